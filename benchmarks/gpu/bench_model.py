"""One decode step of a 78-layer, 20-group model as one CUDA graph: what the data plane adds to it.

The computation is a chain of matrix products calibrated to 30 ms, spread evenly over the layers. A
group's resolve needs the indexer of its first layer (the leader) and that layer's attention needs
its rows, so only the rows of the other layers (the followers) can be on their way meanwhile.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.measure import ROW, Report, Workload, clone_inputs
from benchmarks.gpu.products import SHAPES, Product, calibrated
from benchmarks.gpu.workloads import Pool, device_pages, median, time_us
from worker_client.kernels.cuda import CudaBackend
from worker_client.kernels.interface import GroupPages, Overlap, StepInputs

LAYERS_OF_GROUPS = (4,) * 18 + (3,) * 2
NUM_LAYERS = sum(LAYERS_OF_GROUPS)
STEP_US = 30_000
SPIN_CYCLES = 8_000_000
"""A graph of a thousand nodes takes longer to launch than the usual spin lasts."""

MAX_RESIDENT_PERCENT = 2.0


class Order(enum.Enum):
    """How the data plane and the computation follow each other."""

    COMPUTE = "compute"
    """The computation alone."""
    STEP = "step"
    """The data plane alone."""
    SERIAL = "serial"
    """Resolve, gather of the whole group, then the group's layers."""
    SPLIT = "split"
    """Resolve, gather of the leader's rows; the followers' rows on a side stream, while the leader
    computes, with the launch for a gather that is waited for."""
    SPLIT_FEW = "split_few"
    """The same, with the launch that leaves the multiprocessors to the computation."""
    AHEAD = "ahead"
    """The next group's resolve and gather on a side stream, while this group computes. Not possible
    for a model whose top-k depends on the layer before: the bound of any prefetch."""


SPLITS = {Order.SPLIT: Overlap.NONE, Order.SPLIT_FEW: Overlap.COMPUTE}


@dataclass(frozen=True, kw_only=True)
class Group:
    """One index group and its step."""

    work: Workload
    pages: GroupPages
    inputs: StepInputs
    leader: GroupPages
    followers: GroupPages

    def resolve(self) -> None:
        """Resolve the step whose inputs were copied in last."""
        work = self.work
        work.backend.resolve(
            state=work.state, tables=work.tables, inputs=self.inputs, plan=work.plan
        )

    def gather(self, pages: GroupPages | None = None, overlap: Overlap = Overlap.NONE) -> None:
        """Gather the planned rows of these layers, by default all."""
        self.work.backend.gather(pages=pages or self.pages, plan=self.work.plan, overlap=overlap)

    def draw(self) -> None:
        """Copy the next step's inputs to where the graph reads them."""
        self.work.advance()
        for name in ("positions", "request_slots", "table_rows", "query_starts"):
            getattr(self.inputs, name).copy_(getattr(self.work.inputs, name))


def make_groups(backend: CudaBackend, pool: Pool, requests: int, *, warm_steps: int) -> list[Group]:
    """The groups of one model. All use the same pages, each its own trace and hot state."""
    pages = pool.pages(
        layers=4, row_bytes=ROW, interleaved=True,
        device=device_pages(layers=4, row_bytes=ROW, blocks=max(requests * 64 + 100, 8_192)),
    )  # fmt: skip
    groups = []
    for index, count in enumerate(LAYERS_OF_GROUPS):
        work = Workload(backend, pages, requests=requests, context=65_536, hot_rows=4_096)
        work.trace.seed(100 + index)
        work.warm(warm_steps)
        part = pages.layers(0, count)
        groups.append(
            Group(
                work=work,
                pages=part,
                inputs=clone_inputs(work.inputs),
                leader=part.layers(0, 1),
                followers=part.layers(1, count),
            )
        )
    return groups


