"""What the log says of peers: refused ones at a bounded rate, operators only when they act."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import DaemonProcess, RawClient, wait_until

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import ProtocolMismatch

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbooks" / "HisparseMalformedMessages.md"
FRAMES = 500
Connect = Callable[..., RawClient]


def run(*arguments: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    done = subprocess.run(
        [sys.executable, "-m", "hisparse_service", *arguments], env=kept, check=True,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_the_commands_of_the_runbook_find_who_sends_malformed_frames(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Before: after 198,871 such frames no line of the log had the word, `sessions` no column."""
    client, stranger = connect(group="broken"), connect(greet=False)
    for sender in (client, stranger):
        for _ in range(FRAMES):
            sender.socket.send(b"\xc1 no message")
            assert sender.socket.recv()
    sessions = run("sessions", "--runtime-dir", str(daemon.runtime_dir))
    header, *rows = (line.split() for line in sessions.splitlines())
    (row,) = (row for row in rows if "broken" in row)
    assert header[-2:] == ["errors", "malformed"]
    assert row[-2:] == [str(FRAMES)] * 2
    pattern = re.search(r"journalctl .*\| grep (\S+)", RUNBOOK.read_text())
    assert pattern is not None

    def found() -> list[str]:
        return [line for line in daemon.log.splitlines() if pattern[1] in line]

    assert len(found()) == 2
    for line in found():
        assert f"pid={os.getpid()}" in line
    daemon.terminate()
    assert len(found()) == 4, "what was counted since, at the end"
    assert sum(int(re.search(r"count=(\d+)", line)[1]) for line in found()) == 2 * FRAMES  # type: ignore[index]


def test_a_refused_hello_is_logged_once(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(greet=False)
    for _ in range(3):
        with pytest.raises(ProtocolMismatch):
            client.ask(m.HelloReply, m.Hello, 90, 91, "from the future", "", 0, 1, "")
    lines = [line for line in daemon.log.splitlines() if "hello_refused" in line]
    assert len(lines) == 1
    for word in ("ProtocolMismatch", "from the future", "90 to 91", f"pid={os.getpid()}"):
        assert word in lines[0]


def test_operators_leave_a_line_when_they_change_something_and_only_then(
    daemon: DaemonProcess,
) -> None:
    where = ("--runtime-dir", str(daemon.runtime_dir))
    before = daemon.log
    for command in (("status",), ("sessions",), ("limits", "show")):
        run(*command, *where)
    assert daemon.log == before
    run("limits", "set", "--max-sessions", "20", *where)
    run("drain", *where)
    lines = [line for line in daemon.log.splitlines() if "operator_request" in line]
    assert ["SetLimits" in lines[0], "Drain" in lines[1], len(lines)] == [True, True, 2]
    wait_until(lambda: "draining" in daemon.log)
