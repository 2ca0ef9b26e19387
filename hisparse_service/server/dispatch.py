"""From a frame to a reply: decoded, admitted, handled, and every error turned into an answer.

One table says for each request type which function handles it and what it needs. Handlers never
wait; long ones come back as `LongRequest` and are stepped by `run_slice`, round robin between
sessions. Requests of one session are carried out in order: what comes behind a long one waits for
it, except Ping and Status. Control loop only.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import zmq

from hisparse_service.contract import messages as m
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    HiSparseError,
    InternalError,
    MalformedMessage,
    MessageTooLarge,
    NotAuthorised,
    NotReady,
    QuotaExceeded,
    UnknownSession,
)
from hisparse_service.contract.limits import MAX_IN_FLIGHT_PER_SESSION
from hisparse_service.membership.credentials import Authoriser, parse_peer_address
from hisparse_service.membership.sessions import DeathCause
from hisparse_service.server import handlers_backing as backing
from hisparse_service.server import handlers_blocks as blocks
from hisparse_service.server import handlers_control as control
from hisparse_service.server import handlers_device as device
from hisparse_service.server import handlers_operations as operations
from hisparse_service.server import handlers_session as session
from hisparse_service.server import handlers_shared_events as shared_events
from hisparse_service.server.clients import (
    begin_session,
    draining,
    end_session,
    hello_reply,
    log_operator_request,
)
from hisparse_service.server.state import (
    AwaitsHelper,
    Client,
    LongRequest,
    Pending,
    Phase,
    ServerState,
)
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.taps import Answered

_SOURCE_FD: Final = 2  # ZMQ_SRCFD: which connection a frame came by; the monitor uses this number
MAX_PENDING_BYTES_PER_SESSION: Final = 8 * 2**20
"""Of frames whose requests wait; with MAX_SESSIONS sessions 2 GiB at the very worst."""

_BEFORE_REPLY: Final = {
    request_type: declare(f"reply.before_{request_type.__name__}")
    for request_type in m.REQUEST_TYPES.values()
}
_AFTER_REPLY: Final = {
    request_type: declare(f"reply.after_{request_type.__name__}")
    for request_type in m.REQUEST_TYPES.values()
}

log = get_logger()


class Needs(enum.IntEnum):
    """What a request needs to be admitted; each includes the ones before it."""

    SESSION = 0
    POOL = 1
    """The pool is there (READY or DRAINING)."""
    WORKER = 2
    """A session that is not an operator's."""
    NOT_DRAINING = 3


Handler = Callable[[ServerState, Client, Any, float], "m.Reply | LongRequest"]


class Route(NamedTuple):
    """How one request type is handled."""

    handler: Handler
    needs: Needs
    overtakes: bool = False
    """Whether it may be answered before earlier requests of its session."""


ROUTES: Final[dict[type[m.Request], Route]] = {
    m.Ping: Route(session.ping, Needs.SESSION, overtakes=True),
    m.Bye: Route(session.bye, Needs.SESSION, overtakes=True),
    m.OpenNamespace: Route(backing.open_namespace, Needs.NOT_DRAINING),
    m.AllocateBacking: Route(backing.allocate_backing, Needs.NOT_DRAINING),
    m.TakeWriter: Route(backing.take_writer, Needs.WORKER),
    m.YieldWriter: Route(backing.yield_writer, Needs.WORKER),
    m.RegistrationTurn: Route(backing.registration_turn, Needs.WORKER),
    m.Reserve: Route(blocks.reserve, Needs.NOT_DRAINING),
    m.Reclaim: Route(blocks.reclaim, Needs.WORKER),
    m.Lookup: Route(blocks.lookup, Needs.WORKER),
    m.Pin: Route(blocks.pin, Needs.WORKER),
    m.Unpin: Route(blocks.unpin, Needs.WORKER),
    m.MirrorBatch: Route(blocks.mirror_batch, Needs.WORKER),
    m.Abandon: Route(blocks.abandon, Needs.WORKER),
    m.Free: Route(blocks.free, Needs.WORKER),
    m.ReportDamage: Route(blocks.report_damage, Needs.WORKER),
    m.ReleaseLeases: Route(blocks.release_leases, Needs.WORKER),
    m.OfferEvents: Route(shared_events.offer_events, Needs.WORKER),
    m.FetchEvents: Route(shared_events.fetch_events, Needs.WORKER),
    m.AllocateDeviceBacking: Route(device.allocate_device_backing, Needs.NOT_DRAINING),
    m.ReleaseDeviceBacking: Route(device.release_device_backing, Needs.POOL),
    m.Status: Route(operations.status, Needs.SESSION, overtakes=True),
    m.Sessions: Route(operations.sessions, Needs.SESSION, overtakes=True),
    m.ListBlocks: Route(operations.list_blocks, Needs.POOL),
    m.Evict: Route(operations.evict, Needs.POOL),
    m.Drain: Route(operations.drain, Needs.SESSION, overtakes=True),
    m.SetLimits: Route(control.set_limits, Needs.POOL, overtakes=True),
    m.Trace: Route(control.trace, Needs.SESSION, overtakes=True),
    m.Overview: Route(control.overview, Needs.SESSION, overtakes=True),
}
"""Every request type but Hello, which makes the session that the others need."""

