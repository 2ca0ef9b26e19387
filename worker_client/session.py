"""One connection to the daemon: requests, heartbeats, and what happens when it goes away.

A request is sent and answered on the caller's own thread: one send, one blocking receive, no
hand-over to another thread, which would cost more than the daemon's whole work. One re-entrant lock
(`Session.lock`) guards the socket and, for the client's objects, everything that a new session
changes. One background thread sends heartbeats from registration on, renews leases and notices
that the daemon went or came back; it takes the same lock.

The lock is held for one exchange, or for one registration with all that follows from it. A request
that waits for a daemon that is away gives it up meanwhile, all levels of it: what its thread knew
before may have changed when the request is built. A caller that can ask again asks with a short
deadline, so that a daemon that hangs keeps the other threads no longer (`Attachment` does).

    STARTING --Hello answered--> ALIVE --disconnected, silent--> AWAY --answered--> ALIVE
    any --close--> CLOSED

A deadline that passed is its caller's alone (decision 0020). It leaves a doubt: the background
thread asks without waiting, and says AWAY after `_HEARTBEAT_TIMEOUT_S` without any reply. Each
AWAY, and each return, is one line of the logger ``worker_client``.

A new session (`UnknownSession`, another epoch, a new connection) is made inside the request that
found out, or by the background thread, whichever comes first; `SessionOwner.reattach` then opens
namespaces and pins leases again before the request is built once more with the new numbers.

Any thread may call. After a fork the child's copy is unusable: it would share the parent's socket.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from hisparse_service.contract import limits
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    ClosedError,
    HiSparseError,
    InternalError,
    MessageTooLarge,
    NotReady,
    ServiceUnavailable,
    UnknownSession,
    UsageError,
    from_wire,
)
from hisparse_service.contract.messages import (
    Bye,
    ErrorReply,
    Hello,
    HelloReply,
    Ping,
    Pong,
    Reply,
    Request,
    decode_reply,
    encode,
)
from worker_client.telemetry import WorkerCounters

_BEFORE_SEND: Final = declare("client.before_send")
_AFTER_SEND: Final = declare("client.after_send")
_AFTER_RECEIVE: Final = declare("client.after_receive")
logger = logging.getLogger("worker_client")

_WAIT_SLICE_S: Final = 0.05
"""A waiting request looks this often whether the connection broke or the session was closed."""
_HEARTBEAT_TIMEOUT_S: Final = 1.0
"""The daemon answers within 0.1 s whatever happens (I7); ten times that is silence."""
_AWAY_POLL_S: Final = 0.1
_MIN_REVIVE_S: Final = 0.1
"""With less time left (I7) a waiting request leaves it to the background thread to say Hello: an
answer that comes too late only makes the next one late."""
_LET_IN_S: Final = 0.02
"""So long a request that may not wait stands back for the background thread, if that waits."""
_NOT_READY_PAUSE_S: Final = 0.05
_COUNTERS_EVERY_S: Final = 5.0
_RECONNECT_MS: Final = 20
_RECONNECT_MAX_MS: Final = 200
_BYE_TIMEOUT_S: Final = 0.5
_JOIN_TIMEOUT_S: Final = 10.0
_NO_WAIT: Final = int(zmq.NOBLOCK)
_send: Final = zmq.backend.Socket.send
"""Without the layer above it that looks for options which only other kinds of sockets have."""
_MAX_ATTEMPTS: Final = 4
"""Sessions that one request may see end before it gives up."""

ReplyT = TypeVar("ReplyT", bound=Reply)
BuildRequest = Callable[[int], Request]
"""Makes the request for a request id; called again, with the new session's numbers, on a retry."""


class SessionState(enum.Enum):
    """Where the connection stands; see the module's header for the transitions."""

    STARTING = "starting"
    ALIVE = "alive"
    AWAY = "away"
    CLOSED = "closed"


_TRANSITIONS: Final = {
    SessionState.STARTING: (SessionState.ALIVE, SessionState.CLOSED),
    SessionState.ALIVE: (SessionState.AWAY, SessionState.ALIVE, SessionState.CLOSED),
    SessionState.AWAY: (SessionState.ALIVE, SessionState.AWAY, SessionState.CLOSED),
    SessionState.CLOSED: (SessionState.CLOSED,),
}


