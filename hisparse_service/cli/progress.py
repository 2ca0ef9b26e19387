"""A bar for work that takes long: on standard error, on a terminal, gone when it is done."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Move = Callable[[float, str], None]
"""(done, words) -> None"""


@contextlib.contextmanager
def progress_bar(title: str, *, total: float | None) -> Iterator[Move]:
    """Yields what moves the bar; it does nothing where standard error is no terminal.

    Args:
        title: What is being done.
        total: What done will be at the end; None: not known.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _words: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
        TextColumn("{task.fields[words]}"), TimeElapsedColumn(), console=Console(stderr=True),
        transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task(title, total=total, words="")
        yield lambda done, words: bar.update(task, completed=done, words=words)