assert set(ROUTES) | {m.Hello} == set(m.REQUEST_TYPES.values())


class BrokenInvariantError(Exception):
    """An assertion of the directory failed: the daemon stops, and its successor adopts."""


def peer_address_of(frame: zmq.Frame) -> str:
    """The kernel's word on who sent a frame; empty of a peer of ZMTP 1.0.

    Bytes that are no ZMTP may look like that version, and its frames carry no properties.
    """
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


class Dispatcher:
    """Answers frames. `send` queues a reply and says whether it could.

    Args:
        state: What handlers work on.
        authoriser: Who may connect.
        send: (routing id, frame) to whether it was queued; never waits.
        read_monitor: Takes note of connections that were made and ended up to now; never waits.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        authoriser: Authoriser,
        send: Callable[[bytes, bytes], SendResult],
        read_monitor: Callable[[], None],
    ) -> None:
        self._state = state
        self._authoriser = authoriser
        self._send = send
        self._read_monitor = read_monitor
        self.waiting: deque[Client] = deque()
        """Clients with waiting requests, each once; `run_slice` has something to do while any."""
        self._latency = {
            request_type: state.metrics.latency_of(request_type.__name__)
            for request_type in (*m.REQUEST_TYPES.values(), type(None))
        }

    def on_frame(self, routing_id: bytes, frame: zmq.Frame) -> None:
        """Handle one frame of a connection."""
        started_ns = time.monotonic_ns()
        state = self._state
        client = state.clients.get(routing_id)
        request: m.Request | None = None
        reply: m.Reply | None
        state.metrics.received_bytes += len(frame)
        try:
            if client is not None and frame.get("Peer-Address") != client.peer_address:
                # The routing id passed to another process: the session's own is gone.
                end_session(state, client, DeathCause.DISCONNECTED)
                client = None
            request = m.decode_request(frame.buffer)  # type: ignore[arg-type]
            if client is None or type(request) is m.Hello:
                reply = self._greet(routing_id, frame, request, started_ns / 1e9)
            else:
                reply = self._answer(client, request, len(frame), started_ns / 1e9)
            if reply is None:
                return
        except HiSparseError as error:
            reply = self._refuse(client, request, error, peer_address_of(frame))
        except AssertionError as error:
            raise BrokenInvariantError(f"{type(request).__name__}: {error}") from error
        except Exception as error:
            reply = self._bug(client, request, error)
        self._reply(client, routing_id, reply, request)
        ended_ns = time.monotonic_ns()
        self._latency[type(request)].observe_ns(ended_ns - started_ns)
        if state.taps and request is not None:
            self._tap(client, request, reply, started_ns, ended_ns, len(frame))

    def on_wrong_frames(self, routing_id: bytes, num_frames: int, peer_address: str = "") -> None:
        """Answer a message that is not one frame."""
        client = self._state.clients.get(routing_id)
        error = MalformedMessage(
            f"a message of {num_frames} frames; the protocol has one",
            remedy="Use a DEALER socket and send one frame a request",
            num_frames=num_frames,
        )
        self._reply(client, routing_id, self._refuse(client, None, error, peer_address))

    def run_slice(self, now_s: float) -> None:
        """One slice of the next session's first waiting request."""
        client = self.waiting.popleft()
        if not client.pending:
            return
        pending = client.pending[0]
        reply: m.Reply | None
        try:
            reply = self._step(client, pending, now_s)
        except HiSparseError as error:
            reply = self._refuse(client, pending.request, error)
        except AssertionError as error:
            raise BrokenInvariantError(f"{type(pending.request).__name__}: {error}") from error
        except Exception as error:
            reply = self._bug(client, pending.request, error)
        if reply is not None:
            # A reply that cannot be sent may have ended the session and emptied the queue.
            if client.pending and client.pending[0] is pending:
                client.pending.popleft()
            self._reply(client, client.session.routing_id, reply, pending.request)
            started_ns, ended_ns = int(pending.received_s * 1e9), time.monotonic_ns()
            self._latency[type(pending.request)].observe_ns(ended_ns - started_ns)
            if self._state.taps:
                self._tap(client, pending.request, reply, started_ns, ended_ns, pending.frame_bytes)
        if client.pending and not self._is_parked(client):
            self.waiting.append(client)

    def _is_parked(self, client: Client) -> bool:
        """Whether the first waiting request waits for a helper, which then has it stepped."""
        work = client.pending[0].work
        if not isinstance(work, AwaitsHelper) or work.is_ready:
            return False

        def resume() -> None:
            if client.pending and client.pending[0].work is work:
                self.waiting.append(client)

        work.resume = resume
        return True

    def _step(self, client: Client, pending: Pending, now_s: float) -> m.Reply | None:
        if pending.work is None:
            result = self._admit(client, pending.request)(
                self._state, client, pending.request, now_s
            )
            if isinstance(result, m.Reply):
                return result
            pending.work = result
        if pending.work.step():
            return pending.work.finish(time.monotonic())
        return None

    def _greet(
        self, routing_id: bytes, frame: zmq.Frame, request: m.Request, now_s: float
    ) -> m.Reply:
        """A frame of a connection without a session, or a Hello."""
        if type(request) is not m.Hello:
            raise UnknownSession(
                "this connection has no session",
                remedy="Say Hello first, and again when the daemon was restarted",
            )
        peer_address = peer_address_of(frame)
        parse_peer_address(peer_address)  # a peer without credentials has no descriptor either
        # Connections are told apart by their descriptor's number, which the next one takes over.
        # What the monitor said before this Hello arrived is of an earlier connection: read later,
        # it would end this session for the end of that one.
        self._read_monitor()
        client = begin_session(
            self._state, self._authoriser, request, routing_id=routing_id,
            peer_address=peer_address,
            connection_fd=int(frame.get(_SOURCE_FD)), now_s=now_s,
        )  # fmt: skip
        return hello_reply(self._state, client, request.request_id)

    def _answer(
        self, client: Client, request: m.Request, frame_bytes: int, now_s: float
    ) -> m.Reply | None:
        """The reply, or None for a request that waits."""
        client.session.last_seen_s = now_s
        client.session.statistics.messages += 1
        handler, needs, overtakes = ROUTES[type(request)]
        if client.is_operator:
            log_operator_request(client, request)
        if client.pending and not overtakes:
            self._queue(client, request, None, frame_bytes, now_s)
            return None
        if needs is not Needs.SESSION and (
            client.is_operator or self._state.phase is not Phase.READY
        ):
            self._admit(client, request)
        result = handler(self._state, client, request, now_s)
        if isinstance(result, m.Reply):
            return result
        self._queue(client, request, result, frame_bytes, now_s)
        return None

    def _admit(self, client: Client, request: m.Request) -> Handler:
        """The handler, if the session and the daemon's phase allow the request.

        Raises:
            NotReady: Populating, or draining.
            NotAuthorised: An operator's session asks for a worker's.
        """
        handler, needs, _ = ROUTES[type(request)]
        if needs is Needs.SESSION:
            return handler
        phase = self._state.phase
        if phase is Phase.STARTING:
            raise NotReady(
                f"the pool is being populated: {self._state.progress:.0%}",
                remedy="Retry; Ping and Status are answered meanwhile",
                progress=self._state.progress,
            )
        if needs >= Needs.WORKER and client.is_operator:
            raise NotAuthorised(
                f"an operator's session may not send {type(request).__name__}",
                remedy="Say Hello as a worker: those have heartbeats, which guard what they hold",
            )
        if needs is Needs.NOT_DRAINING and phase is not Phase.READY:
            raise draining(self._state)
        return handler

    def _queue(
        self,
        client: Client,
        request: m.Request,
        work: LongRequest | None,
        frame_bytes: int,
        now_s: float,
    ) -> None:
        waiting = client.pending
        waiting_bytes = frame_bytes + sum(each.frame_bytes for each in waiting)
        if len(waiting) >= MAX_IN_FLIGHT_PER_SESSION or (
            waiting and waiting_bytes > MAX_PENDING_BYTES_PER_SESSION
        ):
            if work is not None:
                work.cancel()
            raise QuotaExceeded(
                f"{len(waiting)} requests of this session wait with {waiting_bytes} bytes; the "
                f"limits are {MAX_IN_FLIGHT_PER_SESSION} and {MAX_PENDING_BYTES_PER_SESSION}",
                remedy="Wait for replies before sending more",
                limit=MAX_IN_FLIGHT_PER_SESSION, value=len(waiting),
            )  # fmt: skip
        waiting.append(Pending(request, now_s, frame_bytes, work))
        if len(waiting) == 1 and not self._is_parked(client):
            self.waiting.append(client)

    def _tap(
        self,
        client: Client | None,
        request: m.Request,
        reply: m.Reply,
        started_ns: int,
        ended_ns: int,
        frame_bytes: int,
    ) -> None:
        if isinstance(reply, m.HelloReply):
            session_id = reply.session_id
        else:
            session_id = client.session.session_id if client is not None else 0
        answered = Answered(session_id, request, reply, started_ns, ended_ns, frame_bytes)
        for tap in self._state.taps:
            tap.offer(answered)

    def _refuse(
        self,
        client: Client | None,
        request: m.Request | None,
        error: HiSparseError,
        peer_address: str = "",
    ) -> m.Reply:
        metrics = self._state.metrics
        metrics.count_error(error.code)
        if isinstance(error, MalformedMessage | MessageTooLarge):
            metrics.malformed += 1
        if client is not None:
            client.session.statistics.errors += 1
        self._state.refusals.note(
            client, request, error, peer_address=peer_address, now_s=time.monotonic()
        )
        request_id = request.request_id if request is not None else 0
        if request is None:
            request_id = int(error.details.get("request_id", 0))
        return m.error_reply(request_id, self._state.options.epoch, error)

    def _bug(self, client: Client | None, request: m.Request | None, error: Exception) -> m.Reply:
        self._state.metrics.unexpected_errors += 1
        log.error(
            "unexpected_error", request=type(request).__name__,
            session=client.session.session_id if client is not None else 0,
            error=repr(error), exc_info=error,
        )  # fmt: skip
        return self._refuse(
            client,
            request,
            InternalError(
                f"the daemon met a bug in {type(request).__name__}: {type(error).__name__}",
                remedy="Report it with the daemon's log",
            ),
        )

    def _reply(
        self,
        client: Client | None,
        routing_id: bytes,
        reply: m.Reply,
        request: m.Request | None = None,
    ) -> None:
        if request is not None:
            crash_point(_BEFORE_REPLY[type(request)])
        result = self._send(routing_id, m.encode(reply))
        if result is SendResult.SENT:
            if request is not None:
                crash_point(_AFTER_REPLY[type(request)])
            return
        metrics = self._state.metrics
        if result is SendResult.NOT_READ:
            metrics.replies_dropped += 1
            if client is not None:
                client.session.statistics.dropped_replies += 1
            return
        metrics.replies_unroutable += 1
        known = self._state.clients.get(routing_id)
        if known is not None:
            end_session(self._state, known, DeathCause.DISCONNECTED)


class SendResult(enum.Enum):
    """What became of a reply."""

    SENT = "sent"
    NOT_READ = "not_read"
    """The peer's queue is full: it does not read."""
    GONE = "gone"
    """There is no such peer any more."""
