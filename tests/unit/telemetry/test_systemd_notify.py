"""What systemd is told, and how often; the socket is real, only the clock is not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse_service.contract.limits import GIB
from hisparse_service.telemetry.systemd_notify import (
    EXTENSION_S,
    PROGRESS_INTERVAL_S,
    STATUS_INTERVAL_S,
    STOP_EXTENSION_S,
    ServiceManager,
)
from hisparse_service.testing.clock import FakeClock


class Listener:
    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(address.replace("@", "\0", 1))

    def heard(self) -> list[list[str]]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return messages


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    address = str(tmp_path / "n") if request.param == "path" else f"@hst-notify-{os.getpid()}"
    made = Listener(address)
    yield made
    made.socket.close()


def test_progress_extends_the_start_only_while_it_goes_on(listener: Listener) -> None:
    clock = FakeClock()
    manager = ServiceManager(listener.address, clock=clock)
    manager.progress(1 * GIB, 4 * GIB)
    assert listener.heard() == [
        [
            "STATUS=Reserving the pool: 25% of 4.0 GiB",
            f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * 1e6)}",
        ]
    ]
    clock.advance(PROGRESS_INTERVAL_S)
    manager.progress(1 * GIB, 4 * GIB)
    assert listener.heard() == [], "a start that stands still must run into its timeout"
    manager.progress(2 * GIB, 4 * GIB)
    manager.progress(3 * GIB, 4 * GIB)
    assert len(listener.heard()) == 1, "not one message a chunk"


def test_the_watchdog_is_fed_four_times_as_often_as_systemd_looks(listener: Listener) -> None:
    clock = FakeClock()
    manager = ServiceManager(listener.address, watchdog_s=8.0, clock=clock)
    manager.ready("Ready")
    assert listener.heard() == [["READY=1", f"MAINPID={os.getpid()}", "STATUS=Ready"]]
    for _ in range(16):
        manager.tick("Ready")
        clock.advance(0.5)
    assert listener.heard() == [["WATCHDOG=1"]] * 4


def test_a_status_is_said_when_it_changed_and_not_too_often(listener: Listener) -> None:
    clock = FakeClock()
    manager = ServiceManager(listener.address, clock=clock)
    manager.ready("0 workers")
    listener.heard()
    manager.tick("1 worker")
    assert listener.heard() == []
    clock.advance(STATUS_INTERVAL_S)
    manager.tick("2 workers")
    manager.tick("2 workers")
    assert listener.heard() == [["STATUS=2 workers"]]


def test_a_drain_may_take_longer_than_the_unit_says(listener: Listener) -> None:
    manager = ServiceManager(listener.address)
    manager.draining(600.0, 3)
    assert listener.heard() == [
        [
            "STOPPING=1", "STATUS=Draining: 3 workers",
            f"EXTEND_TIMEOUT_USEC={int((600 + STOP_EXTENSION_S) * 1e6)}",
        ]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "predecessor_s", "is_fed"),
    [
        ({"WATCHDOG_USEC": "4000000"}, 0.0, True),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())}, 0.0, True),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, 0.0, False),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, 60.0, True),
        ({"WATCHDOG_USEC": "soon"}, 0.0, False),
        ({}, 0.0, False),
    ],
)
def test_only_a_watchdog_that_is_meant_for_this_process_is_fed(
    listener: Listener, environment: dict[str, str], predecessor_s: float, is_fed: bool
) -> None:
    environment = {"NOTIFY_SOCKET": listener.address, **environment}
    ServiceManager.from_environment(environment, predecessor_s=predecessor_s).tick("")
    assert (["WATCHDOG=1"] in listener.heard()) is is_fed


def test_outside_systemd_and_with_a_dead_manager_nothing_is_raised(tmp_path: Path) -> None:
    silent = ServiceManager.from_environment({})
    assert not silent.listens
    silent.ready("Ready")
    ServiceManager(str(tmp_path / "nobody")).stopping()


def test_a_full_socket_of_the_manager_does_not_block_the_loop(tmp_path: Path) -> None:
    listener = Listener(str(tmp_path / "n"))
    manager = ServiceManager(listener.address)
    for _ in range(10_000):
        manager.stopping()
    listener.socket.close()
