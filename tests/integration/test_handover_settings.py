"""`handover` keeps what the old daemon's command line said, and tells it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from helpers import DaemonProcess, unique_instance, wait_until

from hisparse_service.contract import messages as m

MakeDaemon = Callable[..., DaemonProcess]
OLDER = """
from hisparse_service.cli.entry import main
from hisparse_service.contract import messages as m
from hisparse_service.server import dispatch
from hisparse_service.server.handlers_operations import status_of

def status(state, client, request, now_s):
    return m.StatusReply(request.request_id, state.options.epoch, status_of(state, now_s))

dispatch.ROUTES[m.Status] = dispatch.Route(status, dispatch.Needs.SESSION, overtakes=True)
main()
"""
"""A daemon from before flags were told."""


@pytest.fixture
def successors() -> Iterator[list[int]]:
    """Pids of daemons that are no children of ours; ended here."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            assert select.select([pidfd], [], [], 30)[0]
            os.close(pidfd)


def run(
    daemon: DaemonProcess, *arguments: str, expect: int = 0, directory: str | None = None
) -> subprocess.CompletedProcess[str]:
    """`handover` from a shell that has none of the daemon's environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    done = subprocess.run(
        [
            sys.executable, "-m", "hisparse_service", "handover",
            "--runtime-dir", str(daemon.runtime_dir), "--log-file", str(daemon.log_path),
            *arguments,
        ],
        env=kept, check=False, capture_output=True, text=True, timeout=60, cwd=directory,
    )  # fmt: skip
    assert done.returncode == expect, (done.returncode, done.stdout, done.stderr)
    return done


def settings_of(daemon: DaemonProcess) -> dict[str, Any]:
    """What the daemon that serves now says of itself."""
    client = daemon.client(operator=True)
    try:
        return client.ask(m.StatusReply, m.Status).status
    finally:
        client.close()


def by_flags(make_daemon: MakeDaemon, *flags: str, **options: Any) -> DaemonProcess:
    """A daemon whose size, name and address are known to its command line alone."""
    instance = unique_instance()
    daemon = make_daemon(
        arguments=(
            "--instance", instance, "--pool-bytes", "16MiB", "--set", "http.listen=",
            "--set", "limits.max_sessions=33", *flags,
        ),
        instance=instance, **options,
    )  # fmt: skip
    return daemon.wait_ready()


def test_the_successor_has_the_old_daemons_flags(
    make_daemon: MakeDaemon, successors: list[int]
) -> None:
    """Before: 1 GiB (a warning), and port 9477 opened."""
    daemon = by_flags(make_daemon)
    first = json.loads(run(daemon, "--json").stdout)
    successors.append(first["pid"])
    assert first["inherited"]["flags"] == {
        "instance": daemon.instance, "pool.bytes": "16MiB", "http.listen": "",
        "limits.max_sessions": "33",
    }  # fmt: skip
    assert daemon.process.wait(30) == 0
    status = settings_of(daemon)
    assert status["limits"]["max_sessions"] == 33
    assert status["http"]["listening"] == []
    assert status["pool_bytes"] == 16 * 2**20
    assert "adopted as it is" not in daemon.log
    assert f"handed over to pid {first['pid']}" in daemon.log
    assert "deadline" not in daemon.log
    # The next one inherits what the first inherited, the command's own flags on top.
    said = run(daemon, "--set", "limits.max_sessions=44").stdout
    assert "http.listen=" in said
    assert f"instance={daemon.instance}" in said
    assert "max_sessions" not in said, "not inherited: given here"
    successors.append(int(said.split("pid ")[1].split()[0]))
    assert settings_of(daemon)["limits"]["max_sessions"] == 44


def test_the_settings_file_goes_with_it_from_any_directory(
    make_daemon: MakeDaemon, successors: list[int], tmp_path: Any
) -> None:
    (tmp_path / "s.toml").write_text("[limits]\nmax_sessions = 55\n")
    relative = os.path.relpath(tmp_path / "s.toml")
    daemon = make_daemon(arguments=("--config", relative, "--set", "http.listen="))
    daemon.wait_ready()
    flags = ("--instance", daemon.instance, "--pool-bytes", "8MiB")
    report = json.loads(run(daemon, "--json", *flags, directory="/").stdout)
    successors.append(report["pid"])
    assert report["inherited"]["config"] == str(tmp_path / "s.toml")
    assert settings_of(daemon)["limits"]["max_sessions"] == 55


def test_nothing_is_inherited_where_that_is_asked(
    make_daemon: MakeDaemon, successors: list[int]
) -> None:
    daemon = by_flags(make_daemon)
    flags = ("--instance", daemon.instance, "--pool-bytes", "16MiB", "--set", "http.listen=")
    report = json.loads(run(daemon, "--json", "--no-inherit", *flags).stdout)
    successors.append(report["pid"])
    assert report["inherited"] is None
    assert settings_of(daemon)["limits"]["max_sessions"] == 256


def test_what_the_successor_would_refuse_is_refused_before_it_is_started(
    make_daemon: MakeDaemon,
) -> None:
    daemon = by_flags(make_daemon, "--set", "limits.session_timeout_s=14")
    said = run(daemon, "--set", "limits.lease_ttl_s=13", expect=3).stderr
    assert "limits.session_timeout_s=14" in said
    assert "--no-inherit" in said
    assert daemon.process.poll() is None
    assert "draining" not in daemon.log


def test_an_older_daemon_is_replaced_with_a_warning(
    make_daemon: MakeDaemon, successors: list[int]
) -> None:
    daemon = by_flags(make_daemon, program=("-c", OLDER))
    flags = ("--instance", daemon.instance, "--pool-bytes", "16MiB", "--set", "http.listen=")
    done = run(daemon, "--json", *flags)
    report = json.loads(done.stdout)
    successors.append(report["pid"])
    assert report["inherited"] is None
    assert "does not tell its flags" in done.stderr
    wait_until(lambda: daemon.process.poll() is not None)


def test_an_older_daemon_reads_a_drain_that_names_the_successor() -> None:
    class Drain(m.Request, tag=44, frozen=True):
        stop: bool
        timeout_s: float = 30.0
        hand_over: bool = False

    frame = m.encode(m.Drain(1, stop=True, timeout_s=0.0, hand_over=True, successor_pid=99))
    assert msgspec.msgpack.decode(frame, type=Drain) == Drain(1, True, 0.0, True)
    older = msgspec.msgpack.encode(Drain(1, True, 0.0, True))
    assert m.decode_request(memoryview(older)) == m.Drain(1, True, 0.0, True, 0)
