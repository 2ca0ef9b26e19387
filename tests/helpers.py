"""What tests of the daemon share: waiting for conditions, a daemon process, a raw client."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import zmq

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.geometry import (
    HostGeometry,
    HostLayout,
    LayerGroup,
    encode_geometry,
)
from hisparse_service.contract.keys import key_space
from hisparse_service.pool.purge import PurgeMode, Verdict, purge_one

DEADLINE_S = 30.0
SHM = Path("/dev/shm")
FINGERPRINT = b"fingerprint-0001"
GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=4, groups=[LayerGroup(1, 16)]
)
OTHER_GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=4, groups=[LayerGroup(2, 32)]
)
KEY_SPACE = key_space(FINGERPRINT)
_numbers = itertools.count(1)
T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=m.Reply)


def wait_until(condition: Callable[[], T], deadline_s: float = DEADLINE_S, *, what: str = "") -> T:
    """Poll until the condition is true and return its value; AssertionError at the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"not reached within {deadline_s} s: {what or condition}")
        threading.Event().wait(0.005)


def has_ended(process: int | psutil.Process) -> bool:
    """Whether a process is gone or waits to be reaped: nothing of it runs any more."""
    try:
        known = psutil.Process(process) if isinstance(process, int) else process
        return not known.is_running() or known.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def unique_instance(label: str = "t") -> str:
    """An instance name that carries this process's pid: the resource check knows it as ours."""
    return f"{label}-{os.getpid()}-{next(_numbers)}"


def remove_leftovers(shm: Path = SHM, labels: str = "t|wct|rsv|sd|kube|nothread") -> list[str]:
    """Remove pools of test runs that were killed, which no later daemon adopts; their names.

    A daemon that is killed leaves its pool on purpose, and who would have removed it was killed
    too. Only names with the pid of a run that is over, and only what no process owns or maps.
    """
    ours = re.compile(rf"hisparse-(?:{labels})-(\d+)-[0-9a-f]+-.*")
    found = [(name, match[1]) for name in os.listdir(shm) if (match := ours.fullmatch(name))]
    return [
        name
        for name, pid in sorted(found)
        if not Path(f"/proc/{pid}").exists()
        and purge_one(f"/{name}", PurgeMode.REMOVE).verdict is Verdict.REMOVED
    ]


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory with a path that leaves room for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="hst-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- resources --------------------------------------------------------------------------------


class Resources:
    """What this process holds: /dev/shm, descriptors, threads, children, semaphores."""

    def __init__(self) -> None:
        self.segments = self._segments()
        self.descriptors = self._descriptors()
        self.threads = {thread.ident for thread in threading.enumerate()}
        self.children = {child.pid for child in psutil.Process().children(recursive=True)}
        self.semaphores = self._semaphores()

    @staticmethod
    def _semaphores() -> Counter[str]:
        """Named ones that are mapped here (unlinked or not), and this user's System V ones."""
        mapped = re.findall(r"/dev/shm/(sem\.\S+)", Path("/proc/self/maps").read_text())
        found = Counter(mapped)
        with contextlib.suppress(OSError):
            rows = Path("/proc/sysvipc/sem").read_text().splitlines()[1:]
            found.update(f"System V {row.split()[1]}" for row in rows)
        return found

    @staticmethod
    def _segments() -> set[str]:
        # Other test processes run beside this one: only names that carry our pid are ours.
        ours = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
        return {name for name in os.listdir(SHM) if ours.search(name)}

    @staticmethod
    def _descriptors() -> dict[int, str]:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        return found

    def leaked_since(self, before: Resources) -> list[str]:
        """What is there now and was not before, in words."""
        leaks = [f"segment {name}" for name in sorted(self.segments - before.segments)]
        if len(self.descriptors) > len(before.descriptors):
            new = set(self.descriptors) - set(before.descriptors)
            leaks += [f"descriptor {fd}: {self.descriptors[fd]}" for fd in sorted(new)]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        leaks += [f"thread {names.get(i, i)}" for i in self.threads - before.threads]
        leaks += [f"child process {pid}" for pid in self.children - before.children]
        leaks += [f"semaphore {name}" for name in (self.semaphores - before.semaphores)]
        return leaks


# --- the daemon -------------------------------------------------------------------------------


