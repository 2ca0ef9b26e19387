"""One figure is one JSON object on one line; a run ends with a table and, on request, a file.

A figure carries both sides (its own value and the reference measured in the same run), so that it
can be read without knowing the machine.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    reference: str = ""
    """What `reference_value` is, in words."""
    reference_value: float | None = None
    required_ratio: float | None = None
    """Highest ratio to the reference that is good enough."""
    required_value: float | None = None
    """Highest value that is good enough."""
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Value over reference."""
        return self.value / self.reference_value if self.reference_value else None

    @property
    def is_met(self) -> bool | None:
        """Whether it is good enough; None where nothing is required."""
        checks = []
        if self.required_ratio is not None and self.ratio is not None:
            checks.append(self.ratio <= self.required_ratio)
        if self.required_value is not None:
            checks.append(self.value <= self.required_value)
        return all(checks) if checks else None


def cpu_name() -> str:
    """Model and number of cores of this machine."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    """Short id of the checked-out commit, with a + when the tree differs from it."""
    root = pathlib.Path(__file__).parent
    run = {"cwd": root, "capture_output": True, "text": True, "check": False}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **run).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], **run).stdout.strip()
    return f"{head or 'unknown'}{'+' if dirty else ''}"


def as_object(figure: Figure, *, device: str | None = None) -> dict[str, Any]:
    """The JSON object of a figure."""
    return asdict(figure) | {
        "ratio": figure.ratio,
        "is_met": figure.is_met,
        "device": device or cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
    }


def emit(figure: Figure) -> Figure:
    """Print the figure as one JSON line."""
    print(json.dumps(as_object(figure)), flush=True)
    return figure


def print_table(figures: list[Figure], title: str) -> None:
    """The figures for the eye."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title} · {cpu_name()} · {commit()}")
    for column, justify in [
        ("figure", "left"), ("value", "right"), ("reference", "right"), ("ratio", "right"),
        ("required", "right"), ("", "left"),
    ]:  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        required = [
            f"{figure.required_ratio:g}x" if figure.required_ratio is not None else "",
            f"{figure.required_value:g} {figure.unit}" if figure.required_value is not None else "",
        ]
        table.add_row(
            figure.name,
            f"{figure.value:.4g} {figure.unit}",
            f"{figure.reference_value:.4g} {figure.unit}" if figure.reference_value else "",
            f"{figure.ratio:.2f}x" if figure.ratio else "",
            ", ".join(part for part in required if part),
            {True: "met", False: "[red]missed[/red]", None: ""}[figure.is_met],
        )
    Console().print(table)


def save(figures: list[Figure], path: pathlib.Path) -> None:
    """Write a list of figures as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([as_object(figure) for figure in figures], indent=1) + "\n")
