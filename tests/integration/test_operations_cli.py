"""limits, top, trace, bench and completion of the installed command, against real daemons."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from helpers import KEY_SPACE, DaemonProcess, RawClient, keys_of, wait_until
from rich.console import Console

from hisparse_service.cli.replay import Replayer
from hisparse_service.cli.top import render
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import CapacityError, QuotaExceeded, UsageError
from hisparse_service.telemetry.trace_file import TraceReader

MakeDaemon = Callable[..., DaemonProcess]
Connect = Callable[..., RawClient]
TIMEOUT_S = 100.0


def run(*arguments: str, expect: int = 0, **environment: str) -> str:
    """Run the command; its standard output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "hisparse_service", *arguments], capture_output=True, text=True,
        env=kept | environment, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == expect, (ran.returncode, ran.stdout, ran.stderr)
    return ran.stdout


def where(daemon: DaemonProcess) -> tuple[str, str]:
    return "--runtime-dir", str(daemon.runtime_dir)


# --- limits -------------------------------------------------------------------------------------


def test_quotas_set_at_run_time_hold_for_who_is_connected(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect()
    namespace = client.open(64)
    client.ask(m.BlocksReply, m.Reserve, namespace, 0, 10)
    found = json.loads(
        run("limits", "set", "--max-reserved-blocks-per-session", "10", "--json", *where(daemon))
    )
    assert found["max_reserved_blocks_per_session"] == 10
    with pytest.raises(QuotaExceeded):
        client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    run("limits", "set", "--max-reserved-blocks-per-session", "0", *where(daemon))
    client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    client.publish(namespace, keys_of(1, 2, 3))
    run("limits", "set", "--max-pins-per-namespace", "3", *where(daemon))
    with pytest.raises(QuotaExceeded):
        client.publish(namespace, keys_of(7))
    assert "max_pins_per_namespace              3" in run("limits", "show", *where(daemon))


def test_the_number_of_sessions_can_be_limited_and_who_is_connected_stays(
    daemon: DaemonProcess, connect: Connect
) -> None:
    first = connect()
    first.ask(m.LimitsReply, m.SetLimits, -1, -1, -1, -1, -1, 1)
    with pytest.raises(QuotaExceeded):
        connect()
    first.ask(m.Pong, m.Ping)
    limits = first.ask(m.LimitsReply, m.SetLimits, -1, -1, -1, -1, -1, 0).limits
    assert limits["max_sessions"] == 256
    connect()


def test_limits_that_cannot_be_are_refused_as_a_whole(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect()
    before = client.ask(m.LimitsReply, m.SetLimits).limits
    with pytest.raises(UsageError):
        client.ask(m.LimitsReply, m.SetLimits, 5, 5, -1, -1, -1, 100_000)
    assert client.ask(m.LimitsReply, m.SetLimits).limits == before
    run("limits", "set", *where(daemon), expect=2)


# --- top ----------------------------------------------------------------------------------------


def test_top_shows_cells_rates_sessions_and_events(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(group="engine-a")
    namespace = client.open(64)
    client.ask(m.LeaseReply, m.TakeWriter, namespace)
    client.publish(namespace, keys_of(*range(1, 20)))
    overview: dict[str, Any] = json.loads(run("top", "--json", *where(daemon)))
    assert {row["group"] for row in overview["session_rows"]} == {"engine-a", ""}
    for width in (60, 120):
        console = Console(file=io.StringIO(), width=width, force_terminal=True)
        console.print(render(overview, width=width, height=40))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "\x1b[32m■" in shown  # pinned blocks
        for text in ("ready", "prefix hits", "evicted", "engine-a", "session_opened"):
            assert text in shown
    assert "prefix hits" in run("top", "--once", *where(daemon), COLUMNS="120")


def test_top_shows_problems_first() -> None:
    overview = json.loads((Path(__file__).parent / "overview.json").read_text())
    overview["rates"]["refusals"] = 3.0
    overview["longest_turn_s"] = 0.5
    overview["helpers"]["http"] = {
        "alive": False, "permanent": True, "restarts": 1, "last_error": "OSError()",
    }  # fmt: skip
    overview["cuda"] = {"state": "failed", "error": "no device"}
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render(overview, width=120))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "3.0 requests a second are refused" in lines[1]
    assert "busy for 0.50 s" in lines[2]
    assert "The thread http is dead: OSError()" in lines[3]
    assert "CUDA registration failed: no device" in lines[4]


def test_top_lives_in_a_terminal_until_q(daemon: DaemonProcess) -> None:
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hisparse_service", "top", "--interval", "0.2", *where(daemon)],
        stdin=child, stdout=child, stderr=child, env=os.environ | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(child)
    seen = b""
    try:

        def draws(count: int) -> bool:
            nonlocal seen
            if select.select([parent], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the command has ended
                    seen += os.read(parent, 65_536)
            return seen.count(b"prefix hits") >= count

        wait_until(lambda: draws(3), what="three pictures")
        assert b"\x1b[?1049h" in seen  # the alternate screen
        os.write(parent, b"q")
        end_s = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < end_s:
            draws(0)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)


# --- trace --------------------------------------------------------------------------------------


def work(client: RawClient, namespace: int) -> None:
    """Publish, look up, abandon, release, one error."""
    first = client.publish(namespace, keys_of(1, 2, 3))
    found = client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2, 9))
    client.ask(m.Done, m.Unpin, namespace, found.lease_id, found.blocks[:4])
    got = client.ask(m.BlocksReply, m.Reserve, namespace, found.lease_id, 4)
    client.ask(
        m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE,
        [m.EnqueuedItem(got.lease_id, got.blocks[:4], got.generations[:4])], [],
        [m.ReserveItem(got.lease_id, 1)],
    )  # fmt: skip
    client.ask(m.Done, m.Abandon, namespace, got.lease_id, got.blocks[4:8])
    with pytest.raises(CapacityError):
        client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1_000)
    client.ask(m.Pong, m.Ping, [first.lease_id], {})
    client.ask(m.Done, m.ReleaseLeases, [first.lease_id, got.lease_id])


