"""Writes docs/performance.md and its plots from benchmarks/results: `make performance`.

    python -m benchmarks.performance_page            write the page and the plots
    python -m benchmarks.performance_page --check    exit 1 if the page is stale

Figures come from the JSON lists alone. What people wrote about them is in
benchmarks/performance.md.in, whose lines `{{table}}` and `{{plot name}}` are replaced, and so is
`{{value name}}` within a line, so that prose cannot disagree with the tables. Plots
need matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import performance_plots

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
TEMPLATE: Final = ROOT / "benchmarks" / "performance.md.in"
PAGE: Final = ROOT / "docs" / "performance.md"
PLOTS: Final = ROOT / "docs" / "images" / "performance"
HEADER: Final = (
    "<!-- Written by benchmarks/performance_page.py from benchmarks/performance.md.in and "
    "benchmarks/results. Edit those, then run make performance. -->"
)

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Required:
    """One row of the table of what must be reached.

    Attributes:
        name: Of the figure in benchmarks/results.
        what: In words.
        peer: The best public implementation's value, as text; "" where there is none.
        required: What must be reached.
        aim: What was tried for; None: nothing beyond that.
        unit: Of all of them.
        is_time: Whether less is better.
    """

    name: str
    what: str
    peer: str
    required: float
    aim: float | None = None
    unit: str
    is_time: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a value is good enough."""
        return value <= self.required if self.is_time else value >= self.required


def _times(kind: str, what: str, rows: Iterable[tuple[int, str, float, float]]) -> list[Required]:
    return [
        Required(
            name=f"resolve.{kind}.{requests}",
            what=f"resolve, {what}, {requests} request{'s' * (requests > 1)}",
            peer=peer, required=required, aim=aim, unit="us", is_time=True,
        )
        for requests, peer, required, aim in rows
    ]  # fmt: skip


def _rates(rows: Iterable[tuple[str, str, str, float, float]]) -> list[Required]:
    return [
        Required(name=name, what=what, peer=peer, required=required, aim=aim, unit="GB/s")
        for name, what, peer, required, aim in rows
    ]


PRODUCTS: Final = {
    "dense": "[4,096 x 7,168] x [7,168 x 8,192]",
    "fine": "[8,192 x 2,048] x [2,048 x 8,192]",
    "decode": "[64 x 7,168] x [7,168 x 8,192]",
}
KINDS: Final = {"wide": "an index group of 4", "sorted": "single layers"}
BESIDE_BLOCKS: Final = {"wide": 4, "sorted": 4}
"""Thread blocks of a gather beside computation, as the library makes it: those of `CudaTuning`."""

REQUIRED: Final = (
    *_times("hit", "all hits", [(1, "17.4", 13, 8), (64, "18.2", 16, 9), (256, "25.5", 22, 14)]),
    *_times(
        "sticky", "sticky trace", [(1, "17.2", 14, 9), (64, "21.8", 18, 11), (256, "27.3", 24, 16)]
    ),
    *_rates(
        [
            ("gather.group4.295", "gather, group of 4 layers, 295 misses", "17.9", 36, 38),
            ("gather.group4.4753", "gather, group of 4 layers, 4,753 misses", "39", 47, 49),
            ("gather.group4.19009", "gather, group of 4, 19,009 misses", "19 to 29", 47, 49.5),
            ("gather.single.19009", "gather, single layers, 19,009 misses", "23 to 25", 42, 46),
            ("gather.single.73339", "gather, single layers, 73,339 misses", "22", 38, 44),
            ("gather.cold.contexts", "cold gather, own contexts", "32", 42, 48),
            ("gather.cold.uniform", "cold gather, uniform over 16 GiB", "19.5", 34, 42),
            ("mirror.prefill", "mirror of prefill blocks", "46", 52, 54),
            ("staging.65536", "prefill staging, 65,536 rows", "18.8", 42, 48),
        ]
    ),
    Required(
        name="spec4.64", what="resolve and gather, 4 speculative rows, 64 requests, per step",
        peer="600", required=310, aim=270, unit="us a step", is_time=True,
    ),
    Required(
        name="attach.16gib", what="attach of a populated 16 GiB pool in a second process", peer="",
        required=0.8, unit="s", is_time=True,
    ),
    *(
        Required(
            name=f"beside_product.{kind}.{BESIDE_BLOCKS[kind]}.{product}", peer="",
            what=f"product ({product}) beside the gather of {layers}, default of "
            f"{BESIDE_BLOCKS[kind]} thread blocks: slowed down by",
            required=10.0, unit="%", is_time=True,
        )
        for kind, layers in KINDS.items()
        for product in PRODUCTS
    ),
    *(
        Required(
            name=f"overhead.resident.{requests}", peer="", required=2.0, unit="%", is_time=True,
            what=f"all rows resident, {requests} request{'s' * (requests > 1)}: added to a step",
        )
        for requests in (1, 2, 3, 4)
    ),
)  # fmt: skip


