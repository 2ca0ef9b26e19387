"""The blocks of one backing: what each holds, who may write it, how many read it.

The only writer of the backing's block table. It knows leases only as numbers and sessions not at
all; who calls it has validated the request (`reading.py`, `writing.py` and their like). On the
control loop only.

Order of the stores when a block is given up: state (it holds nothing any more), generation, state
FREE; only then can it be handed out again, so no handle of its old content ever matches (I3).
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.segment import BlockState, record_check
from hisparse_service.directory.adoption import Survivors, find_survivors
from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.eviction import LeastRecentlyUsed
from hisparse_service.directory.index import Blocks, KeyIndex, Keys
from hisparse_service.directory.records import Readers, RecordTable
from hisparse_service.directory.results import Counts, UnfinishedBlocks
from hisparse_service.directory.states import (
    BLOCK_EVENT_ALLOWED,
    BlockEvent,
    illegal_block_event,
)

NO_BLOCKS: Final[Blocks] = np.zeros(0, np.intp)
# Plain numbers: numpy takes 5 us to find out that an enum's member is one.
_FREE: Final = int(BlockState.FREE)
_RESERVED: Final = int(BlockState.RESERVED)
_WRITING: Final = int(BlockState.WRITING)
_PUBLISHED: Final = int(BlockState.PUBLISHED)
_EVICTING: Final = int(BlockState.EVICTING)


def next_generations(generations: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The generations after these; 0 is left out when u32 wraps."""
    bumped = generations + np.uint32(1)
    bumped[bumped == 0] = 1
    return bumped


def next_generation(generation: int) -> int:
    """`next_generations` of one."""
    return (generation + 1) & 0xFFFF_FFFF or 1


def _count_each(values: Blocks) -> tuple[Blocks, Blocks]:
    """Distinct values and how often each is there. np.unique hashes, five times slower here."""
    values = np.sort(values)
    first = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    return values[first], np.diff(first, append=len(values))


