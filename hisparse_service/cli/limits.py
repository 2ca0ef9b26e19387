"""`hisparse-service limits show|set`: quotas of a running daemon."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from hisparse_service.cli.operations import connect
from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    TimeoutOption,
)

app = typer.Typer(
    help="Show or change the quotas of a running daemon.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip

LimitOption = Annotated[
    Optional[int],  # noqa: UP045  typer reads the annotation at run time
    typer.Option(min=0, help="0: no limit"),
]
CeilingOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=0, help="0: as many as the protocol allows"),
]


@app.command()
def show(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Print the limits in force."""
    _ask({}, config, instance, runtime_dir, timeout_s, as_json=as_json)


@app.command("set")
def set_(
    max_reserved_blocks_per_session: LimitOption = None,
    max_pins_per_session: LimitOption = None,
    max_leases_per_session: CeilingOption = None,
    max_reserved_blocks_per_namespace: LimitOption = None,
    max_pins_per_namespace: LimitOption = None,
    max_sessions: CeilingOption = None,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Change limits until the daemon ends; what is held already stays. Print those in force.

    To keep them, write them into the settings, section limits.
    """
    asked = {
        "max_reserved_blocks_per_session": max_reserved_blocks_per_session,
        "max_pins_per_session": max_pins_per_session,
        "max_leases_per_session": max_leases_per_session,
        "max_reserved_blocks_per_namespace": max_reserved_blocks_per_namespace,
        "max_pins_per_namespace": max_pins_per_namespace,
        "max_sessions": max_sessions,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    if not given:
        raise typer.BadParameter("name at least one limit; `limits show` prints those in force")
    _ask(given, config, instance, runtime_dir, timeout_s, as_json=as_json)


def _ask(
    given: dict[str, int],
    config: str | None,
    instance: str | None,
    runtime_dir: str | None,
    timeout_s: float,
    *,
    as_json: bool,
) -> None:
    from hisparse_service.contract import messages as m

    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        found = daemon.ask(m.LimitsReply, m.SetLimits(daemon.next_id(), **given)).limits
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:<36}{value or 'none'}")
