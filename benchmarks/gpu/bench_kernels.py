"""Times the GPU kernels against the required figures: `python -m benchmarks.gpu.bench_kernels`.

All times are between two events queued behind a spin, so no launch time of the CPU is in them; the
batch order is permuted each step unless a figure says otherwise; data are random bytes. `--sweep`
measures launch sizes instead, one line each.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.workloads import (
    BLOCK_SIZE,
    DEVICE,
    GIB,
    STICKY,
    TRACES,
    Pool,
    Trace,
    TraceKind,
    device_pages,
    driver_version,
    flush_l2,
    make_tables,
    median,
    random_orders,
    step_inputs,
    time_us,
)
from worker_client.kernels import cuda
from worker_client.kernels.cuda import CopyLaunch, CudaBackend, CudaTuning
from worker_client.kernels.interface import (
    GroupPages,
    ResolvePlan,
    StepInputs,
    allocate_plan,
)

ROW = 656
TOP_K = 2_048
FLUSH = False
"""Write through the second-level cache before each gather, as the layers between two would do. Off
by default, as in the peers' figures."""


class Report:
    """Figures, printed as they come and written as JSON lists."""

    def __init__(self, commit: str) -> None:
        self.figures: list[dict[str, object]] = []
        self._common = {
            "device": torch.cuda.get_device_name(0),
            "driver": driver_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit,
        }

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        reference: float | None = None,
        required: float | None = None,
        **parameters: object,
    ) -> None:
        """Add one figure. ``reference`` is the best public peer's or the link's."""
        if required is not None:
            parameters["required"] = required
        if FLUSH:
            name += ".flushed"
        ratio = None if not reference else round(value / reference, 4)
        self.figures.append(
            {
                "name": name,
                "parameters": parameters,
                "value": round(value, 3),
                "unit": unit,
                "reference_value": reference,
                "ratio": ratio,
                **self._common,
            }
        )
        goal = "" if required is None else f" (required {required})"
        print(f"{name:34s} {value:10.2f} {unit}{goal} {parameters}", flush=True)

    def write(self, path: Path) -> None:
        """Write all figures."""
        path.write_text(json.dumps(self.figures, indent=1) + "\n")


class Workload:
    """Requests with a trace, a hot state and a plan; one index group."""

    def __init__(
        self,
        backend: CudaBackend,
        pages: GroupPages,
        *,
        requests: int,
        context: int,
        hot_rows: int,
        kind: TraceKind = STICKY,
        rows: int = 1,
        permute: bool = True,
    ) -> None:
        self.backend, self.pages, self.rows = backend, pages, rows
        self.tables = make_tables(
            requests=requests,
            context=context,
            hot_rows=hot_rows,
            host_blocks=pages.host[0].shape[0],
            device_blocks=pages.device[0].shape[0],
        )
        self.trace = Trace(kind, requests=requests, context=context)
        self.state = backend.make_hot_state(max_num_reqs=requests, hot_rows=hot_rows, device=DEVICE)
        self.plan = allocate_plan(
            max_num_requests=requests,
            max_query_rows=requests * rows,
            max_rows_per_request=rows,
            top_k=TOP_K,
            device=DEVICE,
        )
        self._orders = random_orders(requests)
        self._fixed = torch.arange(requests, dtype=torch.int32, device=DEVICE)
        self._permute = permute
        self.inputs: StepInputs | None = None

    def advance(self, index: int = 0) -> None:
        """Draw the next step's inputs."""
        del index
        drawn = [self.trace.advance() for _ in range(self.rows)]
        positions = torch.stack(drawn, dim=1) if self.rows > 1 else drawn[0]
        order = next(self._orders) if self._permute else self._fixed
        self.inputs = step_inputs(positions, order, self.rows)

    def again(self, index: int = 0) -> None:
        """The last step's positions once more: all hits."""
        del index
        order = next(self._orders) if self._permute else self._fixed
        drawn = self.trace.current
        self.inputs = step_inputs(drawn, order, 1)

    def resolve(self, index: int = 0) -> None:
        """Resolve the drawn step."""
        del index
        self.backend.resolve(
            state=self.state, tables=self.tables, inputs=self.inputs, plan=self.plan
        )

    def warm(self, steps: int = 12) -> None:
        """Bring the hot state to where the trace holds it."""
        for _ in range(steps):
            self.advance()
            self.resolve()

    def planned(self, count: int) -> list[ResolvePlan]:
        """Plans of the next steps."""
        plans = []
        for _ in range(count):
            self.advance()
            self.resolve()
            plans.append(clone_plan(self.plan))
        return plans


