"""The device side of sparse attention: hot regions, index groups, and what attention holds.

One `HiSparseRuntime` a layer; the layers that share a top-k share one `HiSparseIndexGroup` (hot
map, recency and plan): its leader resolves a step and copies the missing rows for all of them, its
followers reuse the plan. One `HiSparseCacheHandle` a layer is what the attention layer sees.

`swap_in` gives a layer its rows. With `enable_prefetch` the copies run on a side stream, and each
layer's `swap_in` waits for its own; a leader that has something to compute before it reads them
calls `begin_swap` where its top-k is known and `wait_rows` where it reads.

Borrows all memory it is bound to (device backing, host pool, block tables); owns its state and plan
tensors. Called on the worker's compute thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.kernels import backend_for
from worker_client.kernels.interface import (
    Counter,
    GroupPages,
    HotState,
    KernelBackend,
    Overlap,
    ResidencyTables,
    ResolvePlan,
    StepInputs,
    allocate_plan,
    check_hot_size,
    check_row_bytes,
    check_rows_per_request,
    check_step,
    check_tensor,
    check_top_k,
)
from worker_client.prefetch import CopyLane, GatherSplit, GroupPrefetch, lane_for
from worker_client.views import PagedCacheView

_T = TypeVar("_T")

__all__ = [
    "HiSparseCacheHandle",
    "HiSparseIndexGroup",
    "HiSparseRuntime",
    "ResolvedHiSparseConfig",
    "SwapStatistics",
    "create_index_group_handles",
    "enable_prefetch",
    "initialize_hisparse_runtime_buffers",
]


@dataclass(frozen=True, kw_only=True)
class ResolvedHiSparseConfig:
    """Sizes of a hot region. Make it with `resolve`.

    Attributes:
        top_k: Rows that the indexer selects for one query row.
        device_buffer_size: Hot rows of a request.
        max_decode_query_len: Query rows of a request in one decode step (1 + speculative tokens).
    """

    top_k: int
    device_buffer_size: int
    max_decode_query_len: int = 1

    def __post_init__(self) -> None:
        check_top_k(self.top_k)
        check_rows_per_request(self.max_decode_query_len)
        values = (
            f"device_buffer_size={self.device_buffer_size}, "
            f"max_decode_query_len={self.max_decode_query_len}, top_k={self.top_k}"
        )
        if self.device_buffer_size < self.max_union_rows:
            raise GeometryError(
                f"device_buffer_size must cover max_decode_query_len * top_k = "
                f"{self.max_union_rows} rows: {values}",
                remedy=f"set device_buffer_size to {self.max_union_rows} or more",
                device_buffer_size=self.device_buffer_size,
                needed=self.max_union_rows,
            )
        if self.device_buffer_size > limits.MAX_HOT_ROWS:
            raise GeometryError(
                f"device_buffer_size passes {limits.MAX_HOT_ROWS}, hot slots are 16-bit: {values}",
                remedy=f"set device_buffer_size to {limits.MAX_HOT_ROWS} or less",
                device_buffer_size=self.device_buffer_size,
                limit=limits.MAX_HOT_ROWS,
            )

    @classmethod
    def resolve(
        cls,
        *,
        top_k: int,
        max_decode_query_len: int = 1,
        device_buffer_size: int | None = None,
    ) -> ResolvedHiSparseConfig:
        """Fill in the default: every row that one step can select, and one top-k of slack.

        Raises:
            GeometryError: Names all values and the limit that is broken.
        """
        if device_buffer_size is None:
            device_buffer_size = (max_decode_query_len + 1) * top_k
        return cls(
            top_k=top_k,
            device_buffer_size=device_buffer_size,
            max_decode_query_len=max_decode_query_len,
        )

    @property
    def max_union_rows(self) -> int:
        """Most distinct rows that one request selects in one step."""
        return self.max_decode_query_len * self.top_k

    def blocks_per_request(self, block_size: int) -> int:
        """Blocks of one request's hot region."""
        return -(-self.device_buffer_size // block_size)


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


class HiSparseRuntime:
    """One layer's tiers: its hot view, its host rows, and its index group.

    Attributes:
        hot: Strided view of the layer's hot blocks (which overlay the resident ones).
        hot_backing: The raw tensor that ``hot`` views.
        hot_block_table: int32 ``[rows, blocks_per_request]``: device blocks of hot regions.
        source: Host cache, ``[num_source_blocks, block_size, row_width]``.
        registered_host_pool: The registered tensor that ``source`` lies in.
        resident_source_index: Index of the layer's resident group; -1 until it is bound.
        shared_host_region: What owns the shared mapping, or None. Kept so that it outlives views.
    """

    def __init__(
        self,
        config: ResolvedHiSparseConfig,
        *,
        row_width: int,
        kv_dtype: torch.dtype,
        device: torch.device | str,
        leader: HiSparseRuntime | None = None,
        backend: KernelBackend | None = None,
    ) -> None:
        """Make the runtime of a layer.

        Args:
            config: Sizes, the same for all layers of an index group.
            row_width: Elements of a row.
            kv_dtype: Their type.
            device: Where attention runs.
            leader: The runtime whose top-k this layer reuses, or None for a leader.
            backend: Kernels; by default those for the device. Followers use their leader's.

        Raises:
            GeometryError: Row bytes that are no multiple of 16; other sizes than the leader's.
        """
        check_row_bytes(row_width * kv_dtype.itemsize)
        self.config = config
        self.row_width = row_width
        self.kv_dtype = kv_dtype
        self.device = torch.device(device)
        self.resident_source_index = -1
        self.shared_host_region: Any | None = None
        self.registered_host_pool: torch.Tensor | None = None
        self.hot_backing: torch.Tensor | None = None
        self._hot: PagedCacheView | None = None
        self._hot_block_table: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self._used_step = 0
        if leader is None:
            self.index_group = HiSparseIndexGroup(self, backend or backend_for(self.device))
        else:
            self._join(leader)

    def _join(self, leader: HiSparseRuntime) -> None:
        group = leader.index_group
        if not leader.is_group_leader:
            raise UsageError("a follower cannot lead an index group")
        if group.state is not None:
            raise UsageError("the index group's buffers exist already: no layer can join it now")
        same = (leader.config, leader.row_bytes, leader.device)
        if same != (self.config, self.row_bytes, self.device):
            raise GeometryError(
                f"a follower must have its leader's sizes: expected (config, row bytes, device) "
                f"{same}, got {(self.config, self.row_bytes, self.device)}"
            )
        self.index_group = group
        group.followers.append(self)
        group.forget_pages()

    @property
    def is_group_leader(self) -> bool:
        """Whether this layer resolves for its group."""
        return self.index_group.leader is self

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_width * self.kv_dtype.itemsize

    @property
    def layer_index(self) -> int:
        """Index of this layer in its group (0 = leader), as in `GroupPages`."""
        return self.index_group.runtimes.index(self)

    @property
    def hot(self) -> PagedCacheView:
        """The bound hot view.

        Raises:
            UsageError: Not bound yet.
        """
        return _bound(self._hot, "bind_hot_cache")

    @property
    def hot_block_table(self) -> torch.Tensor:
        """The bound hot block table.

        Raises:
            UsageError: Not bound yet.
        """
        return _bound(self._hot_block_table, "bind_hot_cache")

    @property
    def source(self) -> torch.Tensor:
        """The bound host cache.

        Raises:
            UsageError: Not bound yet.
        """
        return _bound(self._source, "bind_source_cache")

    @property
    def source_pages(self) -> torch.Tensor:
        """The host cache as uint8 ``[num_source_blocks, block_size, row_bytes]``."""
        return self.source.view(torch.uint8)

    def bind_hot_cache(
        self,
        raw: torch.Tensor,
        *,
        byte_offset: int,
        block_stride: int,
        num_blocks: int,
        block_size: int,
        block_table: torch.Tensor,
    ) -> None:
        """Bind the layer's view of the shared device backing.

        Args:
            raw: The backing (shared by all hot and resident groups).
            byte_offset: This layer's first byte in it.
            block_stride: Bytes from one block to the next.
            num_blocks: Blocks of the backing.
            block_size: Rows of a block.
            block_table: int32 ``[rows, >= blocks_per_request]``: hot slot s of a request is row
                ``s % block_size`` of block ``block_table[row, s // block_size]``. 0 in the first
                column = no hot region.

        Raises:
            GeometryError: The view does not fit the backing, or the table the hot region.
        """
        check_tensor("hot block table", block_table, dtype=torch.int32, ndim=2)
        needed = self.config.blocks_per_request(block_size)
        if block_table.shape[1] < needed:
            raise GeometryError(
                f"hot block table has {block_table.shape[1]} blocks a request, "
                f"device_buffer_size={self.config.device_buffer_size} needs {needed} of "
                f"{block_size} rows"
            )
        self._hot = PagedCacheView.bind(
            raw,
            dtype=self.kv_dtype,
            row_width=self.row_width,
            byte_offset=byte_offset,
            block_stride=block_stride,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self.hot_backing = raw
        self._hot_block_table = block_table
        self.index_group.forget_pages()

    def bind_source_cache(
        self, source: torch.Tensor, *, registered_host_pool: torch.Tensor
    ) -> None:
        """Bind the layer's rows in the host pool.

        Args:
            source: ``[num_source_blocks, block_size, row_width]`` of ``kv_dtype``, strided, inside
                the pool.
            registered_host_pool: The whole registered pool.

        Raises:
            GeometryError: Another dtype or width than the runtime's.
            UsageError: Not host memory, or not inside the registered pool.
        """
        if source.dtype != self.kv_dtype or source.dim() != 3 or source.shape[2] != self.row_width:
            raise GeometryError(
                f"source cache: expected [num_blocks, block_size, {self.row_width}] of "
                f"{self.kv_dtype}, got {tuple(source.shape)} of {source.dtype}"
            )
        if source.device.type != "cpu":
            raise UsageError(f"the source cache must be in host memory, got {source.device}")
        _check_inside(source, registered_host_pool)
        self._source = source
        self.registered_host_pool = registered_host_pool
        self.index_group.forget_pages()

    def initialize_buffers(
        self, *, max_num_reqs: int, max_num_batched_tokens: int | None = None
    ) -> None:
        """Allocate the group's hot state and plan. Once a group: later calls of its layers return.

        Args:
            max_num_reqs: Request slots.
            max_num_batched_tokens: Tokens of one step; bounds the query rows of a plan.

        Raises:
            UsageError: A layer is not bound, or the buffers exist with another size.
        """
        group = self.index_group
        if group.state is not None:
            if group.state.max_num_reqs != max_num_reqs:
                raise UsageError(
                    f"buffers were made for {group.state.max_num_reqs} requests, not {max_num_reqs}"
                )
            return
        config = group.leader.config
        hot = group.leader.hot
        max_query_rows = max_num_reqs * config.max_decode_query_len
        if max_num_batched_tokens is not None:
            max_query_rows = min(max_query_rows, max_num_batched_tokens)
        max_row = (hot.num_blocks - 1) * hot.block_stride_rows + hot.block_size - 1
        state = group.backend.make_hot_state(
            max_num_reqs=max_num_reqs, hot_rows=config.device_buffer_size, device=self.device
        )
        check_hot_size(
            hot_rows=state.hot_rows,
            max_query_rows=config.max_decode_query_len,
            top_k=config.top_k,
        )
        group.plan = allocate_plan(
            max_num_requests=max_num_reqs,
            max_query_rows=max_query_rows,
            max_rows_per_request=config.max_decode_query_len,
            top_k=config.top_k,
            device=self.device,
            row_dtype=torch.int32 if max_row < 2**31 else torch.int64,
        )
        group.state = state

    def swap_in(
        self,
        positions: torch.Tensor,
        *,
        tables: ResidencyTables,
        request_slots: torch.Tensor,
        query_starts: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Make the rows of one step's top-k readable on the device.

        The leader resolves and copies the missing rows for all layers of the group; each follower
        then gets the same physical rows, once a step.

        Args:
            positions: int32 ``[num_query_rows, top_k]``; see `StepInputs`.
            tables: Block tables.
            request_slots: int32 ``[num_requests]``, -1 = padding.
            query_starts: int32 ``[num_requests + 1]``.
            table_rows: int32 ``[num_requests]``; by default ``request_slots``.

        Returns:
            Physical rows, int32 or int64 ``[num_query_rows, top_k]``, -1 where there is nothing to
            read: a view of the plan, valid until the leader's next call.

        Raises:
            UsageError: Buffers not initialised; a follower whose leader has not resolved this step;
                (reference) a position with no row anywhere. Nothing was changed.
            GeometryError: Inputs that do not fit the buffers.
        """
        if self.is_group_leader:
            physical = self.begin_swap(
                positions,
                tables=tables,
                request_slots=request_slots,
                query_starts=query_starts,
                table_rows=table_rows,
            )
        else:
            physical = self._reuse_plan(positions.shape[0])
        self.wait_rows()
        return physical

    def begin_swap(
        self,
        positions: torch.Tensor,
        *,
        tables: ResidencyTables,
        request_slots: torch.Tensor,
        query_starts: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The leader's `swap_in` up to where the copies are under way; `wait_rows` is the rest.

        Arguments and errors are those of `swap_in`.

        Returns:
            Physical rows; their bytes may be read behind `wait_rows`.
        """
        group = self.index_group
        state, plan = _bound(group.state, "initialize_buffers"), group.plan
        plan = _bound(plan, "initialize_buffers")
        if not self.is_group_leader:
            raise UsageError("a follower resolves nothing: swap_in gives it its leader's rows")
        inputs = StepInputs(
            positions=positions,
            request_slots=request_slots,
            table_rows=request_slots if table_rows is None else table_rows,
            query_starts=query_starts,
        )
        check_step(state=state, tables=tables, inputs=inputs, plan=plan)
        group.pages()
        group.wait_rows()  # the copies of the step before read the plan
        group.backend.resolve(state=state, tables=tables, inputs=inputs, plan=plan)
        group.gather(plan)
        group.step += 1
        self._used_step = group.step
        return plan.physical_rows[: positions.shape[0]]

    def wait_rows(self) -> None:
        """The current stream goes on when this layer's rows are there. Idempotent."""
        if self.index_group.prefetch is not None:
            self.index_group.wait_rows(self.layer_index)

    def _reuse_plan(self, num_query_rows: int) -> torch.Tensor:
        group = self.index_group
        _bound(group.state, "initialize_buffers")
        if self._used_step == group.step:
            raise UsageError(
                f"layer {self.layer_index} of the index group asks for step {group.step + 1}, "
                "which its leader has not resolved",
                remedy="run the layers of an index group in order, leader first",
            )
        self._used_step = group.step
        return _bound(group.plan, "initialize_buffers").physical_rows[:num_query_rows]

    def invalidate(self, host_blocks: torch.Tensor) -> None:
        """Forget the hot rows of these host blocks, for all requests of the group.

        To be called before a step that may read a block which was rewritten or reassigned.

        Args:
            host_blocks: int32 ``[n]``; entries below 1 are padding.
        """
        state = _bound(self.index_group.state, "initialize_buffers")
        self.index_group.backend.invalidate(
            state=state, host_blocks=host_blocks, block_size=self.hot.block_size
        )

    def reset(self, request_slots: torch.Tensor | None = None) -> None:
        """Empty the hot regions of request slots (all of them by default).

        Args:
            request_slots: int32 ``[n]``; -1 is padding.
        """
        state = _bound(self.index_group.state, "initialize_buffers")
        if request_slots is None:
            request_slots = torch.arange(
                state.max_num_reqs, dtype=torch.int32, device=state.host_rows.device
            )
        self.index_group.backend.reset(state=state, request_slots=request_slots)

    def statistics(self) -> SwapStatistics:
        """Read the group's counters. Waits for the device."""
        group = self.index_group
        state = _bound(group.state, "initialize_buffers")
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
            gathered_bytes=miss_rows * self.row_bytes * group.num_layers,
        )


class HiSparseCacheHandle:
    """What one attention layer holds: its resident rows and the way to all others.

    Attributes:
        runtime: The layer's runtime.
        view: Resident view; None until `bind_cache`.
        residency: int32 ``[resident groups, max_num_reqs, num_pages]`` where one tensor holds the
            tables of all groups, else None.
        block_table: int32 ``[max_num_reqs, num_pages]``: the resident table, by request slot; 0 =
            read from host.
        slot_mapping: int64 ``[tokens]``: resident slot that each token of the batch is written to.
        source_block_table: int32 ``[rows, num_pages]``: host block of each page.
        mirror_slot_mapping: int64 ``[tokens]``: host slot that each token is mirrored to, or -1.
        draft_layer: Whether the layer belongs to a speculator, which writes after the target model.
    """

    def __init__(self, runtime: HiSparseRuntime) -> None:
        self.runtime = runtime
        self.view: PagedCacheView | None = None
        self.residency: torch.Tensor | None = None
        self.block_table: torch.Tensor | None = None
        self.slot_mapping: torch.Tensor | None = None
        self.source_block_table: torch.Tensor | None = None
        self.mirror_slot_mapping: torch.Tensor | None = None
        self.draft_layer = False
        self._tables: ResidencyTables | None = None

    def bind_cache(
        self,
        raw: torch.Tensor,
        *,
        byte_offset: int,
        block_stride: int,
        num_blocks: int,
        block_size: int,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Bind the layer's resident view.

        Args:
            raw: The device backing.
            byte_offset: This layer's first byte in it.
            block_stride: Bytes from one block to the next.
            num_blocks: Blocks of the backing.
            block_size: Rows of a block.
            block_table: The resident table, see the class.
            slot_mapping: Resident slots of the batch's tokens.

        Raises:
            GeometryError: The view does not fit the backing.
        """
        check_tensor("resident block table", block_table, dtype=torch.int32, ndim=2)
        self.view = PagedCacheView.bind(
            raw,
            dtype=self.runtime.kv_dtype,
            row_width=self.runtime.row_width,
            byte_offset=byte_offset,
            block_stride=block_stride,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self.block_table = block_table
        self.slot_mapping = slot_mapping

    def tables(self) -> ResidencyTables:
        """The bound block tables, as `swap_in` reads them.

        Raises:
            UsageError: Something is not bound yet.
            GeometryError: Resident, hot and source blocks have different sizes.
        """
        resident = _bound(self.block_table, "bind_cache")
        source = _bound(self.source_block_table, "the source block table")
        hot = self.runtime.hot_block_table
        known = self._tables
        if (
            known is None
            or known.resident is not resident
            or known.source is not source
            or known.hot is not hot
        ):
            known = self._tables = self._make_tables(resident, source, hot)
        return known

    def _make_tables(
        self, resident: torch.Tensor, source: torch.Tensor, hot: torch.Tensor
    ) -> ResidencyTables:
        view = _bound(self.view, "bind_cache")
        hot_view, rows = self.runtime.hot, self.runtime.source
        sizes = (view.block_size, hot_view.block_size, rows.shape[1])
        if len(set(sizes)) != 1:
            raise GeometryError(f"block sizes of (resident, hot, source) differ: {sizes}")
        if view.cache.data_ptr() != hot_view.cache.data_ptr() or (
            view.block_stride_rows != hot_view.block_stride_rows
        ):
            raise GeometryError("resident and hot layouts must match")
        return ResidencyTables(
            source=source,
            resident=resident,
            hot=hot,
            block_size=view.block_size,
            block_stride_rows=view.block_stride_rows,
            num_source_blocks=rows.shape[0],
            num_device_blocks=view.num_blocks,
        )

    def write_target(self, num_tokens: int) -> tuple[PagedCacheView, torch.Tensor]:
        """Where the layer stores the rows of this batch's tokens.

        Returns:
            The resident view and the first ``num_tokens`` resident slots
            (`PagedCacheView.write_slots` takes both).

        Raises:
            UsageError: Not bound, or more tokens than the mapping holds.
        """
        view = _bound(self.view, "bind_cache")
        slots = _bound(self.slot_mapping, "bind_cache")
        return view, _first(slots, num_tokens, "slot mapping")

    def mirror_target(self, num_tokens: int) -> tuple[GroupPages, torch.Tensor, torch.Tensor]:
        """What to mirror for this batch's tokens: one layer's pages, resident and host slots.

        Returns:
            Arguments of `KernelBackend.mirror_rows`.

        Raises:
            UsageError: Not bound, or more tokens than a mapping holds.
        """
        index = self.runtime.layer_index
        pages = self.runtime.index_group.layer_pages(index, index + 1)
        return self._mirror_arguments(pages, num_tokens)

    def group_mirror_target(self, num_tokens: int) -> tuple[GroupPages, torch.Tensor, torch.Tensor]:
        """What to mirror behind the last layer of an index group: all its layers, one launch.

        Returns:
            Arguments of `KernelBackend.mirror_rows`.

        Raises:
            UsageError: Not bound, more tokens than a mapping holds, or layers whose rows are not in
                the same resident blocks.
        """
        group = self.runtime.index_group
        resident = {runtime.resident_source_index for runtime in group.runtimes}
        if len(resident) > 1:
            raise UsageError(
                f"the layers of the index group have rows in resident groups {sorted(resident)}",
                remedy="mirror each layer by its own mirror_target",
            )
        return self._mirror_arguments(group.pages(), num_tokens)

    def _mirror_arguments(
        self, pages: GroupPages, num_tokens: int
    ) -> tuple[GroupPages, torch.Tensor, torch.Tensor]:
        slots = _bound(self.slot_mapping, "bind_cache")
        host_slots = _bound(self.mirror_slot_mapping, "the mirror slot mapping")
        return (
            pages,
            _first(slots, num_tokens, "slot mapping"),
            _first(host_slots, num_tokens, "mirror slot mapping"),
        )

    def swap_in(
        self,
        positions: torch.Tensor,
        *,
        request_slots: torch.Tensor,
        query_starts: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Make the top-k rows readable and return where: see `HiSparseRuntime.swap_in`."""
        return self.runtime.swap_in(
            positions,
            tables=self.tables(),
            request_slots=request_slots,
            query_starts=query_starts,
            table_rows=table_rows,
        )

    def begin_swap(
        self,
        positions: torch.Tensor,
        *,
        request_slots: torch.Tensor,
        query_starts: torch.Tensor,
        table_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Let a leader's copies begin: see `HiSparseRuntime.begin_swap`."""
        return self.runtime.begin_swap(
            positions,
            tables=self.tables(),
            request_slots=request_slots,
            query_starts=query_starts,
            table_rows=table_rows,
        )

    def wait_rows(self) -> None:
        """Before the layer reads its rows: see `HiSparseRuntime.wait_rows`."""
        self.runtime.wait_rows()


def create_index_group_handles(
    config: ResolvedHiSparseConfig,
    *,
    num_layers: int,
    row_width: int,
    kv_dtype: torch.dtype,
    device: torch.device | str,
    backend: KernelBackend | None = None,
) -> list[HiSparseCacheHandle]:
    """Make the handles of one index group: leader first, then its followers."""
    leader = HiSparseRuntime(
        config, row_width=row_width, kv_dtype=kv_dtype, device=device, backend=backend
    )
    followers = [
        HiSparseRuntime(
            config, row_width=row_width, kv_dtype=kv_dtype, device=device, leader=leader
        )
        for _ in range(num_layers - 1)
    ]
    return [HiSparseCacheHandle(runtime) for runtime in (leader, *followers)]


def initialize_hisparse_runtime_buffers(
    handles: Sequence[HiSparseCacheHandle],
    *,
    max_num_reqs: int,
    max_num_batched_tokens: int | None = None,
) -> None:
    """Allocate state and plan of every index group among these handles.

    Raises:
        UsageError: No handles, or one that is not bound.
    """
    if not handles:
        raise UsageError("there are no cache handles to initialise")
    for handle in handles:
        handle.runtime.initialize_buffers(
            max_num_reqs=max_num_reqs, max_num_batched_tokens=max_num_batched_tokens
        )


def enable_prefetch(
    handles: Sequence[HiSparseCacheHandle],
    *,
    split: GatherSplit = GatherSplit.GROUP,
    lane: CopyLane | None = None,
    overlap: Overlap = Overlap.NONE,
) -> CopyLane:
    """Let the copies of these layers' index groups run beside the computation.

    Not in a captured region; graphs that were captured before keep what they have.

    Args:
        handles: Layers of whole index groups, on one device.
        split: Launches of a group.
        lane: Where copies run; by default a side stream on CUDA, else in place.
        overlap: Of copies that only followers read. By default they take what a copy that is waited
            for takes: with 64 requests the few multiprocessors of `Overlap.COMPUTE` made a step
            11 to 13 % longer, with 16 about 1 % (docs/performance.md).

    Returns:
        The lane, shared by all groups.

    Raises:
        UsageError: No handles.
    """
    if not handles:
        raise UsageError("there are no cache handles to prefetch for")
    shared = lane or lane_for(handles[0].runtime.device)
    for group in {id(h.runtime.index_group): h.runtime.index_group for h in handles}.values():
        group.wait_rows()
        group.prefetch = GroupPrefetch(
            shared, split=split, num_layers=group.num_layers, overlap=overlap
        )
    return shared


def _bound(value: _T | None, call: str) -> _T:
    if value is None:
        raise UsageError(f"not bound yet: {call} comes first")
    return value


def _first(slots: torch.Tensor, count: int, name: str) -> torch.Tensor:
    if not 0 <= count <= slots.shape[0]:
        raise UsageError(f"{count} tokens, the {name} holds {slots.shape[0]}")
    return slots[:count]


def _check_inside(source: torch.Tensor, pool: torch.Tensor) -> None:
    if source.untyped_storage().data_ptr() != pool.untyped_storage().data_ptr():
        raise UsageError(
            "the source cache is not in the storage of the registered host pool",
            remedy="make its view from HostPool.backing",
        )
    last = sum(
        (size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)
    )
    start = source.data_ptr()
    end = start + (last + 1) * source.element_size()
    pool_start = pool.data_ptr()
    pool_end = pool_start + pool.numel() * pool.element_size()
    if start < pool_start or end > pool_end:
        raise UsageError(
            f"the source cache ends {end - pool_start} bytes into a registered pool of "
            f"{pool_end - pool_start} bytes"
        )
