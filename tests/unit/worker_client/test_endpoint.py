"""An endpoint that cannot work is refused at once; one that may still come is waited for."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon
from helpers import DaemonProcess, short_directory, wait_until

import worker_client
from hisparse_service.contract.errors import ConfigError, NotAuthorised, ServiceUnavailable
from worker_client.endpoint import ipc_endpoint

FOREVER_S = 600.0
"""Longer than a test may last: who waits for it, hangs."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.mark.parametrize("endpoint", ["", "ipc://"])
def test_an_empty_endpoint_is_not_the_current_directory(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="names no daemon"):
        worker_client.connect(endpoint, timeout_s=FOREVER_S)


def test_a_file_is_no_directory_and_no_socket(directory: Path) -> None:
    file = directory / "file"
    file.touch()
    for endpoint in (file, file / "below"):
        with pytest.raises(ConfigError, match=f"no such directory: {file} is a file"):
            worker_client.connect(endpoint, timeout_s=FOREVER_S)
    for endpoint in (f"ipc://{file}", f"ipc://{directory}"):
        with pytest.raises(ConfigError, match="is no socket"):
            worker_client.connect(endpoint, timeout_s=FOREVER_S)


def test_the_socket_in_the_place_of_its_directory_is_told_how_to_write_it(directory: Path) -> None:
    path = directory / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with pytest.raises(ConfigError) as caught:
            worker_client.connect(path, timeout_s=FOREVER_S)
    assert f"Write ipc://{path}" in caught.value.remedy


def test_what_is_missing_is_said_in_the_log_at_once_and_in_the_error(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = rf"no daemon listens.*no such directory: {directory}/no\. Start the daemon"
    with (
        caplog.at_level(logging.WARNING, "worker_client"),
        pytest.raises(ServiceUnavailable, match=says),
    ):
        worker_client.connect(directory / "no" / "such", timeout_s=0.2)
    (line,) = caplog.messages
    assert f"no such directory: {directory}/no; waiting for it" in line
    with pytest.raises(ServiceUnavailable, match=f"no control.sock in {directory}"):
        worker_client.connect(directory, timeout_s=0.2)


def test_a_directory_that_appears_later_is_waited_for(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = directory / "later"
    made: list[FakeDaemon] = []

    def appear() -> None:
        wait_until(lambda: "waiting for it" in caplog.text, what="the client waits")
        place.mkdir(mode=0o700)
        made.append(FakeDaemon(place))

    thread = threading.Thread(target=appear)
    thread.start()
    try:
        with worker_client.connect(place, timeout_s=60.0) as client:
            client.ping()
    finally:
        thread.join()
        for daemon in made:
            daemon.stop()


def test_a_killed_and_a_stopped_daemon_are_told_apart(make_daemon) -> None:
    daemon: DaemonProcess = make_daemon().wait_ready()
    daemon.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ServiceUnavailable, match="does not even greet, it hangs or is stopped"):
        worker_client.connect(daemon.runtime_dir, timeout_s=0.3)
    daemon.process.send_signal(signal.SIGCONT)
    daemon.kill()
    with pytest.raises(ServiceUnavailable, match="nobody listens, the daemon was killed"):
        worker_client.connect(daemon.runtime_dir, timeout_s=0.3)


def test_a_daemon_that_turns_users_away_is_told_from_one_that_is_away(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the user filter does it: the connection is taken, and closed without a word."""
    path = directory / "control.sock"
    theirs = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: theirs)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def turn_away() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=turn_away)
        thread.start()
        try:
            with pytest.raises(NotAuthorised, match=f"uid {theirs}.* away") as caught:
                worker_client.connect(directory, timeout_s=FOREVER_S)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert caught.value.details == {"uid": theirs, "owner_uid": theirs - 1}
    assert "allowed_uids" in caught.value.remedy


def test_endpoints_are_taken_apart(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.chdir(directory)
    assert ipc_endpoint("/run/x") == "ipc:///run/x/control.sock"
    assert ipc_endpoint("here") == f"ipc://{directory}/here/control.sock"
    assert ipc_endpoint("ipc:///a/b.sock") == "ipc:///a/b.sock"
    with pytest.raises(ConfigError, match="scheme 'tcp'"):
        ipc_endpoint("tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="107"):
        ipc_endpoint("/" + "x" * 120)