class WhenAway(enum.Enum):
    """What a request does when the daemon is away."""

    WAIT = "wait"
    """Wait for it until the deadline."""
    FAIL = "fail"
    """`ServiceUnavailable` as soon as it is known to be away: for callers in a decode step."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a client tells about itself in Hello."""

    client_name: str
    group: str = ""
    rank: int = 0
    world_size: int = 1
    device_uuid: str = ""
    delegates_copies: bool = False

    def check(self) -> None:
        """Refuse what no daemon takes, before one is asked.

        Raises:
            UsageError: A text too long, or a rank outside of its group.
        """
        for what in ("client_name", "group", "device_uuid"):
            check_text(what, getattr(self, what))
        if not 1 <= self.world_size <= limits.MAX_WORLD_SIZE:
            raise UsageError(
                f"world_size is {self.world_size}, a group has 1 to {limits.MAX_WORLD_SIZE} ranks",
                remedy="Give the number of workers of the group", limit=limits.MAX_WORLD_SIZE,
                value=self.world_size,
            )  # fmt: skip
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank is {self.rank} in a group of {self.world_size}, ranks are 0 to "
                f"{self.world_size - 1}",
                remedy="Give rank and world_size of the same group", limit=self.world_size - 1,
                value=self.rank,
            )  # fmt: skip


def check_text(what: str, text: str) -> None:
    """Refuse a text longer than a message carries.

    Raises:
        UsageError: It is.
    """
    if len(text) > limits.MAX_TEXT_BYTES:
        raise UsageError(
            f"{what} has {len(text)} characters, at most {limits.MAX_TEXT_BYTES} are sent",
            remedy=f"Use a shorter {what}", limit=limits.MAX_TEXT_BYTES, value=len(text),
        )  # fmt: skip


class SessionOwner(Protocol):
    """Whose leases and namespaces live in a session. All calls come with `Session.lock` held."""

    def reattach(self) -> None:
        """A new session was made: open namespaces and pin leases again. PeerErrors may go up."""

    def hand_in(self) -> None:
        """The daemon answers again: hand in what completed meanwhile."""

    def leases_to_renew(self, now_ns: int) -> list[int]:
        """Ids of the leases that are due."""

    def renewed(self, lease_ids: list[int], pong: Pong) -> None:
        """The answer for these ids, and what else the daemon says is lost."""

    def late_reply(self, reply: Reply) -> None:
        """A reply whose request gave up before. It may have taken something that must go back."""

    def housekeeping(self) -> None:
        """Once a heartbeat while the daemon is there."""


class _SessionGone(Exception):
    """The daemon does not know this session, or the connection that carried it broke."""


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _mark_forked() -> None:
    for session in list(_sessions):
        session._forked = True
        session._usable = False
        # Another thread of the parent may hold the lock; it does not exist in this process.
        session.lock = threading.RLock()


os.register_at_fork(after_in_child=_mark_forked)