def record_work(daemon: DaemonProcess, connect: Connect) -> Path:
    """A recording of `work` on a new session and one that was there; where it lies."""
    old = connect()
    namespace = old.open(32)
    old.publish(namespace, keys_of(100))
    operator = connect(operator=True)
    operator.ask(m.TraceReply, m.Trace, "start", 60.0, 10**6)
    work(old, namespace)
    new = connect()
    work(new, new.open(32))
    new.ask(m.Done, m.Bye)
    operator.ask(m.TraceReply, m.Trace, "stop")
    look: Callable[[], m.TraceReply] = lambda: operator.ask(m.TraceReply, m.Trace, "look")  # noqa: E731
    wait_until(lambda: not look().is_recording)
    found = look()
    assert found.error == ""
    assert found.dropped == 0
    return Path(found.path)


def test_a_recording_is_replayed_to_another_daemon_with_the_same_answers(
    daemon: DaemonProcess, connect: Connect, make_daemon: MakeDaemon
) -> None:
    path = record_work(daemon, connect)
    assert path.parent == daemon.runtime_dir
    assert path.stat().st_mode & 0o777 == 0o600
    other = make_daemon().wait_ready()
    # Other ids than those recorded: the mapping has to be learnt.
    with other.client() as client:
        namespace = client.open(16, fingerprint=b"something-else-1")
        client.ask(m.BlocksReply, m.Reserve, namespace, 0, 3)
    report = json.loads(run("trace", "replay", str(path), "--json", *where(other)))
    assert report["differences"] == []
    assert report["sent"] == 24
    assert report["requests"]["Reserve"]["count"] == 6
    with other.client(operator=True) as client:
        found = client.ask(m.StatusReply, m.Status).status["namespaces"]
    (replayed,) = [each for each in found if each["name"] == "replay test"]
    assert replayed["statistics"]["publishes"] == 3
    with daemon.client() as client:  # an engine's keys find nothing of a replay
        assert client.open(32) == 1
    assert "sent in" in run("trace", "replay", str(path), "--speed", "50", *where(other))