class DaemonProcess:
    """`hisparse-service serve` as a process of its own, with a small pool.

    Settings are given by environment, so that any may be changed: `limits__lease_ttl_s="40"`.
    """

    def __init__(
        self, directory: Path, *, instance: str | None = None, pool_bytes: str = "8MiB",
        arguments: tuple[str, ...] = (), program: tuple[str, ...] = ("-m", "hisparse_service"),
        python: str = sys.executable, uid: int | None = None, **settings: str,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.instance = instance or unique_instance()
        self.arguments, self.program = arguments, program
        self.python, self.uid = python, uid
        if uid is not None:
            os.chown(directory, uid, uid)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
        self.environment = kept | {
            "HISPARSE_INSTANCE": self.instance,
            "HISPARSE_RUNTIME_DIR": str(directory / "run"),
            "HISPARSE_POOL__BYTES": pool_bytes,
            "HISPARSE_HTTP__LISTEN": "",
            **{f"HISPARSE_{name.upper()}": value for name, value in settings.items()},
        }
        self.runtime_dir = directory / "run"
        self.log_path = directory / "daemon.log"
        self.process: subprocess.Popen[bytes]
        self._ready_fd = -1

    def start(self) -> DaemonProcess:
        """Start it; returns at once."""
        read_fd, write_fd = os.pipe()
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self.python, *self.program, "serve", "--ready-fd", str(write_fd),
                    *self.arguments,
                ],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(write_fd,), user=self.uid, group=self.uid,
                extra_groups=None if self.uid is None else [],
            )  # fmt: skip
        os.close(write_fd)
        self._close_ready()
        self._ready_fd = read_fd
        return self

    def wait_ready(self) -> DaemonProcess:
        """Until it says READY; fails with its log when it ends instead."""
        readable, _, _ = select.select([self._ready_fd], [], [], DEADLINE_S)
        line = os.read(self._ready_fd, 4096) if readable else b""
        self._close_ready()
        if not line.startswith(b"READY "):
            raise AssertionError(f"the daemon is not ready: {self.log}")
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def segments(self) -> list[str]:
        return sorted(path.name for path in SHM.glob(f"hisparse-{self.instance}-*"))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def client(self, **hello: Any) -> RawClient:
        """A client that said Hello."""
        client = RawClient(self.runtime_dir)
        client.hello(**hello)
        return client

    def close(self) -> None:
        """End it, whatever it does, and remove what it left."""
        self._close_ready()
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for name in self.segments:
            (SHM / name).unlink(missing_ok=True)

    def _close_ready(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1


@contextlib.contextmanager
def daemons_in_one_directory() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons in one runtime directory, not waiting for them; ends them all."""
    with short_directory() as directory:
        made: list[DaemonProcess] = []

        def start(**settings: str) -> DaemonProcess:
            made.append(DaemonProcess(directory, **settings))
            return made[-1].start()

        yield start
        for each in made:
            each.close()


class RawClient:
    """One DEALER that speaks the protocol by hand: what a test wants to send, it can send."""

    def __init__(self, runtime_dir: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{runtime_dir}/control.sock")
        self.last_id = 0
        self.epoch = 0
        self.session_id = 0

    def hello(self, *, group: str = "", rank: int = 0, operator: bool = False) -> m.HelloReply:
        reply = self.ask(
            m.HelloReply, m.Hello, limits.PROTOCOL_MIN, limits.PROTOCOL_MAX, "test", group, rank,
            max(1, rank + 1), "", operator,
        )  # fmt: skip
        self.epoch, self.session_id = reply.epoch, reply.session_id
        return reply

    def send(self, request_type: type[m.Request], *fields: Any) -> int:
        self.last_id += 1
        self.socket.send(m.encode(request_type(self.last_id, *fields)))
        return self.last_id

    def send_frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, deadline_s: float = DEADLINE_S) -> m.Reply:
        if not self.socket.poll(int(deadline_s * 1000)):
            raise AssertionError("no reply before the deadline")
        return m.decode_reply(self.socket.recv())

    def receive_error(self) -> m.ErrorReply:
        reply = self.receive()
        assert isinstance(reply, m.ErrorReply), reply
        return reply

    def ask(self, reply_type: type[ReplyT], request_type: type[m.Request], *fields: Any) -> ReplyT:
        """Send, and receive the reply to it; raises the daemon's error."""
        request_id = self.send(request_type, *fields)
        reply = self.receive()
        while reply.request_id != request_id:
            reply = self.receive()
        m.raise_for_error(reply)
        assert isinstance(reply, reply_type), reply
        return reply

    def open(self, num_blocks: int = 64, *, fingerprint: bytes = FINGERPRINT) -> int:
        """The test's namespace with its backing; its id."""
        reply = self.ask(
            m.NamespaceReply, m.OpenNamespace, fingerprint, "test", encode_geometry(GEOMETRY)
        )
        self.ask(m.BackingReply, m.AllocateBacking, reply.namespace_id, num_blocks)
        return reply.namespace_id

    def publish(self, namespace: int, keys: bytes) -> m.BlocksReply:
        """Reserve as many blocks as there are keys, and publish them as one prefix."""
        got = self.ask(m.BlocksReply, m.Reserve, namespace, 0, len(keys) // 16)
        item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys)
        self.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
        return got

    def counts(self, namespace: int) -> dict[str, int]:
        """Blocks by state; checks that they add up (I6)."""
        status = self.ask(m.StatusReply, m.Status).status
        (found,) = [e for e in status["namespaces"] if e["namespace"] == namespace]
        blocks: dict[str, int] = found["blocks"]
        total = blocks["free"] + blocks["reserved"] + blocks["published"] + blocks["pinned"]
        assert total == blocks["capacity"], blocks
        return blocks

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keys_of(*numbers: int) -> bytes:
    """Keys that stand for these numbers."""
    return b"".join(number.to_bytes(16, "little") for number in numbers)
