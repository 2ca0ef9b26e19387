"""docs/performance.md says what benchmarks/results holds; figures are found by their names."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import performance_page as page
from benchmarks import performance_plots as plots

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_what_the_results_give() -> None:
    made = page.render(page.Results(), page.TEMPLATE.read_text())
    assert made == page.PAGE.read_text(), "run make performance"


def test_each_plot_of_the_page_is_there_and_no_other() -> None:
    named = set(re.findall(r"images/performance/(\w+)\.svg", page.PAGE.read_text()))
    assert named == {path.stem for path in page.PLOTS.glob("*.svg")}
    assert named == {name for name, _, _ in plots.drawn(page.Results())}


def test_every_required_figure_has_a_row_even_if_it_was_not_measured(tmp_path: Path) -> None:
    rows = page.table_required(page.Results(tmp_path))
    assert len(rows) == 2 + len(page.REQUIRED)
    assert all("not measured" in row for row in rows[2:])


def figure(name: str, value: float, **more: object) -> page.Result:
    return {
        "name": name, "value": value, "unit": "GB/s", "parameters": {}, "reference_value": None,
        "ratio": None, "device": "a GPU", "driver": "1", "date": "2026-12-01", "commit": "abc",
    } | more  # fmt: skip


def results_of(directory: Path, **files: list[page.Result]) -> page.Results:
    for name, listed in files.items():
        (directory / f"{name}.json").write_text(json.dumps(listed))
    return page.Results(directory)


@pytest.mark.parametrize(
    ("name", "unit", "value", "met"),
    [
        ("gather.group4.4753", "GB/s", 47.0, "yes"),
        ("gather.group4.4753", "GB/s", 46.99, "**no**"),
        ("resolve.hit.64", "us", 16.0, "yes"),
        ("resolve.hit.64", "us", 16.01, "**no**"),
    ],
)
def test_met_is_decided_by_the_measured_value(
    tmp_path: Path, name: str, unit: str, value: float, met: str
) -> None:
    rows = page.table_required(results_of(tmp_path, gpu=[figure(name, value, unit=unit)]))
    (row,) = (row for row in rows if f"`{name}`" in row)
    assert f"| {met} | a |" in row


def test_a_later_run_replaces_an_earlier_one_and_a_tie_is_refused(tmp_path: Path) -> None:
    old, new = figure("link.h2d", 50.0), figure("link.h2d", 55.0, date="2026-12-02")
    found = results_of(tmp_path, b_old=[old], a_new=[new]).get("link.h2d")
    assert found is not None
    assert found["value"] == 55.0
    with pytest.raises(ValueError, match="same date"):
        results_of(tmp_path, c_again=[new])


def test_prose_cannot_name_a_figure_that_is_not_there(tmp_path: Path) -> None:
    results = results_of(tmp_path, gpu=[figure("link.h2d", 55.52, parameters={"us": 1234.5})])
    line = page.inline(results, "{{value link.h2d}} in {{fact link.h2d us}} us")
    assert line == "55.5 GB/s in 1,234 us"
    with pytest.raises(KeyError):
        page.inline(results, "{{value link.d2h}}")


def test_the_table_of_the_bare_gather_keeps_one_row_a_value_and_leaves_out_what_is_no_bandwidth(
    tmp_path: Path,
) -> None:
    listed = [
        figure("translation.span.8.131072", 40.0),
        figure("translation.span.8.19009", 35.0),
        figure("translation.hints.both.4096", 26.0),
        figure("translation.dram_read.sorted.19009", 2.8, unit="MB"),
    ]
    results = results_of(tmp_path, bare=listed)
    _, _, row = page.table_translation(results)
    assert "| 8 | 35 | - | 40 |" in row
    assert len(page.table_other(results)) == 2


def test_plots_are_the_same_bytes_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = page.Results()
    for name in ("one", "two"):
        plots.draw_all(results, tmp_path / name)
    for path in (tmp_path / "one").glob("*.svg"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


torch = pytest.importorskip("torch")


def test_each_required_figure_of_the_kernels_is_found_by_its_name() -> None:
    from benchmarks.gpu.bench_kernels import STEMS, wanted_names

    for each in page.REQUIRED:
        if each.name == "attach.16gib":  # needs a daemon: bench_attach
            continue
        parts = [part for part in STEMS if wanted_names(part, (each.name,)) is not None]
        assert len(parts) == 1, (each.name, parts)


def test_what_is_required_beside_computation_is_of_the_launch_that_the_library_makes() -> None:
    pytest.importorskip("cuda.core")
    from worker_client.kernels.cuda import CudaTuning

    tuning = CudaTuning()
    made = {"wide": tuning.wide_beside.blocks, "sorted": tuning.sorted_beside.blocks}
    assert made == page.BESIDE_BLOCKS


def test_a_sweep_runs_only_when_it_is_named() -> None:
    from benchmarks.gpu.bench_kernels import wanted_names

    assert wanted_names("sweep", ()) is None
    assert wanted_names("sweep", ("gather",)) is None
    assert wanted_names("sweep", ("sweep",)) == ()
    assert wanted_names("single", ("gather",)) == ("gather",)
    assert wanted_names("single", ("single",)) == ()
    assert wanted_names("single", ("resolve",)) is None


def test_the_sample_for_the_sanitizer_names_tests_that_exist() -> None:
    from benchmarks.gpu.sanitize import SAMPLE

    sources = [path.read_text() for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    functions = re.findall(r"def (test_\w+)", "".join(sources))
    for pattern in SAMPLE:
        name = re.split(r"[.\\\[]", pattern)[0]
        assert any(name in function for function in functions), pattern


def test_counters_are_read_from_what_the_profiler_prints() -> None:
    from benchmarks.gpu.counters import TIME, chosen, figures, parse_csv

    said = """==PROF== Profiling "hs_resolve" - 0: 0%....100% - 5 passes
