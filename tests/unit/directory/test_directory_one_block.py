"""The way of one block and the general way: same rules, same result, down to the table's bytes."""

from __future__ import annotations

import dataclasses

import pytest
from directory_world import BLOCK_SIZE, World, key, u32
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract.errors import HiSparseError
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.blocks import next_generation
from hisparse_service.directory.one_block import OneCompleted, OneReserved
from hisparse_service.directory.results import Audience, MirrorItem, Quota

CAPACITY = 6
PATHS = ((0,), (1,), (0, 2), (0, 2, 3), (1, 2), (1, 3))


class Twin:
    """One of two worlds that are told the same."""

    def __init__(self, *, in_short: bool, **options) -> None:
        self.world = World(CAPACITY, **options)
        self.in_short = in_short
        self.granted: list[tuple[int, int, int, int]] = []
        """(session, lease, block, generation) of what was reserved."""
        self.published: list[tuple[int, int]] = []
        self.took_short_way = 0

    def reserve(self, session: int, lease_at: int) -> object:
        directory, now_s = self.world.directory, self.world.clock.now_s
        leases = [0, *(lease for owner, lease, _, _ in self.granted if owner == session)]
        lease = leases[lease_at % len(leases)]
        one = None
        if self.in_short:
            one = directory.reserve_one(session, 1, lease, now_s=now_s)
        if one is None:
            got = directory.reserve(session, 1, 1, lease, now_s=now_s)
            one = OneReserved(
                got.lease_id, got.deadline_s, int(got.blocks[0]), int(got.generations[0])
            )
        else:
            self.took_short_way += 1
        self.granted.append((session, one.lease_id, one.block, one.generation))
        return one

    def complete(
        self, lease_at: int, at: int, path_at: int, session: int, parent_at: int, aged: int
    ) -> object:
        """`aged`: 1 makes the block's handle an older one, 2 the parent's."""
        if not self.granted:
            return None
        directory, now_s = self.world.directory, self.world.clock.now_s
        _, _, block, generation = self.granted[at % len(self.granted)]
        lease = self.granted[lease_at % len(self.granted)][1]
        generation -= aged == 1
        parents = [(0, 0), *self.published]
        parent, parent_generation = parents[parent_at % len(parents)]
        parent_generation -= aged == 2 and parent > 0
        name = key(PATHS[path_at])
        if self.in_short and directory.publish_one(
            session, 1,
            OneCompleted(lease, block, generation, name, parent, parent_generation), now_s=now_s,
        ):  # fmt: skip
            self.took_short_way += 1
            answer = block, generation
        else:
            item = MirrorItem(
                lease, u32(block), u32(generation), name, parent, parent_generation
            )  # fmt: skip
            (done,) = directory.mirror_completed(session, 1, [item])
            directory.renew(session, [lease], now_s=now_s)
            answer = int(done.blocks[0]), int(done.generations[0])
        self.published.append(answer)
        return answer

    def enqueue(self, session: int, items: list[tuple[int, int, bool]]) -> object:
        """Items of (lease, block, whether the handle is an older one)."""
        directory, now_s = self.world.directory, self.world.clock.now_s
        handles = []
        for lease_at, at, is_old in items if self.granted else ():
            _, _, block, generation = self.granted[at % len(self.granted)]
            lease = self.granted[lease_at % len(self.granted)][1]
            handles.append((lease, block, generation - is_old))
        if self.in_short and directory.enqueue_ones(session, 1, handles, now_s=now_s):
            self.took_short_way += 1
            return None
        mirrors = [MirrorItem(lease, u32(block), u32(age)) for lease, block, age in handles]
        directory.mirror_enqueued(session, 1, mirrors)
        directory.renew(session, [lease for lease, _, _ in handles], now_s=now_s)
        return None

    def release(self, at: int) -> object:
        if not self.granted:
            return None
        session, lease, _, _ = self.granted[at % len(self.granted)]
        return self.world.directory.release_leases(session, [lease])

    def wait(self, seconds: int) -> object:
        self.world.clock.advance(float(seconds))
        return self.world.directory.expire(self.world.clock.now_s)

    def do(self, operation: str, arguments: tuple) -> object:
        try:
            return getattr(self, operation)(*arguments)
        except HiSparseError as error:
            return error.code, error.message

    def everything(self) -> tuple:
        directory = self.world.directory
        directory.check_invariants()
        return (
            self.world.table.tobytes(),
            directory.counts(1),
            dataclasses.replace(directory.statistics(1), refusals={}),
            [(e.kind, e.blocks.tolist(), e.keys) for e in self.world.events],
            [directory.session_usage(session) for session in (1, 2)],
            [lease.deadline_s for lease in directory._leases.leases()],
        )


