"""`serve`, from its options on: settings, then the pool's pages, and only then everything else.

A start waits for the pages, so their reservation begins before typer, logs, sockets or NumPy are
imported. `quick_options` reads a plain `serve` command line; whatever it does not know (a mistake,
`--help`, an abbreviation) is left to typer in `serve.py`, which has the same options (a test
compares them).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from hisparse_service.config import LoadedSettings
    from hisparse_service.pool.pool import Pool
    from hisparse_service.pool.populate import Progress

_LOG_INTERVAL_S: Final = 2.0
_Number = TypeVar("_Number", int, float)

SETTING_OPTIONS: Final = {
    "--instance": "instance",
    "--runtime-dir": "runtime_dir",
    "--pool-bytes": "pool.bytes",
    "--log-format": "log.format",
    "--log-level": "log.level",
}
"""Option to the setting that it sets."""


@dataclass(kw_only=True)
class ServeOptions:
    """What the command line says."""

    config: str | None = None
    flags: dict[str, object] = field(default_factory=dict)
    """Settings by dotted name."""
    ready_fd: int = -1
    """Gets a line when ready; -1: none."""
    standby_s: float = 0.0
    """How long to wait for a running daemon to end; 0: it is an error."""


def quick_options(words: Sequence[str]) -> ServeOptions | None:
    """The options of `serve`, or None where typer must read (or refuse) them.

    Args:
        words: What follows `serve`: `--name value` or `--name=value`, each as `serve.py` has it.
    """
    options, assigned = ServeOptions(), dict[str, object]()
    rest = iter(words)
    for word in rest:
        name, joined, value = word.partition("=")
        if not joined:
            value = next(rest, "--")
        if value.startswith("--"):
            return None
        try:
            _take(name, value, options, assigned)
        except (KeyError, ValueError):
            return None
    # The named options win over --set, wherever they stand, as in `serve.py`.
    options.flags = {**assigned, **options.flags}
    return options


def _take(name: str, value: str, options: ServeOptions, assigned: dict[str, object]) -> None:
    """One option. Raises KeyError or ValueError for what typer must see."""
    if name == "--config":
        options.config = value
    elif name == "--ready-fd":
        options.ready_fd = _at_least(int(value), -1)
    elif name == "--standby":
        options.standby_s = _at_least(float(value), 0.0)
    elif name == "--set":
        setting, separator, text = value.partition("=")
        if not separator:
            raise ValueError(value)
        assigned[setting.strip()] = text.strip()
    else:
        options.flags[SETTING_OPTIONS[name]] = value


def _at_least(value: _Number, least: _Number) -> _Number:
    if not value >= least:
        raise ValueError(value)
    return value


def run(options: ServeOptions) -> None:
    """Run the daemon until it is stopped.

    Raises:
        HiSparseError: See `Daemon.run`.
    """
    from hisparse_service.config import load_settings
    from hisparse_service.testing.faults import arm_from_environment

    loaded = load_settings(config_path=options.config, flags=options.flags)
    arm_from_environment()
    if options.standby_s > 0:
        # The predecessor serves until it ends: whatever can be done before its end is.
        _run_daemon(loaded, options, None)
        return
    from hisparse_service.start import begin

    with begin(loaded.settings) as begun:
        _run_daemon(loaded, options, begun)


def _run_daemon(loaded: LoadedSettings, options: ServeOptions, begun: Any) -> None:
    from hisparse_service.daemon import Daemon
    from hisparse_service.telemetry.logs import configure_logs

    settings = loaded.settings
    configure_logs(
        format=settings.log.format,
        level=settings.log.level,
        events_per_second=settings.log.events_per_second,
    )
    listener = (
        ProgressBar() if settings.log.format == "console" and sys.stderr.isatty() else ProgressLog()
    )
    Daemon(
        settings, listener=listener, ready_fd=options.ready_fd, standby_s=options.standby_s,
        begun=begun, config_path=loaded.path, flags=_lasting(options.flags),
    ).run()  # fmt: skip


def _lasting(flags: Mapping[str, object]) -> dict[str, str]:
    """The flags as text that means the same in another directory."""
    texts = {name: str(value) for name, value in flags.items()}
    for name in ("runtime_dir", "http.token_file"):
        if texts.get(name):
            texts[name] = os.path.abspath(texts[name])
    return texts


class ProgressLog:
    """Log lines while the pool is populated."""

    def __init__(self) -> None:
        from hisparse_service.telemetry.logs import get_logger

        self._log = get_logger()
        self._next_s = time.monotonic() + _LOG_INTERVAL_S

    def on_progress(self, progress: Progress) -> None:
        """At most one line every _LOG_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _LOG_INTERVAL_S
            self._log.info(
                "populating", done_bytes=progress.done_bytes, total_bytes=progress.total_bytes,
                bytes_per_s=int(progress.bytes_per_s),
            )  # fmt: skip

    def on_ready(self, endpoint: str, pool: Pool) -> None:
        """The daemon logs that itself."""


class ProgressBar:
    """A bar on the terminal. rich is imported when the first page is reserved, not before."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def on_progress(self, progress: Progress) -> None:
        """Move the bar. Helper thread."""
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import (
                Progress as Bar,
            )

            self._bar = Bar(
                TextColumn("Reserving the pool"), BarColumn(), DownloadColumn(binary_units=True),
                TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
                transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("", total=progress.total_bytes)
        self._bar.update(self._task, completed=progress.done_bytes)
        if progress.done_bytes >= progress.total_bytes:
            self._bar.stop()

    def on_ready(self, endpoint: str, pool: Pool) -> None:  # noqa: ARG002
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
