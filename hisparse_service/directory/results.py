"""What the directory takes and answers: plain data, arrays instead of lists of ids.

Everything here is read by `server/`, which turns it into messages. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.ids import LeaseId, NamespaceId, SessionId
from hisparse_service.contract.segment import BlockState

U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]


class BackingMode(enum.Enum):
    """What to do with what stands in a block table that is attached."""

    FRESH = "fresh"
    """Forget it: every block becomes free, with a generation that was not used before."""
    ADOPT = "adopt"
    """Keep the published blocks of an earlier daemon, free the rest."""


class UnfinishedBlocks(enum.Enum):
    """What adoption does with blocks that were RESERVED or WRITING."""

    FREE = "free"
    HOLD = "hold"
    """Keep state and generation, for their writer to take them back."""


class EventKind(enum.Enum):
    """Kinds of `DirectoryEvent`."""

    PUBLISHED = "published"
    EVICTED = "evicted"
    """Given up, by eviction or by `free`; or withdrawn, and maybe still read."""


@dataclass(frozen=True, slots=True)
class DirectoryEvent:
    """What the event sink is given, after the change is complete.

    `blocks` is u32 [n], `keys` n * 16 B in the same order. n may exceed MAX_EVENT_BLOCKS: the
    server splits.
    """

    kind: EventKind
    namespace: NamespaceId
    blocks: U32Array
    keys: bytes


@dataclass(slots=True, eq=False)
class Audience:
    """Whether anybody listens to the event sink; whoever sends the events changes it."""

    is_there: bool = True


EventSink = Callable[[DirectoryEvent], None]
"""Called on the control loop; must not call the directory back and must not raise."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one session or of one namespace. None: no limit."""

    max_reserved_blocks: int | None = None
    """Blocks in RESERVED or WRITING."""
    max_pins: int | None = None
    """(lease, block) pairs."""
    max_leases: int | None = None


@dataclass(slots=True)
class Usage:
    """What a session or a namespace uses of its `Quota` now."""

    reserved_blocks: int = 0
    pins: int = 0
    leases: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Where a backing's blocks are: free + reserved + published + pinned == capacity (I6)."""

    capacity: int
    """Blocks without the null block."""
    free: int
    reserved: int
    """RESERVED and WRITING."""
    published: int
    """PUBLISHED without readers."""
    pinned: int
    """PUBLISHED with readers."""


@dataclass(slots=True)
class Statistics:
    """Totals of one namespace since it was opened; only ever grow."""

    lookups: int = 0
    keys_asked: int = 0
    keys_hit: int = 0
    tokens_hit: int = 0
    reserves: int = 0
    """Reserve requests that were granted."""
    blocks_reserved: int = 0
    evictions: int = 0
    """Blocks evicted, by need or by an operator."""
    freed: int = 0
    """Published blocks given up by `free`."""
    publishes: int = 0
    """Blocks published."""
    duplicates_merged: int = 0
    """Blocks whose key was published already: the loser's went back."""
    abandoned: int = 0
    """Unpublished blocks that returned: abandoned, freed, released or their writer died."""
    leases_granted: int = 0
    leases_expired: int = 0
    withdrawn: int = 0
    """Published blocks that were damaged, or hung below such a block."""
    checks: dict[str, int] = field(default_factory=dict)
    """Blocks that readers reported as damaged, by what the check found."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Requests refused, by error code."""


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """What a scan of a block table found."""

    kept: int
    """Published blocks that are back."""
    unfinished: int
    """Blocks that were RESERVED, WRITING or EVICTING: freed, or the first two held."""
    corrupt: int
    """Records with a failed check, an impossible state or a foreign namespace: freed."""
    orphans: int
    """Published blocks without a published parent: freed."""
    duplicates: int
    """Second blocks of one key: freed."""


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace, as an operator or a metric sees it."""

    namespace: NamespaceId
    fingerprint: bytes
    name: str
    block_size: int
    is_attached: bool


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """Granted blocks: u32 [n] each. Never block 0."""

    lease_id: LeaseId
    deadline_s: float
    blocks: U32Array
    generations: U32Array


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The longest published prefix, pinned: u32 [n] each, in the order of the keys.

    n may be 0. When nothing was found and no lease was given, no lease is made: lease_id is 0.
    """

    lease_id: LeaseId
    deadline_s: float
    blocks: U32Array
    generations: U32Array


