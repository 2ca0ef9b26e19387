"""Another pool.bytes: what a restart does with it, and the way that docs/upgrade.md gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from helpers import DaemonProcess, keys_of

MIB = 2**20
MakeDaemon = Callable[..., DaemonProcess]


def run(*arguments: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    done = subprocess.run(
        [sys.executable, "-m", "hisparse_service", *arguments], env=kept, check=True,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def status(daemon: DaemonProcess) -> tuple[dict[str, Any], str]:
    where = ("status", "--runtime-dir", str(daemon.runtime_dir))
    return json.loads(run(*where, "--json")), run(*where)


def larger(make_daemon: MakeDaemon, before: DaemonProcess) -> DaemonProcess:
    daemon = make_daemon(before.directory, instance=before.instance, pool_bytes="16MiB")
    return daemon.wait_ready()


def killed_with_prefixes(make_daemon: MakeDaemon) -> DaemonProcess:
    daemon = make_daemon().wait_ready()
    client = daemon.client()
    client.publish(client.open(64), keys_of(1, 2, 3))
    client.close()
    daemon.kill()
    return daemon


def test_a_pool_with_prefixes_keeps_its_size_and_status_says_what_was_set(
    make_daemon: MakeDaemon,
) -> None:
    again = larger(make_daemon, killed_with_prefixes(make_daemon))
    found, text = status(again)
    assert (found["pool"]["bytes"], found["pool_bytes"]) == (8 * MIB, 16 * MIB)
    assert "adopted with 8 MiB; pool.bytes is 16 MiB" in text
    assert "has 8 MiB, pool.bytes asks for 16 MiB: adopted as it is" in again.log


def test_a_stop_without_workers_and_a_start_resize(make_daemon: MakeDaemon) -> None:
    first = killed_with_prefixes(make_daemon)
    again = larger(make_daemon, first)
    again.terminate()
    assert again.segments == [], "released, and the prefixes with it"
    found, text = status(larger(make_daemon, first))
    assert found["pool"]["bytes"] == 16 * MIB
    assert "adopted" not in text


def test_purge_makes_way_after_a_kill(make_daemon: MakeDaemon) -> None:
    first = killed_with_prefixes(make_daemon)
    run("purge", "--instance", first.instance)
    assert status(larger(make_daemon, first))[0]["pool"]["bytes"] == 16 * MIB
