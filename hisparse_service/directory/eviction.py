"""Chooses victims: least recently used first, leaf blocks of a prefix first, never a pinned one.

It only chooses; `blocks.py` gives the blocks up. It reads the block arrays and never writes them.
Only `blocks.py` calls it, on the control loop.

A block is a *candidate* while it is published, has no readers and no children. Victims go in the
order of (last use, deepest first, id) among the candidates at that moment; a parent becomes one
when its last child goes. There is no scan and no reordering on use, because last use only changes
while a block is pinned, and ends as the time of its last unpin:

- a block that becomes a candidate by its last unpin is the most recently used of all: it is
  appended to a queue, which is therefore sorted for ever;
- a block that becomes one by losing its last child may be older: it goes to a small heap.

Entries are checked when they are taken (still a candidate, not used since), so ending candidacy
costs nothing. Stale entries are swept out when they outnumber the living ones: amortised constant.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Final

import numpy as np

from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.index import Blocks

_PUBLISHED: Final = int(BlockState.PUBLISHED)  # numpy is slow with members of enums
_MIN_SWEEP_ENTRIES: Final = 4096
"""Below this many entries stale ones are not worth a sweep."""

_HeapKey = tuple[int, int, int]
"""(last use, -depth, block): the order in which victims go."""


class LeastRecentlyUsed:
    """Eviction order of one backing.

    Args:
        columns: The block arrays; read only.
    """

    def __init__(self, columns: BlockColumns) -> None:
        self._columns = columns
        self._queue_ticks = array("Q")
        self._queue_blocks = array("I")
        self._head = 0
        self._heap: list[_HeapKey] = []
        self._max_queue = _MIN_SWEEP_ENTRIES
        self._max_heap = _MIN_SWEEP_ENTRIES

    def rebuild(self) -> None:
        """Start again from the arrays alone (adoption). The only sort of everything."""
        found = self._candidates(np.arange(len(self._columns.state)))
        columns = self._columns
        depth = columns.depth[found].astype(np.int64)
        found = found[np.lexsort((found, -depth, columns.last_use[found]))]
        self._queue_blocks = array("I", found.astype(np.uint32).tobytes())
        self._queue_ticks = array("Q", columns.last_use[found].tobytes())
        self._head = 0
        self._heap = []

    def unpinned(self, blocks: Blocks, tick: int) -> None:
        """These lost their last reader at `tick`, which is also their last use now."""
        columns = self._columns
        leaves = blocks[columns.children[blocks] == 0]
        if leaves.size > 1:
            depth = columns.depth[leaves].astype(np.int64)
            leaves = leaves[np.lexsort((leaves, -depth))]
        self._queue_blocks.frombytes(leaves.astype(np.uint32).tobytes())
        self._queue_ticks.extend([tick] * len(leaves))
        if len(self._queue_blocks) - self._head > self._max_queue:
            self._sweep_queue()

    def lost_children(self, blocks: Blocks) -> None:
        """These lost their last child; those without readers are candidates now."""
        columns = self._columns
        for block in blocks[columns.readers[blocks] == 0].tolist():
            heapq.heappush(
                self._heap, (columns.last_use_view[block], -columns.depth_view[block], block)
            )
        if len(self._heap) > self._max_heap:
            self._sweep_heap()

    def choose(self, num_blocks: int) -> Blocks:
        """Up to `num_blocks` victims, in order; fewer when there are no more.

        The caller gives all of them up, or hands them to `put_back` before anything else.
        """
        columns = self._columns
        state, readers, children = columns.state_view, columns.readers_view, columns.children_view
        last_use = columns.last_use_view
        heap = self._heap
        victims: list[int] = []
        taken: set[int] = set()
        children_left: dict[int, int] = {}
        head = self._queue_head()
        while len(victims) < num_blocks:
            if heap and (head is None or heap[0] < head):
                tick, _, block = heapq.heappop(heap)
            elif head is not None:
                tick, _, block = head
                self._head += 1
                head = self._queue_head()
            else:
                break
            if (
                state[block] == _PUBLISHED
                and not readers[block]
                and last_use[block] == tick
                and block not in taken
                and not children_left.get(block, children[block])
            ):
                limit = min(heap[0], head) if heap and head else (heap[0] if heap else head)
                chain = self._climb(block, num_blocks - len(victims), limit, children_left)
                victims += chain
                taken.update(chain)
        return np.array(victims, np.intp)

    def _climb(
        self,
        block: int,
        max_blocks: int,
        limit: _HeapKey | None,
        children_left: dict[int, int],
    ) -> list[int]:
        """A victim and those ancestors that go right after it, before `limit`.

        A prefix goes from its end to its start, most often in one piece: 0.4 us a block instead of
        1.3 us through the heap.
        """
        columns = self._columns
        readers, children, states = (
            columns.readers_view, columns.children_view, columns.state_view
        )  # fmt: skip
        parents, last_use, depth = columns.parent_view, columns.last_use_view, columns.depth_view
        chain = [block]
        while parent := parents[block]:
            left = children[parent]
            if left != 1 or parent in children_left:
                left = children_left.get(parent, left)
            left -= 1
            if left or readers[parent] or states[parent] != _PUBLISHED:
                children_left[parent] = left
                break
            key = (last_use[parent], -depth[parent], parent)
            if len(chain) == max_blocks or (limit is not None and limit < key):
                children_left[parent] = 0
                heapq.heappush(self._heap, key)
                break
            chain.append(parent)
            block = parent
        return chain

    def put_back(self, blocks: Blocks) -> None:
        """Undo a `choose` whose victims stay."""
        columns = self._columns
        keys = zip(
            columns.last_use[blocks].tolist(),
            (-columns.depth[blocks].astype(np.int64)).tolist(),
            blocks.tolist(),
            strict=True,
        )
        # Entries of parents that `choose` pushed are stale now, and are dropped when taken.
        self._heap.extend(keys)
        heapq.heapify(self._heap)

    def _queue_head(self) -> _HeapKey | None:
        columns, at = self._columns, self._head
        if at >= len(self._queue_blocks):
            del self._queue_blocks[:], self._queue_ticks[:]
            self._head = 0
            return None
        block = self._queue_blocks[at]
        return (self._queue_ticks[at], -columns.depth_view[block], block)

    def _candidates(self, blocks: Blocks) -> Blocks:
        columns = self._columns
        mask = columns.state[blocks] == _PUBLISHED
        mask &= (columns.readers[blocks] == 0) & (columns.children[blocks] == 0)
        found: Blocks = blocks[mask]
        return found

    def _sweep_queue(self) -> None:
        columns = self._columns
        blocks = np.array(self._queue_blocks, np.intp)[self._head :]
        ticks = np.array(self._queue_ticks, np.uint64)[self._head :]
        keep = columns.state[blocks] == _PUBLISHED
        keep &= (columns.readers[blocks] == 0) & (columns.children[blocks] == 0)
        keep &= columns.last_use[blocks] == ticks
        self._queue_blocks = array("I", blocks[keep].astype(np.uint32).tobytes())
        self._queue_ticks = array("Q", ticks[keep].tobytes())
        self._head = 0
        self._max_queue = max(_MIN_SWEEP_ENTRIES, 2 * len(self._queue_blocks))

    def _sweep_heap(self) -> None:
        columns = self._columns
        blocks = np.array([block for _, _, block in self._heap], np.intp)
        ticks = np.array([tick for tick, _, _ in self._heap], np.uint64)
        fresh = self._candidates(np.unique(blocks[columns.last_use[blocks] == ticks]))
        self._heap = []
        self.put_back(fresh)
        self._max_heap = max(_MIN_SWEEP_ENTRIES, 2 * len(self._heap))
