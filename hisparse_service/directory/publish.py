"""Publication of completed mirrors: the whole batch is checked, then the whole batch is done.

The two parts are `plan_batch`, which raises and changes nothing, and `MirrorPlan.apply`, which
changes and does not raise. Items see what earlier items of their batch will publish. An item of one
block, the common case of a decode step, goes through scalars: 10 us where arrays take 100
(benchmarks/bench_directory.py). Only `writing.py` calls it, on the control loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.errors import PublishOutOfOrder, UsageError
from hisparse_service.contract.limits import (
    BLOCK_KEY_BYTES,
    MAX_BATCH_ITEMS,
    MAX_RESERVE_BLOCKS,
)
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.checks import not_held, out_of_range, stale_block
from hisparse_service.directory.index import Blocks, Keys, as_keys
from hisparse_service.directory.leases import Lease
from hisparse_service.directory.namespaces import Namespace, as_blocks, as_u32
from hisparse_service.directory.results import CompletedItem, EventKind, MirrorItem
from hisparse_service.directory.states import (
    BLOCK_EVENT_ALLOWED,
    BlockEvent,
    illegal_block_event,
)

FindLease = Callable[[int], Lease]
"""The live lease of an id, or raises."""


def check_batch_size(items: Sequence[MirrorItem]) -> int:
    """Blocks of a batch.

    Raises:
        UsageError: Too many items or blocks, or arrays of unequal lengths.
    """
    if len(items) > MAX_BATCH_ITEMS:
        raise UsageError(
            f"{len(items)} items in a batch, the limit is {MAX_BATCH_ITEMS}",
            remedy="Send them in several batches",
            limit=MAX_BATCH_ITEMS,
            value=len(items),
        )
    num_blocks = 0
    for item in items:
        if len(item.blocks) != len(item.generations):
            raise UsageError(f"{len(item.blocks)} blocks with {len(item.generations)} generations")
        num_blocks += len(item.blocks)
    if num_blocks > MAX_RESERVE_BLOCKS:
        raise UsageError(
            f"{num_blocks} blocks in a batch, the limit is {MAX_RESERVE_BLOCKS}",
            remedy="Send them in several batches",
            limit=MAX_RESERVE_BLOCKS,
            value=num_blocks,
        )
    return num_blocks


def check_held(namespace: Namespace, lease: Lease, item: MirrorItem, event: BlockEvent) -> Blocks:
    """The item's blocks, which must be the lease's to write.

    Raises:
        StaleBlock: Wrong generation.
        IllegalTransition: `event` is not allowed.
        NotHeld: Out of range, or reserved by another lease.
    """
    columns = namespace.blocks.columns
    blocks = item.blocks.astype(np.intp)
    if not blocks.size:
        return blocks
    if blocks.min() < 1 or blocks.max() >= namespace.blocks.num_blocks:
        raise out_of_range(namespace, int(blocks.max()))
    wrong = columns.generation[blocks] != item.generations
    if wrong.any():
        at = int(wrong.argmax())
        raise stale_block(namespace, int(blocks[at]), int(item.generations[at]))
    illegal = ~BLOCK_EVENT_ALLOWED[event][columns.state[blocks]]
    if illegal.any():
        block = int(blocks[int(illegal.argmax())])
        raise illegal_block_event(columns.state_view[block], event, block=block)
    foreign = columns.holder[blocks] != lease.lease_id
    if foreign.any():
        raise not_held(lease, int(blocks[int(foreign.argmax())]))
    return blocks


@dataclass(slots=True)
class _PlannedOne:
    lease: Lease
    block: int
    key: bytes
    parent: int
    checksum: int
    canonical: int
    """Where the key is (going to be) published already; 0 = nowhere."""
    keep: bool
    """Whether the own block of a duplicate stays reserved."""


@dataclass(slots=True)
class _PlannedMany:
    lease: Lease
    blocks: Blocks
    keys: Keys
    checksums: npt.NDArray[np.uint64] | None
    canonical: Blocks
    """intp [n]; 0 = nowhere."""
    resolved: Blocks
    """canonical where there is one, else blocks"""
    parents: Blocks
    depths: npt.NDArray[np.uint32]
    keep: bool


@dataclass(slots=True)
class _Ahead:
    """What earlier items of the batch are going to do."""

    seen: set[int] = field(default_factory=set)
    """Blocks named so far."""
    published: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Block -> (parent, depth)."""
    by_key: dict[bytes, int] = field(default_factory=dict)
    merged: dict[int, int] = field(default_factory=dict)
    """Loser's block -> canonical block."""


