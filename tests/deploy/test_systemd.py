"""systemd takes the unit, the unit is hardened, and the daemon keeps its side of the protocol."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from deploy_tools import COMMAND, DEPLOY, find_tool, run
from helpers import DaemonProcess, wait_until

from hisparse_service.cli import exit_codes
from hisparse_service.config import load_settings

MakeDaemon = Callable[..., DaemonProcess]
UNIT = DEPLOY / "systemd" / "hisparse-service@.service"
DROP_INS = sorted((DEPLOY / "systemd" / "hisparse-service@.service.d").glob("*.example"))
INSTALLED = "/opt/hisparse-service/bin/hisparse-service"
MAX_EXPOSURE = 25
"""Tenths, as `systemd-analyze security` counts; below 30 it says OK."""


def values(key: str) -> list[str]:
    """All values of a key of the unit, in order."""
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(), re.MULTILINE)


def install(directory: Path, drop_ins: list[Path]) -> Path:
    """The unit as on a node, but for where the command is."""
    unit = directory / UNIT.name
    unit.write_text(UNIT.read_text().replace(INSTALLED, str(COMMAND)))
    target = directory / "hisparse-service@.service.d"
    target.mkdir()
    for path in drop_ins:
        shutil.copy(path, target / path.name.removesuffix(".example"))
    instance = directory / "hisparse-service@default.service"
    instance.symlink_to(unit.name)
    return instance


@pytest.mark.parametrize(
    "drop_ins", [[], *([path] for path in DROP_INS), DROP_INS],
    ids=["plain", *(path.name for path in DROP_INS), "all"],
)  # fmt: skip
def test_systemd_takes_the_unit_and_each_drop_in(tmp_path: Path, drop_ins: list[Path]) -> None:
    analyze = find_tool("systemd-analyze")
    instance = install(tmp_path, drop_ins)
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = run([analyze, "verify", instance], environment=environment)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_misspelt_line_would_have_been_found(tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze")
    instance = install(tmp_path, [])
    unit = tmp_path / UNIT.name
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = run([analyze, "verify", instance], environment=environment)
    assert "WatchdogSecs" in done.stdout


def test_the_unit_is_hardened(tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze")
    install(tmp_path, [])
    done = run(
        [analyze, "security", "--offline=yes", f"--threshold={MAX_EXPOSURE}", "--no-pager",
         tmp_path / UNIT.name]
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]
    assert "exposure level" in done.stdout


def test_shared_memory_outlives_the_unit_and_peers_are_recognised() -> None:
    # Each of these, switched on, would give the daemon a /dev/shm or pids of its own.
    for key in ("PrivateIPC", "PrivateUsers", "PrivateDevices", "RemoveIPC"):
        assert values(key) == ["no"], key
    assert values("DynamicUser") == [], "it implies RemoveIPC"
    assert values("RuntimeDirectoryMode") == ["0700"]
    assert values("DeviceAllow") == ["char-nvidia* rw"]
    assert values("LimitMEMLOCK") == ["infinity"]


def test_errors_that_trying_again_cannot_mend_are_not_tried_again() -> None:
    codes = {int(code) for code in values("RestartPreventExitStatus")[0].split()}
    assert codes == {exit_codes.USAGE, exit_codes.CONFIG, exit_codes.SEGMENT}


def test_the_unit_and_its_example_settings_start_a_daemon(
    tmp_path: Path, make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    """With the unit's command line and environment, paths re-rooted."""
    settings = tmp_path / "settings.toml"
    example = (DEPLOY / "systemd" / "example.toml").read_text()
    load_settings(config_path=str(DEPLOY / "systemd" / "example.toml"), environment={})
    settings.write_text(example.replace("256GiB", "8MiB"))
    command = shlex.split(values("ExecStart")[0])
    assert command[:2] == [INSTALLED, "serve"]
    daemon = make_daemon(runtime_dir)
    daemon.close()
    rooted = {
        "HISPARSE_CONFIG": str(settings),
        "HISPARSE_RUNTIME_DIR": str(daemon.runtime_dir),
    }
    given = dict(line.split("=", 1) for line in values("Environment"))
    assert set(rooted) < set(given)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    daemon.environment = kept | given | rooted
    daemon.arguments = tuple(argument.replace("%i", daemon.instance) for argument in command[2:])
    daemon.start().wait_ready()
    assert daemon.log.splitlines()[0].startswith("{"), "HISPARSE_LOG__FORMAT=json"
    assert daemon.segments == [f"hisparse-{daemon.instance}-main"]
    assert daemon.terminate() == 0


