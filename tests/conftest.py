"""Fixtures of all tests, and the check that a test gives back what it took."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    DaemonProcess,
    RawClient,
    Resources,
    remove_leftovers,
    short_directory,
    wait_until,
)
from hypothesis import HealthCheck, settings

# A test that is slow because its machine is busy has found nothing: no timed assertions.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

_CHECKED = ("integration", "faults")
_SETTLE_S = 10.0


def pytest_sessionstart() -> None:
    """Runs that were killed could not remove their pools."""
    remove_leftovers()


@pytest.fixture(autouse=True)
def resource_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Segments, descriptors, threads and children are back to the baseline after the test (I6)."""
    if not set(_CHECKED) & set(Path(request.node.path).parts):
        yield
        return
    gc.collect()
    before = Resources()
    yield
    gc.collect()
    leaks: list[str] = []

    def is_settled() -> bool:
        leaks[:] = Resources().leaked_since(before)
        return not leaks

    try:
        wait_until(is_settled, _SETTLE_S)
    except AssertionError:
        pytest.fail(f"the test left behind: {'; '.join(leaks)}")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private directory whose path is short enough for sockets."""
    with short_directory() as path:
        yield path


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons, each in a directory of its own unless one is given; ends them all."""
    with_directories: list[Any] = []
    made: list[DaemonProcess] = []

    def make(directory: Path | None = None, **options: Any) -> DaemonProcess:
        if directory is None:
            manager = short_directory()
            directory = manager.__enter__()
            with_directories.append(manager)
        daemon = DaemonProcess(directory, **options).start()
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.close()
    for manager in with_directories:
        manager.__exit__(None, None, None)


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A ready daemon with a small pool."""
    return make_daemon().wait_ready()


@pytest.fixture
def connect(daemon: DaemonProcess) -> Iterator[Callable[..., RawClient]]:
    """Makes clients of `daemon` that said Hello; closes them all."""
    made: list[RawClient] = []

    def make(*, greet: bool = True, **hello: Any) -> RawClient:
        client = RawClient(daemon.runtime_dir)
        made.append(client)
        if greet:
            client.hello(**hello)
        return client

    yield make
    for client in made:
        client.close()
