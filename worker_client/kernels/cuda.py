"""The GPU data plane: the functions of `reference.py` as CUDA kernels, byte for byte.

Every operation is one launch on torch's current stream and reads nothing back, so it can be
captured in a CUDA graph; copies that sort take memory to sort in from torch, once a stream and
once a captured launch (docs/decisions/0016-gathers-sort-and-share.md). Variants are compiled when
a hot state is made (see `CudaBackend.prepare`), not in a captured region. What the kernels would
trap on is checked by `interface.check_*`; a block id past the end makes its lanes invalid instead
of a wild access.

Host pages must be registered with CUDA in this process, portable and mapped; they are read and
written in place. Used by the runtime's parts and `mirror.py` on the worker's compute thread; a
backend belongs to one device and one thread.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.kernels.addresses import Layers, layers_of
from worker_client.kernels.compile import KernelCompiler, KernelSpec, default_cache_directory
from worker_client.kernels.driver import call, device_attribute, set_l2_aside
from worker_client.kernels.interface import (
    GroupPages,
    HotState,
    Overlap,
    ResidencyTables,
    ResolvePlan,
    StepInputs,
    allocate_hot_state,
    check_block_pairs,
    check_slots,
    check_step,
    check_tensor,
)
from worker_client.kernels.launches import (
    ADDRESS_BINS,
    MAX_LAYERS_A_LAUNCH,
    MAX_SORTING_BLOCKS,
    NEVER,
    STATE_THREADS,
    BlockArgs,
    CopyLaunch,
    CudaTuning,
    InvalidateArgs,
    ResetArgs,
    ResolveArgs,
    RowArgs,
    copy_spec,
    list_bytes,
    power_of_two_shift,
    resolve_spec,
    state_spec,
)
from worker_client.kernels.sorting import SortingMemory
from worker_client.kernels.tables import TableLayout, padded_lanes, plan_tables

MAX_CACHED_HOT_BLOCKS: Final = 1_024
NARROW_KEY_ROWS: Final = 2**32 - 1
"""Host rows below it have 32-bit keys; all ones marks an empty entry."""

HINT_BYTES: Final = 16
"""Front of a request's workspace: the age class at which its last victims were cut."""

_RESERVED_SHARED_BYTES: Final = 1_024