def run_step(groups: list[Group], order: Order, compute: Callable[[], None]) -> None:
    """Enqueue one step; ``compute`` enqueues one layer's computation."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    is_moving = order is not Order.COMPUTE
    if order is Order.AHEAD:
        groups[0].resolve()
        groups[0].gather()
    for index, group in enumerate(groups):
        follow = group.pages.num_layers - 1
        if order is Order.AHEAD:
            if index:
                main.wait_stream(side)
            if index + 1 < len(groups):
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    groups[index + 1].resolve()
                    groups[index + 1].gather(overlap=Overlap.COMPUTE)
        elif is_moving:
            group.resolve()
            if order in SPLITS:
                group.gather(group.leader)
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    group.gather(group.followers, SPLITS[order])
            else:
                group.gather()
        if order is Order.STEP:
            continue
        compute()
        if order in SPLITS:
            main.wait_stream(side)
        for _ in range(follow):
            compute()


def capture(groups: list[Group], order: Order, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """One step as a graph."""
    run_step(groups, order, compute)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_step(groups, order, compute)
    return graph


def time_graphs(
    groups: list[Group], graphs: dict[Order, torch.cuda.CUDAGraph], *, repeats: int
) -> dict[Order, list[float]]:
    """Microseconds of each graph, in turns, each with a new step's inputs.

    The computation alone resolves nothing, so no step is drawn for it: the next order would miss
    the rows of two.
    """
    times: dict[Order, list[float]] = {order: [] for order in graphs}
    for index in range(repeats + 1):
        for order, graph in graphs.items():

            def before(_: int, order: Order = order) -> None:
                if order is not Order.COMPUTE:
                    for group in groups:
                        group.draw()

            took = time_us(
                lambda _, graph=graph: graph.replay(), before=before, repeats=1, warm=0,
                spin_cycles=SPIN_CYCLES,
            )  # fmt: skip
            if index:
                times[order] += took
    return times


def layer_product(name: str) -> tuple[Product, int]:
    """The product that stands for one layer of a step of 30 ms, and how often it runs."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    return calibrated(shape, STEP_US / NUM_LAYERS)


def bench_model(report: Report, backend: CudaBackend, pool: Pool, *, requests: int = 64) -> None:
    """``model.step.64`` (no computation), then each order beside two kinds of products."""
    groups = make_groups(backend, pool, requests, warm_steps=12)
    step = {Order.STEP: capture(groups, Order.STEP, lambda: None)}
    alone = median(time_graphs(groups, step, repeats=6)[Order.STEP])
    moved = sum(
        int(group.work.plan.miss_counts.sum()) * group.pages.num_layers * ROW for group in groups
    )
    facts = {"layers": NUM_LAYERS, "groups": len(groups), "gathered_mb": round(moved / 1e6, 1)}
    report.add(
        f"model.step.{requests}", alone / 1000, "ms", link_ms=round(moved / 53.6e6, 2),
        share_beside_30_ms=round(alone / (alone + STEP_US), 4), **facts,
    )  # fmt: skip
    for name in ("decode", "fine"):
        if not report.wants(f"model.beside.{requests}.{name}"):
            continue
        product, count = layer_product(name)
        orders = (Order.COMPUTE, Order.SERIAL, *SPLITS, Order.AHEAD)
        graphs = {
            order: capture(groups, order, lambda: product.run(count))  # noqa: B023
            for order in orders
        }
        times = time_graphs(groups, graphs, repeats=5)
        compute = median(times[Order.COMPUTE])
        for order in orders[1:]:
            total = median(times[order])
            report.add(
                f"model.beside.{requests}.{name}.{order.value}", total / 1000, "ms",
                reference=round(compute / 1000, 3), added_ms=round((total - compute) / 1000, 3),
                share_of_step=round(1 - compute / total, 4), products_a_layer=count, **facts,
            )  # fmt: skip


def bench_resident(report: Report, backend: CudaBackend, pool: Pool) -> None:
    """``overhead.resident.<requests>``: all rows resident, against the computation alone.

    The computation alone stands for an engine without HiSparse, so even the translation of
    positions, which such an engine has to do as well, counts as ours.
    """
    product, count = layer_product("decode")
    for requests in (1, 2, 3, 4):
        if not report.wants(f"overhead.resident.{requests}"):
            continue
        groups = make_groups(backend, pool, requests, warm_steps=1)
        for group in groups:
            tables = group.work.tables
            tables.resident.copy_(tables.source % (tables.num_device_blocks - 1) + 1)
        graphs = {
            order: capture(groups, order, lambda: product.run(count))
            for order in (Order.STEP, Order.COMPUTE, Order.SERIAL)
        }
        times = time_graphs(groups, graphs, repeats=11)
        pairs = zip(times[Order.SERIAL], times[Order.COMPUTE], strict=True)
        misses = sum(int(group.work.plan.miss_counts.sum()) for group in groups)
        report.add(
            f"overhead.resident.{requests}",
            100 * median([ours / without - 1 for ours, without in pairs]), "%",
            required=MAX_RESIDENT_PERCENT, misses=misses, groups=len(groups),
            without_ms=round(median(times[Order.COMPUTE]) / 1000, 3),
            with_ms=round(median(times[Order.SERIAL]) / 1000, 3),
            alone_us=round(median(times[Order.STEP]), 1),
        )  # fmt: skip
