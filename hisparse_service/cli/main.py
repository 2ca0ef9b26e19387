"""The command `hisparse-service`: one module a sub-command, heavy imports inside the commands.

Exit codes are in `exit_codes.py`. Errors of the tree are one clear message on standard error.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import hisparse_service
from hisparse_service.cli import (
    bench,
    config_command,
    doctor,
    handover,
    limits,
    operations,
    plan,
    purge,
    serve,
    top,
    trace,
)
from hisparse_service.cli.exit_codes import exit_code_of
from hisparse_service.contract.errors import HiSparseError

app = typer.Typer(
    name="hisparse-service",
    help="A node-wide host KV-cache pool for sparse attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        print(hisparse_service.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    """A node-wide host KV-cache pool for sparse attention."""


app.command("serve")(serve.serve)
app.add_typer(config_command.app, name="config")
app.command("status")(operations.status)
app.command("top")(top.top)
app.command("sessions")(operations.sessions)
app.command("blocks")(operations.blocks)
app.command("evict")(operations.evict)
app.command("release-device")(operations.release_device)
app.command("drain")(operations.drain)
app.add_typer(limits.app, name="limits")
app.add_typer(trace.app, name="trace")
app.command("purge")(purge.purge)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("handover")(handover.handover)

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("demo", context_settings=_PASS_THROUGH, add_help_option=False)
def _demo(context: typer.Context) -> None:
    """Decode real text through the service and check every token."""
    from importlib import import_module

    raise typer.Exit(import_module("hisparse_service.cli.demo").main(context.args))


def main() -> None:
    """Run the command line; ends the process."""
    try:
        app(prog_name="hisparse-service")
    except HiSparseError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
