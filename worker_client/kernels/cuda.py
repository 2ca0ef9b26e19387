"""The GPU data plane: the functions of `reference.py` as CUDA kernels, byte for byte.

Every operation is one launch on torch's current stream and reads nothing back, so it can be
captured in a CUDA graph; copies that sort take memory to sort in from torch, once a stream and
once a captured launch (docs/decisions/0016-gathers-sort-and-share.md). Variants are compiled when
a hot state is made (see `CudaBackend.prepare`), not in a captured region. What the kernels would
trap on is checked by `interface.check_*`; a block id past the end makes its lanes invalid instead
of a wild access.

Host pages must be registered with CUDA in this process, portable and mapped; they are read and
written in place. Used by `runtime.py` and `mirror.py` on the worker's compute thread; a backend
belongs to one device and one thread.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.errors import DeviceError, GeometryError, UsageError
from worker_client.kernels.compile import KernelCompiler, KernelSpec, default_cache_directory
from worker_client.kernels.interface import (
    GroupPages,
    HostLayout,
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

MAX_LAYERS_A_LAUNCH: Final = 32
"""Layers whose addresses fit the arguments of one launch; larger groups take several."""

MAX_CACHED_HOT_BLOCKS: Final = 1_024
NARROW_KEY_ROWS: Final = 2**32 - 1
"""Host rows below it have 32-bit keys; all ones marks an empty entry."""

HINT_BYTES: Final = 16
"""Front of a request's workspace: the age class at which its last victims were cut."""

ADDRESS_BINS: Final = 8_192
"""Runs of host blocks that rows are sorted by (kBins of copy.cu)."""

MAX_SORTING_BLOCKS: Final = 32
"""Thread blocks of a launch that sorts (kMaxRanges of copy.cu)."""

CONTROL_BYTES: Final = 512
"""What the thread blocks of such a launch share (SortControl of copy.cu), and a bit of room."""

MAX_SORTS: Final = 4_096
"""Launches that sort and were captured in graphs, and streams that sort, each with its own control.
Whoever comes later copies its rows in the order of the plan."""

SORTED_ROW_BYTES: Final = 16

OWN_ENTRIES: Final = 768
"""Entries that a warp holds before it places them (kOwn of copy.cu)."""

_NEVER: Final = 2**31 - 1
_RESERVED_SHARED_BYTES: Final = 1_024
_MIN_TABLE_FACTOR: Final = 1.25

__all__ = ["CopyLaunch", "CudaBackend", "CudaTuning"]


@dataclass(frozen=True, kw_only=True)
class CopyLaunch:
    """Size of a launch that copies. Few blocks: the link is slow, and the rest computes.

    Attributes:
        threads: Threads of a block: 256, 512 or 1,024.
        unroll: 16-byte loads in flight for each thread.
        blocks: Thread blocks.
    """

    threads: int
    unroll: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class CudaTuning:
    """Sizes of the launches.

    The defaults come from sweeps on an H200 (benchmarks/gpu).

    Attributes:
        resolve_threads: Threads of a block; None = 1,024, or 512 (two blocks a multiprocessor)
            where there are more requests than multiprocessors.
        table_factor: Hash slots for each wanted row, where shared memory allows.
        wide: Launch of rows that are copied in the order of the plan.
        small_batch_lists: Plans of at most so many requests have few rows: latency counts, and
            ``small_batch_blocks`` blocks share them.
        sorted: Launch of rows that are copied in the order of host addresses, of at most
            MAX_SORTING_BLOCKS blocks. With more than a dozen, the copied rows push the page tables
            out of the cache: from a cold one 12 move 10 to 15 % more than 32.
        wide_beside: The same as ``wide`` with `Overlap.COMPUTE`: each block takes a multiprocessor
            from the computation, so few and large ones.
        sorted_beside: The same as ``sorted`` with `Overlap.COMPUTE`.
        blocks: Launch that copies whole blocks.
        sort_min_rows: Launches with fewer rows copy them in the order of the plan, longer ones in
            the order of host addresses.
        sort_max_row_bytes: Rows that are longer (all layers, where they lie side by side) are
            copied in the order of the plan too: few enough of them keep the link busy.
        l2_set_aside_bytes: Second-level cache that copied rows stay out of, so that page tables
            stay in: the limit that CUDA has for persisting accesses, raised for the whole process.
            Ordinary accesses use that part as ever, others that are marked to leave first do not: a
            product of few rows took up to 8 % longer. Worth it where gathers follow each other with
            little computation between (docs/performance.md). 0 leaves the limit alone; more than
            the device allows is as much as it allows.
    """

    resolve_threads: int | None = None
    table_factor: float = 4.0
    wide: CopyLaunch = CopyLaunch(threads=256, unroll=8, blocks=16)
    small_batch_lists: int = 8
    small_batch_blocks: int = 66
    sorted: CopyLaunch = CopyLaunch(threads=512, unroll=3, blocks=12)
    wide_beside: CopyLaunch = CopyLaunch(threads=512, unroll=8, blocks=4)
    sorted_beside: CopyLaunch = CopyLaunch(threads=512, unroll=4, blocks=4)
    blocks: CopyLaunch = CopyLaunch(threads=512, unroll=8, blocks=32)
    sort_min_rows: int = 3_072
    sort_max_row_bytes: int = 2_048
    l2_set_aside_bytes: int = 0


