"""What the layers that share a top-k share: hot map, recency, plan, and the copies of a step.

Borrows its layers' pages and backend; owns state and plan. Called on the worker's compute thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hisparse_service.contract.errors import UsageError
from worker_client.binding_checks import bound
from worker_client.kernels.interface import (
    Counter,
    GroupPages,
    HotState,
    KernelBackend,
    ResolvePlan,
    allocate_plan,
    check_hot_size,
)
from worker_client.prefetch import GroupPrefetch

if TYPE_CHECKING:
    from worker_client.layer_runtime import HiSparseRuntime

__all__ = ["HiSparseIndexGroup", "SwapStatistics"]


@dataclass(frozen=True, kw_only=True)
class SwapStatistics:
    """What an index group did since its buffers were made (see `interface.Counter`).

    Attributes:
        resident_lanes: Top-k lanes answered by resident pages.
        hot_lanes: Lanes answered by hot rows of earlier steps.
        miss_lanes: Lanes on rows that had to be read from host memory.
        miss_rows: Distinct rows read, counted once for all layers.
        invalid_lanes: Lanes with no row anywhere (always 0 on the reference, which raises).
        transactions: Requests resolved, one a step.
        invalidated_rows: Hot rows forgotten.
        gathered_bytes: Bytes copied host to hot, all layers.
    """

    resident_lanes: int
    hot_lanes: int
    miss_lanes: int
    miss_rows: int
    invalid_lanes: int
    transactions: int
    invalidated_rows: int
    gathered_bytes: int


class HiSparseIndexGroup:
    """State that the layers of one index group share: leader first, then its followers.

    Attributes:
        leader: The layer that has an indexer.
        followers: The layers that reuse its top-k, in order of construction.
        state: Hot map and recency; None until `initialize_buffers`.
        plan: The plan of the last step; None until `initialize_buffers`.
        backend: The kernels in use.
        prefetch: Where the copies run beside the computation, or None: where `swap_in` stands.
    """

    leader: HiSparseRuntime

    def __init__(self, leader: HiSparseRuntime, backend: KernelBackend) -> None:
        self.leader = leader
        self.followers: list[HiSparseRuntime] = []
        self.backend = backend
        self.state: HotState | None = None
        self.plan: ResolvePlan | None = None
        self.prefetch: GroupPrefetch | None = None
        self.step = 0
        self._pages: GroupPages | None = None
        self._parts: dict[tuple[int, int], GroupPages] = {}

    @property
    def runtimes(self) -> list[HiSparseRuntime]:
        """All layers, leader first: the order of `pages`."""
        return [self.leader, *self.followers]

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return 1 + len(self.followers)

    def initialize_buffers(
        self, *, max_num_reqs: int, max_num_batched_tokens: int | None = None
    ) -> None:
        """Allocate hot state and plan, once: see `HiSparseRuntime.initialize_buffers`."""
        if self.state is not None:
            if self.state.max_num_reqs != max_num_reqs:
                raise UsageError(
                    f"buffers were made for {self.state.max_num_reqs} requests, not {max_num_reqs}"
                )
            return
        config = self.leader.config
        hot = self.leader.hot
        max_query_rows = max_num_reqs * config.max_decode_query_len
        if max_num_batched_tokens is not None:
            max_query_rows = min(max_query_rows, max_num_batched_tokens)
        max_row = (hot.num_blocks - 1) * hot.block_stride_rows + hot.block_size - 1
        device = self.leader.device
        state = self.backend.make_hot_state(
            max_num_reqs=max_num_reqs, hot_rows=config.device_buffer_size, device=device
        )
        check_hot_size(
            hot_rows=state.hot_rows,
            max_query_rows=config.max_decode_query_len,
            top_k=config.top_k,
        )
        self.plan = allocate_plan(
            max_num_requests=max_num_reqs,
            max_query_rows=max_query_rows,
            max_rows_per_request=config.max_decode_query_len,
            top_k=config.top_k,
            device=device,
            row_dtype=torch.int32 if max_row < 2**31 else torch.int64,
        )
        self.state = state

    def pages(self) -> GroupPages:
        """Host and device bytes of all layers, checked once after binding.

        Raises:
            GeometryError: The layers do not fit each other.
            UsageError: A layer is not bound yet.
        """
        if self._pages is None:
            self._pages = GroupPages(
                host=tuple(runtime.source_pages for runtime in self.runtimes),
                device=tuple(runtime.hot.byte_pages() for runtime in self.runtimes),
                block_stride_rows=self.leader.hot.block_stride_rows,
            )
        return self._pages

    def layer_pages(self, start: int, stop: int) -> GroupPages:
        """`pages` of layers ``[start, stop)``: the same object each time, checked once."""
        if (start, stop) == (0, self.num_layers):
            return self.pages()
        part = self._parts.get((start, stop))
        if part is None:
            part = self._parts[start, stop] = self.pages().layers(start, stop)
        return part

    def forget_pages(self) -> None:
        """Called when a layer is bound anew."""
        self._pages = None
        self._parts.clear()

    def gather(self, plan: ResolvePlan) -> None:
        """Copy the planned rows of all layers, on the side stream where there is one."""
        if self.prefetch is None:
            self.backend.gather(pages=self.pages(), plan=plan)
            return
        self.prefetch.start(
            lambda start, stop, overlap: self.backend.gather(
                pages=self.layer_pages(start, stop), plan=plan, overlap=overlap
            )
        )

    def wait_rows(self, layer: int | None = None) -> None:
        """The current stream goes on when the rows of a layer are there (of all, for None).

        All must have been waited for before a capture ends, and before anything but the group's
        own layers touches hot rows.
        """
        if self.prefetch is None:
            return
        if layer is None:
            self.prefetch.wait_all()
        else:
            self.prefetch.wait(layer)

    def statistics(self) -> SwapStatistics:
        """Read the counters. Waits for the device.

        Raises:
            UsageError: There are no buffers yet.
        """
        state = bound(self.state, "initialize_buffers")
        values = dict(zip(Counter, state.counters.tolist(), strict=True))
        miss_rows = values[Counter.MISS_ROWS]
        return SwapStatistics(
            resident_lanes=values[Counter.RESIDENT_LANES],
            hot_lanes=values[Counter.HOT_LANES],
            miss_lanes=values[Counter.MISS_LANES],
            miss_rows=miss_rows,
            invalid_lanes=values[Counter.INVALID_LANES],
            transactions=values[Counter.TRANSACTIONS],
            invalidated_rows=values[Counter.INVALIDATED_ROWS],
            gathered_bytes=miss_rows * self.leader.row_bytes * self.num_layers,
        )
