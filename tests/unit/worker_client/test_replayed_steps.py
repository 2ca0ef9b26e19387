"""Whole decode steps on the reference; tests/gpu replays the same ones as captured graphs."""

from __future__ import annotations

import random

import pytest
import torch
from replay_steps import DRAFT, REQUESTS, SIZE, STEPS, ReplayedSteps

from worker_client.mirror import DeferredTracker, ImmediateTracker
from worker_client.prefetch import GatherSplit


def test_host_rows_equal_device_rows_after_all_steps():
    world = ReplayedSteps("cpu", tracker=ImmediateTracker())
    world.run()
    world.check_everything()


@pytest.mark.parametrize("seed", range(3))
def test_i2_whatever_completes_late_is_published_late_and_right(seed):
    tracker, order = DeferredTracker(), random.Random(seed)
    world = ReplayedSteps(
        "cpu", tracker=tracker, before_poll=lambda: tracker.complete(order.randint(0, 2)),
        seed=seed,
    )  # fmt: skip
    world.run()
    world.check_everything()


@pytest.mark.parametrize("split", GatherSplit)
def test_a_prefetch_changes_nothing_that_is_read_or_remembered(split):
    worlds = [ReplayedSteps("cpu", tracker=ImmediateTracker(), split=s) for s in (None, split)]
    for world in worlds:
        world.run()
        world.check_everything()
    assert torch.equal(worlds[0].seen, worlds[1].seen)
    for one, other in zip(*(world.units for world in worlds), strict=True):
        states = [unit.handles[0].runtime.index_group.state for unit in (one, other)]
        for name in ("host_rows", "last_use", "clock", "counters"):
            assert torch.equal(*(getattr(state, name) for state in states)), name
        assert torch.equal(one.backing, other.backing)


def test_i2_draft_layers_that_never_come_hold_every_page_back():
    world = ReplayedSteps("cpu", tracker=ImmediateTracker())
    before = [set(found) for found in world.published]
    world._run_draft = lambda _: None
    for _ in range(STEPS // 2):
        world.step()
    assert min(world.accepted) > (len(before[0]) + 1) * SIZE
    assert world.published == before


def test_i2_a_rejected_row_is_in_host_memory_and_not_published():
    """The copy of a rejected row is there, so only the books keep it from being read."""
    world = ReplayedSteps("cpu", tracker=ImmediateTracker())
    seen = 0
    for _ in range(STEPS // 2):
        world.step()
        for request in range(REQUESTS):
            position = world.accepted[request]  # first of the rejected, if any was
            page, row = divmod(position, SIZE)
            block = world.host_blocks[request][page]
            if int(world.units[0].host(0)[block, row, 0]):
                seen += 1
                assert page not in world.published[request]
                assert int(world.tables["source"][request, page]) == 0
    assert seen > 0
    assert world.queue.num_tracked_blocks > 0
    assert DRAFT == 2
