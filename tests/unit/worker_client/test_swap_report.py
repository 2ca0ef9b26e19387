"""Growth of the index groups' statistics reaches the counters once, and at most once a second."""

from __future__ import annotations

import torch

from worker_client.runtime import SwapStatistics
from worker_client.swap_report import SwapReporter
from worker_client.telemetry import WorkerCounters


def statistics(count: int) -> SwapStatistics:
    return SwapStatistics(
        resident_lanes=count, hot_lanes=2 * count, miss_lanes=3 * count, miss_rows=count,
        invalid_lanes=0, transactions=count, invalidated_rows=0, gathered_bytes=100 * count,
    )  # fmt: skip


class World:
    def __init__(self) -> None:
        self.now_s, self.asked = 10.0, 0
        self.groups: list[SwapStatistics] | None = [statistics(1), statistics(10)]
        self.counters = WorkerCounters()
        self.reporter = SwapReporter(self.counters, self._ask, clock=lambda: self.now_s)

    def _ask(self) -> list[SwapStatistics] | None:
        self.asked += 1
        return self.groups


def test_growth_over_all_groups_is_added_once() -> None:
    world = World()
    world.reporter.report()
    world.reporter.report()
    world.groups = [statistics(2), statistics(10)]
    world.reporter.report()
    assert world.counters.snapshot() == {
        "rows_read_resident": 12.0, "rows_read_hot": 24.0, "rows_missed": 36.0,
        "bytes_gathered": 1_200.0, "swaps": 12.0,
    }  # fmt: skip


def test_the_device_is_asked_at_most_once_a_second() -> None:
    world = World()
    for _ in range(5):
        world.reporter.tick()
    assert world.asked == 1
    world.now_s += 1.0
    world.reporter.tick()
    assert world.asked == 2


def test_figures_that_are_not_known_yet_are_asked_for_again_at_the_next_tick() -> None:
    world = World()
    groups, world.groups = world.groups, None
    world.reporter.tick()
    world.reporter.tick()
    assert world.asked == 2
    world.groups = groups
    for _ in range(3):
        world.reporter.tick()
    assert world.asked == 3
    assert world.counters["swaps"] == 11


def test_a_total_that_is_too_small_for_a_while_counts_nothing_twice() -> None:
    """An engine zeroes its counters some steps before it says what they were."""
    world = World()
    for count in (10, 4, 12):
        world.groups = [statistics(count)]
        world.reporter.report()
    assert world.counters["swaps"] == 12


def test_the_time_of_swaps_adds_up() -> None:
    world = World()
    for _ in range(2):
        before = world.counters["swap_seconds"]
        with world.reporter.timed(torch.device("cpu")):
            torch.zeros(1_000).sum()
        assert world.counters["swap_seconds"] > before
