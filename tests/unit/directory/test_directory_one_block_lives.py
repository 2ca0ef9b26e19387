"""The two ways among readers, frees, deaths with heirs and quarantine, and writer leases."""

from __future__ import annotations

from directory_world import SPACE, chain, u32
from hypothesis import given, settings
from hypothesis import strategies as st
from test_directory_one_block import OPERATIONS, PATHS, SESSIONS, SMALL, Twin

from hisparse_service.directory.results import UnpublishedBlocks

GROUP = "g"


class LivingTwin(Twin):
    """A twin whose sessions read, free, die and come back, alone or as ranks of one group."""

    def __init__(self, *, in_short: bool, is_group: bool) -> None:
        super().__init__(in_short=in_short)
        self.is_group = is_group
        for session in (1, 2):
            self.world.directory.session_died(session)
            self._open(session)

    def _open(self, session: int) -> None:
        self.world.directory.open_session(
            session, group=GROUP if self.is_group else "", rank=session,
            delegates_copies=self.is_group,
        )  # fmt: skip

    def take_writer(self, session: int) -> object:
        now_s = self.world.clock.now_s
        group = GROUP if self.is_group else ""
        return self.world.directory.take_writer(group, 1, session, rank=session, now_s=now_s)

    def yield_writer(self, session: int) -> object:
        group = GROUP if self.is_group else ""
        return self.world.directory.yield_writer(group, 1, session)

    def look_up(self, session: int, path_at: int) -> object:
        found = self.world.directory.lookup(
            session, 1, SPACE, chain(PATHS[path_at]), 0, now_s=self.world.clock.now_s
        )
        for block, generation in zip(found.blocks, found.generations, strict=True):
            self.granted.append((session, found.lease_id, int(block), int(generation)))
        return found.lease_id, found.blocks.tolist(), found.generations.tolist()

    def free(self, at: int) -> object:
        if not self.granted:
            return None
        session, lease, block, _ = self.granted[at % len(self.granted)]
        return self.world.directory.free(session, 1, lease, u32(block)).freed.tolist()

    def reclaim(self, session: int, at: int) -> object:
        if not self.granted:
            return None
        _, _, block, generation = self.granted[at % len(self.granted)]
        got = self.world.directory.reclaim(
            session, 1, 0, u32(block), u32(generation), now_s=self.world.clock.now_s
        )
        self.granted.append((session, got.lease_id, block, generation))
        return got.lease_id, got.blocks.tolist()

    def die(self, session: int, unpublished: UnpublishedBlocks) -> object:
        directory, now_s = self.world.directory, self.world.clock.now_s
        end = directory.session_died(session, unpublished=unpublished, now_s=now_s)
        self._open(session)
        return end

    def evict(self, num_blocks: int) -> object:
        return self.world.directory.evict(1, num_blocks=num_blocks).tolist()


LIVES = st.one_of(
    st.tuples(st.just("take_writer"), st.tuples(SESSIONS)),
    st.tuples(st.just("yield_writer"), st.tuples(SESSIONS)),
    st.tuples(st.just("look_up"), st.tuples(SESSIONS, st.integers(0, len(PATHS) - 1))),
    st.tuples(st.just("free"), st.tuples(SMALL)),
    st.tuples(st.just("reclaim"), st.tuples(SESSIONS, SMALL)),
    st.tuples(st.just("die"), st.tuples(SESSIONS, st.sampled_from(UnpublishedBlocks))),
    st.tuples(st.just("evict"), st.tuples(st.integers(0, 2))),
)


@settings(max_examples=300, deadline=None)
@given(operations=st.lists(st.one_of(OPERATIONS, LIVES), max_size=30), is_group=st.booleans())
def test_both_ways_agree_through_readers_frees_and_deaths(operations, is_group):
    short = LivingTwin(in_short=True, is_group=is_group)
    general = LivingTwin(in_short=False, is_group=is_group)
    if is_group:  # most of what follows would be refused otherwise
        operations = [("take_writer", (1,)), *operations]
    for operation, arguments in operations:
        assert short.do(operation, arguments) == general.do(operation, arguments)
        assert short.everything() == general.everything()
        assert short.world.directory.writers(1) == general.world.directory.writers(1)
