"""Readiness says what an operator must know while the daemon still serves."""

from __future__ import annotations

from hisparse_service.telemetry.health import Health


def ready(helpers):
    snapshot = {"phase": "ready", "progress": 1.0, "helpers": helpers}
    health = Health(last_turn_s=lambda: 5.0, snapshot=lambda: snapshot, clock=lambda: 5.0)
    answer = health.ready()
    assert answer.is_good
    return answer.body


def test_a_restarted_thread_is_visible_in_readiness():
    helper = {"alive": True, "restarts": 0, "last_error": ""}
    assert "helper_restarts" not in ready({"http": helper, "waker": helper})
    died_twice = helper | {"restarts": 2}
    assert ready({"http": died_twice, "waker": helper})["helper_restarts"] == {"http": 2}
