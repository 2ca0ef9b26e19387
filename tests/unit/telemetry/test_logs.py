"""Logs: one event a line, and a bounded rate that says what it left out."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from hisparse_service.telemetry.logs import (
    MAX_RECENT_EVENTS,
    RateLimiter,
    configure_logs,
    get_logger,
    recent_events,
)


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


def test_secrets_and_bytes_never_reach_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(format="json", level="info", events_per_second=100)
    recent_events.clear()
    get_logger().info(
        "all_of_it", token="hunter2",  # noqa: S106
        token_ids=[987654321, 123456789], Authorization="Bearer hunter2",
        api_key="hunter2", keys=b"hunter2", payload=b"hunter2", chunk=memoryview(b"hunter2"),
        text="x" * 5_000, num_keys=3, keys_asked=7, tokens_hit=9, key_bytes=16,
    )  # fmt: skip
    out = capsys.readouterr().err
    line = json.loads(out)
    assert "hunter2" not in out
    assert "987654321" not in out
    assert (line["num_keys"], line["keys_asked"], line["tokens_hit"]) == (3, 7, 9)
    assert line["key_bytes"] == 16
    assert len(line["text"]) < 1_100
    assert "hunter2" not in recent_events.last(1)[0]["text"]


def test_the_last_events_are_kept_up_to_a_bound() -> None:
    configure_logs(format="json", level="info", events_per_second=10_000)
    recent_events.clear()
    for number in range(MAX_RECENT_EVENTS + 10):
        get_logger().warning("event", number=number)
    kept = recent_events.last()
    assert len(kept) == MAX_RECENT_EVENTS
    assert kept[-1]["text"] == f"number={MAX_RECENT_EVENTS + 9}"
    assert kept[-1]["level"] == "warning"
    assert recent_events.last(3) == kept[-3:]
