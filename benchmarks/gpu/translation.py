"""A bare gather of rows from host memory: what address translation costs, and what helps.

    python -m benchmarks.gpu.translation --out translation.json [--only span,spread] [--gib 16]

The kernel does nothing but copy rows of 656 bytes that two lists name. One thing is varied at a
time: the order of the rows, the number of thread blocks, the cache hints, the bytes over which the
sources and the destinations lie and the order of those, the size of the pages, the cache that is
set aside. Every launch has a list of its own. A case begins with a flushed second-level cache, and
the first two thirds of its launches are not timed; `flushed` cases flush before each launch.

`worker_client/kernels/copy.cu` is built on what this found.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.measure import Report

ROW_BYTES: Final = 656
GIB: Final = 1024**3
HUGE_PAGE_BYTES: Final = 2 * 1024**2
CHECKED_ROWS: Final = 50
LISTS: Final = {4_096: 90, 19_009: 60, 65_536: 30, 73_339: 30, 131_072: 24}
"""Lists for each number of rows: enough to touch most of the page tables before timing begins."""

_LOAD: Final = "{%0, %1, %2, %3}, [%4]"
_STORE: Final = "[%0], {%1, %2, %3, %4}"
LOADS: Final = {
    "usual": f"ld.global.L1::no_allocate.v4.u32 {_LOAD};",
    "evict_first": f"ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {_LOAD}, %5;",
    "evict_unchanged": f"ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {_LOAD}, %5;",
    "volatile": f"ld.volatile.global.v4.u32 {_LOAD};",
}
STORES: Final = {
    "usual": f"st.global.v4.u32 {_STORE};",
    "evict_first": f"st.global.L2::cache_hint.v4.u32 {_STORE}, %5;",
    "evict_unchanged": f"st.global.L2::cache_hint.v4.u32 {_STORE}, %5;",
    "write_through": f"st.global.wt.v4.u32 {_STORE};",
}

SOURCE: Final = r"""
typedef unsigned long long u64;
typedef long long i64;
typedef int i32;
constexpr i32 kWarps = THREADS / 32;
constexpr i32 kLanes = ROW_BYTES / 16;
constexpr i32 kRows = 32 * UNROLL / kLanes > 32 ? 32 : 32 * UNROLL / kLanes;  // a warp's batch
static_assert(kRows > 0, "a warp holds no whole row");

template <i32 kIsLoad> __device__ __forceinline__ u64 policy() {
    u64 made;
    if (kIsLoad) asm("createpolicy.fractional.L2::@LOAD_POLICY@.b64 %0, 1.0;" : "=l"(made));
    else asm("createpolicy.fractional.L2::@STORE_POLICY@.b64 %0, 1.0;" : "=l"(made));
    return made;
}