def plan_batch(
    namespace: Namespace, items: Sequence[MirrorItem], find_lease: FindLease
) -> MirrorPlan:
    """Check a batch of completed mirrors against the blocks and against itself.

    Raises:
        UsageError, LeaseLost, LeaseExpired, StaleBlock, NotHeld, IllegalTransition,
        PublishOutOfOrder: See `Directory.mirror_completed`. Nothing was changed.
    """
    plan = MirrorPlan(namespace, num_blocks=check_batch_size(items))
    for at, item in enumerate(items, 1):
        plan.add(item, find_lease(item.lease_id), is_last=at == len(items))
    return plan


class MirrorPlan:
    """A batch that passed every check. Applied before anything else happens to the namespace."""

    def __init__(self, namespace: Namespace, *, num_blocks: int) -> None:
        self._namespace = namespace
        self.num_blocks = num_blocks
        """Of all items: at most so many pins more."""
        self._ahead = _Ahead()
        self._planned: list[_PlannedOne | _PlannedMany] = []

    # --- checking ---------------------------------------------------------------------------

    def add(self, item: MirrorItem, lease: Lease, *, is_last: bool) -> None:
        """Check one item and take it in. `is_last`: nothing will refer to it."""
        num_blocks = len(item.blocks)
        if not num_blocks:
            raise UsageError("an item without blocks", remedy="Leave it out of the batch")
        checksums = item.checksums
        if len(item.keys) != num_blocks * BLOCK_KEY_BYTES or (
            checksums is not None and len(checksums) not in (0, num_blocks)
        ):
            raise UsageError(
                f"{num_blocks} blocks with {len(item.keys)} B of keys and "
                f"{0 if checksums is None else len(checksums)} checksums",
                remedy=f"Send {BLOCK_KEY_BYTES} B of key a block, and one checksum each or none",
            )
        if num_blocks == 1:
            self._add_one(item, lease)
        else:
            planned = self._add_many(item, lease)
            if not is_last:
                self._note_ahead(item, planned)

    def _add_one(self, item: MirrorItem, lease: Lease) -> None:
        namespace, ahead = self._namespace, self._ahead
        blocks = namespace.blocks
        columns = blocks.columns
        block, generation = int(item.blocks[0]), int(item.generations[0])
        if not 0 < block < blocks.num_blocks:
            raise out_of_range(namespace, block)
        if columns.generation_view[block] != generation:
            raise stale_block(namespace, block, generation)
        state = columns.state_view[block]
        if block in ahead.seen:
            state = BlockState.PUBLISHED
        if not BLOCK_EVENT_ALLOWED[BlockEvent.PUBLISH, state]:
            raise illegal_block_event(state, BlockEvent.PUBLISH, block=block)
        if columns.holder_view[block] != lease.lease_id:
            raise not_held(lease, block)
        parent, depth = self._resolve_parent(item)
        key = bytes(item.keys)
        low, high = _halves(key)
        canonical = blocks.index.find_one(low, high) or ahead.by_key.get(key, 0)
        if canonical:
            self._check_same_parent(canonical, parent)
            ahead.merged[block] = canonical
        else:
            ahead.by_key[key] = block
            ahead.published[block] = (parent, depth)
        ahead.seen.add(block)
        checksums = item.checksums
        checksum = int(checksums[0]) if checksums is not None and len(checksums) else 0
        self._planned.append(
            _PlannedOne(lease, block, key, parent, checksum, canonical, item.keep_duplicates)
        )

    def _add_many(self, item: MirrorItem, lease: Lease) -> _PlannedMany:
        ahead = self._ahead
        blocks = check_held(self._namespace, lease, item, BlockEvent.PUBLISH)
        keys = as_keys(item.keys)
        self._check_distinct(blocks, keys)
        first_parent, first_depth = self._resolve_parent(item)
        canonical = self._namespace.blocks.index.find(keys)
        if ahead.by_key:
            key_list = _split(item.keys)
            earlier = np.fromiter(
                (ahead.by_key.get(key, 0) for key in key_list), np.intp, len(blocks)
            )
            canonical = np.where(canonical != 0, canonical, earlier)
        resolved = np.where(canonical != 0, canonical, blocks)
        parents = np.concatenate((np.array([first_parent], np.intp), resolved[:-1]))
        merging = np.flatnonzero(canonical)
        if not ahead.published:
            merging = merging[
                self._namespace.blocks.columns.parent[canonical[merging]] != parents[merging]
            ]
        for at in merging.tolist():
            self._check_same_parent(int(canonical[at]), int(parents[at]))
        depths = np.arange(first_depth, first_depth + len(blocks), dtype=np.uint32)
        checksums = item.checksums if item.checksums is not None and len(item.checksums) else None
        planned = _PlannedMany(
            lease, blocks, keys, checksums, canonical, resolved, parents, depths,
            item.keep_duplicates,
        )  # fmt: skip
        self._planned.append(planned)
        return planned

    def _note_ahead(self, item: MirrorItem, planned: _PlannedMany) -> None:
        ahead = self._ahead
        ahead.seen.update(planned.blocks.tolist())
        rows = zip(
            _split(item.keys), planned.blocks.tolist(), planned.canonical.tolist(),
            planned.parents.tolist(), planned.depths.tolist(), strict=True,
        )  # fmt: skip
        for key, block, other, parent, depth in rows:
            if other:
                ahead.merged[block] = other
            else:
                ahead.by_key[key] = block
                ahead.published[block] = (parent, depth)

    def _check_distinct(self, blocks: Blocks, keys: Keys) -> None:
        block_list = blocks.tolist()
        distinct = set(block_list)
        if len(distinct) < len(block_list) or not self._ahead.seen.isdisjoint(distinct):
            seen = set(self._ahead.seen)
            for block in block_list:
                if block in seen:
                    raise illegal_block_event(BlockState.PUBLISHED, BlockEvent.PUBLISH, block=block)
                seen.add(block)
        # Equal low halves of different keys are chance or an attack; only then look at both.
        num_keys = len(keys)
        if len(np.unique(keys[:, 0])) < num_keys and len(np.unique(keys, axis=0)) < num_keys:
            raise PublishOutOfOrder(
                "one key twice in an item: keys are chained, so a prefix never repeats one",
                remedy="Make keys with contract.keys.KeyChain",
            )

    def _resolve_parent(self, item: MirrorItem) -> tuple[int, int]:
        """(canonical block of the item's parent, depth of its first block)."""
        parent = item.parent
        if parent == 0:
            return 0, 0
        blocks, ahead = self._namespace.blocks, self._ahead
        columns = blocks.columns
        inside = 0 < parent < blocks.num_blocks
        if inside and columns.generation_view[parent] == item.parent_generation:
            parent = ahead.merged.get(parent, parent)
            if parent in ahead.published:
                return parent, ahead.published[parent][1] + 1
            if columns.state_view[parent] == BlockState.PUBLISHED:
                return parent, columns.depth_view[parent] + 1
        raise PublishOutOfOrder(
            f"the parent, block {item.parent} of generation {item.parent_generation}, is not "
            "published",
            remedy="Publish a prefix from its start, and keep its last block pinned",
            block=item.parent,
            generation=item.parent_generation,
        )

    def _check_same_parent(self, canonical: int, parent: int) -> None:
        ahead = self._ahead.published.get(canonical)
        published = (
            self._namespace.blocks.columns.parent_view[canonical] if ahead is None else ahead[0]
        )
        if published != parent:
            raise PublishOutOfOrder(
                f"the key is published as block {canonical} below block {published}, not below "
                f"block {parent}",
                remedy="Equal keys mean equal prefixes; make them with contract.keys.KeyChain",
                block=canonical,
            )

    # --- doing ------------------------------------------------------------------------------

    def apply(self) -> list[CompletedItem]:
        """Publish everything; one answer an item."""
        tick = self._namespace.blocks.next_tick()
        new_blocks: list[int] = []
        new_keys: list[bytes] = []
        answers = []
        for planned in self._planned:
            if isinstance(planned, _PlannedOne):
                answers.append(self._apply_one(planned, tick, new_blocks, new_keys))
            else:
                answers.append(self._apply_many(planned, tick, new_blocks, new_keys))
        self._namespace.statistics.publishes += len(new_blocks)
        if new_blocks:
            self._namespace.emit(EventKind.PUBLISHED, as_blocks(new_blocks), b"".join(new_keys))
        return answers

    def _apply_one(
        self, planned: _PlannedOne, tick: int, new_blocks: list[int], new_keys: list[bytes]
    ) -> CompletedItem:
        namespace, lease, block = self._namespace, planned.lease, planned.block
        blocks = namespace.blocks
        if planned.canonical:
            block = planned.canonical
            self._merge(planned, as_blocks([planned.block]), as_blocks([block]), tick)
        else:
            low, high = _halves(planned.key)
            blocks.publish_one(
                block, blocks.index.bucket_without(low, high), low, high, parent=planned.parent,
                checksum=planned.checksum, tick=tick,
            )  # fmt: skip
            lease.reserved.discard(block)
            lease.pins.add_one(block)
            namespace.charge(lease, reserved=-1, pins=1)
            new_blocks.append(block)
            new_keys.append(planned.key)
        return CompletedItem(
            np.array([block], np.uint32),
            np.array([blocks.columns.generation_view[block]], np.uint32),
        )

    def _apply_many(
        self, planned: _PlannedMany, tick: int, new_blocks: list[int], new_keys: list[bytes]
    ) -> CompletedItem:
        namespace, lease, blocks = self._namespace, planned.lease, planned.blocks
        is_new = planned.canonical == 0
        fresh, keys = blocks[is_new], planned.keys[is_new]
        checksums = planned.checksums
        namespace.blocks.publish(
            fresh, keys=keys, parents=planned.parents[is_new], depths=planned.depths[is_new],
            checksums=None if checksums is None else checksums[is_new], tick=tick,
        )  # fmt: skip
        fresh_list = fresh.tolist()
        lease.reserved.difference_update(fresh_list)
        lease.pins.add(fresh)
        namespace.charge(lease, reserved=-len(fresh), pins=len(fresh))
        new_blocks += fresh_list
        new_keys.append(keys.tobytes())
        if len(fresh) < len(blocks):
            self._merge(planned, blocks[~is_new], planned.canonical[~is_new], tick)
        return CompletedItem(
            as_u32(planned.resolved), namespace.blocks.columns.generation[planned.resolved]
        )

    def _merge(
        self, planned: _PlannedOne | _PlannedMany, losers: Blocks, canonical: Blocks, tick: int
    ) -> None:
        namespace, lease = self._namespace, planned.lease
        missing = namespace.not_pinned_by(lease, canonical)
        if missing.size:
            namespace.blocks.pin(missing, tick=tick)
            lease.pins.add(missing)
            namespace.charge(lease, pins=len(missing))
        namespace.statistics.duplicates_merged += len(losers)
        if planned.keep:
            return
        namespace.blocks.give_back(losers)
        lease.reserved.difference_update(losers.tolist())
        namespace.charge(lease, reserved=-len(losers))


def _halves(key: bytes) -> tuple[int, int]:
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")


def _split(keys: bytes) -> list[bytes]:
    return [keys[i : i + BLOCK_KEY_BYTES] for i in range(0, len(keys), BLOCK_KEY_BYTES)]
