"""What telemetry knows of a backing: its blocks' states, and when their mirrors were enqueued.

`MirrorClock` is called by the control loop. `occupancy` and `publication_lag_s` read the live
arrays from another thread: a picture may mix two moments, which a picture may.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.segment import BlockState
from hisparse_service.telemetry.histogram import LatencyHistogram

U32Array = npt.NDArray[np.uint32]
_FEW: Final = 16
"""Up to so many blocks are looked at one by one: less than numpy's own overhead."""
_CHUNK_BLOCKS: Final = 65_536
"""Blocks looked at before the GIL may pass to the control loop: about 0.3 ms."""
SHARES: Final = ("reserved", "published", "pinned")
"""Of an occupancy cell, in per cent; what is missing to 100 is free."""


class MirrorClock:
    """How long mirrors of one backing's blocks take, from enqueued to completed.

    Args:
        num_blocks: Of the backing, null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        # Zeros are not touched, hence not resident, before a block is first mirrored.
        self.enqueued_ns = np.zeros(num_blocks, np.int64)
        """When the mirror of a block was enqueued (CLOCK_MONOTONIC); 0: not known."""
        self._view = self.enqueued_ns.data
        self.latency = LatencyHistogram()
        self.enqueued_total = 0
        self.completed_total = 0

    def enqueued(self, blocks: U32Array, now_ns: int) -> None:
        """Copies of these blocks are in stream order. The ids are valid."""
        self.enqueued_total += len(blocks)
        if len(blocks) <= _FEW:
            view = self._view
            for block in blocks.tolist():
                view[block] = now_ns
        else:
            self.enqueued_ns[blocks] = now_ns

    def enqueued_ones(self, blocks: list[int], now_ns: int) -> None:
        """`enqueued` of a few blocks."""
        self.enqueued_total += len(blocks)
        view = self._view
        for block in blocks:
            view[block] = now_ns

    def completed_one(self, block: int, now_ns: int) -> None:
        """`completed` of one block."""
        self.completed_total += 1
        began_ns = self._view[block]
        if began_ns:
            self._view[block] = 0
            self.latency.observe_ns(now_ns - began_ns)

    def completed(self, blocks: U32Array, now_ns: int) -> None:
        """The writer saw the copies complete. The ids are valid."""
        self.completed_total += len(blocks)
        if len(blocks) <= _FEW:
            view, observe_ns = self._view, self.latency.observe_ns
            for block in blocks.tolist():
                began_ns = view[block]
                if began_ns:
                    view[block] = 0
                    observe_ns(now_ns - began_ns)
            return
        began = self.enqueued_ns[blocks]
        self.enqueued_ns[blocks] = 0
        self.latency.observe_many_ns(now_ns - began[began > 0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackingView:
    """Live arrays of a backing. `state` and `readers` are the directory's: read only."""

    namespace_id: int
    name: str
    block_stride_bytes: int
    state: npt.NDArray[np.uint8]
    """`BlockState` of each block, the null block included."""
    readers: npt.NDArray[np.uint32]
    clock: MirrorClock

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold something."""
        return len(self.state) - 1

    def publication_lag_s(self, now_ns: int) -> float:
        """Age of the oldest mirror that was enqueued and is not published; 0 without any."""
        oldest = 0
        for start in range(0, len(self.state), _CHUNK_BLOCKS):
            part = slice(start, start + _CHUNK_BLOCKS)
            began = self.clock.enqueued_ns[part][self.state[part] == BlockState.WRITING]
            began = began[began > 0]
            if len(began) and (not oldest or int(began.min()) < oldest):
                oldest = int(began.min())
        return max(0.0, (now_ns - oldest) / 1e9) if oldest else 0.0

    def occupancy(self, num_cells: int) -> dict[str, Any]:
        """Shares of the states in `num_cells` equal runs of blocks, in the order of their ids.

        `shares` holds three whole numbers a cell: see `SHARES`.
        """
        num_cells = max(1, min(num_cells, self.num_blocks))
        edges = 1 + np.arange(num_cells + 1, dtype=np.int64) * self.num_blocks // num_cells
        counts = np.zeros((num_cells, len(SHARES)), np.int64)
        step = max(1, _CHUNK_BLOCKS * num_cells // max(1, self.num_blocks))
        for first in range(0, num_cells, step):
            last = min(num_cells, first + step)
            begin, end = int(edges[first]), int(edges[last])
            state, read = self.state[begin:end], self.readers[begin:end] > 0
            published = state == BlockState.PUBLISHED
            flags = np.empty((end - begin, len(SHARES)), np.int32)
            flags[:, 0] = (state == BlockState.RESERVED) | (state == BlockState.WRITING)
            flags[:, 1] = published & ~read
            flags[:, 2] = published & read
            counts[first:last] = np.add.reduceat(flags, edges[first:last] - begin, axis=0)
        sizes = np.diff(edges)[:, None]
        # A single block in a cell of thousands must not vanish: what is there shows at least 1 %.
        shares = np.minimum(100, -(-counts * 100 // sizes))
        return {
            "namespace": self.namespace_id, "name": self.name, "num_blocks": self.num_blocks,
            "block_stride_bytes": self.block_stride_bytes,
            "blocks_per_cell": round(self.num_blocks / num_cells, 1),
            "shares": shares.ravel().tolist(),
        }  # fmt: skip
