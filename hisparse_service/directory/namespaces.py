"""One namespace: its blocks, and whom they are charged to.

Joins what must change together: block states (`blocks.py`), the leases that hold them, the use of
quotas, the totals, and the events. Each method either raises before it changed anything or does all
of it. Only `directory/` calls it, on the control loop.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hisparse_service.contract.errors import CapacityError, QuotaExceeded, UsageError
from hisparse_service.contract.ids import NO_SESSION, NamespaceId
from hisparse_service.contract.keys import key_space
from hisparse_service.directory.blocks import NO_BLOCKS, BlockDirectory
from hisparse_service.directory.index import Blocks
from hisparse_service.directory.leases import Lease, SessionAccount
from hisparse_service.directory.results import (
    Audience,
    DirectoryEvent,
    EventKind,
    EventSink,
    NamespaceInfo,
    Quota,
    Statistics,
    U32Array,
    Usage,
    WriterLease,
)


class Quotas:
    """The limits in force; one object that all namespaces share, so that a change acts at once."""

    def __init__(self, session: Quota, namespace: Quota) -> None:
        self.session = session
        self.namespace = namespace
        self.limits_blocks = False
        """Whether reserved blocks or pins are limited at all."""
        self.change()

    def change(self, *, session: Quota | None = None, namespace: Quota | None = None) -> None:
        """Put others in force."""
        self.session = session or self.session
        self.namespace = namespace or self.namespace
        self.limits_blocks = any(
            limit is not None
            for quota in (self.session, self.namespace)
            for limit in (quota.max_reserved_blocks, quota.max_pins)
        )

    def check(
        self, session: Usage, namespace: Usage, *, reserved: int = 0, pins: int = 0, leases: int = 0
    ) -> None:
        """Whether so much more may be held.

        Raises:
            QuotaExceeded: No. Details: limit_name, limit, value (what it would become).
        """
        for of, usage, quota in (
            ("session", session, self.session),
            ("namespace", namespace, self.namespace),
        ):
            if reserved and quota.max_reserved_blocks is not None:
                _check(of, "reserved blocks", usage.reserved_blocks, reserved,
                       quota.max_reserved_blocks)  # fmt: skip
            if pins and quota.max_pins is not None:
                _check(of, "pins", usage.pins, pins, quota.max_pins)
            if leases and quota.max_leases is not None:
                _check(of, "leases", usage.leases, leases, quota.max_leases)


def _check(of: str, what: str, used: int, more: int, limit: int) -> None:
    if used + more > limit:
        raise QuotaExceeded(
            f"{more} more {what} on top of {used} pass the {of}'s limit of {limit}",
            remedy="Release leases that are not needed, or raise the limit",
            limit_name=f"{of} {what}",
            limit=limit,
            value=used + more,
            needed=more,
            free=max(0, limit - used),
        )


def as_u32(blocks: Blocks) -> U32Array:
    """Block ids as they travel."""
    return blocks.astype(np.uint32)


class Namespace:
    """One namespace of the directory.

    Args:
        namespace: Its id.
        fingerprint: 16 B.
        name: For people.
        block_size: Tokens a block.
        quotas: Shared.
        event_sink: Called after changes are complete.
        audience: Of the sink.
    """

    def __init__(
        self,
        namespace: NamespaceId,
        fingerprint: bytes,
        *,
        name: str,
        block_size: int,
        quotas: Quotas,
        event_sink: EventSink | None,
        audience: Audience,
    ) -> None:
        self.namespace = namespace
        self.fingerprint = fingerprint
        self.name = name
        self.block_size = block_size
        self.key_space = key_space(fingerprint)
        self.quotas = quotas
        self.usage = Usage()
        self.statistics = Statistics()
        self.writers: dict[str, WriterLease] = {}
        self.attached: BlockDirectory | None = None
        self._event_sink = event_sink
        self.audience = audience

    @property
    def blocks(self) -> BlockDirectory:
        """The blocks.

        Raises:
            UsageError: No backing is attached.
        """
        if self.attached is None:
            raise UsageError(
                f"namespace {self.namespace} has no backing yet",
                remedy="Allocate its backing first",
                namespace=self.namespace,
            )
        return self.attached

    def info(self) -> NamespaceInfo:
        """For operators."""
        return NamespaceInfo(
            self.namespace, self.fingerprint, self.name, self.block_size, self.attached is not None
        )

    # --- quota ------------------------------------------------------------------------------

    def check_quota(
        self, account: SessionAccount, *, reserved: int = 0, pins: int = 0, leases: int = 0
    ) -> None:
        """See `Quotas.check`."""
        # `leases` is often given as whether one is needed; numbers go onto the wire.
        self.quotas.check(
            account.usage, self.usage, reserved=reserved, pins=pins, leases=int(leases)
        )

    def has_room(
        self, account: SessionAccount, *, reserved: int = 0, pins: int = 0, leases: int = 0
    ) -> bool:
        """Whether `check_quota` would let so much pass."""
        try:
            self.check_quota(account, reserved=reserved, pins=pins, leases=leases)
        except QuotaExceeded:
            return False
        return True

    def charge(self, lease: Lease, *, reserved: int = 0, pins: int = 0, leases: int = 0) -> None:
        """Add to (or take from) what the lease's session and the namespace use.

        Not to the namespace what is only kept until its owner takes it back: that would be refused
        where both together pass the quota.
        """
        is_kept = lease.account.session_id == NO_SESSION
        for usage in (lease.account.usage,) if is_kept else (lease.account.usage, self.usage):
            usage.reserved_blocks += reserved
            usage.pins += pins
            usage.leases += leases

    # --- write part of a lease --------------------------------------------------------------

    def make_room(self, num_blocks: int) -> None:
        """Evict until `num_blocks` are free.

        Raises:
            CapacityError: That cannot be had; nothing was evicted.
        """
        blocks = self.blocks
        missing = num_blocks - blocks.num_free
        if missing <= 0:
            return
        victims = blocks.evict(missing)
        if victims is None:
            counts = blocks.counts()
            raise CapacityError(
                f"{num_blocks} blocks are needed, {counts.free} are free and at most "
                f"{counts.published} of {counts.capacity} can be evicted",
                remedy="Retry when leases were released, or enlarge the pool",
                needed=num_blocks,
                free=counts.free,
                evictable=counts.published,
            )
        self.statistics.evictions += len(victims)
        self.emit(EventKind.EVICTED, victims, blocks.columns.keys_of(victims).tobytes())

    def reserve_into(self, lease: Lease, num_blocks: int) -> Blocks:
        """Reserve blocks, for which there is room."""
        reserved = self.blocks.reserve(num_blocks, holder=lease.lease_id)
        lease.reserved.update(reserved.tolist())
        self.charge(lease, reserved=num_blocks)
        return reserved

    def give_back(self, lease: Lease, blocks: Blocks) -> None:
        """Blocks that the lease reserved become free."""
        if blocks.size:
            self.blocks.give_back(blocks)
            lease.reserved.difference_update(blocks.tolist())
            self.charge(lease, reserved=-len(blocks))
            self.statistics.abandoned += len(blocks)

    def hand_over(self, old: Lease, new: Lease, blocks: Blocks) -> None:
        """Blocks that one lease reserved become another's."""
        self.blocks.hand_over(blocks, holder=new.lease_id)
        moved = blocks.tolist()
        old.reserved.difference_update(moved)
        new.reserved.update(moved)
        self.charge(old, reserved=-len(moved))
        self.charge(new, reserved=len(moved))

    # --- read part of a lease ---------------------------------------------------------------

    def pin_into(self, lease: Lease, blocks: Blocks, *, tick: int) -> None:
        """Pin published blocks (distinct); those that the lease pins already stay so.

        Raises:
            QuotaExceeded: Too many pins.
        """
        self.pin_new_into(lease, self.not_pinned_by(lease, blocks), tick=tick)

    def not_pinned_by(self, lease: Lease, blocks: Blocks) -> Blocks:
        """Those of `blocks` (distinct, published) that the lease does not pin."""
        if not len(lease.pins):
            return blocks
        # What nobody reads this lease does not read: spares most blocks the look into its set.
        is_read = self.blocks.columns.readers[blocks] != 0
        if not is_read.any():
            return blocks
        missing = lease.pins.missing(blocks[is_read])
        return np.concatenate((blocks[~is_read], missing))

    def pin_new_into(self, lease: Lease, blocks: Blocks, *, tick: int) -> None:
        """Pin published blocks (distinct) that the lease does not pin.

        Raises:
            QuotaExceeded: Too many pins.
        """
        if blocks.size:
            if self.quotas.limits_blocks:
                self.check_quota(lease.account, pins=len(blocks))
            self.blocks.pin(blocks, tick=tick)
            lease.pins.add(blocks)
            self.charge(lease, pins=len(blocks))

    def unpin_from(self, lease: Lease, blocks: Blocks) -> None:
        """Drop pins (distinct) that the lease holds."""
        if blocks.size:
            lease.pins.remove(blocks)
            self._unpin(lease, blocks)

    def unpin_all(self, lease: Lease) -> int:
        """Drop all pins of a lease; how many."""
        blocks = lease.pins.drain() if len(lease.pins) else NO_BLOCKS
        self._unpin(lease, blocks)
        return len(blocks)

    def _unpin(self, lease: Lease, blocks: Blocks) -> None:
        self.blocks.unpin(blocks, tick=self.blocks.next_tick())
        self.charge(lease, pins=-len(blocks))

    def end_holdings(self, lease: Lease) -> tuple[int, int]:
        """Give back all that a lease holds: (unpublished blocks, pins)."""
        reserved = as_blocks(lease.reserved)
        self.give_back(lease, reserved)
        return len(reserved), self.unpin_all(lease)

    # --- giving up published blocks ---------------------------------------------------------

    def drop_unused(self, blocks: Blocks) -> Blocks:
        """Give up those that nobody needs; the caller counts."""
        gone = self.blocks.drop_unused(blocks)
        self.emit(EventKind.EVICTED, gone, self.blocks.columns.keys_of(gone).tobytes())
        return gone

    def withdraw(self, blocks: Blocks) -> None:
        """Take published blocks away from everybody; see `BlockDirectory.withdraw`."""
        keys = self.blocks.columns.keys_of(blocks).tobytes()
        self.blocks.withdraw(blocks)
        self.statistics.withdrawn += len(blocks)
        self.emit(EventKind.EVICTED, blocks, keys)

    def evict_up_to(self, num_blocks: int) -> Blocks:
        """Give up the least recently used, at most so many."""
        gone = self.blocks.evict_up_to(num_blocks)
        self.emit(EventKind.EVICTED, gone, self.blocks.columns.keys_of(gone).tobytes())
        return gone

    def emit_one(self, kind: EventKind, block: int) -> None:
        """`emit` of one block, whose key still stands in its row."""
        blocks = as_blocks([block])
        self.emit(kind, blocks, self.blocks.columns.keys_of(blocks).tobytes())

    def emit(self, kind: EventKind, blocks: Blocks, keys: bytes) -> None:
        """Tell the event sink."""
        if self._event_sink is not None and len(blocks) and self.audience.is_there:
            self._event_sink(DirectoryEvent(kind, self.namespace, as_u32(blocks), keys))


def as_blocks(blocks: Iterable[int]) -> Blocks:
    """A set or list of ids as an array."""
    return np.array(list(blocks), np.intp)
