"""One layer's tiers: binding of its hot and host rows, and the swap that makes rows readable.

Borrows all memory it is bound to (device backing, host pool, block tables). The layer's index group
owns state and plan. Called on the worker's compute thread only.
"""

from __future__ import annotations

from typing import Any

import torch

from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.binding_checks import bound, check_inside
from worker_client.hot_config import ResolvedHiSparseConfig
from worker_client.index_group import HiSparseIndexGroup, SwapStatistics
from worker_client.kernels import backend_for
from worker_client.kernels.interface import (
    KernelBackend,
    ResidencyTables,
    StepInputs,
    check_row_bytes,
    check_step,
    check_tensor,
)
from worker_client.views import PagedCacheView

__all__ = ["HiSparseRuntime"]


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
        return bound(self._hot, "bind_hot_cache")

    @property
    def hot_block_table(self) -> torch.Tensor:
        """The bound hot block table.

        Raises:
            UsageError: Not bound yet.
        """
        return bound(self._hot_block_table, "bind_hot_cache")

    @property
    def source(self) -> torch.Tensor:
        """The bound host cache.

        Raises:
            UsageError: Not bound yet.
        """
        return bound(self._source, "bind_source_cache")

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
        check_inside(source, registered_host_pool)
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
        self.index_group.initialize_buffers(
            max_num_reqs=max_num_reqs, max_num_batched_tokens=max_num_batched_tokens
        )

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
        state, plan = bound(group.state, "initialize_buffers"), group.plan
        plan = bound(plan, "initialize_buffers")
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
        bound(group.state, "initialize_buffers")
        if self._used_step == group.step:
            raise UsageError(
                f"layer {self.layer_index} of the index group asks for step {group.step + 1}, "
                "which its leader has not resolved",
                remedy="run the layers of an index group in order, leader first",
            )
        self._used_step = group.step
        return bound(group.plan, "initialize_buffers").physical_rows[:num_query_rows]

    def invalidate(self, host_blocks: torch.Tensor) -> None:
        """Forget the hot rows of these host blocks, for all requests of the group.

        To be called before a step that may read a block which was rewritten or reassigned.

        Args:
            host_blocks: int32 ``[n]``; entries below 1 are padding.
        """
        state = bound(self.index_group.state, "initialize_buffers")
        self.index_group.backend.invalidate(
            state=state, host_blocks=host_blocks, block_size=self.hot.block_size
        )

    def reset(self, request_slots: torch.Tensor | None = None) -> None:
        """Empty the hot regions of request slots (all of them by default).

        Args:
            request_slots: int32 ``[n]``; -1 is padding.
        """
        state = bound(self.index_group.state, "initialize_buffers")
        if request_slots is None:
            request_slots = torch.arange(
                state.max_num_reqs, dtype=torch.int32, device=state.host_rows.device
            )
        self.index_group.backend.reset(state=state, request_slots=request_slots)

    def statistics(self) -> SwapStatistics:
        """Read the group's counters. Waits for the device."""
        return self.index_group.statistics()