SESSIONS = st.sampled_from([1, 2])
SMALL = st.integers(0, 7)
COMPLETE = st.tuples(
    st.just("complete"),
    st.tuples(
        SMALL, SMALL, st.integers(0, len(PATHS) - 1), SESSIONS, SMALL,
        st.sampled_from([0, 0, 0, 0, 1, 2]),
    ),
)  # fmt: skip
# Lease and block of one reservation, and its session: what may succeed.
COMPLETE_OWN = st.builds(
    lambda at, path_at, parent_at: ("complete", (at, at, path_at, 1, parent_at, 0)),
    SMALL, st.integers(0, len(PATHS) - 1), SMALL,
)  # fmt: skip
OPERATIONS = st.one_of(
    st.tuples(st.just("reserve"), st.tuples(SESSIONS, SMALL)),
    st.tuples(st.just("reserve"), st.tuples(st.just(1), SMALL)),
    COMPLETE,
    COMPLETE_OWN,
    COMPLETE_OWN,
    st.tuples(
        st.just("enqueue"),
        st.tuples(
            SESSIONS,
            st.lists(
                st.one_of(
                    SMALL.map(lambda at: (at, at, False)),
                    st.tuples(SMALL, SMALL, st.sampled_from([False, False, True])),
                ),
                max_size=3,
            ),
        ),
    ),
    st.tuples(st.just("release"), st.tuples(SMALL)),
    st.tuples(st.just("wait"), st.tuples(st.integers(1, 20))),
)
QUOTAS = st.sampled_from(
    [None, Quota(max_pins=2), Quota(max_reserved_blocks=2), Quota(max_leases=2)]
)


@settings(max_examples=600, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=30), session_quota=QUOTAS)
def test_both_ways_do_and_refuse_the_same(operations, session_quota):
    short = Twin(in_short=True, session_quota=session_quota)
    general = Twin(in_short=False, session_quota=session_quota)
    for operation, arguments in operations:
        assert short.do(operation, arguments) == general.do(operation, arguments)
        assert short.everything() == general.everything()


def test_the_common_case_goes_the_short_way():
    twin = Twin(in_short=True)
    first = twin.reserve(1, 0)
    block = twin.complete(0, 0, 0, 1, 0, 0)
    twin.reserve(1, 1)
    assert twin.complete(1, 1, 2, 1, 1, 0) == twin.granted[1][2:]
    assert (first.block, first.generation) == block
    assert twin.took_short_way == 4
    assert twin.world.found((0, 2)) == 2


def test_enqueued_blocks_of_one_each_are_written_from_then_on():
    twin = Twin(in_short=True)
    first, second = twin.reserve(1, 0), twin.reserve(1, 1)
    for _ in range(2):  # a block fills row by row
        twin.enqueue(1, [(0, 0, False), (1, 1, False)])
        states = twin.world.table["state"][[first.block, second.block]].tolist()
        assert states == [BlockState.WRITING] * 2
    assert twin.took_short_way == 4
    twin.complete(0, 0, 0, 1, 0, 0)
    for handles in (
        [(second.lease_id, second.block, second.generation), first[:1] + first[2:]],
        [(second.lease_id, second.block, second.generation + 1)],
        [(99, second.block, second.generation)],
        [(second.lease_id, CAPACITY + 1, 1)],
    ):
        before = twin.world.table.tobytes()
        assert not twin.world.directory.enqueue_ones(1, 1, handles, now_s=0.0), handles
        assert twin.world.table.tobytes() == before
    assert not twin.world.directory.enqueue_ones(
        2, 1, [(second.lease_id, second.block, 1)], now_s=0
    )


def make_group_world() -> World:
    world = World(CAPACITY)
    for session in (11, 12):
        world.directory.open_session(session, group="g", rank=session)
    return world


def test_i1_one_block_needs_the_writer_lease_of_the_group():
    world = make_group_world()
    world.directory.take_writer("g", 1, 11, rank=11, now_s=0.0)
    lease = world.directory.reserve(11, 1, 1, 0, now_s=0.0)
    item = OneCompleted(
        lease.lease_id, int(lease.blocks[0]), int(lease.generations[0]), key((0,)), 0, 0
    )
    world.directory.yield_writer("g", 1, 11)
    world.directory.take_writer("g", 1, 12, rank=12, now_s=0.0)
    assert not world.directory.publish_one(11, 1, item, now_s=0.0)
    assert world.directory.reserve_one(11, 1, lease.lease_id, now_s=0.0) is None
    assert world.directory.counts(1).published == 0


