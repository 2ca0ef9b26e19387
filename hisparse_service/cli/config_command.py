"""`hisparse-service config show|check`: the effective settings, and where each came from."""

from __future__ import annotations

import json

import typer

from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    SetOption,
    flags_of,
)

app = typer.Typer(help="Show or check the settings.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print each setting, its value and where it came from."""
    from hisparse_service.config import flatten, load_settings

    loaded = load_settings(
        config_path=config, flags=flags_of(assignments, instance=instance, runtime_dir=runtime_dir)
    )
    values = flatten(loaded.settings)
    if as_json:
        rows = {
            name: {"value": value, "origin": loaded.origins[name]} for name, value in values.items()
        }
        print(json.dumps(rows, indent=2))
        return
    shown = {name: json.dumps(value) for name, value in values.items()}
    if not loaded.settings.runtime_dir:
        shown["runtime_dir"] = f'"{loaded.settings.resolved_runtime_dir()}"'
    name_width, value_width = max(map(len, shown)), max(map(len, shown.values()))
    for name, value in shown.items():
        print(f"{name:<{name_width}}  {value:<{value_width}}  {loaded.origins[name]}")


@app.command()
def check(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the settings as a whole; changes nothing. Exit code 3 when they cannot work."""
    from hisparse_service.config import load_settings
    from hisparse_service.server.runtime_directory import check_path_length
    from hisparse_service.start import pool_settings

    settings = load_settings(
        config_path=config, flags=flags_of(assignments, instance=instance, runtime_dir=runtime_dir)
    ).settings
    pool_settings(settings)
    directory = settings.resolved_runtime_dir()
    check_path_length(directory)
    print(json.dumps({"ok": True, "runtime_dir": str(directory)}) if as_json else "ok")
