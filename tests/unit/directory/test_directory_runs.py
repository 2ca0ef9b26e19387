"""Lookups find the same whether blocks lie in a row, scattered, or partly so."""

from __future__ import annotations

import numpy as np
from directory_world import SPACE, World, chain, key, path_of, u32
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.directory.results import MirrorItem

LENGTH = 8


def world_with(order: list[int]) -> tuple[World, list[int]]:
    """A prefix of LENGTH blocks that lies in the blocks `order`."""
    world = World(len(order))
    free = world.directory._namespaces[1].blocks._free
    free[:] = type(free)("I", [block + 1 for block in reversed(order)])
    _, answer = world.publish(path_of(LENGTH))
    return world, answer.blocks.tolist()


@settings(max_examples=200, deadline=None)
@given(
    order=st.one_of(
        st.permutations(range(12)),
        st.integers(0, 11).map(lambda at: [*range(at, 12), *range(at)]),
    ),
    known=st.integers(0, LENGTH),
    others=st.integers(0, 3),
)
def test_the_longest_published_prefix_is_found_wherever_it_lies(order, known, others):
    world, blocks = world_with(order)
    asked = (*path_of(known), *path_of(others, start=90))
    result = world.lookup(asked)
    assert result.blocks.tolist() == blocks[:known]
    assert result.generations.tolist() == [1] * known
    world.check()


def test_a_block_in_a_row_below_another_parent_ends_the_prefix():
    """Keys alone would let one client lead others to blocks of another prefix."""
    world, blocks = world_with(list(range(12)))
    lease = world.reserve(1)
    assert lease.blocks.tolist() == [blocks[-1] + 1]
    stray = key(path_of(LENGTH + 1))
    item = MirrorItem(lease.lease_id, lease.blocks, lease.generations, stray, blocks[2], 1)
    world.directory.mirror_completed(1, 1, [item])
    assert world.lookup(path_of(LENGTH + 1)).blocks.tolist() == blocks


def test_a_block_in_a_row_that_was_given_up_ends_the_prefix():
    """Its key still stands in its row."""
    world, blocks = world_with(list(range(12)))
    held = world.lookup(path_of(LENGTH))
    assert world.directory.free(1, 1, held.lease_id, u32(blocks[-1])).freed.tolist() == blocks[-1:]
    assert world.lookup(path_of(LENGTH)).blocks.tolist() == blocks[:-1]


def test_a_lookup_goes_on_in_a_row_behind_a_pinned_block():
    world, blocks = world_with(list(range(12)))
    held = world.lookup(path_of(3))
    rest = world.directory.lookup(1, 1, SPACE, chain(path_of(LENGTH))[48:], held.lease_id, now_s=0)
    assert rest.blocks.tolist() == blocks[3:]
    assert np.unique(rest.generations).tolist() == [1]


def test_half_a_key_is_no_key():
    world, blocks = world_with(list(range(12)))
    for half in (0, 8):
        keys = bytearray(chain(path_of(LENGTH)))
        keys[4 * 16 + half] ^= 1
        found = world.directory.lookup(1, 1, SPACE, bytes(keys), 0, now_s=0.0)
        assert found.blocks.tolist() == blocks[:4]
