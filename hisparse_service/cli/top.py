"""`hisparse-service top`: the daemon as it is, live in the terminal."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hisparse_service.cli.exit_codes import CAPACITY
from hisparse_service.cli.operations import connect, human_bytes
from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    TimeoutOption,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from hisparse_service.cli.connection import OperatorConnection

_BARS: Final = "▁▂▃▄▅▆▇█"
_STATES: Final = (
    ("pinned", "read", "green"), ("published", "cached", "blue"),
    ("reserved", "written", "yellow"), ("free", "free", "bright_black"),
)  # fmt: skip
_FIRST_WAIT_S: Final = 0.2
_PHASES: Final = {"ready": "white on green", "starting": "black on yellow"}


def top(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks", min=0.2)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end")] = False,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show occupancy, rates, sessions and events, live. q or Ctrl-C ends it."""
    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        overview = first_overview(daemon, timeout_s)
        if as_json:
            print(json.dumps(overview, indent=2))
            return
        from rich.console import Console

        console = Console()
        if once or not console.is_terminal:
            console.print(render(overview, width=console.width))
            return
        _live(daemon, overview, interval_s)


def _ask(daemon: OperatorConnection) -> dict[str, Any]:
    from hisparse_service.contract import messages as m

    return daemon.ask(m.StatusReply, m.Overview(daemon.next_id())).status


def first_overview(daemon: OperatorConnection, timeout_s: float) -> dict[str, Any]:
    """Nobody has looked for a while: the daemon makes its first picture within two seconds."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        overview = _ask(daemon)
        # This command's own session is in it: rows are there, so it was made for this look.
        if overview.get("session_rows"):
            return overview
        if time.monotonic() > deadline_s:
            print("the daemon has made no picture in time", file=sys.stderr)
            raise typer.Exit(CAPACITY)
        time.sleep(_FIRST_WAIT_S)


def _live(daemon: OperatorConnection, overview: dict[str, Any], interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as wants_end,
        Live(
            render(overview, width=console.width, height=console.height),
            console=console, screen=True, auto_refresh=False,
        ) as live,
    ):  # fmt: skip
        while not wants_end(interval_s):
            overview = _ask(daemon) or overview
            live.update(render(overview, width=console.width, height=console.height), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Read single keys; yields a function that waits so long and says whether q was pressed."""
    if not sys.stdin.isatty():

        def wait(wait_s: float) -> bool:
            time.sleep(wait_s)
            return False

        yield wait
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def wants_end(wait_s: float) -> bool:
        readable, _, _ = select.select([sys.stdin], [], [], wait_s)
        return bool(readable) and sys.stdin.read(1) in ("q", "Q", "\x03", "\x04")

    try:
        tty.setcbreak(sys.stdin)
        yield wants_end
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# --- the picture --------------------------------------------------------------------------------


