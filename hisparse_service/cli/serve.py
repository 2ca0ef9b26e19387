"""`hisparse-service serve`: run the daemon in the foreground."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    RuntimeDirOption,
    SetOption,
    flags_of,
)

if TYPE_CHECKING:
    from hisparse_service.daemon import Listener
    from hisparse_service.pool.pool import Pool
    from hisparse_service.pool.populate import Progress

_LOG_INTERVAL_S: Final = 2.0


def serve(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    pool_bytes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--pool-bytes", help='Size of the pool, such as "8GiB"'),
    ] = None,
    log_format: Annotated[
        Optional[str], typer.Option("--log-format", help="console or json")  # noqa: UP045
    ] = None,
    log_level: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--log-level", help="debug, info, warning or error"),
    ] = None,
    assignments: SetOption = None,
    ready_fd: Annotated[
        int, typer.Option("--ready-fd", help="Descriptor that gets a line when ready", min=-1)
    ] = -1,
    standby_s: Annotated[
        float,
        typer.Option("--standby", help="Seconds to wait for a running daemon to end", min=0),
    ] = 0.0,
) -> None:
    """Own the pool and serve workers until SIGTERM."""
    from hisparse_service.config import load_settings
    from hisparse_service.telemetry.logs import configure_logs

    flags = flags_of(assignments)
    named = {
        "instance": instance, "runtime_dir": runtime_dir, "pool.bytes": pool_bytes,
        "log.format": log_format, "log.level": log_level,
    }  # fmt: skip
    flags.update({name: value for name, value in named.items() if value is not None})
    settings = load_settings(config_path=config, flags=flags).settings
    configure_logs(
        format=settings.log.format,
        level=settings.log.level,
        events_per_second=settings.log.events_per_second,
    )
    from hisparse_service.daemon import Daemon
    from hisparse_service.testing.faults import arm_from_environment

    arm_from_environment()
    listener: Listener = (
        ProgressBar() if settings.log.format == "console" and sys.stderr.isatty() else ProgressLog()
    )
    Daemon(settings, listener=listener, ready_fd=ready_fd, standby_s=standby_s).run()


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