class _ResolveArgs(ctypes.Structure):
    """ResolveArgs of resolve.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "host_rows", "last_use", "clock", "counters", "source", "resident", "hot",
                "positions", "request_slots", "table_rows", "query_starts", "physical_rows",
                "valid_counts", "miss_source_rows", "miss_device_rows", "miss_counts", "workspace",
                "profile",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "workspace_stride", "source_stride", "resident_stride", "hot_stride",
                "positions_stride", "block_stride_rows",
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_source_blocks", "num_device_blocks", "source_pages", "resident_pages",
                "hot_blocks", "cached_hot_blocks", "cached_pages", "block_size", "block_shift",
                "hot_rows", "max_num_reqs", "num_requests", "num_query_rows",
                "max_num_requests", "top_k", "max_misses", "max_lanes", "padded_lanes",
                "table_slots", "wide_rows", "rows_guess", "vector_slots",
            )
        ),
    )  # fmt: skip


_Addresses = ctypes.c_uint64 * MAX_LAYERS_A_LAUNCH


class _RowArgs(ctypes.Structure):
    """RowArgs of copy.cu."""

    _fields_ = (
        ("host", _Addresses),
        ("device", _Addresses),
        ("host_rows", ctypes.c_void_p),
        ("device_rows", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("sorted", ctypes.c_void_p),
        ("control", ctypes.c_void_p),
        ("list_stride", ctypes.c_int64),
        ("fixed_count", ctypes.c_int64),
        ("host_block_bytes", ctypes.c_int64),
        ("host_row_bytes", ctypes.c_int64),
        ("device_block_bytes", ctypes.c_int64),
        ("device_block_rows", ctypes.c_int64),
        ("num_lists", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("row_lanes", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("block_shift", ctypes.c_int32),
        ("bin_scale", ctypes.c_uint32),
        ("sort_min_rows", ctypes.c_int32),
        ("sorting_blocks", ctypes.c_uint32),
        ("adjacent", ctypes.c_int32),
    )


class _BlockArgs(ctypes.Structure):
    """BlockArgs of copy.cu."""

    _fields_ = (
        ("host", _Addresses),
        ("device", _Addresses),
        ("host_blocks", ctypes.c_void_p),
        ("device_blocks", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int64),
        ("host_block_bytes", ctypes.c_int64),
        ("host_row_bytes", ctypes.c_int64),
        ("device_block_bytes", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("row_lanes", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("adjacent_layers", ctypes.c_int32),
    )


class _InvalidateArgs(ctypes.Structure):
    """InvalidateArgs of state.cu."""

    _fields_ = (
        ("host_rows", ctypes.c_void_p),
        ("last_use", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("host_blocks", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("num_host_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int32),
        ("block_shift", ctypes.c_int32),
    )


class _ResetArgs(ctypes.Structure):
    """ResetArgs of state.cu."""

    _fields_ = (
        ("host_rows", ctypes.c_void_p),
        ("last_use", ctypes.c_void_p),
        ("clock", ctypes.c_void_p),
        ("request_slots", ctypes.c_void_p),
        ("hot_rows", ctypes.c_int32),
        ("max_num_reqs", ctypes.c_int32),
    )


def resolve_spec(
    *,
    threads: int,
    wide_keys: bool = False,
    global_hash: bool = False,
    wide_rows: bool = False,
    power_of_two: bool = True,
    profile: bool = False,
) -> KernelSpec:
    """A variant of resolve.cu."""
    return KernelSpec.make(
        "resolve.cu",
        {
            "HS_THREADS": threads,
            "HS_BLOCKS_PER_SM": 1024 // threads,
            "HS_WIDE_KEYS": int(wide_keys),
            "HS_GLOBAL_HASH": int(global_hash),
            "HS_WIDE_ROWS": int(wide_rows),
            "HS_POW2": int(power_of_two),
            "HS_PROFILE": int(profile),
            "HS_SIZEOF_ARGS": ctypes.sizeof(_ResolveArgs),
        },
    )


def copy_spec(launch: CopyLaunch, *, sorts: bool, power_of_two: bool = True) -> KernelSpec:
    """The variant of copy.cu for a launch size, with the code that sorts rows or without."""
    return KernelSpec.make(
        "copy.cu",
        {
            "HS_THREADS": launch.threads,
            "HS_COPY_UNROLL": launch.unroll,
            "HS_BLOCKS_PER_SM": 1,
            "HS_SIZEOF_ROWS": ctypes.sizeof(_RowArgs),
            "HS_SIZEOF_BLOCKS": ctypes.sizeof(_BlockArgs),
            "HS_LIST_BYTES": list_bytes(launch.threads, sorts=True),
            "HS_CONTROL_BYTES": CONTROL_BYTES,
            "HS_SORTS": int(sorts),
            "HS_POW2": int(power_of_two),
        },
    )


def list_bytes(threads: int, *, sorts: bool) -> int:
    """Dynamic shared memory of a block that copies rows (struct Lists of copy.cu)."""
    return 5 * 1024 + (4 * ADDRESS_BINS + threads // 32 * 4 * OWN_ENTRIES if sorts else 0)


_STATE_THREADS: Final = 512


def state_spec(*, power_of_two: bool = True) -> KernelSpec:
    """The variant of state.cu."""
    return KernelSpec.make(
        "state.cu",
        {
            "HS_THREADS": _STATE_THREADS,
            "HS_POW2": int(power_of_two),
            "HS_SIZEOF_INVALIDATE": ctypes.sizeof(_InvalidateArgs),
            "HS_SIZEOF_RESET": ctypes.sizeof(_ResetArgs),
        },
    )


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """Shared memory of one resolve block (place_tables in resolve.cu).

    Attributes:
        table_slots: Slots of the hash of wanted rows.
        cached_pages: Pages whose places are kept in shared memory: all of the tables, or none.
        shared_bytes: Dynamic shared memory.
        workspace_bytes: Bytes in the workspace for each request slot; 0 with the hash in shared
            memory.
    """

    table_slots: int
    cached_pages: int
    shared_bytes: int
    workspace_bytes: int

    @property
    def in_workspace(self) -> bool:
        """Whether the hash is in the workspace."""
        return self.workspace_bytes > 0


def plan_tables(
    *,
    max_lanes: int,
    hot_rows: int,
    cached_hot_blocks: int,
    num_pages: int,
    key_bytes: int,
    table_factor: float,
    budget_bytes: int,
) -> TableLayout:
    """Place the hash of wanted rows: in shared memory if 1.25 slots a row fit there.

    Args:
        max_lanes: Most rows that one transaction may want.
        hot_rows: Hot slots of a request.
        cached_hot_blocks: Entries of the hot block table kept in shared memory.
        num_pages: Pages of the block tables; kept there too where two slots a row are left.
        key_bytes: 4 or 8.
        table_factor: Slots wanted for each row.
        budget_bytes: Dynamic shared memory of a block.
    """
    # Every warp has whole steps of 128 slots and 64 or 128 lanes: see share_of_warp.
    always = -(-hot_rows // 4_096) * 4_096 + _padded(4 * cached_hot_blocks)
    lanes = _padded(4 * _padded_lanes(max_lanes)) + 2 * _padded(2 * max_lanes)
    slot_bytes = key_bytes + 4
    pages = _padded(4 * num_pages)
    for cached, least in ((num_pages, 2.0), (0, _MIN_TABLE_FACTOR)):
        fixed = always + lanes + (pages if cached else 0)
        room = (budget_bytes - fixed - 64) // slot_bytes // 4 * 4
        if room < int(max_lanes * least) + 4:
            continue
        slots = min(room, max(int(max_lanes * table_factor) // 4 * 4, 64))
        return TableLayout(
            table_slots=slots,
            cached_pages=cached,
            shared_bytes=fixed + _padded(key_bytes * slots) + _padded(4 * slots),
            workspace_bytes=0,
        )
    slots = max(2 * max_lanes // 4 * 4, 64)
    cached = num_pages if always + pages <= budget_bytes else 0
    return TableLayout(
        table_slots=slots,
        cached_pages=cached,
        shared_bytes=always + (pages if cached else 0),
        workspace_bytes=lanes + _padded(key_bytes * slots) + _padded(4 * slots),
    )


def _padded_lanes(max_lanes: int) -> int:
    return -(-max_lanes // 2_048) * 2_048


def _rows_guess(inputs: StepInputs, plan: ResolvePlan) -> int:
    """Query rows of each request if all have the same; the kernel checks it. 0 = no guess."""
    if not inputs.num_requests:
        return 0
    rows = inputs.num_query_rows // inputs.num_requests
    return min(rows, plan.miss_source_rows.shape[1] // inputs.top_k)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def power_of_two_shift(size: int) -> int:
    """log2 of a power of two; -1 for any other size."""
    return size.bit_length() - 1 if size & (size - 1) == 0 else -1


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One loaded kernel."""

    function: Any
    owner: Any


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Addresses of up to MAX_LAYERS_A_LAUNCH layers, and their strides in bytes."""

    host: tuple[int, ...]
    device: tuple[int, ...]
    host_block_bytes: int
    host_row_bytes: int
    host_bytes: int
    device_block_bytes: int
    row_bytes: int
    block_size: int
    block_stride_rows: int
    adjacent: bool

    @property
    def is_device_flat(self) -> bool:
        """Whether physical row p lies at p * row_bytes."""
        return self.block_stride_rows * self.row_bytes == self.device_block_bytes


@dataclass(frozen=True, kw_only=True)
class _SortMemory:
    """Memory of one launch that sorts: rows [entries, 16] uint8, and the address of its control."""

    rows: torch.Tensor
    control: int


class _SortingMemory:
    """Global memory of launches that sort.

    Two launches that may run at once must not share any. Launches of one stream follow each other
    and share theirs. A captured launch may be replayed beside anything: it has a control of its
    own for ever, and rows from the graph's memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._controls: torch.Tensor | None = None
        self._used = 0
        self._of_stream: dict[int, _SortMemory] = {}

    def prepare(self) -> None:
        """Allocate the controls. Not in a captured region."""
        size = MAX_SORTS * CONTROL_BYTES
        self._controls = torch.zeros(size, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # other streams will use them too

    def memory(self, entries: int) -> _SortMemory | None:
        """Memory for so many rows on the current stream; None when all controls are in use."""
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self._make(entries, self._next_control())
            stream = torch.cuda.current_stream(self._device).cuda_stream
            known = self._of_stream.get(stream)
            if known is not None and known.rows.shape[0] >= entries:
                return known
            made = self._make(entries, known.control if known else self._next_control())
            if made is not None:
                self._of_stream[stream] = made
            return made

    def _next_control(self) -> int | None:
        if self._controls is None or self._used == MAX_SORTS:
            return None
        self._used += 1
        return self._controls.data_ptr() + (self._used - 1) * CONTROL_BYTES

    def _make(self, entries: int, control: int | None) -> _SortMemory | None:
        if control is None:
            return None
        shape = (entries, SORTED_ROW_BYTES)
        rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return _SortMemory(rows=rows, control=control)


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
        self._num_sms = _device_attribute(index, "MULTIPROCESSOR_COUNT")
        self._shared_per_block = _device_attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._shared_per_sm = _device_attribute(index, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        self._compiler = compiler or KernelCompiler(
            default_cache_directory(), driver_version=_driver_version()
        )
        self._entries: dict[tuple[KernelSpec, str], _Entry] = {}
        self._layers: dict[int, tuple[weakref.ref[GroupPages], list[_Layers]]] = {}
        self._sorting = _SortingMemory(self.device)
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
                _set_l2_aside(self.device.index, tuning.l2_set_aside_bytes)
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
                remedy="make the hot state with CudaBackend.make_hot_state",
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

    def _launch_rows(self, name: str, args: _RowArgs, overlap: Overlap = Overlap.NONE) -> None:
        sorts = args.sort_min_rows < _NEVER
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
            args = _BlockArgs()
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
        args = _InvalidateArgs(
            host_rows=state.host_rows.data_ptr(),
            last_use=state.last_use.data_ptr(),
            counters=state.counters.data_ptr(),
            host_blocks=self._on_device("host_blocks", host_blocks),
            num_slots=state.host_rows.numel(),
            num_host_blocks=host_blocks.shape[0],
            block_size=block_size,
            block_shift=power_of_two_shift(block_size),
        )
        per_block = 4 * _STATE_THREADS
        blocks = min(-(-state.host_rows.numel() // per_block), 2 * self._num_sms)
        spec = state_spec(power_of_two=args.block_shift >= 0)
        entry = self._entry(spec, "hs_invalidate")
        self._launch(entry, args, blocks=blocks, threads=_STATE_THREADS)

    def reset(self, *, state: HotState, request_slots: torch.Tensor) -> None:
        """Empty the hot regions of these request slots, clocks included."""
        check_tensor("request_slots", request_slots, dtype=torch.int32, ndim=1)
        if not request_slots.shape[0]:
            return
        args = _ResetArgs(
            host_rows=state.host_rows.data_ptr(),
            last_use=state.last_use.data_ptr(),
            clock=state.clock.data_ptr(),
            request_slots=self._on_device("request_slots", request_slots),
            hot_rows=state.hot_rows,
            max_num_reqs=state.max_num_reqs,
        )
        entry = self._entry(state_spec(), "hs_reset")
        self._launch(entry, args, blocks=request_slots.shape[0], threads=_STATE_THREADS)

    # --- launches --------------------------------------------------------------------------------

    def _on_device(self, name: str, tensor: torch.Tensor) -> int:
        if tensor.device != self.device:
            raise GeometryError(f"device of {name}: expected {self.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise GeometryError(f"{name} must be contiguous")
        return tensor.data_ptr()

    def _addresses(self, pages: GroupPages) -> list[_Layers]:
        known = self._layers.get(id(pages))
        if known is not None and known[0]() is pages:
            return known[1]
        layers = [
            _layers_of(pages.layers(start, start + MAX_LAYERS_A_LAUNCH))
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
            _check(
                driver.cuKernelSetAttribute(
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    self._shared_per_block - static,
                    kernel.handle,
                    driver.CUdevice(self.device.index),
                ),
                f"shared memory of {name}",
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
        from cuda.bindings import driver

        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            _check(
                driver.cuLaunchKernel(
                    entry.function,
                    *(blocks, 1, 1),
                    *(threads, 1, 1),
                    shared_bytes,
                    stream,
                    ctypes.addressof(pointers),
                    0,
                ),
                "kernel launch",
            )


def _resolve_args(
    state: HotState, tables: ResidencyTables, inputs: StepInputs, plan: ResolvePlan
) -> _ResolveArgs:
    workspace = state.workspace
    return _ResolveArgs(
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
        padded_lanes=_padded_lanes(plan.miss_source_rows.shape[1]),
        wide_rows=int(plan.physical_rows.dtype == torch.int64),
        rows_guess=_rows_guess(inputs, plan),
        vector_slots=int(
            state.hot_rows % 4 == 0
            and (state.host_rows.data_ptr() | state.last_use.data_ptr()) % 16 == 0
        ),
    )


def _fill_layers(args: _RowArgs | _BlockArgs, layers: _Layers) -> None:
    for index, address in enumerate(layers.host):
        args.host[index] = address
        args.device[index] = layers.device[index]
    args.host_block_bytes = layers.host_block_bytes
    args.host_row_bytes = layers.host_row_bytes
    args.device_block_bytes = layers.device_block_bytes
    args.num_layers = len(layers.host)
    args.row_lanes = layers.row_bytes // limits.ROW_ALIGNMENT_BYTES
    args.block_size = layers.block_size


def _row_args(layers: _Layers, tuning: CudaTuning) -> _RowArgs:
    args = _RowArgs()
    _fill_layers(args, layers)
    args.block_shift = power_of_two_shift(layers.block_size)
    args.adjacent = int(layers.adjacent)
    num_blocks = max(layers.host_bytes // layers.host_block_bytes, 1)
    args.bin_scale = min((ADDRESS_BINS << 32) // num_blocks, 2**32 - 1)
    contiguous = layers.row_bytes * (len(layers.host) if layers.adjacent else 1)
    wide = contiguous > tuning.sort_max_row_bytes
    args.sort_min_rows = _NEVER if wide else tuning.sort_min_rows
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


def _layers_of(pages: GroupPages) -> _Layers:
    device = pages.device[0]
    return _Layers(
        host=tuple(_device_address(layer) for layer in pages.host),
        device=tuple(layer.data_ptr() for layer in pages.device),
        host_block_bytes=pages.host[0].stride(0),
        host_row_bytes=pages.host[0].stride(1),
        host_bytes=pages.host[0].shape[0] * pages.host[0].stride(0),
        device_block_bytes=device.stride(0),
        row_bytes=pages.row_bytes,
        block_size=pages.block_size,
        block_stride_rows=pages.block_stride_rows,
        adjacent=pages.host_layout is HostLayout.GROUP_INTERLEAVED,
    )


def _device_address(layer: torch.Tensor) -> int:
    """Where the device reads a layer's host pages: both ends must be in registered memory.

    Raises:
        UsageError: They are not, or not at one distance from the host's addresses.
    """
    first = layer.data_ptr()
    size = sum((n - 1) * s for n, s in zip(layer.shape, layer.stride(), strict=True)) + 1
    start, end = (_mapped_address(address) for address in (first, first + size - 1))
    if end - start != size - 1:
        raise UsageError("the device maps the two ends of a layer's host pages at other distances")
    return start


def _mapped_address(address: int) -> int:
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    error, mapped = driver.cuPointerGetAttribute(attribute, address)
    if int(error) or not int(mapped):
        raise UsageError(
            f"host page at {address:#x} is not registered with CUDA (error {int(error)})",
            remedy="attach the host pool with registration before binding its pages",
            code=int(error),
        )
    return int(mapped)


def _device_attribute(index: int, name: str) -> int:
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    error, value = driver.cuDeviceGetAttribute(attribute, driver.CUdevice(index))
    _check((error,), f"device attribute {name}")
    return int(value)


def _set_l2_aside(index: int, num_bytes: int) -> None:
    """Raise the current context's limit; never lower what somebody else has set."""
    from cuda.bindings import driver

    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    wanted = min(num_bytes, _device_attribute(index, "MAX_PERSISTING_L2_CACHE_SIZE"))
    error, current = driver.cuCtxGetLimit(limit)
    _check((error,), "limit of the second-level cache")
    if wanted > current:
        _check(driver.cuCtxSetLimit(limit, wanted), f"setting {wanted} bytes of cache aside")


def _driver_version() -> str:
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    _check((error,), "driver version")
    return str(version)


def _check(result: tuple[Any, ...], what: str) -> None:
    code = int(result[0])
    if code:
        raise DeviceError(f"{what} failed with CUDA error {code} ({result[0]!s})", code=code)
