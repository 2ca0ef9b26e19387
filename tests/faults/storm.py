"""A storm of kills over real processes, with every row checked by its readers.

    python -m tests.faults.storm --kills 1000 --seed 7 [--workers 4]

A driver kills -9 workers and the daemon, stops and continues them, restarts the daemon, hands over
to a successor, and fills the file system, in an order drawn from the seed, while workers write,
publish and read rows that tell what they are (rows.py). Leases and time-outs are short, so that a
worker that stood still finds its session ended and its leases expired. Where it may (root), it runs
in a mount namespace of its own with a small tmpfs on /dev/shm, so that the file system can really
be filled.

Its last line is one JSON object: operations, kills, recoveries, longest_outage_s, wrong_bytes,
leaked_bytes, leaked_blocks and more. An outage is the time between two answers to a client that
pings all the time, the start of a killed daemon's successor included. Exit code 1 where any of the
last three is not 0, a process ended by itself, or the accounts of the directory did not balance
after a recovery.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hisparse_service.contract.errors import HiSparseError
from tests.faults import planted, storm_worker
from tests.faults.board import Board, Count
from tests.faults.prober import Prober
from worker_client import connect

ROOT = pathlib.Path(__file__).parents[2]
SHM = pathlib.Path("/dev/shm")
POOL_BYTES = 4 << 20
TMPFS_BYTES = 32 << 20
IN_NAMESPACE = "HISPARSE_STORM_IN_NAMESPACE"
PROGRESS_DEADLINE_S = 60.0
LEASE_TTL_S = 2.0
SETTINGS = {
    "limits.heartbeat_interval_s": 0.2, "limits.session_timeout_s": 1.0,
    "limits.lease_ttl_s": LEASE_TTL_S, "limits.writer_lease_ttl_s": LEASE_TTL_S,
    "limits.adoption_grace_s": 1.0, "server.drain_timeout_s": 0.5,
}  # fmt: skip


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["hisparse_service.daemon", "hisparse_service.cli.main", "tests.faults.storm_worker"]
)


class Child:
    """A process of the storm, forked from a server that has imported everything.

    Starting an interpreter and importing take ten times as long as all that a storm is about.
    """

    def __init__(
        self,
        target: Callable[[list[str]], None],
        log: pathlib.Path,
        arguments: list[str],
    ) -> None:
        self._process = FORKS.Process(target=enter, args=(target, str(log), arguments))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As `subprocess` has it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status once it ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Until it ended.

        Raises:
            TimeoutError: It did not.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"process {self._process.pid} did not end")
        return status

    def send_signal(self, number: int) -> None:
        """Unless it ended."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def enter(target: Callable[[list[str]], None], log: str, arguments: list[str]) -> None:
    """In the child: its output goes to the log, as that of a process of its own would."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    target(arguments)


def run_daemon(arguments: list[str]) -> None:
    """`hisparse-service serve`, with the planted bug if there is one."""
    sys.argv = ["hisparse-service", os.environ.get(planted.VARIABLE, ""), "serve", *arguments]
    planted.main()


def run_worker(arguments: list[str]) -> None:
    """A storm worker."""
    sys.argv = ["storm_worker", *arguments]
    sys.exit(storm_worker.main())


class Successor:
    """A daemon that `handover` started: not our child, but used like one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """0 once it ended; how, only its parent would know."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            os.close(self._pidfd)
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it ended.

        Raises:
            TimeoutError: It did not.
        """
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"the successor {self.pid} did not end")
        self.poll()
        return 0

    def send_signal(self, number: int) -> None:
        """Unless it ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


Daemon = Child | Successor


class Storm:
    """The driver: one daemon, some workers, and what happens to them."""

    def __init__(self, directory: pathlib.Path, *, num_workers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.instance = f"storm-{os.getpid()}"
        self.runtime = directory / "run"
        self.log_path = directory / "daemon.log"
        self.board_path = directory / "board"
        self.board = Board(self.board_path, num_workers)
        self.daemon: Daemon = self.start_daemon()
        self.prober = Prober(str(self.runtime))
        self.workers = [self.start_worker(index) for index in range(num_workers)]
        self.kills = 0
        self.recoveries = 0
        self.faults: Counter[str] = Counter()
        self.failures: list[str] = []

    # --- processes --------------------------------------------------------------------------

    def start_daemon(self) -> Daemon:
        """A daemon on the storm's runtime directory; adopts what its predecessor left."""
        return Child(run_daemon, self.log_path, self.daemon_options())

    def daemon_options(self) -> list[str]:
        """Of `serve` and `handover` alike."""
        return [
            "--instance", self.instance, "--runtime-dir", str(self.runtime),
            "--pool-bytes", str(POOL_BYTES),
            *(f"--set={name}={value}" for name, value in SETTINGS.items()),
        ]  # fmt: skip

    def start_worker(self, index: int) -> Child:
        """A worker, by its place on the board."""
        incarnation = int(self.board.counts[index, Count.INCARNATIONS])
        return Child(
            run_worker, self.log_path,
            [
                str(self.runtime), str(self.board_path), str(len(self.board.counts)), str(index),
                f"{self.seed}-{incarnation}",
            ],
        )  # fmt: skip

    def kill(self, process: Daemon) -> None:
        """SIGKILL, and reap it."""
        process.kill()
        process.wait()
        self.kills += 1

    # --- faults -----------------------------------------------------------------------------

    def kill_worker(self) -> None:
        """A worker dies, and another takes its place."""
        index = self.rng.randrange(len(self.workers))
        self.kill(self.workers[index])
        self.workers[index] = self.start_worker(index)

    def kill_daemon(self) -> None:
        """The daemon dies, and its successor adopts the pool."""
        self.kill(self.daemon)
        self.daemon = self.start_daemon()

    def kill_both(self) -> None:
        """The daemon and a worker die together."""
        self.kill(self.daemon)
        self.kill_worker()
        self.daemon = self.start_daemon()

    def kill_starting_daemon(self) -> None:
        """The successor dies too, before it has finished starting."""
        self.kill(self.daemon)
        successor = self.start_daemon()
        with contextlib.suppress(TimeoutError):
            successor.wait(self.rng.random() * 0.3)
        self.kill(successor)
        self.daemon = self.start_daemon()

    def stop_worker(self) -> None:
        """A worker stands still while the others go on, then continues with what it held.

        Sometimes for longer than its session lasts, or than its leases do.
        """
        index = self.rng.randrange(len(self.workers))
        lasting_s = self.rng.choice((0.0, 0.75 * LEASE_TTL_S, 2 * LEASE_TTL_S))
        self.workers[index].send_signal(signal.SIGSTOP)
        try:
            end = time.monotonic() + lasting_s
            self.wait_for_progress(besides=index)
            wait_until(lambda: time.monotonic() >= end, "the leases to expire")
            self.wait_for_progress(besides=index)
        finally:
            self.workers[index].send_signal(signal.SIGCONT)

    def stop_daemon(self) -> None:
        """The daemon stands still until requests run into their deadline."""
        before = self.board.total(Count.UNAVAILABLE)
        with self.prober.excused():
            self.daemon.send_signal(signal.SIGSTOP)
            try:
                wait_until(lambda: self.board.total(Count.UNAVAILABLE) > before, "a deadline")
            finally:
                self.daemon.send_signal(signal.SIGCONT)

    def restart_daemon(self) -> None:
        """SIGTERM with workers attached: the pool stays for the successor."""
        self.daemon.terminate()
        self.daemon.wait(60)
        self.daemon = self.start_daemon()

    def hand_over(self) -> None:
        """A successor is prepared, and takes over."""
        with self.log_path.open("ab") as log:
            done = subprocess.run(
                [
                    sys.executable, "-m", "hisparse_service", "handover", "--json",
                    *self.daemon_options(),
                ],
                cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=log, timeout=60,
            )  # fmt: skip
        if done.returncode:
            self.failures.append(f"handover ended with {done.returncode}")
            return
        if self.daemon.wait(60):
            self.failures.append(f"the predecessor ended with {self.daemon.returncode}")
        self.daemon = Successor(json.loads(done.stdout)["pid"])

    def fill_file_system(self) -> None:
        """No byte is left in /dev/shm, and the daemon dies in that state."""
        if os.environ.get(IN_NAMESPACE) != "1":
            return
        filler = SHM / "filler"
        try:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))
            self.kill_daemon()
            self.wait_for_progress()
        finally:
            filler.unlink(missing_ok=True)

    # --- checks -----------------------------------------------------------------------------

    def wait_for_progress(self, besides: int | None = None) -> None:
        """Until each worker (but one) has finished turns, with all processes alive."""
        others = [i for i in range(len(self.workers)) if i != besides]
        before = self.board.counts[others, Count.OPERATIONS].copy()
        pings = self.prober.pings

        def all_went_on() -> bool:
            for index in others:
                if self.workers[index].poll() is not None:
                    self.failures.append(f"worker {index} ended: {self.workers[index].returncode}")
                    self.workers[index] = self.start_worker(index)
            if self.daemon.poll() is not None:
                self.failures.append(f"the daemon ended: {self.daemon.returncode}")
                self.daemon = self.start_daemon()
            went_on = self.board.counts[others, Count.OPERATIONS] > before
            return bool(went_on.all()) and self.prober.pings > pings

        wait_until(all_went_on, "progress of every worker")

    def check_accounts(self) -> None:
        """I6: every block of the namespace is in exactly one state."""
        for counts in self.block_counts():
            parts = sum(counts[part] for part in ("free", "reserved", "published", "pinned"))
            if parts != counts["capacity"]:
                self.failures.append(f"accounts do not balance: {counts}")

    def block_counts(self) -> list[dict[str, int]]:
        """The blocks of each namespace by state, asked of the daemon."""
        with connect(str(self.runtime), client_name="storm-driver") as client:
            return [namespace["blocks"] for namespace in client.status()["namespaces"]]

    # --- the run ----------------------------------------------------------------------------

    def run(self, kills: int, *, only: list[str] | None = None) -> None:
        """Faults until that many processes were killed, each followed by a recovery.

        Args:
            kills: How many.
            only: Names of the faults to choose from, each as likely as the others; all, by
                their weights, when None.
        """
        faults: list[tuple[Callable[[], None], int]] = [
            (self.kill_worker, 40), (self.kill_daemon, 25), (self.kill_both, 8),
            (self.kill_starting_daemon, 5), (self.stop_worker, 8), (self.stop_daemon, 2),
            (self.restart_daemon, 5), (self.hand_over, 5), (self.fill_file_system, 4),
        ]  # fmt: skip
        if only is not None:
            faults = [(fault, 1) for fault, _ in faults if fault.__name__ in only]
        names, weights = zip(*faults, strict=True)
        self.wait_for_progress()
        while self.kills < kills:
            fault = self.rng.choices(names, weights)[0]
            self.faults[fault.__name__] += 1
            self.prober.during(fault.__name__)
            fault()
            self.wait_for_progress()
            self.recoveries += 1
            self.check_accounts()
            if self.recoveries % 25 == 0:
                print(
                    f"{self.kills}/{kills} kills, {self.board.total(Count.OPERATIONS)} operations,"
                    f" {self.board.total(Count.WRONG_BYTES)} wrong bytes", flush=True,
                )  # fmt: skip

    def finish(self) -> dict[str, Any]:
        """End everybody politely and count what is left."""
        for worker in self.workers:
            worker.terminate()
        for index, worker in enumerate(self.workers):
            if worker.wait(60) != 0:
                self.failures.append(f"worker {index} ended with {worker.returncode}")
        leaked_blocks = 0

        def all_returned() -> bool:
            nonlocal leaked_blocks
            with contextlib.suppress(HiSparseError):
                counts = self.block_counts()
                leaked_blocks = sum(c["reserved"] + c["pinned"] for c in counts)
                return leaked_blocks == 0
            return False

        with contextlib.suppress(TimeoutError):
            wait_until(all_returned, "all blocks to come back")
        self.prober.close()
        self.daemon.terminate()
        self.daemon.wait(60)
        left = [path for path in SHM.iterdir() if self.instance in path.name]
        summary = {
            "seed": self.seed,
            "operations": self.board.total(Count.OPERATIONS),
            "blocks_read": self.board.total(Count.READS),
            "blocks_published": self.board.total(Count.PUBLISHED_BLOCKS),
            "kills": self.kills,
            "recoveries": self.recoveries,
            "faults": dict(self.faults.most_common()),
            "stale_raised": self.board.total(Count.STALE_RAISED),
            "refused": self.board.total(Count.REFUSED),
            "mirrors_handed_in": self.board.total(Count.HANDED_IN),
            "mirrors_lost": self.board.total(Count.MIRRORS_LOST),
            "mirrors_given_up": self.board.total(Count.MIRRORS_GIVEN_UP),
            "pings": self.prober.pings,
            "longest_outage_s": round(self.prober.longest_outage_s, 3),
            "longest_outage_s_by_fault": {
                fault: round(value, 3) for fault, value in sorted(self.prober.longest_s.items())
            },
            "wrong_bytes": self.board.total(Count.WRONG_BYTES),
            "leaked_bytes": sum(path.stat().st_size for path in left),
            "leaked_blocks": leaked_blocks,
            "failures": self.failures[:10],
        }
        for path in left:
            path.unlink()
        return summary

    def close(self) -> None:
        """Leave no process behind."""
        self.prober.close()
        for process in [*self.workers, self.daemon]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        with self.board:
            pass


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition with a deadline.

    Raises:
        TimeoutError: It did not come true.
    """
    end = time.monotonic() + PROGRESS_DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PROGRESS_DEADLINE_S} s for {what}")
        time.sleep(0.005)


def enter_namespace() -> None:
    """Start this program again with a small /dev/shm of its own, where that is allowed."""
    if os.environ.get(IN_NAMESPACE) or os.geteuid() != 0:
        return
    command = f"mount -t tmpfs -o size={TMPFS_BYTES} tmpfs /dev/shm && exec " + " ".join(
        [sys.executable, "-m", "tests.faults.storm", *sys.argv[1:]]
    )
    probe = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    if probe.returncode == 0:
        environment = os.environ | {IN_NAMESPACE: "1"}
        os.execvpe("unshare", ["unshare", "--mount", "sh", "-c", command], environment)


def main() -> int:
    """Run the storm, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", nargs="+", help="faults to choose from (names of methods)")
    parser.add_argument("--keep-log", type=pathlib.Path, help="copy the daemon's log there")
    parser.add_argument("--plant", choices=planted.BUGS, help="a bug that the storm must see")
    options = parser.parse_args()
    if options.plant:
        os.environ[planted.VARIABLE] = options.plant
    enter_namespace()
    with tempfile.TemporaryDirectory(prefix="storm-") as directory:
        storm = Storm(pathlib.Path(directory), num_workers=options.workers, seed=options.seed)
        try:
            storm.run(options.kills, only=options.only)
            summary = storm.finish()
        finally:
            storm.close()
            if options.keep_log:
                options.keep_log.write_bytes(storm.log_path.read_bytes())
                with options.keep_log.open("a") as log:
                    log.writelines(f"gap {gap}\n" for gap in storm.prober.gaps)
    print(json.dumps(summary))
    bad = ("wrong_bytes", "leaked_bytes", "leaked_blocks", "failures")
    return 1 if any(summary[name] for name in bad) else 0


if __name__ == "__main__":
    sys.exit(main())
