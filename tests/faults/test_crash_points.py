"""The daemon and the client are killed at every named crash point, in turn; then all is checked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import DaemonProcess, RawClient, wait_until

from hisparse_service.contract import messages as m
from hisparse_service.testing.faults import CRASH_POINT_VARIABLE, all_points
from tests.faults.scenario import SHORT_TIMES, Scenario, segments_of, verify, wait_for_all_blocks

MakeDaemon = Callable[..., DaemonProcess]
EVERY = int(os.environ.get("HISPARSE_FAULTS_EVERY", "1"))
"""1: all points; n: every n-th, for a run that must be short."""

OF_THE_CLIENT = ("client.", "mirror_queue.")
DAEMON_POINTS = tuple(point for point in all_points() if not point.startswith(OF_THE_CLIENT))
NOT_ON_THE_WAY = {
    "backing.after_clear",  # only where a new backing cannot be attached: test_pool_crash.py
}
CLIENT_POINTS = (
    "client.before_send", "client.after_send", "client.after_receive", "client.attach_after_map",
    "client.attach_after_register", "client.before_mirror", "client.after_mirror",
    "client.after_mirror_noted", "client.after_mirror_queued", "client.before_hand_in",
    "client.after_hand_in", "client.reattach_after_open", "client.reattach_after_pin",
    "client.reattach_after_reclaim", "mirror_queue.after_submit", "mirror_queue.after_seal",
    "mirror_queue.after_completed",
)  # fmt: skip
# How often a point is passed before the interesting moment.
NTH = {"client.before_send": 6, "client.after_send": 6, "client.after_receive": 6}


def sampled(points: tuple[str, ...]) -> list[str]:
    return [point for at, point in enumerate(points) if at % EVERY == 0]


@pytest.mark.parametrize(
    "point", [point for point in sampled(DAEMON_POINTS) if point not in NOT_ON_THE_WAY]
)
def test_i6_a_daemon_killed_at_any_point_loses_and_leaks_nothing(
    make_daemon: MakeDaemon, runtime_dir: Path, point: str
) -> None:
    armed = make_daemon(runtime_dir, crash_point=point, **SHORT_TIMES)
    scenario = Scenario(armed)
    if wait_until(lambda: armed.process.poll() is not None or is_listening(armed)):
        scenario.run()
    assert armed.process.wait(30) == -signal.SIGKILL, f"{point} was not reached"
    del armed.environment[CRASH_POINT_VARIABLE]
    armed.start().wait_ready()
    # The scenario's own SIGTERM released the pool: after that nothing is promised.
    released = point in ("segment.after_unlink",)
    verify(armed, [] if released else scenario.acknowledged)
    assert armed.terminate() == 0, armed.log
    assert segments_of(armed.instance) == []
    assert "Traceback" not in armed.log, armed.log


def is_listening(daemon: DaemonProcess) -> bool:
    return (daemon.runtime_dir / "control.sock").exists()


@pytest.mark.parametrize("point", sampled(CLIENT_POINTS))
def test_i9_a_client_killed_at_any_point_gives_everything_back(
    make_daemon: MakeDaemon, runtime_dir: Path, point: str
) -> None:
    daemon = make_daemon(runtime_dir, **SHORT_TIMES).wait_ready()
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.crash_client", str(daemon.runtime_dir), point],
        env=os.environ | {CRASH_POINT_VARIABLE: f"{point}:{NTH.get(point, 1)}"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with victim:
        try:
            follow(victim, daemon)
            assert victim.wait(30) == -signal.SIGKILL, f"{point} was not reached"
        finally:
            victim.kill()
    with RawClient(daemon.runtime_dir) as client:
        client.hello()
        wait_until(lambda: client.ask(m.ListReply, m.Sessions).total == 1, 2.0)
        for entry in client.ask(m.StatusReply, m.Status).status["namespaces"]:
            if entry["blocks"]:
                wait_for_all_blocks(client, entry["namespace"])
        client.ask(m.Done, m.Bye)
    assert daemon.terminate() == 0
    assert segments_of(daemon.instance) == []


def follow(victim: subprocess.Popen[str], daemon: DaemonProcess) -> None:
    """Do to the daemon what the client asks for, until the client ends."""
    assert victim.stdin is not None
    assert victim.stdout is not None
    for line in victim.stdout:
        if line == "stop\n":
            daemon.process.send_signal(signal.SIGSTOP)
        elif line == "continue\n":
            daemon.process.send_signal(signal.SIGCONT)
        elif line == "restart\n":
            daemon.kill()
            daemon.start().wait_ready()
        if victim.poll() is not None:
            break
        victim.stdin.write("done\n")
        victim.stdin.flush()
    if daemon.process.poll() is None:
        daemon.process.send_signal(signal.SIGCONT)


def test_every_client_point_is_in_the_list() -> None:
    declared = all_points(packages=("hisparse_service", "worker_client"))
    client = {point for point in declared if point.startswith(OF_THE_CLIENT)}
    assert client == set(CLIENT_POINTS)
