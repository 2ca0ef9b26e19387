"""The extent allocator, against a page map."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from hisparse_service.contract.errors import CapacityError, CorruptSegmentError, InternalError
from hisparse_service.pool.arena import Arena

PAGE = 4096
START = 129 * PAGE
NUM_PAGES = 40


def make_arena(num_pages: int = NUM_PAGES) -> Arena:
    return Arena(start_bytes=START, end_bytes=START + num_pages * PAGE, page_bytes=PAGE)


class ArenaMachine(RuleBasedStateMachine):
    """A list of pages is the model: each is free or belongs to one extent."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.arena = make_arena()
        self.taken: list[bool] = [False] * NUM_PAGES

    def pages(self, offset: int, length: int) -> range:
        first = (offset - START) // PAGE
        return range(first, first + -(-length // PAGE))

    def runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for page, taken in enumerate(self.taken):
            if taken:
                continue
            if runs and sum(runs[-1]) == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        return runs

    @rule(target=extents, length=st.integers(1, 12 * PAGE))
    def allocate(self, length: int):
        needed = -(-length // PAGE)
        fitting = [start for start, count in self.runs() if count >= needed]
        if not fitting:
            with pytest.raises(CapacityError) as error:
                self.arena.allocate(length)
            assert error.value.details["needed"] == needed * PAGE
            return multiple()
        offset = self.arena.allocate(length)
        assert offset == START + fitting[0] * PAGE, "first fit"
        for page in self.pages(offset, length):
            assert not self.taken[page]
            self.taken[page] = True
        return (offset, length)

    @rule(target=extents, page=st.integers(0, NUM_PAGES - 1), length=st.integers(1, 6 * PAGE))
    def reserve(self, page: int, length: int):
        offset = START + page * PAGE
        wanted = self.pages(offset, length)
        if wanted.stop > NUM_PAGES or any(self.taken[each] for each in wanted):
            with pytest.raises(CorruptSegmentError):
                self.arena.reserve(offset, length)
            return multiple()
        self.arena.reserve(offset, length)
        for each in wanted:
            self.taken[each] = True
        return (offset, length)

    @rule(extent=consumes(extents))
    def free(self, extent: tuple[int, int]) -> None:
        self.arena.free(*extent)
        for page in self.pages(*extent):
            self.taken[page] = False
        with pytest.raises(InternalError):
            self.arena.free(*extent)

    @invariant()
    def free_extents_are_the_runs_of_free_pages(self) -> None:
        self.arena.check()
        free = [
            ((each.offset_bytes - START) // PAGE, each.length_bytes // PAGE)
            for each in self.arena.free_extents()
        ]
        assert free == self.runs()
        assert self.arena.free_bytes == self.taken.count(False) * PAGE


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArena = ArenaMachine.TestCase


def test_an_arena_rebuilt_from_its_extents_is_the_same() -> None:
    arena = make_arena()
    extents = [(arena.allocate(length), length) for length in (PAGE, 3 * PAGE, 100, 5 * PAGE)]
    arena.free(*extents.pop(1))
    rebuilt = make_arena()
    for extent in reversed(extents):
        rebuilt.reserve(*extent)
    assert rebuilt.free_extents() == arena.free_extents()


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (START - PAGE, PAGE),
        (START + 1, PAGE),
        (START + NUM_PAGES * PAGE, PAGE),
        (START + (NUM_PAGES - 1) * PAGE, 2 * PAGE),
        (START, 0),
        (START, -PAGE),
        (0, 2**63),
    ],
)
def test_extents_outside_the_arena_are_corrupt_and_change_nothing(offset: int, length: int) -> None:
    arena = make_arena()
    with pytest.raises(CorruptSegmentError):
        arena.reserve(offset, length)
    assert arena.free_bytes == NUM_PAGES * PAGE


def test_an_arena_smaller_than_a_page_has_nothing_to_give() -> None:
    arena = Arena(start_bytes=START, end_bytes=START + PAGE - 1, page_bytes=PAGE)
    assert arena.free_bytes == arena.total_bytes == 0
    with pytest.raises(CapacityError):
        arena.allocate(1)


def test_an_arena_that_does_not_start_on_a_page_is_a_bug() -> None:
    with pytest.raises(InternalError):
        Arena(start_bytes=1, end_bytes=PAGE * 2, page_bytes=PAGE)