@dataclass(frozen=True, slots=True)
class PinResult:
    """The lease that holds the pins, and until when."""

    lease_id: LeaseId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class MirrorItem:
    """Blocks of one request, consecutive in its prefix, whose mirrors are enqueued or completed.

    `mirror_enqueued` reads lease_id, blocks and generations alone; the rest may keep its default.
    """

    lease_id: int
    blocks: U32Array
    """u32 [n]"""
    generations: U32Array
    """u32 [n]"""
    keys: bytes = b""
    """n * 16 B"""
    parent: int = 0
    """Block before the first one of this item; 0 where the item begins the prefix."""
    parent_generation: int = 0
    checksums: U64Array | None = None
    """u64 [n], of the payloads; None or length 0: none."""
    keep_duplicates: bool = False
    """See `messages.CompletedItem`."""


@dataclass(frozen=True, slots=True)
class CompletedItem:
    """Where the keys of one `MirrorItem` are published: u32 [n] each, pinned by the item's lease.

    A block other than the item's own is the canonical copy that was there before; the own one is
    free again and must not be written (unless the item kept its duplicates).
    """

    blocks: U32Array
    generations: U32Array


@dataclass(frozen=True, slots=True)
class Suspect:
    """A reported block that has to be compared with what is known of it."""

    block: int
    generation: int
    checksum: int
    """Of its content, never 0."""
    is_record_damaged: bool
    """Its record is not what was stored: readers cannot verify it, whatever its content is."""


@dataclass(frozen=True, slots=True)
class FreeResult:
    """What became of the blocks of a `free`."""

    freed: U32Array
    """Free again. The others stay published: another lease reads them, or longer prefixes do."""


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """What became of the leases of a `release_leases`."""

    lost: list[int]
    """Ids that this session does not hold (any more)."""
    returned_blocks: int
    """Unpublished blocks that became free."""
    dropped_pins: int


@dataclass(slots=True)
class WriterLease:
    """The right to write for a tensor-parallel group in one namespace."""

    namespace: NamespaceId
    group: str
    session: SessionId
    rank: int
    deadline_s: float


class UnpublishedBlocks(enum.Enum):
    """What becomes of blocks that an ended session had reserved."""

    RETURN = "return"
    """Its process is dead: they are free at once."""
    QUARANTINE = "quarantine"
    """Its process may live and copy on: nobody gets them before its death is known, or before a
    long time has passed (I1)."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """What returned when a session ended."""

    returned_blocks: int
    dropped_pins: int
    leases: int
    yielded: Sequence[tuple[NamespaceId, str]]
    """(namespace, group) whose writer lease it held: any rank may take it now."""
    quarantine: Sequence[LeaseId] = ()
    """For `Directory.end_quarantine`."""
    quarantined_blocks: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceEnd:
    """What ended with a namespace."""

    lost_leases: Sequence[tuple[SessionId, LeaseId]]


@dataclass(frozen=True, slots=True)
class ExpiryResult:
    """What `expire` did."""

    next_deadline_s: float | None
    """When to call again; None: nothing is waiting. Never later than a real deadline, but maybe
    earlier (a renewed lease is looked at once more)."""
    expired: Sequence[tuple[SessionId, LeaseId]]
    yielded: Sequence[tuple[NamespaceId, str]]
    """Writer leases that expired."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block, for an operator's listing."""

    block: int
    generation: int
    state: BlockState
    readers: int
    children: int
    depth: int
    last_use: int
    lease_id: int
    """Of the writer; 0 when it is not reserved."""
