"""`hisparse-service doctor`: what keeps the daemon from starting, or a worker from attaching.

The checks are in `doctor_host.py` (the machine) and `doctor_service.py` (the daemon and a worker's
way to it). Each says what was found and, where it is not good, what to do. Nothing is changed but
by `--fix`, and by that only what is safe: permissions of our own directory, segments and sockets
that nobody owns.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from hisparse_service.cli.exit_codes import FAILED
from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    SetOption,
    flags_of,
)
from hisparse_service.cli.progress import progress_bar

if TYPE_CHECKING:
    from hisparse_service.cli.doctor_findings import Check, Finding
    from hisparse_service.config import Settings


class Subject(enum.StrEnum):
    """What to check alone."""

    VLLM = "vllm"


def doctor(
    subject: Annotated[
        Optional[Subject],  # noqa: UP045  typer reads the annotation at run time
        typer.Argument(help="vllm: only whether an engine of this Python would use the service"),
    ] = None,
    endpoint: Annotated[
        str,
        typer.Argument(help="What the engine is given", envvar="HISPARSE_SERVICE_ENDPOINT"),
    ] = "",
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Repair what can be repaired safely, and say so")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what starts processes or touches a GPU")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the daemon, one line each with a remedy. Exit code 1 when one is bad.

    Run it where the trouble is: in the worker's container it sees the worker's limits. `doctor
    vllm` runs in the environment of vLLM.
    """
    from hisparse_service.config import load_settings

    flags = flags_of(assignments, instance=instance, runtime_dir=runtime_dir)
    settings = load_settings(config_path=config, flags=flags).settings
    if subject is Subject.VLLM:
        from hisparse_service.cli.doctor_vllm import check_engine

        if instance or runtime_dir:
            endpoint = endpoint or str(settings.resolved_runtime_dir())
        _finish(check_engine(endpoint), as_json=as_json)
        return
    _finish(examine(settings, fix=fix, quick=quick), as_json=as_json)


def examine(settings: Settings, *, fix: bool = False, quick: bool = False) -> list[Finding]:
    """Run all checks; repair if asked."""
    import msgspec

    from hisparse_service.cli import doctor_host, doctor_service

    machine = settings
    roots = doctor_host.Roots()
    running = doctor_service.running_pool(settings)
    if running is not None and running["bytes"]:
        # Its pool is what counts here, not the size in the settings of this command.
        pool = msgspec.structs.replace(settings.pool, bytes=running["bytes"])
        machine = msgspec.structs.replace(settings, pool=pool)
        roots = dataclasses.replace(
            roots, reserved_bytes=int(running["bytes"] * running["progress"])
        )
    checks: list[Check] = [
        *doctor_host.checks(machine, roots), *doctor_service.checks(settings, quick=quick)
    ]  # fmt: skip
    if not quick:
        checks += doctor_host.slow_checks(settings)
    findings: list[Finding] = []
    with progress_bar("Checking", total=len(checks)) as move:
        for number, check in enumerate(checks):
            move(number, check.name)
            findings += check.run(fix=fix)
    return findings


def _finish(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([finding.as_row() for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.is_bad for finding in findings):
        raise typer.Exit(FAILED)


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        line = f"{finding.verdict.value:<8}{finding.check:<{width}}  {finding.found}"
        print(f"{line}. {finding.remedy}" if finding.remedy else line)
    counts = {
        verdict: sum(finding.verdict is verdict for finding in findings)
        for verdict in dict.fromkeys(finding.verdict for finding in findings)
    }
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
