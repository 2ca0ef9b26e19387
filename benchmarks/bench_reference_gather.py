"""The reference gather against `torch.index_select` on the same rows, both in one run.

One JSON object a line: name, parameters, value and reference_value (ns a row, median), ratio. Fresh
random rows each time from a pool of random data far larger than the caches, the sides in turn.
``cold`` fills hot regions (adjacent rows of blocks), ``steady`` replaces scattered rows.
`torch.index_select` writes its rows side by side; ``same_work_value`` is what plain torch takes to
bring them to the same places (index_select, then index_copy_), with same_work_ratio.

    python benchmarks/bench_reference_gather.py [--pool-gib 4] [--repeats 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from worker_client.kernels.interface import GroupPages, HostLayout, ResolvePlan, allocate_plan
from worker_client.kernels.reference import ReferenceBackend

BLOCK_SIZE = 64
HOT_ROWS = 4096
TOP_K = 2048
LAYERS = 4


def make_pages(
    *, layers: int, row_bytes: int, layout: HostLayout, pool_bytes: int, requests: int
) -> GroupPages:
    host_blocks = pool_bytes // (layers * row_bytes * BLOCK_SIZE)
    shape = (layers, host_blocks, BLOCK_SIZE, row_bytes)
    if layout is HostLayout.GROUP_INTERLEAVED:
        shape = (host_blocks, BLOCK_SIZE, layers, row_bytes)
    pool = torch.empty(shape, dtype=torch.uint8)
    pool.view(torch.int64).random_()
    host = pool.unbind(0 if layout is HostLayout.LAYER_MAJOR else 2)
    device_blocks = 1 + requests * HOT_ROWS // BLOCK_SIZE
    backing = torch.empty((device_blocks, layers, BLOCK_SIZE, row_bytes), dtype=torch.uint8)
    backing.fill_(1)  # really there: a first touch of its pages would be timed as copying
    return GroupPages(
        host=tuple(host), device=tuple(backing.unbind(1)), block_stride_rows=layers * BLOCK_SIZE
    )


def fill_plan(plan: ResolvePlan, pages: GroupPages, *, requests: int, misses: int) -> torch.Tensor:
    """Write a plan as `resolve` would: rows anywhere, slots ascending. Returns the host rows."""
    host_rows = pages.host[0].shape[0] * BLOCK_SIZE
    plan.miss_counts.fill_(misses)
    hot_blocks = HOT_ROWS // BLOCK_SIZE
    order = 1 + torch.randperm(requests * hot_blocks).view(requests, hot_blocks)
    for request in range(requests):
        cold = misses == TOP_K
        slots = torch.arange(misses) if cold else torch.randperm(HOT_ROWS)[:misses].sort().values
        block = order[request, slots // BLOCK_SIZE]
        plan.miss_device_rows[request, :misses] = (
            block * pages.block_stride_rows + slots % BLOCK_SIZE
        )
        plan.miss_source_rows[request, :misses] = torch.randint(0, host_rows, (misses,))
    return plan.miss_source_rows[:, :misses].flatten()


def index_select_of(pages: GroupPages, rows: int) -> Callable[[torch.Tensor], None]:
    """The plain call: once a layer, or once for all where the layers' rows lie side by side."""
    if pages.host_layout is HostLayout.GROUP_INTERLEAVED:
        width = pages.num_layers * pages.row_bytes
        first = pages.host[0]
        sources = [first.as_strided((first.shape[0] * BLOCK_SIZE, width), (width, 1))]
    else:
        sources = [layer.reshape(-1, pages.row_bytes) for layer in pages.host]
    outs = [torch.ones((rows, source.shape[1]), dtype=torch.uint8) for source in sources]

    def select(host_rows: torch.Tensor) -> None:
        for source, out in zip(sources, outs, strict=True):
            torch.index_select(source, 0, host_rows, out=out)

    return select


