"""``kernels: hisparse_service``: our resolve and gather inside vLLM's runtimes.

vLLM keeps its streams, events, index groups and buffers; of each runtime object of this engine the
methods that call compiled operators are replaced. The rows that attention reads are the same, the
hot slots that they lie in need not be: replacement order is each kernel's own.

The staging of host rows for a prefill stays vLLM's. On the worker's main thread; once a
`GroupKernels` is made no step allocates but by torch's small index operations, which a CUDA graph
captures.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hisparse_service.contract.errors import UsageError
from worker_client.kernels import backend_for
from worker_client.kernels.interface import (
    Counter,
    GroupPages,
    KernelBackend,
    ResidencyTables,
    StepInputs,
    allocate_plan,
)

logger = logging.getLogger("vllm.hisparse_service")


def make_backend(device: torch.device) -> KernelBackend:
    """The kernels for a device; the reference on a CPU."""
    if device.type != "cuda":
        return backend_for(device)
    from worker_client.kernels.cuda import CudaBackend

    return CudaBackend(device)


def use_service_kernels(handles: list[Any]) -> list[GroupKernels]:
    """Replace the operators of all runtimes behind these bound handles; one object a group."""
    residents = {id(handle.runtime): handle for handle in handles}
    groups = {id(handle.runtime.index_group): handle.runtime.index_group for handle in handles}
    backend = make_backend(handles[0].runtime.device)
    made = [GroupKernels(group, residents, backend) for group in groups.values()]
    logger.info("hisparse-service: %s kernels in %d index groups", backend.name, len(made))
    return made


class GroupKernels:
    """One index group of vLLM with our hot state and plan.

    Args:
        group: vLLM's `HiSparseIndexGroup`, its leader and followers bound.
        residents: Bound handle by ``id(runtime)``.
        backend: The kernels.
    """

    def __init__(self, group: Any, residents: dict[int, Any], backend: KernelBackend) -> None:
        leader = group.leader
        runtimes = [leader, *group.followers]
        resident = residents[id(leader)]
        device = leader.device
        top_k = group.shared_topk.physical_topk_indices.shape[1]
        self.backend = backend
        self.state = backend.make_hot_state(
            max_num_reqs=leader.max_num_reqs, hot_rows=leader.region_stride, device=device
        )
        self.plan = allocate_plan(
            max_num_requests=leader.max_num_reqs, max_query_rows=leader.max_swap_rows,
            max_rows_per_request=max(leader.max_union_rows // top_k, 1), top_k=top_k,
            device=device,
        )  # fmt: skip
        self.group = group
        self._leader = leader
        self._resident_table = resident.block_table
        self._block_size = resident.view.block_size
        self._pages = GroupPages(
            host=tuple(_blocks(r.host_cache, self._block_size) for r in runtimes),
            device=tuple(r.hot.cache.view(torch.uint8) for r in runtimes),
            block_stride_rows=leader.hot.attention_block_stride,
        )
        self._layer_pages = [self._pages.layers(i, i + 1) for i in range(len(runtimes))]
        self._all_slots = torch.arange(leader.max_num_reqs, dtype=torch.int32, device=device)
        self._edges = torch.arange(leader.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(2, dtype=torch.int64, device=device)
        for index, runtime in enumerate(runtimes):
            self._install(runtime, index)

    def _install(self, runtime: Any, index: int) -> None:
        def swap_rows(shared_rows: slice) -> None:
            del shared_rows  # the plan is that of the leader's last resolve
            self.backend.gather(pages=self._layer_pages[index], plan=self.plan)

        runtime._resolve_residency = self.resolve
        runtime._swap_rows = swap_rows
        runtime.invalidate_written_slots = self.invalidate_written
        runtime.invalidate_sorted_slots = self.invalidate_sorted
        runtime.reset_hot_state = self.reset

    def resolve(
        self,
        *,
        resident: Any = None,
        req_id_per_token: torch.Tensor,
        block_table: torch.Tensor,
        topk_indices: torch.Tensor,
        block_size: int,
        return_valid_counts: bool = False,
        shared_rows: slice,
        attention_indices_out: torch.Tensor | None = None,
        valid_counts_out: torch.Tensor | None = None,
    ) -> None:
        """`HiSparseRuntime._resolve_residency` of the leader, with its arguments.

        Args:
            resident: The leader's handle; its table was bound before.
            req_id_per_token: int32 [tokens]: row of the batch, -1 for padding at the end.
            block_table: int32 [requests, pages]: host block of each page, by row of the batch.
            topk_indices: int32 [tokens, top_k]: positions, -1 for none.
            block_size: Tokens a block.
            return_valid_counts: Whether `valid_counts_out` (or the shared buffer) is filled.
            shared_rows: Rows of the group's shared buffers.
            attention_indices_out: int32 [tokens, top_k]; the shared buffer when None.
            valid_counts_out: int32 [tokens]; the shared buffer when None.

        Raises:
            UsageError: Another block size than the caches'.
        """
        del resident
        if block_size != self._block_size:
            raise UsageError(f"block size {block_size}, the caches have {self._block_size}")
        shared, tokens = self.group.shared_topk, topk_indices.shape[0]
        self.backend.resolve(
            state=self.state, tables=self._tables(block_table), plan=self.plan,
            inputs=self._inputs(topk_indices, req_id_per_token[:tokens], block_table.shape[0]),
        )  # fmt: skip
        physical = attention_indices_out
        if physical is None:
            physical = shared.physical_topk_indices[shared_rows]
        physical.copy_(self.plan.physical_rows[:tokens])
        if return_valid_counts:
            counts = valid_counts_out
            if counts is None:
                counts = shared.valid_topk_counts[shared_rows]
            counts.copy_(self.plan.valid_counts[:tokens])
        self._count()

    def _tables(self, block_table: torch.Tensor) -> ResidencyTables:
        return ResidencyTables(
            source=block_table, resident=self._resident_table, hot=self._leader.hot_block_table,
            block_size=self._block_size,
            block_stride_rows=self._leader.hot.attention_block_stride,
            num_source_blocks=self._pages.host[0].shape[0],
            num_device_blocks=self._pages.device[0].shape[0],
        )  # fmt: skip

    def _inputs(
        self, positions: torch.Tensor, requests: torch.Tensor, num_requests: int
    ) -> StepInputs:
        """Of vLLM: each row's request, ascending, padding (-1) last. Ours: where each begins."""
        slots = self._leader.request_state_indices
        num_requests = min(num_requests, slots.shape[0])
        rows = torch.where(requests < 0, num_requests, requests)
        return StepInputs(
            positions=positions,
            request_slots=slots[:num_requests],
            table_rows=self._all_slots[:num_requests],
            query_starts=torch.searchsorted(rows, self._edges[: num_requests + 1], out_int32=True),
        )

    def invalidate_written(
        self, written_slots: torch.Tensor, req_id_per_token: torch.Tensor
    ) -> None:
        """Forget hot rows of the blocks that these host slots lie in; int64 [tokens], -1 none."""
        num_tokens = min(written_slots.numel(), req_id_per_token.numel())
        if num_tokens:
            self._invalidate(written_slots[:num_tokens])

    def invalidate_sorted(self, sorted_slots: torch.Tensor, state_indices: torch.Tensor) -> None:
        """Forget hot rows of recycled blocks, for all requests."""
        del state_indices
        self._invalidate(sorted_slots)

    def reset(self) -> None:
        """Forget everything."""
        self.backend.reset(state=self.state, request_slots=self._all_slots)
        self.group.swap_stats.zero_()

    def _invalidate(self, slots: torch.Tensor) -> None:
        blocks = torch.div(slots, self._block_size, rounding_mode="floor").to(torch.int32)
        self.backend.invalidate(state=self.state, host_blocks=blocks, block_size=self._block_size)

    def _count(self) -> None:
        """Add to vLLM's hits and misses, which it reads and zeroes at its own pace."""
        counters = self.state.counters
        now = torch.stack((counters[Counter.HOT_LANES], counters[Counter.MISS_ROWS]))
        self.group.swap_stats.view(torch.int64).add_(now - self._seen)
        self._seen.copy_(now)


def _blocks(host_cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """uint8 [blocks, block_size, row_bytes] of vLLM's flat host rows."""
    rows = host_cache.view(torch.uint8)
    return rows.view(-1, block_size, rows.shape[-1])
