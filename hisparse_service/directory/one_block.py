"""One block of one lease, through plain numbers: what a decode step asks for, step after step.

Nothing here refuses. Where anything differs from the common case (a duplicate, a wrong handle, an
expired lease, nothing to evict) nothing is changed, the answer is None or False, and the caller
goes the general way (`writing.py`, `publish.py`), which has the same rules and says what is
wrong. So the two ways must agree on what is good; `test_directory_one_block.py` compares them.

Why it is worth a second way: a daemon that answers one message at a time runs cold after each
context switch, and then what counts is how much code a message touches. In the general way a step
makes 120 Python calls in the daemon, 50 in this one (counted by sys.setprofile; decision 0017).

Made by `directory.py`, on the control loop.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from hisparse_service.contract.limits import MAX_BATCH_ITEMS
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.leases import Lease, SessionAccount
from hisparse_service.directory.namespaces import Namespace
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import EventKind
from hisparse_service.directory.states import LeaseState
from hisparse_service.directory.writers import Writers, is_writer

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


class OneBlock:
    """The requests of one block, beside those of `Reading` and `Writing`.

    Args:
        registry: The sessions, namespaces and leases.
        writers: Who writes for its group.
    """

    def __init__(self, registry: Registry, writers: Writers) -> None:
        self._registry = registry
        self._accounts, self._namespaces = registry.accounts, registry.namespaces
        self._leases = registry.leases
        self._writers = writers

    def reserve_one(
        self, session: int, namespace: int, lease_id: int, *, now_s: float
    ) -> OneReserved | None:
        """`reserve` of one block, for the common case.

        Returns:
            None: nothing was changed, and `reserve` says why.
        """
        account, owner = self._accounts.get(session), self._namespaces.get(namespace)
        if (
            account is None
            or owner is None
            or not is_writer(account, owner)
            or not _can_reserve(owner, account)
        ):
            return None
        lease = _granted(account, owner, lease_id) if lease_id else None
        if lease is None and (lease_id or not owner.has_room(account, leases=1)):
            return None
        if not _make_room(owner):
            return None
        if lease is None:
            lease = self._registry.renewed(account, owner, None, now_s)
        else:
            self._leases.renew(lease, now_s=now_s)
        return _reserve(owner, lease)

    def enqueue_ones(
        self, session: int, namespace: int, handles: Sequence[tuple[int, int, int]], *, now_s: float
    ) -> bool:
        """`mirror_enqueued` of one block an item, and `renew` of their leases.

        Args:
            session: Who asks.
            namespace: Where.
            handles: (lease id, block, generation) each.
            now_s: Monotonic time.

        Returns:
            Whether it was done; False: nothing was changed, and `mirror_enqueued` says why.
        """
        account, owner = self._accounts.get(session), self._namespaces.get(namespace)
        if (
            account is None
            or owner is None
            or len(handles) > MAX_BATCH_ITEMS
            or not is_writer(account, owner)
            or not _enqueue(owner, account, handles)
        ):
            return False
        for lease_id, _, _ in handles:
            self._leases.renew(account.leases[lease_id], now_s=now_s)
        if account.group:
            self._writers.renew(account, now_s)
        return True

    def publish_one(
        self, session: int, namespace: int, item: OneCompleted, *, now_s: float
    ) -> bool:
        """`mirror_completed` of one new block, and `renew` of its lease, for the common case.

        Returns:
            Whether it was done; False: nothing was changed, and `mirror_completed` says why.
        """
        account, owner = self._accounts.get(session), self._namespaces.get(namespace)
        if account is None or owner is None or not is_writer(account, owner):
            return False
        lease = _granted(account, owner, item.lease_id)
        if lease is None or not _publish(owner, lease, item):
            return False
        self._leases.renew(lease, now_s=now_s)
        if account.group:
            self._writers.renew(account, now_s)
        return True


def _granted(account: SessionAccount, owner: Namespace, lease_id: int) -> Lease | None:
    """`LeaseTable.require_live` as a question."""
    lease = account.leases.get(lease_id)
    if lease is None or lease.state is not _GRANTED or lease.namespace != owner.namespace:
        return None
    return lease


def _publish(owner: Namespace, lease: Lease, item: OneCompleted) -> bool:
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


def _enqueue(
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


def _can_reserve(owner: Namespace, account: SessionAccount) -> bool:
    """Whether no quota is in the way, and there is a backing."""
    return owner.attached is not None and (
        not owner.quotas.limits_blocks or owner.has_room(account, reserved=1)
    )


def _make_room(owner: Namespace) -> bool:
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


def _reserve(owner: Namespace, lease: Lease) -> OneReserved:
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