__all__ = ["CopyLaunch", "CudaBackend", "CudaTuning"]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One loaded kernel."""

    function: Any
    owner: Any


class CudaBackend:
    """The GPU implementation of `KernelBackend`, for one device."""

    name = "cuda"

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        tuning: CudaTuning | None = None,
        compiler: KernelCompiler | None = None,
    ) -> None:
        """Make a backend. Compiles nothing yet.

        Args:
            device: A CUDA device.
            tuning: Launch sizes.
            compiler: Where kernels come from; by default NVRTC with the user's cache directory.

        Raises:
            UsageError: Not a CUDA device.
            DeviceError: The driver does not answer.
        """
        found = torch.device(device)
        if found.type != "cuda":
            raise UsageError(f"CudaBackend needs a CUDA device, got {found}")
        index = torch.cuda.current_device() if found.index is None else found.index
        self.device = torch.device("cuda", index)
        self.tuning = tuning or CudaTuning()
        major, minor = torch.cuda.get_device_capability(self.device)
        self.arch = f"sm_{major}{minor}"
        self._num_sms = device_attribute(index, "MULTIPROCESSOR_COUNT")
        self._shared_per_block = device_attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._shared_per_sm = device_attribute(index, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        self._compiler = compiler or KernelCompiler(
            default_cache_directory(), driver_version=str(call("cuDriverGetVersion"))
        )
        self._entries: dict[tuple[KernelSpec, str], _Entry] = {}
        self._layers: dict[int, tuple[weakref.ref[GroupPages], list[Layers]]] = {}
        self._sorting = SortingMemory(self.device)
        self._prepared = False
        self._profile: torch.Tensor | None = None  # clocks of a profiled variant: benchmarks only

    # --- preparation -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Compile and load the usual variants. Once; not in a captured region.

        Raises:
            DeviceError: The driver refuses a kernel, or to set cache aside.
        """
        if self._prepared:
            return
        for threads in (1024, 512):
            self._entry(resolve_spec(threads=threads), "hs_resolve")
        tuning = self.tuning
        for launch, sorts in ((tuning.wide, False), (tuning.sorted, True)):
            for name in ("hs_rows_to_device", "hs_rows_to_host"):
                self._entry(copy_spec(launch, sorts=sorts), name)
        for launch, sorts in ((tuning.wide_beside, False), (tuning.sorted_beside, True)):
            self._entry(copy_spec(launch, sorts=sorts), "hs_rows_to_device")
        for name in ("hs_blocks_to_device", "hs_blocks_to_host"):
            self._entry(copy_spec(tuning.blocks, sorts=False), name)
        for name in ("hs_invalidate", "hs_reset"):
            self._entry(state_spec(), name)
        self._sorting.prepare()
        if tuning.l2_set_aside_bytes > 0:
            with torch.cuda.device(self.device):
                set_l2_aside(self.device.index, tuning.l2_set_aside_bytes)
        self._prepared = True

    def make_hot_state(
        self, *, max_num_reqs: int, hot_rows: int, device: torch.device | str
    ) -> HotState:
        """Make an empty hot state.

        Its workspace has a hint a request, and a step's tables if shared memory may be too small.
        """
        if torch.device(device).type != "cuda":
            raise UsageError(f"the hot state of CudaBackend lives on {self.device}, not {device}")
        self.prepare()
        worst = plan_tables(
            max_lanes=hot_rows,
            hot_rows=hot_rows,
            cached_hot_blocks=MAX_CACHED_HOT_BLOCKS,
            num_pages=0,
            key_bytes=8,
            table_factor=self.tuning.table_factor,
            budget_bytes=self._shared_budget(blocks_per_sm=1),
        )
        workspace = torch.zeros(
            (max_num_reqs, HINT_BYTES + worst.workspace_bytes),
            dtype=torch.uint8,
            device=self.device,
        )
        if worst.in_workspace:
            self._entry(resolve_spec(threads=1024, global_hash=True), "hs_resolve")
        return allocate_hot_state(
            max_num_reqs=max_num_reqs, hot_rows=hot_rows, device=self.device, workspace=workspace
        )

    # --- resolve ---------------------------------------------------------------------------------

    def resolve(
        self,
        *,
        state: HotState,
        tables: ResidencyTables,
        inputs: StepInputs,
        plan: ResolvePlan,
    ) -> None:
        """Translate one step's top-k and plan its misses: see `KernelBackend.resolve`.

        Raises:
            GeometryError: Sizes that do not fit each other.
            UsageError: The state was not made by this backend and needs a workspace.
        """
        check_step(state=state, tables=tables, inputs=inputs, plan=plan)
        wide_keys = tables.num_source_blocks * tables.block_size > NARROW_KEY_ROWS
        threads = self.tuning.resolve_threads
        if threads is None:
            threads = 1024 if inputs.num_requests <= self._num_sms else 512
        layout, cached = self._plan_step(state, tables, plan, threads, wide_keys=wide_keys)
        if layout.in_workspace:
            threads = 1024
        args = _resolve_args(state, tables, inputs, plan)
        args.cached_hot_blocks = cached
        args.cached_pages = layout.cached_pages
        args.table_slots = layout.table_slots
        if self._profile is not None:
            args.profile = self._profile.data_ptr()
        spec = resolve_spec(
            threads=threads,
            wide_keys=wide_keys,
            global_hash=layout.in_workspace,
            wide_rows=plan.physical_rows.dtype == torch.int64,
            power_of_two=args.block_shift >= 0,
        )
        self._launch(
            self._entry(spec, "hs_resolve"),
            args,
            blocks=max(inputs.num_requests, 1),
            threads=threads,
            shared_bytes=layout.shared_bytes,
        )

    def _plan_step(
        self,
        state: HotState,
        tables: ResidencyTables,
        plan: ResolvePlan,
        threads: int,
        *,
        wide_keys: bool,
    ) -> tuple[TableLayout, int]:
        needed = -(-state.hot_rows // tables.block_size)
        cached = needed if needed <= MAX_CACHED_HOT_BLOCKS else 0
        max_lanes = plan.miss_source_rows.shape[1]
        for blocks_per_sm in (1024 // threads, 1):
            layout = plan_tables(
                max_lanes=max_lanes,
                hot_rows=state.hot_rows,
                cached_hot_blocks=cached,
                num_pages=max(tables.source.shape[1], tables.resident.shape[1]),
                key_bytes=8 if wide_keys else 4,
                table_factor=self.tuning.table_factor,
                budget_bytes=self._shared_budget(blocks_per_sm=blocks_per_sm),
            )
            if not layout.in_workspace:
                return layout, cached
        found = 0 if state.workspace is None else state.workspace.shape[1] - HINT_BYTES
        if found < layout.workspace_bytes:
            raise UsageError(
                f"a step of {max_lanes} lanes needs a workspace of {layout.workspace_bytes} bytes "
                f"a request, the hot state has {found}",
                remedy="Make the hot state with CudaBackend.make_hot_state",
            )
        return layout, cached

    def _shared_budget(self, *, blocks_per_sm: int) -> int:
        static = 2_048  # struct Small of resolve.cu, rounded up
        whole = min(self._shared_per_block, self._shared_per_sm // blocks_per_sm)
        return whole - _RESERVED_SHARED_BYTES - static

    # --- rows ------------------------------------------------------------------------------------

    def gather(
        self, *, pages: GroupPages, plan: ResolvePlan, overlap: Overlap = Overlap.NONE
    ) -> None:
        """Copy the planned rows, host to hot, for all layers of ``pages``, in one launch."""
        for layers in self._addresses(pages):
            args = _row_args(layers, self.tuning)
            args.device_block_rows = 0 if layers.is_device_flat else layers.block_stride_rows
            args.host_rows = plan.miss_source_rows.data_ptr()
            args.device_rows = plan.miss_device_rows.data_ptr()
            args.counts = plan.miss_counts.data_ptr()
            args.num_lists, args.list_stride = plan.miss_source_rows.shape
            self._launch_rows("hs_rows_to_device", args, overlap)

    def mirror_rows(
        self, *, pages: GroupPages, device_slots: torch.Tensor, host_slots: torch.Tensor
    ) -> None:
        """Copy rows, device to host: see `KernelBackend.mirror_rows`."""
        _check_pages_slots(pages, device_slots, host_slots)
        if not device_slots.shape[0]:
            return
        for layers in self._addresses(pages):
            args = _row_args(layers, self.tuning)
            contiguous = layers.block_size * layers.row_bytes == layers.device_block_bytes
            args.device_block_rows = 0 if contiguous else layers.block_size
            args.host_rows = self._on_device("host_slots", host_slots)
            args.device_rows = self._on_device("device_slots", device_slots)
            args.num_lists = 1
            args.list_stride = args.fixed_count = device_slots.shape[0]
            self._launch_rows("hs_rows_to_host", args)

    def stage(self, *, pages: GroupPages, host_slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy host rows into a contiguous buffer: see `KernelBackend.stage`.

        Raises:
            GeometryError: ``out`` does not fit the rows.
        """
        check_slots(
            name="host_slots",
            slots=host_slots,
            num_blocks=pages.host[0].shape[0],
            block_size=pages.block_size,
        )
        count = host_slots.shape[0]
        check_tensor("out", out, dtype=torch.uint8, ndim=3, device=pages.device[0].device)
        fits = out.shape[0] == pages.num_layers and out.shape[1] >= count
        if not fits or out.shape[2] != pages.row_bytes or not out.is_contiguous():
            raise GeometryError(
                f"out: expected contiguous [{pages.num_layers}, >= {count}, {pages.row_bytes}], "
                f"got {tuple(out.shape)} with strides {out.stride()}"
            )
        if out.data_ptr() % limits.ROW_ALIGNMENT_BYTES:
            raise GeometryError(f"out starts at {out.data_ptr():#x}, no multiple of 16")
        if not count:
            return
        layer_bytes = out.shape[1] * pages.row_bytes
        first = 0
        for layers in self._addresses(pages):
            args = _row_args(layers, self.tuning)
            for index in range(len(layers.host)):
                args.device[index] = out.data_ptr() + (first + index) * layer_bytes
            first += len(layers.host)
            args.device_block_rows = 0
            args.host_rows = self._on_device("host_slots", host_slots)
            args.num_lists = 1
            args.list_stride = args.fixed_count = count
            self._launch_rows("hs_rows_to_device", args)

    def _launch_rows(self, name: str, args: RowArgs, overlap: Overlap = Overlap.NONE) -> None:
        sorts = args.sort_min_rows < NEVER
        launch = self._launch_for(sorts, overlap)
        small = (
            overlap is Overlap.NONE
            and args.counts
            and args.num_lists <= self.tuning.small_batch_lists
        )
        blocks = self.tuning.small_batch_blocks if small else launch.blocks
        args.sorting_blocks = min(launch.blocks, MAX_SORTING_BLOCKS)
        memory = None
        if sorts:
            entries = args.num_lists * args.list_stride
            if entries >= args.sort_min_rows and args.num_lists <= launch.threads:
                memory = self._sorting.memory(entries)
        if memory is not None:
            args.sorted, args.control = memory.rows.data_ptr(), memory.control
        power_of_two = power_of_two_shift(args.block_size) >= 0
        spec = copy_spec(launch, sorts=sorts, power_of_two=power_of_two)
        self._launch(
            self._entry(spec, name),
            args,
            blocks=blocks,
            threads=launch.threads,
            shared_bytes=list_bytes(launch.threads, sorts=sorts),
        )

    def _launch_for(self, sorts: bool, overlap: Overlap) -> CopyLaunch:
        if overlap is Overlap.COMPUTE:
            return self.tuning.sorted_beside if sorts else self.tuning.wide_beside
        return self.tuning.sorted if sorts else self.tuning.wide

    # --- blocks ----------------------------------------------------------------------------------

    def mirror_blocks(
        self, *, pages: GroupPages, device_blocks: torch.Tensor, host_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, device to host, all layers of ``pages``."""
        self._copy_blocks("hs_blocks_to_host", pages, device_blocks, host_blocks)

    def restore_blocks(
        self, *, pages: GroupPages, host_blocks: torch.Tensor, device_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, host to device, all layers of ``pages``."""
        self._copy_blocks("hs_blocks_to_device", pages, device_blocks, host_blocks)

    def _copy_blocks(
        self,
        name: str,
        pages: GroupPages,
        device_blocks: torch.Tensor,
        host_blocks: torch.Tensor,
    ) -> None:
        check_block_pairs(pages=pages, device_blocks=device_blocks, host_blocks=host_blocks)
        if not device_blocks.shape[0]:
            return
        for layers in self._addresses(pages):
            args = BlockArgs()
            _fill_layers(args, layers)
            args.adjacent_layers = len(layers.host) if layers.adjacent else 1
            args.host_blocks = self._on_device("host_blocks", host_blocks)
            args.device_blocks = self._on_device("device_blocks", device_blocks)
            args.num_pairs = device_blocks.shape[0]
            power_of_two = power_of_two_shift(layers.block_size) >= 0
            spec = copy_spec(self.tuning.blocks, sorts=False, power_of_two=power_of_two)
            self._launch(
                self._entry(spec, name),
                args,
                blocks=self.tuning.blocks.blocks,
                threads=self.tuning.blocks.threads,
            )

    # --- state -----------------------------------------------------------------------------------

    def invalidate(self, *, state: HotState, host_blocks: torch.Tensor, block_size: int) -> None:
        """Forget every hot row, of every request, that lies in one of these host blocks."""
        check_tensor("host_blocks", host_blocks, dtype=torch.int32, ndim=1)
        if not host_blocks.shape[0]:
            return
        args = InvalidateArgs(
            host_rows=state.host_rows.data_ptr(),
            last_use=state.last_use.data_ptr(),
            counters=state.counters.data_ptr(),
            host_blocks=self._on_device("host_blocks", host_blocks),
            num_slots=state.host_rows.numel(),
            num_host_blocks=host_blocks.shape[0],
            block_size=block_size,
            block_shift=power_of_two_shift(block_size),
        )
        per_block = 4 * STATE_THREADS
        blocks = min(-(-state.host_rows.numel() // per_block), 2 * self._num_sms)
        spec = state_spec(power_of_two=args.block_shift >= 0)
        entry = self._entry(spec, "hs_invalidate")
        self._launch(entry, args, blocks=blocks, threads=STATE_THREADS)

    def reset(self, *, state: HotState, request_slots: torch.Tensor) -> None:
        """Empty the hot regions of these request slots, clocks included."""
        check_tensor("request_slots", request_slots, dtype=torch.int32, ndim=1)
        if not request_slots.shape[0]:
            return
        args = ResetArgs(
            host_rows=state.host_rows.data_ptr(),
            last_use=state.last_use.data_ptr(),
            clock=state.clock.data_ptr(),
            request_slots=self._on_device("request_slots", request_slots),
            hot_rows=state.hot_rows,
            max_num_reqs=state.max_num_reqs,
        )
        entry = self._entry(state_spec(), "hs_reset")
        self._launch(entry, args, blocks=request_slots.shape[0], threads=STATE_THREADS)

    # --- launches --------------------------------------------------------------------------------

    def _on_device(self, name: str, tensor: torch.Tensor) -> int:
        if tensor.device != self.device:
            raise GeometryError(f"device of {name}: expected {self.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise GeometryError(f"{name} must be contiguous")
        return tensor.data_ptr()

    def _addresses(self, pages: GroupPages) -> list[Layers]:
        known = self._layers.get(id(pages))
        if known is not None and known[0]() is pages:
            return known[1]
        layers = [
            layers_of(pages.layers(start, start + MAX_LAYERS_A_LAUNCH))
            for start in range(0, pages.num_layers, MAX_LAYERS_A_LAUNCH)
        ]
        key, table = id(pages), self._layers
        table[key] = (weakref.ref(pages, lambda _: table.pop(key, None)), layers)
        return layers

    def _entry(self, spec: KernelSpec, name: str) -> _Entry:
        entry = self._entries.get((spec, name))
        if entry is None:
            entry = self._entries[spec, name] = self._load(spec, name)
        return entry

    def _load(self, spec: KernelSpec, name: str) -> _Entry:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        compiled = self._compiler.compile(spec, arch=self.arch)
        with torch.cuda.device(self.device):
            torch.cuda.current_stream()
            code = ObjectCode.from_cubin(compiled.cubin)
            kernel = code.get_kernel(name)
            static = compiled.resources[name].static_shared_bytes
            attribute = driver.CUfunction_attribute
            call(
                "cuKernelSetAttribute",
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                self._shared_per_block - static,
                kernel.handle,
                driver.CUdevice(self.device.index),
            )
        function = driver.CUfunction(int(kernel.handle))
        return _Entry(function=function, owner=(code, kernel))

    def _launch(
        self,
        entry: _Entry,
        args: ctypes.Structure,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int = 0,
    ) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            call(
                "cuLaunchKernel",
                entry.function,
                *(blocks, 1, 1),
                *(threads, 1, 1),
                shared_bytes,
                stream,
                ctypes.addressof(pointers),
                0,
            )


def _rows_guess(inputs: StepInputs, plan: ResolvePlan) -> int:
    """Query rows of each request if all have the same; the kernel checks it. 0 = no guess."""
    if not inputs.num_requests:
        return 0
    rows = inputs.num_query_rows // inputs.num_requests
    return min(rows, plan.miss_source_rows.shape[1] // inputs.top_k)


def _resolve_args(
    state: HotState, tables: ResidencyTables, inputs: StepInputs, plan: ResolvePlan
) -> ResolveArgs:
    workspace = state.workspace
    return ResolveArgs(
        host_rows=state.host_rows.data_ptr(),
        last_use=state.last_use.data_ptr(),
        clock=state.clock.data_ptr(),
        counters=state.counters.data_ptr(),
        source=tables.source.data_ptr(),
        resident=tables.resident.data_ptr(),
        hot=tables.hot.data_ptr(),
        positions=inputs.positions.data_ptr(),
        request_slots=inputs.request_slots.data_ptr(),
        table_rows=inputs.table_rows.data_ptr(),
        query_starts=inputs.query_starts.data_ptr(),
        physical_rows=plan.physical_rows.data_ptr(),
        valid_counts=plan.valid_counts.data_ptr(),
        miss_source_rows=plan.miss_source_rows.data_ptr(),
        miss_device_rows=plan.miss_device_rows.data_ptr(),
        miss_counts=plan.miss_counts.data_ptr(),
        workspace=0 if workspace is None else workspace.data_ptr(),
        workspace_stride=0 if workspace is None else workspace.stride(0),
        source_stride=tables.source.stride(0),
        resident_stride=tables.resident.stride(0),
        hot_stride=tables.hot.stride(0),
        positions_stride=inputs.positions.stride(0),
        block_stride_rows=tables.block_stride_rows,
        num_source_blocks=tables.num_source_blocks,
        num_device_blocks=tables.num_device_blocks,
        source_pages=tables.source.shape[1],
        resident_pages=tables.resident.shape[1],
        hot_blocks=tables.hot.shape[1],
        block_size=tables.block_size,
        block_shift=power_of_two_shift(tables.block_size),
        hot_rows=state.hot_rows,
        max_num_reqs=state.max_num_reqs,
        num_requests=inputs.num_requests,
        num_query_rows=inputs.num_query_rows,
        max_num_requests=plan.max_num_requests,
        top_k=inputs.top_k,
        max_misses=plan.miss_source_rows.shape[1],
        max_lanes=plan.miss_source_rows.shape[1],
        padded_lanes=padded_lanes(plan.miss_source_rows.shape[1]),
        wide_rows=int(plan.physical_rows.dtype == torch.int64),
        rows_guess=_rows_guess(inputs, plan),
        vector_slots=int(
            state.hot_rows % 4 == 0
            and (state.host_rows.data_ptr() | state.last_use.data_ptr()) % 16 == 0
        ),
    )


def _fill_layers(args: RowArgs | BlockArgs, layers: Layers) -> None:
    for index, address in enumerate(layers.host):
        args.host[index] = address
        args.device[index] = layers.device[index]
    args.host_block_bytes = layers.host_block_bytes
    args.host_row_bytes = layers.host_row_bytes
    args.device_block_bytes = layers.device_block_bytes
    args.num_layers = len(layers.host)
    args.row_lanes = layers.row_bytes // limits.ROW_ALIGNMENT_BYTES
    args.block_size = layers.block_size


def _row_args(layers: Layers, tuning: CudaTuning) -> RowArgs:
    args = RowArgs()
    _fill_layers(args, layers)
    args.block_shift = power_of_two_shift(layers.block_size)
    args.adjacent = int(layers.adjacent)
    num_blocks = max(layers.host_bytes // layers.host_block_bytes, 1)
    args.bin_scale = min((ADDRESS_BINS << 32) // num_blocks, 2**32 - 1)
    contiguous = layers.row_bytes * (len(layers.host) if layers.adjacent else 1)
    wide = contiguous > tuning.sort_max_row_bytes
    args.sort_min_rows = NEVER if wide else tuning.sort_min_rows
    return args


def _check_pages_slots(
    pages: GroupPages, device_slots: torch.Tensor, host_slots: torch.Tensor
) -> None:
    check_slots(
        name="device_slots",
        slots=device_slots,
        num_blocks=pages.device[0].shape[0],
        block_size=pages.block_size,
    )
    check_slots(
        name="host_slots",
        slots=host_slots,
        num_blocks=pages.host[0].shape[0],
        block_size=pages.block_size,
    )
    if device_slots.shape != host_slots.shape:
        raise GeometryError(
            f"{device_slots.shape[0]} device slots and {host_slots.shape[0]} host slots"
        )
