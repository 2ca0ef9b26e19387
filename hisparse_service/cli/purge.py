"""`hisparse-service purge`: release what no live process owns, and say what was found."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hisparse_service.cli.exit_codes import SEGMENT
from hisparse_service.cli.options import ConfigOption, InstanceOption, JsonOption, flags_of


def purge(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what is there; remove nothing")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the instance's segments that no live process owns or uses.

    Exit code 6 when there is one that this user could not look at.
    """
    from hisparse_service.cli.operations import human_bytes, print_table
    from hisparse_service.config import load_settings
    from hisparse_service.pool.purge import PurgeMode, Verdict
    from hisparse_service.pool.purge import purge as purge_pool

    settings = load_settings(config_path=config, flags=flags_of(None, instance=instance)).settings
    found = purge_pool(settings.instance, mode=PurgeMode.REPORT if dry_run else PurgeMode.REMOVE)
    rows = [
        {
            "segment": each.name, "bytes": each.size_bytes, "verdict": each.verdict.value,
            "reason": each.reason,
        }
        for each in found
    ]  # fmt: skip
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print_table(
            [{**row, "size": human_bytes(int(str(row["bytes"])))} for row in rows],
            ["segment", "size", "verdict", "reason"],
        )
    else:
        print(f"no segments of instance {settings.instance}")
    if any(each.verdict is Verdict.UNSEEN for each in found):
        raise typer.Exit(SEGMENT)
