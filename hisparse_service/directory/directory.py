"""The facade that the server calls: every request about blocks, leases and writers, validated.

Only the control loop calls it; nothing here waits, reads a clock or touches a socket: `now_s` comes
with the call, from one monotonic clock. Each method checks everything first and changes nothing when
it raises. Sessions must be opened before they ask: an unopened one gets `UnknownSession`.

Errors common to all methods with a session, a namespace or a lease:
    UnknownSession  the session was not opened, or has died
    UsageError      no such namespace, or no backing attached; malformed arguments
    LeaseLost       the lease is unknown, was released, or belongs to another session or namespace
    LeaseExpired    its deadline passed and it still holds reserved blocks (abandon or release it)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy.typing as npt

from hisparse_service.contract.ids import NamespaceId, SessionId
from hisparse_service.contract.limits import LEASE_TTL_S, MAX_LIST_ROWS, WRITER_LEASE_TTL_S
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.results import (
    AdoptionReport,
    BackingMode,
    BlockInfo,
    CompletedItem,
    Counts,
    EventSink,
    ExpiryResult,
    FreeResult,
    LookupResult,
    MirrorItem,
    NamespaceEnd,
    NamespaceInfo,
    PinResult,
    Quota,
    ReleaseResult,
    ReserveResult,
    SessionEnd,
    Statistics,
    U32Array,
    Usage,
    WriterLease,
)


class Lookup:
    """A lookup in slices, so that other clients are served in between.

    Each step pins what it found at once: a block cannot go between two steps. Steps and `finish`
    raise `LeaseLost` when the lease ended meanwhile (expiry, release, death, dropped namespace).
    """

    @property
    def is_done(self) -> bool:
        """Whether `finish` may be called."""
        raise NotImplementedError

    def step(self, max_keys: int) -> bool:
        """Look up at most `max_keys` more keys; True when there is nothing left to do."""
        raise NotImplementedError

    def finish(self, now_s: float) -> LookupResult:
        """The result; the lease's deadline counts from now.

        Raises:
            UsageError: Not done yet.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Give up: drops the lease when this lookup made it. Idempotent."""
        raise NotImplementedError


class Directory:
    """All namespaces of one daemon.

    Args:
        epoch: The daemon's boot id.
        hash_seed: Secret random bits (128), so that no client can choose keys that collide.
        lease_ttl_s: Time to live of leases, from each grant and renewal.
        writer_ttl_s: The same for writer leases.
        session_quota: Limits of each session.
        namespace_quota: Limits of each namespace.
        event_sink: Called after each publication and eviction.
        after_store: Called with the store's name after every single store into a block table. For
            crash points in tests.
    """

    def __init__(
        self,
        *,
        epoch: int,
        hash_seed: int = 0,
        lease_ttl_s: float = LEASE_TTL_S,
        writer_ttl_s: float = WRITER_LEASE_TTL_S,
        session_quota: Quota | None = None,
        namespace_quota: Quota | None = None,
        event_sink: EventSink | None = None,
        after_store: Callable[[str], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The daemon's boot id."""
        raise NotImplementedError

    # --- namespaces ------------------------------------------------------------------------

    def open_namespace(
        self, fingerprint: bytes, *, name: str, block_size: int, namespace: int = 0
    ) -> NamespaceId:
        """The id of the namespace with this fingerprint; opened when it is new. Idempotent.

        Args:
            fingerprint: 16 B.
            name: For people.
            block_size: Tokens a block.
            namespace: The id it must get (adoption); 0 = any.

        Raises:
            QuotaExceeded: MAX_NAMESPACES are open.
            UsageError: The id is taken by another fingerprint, or this one has another id.
        """
        raise NotImplementedError

    def attach_backing(
        self, namespace: int, table: npt.NDArray[Any], *, mode: BackingMode
    ) -> AdoptionReport:
        """Take over the namespace's block table; the directory is its only writer from now on.

        Args:
            namespace: Its id; also stands in each record.
            table: `RECORD_DTYPE` [num_blocks], writable, contiguous. Borrowed until
                `drop_namespace`, which drops every view of it.
            mode: Whether to keep what is published in it.

        Raises:
            UsageError: There is a backing already, or the array is not such a table.
        """
        raise NotImplementedError

    def drop_namespace(self, namespace: int) -> NamespaceEnd:
        """Forget a namespace: revokes its leases and drops all views of its table.

        The table's bytes are left as they are: whoever gives the range out again attaches FRESH.
        """
        raise NotImplementedError

    def namespaces(self) -> list[NamespaceInfo]:
        """All open namespaces, by id."""
        raise NotImplementedError

    # --- sessions and writers ---------------------------------------------------------------

    def open_session(self, session: int, *, group: str = "", rank: int = 0) -> None:
        """Let a session ask. `group`: its tensor-parallel group; empty: a group of its own.

        Raises:
            UsageError: The id is open already.
        """
        raise NotImplementedError

    def session_died(self, session: int) -> SessionEnd:
        """End a session, however it ended: its unpublished blocks return, its pins end, its
        published blocks stay (I9). Unknown or dead sessions are ignored."""
        raise NotImplementedError

    def take_writer(
        self, group: str, namespace: int, session: int, *, rank: int, now_s: float
    ) -> WriterLease:
        """Take, or renew, the writer lease of the session's group in a namespace.

        A session of a group needs it for reserve, mirror_enqueued, mirror_completed and free (they
        raise `LeaseLost` without); a session without a group has it always.

        Raises:
            WriterTaken: Another session holds it. Details: holder_session, holder_rank.
            UsageError: Not the group that the session was opened with.
        """
        raise NotImplementedError

    def yield_writer(self, group: str, namespace: int, session: int) -> None:
        """Give the writer lease back. Idempotent.

        Raises:
            UsageError: Not the group that the session was opened with.
        """
        raise NotImplementedError

    # --- blocks -----------------------------------------------------------------------------

    def reserve(
        self, session: int, namespace: int, num_blocks: int, lease_id: int, *, now_s: float
    ) -> ReserveResult:
        """Blocks to write, evicting least recently used ones when too few are free.

        Args:
            session: Who asks.
            namespace: Where.
            num_blocks: At least 1.
            lease_id: A lease that gets them (renewed by this); 0 makes one.
            now_s: Monotonic time.

        Raises:
            CapacityError: Too few free or evictable blocks; nothing was evicted. Details: needed,
                free, evictable.
            QuotaExceeded: Of the session or the namespace.
            LeaseLost: Also without the group's writer lease.
        """
        raise NotImplementedError

    def begin_lookup(
        self,
        session: int,
        namespace: int,
        key_space: bytes,
        keys: bytes,
        lease_id: int,
        *,
        now_s: float,
    ) -> Lookup:
        """Look up the longest published prefix of `keys` (n * 16 B) and pin it, in slices.

        Args:
            session: Who asks.
            namespace: Where.
            key_space: 8 B tag that the keys were made for.
            keys: Chained keys from the first block on, at most MAX_KEYS.
            lease_id: A lease that gets the pins (renewed by this); 0 makes one.
            now_s: Monotonic time.

        Raises:
            ForeignKeys: The tag is another namespace's.
            QuotaExceeded: No further lease. (Steps raise it for pins; the lookup is cancelled.)
        """
        raise NotImplementedError

    def lookup(
        self,
        session: int,
        namespace: int,
        key_space: bytes,
        keys: bytes,
        lease_id: int,
        *,
        now_s: float,
    ) -> LookupResult:
        """`begin_lookup`, all steps and `finish` at once."""
        raise NotImplementedError

    def pin(
        self,
        session: int,
        namespace: int,
        lease_id: int,
        blocks: U32Array,
        generations: U32Array,
        *,
        now_s: float,
    ) -> PinResult:
        """Pin published blocks by their handles. Pinning twice in a lease counts once.

        Raises:
            StaleBlock: A block is not published with that generation (any more).
            QuotaExceeded: Too many pins or leases.
        """
        raise NotImplementedError

    def unpin(self, session: int, namespace: int, lease_id: int, blocks: U32Array) -> None:
        """Drop pins of a lease.

        Raises:
            NotHeld: A block is not pinned by this lease.
        """
        raise NotImplementedError

    def renew(self, session: int, lease_ids: Iterable[int], *, now_s: float) -> list[int]:
        """Extend leases, and the session's writer leases. Returns the ids that are lost."""
        raise NotImplementedError

    def release_leases(
        self, session: int, lease_ids: Iterable[int], *, now_s: float
    ) -> ReleaseResult:
        """End leases: pins are dropped, blocks that were not published become free."""
        raise NotImplementedError

    def mirror_enqueued(self, session: int, namespace: int, items: Sequence[MirrorItem]) -> None:
        """RESERVED -> WRITING (WRITING stays: a block fills row by row).

        Raises:
            StaleBlock: Wrong generation.
            NotHeld: A block is reserved by another lease (I1).
            IllegalTransition: A block is not reserved.
        """
        raise NotImplementedError

    def mirror_completed(
        self, session: int, namespace: int, items: Sequence[MirrorItem]
    ) -> list[CompletedItem]:
        """Publish: every layer of these blocks is complete (I2). One answer an item, in order.

        Each block becomes a pin of its lease. Where its key is published already, that block is
        pinned instead and the own one becomes free. An item's parent may be a block of an earlier
        item of the batch. The whole batch is checked before anything changes.

        Raises:
            StaleBlock: Wrong generation of a block.
            NotHeld: A block is reserved by another lease (I1).
            IllegalTransition: Published before, or named twice in the batch.
            PublishOutOfOrder: The parent is not published (with that generation), or the key is
                published below another parent.
            QuotaExceeded: Too many pins.
        """
        raise NotImplementedError

    def abandon(
        self, session: int, namespace: int, lease_id: int, blocks: U32Array | None
    ) -> U32Array:
        """Give unpublished blocks back; None: all of the lease's. Returns them, u32 [n].

        Raises:
            NotHeld: A block is not reserved by this lease.
        """
        raise NotImplementedError

    def free(self, session: int, namespace: int, lease_id: int, blocks: U32Array) -> FreeResult:
        """Forget blocks of a lease: reserved ones become free; pinned ones are unpinned and, when
        neither a reader nor a longer prefix needs them, dropped from the index and freed.

        Raises:
            NotHeld: A block is neither reserved nor pinned by this lease.
        """
        raise NotImplementedError

    def evict(
        self, namespace: int, *, num_blocks: int | None = None, blocks: U32Array | None = None
    ) -> U32Array:
        """For operators: give up published blocks that nobody reads.

        Args:
            namespace: Where.
            num_blocks: As many of the least recently used as can go, up to this.
            blocks: These (exactly one of both is given); pinned ones and those with children that
                stay are left out.

        Returns:
            The blocks that went, u32 [n].
        """
        raise NotImplementedError

    def expire(self, now_s: float) -> ExpiryResult:
        """End leases whose deadline passed. Pins are dropped; reserved blocks of a live session are
        kept, because its copies may still be in flight: they return on abandon, free, release or
        death."""
        raise NotImplementedError

    # --- what is where ----------------------------------------------------------------------

    def counts(self, namespace: int) -> Counts:
        """Where the blocks are now."""
        raise NotImplementedError

    def statistics(self, namespace: int) -> Statistics:
        """Live totals: read only."""
        raise NotImplementedError

    def namespace_usage(self, namespace: int) -> Usage:
        """Live use of the namespace's quota: read only."""
        raise NotImplementedError

    def session_usage(self, session: int) -> Usage:
        """Live use of the session's quota: read only."""
        raise NotImplementedError

    def set_session_quota(self, quota: Quota) -> None:
        """Change the limits of each session; what is held already stays."""
        raise NotImplementedError

    def set_namespace_quota(self, quota: Quota) -> None:
        """Change the limits of each namespace; what is held already stays."""
        raise NotImplementedError

    def writers(self, namespace: int) -> list[WriterLease]:
        """Current writer leases of a namespace."""
        raise NotImplementedError

    def list_blocks(
        self,
        namespace: int,
        *,
        states: frozenset[BlockState] | None = None,
        start: int = 1,
        max_rows: int = MAX_LIST_ROWS,
    ) -> list[BlockInfo]:
        """Blocks from id `start` on, of these states (None: all), at most `max_rows`."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Recount everything from scratch; AssertionError where it does not agree. For tests."""
        raise NotImplementedError


__all__ = ["Directory", "Lookup", "SessionId"]
