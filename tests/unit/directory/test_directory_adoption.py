"""What a successor believes of a block table: crashes between stores, flips, forged links."""

from __future__ import annotations

import os

import numpy as np
import pytest
from directory_world import BLOCK_SIZE, FINGERPRINT, SPACE, World, key
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract import crashpoints
from hisparse_service.contract.segment import (
    RECORD_BYTES,
    RECORD_DTYPE,
    BlockState,
    record_checks,
)
from hisparse_service.directory.adoption import find_survivors
from hisparse_service.directory.results import BackingMode, MirrorItem

_PUBLISHED_FIELDS = ("key_low", "key_high", "generation", "parent", "parent_generation", "depth",
                     "namespace", "checksum")  # fmt: skip

HELD = (BlockState.RESERVED, BlockState.WRITING, BlockState.PUBLISHED)
"""States in which somebody has a handle of the block."""


def sealed(table: np.ndarray, *blocks: int) -> None:
    """Make records pass their check again after a test changed them."""
    at = np.array(blocks)
    table["check"][at] = record_checks(table, at)


def content(table: np.ndarray, block: int) -> tuple:
    return tuple(int(table[name][block]) for name in _PUBLISHED_FIELDS)


@pytest.fixture
def forest() -> World:
    """Blocks 1 to 6: 0-1-2-3 with a fork 0-1-9, and a single 7."""
    world = World(12)
    world.publish((0, 1, 2, 3))
    world.publish((0, 1, 9))
    world.publish((7,))
    assert world.directory.counts(1).published == 6
    return world


def test_published_blocks_come_back_with_key_parent_and_order_of_use(forest):
    forest.found((0, 1, 2, 3))
    order = forest.directory.evict(1, num_blocks=0)
    assert order.size == 0
    twin = World(table=forest.table.copy())
    assert (twin.report.kept, twin.report.unfinished, twin.report.corrupt) == (6, 0, 0)
    assert twin.found((0, 1, 2, 3)) == 4
    assert twin.found((0, 1, 9)) == 3
    twin = World(table=forest.table.copy())
    expected = forest.directory.evict(1, num_blocks=6).tolist()
    assert twin.directory.evict(1, num_blocks=6).tolist() == expected


def test_blocks_used_at_the_same_time_go_deepest_first_after_adoption(forest):
    lease = forest.lookup((7,)).lease_id
    forest.lookup((0, 1, 9), lease=lease)
    forest.lookup((0, 1, 2, 3), lease=lease)
    forest.directory.release_leases(1, [lease])
    twin = World(table=forest.table.copy())
    depths = {row.block: row.depth for row in twin.directory.list_blocks(1)}
    gone = twin.directory.evict(1, num_blocks=6).tolist()
    assert [depths[block] for block in gone] == [3, 2, 2, 1, 0, 0]
    assert gone == forest.directory.evict(1, num_blocks=6).tolist()


def test_everything_unfinished_is_freed_with_its_generation_bumped(forest):
    reserved = forest.reserve(4)
    enqueued = dict(blocks=reserved.blocks[:2], generations=reserved.generations[:2])
    forest.directory.mirror_enqueued(
        1, 1, [forest.item(type(reserved)(reserved.lease_id, 0.0, **enqueued), (5, 6))]
    )
    twin = World(table=forest.table.copy())
    assert (twin.report.kept, twin.report.unfinished) == (6, 4)
    assert twin.directory.counts(1).free == 6
    generations = twin.table["generation"][reserved.blocks]
    assert (generations == reserved.generations + 1).all()
    twin.check()


def test_pins_do_not_survive_and_adopting_twice_changes_nothing(forest):
    forest.lookup((0, 1, 2, 3))
    twin = World(table=forest.table.copy())
    assert twin.directory.counts(1).pinned == 0
    before = twin.table.copy()
    again = World(table=twin.table)
    assert again.report.kept == 6
    assert (again.table == before).all()


