"""`status`, `sessions`, `blocks`, `evict`, `drain`: what an operator asks of a running daemon."""

from __future__ import annotations

import json
import mmap
import time
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from hisparse_service.cli.exit_codes import CAPACITY, FAILED
from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    TimeoutOption,
    flags_of,
)
from hisparse_service.contract.sizes import size_text

if TYPE_CHECKING:
    from hisparse_service.cli.connection import OperatorConnection

NamespaceOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--namespace", help="Id of the namespace; may be left out where there is one"),
]

RatesOption = Annotated[
    bool,
    typer.Option("--rates", help="Also what happens a second; the daemon takes up to 2 s for it"),
]


def connect(
    config: str | None, instance: str | None, runtime_dir: str | None, timeout_s: float
) -> OperatorConnection:
    """Connect to the daemon that the settings name."""
    from hisparse_service.cli.connection import OperatorConnection
    from hisparse_service.config import load_settings

    settings = load_settings(
        config_path=config, flags=flags_of(None, instance=instance, runtime_dir=runtime_dir)
    ).settings
    return OperatorConnection(settings.resolved_runtime_dir(), timeout_s=timeout_s)


def human_bytes(count: float) -> str:
    """8589934592 as "8.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Plain columns: greppable, and no library for them."""
    cells = [columns] + [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def status(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    timeout_s: TimeoutOption = 5.0,
    rates: RatesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the pool, the namespaces and the sessions. Exit code 4 while it is not ready."""
    from hisparse_service.contract import messages as m

    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        found = daemon.ask(m.StatusReply, m.Status(daemon.next_id())).status
        if rates:
            from hisparse_service.cli.top import first_overview

            found["rates"] = first_overview(daemon, timeout_s)["rates"]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print_status(found)
    if found["phase"] != "ready":
        raise typer.Exit(CAPACITY)


def _print_status(found: dict[str, Any]) -> None:
    print(
        f"instance {found['instance']}  version {found['version']}  {found['phase']}"
        f"  up {found['uptime_s']:.0f} s  epoch {_epoch_text(found['epoch'])}"
    )
    if "pid" in found:  # an older daemon does not say
        print(f"pid {found['pid']}  runtime directory {found['runtime_dir']}")
    pool, sessions = found["pool"], found["sessions"]
    if pool:
        print(
            f"pool {pool['segment']}  {human_bytes(pool['bytes'])}, "
            f"{human_bytes(pool['free_bytes'])} not given out"
            f"{_adopted_text(found)}"
        )
    else:
        print(f"pool being populated: {found['progress']:.0%}")
    print(f"sessions {sessions['workers']} workers, {sessions['operators']} operators")
    if "rates" in found:
        shown = {name: value for name, value in found["rates"].items() if value}
        print("a second: " + (", ".join(f"{k} {v:g}" for k, v in shown.items()) or "nothing"))
    rows = []
    for namespace in found["namespaces"]:
        statistics, blocks = namespace["statistics"], namespace["blocks"]
        asked = statistics["keys_asked"]
        rows.append(
            {
                "id": namespace["namespace"], "name": namespace["name"],
                "blocks": blocks.get("capacity", 0), "free": blocks.get("free", 0),
                "reserved": blocks.get("reserved", 0), "published": blocks.get("published", 0),
                "pinned": blocks.get("pinned", 0), "evictions": statistics["evictions"],
                "hit": f"{statistics['keys_hit'] / asked:.0%}" if asked else "-",
            }
        )  # fmt: skip
    if rows:
        print_table(rows, list(rows[0]))
    for namespace in found["namespaces"]:
        withdrawn = namespace["statistics"].get("withdrawn", 0)  # an older daemon has none
        if withdrawn:
            print(
                f"namespace {namespace['namespace']}: {withdrawn} published blocks were withdrawn "
                f"because of damage, {namespace['withdrawn']} of them are still read"
            )
    _print_devices(found["device"])


def _adopted_text(found: dict[str, Any]) -> str:
    """Whether the pool is an earlier daemon's, and what its size should be where that differs."""
    if not found["pool"]["adopted"]:
        return ""
    has_bytes, set_bytes = found["pool"]["bytes"], found.get("pool_bytes", 0)
    # An older daemon tells no size; a pool has whole pages.
    if not set_bytes or 0 <= has_bytes - set_bytes < mmap.PAGESIZE:
        return "  (adopted)"
    return (
        f"  (adopted with {size_text(has_bytes)}; pool.bytes is {size_text(set_bytes)}: "
        "docs/upgrade.md says how to resize)"
    )


def _epoch_text(epoch: int | str) -> str:
    """As the log has it; an older daemon gives the number."""
    return epoch if isinstance(epoch, str) else f"{epoch:016x}"


def _print_devices(device: dict[str, Any]) -> None:
    for each in device["devices"]:
        print(
            f"device {each['device_uuid']}  {human_bytes(each['used_bytes'])} of "
            f"{human_bytes(device['limit_bytes'])} allocated for workers, context "
            f"{human_bytes(each['context_bytes'])}, child {each['child']}"
        )
        rows = [
            {
                **backing, "size": human_bytes(backing["bytes"]),
                "holder": backing["holder_session"] or "-", "pid": backing["holder_pid"],
            }
            for backing in each["backings"]
        ]  # fmt: skip
        if rows:
            print_table(
                rows,
                ["backing", "namespace", "group", "rank", "name", "size", "state", "holder", "pid",
                 "age_s", "idle_s"],
            )  # fmt: skip


def release_device(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    namespace: NamespaceOption = None,
    device_uuid: Annotated[
        str, typer.Option("--device", help="UUID of a GPU; all of them when left out")
    ] = "",
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Give back the namespace's device memory that no process holds, before its lease ends."""
    from hisparse_service.contract import messages as m

    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        namespace_id = _namespace(daemon, namespace)
        count = daemon.ask(
            m.CountReply,
            m.ReleaseDeviceBacking(daemon.next_id(), namespace_id, "", device_uuid, "give_back"),
        ).count
    print(json.dumps({"released": count}) if as_json else f"released {count} device backings")


def sessions(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """List the connected sessions."""
    from hisparse_service.contract import messages as m

    rows: list[dict[str, Any]] = []
    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        while True:
            page = daemon.ask(m.ListReply, m.Sessions(daemon.next_id(), offset=len(rows)))
            rows += page.rows
            if not page.rows or len(rows) >= page.total:
                break
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(
        rows,
        ["session", "kind", "state", "name", "group", "rank", "uid", "pid", "age_s", "silent_s",
         "leases", "pins", "reserved_blocks", "messages", "errors", "malformed"],
    )  # fmt: skip


def blocks(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    namespace: NamespaceOption = None,
    state: Annotated[
        str, typer.Option("--state", help="Only this state; all but free when left out")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", help="At most so many rows", min=1)] = 1000,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """List the blocks of a namespace."""
    from hisparse_service.contract import messages as m

    rows: list[dict[str, Any]] = []
    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        namespace_id = _namespace(daemon, namespace)
        start = 0
        while len(rows) < limit:
            page = daemon.ask(
                m.ListReply, m.ListBlocks(daemon.next_id(), namespace_id, state, start)
            )
            rows += page.rows
            if not page.rows:
                break
            start = page.rows[-1]["block"] + 1
    del rows[limit:]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print_table(
        rows,
        ["block", "generation", "state", "readers", "children", "depth", "last_use", "lease_id"],
    )


def evict(
    num_blocks: Annotated[int, typer.Argument(help="At most so many", min=1)],
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    namespace: NamespaceOption = None,
    timeout_s: TimeoutOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Evict the least recently used blocks that nobody reads."""
    from hisparse_service.contract import messages as m

    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        namespace_id = _namespace(daemon, namespace)
        count = daemon.ask(m.CountReply, m.Evict(daemon.next_id(), namespace_id, num_blocks)).count
    print(json.dumps({"evicted": count}) if as_json else f"evicted {count} blocks")


def drain(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the daemon when the workers are gone")
    ] = False,
    drain_timeout_s: Annotated[
        float, typer.Option("--within", help="Seconds until it ends all the same", min=0)
    ] = 30.0,
    timeout_s: TimeoutOption = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Take no new session and give out nothing new. With --stop, wait until the daemon ended."""
    from hisparse_service.contract import messages as m

    with connect(config, instance, runtime_dir, timeout_s) as daemon:
        daemon.ask(m.Done, m.Drain(daemon.next_id(), stop, drain_timeout_s))
        has_ended = False
        deadline_s = time.monotonic() + drain_timeout_s + timeout_s
        while stop and not has_ended and time.monotonic() < deadline_s:
            has_ended = not daemon.is_answering()
            if not has_ended:
                time.sleep(0.05)
    if stop and not has_ended:
        print(json.dumps({"ended": False}) if as_json else "the daemon did not end in time")
        raise typer.Exit(FAILED)
    if as_json:
        print(json.dumps({"draining": True, "ended": has_ended}))
    else:
        print("the daemon ended" if has_ended else "draining")


def _namespace(daemon: OperatorConnection, wanted: int | None) -> int:
    from hisparse_service.contract import messages as m
    from hisparse_service.contract.errors import UsageError

    if wanted is not None:
        return wanted
    found = daemon.ask(m.StatusReply, m.Status(daemon.next_id())).status["namespaces"]
    if len(found) != 1:
        raise UsageError(
            f"there are {len(found)} namespaces",
            remedy="Name one with --namespace: `hisparse-service status` lists them",
        )
    return int(found[0]["namespace"])