class Manager:
    """The other end of NOTIFY_SOCKET: a real datagram socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(str(path))
        self.lines: list[str] = []

    def hears(self, pattern: str) -> bool:
        """Whether a line that matches was said, now or before."""
        try:
            while True:
                self.lines += self.socket.recv(4096).decode().splitlines()
        except BlockingIOError:
            return any(re.fullmatch(pattern, line) for line in self.lines)

    def waits_for(self, pattern: str) -> None:
        wait_until(lambda: self.hears(pattern), what=pattern)


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[Manager]:
    made = Manager(runtime_dir / "notify")
    yield made
    made.socket.close()


def managed(
    make_daemon: MakeDaemon, directory: Path, manager: Manager, **options: str
) -> DaemonProcess:
    daemon = make_daemon(directory, **options)
    daemon.close()
    daemon.environment |= {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "2000000"}
    return daemon.start()


def test_the_notify_protocol_from_start_to_stop(
    make_daemon: MakeDaemon, runtime_dir: Path, manager: Manager
) -> None:
    daemon = managed(make_daemon, runtime_dir, manager, pool_bytes="192MiB")
    manager.waits_for(r"STATUS=Reserving the pool: \d+% of 0\.2 GiB")
    manager.waits_for(r"EXTEND_TIMEOUT_USEC=30000000")
    manager.waits_for("READY=1")
    assert manager.lines.index("READY=1") > 0, "progress comes before readiness"
    manager.waits_for(f"MAINPID={daemon.process.pid}")
    manager.waits_for(r"STATUS=Ready: 0 workers, pool of 0\.2 GiB")
    manager.waits_for("WATCHDOG=1")
    assert daemon.terminate() == 0
    manager.waits_for("STOPPING=1")


def test_a_loop_that_stands_still_starves_the_watchdog(
    make_daemon: MakeDaemon, runtime_dir: Path, manager: Manager
) -> None:
    daemon = managed(make_daemon, runtime_dir, manager).wait_ready()
    manager.waits_for("WATCHDOG=1")
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
    manager.hears("")
    manager.lines.clear()
    manager.socket.setblocking(True)
    manager.socket.settimeout(1.5)  # the loop feeds it every 0.5 s
    with pytest.raises(TimeoutError):
        manager.socket.recv(100)
    manager.socket.setblocking(False)
    daemon.process.send_signal(signal.SIGCONT)
    manager.waits_for("WATCHDOG=1")


def test_a_drain_with_a_worker_extends_the_stop_by_its_settings(
    make_daemon: MakeDaemon, runtime_dir: Path, manager: Manager
) -> None:
    daemon = managed(make_daemon, runtime_dir, manager, server__drain_timeout_s="500").wait_ready()
    client = daemon.client()
    daemon.process.send_signal(signal.SIGTERM)
    manager.waits_for("STATUS=Draining: 1 workers")
    extensions = [int(line.split("=")[1]) for line in manager.lines if "EXTEND" in line]
    assert max(extensions) > 600e6
    client.close()
    assert daemon.process.wait(30) == 0


@pytest.mark.slow
def test_the_unit_allows_each_system_call_that_the_daemon_makes(
    tmp_path: Path, make_daemon: MakeDaemon, runtime_dir: Path
) -> None:
    analyze, strace = find_tool("systemd-analyze"), find_tool("strace")
    daemon = make_daemon(runtime_dir)
    daemon.close()
    trace = tmp_path / "trace"
    with daemon.log_path.open("ab") as log:
        process = subprocess.Popen(
            [strace, "-f", "-qq", "-o", str(trace), str(COMMAND), "serve"],
            env=daemon.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: "ready" in daemon.log)
        with daemon.client() as client:
            client.publish(client.open(), b"k" * 16)
    finally:
        for child in psutil.Process(process.pid).children():
            child.terminate()
        assert process.wait(60) == 0
    made = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(errors="replace"), re.MULTILINE))
    assert {"mmap", "madvise", "epoll_wait", "pidfd_open"} <= made
    assert made <= allowed_calls(analyze, values("SystemCallFilter")[0])


def allowed_calls(analyze: str, group: str) -> set[str]:
    """A group's system calls, its inner groups taken apart."""
    calls: set[str] = set()
    for line in run([analyze, "--no-pager", "syscall-filter", group]).stdout.splitlines()[1:]:
        name = line.strip()
        if name.startswith("@"):
            calls |= allowed_calls(analyze, name)
        elif name and not name.startswith("#"):
            calls.add(name)
    return calls
