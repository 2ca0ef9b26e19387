"""What the control loop knows: the service's phase, its clients, its namespaces and their backings.

Plain data that the request handlers share. Everything here belongs to the control loop's thread; a
helper thread hands over through `loop.call_soon`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hisparse_service.contract import messages as m
from hisparse_service.contract.geometry import HostGeometry
from hisparse_service.contract.ids import LeaseId
from hisparse_service.directory.directory import Directory
from hisparse_service.membership.liveness import PidWatcher
from hisparse_service.membership.sessions import Session, SessionTable
from hisparse_service.pool.pool import Backing, Pool
from hisparse_service.server.block_checks import BlockChecks
from hisparse_service.server.device_backings import DeviceBackings
from hisparse_service.server.events import EventPublisher
from hisparse_service.server.refusals import RefusalLog
from hisparse_service.telemetry.metrics import ServerMetrics
from hisparse_service.telemetry.recorder import TraceRecorder
from hisparse_service.telemetry.taps import MessageTap

_NOTHING = b"\x80"  # an empty map


class Phase(enum.Enum):
    """What the service does. STARTING -> READY -> DRAINING -> STOPPED, each also -> STOPPED."""

    STARTING = "starting"
    """The pool is created or adopted, and populated; Hello, Ping and Status are answered."""
    READY = "ready"
    DRAINING = "draining"
    """No new session, nothing reserved; what is held may be finished and given back."""
    STOPPED = "stopped"


class LongRequest(Protocol):
    """A request that is carried out in slices, so that others are served in between."""

    def step(self) -> bool:
        """Do one slice; True when `finish` may be called."""

    def finish(self, now_s: float) -> m.Reply:
        """The reply."""

    def cancel(self) -> None:
        """Its client is gone. Idempotent."""


class AwaitsHelper(LongRequest):
    """Base of long requests that wait for a helper thread: not stepped before it has answered."""

    def __init__(self) -> None:
        self.is_ready = False
        self.resume: Callable[[], None] = lambda: None
        """Called on the loop once `is_ready`; the dispatcher's."""

    def step(self) -> bool:
        """Whether the helper has answered."""
        return self.is_ready


@dataclass(slots=True, eq=False)
class Pending:
    """A request that waits behind a long one of its own session."""

    request: m.Request
    received_s: float
    frame_bytes: int
    work: LongRequest | None = None
    """Set once it was begun."""


@dataclass(slots=True, eq=False)
class Client:
    """A connection with a session, beside what `membership` knows of it."""

    session: Session
    peer_address: str
    """As the kernel gave it at Hello; a frame with another one is from somebody else."""
    connection_fd: int
    is_operator: bool
    hello: m.Hello
    pending: deque[Pending] = field(default_factory=deque)
    """In order of arrival; at most MAX_IN_FLIGHT_PER_SESSION."""
    counters: dict[str, float] = field(default_factory=dict)
    """The worker's own, of its last heartbeat."""


@dataclass(slots=True, frozen=True)
class EventOffer:
    """CUDA IPC event handles of a group's writer. Bytes: the daemon never opens them."""

    session_id: int
    device_uuid: str
    handles: bytes
    number: int


@dataclass(slots=True, eq=False)
class NamespaceEntry:
    """A namespace's geometry, and its backing once it has one."""

    namespace_id: int
    fingerprint: bytes
    name: str
    geometry: HostGeometry
    geometry_blob: bytes
    key_space: bytes
    """8 B tag that keyed requests must carry."""
    backing: Backing | None = None
    is_adopted: bool = False
    made_by: int = 0
    """Session that the backing was made for; every other one finds it there."""
    openers: set[int] = field(default_factory=set)
    """Live sessions that opened it; without any and without a backing it is dropped."""
    turns: deque[int] = field(default_factory=deque)
    """Sessions that register or wait to; the first has the turn."""
    event_offers: dict[str, EventOffer] = field(default_factory=dict)
    """By group; each of the session that was its writer then."""
    num_event_offers: int = 0
    """Made since the daemon started: numbers them."""

    def withdraw_events(self, group: str, session_id: int) -> None:
        """The session ended, or is the group's writer no more. Idempotent."""
        offer = self.event_offers.get(group)
        if offer is not None and offer.session_id == session_id:
            del self.event_offers[group]