class Results:
    """All figures of benchmarks/results by name.

    Args:
        directory: Of the JSON lists. Files whose name begins with ``control`` are kept apart: their
            figures are ratios of one run each.

    Raises:
        ValueError: A figure occurs in two files with the same date: one of them is stale.
    """

    def __init__(self, directory: Path = RESULTS) -> None:
        self.figures: dict[str, Result] = {}
        self.control: dict[str, list[Result]] = {}
        self._runs: list[tuple[str, ...]] = []
        for path in sorted(directory.glob("*.json")):
            listed = json.loads(path.read_text())
            if not isinstance(listed, list) or not all("name" in each for each in listed):
                continue
            if path.name.startswith("control"):
                self.control[path.name] = listed
                continue
            for figure in listed:
                self._take(figure, path.name)

    def _take(self, figure: Result, file: str) -> None:
        known = self.figures.get(figure["name"])
        if known is not None and known["file"] != file and known["date"] == figure["date"]:
            raise ValueError(
                f"{figure['name']} is in {known['file']} and in {file} with the same date: remove "
                "the one that no longer holds"
            )
        if known is None or known["date"] <= figure["date"]:
            self.figures[figure["name"]] = figure | {"file": file}

    def get(self, name: str, unit: str = "") -> Result | None:
        """A figure; None if it is not there or has another unit."""
        found = self.figures.get(name)
        return found if found and (not unit or found["unit"] == unit) else None

    def matching(self, pattern: str) -> list[tuple[re.Match[str], Result]]:
        """Figures whose whole name matches, in the order of the files."""
        found = ((re.fullmatch(pattern, name), each) for name, each in self.figures.items())
        return [(match, each) for match, each in found if match]

    def run_of(self, figure: Result) -> str:
        """A letter for where and when a figure was measured."""
        run = tuple(str(figure.get(key) or "") for key in ("device", "driver", "date", "commit"))
        if run not in self._runs:
            self._runs.append(run)
        index = self._runs.index(run)
        return chr(ord("a") + index) if index < 26 else f"a{index}"

    def runs(self) -> list[str]:
        """What the letters mean, for those that were asked for."""
        lines = []
        for index, (device, driver, date, commit) in enumerate(self._runs):
            letter = chr(ord("a") + index) if index < 26 else f"a{index}"
            with_driver = f", driver {driver}" if driver else ""
            lines.append(f"- {letter}: {device}{with_driver}, {date}, commit {commit}")
        return lines


