"""Decode steps as CUDA graphs: resolve, gather and mirrors replayed with other values each time.

The world and its ledger are `tests/replay_steps.py`, which tests/unit runs on the reference.

    python3 -m pytest -m gpu tests/gpu/test_graph_replay_cuda.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import wait_until
from replay_steps import DRAFT, STEPS, TOP_K, ReplayedSteps

from hisparse_service.contract.errors import UsageError
from worker_client.mirror import EventTracker, ImmediateTracker
from worker_client.prefetch import GatherSplit, SideStream
from worker_client.runtime import enable_prefetch

pytestmark = pytest.mark.timeout(120)

DEVICE = "cuda:0"
SPLITS = [pytest.param(None, id="no-prefetch"), *GatherSplit]


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """One graph. The step before it has padding alone: it compiles, and must change nothing."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def replayed(backend: object, *, tracker: object | None = None, **options: object) -> ReplayedSteps:
    return ReplayedSteps(
        DEVICE, tracker=tracker or EventTracker(), capture=capture, backend=backend, **options
    )


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("seed", [1, 2])
def test_host_rows_equal_device_rows_after_all_replays(backend, split, seed: int) -> None:
    """Polled without waiting: every published page is compared at the moment of its poll (I2)."""
    world = replayed(backend, split=split, seed=seed)
    world.run()
    world.check_everything()


@pytest.mark.parametrize("split", SPLITS)
def test_replays_see_publish_and_remember_what_the_reference_does(backend, split) -> None:
    world = replayed(backend, split=split, before_poll=torch.cuda.synchronize)
    expected = ReplayedSteps("cpu", tracker=ImmediateTracker())
    for each in (world, expected):
        each.run()
        each.check_everything()
    assert torch.equal(world.seen.cpu()[1:], expected.seen[1:])
    assert world.published == expected.published
    for unit, other in zip(world.units, expected.units, strict=True):
        assert torch.equal(unit.pool, other.pool)
        # The null block takes what padding writes.
        null = unit.backing.numel() // unit.handles[0].view.num_blocks
        assert torch.equal(unit.backing.cpu()[null:], other.backing[null:])
        states = [each.handles[0].runtime.index_group.state for each in (unit, other)]
        for name in ("host_rows", "last_use", "clock", "counters"):
            left, right = (getattr(state, name).cpu() for state in states)
            assert torch.equal(left, right), name


def test_without_a_graph_the_side_stream_changes_nothing_either(backend) -> None:
    world = ReplayedSteps(
        DEVICE, tracker=EventTracker(), backend=backend, split=GatherSplit.LEADER_FIRST
    )
    world.run()
    world.check_everything()


def test_i2_copies_that_a_replay_only_enqueued_are_not_published(backend) -> None:
    """The device is 20 ms behind at each poll; what a poll returns was complete all the same."""
    world = replayed(backend)
    replay, behind = world.replay_target, 0

    def late() -> None:
        torch.cuda._sleep(40_000_000)
        replay()

    world.replay_target = late
    for _ in range(STEPS // 2):
        world.step()
        behind += world.queue.num_in_flight_batches > 0
    assert behind > 0, "the device was never behind: nothing was tested"
    world.run(steps=STEPS // 2)
    world.check_everything()


def test_i2_draft_layers_that_never_come_hold_every_page_back(backend) -> None:
    world = replayed(backend)
    before = [set(found) for found in world.published]
    world._run_draft = lambda _: None
    for _ in range(STEPS // 2):
        world.step()
    world.drain()
    assert world.published == before


def test_replays_with_padding_alone_change_nothing(backend) -> None:
    world = replayed(backend, split=GatherSplit.LEADER_FIRST)
    for _ in range(4):
        world.step()
    world.drain()
    torch.cuda.synchronize()

    def everything() -> list[torch.Tensor]:
        torch.cuda.synchronize()
        found = []
        for unit in world.units:
            state = unit.handles[0].runtime.index_group.state
            found += [unit.backing.cpu(), unit.pool.clone()]
            found += [getattr(state, n).cpu() for n in ("host_rows", "last_use", "clock")]
        return found

    before = everything()
    for name in ("slots", "mirror_slots"):
        world.inputs[name].fill_(-1)
        world.draft[name].fill_(-1)
    for name in ("positions", "request_slots"):
        world.inputs[name].fill_(-1)
    world.inputs["query_starts"].zero_()
    world.replay_target()
    world.replay_draft()
    for left, right in zip(before, everything(), strict=True):
        assert torch.equal(left, right)


def test_the_side_stream_copies_while_the_compute_stream_is_busy(backend) -> None:
    world = ReplayedSteps(DEVICE, tracker=EventTracker(), backend=backend)
    world._prepare()
    unit = world.units[0]
    lane = SideStream(DEVICE)
    enable_prefetch(unit.handles, split=GatherSplit.LEADER_FIRST, lane=lane)
    leader = unit.handles[0]
    # All rows of the prefix are read from the host, on the first step.
    world.inputs["positions"].copy_(
        torch.arange(TOP_K, dtype=torch.int32).expand_as(world.inputs["positions"])
    )
    world.tables["resident"].zero_()
    torch.cuda.synchronize()
    physical = leader.begin_swap(
        world.inputs["positions"],
        request_slots=world.inputs["request_slots"],
        query_starts=world.inputs["query_starts"],
    )
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    busy = torch.cuda.Event()
    busy.record()
    copied = torch.cuda.Event()
    copied.record(lane.stream)
    wait_until(copied.query, what="the copies")
    assert not busy.query(), "the copies came behind the computation"
    for handle in unit.handles:
        handle.wait_rows()
    rows = [handle.runtime.hot.read(physical[:1]) for handle in unit.handles]
    torch.cuda.synchronize()
    request = int(world.inputs["request_slots"][0])
    for index, found in enumerate(rows):
        host = unit.host(index)
        for lane_index in range(TOP_K):
            block = world.host_blocks[request][lane_index // 16]
            assert torch.equal(found[0, lane_index].cpu(), host[block, lane_index % 16])
    assert unit.handles[0].runtime.statistics().miss_rows > 0


def test_completion_is_not_recorded_into_a_graph(backend) -> None:
    world = replayed(backend)
    tokens = world._prepare()
    world._note(DRAFT, tokens)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        world.step_number += 0  # torch warns of an empty graph
        with pytest.raises(UsageError, match="behind each replay"):
            world.queue.seal()
