"""Requests of writers: reserve blocks, publish what was mirrored into them, give them back.

For a single block there is a shorter way (`one_block.py`), with the same rules. Made by
`directory.py`, whose head says what holds for all requests. Control loop only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.limits import MAX_RESERVE_BLOCKS
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.checks import distinct, not_held
from hisparse_service.directory.namespaces import as_blocks, as_u32
from hisparse_service.directory.publish import check_batch_size, check_held, plan_batch
from hisparse_service.directory.registry import Registry, counts_refusals
from hisparse_service.directory.results import (
    CompletedItem,
    FreeResult,
    MirrorItem,
    ReserveResult,
    U32Array,
)
from hisparse_service.directory.states import BlockEvent
from hisparse_service.directory.writers import Writers

# Numbers: numpy is slow with members of enums.
_FREE: Final = int(BlockState.FREE)
_PUBLISHED: Final = int(BlockState.PUBLISHED)


class Writing:
    """Reservations and publications, by who may write.

    Args:
        registry: The sessions, namespaces and leases.
        writers: Who writes for its group.
    """

    def __init__(self, registry: Registry, writers: Writers) -> None:
        self._registry = registry
        self._leases = registry.leases
        self._writers = writers

    @counts_refusals
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
        account, owner = self._writers.require(session, namespace)
        if not 1 <= num_blocks <= MAX_RESERVE_BLOCKS:
            raise UsageError(
                f"{num_blocks} blocks asked for, one request may take 1 to {MAX_RESERVE_BLOCKS}",
                remedy="Reserve in several requests",
                limit=MAX_RESERVE_BLOCKS,
                value=num_blocks,
            )
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        owner.check_quota(account, reserved=num_blocks, leases=lease is None)
        owner.make_room(num_blocks)
        lease = self._registry.renewed(account, owner, lease, now_s)
        blocks = owner.reserve_into(lease, num_blocks)
        owner.statistics.reserves += 1
        owner.statistics.blocks_reserved += num_blocks
        return ReserveResult(
            lease.lease_id,
            lease.deadline_s,
            as_u32(blocks),
            owner.blocks.columns.generation[blocks],
        )

    @counts_refusals
    def mirror_enqueued(self, session: int, namespace: int, items: Sequence[MirrorItem]) -> None:
        """RESERVED -> WRITING (WRITING stays: a block fills row by row).

        Raises:
            StaleBlock: Wrong generation.
            NotHeld: A block is reserved by another lease (I1).
            IllegalTransition: A block is not reserved.
        """
        account, owner = self._writers.require(session, namespace)
        check_batch_size(items)
        checked = [
            check_held(
                owner,
                self._leases.require_live(account, owner.namespace, item.lease_id),
                item,
                BlockEvent.ENQUEUE,
            )
            for item in items
        ]
        for blocks in checked:
            if blocks.size:
                owner.blocks.start_writing(blocks)

    @counts_refusals
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
        account, owner = self._writers.require(session, namespace)
        plan = plan_batch(
            owner,
            items,
            lambda lease_id: self._leases.require_live(account, owner.namespace, lease_id),
        )
        owner.check_quota(account, pins=plan.num_blocks)
        return plan.apply()

    @counts_refusals
    def abandon(
        self, session: int, namespace: int, lease_id: int, blocks: U32Array | None
    ) -> U32Array:
        """Give unpublished blocks back; None: all of the lease's. Returns them, u32 [n].

        Raises:
            NotHeld: A block is not reserved by this lease.
        """
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
        lease = self._leases.require_held(account, owner.namespace, lease_id)
        if blocks is None:
            going = np.sort(as_blocks(lease.reserved))
        else:
            going = distinct(owner, blocks)
            foreign = owner.blocks.columns.holder[going] != lease_id
            if foreign.any():
                raise not_held(lease, int(going[int(foreign.argmax())]))
        owner.give_back(lease, going)
        return as_u32(going)

    @counts_refusals
    def free(self, session: int, namespace: int, lease_id: int, blocks: U32Array) -> FreeResult:
        """Forget blocks of a lease.

        Reserved ones become free; pinned ones are unpinned and, when neither a reader nor a longer
        prefix needs them, dropped from the index and freed.

        Raises:
            NotHeld: A block is neither reserved nor pinned by this lease.
        """
        account, owner = self._writers.require(session, namespace)
        lease = self._leases.require_held(account, owner.namespace, lease_id)
        wanted = distinct(owner, blocks, limit=MAX_RESERVE_BLOCKS)
        is_reserved = owner.blocks.columns.holder[wanted] == lease_id
        reserved, pinned = wanted[is_reserved], wanted[~is_reserved]
        missing = lease.pins.missing(pinned)
        if missing.size:
            raise not_held(lease, int(missing[0]))
        owner.give_back(lease, reserved)
        owner.unpin_from(lease, pinned)
        states = owner.blocks.columns.state[pinned]
        cleared = pinned[states == _FREE]  # withdrawn before, and let go by their last reader now
        dropped = owner.drop_unused(pinned[states == _PUBLISHED])
        owner.statistics.freed += len(dropped)
        return FreeResult(as_u32(np.concatenate((reserved, cleared, dropped))))