class BlockDirectory:
    """All blocks of one backing.

    Args:
        table: See `RecordTable`.
        namespace: Stands in each record.
        hash_seed: Secret, for the index.
    """

    def __init__(self, table: npt.NDArray[Any], *, namespace: int, hash_seed: int) -> None:
        self._records = RecordTable(table, namespace=namespace)
        self._namespace = namespace
        self.num_blocks = self._records.num_blocks
        self.columns = BlockColumns(self.num_blocks)
        self.index = KeyIndex(self.columns, seed=hash_seed)
        self._eviction = LeastRecentlyUsed(self.columns)
        self._free = array("I")
        self._num_published = 0
        self._num_pinned = 0
        self._tick = 0
        # Most blocks have no checksum: no page of these is touched for them, nor a line on the
        # way of one block. A checksum counts in its generation alone.
        self._checksums = np.zeros(self.num_blocks, np.uint64)
        self._checksum_generations = np.zeros(self.num_blocks, np.uint32)
        self._withdrawn: set[int] = set()
        """Blocks in EVICTING that are read, or have published blocks below them."""

    def detach(self) -> None:
        """Drop every view of the table. Nothing else may be called afterwards."""
        self._records.detach()

    # --- beginning --------------------------------------------------------------------------

    def start_fresh(self) -> None:
        """Make every block free, with a generation that it did not have before."""
        everything = np.arange(1, self.num_blocks)
        self._records.store_state_one(0, _FREE)
        self._records.store_state(everything, _FREE)
        found = self._records.table["generation"].astype(np.uint32)
        self.columns.generation[1:] = next_generations(found)[1:]
        self._records.store_generation(everything, self.columns.generation[1:])
        self._set_free(everything)

    def adopt(self, *, holder: int = 0) -> Survivors:
        """Rebuild everything from the table of an earlier daemon.

        Published blocks that pass every check come back with key, parent and order of use; the rest
        becomes free with a new generation, except those that were being written where a `holder`
        takes them.

        Returns:
            What was found; `holder` holds its `held` blocks now. Its `read` blocks have no reader
            yet.
        """
        found = find_survivors(
            self._records.table,
            namespace=self._namespace,
            unfinished_blocks=UnfinishedBlocks.HOLD if holder else UnfinishedBlocks.FREE,
        )
        self._free_the_rest(found)
        self.columns.state[found.held] = self._records.table["state"][found.held]
        self.columns.holder[found.held] = holder
        kept, columns = found.blocks, self.columns
        columns.state[kept] = _PUBLISHED
        columns.parent[kept] = found.parents
        columns.depth[kept] = found.depths
        columns.last_use[kept] = found.last_use
        with_parent = found.parents[found.parents != 0]
        columns.children[:] = np.bincount(with_parent, minlength=self.num_blocks)
        # Who was read stays so in the table until it is known again who reads: this daemon may die
        # in the next moment too.
        is_read = np.isin(kept, found.read, assume_unique=True) if holder else np.zeros_like(kept)
        self._records.store_last_use(kept, found.last_use, is_read.astype(np.uint64))
        self.index.add(kept, found.keys)
        self._keep_checksums(kept, found.checksums)
        self._num_published = len(kept)
        self._tick = int(found.last_use.max()) if len(kept) else 0
        self._eviction.rebuild()
        return found

    def hand_over(self, blocks: Blocks, *, holder: int) -> None:
        """RESERVED, WRITING: from now on another lease's."""
        self.columns.holder[blocks] = holder

    def _free_the_rest(self, found: Survivors) -> None:
        columns = self.columns
        columns.generation[:] = found.generations
        columns.generation[0] = 1
        rest = found.given_up
        self._records.store_state_one(0, _FREE)
        self._records.store_state(rest, _EVICTING)
        self._records.store_generation(rest, columns.generation[rest])
        self._records.store_state(rest, _FREE)
        free = np.ones(self.num_blocks, np.bool_)
        free[0] = False
        free[found.blocks] = False
        free[found.held] = False
        self._set_free(np.flatnonzero(free))

    def _set_free(self, blocks: Blocks) -> None:
        # Taken from the end: ascending ids, so that a prefix lies in consecutive blocks.
        self._free = array("I", blocks[::-1].astype(np.uint32).tobytes())

    # --- counts -----------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be reserved at once."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Published blocks without readers: no more than these can be evicted."""
        return self._num_published - self._num_pinned

    def counts(self) -> Counts:
        """Where the blocks are now (I6)."""
        capacity = self.num_blocks - 1
        free = len(self._free)
        return Counts(
            capacity=capacity,
            free=free,
            reserved=capacity - free - self._num_published,
            published=self._num_published - self._num_pinned,
            pinned=self._num_pinned,
        )

    def next_tick(self) -> int:
        """A new value of the use counter."""
        self._tick += 1
        return self._tick

    # --- finding ----------------------------------------------------------------------------

    def match_prefix(self, keys: Keys, *, after: int) -> Blocks:
        """Published blocks of the longest run of `keys` from its start.

        Each must hang below the one before it: keys alone would let a client that publishes a key
        below a foreign parent lead others astray.

        Args:
            keys: u64 [n, 2].
            after: Block of the key before the first one; 0 at the start of a prefix.
        """
        first = self.index.find_one(int(keys[0, 0]), int(keys[0, 1]))
        if not first or self.columns.parent_view[first] != after:
            return NO_BLOCKS
        run = self._match_run(first, keys)
        found = np.arange(first, first + run)
        rest = keys[run:]
        if not len(rest) or not self.index.find_one(int(rest[0, 0]), int(rest[0, 1])):
            return found
        others = self._match_scattered(rest, after=first + run - 1)
        return np.concatenate((found, others))

    def _match_run(self, first: int, keys: Keys) -> int:
        """How many of `keys`, from the first on, stand in the blocks `first`, `first` + 1, ...

        Blocks that were reserved together lie so. Then nothing has to be found, and rows are read
        one after the other: a fifth of the time among 1,000,000 blocks.
        """
        columns = self.columns
        end = min(first + len(keys), self.num_blocks)
        if end - first < 2 or columns.key_low_view[first + 1] != keys[1, 0]:
            return 1
        keys = keys[1 : end - first]
        there = slice(first + 1, end)
        same = columns.key_low[there] == keys[:, 0]
        same &= columns.key_high[there] == keys[:, 1]
        same &= columns.parent[there] == np.arange(first, end - 1)
        same &= columns.state[there] == _PUBLISHED
        at = int(same.argmin())
        return end - first if same[at] else 1 + at

    def _match_scattered(self, keys: Keys, *, after: int) -> Blocks:
        """`match_prefix` wherever the blocks lie."""
        found = self.index.find(keys)
        above = np.empty_like(found)
        above[0] = after
        above[1:] = found[:-1]
        good = self.columns.parent[found] == above
        good &= found != 0
        at = int(good.argmin())
        return found if good[at] else found[:at]

    # --- writing ----------------------------------------------------------------------------

    def reserve(self, num_blocks: int, *, holder: int) -> Blocks:
        """FREE -> RESERVED; `num_free` must suffice."""
        assert 0 < num_blocks <= len(self._free)
        blocks = np.array(self._free[-num_blocks:], np.intp)[::-1]
        del self._free[-num_blocks:]
        self.columns.state[blocks] = _RESERVED
        self.columns.holder[blocks] = holder
        self._records.store_state(blocks, _RESERVED)
        return blocks

    def start_writing(self, blocks: Blocks) -> None:
        """RESERVED -> WRITING."""
        self._require(blocks, BlockEvent.ENQUEUE)
        self.columns.state[blocks] = _WRITING
        self._records.store_state(blocks, _WRITING)

    def start_writing_one(self, block: int) -> None:
        """`start_writing` of one RESERVED block."""
        self.columns.state_view[block] = _WRITING
        self._records.store_state_one(block, _WRITING)

    def give_back(self, blocks: Blocks) -> None:
        """RESERVED, WRITING -> FREE."""
        if blocks.size:
            self._require(blocks, BlockEvent.ABANDON)
            self.columns.holder[blocks] = 0
            self._make_free(blocks)

    def reserve_one(self, *, holder: int) -> int:
        """FREE -> RESERVED: `reserve` for the common case."""
        block = self._free.pop()
        self.columns.state_view[block] = _RESERVED
        self.columns.holder_view[block] = holder
        self._records.store_state_one(block, _RESERVED)
        return block

    def publish_one(
        self,
        block: int,
        bucket: int,
        low: int,
        high: int,
        *,
        parent: int,
        checksum: int,
        tick: int,
    ) -> None:
        """RESERVED, WRITING -> PUBLISHED, with one reader: `publish` for the common case.

        Args:
            block: Its id.
            bucket: `index.bucket_without` of its key.
            low: Half of its key.
            high: The other half.
            parent: Published; 0: none.
            checksum: 0: none.
            tick: Of this use.
        """
        columns = self.columns
        generations = columns.generation_view
        depth = parent_generation = 0
        if parent:
            depth = columns.depth_view[parent] + 1
            parent_generation = generations[parent]
            columns.children_view[parent] += 1
        columns.parent_view[block] = parent
        columns.depth_view[block] = depth
        columns.last_use_view[block] = tick
        columns.readers_view[block] = 1
        columns.holder_view[block] = 0
        columns.state_view[block] = _PUBLISHED
        self.index.insert(block, bucket, low, high)
        if checksum:
            self._checksums[block] = checksum
            self._checksum_generations[block] = generations[block]
        self._num_published += 1
        self._num_pinned += 1
        self._records.publish_one(
            block, key_low=low, key_high=high, last_use=tick, checksum=checksum,
            generation=generations[block], parent=parent, parent_generation=parent_generation,
            depth=depth,
        )  # fmt: skip

    def publish(
        self,
        blocks: Blocks,
        *,
        keys: Keys,
        parents: Blocks,
        depths: npt.NDArray[np.uint32],
        checksums: npt.NDArray[np.uint64] | None,
        tick: int,
    ) -> None:
        """RESERVED, WRITING -> PUBLISHED, with one reader each.

        Arrays of one length; parents are distinct (one chain) and published, or among `blocks`.
        """
        if not blocks.size:
            return
        self._require(blocks, BlockEvent.PUBLISH)
        columns = self.columns
        self._records.store_fields(
            blocks,
            keys=keys,
            last_use=tick,
            checksums=checksums,
            generations=columns.generation[blocks],
            parents=parents,
            parent_generations=np.where(parents != 0, columns.generation[parents], 0),
            depths=depths,
        )
        columns.parent[blocks] = parents
        columns.depth[blocks] = depths
        columns.last_use[blocks] = tick
        columns.readers[blocks] = 1
        columns.holder[blocks] = 0
        columns.state[blocks] = _PUBLISHED
        columns.children[parents[parents != 0]] += 1
        self.index.add(blocks, keys)
        if checksums is not None:
            self._keep_checksums(blocks, checksums)
        self._num_published += len(blocks)
        self._num_pinned += len(blocks)
        self._records.store_state(blocks, _PUBLISHED)

    # --- reading ----------------------------------------------------------------------------

    def pin(self, blocks: Blocks, *, tick: int) -> None:
        """One more reader of each (distinct, PUBLISHED)."""
        columns = self.columns
        readers = columns.readers[blocks]
        self._num_pinned += len(blocks) - int(np.count_nonzero(readers))
        columns.readers[blocks] = readers + np.uint32(1)
        columns.last_use[blocks] = tick
        self._records.store_last_use(blocks, tick, Readers.SOME)

    def unpin(self, blocks: Blocks, *, tick: int) -> None:
        """One reader less of each (distinct, pinned)."""
        if not blocks.size:
            return
        columns = self.columns
        readers = columns.readers[blocks]
        assert readers.all()
        columns.readers[blocks] = readers - np.uint32(1)
        idle = blocks[readers == 1]
        if idle.size:
            self._num_pinned -= len(idle)
            columns.last_use[idle] = tick
            if self._withdrawn:
                idle = self._clear_withdrawn(idle)
            self._records.store_last_use(idle, tick, Readers.NONE)
            self._eviction.unpinned(idle, tick)

    # --- giving up --------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> Blocks | None:
        """Give up exactly `num_blocks` of the least recently used.

        None: they cannot be found, and nothing went.
        """
        if num_blocks > self.num_idle:
            return None
        victims = self._eviction.choose(num_blocks)
        if len(victims) < num_blocks:
            self._eviction.put_back(victims)
            return None
        self._drop(victims)
        return victims

    def evict_one(self) -> int:
        """`evict` of one block, for the common case of a full pool; 0: there is none."""
        if not self.num_idle:
            return 0
        victims = self._eviction.choose(1)
        if not len(victims):
            return 0
        block = int(victims[0])
        assert self.columns.state_view[block] == _PUBLISHED
        self._drop_one(block)
        return block

    def _drop_one(self, block: int) -> None:
        """`_drop` of one; nobody asks who lost the last child."""
        columns, records = self.columns, self._records
        columns.state_view[block] = _EVICTING
        records.store_state_one(block, _EVICTING)
        self.index.remove_one(block)
        self._num_published -= 1
        parent = columns.parent_view[block]
        if parent:
            columns.children_view[parent] -= 1
        columns.parent_view[block] = 0
        columns.depth_view[block] = 0
        generation = next_generation(columns.generation_view[block])
        columns.generation_view[block] = generation
        records.store_generation_one(block, generation)
        columns.state_view[block] = _FREE
        records.store_state_one(block, _FREE)
        self._free.append(block)

    def evict_up_to(self, num_blocks: int) -> Blocks:
        """Give up at most `num_blocks` of the least recently used."""
        victims = self._eviction.choose(min(num_blocks, self.num_idle))
        self._drop(victims)
        return victims

    def drop_unused(self, blocks: Blocks) -> Blocks:
        """Give up those of `blocks` (distinct, PUBLISHED) that nobody needs; returns them.

        Nobody needs a block without readers whose children, if any, go too.
        """
        going = self._closed_leaves(blocks[self.columns.readers[blocks] == 0])
        self._eviction.lost_children(self._drop(going))
        return going

    def _closed_leaves(self, blocks: Blocks) -> Blocks:
        """Those of `blocks` whose children, if any, are among them too; deepest first."""
        columns = self.columns
        blocks = blocks[np.argsort(-columns.depth[blocks].astype(np.int64), kind="stable")]
        children, parents = columns.children_view, columns.parent_view
        left: dict[int, int] = {}
        going = []
        for block in blocks.tolist():
            if left.get(block, children[block]) == 0:
                going.append(block)
                parent = parents[block]
                if parent:
                    left[parent] = left.get(parent, children[parent]) - 1
        return np.array(going, np.intp)

    # --- damage -----------------------------------------------------------------------------

    @property
    def num_withdrawn(self) -> int:
        """Blocks that were withdrawn and are not free yet."""
        return len(self._withdrawn)

    def withdrawn(self) -> Blocks:
        """Those blocks, in no order."""
        return np.fromiter(self._withdrawn, np.intp, len(self._withdrawn))

    def checksum_of(self, block: int) -> int:
        """Of a published block's content; 0: none was given."""
        if self._checksum_generations[block] != self.columns.generation_view[block]:
            return 0
        return int(self._checksums[block])

    def record_fits(self, block: int) -> bool:
        """Whether a published block's record still says what readers are to compare."""
        columns = self.columns
        parent = columns.parent_view[block]
        return self._records.fits(
            block,
            record_check(
                block=block, key_low=columns.key_low_view[block],
                key_high=columns.key_high_view[block], checksum=self.checksum_of(block),
                generation=columns.generation_view[block], parent=parent,
                parent_generation=columns.generation_view[parent] if parent else 0,
                depth=columns.depth_view[block], namespace=self._namespace, flags=0,
            ),
        )  # fmt: skip

    def withdraw(self, blocks: Blocks) -> None:
        """PUBLISHED -> EVICTING, whatever reads them; those that nobody reads are free at once.

        Nobody finds them or pins them from here on, and each reader's check of the record fails.
        A block keeps its id and generation while it is read, so that it is nobody else's, and
        while published blocks lie below it, whose parent it is.

        Args:
            blocks: Distinct.
        """
        self._require(blocks, BlockEvent.WITHDRAW)
        columns = self.columns
        columns.state[blocks] = _EVICTING
        self._records.store_state(blocks, _EVICTING)
        self.index.remove(blocks)
        self._withdrawn.update(blocks.tolist())
        self._eviction.lost_children(self._leave_parents(blocks))
        self.clear_withdrawn()

    def clear_withdrawn(self) -> None:
        """Free the withdrawn blocks that nobody needs any more."""
        if self._withdrawn:
            held = self.withdrawn()
            self._clear_withdrawn(held[self.columns.readers[held] == 0])

    def _clear_withdrawn(self, blocks: Blocks) -> Blocks:
        """Free those of `blocks` (without readers) that are withdrawn; returns the published."""
        columns = self.columns
        is_published = columns.state[blocks] == _PUBLISHED
        gone = blocks[~is_published & (columns.children[blocks] == 0)]
        if gone.size:
            self._withdrawn.difference_update(gone.tolist())
            self._num_published -= len(gone)
            self._make_free(gone, already_evicting=True)
        staying: Blocks = blocks[is_published]
        return staying

    def closed_below(self, blocks: Blocks, generations: npt.NDArray[np.uint32]) -> Blocks:
        """Those that are still published in this generation and have no other children."""
        columns = self.columns
        good = columns.state[blocks] == _PUBLISHED
        good &= columns.generation[blocks] == generations
        return self._closed_leaves(blocks[good])

    def _keep_checksums(self, blocks: Blocks, checksums: npt.NDArray[np.uint64]) -> None:
        given = checksums != 0
        blocks = blocks[given]
        if blocks.size:
            self._checksums[blocks] = checksums[given]
            self._checksum_generations[blocks] = self.columns.generation[blocks]

    def _leave_parents(self, blocks: Blocks) -> Blocks:
        """These are nobody's children any more; the published ones that lost their last child."""
        columns = self.columns
        parents, counts = _count_each(columns.parent[blocks].astype(np.intp))
        columns.children[parents] -= counts.astype(np.uint32)
        columns.children[0] = 0
        columns.parent[blocks] = 0
        columns.depth[blocks] = 0
        staying = (parents != 0) & (columns.children[parents] == 0)
        staying &= columns.state[parents] == _PUBLISHED
        left: Blocks = parents[staying]
        return left

    def _drop(self, blocks: Blocks) -> Blocks:
        """PUBLISHED -> EVICTING -> FREE; returns the blocks that lost their last child and stay."""
        if not blocks.size:
            return NO_BLOCKS
        self._require(blocks, BlockEvent.EVICT)
        columns = self.columns
        columns.state[blocks] = _EVICTING
        self._records.store_state(blocks, _EVICTING)
        self.index.remove(blocks)
        self._num_published -= len(blocks)
        left = self._leave_parents(blocks)
        self._make_free(blocks, already_evicting=True)
        return left

    def _make_free(self, blocks: Blocks, *, already_evicting: bool = False) -> None:
        columns = self.columns
        if not already_evicting:
            self._records.store_state(blocks, _EVICTING)
        columns.generation[blocks] = next_generations(columns.generation[blocks])
        self._records.store_generation(blocks, columns.generation[blocks])
        columns.state[blocks] = _FREE
        self._records.store_state(blocks, _FREE)
        self._free.frombytes(blocks.astype(np.uint32).tobytes())

    def _require(self, blocks: Blocks, event: BlockEvent) -> None:
        allowed = BLOCK_EVENT_ALLOWED[event][self.columns.state[blocks]]
        if not allowed.all():
            block = int(blocks[int(allowed.argmin())])
            raise illegal_block_event(self.columns.state_view[block], event, block=block)

    # --- for tests --------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Recount everything from the arrays and compare the table; AssertionError otherwise."""
        columns, table = self.columns, self._records.table
        published = columns.state == _PUBLISHED
        withdrawn = columns.state == _EVICTING
        standing = published | withdrawn
        reserved = np.isin(columns.state, (_RESERVED, _WRITING))
        free = columns.state == _FREE
        counts = self.counts()
        assert columns.state[0] == _FREE
        assert sorted(self._free) == np.flatnonzero(free)[1:].tolist()
        assert counts.reserved == np.count_nonzero(reserved)
        assert counts.pinned == np.count_nonzero(columns.readers)
        assert counts.published == np.count_nonzero(standing & (columns.readers == 0))
        assert counts.free + counts.reserved + counts.published + counts.pinned == counts.capacity
        assert not columns.readers[~standing].any()
        assert self._withdrawn == set(np.flatnonzero(withdrawn).tolist())
        assert (columns.holder[reserved] != 0).all()
        assert not columns.holder[~reserved].any()
        assert sorted(self.index.all_blocks().tolist()) == np.flatnonzero(published).tolist()
        kept = np.flatnonzero(published)
        parents = columns.parent[kept]
        assert standing[parents[parents != 0]].all()
        children = np.bincount(parents[parents != 0], minlength=self.num_blocks)
        assert (children == columns.children).all()
        assert (table["state"] == columns.state).all()
        assert (table["generation"][1:] == columns.generation[1:]).all()
        found = find_survivors(table.copy(), namespace=self._namespace)
        if not withdrawn.any():  # what lies below such a block goes with it at an adoption
            assert sorted(found.blocks.tolist()) == kept.tolist()
        assert not withdrawn[found.blocks].any()
        assert (found.keys == columns.keys_of(found.blocks)).all()
        assert (found.parents == columns.parent[found.blocks]).all()
