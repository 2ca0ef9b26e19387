"""Blocks being written whose daemon, or whose reserving process, ends before the copies do."""

from __future__ import annotations

import numpy as np
import pytest
from directory_world import TTL_S, World, chain

from hisparse_service.contract.errors import CapacityError, LeaseLost
from hisparse_service.contract.limits import ADOPTION_GRACE_S
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.results import BackingMode, MirrorItem, UnpublishedBlocks


@pytest.fixture
def world() -> World:
    return World(8)


def restart_holding(world: World) -> None:
    world.directory = world._new()
    world.report = world.directory.attach_backing(
        1, world.table, mode=BackingMode.ADOPT, now_s=world.clock.now_s
    )
    world.open_sessions()


def reclaim(world: World, blocks, generations, *, session: int = 1, lease: int = 0):
    return world.directory.reclaim(
        session, 1, lease, np.asarray(blocks, np.uint32), np.asarray(generations, np.uint32),
        now_s=world.clock.now_s,
    )  # fmt: skip


def test_i1_a_block_being_written_when_the_daemon_died_is_its_writers_again(world):
    got = world.reserve(3)
    world.directory.mirror_enqueued(
        1, 1, [MirrorItem(got.lease_id, got.blocks[:1], got.generations[:1])]
    )
    restart_holding(world)
    assert world.directory.counts(1).reserved == 3
    other = world.reserve(5, session=2)
    assert not set(other.blocks) & set(got.blocks)
    back = reclaim(world, got.blocks, got.generations)
    assert back.blocks.tolist() == got.blocks.tolist()
    assert back.generations.tolist() == got.generations.tolist()
    item = MirrorItem(back.lease_id, back.blocks, back.generations, chain((1, 2, 3)))
    world.directory.mirror_completed(1, 1, [item])
    assert world.found((1, 2, 3)) == 3
    world.directory.check_invariants()


def test_what_nobody_reclaims_becomes_free_after_a_leases_time(world):
    got = world.reserve(3)
    restart_holding(world)
    world.clock.advance(TTL_S / 2)
    world.directory.expire(world.clock.now_s)
    assert world.directory.counts(1).reserved == 3
    world.clock.advance(TTL_S)
    expired = world.directory.expire(world.clock.now_s)
    assert expired.expired == []
    assert world.directory.counts(1).free == 8
    assert reclaim(world, got.blocks, got.generations).blocks.size == 0
    world.directory.check_invariants()


def test_i3_a_reclaim_with_another_generation_gets_nothing(world):
    got = world.reserve(2)
    restart_holding(world)
    back = reclaim(world, got.blocks, got.generations + np.uint32(1))
    assert back.blocks.size == 0
    assert world.directory.counts(1).reserved == 2


def test_i1_a_block_is_reclaimed_once(world):
    got = world.reserve(2)
    restart_holding(world)
    assert reclaim(world, got.blocks[:1], got.generations[:1]).blocks.size == 1
    assert reclaim(world, got.blocks, got.generations, session=2).blocks.tolist() == [
        int(got.blocks[1])
    ]
    world.directory.check_invariants()


def test_i1_blocks_of_a_scheduler_that_died_return_with_the_last_of_its_workers():
    world = World(8)
    directory = world.directory
    directory.open_session(10, group="engine", rank=0, delegates_copies=True)
    directory.open_session(11, group="engine", rank=1)
    directory.open_session(12, group="engine", rank=2)
    directory.take_writer("engine", 1, 10, rank=0, now_s=world.clock.now_s)
    got = directory.reserve(10, 1, 3, 0, now_s=world.clock.now_s)
    directory.session_died(10)
    assert directory.counts(1).reserved == 3
    assert directory.counts(1).free == 5
    world.clock.advance(10 * TTL_S)
    directory.expire(world.clock.now_s)
    directory.check_invariants()
    directory.session_died(11)
    assert (world.table["state"][got.blocks] == BlockState.RESERVED).all()
    directory.session_died(12)
    assert directory.counts(1).free == 8
    directory.check_invariants()


