"""The beginning and the end of a session, whatever noticed it: one way in, one way out.

What a session held goes back in one order: its running requests, its blocks, pins and leases, its
registration turns and offered events, the namespaces that only it had opened, its pid watch, the
session. Control loop only.
"""

from __future__ import annotations

import time

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    NotReady,
    ProtocolMismatch,
    QuotaExceeded,
    UnknownSession,
)
from hisparse_service.directory.results import SessionEnd, UnpublishedBlocks
from hisparse_service.membership.credentials import Authoriser, parse_peer_address
from hisparse_service.membership.liveness import WatchResult
from hisparse_service.membership.sessions import DeathCause, Identity
from hisparse_service.server.state import Client, Phase, Quarantine, ServerState
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.workers import Identity as WorkerIdentity

MAX_COUNTERS_PER_SESSION = 256

log = get_logger()


def hello_reply(state: ServerState, client: Client, request_id: int) -> m.HelloReply:
    """What a session is told of the daemon."""
    options = state.options
    return m.HelloReply(
        request_id=request_id, epoch=options.epoch, protocol=client.session.identity.version,
        session_id=client.session.session_id, heartbeat_interval_s=options.heartbeat_interval_s,
        session_timeout_s=options.session_timeout_s, instance=options.instance,
        daemon_version=options.daemon_version, events_endpoint=options.events_endpoint,
    )  # fmt: skip


def begin_session(
    state: ServerState,
    authoriser: Authoriser,
    hello: m.Hello,
    *,
    routing_id: bytes,
    peer_address: str,
    connection_fd: int,
    now_s: float,
) -> Client:
    """Make the session of a connection, ALIVE.

    A repeated Hello (its reply was lost) gets the session that is there, if that holds nothing.

    Raises:
        NotAuthorised: The kernel's credentials are missing or not allowed.
        ProtocolMismatch: No common version.
        NotReady: The daemon drains.
        QuotaExceeded: Too many sessions.
        UnknownSession: The peer is gone already: nobody reads this.
        UsageError: The connection has a session with another identity.
    """
    credentials = parse_peer_address(peer_address)
    authoriser.check(credentials)
    version = negotiate(hello)
    known = state.clients.get(routing_id)
    if known is not None and _same_identity(known.hello, hello):
        if not _holds_leases(state, known):
            return known
        # It attaches anew and asks for what it held by handle: kept under the old leases, that
        # would be there twice.
        end_session(state, known, DeathCause.REPLACED)
    if state.phase is not Phase.STARTING and state.phase is not Phase.READY and not hello.operator:
        raise draining(state)
    if connection_fd in state.ended_connections:
        raise UnknownSession("the connection ended before its Hello was read")
    _end_predecessor(state, connection_fd, routing_id)
    session = state.sessions.create(
        routing_id,
        credentials,
        Identity(
            name=hello.client_name, group=hello.group, rank=hello.rank,
            world_size=hello.world_size, device_uuid=hello.device_uuid, version=version,
        ),
        now_s=now_s,
    )  # fmt: skip
    client = Client(
        session=session, peer_address=peer_address, connection_fd=connection_fd,
        is_operator=hello.operator, hello=hello,
    )  # fmt: skip
    state.clients[routing_id] = client
    state.by_session[session.session_id] = client
    state.by_connection[connection_fd] = routing_id
    if state.loaded_directory is not None:
        state.directory.open_session(
            session.session_id, group=hello.group, rank=hello.rank,
            delegates_copies=hello.delegates_copies,
        )  # fmt: skip
    watched = state.watcher.watch(session.session_id, credentials.pid)
    state.sessions.welcome(session)
    state.metrics.sessions_total += 1
    tell = log.debug if hello.operator else log.info
    tell(
        "session_opened", session=session.session_id, pid=credentials.pid, uid=credentials.uid,
        client=hello.client_name, group=hello.group, rank=hello.rank, operator=hello.operator,
        pid_watched=watched is WatchResult.WATCHED,
    )  # fmt: skip
    if watched is WatchResult.GONE:
        end_session(state, client, DeathCause.PROCESS_ENDED)
        raise UnknownSession("the process ended before its Hello was read")
    return client


