"""What the demonstration shows: progress while it runs, and a table at its end.

On a terminal with rich, else as plain lines. Main thread of the command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from hisparse_service.contract.limits import MIB

_LINE_EVERY = 48


@dataclass(frozen=True)
class Check:
    """One thing that must be so.

    Attributes:
        what: Its name.
        is_good: Whether it is.
        detail: The numbers.
    """

    what: str
    is_good: bool
    detail: str


@dataclass(frozen=True)
class Phase:
    """One set of workers.

    Attributes:
        title: Its name.
        prompt_tokens: Of all requests.
        ranks: Each rank's counters, as `demo_worker` reports them.
    """

    title: str
    prompt_tokens: int
    ranks: list[dict[str, Any]]


@dataclass
class DemoReport:
    """Everything that was found."""

    text: str
    sizes: dict[str, Any] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """What differed first, if anything did."""

    @property
    def is_good(self) -> bool:
        """Whether every check holds."""
        return bool(self.checks) and all(check.is_good for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**dataclasses.asdict(self), "is_good": self.is_good, "summary": self.summary()}

    def summary(self) -> dict[str, list[str]]:
        """The table: what, then a column a phase. Counts are of all ranks unless named."""
        columns = [self._column(phase) for phase in self.phases]
        return {what: [column[what] for column in columns] for what in columns[0]}

    def _column(self, phase: Phase) -> dict[str, str]:
        writer, *readers = phase.ranks

        def total(name: str) -> int:
            return sum(rank[name] for rank in phase.ranks)

        lanes = max(total("resident_lanes") + total("hot_lanes") + total("miss_lanes"), 1)
        prefill = max(total("prefill_resident_rows") + total("prefill_staged_rows"), 1)
        block_bytes = self.sizes["block_bytes"]
        held = writer["host_blocks_in_use"] * block_bytes / MIB
        copies = len(phase.ranks)
        column = {
            "tokens generated, each rank": f"{writer['generated_tokens']:,}",
            "longest context": f"{writer['longest_context']:,} tokens",
            "prompt tokens": f"{phase.prompt_tokens:,}",
            "prefill tokens saved": f"{writer['hit_tokens']:,} "
            f"({100 * writer['hit_tokens'] / phase.prompt_tokens:.0f} %)",
            "decode rows: resident / hot / host": " / ".join(
                f"{100 * total(name) / lanes:.1f} %"
                for name in ("resident_lanes", "hot_lanes", "miss_lanes")
            ),
            "prefill rows: resident / host": " / ".join(
                f"{100 * total(name) / prefill:.1f} %"
                for name in ("prefill_resident_rows", "prefill_staged_rows")
            ),
            "rows missed (hot rows evicted)": f"{total('miss_rows'):,} "
            f"({total('evicted_hot_rows'):,})",
            "pages spilled / restored": f"{total('spilled_pages'):,} / {total('restored_pages'):,}",
            "blocks mirrored / published": f"{writer['mirrored_pages']:,} / "
            f"{writer['published_pages']:,} ({writer['merged_pages']:,} were there already)",
            "host rows compared byte for byte": f"{total('checked_rows'):,}",
            "host memory: shared / private copies": f"{held:.1f} MiB / {held * copies:.1f} MiB",
            "control messages a step, rank 0": _per_step(writer),
        }
        if readers:
            column["control messages a step, readers"] = " ".join(map(_per_step, readers))
        return column


def _per_step(rank: dict[str, Any]) -> str:
    return f"{rank['control_messages'] / max(rank['engine_steps'], 1):.2f}"


class Progress(Protocol):
    """Tells a person how far it is."""

    def say(self, line: str) -> None:
        """Something begins."""
        ...

    def phase(self, title: str, total: int) -> contextlib.AbstractContextManager[None]:
        """A part of known length."""
        ...

    def advance(self, count: int, *, prefilled: int | None = None) -> None:
        """The part is `count` further."""
        ...


class PlainProgress:
    """Lines on standard error: for logs."""

    def __init__(self) -> None:
        self._title = ""
        self._done = self._total = self._said = 0

    def say(self, line: str) -> None:
        """Write a line."""
        print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def phase(self, title: str, total: int) -> Iterator[None]:
        """Begin to count."""
        self._title, self._total = title, total
        self._done = self._said = 0
        yield
        self.say(f"{title}: done")

    def advance(self, count: int, *, prefilled: int | None = None) -> None:
        """Count; now and then, write a line."""
        self._done += count
        if self._done - self._said >= _LINE_EVERY or (prefilled and not self._said):
            self._said = max(self._done, 1)
            note = "" if prefilled is None else f", {prefilled:,} prompt tokens computed"
            self.say(f"{self._title}: {self._done:,} of {self._total:,}{note}")


class RichProgress:
    """A bar on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar: Any = None
        self._task: Any = None

    def say(self, line: str) -> None:
        """Write a line above the bar."""
        self._console.print(line, highlight=False)

    @contextlib.contextmanager
    def phase(self, title: str, total: int) -> Iterator[None]:
        """Show a bar."""
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeElapsedColumn(),
        )
        with progress.Progress(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task(title, total=total, note="")
            yield

    def advance(self, count: int, *, prefilled: int | None = None) -> None:
        """Move the bar."""
        note = "" if prefilled is None else f"{prefilled:,} prompt tokens computed"
        self._bar.update(self._task, advance=count, note=note)


def make_progress(*, is_quiet: bool) -> Progress:
    """A bar on a terminal, lines elsewhere; nothing of it is on standard output."""
    return RichProgress() if sys.stderr.isatty() and not is_quiet else PlainProgress()


def print_report(report: DemoReport) -> None:
    """Print the checks and the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    style = box.SIMPLE_HEAD if sys.stdout.isatty() else box.ASCII2
    checks = Table("", "check", "found", box=style, title="Checks", title_justify="left")
    for check in report.checks:
        mark = "[green]ok[/]" if check.is_good else "[bold red]WRONG[/]"
        checks.add_row(mark, check.what, check.detail)
    console.print(checks)
    for line in report.lines:
        console.print(line, markup=False)
    sizes = report.sizes
    table = Table(
        "", *(phase.title for phase in report.phases), box=style, title_justify="left",
        title=f"Tiers: {sizes['resident_tokens']:,} resident tokens and {sizes['hot_rows']:,} hot "
        f"rows for all requests, top-k {sizes['top_k']}, blocks of {sizes['block_size']} tokens",
    )  # fmt: skip
    for what, values in report.summary().items():
        table.add_row(what, *values)
    console.print(table)
    verdict = "[bold green]all checks passed[/]" if report.is_good else "[bold red]FAILED[/]"
    console.print(verdict)