def render(overview: dict[str, Any], *, width: int, height: int | None = None) -> RenderableType:
    """One look at `overview`, for a terminal of this size; without a height, all of it."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    wide = width >= 100
    left_width = width * 11 // 20 if wide else width
    upper = Table.grid(expand=True, padding=(0, 2))
    pool = Group(*_pool(overview, left_width - 2, 8 if height is None else max(3, height // 5)))
    rates = _rates(overview)
    if wide:
        upper.add_column(width=left_width)
        upper.add_column()
        upper.add_row(pool, rates)
    else:
        upper.add_column()
        upper.add_row(pool)
        upper.add_row(rates)
    sessions = overview["session_rows"]
    rows = max(4, (height or 48) - 30)
    return Group(
        _header(overview), *_problems(overview), Padding(upper, (1, 0, 0, 0)),
        _namespaces(overview, is_wide=wide), _sessions(sessions, rows, is_wide=wide),
        *_events(overview, 8, width),
    )  # fmt: skip


def _header(overview: dict[str, Any]) -> Text:
    from rich.text import Text

    phase = overview["phase"]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{overview['instance']} ", "bold")
    text.append(f" {phase} ", _PHASES.get(phase, "white on red"))
    if phase == "starting":
        text.append(f" {overview['progress']:.0%} populated", "yellow")
    sessions = overview["sessions"]
    pool = overview["pool"]
    size = human_bytes(pool["bytes"]) if pool else "not open"
    text.append(
        f"  {sessions['workers']} workers  pool {size}  up {_duration(overview['uptime_s'])}"
        f"  version {overview['version']}  {overview['at'][11:19]} UTC"
    )
    return text


def _problems(overview: dict[str, Any]) -> Iterator[Text]:
    from rich.text import Text

    rates = overview["rates"]
    if overview["phase"] == "draining":
        yield Text("Draining: no new sessions, nothing is given out.", "bold yellow")
    if rates["refusals"] > 0:
        yield Text(f"{rates['refusals']:.1f} requests a second are refused.", "bold red")
    if overview["publication_lag_s"] > 5:
        yield Text(
            f"A mirror was enqueued {overview['publication_lag_s']:.0f} s ago and is not complete.",
            "bold yellow",
        )
    if overview["longest_turn_s"] > 0.1:
        yield Text(
            f"The control loop was busy for {overview['longest_turn_s']:.2f} s at a stretch.",
            "bold yellow",
        )
    for name, helper in overview["helpers"].items():
        if helper.get("permanent") and not helper["alive"]:
            yield Text(f"The thread {name} is dead: {helper['last_error']}", "bold red")
    if overview["cuda"].get("state") == "failed":
        yield Text(f"CUDA registration failed: {overview['cuda']['error']}", "bold red")


def _pool(overview: dict[str, Any], width: int, rows: int) -> Iterator[Text]:
    from rich.text import Text

    sums = dict.fromkeys((state for state, _, _ in _STATES), 0)
    for namespace in overview["namespaces"]:
        for state in sums:
            sums[state] += namespace["blocks"].get(state, 0) * namespace["block_stride_bytes"]
    legend = Text()
    for state, words, color in _STATES:
        legend.append("■ ", color)
        legend.append(f"{words} ")
        legend.append(f"{_whole(human_bytes(sums[state]))}  ", "bold")
    yield legend
    each_rows = max(2, rows // max(1, len(overview["occupancy"])))
    for backing in overview["occupancy"]:
        yield Text.assemble(
            (f"{backing['namespace']} {backing['name'] or '(no name)'}", "bold"),
            (f"  {backing['num_blocks']} blocks", "dim"),
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
        yield _map(backing["shares"], width, each_rows)
    if not overview["occupancy"]:
        yield Text("No namespace has a backing yet.", "dim")


def _map(shares: list[int], width: int, rows: int) -> Text:
    """The cells, joined so that they fill `rows` lines of `width` at most."""
    from rich.text import Text

    num_cells = len(shares) // 3
    shown = min(num_cells, width * rows)
    text = Text()
    for index in range(shown):
        first = index * num_cells // shown
        last = max(first + 1, (index + 1) * num_cells // shown)
        sums = [
            sum(shares[3 * cell + which] for cell in range(first, last)) / (last - first)
            for which in range(3)
        ]
        reserved, published, pinned = sums
        free = 100 - min(100, reserved + published + pinned)
        shades = {"green": pinned, "blue": published, "yellow": reserved, "bright_black": free}
        color = max(shades, key=lambda name: shades[name])
        # What is being written is little and matters: it shows wherever it is a fifth of the cell.
        if reserved >= 20:
            color = "yellow"
        text.append("·" if color == "bright_black" else "■", color)
        if (index + 1) % width == 0 and index + 1 < shown:
            text.append("\n")
    return text


def _rates(overview: dict[str, Any]) -> Table:
    from rich.table import Table

    rates, series = overview["rates"], overview["history"]["series"]
    hits = [
        100 * hit / asked if asked else 0.0
        for hit, asked in zip(series["keys_hit"], series["keys_asked"], strict=True)
    ]
    reads = rates["rows_resident"] + rates["rows_hot"] + rates["rows_missed"]
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True, min_width=11)
    table.add_column(no_wrap=True)
    for words, value, values, color in (
        ("prefix hits", _percent(rates["keys_hit"], rates["keys_asked"]), hits, "green"),
        ("blocks asked", f"{rates['keys_asked']:,.0f}/s", series["keys_asked"], "green"),
        ("mirrored", f"{human_bytes(rates['published_bytes'])}/s", series["published_bytes"],
         "blue"),
        ("published", f"{rates['published']:,.0f}/s", series["published"], "blue"),
        ("evicted", f"{rates['evictions']:,.0f}/s", series["evictions"], "yellow"),
        ("refused", f"{rates['refusals']:,.1f}/s", series["refusals"], "red"),
        ("GPU misses", _percent(rates["rows_missed"], reads), series["rows_missed"], "yellow"),
        ("from host", f"{human_bytes(rates['bytes_gathered'])}/s", series["bytes_gathered"],
         "yellow"),
        ("requests", f"{rates['requests']:,.0f}/s", series["requests"], "cyan"),
    ):  # fmt: skip
        table.add_row(words, value, _spark(values, color))
    ping = overview["requests"].get("Ping")
    if ping:
        table.add_row("ping p99 ≤", f"{ping['p99_s'] * 1e3:.2f} ms", "")
    table.add_row("longest turn", f"{overview['longest_turn_s'] * 1e3:.1f} ms", "")
    return table


def _spark(values: list[float], color: str, count: int = 24) -> Text:
    from rich.text import Text

    shown = values[-count:]
    most = max(shown, default=0.0)
    if most <= 0:
        return Text(" " * len(shown))
    bars = (_BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] for value in shown)
    return Text("".join(bars), color)


def _table(
    columns: tuple[tuple[str, str], ...], rows: list[list[str]], shown: Sequence[int]
) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False, pad_edge=False)
    for index in shown:
        name, justify = columns[index]
        table.add_column(
            name, justify="right" if justify == "n" else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def _namespaces(overview: dict[str, Any], *, is_wide: bool) -> RenderableType:
    from rich.padding import Padding

    rows = []
    for each in overview["namespaces"]:
        blocks, statistics = each["blocks"], each["statistics"]
        rows.append(
            [
                str(each["namespace"]), each["name"][:40], f"{blocks.get('capacity', 0):,}",
                *(f"{blocks.get(state, 0):,}" for state, _, _ in _STATES),
                _percent(statistics["keys_hit"], statistics["keys_asked"]),
                f"{statistics['evictions']:,}", f"{each['usage']['leases']:,}",
                f"{sum(statistics['refusals'].values()):,}",
            ]
        )  # fmt: skip
    columns = (
        ("id", ""), ("namespace", ""), ("blocks", "n"), ("read", "n"), ("cached", "n"),
        ("written", "n"), ("free", "n"), ("hits", "n"), ("evicted", "n"), ("leases", "n"),
        ("refused", "n"),
    )  # fmt: skip
    shown = range(len(columns)) if is_wide else (0, 1, 2, 6, 7, 8, 10)
    return Padding(_table(columns, rows, shown), (1, 0, 0, 0))


def _sessions(sessions: list[dict[str, Any]], max_rows: int, *, is_wide: bool) -> RenderableType:
    from rich.padding import Padding

    # Those that hold most come first: they are what one looks for.
    ranked = sorted(
        sessions, key=lambda each: (-each["pins"] - each["reserved_blocks"], each["session"])
    )
    rows = [
        [
            str(each["session"]), each["name"][:28], (each["group"] or "-")[:20],
            "-" if each["kind"] == "operator" else f"{each['rank']}/{each['world_size']}",
            str(each["pid"]), "operator" if each["kind"] == "operator" else each["state"].lower(),
            f"{each['silent_s']:.1f} s", f"{each['reserved_blocks']:,}", f"{each['pins']:,}",
            f"{each['messages']:,}", f"{each['errors']:,}",
        ]
        for each in ranked[:max_rows]
    ]  # fmt: skip
    columns = (
        ("id", ""), ("session", ""), ("group", ""), ("rank", "n"), ("pid", "n"), ("state", ""),
        ("silent", "n"), ("writes", "n"), ("reads", "n"), ("messages", "n"), ("errors", "n"),
    )  # fmt: skip
    shown = range(len(columns)) if is_wide else (0, 2, 3, 5, 7, 8, 10)
    return Padding(_table(columns, rows, shown), (1, 0, 1, 0))


def _events(overview: dict[str, Any], count: int, width: int) -> Iterator[Text]:
    from rich.text import Text

    colors = {"warning": "yellow", "error": "red", "critical": "bold red"}
    for event in overview["events"][-count:]:
        text = Text(no_wrap=True, overflow="ellipsis", style=colors.get(event["level"], ""))
        text.append(f"{event['time'][11:19]} ", "dim")
        text.append(event["event"], "bold")
        text.append(f" {event['text']}"[: max(0, width)])
        yield text


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _whole(size: str) -> str:
    """132.0 MiB as 132 MiB: a line has to hold four of them."""
    number, unit = size.split(" ")
    return f"{float(number):.0f} {unit}"
