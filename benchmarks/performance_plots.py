"""The plots of docs/performance.md: what each shows, and how it is drawn.

What is shown needs no matplotlib, so that the page can be checked without it; drawing does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.performance_page import Results

GREY: Final = "#888888"
"""Readable on the light and on the dark page."""


@dataclass(kw_only=True)
class Series:
    """One line of a plot, or one group of bars."""

    label: str
    points: list[tuple[float, float]] = field(default_factory=list)
    style: str = "o-"
    marks: list[str] = field(default_factory=list)
    """Names of the bars, where the plot is one of bars."""
    limits: list[float | None] = field(default_factory=list)
    """What each bar may reach at most."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture."""

    title: str
    x: str
    y: str
    series: Callable[[Results], list[Series]]
    is_log: bool = False
    is_bars: bool = False


def _line(label: str, points: dict[float, float], style: str = "o-") -> list[Series]:
    return [Series(label=label, points=sorted(points.items()), style=style)] if points else []


def _required(pattern: str) -> dict[float, float]:
    from benchmarks.performance_page import REQUIRED

    pairs = ((re.fullmatch(pattern, each.name), each.required) for each in REQUIRED)
    return {float(match[1]): required for match, required in pairs if match}


def gather_series(results: Results) -> list[Series]:
    """Bandwidth against misses, by layout; the link; what is required."""
    labels = {
        r"gather\.group4\.(\d+)": "4 layers side by side (group_interleaved)",
        r"gather\.group4_layer_major\.(\d+)": "4 layers apart (layer_major)",
        r"gather\.single\.(\d+)": "single layers",
    }
    found: list[Series] = []
    for pattern, label in labels.items():
        points = {float(m[1]): f["value"] for m, f in results.matching(pattern)}
        found += _line(label, points)
        found += _line(f"required, {label}", _required(pattern), "+") if points else []
    link = results.get("link.h2d")
    if found and link:
        ends = [x for each in found for x, _ in each.points]
        points = {min(ends): link["value"], max(ends): link["value"]}
        found += _line("copy engine, host to device", points, "--")
    return found


def resolve_series(results: Results) -> list[Series]:
    """Time against requests: all hits, the sticky trace, and the best public peer."""
    found: list[Series] = []
    for kind, label in (("hit", "all hits"), ("sticky", "sticky trace")):
        pairs = [(float(m[1]), f) for m, f in results.matching(rf"resolve\.{kind}\.(\d+)")]
        found += _line(label, {x: f["value"] for x, f in pairs})
        peers = {x: f["reference_value"] for x, f in pairs if f.get("reference_value")}
        found += _line(f"{label}, best public peer", peers, "x:")
    return found


def beside_series(results: Results) -> list[Series]:
    """Slow-down of the product in percent against thread blocks of the gather."""
    from benchmarks.performance_page import KINDS, besides, percent

    points: dict[str, dict[float, float]] = {}
    for kind, launch, product, blocks, figure in besides(results):
        if launch == "default":
            label = f"{product}, gather of {KINDS[kind]}"
            points.setdefault(label, {})[blocks] = percent(figure)
    return [series for label, line in points.items() for series in _line(label, line)]


def span_series(results: Results) -> list[Series]:
    """Bandwidth of the bare gather against the host memory that its rows come from."""
    points: dict[str, dict[float, float]] = {}
    for match, figure in results.matching(r"translation\.span\.(\d+)(_flushed)?\.(\d+)"):
        label = f"{int(match[3]):,} rows" + (", cache flushed before" if match[2] else "")
        points.setdefault(label, {})[float(match[1])] = figure["value"]
    return [
        series
        for label, line in points.items()
        for series in _line(label, line, "x:" if "flushed" in label else "o-")
    ]


def spread_series(results: Results) -> list[Series]:
    """Bandwidth of the bare gather against the device memory over which its rows are spread."""
    points: dict[str, dict[float, float]] = {}
    for match, figure in results.matching(r"translation\.spread\.(\w+)\.(\d+)"):
        at = figure["parameters"]["destination_mb"]
        points.setdefault(f"{int(match[2]):,} rows", {})[at] = figure["value"]
    return [series for label, line in points.items() for series in _line(label, line)]


