"""`hisparse-service serve`: run the daemon in the foreground. The options as typer reads them."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    RuntimeDirOption,
    SetOption,
    flags_of,
)
from hisparse_service.cli.serve_start import ServeOptions, run


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
    flags = flags_of(assignments)
    named = {
        "instance": instance, "runtime_dir": runtime_dir, "pool.bytes": pool_bytes,
        "log.format": log_format, "log.level": log_level,
    }  # fmt: skip
    flags.update({name: value for name, value in named.items() if value is not None})
    run(ServeOptions(config=config, flags=flags, ready_fd=ready_fd, standby_s=standby_s))