def end_session(state: ServerState, client: Client, cause: DeathCause) -> None:
    """Give back all that a session held. Idempotent."""
    session = client.session
    if not state.sessions.mark_dead(session, cause):
        return
    for pending in client.pending:
        if pending.work is not None:
            pending.work.cancel()
    client.pending.clear()
    ended = SessionEnd(0, 0, 0, ())
    if state.loaded_directory is not None:
        may_live = _may_live(state, session.session_id, cause)
        ended = state.directory.session_died(
            session.session_id, now_s=time.monotonic(),
            unpublished=(
                UnpublishedBlocks.QUARANTINE if may_live else UnpublishedBlocks.RETURN
            ),
        )  # fmt: skip
    state.devices.session_ended(
        session.session_id, now_s=time.monotonic(),
        may_live=cause in (DeathCause.TIMED_OUT, DeathCause.REPLACED),
    )  # fmt: skip
    for entry in list(state.namespaces.values()):
        if session.session_id in entry.turns:
            entry.turns.remove(session.session_id)
        entry.withdraw_events(client.hello.group, session.session_id)
        entry.openers.discard(session.session_id)
        is_kept = state.devices.keeps(entry.namespace_id)
        if entry.backing is None and not entry.openers and not is_kept:
            drop_namespace(state, entry.namespace_id)
    if ended.quarantine:
        state.quarantine[session.session_id] = Quarantine(
            client.connection_fd, list(ended.quarantine)
        )
    else:
        state.watcher.unwatch(session.session_id)
    state.clients.pop(session.routing_id, None)
    state.by_session.pop(session.session_id, None)
    if state.by_connection.get(client.connection_fd) == session.routing_id:
        del state.by_connection[client.connection_fd]
    state.sessions.forget(session)
    state.metrics.count_death(cause.value)
    state.metrics.workers.ended(session.session_id, _worker_of(client))
    tell = log.debug if client.is_operator else log.info
    tell(
        "session_ended", session=session.session_id, cause=cause.value,
        returned_blocks=ended.returned_blocks, dropped_pins=ended.dropped_pins,
        quarantined_blocks=ended.quarantined_blocks,
    )  # fmt: skip


def log_operator_request(client: Client, request: m.Request) -> None:
    """Who changed something. Commands that only ask leave no line: scripts run them all day."""
    match request:
        case m.Evict() | m.Drain() | m.ReleaseDeviceBacking():
            changes = True
        case m.SetLimits():
            changes = request != m.SetLimits(request.request_id)
        case m.Trace():
            changes = request.action != "look"
        case _:
            changes = False
    if changes:
        credentials = client.session.credentials
        log.info(
            "operator_request", request=type(request).__name__, pid=credentials.pid,
            uid=credentials.uid, session=client.session.session_id,
        )  # fmt: skip


def _may_live(state: ServerState, session_id: int, cause: DeathCause) -> bool:
    """Whether the process may go on copying into what it reserved.

    Silence proves nothing: a process that was stopped goes on when it continues. Nor does a closed
    connection: one that broke is made again, and of a killed process with much pinned memory the
    kernel may close the socket long before it ends the last copy. Its pid tells, where it is seen.
    """
    if cause is DeathCause.DISCONNECTED:
        return state.watcher.watches(session_id)
    return cause in (DeathCause.TIMED_OUT, DeathCause.REPLACED)


def end_process(state: ServerState, session_id: int) -> None:
    """A watched process ended."""
    client = state.by_session.get(session_id)
    if client is not None:
        end_session(state, client, DeathCause.PROCESS_ENDED)
    else:
        end_quarantine(state, session_id)