@dataclass(slots=True, frozen=True)
class Quarantine:
    """Unpublished blocks of a session that ended while its process may live."""

    connection_fd: int
    lease_ids: list[LeaseId]


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerOptions:
    """What does not change while the daemon runs."""

    instance: str
    daemon_version: str
    epoch: int
    events_endpoint: str
    heartbeat_interval_s: float
    session_timeout_s: float
    lease_ttl_s: float
    started_s: float
    config_path: str = ""
    """Of the settings file; empty without one."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Settings of the command line, by dotted name: a successor by `handover` gets them too."""
    runtime_dir: str = ""
    pool_bytes: int = 0
    """As the settings say; a pool that was adopted may have another size."""


@dataclass(slots=True, eq=False)
class ServerState:
    """Everything that handlers read and change."""

    options: ServerOptions
    sessions: SessionTable
    watcher: PidWatcher
    events: EventPublisher
    metrics: ServerMetrics
    begin_drain: Callable[[float, bool], None]
    """Drain with a deadline (monotonic) and whether to stop at its end."""
    recorder: TraceRecorder
    describe_helpers: Callable[[], dict[str, object]] = dict
    describe_cuda: Callable[[], dict[str, object]] = dict
    """Of the child that registers the pool; empty without one."""
    describe_http: Callable[[], dict[str, object]] = dict
    """Where the HTTP service listens."""
    overview: Callable[[], bytes] = lambda: _NOTHING
    """What `Overview` is answered with, as MessagePack. Never waits."""
    taps: tuple[MessageTap, ...] = ()
    """Who is given a copy of each message and its reply."""
    limits: dict[str, int] = field(default_factory=dict)
    """In force, by the names of `SetLimits`."""
    pool: Pool | None = None
    loaded_directory: Directory | None = None
    """None while STARTING: until then it belongs to the thread that opens the pool."""
    phase: Phase = Phase.STARTING
    keeps_pool: bool = False
    """At the end the pool stays, with or without workers: a successor waits for it."""
    successor_pid: int = 0
    """Of that successor, as `Drain` says it; 0: not told."""
    progress: float = 0.0
    """Of population, 0 to 1."""
    clients: dict[bytes, Client] = field(default_factory=dict)
    """By routing id."""
    by_session: dict[int, Client] = field(default_factory=dict)
    by_connection: dict[int, bytes] = field(default_factory=dict)
    """Routing id by number of the connection."""
    quarantine: dict[int, Quarantine] = field(default_factory=dict)
    """By the id of the session that ended; its pid stays watched."""
    ended_connections: set[int] = field(default_factory=set)
    """Numbers of connections that ended and were not taken by a new one since."""
    namespaces: dict[int, NamespaceEntry] = field(default_factory=dict)
    by_fingerprint: dict[bytes, NamespaceEntry] = field(default_factory=dict)
    devices: DeviceBackings = field(default_factory=DeviceBackings)
    """Device memory that outlives the workers; switched off unless the daemon gives it."""
    checks: BlockChecks = field(default_factory=BlockChecks)
    """Blocks that readers reported as damaged."""
    refusals: RefusalLog = field(default_factory=RefusalLog)
    """What is refused at the door, for the log."""

    @property
    def directory(self) -> Directory:
        """The directory; only after STARTING."""
        assert self.loaded_directory is not None, "the pool is not open yet"
        return self.loaded_directory

    @property
    def num_workers(self) -> int:
        """Sessions that are not operators."""
        return sum(not client.is_operator for client in self.clients.values())
