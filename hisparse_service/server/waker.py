"""Lets the control loop block on its ROUTER alone and still hear of everything else.

The loop waits in one receive, which is the quickest way from a request to its reply: waiting in an
epoll instead costs about 4 us a request, and a reply that is late by that much finds libzmq's I/O
thread asleep and pays 10 us more to wake it (2 cores, libzmq 4.3.5). So a thread waits on the
other descriptors and sends the loop an empty message when one is readable; the loop then does the
reading.

Each descriptor is reported once and armed again by the loop after it has read it, so no more wake
messages are under way than descriptors are watched.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from hisparse_service.telemetry.logs import get_logger

_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT
_NO_WAIT: Final = int(zmq.NOBLOCK)

log = get_logger()


class Waker:
    """Owns its thread, its epoll and one eventfd; borrows the socket that it wakes the loop with.

    Args:
        socket: Connected to the loop's ROUTER; used by this thread only until `close` returns.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._epoll = select.epoll()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._on_readable: dict[int, Callable[[], None]] = {}
        self._ready: deque[int] = deque()
        self._thread = threading.Thread()
        self._is_closed = False
        self.restarts = 0
        self.last_error = ""
        self._epoll.register(self._stop_fd, select.EPOLLIN)

    # --- control loop -----------------------------------------------------------------------

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Have the loop call `on_readable` when `fd` is. Before `ensure_running`."""
        self._on_readable[fd] = on_readable
        self._epoll.register(fd, _ONCE)

    def ensure_running(self) -> None:
        """Start the thread, and again when it died: without it the loop hears only messages."""
        if self._is_closed or self._thread.is_alive():
            return
        if self._thread.ident is not None:
            self.restarts += 1
            log.error("waker_restarted", restarts=self.restarts)
            for fd in self._on_readable:  # it may have died between hearing and telling
                self._epoll.modify(fd, _ONCE)
        self._thread = threading.Thread(target=self._run, name="loop-waker", daemon=True)
        self._thread.start()
        # What the dead one had taken and not told is read now.
        self.run_ready()

    def describe(self) -> dict[str, object]:
        """As `HelperThreads.describe` does for the others."""
        return {
            "alive": self._thread.is_alive(), "permanent": True, "restarts": self.restarts,
            "last_error": self.last_error,
        }  # fmt: skip

    def run_ready(self) -> None:
        """Read what is readable. On each wake message."""
        while self._ready:
            fd = self._ready.popleft()
            self._on_readable[fd]()
            with contextlib.suppress(OSError):  # closed by its own reading, at the end
                self._epoll.modify(fd, _ONCE)

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._epoll.close()
        os.close(self._stop_fd)

    # --- its own thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._wake_again_and_again()
        except Exception as error:
            self.last_error = repr(error)
            log.error("helper_died", helper="loop-waker", error=repr(error), exc_info=error)

    def _wake_again_and_again(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._stop_fd:
                    return
                self._ready.append(fd)
            with contextlib.suppress(zmq.Again):
                self._socket.send(b"", _NO_WAIT)