def number(value: float) -> str:
    """Three significant digits, or whole."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(figure: Result) -> float:
    """A slow-down, which early runs noted as a share."""
    return float(figure["value"]) * (100 if figure["unit"] == "slow-down" else 1)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def table_required(results: Results) -> list[str]:
    """One row a required figure."""
    rows = []
    for each in REQUIRED:
        figure = results.get(each.name, each.unit)
        aim = "-" if each.aim is None else f"{each.aim:g}"
        fixed = (each.peer or "-", f"{each.required:g}", aim, each.unit)
        named = (f"{each.what} (`{each.name}`)",)
        if figure is None:
            rows.append((*named, "not measured", *fixed, "-", "-"))
            continue
        met = "yes" if each.is_met(figure["value"]) else "**no**"
        rows.append((*named, number(figure["value"]), *fixed, met, results.run_of(figure)))
    head = ("what", "measured", "peer", "required", "try for", "unit", "met", "run")
    return table(head, rows)


def table_traces(results: Results) -> list[str]:
    """Each trace and hot size: hit rate, resolve, gathers."""
    cells: dict[tuple[str, int], dict[str, Result]] = {}
    for match, figure in results.matching(r"trace\.(\w+)\.(\d+)\.(\w+)"):
        cells.setdefault((match[1], int(match[2])), {})[match[3]] = figure
    rows = []
    for (kind, hot), found in cells.items():
        shown = next(iter(found.values()))
        values = (
            number(found[key]["value"]) if key in found else "-"
            for key in ("resolve", "gather_single", "gather_group4")
        )
        hit, misses = shown["parameters"]["hit_rate"], shown["parameters"]["misses"]
        rows.append(
            (kind.replace("_", " "), f"{hot:,}", f"{100 * hit:.0f} %", f"{misses:,}", *values,
             results.run_of(shown))
        )  # fmt: skip
    head = ("trace", "hot rows", "hit rate", "misses a step", "resolve, us",
            "gather of single layers, GB/s", "gather of a group of 4, GB/s", "run")  # fmt: skip
    return table(head, rows) if rows else ["Not measured yet."]


def table_model(results: Results) -> list[str]:
    """A step of the model: the data plane alone, then beside the computation."""
    rows = []
    for match, figure in results.matching(r"model\.step\.(\d+)"):
        facts = figure["parameters"]
        rows.append(
            (match[1], "-", "the data plane alone", "-", number(figure["value"]),
             number(figure["value"]), f"{100 * facts['share_beside_30_ms']:.0f} % (beside 30 ms)",
             results.run_of(figure))
        )  # fmt: skip
    said = {
        "serial": "without overlap", "split": "followers' rows on a side stream",
        "split_few": "followers' rows on a side stream, few multiprocessors",
        "ahead": "a group ahead on a side stream (a bound)",
    }  # fmt: skip
    for match, figure in results.matching(r"model\.beside\.(\d+)\.(\w+)\.(\w+)"):
        facts = figure["parameters"]
        rows.append(
            (match[1], match[2], said.get(match[3], match[3]), number(figure["reference_value"]),
             number(figure["value"]), number(facts["added_ms"]),
             f"{100 * facts['share_of_step']:.0f} %", results.run_of(figure))
        )  # fmt: skip
    head = ("requests", "computation", "order", "computation alone, ms", "step, ms", "added, ms",
            "share of the step", "run")  # fmt: skip
    return table(head, rows) if rows else ["Not measured yet."]


def table_resident(results: Results) -> list[str]:
    """Low concurrency, all rows resident."""
    rows = [
        (match[1], f"{figure['parameters']['without_ms']:.2f}",
         f"{figure['parameters']['with_ms']:.2f}", f"{figure['parameters']['alone_us']:.0f}",
         f"{figure['value']:.2f} %", results.run_of(figure))
        for match, figure in results.matching(r"overhead\.resident\.(\d)")
        if figure["unit"] == "%"
    ]  # fmt: skip
    head = ("requests", "step without, ms", "step with, ms", "20 groups alone, us", "added", "run")
    return table(head, rows) if rows else ["Not measured yet."]


def besides(results: Results) -> list[tuple[str, str, str, int, Result]]:
    """Kind, launch, product, blocks and figure of every size beside a product."""
    pattern = r"beside_product\.(wide|sorted)\.(\d+)(?:\.(t\d+u\d+|cluster\d+))?(?:\.(\w+))?"
    return [
        (match[1], match[3] or "default", match[4] or "dense", int(match[2]), figure)
        for match, figure in results.matching(pattern)
    ]


def table_beside(results: Results) -> list[str]:
    """Each launch size beside each product."""
    cells: dict[tuple[str, str, int], dict[str, Result]] = {}
    for kind, launch, product, blocks, figure in besides(results):
        cells.setdefault((kind, launch, blocks), {})[product] = figure
    rows = []
    for (kind, launch, blocks), found in cells.items():
        shown = next(iter(found.values()))
        facts = shown["parameters"]
        values = (
            f"{percent(found[product]):.1f} %" if product in found else "-" for product in PRODUCTS
        )
        beside = facts.get("gather_beside_gbs")
        rows.append(
            (KINDS[kind], launch, str(blocks), *values, number(facts["gather_alone_gbs"]),
             "-" if beside is None else number(beside), results.run_of(shown))
        )  # fmt: skip
    head = ("gather of", "launch", "blocks", *(f"slow-down, {name}" for name in PRODUCTS),
            "gather alone, GB/s", "gather beside, GB/s", "run")  # fmt: skip
    return table(head, rows) if rows else ["Not measured yet."]


TRANSLATION: Final = {
    "order": "order, without hints (random: 66 blocks, sorted: 16)",
    "hints": "hint to leave the cache first on",
    "grid": "thread blocks",
    "span": "source within GiB, 24 blocks, no hints",
    "spread": "destination spread over MB",
    "policy": "cache policy, destination spread over 172 / 688 MB",
    "destinations": "destinations, spread over 172 / 688 MB",
    "set_aside": "MiB of cache set aside, destination spread over 172 / 688 MB",
    "pages": "pages of the host memory, as in span 16",
    "copy": "way of copying, no hints",
}
TRANSLATION_ROWS: Final = ("19009", "73339", "131072")


def table_translation(results: Results) -> list[str]:
    """The bare gather: what is varied, to what, and the bandwidth for each number of rows."""
    cells: dict[tuple[str, str], dict[str, Result]] = {}
    for match, figure in results.matching(r"translation\.(\w+)\.(\w+)\.(\d+)"):
        if match[1] in TRANSLATION and match[3] in TRANSLATION_ROWS:
            cells.setdefault((match[1], match[2]), {})[match[3]] = figure
    rows = []
    for group, what in TRANSLATION.items():
        for (found, label), by_rows in cells.items():
            if found == group:
                values = (
                    number(by_rows[each]["value"]) if each in by_rows else "-"
                    for each in TRANSLATION_ROWS
                )
                shown = next(iter(by_rows.values()))
                rows.append((what, label.replace("_", " "), *values, results.run_of(shown)))
    head = ("varied", "to", *(f"{int(each):,} rows, GB/s" for each in TRANSLATION_ROWS), "run")
    return table(head, rows) if rows else ["Not measured yet."]


def table_other(results: Results) -> list[str]:
    """Figures without a requirement that belong to no other table."""
    taken = {each.name for each in REQUIRED}
    patterns = (
        r"trace\..*",
        r"model\..*",
        r"overhead\..*",
        r"beside_product\..*",
        r"translation\..*",
        r"counters\..*",
    )
    rows = [
        (f"`{name}`", number(figure["value"]), figure["unit"], results.run_of(figure))
        for name, figure in results.figures.items()
        if name not in taken and not any(re.fullmatch(each, name) for each in patterns)
    ]
    return table(("figure", "value", "unit", "run"), rows)


def table_control(results: Results) -> list[str]:
    """The runs of the control plane, one table each."""
    lines: list[str] = []
    for file, figures in results.control.items():
        rows = []
        for each in figures:
            wanted = [
                f"{each['required_ratio']:g}x" if each.get("required_ratio") else "",
                f"{each['required_value']:g} {each['unit']}" if each.get("required_value") else "",
            ]
            reference = each.get("reference_value")
            rows.append(
                (f"`{each['name']}`", f"{number(each['value'])} {each['unit']}",
                 f"{number(reference)} {each['unit']}" if reference else "-",
                 f"{each['ratio']:.2f}x" if each.get("ratio") else "-",
                 ", ".join(filter(None, wanted)) or "-",
                 {True: "yes", False: "**no**", None: "-"}[each.get("is_met")])
            )  # fmt: skip
        first = figures[0]
        lines += [
            f"{first['device']}, {first['date']}, commit {first['commit']} (`{file}`):", "",
            *table(("figure", "value", "reference", "ratio", "required", "met"), rows), "",
        ]  # fmt: skip
    return lines[:-1] or ["Not measured yet."]


def table_runs(results: Results) -> list[str]:
    """What the letters of the column "run" mean. After all other tables."""
    return results.runs()


TABLES: Final[dict[str, Callable[[Results], list[str]]]] = {
    "required": table_required,
    "traces": table_traces,
    "model": table_model,
    "resident": table_resident,
    "beside": table_beside,
    "translation": table_translation,
    "control": table_control,
    "other": table_other,
    "runs": table_runs,
}


def inline(results: Results, line: str) -> str:
    """Replace ``{{value NAME}}`` and ``{{fact NAME PARAMETER}}``.

    Raises:
        KeyError: A figure that the prose speaks of is not there.
    """

    def value(match: re.Match[str]) -> str:
        figure = results.figures[match[1]]
        return f"{number(figure['value'])} {figure['unit']}"

    def fact(match: re.Match[str]) -> str:
        return number(results.figures[match[1]]["parameters"][match[2]])

    line = re.sub(r"\{\{value ([\w.]+)\}\}", value, line)
    return re.sub(r"\{\{fact ([\w.]+) (\w+)\}\}", fact, line)


def render(results: Results, template: str) -> str:
    """The page. Plots without data are left out."""
    lines: list[str] = []
    for line in template.splitlines():
        found = re.fullmatch(r"\{\{(plot )?(\w+)\}\}", line)
        if found is None:
            lines.append(inline(results, line))
        elif found[1] is None:
            lines += TABLES[found[2]](results)
        elif performance_plots.PLOTS[found[2]].series(results):
            title = performance_plots.PLOTS[found[2]].title
            lines.append(f"![{title}](images/performance/{found[2]}.svg)")
        elif lines and not lines[-1]:
            lines.pop()
    return "\n".join([HEADER, *lines]) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    results = Results()
    page = render(results, TEMPLATE.read_text())
    if options.check:
        is_stale = page != PAGE.read_text()
        if is_stale:
            print("docs/performance.md is stale: run make performance")
        return int(is_stale)
    PAGE.write_text(page)
    performance_plots.draw_all(results, PLOTS)
    missed = [
        each.name
        for each in REQUIRED
        if (figure := results.get(each.name, each.unit)) and not each.is_met(figure["value"])
    ]
    unmeasured = [each.name for each in REQUIRED if results.get(each.name, each.unit) is None]
    print(f"missed: {', '.join(missed) or 'nothing'}")
    print(f"not measured: {', '.join(unmeasured) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
