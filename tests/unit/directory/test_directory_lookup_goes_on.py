"""A lookup that continues behind what its lease pins: how a reader follows its group's writer."""

from __future__ import annotations

import pytest
from directory_world import SPACE, World, chain, path_of


@pytest.fixture
def world() -> World:
    return World()


def lookup_from(world: World, path: tuple[int, ...], start: int, lease: int):
    keys = chain(path)[16 * start :]
    return world.directory.lookup(2, 1, SPACE, keys, lease, now_s=world.clock.now_s)


def test_a_lookup_goes_on_behind_the_blocks_that_its_lease_pins(world):
    path = path_of(6)
    reserved, _ = world.publish(path)
    first = world.lookup(path[:3], session=2)
    rest = lookup_from(world, path, 3, first.lease_id)
    assert rest.blocks.tolist() == reserved.blocks[3:].tolist()
    assert rest.lease_id == first.lease_id
    world.directory.release_leases(2, [first.lease_id])
    assert world.directory.counts(1).pinned == 0
    world.check()


@pytest.mark.parametrize("known", [0, 2], ids=["a new lease", "pins that end too early"])
def test_a_lookup_that_hangs_below_nothing_of_its_lease_finds_nothing(world, known):
    """The keys alone do not say that the rows before them are the asker's own."""
    path = path_of(6)
    world.publish(path)
    lease = world.lookup(path[:known], session=2).lease_id if known else 0
    assert len(lookup_from(world, path, 3, lease).blocks) == 0
    world.check()
