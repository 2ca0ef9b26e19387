"""Hardware counters of the kernels, read with Nsight Compute: what limits each.

    python -m benchmarks.gpu.counters --out FILE [--only gather.single] [--metrics ...] [--probe]

All counters together take tens of passes, and between two passes the profiler saves and restores
the whole pool: some five seconds each for 16 GiB. A few counters take one or two.

First it is found out whether `ncu` is there and may read counters, then which counters this chip
has for PCIe, system memory and address translation; then every kernel runs once under `ncu`. The
file has a figure for each launch: its time, the bytes that it had to move, and the counters.
Nothing is reset, and clocks are left alone. `ncu` empties the caches before each pass, so times
here are not those of `bench_kernels`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from worker_client.kernels.interface import GroupPages, ResolvePlan

PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
WANTED = (
    "gpu__time_duration.sum",
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.max",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio",
    "l1tex__t_sector_hit_rate.pct",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "lts__t_sector_hit_rate.pct",
    "lts__t_sectors_aperture_sysmem.sum",
    "lts__t_sectors_aperture_sysmem_op_read.sum",
    "lts__t_sectors_aperture_sysmem_lookup_hit.sum",
    "lts__t_sectors_aperture_sysmem_lookup_miss.sum",
    "lts__t_requests_aperture_sysmem.sum",
    "lts__t_sectors_aperture_device.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "pcie__read_bytes.sum",
    "pcie__write_bytes.sum",
)
TELLING = re.compile(r"mmu|tlb|pcie|sysmem|hub")
"""Names of counters that say something about the way to host memory."""

TRANSLATION = re.compile(r"mmu|tlb")
MAX_FOUND = 40
"""Counters of address translation that are read beside those wanted: a few more cost one pass."""

PROBE_S, QUERY_S = 120, 120
ROW = 656


class NoCountersError(Exception):
    """Counters cannot be read here."""


def find_ncu(given: str | None) -> str:
    """Path of the profiler.

    Raises:
        NoCountersError: There is none.
    """
    found = given or shutil.which("ncu")
    if found:
        return found
    for place in PLACES:
        for path in sorted(Path(place).glob("**/ncu"), reverse=True):
            if os.access(path, os.X_OK) and path.is_file():
                return str(path)
    raise NoCountersError("ncu: not found; give --ncu PATH")


def run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output; 124 when it ran out of time."""
    try:
        done = subprocess.run(
            command, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return 124, said.decode(errors="replace") if isinstance(said, bytes) else said
    return done.returncode, done.stdout + done.stderr


def probe(ncu: str) -> str:
    """Read one counter of one small kernel.

    Raises:
        NoCountersError: With what the profiler said.
    """
    small = "import torch; torch.ones(9, device='cuda').add_(1); torch.cuda.synchronize()"
    command = [ncu, "--clock-control", "none", "--launch-count", "1", "--metrics"]
    metrics = "gpu__time_duration.sum,lts__t_sectors_aperture_sysmem.sum"
    code, said = run([*command, metrics, sys.executable, "-c", small], PROBE_S)
    if code or "==ERROR==" in said or "gpu__time_duration.sum" not in said:
        raise NoCountersError(f"ncu ended with {code}: {said[-2000:]}")
    return run([ncu, "--version"], PROBE_S)[1].strip().splitlines()[-1]


def names_of_chip(ncu: str) -> set[str]:
    """Base names of all counters; empty where the profiler does not list them."""
    _, said = run([ncu, "--query-metrics"], QUERY_S)
    return set(re.findall(r"^\s*([a-z][a-z0-9]*__[a-z0-9_]+)", said, flags=re.MULTILINE))


def chosen(names: set[str]) -> list[str]:
    """Counters to read: those wanted that the chip has, and those of address translation."""
    wanted = [name for name in WANTED if not names or name.split(".")[0] in names]
    found = sorted(name for name in names if TRANSLATION.search(name))[:MAX_FOUND]
    return wanted + [f"{name}.sum" for name in found]


# --- what is profiled: runs inside the profiler --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch to profile.

    Attributes:
        name: As in `bench_kernels`.
        num_bytes: To move from host memory; 0 where nothing is.
        launch: Enqueues it.
        prepare: Enqueues what must come before.
    """

    name: str
    num_bytes: int
    launch: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


class Cases:
    """The kernels that are profiled, on one pool."""

    def __init__(self, gib: int) -> None:
        from benchmarks.gpu.workloads import DEVICE, GIB, Pool
        from worker_client.kernels.cuda import CudaBackend, CudaTuning

        self.backend = CudaBackend(DEVICE)
        never = replace(CudaTuning(), sort_min_rows=2**31 - 1)
        self.unsorted = CudaBackend(DEVICE, tuning=never)
        for backend in (self.backend, self.unsorted):
            backend.prepare()
        self.pool = Pool(gib * GIB)

    def __iter__(self) -> Iterator[Case]:
        yield from self._single()
        yield from self._cold()
        yield from self._group()

    def _gather(
        self, name: str, pages: GroupPages, plan: ResolvePlan, *, in_order: bool = False
    ) -> Case:
        backend = self.unsorted if in_order else self.backend
        return Case(
            name=f"{name}.unsorted" if in_order else name,
            num_bytes=int(plan.miss_counts.sum()) * pages.num_layers * pages.row_bytes,
            launch=lambda: backend.gather(pages=pages, plan=plan),
        )

    def _single(self) -> Iterator[Case]:
        from benchmarks.gpu import measure

        for requests, label in ((64, 19009), (256, 73339)):
            work = measure.single_work(self.backend, self.pool, requests)
            yield Case(
                name=f"resolve.sticky.{requests}",
                num_bytes=0,
                launch=work.resolve,
                prepare=work.advance,
            )
            plan = work.planned(1)[0]
            for in_order in (False, True):
                yield self._gather(f"gather.single.{label}", work.pages, plan, in_order=in_order)
        pages = measure.single_pages(self.pool, 64 * 128 + 100)
        spec = measure.Workload(
            self.backend, pages, requests=64, context=65_536, hot_rows=8_192, rows=4
        )
        spec.warm(6)
        yield Case(name="spec4.64.resolve", num_bytes=0, launch=spec.resolve, prepare=spec.advance)
        yield self._gather("spec4.64.gather", pages, spec.planned(1)[0])

    def _cold(self) -> Iterator[Case]:
        import torch

        from benchmarks.gpu import measure
        from benchmarks.gpu.bench_kernels import staging_slots

        pages = measure.single_pages(self.pool, 64 * 64 + 100)
        own = measure.context_plans(self.backend, pages, 1)[0]
        yield self._gather("gather.cold.contexts", pages, own)
        plan = measure.uniform_plan(pages, 64, 1)
        for in_order in (False, True):
            yield self._gather("gather.cold.uniform", pages, plan, in_order=in_order)
        slots = staging_slots(pages, "uniform", 65_536, 1)
        out = torch.empty((1, 65_536, ROW), dtype=torch.uint8, device=slots.device)
        yield Case(
            name="staging.65536",
            num_bytes=65_536 * ROW,
            launch=lambda: self.backend.stage(pages=pages, host_slots=slots, out=out),
        )

    def _group(self) -> Iterator[Case]:
        from benchmarks.gpu import measure
        from benchmarks.gpu.workloads import device_pages

        pages = self.pool.pages(
            layers=4, row_bytes=ROW, interleaved=True,
            device=device_pages(layers=4, row_bytes=ROW, blocks=64 * 64 + 100),
        )  # fmt: skip
        for requests, label in ((1, 295), (64, 19009)):
            work = measure.Workload(
                self.backend, pages, requests=requests, context=65_536, hot_rows=4_096
            )
            work.warm()
            yield self._gather(f"gather.group4.{label}", pages, work.planned(1)[0])


def workload(told: Path, gib: int, only: tuple[str, ...]) -> None:
    """Launch each case twice, the second time where the profiler looks."""
    import torch

    profiler = torch.cuda.cudart()
    seen = []
    for case in Cases(gib):
        if only and not any(case.name.startswith(each) for each in only):
            continue
        case.prepare()
        case.launch()
        case.prepare()
        torch.cuda.synchronize()
        profiler.cudaProfilerStart()
        case.launch()
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()
        seen.append({"case": case.name, "bytes": case.num_bytes})
        told.write_text(json.dumps(seen))


# --- what the profiler said ----------------------------------------------------------------------


def parse_csv(text: str) -> list[dict[str, Any]]:
    """One mapping a profiled launch, counters as numbers, with their units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        return []
    rows = list(csv.DictReader(lines))
    units, launches = rows[0], rows[1:]
    parsed = []
    for launch in launches:
        counters = {}
        for name, value in launch.items():
            if name and "__" in name and value:
                counters[name] = {"value": number(value), "unit": units.get(name) or ""}
        parsed.append({"kernel": launch.get("Kernel Name", ""), "counters": counters})
    return parsed


def number(text: str) -> float | str:
    """A number with thousands separators, or what else it is."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


TIME: Final = "gpu__time_duration.sum"


def figures(
    seen: list[dict[str, Any]], launches: list[dict[str, Any]], metrics: list[str]
) -> list[dict[str, Any]]:
    """Figures of the launches beside their cases: one launch each, in order."""
    made = []
    for case, launch in zip(seen, launches, strict=False):
        read = {name: launch["counters"][name] for name in metrics if name in launch["counters"]}
        parameters = {"bytes": case["bytes"], "kernel": launch["kernel"]}
        parameters |= {name.replace(".", "_"): each["value"] for name, each in read.items()}
        time = read.get(TIME, {}).get("value")
        us = time / 1000 if isinstance(time, float) else None
        name = f"counters.{case['case']}"
        made.append({"name": name, "value": us, "unit": "us", "parameters": parameters})
    return made


def profile(ncu: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Everything, as far as it goes. What else the profiler says is printed."""
    print(f"counters can be read: {probe(ncu)}", flush=True)
    names = names_of_chip(ncu)
    print(f"{len(names)} counters on this chip, of the way to host memory:", flush=True)
    print(*sorted(name for name in names if TELLING.search(name)))
    if options.probe:
        return []
    metrics = [each for each in options.metrics.split(",") if each] or chosen(names)
    told, log = options.out.with_suffix(".cases"), options.out.with_suffix(".csv")
    command = [
        ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
        "--print-units", "base", "--force-overwrite", "--log-file", str(log),
        "--metrics", ",".join({TIME, *metrics}),
        sys.executable, "-m", "benchmarks.gpu.counters", "--out", str(told), "--workload",
        "--gib", str(options.gib), "--only", options.only,
    ]  # fmt: skip
    code, said = run(command, options.limit_s)
    text = log.read_text(errors="replace") if log.exists() else ""
    seen = json.loads(told.read_text()) if told.exists() else []
    print(f"ncu ended with {code}", said[-1500:], flush=True)
    for path in (told, log):
        path.unlink(missing_ok=True)
    return figures(seen, parse_csv(text), [TIME, *metrics])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ncu")
    parser.add_argument("--only", default="")
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--commit", default="")
    parser.add_argument("--metrics", default="", help="comma-separated; all that tell by default")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--probe", action="store_true", help="only what can be read")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.workload:
        workload(options.out, options.gib, tuple(filter(None, options.only.split(","))))
        return 0
    try:
        made = profile(find_ncu(options.ncu), options)
    except NoCountersError as error:
        print(error, flush=True)
        return 1
    import torch

    from benchmarks import report
    from benchmarks.gpu.workloads import driver_version

    common = {
        "device": torch.cuda.get_device_name(0),
        "driver": driver_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": options.commit or report.commit(),
    }
    options.out.write_text(json.dumps([each | common for each in made], indent=1) + "\n")
    for each in made:
        print(f"{each['name']:34s} {each['value']} {each['unit']} {each['parameters']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