def test_any_single_flipped_byte_never_makes_another_block(forest):
    reference = forest.table.copy()
    rng = np.random.default_rng(7)
    for block in (1, 2, 6):
        for offset in range(RECORD_BYTES):
            for flip in {1, 0x80, 0xFF, int(rng.integers(1, 256))}:
                table = reference.copy()
                table.view(np.uint8)[block * RECORD_BYTES + offset] ^= flip
                twin = World(table=table)
                kept = np.flatnonzero(twin.table["state"] == BlockState.PUBLISHED).tolist()
                for survivor in kept:
                    assert content(twin.table, survivor) == content(reference, survivor)
                if block not in kept:
                    assert twin.table["generation"][block] != reference["generation"][block]
                outside_check = (*range(16, 24), *range(60, 64))
                assert (block in kept) == (offset in outside_check)
                twin.check()


@pytest.mark.parametrize(
    ("change", "kept", "counter"),
    [
        ({"block": 1, "state": BlockState.WRITING}, 1, "orphans"),
        ({"block": 1, "generation": 9, "sealed": True}, 2, "orphans"),
        ({"block": 2, "depth": 5, "sealed": True}, 2, "orphans"),
        ({"block": 3, "parent": 0, "sealed": True}, 4, "orphans"),
        ({"block": 3, "parent": 10, "sealed": True}, 4, "orphans"),
        ({"block": 3, "parent": 2**32 - 1, "sealed": True}, 4, "orphans"),
        ({"block": 6, "namespace": 2, "sealed": True}, 5, "corrupt"),
        ({"block": 6, "generation": 0, "sealed": True}, 5, "corrupt"),
        ({"block": 6, "state": 77}, 5, "corrupt"),
        ({"block": 6, "checksum": 5}, 5, "corrupt"),
        ({"block": 6, "state": BlockState.EVICTING}, 5, "unfinished"),
    ],
)
def test_each_kind_of_broken_record_is_dropped_with_what_hangs_below_it(
    forest, change, kept, counter
):
    table = forest.table.copy()
    block, is_sealed = change.pop("block"), change.pop("sealed", False)
    for name, value in change.items():
        table[name][block] = value
    if is_sealed:
        sealed(table, block)
    twin = World(table=table)
    assert twin.report.kept == kept
    assert getattr(twin.report, counter) > 0
    twin.check()
    assert len(twin.reserve(12).blocks) == 12


def test_of_two_blocks_with_one_key_one_is_kept(forest):
    table = forest.table.copy()
    table[8] = table[6]
    sealed(table, 8)
    twin = World(table=table)
    assert (twin.report.kept, twin.report.duplicates) == (6, 1)
    assert twin.found((7,)) == 1
    twin.check()


def test_a_record_copied_to_another_place_is_not_believed(forest):
    table = forest.table.copy()
    table[8] = table[6]
    assert World(table=table).report.corrupt == 1


def test_a_forged_circle_of_parents_ends(forest):
    table = forest.table.copy()
    for block, parent in ((8, 9), (9, 8)):
        table[block] = table[2]
        table["key_low"][block] = block
        table["parent"][block] = parent
        table["parent_generation"][block] = table["generation"][parent] = 1
    sealed(table, 8, 9)
    twin = World(table=table)
    assert (twin.report.kept, twin.report.orphans) == (6, 2)


def test_a_corrupt_use_counter_neither_overflows_nor_stops_eviction(forest):
    table = forest.table.copy()
    table["last_use"][6] = 2**64 - 1
    twin = World(table=table)
    assert twin.found((7,)) == 1
    twin.publish((8,))
    assert len(twin.directory.evict(1, num_blocks=7)) == 7


def test_a_long_prefix_is_adopted_whole():
    world = World(20_000)
    keys = os.urandom(20_000 * 16)
    granted = world.reserve(20_000)
    item = MirrorItem(granted.lease_id, granted.blocks, granted.generations, keys)
    world.directory.mirror_completed(1, 1, [item])
    twin = World(table=world.table.copy())
    assert twin.report.kept == 20_000
    result = twin.directory.lookup(1, 1, SPACE, keys, 0, now_s=0.0)
    assert result.blocks.tolist() == list(range(1, 20_001))


def test_the_scan_itself_changes_nothing(forest):
    before = forest.table.copy()
    find_survivors(forest.table, namespace=1)
    assert (forest.table == before).all()


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=8 * RECORD_BYTES, max_size=8 * RECORD_BYTES))
def test_rubbish_is_never_published(rubbish):
    world = World(table=np.frombuffer(bytearray(rubbish), RECORD_DTYPE))
    assert world.report.kept == 0
    world.check()
    assert len(world.reserve(7).blocks) == 7