def control_series(results: Results) -> list[Series]:
    """Ratios of the control plane to their references, a group of bars a run."""
    found = []
    for file, figures in results.control.items():
        with_ratio = [each for each in figures if each.get("ratio")]
        if with_ratio:
            found.append(
                Series(
                    label=re.sub(r"\.json$", "", file),
                    points=[(i, each["ratio"]) for i, each in enumerate(with_ratio)],
                    marks=[each["name"].removeprefix("control.") for each in with_ratio],
                    limits=[each.get("required_ratio") for each in with_ratio],
                )
            )
    return found


def populate_series(results: Results) -> list[Series]:
    """Rate of reserving memory against threads, by method."""
    points: dict[str, dict[float, float]] = {}
    for match, figure in results.matching(r"populate\.(\w+)\.(\d+)"):
        points.setdefault(match[1], {})[float(match[2])] = figure["value"]
    return [series for label, line in points.items() for series in _line(label, line)]


PLOTS: Final = {
    "gather": Plot(
        title="Gather: bandwidth against misses", x="misses a step", y="GB/s",
        series=gather_series, is_log=True,
    ),
    "resolve": Plot(
        title="Resolve: time against requests", x="requests", y="us", series=resolve_series,
        is_log=True,
    ),
    "beside": Plot(
        title="Slow-down of a matrix product beside the gather", x="thread blocks of the gather",
        y="%", series=beside_series,
    ),
    "span": Plot(
        title="Rows in order, no hints: bandwidth against the span of their addresses",
        x="GiB of host memory", y="GB/s", series=span_series, is_log=True,
    ),
    "spread": Plot(
        title="Rows in order, with hints: bandwidth against the spread of their destinations",
        x="MB of device memory", y="GB/s", series=spread_series,
    ),
    "control": Plot(
        title="Control plane: ratio to the reference of the same run", x="", y="ratio",
        series=control_series, is_bars=True,
    ),
    "populate": Plot(
        title="Reserving shared memory: rate against threads", x="threads", y="GiB/s",
        series=populate_series,
    ),
}  # fmt: skip


def _draw_lines(axes: Any, plot: Plot, series: list[Series]) -> None:
    for each in series:
        xs, ys = zip(*each.points, strict=True)
        axes.plot(xs, ys, each.style, label=each.label)
    if plot.is_log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for each in series for x, _ in each.points})
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)


def _draw_bars(axes: Any, plot: Plot, series: list[Series]) -> None:
    names = list(dict.fromkeys(mark for each in series for mark in each.marks))
    wide = 0.8 / len(series)
    limits: dict[str, float] = {}
    for index, each in enumerate(series):
        places = [names.index(mark) + (index + 0.5) * wide - 0.4 for mark in each.marks]
        axes.barh(places, [y for _, y in each.points], height=wide, label=each.label)
        limits |= {m: x for m, x in zip(each.marks, each.limits, strict=True) if x is not None}
    for at, name in enumerate(names):
        if name in limits:
            axes.plot([limits[name]] * 2, [at - 0.45, at + 0.45], color="#cc4444")
    axes.plot([], [], color="#cc4444", label="at most")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(plot.y)


def _draw(plot: Plot, series: list[Series], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    (_draw_bars if plot.is_bars else _draw_lines)(axes, plot, series)
    axes.set_title(plot.title, color=GREY, fontsize=11)
    axes.grid(visible=True, color=GREY, alpha=0.25)
    axes.tick_params(colors=GREY)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    axes.legend(frameon=False, labelcolor=GREY, fontsize=8)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def drawn(results: Results) -> Iterator[tuple[str, Plot, list[Series]]]:
    """The plots that have data."""
    for name, plot in PLOTS.items():
        series = plot.series(results)
        if series:
            yield name, plot, series


def draw_all(results: Results, directory: Path) -> None:
    """Write every plot that has data, the same bytes for the same figures; remove the others."""
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "hisparse", "svg.fonttype": "none"})
    directory.mkdir(parents=True, exist_ok=True)
    written = set()
    for name, plot, series in drawn(results):
        _draw(plot, series, directory / f"{name}.svg")
        written.add(f"{name}.svg")
    for path in directory.glob("*.svg"):
        if path.name not in written:
            path.unlink()
