"""Plain torch on the CPU: the oracle of every kernel, and the data plane of machines without one.

Results, state included, are defined byte for byte by `interface.KernelBackend`. Unlike a kernel it
raises on an invalid lane, before anything is changed. Called on the worker's compute thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.kernels.interface import (
    EMPTY_ROW,
    MAX_HOST_ROW_BITS,
    CheckDepth,
    Counter,
    GroupPages,
    HotState,
    ResidencyTables,
    ResolvePlan,
    StepInputs,
    allocate_hot_state,
    check_block_pairs,
    check_slots,
    check_step,
    check_tensor,
)


class ReferenceBackend:
    """The CPU implementation of `KernelBackend`."""

    name = "reference"

    def make_hot_state(
        self, *, max_num_reqs: int, hot_rows: int, device: torch.device | str
    ) -> HotState:
        """Make an empty hot state; there is no workspace."""
        return allocate_hot_state(max_num_reqs=max_num_reqs, hot_rows=hot_rows, device=device)

    def resolve(
        self,
        *,
        state: HotState,
        tables: ResidencyTables,
        inputs: StepInputs,
        plan: ResolvePlan,
    ) -> None:
        """Translate one step's top-k and plan its misses: see `KernelBackend.resolve`."""
        check_step(state=state, tables=tables, inputs=inputs, plan=plan, depth=CheckDepth.VALUES)
        raise NotImplementedError

    def gather(self, *, pages: GroupPages, plan: ResolvePlan) -> None:
        """Copy the planned rows, host to hot, for all layers of ``pages``."""
        raise NotImplementedError

    def invalidate(self, *, state: HotState, host_blocks: torch.Tensor, block_size: int) -> None:
        """Forget every hot row that lies in one of these host blocks."""
        raise NotImplementedError

    def reset(self, *, state: HotState, request_slots: torch.Tensor) -> None:
        """Empty the hot regions of these request slots."""
        raise NotImplementedError

    def mirror_blocks(
        self, *, pages: GroupPages, device_blocks: torch.Tensor, host_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, device to host."""
        raise NotImplementedError

    def mirror_rows(
        self, *, pages: GroupPages, device_slots: torch.Tensor, host_slots: torch.Tensor
    ) -> None:
        """Copy rows, device to host."""
        raise NotImplementedError

    def restore_blocks(
        self, *, pages: GroupPages, host_blocks: torch.Tensor, device_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, host to device."""
        raise NotImplementedError

    def stage(self, *, pages: GroupPages, host_slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy host rows into a contiguous buffer."""
        raise NotImplementedError