def test_i9_blocks_of_a_rank_that_copies_itself_return_at_once():
    world = World(8)
    directory = world.directory
    directory.open_session(10, group="engine", rank=0)
    directory.open_session(11, group="engine", rank=1)
    directory.take_writer("engine", 1, 10, rank=0, now_s=world.clock.now_s)
    directory.reserve(10, 1, 3, 0, now_s=world.clock.now_s)
    directory.session_died(10)
    assert directory.counts(1).free == 8


@pytest.mark.parametrize("length", [1, 3])
def test_a_duplicate_that_is_kept_stays_reserved_and_the_published_one_is_pinned(world, length):
    path = tuple(range(length))
    first, _ = world.publish(path)
    got = world.reserve(length, session=2)
    item = MirrorItem(got.lease_id, got.blocks, got.generations, chain(path), keep_duplicates=True)
    (answer,) = world.directory.mirror_completed(2, 1, [item])
    assert answer.blocks.tolist() == first.blocks.tolist()
    assert (world.table["state"][got.blocks] == BlockState.RESERVED).all()
    assert world.directory.counts(1).reserved == length
    world.directory.abandon(2, 1, got.lease_id, got.blocks)
    world.directory.unpin(2, 1, got.lease_id, answer.blocks)
    world.directory.check_invariants()


def test_reclaim_needs_the_groups_writer_lease(world):
    got = world.reserve(1)
    restart_holding(world)
    world.directory.open_session(10, group="engine", rank=0)
    with pytest.raises(LeaseLost, match="writer lease"):
        reclaim(world, got.blocks, got.generations, session=10)


@pytest.mark.parametrize("restarts", [1, 2])
def test_i3_blocks_that_were_read_cannot_be_evicted_before_the_grace_is_over(world, restarts):
    world.publish((1, 2, 3), release=False)  # pinned by its writer
    world.publish((7, 8))
    for _ in range(restarts):
        restart_holding(world)
    assert world.directory.counts(1).pinned == 3
    world.reserve(5)  # all the rest, the idle ones evicted
    with pytest.raises(CapacityError):
        world.reserve(1)
    world.clock.advance(ADOPTION_GRACE_S)
    world.directory.expire(world.clock.now_s)
    assert world.directory.counts(1).pinned == 0
    world.reserve(3)
    world.directory.check_invariants()


def test_i3_a_reader_that_comes_back_in_time_keeps_its_blocks(world):
    mine, _ = world.publish((1, 2, 3), release=False)
    blocks, generations = mine.blocks, mine.generations
    restart_holding(world)
    pinned = world.directory.pin(1, 1, 0, blocks, generations, now_s=world.clock.now_s)
    world.clock.advance(ADOPTION_GRACE_S)
    world.directory.expire(world.clock.now_s)
    assert world.directory.counts(1).pinned == 3
    world.directory.release_leases(1, [pinned.lease_id])
    assert world.directory.counts(1).pinned == 0
    world.directory.check_invariants()


def test_i1_a_silent_sessions_blocks_are_nobodys_until_its_death_is_known(world):
    got = world.reserve(3)
    end = world.directory.session_died(
        1, unpublished=UnpublishedBlocks.QUARANTINE, now_s=world.clock.now_s
    )
    assert end.quarantined_blocks == 3
    world.clock.advance(10 * TTL_S)
    world.directory.expire(world.clock.now_s)
    assert not set(world.reserve(5, session=2).blocks) & set(got.blocks)
    world.directory.check_invariants()
    assert world.directory.end_quarantine(end.quarantine) == 3
    assert world.directory.counts(1).free == 3
    world.directory.check_invariants()


def test_a_detached_directory_leaves_what_clients_hold(world):
    got = world.reserve(2)
    world.publish((1, 2))
    before = world.table.copy()
    world.directory.detach()
    assert (world.table == before).all()
    restart_holding(world)
    assert reclaim(world, got.blocks, got.generations).blocks.tolist() == got.blocks.tolist()