def end_quarantine(state: ServerState, session_id: int) -> None:
    """A process whose session ended before it did is dead now. Unknown ids are ignored."""
    quarantine = state.quarantine.pop(session_id, None)
    if quarantine is not None:
        state.watcher.unwatch(session_id)
        returned = state.directory.end_quarantine(quarantine.lease_ids)
        log.info("quarantine_ended", session=session_id, returned_blocks=returned)


def drop_namespace(state: ServerState, namespace_id: int) -> None:
    """Forget a namespace without a backing: it is in nobody's way, and ids are few."""
    state.devices.namespace_gone(namespace_id)
    entry = state.namespaces.pop(namespace_id)
    del state.by_fingerprint[entry.fingerprint]
    state.directory.drop_namespace(namespace_id)


def end_connection(state: ServerState, connection_fd: int) -> None:
    """The monitor says that this connection closed."""
    routing_id = state.by_connection.get(connection_fd)
    client = state.clients.get(routing_id) if routing_id is not None else None
    if client is not None:
        end_session(state, client, DeathCause.DISCONNECTED)
    for session_id, quarantine in list(state.quarantine.items()):
        if quarantine.connection_fd == connection_fd and not state.watcher.watches(session_id):
            end_quarantine(state, session_id)


def negotiate(hello: m.Hello) -> int:
    """The highest version that both sides speak.

    Raises:
        ProtocolMismatch: There is none.
    """
    low = max(hello.protocol_min, limits.PROTOCOL_MIN)
    high = min(hello.protocol_max, limits.PROTOCOL_MAX)
    if low > high:
        raise ProtocolMismatch(
            f"the client speaks versions {hello.protocol_min} to {hello.protocol_max}, this daemon "
            f"{limits.PROTOCOL_MIN} to {limits.PROTOCOL_MAX}",
            remedy="Upgrade the older of the two",
            client_min=hello.protocol_min, client_max=hello.protocol_max,
            daemon_min=limits.PROTOCOL_MIN, daemon_max=limits.PROTOCOL_MAX,
        )  # fmt: skip
    return high


def keep_counters(state: ServerState, client: Client, counters: dict[str, float]) -> None:
    """Remember what a worker reports of itself, up to a bound, and add it to the node's sums.

    Raises:
        QuotaExceeded: More names than are kept.
    """
    if len(counters) > MAX_COUNTERS_PER_SESSION:
        raise QuotaExceeded(
            f"{len(counters)} counters in a heartbeat, the limit is {MAX_COUNTERS_PER_SESSION}",
            remedy="Report fewer",
            limit=MAX_COUNTERS_PER_SESSION, value=len(counters),
        )  # fmt: skip
    client.counters = counters
    if not client.is_operator:
        state.metrics.workers.report(client.session.session_id, _worker_of(client), counters)


def _worker_of(client: Client) -> WorkerIdentity:
    hello = client.hello
    pid = client.session.credentials.pid
    return pid, hello.client_name, hello.group, hello.rank


def draining(state: ServerState) -> NotReady:
    """The error for what a draining daemon no longer does."""
    return NotReady(
        "the daemon is draining: it takes no new session and gives out nothing new",
        remedy="Connect to its successor, or wait until it is started again",
        progress=state.progress,
    )


def _same_identity(left: m.Hello, right: m.Hello) -> bool:
    return all(
        getattr(left, name) == getattr(right, name)
        for name in ("client_name", "group", "rank", "world_size", "device_uuid", "operator")
    )


def _holds_leases(state: ServerState, client: Client) -> bool:
    if state.loaded_directory is None:
        return False
    return state.directory.session_usage(client.session.session_id).leases > 0


def _end_predecessor(state: ServerState, connection_fd: int, routing_id: bytes) -> None:
    """A descriptor has one connection: an older session with this one's number is gone."""
    older = state.by_connection.get(connection_fd)
    if older is not None and older != routing_id:
        end_connection(state, connection_fd)
