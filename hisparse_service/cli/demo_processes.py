"""The child processes of the demonstration: a private daemon, ranks, the reference.

Each is started by its own interpreter and talks over pipes, so that this command imports no torch.
`close` ends what was started here and nothing else. Main thread of the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hisparse_service.contract.errors import ServiceUnavailable, from_wire

_START_TIMEOUT_S: Final = 120.0
"""Importing torch and transformers takes some seconds, on a cold disk many."""
_STOP_TIMEOUT_S: Final = 20.0
_LOG_TAIL_BYTES: Final = 2_000


class PrivateDaemon:
    """A daemon for one demonstration, in a directory of its own.

    Args:
        pool_bytes: Size of its pool.
    """

    def __init__(self, pool_bytes: int) -> None:
        # Short, because a socket's path has 107 bytes at most.
        self.directory = Path(tempfile.mkdtemp(prefix="hsp-demo-", dir="/tmp"))
        self._log = self.directory / "daemon.log"
        ready, write = os.pipe()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable, "-m", "hisparse_service", "serve",
                        "--instance", f"demo-{os.getpid()}-{secrets.token_hex(3)}",
                        "--runtime-dir", str(self.directory / "run"),
                        "--pool-bytes", str(pool_bytes),
                        "--log-level", "warning", "--ready-fd", str(write),
                    ],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[write],
                    env=_environment(), start_new_session=True,
                )  # fmt: skip
            os.close(write)
            self._wait_ready(ready)
        finally:
            os.close(ready)

    @property
    def endpoint(self) -> str:
        """Its runtime directory."""
        return str(self.directory / "run")

    def _wait_ready(self, descriptor: int) -> None:
        readable, _, _ = select.select([descriptor], [], [], _START_TIMEOUT_S)
        if not readable or not os.read(descriptor, 1):
            tail = _tail(self._log)
            self.close()
            raise ServiceUnavailable(
                f"the demonstration's daemon did not start: {tail}",
                remedy="Correct what it complains of, or use a running one with --endpoint",
            )

    def close(self) -> None:
        """End it; its pool is released, for no worker is left. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class WorkerProcess:
    """One rank, or the reference (rank -1), answering commands one at a time.

    Args:
        job: Path of the job file.
        rank: See `demo_worker`.
        generation: Which set of workers it is of.
    """

    def __init__(self, job: Path, *, rank: int, generation: int = 0) -> None:
        self.name = "reference" if rank < 0 else f"rank {rank}"
        self._has_answered = False
        self._log = job.parent / f"{self.name.replace(' ', '-')}-{generation}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "worker_client.integrations.demo_worker",
                    "--job", str(job), "--rank", str(rank), "--generation", str(generation),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(),
                start_new_session=True,
            )  # fmt: skip

    def ask(self, operation: str, **fields: Any) -> None:
        """Send a command; `answer` takes what it gives."""
        if self._process.stdin is None:
            raise self._ended()
        line = json.dumps({"op": operation, **fields}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest open command; the first one is the worker's hello.

        Raises:
            ServiceUnavailable: The process ended.
            HiSparseError: What the command raised.
        """
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise self._ended()
        self._has_answered = True
        answer: dict[str, Any] = json.loads(line)
        error: Mapping[str, str] | None = answer.get("error")
        if error is not None:
            raise from_wire(error["code"], f"{self.name}: {error['message']}")
        return answer

    def _ended(self) -> ServiceUnavailable:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        return ServiceUnavailable(
            f"{self.name} ended with status {self._process.poll()}: {_tail(self._log)}",
            remedy="Report this as a bug, with the lines above",
        )

    def stop(self) -> None:
        """Let it leave the daemon and end; kill it if it does not. Idempotent."""
        process = self._process
        if not self._has_answered:
            process.kill()  # it is still starting and holds nothing
            process.wait()
        if process.poll() is None:
            with contextlib.suppress(ServiceUnavailable):
                self.ask("stop")
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _environment() -> dict[str, str]:
    """This process's, without settings of another daemon, and one thread a worker."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HISPARSE_")}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return "it left no log"
