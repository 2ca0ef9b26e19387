"""The unit in a real systemd: starts, reports, is watched, restarted, handed over, stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_tools import DEPLOY
from helpers import SHM, short_directory, unique_instance, wait_until
from systemd_world import UID, SystemdWorld

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("systemd")]


@pytest.fixture
def world() -> Iterator[SystemdWorld]:
    with short_directory() as directory:
        directory.chmod(0o755)
        settings = (DEPLOY / "systemd" / "example.toml").read_text().replace("256GiB", "64MiB")
        made = SystemdWorld(directory, instance=unique_instance("sd"), settings=settings)
        try:
            yield made
        finally:
            made.close()
            for path in SHM.glob(f"hisparse-{made.instance}-*"):
                path.unlink()


def segment(world: SystemdWorld) -> Path:
    return SHM / f"hisparse-{world.instance}-main"


def start(world: SystemdWorld) -> int:
    """Start the unit; the daemon's pid inside."""
    done = world.systemctl("start", world.unit)
    assert done.returncode == 0, f"{done.stdout}\n{world.daemon_log}"
    return int(world.show("MainPID"))


def test_the_unit_starts_serves_and_stops(world: SystemdWorld) -> None:
    pid = start(world)
    assert world.show("ActiveState") == "active", "start returns when workers are accepted"
    assert world.show("StatusText") == "Ready: 0 workers, pool of 0.1 GiB"
    # The pool is the node's own, not one of a private /dev, and the daemon is no root.
    assert segment(world).stat().st_uid == UID
    status = world.run("cat", f"/proc/{pid}/status").stdout
    assert "CapEff:\t0000000000000000" in status
    assert "Seccomp:\t2" in status
    done = world.run(
        "/opt/hisparse-service/bin/hisparse-service", "status", "--runtime-dir",
        f"/run/hisparse/{world.instance}",
    )  # fmt: skip
    assert "ready" in done.stdout
    assert world.systemctl("stop", world.unit).returncode == 0
    assert world.show("Result") == "success"
    assert not segment(world).exists(), "released: nobody was attached"
    assert world.run("test", "-d", f"/run/hisparse/{world.instance}").returncode == 0, "kept"


def test_a_killed_daemon_is_started_again_and_adopts_its_pool(world: SystemdWorld) -> None:
    pid = start(world)
    inode = segment(world).stat().st_ino
    world.run("kill", "-KILL", str(pid))
    wait_until(
        lambda: world.show("NRestarts") == "1" and world.show("ActiveState") == "active",
        what="restarted",
    )
    assert world.show("MainPID") not in ("0", str(pid))
    assert segment(world).stat().st_ino == inode


def test_settings_that_cannot_work_are_not_tried_again(world: SystemdWorld) -> None:
    world.run("sh", "-c", f"echo 'bytes = 1' > /etc/hisparse/{world.instance}.toml")
    assert world.systemctl("start", world.unit).returncode != 0
    wait_until(lambda: world.show("ActiveState") == "failed", what=world.show("ActiveState"))
    assert world.show("ExecMainStatus") == "3"
    assert world.show("NRestarts") == "0"
    assert "there is no setting 'bytes'" in world.daemon_log


def test_a_reload_hands_over_to_a_new_daemon_without_a_stop(world: SystemdWorld) -> None:
    pid = start(world)
    inode = segment(world).stat().st_ino
    done = world.systemctl("reload", world.unit)
    assert done.returncode == 0, f"{done.stdout}\n{world.daemon_log}"
    wait_until(lambda: world.run("test", "-d", f"/proc/{pid}").returncode == 1, what="old gone")
    assert world.show("ActiveState") == "active"
    assert world.show("MainPID") not in ("0", str(pid))
    assert segment(world).stat().st_ino == inode
    assert world.show("NRestarts") == "0"
    assert world.systemctl("stop", world.unit).returncode == 0
    assert world.show("Result") == "success", f"{world.daemon_log}\n{world.log}"


def test_a_loop_that_stands_still_is_killed_by_the_watchdog(world: SystemdWorld) -> None:
    drop_in = world.directory / "units" / "hisparse-service@.service.d" / "watchdog.conf"
    drop_in.write_text("[Service]\nWatchdogSec=2s\nWatchdogSignal=SIGKILL\n")
    world.systemctl("daemon-reload")
    pid = start(world)
    world.run("kill", "-STOP", str(pid))
    wait_until(
        lambda: world.show("NRestarts") == "1" and world.show("ActiveState") == "active",
        what="restarted by the watchdog",
    )
