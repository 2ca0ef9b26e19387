"""How fast a pool becomes ready: threads against methods, and the daemon's own way against both.

    python -m benchmarks.bench_populate [--gib 8] [--repeats 3] [--threads 1,2,4] [--json FILE]

One JSON object a line. `populate` reserves a bare object of shared memory; `attach_s` is what the
first process that maps it then pays to have every page in its page tables, with all cores.
`start_to_ready` is `Pool.create_or_adopt`, from limits to the public name; its `ratio` is to the
median of `populate` with all cores in the same run (required: at most 1.2). `adopt` is the second
start. Methods take turns, because the first touch of a virtual machine's memory is slower than the
second: one round is thrown away.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import statistics
import time
from collections.abc import Iterator

import posix_ipc

from benchmarks import report
from hisparse_service.contract.limits import GIB
from hisparse_service.pool import os_calls
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.populate import (
    PopulateMethod,
    default_threads,
    populate,
    touch_page_tables,
)
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.testing.segments import own_instance


def bare_populate(method: PopulateMethod, threads: int, size_bytes: int) -> tuple[float, float]:
    """Seconds to reserve, and to map what was reserved in a second mapping."""
    started = time.perf_counter()
    name = f"/bench-populate-{os.getpid()}"
    shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0)
    posix_ipc.unlink_shared_memory(name)
    try:
        os.ftruncate(shared.fd, size_bytes)
        with mmap.mmap(shared.fd, size_bytes) as mapping:
            populate(
                fd=shared.fd, address=os_calls.address_of(mapping), size_bytes=size_bytes,
                threads=threads, method=method,
            )  # fmt: skip
            ready = time.perf_counter()
        attaching = time.perf_counter()
        with mmap.mmap(shared.fd, size_bytes) as mapping:
            touch_page_tables(address=os_calls.address_of(mapping), size_bytes=size_bytes)
            attached = time.perf_counter()
    finally:
        shared.close_fd()
    return ready - started, attached - attaching


def start_pool(size_bytes: int) -> tuple[float, float]:
    """Seconds from nothing to a ready pool, and to adopt it again."""
    with own_instance("bench") as instance:
        settings = PoolSettings(instance=instance, pool_bytes=size_bytes)
        started = time.perf_counter()
        pool = Pool.create_or_adopt(settings)
        ready = time.perf_counter()
        pool.keep()
        adopting = time.perf_counter()
        pool = Pool.create_or_adopt(settings)
        adopted = time.perf_counter()
        pool.release()
    return ready - started, adopted - adopting


def cases(threads: list[int]) -> Iterator[tuple[PopulateMethod, int]]:
    for method in PopulateMethod:
        for count in sorted({*threads, 1, default_threads()}):
            yield method, count


def figures(
    medians: dict[tuple[PopulateMethod, int], float], size_bytes: int
) -> list[report.Figure]:
    """GiB/s of each method with each number of threads."""
    return [
        report.Figure(
            name=f"populate.{method.value}.{threads}",
            value=round(size_bytes / GIB / seconds, 3),
            unit="GiB/s",
            parameters={"gib": size_bytes / GIB, "threads": threads, "seconds": round(seconds, 3)},
        )
        for (method, threads), seconds in medians.items()
    ]


def say(benchmark: str, size_bytes: int, seconds: list[float], **facts: object) -> float:
    """Print one line; gives the median back."""
    median = statistics.median(seconds)
    line = {
        "benchmark": benchmark, "gib": size_bytes / GIB, "seconds": round(median, 4),
        "seconds_all": [round(each, 4) for each in seconds],
        "gib_per_s": round(size_bytes / GIB / median, 3) if median else None, **facts,
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", default="", help="comma-separated, beside 1 and all cores")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there, as a list")
    options = parser.parse_args()
    threads = [int(each) for each in options.threads.split(",") if each]
    size_bytes = int(options.gib * GIB) // mmap.PAGESIZE * mmap.PAGESIZE
    ready: dict[tuple[PopulateMethod, int], list[float]] = {case: [] for case in cases(threads)}
    attach: dict[tuple[PopulateMethod, int], list[float]] = {case: [] for case in ready}
    starts: list[float] = []
    adoptions: list[float] = []
    for repeat in range(options.repeats + 1):
        for case in ready:
            reserved_s, attached_s = bare_populate(*case, size_bytes)
            if repeat:
                ready[case].append(reserved_s)
                attach[case].append(attached_s)
        started_s, adopted_s = start_pool(size_bytes)
        if repeat:
            starts.append(started_s)
            adoptions.append(adopted_s)
    medians = {
        case: say(
            "populate", size_bytes, seconds, method=case[0].value, threads=case[1],
            attach_s=round(statistics.median(attach[case]), 4),
        )
        for case, seconds in ready.items()
    }  # fmt: skip
    all_cores = medians[PopulateMethod.POPULATE_WRITE, default_threads()]
    ratio = round(statistics.median(starts) / all_cores, 3)
    say("start_to_ready", size_bytes, starts, ratio=ratio, required_ratio=1.2)
    say("adopt", size_bytes, adoptions)
    if options.json:
        report.save(figures(medians, size_bytes), options.json)


if __name__ == "__main__":
    main()
