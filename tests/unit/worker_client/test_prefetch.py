"""Copies beside the computation: each layer has its rows when it reads them, and not by luck.

The lane of these tests copies as late as it may: what is not waited for is not there.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from test_runtime import LAYERS, NUM_REQS, Server, i32

from hisparse_service.contract.errors import UsageError
from worker_client.kernels.interface import Overlap
from worker_client.kernels.reference import ReferenceBackend
from worker_client.prefetch import GatherSplit, GroupPrefetch, InlineLane, SideStream, lane_for
from worker_client.runtime import enable_prefetch


class LateLane:
    """Work is done when somebody joins a mark behind it."""

    def __init__(self):
        self.work = []
        self.is_forked = False
        self.joins = 0

    def make_mark(self):
        return []

    @contextlib.contextmanager
    def fork(self, _):
        self.is_forked = True
        yield
        self.is_forked = False

    def place(self, mark):
        self.work.append(mark)

    def join(self, mark):
        assert any(mark is entry for entry in self.work), "a mark that was never placed"
        self.joins += 1
        while self.work:
            entry = self.work.pop(0)
            if entry is mark:
                return
            if callable(entry):
                entry()


class LateBackend(ReferenceBackend):
    """Reads the plan when the copy is done, as a device does."""

    def __init__(self, lane):
        super().__init__()
        self.lane = lane
        self.overlaps = []

    def gather(self, *, pages, plan, overlap):
        assert self.lane.is_forked
        self.overlaps.append(overlap)
        copy = super().gather
        self.lane.work.append(lambda: copy(pages=pages, plan=plan))


def late_server(split, **options):
    server = Server().start()
    lane = LateLane()
    server.handles[0].runtime.index_group.backend = LateBackend(lane)
    assert enable_prefetch(server.handles, split=split, lane=lane, **options) is lane
    return server, lane


def rows_are_there(server, layer, physical, positions):
    handle = server.handles[layer]
    return all(
        bool((handle.runtime.hot.attention_cache[int(row)] == server.want(layer, 0, at)).all())
        for row, at in zip(physical[0], positions, strict=True)
    )


@pytest.mark.parametrize("split", GatherSplit)
def test_what_every_layer_reads_is_what_it_reads_without_a_side_stream(split):
    random = torch.Generator().manual_seed(3)
    plain, (beside, lane) = Server().start(), late_server(split)
    for _ in range(20):
        positions = torch.randint(-1, 32, (2, 4), generator=random).tolist()
        for layer, (one, other) in enumerate(zip(plain.handles, beside.handles, strict=True)):
            physical = plain.swap_in(one, positions, slots=(0, 1))
            assert torch.equal(beside.swap_in(other, positions, slots=(0, 1)), physical)
            for slot in range(NUM_REQS):
                for row, position in zip(physical[slot].tolist(), positions[slot], strict=True):
                    if position >= 0:
                        values = other.runtime.hot.attention_cache[row]
                        assert (values == beside.want(layer, slot, position)).all()
        assert lane.work == [], "all layers have joined"
    assert torch.equal(plain.backing, beside.backing)
    groups = [server.handles[0].runtime.index_group for server in (plain, beside)]
    assert torch.equal(groups[0].state.host_rows, groups[1].state.host_rows)


def test_a_leader_begins_where_its_top_k_is_known_and_waits_where_it_reads():
    server, _ = late_server(GatherSplit.LEADER_FIRST)
    leader, follower = server.handles[0], server.handles[1]
    positions = [0, 5, 31, 9]
    physical = leader.begin_swap(
        i32([positions]), request_slots=i32([0]), query_starts=i32([0, 1])
    ).clone()
    assert not rows_are_there(server, 0, physical, positions)
    leader.wait_rows()
    leader.wait_rows()
    assert rows_are_there(server, 0, physical, positions)
    assert not rows_are_there(server, 1, physical, positions)
    assert torch.equal(server.swap_in(follower, [positions]), physical)
    assert rows_are_there(server, 1, physical, positions)
    assert rows_are_there(server, 2, physical, positions), "one launch: they came together"


def test_a_layer_waits_for_its_own_launch_and_those_before_it():
    server, lane = late_server(GatherSplit.LAYERS)
    positions = [0, 5, 31, 9]
    physical = server.swap_in(server.handles[0], [positions])
    server.swap_in(server.handles[2], [positions])  # out of order: the lane is in order
    assert all(rows_are_there(server, layer, physical, positions) for layer in range(LAYERS))
    joins = lane.joins
    server.swap_in(server.handles[1], [positions])
    assert lane.joins == joins


def test_a_plan_is_not_written_again_before_its_copies_have_read_it():
    """Followers that were skipped (a request that ended) must not get the next step's rows."""
    server, lane = late_server(GatherSplit.LEADER_FIRST)
    first, second = [0, 5, 31, 9], [1, 2, 3, 4]
    physical = server.swap_in(server.handles[0], [first]).clone()
    assert len(lane.work) > 0
    server.swap_in(server.handles[0], [second])
    assert rows_are_there(server, 2, physical, first)