// In order: each thread block walks through a range of the list. Otherwise batches of all blocks
// are interleaved.
extern "C" __global__ void __launch_bounds__(THREADS) gather_rows(
    u64 host, u64 device, const i64* rows, const i64* to, i32 count, i32 in_ranges
) {
    const i32 warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    i32 begin = (warp * gridDim.x + blockIdx.x) * kRows, end = count;
    i32 step = kWarps * gridDim.x * kRows;
    if (in_ranges) {
        begin = (i64)count * blockIdx.x / gridDim.x + warp * kRows;
        end = (i64)count * (blockIdx.x + 1) / gridDim.x;
        step = kWarps * kRows;
    }
    for (i32 first = begin; first < end; first += step) {
        const i32 batch = min(kRows, end - first);
        i64 from_row = 0, to_row = 0;
        if (thread < batch) {
            from_row = rows[first + thread] * ROW_BYTES;
            to_row = to[first + thread] * ROW_BYTES;
        }
        uint4 v[UNROLL];
        u64 target[UNROLL];
#pragma unroll
        for (i32 u = 0; u < UNROLL; ++u) {
            const i32 lane = u * 32 + thread, row = min(lane / kLanes, batch - 1);
            const i64 from = __shfl_sync(~0u, from_row, row), into = __shfl_sync(~0u, to_row, row);
            const i64 in_row = (lane - row * kLanes) * 16;
            target[u] = 0;
            if (lane < batch * kLanes) {
                asm volatile("@LOAD@"
                             : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                             : "l"(host + from + in_row), "l"(policy<1>()) : "memory");
                target[u] = device + into + in_row;
            }
        }
#pragma unroll
        for (i32 u = 0; u < UNROLL; ++u)
            if (target[u])
                asm volatile("@STORE@"
                             :: "l"(target[u]), "r"(v[u].x), "r"(v[u].y), "r"(v[u].z), "r"(v[u].w),
                                "l"(policy<0>()) : "memory");
    }
}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One figure.

    Attributes:
        group: What is varied.
        label: To which value.
        rows: In each list.
        is_sorted: Whether the rows are in the order of their host addresses.
        blocks: Thread blocks.
        threads: Of a block.
        unroll: 16-byte loads in flight for each thread.
        loads: Cache hint of the reads from the host, of `LOADS`.
        stores: Cache hint of the writes to the device, of `STORES`.
        span_gib: Host memory from which the rows are drawn; None: the whole pool.
        destination_mb: Device memory over which they are spread (10^6 bytes); None: no gaps.
        destinations: "random", "in_order" (of the sources), or "again" (those of the first launch).
        set_aside_mib: Second-level cache set aside for persisting accesses, which nobody makes. The
            driver rounds it up.
        pages: "4 KiB" (shared memory) or "2 MiB" (anonymous memory of huge pages).
        flushed: Whether the second-level cache is written through before each launch.
    """

    group: str
    label: str
    rows: int
    is_sorted: bool = True
    blocks: int = 12
    threads: int = 512
    unroll: int = 4
    loads: str = "evict_first"
    stores: str = "evict_first"
    span_gib: int | None = None
    destination_mb: int | None = None
    destinations: str = "random"
    set_aside_mib: int = 0
    pages: str = "4 KiB"
    flushed: bool = False

    @property
    def name(self) -> str:
        """Of the figure."""
        return f"translation.{self.group}.{self.label}.{self.rows}"


def cases() -> Iterator[Case]:
    """All of them, group by group."""
    for rows in (19_009, 131_072):
        sort = Case(group="hints", label="both", rows=rows, blocks=16)
        plain = replace(sort, group="order", label="sorted", loads="usual", stores="usual")
        yield plain
        yield replace(plain, label="random", is_sorted=False, blocks=66)
        yield replace(sort, group="order", label="random_hinted", is_sorted=False, blocks=66)
        yield replace(sort, label="loads", stores="usual")
        yield replace(sort, label="stores", loads="usual")
        yield sort
        yield replace(sort, label="flushed", flushed=True)
        for blocks in (6, 8, 12, 16, 24, 33, 66):
            yield replace(sort, group="grid", label=str(blocks), blocks=blocks)
        for span in (1, 2, 4, 8, 16):
            within = replace(plain, group="span", label=str(span), span_gib=span, blocks=24)
            yield within
            yield replace(within, label=f"{span}_flushed", flushed=True)
        yield replace(plain, group="pages", label="huge", pages="2 MiB", blocks=24)
    for rows in (19_009, 73_339, 131_072):
        dense = Case(group="spread", label="dense", rows=rows)
        yield dense
        for destination in (86, 172, 344, 688):
            if destination * 10**6 // ROW_BYTES >= rows:
                yield replace(dense, label=str(destination), destination_mb=destination)
    for rows, destination in ((19_009, 172), (73_339, 688)):
        base = Case(group="policy", label="evict_first", rows=rows, destination_mb=destination)
        yield base
        yield replace(base, label="loads_unchanged", loads="evict_unchanged")
        yield replace(base, label="loads_volatile", loads="volatile")
        yield replace(base, label="stores_unchanged", stores="evict_unchanged")
        yield replace(base, label="stores_through", stores="write_through")
        for destinations in ("in_order", "again"):
            yield replace(base, group="destinations", label=destinations, destinations=destinations)
        for mib in (8, 16, 24, 32, 37):
            yield replace(base, group="set_aside", label=str(mib), set_aside_mib=mib)
        yield replace(base, group="set_aside", label="37_flushed", set_aside_mib=37, flushed=True)


def source_of(loads: str, stores: str) -> str:
    """The kernel with these cache hints. NVRTC drops a policy that no instruction uses."""
    policies = {"evict_first", "evict_unchanged"}
    values = {
        "LOAD": LOADS[loads],
        "STORE": STORES[stores],
        "LOAD_POLICY": loads if loads in policies else "evict_first",
        "STORE_POLICY": stores if stores in policies else "evict_first",
    }
    text = SOURCE
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def compile_kernel(case: Case, arch: str) -> Any:
    """A `cuda.core.ObjectCode` that holds ``gather_rows``. Needs NVRTC, no GPU."""
    from cuda.core import Program, ProgramOptions

    defines = [("THREADS", f"{case.threads}"), ("UNROLL", f"{case.unroll}")]
    options = ProgramOptions(
        arch=arch, std="c++17", define_macro=[*defines, ("ROW_BYTES", f"{ROW_BYTES}")]
    )
    return Program(source_of(case.loads, case.stores), "c++", options).compile("cubin")


class HugePages:
    """Anonymous memory of 2 MiB pages, registered. Close it before the process ends.

    Args:
        num_bytes: A multiple of 2 MiB.

    Raises:
        OSError: The kernel gives fewer huge pages.
        RuntimeError: CUDA refuses the memory.
    """

    def __init__(self, num_bytes: int, *, threads: int = 16) -> None:
        import numpy as np
        import torch

        self._map = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        skipped = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._map.madvise(mmap.MADV_HUGEPAGE)
        part = whole[skipped : skipped + num_bytes]
        share = num_bytes // threads
        touching = [
            threading.Thread(target=part[i * share : (i + 1) * share].fill, args=(i,))
            for i in range(threads)
        ]
        for each in touching:
            each.start()
        for each in touching:
            each.join()
        given = re.search(r"AnonHugePages: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        if given is None or int(given[1]) * 1024 < num_bytes:
            raise OSError(
                f"{num_bytes} bytes of huge pages asked for, given: {given and given[1]} kB"
            )
        self.tensor = torch.from_numpy(part)
        code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 3)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes of huge pages: {code}")

    def close(self) -> None:
        """Unregister. The memory goes with the process."""
        import torch

        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


class Bench:
    """Runs cases on one registered memory.

    Args:
        host: Registered host memory: uint8 [bytes].
    """

    def __init__(self, host: torch.Tensor) -> None:
        import torch
        from cuda.bindings import driver

        self._host = host
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        error, mapped = driver.cuPointerGetAttribute(attribute, host.data_ptr())
        if int(error):
            raise RuntimeError(f"host memory has no address on the device: {error}")
        self._mapped = int(mapped)
        major, minor = torch.cuda.get_device_capability(0)
        self._arch = f"sm_{major}{minor}"
        self._kernels: dict[tuple[str, str, int, int], Any] = {}

    def _kernel(self, case: Case) -> Any:
        key = (case.loads, case.stores, case.threads, case.unroll)
        if key not in self._kernels:
            self._kernels[key] = compile_kernel(case, self._arch).get_kernel("gather_rows")
        return self._kernels[key]

    def lists(self, case: Case, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Source and target rows of each launch: int64 [rows], the targets distinct."""
        import torch

        from benchmarks.gpu.workloads import DEVICE

        random = torch.Generator(DEVICE).manual_seed(0)
        span = self._host.numel() if case.span_gib is None else case.span_gib * GIB
        spread = case.rows
        if case.destination_mb is not None:
            spread = case.destination_mb * 10**6 // ROW_BYTES
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(count):
            rows = torch.randint(span // ROW_BYTES, (case.rows,), generator=random, device=DEVICE)
            if case.is_sorted:
                rows = rows.sort().values
            to = torch.randperm(spread, generator=random, device=DEVICE)[: case.rows].clone()
            if case.destinations == "in_order":
                to = to.sort().values
            elif case.destinations == "again" and made:
                to = made[0][1]
            made.append((rows, to))
        return made

    def launch(
        self, case: Case, target: torch.Tensor, rows: torch.Tensor, to: torch.Tensor
    ) -> None:
        """Enqueue one gather into ``target`` (uint8 [bytes]) on the current stream."""
        import torch
        from cuda.bindings import driver

        values = (
            ctypes.c_uint64(self._mapped), ctypes.c_uint64(target.data_ptr()),
            ctypes.c_uint64(rows.data_ptr()), ctypes.c_uint64(to.data_ptr()),
            ctypes.c_int32(case.rows), ctypes.c_int32(case.is_sorted),
        )  # fmt: skip
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
        (error,) = driver.cuLaunchKernel(
            driver.CUfunction(int(self._kernel(case).handle)), case.blocks, 1, 1,
            case.threads, 1, 1, 0, torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(pointers), 0,
        )  # fmt: skip
        if int(error):
            raise RuntimeError(f"{case.name}: {error}")

    def target(self, case: Case) -> torch.Tensor:
        """Device memory for the rows of a case."""
        import torch

        from benchmarks.gpu.workloads import DEVICE

        num_bytes = (case.destination_mb or 0) * 10**6 or case.rows * ROW_BYTES
        return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)

    def check(
        self, target: torch.Tensor, rows: torch.Tensor, to: torch.Tensor, count: int = CHECKED_ROWS
    ) -> None:
        """Compare some of the copied rows with the host's.

        Raises:
            RuntimeError: A row has other bytes.
        """
        import torch

        whole = target[: target.numel() // ROW_BYTES * ROW_BYTES].view(-1, ROW_BYTES)
        for at in range(0, rows.numel(), max(1, rows.numel() // count)):
            begin = int(rows[at]) * ROW_BYTES
            if not torch.equal(whole[int(to[at])].cpu(), self._host[begin : begin + ROW_BYTES]):
                raise RuntimeError(f"entry {at}: the row on the device is not the host's")

    def run(self, case: Case, report: Report) -> None:
        """Time a case and add its figure."""
        from benchmarks.gpu.workloads import flush_l2, l2_aside, median, time_us

        lists, target = self.lists(case, LISTS[case.rows]), self.target(case)
        warm = len(lists) * 2 // 3
        flush_l2()

        def before(_: int) -> None:
            if case.flushed:
                flush_l2()

        with l2_aside(case.set_aside_mib * 2**20):
            times = time_us(
                lambda i: self.launch(case, target, *lists[i]), before=before,
                repeats=len(lists) - warm, warm=warm,
            )  # fmt: skip
        self.check(target, *lists[-1])
        facts = {k: v for k, v in asdict(case).items() if k not in ("group", "label")}
        us = median(times)
        facts["destination_mb"] = case.destination_mb or round(case.rows * ROW_BYTES / 1e6)
        facts["span_gib"] = case.span_gib or self._host.numel() // GIB
        report.add(case.name, case.rows * ROW_BYTES / us / 1e3, "GB/s", us=round(us, 1), **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="beginnings of names after 'translation.'")
    parser.add_argument("--gib", type=int, default=16, help="host memory (default 16)")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    from benchmarks import report as records
    from benchmarks.gpu.measure import Report
    from benchmarks.gpu.workloads import Pool

    report = Report(options.commit or records.commit(), path=options.out)
    wanted = tuple(f"translation.{each}" for each in options.only.split(",") if each)
    chosen = [
        each
        for each in cases()
        if (each.span_gib or 0) <= options.gib and (not wanted or each.name.startswith(wanted))
    ]
    for pages, make in (("4 KiB", Pool), ("2 MiB", HugePages)):
        todo = [each for each in chosen if each.pages == pages]
        if not todo:
            continue
        memory = make(options.gib * GIB)
        try:
            bench = Bench(memory.tensor)
            for case in todo:
                bench.run(case, report)
        finally:
            memory.close()


if __name__ == "__main__":
    main()
