"""The prefix index of one namespace: block key -> block, for whole arrays of keys at once.

A chained hash table whose links are fields of the block rows (`columns.py`): no Python object a
block, no rebuilds, tombstones or growth, so the work an operation is the same for a thousand and a
million blocks. What grows is how much of it misses the caches: a scattered key takes one line of
the buckets and one of the rows. A dict of bytes was measured first: 15,625 random keys took 300 ns
each among 1,000 blocks, but 800 ns among 1,000,000; here the misses overlap
(benchmarks/bench_directory.py). Blocks that lie in a row are not even looked for: see
`BlockDirectory.match_prefix`.

Buckets are chosen with a secret seed, so that a client cannot choose keys that share one.
Only `blocks.py` calls it, on the control loop.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.segment import U64_MASK
from hisparse_service.directory.columns import BlockColumns

Blocks = npt.NDArray[np.intp]
"""Block ids as numpy indexes fastest."""
Keys = npt.NDArray[np.uint64]
"""u64 [n, 2]: the low and the high half of each key."""

_BUCKETS_A_BLOCK: Final = 8
"""4 B each. With 2, an eighth to a quarter of all keys stand behind another in their bucket, and
each of those costs two cache misses more: 55 ns a key among 1,000,000 blocks, with 8 it is 43
(benchmarks/bench_directory.py, scattered)."""
_FEW: Final = 8
"""Up to here a Python loop beats the fixed cost of some thirty numpy calls."""
_ODD_LOW: Final = 0x9E3779B97F4A7C15
_ODD_HIGH: Final = 0xC2B2AE3D27D4EB4F


def as_keys(keys: bytes) -> Keys:
    """View n * 16 B of keys as u64 [n, 2]."""
    return np.frombuffer(keys, "<u8").reshape(-1, 2)


class KeyIndex:
    """The index over `num_blocks` blocks (null block included: it means "not found").

    Args:
        columns: The block rows; this writes key_low, key_high and next_in_bucket alone.
        seed: 128 random bits.
    """

    def __init__(self, columns: BlockColumns, *, seed: int) -> None:
        num_blocks = len(columns.state)
        bits = max(4, (_BUCKETS_A_BLOCK * num_blocks - 1).bit_length())
        self._shift = 64 - bits
        self._xor_low = seed & U64_MASK
        self._xor_high = (seed >> 64) & U64_MASK
        # Odd multipliers, secret too.
        self._mul_low = (_ODD_LOW ^ (self._xor_high << 1)) & U64_MASK
        self._mul_high = (_ODD_HIGH ^ (self._xor_low << 1)) & U64_MASK
        # The same for arrays: a numpy scalar is made only once.
        self._u64 = tuple(
            np.uint64(number)
            for number in (
                self._xor_low, self._mul_low, self._xor_high, self._mul_high, self._shift,
            )
        )  # fmt: skip
        self._heads = np.zeros(1 << bits, np.uint32)
        self._next = columns.next_in_bucket
        self._low = columns.key_low
        self._high = columns.key_high
        self._heads_view = self._heads.data
        self._next_view = columns.next_in_bucket_view
        self._low_view = columns.key_low_view
        self._high_view = columns.key_high_view
        self._dead = np.zeros(num_blocks, np.bool_)

    def _buckets(self, low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> Blocks:
        xor_low, mul_low, xor_high, mul_high, shift = self._u64
        mixed = (low ^ xor_low) * mul_low
        mixed += (high ^ xor_high) * mul_high
        mixed >>= shift
        return mixed.view(np.int64)

    def _bucket(self, low: int, high: int) -> int:
        mixed = (low ^ self._xor_low) * self._mul_low + (high ^ self._xor_high) * self._mul_high
        return (mixed & U64_MASK) >> self._shift

    def find(self, keys: Keys) -> Blocks:
        """Blocks of keys, intp [n]; 0 where there is none."""
        low, high = keys[:, 0], keys[:, 1]
        found = self._heads[self._buckets(low, high)].astype(np.intp)
        # The null block ends every chain, and once more where a bucket is empty.
        open_ = self._low[found] != low
        open_ |= self._high[found] != high
        pending = np.flatnonzero(open_)
        while pending.size:
            here = self._next[found[pending]].astype(np.intp)
            found[pending] = here
            open_ = (self._low[here] != low[pending]) | (self._high[here] != high[pending])
            open_ &= here != 0
            pending = pending[open_]
        return found

    def find_one(self, low: int, high: int) -> int:
        """Block of one key; 0 when there is none."""
        block: int = self._heads_view[self._bucket(low, high)]
        while block:
            if self._low_view[block] == low and self._high_view[block] == high:
                return block
            block = self._next_view[block]
        return 0

    def bucket_without(self, low: int, high: int) -> int:
        """For `insert`, where this key goes; -1 when it is there."""
        mixed = (low ^ self._xor_low) * self._mul_low + (high ^ self._xor_high) * self._mul_high
        bucket = (mixed & U64_MASK) >> self._shift
        block: int = self._heads_view[bucket]
        while block:
            if self._low_view[block] == low and self._high_view[block] == high:
                return -1
            block = self._next_view[block]
        return bucket

    def add_one(self, block: int, low: int, high: int) -> None:
        """Put a block in; its key must not be there."""
        self.insert(block, self._bucket(low, high), low, high)

    def insert(self, block: int, bucket: int, low: int, high: int) -> None:
        """`add_one`, where `bucket_without` told the bucket."""
        self._low_view[block] = low
        self._high_view[block] = high
        self._next_view[block] = self._heads_view[bucket]
        self._heads_view[bucket] = block

    def add(self, blocks: Blocks, keys: Keys) -> None:
        """Put blocks in; keys must be distinct and not there."""
        if not blocks.size:
            return
        self._low[blocks] = keys[:, 0]
        self._high[blocks] = keys[:, 1]
        buckets = self._buckets(keys[:, 0], keys[:, 1])
        order = np.argsort(buckets, kind="stable")
        buckets, blocks = buckets[order], blocks[order]
        # Blocks of one bucket now stand side by side: link each to the next, the last to the old
        # head, and make the first the head.
        follows = self._heads[buckets]
        shared = buckets[1:] == buckets[:-1]
        follows[:-1][shared] = blocks[1:][shared]
        self._next[blocks] = follows
        first = np.ones(len(blocks), np.bool_)
        first[1:] = ~shared
        self._heads[buckets[first]] = blocks[first]

    def remove(self, blocks: Blocks) -> None:
        """Take blocks out; each must be in."""
        if len(blocks) <= _FEW:
            for block in blocks.tolist():
                self.remove_one(block)
            return
        buckets = np.sort(self._buckets(self._low[blocks], self._high[blocks]))
        buckets = buckets[np.concatenate(([True], buckets[1:] != buckets[:-1]))]
        self._dead[blocks] = True
        here = self._skip_dead(self._heads[buckets])
        self._heads[buckets] = here
        while (here := here[here != 0]).size:
            after = self._skip_dead(self._next[here])
            self._next[here] = after
            here = after
        self._dead[blocks] = False

    def _skip_dead(self, blocks: npt.NDArray[Any]) -> npt.NDArray[Any]:
        while (dead := self._dead[blocks]).any():
            blocks[dead] = self._next[blocks[dead]]
        return blocks

    def remove_one(self, block: int) -> None:
        """Take a block out; it must be in."""
        bucket = self._bucket(self._low_view[block], self._high_view[block])
        follows = self._next_view[block]
        before: int = self._heads_view[bucket]
        if before == block:
            self._heads_view[bucket] = follows
            return
        while self._next_view[before] != block:
            before = self._next_view[before]
        self._next_view[before] = follows

    def all_blocks(self) -> Blocks:
        """Every block that is in, in no order. Walks the whole table: for tests."""
        parts = []
        here = self._heads[self._heads != 0].astype(np.intp)
        while here.size:
            parts.append(here)
            here = self._next[here].astype(np.intp)
            here = here[here != 0]
        return np.concatenate(parts) if parts else np.zeros(0, np.intp)
