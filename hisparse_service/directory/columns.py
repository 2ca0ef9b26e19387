"""The directory's own record of each block: what it knows, whatever stands in shared memory.

One row of 64 B a block, so that everything a lookup reads and writes of a block is one cache line:
15,625 scattered blocks of a million in cold caches take 1.6 ms, with an array a field 2.6 ms
(fastest of 25, benchmarks/bench_directory.py). Each field is there twice, as a column for many
blocks and as a memoryview for one, whose items cost less.

Owned by `blocks.py`; `index.py` keeps its two fields in it, `eviction.py` only reads.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_ROW_BYTES: Final = 64
_ROW: Final = np.dtype(
    {
        "names": [
            "key_low", "key_high", "last_use", "holder", "parent", "depth", "children", "readers",
            "generation", "next_in_bucket", "state",
        ],
        "formats": ["u8", "u8", "u8", "i8", "u4", "u4", "u4", "u4", "u4", "u4", "u1"],
        "offsets": [0, 8, 16, 24, 32, 36, 40, 44, 48, 52, 56],
        "itemsize": _ROW_BYTES,
    }
)  # fmt: skip


class BlockColumns:
    """Columns of `num_blocks` blocks, the null block included (free, for ever)."""

    def __init__(self, num_blocks: int) -> None:
        # Rows begin at cache lines, which numpy alone does not promise.
        raw = np.zeros((num_blocks + 1) * _ROW_BYTES, np.uint8)
        skip = -raw.ctypes.data % _ROW_BYTES
        rows: npt.NDArray[Any] = raw[skip : skip + num_blocks * _ROW_BYTES].view(_ROW)

        self.key_low: npt.NDArray[np.uint64] = rows["key_low"]
        """Of blocks in the index."""
        self.key_high: npt.NDArray[np.uint64] = rows["key_high"]
        self.next_in_bucket: npt.NDArray[np.uint32] = rows["next_in_bucket"]
        """The index's chain; 0 ends it."""
        self.state: npt.NDArray[np.uint8] = rows["state"]
        """`BlockState`."""
        self.generation: npt.NDArray[np.uint32] = rows["generation"]
        self.generation[:] = 1
        self.parent: npt.NDArray[np.uint32] = rows["parent"]
        """Of published blocks; 0 = first of its prefix."""
        self.depth: npt.NDArray[np.uint32] = rows["depth"]
        """Of published blocks."""
        self.children: npt.NDArray[np.uint32] = rows["children"]
        """Published blocks whose parent this one is."""
        self.readers: npt.NDArray[np.uint32] = rows["readers"]
        """Leases that pin it; only in PUBLISHED, and in EVICTING while it is withdrawn."""
        self.last_use: npt.NDArray[np.uint64] = rows["last_use"]
        """Use counter at publication, pin and last unpin."""
        self.holder: npt.NDArray[np.int64] = rows["holder"]
        """Lease that may write it; only in RESERVED and WRITING, else 0."""

        self.key_low_view = self.key_low.data
        self.key_high_view = self.key_high.data
        self.next_in_bucket_view = self.next_in_bucket.data
        self.state_view = self.state.data
        self.generation_view = self.generation.data
        self.parent_view = self.parent.data
        self.depth_view = self.depth.data
        self.children_view = self.children.data
        self.readers_view = self.readers.data
        self.last_use_view = self.last_use.data
        self.holder_view = self.holder.data

    def keys_of(self, blocks: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
        """Keys of blocks that are, or just were, in the index: u64 [n, 2]."""
        return np.stack((self.key_low[blocks], self.key_high[blocks]), axis=1)
