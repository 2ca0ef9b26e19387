"""A real systemd in namespaces of its own: mounts, processes, cgroups, network, host name.

Root only. It knows the units of this directory and the node's unit, and nothing else: no service
of the machine is started or seen. The interpreter and the code appear below /opt, as on a node,
because ProtectHome and PrivateTmp hide where a developer has them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from deploy_tools import DEPLOY, ROOT, run
from helpers import wait_until

SYSTEMD = Path("/lib/systemd/systemd")
TARGETS = ("sysinit", "basic", "shutdown", "multi-user", "network", "local-fs", "umount")
UID = 10001
_COMMAND = """#!/opt/hisparse-service/bin/python
from hisparse_service.cli.main import main
main()
"""
_INNER = """set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/opt
mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work /etc
cp {world}/passwd {world}/group /etc/
mkdir -p /etc/hisparse
cp {world}/settings.toml /etc/hisparse/{instance}.toml
mkdir -p /mnt/opt/python /mnt/opt/site /mnt/opt/src
cp -a {world}/venv /mnt/opt/hisparse-service
mount --bind {python} /mnt/opt/python
mount --bind {site} /mnt/opt/site
mount --bind {root} /mnt/opt/src
mount --rbind /mnt/opt /opt
exec env -i container=hisparse-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    SYSTEMD_UNIT_PATH={world}/units {systemd} --system --unit=multi-user.target \\
    --log-target=console --log-level=info --show-status=no
"""


def unified_cgroup() -> Path | None:
    """Where cgroup v2 is mounted, if this process may make a group there."""
    for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (path / "cgroup.procs").exists() and os.access(path / "cgroup.procs", os.W_OK):
            return path
    return None


class SystemdWorld:
    """Starts systemd; `run` runs a command beside it. Skips where that cannot be.

    Args:
        directory: For its files; reachable by everybody.
        instance: Of the unit.
        settings: Text of the unit's settings file.
    """

    def __init__(self, directory: Path, *, instance: str, settings: str) -> None:
        parent = unified_cgroup()
        if os.geteuid() != 0 or parent is None or not SYSTEMD.exists():
            pytest.skip("needs root, cgroup v2 and Debian's systemd")
        self.directory, self.instance = directory, instance
        self.unit = f"hisparse-service@{instance}"
        self._cgroup = parent / f"hst-{os.getpid()}-systemd"
        self._log = directory / "systemd.log"
        self._write(settings)
        self._cgroup.mkdir(exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", f"echo $$ > {self._cgroup}/cgroup.procs; exec unshare --mount --pid "
                 f"--fork --uts --cgroup --net --mount-proc sh {directory}/inner.sh"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait_until(self._is_running, what=f"systemd: {self.log}")
        except AssertionError:
            self.close()
            pytest.skip(f"systemd does not start in namespaces here: {self.log[-500:]}")

    def _write(self, settings: str) -> None:
        made = self.directory
        units = made / "units"
        units.mkdir()
        for target in TARGETS:
            text = f"[Unit]\nDescription={target}\nDefaultDependencies=no\n"
            (units / f"{target}.target").write_text(text)
        shutil.copy(DEPLOY / "systemd" / "hisparse-service@.service", units)
        drop_in = units / "hisparse-service@.service.d"
        drop_in.mkdir()
        # There is no journal in this world.
        (drop_in / "log.conf").write_text(
            "[Service]\nStandardOutput=append:/run/hisparse.log\nStandardError=inherit\n"
        )
        for name, line in (
            ("passwd", f"hisparse:x:{UID}:{UID}::/nonexistent:/usr/sbin/nologin\n"),
            ("group", f"hisparse:x:{UID}:\n"),
        ):
            (made / name).write_text(Path("/etc", name).read_text() + line)
        (made / "settings.toml").write_text(settings)
        self._write_environment(made / "venv")
        (made / "inner.sh").write_text(
            _INNER.format(
                world=made, instance=self.instance, python=sys.base_prefix, root=ROOT,
                site=sysconfig.get_paths()["purelib"], systemd=SYSTEMD,
            )
        )  # fmt: skip

    @staticmethod
    def _write_environment(target: Path) -> None:
        """A virtual environment as pip would have made it, over what is mounted below /opt."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = target / "lib" / version / "site-packages"
        site.mkdir(parents=True)
        (site / "hisparse.pth").write_text("/opt/src\n/opt/site\n")
        (target / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
        (target / "bin").mkdir()
        (target / "bin" / "python").symlink_to(f"/opt/python/bin/{version}")
        command = target / "bin" / "hisparse-service"
        command.write_text(_COMMAND)
        command.chmod(0o755)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def daemon_log(self) -> str:
        return self.run("cat", "/run/hisparse.log").stdout

    def _pid(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        found = children.read_text().split() if children.exists() else []
        return int(found[0]) if found else 0

    def _is_running(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(self.log)
        # is-system-running says "degraded" once a unit has failed.
        return self._pid() > 0 and self.systemctl("is-system-running").stdout.strip() in (
            "running", "degraded",
        )  # fmt: skip

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command inside."""
        return run(["nsenter", "-t", str(self._pid()), "-m", "-p", "-C", "-u", "-n", *words])

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", "--no-pager", *words)

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.systemctl("show", "-P", name, self.unit).stdout.strip()

    def close(self) -> None:
        """End systemd, and with it every process of its PID namespace. Idempotent."""
        pid = self._pid()
        if pid:
            os.kill(pid, signal.SIGKILL)
        self._process.wait(30)
        wait_until(self._cgroups_are_gone, what="empty cgroups")

    def _cgroups_are_gone(self) -> bool:
        groups = sorted(self._cgroup.rglob("*/"), key=lambda path: len(path.parts), reverse=True)
        for group in [*(each for each in groups if each.is_dir()), self._cgroup]:
            try:
                group.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True