def clone_plan(plan: ResolvePlan) -> ResolvePlan:
    return replace(
        plan,
        miss_source_rows=plan.miss_source_rows.clone(),
        miss_device_rows=plan.miss_device_rows.clone(),
        miss_counts=plan.miss_counts.clone(),
    )


def copy_plan(source: ResolvePlan, into: ResolvePlan) -> None:
    into.miss_source_rows.copy_(source.miss_source_rows)
    into.miss_device_rows.copy_(source.miss_device_rows)
    into.miss_counts.copy_(source.miss_counts)


def time_gather(
    backend: CudaBackend, pages: GroupPages, plans: list[ResolvePlan], *, repeats: int = 15
) -> tuple[float, float, float]:
    """Median GB/s, median microseconds and mean misses over fresh plans."""
    static = clone_plan(plans[0])
    moved = [int(plan.miss_counts.sum()) for plan in plans]

    def before(index: int) -> None:
        if FLUSH:
            flush_l2()
        copy_plan(plans[index % len(plans)], static)

    times = time_us(
        lambda _: backend.gather(pages=pages, plan=static), before=before, repeats=repeats
    )
    wide = pages.num_layers * pages.row_bytes
    rates = [moved[(i + 3) % len(plans)] * wide / t / 1e3 for i, t in enumerate(times)]
    return median(rates), median(times), sum(moved) / len(moved)


