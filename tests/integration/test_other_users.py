"""A daemon and those who ask belong to different users: what each command and `connect` says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from helpers import SHM, DaemonProcess

import worker_client
from hisparse_service.contract.errors import NotAuthorised
from hisparse_service.pool.purge import PurgeMode, Verdict, purge

MakeDaemon = Callable[..., DaemonProcess]
DAEMON_UID, OTHER_UID = 10_001, 10_002
FOREVER_S = 600.0
"""Longer than a test may last: who waits for it, hangs."""


def python_for(uid: int) -> str:
    """A Python of this version that the user may run; empty: there is none, or this is not root."""
    if os.geteuid() != 0:
        return ""
    system = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    for python in filter(None, (sys.executable, system)):
        with contextlib.suppress(OSError):
            if as_user(uid, python, "-c", "import hisparse_service.cli.main").returncode == 0:
                return python
    return ""


def as_user(uid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    return subprocess.run(
        arguments, user=uid, group=uid, extra_groups=[], cwd="/", env=kept | PATHS,
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


PATHS = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
"""The Python may be another than the tests': it finds the same packages."""
PYTHON = python_for(DAEMON_UID)
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs root, and a Python that other users may run"
)


@pytest.fixture(autouse=True)
def same_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATHS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def theirs(make_daemon: MakeDaemon) -> DaemonProcess:
    """A daemon of another user, in a directory whose name everybody may look up."""
    daemon = make_daemon(python=PYTHON, uid=DAEMON_UID).wait_ready()
    daemon.directory.chmod(0o711)
    return daemon


def run(*arguments: str, uid: int) -> subprocess.CompletedProcess[str]:
    done = as_user(uid, PYTHON, "-m", "hisparse_service", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def where(daemon: DaemonProcess) -> tuple[str, ...]:
    return ("--runtime-dir", str(daemon.runtime_dir), "--instance", daemon.instance)


def doctor(daemon: DaemonProcess, uid: int) -> dict[str, list[dict[str, str]]]:
    rows: dict[str, list[dict[str, str]]] = {}
    for row in json.loads(run("doctor", "--quick", "--json", *where(daemon), uid=uid).stdout):
        rows.setdefault(row["check"], []).append(row)
    return rows


# --- a pool that cannot be looked at ------------------------------------------------------------


@pytest.mark.parametrize("uid", [0, OTHER_UID])
def test_doctor_never_advises_to_delete_the_living_pool_of_another_user(
    theirs: DaemonProcess, uid: int
) -> None:
    rows = doctor(theirs, uid)
    (found,) = rows["segments"]
    assert (found["verdict"], found["can_fix"]) == ("bad", "no")
    assert "8.0 MiB" in found["found"]
    assert f"belongs to uid {DAEMON_UID}; this user ({uid}) cannot see" in found["found"]
    assert f"as that user (uid {DAEMON_UID})" in found["remedy"]
    assert not [row for each in rows.values() for row in each if "rm /dev" in row["remedy"]]


@pytest.mark.parametrize("uid", [0, OTHER_UID])
def test_doctor_finds_the_daemon_of_another_user_closed(theirs: DaemonProcess, uid: int) -> None:
    rows = doctor(theirs, uid)
    for check in ("runtime directory", "daemon", "attach"):
        (found,) = rows[check]
        assert found["verdict"] == "bad", found
        assert f"uid {DAEMON_UID}" in found["found"], found
        assert "serve" not in found["remedy"].replace("server.", ""), found


@pytest.mark.parametrize("uid", [0, OTHER_UID])
def test_purge_says_that_it_cannot_see_another_users_pool_and_leaves_it(
    theirs: DaemonProcess, uid: int
) -> None:
    done = run("purge", "--instance", theirs.instance, "--json", uid=uid)
    assert done.returncode == 6
    (row,) = json.loads(done.stdout)
    assert (row["verdict"], row["bytes"]) == ("unseen", 8 * 2**20)
    assert f"belongs to uid {DAEMON_UID}" in row["reason"]
    assert theirs.segments


def test_what_is_no_file_is_foreign_and_no_pool_that_may_live(theirs: DaemonProcess) -> None:
    path = SHM / f"hisparse-{theirs.instance}x-main"
    path.mkdir()
    try:
        (found,) = purge(f"{theirs.instance}x", mode=PurgeMode.REPORT)
    finally:
        path.rmdir()
    assert found.verdict is Verdict.FOREIGN


# --- a daemon that turns a user away ------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "sessions", "top"])
def test_root_is_told_that_the_daemon_turns_it_away(theirs: DaemonProcess, command: str) -> None:
    done = run(command, *where(theirs), "--timeout", str(FOREVER_S), uid=0)
    assert done.returncode == 5
    assert "NotAuthorised" in done.stderr
    assert f"runs as uid {DAEMON_UID} and turns this user (uid 0) away" in done.stderr
    assert "server.allowed_uids" in done.stderr


def test_a_user_who_may_not_enter_the_directory_is_told_so(theirs: DaemonProcess) -> None:
    done = run("status", *where(theirs), "--timeout", str(FOREVER_S), uid=OTHER_UID)
    assert done.returncode == 5
    assert f"(uid {OTHER_UID}) may not enter {theirs.runtime_dir}" in done.stderr
    assert f"uid {DAEMON_UID}" in done.stderr


def test_a_client_of_root_is_told_that_the_daemon_turns_it_away(theirs: DaemonProcess) -> None:
    with pytest.raises(NotAuthorised, match=r"turns this user \(uid 0\) away.*allowed_uids"):
        worker_client.connect(theirs.runtime_dir, timeout_s=FOREVER_S)


def test_a_client_that_may_not_enter_the_directory_is_told_so(theirs: DaemonProcess) -> None:
    code = (
        f"import worker_client; worker_client.connect({str(theirs.runtime_dir)!r}, timeout_s=600)"
    )
    done = as_user(OTHER_UID, PYTHON, "-c", code)
    assert "NotAuthorised: this user" in done.stderr
    assert f"belongs to uid {DAEMON_UID}" in done.stderr


def test_root_may_ask_a_daemon_that_names_it(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(python=PYTHON, uid=DAEMON_UID, server__allowed_uids="0").wait_ready()
    status: dict[str, Any] = json.loads(run("status", "--json", *where(daemon), uid=0).stdout)
    assert status["pid"] == daemon.process.pid
    with worker_client.connect(daemon.runtime_dir) as client:
        client.ping()
    rows = doctor(daemon, 0)
    assert rows["runtime directory"][0]["verdict"] == "good"
    assert rows["daemon"][0]["verdict"] == "good"
    assert rows["attach"][0]["verdict"] == "warning"
    assert f"run workers as uid {DAEMON_UID}" in rows["attach"][0]["remedy"]


def test_root_sees_that_a_daemon_of_another_user_was_killed(theirs: DaemonProcess) -> None:
    pid = theirs.process.pid
    theirs.kill()
    done = run("status", *where(theirs), "--timeout", str(FOREVER_S), uid=0)
    assert done.returncode == 5
    assert f"nobody holds the lock; pid {pid} held it last and was killed" in done.stderr