def test_a_replay_tells_answers_that_differ(
    daemon: DaemonProcess, connect: Connect, make_daemon: MakeDaemon
) -> None:
    path = record_work(daemon, connect)
    narrow = make_daemon(limits__max_reserved_blocks_per_session="1").wait_ready()
    report = json.loads(run("trace", "replay", str(path), "--json", *where(narrow), expect=1))
    assert {
        "request": "Reserve",
        "recorded": "BlocksReply",
        "now": "QuotaExceeded",
        "count": 4,
    } in (report["differences"])


def test_recording_by_the_command_moves_the_file(
    daemon: DaemonProcess, connect: Connect, tmp_path: Path
) -> None:
    output = tmp_path / "out.hstrace"
    found = json.loads(
        run("trace", "record", "--seconds", "0.3", "-o", str(output), "--json", *where(daemon))
    )
    assert found["path"] == str(output)
    with TraceReader(output) as reader:
        kinds = {type(each.request) for each in reader}
    assert kinds == {m.Trace}
    run("trace", "record", "-o", str(output), *where(daemon), expect=2)
    assert not list(daemon.runtime_dir.glob("trace-*"))


def test_one_recording_at_a_time_and_it_ends_at_its_bounds(
    daemon: DaemonProcess, connect: Connect
) -> None:
    operator = connect(operator=True)
    with pytest.raises(UsageError):
        operator.ask(m.TraceReply, m.Trace, "look")
    operator.ask(m.TraceReply, m.Trace, "start", 60.0, 3_000)
    with pytest.raises(CapacityError):
        operator.ask(m.TraceReply, m.Trace, "start", 60.0, 3_000)

    def is_over() -> bool:
        operator.ask(m.Pong, m.Ping)
        return not operator.ask(m.TraceReply, m.Trace, "look").is_recording

    wait_until(is_over)
    found = operator.ask(m.TraceReply, m.Trace, "look")
    assert 3_000 <= found.recorded_bytes < 4_000
    operator.ask(m.TraceReply, m.Trace, "start", 0.0, 3_000)  # its time is over at once
    wait_until(lambda: not operator.ask(m.TraceReply, m.Trace, "look").is_recording)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"format": "other"}), b"hello world" * 50],
)
def test_i8_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        TraceReader(path)


def test_i8_a_damaged_recording_is_refused_where_it_is_damaged(
    daemon: DaemonProcess, connect: Connect, tmp_path: Path
) -> None:
    data = record_work(daemon, connect).read_bytes()
    path = tmp_path / "x"
    path.write_bytes(data[:-30])  # the daemon was killed: what is whole is played
    with TraceReader(path) as reader:
        assert len(list(reader)) > 10
    path.write_bytes(data + msgpack.packb([1, 2, 3]))
    with TraceReader(path) as reader, pytest.raises(UsageError):
        list(reader)


def test_a_replay_without_a_daemon_says_so(
    daemon: DaemonProcess, connect: Connect, tmp_path: Path
) -> None:
    path = record_work(daemon, connect)
    run("trace", "replay", str(path), "--runtime-dir", str(tmp_path), expect=5)
    assert Replayer  # imported above: the command uses the same


# --- bench and completion -----------------------------------------------------------------------


def test_bench_compares_with_an_echo() -> None:
    rows = json.loads(run("bench", "--calls", "50", "--json"))
    assert [row["call"].split()[0] for row in rows] == ["ping", "lookup", "decode"]
    assert all(row["ratio"] > 0 and row["echo_p50_us"] > 0 for row in rows)
    assert all((row["verdict"] == "over") is (row["ratio"] > row["limit"]) for row in rows)


def test_completion_knows_commands_and_options() -> None:
    def complete(words: str) -> str:
        return run(
            _HISPARSE_SERVICE_COMPLETE="complete_bash", COMP_WORDS=f"hisparse-service {words}",
            COMP_CWORD=str(len(words.split()) + words.endswith(" ")),
        )  # fmt: skip

    script = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_HISPARSE_SERVICE_COMPLETE" in script
    assert {"trace", "top"} <= set(complete("t").split())
    assert "record" in complete("trace rec")