def uniform_plan(pages: GroupPages, requests: int, seed: int) -> ResolvePlan:
    """2,048 rows a request, uniform over the pool."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    plan = allocate_plan(
        max_num_requests=requests, max_query_rows=1, max_rows_per_request=1, top_k=TOP_K,
        device=DEVICE,
    )  # fmt: skip
    rows = pages.host[0].shape[0] * BLOCK_SIZE
    plan.miss_source_rows.random_(BLOCK_SIZE, rows, generator=random)
    targets = torch.randperm(pages.device[0].shape[0] * BLOCK_SIZE, generator=random, device=DEVICE)
    plan.miss_device_rows.copy_(targets[: requests * TOP_K].view(requests, TOP_K))
    plan.miss_counts.fill_(TOP_K)
    return plan


def context_plans(
    backend: CudaBackend, pages: GroupPages, count: int, requests: int = 64
) -> list[ResolvePlan]:
    """2,048 rows a request, each within its own 65,536-token context, batch permuted."""
    kind = TraceKind("cold", 0.0)
    work = Workload(backend, pages, requests=requests, context=65_536, hot_rows=TOP_K, kind=kind)
    plans = []
    for _ in range(count):
        work.advance()
        backend.reset(
            state=work.state,
            request_slots=torch.arange(requests, dtype=torch.int32, device=DEVICE),
        )
        work.resolve()
        plans.append(clone_plan(work.plan))
    return plans


# --- figures -------------------------------------------------------------------------------------


def bench_floor(report: Report, backend: CudaBackend) -> None:
    state = backend.make_hot_state(max_num_reqs=1, hot_rows=64, device=DEVICE)
    none = torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
    times = time_us(lambda _: backend.reset(state=state, request_slots=none), repeats=31)
    report.add("floor.launch", median(times), "us")


def bench_link(report: Report, pool: Pool) -> tuple[float, float]:
    size = GIB
    device = torch.randint(0, 255, (size,), dtype=torch.uint8, device=DEVICE)
    host = [pool.tensor[i * size : (i + 1) * size] for i in range(4)]
    down = time_us(lambda i: device.copy_(host[i % 4], non_blocking=True), repeats=5)
    up = time_us(lambda i: host[i % 4].copy_(device, non_blocking=True), repeats=5)
    rates = size / median(down) / 1e3, size / median(up) / 1e3
    report.add("link.h2d", rates[0], "GB/s")
    report.add("link.d2h", rates[1], "GB/s")
    return rates


RESOLVE_GOALS = {
    # requests: (context, peer hit, required hit, peer sticky, required sticky)
    1: (65_536, 17.4, 13.0, 17.2, 14.0),
    16: (65_536, None, None, None, None),
    64: (65_536, 18.2, 16.0, 21.8, 18.0),
    128: (32_768, None, None, None, None),
    256: (32_768, 25.5, 22.0, 27.3, 24.0),
}


def bench_resolve(
    report: Report, backend: CudaBackend, pages: GroupPages, *, tag: str = ""
) -> None:
    for requests, (context, peer_hit, need_hit, peer_miss, need_miss) in RESOLVE_GOALS.items():
        work = Workload(backend, pages, requests=requests, context=context, hot_rows=4_096)
        work.warm()
        times = time_us(work.resolve, before=work.again, repeats=21)
        report.add(
            f"resolve.hit.{requests}{tag}", median(times), "us", reference=peer_hit,
            required=need_hit, hot_rows=4_096, context=context,
        )  # fmt: skip
        times = time_us(work.resolve, before=work.advance, repeats=21)
        misses = int(work.plan.miss_counts.sum())
        report.add(
            f"resolve.sticky.{requests}{tag}", median(times), "us", reference=peer_miss,
            required=need_miss, hot_rows=4_096, context=context, misses=misses,
        )  # fmt: skip


def bench_resolve_traces(report: Report, backend: CudaBackend, pages: GroupPages) -> None:
    for kind in TRACES[1:]:
        for hot_rows in (4_096, 6_144, 8_192):
            work = Workload(
                backend, pages, requests=64, context=32_768, hot_rows=hot_rows, kind=kind
            )
            work.warm()
            times = time_us(work.resolve, before=work.advance, repeats=11)
            share = 1 - int(work.plan.miss_counts.sum()) / (64 * TOP_K)
            report.add(
                f"resolve.{kind.name}.64.{hot_rows}", median(times), "us", hot_rows=hot_rows,
                hit_rate=round(share, 4), context=32_768,
            )  # fmt: skip


def bench_resident(report: Report, backend: CudaBackend, pages: GroupPages) -> None:
    work = Workload(backend, pages, requests=1, context=65_536, hot_rows=4_096)
    work.tables.resident.copy_(work.tables.source % (pages.device[0].shape[0] - 1) + 1)

    def step(_: int) -> None:
        work.resolve()
        backend.gather(pages=pages, plan=work.plan)

    times = time_us(step, before=work.advance, repeats=31)
    report.add(
        "overhead.resident.1", median(times), "us", groups=1,
        share_of_30_ms_with_20_groups=round(20 * median(times) / 30_000, 5),
    )  # fmt: skip


def bench_group4(
    report: Report, backend: CudaBackend, pool: Pool, *, interleaved: bool = True
) -> None:
    pages = pool.pages(
        layers=4, row_bytes=ROW, interleaved=interleaved,
        device=device_pages(layers=4, row_bytes=ROW, blocks=64 * 64 + 100),
    )  # fmt: skip
    layout = "group4" if interleaved else "group4_layer_major"
    goals = {1: (17.9, 36.0, 295), 16: (39.0, 47.0, 4753), 64: (29.0, 47.0, 19009)}
    for requests, (peer, required, label) in goals.items():
        work = Workload(backend, pages, requests=requests, context=65_536, hot_rows=4_096)
        work.warm()
        plans = work.planned(40 if requests == 1 else 12)
        rate, us, misses = time_gather(backend, pages, plans, repeats=31 if requests == 1 else 15)
        report.add(
            f"gather.{layout}.{label}", rate, "GB/s", reference=peer if interleaved else None,
            required=required if interleaved else None, us=round(us, 2), misses=misses,
            pool_gib=pool.num_bytes / GIB,
        )  # fmt: skip


def single_pages(pool: Pool, blocks: int) -> GroupPages:
    return pool.pages(
        layers=1, row_bytes=ROW, interleaved=False,
        device=device_pages(layers=1, row_bytes=ROW, blocks=blocks),
    )  # fmt: skip


def single_work(backend: CudaBackend, pool: Pool, requests: int, **options: object) -> Workload:
    pages = single_pages(pool, requests * 64 + 100)
    context = 65_536 if requests <= 64 else 32_768
    work = Workload(backend, pages, requests=requests, context=context, hot_rows=4_096, **options)
    work.warm()
    return work


def bench_single(report: Report, backend: CudaBackend, pool: Pool) -> None:
    for requests, label, peer, required in ((64, 19009, 25.0, 42.0), (256, 73339, 22.0, 38.0)):
        for permute in (True, False):
            work = single_work(backend, pool, requests, permute=permute)
            rate, us, misses = time_gather(backend, work.pages, work.planned(12))
            report.add(
                f"gather.single.{label}" + ("" if permute else ".fixed_order"), rate, "GB/s",
                reference=peer if permute else None, required=required if permute else None,
                us=round(us, 2), misses=misses, permuted=permute,
            )  # fmt: skip


def bench_cold(report: Report, backend: CudaBackend, pool: Pool) -> None:
    pages = single_pages(pool, 64 * 64 + 100)
    for name, plans, peer, required in (
        ("contexts", context_plans(backend, pages, 6), 32.0, 42.0),
        ("uniform", [uniform_plan(pages, 64, seed) for seed in range(6)], 19.5, 34.0),
    ):
        rate, us, rows = time_gather(backend, pages, plans)
        report.add(
            f"gather.cold.{name}", rate, "GB/s", reference=peer, required=required,
            us=round(us, 2), rows=rows,
        )  # fmt: skip


def bench_spec4(report: Report, backend: CudaBackend, pool: Pool) -> None:
    pages = single_pages(pool, 64 * 128 + 100)
    work = Workload(backend, pages, requests=64, context=65_536, hot_rows=8_192, rows=4)
    work.warm(6)
    resolve = median(time_us(work.resolve, before=work.advance, repeats=9))
    misses: list[int] = []

    def step(_: int) -> None:
        work.resolve()
        backend.gather(pages=pages, plan=work.plan)

    times = []
    for _ in range(12):
        times += time_us(step, before=work.advance, repeats=1, warm=0)
        misses.append(int(work.plan.miss_counts.sum()))
    report.add(
        "spec4.64", median(times[2:]) / 4, "us a step", reference=600.0, required=310.0,
        misses_a_run=sum(misses) / len(misses), resolve_us=round(resolve, 2),
    )  # fmt: skip


def bench_mirror(report: Report, backend: CudaBackend, pool: Pool) -> None:
    blocks = 2_048
    pages = single_pages(pool, blocks + 1)
    device = torch.arange(1, blocks + 1, dtype=torch.int32, device=DEVICE)
    host = [
        (torch.randperm(pages.host[0].shape[0] - 1)[:blocks] + 1).to(torch.int32).to(DEVICE)
        for _ in range(6)
    ]
    moved = blocks * BLOCK_SIZE * ROW
    for name, call, peer, required in (
        ("mirror.prefill", backend.mirror_blocks, 46.0, 52.0),
        ("restore.blocks", backend.restore_blocks, None, None),
    ):
        times = time_us(
            lambda i, call=call: call(pages=pages, device_blocks=device, host_blocks=host[i % 6]),
            repeats=11,
        )
        report.add(
            name, moved / median(times) / 1e3, "GB/s", reference=peer, required=required,
            blocks=blocks, block_bytes=BLOCK_SIZE * ROW, us=round(median(times), 1),
        )  # fmt: skip


def staging_slots(pages: GroupPages, kind: str, count: int, seed: int) -> torch.Tensor:
    random = torch.Generator(DEVICE).manual_seed(seed)
    host_blocks = pages.host[0].shape[0]
    if kind == "uniform":
        return torch.randint(
            BLOCK_SIZE, host_blocks * BLOCK_SIZE, (count,), generator=random, device=DEVICE
        )
    own = torch.randperm(host_blocks - 1, generator=random, device=DEVICE)[: count // BLOCK_SIZE]
    rows = torch.arange(BLOCK_SIZE, device=DEVICE)
    return ((own + 1)[:, None] * BLOCK_SIZE + rows[None]).flatten()


def bench_staging(report: Report, backend: CudaBackend, pool: Pool) -> None:
    pages = single_pages(pool, 8)
    for kind, count, peer, required in (
        ("uniform", 65_536, 18.8, 42.0),
        ("uniform", 4_096, 32.0, None),
        ("context", 65_536, None, None),
    ):
        slots = [staging_slots(pages, kind, count, seed) for seed in range(6)]
        out = torch.empty((1, count, ROW), dtype=torch.uint8, device=DEVICE)
        times = time_us(
            lambda i, slots=slots, out=out: backend.stage(
                pages=pages, host_slots=slots[i % 6], out=out
            ),
            repeats=11,
        )
        name = f"staging.{count}" + ("" if kind == "uniform" else f".{kind}")
        report.add(
            name, count * ROW / median(times) / 1e3, "GB/s", reference=peer, required=required,
            rows=kind, us=round(median(times), 1),
        )  # fmt: skip


def time_products(side: torch.cuda.Stream, products, gathers) -> float:  # noqa: ANN001
    """Microseconds of the products, behind a spin, with ``gathers()`` on another stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(3_000_000)
    start.record()
    side.wait_event(start)
    with torch.cuda.stream(side):
        gathers()
    products()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


