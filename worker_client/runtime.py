"""The device side of sparse attention: hot regions, index groups, and what attention holds.

One `HiSparseRuntime` a layer; the layers that share a top-k share one `HiSparseIndexGroup` (hot
map, recency and plan): its leader resolves a step and copies the missing rows for all of them, its
followers reuse the plan. One `HiSparseCacheHandle` a layer is what the attention layer sees.

`swap_in` gives a layer its rows. With `enable_prefetch` the copies run on a side stream, and each
layer's `swap_in` waits for its own; a leader that has something to compute before it reads them
calls `begin_swap` where its top-k is known and `wait_rows` where it reads.

    HiSparseCacheHandle              what attention holds; here
     `- HiSparseRuntime              a layer's binding and its swap              layer_runtime.py
         |- ResolvedHiSparseConfig   sizes of a hot region                       hot_config.py
         `- HiSparseIndexGroup       hot map, plan and copies of its layers      index_group.py

The handle stands beside `initialize_hisparse_runtime_buffers`, since binding.py looks for that in
the module of the handles that it is given, ours or an engine's.

All memory that is bound (device backing, host pool, block tables) is borrowed; state and plan
tensors are the index group's own. Called on the worker's compute thread only. What users import of
these stands in `__all__`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.binding_checks import bound, first_slots
from worker_client.hot_config import ResolvedHiSparseConfig
from worker_client.index_group import HiSparseIndexGroup, SwapStatistics
from worker_client.kernels.interface import (
    GroupPages,
    KernelBackend,
    Overlap,
    ResidencyTables,
    check_tensor,
)
from worker_client.layer_runtime import HiSparseRuntime
from worker_client.prefetch import CopyLane, GatherSplit, GroupPrefetch, lane_for
from worker_client.views import PagedCacheView

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
        resident = bound(self.block_table, "bind_cache")
        source = bound(self.source_block_table, "the source block table")
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
        view = bound(self.view, "bind_cache")
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
        view = bound(self.view, "bind_cache")
        slots = bound(self.slot_mapping, "bind_cache")
        return view, first_slots(slots, num_tokens, "slot mapping")

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
        slots = bound(self.slot_mapping, "bind_cache")
        host_slots = bound(self.mirror_slot_mapping, "the mirror slot mapping")
        return (
            pages,
            first_slots(slots, num_tokens, "slot mapping"),
            first_slots(host_slots, num_tokens, "mirror slot mapping"),
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
