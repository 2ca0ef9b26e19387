"""What vLLM's index groups did, for the daemon's metrics, read without waiting for the device.

vLLM's kernels count hits and misses in a device tensor that vLLM reads and zeroes every 2,000
steps; ours count in `HotState.counters`, which only grow. A sample is a copy to pinned memory in
stream order, read at a later step, when its event has passed. Counts before a zeroing come with
vLLM's own statistics, so that none is lost; between the zeroing and those a sample shows too
little, which `SwapReporter` waits out.

On the worker's main thread, once a step, after the forward was enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker_client.kernels.interface import Counter
from worker_client.runtime import SwapStatistics


class SwapSampler:
    """Samples of all index groups of a worker; the `statistics` of a `SwapReporter`.

    Args:
        groups: vLLM's `HiSparseIndexGroup`s.
        counters: int64 ``[len(Counter)]``, one a group: of our kernels; empty for vLLM's, whose
            groups count in ``swap_stats``, uint64 ``[2]``.
        current_stream: The stream that the forward was enqueued on.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        *,
        counters: Sequence[torch.Tensor] = (),
        current_stream: Callable[[], Any],
    ) -> None:
        self._groups = groups
        self._is_ours = bool(counters)
        self._device = counters or [group.swap_stats for group in groups]
        self._host = [
            torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=counts.is_cuda)
            for counts in self._device
        ]
        self._current_stream = current_stream
        self._event = torch.Event()
        self._is_pending = False
        self._taken = (0, 0, 0)
        """Hits, misses and bytes that are not in vLLM's counters any more."""
        self._seen = (0, 0, 0)
        """The same of its counters at the last sample."""

    def __call__(self) -> list[SwapStatistics] | None:
        """Totals since the start; None while a sample is under way, which the first call starts."""
        if not self._is_pending:
            self._start()
            return None
        if not self._event.query():
            return None
        self._is_pending = False
        return self._of_ours() if self._is_ours else self._of_vllms()

    def vllm_took(self, hits: int, misses: int, row_bytes: int) -> None:
        """VLLM's statistics say what its counters had before it zeroed them."""
        self._take((hits, misses, row_bytes))

    def reset(self) -> None:
        """VLLM zeroed its counters and says nothing: what was seen of them stays counted."""
        self._take(self._seen)

    def _take(self, counts: tuple[int, int, int]) -> None:
        hits, misses, row_bytes = self._taken
        self._taken = (hits + counts[0], misses + counts[1], row_bytes + counts[2])
        self._seen = (0, 0, 0)
        self._is_pending = False  # that sample may be of before the zeroing: counted twice

    def _start(self) -> None:
        # As vLLM does: a captured graph counts on the current stream, all else on the groups'.
        stream = self._current_stream()
        for group, device, host in zip(self._groups, self._device, self._host, strict=True):
            stream.wait_stream(group.copy_stream)
            host.copy_(device, non_blocking=True)
        self._event.record(stream)
        self._is_pending = True

    def _of_vllms(self) -> list[SwapStatistics]:
        hits = misses = row_bytes = 0
        for group, host in zip(self._groups, self._host, strict=True):
            group_hits, group_misses = host.tolist()
            hits += group_hits
            misses += group_misses
            row_bytes += group_misses * group.stats_row_bytes
        self._seen = (hits, misses, row_bytes)
        return [_vllm_statistics(*self._taken), _vllm_statistics(*self._seen)]

    def _of_ours(self) -> list[SwapStatistics]:
        found = []
        for group, host in zip(self._groups, self._host, strict=True):
            counts = host.tolist()
            found.append(
                SwapStatistics(
                    resident_lanes=counts[Counter.RESIDENT_LANES],
                    hot_lanes=counts[Counter.HOT_LANES],
                    miss_lanes=counts[Counter.MISS_LANES],
                    miss_rows=counts[Counter.MISS_ROWS],
                    invalid_lanes=counts[Counter.INVALID_LANES],
                    transactions=counts[Counter.TRANSACTIONS],
                    invalidated_rows=counts[Counter.INVALIDATED_ROWS],
                    gathered_bytes=counts[Counter.MISS_ROWS] * group.stats_row_bytes,
                )
            )
        return found


def _vllm_statistics(hits: int, misses: int, gathered_bytes: int) -> SwapStatistics:
    """VLLM's kernels do not count lanes that a resident page answers, nor requests."""
    return SwapStatistics(
        resident_lanes=0, hot_lanes=hits, miss_lanes=misses, miss_rows=misses, invalid_lanes=0,
        transactions=0, invalidated_rows=0, gathered_bytes=gathered_bytes,
    )  # fmt: skip


__all__ = ["SwapSampler"]
