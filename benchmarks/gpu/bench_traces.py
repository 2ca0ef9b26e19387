"""Resolve and gather on each trace and hot size, with the hit rate that the trace has there.

Layers of an index group share their top-k exactly, so one resolve serves all four layers of the
group's gather; single layers gather for themselves.
"""

from __future__ import annotations

from benchmarks.gpu.measure import ROW, TOP_K, Report, Workload, single_pages, time_gather
from benchmarks.gpu.workloads import GIB, TRACES, Pool, TraceKind, device_pages, median, time_us
from worker_client.kernels.cuda import CudaBackend
from worker_client.kernels.interface import GroupPages

REQUESTS = 64
CONTEXT = 65_536
HOT_SIZES = {4_096: 14, 6_144: 26, 8_192: 38}
"""Hot rows, and the steps after which the sticky trace has filled them."""


def bench_traces(report: Report, backend: CudaBackend, pool: Pool, small: Pool) -> None:
    """``trace.<kind>.<hot rows>.resolve``, ``.gather_single`` and ``.gather_group4``.

    Args:
        report: Where figures go.
        backend: What is measured.
        pool: Host memory of the index group.
        small: Host memory of the single layer.
    """
    blocks = REQUESTS * max(HOT_SIZES) // 64 + 100
    single = single_pages(small, blocks)
    group = pool.pages(
        layers=4, row_bytes=ROW, interleaved=True,
        device=device_pages(layers=4, row_bytes=ROW, blocks=blocks),
    )  # fmt: skip
    for kind in TRACES:
        for hot_rows, steps in HOT_SIZES.items():
            if report.wants(f"trace.{kind.name}.{hot_rows}."):
                bench_trace(report, backend, kind, hot_rows, steps, (single, group))


def bench_trace(
    report: Report,
    backend: CudaBackend,
    kind: TraceKind,
    hot_rows: int,
    steps: int,
    both: tuple[GroupPages, GroupPages],
) -> None:
    """One trace with one hot size, on single layers and on a group."""
    name = f"trace.{kind.name}.{hot_rows}"
    for label, pages in zip(("gather_single", "gather_group4"), both, strict=True):
        work = Workload(
            backend, pages, requests=REQUESTS, context=CONTEXT, hot_rows=hot_rows, kind=kind
        )
        work.warm(steps)
        plans = work.planned(8)
        misses = sum(int(plan.miss_counts.sum()) for plan in plans) / len(plans)
        facts = {
            "requests": REQUESTS,
            "context": CONTEXT,
            "hot_rows": hot_rows,
            "misses": round(misses),
            "hit_rate": round(1 - misses / (REQUESTS * TOP_K), 4),
            "pool_gib": round(pages.num_layers * pages.host[0].shape[0] * 64 * ROW / GIB, 1),
        }
        if label == "gather_single":
            times = time_us(work.resolve, before=work.advance, repeats=9)
            report.add(f"{name}.resolve", median(times), "us", **facts)
        rate, us, _ = time_gather(backend, pages, plans, repeats=9)
        report.add(f"{name}.{label}", rate, "GB/s", us=round(us, 1), **facts)
