"""The control loop: one thread that receives, answers, and never waits for anything but work.

It waits in a receive on the ROUTER. Everything else (subscriptions, ended connections, ended
processes, signals, calls from helper threads) reaches it through the waker. No driver call, file
system call or tier call runs here (I7).

While a long request is being carried out it does not wait: it asks ZMQ_EVENTS (1.4 us, where a
receive that raises Again costs 5.3), answers what has arrived, and goes on with the next slice.
Flags are plain numbers because or-ing pyzmq's costs 0.5 us each time (2 cores, pyzmq 27).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, cast

import zmq

from hisparse_service.server.clients import end_connection, end_process
from hisparse_service.server.dispatch import Dispatcher, SendResult, peer_address_of
from hisparse_service.server.state import ServerState
from hisparse_service.server.transport import WAKE_ROUTING_ID, ConnectionChange, Transport
from hisparse_service.server.waker import Waker
from hisparse_service.telemetry.logs import get_logger

BURST_MESSAGES: Final = 64
"""Messages answered between two slices of long requests."""
TICK_S: Final = 0.5
"""How often silence, leases and helper threads are looked at."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_NO_WAIT: Final = int(zmq.NOBLOCK)
_MORE_NO_WAIT: Final = int(zmq.SNDMORE) | int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_send: Final = zmq.backend.Socket.send
"""Without the layer above it that looks for options which only other kinds of sockets have."""
_POLLIN: Final = int(zmq.POLLIN)

log = get_logger()


class ControlLoop:
    """Made and run on the main thread. Owns its waker, eventfd, signal pipe and signal handlers.

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
        self._receive: Any = self._router.recv
        self._on_tick = on_tick
        self._on_signal = on_signal
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signal_in, self._signal_out = socket.socketpair()
        self._signal_in.setblocking(False)
        self._signal_out.setblocking(False)
        self._waker = Waker(transport.wake)
        self._next_tick_s = 0.0
        self._is_stopping = False
        self.stop_reason = ""
        self.last_turn_s = time.monotonic()
        """When the loop last came round; health reads it from another thread."""
        self._longest_turn_s = 0.0
        self._watch_descriptors()
        # From here on, and not only in `run`: a helper thread may be populating the pool by then.
        for number in STOP_SIGNALS:
            signal.signal(number, _note_signal)
        signal.set_wakeup_fd(self._signal_out.fileno(), warn_on_full_buffer=False)

    def _watch_descriptors(self) -> None:
        transport, watch = self._transport, self._waker.watch
        watch(int(transport.publisher.getsockopt(zmq.FD)), self._state.events.read_subscriptions)
        watch(transport.monitor_fd, self.read_monitor)
        watch(self._state.watcher.fileno(), self._read_pidfds)
        watch(self._wake_fd, self._run_calls)
        watch(self._signal_in.fileno(), self._read_signals)

    def describe_helpers(self) -> dict[str, object]:
        """The loop's own thread, for the status."""
        return {"loop-waker": self._waker.describe()}

    # --- from other threads -----------------------------------------------------------------

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Have the loop call this. Any thread."""
        self._calls.append(callback)
        with contextlib.suppress(OSError, BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def take_longest_turn_s(self) -> float:
        """The longest time between two receives since the last call. One other thread."""
        longest_s, self._longest_turn_s = self._longest_turn_s, 0.0
        return longest_s

    # --- the loop ---------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End `run` after this turn. Control loop."""
        self.stop_reason = self.stop_reason or reason
        self._is_stopping = True

    def run(self, dispatcher: Dispatcher) -> None:
        """Serve until `stop`."""
        # libzmq's descriptors stay silent until their socket was once found empty.
        self._state.events.read_subscriptions()
        self.read_monitor()
        self._waker.ensure_running()
        self._router.setsockopt(zmq.RCVTIMEO, int(TICK_S * 1000))
        while not self._is_stopping:
            self._turn(dispatcher)

    def _turn(self, dispatcher: Dispatcher) -> None:
        if dispatcher.waiting:
            began_s = time.monotonic()
            self._receive_burst(dispatcher)
            dispatcher.run_slice(began_s)
        else:
            try:
                routing_id = self._receive()
            except zmq.Again:  # nothing came for TICK_S
                routing_id = None
            began_s = time.monotonic()
            if routing_id is not None:
                frame = self._receive(_NO_WAIT, False)
                if routing_id == WAKE_ROUTING_ID or frame.more:
                    self._handle_other(routing_id, frame, dispatcher)
                else:
                    dispatcher.on_frame(routing_id, frame)
        now_s = time.monotonic()
        self.last_turn_s = now_s
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._waker.ensure_running()
            self._on_tick(now_s)
            now_s = time.monotonic()
        if now_s - began_s > self._longest_turn_s:
            self._longest_turn_s = now_s - began_s

    def _receive_burst(self, dispatcher: Dispatcher) -> None:
        """Answer what has arrived, at most BURST_MESSAGES."""
        for _ in range(BURST_MESSAGES):
            if not cast("int", self._router.get(_EVENTS)) & _POLLIN:
                return
            routing_id = self._receive(_NO_WAIT)
            frame = self._receive(_NO_WAIT, False)
            if routing_id == WAKE_ROUTING_ID or frame.more:
                self._handle_other(routing_id, frame, dispatcher)
            else:
                dispatcher.on_frame(routing_id, frame)

    def _handle_other(self, routing_id: bytes, frame: zmq.Frame, dispatcher: Dispatcher) -> None:
        """The waker's message, or one that is not a request."""
        if routing_id == WAKE_ROUTING_ID:
            self._waker.run_ready()
        elif frame.more:
            peer_address = peer_address_of(frame)
            dispatcher.on_wrong_frames(routing_id, self._skip_frames(), peer_address)

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
        try:
            # ROUTER_MANDATORY decides on the first frame; the second then has its place.
            _send(self._router, routing_id, _MORE_NO_WAIT)
            _send(self._router, frame, _NO_WAIT)
        except zmq.Again:
            return SendResult.NOT_READ
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendResult.GONE
            raise
        self._state.metrics.sent_bytes += len(frame)
        return SendResult.SENT

    # --- what wakes it ----------------------------------------------------------------------

    def read_monitor(self) -> None:
        """Take note of connections that were made and ended. Control loop."""
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
            self._waker.close()
            self._signal_in.close()
            self._signal_out.close()
            os.close(self._wake_fd)
            self._wake_fd = -1


def _note_signal(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; a handler must exist for Python to write it."""
