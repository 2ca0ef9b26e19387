"""A daemon on a thread of this process, killed by an exception at a crash point.

The thread of the control loop unwinds from wherever it is, between two stores or two messages, and
writes nothing more: the segment is what a SIGKILL at that place would leave. Quick enough for state
machines; real kills are in test_crash_points.py.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from hisparse_service import daemon as daemon_module
from hisparse_service.config import load_settings
from hisparse_service.contract import crashpoints
from hisparse_service.contract.crashpoints import PointKind
from hisparse_service.contract.errors import HiSparseError
from hisparse_service.daemon import Daemon
from hisparse_service.server import loop as loop_module
from hisparse_service.server.dispatch import SendResult
from hisparse_service.server.loop import ControlLoop
from hisparse_service.server.waker import Waker

T = TypeVar("T")
_DEADLINE_S = 30.0


_NO_SIGNALS = SimpleNamespace(
    signal=lambda *_: None, set_wakeup_fd=lambda *_, **__: -1, SIG_IGN=signal.SIG_IGN,
)  # fmt: skip


class Killed(BaseException):
    """Raised in the loop's thread where a SIGKILL would strike."""


class _Loop(ControlLoop):
    """With replies that get lost."""

    drop_replies = 0

    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        """Queue a reply, or lose it."""
        if self.drop_replies:
            self.drop_replies -= 1
            return SendResult.SENT
        return super().send(routing_id, frame)


class ThreadedDaemon:
    """`Daemon.run` on a thread. `kill_at` arms; `start` again after a death.

    Args:
        directory: For the sockets.
        instance: For the segment.
        settings: More settings, by dotted name.
    """

    def __init__(self, directory: Path, instance: str, **settings: Any) -> None:
        self._flags = {
            "instance": instance, "runtime_dir": str(directory / "run"), "pool.bytes": 4 << 20,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }  # fmt: skip
        self.runtime_dir = directory / "run"
        self.kills = 0
        self._kill_at = ""
        self._hook_before = crashpoints.install(self._reach)
        # Signals belong to the main thread, which is the test's.
        self._no_signals = mock.patch.object(loop_module, "signal", _NO_SIGNALS)
        self._no_signals.start()
        self.start()

    def start(self) -> None:
        """Start a daemon, which adopts what the last one left, and wait until it is ready."""
        self._kill_at = ""
        self._ready = threading.Event()
        self._daemon = Daemon(
            load_settings(flags=self._flags, environment={}).settings, listener=self
        )
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="daemon")
        with mock.patch.object(daemon_module, "ControlLoop", _Loop):
            self._thread.start()
            assert self._ready.wait(_DEADLINE_S), f"not ready: {self.error}"

    def on_progress(self, progress: object) -> None:
        """Not interesting."""

    def on_ready(self, endpoint: str, pool: object) -> None:  # noqa: ARG002
        """Of the loop: requests are answered from now on."""
        self._ready.set()

    def _run(self) -> None:
        try:
            self._daemon.run()
        except (Killed, HiSparseError) as error:
            self.error = error.with_traceback(None)
            self._daemon._close_pool()

    def _reach(self, kind: PointKind, name: str) -> None:
        is_loop = threading.current_thread() is self._thread
        if kind is PointKind.CRASH and name == self._kill_at and is_loop:
            self._kill_at = ""
            self.kills += 1
            raise Killed(name)

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def kill_at(self, point: str) -> None:
        """The loop dies when it next passes this point."""
        self._kill_at = point

    def drop_replies(self, count: int) -> None:
        """The next replies are lost."""
        loop: Any = self._daemon._loop
        loop.drop_replies = count

    def on_loop(self, ask: Callable[[Any], T]) -> T:
        """Call with the server's state, on the loop's thread.

        Raises:
            Killed: The daemon is dead, or died before it came to this.
        """
        answers: list[T] = []
        errors: list[Exception] = []
        done = threading.Event()

        def call() -> None:
            try:
                answers.append(ask(self._daemon._state))
            except Exception as error:  # not Killed: that ends the loop
                errors.append(error)
            done.set()

        self._daemon._loop.call_soon(call)
        while not done.wait(0.02):
            if not self.is_alive:
                raise Killed
        if errors:
            raise errors[0]
        return answers[0]

    @property
    def waker(self) -> Waker:
        """The thread that wakes the loop."""
        return self._daemon._loop._waker

    def wait_dead(self) -> None:
        """Until the thread ended."""
        self._thread.join(_DEADLINE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """End it in the regular way."""
        crashpoints.install(self._hook_before)
        if self.is_alive:
            self._daemon._loop.call_soon(lambda: self._daemon._loop.stop("the test ended"))
            self.wait_dead()
        self._no_signals.stop()