def bench_beside_product(report: Report, backend: CudaBackend, pool: Pool) -> None:
    """How much a matrix product slows down while a gather runs beside it, for each grid size.

    Alone and beside alternate: the clock of a GPU that was idle differs from that of one at work by
    more than what is measured here.
    """
    a = torch.randn((4096, 7168), device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn((7168, 8192), device=DEVICE, dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def products() -> None:
        for _ in range(12):
            torch.mm(a, b)

    for _ in range(60):
        products()
    torch.cuda.synchronize()
    wide_pages = pool.pages(
        layers=4, row_bytes=ROW, interleaved=True,
        device=device_pages(layers=4, row_bytes=ROW, blocks=64 * 64 + 100),
    )  # fmt: skip
    wide = Workload(backend, wide_pages, requests=64, context=65_536, hot_rows=4_096)
    wide.warm()
    works = {"sorted": single_work(backend, pool, 64), "wide": wide}
    for (kind, work), blocks in itertools.product(works.items(), (8, 12, 16, 20, 24, 28, 33, 66)):
        launch = replace(getattr(backend.tuning, kind), blocks=blocks)
        made = CudaBackend(DEVICE, tuning=replace(backend.tuning, **{kind: launch}))
        made.prepare()
        plans = work.planned(8)
        rate, us, _ = time_gather(made, work.pages, plans, repeats=5)
        count = max(2, int(9_000 / us) + 2)  # longer than the products

        def gathers(made=made, work=work, plans=plans, count=count) -> None:  # noqa: ANN001
            for index in range(count):
                made.gather(pages=work.pages, plan=plans[index % len(plans)])

        alone, beside = [], []
        for _ in range(9):
            alone.append(time_products(side, products, lambda: None))
            beside.append(time_products(side, products, gathers))
        ratios = [
            with_gather / by_itself for with_gather, by_itself in zip(beside, alone, strict=True)
        ]
        report.add(
            f"beside_product.{kind}.{blocks}", median(ratios) - 1, "slow-down",
            least=round(min(ratios) - 1, 3), most=round(max(ratios) - 1, 3),
            gather_alone_gbs=round(rate, 2), product_alone_us=round(median(alone) / 12, 1),
        )  # fmt: skip


def bench_model(report: Report, backend: CudaBackend, pool: Pool, *, requests: int = 64) -> None:
    """Resolve and gather of 20 groups (78 layers) in one captured graph."""
    layers = [4] * 18 + [3] * 2
    pages = pool.pages(
        layers=4, row_bytes=ROW, interleaved=True,
        device=device_pages(layers=4, row_bytes=ROW, blocks=requests * 64 + 100),
    )  # fmt: skip
    groups = [
        Workload(backend, pages, requests=requests, context=65_536, hot_rows=4_096) for _ in layers
    ]
    for index, group in enumerate(groups):
        group.trace._random.manual_seed(100 + index)
        group.warm(10)
    parts = [pages.layers(0, count) for count in layers]
    static = [clone_inputs(group.inputs) for group in groups]

    def step() -> None:
        for group, part, inputs in zip(groups, parts, static, strict=True):
            backend.resolve(state=group.state, tables=group.tables, inputs=inputs, plan=group.plan)
            backend.gather(pages=part, plan=group.plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def before(_: int) -> None:
        for group, inputs in zip(groups, static, strict=True):
            group.advance()
            for name in ("positions", "request_slots", "table_rows", "query_starts"):
                getattr(inputs, name).copy_(getattr(group.inputs, name))

    times = time_us(lambda _: graph.replay(), before=before, repeats=7)
    moved = sum(
        int(group.plan.miss_counts.sum()) * count * ROW
        for group, count in zip(groups, layers, strict=True)
    )
    report.add(
        f"model.step.{requests}", median(times) / 1000, "ms", layers=78, groups=20,
        gathered_mb=round(moved / 1e6, 1), link_ms=round(moved / 53.6e6, 2),
        share_beside_30_ms=round(median(times) / 30_000, 4),
    )  # fmt: skip


def clone_inputs(inputs: StepInputs) -> StepInputs:
    return StepInputs(
        positions=inputs.positions.clone(),
        request_slots=inputs.request_slots.clone(),
        table_rows=inputs.request_slots.clone(),
        query_starts=inputs.query_starts.clone(),
    )


# --- sweeps --------------------------------------------------------------------------------------


def sweep_gather(
    report: Report, large: Pool, pool: Pool, base: CudaTuning, budget_s: float
) -> None:
    """Every combination of launch sizes on each list of rows, a few repeats each."""
    plain = CudaBackend(DEVICE, tuning=base)
    group = large.pages(
        layers=4, row_bytes=ROW, interleaved=True,
        device=device_pages(layers=4, row_bytes=ROW, blocks=64 * 64 + 100),
    )  # fmt: skip
    lists: list[tuple[str, GroupPages, list[ResolvePlan]]] = []
    for requests, label in ((1, 295), (16, 4753), (64, 19009)):
        work = Workload(plain, group, requests=requests, context=65_536, hot_rows=4_096)
        work.warm()
        lists.append((f"group4.{label}", group, work.planned(8)))
    for requests, label in ((64, 19009), (256, 73339)):
        work = single_work(plain, pool, requests)
        lists.append((f"single.{label}", work.pages, work.planned(8)))
    pages = single_pages(pool, 64 * 64 + 100)
    lists.append(("cold.contexts", pages, context_plans(plain, pages, 4)))
    lists.append(("cold.uniform", pages, [uniform_plan(pages, 64, s) for s in range(4)]))
    started = time.perf_counter()
    combinations = itertools.product(
        ((512, 4), (256, 8), (512, 2)), (33, 24, 16, 48, 66), (0, 1 << 30)
    )
    for (threads, unroll), blocks, least in combinations:
        launch = CopyLaunch(threads=threads, unroll=unroll, blocks=blocks)
        tuning = replace(
            base, sorted=launch, wide=launch, sort_min_rows=least, sort_max_row_bytes=1 << 30
        )
        made = CudaBackend(DEVICE, tuning=tuning)
        made.prepare()
        line = []
        for name, where, plans in lists:
            rate, us, _ = time_gather(made, where, plans, repeats=5)
            line.append((name, round(rate, 2), round(us, 1)))
        mode = "in-order" if least else "sorted"
        print(
            f"{threads:5d}x{unroll:<2d} grid {blocks:4d} {mode:9s} "
            + " ".join(f"{name}={rate}" for name, rate, _ in line),
            flush=True,
        )
        report.figures.append(
            {"threads": threads, "unroll": unroll, "blocks": blocks, "mode": mode, "gbs": line}
        )
        if time.perf_counter() - started > budget_s:
            print("sweep stopped: out of its time", flush=True)
            return


def sweep_freshness(report: Report, backend: CudaBackend, pool: Pool) -> None:
    """How much of a rate is rows that were read a few launches ago."""
    for requests, label in ((64, 19009), (256, 73339)):
        work = single_work(backend, pool, requests)
        plans = work.planned(40 if requests == 64 else 16)
        for count in (1, 2, 4, 8, 16, 40):
            if count <= len(plans):
                rate, us, _ = time_gather(backend, work.pages, plans[:count], repeats=24)
                report.add(
                    f"freshness.single.{label}.{count}", rate, "GB/s", plans=count, us=round(us, 1)
                )


def sweep_resolve(report: Report, pages: GroupPages, base: CudaTuning) -> None:
    for threads, factor in itertools.product((1024, 512), (4.0, 3.0)):
        tuning = replace(base, resolve_threads=threads, table_factor=factor)
        bench_resolve(
            report, CudaBackend(DEVICE, tuning=tuning), pages, tag=f".t{threads}.f{factor:g}"
        )


def time_repeated(pages: GroupPages, base: CudaTuning) -> None:
    """One call against five of the same step: what a call costs once its code is cached."""
    made = CudaBackend(DEVICE, tuning=base)
    for requests in (1, 64, 256):
        context = 65_536 if requests <= 64 else 32_768
        work = Workload(made, pages, requests=requests, context=context, hot_rows=4_096)
        work.warm()

        def five(_: int, work: Workload = work) -> None:
            for _ in range(5):
                work.resolve()

        one = median(time_us(work.resolve, before=work.again, repeats=15))
        many = median(time_us(five, before=work.again, repeats=15))
        print(f"repeated {requests}: one {one:.2f} us, each further {(many - one) / 4:.2f} us")


def profile_resolve(pages: GroupPages, base: CudaTuning) -> None:
    """Clock cycles between the phases of the resolve kernel, mean over blocks and steps."""
    usual = cuda.resolve_spec
    cuda.resolve_spec = functools.partial(usual, profile=True)  # type: ignore[assignment]
    try:
        for requests, threads in ((1, 1024), (64, 1024), (256, 512), (256, 1024)):
            made = CudaBackend(DEVICE, tuning=replace(base, resolve_threads=threads))
            context = 65_536 if requests <= 64 else 32_768
            work = Workload(made, pages, requests=requests, context=context, hot_rows=4_096)
            stamps = torch.zeros((requests, 128), dtype=torch.uint8, device=DEVICE)
            made._profile = stamps
            work.warm()
            total = torch.zeros((requests, 15), dtype=torch.float64, device=DEVICE)
            for _ in range(10):
                work.advance()
                stamps.zero_()
                torch.cuda._sleep(400_000)
                work.resolve()
                clocks = stamps.view(torch.int64).view(requests, 16)
                total += clocks.diff(dim=1).double() / 10
            cycles = [round(v) for v in total.mean(0).tolist()[:11]]
            print(f"profile {requests} requests, {threads} threads: {cycles} sum {sum(cycles)}")
    finally:
        cuda.resolve_spec = usual


def sweep_blocks(report: Report, pool: Pool, base: CudaTuning) -> None:
    for blocks in (16, 32, 66, 132):
        tuning = replace(base, blocks=replace(base.blocks, blocks=blocks))
        print(f"-- {blocks} blocks")
        bench_mirror(report, CudaBackend(DEVICE, tuning=tuning), pool)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", default="", help="comma-separated parts; all by default")
    parser.add_argument("--sweep-s", type=float, default=0.0)
    parser.add_argument("--tuning", default="{}", help="JSON of CudaTuning fields")
    parser.add_argument("--small-gib", type=int, default=16)
    parser.add_argument("--large-gib", type=int, default=24)
    parser.add_argument(
        "--flush", action="store_true", help="write through the L2 cache before each gather"
    )
    options = parser.parse_args(arguments)
    global FLUSH  # one process, one mode
    FLUSH = options.flush
    tuning = CudaTuning(**json.loads(options.tuning))
    report = Report(options.commit)
    started = time.perf_counter()
    pool = Pool(options.large_gib * GIB)
    small = Pool.__new__(Pool)
    small.num_bytes = options.small_gib * GIB
    small.tensor = pool.tensor[: small.num_bytes]
    print(f"pool: fill {pool.fill_s:.1f} s, register {pool.register_s:.1f} s", flush=True)
    backend = CudaBackend(DEVICE, tuning=tuning)
    backend.prepare()
    wanted = set(filter(None, options.only.split(",")))
    parts = {
        "floor": lambda: bench_floor(report, backend),
        "link": lambda: bench_link(report, pool),
        "resolve": lambda: bench_resolve(report, backend, single_pages(small, 256 * 64 + 100)),
        "traces": lambda: bench_resolve_traces(
            report, backend, single_pages(small, 64 * 128 + 100)
        ),
        "resident": lambda: bench_resident(report, backend, single_pages(small, 8_192)),
        "group4": lambda: bench_group4(report, backend, pool),
        "layer_major": lambda: bench_group4(report, backend, pool, interleaved=False),
        "single": lambda: bench_single(report, backend, small),
        "cold": lambda: bench_cold(report, backend, small),
        "spec4": lambda: bench_spec4(report, backend, small),
        "mirror": lambda: bench_mirror(report, backend, small),
        "staging": lambda: bench_staging(report, backend, small),
        "beside": lambda: bench_beside_product(report, backend, small),
        "model": lambda: bench_model(report, backend, pool),
        "sweep_resolve": lambda: sweep_resolve(report, single_pages(small, 16_500), tuning),
        "sweep_profile": lambda: profile_resolve(single_pages(small, 16_500), tuning),
        "sweep_repeated": lambda: time_repeated(single_pages(small, 16_500), tuning),
        "sweep_freshness": lambda: sweep_freshness(report, backend, small),
        "sweep_blocks": lambda: sweep_blocks(report, small, tuning),
        "sweep": lambda: sweep_gather(report, pool, small, tuning, options.sweep_s),
    }
    for name, part in parts.items():
        if name in wanted or (not wanted and not name.startswith("sweep")):
            try:
                part()
            except Exception as error:  # one part must not take the others' figures with it
                print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
            print(f"   [{time.perf_counter() - started:.0f} s] {name}", flush=True)
            report.write(options.out)
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
