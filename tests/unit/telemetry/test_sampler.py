"""Rates and pictures out of what the control loop left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from hisparse_service.telemetry.metrics import ServerMetrics
from hisparse_service.telemetry.sampler import (
    HISTORY_SAMPLES,
    SHORT_HISTORY_SAMPLES,
    Sampler,
)

STATISTICS = (
    "lookups", "keys_asked", "keys_hit", "tokens_hit", "publishes", "evictions", "blocks_reserved",
)  # fmt: skip


def snapshot(uptime_s: float, *, count: int = 0, namespaces: int = 1) -> dict[str, Any]:
    return {
        "instance": "t", "version": "1", "epoch": f"{7:016x}", "phase": "ready", "progress": 1.0,
        "uptime_s": uptime_s, "pool": {}, "requests": {"Ping": {"count": count}},
        "sessions": {"workers": 2, "quarantined": 0}, "errors": {}, "helpers": {}, "cuda": {},
        "workers": {}, "limits": {}, "http": {},
        "namespaces": [
            {
                "namespace": n, "block_stride_bytes": 10,
                "blocks": {"free": 1, "reserved": 2, "published": 3, "pinned": 4},
                "statistics": dict.fromkeys(STATISTICS, count) | {"refusals": {"x": count}},
            }
            for n in range(namespaces)
        ],
    }  # fmt: skip


class World:
    def __init__(self) -> None:
        self.metrics = ServerMetrics()
        self.calls: list[Callable[[], None]] = []
        self.turns_s = [0.0]
        self.sampler = Sampler(
            self.metrics, call_soon=self.calls.append,
            take_longest_turn_s=lambda: self.turns_s.pop() if self.turns_s else 0.0,
        )  # fmt: skip

    def sample(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.metrics.snapshot = snapshot(*arguments, **options)
        self.metrics.watched_until_s = time.monotonic() + 60
        self.sampler.sample()
        found: dict[str, Any] = json.loads(self.sampler.overview)
        return found


def test_rates_are_growth_by_time_over_the_last_ten_seconds() -> None:
    world = World()
    world.sample(0.0, count=0)
    world.sample(90.0, count=900)
    found = world.sample(100.0, count=1_400)
    assert found["rates"]["requests"] == 50.0
    assert found["rates"]["published_bytes"] == 500.0
    assert found["history"]["series"]["evictions"] == [10.0, 50.0]
    assert found["history"]["series"]["pinned_bytes"] == [40, 40]


def test_a_namespace_that_went_gives_no_negative_rate() -> None:
    world = World()
    world.sample(0.0, count=500)
    found = world.sample(1.0, count=0, namespaces=0)
    assert min(found["rates"].values()) == 0.0
    assert min(found["history"]["series"]["published"]) == 0.0


def test_history_is_bounded_and_the_message_carries_less() -> None:
    world = World()
    for second in range(HISTORY_SAMPLES + 50):
        found = world.sample(float(second))
    assert len(found["history"]["series"]["requests"]) == HISTORY_SAMPLES
    short = msgpack.unpackb(world.sampler.short_overview)
    assert len(short["history"]["series"]["requests"]) == SHORT_HISTORY_SAMPLES


def test_nothing_is_drawn_while_nobody_looks() -> None:
    world = World()
    world.metrics.snapshot = snapshot(1.0)
    world.sampler.sample()
    assert world.sampler.overview == b"{}"


def test_one_probe_of_the_loop_is_out_at_a_time() -> None:
    world = World()
    world.sample(1.0)
    world.sample(2.0)
    assert len(world.calls) == 1
    world.calls.pop()()
    assert world.metrics.loop_lag.count == 1
    world.sample(3.0)
    assert len(world.calls) == 1


def test_the_longest_turn_of_a_minute_is_kept_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    world = World()
    world.turns_s = [0.001, 0.25]
    world.sample(1.0)
    found = world.sample(2.0)
    assert found["longest_turn_s"] == 0.25
    assert "slow_turn" in "".join(capsys.readouterr())
