"""The daemon's side of one `device_child`: starts it, gives it orders, hands its answers over.

`start`, `send`, `end` and `is_running` return at once: control loop. One thread a process starts
the child, reads its answers and reaps it; it must live as long as the child, because the kernel
kills the child when the *thread* that made it ends. What the child says reaches the loop through
`call_soon`, so the owner of this object needs no lock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Final

import msgspec

from hisparse_service.contract.errors import DeviceError, HiSparseError, from_wire
from hisparse_service.pool.device_protocol import Answer, Order

_MAX_LINE_BYTES: Final = 64 * 1024
CHILD_COMMAND: list[str] = [sys.executable, "-m", "hisparse_service.pool.device_child"]
"""Tests put a child without a GPU here."""

CallSoon = Callable[[Callable[[], None]], None]


class DeviceProcess:
    """One child. Owns its process, its pipes and its thread.

    Args:
        device_uuid: The GPU.
        call_soon: Has the control loop call something.
        on_answer: Called by the loop for each answer, in order.
        on_end: Called by the loop once, last, with why the child ended.
        command: The child's command line, without its options.
    """

    def __init__(
        self,
        device_uuid: str,
        *,
        call_soon: CallSoon,
        on_answer: Callable[[DeviceProcess, Answer], None],
        on_end: Callable[[DeviceProcess, HiSparseError], None],
        command: Sequence[str] | None = None,
    ) -> None:
        self.device_uuid = device_uuid
        self.pid = 0
        """Of the child; 0 before it runs."""
        self._call_soon = call_soon
        self._on_answer = on_answer
        self._on_end = on_end
        self._command = [
            *(CHILD_COMMAND if command is None else command),
            "--device-uuid", device_uuid, "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._unsent: list[bytes] = []
        self._is_abandoned = False
        self._reason: HiSparseError | None = None
        """Why the child was or is to be killed; set once."""
        self._watcher = threading.Thread(target=self._watch, name="device-watch", daemon=True)

    # --- control loop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the child. Once."""
        self._watcher.start()

    def send(self, order: Order) -> None:
        """Give an order; a child that no longer reads is killed."""
        line = msgspec.json.encode(order) + b"\n"
        with self._lock:
            if self._child is None:
                self._unsent.append(line)
            else:
                self._write(line)

    def end(self, reason: HiSparseError) -> None:
        """Kill the child. Does not wait; `on_end` follows with the first reason. Idempotent."""
        with self._lock:
            self._kill(reason)

    def abandon(self, reason: HiSparseError) -> None:
        """Kill the child and hear no more of it: no callback follows. Idempotent."""
        with self._lock:
            self._is_abandoned = True
            self._kill(reason)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the child is reaped. For tests."""
        self._watcher.join(timeout_s)
        return not self._watcher.is_alive()

    # --- under the lock -------------------------------------------------------------------------

    def _write(self, line: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            written = os.write(self._child.stdin.fileno(), line)
        except BrokenPipeError:
            return  # it ended; the watching thread says so
        except BlockingIOError:
            written = 0
        if written != len(line):
            self._kill(DeviceError("the device child does not read its orders and was killed"))

    def _kill(self, reason: HiSparseError) -> None:
        if self._reason is None:
            self._reason = reason
        if self._child is not None:
            self._child.kill()

    # --- the watching thread --------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True
            )
        except OSError as error:
            reason: HiSparseError = DeviceError(f"the device child cannot be started: {error}")
        else:
            reason = self._serve(child)
        self._tell(lambda: self._on_end(self, self._reason or reason))

    def _tell(self, callback: Callable[[], None]) -> None:
        with self._lock:  # once abandoned, the loop may be closed
            if not self._is_abandoned:
                self._call_soon(callback)

    def _serve(self, child: subprocess.Popen[bytes]) -> HiSparseError:
        assert child.stdout is not None
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        with self._lock:
            self._child = child
            self.pid = child.pid
            if self._reason is not None:
                child.kill()
            for line in self._unsent:
                self._write(line)
            self._unsent.clear()
        failure = self._read_answers(child.stdout)
        with self._lock:
            self._child = None  # `send` finds it gone before its pipe is closed
        child.stdout.close()
        with contextlib.suppress(OSError):
            child.stdin.close()
        if failure is not None:
            child.kill()
        code = child.wait()
        return failure or DeviceError(
            f"the device child of {self.device_uuid} ended with code {code}",
            remedy="See its last lines in the daemon's standard error; ask again: it is started "
            "anew, what lay in its memory is gone",
            device_uuid=self.device_uuid,
        )

    def _read_answers(self, pipe: IO[bytes]) -> HiSparseError | None:
        """Until the pipe ends; why, where the child said it or broke the rules."""
        while line := pipe.readline(_MAX_LINE_BYTES):
            try:
                answer = msgspec.json.decode(line, type=Answer)
            except msgspec.MsgspecError:
                return DeviceError(f"the device child said {line[:100]!r}, which is no answer")
            if answer.event == "failed":
                return from_wire(answer.code, answer.message, answer.remedy, answer.details)
            self._tell(functools.partial(self._on_answer, self, answer))
        return None
