"""The directory against a model of dictionaries: any order of requests, deaths and restarts."""

from __future__ import annotations

import pytest
from directory_world import BLOCK_SIZE, SPACE, TTL_S, World, chain, key, u32
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hisparse_service.contract.errors import CapacityError, LeaseExpired, LeaseLost, NotHeld
from hisparse_service.directory.results import MirrorItem
from hisparse_service.directory.subtree import find_below

CAPACITY = 12
SESSIONS = (1, 2)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
PICK = st.integers(0, 10_000)
RARELY = st.integers(0, 7)
"""0 one time in eight: deaths that come too often leave nothing to look at."""


class ModelLease:
    def __init__(self, session: int, deadline_s: float) -> None:
        self.session = session
        self.deadline_s = deadline_s
        self.reserved: set[int] = set()
        self.pins: set[int] = set()
        self.is_expired = False


class Published:
    def __init__(self, path: tuple[int, ...], use: int) -> None:
        self.path = path
        self.use = use


class Model:
    """What should be true, in the plainest way."""

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        """block -> lease"""
        self.published: dict[int, Published] = {}
        self.withdrawn: set[int] = set()
        """Damaged, or below such a block, and still read."""
        self.leases: dict[int, ModelLease] = {}
        self.uses = 0

    def use(self) -> int:
        self.uses += 1
        return self.uses

    @property
    def free(self) -> set[int]:
        return (
            set(range(1, CAPACITY + 1)) - set(self.reserved) - set(self.published) - self.withdrawn
        )

    def block_of(self, path: tuple[int, ...]) -> int:
        return next((b for b, p in self.published.items() if p.path == path), 0)

    def readers(self, block: int) -> int:
        return sum(block in lease.pins for lease in self.leases.values())

    def prefix(self, path: tuple[int, ...]) -> list[int]:
        blocks = []
        for depth in range(1, len(path) + 1):
            block = self.block_of(path[:depth])
            if not block:
                break
            blocks.append(block)
        return blocks

    def victims(self, wanted: int) -> list[int]:
        going: list[int] = []
        while len(going) < wanted:
            stay = {b: p for b, p in self.published.items() if b not in going}
            leaves = [
                (p.use, -len(p.path), b)
                for b, p in stay.items()
                if not self.readers(b) and not any(q.path[:-1] == p.path for q in stay.values())
            ]
            if not leaves:
                break
            going.append(min(leaves)[2])
        return going

    def unpin(self, lease: ModelLease, blocks: set[int]) -> None:
        if blocks:
            use = self.use()
            lease.pins -= blocks
            for block in blocks:
                if block in self.withdrawn:
                    if not self.readers(block):
                        self.withdrawn.discard(block)
                elif not self.readers(block):
                    self.published[block].use = use

    def end(self, lease_id: int) -> None:
        lease = self.leases[lease_id]
        for block in lease.reserved:
            del self.reserved[block]
        self.unpin(lease, set(lease.pins))
        del self.leases[lease_id]


class DirectoryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.world = World(CAPACITY)
        self.model = Model()

    # --- choosing what a request names ------------------------------------------------------

    def live(self, pick: int, session: int | None = None) -> int:
        """A lease that may be used, or 0."""
        ids = [
            i
            for i, lease in self.model.leases.items()
            if not lease.is_expired and session in (None, lease.session)
        ]
        return ids[pick % len(ids)] if ids else 0

    def note_lease(self, lease_id: int, session: int, deadline_s: float) -> ModelLease:
        lease = self.model.leases.setdefault(lease_id, ModelLease(session, deadline_s))
        lease.deadline_s = deadline_s
        return lease

    # --- requests ---------------------------------------------------------------------------

    @rule(session=st.sampled_from(SESSIONS), num=st.integers(1, 6), pick=PICK, new=st.booleans())
    def reserve(self, session: int, num: int, pick: int, new: bool) -> None:
        model = self.model
        lease_id = 0 if new else self.live(pick, session)
        missing = max(0, num - len(model.free))
        victims = model.victims(missing)
        if len(victims) < missing:
            with pytest.raises(CapacityError) as error:
                self.world.reserve(num, lease=lease_id, session=session)
            assert error.value.details["needed"] == num
            assert error.value.details["free"] == len(model.free)
            return
        before = len(self.world.evicted())
        result = self.world.reserve(num, lease=lease_id, session=session)
        assert self.world.evicted()[before:] == victims
        for block in victims:
            del model.published[block]
        blocks = set(result.blocks.tolist())
        assert len(blocks) == num
        assert blocks <= model.free
        lease = self.note_lease(result.lease_id, session, result.deadline_s)
        lease.reserved |= blocks
        model.reserved.update(dict.fromkeys(blocks, result.lease_id))

    @rule(path=PATHS, session=st.sampled_from(SESSIONS), keeps=st.booleans())
    def publish_a_whole_path(self, path: tuple[int, ...], session: int, keeps: bool) -> None:
        self.reserve(session, len(path), 0, True)
        newest = max(self.model.leases, default=0)
        lease = self.model.leases.get(newest)
        if lease is None or len(lease.reserved) != len(path) or lease.is_expired:
            return
        self.publish_with(newest, path, len(path))
        if not keeps:
            self.end_lease(newest)

    @rule(path=PATHS, pick=PICK, count=st.integers(1, 5))
    def complete(self, path: tuple[int, ...], pick: int, count: int) -> None:
        """Publish reserved blocks at the end of a path whose start is published."""
        model = self.model
        lease_id = self.live(pick)
        lease = model.leases.get(lease_id)
        if lease is None or not lease.reserved:
            return
        self.publish_with(lease_id, path, min(count, len(lease.reserved), len(path)))

    def publish_with(self, lease_id: int, path: tuple[int, ...], count: int) -> None:
        model = self.model
        lease = model.leases[lease_id]
        head = path[: len(path) - count]
        if len(model.prefix(head)) < len(head):
            return
        parent = model.block_of(head)
        own = sorted(lease.reserved)[:count]
        generations = [int(self.world.table["generation"][b]) for b in own]
        item = MirrorItem(
            lease_id, u32(*own), u32(*generations), chain(path)[-16 * count :], parent,
            int(self.world.table["generation"][parent]),
        )  # fmt: skip
        (answer,) = self.world.directory.mirror_completed(lease.session, 1, [item])
        use = model.use()
        for i, (block, got) in enumerate(zip(own, answer.blocks.tolist(), strict=True)):
            there = path[: len(head) + i + 1]
            canonical = model.block_of(there)
            del model.reserved[block]
            lease.reserved.discard(block)
            if not canonical:
                canonical = block
                model.published[block] = Published(there, use)
            elif canonical not in lease.pins:
                model.published[canonical].use = use
            assert got == canonical
            lease.pins.add(canonical)
        assert (answer.generations == self.world.table["generation"][answer.blocks]).all()

    @rule(path=PATHS, session=st.sampled_from(SESSIONS), pick=PICK, slice_keys=st.integers(1, 6))
    def lookup(self, path: tuple[int, ...], session: int, pick: int, slice_keys: int) -> None:
        model = self.model
        lease_id = self.live(pick, session) if pick % 2 else 0
        expected = model.prefix(path)
        running = self.world.directory.begin_lookup(
            session, 1, SPACE, chain(path), lease_id, now_s=self.world.clock.now_s
        )
        while not running.step(slice_keys):
            self.world.directory.evict(1, num_blocks=0)
        result = running.finish(self.world.clock.now_s)
        assert result.blocks.tolist() == expected
        if not expected and not lease_id:
            assert result.lease_id == 0
            return
        lease = self.note_lease(result.lease_id, session, result.deadline_s)
        for at in range(0, len(expected), slice_keys):
            use = model.use()
            for block in expected[at : at + slice_keys]:
                if block not in lease.pins:
                    lease.pins.add(block)
                    model.published[block].use = use

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        ids = list(self.model.leases)
        if ids:
            self.end_lease(ids[pick % len(ids)])

    def end_lease(self, lease_id: int) -> None:
        session = self.model.leases[lease_id].session
        assert self.world.directory.release_leases(session, [lease_id]).lost == []
        self.model.end(lease_id)

    @rule(pick=PICK, num=st.integers(1, 4))
    def unpin(self, pick: int, num: int) -> None:
        lease_id = self.live(pick)
        lease = self.model.leases.get(lease_id)
        if lease is not None and lease.pins:
            blocks = sorted(lease.pins)[:num]
            self.world.directory.unpin(lease.session, 1, lease_id, u32(*blocks))
            self.model.unpin(lease, set(blocks))

    @rule(pick=PICK, num=st.integers(1, 4))
    def enqueue_and_abandon(self, pick: int, num: int) -> None:
        ids = [i for i, lease in self.model.leases.items() if lease.reserved]
        if not ids:
            return
        lease_id = ids[pick % len(ids)]
        lease = self.model.leases[lease_id]
        blocks = sorted(lease.reserved)[:num]
        generations = [int(self.world.table["generation"][b]) for b in blocks]
        item = MirrorItem(lease_id, u32(*blocks), u32(*generations))
        if lease.is_expired:
            with pytest.raises(LeaseExpired):
                self.world.directory.mirror_enqueued(lease.session, 1, [item])
        else:
            self.world.directory.mirror_enqueued(lease.session, 1, [item])
        if pick % 2:
            self.world.directory.abandon(lease.session, 1, lease_id, u32(*blocks))
            for block in blocks:
                del self.model.reserved[block]
                lease.reserved.discard(block)

    @rule(pick=PICK, num=st.integers(1, 4))
    def free(self, pick: int, num: int) -> None:
        lease_id = self.live(pick)
        lease = self.model.leases.get(lease_id)
        if lease is None:
            return
        blocks = sorted(lease.pins | lease.reserved)[:num]
        if not blocks:
            return
        result = self.world.directory.free(lease.session, 1, lease_id, u32(*blocks))
        model = self.model
        expected = set()
        for block in lease.reserved & set(blocks):
            del model.reserved[block]
            expected.add(block)
        lease.reserved -= set(blocks)
        pinned = {b for b in blocks if b in lease.pins}
        withdrawn = pinned & model.withdrawn
        model.unpin(lease, pinned)
        expected |= withdrawn - model.withdrawn
        pinned -= withdrawn
        for block in sorted(pinned, key=lambda b: -len(model.published[b].path)):
            path = model.published[block].path
            has_child = any(p.path[:-1] == path for p in model.published.values())
            if not has_child and not model.readers(block):
                del model.published[block]
                expected.add(block)
        assert set(result.freed.tolist()) == expected

    @rule(pick=PICK, rarely=RARELY, takes_all_at_once=st.booleans())
    def withdraw(self, pick: int, rarely: int, takes_all_at_once: bool) -> None:
        """A block is damaged: it goes with all below it, at once or in slices."""
        model, directory = self.model, self.world.directory
        if rarely > 1 or not model.published:
            return
        block = sorted(model.published)[pick % len(model.published)]
        path = model.published[block].path
        gone = {b for b, p in model.published.items() if p.path[: len(path)] == path}
        generation = int(self.world.table["generation"][block])
        found = find_below(directory.columns(1), block)
        assert set(found[0].tolist()) == gone - {block}
        for stale in (generation - 1, generation + 1):
            assert not directory.withdraw(1, block, stale, below=found)
        before = len(self.world.evicted())
        nothing = found[0][:0], found[1][:0]
        assert directory.withdraw(
            1, block, generation, below=found if takes_all_at_once else nothing
        )
        for at in range(len(found[0])):  # a slice that comes too late finds nothing to do
            self.world.check()
            directory.withdraw_below(1, (found[0][at : at + 1], found[1][at : at + 1]))
        directory.expire(self.world.clock.now_s)
        assert set(self.world.evicted()[before:]) == gone
        for each in gone:
            del model.published[each]
            if model.readers(each):
                model.withdrawn.add(each)
        for session in SESSIONS:
            pins = {b for x in model.leases.values() if x.session == session for b in x.pins}
            assert {b for _, b, _ in directory.lost_pins(session)} == pins & model.withdrawn

    @rule(num=st.integers(0, 4))
    def evict(self, num: int) -> None:
        expected = self.model.victims(num)
        assert self.world.directory.evict(1, num_blocks=num).tolist() == expected
        for block in expected:
            del self.model.published[block]

    @rule(seconds=st.sampled_from((1.0, 1.0, 1.0, TTL_S / 2, TTL_S)))
    def expire(self, seconds: float) -> None:
        now_s = self.world.clock.advance(seconds)
        result = self.world.directory.expire(now_s)
        due = {
            i
            for i, lease in self.model.leases.items()
            if not lease.is_expired and lease.deadline_s <= now_s
        }
        assert {lease for _, lease in result.expired} == due
        for _, lease_id in result.expired:
            lease = self.model.leases[lease_id]
            if lease.reserved:
                self.model.unpin(lease, set(lease.pins))
                lease.is_expired = True
            else:
                self.model.end(lease_id)
        waiting = [x.deadline_s for x in self.model.leases.values() if not x.is_expired]
        assert (result.next_deadline_s is None) == (not waiting)
        if waiting:
            assert result.next_deadline_s <= min(waiting)

    @rule(pick=PICK)
    def foreign_requests_change_nothing(self, pick: int) -> None:
        lease_id = self.live(pick)
        lease = self.model.leases.get(lease_id)
        if lease is None:
            return
        other = 3 - lease.session
        directory = self.world.directory
        with pytest.raises(LeaseLost):
            directory.abandon(other, 1, lease_id, None)
        assert directory.renew(other, [lease_id], now_s=self.world.clock.now_s) == [lease_id]
        assert directory.release_leases(other, [lease_id]).lost == [lease_id]
        not_mine = set(range(1, CAPACITY + 1)) - lease.reserved - lease.pins
        for block in list(not_mine)[:2]:
            with pytest.raises(NotHeld):
                directory.free(lease.session, 1, lease_id, u32(block))

    @rule(session=st.sampled_from(SESSIONS), rarely=RARELY)
    def die(self, session: int, rarely: int) -> None:
        if rarely:
            return
        mine = [i for i, lease in self.model.leases.items() if lease.session == session]
        ended = self.world.directory.session_died(session)
        assert ended.leases == len(mine)
        assert ended.returned_blocks == sum(len(self.model.leases[i].reserved) for i in mine)
        for lease_id in mine:
            self.model.end(lease_id)
        self.world.directory.open_session(session)

    @precondition(lambda self: self.model.published)
    @rule(rarely=RARELY)
    def restart_daemon(self, rarely: int) -> None:
        """Only the table is left: published blocks come back, with their order of use."""
        if rarely:
            return
        before = dict(self.model.published)
        self.world.restart()
        assert self.world.report.kept == len(before)
        unfinished = len(self.model.reserved) + len(self.model.withdrawn)
        assert self.world.report.unfinished == unfinished
        self.model.reserved.clear()
        self.model.withdrawn.clear()
        self.model.leases.clear()

    # --- what always holds ------------------------------------------------------------------

    @invariant()
    def i6_every_block_is_in_exactly_one_place(self) -> None:
        world, model = self.world, self.model
        world.check()
        counts = world.directory.counts(1)
        assert counts.free + counts.reserved + counts.published + counts.pinned == CAPACITY
        pinned = sum(bool(model.readers(b)) for b in model.published)
        assert counts.free == len(model.free)
        assert counts.reserved == len(model.reserved)
        assert counts.pinned == pinned + len(model.withdrawn)
        assert world.directory.num_withdrawn(1) == len(model.withdrawn)
        assert counts.published == len(model.published) - pinned
        for block, published in model.published.items():
            assert world.table[block]["key_low"] == int.from_bytes(
                key(published.path)[:8], "little"
            )

    def teardown(self) -> None:
        statistics = self.world.directory.statistics(1)
        assert statistics.tokens_hit == statistics.keys_hit * BLOCK_SIZE


def test_i6_any_order_of_requests_deaths_and_restarts_keeps_every_block_accounted_for() -> None:
    run_state_machine_as_test(
        DirectoryMachine,
        settings=settings(max_examples=100, stateful_step_count=100, deadline=None),
    )
