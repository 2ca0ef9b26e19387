"""Times the GPU kernels against the required figures.

    python -m benchmarks.gpu.bench_kernels --out FILE [--only gather.single,resolve.hit]

All times are between two events queued behind a spin, so no launch time of the CPU is in them; the
batch order is permuted each step unless a figure says otherwise; data are random bytes. `--only`
takes beginnings of figures' names, or names of parts (`--list`); parts called `sweep_*`, which
measure launch sizes instead, run only when they are named. The file is written at every figure;
with `--update` the figures of other names in it stay.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.bench_beside import bench_beside_product, sweep_beside
from benchmarks.gpu.bench_model import bench_model, bench_resident
from benchmarks.gpu.bench_traces import bench_traces
from benchmarks.gpu.measure import (
    MODE,
    ROW,
    Report,
    Workload,
    context_plans,
    single_pages,
    single_work,
    time_gather,
    uniform_plan,
)
from benchmarks.gpu.products import SHAPES, Product
from benchmarks.gpu.workloads import (
    BLOCK_SIZE,
    DEVICE,
    GIB,
    Pool,
    device_pages,
    flush_l2,
    l2_aside,
    median,
    time_us,
)
from worker_client.kernels import cuda
from worker_client.kernels.cuda import CopyLaunch, CudaBackend, CudaTuning
from worker_client.kernels.interface import GroupPages, ResolvePlan

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
        if not (
            report.wants(f"resolve.hit.{requests}{tag}")
            or report.wants(f"resolve.sticky.{requests}{tag}")
        ):
            continue
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
        if not report.wants(f"gather.{layout}.{label}"):
            continue
        work = Workload(backend, pages, requests=requests, context=65_536, hot_rows=4_096)
        work.warm()
        plans = work.planned(40 if requests == 1 else 12)
        rate, us, misses = time_gather(backend, pages, plans, repeats=31 if requests == 1 else 15)
        report.add(
            f"gather.{layout}.{label}", rate, "GB/s", reference=peer if interleaved else None,
            required=required if interleaved else None, us=round(us, 2), misses=misses,
            pool_gib=pool.num_bytes / GIB,
        )  # fmt: skip


def bench_single(report: Report, backend: CudaBackend, pool: Pool) -> None:
    for requests, label, peer, required in ((64, 19009, 25.0, 42.0), (256, 73339, 22.0, 38.0)):
        for permute in (True, False):
            if not report.wants(f"gather.single.{label}" + ("" if permute else ".fixed_order")):
                continue
            work = single_work(backend, pool, requests, permute=permute)
            # As many plans as calls, and timed from the middle: page tables are in the cache as the
            # steps of a trace leave them.
            rate, us, misses = time_gather(
                backend, work.pages, work.planned(36), repeats=21, warm=15
            )
            report.add(
                f"gather.single.{label}" + ("" if permute else ".fixed_order"), rate, "GB/s",
                reference=peer if permute else None, required=required if permute else None,
                us=round(us, 2), misses=misses, permuted=permute,
            )  # fmt: skip


def bench_cold(report: Report, backend: CudaBackend, pool: Pool) -> None:
    pages = single_pages(pool, 64 * 64 + 100)
    for name, plans, peer, required in (
        ("contexts", context_plans(backend, pages, 18), 32.0, 42.0),
        ("uniform", [uniform_plan(pages, 64, seed) for seed in range(18)], 19.5, 34.0),
    ):
        if not report.wants(f"gather.cold.{name}"):
            continue
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
        name = f"staging.{count}" + ("" if kind == "uniform" else f".{kind}")
        if not report.wants(name):
            continue
        slots = [staging_slots(pages, kind, count, seed) for seed in range(36)]
        out = torch.empty((1, count, ROW), dtype=torch.uint8, device=DEVICE)
        times = time_us(
            lambda i, slots=slots, out=out: backend.stage(
                pages=pages, host_slots=slots[i], out=out
            ),
            before=lambda _: flush_l2() if MODE.flush else None,
            repeats=15,
            warm=21,
        )
        report.add(
            name, count * ROW / median(times) / 1e3, "GB/s", reference=peer, required=required,
            rows=kind, us=round(median(times), 1),
        )  # fmt: skip


# --- sweeps --------------------------------------------------------------------------------------


SET_ASIDE_MIB = (32, 37)
"""Rounded up by the driver. More than the second an H200 does not allow."""


def bench_set_aside(report: Report, backend: CudaBackend, pool: Pool) -> None:
    """Gathers, and products by themselves, with cache set aside: ``set_aside.<MiB>.<figure>``."""
    products = {shape.name: Product(shape) for shape in SHAPES}
    for wanted in SET_ASIDE_MIB:
        alone = {name: product.time_us() for name, product in products.items()}
        with l2_aside(wanted * 2**20) as given:
            report.prefix = f"set_aside.{wanted}."
            try:
                bench_single(report, backend, pool)
                bench_cold(report, backend, pool)
                bench_spec4(report, backend, pool)
                bench_staging(report, backend, pool)
                for name, product in products.items():
                    percent = 100 * (product.time_us() / alone[name] - 1)
                    report.add(
                        f"product.{name}", percent, "%", alone_us=round(alone[name], 1),
                        given_mib=given / 2**20,
                    )  # fmt: skip
            finally:
                report.prefix = ""


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


STEMS: dict[str, tuple[str, ...]] = {
    "floor": ("floor.launch",),
    "link": ("link.",),
    "resolve": ("resolve.hit.", "resolve.sticky."),
    "group4": ("gather.group4.",),
    "single": ("gather.single.",),
    "cold": ("gather.cold.",),
    "spec4": ("spec4.",),
    "mirror": ("mirror.", "restore."),
    "staging": ("staging.",),
    "set_aside": ("set_aside.",),
    "resident": ("overhead.resident.",),
    "layer_major": ("gather.group4_layer_major.",),
    "beside": ("beside_product.",),
    "model": ("model.",),
    "traces": ("trace.",),
}
"""Parts in the order in which they run, and the beginnings of their figures' names."""


