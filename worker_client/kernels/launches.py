"""What the kernels are compiled with and called with: launch sizes, variants, arguments.

The structures mirror those of the `.cu` files, which assert their sizes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from worker_client.kernels.compile import KernelSpec

MAX_LAYERS_A_LAUNCH: Final = 32
"""Layers whose addresses fit the arguments of one launch; larger groups take several."""

ADDRESS_BINS: Final = 8_192
"""Runs of host blocks that rows are sorted by (kBins of copy.cu)."""

MAX_SORTING_BLOCKS: Final = 32
"""Thread blocks of a launch that sorts (kMaxRanges of copy.cu)."""

CONTROL_BYTES: Final = 512
"""What the thread blocks of such a launch share (SortControl of copy.cu), and a bit of room."""

OWN_ENTRIES: Final = 768
"""Entries that a warp holds before it places them (kOwn of copy.cu)."""

STATE_THREADS: Final = 512
"""Threads of a block of state.cu."""

NEVER: Final = 2**31 - 1
"""For `RowArgs.sort_min_rows`: no launch has so many rows."""


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


class ResolveArgs(ctypes.Structure):
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


class RowArgs(ctypes.Structure):
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


class BlockArgs(ctypes.Structure):
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


class InvalidateArgs(ctypes.Structure):
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


class ResetArgs(ctypes.Structure):
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
            "HS_SIZEOF_ARGS": ctypes.sizeof(ResolveArgs),
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
            "HS_SIZEOF_ROWS": ctypes.sizeof(RowArgs),
            "HS_SIZEOF_BLOCKS": ctypes.sizeof(BlockArgs),
            "HS_LIST_BYTES": list_bytes(launch.threads, sorts=True),
            "HS_CONTROL_BYTES": CONTROL_BYTES,
            "HS_SORTS": int(sorts),
            "HS_POW2": int(power_of_two),
        },
    )


def list_bytes(threads: int, *, sorts: bool) -> int:
    """Dynamic shared memory of a block that copies rows (struct Lists of copy.cu)."""
    return 5 * 1024 + (4 * ADDRESS_BINS + threads // 32 * 4 * OWN_ENTRIES if sorts else 0)


def state_spec(*, power_of_two: bool = True) -> KernelSpec:
    """The variant of state.cu."""
    return KernelSpec.make(
        "state.cu",
        {
            "HS_THREADS": STATE_THREADS,
            "HS_POW2": int(power_of_two),
            "HS_SIZEOF_INVALIDATE": ctypes.sizeof(InvalidateArgs),
            "HS_SIZEOF_RESET": ctypes.sizeof(ResetArgs),
        },
    )


def power_of_two_shift(size: int) -> int:
    """log2 of a power of two; -1 for any other size."""
    return size.bit_length() - 1 if size & (size - 1) == 0 else -1
