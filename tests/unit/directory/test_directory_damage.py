"""Damaged blocks: what a report is compared with, and how a block and what hangs below it go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from directory_world import SPACE, World, chain, path_of, u32

from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.errors import CapacityError, PublishOutOfOrder, StaleBlock
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.one_block import OneCompleted
from hisparse_service.directory.results import Suspect
from hisparse_service.directory.subtree import find_below

NOTHING = u32(), u32()


def generation_of(world, block):
    return int(world.table["generation"][block])


def withdraw(world, block, below=None):
    found = find_below(world.directory.columns(1), block) if below is None else below
    done = world.directory.withdraw(1, int(block), generation_of(world, block), below=found)
    world.check()
    return done


def test_a_report_is_compared_with_the_daemons_own_knowledge():
    world = World()
    reserved = world.reserve(2)
    item = dataclasses.replace(
        world.item(reserved, path_of(2)), checksums=np.array([7, 0], np.uint64)
    )
    world.directory.mirror_completed(1, 1, [item])
    first, second = reserved.blocks.tolist()
    generation = generation_of(world, first)
    assert world.directory.suspect(1, first, generation) == Suspect(first, generation, 7, False)
    assert world.directory.suspect(1, first, generation + 1) is Verdict.STALE
    assert world.directory.suspect(1, 10**6, 1) is Verdict.STALE
    assert world.directory.suspect(1, 0, 1) is Verdict.STALE
    assert world.directory.suspect(1, second, generation) is Verdict.UNVERIFIABLE
    # A worker maps the table too; what stands there is compared and never believed.
    world.table["checksum"][first] = 8
    assert world.directory.suspect(1, first, generation) == Suspect(first, generation, 7, True)


def test_a_checksum_is_forgotten_with_its_generation_and_found_again_by_the_next_daemon():
    world = World(capacity=2)
    reserved = world.reserve(1)
    item = dataclasses.replace(world.item(reserved, (1,)), checksums=np.array([9], np.uint64))
    world.directory.mirror_completed(1, 1, [item])
    world.restart()
    (block,) = reserved.blocks.tolist()
    found = world.directory.suspect(1, block, generation_of(world, block))
    assert found == Suspect(block, found.generation, 9, False)
    world.directory.evict(1, num_blocks=1)
    world.publish((2, 3))
    assert world.directory.suspect(1, block, generation_of(world, block)) is Verdict.UNVERIFIABLE


def test_what_is_read_keeps_its_id_and_generation_and_is_found_by_nobody():
    world = World()
    reserved, _ = world.publish(path_of(4), release=False)
    blocks = reserved.blocks.tolist()
    other = world.lookup(path_of(4), session=2)
    generation = generation_of(world, blocks[1])
    assert withdraw(world, blocks[1])
    assert world.found(path_of(4)) == 1
    assert generation_of(world, blocks[1]) == generation
    assert world.directory.num_withdrawn(1) == 3
    with pytest.raises(StaleBlock):
        world.directory.pin(2, 1, 0, u32(blocks[1]), u32(generation), now_s=world.clock.now_s)
    taken = world.reserve(world.directory.counts(1).free).blocks.tolist()
    assert not set(taken) & set(blocks), "nobody is given what others read"
    world.directory.free(1, 1, reserved.lease_id, u32(*blocks))
    assert world.directory.num_withdrawn(1) == 3
    freed = world.directory.free(2, 1, other.lease_id, u32(*blocks)).freed.tolist()
    assert sorted(freed) == sorted(blocks), "the first too: nobody needs it"
    assert world.directory.num_withdrawn(1) == 0
    assert generation_of(world, blocks[1]) == generation + 1
    world.check()


def test_the_same_prefix_can_be_published_anew_while_the_damaged_one_is_read():
    world = World()
    reserved, _ = world.publish(path_of(3), release=False)
    assert withdraw(world, int(reserved.blocks[0]))
    again, answer = world.publish(path_of(3), session=2, release=False)
    assert answer.blocks.tolist() == again.blocks.tolist()
    assert world.found(path_of(3)) == 3
    world.directory.release_leases(1, [reserved.lease_id])
    assert world.found(path_of(3)) == 3
    world.check()


def test_nothing_is_published_below_a_withdrawn_block_by_either_way():
    world = World()
    reserved, _ = world.publish(path_of(2), release=False)
    last = int(reserved.blocks[1])
    more = world.reserve(1, lease=reserved.lease_id)
    assert withdraw(world, last)
    after = last, generation_of(world, last)
    with pytest.raises(PublishOutOfOrder):
        world.complete(more, path_of(3), after=after)
    (block,), (generation,) = more.blocks.tolist(), more.generations.tolist()
    one = OneCompleted(more.lease_id, block, generation, chain(path_of(3))[-16:], *after)
    assert not world.directory.publish_one(1, 1, one, now_s=world.clock.now_s)


def test_a_picture_that_is_out_of_date_takes_no_other_block():
    world = World(capacity=3)
    reserved, _ = world.publish(path_of(3))
    first, _, last = reserved.blocks.tolist()
    picture = find_below(world.directory.columns(1), first)
    assert picture[0][0] == last
    world.directory.evict(1, blocks=u32(last))
    other, _ = world.publish((9,))  # another prefix in that block
    assert other.blocks.tolist() == [last]
    assert withdraw(world, first, below=picture)
    assert world.found((9,)) == 1


def test_a_block_published_meanwhile_keeps_its_parents_until_the_next_picture():
    world = World()
    reserved, _ = world.publish(path_of(2), release=False)
    first, second = reserved.blocks.tolist()
    picture = find_below(world.directory.columns(1), first)
    more = world.reserve(1, lease=reserved.lease_id)
    world.complete(more, path_of(3), after=(second, generation_of(world, second)))
    assert withdraw(world, first, below=picture)
    assert world.table["state"][second] == BlockState.PUBLISHED
    assert world.found(path_of(3)) == 0, "it cannot be reached all the same"
    world.directory.withdraw_below(1, find_below(world.directory.columns(1), first))
    world.check()
    world.directory.release_leases(1, [reserved.lease_id])
    assert world.directory.counts(1).free == 32


def test_eviction_between_two_slices_stops_at_the_withdrawn_block():
    world = World(capacity=4)
    reserved, _ = world.publish(path_of(4))
    first = int(reserved.blocks[0])
    generation = generation_of(world, first)
    assert withdraw(world, first, below=NOTHING)
    assert world.directory.num_withdrawn(1) == 1
    with pytest.raises(CapacityError):
        world.reserve(4)
    world.check()
    taken = world.reserve(3).blocks.tolist()
    world.check()
    assert first not in taken
    world.directory.expire(world.clock.now_s)
    world.check()
    assert world.directory.counts(1).free == 1
    assert generation_of(world, first) == generation + 1


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_daemon_killed_between_two_slices_brings_none_of_them_back(slices):
    world = World()
    reserved, _ = world.publish(path_of(4), release=False)
    first = int(reserved.blocks[1])
    found = find_below(world.directory.columns(1), first)
    assert withdraw(world, first, below=(found[0][:slices], found[1][:slices]))
    before = world.table["generation"][reserved.blocks].copy()
    world.restart()
    world.check()
    assert world.found(path_of(4)) == 1
    assert (world.table["generation"][reserved.blocks[1:]] != before[1:]).all()


def test_a_lookup_in_slices_does_not_answer_what_was_withdrawn_meanwhile():
    world = World()
    reserved, _ = world.publish(path_of(4))
    running = world.directory.begin_lookup(
        2, 1, SPACE, chain(path_of(4)), 0, now_s=world.clock.now_s
    )
    assert not running.step(3)
    assert withdraw(world, int(reserved.blocks[1]))
    while not running.step(1):
        pass
    assert running.finish(world.clock.now_s).blocks.tolist() == reserved.blocks.tolist()[:1]
    assert world.directory.num_withdrawn(1) == 0, "its pins on the others ended"
    world.check()