def all_parts(
    report: Report, backend: CudaBackend, pool: Pool, small: Pool, sweep_s: float
) -> dict[str, Callable[[], object]]:
    """What runs each part. ``small`` is the front of ``pool``."""
    tuning = backend.tuning
    resolve_pages = functools.partial(single_pages, small)
    return {
        "floor": lambda: bench_floor(report, backend),
        "link": lambda: bench_link(report, pool),
        "resolve": lambda: bench_resolve(report, backend, resolve_pages(256 * 64 + 100)),
        "group4": lambda: bench_group4(report, backend, pool),
        "single": lambda: bench_single(report, backend, small),
        "cold": lambda: bench_cold(report, backend, small),
        "spec4": lambda: bench_spec4(report, backend, small),
        "mirror": lambda: bench_mirror(report, backend, small),
        "staging": lambda: bench_staging(report, backend, small),
        "set_aside": lambda: bench_set_aside(report, backend, small),
        "resident": lambda: bench_resident(report, backend, pool),
        "layer_major": lambda: bench_group4(report, backend, pool, interleaved=False),
        "beside": lambda: bench_beside_product(report, backend, small),
        "model": lambda: [bench_model(report, backend, pool, requests=n) for n in (64, 16)],
        "traces": lambda: bench_traces(report, backend, pool, small),
        "sweep_resolve": lambda: sweep_resolve(report, resolve_pages(16_500), tuning),
        "sweep_profile": lambda: profile_resolve(resolve_pages(16_500), tuning),
        "sweep_repeated": lambda: time_repeated(resolve_pages(16_500), tuning),
        "sweep_freshness": lambda: sweep_freshness(report, backend, small),
        "sweep_beside": lambda: sweep_beside(report, backend, small),
        "sweep_blocks": lambda: sweep_blocks(report, small, tuning),
        "sweep": lambda: sweep_gather(report, pool, small, tuning, sweep_s),
    }


def wanted_names(part: str, wanted: tuple[str, ...]) -> tuple[str, ...] | None:
    """What of a part to run: None for nothing, () for all of it, else beginnings of names."""
    if part in wanted:
        return ()
    if part not in STEMS:
        return None
    if not wanted:
        return ()
    tokens = tuple(
        token
        for token in wanted
        if any(stem.startswith(token) or token.startswith(stem) for stem in STEMS[part])
    )
    return tokens or None


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-kernels.json"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", default="", help="comma-separated names; all by default")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    parser.add_argument("--update", action="store_true", help="keep other figures of the file")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no part after it")
    parser.add_argument("--sweep-s", type=float, default=0.0)
    parser.add_argument("--tuning", default="{}", help="JSON of CudaTuning fields")
    parser.add_argument("--small-gib", type=int, default=16)
    parser.add_argument("--large-gib", type=int, default=24)
    parser.add_argument(
        "--flush", action="store_true", help="write through the L2 cache before each gather"
    )
    return parser.parse_args(arguments)


def tuning_of(text: str) -> CudaTuning:
    """Sizes of launches from JSON; a launch is an object of its own."""
    fields = json.loads(text)
    launches = {k: CopyLaunch(**v) for k, v in fields.items() if isinstance(v, dict)}
    return CudaTuning(**(fields | launches))


def run_parts(
    parts: dict[str, Callable[[], object]],
    report: Report,
    wanted: tuple[str, ...],
    started: float,
    budget_s: float,
) -> list[str]:
    """Run what is wanted; the names of parts that failed."""
    failed = []
    for name, part in parts.items():
        selected = wanted_names(name, wanted)
        if selected is None:
            continue
        before = time.perf_counter()
        if before - started > budget_s:
            print(f"   {name} left out: out of time", flush=True)
            continue
        report.selected = selected
        try:
            part()
        except Exception as error:  # one part must not take the others' figures with it
            print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
            failed.append(name)
        now = time.perf_counter()
        print(f"   [{now - started:.0f} s] {name} took {now - before:.1f} s", flush=True)
        report.write()
    return failed


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.list:
        for name, stems in STEMS.items():
            print(f"{name:12s} {' '.join(stems)}")
        return 0
    started = time.perf_counter()
    MODE.flush = options.flush
    kept = json.loads(options.out.read_text()) if options.update and options.out.exists() else []
    report = Report(options.commit, path=options.out, kept=kept)
    pool = Pool(options.large_gib * GIB)
    print(f"pool: fill {pool.fill_s:.1f} s, register {pool.register_s:.1f} s", flush=True)
    backend = CudaBackend(DEVICE, tuning=tuning_of(options.tuning))
    backend.prepare()
    small = pool.front(options.small_gib * GIB)
    parts = all_parts(report, backend, pool, small, options.sweep_s)
    wanted = tuple(filter(None, options.only.split(",")))
    failed = run_parts(parts, report, wanted, started, options.budget_s)
    pool.close()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
