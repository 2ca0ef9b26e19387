"""What may be published, and when: the writer's rules, with completion in the test's hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract.errors import (
    CapacityError,
    DeviceError,
    IllegalTransition,
    UsageError,
)
from worker_client.kernels.interface import GroupPages
from worker_client.kernels.reference import ReferenceBackend
from worker_client.mirror import (
    BlockMirror,
    CompletedBlock,
    DeferredTracker,
    EventTracker,
    ImmediateTracker,
    MirrorQueue,
    RowMirror,
)

SIZE = 4


def make_queue(*, num_units=2, tracker=None, max_blocks=64) -> tuple[MirrorQueue, DeferredTracker]:
    tracker = tracker or DeferredTracker()
    queue = MirrorQueue(
        num_units=num_units,
        block_size=SIZE,
        tracker=tracker,
        backend=ReferenceBackend(),
        max_blocks=max_blocks,
    )
    return queue, tracker


def make_pages(layers=1) -> GroupPages:
    host = torch.zeros((layers, 12, SIZE, 16), dtype=torch.uint8)
    device = torch.randint(1, 256, (layers, 10, SIZE, 16)).to(torch.uint8)
    return GroupPages(
        host=tuple(host.unbind(0)), device=tuple(device.unbind(0)), block_stride_rows=SIZE
    )


def whole(request, index) -> RowMirror:
    return RowMirror(request, index, device_block=1, row=0, count=SIZE)


def note_all_units(queue, mirrors, units=(0, 1)):
    for unit in units:
        queue.note_rows(unit, mirrors)


def test_i2_enqueued_is_not_completed():
    queue, tracker = make_queue()
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    note_all_units(queue, [whole("a", 0)])
    queue.accept("a", SIZE)
    assert queue.poll() == []  # not even sealed
    queue.seal()
    assert queue.poll() == []
    assert queue.num_in_flight_batches == 1
    tracker.complete()
    assert queue.poll() == [CompletedBlock("a", 0, 5)]
    assert queue.poll() == []
    assert queue.is_completed("a", 0)


def test_i2_a_block_waits_for_every_layer_draft_layers_included():
    queue, tracker = make_queue(num_units=3)
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    note_all_units(queue, [whole("a", 0)], units=(0, 1))
    queue.accept("a", SIZE)
    queue.seal()
    tracker.complete()
    assert queue.poll() == []
    queue.note_rows(2, [RowMirror("a", 0, 1, row=0, count=3)])  # the draft layer, late
    queue.seal()
    tracker.complete()
    assert not queue.is_completed("a", 0)
    queue.note_rows(2, [RowMirror("a", 0, 1, row=3)])
    queue.seal()
    assert queue.poll() == []
    tracker.complete()
    assert queue.poll() == [CompletedBlock("a", 0, 5)]


def test_i2_only_a_contiguous_completed_prefix_is_published():
    queue, tracker = make_queue()
    queue.open_request("a")
    queue.open_request("b")
    for index in range(3):
        queue.add_block("a", index, 5 + index)
    queue.add_block("b", 0, 9)
    queue.accept("a", 3 * SIZE)
    queue.accept("b", SIZE)
    note_all_units(queue, [whole("a", 1), whole("a", 2), whole("b", 0)])
    queue.seal()
    tracker.complete()
    assert queue.poll() == [CompletedBlock("b", 0, 9)]
    assert queue.is_completed("a", 1)
    note_all_units(queue, [whole("a", 0)])
    queue.seal()
    tracker.complete()
    assert [done.block_index for done in queue.poll()] == [0, 1, 2]


def test_i2_tokens_that_are_not_accepted_yet_hold_their_block_back():
    queue, tracker = make_queue()
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    note_all_units(queue, [whole("a", 0)])
    queue.seal()
    tracker.complete()
    assert queue.poll() == []
    assert not queue.is_completed("a", 0)
    queue.accept("a", SIZE)
    assert queue.poll() == [CompletedBlock("a", 0, 5)]


def test_i2_a_block_waits_for_an_earlier_one_that_is_not_even_known():
    queue, tracker = make_queue()
    queue.open_request("a")
    queue.accept("a", 2 * SIZE)
    queue.add_block("a", 1, 6)
    note_all_units(queue, [whole("a", 1)])
    queue.seal()
    tracker.complete()
    assert queue.poll() == []
    queue.add_block("a", 0, 5)
    note_all_units(queue, [whole("a", 0)])
    queue.seal()
    tracker.complete()
    assert [done.host_block for done in queue.poll()] == [5, 6]


def test_i2_a_rejected_speculative_row_is_never_published():
    """Rows 2 and 3 were mirrored for tokens that were rejected; only their rewrite counts."""
    queue, tracker = make_queue(num_units=1)
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.note_rows(0, [RowMirror("a", 0, 1, row=0, count=4)])
    queue.seal()
    tracker.complete()
    queue.accept("a", 2)
    assert queue.poll() == []
    queue.accept("a", 4)  # accepted by a later step whose mirror has not been seen yet
    assert queue.poll() == []
    queue.note_rows(0, [RowMirror("a", 0, 1, row=2, count=2)])
    queue.seal()
    assert queue.poll() == []
    tracker.complete()
    assert queue.poll() == [CompletedBlock("a", 0, 5)]


def test_i2_a_rewrite_in_flight_holds_the_block_back():
    queue, tracker = make_queue(num_units=1)
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.note_rows(0, [whole("a", 0)])
    queue.seal()
    queue.note_rows(0, [RowMirror("a", 0, 1, row=3)])
    queue.seal()
    queue.accept("a", SIZE)
    tracker.complete(1)
    assert queue.poll() == []
    tracker.complete(1)
    assert len(queue.poll()) == 1


def test_i2_a_dropped_request_publishes_nothing_and_gives_blocks_back_after_their_copies():
    queue, tracker = make_queue(num_units=1)
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.add_block("a", 1, 6)
    queue.note_rows(0, [whole("a", 0)])
    queue.accept("a", SIZE)
    queue.seal()
    queue.drop_request("a")
    assert queue.poll_dropped() == [6]  # no copy ever went there
    assert queue.num_tracked_blocks == 1
    queue.open_request("a")  # the name may be used again at once
    tracker.complete()
    assert queue.poll() == []
    assert queue.poll_dropped() == [5]
    assert queue.num_tracked_blocks == 0


def test_a_block_dropped_before_its_step_is_sealed_waits_for_it():
    queue, tracker = make_queue(num_units=1)
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.note_rows(0, [whole("a", 0)])
    queue.drop_request("a")
    assert queue.poll_dropped() == []
    queue.seal()
    assert queue.poll_dropped() == []
    tracker.complete()
    assert queue.poll_dropped() == [5]


def test_blocks_before_a_found_prefix_are_published_already():
    queue, tracker = make_queue(num_units=1)
    queue.open_request("a", first_block=2)
    assert queue.is_completed("a", 1)
    with pytest.raises(UsageError, match="known already"):
        queue.add_block("a", 1, 5)
    queue.add_block("a", 2, 7)
    queue.note_rows(0, [whole("a", 2)])
    queue.accept("a", 3 * SIZE)
    queue.seal()
    tracker.complete()
    assert queue.poll() == [CompletedBlock("a", 2, 7)]


def test_the_bound_counts_completed_blocks_until_they_are_taken():
    queue, tracker = make_queue(num_units=1, max_blocks=2)
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.add_block("a", 1, 6)
    queue.note_rows(0, [whole("a", 0), whole("a", 1)])
    queue.accept("a", 2 * SIZE)
    queue.seal()
    tracker.complete()
    with pytest.raises(CapacityError) as caught:
        queue.add_block("a", 2, 7)
    assert caught.value.details == {"needed": 1, "free": 0}
    assert queue.poll(limit=1) == [CompletedBlock("a", 0, 5)]
    queue.add_block("a", 2, 7)
    assert queue.poll(limit=0) == []
    assert queue.poll() == [CompletedBlock("a", 1, 6)]


def test_submitted_blocks_and_rows_arrive_in_their_host_blocks():
    queue, _ = make_queue(num_units=2, tracker=ImmediateTracker())
    target, draft = make_pages(layers=2), make_pages()
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.add_block("a", 1, 7)
    queue.accept("a", 2 * SIZE)
    queue.submit_blocks(0, target, [BlockMirror("a", 0, 3), BlockMirror("a", 1, 4)])
    queue.submit_rows(
        1, draft, [RowMirror("a", 0, 3, row=0, count=4), RowMirror("a", 1, 4, row=0, count=2)]
    )
    queue.seal()
    assert queue.poll() == [CompletedBlock("a", 0, 5)]
    queue.submit_rows(1, draft, [RowMirror("a", 1, 4, row=2, count=2)])
    queue.seal()
    assert queue.poll() == [CompletedBlock("a", 1, 7)]
    for pages in (target, draft):
        for host, device in zip(pages.host, pages.device, strict=True):
            assert torch.equal(host[5], device[3])
            assert torch.equal(host[7], device[4])
            assert host.any(dim=(1, 2)).nonzero().flatten().tolist() == [5, 7]


def test_calls_that_make_no_sense_are_refused_before_any_copy():
    queue, _ = make_queue(num_units=1)
    pages = make_pages()
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    with pytest.raises(IllegalTransition):
        queue.open_request("a")
    with pytest.raises(UsageError, match="null block"):
        queue.add_block("a", 1, 0)
    with pytest.raises(UsageError, match="known already"):
        queue.add_block("a", 0, 6)
    with pytest.raises(UsageError, match="not open"):
        queue.add_block("b", 0, 6)
    with pytest.raises(UsageError, match="unit 1"):
        queue.submit_blocks(1, pages, [BlockMirror("a", 0, 3)])
    with pytest.raises(UsageError, match="block 1 of request 'a' is not known"):
        queue.submit_blocks(0, pages, [BlockMirror("a", 0, 3), BlockMirror("a", 1, 4)])
    with pytest.raises(UsageError, match="rows 3 to 5"):
        queue.submit_rows(0, pages, [RowMirror("a", 0, 3, row=3, count=2)])
    with pytest.raises(UsageError, match="rows 1 to 1"):
        queue.note_rows(0, [RowMirror("a", 0, 3, row=1, count=0)])
    assert not pages.host[0].any()
    queue.accept("a", 2)
    with pytest.raises(UsageError, match="2 accepted tokens, now 1"):
        queue.accept("a", 1)
    with pytest.raises(UsageError, match="must be positive"):
        make_queue(num_units=0)
    queue.seal()
    assert queue.num_in_flight_batches == 0  # an empty step takes no ticket


class FakeEvent:
    made = 0

    def __init__(self):
        FakeEvent.made += 1
        self.done = False

    def record(self):
        self.done = False

    def query(self):
        return self.done


def test_events_are_polled_in_order_and_reused():
    FakeEvent.made = 0
    events: list[FakeEvent] = []

    def make_event():
        events.append(FakeEvent())
        return events[-1]

    queue, _ = make_queue(num_units=1, tracker=EventTracker(make_event))
    queue.open_request("a")
    for index in range(6):
        queue.add_block("a", index, 1 + index)
    queue.accept("a", 6 * SIZE)
    for index in (0, 1):
        queue.note_rows(0, [whole("a", index)])
        queue.seal()
    events[
        1
    ].done = True  # events of one stream complete in order; a later one alone proves nothing
    assert queue.poll() == []
    events[0].done = True
    assert [done.block_index for done in queue.poll()] == [0, 1]
    for index in range(2, 6):
        queue.note_rows(0, [whole("a", index)])
        queue.seal()
        events[0].done = events[1].done = True
        assert len(queue.poll()) == 1
    assert FakeEvent.made == 2


def test_a_device_that_failed_is_a_device_error_and_publishes_nothing():
    class Broken(FakeEvent):
        def query(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    queue, _ = make_queue(num_units=1, tracker=EventTracker(Broken))
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.note_rows(0, [whole("a", 0)])
    queue.accept("a", SIZE)
    queue.seal()
    with pytest.raises(DeviceError, match=r"illegal memory access was encountered\. Restart"):
        queue.poll()


def test_completion_is_not_recorded_into_a_graph(monkeypatch):
    """A replay records no event that the host could ask: everything would seem complete."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    queue, _ = make_queue(num_units=1, tracker=EventTracker(FakeEvent))
    queue.open_request("a")
    queue.add_block("a", 0, 5)
    queue.note_rows(0, [whole("a", 0)])
    with pytest.raises(UsageError, match="behind each replay"):
        queue.seal()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_i2_whatever_the_order_a_published_block_was_complete(data):
    """Random steps, rejections and completions: each published row is the last one written."""
    queue, tracker = make_queue(num_units=2)
    written: dict[tuple[int, int], int] = {}  # (unit, position) -> sealed batch
    queue.open_request("r")
    for index in range(4):
        queue.add_block("r", index, 1 + index)
    accepted, batch, published = 0, 0, 0
    for _ in range(data.draw(st.integers(1, 14))):
        count = data.draw(st.integers(0, 3))
        batch += 1
        span = range(accepted, min(accepted + count, 4 * SIZE))
        units = data.draw(st.sampled_from([(0, 1), (0, 1), (1, 0), (0,)]))
        for unit in units:
            for position in span:
                mirror = RowMirror("r", position // SIZE, 1, row=position % SIZE)
                queue.note_rows(unit, [mirror])
                written[unit, position] = batch
        before = tracker.recorded
        queue.seal()
        if tracker.recorded == before:
            batch -= 1
        if len(units) == 2 or not span:
            accepted += data.draw(st.integers(0, len(span)))
            queue.accept("r", accepted)
            for key in [k for k in written if k[1] >= accepted]:
                del written[key]
        tracker.complete(data.draw(st.integers(0, 2)))
        for done in queue.poll():
            assert done.block_index == published
            published += 1
            for position in range(done.block_index * SIZE, published * SIZE):
                assert position < accepted
                assert all(written[unit, position] <= tracker.completed for unit in (0, 1))
    tracker.complete()
    queue.poll()
    assert queue._requests["r"].next_index == accepted // SIZE
