"""The control loop: one thread that receives, answers, and never waits for anything but work.

Woken by one epoll over: the ROUTER and XPUB descriptors, the ROUTER's monitor, the pidfds, the
signal pipe, and an eventfd by which helper threads hand over. No driver call, file system call or
tier call runs here (I7).

libzmq's descriptors are edge-triggered: they speak only after ZMQ_EVENTS said "nothing" with
nothing sent since. So the loop asks ZMQ_EVENTS after each reply, and waits only when that was the
last thing done to the ROUTER. Asking costs 1.4 us where a receive that raises Again costs 5.3, and
flags are plain numbers because or-ing pyzmq's costs 0.5 us each time (2 cores, pyzmq 27).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Final, cast

import zmq

from hisparse_service.server.clients import end_connection, end_process
from hisparse_service.server.dispatch import Dispatcher, SendResult
from hisparse_service.server.state import ServerState
from hisparse_service.server.transport import ConnectionChange, Transport
from hisparse_service.telemetry.logs import get_logger

BURST_MESSAGES: Final = 64
"""Messages answered before timers, deaths and long requests get their turn."""
TICK_S: Final = 0.5
"""How often silence, leases and helper threads are looked at."""
MAX_EXTRA_FRAMES: Final = 1_024
"""Frames of one message that are read off before it is answered as malformed."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_NO_WAIT: Final = int(zmq.NOBLOCK)
_MORE_NO_WAIT: Final = int(zmq.SNDMORE) | int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

log = get_logger()