def test_all_copies_can_be_waited_for_at_once():
    server, lane = late_server(GatherSplit.LAYERS)
    group = server.handles[0].runtime.index_group
    server.swap_in(server.handles[0], [[0, 5, 31, 9]])
    assert group.prefetch.num_pending == LAYERS - 1
    group.wait_rows()
    assert lane.work == []
    assert group.prefetch.num_pending == 0


@pytest.mark.parametrize("overlap", Overlap)
def test_only_rows_that_are_not_waited_for_at_once_leave_room_for_the_computation(overlap):
    for split in GatherSplit:
        server, _ = late_server(split, overlap=overlap)
        server.swap_in(server.handles[0], [[0, 5, 31, 9]])
        leader, *others = server.handles[0].runtime.index_group.backend.overlaps
        assert leader is Overlap.NONE
        assert set(others) <= {overlap}


def test_groups_of_one_layer_have_one_launch():
    assert [split.parts(1) for split in GatherSplit] == [[(0, 1)]] * 3
    assert GatherSplit.GROUP.parts(4) == [(0, 4)]
    assert GatherSplit.LEADER_FIRST.parts(4) == [(0, 1), (1, 4)]
    assert GatherSplit.LAYERS.parts(3) == [(0, 1), (1, 2), (2, 3)]


def test_calls_that_make_no_sense_are_refused():
    server = Server().start()
    with pytest.raises(UsageError, match="a follower resolves nothing"):
        server.handles[1].begin_swap(
            i32([[0, 1, 2, 3]]), request_slots=i32([0]), query_starts=i32([0, 1])
        )
    with pytest.raises(UsageError, match="no cache handles"):
        enable_prefetch([])
    with pytest.raises(UsageError, match="needs a CUDA device"):
        SideStream("cpu")
    prefetch = GroupPrefetch(LateLane(), split=GatherSplit.GROUP, num_layers=2)
    prefetch.start(lambda *_: None)
    with pytest.raises(UsageError, match="not joined"):
        prefetch.start(lambda *_: None)


def test_without_a_gpu_copies_run_where_they_stand():
    assert isinstance(lane_for("cpu"), InlineLane)
    server = Server().start()
    enable_prefetch(server.handles)
    server.swap_in(server.handles[0], [[0, 5, 31, 9]])
    physical = server.swap_in(server.handles[1], [[0, 5, 31, 9]])
    assert rows_are_there(server, 2, physical, [0, 5, 31, 9])


def test_the_rows_of_a_group_are_mirrored_by_one_launch_of_all_its_layers():
    server = Server().start()
    leader = server.handles[0]
    server.slot_mapping[:2] = torch.tensor([6 * 4 + 1, 6 * 4 + 2])
    server.mirror_slots[:2] = torch.tensor([9 * 4 + 1, 9 * 4 + 2])
    for layer, handle in enumerate(server.handles):
        view, slots = handle.write_target(2)
        view.write_slots(slots, torch.full((2, 8), 50.0 + layer))
    pages, device_slots, host_slots = leader.group_mirror_target(2)
    assert pages.num_layers == LAYERS
    leader.runtime.index_group.backend.mirror_rows(
        pages=pages, device_slots=device_slots, host_slots=host_slots
    )
    for layer in range(LAYERS):
        assert (server.source_view(layer)[9, 1:3] == 50.0 + layer).all()
    server.handles[1].runtime.resident_source_index = 1
    with pytest.raises(UsageError, match="resident groups"):
        leader.group_mirror_target(2)