class Session:
    """A DEALER socket, its registration with the daemon and its background thread.

    Args:
        endpoint: ``ipc://`` and the path of the control socket.
        identity: Who this client is.
        timeout_s: Deadline of requests that bring none.
        counters: Where time-outs and reconnects are counted.
    """

    def __init__(
        self,
        endpoint: str,
        identity: Identity,
        *,
        timeout_s: float = limits.DEFAULT_REQUEST_TIMEOUT_S,
        counters: WorkerCounters | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.identity = identity
        self.counters = counters if counters is not None else WorkerCounters()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        """The daemon is there again, or the session is closed."""
        self.owner: SessionOwner | None = None
        self.epoch = 0
        self.hello: HelloReply | None = None
        self.state = SessionState.STARTING
        self._timeout_s = timeout_s
        self._next_id = 1
        self._usable = True
        self._close_once = threading.Lock()
        self._forked = False
        self._connected = False
        self._needs_hello = True
        self._attaching = False
        self._last_reply_s = 0.0
        self._probed_s = 0.0
        self._in_doubt = False
        """A request was given up and nothing says yet that the daemon is there."""
        self._unanswered_s = 0.0
        """Since when it owes an answer; `_last_reply_s` behind it: to the session as a whole."""
        self._is_told_away = False
        self._away_since_s = 0.0
        self._thread_waits = False
        """The background thread waits for the lock."""
        self._counters_sent_s = 0.0
        self._heartbeat_s = limits.HEARTBEAT_INTERVAL_S
        self._quiet_heartbeat_s = limits.HEARTBEAT_INTERVAL_S
        self._heartbeat_reply_s = 0.0
        """`_last_reply_s` of the last heartbeat: the same as long as nothing else was asked."""
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._set_options()
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        _sessions.add(self)

    def _set_options(self) -> None:
        for option, value in (
            (zmq.LINGER, limits.SOCKET_LINGER_MS),
            (zmq.SNDHWM, limits.SEND_HIGH_WATER_MARK),
            (zmq.RCVHWM, limits.RECEIVE_HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.RCVTIMEO, int(_WAIT_SLICE_S * 1000)),
            (zmq.SNDTIMEO, int(_WAIT_SLICE_S * 1000)),
        ):
            self._socket.setsockopt(option, value)

    # --- life -----------------------------------------------------------------------------------

    def open(self, *, timeout_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Connect, register, and start the background thread. On failure the session is closed.

        Args:
            timeout_s: For the daemon's answer.
            alive: Called while waiting; raises to give up early (a child that ended, say).

        Raises:
            ServiceUnavailable: No answer in time.
            ProtocolMismatch, NotAuthorised, QuotaExceeded: The daemon refused.
        """
        try:
            self._socket.connect(self.endpoint)
            with self.lock:
                self._register(time.monotonic() + timeout_s, alive)
            self._thread = threading.Thread(
                target=self._run, name="hisparse-heartbeat", daemon=True
            )
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say Bye where the daemon answers, end the thread, close the sockets. Idempotent."""
        if not self._close_once.acquire(blocking=False):
            return
        self._usable = False
        if self._forked:
            self.state = SessionState.CLOSED  # socket, thread and descriptors are the parent's
            return
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)
        with self.lock:
            self._changed.notify_all()
            linger_ms = 0
            if self.state is SessionState.ALIVE and not self._needs_hello:
                linger_ms = self._say_bye()
            self._move(SessionState.CLOSED)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            self._context.term()
            os.close(self._wake_fd)
            _sessions.discard(self)

    def _say_bye(self) -> int:
        with contextlib.suppress(HiSparseError, zmq.ZMQError, _SessionGone):
            self._exchange(Bye, time.monotonic() + _BYE_TIMEOUT_S, closing=True)
            return limits.SOCKET_LINGER_MS
        return 0

    @property
    def is_alive(self) -> bool:
        """Whether the daemon answered last time. Reads without the lock: a hint."""
        return self.state is SessionState.ALIVE and not self._needs_hello

    def _move(self, state: SessionState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise InternalError(f"session {self.endpoint}: {self.state.value} to {state.value}")
        self.state = state

    def _check_usable(self) -> None:
        if self._usable:
            return
        if self._forked:
            raise ClosedError(
                "this client was made before a fork; its connection belongs to the parent process",
                remedy="Connect again in the child, or start workers by spawn",
            )
        raise ClosedError("the client is closed", remedy="Connect again")

    # --- requests -------------------------------------------------------------------------------

    def request(
        self,
        build: BuildRequest,
        reply_type: type[ReplyT],
        *,
        timeout_s: float | None = None,
        when_away: WhenAway = WhenAway.WAIT,
    ) -> ReplyT:
        """Send one request and wait for its reply, on this thread.

        Args:
            build: Makes the request. Called again when a new session had to be made meanwhile.
            reply_type: What the reply must be.
            timeout_s: Deadline from now; the session's own when None.
            when_away: What to do when the daemon is away.

        Raises:
            ServiceUnavailable: No reply before the deadline. The daemon may still carry it out.
            HiSparseError: The daemon's typed answer.
            ClosedError: After `close`, or in a forked child.
        """
        if not self._usable:
            self._check_usable()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        if not self.lock.acquire(timeout=max(timeout_s, 0.0)):
            raise self._unavailable("another request of this client is waiting for the daemon")
        try:
            if self.state is SessionState.ALIVE and not self._needs_hello:
                try:
                    reply = self._exchange(build, deadline_s, when_away)
                except _SessionGone:
                    self._needs_hello = True
                    reply = self._request_again(build, deadline_s, when_away)
            else:
                reply = self._request_again(build, deadline_s, when_away)
        finally:
            self.lock.release()
        if type(reply) is reply_type:
            return reply
        raise InternalError(
            f"the daemon answered {type(reply).__name__}, expected {reply_type.__name__}"
        )

    def _request_again(self, build: BuildRequest, deadline_s: float, when_away: WhenAway) -> Reply:
        if self._attaching:
            raise _SessionGone
        for _ in range(_MAX_ATTEMPTS):
            if not self.is_alive:
                if when_away is WhenAway.FAIL:
                    self._away(self._why_gone())
                    raise self.away_error()
                self._wait_alive(deadline_s)
            try:
                return self._exchange(build, deadline_s, when_away)
            except _SessionGone:
                self._needs_hello = True
        raise self._unavailable(f"the session ended {_MAX_ATTEMPTS} times during one request")

    def _wait_alive(self, deadline_s: float) -> None:
        """Wait until the daemon answers; the lock is given up meanwhile, all levels of it.

        Held, it kept decode steps, releases and heartbeats of this client waiting for as long as
        one thread had patience: an attach has a minute.

        Raises:
            ServiceUnavailable: Not before the deadline.
            HiSparseError: The daemon is there and refuses this client.
            ClosedError: Closed by another thread meanwhile.
        """
        self._away(self._why_gone())
        self._probed_s = 0.0  # ask now, whenever somebody asked last
        refused: HiSparseError | None = None
        while True:
            self._check_usable()
            self._read_monitor()
            if self._connected:
                now_s = time.monotonic()
                try:
                    if deadline_s - now_s >= _MIN_REVIVE_S:
                        self._probe(now_s, min(deadline_s, now_s + _HEARTBEAT_TIMEOUT_S))
                except NotReady as error:
                    refused = error
                except ServiceUnavailable as error:
                    # The last attempt may have had no time left: why it was refused says more.
                    refused = refused if isinstance(refused, NotReady) else error
            else:
                refused = None
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._let_in()
            if self.is_alive:
                return
            if left_s <= 0:
                raise refused if refused is not None else self._no_answer()
            self._changed.wait(min(left_s, _WAIT_SLICE_S))

    def _let_in(self) -> None:
        """Give the lock to the background thread if it waits for it: it revives the session.

        Whoever asks again and again without time to wait takes the lock anew before a thread that
        was woken up for it runs.
        """
        end_s = time.monotonic() + _LET_IN_S
        while self._thread_waits and time.monotonic() < end_s:
            self._changed.wait(_LET_IN_S / 10)

    def _no_answer(self) -> ServiceUnavailable:
        if not self._connected:
            return self._unavailable("no daemon listens there")
        self.counters.add("request_timeouts")
        return self._unavailable("no answer before the deadline")

    def _exchange(
        self,
        build: BuildRequest,
        deadline_s: float,
        when_away: WhenAway = WhenAway.WAIT,
        *,
        closing: bool = False,
    ) -> Reply:
        if not self._usable and not closing:
            self._check_usable()
        request_id = self._next_id
        self._next_id = request_id + 1
        frame = encode(build(request_id))
        if len(frame) > limits.MAX_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"the request has {len(frame)} bytes, at most {limits.MAX_MESSAGE_BYTES} are sent",
                remedy="Split it: fewer keys or blocks a message",
                limit_bytes=limits.MAX_MESSAGE_BYTES,
                message_bytes=len(frame),
            )
        crash_point(_BEFORE_SEND)
        try:
            _send(self._socket, frame)
        except zmq.Again:
            self._read_monitor()
            self._away("it does not read its socket" if self._connected else self._why_gone())
            raise self._unavailable("the daemon does not read its socket") from None
        crash_point(_AFTER_SEND)
        reply = self._receive(request_id, deadline_s, when_away, closing)
        crash_point(_AFTER_RECEIVE)
        if type(reply) is ErrorReply:
            if reply.code == UnknownSession.__name__:
                raise _SessionGone
            raise from_wire(reply.code, reply.message, reply.remedy, reply.details)
        if reply.epoch != self.epoch and type(reply) is not HelloReply:
            raise _SessionGone
        return reply

    def _receive(
        self, request_id: int, deadline_s: float, when_away: WhenAway, closing: bool
    ) -> Reply:
        receive = self._socket.recv
        began_s = now_s = time.monotonic()
        while True:
            flags = 0
            if deadline_s - now_s < _WAIT_SLICE_S:
                self._socket.poll(max(0, int((deadline_s - now_s) * 1000)))
                flags = _NO_WAIT
            try:
                frame = receive(flags)
            except zmq.Again:
                self._while_waiting(deadline_s, began_s, when_away, closing=closing)
                now_s = time.monotonic()
                continue
            reply = decode_reply(frame)
            self._last_reply_s = now_s
            if reply.request_id == request_id:
                return reply
            now_s = time.monotonic()
            self.counters.add("late_replies")
            # A probe's Pong took nothing that must go back.
            if self.owner is not None and reply.epoch == self.epoch and type(reply) is not Pong:
                self.owner.late_reply(reply)

    def _while_waiting(
        self, deadline_s: float, began_s: float, when_away: WhenAway, *, closing: bool
    ) -> None:
        """Called after each slice without a reply to what was asked at `began_s`.

        Raises:
            _SessionGone: The connection broke, so no reply will come.
            ServiceUnavailable: The deadline passed; or the daemon was in doubt before, is silent by
                now, and the caller does not wait for one that is away.
            ClosedError: Closed by another thread meanwhile.
        """
        if not closing:
            self._check_usable()
        self._read_monitor()
        if self._needs_hello:
            raise _SessionGone
        if time.monotonic() >= deadline_s:
            self._doubt(began_s)
            raise self._no_answer()
        if self._in_doubt and when_away is WhenAway.FAIL:
            # Nobody else can find out: the lock is held here.
            self._check_silence(time.monotonic(), began_s)
            if self.state is SessionState.AWAY:
                raise self.away_error()

    def _doubt(self, began_s: float) -> None:
        """A caller lost its patience: no reason to be away for all, but one to look."""
        if self.state is not SessionState.ALIVE:
            return
        if not self._in_doubt:
            self._in_doubt = True
            self._probed_s = 0.0
            os.eventfd_write(self._wake_fd, 1)
        self._check_silence(time.monotonic(), began_s)

    def _check_silence(self, now_s: float, began_s: float) -> None:
        """AWAY after too long without a reply; `began_s`: when the present question was asked."""
        if self._unanswered_s < self._last_reply_s:  # what was owed before is settled
            self._unanswered_s = max(began_s, self._last_reply_s)
        silent_s = now_s - max(self._unanswered_s, self._last_reply_s)
        # Who asks with this time-out as its deadline counts from before it had the lock.
        if silent_s >= _HEARTBEAT_TIMEOUT_S - _WAIT_SLICE_S:
            self._away(f"no answer for {silent_s:.1f} s")

    def _clear_up(self, now_s: float) -> bool:
        """While in doubt: see whether the daemon is there, without waiting for it; True: it is."""
        deadline_s = now_s + _HEARTBEAT_TIMEOUT_S
        if self._last_reply_s > self._unanswered_s or self._socket.poll(0):
            self._revive(deadline_s)
            return self.is_alive
        self._check_silence(now_s, now_s)
        if self.state is SessionState.ALIVE:
            self._probe(now_s, deadline_s)
        return False

    def away_error(self) -> ServiceUnavailable:
        """For a caller that does not wait for a daemon that is away."""
        return self._unavailable("the daemon is away")

    def _unavailable(self, what: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"{what} ({self.endpoint})",
            remedy="See whether the daemon runs (`hisparse-service status`) and try again",
        )

    # --- coming and going of the daemon ---------------------------------------------------------

    def _read_monitor(self) -> None:
        """Take the socket's own account of its connection. A broken one ended the session."""
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_DISCONNECTED:
                self._needs_hello = True

    def _why_gone(self) -> str:
        return "its session ended" if self._connected else "the connection broke"

    def _away(self, why: str) -> None:
        if self.state is not SessionState.ALIVE:
            return
        self._move(SessionState.AWAY)
        os.eventfd_write(self._wake_fd, 1)
        if not self._is_told_away:  # until all is attached again, it was never back
            self._is_told_away = True
            self._away_since_s = time.monotonic()
            logger.warning(
                "hisparse-service is away (%s): %s; mirrors are kept, nothing new is found until "
                "it is back", self.endpoint, why,
            )  # fmt: skip

    def _note_back(self) -> None:
        if self._is_told_away and self.is_alive:
            self._is_told_away = False
            logger.info(
                "hisparse-service is back (%s) after %.1f s, epoch %016x", self.endpoint,
                time.monotonic() - self._away_since_s, self.epoch,
            )  # fmt: skip

    def _revive(self, deadline_s: float) -> None:
        """Make the session usable again: a heartbeat if it was only silent, else a new one.

        Raises:
            ServiceUnavailable: Not before the deadline.
        """
        self._read_monitor()
        if not self._needs_hello:
            try:
                self._exchange(self._heartbeat, deadline_s)
            except _SessionGone:
                self._needs_hello = True
            else:
                self._in_doubt = False
                self._move(SessionState.ALIVE)
                self._changed.notify_all()
                self._call_owner_hand_in()
                return
        self._away(self._why_gone())
        self._register(deadline_s)

    def _register(self, deadline_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Say Hello until it is answered; then, unless it is the first time, attach again."""
        while True:
            self._wait_connected(deadline_s, alive)
            self._needs_hello = False
            try:
                # Bounded, so that `alive` is looked at while a daemon that listens does not answer.
                slice_s = min(deadline_s, time.monotonic() + _HEARTBEAT_TIMEOUT_S)
                reply = self._exchange(self._hello, slice_s)
                break
            except NotReady:
                self._needs_hello = True
                alive()
                is_known = self.hello is not None  # then whoever waits asks again, without the lock
                if is_known or time.monotonic() + _NOT_READY_PAUSE_S >= deadline_s:
                    raise
                time.sleep(_NOT_READY_PAUSE_S)
            except ServiceUnavailable:
                self._needs_hello = True
                alive()
                if time.monotonic() >= deadline_s:
                    raise
            except _SessionGone:
                self._needs_hello = True
            except BaseException:
                self._needs_hello = True
                raise
        if not isinstance(reply, HelloReply):
            raise InternalError(f"the daemon answered Hello by {type(reply).__name__}")
        is_first = self.hello is None
        # Set first, so that a lock-free `BlockLease.check` that sees the new epoch waits.
        self._attaching = not is_first
        self.hello, self.epoch = reply, reply.epoch
        self._heartbeat_s = min(max(reply.heartbeat_interval_s, 0.05), limits.SESSION_TIMEOUT_S)
        quiet_s = min(self._heartbeat_s * limits.MAX_QUIET_HEARTBEATS, reply.session_timeout_s / 5)
        self._quiet_heartbeat_s = max(quiet_s, self._heartbeat_s)
        self._in_doubt = False
        self._move(SessionState.ALIVE)
        self._changed.notify_all()
        if not is_first:
            self.counters.add("reconnects")
            self._reattach()

    def _reattach(self) -> None:
        try:
            if self.owner is not None:
                self.owner.reattach()
        except (_SessionGone, ServiceUnavailable) as error:
            self._needs_hello = True
            self._away(self._why_gone())
            raise self._unavailable("the daemon went away while attaching again") from error
        except BaseException:
            self._needs_hello = True  # half attached is not attached: all of it is done again
            self._away(self._why_gone())
            raise
        finally:
            self._attaching = False
        self._call_owner_hand_in()

    def _call_owner_hand_in(self) -> None:
        if self.owner is not None:
            self._attaching = True
            try:
                self.owner.hand_in()
            except (_SessionGone, ServiceUnavailable):
                self._needs_hello = True
                self._away(self._why_gone())
            finally:
                self._attaching = False
        self._note_back()

    def _wait_connected(self, deadline_s: float, alive: Callable[[], None]) -> None:
        """Nothing is queued for a daemon that is not there: it would hear it much later."""
        while True:
            self._read_monitor()
            if self._connected:
                return
            alive()
            self._check_usable()
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._unavailable("no daemon listens there")
            self._monitor.poll(max(1, int(min(left_s, _WAIT_SLICE_S) * 1000)))

    def _hello(self, request_id: int) -> Hello:
        who = self.identity
        return Hello(
            request_id, limits.PROTOCOL_MIN, limits.PROTOCOL_MAX, who.client_name, who.group,
            who.rank, who.world_size, who.device_uuid, False, who.delegates_copies,
        )  # fmt: skip

    def _heartbeat(self, request_id: int) -> Ping:
        return Ping(request_id, [], self.counters.snapshot())

    # --- background -----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        # Edge-triggered; whoever holds the lock reads the monitor, so a missed edge was handled.
        poller.register(int(self._monitor.getsockopt(zmq.FD)), select.POLLIN)
        while self._usable:
            is_calm = self.is_alive and not self._in_doubt
            poller.poll(int((self._heartbeat_s if is_calm else _AWAY_POLL_S) * 1000))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._thread_waits = True
            with self.lock, contextlib.suppress(HiSparseError, _SessionGone):
                self._thread_waits = False
                if self._usable:
                    self._tick()

    def _tick(self) -> None:
        self._read_monitor()
        now_s = time.monotonic()
        if not self.is_alive:
            self._away(self._why_gone())
            if self._connected:
                self._probe(now_s, now_s + _HEARTBEAT_TIMEOUT_S)
            return
        if self._in_doubt and not self._clear_up(now_s):
            return
        lease_ids: list[int] = []
        if self.owner is not None:
            self.owner.housekeeping()
            lease_ids = self.owner.leases_to_renew(time.monotonic_ns())
        silent_s = now_s - self._last_reply_s
        counters_due = now_s - self._counters_sent_s >= _COUNTERS_EVERY_S
        is_quiet = self._last_reply_s == self._heartbeat_reply_s
        wait_s = self._quiet_heartbeat_s if is_quiet else self._heartbeat_s
        if lease_ids or counters_due or silent_s >= wait_s - self._heartbeat_s * 0.1:
            self._ping(lease_ids)

    def _probe(self, now_s: float, deadline_s: float) -> None:
        """See whether a daemon that hangs is back, without waiting for it.

        Decode steps need the lock: held for each unanswered heartbeat, it cost them a second each.

        Args:
            now_s: Time now.
            deadline_s: For a daemon that is back, to answer.
        """
        if self._needs_hello or self._socket.poll(0):
            self._revive(deadline_s)
        elif now_s - self._probed_s >= _HEARTBEAT_TIMEOUT_S:
            self._probed_s = now_s
            request_id = self._next_id
            self._next_id = request_id + 1
            with contextlib.suppress(zmq.Again):  # it reads nothing either
                self._socket.send(encode(self._heartbeat(request_id)), zmq.NOBLOCK)

    def _ping(self, lease_ids: list[int]) -> None:
        counters = self.counters.snapshot()
        for start in range(0, max(len(lease_ids), 1), limits.MAX_LIST_ITEMS):
            part = lease_ids[start : start + limits.MAX_LIST_ITEMS]

            def build(request_id: int, part: list[int] = part) -> Ping:
                return Ping(request_id, part, counters)

            try:
                pong = self.request(
                    build, Pong, timeout_s=_HEARTBEAT_TIMEOUT_S, when_away=WhenAway.FAIL
                )
            except ServiceUnavailable:
                if self._connected:
                    now_s = time.monotonic()
                    self._probe(now_s, now_s + _HEARTBEAT_TIMEOUT_S)
                return
            if self.owner is not None and (part or pong.lost_device_backings or pong.lost_pins):
                self.owner.renewed(part, pong)
        self._counters_sent_s = time.monotonic()
        self._heartbeat_reply_s = self._last_reply_s
