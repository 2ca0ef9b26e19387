"""Logs: one event a line, and a bounded rate that says what it left out."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from hisparse_service.telemetry.logs import RateLimiter, configure_logs, get_logger


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_events_of_one_name_are_limited_by_the_second_and_the_rest_is_counted() -> None:
    now_s = [0.0]
    limiter = RateLimiter(2, clock=lambda: now_s[0])

    def passes(name: str) -> dict[str, object] | None:
        try:
            return dict(limiter(None, "info", {"event": name}))
        except structlog.DropEvent:
            return None

    assert [passes("a") is not None for _ in range(5)] == [True, True, False, False, False]
    assert passes("b") == {"event": "b"}
    now_s[0] = 1.0
    assert passes("a") == {"event": "a", "suppressed": 3}
    assert passes("a") == {"event": "a"}


def test_names_made_up_by_a_caller_do_not_grow_for_ever() -> None:
    limiter = RateLimiter(1, clock=lambda: 0.0)
    for number in range(10_000):
        limiter(None, "info", {"event": f"event-{number}"})
    assert len(limiter._by_event) <= 1_024


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(format="json", level="info", events_per_second=100)
    log = get_logger()
    log.info("ready", endpoint="x\ny", pool_bytes=5)
    log.debug("not_shown")
    try:
        raise ValueError("inner")
    except ValueError as error:
        log.error("failed", exc_info=error)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["ready", "failed"]
    assert lines[0]["endpoint"] == "x\ny"
    assert lines[0]["level"] == "info"
    assert "inner" in json.dumps(lines[1])