def test_one_block_renews_the_writer_lease_of_the_group():
    world = make_group_world()
    world.directory.take_writer("g", 1, 11, rank=11, now_s=0.0)
    lease = world.directory.reserve(11, 1, 1, 0, now_s=0.0)
    item = OneCompleted(
        lease.lease_id, int(lease.blocks[0]), int(lease.generations[0]), key((0,)), 0, 0
    )
    assert world.directory.publish_one(11, 1, item, now_s=20.0)
    (writer,) = world.directory.writers(1)
    assert writer.deadline_s == pytest.approx(50.0)


def test_events_are_made_only_while_somebody_listens():
    audience = Audience(is_there=False)
    world = World(CAPACITY, audience=audience)
    world.publish((0,))
    assert world.events == []
    audience.is_there = True
    world.publish((1,))
    assert [event.keys for event in world.events] == [key((1,))]


def test_nothing_is_done_without_session_namespace_or_backing():
    world = World(CAPACITY)
    lease = world.reserve(1)
    item = OneCompleted(
        lease.lease_id, int(lease.blocks[0]), int(lease.generations[0]), key((0,)), 0, 0
    )
    other = world.directory.open_namespace(b"o" * 16, name="o", block_size=BLOCK_SIZE)
    for session, namespace in ((9, 1), (1, 9), (1, other)):
        assert not world.directory.publish_one(session, namespace, item, now_s=0.0)
        assert world.directory.reserve_one(session, namespace, lease.lease_id, now_s=0.0) is None
    assert world.table["state"][item.block] == BlockState.RESERVED


def test_what_differs_in_one_thing_is_left_to_the_general_way():
    world = World(CAPACITY)
    directory = world.directory
    parent, _ = world.publish((0,), release=False)
    above = int(parent.blocks[0]), int(parent.generations[0])
    lease, foreign = world.reserve(2), world.reserve(1, session=2)
    block, other = lease.blocks.tolist()
    generation = int(lease.generations[0])
    good = OneCompleted(lease.lease_id, block, generation, key((0, 2)), *above)
    for bad in (
        good._replace(lease_id=foreign.lease_id),
        good._replace(lease_id=99),
        good._replace(block=int(foreign.blocks[0]), generation=int(foreign.generations[0])),
        good._replace(block=0),
        good._replace(block=CAPACITY + 1),
        good._replace(generation=generation + 1),
        good._replace(key=key((0,))),
        good._replace(parent_generation=above[1] + 1),
        good._replace(parent=other, parent_generation=int(lease.generations[1])),
        good._replace(parent=CAPACITY + 1),
    ):
        before = world.table.tobytes(), directory.counts(1), directory.session_usage(1)
        assert not directory.publish_one(1, 1, bad, now_s=0.0), bad
        assert (world.table.tobytes(), directory.counts(1), directory.session_usage(1)) == before
    assert not directory.publish_one(2, 1, good, now_s=0.0)
    assert directory.publish_one(1, 1, good, now_s=0.0)
    assert not directory.publish_one(1, 1, good, now_s=0.0)
    world.check()


def test_a_full_quota_is_left_to_the_general_way():
    world = World(CAPACITY)
    lease = world.reserve(1)
    item = OneCompleted(
        lease.lease_id, int(lease.blocks[0]), int(lease.generations[0]), key((0,)), 0, 0
    )
    world.directory.set_session_quota(Quota(max_pins=0, max_reserved_blocks=1))
    assert not world.directory.publish_one(1, 1, item, now_s=0.0)
    assert world.directory.reserve_one(1, 1, lease.lease_id, now_s=0.0) is None
    world.directory.set_session_quota(Quota(max_pins=1, max_reserved_blocks=2))
    assert world.directory.reserve_one(1, 1, lease.lease_id, now_s=0.0) is not None
    world.directory.set_session_quota(Quota(max_leases=1))
    assert world.directory.reserve_one(1, 1, 0, now_s=0.0) is None
    assert world.directory.publish_one(1, 1, item, now_s=0.0)


def test_a_full_pool_gives_up_the_same_blocks_one_by_one():
    twins = [Twin(in_short=True), Twin(in_short=False)]
    for twin in twins:
        for path in ((0, 2, 3), (1,), (0, 4), (5,)):
            twin.world.publish(path)
    short, general = twins
    assert short.world.directory.counts(1).free == 0
    for _ in range(CAPACITY):
        assert short.reserve(1, 0) == general.reserve(1, 0)
        assert short.everything() == general.everything()
    assert short.took_short_way == CAPACITY
    assert len(short.world.evicted()) == CAPACITY
    assert short.world.directory.reserve_one(1, 1, 0, now_s=0.0) is None
    assert short.do("reserve", (1, 0)) == general.do("reserve", (1, 0))
    assert short.everything() == general.everything()


def test_a_generation_that_wraps_leaves_out_zero():
    assert [next_generation(old) for old in (1, 2**32 - 2, 2**32 - 1)] == [2, 2**32 - 1, 1]
