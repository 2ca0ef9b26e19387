"""How fast a pool becomes ready: threads against methods, and the daemon's own way against both.

    python -m benchmarks.bench_populate [--gib 8] [--repeats 3] [--threads 1,2,4] [--json FILE]

One JSON object a line. `populate` reserves a bare object of shared memory; `attach_s` is what the
first process that maps it then pays to have every page in its page tables, with all cores.
`pool` is `Pool.create_or_adopt`, from limits to the public name, and `adopt` its second start.
`start_to_ready` is a whole daemon, from the start of its process until it says that it is ready;
its `ratio` is to the median of `populate` with all cores in the same run (required: at most 1.2 for
8 GiB). All take turns, because the first touch of a virtual machine's memory is slower than the
second: one round is thrown away.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
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


def start_daemon(size_bytes: int) -> float:
    """Seconds from the start of `hisparse-service serve` until it says that it is ready."""
    read_fd, write_fd = os.pipe()
    with (
        own_instance("bench") as instance,
        tempfile.TemporaryDirectory(prefix="hisparse-bench-") as directory,
        open(read_fd, "rb") as said,
    ):
        started = time.perf_counter()
        process = subprocess.Popen(
            [
                sys.executable, "-m", "hisparse_service", "serve", "--instance", instance,
                "--runtime-dir", os.path.join(directory, "run"), "--pool-bytes", str(size_bytes),
                "--ready-fd", str(write_fd),
            ],
            pass_fds=[write_fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(write_fd)
        line = said.readline()
        ready = time.perf_counter()
        process.terminate()
        process.wait(60)
    if not line.startswith(b"READY "):
        raise SystemExit(f"the daemon did not start: {line!r}, exit code {process.returncode}")
    return ready - started


def start_to_ready(size_bytes: int, *, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of the daemon's start, and of populating as much with all cores, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(repeats + 1):
        populated = bare_populate(PopulateMethod.POPULATE_WRITE, default_threads(), size_bytes)[0]
        started = start_daemon(size_bytes)
        if repeat:  # the first round touches memory that the machine may not have yet
            theirs.append(populated)
            ours.append(started)
    return ours, theirs


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
    pools: list[float] = []
    starts: list[float] = []
    adoptions: list[float] = []
    for repeat in range(options.repeats + 1):
        for case in ready:
            reserved_s, attached_s = bare_populate(*case, size_bytes)
            if repeat:
                ready[case].append(reserved_s)
                attach[case].append(attached_s)
        pool_s, adopted_s = start_pool(size_bytes)
        started_s = start_daemon(size_bytes)
        if repeat:
            pools.append(pool_s)
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
    say("pool", size_bytes, pools, ratio=round(statistics.median(pools) / all_cores, 3))
    say("start_to_ready", size_bytes, starts, ratio=ratio, required_ratio=1.2)
    say("adopt", size_bytes, adoptions)
    if options.json:
        report.save(figures(medians, size_bytes), options.json)


if __name__ == "__main__":
    main()
