"""Tells systemd how the daemon is: sd_notify(3), spoken over its datagram socket.

Says nothing where NOTIFY_SOCKET is unset: outside systemd every call is free. No call blocks: the
socket is non-blocking, and a datagram that the manager has no room for is lost.

`progress` is called on the thread that opens the pool, all else on the control loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from hisparse_service.contract.limits import GIB

EXTENSION_S: Final = 30.0
"""Granted from each sign of progress on: a start may take hours, but not stand still that long."""
PROGRESS_INTERVAL_S: Final = 1.0
STATUS_INTERVAL_S: Final = 5.0
"""At most so often a status line; systemd writes each to its bus."""
STOP_EXTENSION_S: Final = 120.0
"""For what follows the drain: ending helper threads and giving hundreds of GiB back."""
_PINGS_PER_WATCHDOG: Final = 4


class ServiceManager:
    """The service manager that started this process, if any did.

    Args:
        address: NOTIFY_SOCKET; empty: nobody listens. "@" begins an abstract name.
        watchdog_s: WATCHDOG_USEC in seconds; 0: none is expected.
        clock: Stands in for `time.monotonic`.
    """

    def __init__(
        self,
        address: str,
        *,
        watchdog_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next_progress_s = 0.0
        self._next_ping_s = 0.0
        self._next_status_s = 0.0
        self._done_bytes = -1
        self._status = ""

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], *, predecessor_s: float = 0.0
    ) -> ServiceManager:
        """What the environment says; a watchdog that is meant for another process is not ours.

        Args:
            environment: Stands in for `os.environ`.
            predecessor_s: Over 0 in a successor, whose watchdog still bears its predecessor's pid.
        """
        watchdog_s = 0.0
        ours = ("", str(os.getpid()))
        if predecessor_s > 0 or environment.get("WATCHDOG_PID", "") in ours:
            with contextlib.suppress(ValueError):
                watchdog_s = max(0.0, int(environment.get("WATCHDOG_USEC", "0")) / 1e6)
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)

    def standby(self) -> None:
        """A successor waits for its predecessor to end; from now on systemd watches this process.

        Said before the predecessor ends: systemd takes the end of its main process for the
        service's.
        """
        self._send(f"MAINPID={os.getpid()}", "STATUS=Waiting for the daemon before to end")

    @property
    def listens(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._address)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """The pool is being reserved. Extends the start timeout only when it went on."""
        with self._lock:
            now_s = self._clock()
            if done_bytes <= self._done_bytes or now_s < self._next_progress_s:
                return
            self._done_bytes, self._next_progress_s = done_bytes, now_s + PROGRESS_INTERVAL_S
        share = done_bytes / total_bytes if total_bytes else 1.0
        self._send(
            f"STATUS=Reserving the pool: {share:.0%} of {total_bytes / GIB:.1f} GiB",
            _extension(EXTENSION_S),
        )

    def ready(self, status: str) -> None:
        """Workers are accepted. MAINPID, because after a handover systemd started another."""
        self._status = status
        self._next_status_s = self._clock() + STATUS_INTERVAL_S
        self._send("READY=1", f"MAINPID={os.getpid()}", f"STATUS={status}")

    def tick(self, status: str) -> None:
        """The control loop came round: feed the watchdog, and say a new status now and then."""
        if not self.listens:
            return
        now_s = self._clock()
        lines = []
        if self._watchdog_s and now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._watchdog_s / _PINGS_PER_WATCHDOG
            lines.append("WATCHDOG=1")
        if status != self._status and now_s >= self._next_status_s:
            self._status, self._next_status_s = status, now_s + STATUS_INTERVAL_S
            lines.append(f"STATUS={status}")
        if lines:
            self._send(*lines)

    def draining(self, within_s: float, num_workers: int) -> None:
        """The end has begun; it may take the drain and what follows, whatever the unit says."""
        self._send(
            "STOPPING=1",
            f"STATUS=Draining: {num_workers} workers",
            _extension(within_s + STOP_EXTENSION_S),
        )

    def stopping(self) -> None:
        """Nobody is served any more; memory is given back."""
        self._send("STOPPING=1", "STATUS=Stopping", _extension(STOP_EXTENSION_S))

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}"
