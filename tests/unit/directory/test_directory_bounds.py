"""What one request, one tick or one death may cost, and what is kept for whom meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from directory_world import TTL_S, World, path_of

from hisparse_service.contract.errors import QuotaExceeded, UsageError
from hisparse_service.contract.limits import (
    MAX_EXPIRED_LEASES,
    MAX_LEASES_PER_SESSION,
    MAX_RESERVE_BLOCKS,
)
from hisparse_service.directory.results import BackingMode, MirrorItem, Quota, UnpublishedBlocks


def restart_holding(world: World) -> None:
    world.directory = world._new()
    world.directory.attach_backing(1, world.table, mode=BackingMode.ADOPT, now_s=world.clock.now_s)
    world.open_sessions()


def test_i7_a_message_publishes_and_frees_no_more_than_the_loop_can_bear():
    world = World(4)
    many = np.arange(1, MAX_RESERVE_BLOCKS + 2, dtype=np.uint32)
    item = MirrorItem(1, many, many, bytes(16 * len(many)))
    got = world.reserve(1)
    with pytest.raises(UsageError, match="limit is 32768"):
        world.directory.mirror_completed(1, 1, [item])
    with pytest.raises(UsageError, match="limit is 32768"):
        world.directory.free(1, 1, got.lease_id, many)


def test_i7_leases_that_expire_together_do_so_in_parts():
    world = World(4)
    world.publish(path_of(1))
    for _ in range(MAX_EXPIRED_LEASES + 5):
        world.lookup(path_of(1))
    world.clock.advance(2 * TTL_S)
    result = world.directory.expire(world.clock.now_s)
    assert len(result.expired) == MAX_EXPIRED_LEASES
    assert result.next_deadline_s is not None
    assert result.next_deadline_s <= world.clock.now_s
    assert len(world.directory.expire(world.clock.now_s).expired) == 5
    world.check()


def test_i7_a_session_holds_no_more_leases_than_can_end_at_once():
    world = World(4)
    world.publish(path_of(1))
    for _ in range(MAX_LEASES_PER_SESSION):
        world.lookup(path_of(1))
    with pytest.raises(QuotaExceeded, match="leases"):
        world.lookup(path_of(1))


def test_i6_a_scheduler_that_was_only_silent_takes_back_what_its_workers_inherited():
    """They never learn of it: without this the blocks would be nobody's until the workers end."""
    world = World(8)
    directory = world.directory
    directory.open_session(10, group="engine", rank=0, delegates_copies=True)
    directory.open_session(11, group="engine", rank=1)
    directory.take_writer("engine", 1, 10, rank=0, now_s=world.clock.now_s)
    got = world.reserve(3, session=10)
    directory.session_died(10, unpublished=UnpublishedBlocks.QUARANTINE, now_s=world.clock.now_s)
    directory.open_session(12, group="engine", rank=0, delegates_copies=True)
    directory.take_writer("engine", 1, 12, rank=0, now_s=world.clock.now_s)
    back = directory.reclaim(12, 1, 0, got.blocks, got.generations, now_s=world.clock.now_s)
    assert back.blocks.tolist() == got.blocks.tolist()
    world.check()
    directory.release_leases(12, [back.lease_id])
    assert directory.counts(1).free == 8
    world.check()


def test_i1_another_group_does_not_take_what_an_engines_workers_inherited():
    world = World(8)
    directory = world.directory
    directory.open_session(10, group="engine", rank=0, delegates_copies=True)
    directory.open_session(11, group="engine", rank=1)
    directory.take_writer("engine", 1, 10, rank=0, now_s=world.clock.now_s)
    got = world.reserve(3, session=10)
    directory.session_died(10)
    back = directory.reclaim(1, 1, 0, got.blocks, got.generations, now_s=world.clock.now_s)
    assert back.blocks.size == 0
    assert directory.counts(1).reserved == 3
    world.check()


def test_what_is_kept_for_its_owner_does_not_count_twice_against_the_quota():
    """A daemon's restart must not cost leases (I4): with a quota it did, above half of it."""
    world = World(8, namespace_quota=Quota(max_reserved_blocks=3, max_pins=3))
    published, _ = world.publish((1, 2, 3), release=False)
    got = world.reserve(3)
    restart_holding(world)
    pinned = world.directory.pin(
        1, 1, 0, published.blocks, published.generations, now_s=world.clock.now_s
    )
    back = world.directory.reclaim(
        1, 1, pinned.lease_id, got.blocks, got.generations, now_s=world.clock.now_s
    )
    assert back.blocks.tolist() == got.blocks.tolist()
    world.check()
    with pytest.raises(QuotaExceeded):
        world.reserve(1)
    world.clock.advance(TTL_S / 2)
    world.directory.expire(world.clock.now_s)
    world.check()
    world.directory.release_leases(1, [back.lease_id])
    assert world.found((1, 2, 3)) == 3
    world.check()
