"""Options that several sub-commands share. Type aliases only."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

ConfigOption = Annotated[
    Optional[str],  # noqa: UP045  typer reads the annotation at run time
    typer.Option("--config", help="TOML file with settings (also HISPARSE_CONFIG)"),
]
InstanceOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--instance", help="Instance name (setting instance)"),
]
RuntimeDirOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--runtime-dir", help="Directory of the sockets (setting runtime_dir)"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait for the daemon's answer", min=0.01)
]
SetOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", help="Any setting, as section.name=value; may be repeated"),
]


def flags_of(assignments: list[str] | None, **named: object) -> dict[str, object]:
    """Flags as `config.load_settings` takes them; `pool_bytes` stands for pool.bytes.

    Raises:
        typer.BadParameter: An assignment without "=".
    """
    flags: dict[str, object] = {}
    for assignment in assignments or []:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise typer.BadParameter(f"{assignment!r} is not section.name=value")
        flags[name.strip()] = value.strip()
    flags.update({name: value for name, value in named.items() if value is not None})
    return flags
