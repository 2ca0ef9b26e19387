"""Helper threads: one that dies is started again, counted, and visible."""

from __future__ import annotations

import threading

from helpers import wait_until

from hisparse_service.server.helpers import RESTART_DELAY_S, HelperThreads, Restart


def test_a_helper_that_dies_is_started_again_after_a_moment_and_counted() -> None:
    helpers = HelperThreads()
    starts = threading.Semaphore(0)

    def die(stopping: threading.Event) -> None:
        starts.release()
        if not stopping.is_set():
            raise OSError("it died")

    helpers.start("mortal", die, restart=Restart.ALWAYS)
    assert starts.acquire(timeout=10)
    wait_until(lambda: not helpers.describe()["mortal"]["alive"])  # type: ignore[index]
    helpers.check(100.0)
    helpers.check(100.0 + RESTART_DELAY_S / 2)
    assert helpers.describe()["mortal"] == {
        "alive": False, "permanent": True, "restarts": 0, "last_error": "OSError('it died')",
    }  # fmt: skip
    helpers.check(100.0 + RESTART_DELAY_S)
    assert starts.acquire(timeout=10)
    assert helpers.describe()["mortal"]["restarts"] == 1  # type: ignore[index]
    assert helpers.stop(10) == []


def test_a_helper_that_does_one_thing_is_not_started_again() -> None:
    helpers = HelperThreads()
    helpers.start("once", lambda _: None, restart=Restart.NEVER)
    wait_until(lambda: not helpers.describe()["once"]["alive"])  # type: ignore[index]
    helpers.check(1.0)
    helpers.check(1e9)
    assert helpers.describe()["once"]["restarts"] == 0  # type: ignore[index]


def test_stop_ends_those_that_listen_and_names_those_that_do_not() -> None:
    helpers = HelperThreads()
    release = threading.Event()
    helpers.start("polite", lambda stopping: stopping.wait() and None, restart=Restart.ALWAYS)
    helpers.start("deaf", lambda _: release.wait() and None, restart=Restart.ALWAYS)
    try:
        assert helpers.stop(0.05) == ["deaf"]
    finally:
        release.set()
    assert helpers.stop(10) == []
