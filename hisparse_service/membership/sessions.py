"""The table of sessions: who is connected, since when, and when it was last heard.

Only the control loop calls it. Time comes with each call, from one monotonic clock; nothing here
waits. It knows nothing of blocks: whoever marks a session dead gives back what it held, then
forgets it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from hisparse_service.contract.errors import QuotaExceeded, UnknownSession, UsageError
from hisparse_service.contract.ids import SessionId
from hisparse_service.contract.limits import MAX_SESSIONS, SESSION_TIMEOUT_S
from hisparse_service.membership.credentials import Credentials
from hisparse_service.membership.states import SessionEvent, SessionState, next_session_state


class DeathCause(enum.Enum):
    """How a session's end was noticed."""

    BYE = "bye"
    PROCESS_ENDED = "process_ended"
    """Its pidfd fired."""
    DISCONNECTED = "disconnected"
    """Its socket closed."""
    TIMED_OUT = "timed_out"
    """Silent for longer than the time-out: the last resort."""
    REPLACED = "replaced"
    """Its connection said Hello again: the client does not know any more what it held."""
    EVICTED = "evicted"
    """The daemon or an operator ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a client says of itself in its Hello. Not proven: rights come from the credentials."""

    name: str = ""
    """For people."""
    group: str = ""
    """Tensor-parallel group; empty: a group of its own."""
    rank: int = 0
    world_size: int = 1
    device_uuid: str = ""
    version: int = 0
    """Negotiated protocol version."""


@dataclass(slots=True)
class SessionStatistics:
    """Totals of one session; the server counts."""

    messages: int = 0
    message_bytes: int = 0
    errors: int = 0
    """Requests that were answered with an error."""
    malformed: int = 0
    dropped_replies: int = 0
    """Replies that could not be queued because the client does not read."""


@dataclass(slots=True, eq=False)
class Session:
    """One connected client process. Only `SessionTable` changes its state."""

    session_id: SessionId
    routing_id: bytes
    """The ROUTER's name of the connection."""
    credentials: Credentials
    identity: Identity
    created_s: float
    last_seen_s: float
    state: SessionState = SessionState.STARTING
    death_cause: DeathCause | None = None
    statistics: SessionStatistics = field(default_factory=SessionStatistics)

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state < SessionState.DEAD


class SessionTable:
    """All sessions of one daemon.

    Args:
        timeout_s: Silence after which a session is dead.
        max_sessions: How many may be connected at once (dead ones that are not forgotten count).
    """

    def __init__(
        self, *, timeout_s: float = SESSION_TIMEOUT_S, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self._timeout_s = timeout_s
        self.max_sessions = max_sessions
        """May be changed; who is connected stays."""
        self._next_id = 1
        self._by_id: dict[int, Session] = {}
        self._by_routing_id: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    @property
    def timeout_s(self) -> float:
        """Silence after which a session is dead."""
        return self._timeout_s

    def create(
        self, routing_id: bytes, credentials: Credentials, identity: Identity, *, now_s: float
    ) -> Session:
        """Begin a session (STARTING) on a connection.

        Raises:
            QuotaExceeded: max_sessions are connected.
            UsageError: The connection has a live session already.
        """
        if routing_id in self._by_routing_id:
            holder = self._by_routing_id[routing_id]
            raise UsageError(
                f"this connection is session {holder.session_id} already",
                remedy="Say Bye first, or connect again",
                session=holder.session_id,
            )
        if len(self._by_id) >= self.max_sessions:
            raise QuotaExceeded(
                f"{len(self._by_id)} sessions are connected, the limit is {self.max_sessions}",
                remedy="End clients that are not needed, or retry later",
                limit=self.max_sessions,
                value=len(self._by_id),
            )
        session = Session(
            session_id=SessionId(self._next_id),
            routing_id=routing_id,
            credentials=credentials,
            identity=identity,
            created_s=now_s,
            last_seen_s=now_s,
        )
        self._next_id += 1
        self._by_id[session.session_id] = session
        self._by_routing_id[routing_id] = session
        return session

    def find(self, routing_id: bytes) -> Session:
        """The live session of a connection.

        Raises:
            UnknownSession: There is none (any more).
        """
        session = self._by_routing_id.get(routing_id)
        if session is None:
            raise UnknownSession(
                "this connection has no session", remedy="Say Hello again: the client does so alone"
            )
        return session

    def get(self, session_id: int) -> Session:
        """A session that is not forgotten, dead ones included.

        Raises:
            UnknownSession: There is none (any more).
        """
        session = self._by_id.get(session_id)
        if session is None:
            raise UnknownSession(f"no session {session_id}", session=session_id)
        return session

    def touch(self, session: Session, *, now_s: float) -> None:
        """Note that it was heard. No effect on one that ended."""
        if session.is_live and now_s > session.last_seen_s:
            session.last_seen_s = now_s

    def welcome(self, session: Session) -> None:
        """STARTING -> ALIVE: its Hello is answered.

        Raises:
            IllegalTransition: It is not STARTING.
        """
        self._change(session, SessionEvent.WELCOME)

    def drain(self, session: Session) -> None:
        """ALIVE -> DRAINING.

        Raises:
            IllegalTransition: It is not ALIVE.
        """
        self._change(session, SessionEvent.DRAIN)

    def mark_dead(self, session: Session, cause: DeathCause) -> bool:
        """End it. Its connection may say Hello again at once.

        Returns:
            True the first time; False when it had ended before, so that what it held is given back
            exactly once whatever order pidfd, socket and time-out report in.
        """
        if not session.is_live:
            return False
        self._change(session, SessionEvent.DIE)
        session.death_cause = cause
        del self._by_routing_id[session.routing_id]
        return True

    def forget(self, session: Session) -> None:
        """DEAD -> GONE, after all that it held went back.

        Raises:
            IllegalTransition: It is not DEAD.
        """
        self._change(session, SessionEvent.FORGET)
        del self._by_id[session.session_id]

    def timed_out(self, now_s: float) -> list[Session]:
        """Live sessions that were silent for timeout_s or longer, the longest silent first."""
        late = [
            session
            for session in self._by_id.values()
            if session.is_live and now_s - session.last_seen_s >= self._timeout_s
        ]
        return sorted(late, key=lambda session: session.last_seen_s)

    def next_deadline_s(self) -> float | None:
        """When `timed_out` may next find one; None: no live session. At most MAX_SESSIONS rows."""
        return min(
            (s.last_seen_s + self._timeout_s for s in self._by_id.values() if s.is_live),
            default=None,
        )

    def check_invariants(self) -> None:
        """AssertionError where the two indexes do not agree. For tests."""
        live = {s.routing_id: s for s in self._by_id.values() if s.is_live}
        assert live == self._by_routing_id
        for session_id, session in self._by_id.items():
            assert session.session_id == session_id
            assert session.state is not SessionState.GONE
            assert (session.death_cause is None) == session.is_live

    @staticmethod
    def _change(session: Session, event: SessionEvent) -> None:
        session.state = next_session_state(session.state, event, session=session.session_id)