def index_copy_of(pages: GroupPages, rows: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Plain torch doing what the gather does, layer by layer, 8 bytes an element."""
    words = [
        layer.as_strided(
            ((layer.shape[0] - 1) * (layer.stride(0) // layer.stride(1)) + BLOCK_SIZE,
             pages.row_bytes),
            (layer.stride(1), 1),
        ).view(torch.int64)
        for layer in (*pages.host, *pages.device)
    ]  # fmt: skip
    out = torch.ones((rows, pages.row_bytes // 8), dtype=torch.int64)

    def copy(host_rows: torch.Tensor, device_rows: torch.Tensor) -> None:
        for layer in range(pages.num_layers):
            torch.index_select(words[layer], 0, host_rows, out=out)
            words[pages.num_layers + layer].index_copy_(0, device_rows, out)

    return copy


def measure(
    *, layers: int, row_bytes: int, layout: HostLayout, misses: int, requests: int, pool_bytes: int,
    repeats: int,
) -> dict[str, object]:  # fmt: skip
    pages = make_pages(
        layers=layers, row_bytes=row_bytes, layout=layout, pool_bytes=pool_bytes, requests=requests
    )
    plan = allocate_plan(
        max_num_requests=requests,
        max_query_rows=requests,
        max_rows_per_request=1,
        top_k=TOP_K,
        device="cpu",
    )
    backend = ReferenceBackend()
    select = index_select_of(pages, requests * misses)
    copy = index_copy_of(pages, requests * misses)
    ours: list[float] = []
    theirs: list[float] = []
    same_work: list[float] = []
    for repeat in range(repeats + 1):
        fill_plan(plan, pages, requests=requests, misses=misses)
        start = time.perf_counter()
        backend.gather(pages=pages, plan=plan)
        gathered = time.perf_counter() - start
        rows = fill_plan(plan, pages, requests=requests, misses=misses)
        start = time.perf_counter()
        select(rows)
        selected = time.perf_counter() - start
        rows = fill_plan(plan, pages, requests=requests, misses=misses)
        device_rows = plan.miss_device_rows[:, :misses].flatten()
        start = time.perf_counter()
        copy(rows, device_rows)
        copied = time.perf_counter() - start
        if repeat:
            ours.append(gathered)
            theirs.append(selected)
            same_work.append(copied)
    scale = 1e9 / (requests * misses * layers)
    kind = "cold" if misses == TOP_K else "steady"
    return {
        "name": f"reference_gather.{kind}.{layout.value}.{layers}x{row_bytes}",
        "parameters": {
            "requests": requests,
            "misses_per_request": misses,
            "layers": layers,
            "row_bytes": row_bytes,
            "host_layout": layout.value,
            "pool_bytes": pool_bytes,
            "threads": torch.get_num_threads(),
        },
        "value": round(statistics.median(ours) * scale, 1),
        "unit": "ns a row",
        "reference": "torch.index_select into a preallocated contiguous tensor",
        "reference_value": round(statistics.median(theirs) * scale, 1),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 3),
        "same_work_value": round(statistics.median(same_work) * scale, 1),
        "same_work_ratio": round(statistics.median(ours) / statistics.median(same_work), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool-gib", type=float, default=4.0, help="host pool, GiB")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls a side")
    parser.add_argument("--requests", type=int, default=16, help="requests of a step")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, both sides")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    for layers, row_bytes, layout in (
        (1, 656, HostLayout.LAYER_MAJOR),
        (1, 1152, HostLayout.LAYER_MAJOR),
        (LAYERS, 656, HostLayout.LAYER_MAJOR),
        (LAYERS, 656, HostLayout.GROUP_INTERLEAVED),
    ):
        for misses in (TOP_K, 300):
            result = measure(
                layers=layers,
                row_bytes=row_bytes,
                layout=layout,
                misses=misses,
                requests=options.requests,
                pool_bytes=int(options.pool_gib * 2**30),
                repeats=options.repeats,
            )
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
