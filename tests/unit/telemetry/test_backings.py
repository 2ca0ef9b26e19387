"""Occupancy cells against counting by hand, mirror latencies, and the age of the oldest mirror."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract.segment import BlockState
from hisparse_service.telemetry.backings import BackingView, MirrorClock
from hisparse_service.telemetry.histogram import LatencyHistogram


def view_of(states: list[int], readers: list[int]) -> BackingView:
    return BackingView(
        namespace_id=1, name="n", block_stride_bytes=4096, state=np.array(states, np.uint8),
        readers=np.array(readers, np.uint32), clock=MirrorClock(len(states)),
    )  # fmt: skip


blocks = st.lists(
    st.tuples(st.sampled_from([int(each) for each in BlockState]), st.integers(0, 2)),
    min_size=1, max_size=200,
)  # fmt: skip


@given(blocks, st.integers(1, 300))
def test_cells_cover_every_block_once_and_show_whatever_is_there(
    rows: list[tuple[int, int]], num_cells: int
) -> None:
    view = view_of([0, *(state for state, _ in rows)], [0, *(readers for _, readers in rows)])
    found = view.occupancy(num_cells)
    shares = np.array(found["shares"]).reshape(-1, 3)
    assert len(shares) == min(num_cells, len(rows))
    edges = [index * len(rows) // len(shares) for index in range(len(shares) + 1)]
    for index, (reserved, published, pinned) in enumerate(shares.tolist()):
        part = rows[edges[index] : edges[index + 1]]
        expected = (
            sum(s in (BlockState.RESERVED, BlockState.WRITING) for s, _ in part),
            sum(s == BlockState.PUBLISHED and not r for s, r in part),
            sum(s == BlockState.PUBLISHED and bool(r) for s, r in part),
        )
        shown = [-(-100 * count // len(part)) for count in expected]
        assert [reserved, published, pinned] == shown


def test_a_single_block_among_a_million_shows() -> None:
    states = np.zeros(1_000_001, np.uint8)
    states[700_000] = BlockState.WRITING
    view = BackingView(
        namespace_id=1, name="", block_stride_bytes=1, state=states,
        readers=np.zeros(len(states), np.uint32), clock=MirrorClock(2),
    )  # fmt: skip
    assert sum(view.occupancy(256)["shares"]) == 1


@pytest.mark.parametrize("count", [1, 16, 17, 500])
def test_mirror_latencies_run_from_enqueued_to_completed(count: int) -> None:
    clock = MirrorClock(600)
    ids = np.arange(1, count + 1).astype(np.uint32)
    clock.completed(ids, 10_000)  # never enqueued: no latency is known
    assert clock.latency.count == 0
    clock.enqueued(ids, 1_000_000)
    clock.completed(ids, 3_000_000)
    clock.completed(ids, 9_000_000)  # a duplicate counts no second latency
    assert (clock.latency.count, clock.latency.sum_ns) == (count, count * 2_000_000)
    assert clock.enqueued_total == count
    assert clock.completed_total == 3 * count


def test_the_oldest_mirror_that_is_not_published_tells_the_lag() -> None:
    view = view_of([0, BlockState.WRITING, BlockState.WRITING, BlockState.PUBLISHED], [0] * 4)
    assert view.publication_lag_s(10**9) == 0.0
    view.clock.enqueued_ns[:] = [0, 5_000_000_000, 3_000_000_000, 1]
    assert view.publication_lag_s(6_000_000_000) == 3.0


@given(st.lists(st.integers(0, 10**11), min_size=1, max_size=100))
def test_counting_many_at_once_is_counting_one_by_one(samples_ns: list[int]) -> None:
    one, many = LatencyHistogram(), LatencyHistogram()
    for sample in samples_ns:
        one.observe_ns(sample)
    many.observe_many_ns(np.array(samples_ns, np.int64))
    assert (one.buckets, one.count, one.sum_ns) == (many.buckets, many.count, many.sum_ns)
