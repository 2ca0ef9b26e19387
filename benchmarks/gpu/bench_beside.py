"""How much a matrix product slows down beside a gather, and how fast the gather is then.

A thread block of the gather holds a multiprocessor that the product would use, so the number of
blocks decides both. Alone and beside alternate: the clock of a GPU that was idle differs from that
of one at work by more than what is measured here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.measure import ROW, Report, Workload, single_work, time_gather
from benchmarks.gpu.products import SHAPES, Product
from benchmarks.gpu.workloads import DEVICE, Pool, device_pages, median
from hisparse_service.contract.errors import HiSparseError
from worker_client.kernels.cuda import CopyLaunch, CudaBackend, CudaTuning
from worker_client.kernels.interface import Overlap, ResolvePlan

CHAIN_US = 7_000
"""Length of the chain of products that is timed."""

SPIN_CYCLES = 6_000_000
"""About 3 ms: enqueueing hundreds of short products takes that long."""

MAX_SLOW_DOWN_PERCENT = 10.0
PAIRS = 7
GRIDS = (4, 8, 12, 16, 24, 32)
VARIANTS = ((256, 8), (512, 4), (512, 8), (1_024, 4))
"""Threads of a block and 16-byte loads in flight for each."""

CLUSTERS = (2, 4, 8)
"""Blocks that are placed together. A product whose blocks come in clusters of two cannot use a pair
of multiprocessors of which a gather holds one, so scattered blocks may cost it twice as many."""


class ClusterBackend(CudaBackend):
    """Launches in clusters where the grid is a multiple of their size."""

    cluster_blocks = 1

    def _launch(
        self, entry: Any, args: ctypes.Structure, *, blocks: int, threads: int,
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        if self.cluster_blocks == 1 or blocks % self.cluster_blocks:
            super()._launch(entry, args, blocks=blocks, threads=threads, shared_bytes=shared_bytes)
            return
        from cuda.bindings import driver

        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = self.cluster_blocks
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        stream = torch.cuda.current_stream(self.device).cuda_stream
        config.hStream = driver.CUstream(stream)
        config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        (error,) = driver.cuLaunchKernelEx(config, entry.function, ctypes.addressof(pointers), 0)
        if int(error):
            raise RuntimeError(f"launch in clusters of {self.cluster_blocks}: {error}")


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """One launch size of the gather, with plans to run."""

    backend: CudaBackend
    work: Workload
    plans: list[ResolvePlan]
    kind: str
    """"wide" (an index group) or "sorted" (single layers)."""
    launch: CopyLaunch
    cluster: int = 1


def time_products(
    side: torch.cuda.Stream, product: Product, count: int, gathers: Gathers | None, runs: int = 0
) -> tuple[float, float]:
    """Microseconds of the chain, and GB/s of the gathers that ran beside it on another stream."""
    start, end, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(2 + runs))
    moved = []
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    side.wait_event(start)
    if gathers is not None:
        with torch.cuda.stream(side):
            for index, event in enumerate(ends):
                plan = gathers.plans[index % len(gathers.plans)]
                gathers.backend.gather(pages=gathers.work.pages, plan=plan, overlap=Overlap.COMPUTE)
                event.record()
                moved.append(plan)
    product.run(count)
    end.record()
    torch.cuda.synchronize()
    length_us = start.elapsed_time(end) * 1000
    if gathers is None:
        return length_us, 0.0
    pages = gathers.work.pages
    row_bytes = pages.num_layers * pages.row_bytes
    done, before_us = 0.0, 0.0
    for plan, event in zip(moved, ends, strict=True):
        at_us = start.elapsed_time(event) * 1000
        share = min(1.0, max(0.0, (length_us - before_us) / max(at_us - before_us, 1e-6)))
        done += share * int(plan.miss_counts.sum()) * row_bytes
        before_us = at_us
    return length_us, done / length_us / 1e3


def measure_beside(
    report: Report, name: str, product: Product, gathers: Gathers, *, required: float | None = None
) -> float:
    """Add the slow-down of one product beside one launch size of the gather."""
    side = torch.cuda.Stream()
    alone_gbs, alone_us, _ = time_gather(
        gathers.backend, gathers.work.pages, gathers.plans, repeats=5
    )
    count = product.count_for(CHAIN_US)
    runs = max(2, int(1.5 * CHAIN_US / alone_us) + 2)  # longer than the products
    product.run(count)
    pairs = []
    for _ in range(PAIRS):
        by_itself, _ = time_products(side, product, count, None)
        pairs.append((by_itself, *time_products(side, product, count, gathers, runs)))
    percents = [100 * (with_gather / by_itself - 1) for by_itself, with_gather, _ in pairs]
    report.add(
        name, median(percents), "%", required=required,
        least=round(min(percents), 1), most=round(max(percents), 1), kind=gathers.kind,
        product=product.shape.name, blocks=gathers.launch.blocks,
        threads=gathers.launch.threads, unroll=gathers.launch.unroll, cluster=gathers.cluster,
        gather_alone_gbs=round(alone_gbs, 2),
        gather_beside_gbs=round(median([rate for *_, rate in pairs]), 2),
        product_alone_us=round(median([alone for alone, *_ in pairs]) / count, 1),
    )  # fmt: skip
    return median(percents)


def make_gathers(
    base: CudaTuning, kind: str, launch: CopyLaunch, work: Workload, plans: list[ResolvePlan],
    cluster: int = 1,
) -> Gathers:  # fmt: skip
    backend = ClusterBackend(DEVICE, tuning=replace(base, **{f"{kind}_beside": launch}))
    backend.cluster_blocks = cluster
    backend.prepare()
    return Gathers(
        backend=backend, work=work, plans=plans, kind=kind, launch=launch, cluster=cluster
    )


@dataclass(frozen=True, kw_only=True)
class Size:
    """One launch size to measure.

    Attributes:
        suffix: Of the figure's name.
        launch: Threads, loads in flight, blocks.
        cluster: Blocks that are placed together.
        products: Names of the products that run beside it.
    """

    suffix: str
    launch: CopyLaunch
    cluster: int = 1
    products: tuple[str, ...] = ("dense", "fine", "decode")


def grid_sizes(default: CopyLaunch) -> list[Size]:
    """The default launch, with its own number of blocks and with others."""
    sizes = sorted({*GRIDS, default.blocks})
    return [Size(suffix=f"{n}", launch=replace(default, blocks=n)) for n in sizes]


def variant_sizes(default: CopyLaunch) -> Iterator[Size]:
    """Other blocks, and blocks in clusters."""
    for threads, unroll in VARIANTS:
        if (threads, unroll) != (default.threads, default.unroll):
            for blocks in GRIDS[:4]:
                yield Size(
                    suffix=f"{blocks}.t{threads}u{unroll}",
                    launch=CopyLaunch(threads=threads, unroll=unroll, blocks=blocks),
                    products=("dense",),
                )
    for cluster in CLUSTERS:
        for blocks in (8, 16):
            yield Size(
                suffix=f"{blocks}.cluster{cluster}",
                launch=replace(default, blocks=blocks),
                cluster=cluster,
                products=("dense", "fine"),
            )


class Beside:
    """The products, and the gathers of an index group ("wide") and of single layers ("sorted")."""

    def __init__(self, report: Report, backend: CudaBackend, pool: Pool) -> None:
        self._report, self._backend = report, backend
        self._products = {shape.name: Product(shape) for shape in SHAPES}
        pages = pool.pages(
            layers=4, row_bytes=ROW, interleaved=True,
            device=device_pages(layers=4, row_bytes=ROW, blocks=64 * 64 + 100),
        )  # fmt: skip
        wide = Workload(backend, pages, requests=64, context=65_536, hot_rows=4_096)
        wide.warm()
        self._works = {"wide": wide, "sorted": single_work(backend, pool, 64)}
        self._plans = {kind: work.planned(8) for kind, work in self._works.items()}

    def sizes(self, sizes_of: Callable[[CopyLaunch], Iterable[Size]]) -> None:
        """Other launch sizes; one that fails does not take the others with it."""
        for kind, work in self._works.items():
            for size in sizes_of(getattr(self._backend.tuning, f"{kind}_beside")):
                try:
                    self._measure(kind, work, size)
                except (HiSparseError, RuntimeError) as error:  # no kernel is built for it
                    print(f"{kind}.{size.suffix} failed: {error}", flush=True)

    def _measure(self, kind: str, work: Workload, size: Size) -> None:
        names = {name: f"beside_product.{kind}.{size.suffix}.{name}" for name in size.products}
        if not any(self._report.wants(name) for name in names.values()):
            return
        made = make_gathers(
            self._backend.tuning, kind, size.launch, work, self._plans[kind], size.cluster
        )
        is_default = made.launch == getattr(self._backend.tuning, f"{kind}_beside")
        required = MAX_SLOW_DOWN_PERCENT if is_default and made.cluster == 1 else None
        for product, name in names.items():
            measure_beside(self._report, name, self._products[product], made, required=required)


def bench_beside_product(report: Report, backend: CudaBackend, pool: Pool) -> None:
    """``beside_product.<kind>.<blocks>.<product>``: the default launch in each grid size."""
    Beside(report, backend, pool).sizes(grid_sizes)


def sweep_beside(report: Report, backend: CudaBackend, pool: Pool) -> None:
    """Other block sizes, and blocks in clusters."""
    Beside(report, backend, pool).sizes(variant_sizes)