"ID","Kernel Name","Block Size","dram__bytes_read.sum","gpu__time_duration.sum","lts__t.sum"
"","","","byte","ns",""
"0","hs_resolve","(1024, 1, 1)","1,234.5","12,500","n/a"
"1","hs_rows_to_device","(512, 1, 1)","7","n/a","1"
==PROF== Disconnected
"""
    seen = [{"case": "resolve", "bytes": 0}, {"case": "gather", "bytes": 656}]
    wanted = [TIME, "dram__bytes_read.sum", "lts__t.sum", "not__there.sum"]
    resolve, gather = figures(seen, parse_csv(said), wanted)
    assert (resolve["name"], resolve["value"], resolve["unit"]) == ("counters.resolve", 12.5, "us")
    assert resolve["parameters"] == {
        "bytes": 0, "kernel": "hs_resolve", "gpu__time_duration_sum": 12_500.0,
        "dram__bytes_read_sum": 1234.5, "lts__t_sum": "n/a",
    }  # fmt: skip
    assert gather["value"] is None
    assert gather["parameters"]["kernel"] == "hs_rows_to_device"
    names = {"dram__bytes_read", "gpcmmu__hits"}
    assert chosen(names) == ["dram__bytes_read.sum", "gpcmmu__hits.sum"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import measure, workloads

    monkeypatch.setattr(workloads, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(measure, "driver_version", lambda: "1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")


@pytest.mark.usefixtures("on_cpu")
def test_traces_keep_and_bring_back_what_their_kind_says() -> None:
    from benchmarks.gpu.workloads import TRACES, Trace

    never_seen = {}
    for kind in TRACES:
        trace = Trace(kind, requests=1, context=16_384)
        steps = [set(trace.current.flatten().tolist())]
        steps += [set(trace.advance().flatten().tolist()) for _ in range(12)]
        assert all(len(step) == 2_048 for step in steps)
        shared = {len(old & new) for old, new in itertools.pairwise(steps)}
        assert shared == {round(2_048 * kind.kept_share)}, kind.name
        never_seen[kind.name] = len(steps[-1] - set().union(*steps[:-1]))
    assert never_seen["middle_high"] < never_seen["middle_low"] / 2


@pytest.mark.usefixtures("on_cpu")
def test_a_report_is_on_disk_at_every_figure_and_keeps_those_of_other_names(tmp_path: Path) -> None:
    from benchmarks.gpu.measure import Report

    path = tmp_path / "figures.json"
    kept = [figure("gather.single.19009", 1.0), figure("link.h2d", 2.0)]
    report = Report("abc", path=path, kept=kept)
    report.add("gather.single.19009", 3.0, "GB/s", reference=2.0, required=42.0)
    named = {each["name"]: each for each in json.loads(path.read_text())}
    assert set(named) == {"gather.single.19009", "link.h2d"}
    assert named["link.h2d"]["value"] == 2.0
    assert named["gather.single.19009"]["ratio"] == 1.5
    assert named["gather.single.19009"]["parameters"] == {"required": 42.0}
    report.selected = ("gather.single.19009",)
    assert report.wants("gather.single.")
    assert not report.wants("gather.single.73339")