class StoreLog:
    """Copies the table after every single store, with what was published at that moment."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.names: set[str] = set()
        self.snapshots: list[tuple[str, np.ndarray]] = []

    def __call__(self, _kind: crashpoints.PointKind, name: str) -> None:
        if name.startswith("record."):
            self.names.add(name)
            self.snapshots.append((name, self.world.table.copy()))


def everything_that_stores(world: World) -> None:
    """Each path of the directory that writes to the table."""
    world.publish((0, 1, 2, 3))
    world.publish((0,))
    lease = world.reserve(1)
    world.directory.mirror_enqueued(1, 1, [world.item(lease, (7,))])
    world.complete(lease, (7,))
    forked = world.reserve(4)
    world.complete(forked, (0, 1, 8, 9))
    world.directory.free(1, 1, forked.lease_id, world.lookup((0, 1, 8, 9)).blocks[3:])
    world.directory.abandon(1, 1, world.reserve(2, lease=lease.lease_id).lease_id, None)
    world.directory.session_died(1)
    world.directory.open_session(1)
    world.found((7,))
    world.reserve(8)
    world.directory.session_died(1)
    world.directory.open_session(1)
    world.publish((4, 5, 6))


def test_a_crash_between_any_two_stores_leaves_old_or_new_and_nothing_else():
    world = World(10)
    log = StoreLog(world)
    before = crashpoints.install(log)
    try:
        everything_that_stores(world)
    finally:
        crashpoints.install(before)
    assert log.names == {name for name in crashpoints.declared() if name.startswith("record.")}
    genuine = {content(table, block) for _, table in log.snapshots for block in range(1, 11)
               if table["state"][block] == BlockState.PUBLISHED}  # fmt: skip
    genuine_keys = {
        (int.from_bytes(key(path)[:8], "little"), int.from_bytes(key(path)[8:], "little"))
        for path in ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (7,), (0, 1, 8), (0, 1, 8, 9),
                     (4,), (4, 5), (4, 5, 6))
    }  # fmt: skip
    assert {entry[:2] for entry in genuine} == genuine_keys
    handed_out: set[tuple[int, int]] = set()
    for name, table in log.snapshots:
        published = np.flatnonzero(table["state"] == BlockState.PUBLISHED)
        twin = World(table=table.copy())
        twin.check()
        assert twin.report.corrupt == 0, name
        kept = np.flatnonzero(twin.table["state"] == BlockState.PUBLISHED)
        assert {content(twin.table, block) for block in kept} <= genuine
        assert set(kept) <= set(published), name
        lost = np.setdiff1d(published, kept)
        assert (twin.table["generation"][lost] != table["generation"][lost]).all()
        handed_out |= {
            (block, int(table["generation"][block]))
            for block in np.flatnonzero(np.isin(table["state"], HELD)).tolist()
        }
        granted = twin.reserve(10 - len(kept))
        for handle in zip(granted.blocks.tolist(), granted.generations.tolist(), strict=True):
            assert handle not in handed_out, (name, handle)


def test_a_crash_while_adopting_can_be_adopted(forest):
    forest.reserve(4)
    crashed = forest.table.copy()
    crashed["parent_generation"][3] += 1
    snapshots = []
    before = crashpoints.install(lambda _kind, _name: snapshots.append(crashed.copy()))
    try:
        world = World(table=crashed)
    finally:
        crashpoints.install(before)
    assert len(snapshots) >= 4
    for table in snapshots:
        twin = World(table=table)
        assert twin.report.kept == world.report.kept == 4
        assert twin.found((0, 1, 2, 3)) == 2
        twin.check()


def test_a_fresh_start_forgets_what_was_there_but_not_the_generations(forest):
    table = forest.table
    before = table["generation"].copy()
    again = World(12)
    again.directory.drop_namespace(1)
    again.directory.open_namespace(FINGERPRINT, name="m", block_size=BLOCK_SIZE, namespace=1)
    again.directory.attach_backing(1, table, mode=BackingMode.FRESH)
    again.table = table
    assert again.directory.counts(1).free == 12
    assert (table["generation"][1:] == before[1:] + 1).all()
    assert (table["state"] == BlockState.FREE).all()
    again.check()
