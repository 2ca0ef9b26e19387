"""The directory's own arrays, one entry a block: what it knows, whatever stands in shared memory.

Owned by `blocks.py`; `eviction.py` reads them. Each is there twice, as an array for many blocks and
as a memoryview for one (an item of a numpy array costs 60 to 100 ns, of a memoryview 30).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class BlockColumns:
    """Columns of `num_blocks` blocks, the null block included (free, for ever)."""

    def __init__(self, num_blocks: int) -> None:
        self.state: npt.NDArray[np.uint8] = np.zeros(num_blocks, np.uint8)
        """`BlockState`."""
        self.generation: npt.NDArray[np.uint32] = np.ones(num_blocks, np.uint32)
        self.parent: npt.NDArray[np.uint32] = np.zeros(num_blocks, np.uint32)
        """Of published blocks; 0 = first of its prefix."""
        self.depth: npt.NDArray[np.uint32] = np.zeros(num_blocks, np.uint32)
        """Of published blocks."""
        self.children: npt.NDArray[np.uint32] = np.zeros(num_blocks, np.uint32)
        """Published blocks whose parent this one is."""
        self.readers: npt.NDArray[np.uint32] = np.zeros(num_blocks, np.uint32)
        """Leases that pin it; only in PUBLISHED."""
        self.last_use: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        """Use counter at publication, pin and last unpin."""
        self.holder: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        """Lease that may write it; only in RESERVED and WRITING, else 0."""

        self.state_view: memoryview[Any] = self.state.data
        self.generation_view: memoryview[Any] = self.generation.data
        self.parent_view: memoryview[Any] = self.parent.data
        self.depth_view: memoryview[Any] = self.depth.data
        self.children_view: memoryview[Any] = self.children.data
        self.readers_view: memoryview[Any] = self.readers.data
        self.last_use_view: memoryview[Any] = self.last_use.data
        self.holder_view: memoryview[Any] = self.holder.data
