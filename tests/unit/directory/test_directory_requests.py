"""Requests to the directory, one behaviour each: invariants I1 to I3, bad input, quotas, leases."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
from directory_world import (
    FINGERPRINT,
    SPACE,
    TTL_S,
    World,
    chain,
    key,
    path_of,
    u32,
)

from hisparse_service.contract.errors import (
    CapacityError,
    ForeignKeys,
    IllegalTransition,
    LeaseExpired,
    LeaseLost,
    NotHeld,
    PublishOutOfOrder,
    QuotaExceeded,
    StaleBlock,
    UnknownSession,
    UsageError,
    WriterTaken,
)
from hisparse_service.contract.keys import key_space
from hisparse_service.contract.limits import MAX_NAMESPACES
from hisparse_service.contract.segment import RECORD_DTYPE, BlockState
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import BackingMode, EventKind, MirrorItem, Quota
from hisparse_service.directory.states import (
    BLOCK_TRANSITIONS,
    BlockEvent,
    LeaseEvent,
    LeaseState,
    next_block_state,
    next_lease_state,
)


@pytest.fixture
def world():
    made = World()
    yield made
    made.check()


# --- states ---------------------------------------------------------------------------------


def test_every_block_event_that_the_table_lacks_raises_with_state_event_and_id():
    for state in BlockState:
        for event in BlockEvent:
            if (state, event) in BLOCK_TRANSITIONS:
                assert next_block_state(state, event, block=7) is BLOCK_TRANSITIONS[state, event]
                continue
            with pytest.raises(IllegalTransition) as error:
                next_block_state(state, event, block=7)
            assert error.value.details == {"block": 7, "state": state.name, "event": event.name}


def test_a_lease_ends_once():
    for event in LeaseEvent:
        ended = next_lease_state(LeaseState.GRANTED, event, lease=3)
        for again in LeaseEvent:
            with pytest.raises(IllegalTransition):
                next_lease_state(ended, again, lease=3)


# --- I1 -------------------------------------------------------------------------------------


def test_i1_a_reserved_block_is_written_only_by_the_session_that_reserved_it(world):
    mine = world.reserve(1, session=1)
    theirs = world.reserve(1, session=2)
    stolen = dataclasses.replace(theirs, blocks=mine.blocks, generations=mine.generations)
    for call in (world.directory.mirror_enqueued, world.directory.mirror_completed):
        with pytest.raises(NotHeld):
            call(2, 1, [world.item(stolen, (0,))])
    with pytest.raises(LeaseLost):
        world.directory.mirror_completed(2, 1, [world.item(mine, (0,))])
    assert world.found((0,)) == 0


def test_i1_another_lease_of_the_same_session_does_not_write_it_either(world):
    mine, other = world.reserve(2), world.reserve(2)
    stolen = dataclasses.replace(other, blocks=mine.blocks, generations=mine.generations)
    with pytest.raises(NotHeld):
        world.directory.mirror_completed(1, 1, [world.item(stolen, (0, 1))])


def test_i1_one_rank_of_a_group_writes(world):
    directory, now_s = world.directory, world.clock.now_s
    for session, rank in ((10, 0), (11, 1)):
        directory.open_session(session, group="tp", rank=rank)
    with pytest.raises(LeaseLost):
        directory.reserve(10, 1, 1, 0, now_s=now_s)
    directory.take_writer("tp", 1, 10, rank=0, now_s=now_s)
    directory.take_writer("tp", 1, 10, rank=0, now_s=now_s)
    with pytest.raises(WriterTaken) as error:
        directory.take_writer("tp", 1, 11, rank=1, now_s=now_s)
    assert error.value.details == {"holder_session": 10, "holder_rank": 0}
    reserved, _ = world.publish((0, 1), session=10)
    with pytest.raises(LeaseLost):
        directory.reserve(11, 1, 1, 0, now_s=now_s)
    found = world.lookup((0, 1), session=11)
    assert found.blocks.tolist() == reserved.blocks.tolist()
    with pytest.raises(LeaseLost):
        directory.free(11, 1, found.lease_id, found.blocks)


def test_i1_the_writer_lease_passes_on_by_yield_death_and_expiry(world):
    directory, clock = world.directory, world.clock
    for session in (10, 11):
        directory.open_session(session, group="tp", rank=session)
    directory.take_writer("tp", 1, 10, rank=10, now_s=clock.now_s)
    directory.yield_writer("tp", 1, 11)
    directory.yield_writer("tp", 1, 10)
    directory.take_writer("tp", 1, 11, rank=11, now_s=clock.now_s)
    assert directory.session_died(11).yielded == [(1, "tp")]
    directory.take_writer("tp", 1, 10, rank=10, now_s=clock.now_s)
    clock.advance(20.0)
    directory.renew(10, [], now_s=clock.now_s)
    assert not directory.expire(clock.advance(20.0)).yielded
    assert directory.expire(clock.advance(20.0)).yielded == [(1, "tp")]
    with pytest.raises(LeaseLost):
        directory.reserve(10, 1, 1, 0, now_s=clock.now_s)


def test_a_session_without_a_group_is_a_group_of_its_own(world):
    for session in (1, 2):
        world.directory.take_writer("", 1, session, rank=0, now_s=0.0)
        assert len(world.reserve(1, session=session).blocks) == 1
    with pytest.raises(UsageError):
        world.directory.take_writer("tp", 1, 1, rank=0, now_s=0.0)


def test_i1_two_engines_that_compute_one_prefix_end_with_one_copy(world):
    first, second = world.reserve(4, session=1), world.reserve(4, session=2)
    won = world.complete(first, path_of(4), session=1)
    lost = world.complete(second, path_of(4), session=2)
    assert lost.blocks.tolist() == won.blocks.tolist() == first.blocks.tolist()
    counts = world.directory.counts(1)
    assert (counts.pinned, counts.reserved, counts.free) == (4, 0, 28)
    statistics = world.directory.statistics(1)
    assert (statistics.publishes, statistics.duplicates_merged) == (4, 4)
    with pytest.raises(StaleBlock):
        world.directory.mirror_completed(2, 1, [world.item(second, path_of(4))])
    world.directory.release_leases(1, [first.lease_id])
    assert world.directory.counts(1).pinned == 4, "the loser pins the canonical copy"


def test_i1_prefixes_that_fork_share_what_they_share(world):
    world.publish((0, 1, 2))
    answer = world.publish((0, 1, 3, 4))[1]
    assert world.directory.counts(1).published == 5
    assert world.found((0, 1, 2)) == 3
    assert world.lookup((0, 1, 3, 4)).blocks.tolist() == answer.blocks.tolist()


# --- I2 -------------------------------------------------------------------------------------


def test_i2_a_block_is_found_only_after_completion(world):
    reserved = world.reserve(2)
    assert world.found((0, 1)) == 0
    world.directory.mirror_enqueued(1, 1, [world.item(reserved, (0, 1))])
    assert (world.table["state"][reserved.blocks] == BlockState.WRITING).all()
    assert world.found((0, 1)) == 0
    world.complete(reserved, (0, 1))
    assert world.found((0, 1)) == 2


def test_i2_a_lost_ack_never_publishes(world):
    reserved = world.reserve(2)
    world.directory.mirror_enqueued(1, 1, [world.item(reserved, (0, 1))])
    assert world.directory.session_died(1).returned_blocks == 2
    world.directory.open_session(1)
    assert world.found((0, 1)) == 0
    assert world.directory.counts(1).free == 32
    with pytest.raises(LeaseLost):
        world.complete(reserved, (0, 1))


def test_i2_a_refused_batch_publishes_nothing(world):
    good, bad = world.reserve(3), world.reserve(3)
    wrong = dataclasses.replace(bad, generations=bad.generations + np.uint32(1))
    before = world.table.copy()
    with pytest.raises(StaleBlock):
        world.directory.mirror_completed(
            1, 1, [world.item(good, (0, 1, 2)), world.item(wrong, (5, 6, 7))]
        )
    assert (world.table == before).all()
    assert world.found((0, 1, 2)) == 0


def test_i2_a_block_is_published_only_below_a_published_parent(world):
    reserved = world.reserve(4)
    blocks, generations = reserved.blocks, reserved.generations
    parent = dataclasses.replace(reserved, blocks=blocks[:1], generations=generations[:1])
    child = dataclasses.replace(reserved, blocks=blocks[1:2], generations=generations[1:2])
    handle = (int(blocks[0]), int(generations[0]))
    with pytest.raises(PublishOutOfOrder):
        world.complete(child, (0, 1), after=handle)
    world.complete(parent, (0,))
    with pytest.raises(PublishOutOfOrder):
        world.complete(child, (0, 1), after=(handle[0], handle[1] + 1))
    with pytest.raises(PublishOutOfOrder):
        world.complete(child, (0, 1), after=(99, 1))
    world.complete(child, (0, 1), after=handle)
    assert world.found((0, 1)) == 2


@pytest.mark.parametrize("length", [1, 3])
def test_i2_an_item_may_follow_an_earlier_one_of_its_batch(world, length):
    first, second = world.reserve(2), world.reserve(length)
    last = (int(first.blocks[-1]), int(first.generations[-1]))
    path = path_of(2 + length)
    answers = world.directory.mirror_completed(
        1, 1, [world.item(first, path[:2]), world.item(second, path, after=last)]
    )
    assert [len(answer.blocks) for answer in answers] == [2, length]
    assert world.found(path) == 2 + length


@pytest.mark.parametrize("length", [1, 3])
def test_i2_two_items_of_one_batch_with_one_key_are_merged(world, length):
    path = path_of(length)
    first, second, third = world.reserve(length), world.reserve(length), world.reserve(1)
    after_loser = (int(second.blocks[-1]), int(second.generations[-1]))
    answers = world.directory.mirror_completed(
        1, 1,
        [
            world.item(first, path),
            world.item(second, path),
            world.item(third, (*path, 9), after=after_loser),
        ],
    )  # fmt: skip
    assert answers[1].blocks.tolist() == answers[0].blocks.tolist() == first.blocks.tolist()
    assert world.found((*path, 9)) == length + 1
    assert world.directory.statistics(1).duplicates_merged == length


# --- I3 -------------------------------------------------------------------------------------


def test_i3_a_handle_of_a_block_that_was_given_up_is_stale(world):
    reserved, _ = world.publish((0, 1))
    handle = (reserved.blocks, reserved.generations)
    held = world.directory.pin(1, 1, 0, *handle, now_s=0.0)
    world.directory.release_leases(1, [held.lease_id])
    assert world.directory.evict(1, num_blocks=2).tolist() == [2, 1]
    assert (world.table["generation"][reserved.blocks] != reserved.generations).all()
    with pytest.raises(StaleBlock):
        world.directory.pin(1, 1, 0, *handle, now_s=0.0)
    again, _ = world.publish((0, 1))
    assert sorted(again.blocks.tolist()) == sorted(reserved.blocks.tolist())
    with pytest.raises(StaleBlock) as error:
        world.directory.pin(1, 1, 0, *handle, now_s=0.0)
    assert error.value.details["generation_now"] == 2


def test_i3_every_way_of_giving_a_block_up_changes_its_generation(world):
    def generations(blocks):
        return world.table["generation"][blocks].tolist()

    reserved = world.reserve(6)
    lease, blocks = reserved.lease_id, reserved.blocks
    world.directory.abandon(1, 1, lease, blocks[:1])
    world.directory.free(1, 1, lease, blocks[1:2])
    world.directory.release_leases(1, [lease])
    assert generations(blocks) == [2] * 6
    again, _ = world.publish((0,))
    duplicate, _ = world.publish((0,))
    assert generations(duplicate.blocks) == (duplicate.generations + 1).tolist()
    assert generations(again.blocks) == again.generations.tolist()


def test_i3_the_generation_is_stored_before_the_block_can_be_handed_out_again(world):
    reserved, _ = world.publish(path_of(32))
    before = world.table["generation"].copy()
    result = world.reserve(32)
    assert (world.table["generation"][1:] == before[1:] + 1).all()
    assert result.generations.tolist() == world.table["generation"][result.blocks].tolist()
    assert len(reserved.blocks) == len(result.blocks) == 32


def test_i3_generations_leave_out_zero_when_they_wrap():
    table = np.zeros(3, RECORD_DTYPE)
    table["generation"] = 2**32 - 2
    world = World(table=table)
    for expected in (2**32 - 2, 2**32 - 1, 1, 2):
        reserved = world.reserve(1)
        assert reserved.generations.tolist() == [expected]
        world.directory.release_leases(1, [reserved.lease_id])


def test_i3_a_block_cannot_go_between_two_slices_of_a_lookup(world):
    world.publish(path_of(8))
    running = world.directory.begin_lookup(1, 1, SPACE, chain(path_of(8)), 0, now_s=0.0)
    assert not running.step(4)
    gone = world.directory.evict(1, num_blocks=32)
    assert sorted(gone.tolist()) == [5, 6, 7, 8]
    assert running.step(4)
    assert running.finish(0.0).blocks.tolist() == [1, 2, 3, 4]


def test_i3_a_lookup_whose_lease_ended_between_two_slices_is_lost(world):
    world.publish(path_of(8))
    running = world.directory.begin_lookup(1, 1, SPACE, chain(path_of(8)), 0, now_s=0.0)
    running.step(4)
    world.directory.session_died(1)
    with pytest.raises(LeaseLost):
        running.step(4)
    with pytest.raises(LeaseLost):
        running.finish(0.0)
    running.cancel()
    assert world.directory.counts(1).pinned == 0


def test_a_cancelled_lookup_leaves_no_pins(world):
    world.publish(path_of(8))
    running = world.directory.begin_lookup(1, 1, SPACE, chain(path_of(8)), 0, now_s=0.0)
    running.step(4)
    with pytest.raises(UsageError):
        running.finish(0.0)
    running.cancel()
    running.cancel()
    counts = world.directory.counts(1)
    assert (counts.pinned, counts.published) == (0, 8)
    assert world.directory.session_usage(1).leases == 0


# --- lookup ---------------------------------------------------------------------------------


def test_random_keys_are_not_found_and_make_no_lease(world):
    world.publish(path_of(16))
    result = world.directory.lookup(1, 1, SPACE, os.urandom(16 * 500), 0, now_s=0.0)
    assert (result.lease_id, len(result.blocks)) == (0, 0)
    assert world.directory.session_usage(1).leases == 0


def test_the_longest_published_prefix_is_found_wherever_it_ends():
    world = World(300)
    world.publish(path_of(300))
    for length in (0, 1, 2, 31, 32, 33, 299, 300):
        path = (*path_of(length), *([-1] * (300 - length)))
        assert world.found(path) == length


def test_a_prefix_is_followed_link_by_link_not_key_by_key(world):
    """A client that publishes a key below a foreign parent must not lead others astray."""
    world.publish((0, 1))
    honest = world.lookup((0, 1))
    liar = world.reserve(1, session=2)
    item = MirrorItem(
        liar.lease_id, liar.blocks, liar.generations, key((7, 8)),
        int(honest.blocks[1]), int(honest.generations[1]),
    )  # fmt: skip
    world.directory.mirror_completed(2, 1, [item])
    world.publish((7,))
    assert world.found((7, 8)) == 1


def test_a_key_published_below_another_parent_is_out_of_order(world):
    world.publish((0, 1, 2))
    reserved = world.reserve(1)
    with pytest.raises(PublishOutOfOrder):
        world.directory.mirror_completed(
            1, 1,
            [MirrorItem(reserved.lease_id, reserved.blocks, reserved.generations, key((0, 1)))],
        )  # fmt: skip
    many = world.reserve(2)
    twice = MirrorItem(many.lease_id, many.blocks, many.generations, key((5,)) * 2)
    with pytest.raises(PublishOutOfOrder):
        world.directory.mirror_completed(1, 1, [twice])


def test_a_lease_that_looks_the_same_prefix_up_twice_pins_it_once(world):
    world.publish(path_of(8))
    first = world.lookup(path_of(4))
    second = world.lookup(path_of(8), lease=first.lease_id)
    assert second.lease_id == first.lease_id
    assert world.directory.session_usage(1).pins == 8
    world.directory.unpin(1, 1, first.lease_id, second.blocks)
    assert world.directory.counts(1).pinned == 0


# --- bad input ------------------------------------------------------------------------------


def test_keys_of_another_namespace_are_refused(world):
    with pytest.raises(ForeignKeys):
        world.directory.lookup(1, 1, key_space(bytes(16)), chain((0,)), 0, now_s=0.0)
    with pytest.raises(UsageError):
        world.directory.lookup(1, 1, SPACE, b"x" * 17, 0, now_s=0.0)


def test_a_double_publish_is_illegal_and_names_state_event_and_block(world):
    reserved = world.reserve(1)
    world.complete(reserved, (0,))
    with pytest.raises(IllegalTransition) as error:
        world.complete(reserved, (0,))
    assert error.value.details == {
        "block": int(reserved.blocks[0]), "state": "PUBLISHED", "event": "PUBLISH",
    }  # fmt: skip
    with pytest.raises(IllegalTransition):
        world.directory.mirror_enqueued(1, 1, [world.item(reserved, (0,))])


@pytest.mark.parametrize("length", [1, 3])
def test_a_block_twice_in_a_batch_is_a_double_publish(world, length):
    reserved = world.reserve(length)
    item = world.item(reserved, path_of(length))
    before = world.table.copy()
    with pytest.raises(IllegalTransition):
        world.directory.mirror_completed(1, 1, [item, item])
    assert (world.table == before).all()
    twice = dataclasses.replace(
        reserved, blocks=reserved.blocks[[0, 0]], generations=reserved.generations[[0, 0]]
    )
    with pytest.raises(IllegalTransition):
        world.complete(twice, (0, 1))


def test_blocks_that_are_not_held_cannot_be_freed_unpinned_or_abandoned(world):
    published, _ = world.publish((0, 1))
    mine = world.reserve(1)
    directory = world.directory
    for call in (directory.free, directory.unpin, directory.abandon):
        for blocks in (published.blocks, u32(0), u32(33), u32(30)):
            with pytest.raises(NotHeld):
                call(1, 1, mine.lease_id, blocks)
        with pytest.raises((UsageError, NotHeld)):
            call(1, 1, mine.lease_id, mine.blocks[[0, 0]])
    assert world.found((0, 1)) == 2


def test_items_whose_arrays_do_not_fit_each_other_are_refused(world):
    reserved = world.reserve(2)
    good = world.item(reserved, (0, 1))
    for bad in (
        dataclasses.replace(good, keys=good.keys[:-1]),
        dataclasses.replace(good, keys=good.keys[:16]),
        dataclasses.replace(good, generations=good.generations[:1]),
        dataclasses.replace(good, checksums=np.ones(1, np.uint64)),
        dataclasses.replace(good, blocks=good.blocks[:0], generations=good.blocks[:0], keys=b""),
    ):
        with pytest.raises(UsageError):
            world.directory.mirror_completed(1, 1, [good, bad])
    for blocks in (u32(0, 1), u32(1, 33), u32(1, 2**32 - 1)):
        with pytest.raises(NotHeld):
            world.directory.mirror_completed(1, 1, [dataclasses.replace(good, blocks=blocks)])
    assert world.found((0, 1)) == 0


def test_unknown_sessions_namespaces_and_leases_are_typed(world):
    directory = world.directory
    with pytest.raises(UnknownSession):
        directory.reserve(77, 1, 1, 0, now_s=0.0)
    with pytest.raises(UsageError):
        directory.reserve(1, 9, 1, 0, now_s=0.0)
    with pytest.raises(LeaseLost):
        directory.reserve(1, 1, 1, 99, now_s=0.0)
    for num_blocks in (0, -1, 2**31):
        with pytest.raises(UsageError):
            directory.reserve(1, 1, num_blocks, 0, now_s=0.0)
    with pytest.raises(UsageError):
        directory.open_session(1)
    refusals = directory.statistics(1).refusals
    assert refusals == {"UnknownSession": 1, "LeaseLost": 1, "UsageError": 3}


def test_namespaces_are_opened_once_by_fingerprint():
    directory = Directory(epoch=5)
    first = directory.open_namespace(FINGERPRINT, name="a", block_size=64)
    assert directory.open_namespace(FINGERPRINT, name="a", block_size=64) == first == 1
    with pytest.raises(UsageError):
        directory.open_namespace(FINGERPRINT, name="a", block_size=64, namespace=2)
    with pytest.raises(UsageError):
        directory.open_namespace(bytes(16), name="b", block_size=64, namespace=1)
    for i in range(1, MAX_NAMESPACES):
        directory.open_namespace(i.to_bytes(16, "big"), name="x", block_size=64)
    with pytest.raises(QuotaExceeded):
        directory.open_namespace(b"\xff" * 16, name="x", block_size=64)
    directory.drop_namespace(7)
    assert directory.open_namespace(b"\xff" * 16, name="x", block_size=64) == 7


def test_a_table_must_be_one():
    directory = Directory(epoch=5)
    namespace = directory.open_namespace(FINGERPRINT, name="a", block_size=64)
    frozen = np.zeros(4, RECORD_DTYPE)
    frozen.flags.writeable = False
    for table in (np.zeros(4, np.uint64), np.zeros(1, RECORD_DTYPE), frozen,
                  np.zeros(8, RECORD_DTYPE)[::2]):  # fmt: skip
        with pytest.raises(UsageError):
            directory.attach_backing(namespace, table, mode=BackingMode.FRESH)
    directory.open_session(1)
    with pytest.raises(UsageError):
        directory.reserve(1, namespace, 1, 0, now_s=0.0)


def test_a_dropped_namespace_holds_no_view_of_its_table_and_ends_its_leases():
    buffer = bytearray(RECORD_DTYPE.itemsize * 33)
    world = World(table=np.frombuffer(buffer, RECORD_DTYPE))
    running_keys = chain(path_of(8))
    world.publish(path_of(8))
    reserved = world.reserve(2)
    running = world.directory.begin_lookup(1, 1, SPACE, running_keys, 0, now_s=0.0)
    running.step(2)
    lost = world.directory.drop_namespace(1).lost_leases
    assert (1, reserved.lease_id) in lost
    assert len(lost) == 2
    with pytest.raises(LeaseLost):
        running.step(2)
    del world.table
    buffer.append(0)  # BufferError while a view is exported
    assert world.directory.renew(1, [reserved.lease_id], now_s=0.0) == [reserved.lease_id]


# --- capacity, quotas -----------------------------------------------------------------------


def test_a_request_that_cannot_be_satisfied_evicts_nothing(world):
    world.publish(path_of(16))
    held = world.lookup(path_of(8))
    before = world.table.copy()
    with pytest.raises(CapacityError) as error:
        world.reserve(25)
    assert error.value.details == {"needed": 25, "free": 16, "evictable": 8}
    assert (world.table == before).all()
    assert world.evicted() == []
    world.directory.release_leases(1, [held.lease_id])
    assert len(world.reserve(32).blocks) == 32


def test_unpinned_blocks_above_a_pinned_one_cannot_be_evicted(world):
    reserved, _ = world.publish(path_of(4))
    deep = world.directory.pin(1, 1, 0, reserved.blocks[3:], reserved.generations[3:], now_s=0.0)
    with pytest.raises(CapacityError):
        world.reserve(29)
    assert world.evicted() == []
    world.directory.release_leases(1, [deep.lease_id])
    world.reserve(29)
    assert world.evicted() == [4]


@pytest.mark.parametrize("of", ["session", "namespace"])
def test_quotas_refuse_before_anything_changes(of):
    quota = Quota(max_reserved_blocks=4, max_pins=5, max_leases=2)
    world = World(**{f"{of}_quota": quota})
    directory = world.directory
    reserved = world.reserve(4)
    with pytest.raises(QuotaExceeded) as error:
        world.reserve(1, lease=reserved.lease_id)
    assert error.value.details["limit"] == 4
    world.complete(reserved, path_of(4))
    more = world.reserve(2, lease=reserved.lease_id)
    with pytest.raises(QuotaExceeded):
        world.complete(more, path_of(6), after=(4, 1))
    assert world.directory.counts(1).reserved == 2
    session = 1 if of == "session" else 2
    with pytest.raises(QuotaExceeded):
        world.lookup(path_of(4), session=session)
    assert directory.namespace_usage(1).leases == 1
    second = world.reserve(1, session=session)
    with pytest.raises(QuotaExceeded):
        world.reserve(1, session=session)
    assert second.lease_id
    assert directory.statistics(1).refusals["QuotaExceeded"] == 3
    world.check()


def test_the_null_block_is_never_handed_out(world):
    assert sorted(world.reserve(32).blocks.tolist()) == list(range(1, 33))
    assert world.table["state"][0] == BlockState.FREE


# --- leases ---------------------------------------------------------------------------------


def test_an_expired_lease_loses_its_pins_and_keeps_what_it_reserved(world):
    world.publish(path_of(4))
    lease = world.lookup(path_of(4)).lease_id
    reserved = world.reserve(2, lease=lease)
    expired = world.directory.expire(world.clock.advance(TTL_S))
    assert expired.expired == [(1, lease)]
    counts = world.directory.counts(1)
    assert (counts.pinned, counts.reserved) == (0, 2)
    with pytest.raises(LeaseExpired):
        world.complete(reserved, (8, 9))
    with pytest.raises(LeaseExpired):
        world.lookup(path_of(4), lease=lease)
    assert world.directory.renew(1, [lease], now_s=world.clock.now_s) == [lease]
    assert world.directory.abandon(1, 1, lease, None).tolist() == reserved.blocks.tolist()
    assert world.directory.release_leases(1, [lease]).lost == []
    assert world.directory.counts(1).free == 28


def test_a_renewed_lease_lives_on(world):
    world.publish(path_of(4))
    lease = world.lookup(path_of(4)).lease_id
    other = world.lookup(path_of(2)).lease_id
    world.clock.advance(TTL_S - 1)
    assert world.directory.renew(1, [lease, 999], now_s=world.clock.now_s) == [999]
    result = world.directory.expire(world.clock.advance(1.0))
    assert result.expired == [(1, other)]
    assert world.directory.counts(1).pinned == 4
    assert result.next_deadline_s is not None
    while not (result := world.directory.expire(result.next_deadline_s)).expired:
        pass
    assert result.expired == [(1, lease)]
    assert result.next_deadline_s is None


def test_a_dead_session_gives_back_what_it_held_and_its_published_blocks_stay(world):
    world.publish(path_of(4))
    world.lookup(path_of(4), session=2)
    world.reserve(3, session=2)
    ended = world.directory.session_died(2)
    assert (ended.returned_blocks, ended.dropped_pins, ended.leases) == (3, 4, 2)
    assert world.directory.session_died(2).leases == 0
    assert world.found(path_of(4)) == 4
    assert world.directory.counts(1).free == 28


def test_freed_blocks_are_forgotten_unless_somebody_needs_them(world):
    reserved = world.reserve(5)
    world.complete(dataclasses.replace(
        reserved, blocks=reserved.blocks[:4], generations=reserved.generations[:4]
    ), path_of(4))  # fmt: skip
    other = world.lookup(path_of(2), session=2)
    freed = world.directory.free(1, 1, reserved.lease_id, reserved.blocks).freed
    assert sorted(freed.tolist()) == [3, 4, 5]
    assert world.found(path_of(4)) == 2
    world.directory.free(2, 1, other.lease_id, other.blocks)
    assert world.directory.counts(1).free == 32


# --- eviction order -------------------------------------------------------------------------


def test_eviction_takes_the_least_recently_used_first_and_leaves_before_parents(world):
    world.publish((0, 1, 2))
    world.publish((0, 1, 3))
    world.publish((9,))
    blocks = {
        path: int(world.lookup(path).blocks[-1])
        for path in ((0,), (0, 1), (0, 1, 2), (0, 1, 3), (9,))
    }
    for lease in list(range(1, 20)):
        world.directory.release_leases(1, [lease])
    for path in ((0, 1, 3), (9,), (0, 1, 2)):
        world.found(path)
    order = [(0, 1, 3), (9,), (0, 1, 2), (0, 1), (0,)]
    assert world.directory.evict(1, num_blocks=5).tolist() == [blocks[path] for path in order]


def test_eviction_order_is_the_same_one_by_one_and_all_at_once():
    def filled():
        world = World(60)
        for i in range(6):
            world.publish((i, *path_of(9)))
        for i in (3, 0, 5):
            world.found((i, *path_of(i + 2)))
        return world

    one_by_one, at_once = filled(), filled()
    singles = [int(one_by_one.directory.evict(1, num_blocks=1)[0]) for _ in range(60)]
    assert singles == at_once.directory.evict(1, num_blocks=60).tolist()


def test_a_pinned_parent_stays_when_its_children_go(world):
    world.publish(path_of(4))
    held = world.lookup(path_of(2))
    assert world.directory.evict(1, num_blocks=32).tolist() == [4, 3]
    assert world.directory.evict(1, num_blocks=32).size == 0
    world.directory.release_leases(1, [held.lease_id])
    assert world.directory.evict(1, num_blocks=32).tolist() == [2, 1]


def test_a_refused_request_does_not_change_the_order_of_eviction(world):
    for path in ((0, 1), (2, 3), (4, 5, 6)):
        world.publish(path)
    world.directory.pin(1, 1, 0, u32(7), u32(1), now_s=0.0)
    world.reserve(24)
    for _ in range(3):
        with pytest.raises(CapacityError):
            world.reserve(6)  # 7 blocks have no reader, but two of them are above a pinned one
    assert world.directory.evict(1, num_blocks=9).tolist() == [2, 1, 4, 3]


def test_a_parent_whose_last_child_is_freed_can_be_evicted(world):
    world.publish((0, 1))
    deep = world.lookup((0, 1)).lease_id
    shallow = world.lookup((0,)).lease_id
    world.directory.unpin(1, 1, deep, u32(1))
    world.directory.release_leases(1, [shallow])
    assert world.directory.free(1, 1, deep, u32(2)).freed.tolist() == [2]
    assert world.directory.evict(1, num_blocks=2).tolist() == [1]


def test_eviction_stays_right_when_stale_entries_are_swept():
    """Thousands of unpins of the same leaves: the queue must neither grow nor lose its order."""
    world = World(8)
    for i in range(8):
        world.publish((i,))
    blocks = [int(world.lookup((i,), session=2).blocks[0]) for i in range(8)]
    world.directory.session_died(2)
    for turn in range(1_200):
        for i in range(8):
            world.found(((i * 3 + turn) % 8,))
    policy = world.directory._namespaces[1].blocks._eviction
    assert len(policy._queue_blocks) - policy._head <= 8192
    last_turn = [(i * 3 + 1199) % 8 for i in range(8)]
    assert world.directory.evict(1, num_blocks=8).tolist() == [blocks[i] for i in last_turn]


def test_operators_evict_only_what_nobody_needs(world):
    reserved, _ = world.publish(path_of(4))
    held = world.lookup(path_of(2))
    assert world.directory.evict(1, blocks=reserved.blocks[2:3]).tolist() == []
    assert sorted(world.directory.evict(1, blocks=reserved.blocks).tolist()) == [3, 4]
    assert world.directory.evict(1, blocks=u32(30)).tolist() == []
    with pytest.raises(UsageError):
        world.directory.evict(1)
    assert len(held.blocks) == 2


# --- events, listing ------------------------------------------------------------------------


def test_events_name_what_was_published_and_what_went(world):
    reserved, _ = world.publish((0, 1, 2))
    world.publish((0, 1, 2))
    world.directory.evict(1, num_blocks=1)
    published, evicted = world.events
    assert published.kind is EventKind.PUBLISHED
    assert published.blocks.tolist() == reserved.blocks.tolist()
    assert published.keys == chain((0, 1, 2))
    assert (evicted.kind, evicted.blocks.tolist()) == (EventKind.EVICTED, [3])
    assert evicted.keys == key((0, 1, 2))


def test_blocks_are_listed_by_state_and_page_by_page(world):
    world.publish(path_of(4))
    reserved = world.reserve(3)
    rows = world.directory.list_blocks(1, states=frozenset({BlockState.RESERVED}))
    assert [row.block for row in rows] == reserved.blocks.tolist()
    assert {row.lease_id for row in rows} == {reserved.lease_id}
    page = world.directory.list_blocks(1, start=3, max_rows=2)
    assert [(row.block, row.depth, row.children) for row in page] == [(3, 2, 1), (4, 3, 0)]


def test_i10_checksums_and_use_counters_keep_64_bits(world):
    reserved = world.reserve(3)
    checksums = np.array([2**64 - 1, 2**63, 1], np.uint64)
    item = dataclasses.replace(world.item(reserved, (0, 1, 2)), checksums=checksums)
    world.directory.mirror_completed(1, 1, [item])
    one = world.reserve(1)
    item = dataclasses.replace(world.item(one, (7,)), checksums=checksums[:1])
    world.directory.mirror_completed(1, 1, [item])
    assert world.table["checksum"][reserved.blocks].tolist() == checksums.tolist()
    assert int(world.table["checksum"][one.blocks][0]) == 2**64 - 1
    world.table["last_use"][reserved.blocks] = 2**64 - 1
    world.restart()
    assert world.report.kept == 4
    assert world.found((0, 1, 2)) == 3
