"""What the directory costs, alone: no socket, no second process. One JSON object a line.

    python benchmarks/bench_directory.py [--quick]

Each figure is the median of several runs, with the fastest beside it. Between two lookups the
caches are filled with other data, so that a big directory shows its cache misses.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hisparse_service.contract.keys import key_space
from hisparse_service.contract.limits import LOOKUP_SLICE_KEYS, MAX_RESERVE_BLOCKS
from hisparse_service.contract.segment import RECORD_DTYPE
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import BackingMode, CompletedItem, MirrorItem

KEY_BYTES = 16
LOOKUP_KEYS = (1_000, 15_625)
"""64,000 and 1,000,000 tokens at block 64. A lookup has a fixed cost too, so that sizes of the
directory compare only at the same number of keys."""
CACHE_BYTES = 64 << 20


class Bench:
    """A directory with one namespace and one session."""

    def __init__(self, num_blocks: int) -> None:
        self.fingerprint = os.urandom(16)
        self.space = key_space(self.fingerprint)
        self.table = np.zeros(num_blocks + 1, RECORD_DTYPE)
        self.directory = self.new_directory()
        self.directory.attach_backing(1, self.table, mode=BackingMode.FRESH)
        self.directory.open_session(1)

    def new_directory(self) -> Directory:
        """Another directory with the same namespace and no backing."""
        directory = Directory(epoch=1, hash_seed=secrets.randbits(128))
        directory.open_namespace(self.fingerprint, name="bench", block_size=64, namespace=1)
        return directory

    def publish(self, keys: bytes) -> CompletedItem:
        """One prefix, unpinned afterwards."""
        parent, generation, done, answer = 0, 0, 0, None
        num_keys = len(keys) // KEY_BYTES
        leases = []
        while done < num_keys:
            part = min(MAX_RESERVE_BLOCKS, num_keys - done)
            granted = self.directory.reserve(1, 1, part, 0, now_s=0.0)
            leases.append(granted.lease_id)
            item = MirrorItem(
                granted.lease_id, granted.blocks, granted.generations,
                keys[done * KEY_BYTES : (done + part) * KEY_BYTES], parent, generation,
            )  # fmt: skip
            (answer,) = self.directory.mirror_completed(1, 1, [item])
            parent, generation = int(answer.blocks[-1]), int(answer.generations[-1])
            done += part
        self.directory.release_leases(1, leases)
        assert answer is not None
        return answer


def measure(run: Callable[[], Any], *, repeats: int) -> tuple[float, float]:
    """(median, fastest) seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times)


def emit(name: str, **values: float) -> None:
    rounded = {key: round(value, 3) for key, value in values.items()}
    print(json.dumps({"benchmark": name, **rounded}), flush=True)


