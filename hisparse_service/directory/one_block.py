"""One block of one lease, through plain numbers: what a decode step asks for, step after step.

Nothing here refuses. Where anything differs from the common case (a duplicate, a wrong handle, an
expired lease, nothing to evict) nothing is changed, the answer is None or False, and the caller
goes the general way (`publish.py`, `Directory.reserve`), which has the same rules and says what is
wrong. So the two ways must agree on what is good; `test_directory_one_block.py` compares them.

Why it is worth a second way: a daemon that answers one message at a time runs cold after each
context switch, and then what counts is how much code a message touches. In the general way a step
makes 120 Python calls in the daemon, 50 in this one (counted by sys.setprofile; decision 0017).

Only `directory.py` calls it, on the control loop.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.leases import Lease, SessionAccount
from hisparse_service.directory.namespaces import Namespace
from hisparse_service.directory.results import EventKind
from hisparse_service.directory.states import LeaseState

_IS_PUBLISHED: Final = EventKind.PUBLISHED
_IS_EVICTED: Final = EventKind.EVICTED
_GRANTED: Final = LeaseState.GRANTED
_HALVES: Final = struct.Struct("<QQ")
_RESERVED: Final = BlockState.RESERVED
_WRITING: Final = BlockState.WRITING
_PUBLISHED: Final = BlockState.PUBLISHED


class OneCompleted(NamedTuple):
    """A `MirrorItem` of one block, without checksum."""

    lease_id: int
    block: int
    generation: int
    key: bytes
    """16 B"""
    parent: int
    parent_generation: int


class OneReserved(NamedTuple):
    """A `ReserveResult` of one block."""

    lease_id: int
    deadline_s: float
    block: int
    generation: int


def publish_one(owner: Namespace, lease: Lease, item: OneCompleted) -> bool:
    """Publish a block of a granted lease whose key nobody published; False: nothing changed."""
    _, block, generation, key, parent, parent_generation = item
    blocks = owner.attached
    if blocks is None or not 0 < block < blocks.num_blocks or not 0 <= parent < blocks.num_blocks:
        return False
    columns = blocks.columns
    states, generations = columns.state_view, columns.generation_view
    state = states[block]
    if (
        (state != _RESERVED and state != _WRITING)
        or generations[block] != generation
        or columns.holder_view[block] != lease.lease_id
        or (parent and (states[parent] != _PUBLISHED or generations[parent] != parent_generation))
    ):
        return False
    low, high = _HALVES.unpack(key)
    bucket = blocks.index.bucket_without(low, high)
    account = lease.account
    if bucket < 0 or (owner.quotas.limits_blocks and not owner.has_room(account, pins=1)):
        return False
    blocks.publish_one(
        block, bucket, low, high, parent=parent, checksum=0, tick=blocks.next_tick()
    )  # fmt: skip
    lease.reserved.discard(block)
    lease.pins.add_one(block)
    for usage in (account.usage, owner.usage):
        usage.reserved_blocks -= 1
        usage.pins += 1
    owner.statistics.publishes += 1
    if owner.audience.is_there:
        owner.emit_one(_IS_PUBLISHED, block)
    return True


def enqueue_ones(
    owner: Namespace, account: SessionAccount, handles: Sequence[tuple[int, int, int]]
) -> bool:
    """RESERVED, WRITING -> WRITING for blocks of granted leases; False: nothing changed.

    Args:
        owner: The namespace.
        account: Of a session that may write there.
        handles: (lease id, block, generation) each.
    """
    blocks = owner.attached
    if blocks is None:
        return False
    columns, leases = blocks.columns, account.leases
    states, generations, holders = (
        columns.state_view, columns.generation_view, columns.holder_view
    )  # fmt: skip
    starting = []
    for lease_id, block, generation in handles:
        lease = leases.get(lease_id)
        if (
            lease is None
            or lease.state is not _GRANTED
            or lease.namespace != owner.namespace
            or not 0 < block < blocks.num_blocks
            or generations[block] != generation
            or holders[block] != lease_id
        ):
            return False
        # Whose holder is a lease is RESERVED or WRITING; who fills row by row comes again.
        if states[block] == _RESERVED:
            starting.append(block)
    for block in starting:
        blocks.start_writing_one(block)
    return True


def can_reserve_one(owner: Namespace, account: SessionAccount) -> bool:
    """Whether no quota is in the way, and there is a backing."""
    return owner.attached is not None and (
        not owner.quotas.limits_blocks or owner.has_room(account, reserved=1)
    )


def make_room_one(owner: Namespace) -> bool:
    """Have a free block, evicting the least recently used; False: there is none."""
    blocks = owner.attached
    if blocks is None:
        return False
    if blocks.num_free:
        return True
    victim = blocks.evict_one()
    if not victim:
        return False
    owner.statistics.evictions += 1
    if owner.audience.is_there:
        owner.emit_one(_IS_EVICTED, victim)
    return True


def reserve_one(owner: Namespace, lease: Lease) -> OneReserved:
    """A free block reserved into a granted lease."""
    blocks = owner.blocks
    block = blocks.reserve_one(holder=lease.lease_id)
    lease.reserved.add(block)
    lease.account.usage.reserved_blocks += 1
    owner.usage.reserved_blocks += 1
    statistics = owner.statistics
    statistics.reserves += 1
    statistics.blocks_reserved += 1
    generation = blocks.columns.generation_view[block]
    return OneReserved(lease.lease_id, lease.deadline_s, block, generation)
