"""What a lease holds, as it grows and shrinks step by step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_client.blocks import BlockLease

BLOCKS = st.lists(st.integers(1, 40), max_size=5, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 90)),
        st.tuples(st.just("drop"), BLOCKS),
        st.tuples(st.just("drop_all"), st.none()),
    ),
    max_size=12,
)


def u32(values) -> np.ndarray:
    return np.array(values, np.uint32)


@pytest.mark.parametrize("part", ["pinned", "reserved"])
@given(steps=STEPS)
def test_a_lease_holds_what_was_added_and_not_dropped_and_old_arrays_never_change(part, steps):
    lease = BlockLease(SimpleNamespace(is_closed=True), epoch=1)
    held: list[tuple[int, int]] = []
    seen: list[tuple[np.ndarray, list[int]]] = []
    fresh = 0
    for step, argument in steps:
        if step == "add":
            new = [(fresh + i, 1000 + fresh + i) for i in range(argument)]
            fresh += argument
            lease._add(part, u32([b for b, _ in new]), u32([g for _, g in new]))
            held += new
        else:
            lease._drop(part, None if argument is None else u32(argument))
            held = [each for each in held if argument is not None and each[0] not in argument]
        arrays = lease._pinned if part == "pinned" else lease._reserved
        assert [array.tolist() for array in arrays] == [
            [block for block, _ in held],
            [generation for _, generation in held],
        ]
        assert not any(array.flags.writeable for array in arrays)
        seen += [(array, array.tolist()) for array in arrays]
    assert all(array.tolist() == before for array, before in seen)


def test_the_arrays_of_the_caller_stay_the_callers():
    lease = BlockLease(SimpleNamespace(is_closed=True), epoch=1)
    mine = u32([5])
    lease._add("reserved", mine, u32([1]))
    mine[0] = 9
    assert mine.flags.writeable
    assert lease.reserved_blocks.tolist() == [5]
