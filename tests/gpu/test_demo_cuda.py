"""`hisparse-service demo --device cuda` as a user runs it: both types, with and without graphs.

What each run found is printed, good or not (``-s`` shows it): what differed first (step, request,
layer, by how much), the choices that two computations have in common, and how far the logits are
from those of the model's own cache.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

SIZES = ("--requests", "3", "--steps", "40", "--pool-bytes", "32MiB")
DTYPES = ("float32", "bfloat16")
GRAPHS = ("--cuda-graphs", "--no-cuda-graphs")


def show(line: str) -> None:
    sys.stdout.write(line + "\n")


@functools.cache
def run_demo(dtype: str, graphs: str) -> dict[str, Any]:
    """One run for all tests that look at it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HISPARSE_")}
    done = subprocess.run(
        [
            sys.executable, "-m", "hisparse_service", "demo", "--device", "cuda",
            "--dtype", dtype, graphs, *SIZES, "--json",
        ],
        capture_output=True, text=True, timeout=500, env=kept, check=False,
    )  # fmt: skip
    show(f"\n--- demo --device cuda --dtype {dtype} {graphs}: exit code {done.returncode}")
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        pytest.fail(f"no report: {done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    for check in report["checks"]:
        show(f"{'ok   ' if check['is_good'] else 'WRONG'} {check['what']}: {check['detail']}")
    for line in report["lines"]:
        show(line)
    for phase in report["phases"]:
        for rank, counters in enumerate(phase["ranks"]):
            shown = {
                name: counters[name]
                for name in ("logits_digest", "graph_replays", "mirrored_rows", "engine_steps")
            }
            show(f"{phase['title']}, rank {rank}: {shown}")
    return report


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_demonstration_is_exact_on_the_gpu(dtype: str, graphs: str) -> None:
    report = run_demo(dtype, graphs)
    wrong = [check for check in report["checks"] if not check["is_good"]]
    assert not wrong, "\n".join([*map(str, wrong), *report["lines"]])
    exact = [check for check in report["checks"] if "equal bit for bit" in check["what"]]
    assert len(exact) == 4  # two sets of two ranks


@pytest.mark.parametrize("dtype", DTYPES)
def test_i2_host_rows_after_replays_are_the_rows_of_the_device(dtype: str) -> None:
    """Replays wrote them: no call of Python copied a row that a graph should have copied."""
    report = run_demo(dtype, "--cuda-graphs")
    for phase in report["phases"]:
        writer, reader = phase["ranks"]
        assert min(writer["graph_replays"], reader["graph_replays"]) >= 39
        assert writer["mirrored_rows"] >= 3 * 38
        assert reader["mirrored_rows"] == 0
        assert writer["pool_pages"] > 0
        assert writer["wrong_pool_pages"] == 0
        assert max(writer["wrong_rows"], reader["wrong_rows"]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_graphs_compute_what_the_same_calls_compute(dtype: str) -> None:
    """Bit for bit, over all tokens of the first workers: their steps are the same in both runs.

    (When the second ones begin to read a page from the host depends on time, and it may be one that
    another chunk computed with other rounding.)
    """
    with_graphs, without = (run_demo(dtype, graphs)["phases"][0] for graphs in GRAPHS)
    digests = {rank["logits_digest"] for rank in with_graphs["ranks"] + without["ranks"]}
    assert len(digests) == 1
    assert [rank["graph_replays"] for rank in without["ranks"]] == [0, 0]


def test_a_damaged_host_row_is_found_by_replayed_graphs() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "hisparse_service", "demo", "--device", "cuda",
            "--dtype", "bfloat16", *SIZES, "--corrupt-host-rows", "--json",
        ],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode != 0, done.stdout[-2000:]
    report = json.loads(done.stdout)
    wrong = {check["what"] for check in report["checks"] if not check["is_good"]}
    assert any("equal bit for bit" in what for what in wrong), report["checks"]
    assert any("host rows" in what for what in wrong), report["checks"]