def bench_lookup(num_blocks: int, wanted: int, layout: str, *, repeats: int) -> None:
    """Lookup of one prefix of `wanted` keys in a full directory, and its slices.

    `in_a_row`: in the blocks that a reservation of a pool with room gives. `scattered`: each
    somewhere else, which is the worst that evictions can lead to; three cache misses a key (bucket,
    row, record) are then left, which a directory of 10,000 blocks does not have.
    """
    bench = Bench(num_blocks)
    prefix = os.urandom(wanted * KEY_BYTES)
    if layout == "scattered":
        free = bench.directory._namespaces[1].blocks._free
        np.random.default_rng(1).shuffle(np.frombuffer(free, np.uint32))
    bench.publish(prefix)
    if num_blocks > wanted:
        bench.publish(os.urandom((num_blocks - wanted) * KEY_BYTES))
    other = np.ones(CACHE_BYTES // 8)
    whole, slices, releases = [], [], []
    for _ in range(repeats):
        other += 1
        start = time.perf_counter()
        running = bench.directory.begin_lookup(1, 1, bench.space, prefix, 0, now_s=0.0)
        is_done = False
        while not is_done:
            before = time.perf_counter()
            is_done = running.step(LOOKUP_SLICE_KEYS)
            slices.append(time.perf_counter() - before)
        result = running.finish(0.0)
        whole.append(time.perf_counter() - start)
        assert len(result.blocks) == wanted
        start = time.perf_counter()
        bench.directory.release_leases(1, [result.lease_id])
        releases.append(time.perf_counter() - start)
    emit(
        f"lookup.{layout}", num_blocks=num_blocks, keys=wanted,
        total_ms=statistics.median(whole) * 1e3, fastest_ms=min(whole) * 1e3,
        key_ns=statistics.median(whole) / wanted * 1e9, fastest_key_ns=min(whole) / wanted * 1e9,
        slowest_slice_ms=max(slices) * 1e3, release_ms=statistics.median(releases) * 1e3,
    )  # fmt: skip


def bench_one_block(num_blocks: int, *, repeats: int) -> None:
    """A decode step of one request: reserve one block, complete it, under one lease."""
    bench = Bench(num_blocks)
    directory = bench.directory
    reserve_s, complete_s = [], []
    parent, generation, lease = 0, 0, 0
    for _ in range(repeats):
        key = os.urandom(KEY_BYTES)
        start = time.perf_counter()
        granted = directory.reserve(1, 1, 1, lease, now_s=0.0)
        reserve_s.append(time.perf_counter() - start)
        lease = granted.lease_id
        item = MirrorItem(lease, granted.blocks, granted.generations, key, parent, generation)
        start = time.perf_counter()
        (answer,) = directory.mirror_completed(1, 1, [item])
        complete_s.append(time.perf_counter() - start)
        parent, generation = int(answer.blocks[0]), int(answer.generations[0])
    emit(
        "one_block", num_blocks=num_blocks,
        reserve_us=statistics.median(reserve_s) * 1e6,
        complete_us=statistics.median(complete_s) * 1e6,
    )  # fmt: skip


def bench_adoption(num_blocks: int, *, repeats: int) -> None:
    bench = Bench(num_blocks)
    step = 1000
    for start in range(0, num_blocks, step):
        bench.publish(os.urandom(min(step, num_blocks - start) * KEY_BYTES))

    def adopt() -> None:
        report = bench.new_directory().attach_backing(1, bench.table.copy(), mode=BackingMode.ADOPT)
        assert report.kept == num_blocks

    median, fastest = measure(adopt, repeats=repeats)
    emit("adopt", num_blocks=num_blocks, total_ms=median * 1e3, fastest_ms=fastest * 1e3)


def bench_eviction(num_blocks: int, prefix_blocks: int, batch: int) -> None:
    """A full directory: every reserve evicts."""
    bench = Bench(num_blocks)
    for _ in range(num_blocks // prefix_blocks):
        bench.publish(os.urandom(prefix_blocks * KEY_BYTES))
    lease = 0
    times = []
    for _ in range(max(1, min(200, num_blocks // batch // 2))):
        start = time.perf_counter()
        lease = bench.directory.reserve(1, 1, batch, lease, now_s=0.0).lease_id
        times.append(time.perf_counter() - start)
    emit(
        "evict_and_reserve", num_blocks=num_blocks, prefix_blocks=prefix_blocks, batch=batch,
        median_us=statistics.median(times) * 1e6, slowest_us=max(times) * 1e6,
        block_us=statistics.median(times) * 1e6 / batch,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller directories, fewer runs")
    quick = parser.parse_args().quick
    sizes = (1_000, 30_000) if quick else (1_000, 10_000, 100_000, 300_000, 1_000_000)
    for layout in ("in_a_row", "scattered"):
        for wanted in LOOKUP_KEYS:
            for num_blocks in sizes:
                if num_blocks >= wanted:
                    bench_lookup(num_blocks, wanted, layout, repeats=5 if quick else 25)
    bench_one_block(sizes[-1], repeats=1_000 if quick else 20_000)
    bench_adoption(30_000 if quick else 300_000, repeats=3 if quick else 5)
    for prefix_blocks, batch in ((1, 1), (250, 1), (250, 256), (1000, 16_384)):
        bench_eviction(40_000 if quick else 1_000_000, prefix_blocks, batch)
    if not quick:
        bench_eviction(1_000_000, 1_000, MAX_RESERVE_BLOCKS)


if __name__ == "__main__":
    main()