class ControlLoop:
    """Made and run on the main thread. Owns its epoll, eventfd, signal pipe and signal handlers.

    Args:
        state: The sessions whose deaths it notices.
        transport: Borrowed; closed by the daemon.
        on_tick: Called about every TICK_S with the time.
        on_signal: Called for each of STOP_SIGNALS that arrives.
    """

    def __init__(
        self,
        state: ServerState,
        transport: Transport,
        *,
        on_tick: Callable[[float], None],
        on_signal: Callable[[int], None],
    ) -> None:
        self._state = state
        self._transport = transport
        self._router = transport.router
        self._on_tick = on_tick
        self._on_signal = on_signal
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signal_in, self._signal_out = socket.socketpair()
        self._signal_in.setblocking(False)
        self._signal_out.setblocking(False)
        self._epoll = select.epoll()
        self._on_readable: dict[int, Callable[[], None]] = {}
        self._next_tick_s = 0.0
        self._is_stopping = False
        self._has_sent = False
        self._is_readable = False
        """The ROUTER's descriptor woke the loop: receive without asking first."""
        self.stop_reason = ""
        self.last_turn_s = time.monotonic()
        """When the loop last came round; health reads it from another thread."""
        self._watch_descriptors()
        # From here on, and not only in `run`: a helper thread may be populating the pool by then.
        for number in STOP_SIGNALS:
            signal.signal(number, _note_signal)
        signal.set_wakeup_fd(self._signal_out.fileno(), warn_on_full_buffer=False)

    def _watch_descriptors(self) -> None:
        transport = self._transport
        self._watch(int(transport.router.getsockopt(zmq.FD)), self._note_readable)
        self._watch(
            int(transport.publisher.getsockopt(zmq.FD)), self._state.events.read_subscriptions
        )
        self._watch(transport.monitor_fd, self._read_monitor)
        self._watch(self._state.watcher.fileno(), self._read_pidfds)
        self._watch(self._wake_fd, self._run_calls)
        self._watch(self._signal_in.fileno(), self._read_signals)

    def _watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._epoll.register(fd, select.EPOLLIN)
        self._on_readable[fd] = on_readable

    # --- from other threads -----------------------------------------------------------------

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Have the loop call this. Any thread."""
        self._calls.append(callback)
        with contextlib.suppress(OSError, BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    # --- the loop ---------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End `run` after this turn. Control loop."""
        self.stop_reason = self.stop_reason or reason
        self._is_stopping = True

    def run(self, dispatcher: Dispatcher) -> None:
        """Serve until `stop`."""
        # libzmq's descriptors stay silent until their socket was once found empty.
        self._state.events.read_subscriptions()
        self._read_monitor()
        while not self._is_stopping:
            self._turn(dispatcher)

    def _turn(self, dispatcher: Dispatcher) -> None:
        is_drained = self._receive_burst(dispatcher)
        now_s = time.monotonic()
        self.last_turn_s = now_s
        wait_s = self._next_tick_s - now_s
        if wait_s <= 0:
            self._next_tick_s = now_s + TICK_S
            self._on_tick(now_s)
            wait_s = TICK_S
        if dispatcher.has_waiting:
            dispatcher.run_slice(now_s)
            self._poll(0)
        elif not is_drained or self._has_sent or self._is_stopping:
            self._poll(0)
        else:
            self._poll(wait_s)

    def _receive_burst(self, dispatcher: Dispatcher) -> bool:
        """Answer what has arrived, at most BURST_MESSAGES. True when nothing is left."""
        receive, get_option, on_frame = self._router.recv, self._router.get, dispatcher.on_frame
        if not self._is_readable and not cast("int", get_option(_EVENTS)) & _POLLIN:
            self._has_sent = False
            return True
        self._is_readable = False
        for _ in range(BURST_MESSAGES):
            try:
                routing_id = receive(_NO_WAIT)
            except zmq.Again:  # woken by something else than a message
                self._has_sent = False
                return True
            frame = receive(_NO_WAIT, False)
            if frame.more:
                dispatcher.on_wrong_frames(routing_id, self._skip_frames())
            else:
                on_frame(routing_id, frame)
            if not cast("int", get_option(_EVENTS)) & _POLLIN:
                self._has_sent = False
                return True
        return False

    def _skip_frames(self) -> int:
        """Read off the rest of a message; the number of its frames."""
        num_frames = 1
        while True:
            frame = self._router.recv(_NO_WAIT, False)
            num_frames += 1
            if not frame.more:
                return num_frames

    def send(self, routing_id: bytes, frame: bytes) -> SendResult:
        """Queue a reply; never waits."""
        self._has_sent = True
        try:
            # ROUTER_MANDATORY decides on the first frame; the second then has its place.
            self._router.send(routing_id, _MORE_NO_WAIT)
            self._router.send(frame, _NO_WAIT)
        except zmq.Again:
            return SendResult.NOT_READ
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendResult.GONE
            raise
        self._state.metrics.sent_bytes += len(frame)
        return SendResult.SENT

    def _poll(self, wait_s: float) -> None:
        for fd, _ in self._epoll.poll(wait_s):
            self._on_readable[fd]()

    # --- what wakes it ----------------------------------------------------------------------

    def _note_readable(self) -> None:
        self._is_readable = True

    def _read_monitor(self) -> None:
        ended = self._state.ended_connections
        for change, connection_fd in self._transport.connection_changes():
            if change is ConnectionChange.OPENED:
                ended.discard(connection_fd)
            else:
                ended.add(connection_fd)
                end_connection(self._state, connection_fd)

    def _read_pidfds(self) -> None:
        for session_id in self._state.watcher.poll():
            end_process(self._state, session_id)

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._calls:
            self._calls.popleft()()

    def _read_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._signal_in.recv(4096):
                if number in STOP_SIGNALS:
                    self._on_signal(number)

    def close(self) -> None:
        """Close what the loop owns. Idempotent.

        STOP_SIGNALS are ignored from then on: a second one during the last clean-up does no harm.
        """
        if self._wake_fd >= 0:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            signal.set_wakeup_fd(-1)
            self._epoll.close()
            self._signal_in.close()
            self._signal_out.close()
            os.close(self._wake_fd)
            self._wake_fd = -1


def _note_signal(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; a handler must exist for Python to write it."""
