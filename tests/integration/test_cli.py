"""The command line, as processes: output for people and for programs, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import DaemonProcess, RawClient, keys_of, unique_instance, wait_until

from hisparse_service.contract import messages as m


def run(
    *arguments: str, status: int = 0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    done = subprocess.run(
        [sys.executable, "-m", "hisparse_service", *arguments],
        env=kept | (environment or {}), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def of(daemon: DaemonProcess, *arguments: str, status: int = 0) -> Any:
    command, *rest = arguments
    done = run(command, "--runtime-dir", str(daemon.runtime_dir), "--json", *rest, status=status)
    return json.loads(done.stdout)


def test_config_show_says_where_each_value_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('instance = "from-file"\n[pool]\nbytes = "1GiB"\npopulate_threads = 3\n')
    done = run(
        "config", "show", "--config", str(path), "--json", "--set", "pool.populate_threads=5",
        environment={"HISPARSE_POOL__BYTES": "2GiB"},
    )  # fmt: skip
    rows = json.loads(done.stdout)
    assert rows["instance"] == {"value": "from-file", "origin": f"file {path}"}
    assert rows["pool.bytes"] == {
        "value": 2 * 2**30, "origin": "environment HISPARSE_POOL__BYTES",
    }  # fmt: skip
    assert rows["pool.populate_threads"] == {"value": 5, "origin": "flag"}
    assert rows["log.level"]["origin"] == "default"
    plain = run("config", "show", environment={"HISPARSE_POOL__BYTES": "2GiB"}).stdout
    assert "environment HISPARSE_POOL__BYTES" in plain


def test_config_check_refuses_what_cannot_work() -> None:
    assert run("config", "check").stdout.strip() == "ok"
    done = run("config", "check", "--set", "limits.lease_ttl_s=1", status=3)
    assert "limits.session_timeout_s" in done.stderr
    assert "pool.bytes" in run("config", "check", "--set", "pool.byte=1", status=3).stderr
    assert "107" in run("config", "check", "--runtime-dir", "/" + "x" * 120, status=3).stderr
    run("config", "check", "--set", "no-equals-sign", status=2)


def test_status_sessions_blocks_and_evict(
    daemon: DaemonProcess, connect: Callable[..., RawClient]
) -> None:
    client = connect()
    namespace = client.open()
    got = client.publish(namespace, keys_of(1, 2, 3))
    client.ask(m.Done, m.ReleaseLeases, [got.lease_id])
    status = of(daemon, "status")
    assert (status["phase"], status["instance"]) == ("ready", daemon.instance)
    assert status["namespaces"][0]["blocks"]["published"] == 3
    assert [row["kind"] for row in of(daemon, "sessions")] == ["worker", "operator"]
    rows = of(daemon, "blocks", "--state", "published")
    assert [row["depth"] for row in rows] == [0, 1, 2]
    assert len(of(daemon, "blocks", "--limit", "1")) == 1
    assert of(daemon, "evict", "1") == {"evicted": 1}
    assert of(daemon, "evict", "10") == {"evicted": 2}
    plain = run("status", "--runtime-dir", str(daemon.runtime_dir)).stdout
    assert daemon.instance in plain
    assert "ready" in plain


def test_status_tells_what_happens_a_second_where_it_is_asked_for(daemon: DaemonProcess) -> None:
    rates = of(daemon, "status", "--rates")["rates"]
    assert {"keys_asked", "published", "evictions", "requests"} <= set(rates)
    assert "rates" not in of(daemon, "status")
    plain = run("status", "--rates", "--runtime-dir", str(daemon.runtime_dir)).stdout
    assert "a second: " in plain


def test_drain_stop_ends_the_daemon(daemon: DaemonProcess) -> None:
    assert of(daemon, "drain", "--stop") == {"draining": True, "ended": True}
    assert daemon.process.wait(30) == 0


def test_a_drained_daemon_is_not_ready_and_still_answers(
    daemon: DaemonProcess, connect: Callable[..., RawClient]
) -> None:
    client = connect()
    assert of(daemon, "drain") == {"draining": True, "ended": False}
    assert of(daemon, "status", status=4)["phase"] == "draining"
    client.ask(m.Pong, m.Ping)


def test_no_daemon_is_said_at_once(runtime_dir: Path) -> None:
    done = run("status", "--runtime-dir", str(runtime_dir), status=5)
    assert "ServiceUnavailable" in done.stderr
    assert "serve" in done.stderr


def test_a_killed_daemon_is_said_at_once(daemon: DaemonProcess) -> None:
    daemon.kill()
    for command in ("status", "sessions", "top", "handover"):
        within = "--within" if command == "handover" else "--timeout"
        done = run(command, "--runtime-dir", str(daemon.runtime_dir), within, "600", status=5)
        assert f"nobody holds the lock; pid {daemon.process.pid} held it last" in done.stderr
        assert "adopts the pool" in done.stderr


def test_a_daemon_that_is_killed_while_it_is_asked_is_not_waited_for(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon().wait_ready()
    daemon.process.send_signal(signal.SIGSTOP)
    asking = subprocess.Popen(
        [sys.executable, "-m", "hisparse_service", "status", "--timeout", "600", "--runtime-dir",
         str(daemon.runtime_dir)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: psutil.Process(asking.pid).net_connections("unix"), what="it asks")
    daemon.kill()
    _out, said = asking.communicate(timeout=60)
    assert asking.returncode == 5
    assert "nobody holds the lock" in said


def test_a_stopped_daemon_is_not_told_to_be_started(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    done = run("status", "--runtime-dir", str(daemon.runtime_dir), "--timeout", "0.5", status=5)
    assert f"pid {daemon.process.pid} holds the lock and does not answer" in done.stderr
    assert "asked for 0.5 s" in done.stderr
    assert "py-spy" in done.stderr
    assert "serve" not in done.stderr


def test_a_runtime_directory_that_is_not_there_or_none_is_said(runtime_dir: Path) -> None:
    done = run("status", "--runtime-dir", str(runtime_dir / "no" / "such"), status=5)
    assert f"{runtime_dir}/no is not there" in done.stderr
    assert "is no directory" in run("status", "--runtime-dir", "/etc/passwd", status=5).stderr


def test_status_says_where_the_daemon_runs_and_its_epoch_as_the_log_has_it(
    daemon: DaemonProcess,
) -> None:
    status = of(daemon, "status")
    assert status["pid"] == daemon.process.pid
    assert status["runtime_dir"] == str(daemon.runtime_dir)
    plain = run("status", "--runtime-dir", str(daemon.runtime_dir)).stdout
    assert f"pid {daemon.process.pid}  runtime directory {daemon.runtime_dir}" in plain
    assert len(status["epoch"]) == 16
    assert f"epoch {status['epoch']}" in plain
    assert f"epoch={status['epoch']}" in daemon.log


def test_purge_removes_what_a_killed_daemon_left_and_nothing_of_a_living_one(
    daemon: DaemonProcess,
) -> None:
    def purge(*options: str) -> list[str]:
        done = run("purge", "--instance", daemon.instance, "--json", *options)
        return [row["verdict"] for row in json.loads(done.stdout)]

    assert purge() == ["owned"]
    daemon.kill()
    assert purge("--dry-run") == ["removable"]
    assert daemon.segments
    assert purge() == ["removed"]
    assert daemon.segments == []
    assert purge() == []


@pytest.mark.parametrize(
    "arguments", [(), ("serve",), ("status",), ("blocks",), ("config", "show"), ("purge",)]
)
def test_help_is_there(arguments: tuple[str, ...]) -> None:
    assert "--help" in run(*arguments, "--help").stdout


def test_the_installed_command_is_the_same() -> None:
    command = Path(sys.executable).with_name("hisparse-service")
    if not command.exists():
        pytest.skip("the console command is not installed in this environment")
    done = subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout == run("--version").stdout


def test_serve_refuses_a_bad_size_without_touching_anything() -> None:
    instance = unique_instance()
    done = run("serve", "--instance", instance, "--pool-bytes", "lots", status=3)
    assert "pool.bytes" in done.stderr
