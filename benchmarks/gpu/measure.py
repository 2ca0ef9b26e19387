"""What all GPU benchmarks share: the report, a running trace with its plans, and gather timing.

Used by the `bench_*` modules of this folder. A report writes its file at every figure, so that a
run that is cut off keeps what it has.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.workloads import (
    BLOCK_SIZE,
    DEVICE,
    STICKY,
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
from worker_client.kernels.cuda import CudaBackend
from worker_client.kernels.interface import (
    GroupPages,
    ResolvePlan,
    StepInputs,
    allocate_plan,
)

ROW = 656
TOP_K = 2_048


@dataclass
class Mode:
    """How this process measures."""

    flush: bool = False
    """Write through the second-level cache before each gather, as the layers between two would do.
    Off by default, as in the peers' figures."""


MODE = Mode()


class Report:
    """Figures, printed as they come and kept in a JSON list.

    Args:
        commit: Of the measured code.
        path: File written at every figure; None: none.
        kept: Figures of an earlier run that stay until one of the same name is added.
    """

    def __init__(
        self, commit: str, *, path: Path | None = None, kept: list[dict[str, Any]] | None = None
    ) -> None:
        self.figures: list[dict[str, Any]] = list(kept or [])
        self.selected: tuple[str, ...] = ()
        """Beginnings of the names that are wanted; empty: all."""
        self.prefix = ""
        """Before the names of figures that are measured under other conditions than usual."""
        self._path = path
        self._common = {
            "device": torch.cuda.get_device_name(0),
            "driver": driver_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit,
        }

    def wants(self, name: str) -> bool:
        """Whether a figure of this name, or one whose name begins with it, was asked for."""
        name = self.prefix + name
        return not self.selected or any(
            name.startswith(wanted) or wanted.startswith(name) for wanted in self.selected
        )

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
        name = self.prefix + name + (".flushed" if MODE.flush else "")
        figure = {
            "name": name,
            "parameters": parameters,
            "value": round(value, 3),
            "unit": unit,
            "reference_value": reference,
            "ratio": round(value / reference, 4) if reference else None,
            **self._common,
        }
        self.figures = [old for old in self.figures if old.get("name") != name]
        self.figures.append(figure)
        goal = "" if required is None else f" (required {required})"
        print(f"{name:34s} {value:10.3f} {unit}{goal} {parameters}", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the file by all figures so far."""
        if self._path is None:
            return
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps(self.figures, indent=1) + "\n")
        os.replace(beside, self._path)


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
            block_stride_rows=pages.block_stride_rows,
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
    backend: CudaBackend,
    pages: GroupPages,
    plans: list[ResolvePlan],
    *,
    repeats: int = 15,
    warm: int = 3,
) -> tuple[float, float, float]:
    """Median GB/s, median microseconds and mean misses over fresh plans, behind ``warm`` others."""
    static = clone_plan(plans[0])
    moved = [int(plan.miss_counts.sum()) for plan in plans]

    def before(index: int) -> None:
        if MODE.flush:
            flush_l2()
        copy_plan(plans[index % len(plans)], static)

    times = time_us(
        lambda _: backend.gather(pages=pages, plan=static),
        before=before,
        repeats=repeats,
        warm=warm,
    )
    wide = pages.num_layers * pages.row_bytes
    rates = [moved[(i + warm) % len(plans)] * wide / t / 1e3 for i, t in enumerate(times)]
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


def clone_inputs(inputs: StepInputs) -> StepInputs:
    return StepInputs(
        positions=inputs.positions.clone(),
        request_slots=inputs.request_slots.clone(),
        table_rows=inputs.request_slots.clone(),
        query_starts=inputs.query_starts.clone(),
    )
