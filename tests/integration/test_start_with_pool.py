"""A start that begins with the pool: whatever ends it early, nothing of the pool is left."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.helpers import DEADLINE_S, daemons_in_one_directory, wait_until

LARGE = "2GiB"
"""Takes longer to reserve than the rest of the daemon takes to load."""
NO_TOKEN = {"http__token_file": "/nonexistent/token"}


@pytest.fixture
def make() -> Iterator:
    with daemons_in_one_directory() as start:
        yield start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_modules_are_loaded_is_a_clean_stop(make, number: signal.Signals) -> None:
    """Nobody would ever remove gigabytes under a temporary name, but the next start."""
    daemon = make(pool_bytes=LARGE)
    wait_until(lambda: daemon.segments, what="the pool is being made")
    assert "starting" not in daemon.log, "too late: the loop is there"
    daemon.process.send_signal(number)
    assert daemon.process.wait(DEADLINE_S) == 0, daemon.log
    assert daemon.segments == []
    assert "stopped before it was ready" in daemon.log or "drained" in daemon.log


def test_a_start_that_fails_beside_the_pool_leaves_no_pool(make) -> None:
    daemon = make(pool_bytes=LARGE, **NO_TOKEN)
    assert daemon.process.wait(DEADLINE_S) == 3, daemon.log
    assert "/nonexistent/token" in daemon.log
    assert daemon.segments == []


def test_a_start_that_fails_leaves_an_adopted_pool_where_it_was(make) -> None:
    daemon = make()
    daemon.wait_ready()
    daemon.kill()
    (name,) = daemon.segments
    failing = make(instance=daemon.instance, **NO_TOKEN)
    assert failing.process.wait(DEADLINE_S) == 3, failing.log
    assert failing.segments == [name]
