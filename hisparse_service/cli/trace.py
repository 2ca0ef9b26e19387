"""`hisparse-service trace record|replay`: control messages into a file, and from it to a daemon."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from hisparse_service.cli.exit_codes import FAILED
from hisparse_service.cli.operations import connect, human_bytes, print_table
from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    TimeoutOption,
    flags_of,
)
from hisparse_service.cli.progress import progress_bar

if TYPE_CHECKING:
    from hisparse_service.cli.connection import OperatorConnection
    from hisparse_service.contract import messages as m

app = typer.Typer(
    help="Record control messages, and replay them against a daemon.", no_args_is_help=True,
    rich_markup_mode=None,
)  # fmt: skip

_LOOK_INTERVAL_S = 0.1
_END_WAIT_S = 10.0


@app.command()
def record(
    output: Annotated[
        Optional[Path],  # noqa: UP045  typer reads the annotation at run time
        typer.Option("--output", "-o", help="Where the file goes; left out: it stays where it is"),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long", min=0)] = 30.0,
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", help='Where it ends earlier, such as "64MiB"')
    ] = "64MiB",
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Have the daemon record every control message and its reply. Ctrl-C ends it early.

    The file holds block keys and the names that clients gave, no tokens and no payload.
    """
    from hisparse_service.config import parse_bytes
    from hisparse_service.contract import messages as m

    limit = parse_bytes(max_bytes)
    if output is not None and output.exists():
        raise typer.BadParameter(f"{output} exists already")
    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        daemon.ask(m.TraceReply, m.Trace(daemon.next_id(), "start", seconds, limit))
        with contextlib.suppress(KeyboardInterrupt):
            _follow(daemon, seconds)
        found = _end(daemon)
    path = Path(found.path)
    if output is not None and not found.error:
        shutil.move(path, output)
        path = output
    result = {
        "path": str(path), "messages": found.messages, "bytes": found.recorded_bytes,
        "dropped": found.dropped, "error": found.error,
    }  # fmt: skip
    if as_json:
        print(json.dumps(result))
    elif found.error:
        print(f"the recording failed: {found.error}")
    else:
        print(
            f"{found.messages} messages, {human_bytes(found.recorded_bytes)}, in {path}"
            + (f"; {found.dropped} came too fast and are missing" if found.dropped else "")
        )
    if found.error:
        raise typer.Exit(FAILED)


def _follow(daemon: OperatorConnection, seconds: float) -> None:
    from hisparse_service.contract import messages as m

    began_s = time.monotonic()
    with progress_bar("Recording", total=seconds) as move:
        while True:
            found = daemon.ask(m.TraceReply, m.Trace(daemon.next_id(), "look"))
            elapsed_s = time.monotonic() - began_s
            move(min(seconds, elapsed_s), f"{found.messages} messages")
            if not found.is_recording or elapsed_s >= seconds:
                return
            time.sleep(min(_LOOK_INTERVAL_S, max(0.01, seconds - elapsed_s)))


def _end(daemon: OperatorConnection) -> m.TraceReply:
    from hisparse_service.contract import messages as m

    deadline_s = time.monotonic() + _END_WAIT_S
    found = daemon.ask(m.TraceReply, m.Trace(daemon.next_id(), "stop"))
    while found.is_recording and time.monotonic() < deadline_s:
        time.sleep(0.02)
        found = daemon.ask(m.TraceReply, m.Trace(daemon.next_id(), "look"))
    return found


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="What `trace record` wrote")],
    speed: Annotated[
        float, typer.Option("--speed", help="1: as recorded; 0: as fast as answers come", min=0)
    ] = 0.0,
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    timeout_s: TimeoutOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Send a recording's messages to a daemon and compare the answers.

    Its namespaces are opened under other fingerprints, so that no engine ever finds blocks of a
    replay; their backings take room in the pool all the same: use a daemon of its own. Exit code 1
    when answers are of another kind than recorded.
    """
    from hisparse_service.cli.replay import Replayer
    from hisparse_service.config import load_settings
    from hisparse_service.telemetry.trace_file import TraceReader

    settings = load_settings(
        config_path=config, flags=flags_of(None, instance=instance, runtime_dir=runtime_dir)
    ).settings
    with (
        TraceReader(file) as reader,
        Replayer(settings.resolved_runtime_dir(), reader.header, timeout_s=timeout_s) as replayer,
        progress_bar("Replaying", total=None) as move,
    ):
        replayer.prepare()
        for number, recorded in enumerate(reader, 1):
            replayer.play(recorded, speed=speed)
            if number % 64 == 0:
                move(number, f"{number} messages")
        report = replayer.report()
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    if report["differences"]:
        raise typer.Exit(FAILED)


def _print_report(report: dict[str, Any]) -> None:
    print(
        f"{report['sent']} messages sent in {report['seconds']:.2f} s, {report['skipped']} left out"
    )
    rows = [
        {
            "request": name, "count": each["count"],
            "recorded p50 us": each["recorded_p50_us"], "p50 us": each["p50_us"],
            "recorded p99 us": each["recorded_p99_us"], "p99 us": each["p99_us"],
        }
        for name, each in report["requests"].items()
    ]  # fmt: skip
    if rows:
        print_table(rows, list(rows[0]))
    for each in report["differences"]:
        print(
            f"{each['count']} x {each['request']}: recorded {each['recorded']}, now {each['now']}"
        )
