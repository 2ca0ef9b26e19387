"""The coordinator by examples; test_coordinator_model.py checks it against a model of memory."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from fake_service import FakeService

from hisparse_service.contract.errors import (
    CapacityError,
    IllegalTransition,
    InternalError,
    NotHeld,
    ServiceUnavailable,
    StaleBlock,
    UsageError,
)
from worker_client.coordinator import CoordinatorConfig, HiSparseCoordinator, Role
from worker_client.requests import EndMode, RequestState, StepWork
from worker_client.residency import TRANSITIONS, DevicePool, Page, PageEvent, PageState

BLOCK = 4


def make(service, *, role=Role.WRITER, num_device_blocks=40, max_requests=4, **changes):
    sizes = {
        "block_size": BLOCK, "num_device_blocks": num_device_blocks, "num_resident_groups": 2,
        "num_hot_groups": 1, "hot_blocks_per_request": 2, "max_num_requests": max_requests,
        "max_model_tokens": 64, "max_step_tokens": 8,
    }  # fmt: skip
    return HiSparseCoordinator(service, CoordinatorConfig(**(sizes | changes)), role=role)


def step(coordinator, request_id, tokens, *, publish=True):
    """One step of one request, its copies complete at once."""
    plan = coordinator.prepare([StepWork(request_id, len(tokens))])
    mirrors = coordinator.commit(request_id, tokens)
    coordinator.enqueued(mirrors)
    for mirror in mirrors:
        coordinator.completed(request_id, mirror.page)
    if publish:
        coordinator.publish()
    return plan


def prefill(coordinator, request_id, tokens):
    """All of a prompt, in chunks, from where its hit ends."""
    start = coordinator.num_computed_tokens(request_id)
    for at in range(start, len(tokens), 8):
        step(coordinator, request_id, tokens[at : at + 8])


def test_admission_reserves_every_host_block_that_the_request_can_ever_need():
    """Otherwise admitted requests wait for each other's blocks for ever."""
    service = FakeService(100)
    coordinator = make(service)
    admission = coordinator.admit("a", [1] * 9, max_tokens=30)
    # 8 pages and a copy-on-write tail; the null block is the pool's own.
    assert admission.num_host_blocks == 9
    assert len(service.reserved) == 9


def test_admission_is_refused_with_needed_and_free_and_changes_nothing():
    service = FakeService(8)
    coordinator = make(service)
    with pytest.raises(CapacityError) as refused:
        coordinator.admit("a", [1] * 9, max_tokens=30)
    assert refused.value.details == {"needed": 9, "free": 7}
    assert not service.reserved
    assert not service.leases
    assert coordinator.num_running == 0
    coordinator.check_accounting()
    coordinator.admit("b", [1] * 9, max_tokens=20)


def test_a_refused_admission_gives_its_prefix_pins_back():
    service = FakeService(12)
    coordinator = make(service)
    coordinator.admit("a", list(range(9)), max_tokens=12)
    prefill(coordinator, "a", list(range(9)))
    with pytest.raises(CapacityError):
        coordinator.admit("b", list(range(9)), max_tokens=60)
    coordinator.finish("a")
    assert not any(service.pins.values())


def test_admission_promises_device_room_for_keys_hot_rows_and_one_step():
    service = FakeService(500)
    # 64 tokens: 16 pages of keys, 2 hot blocks, 3 pages of a step in 2 resident groups.
    coordinator = make(service, num_device_blocks=1 + 24 * 2)
    coordinator.admit("a", [1], max_tokens=64)
    coordinator.admit("b", [1], max_tokens=64)
    with pytest.raises(CapacityError, match="not promised") as refused:
        coordinator.admit("c", [1], max_tokens=4)
    assert refused.value.details["free"] == 0
    coordinator.finish("a")
    coordinator.admit("c", [1], max_tokens=4)


def test_admission_without_a_free_slot_is_refused():
    coordinator = make(FakeService(500), num_device_blocks=400, max_requests=1)
    coordinator.admit("a", [1], max_tokens=8)
    with pytest.raises(CapacityError):
        coordinator.admit("b", [1], max_tokens=8)


def test_admission_while_the_daemon_is_away_raises_service_unavailable():
    service = FakeService(100)
    coordinator = make(service)
    service.is_away = True
    with pytest.raises(ServiceUnavailable):
        coordinator.admit("a", [1] * 9, max_tokens=30)
    coordinator.check_accounting()
    assert coordinator.num_running == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [([], 8), ([1] * 9, 8), ([1], 65)], ids=["empty", "short", "long"]
)
def test_lengths_that_cannot_be_are_refused(prompt, max_tokens):
    with pytest.raises(UsageError):
        make(FakeService(100)).admit("a", prompt, max_tokens=max_tokens)


def test_a_found_prefix_is_not_computed_again_and_leaves_one_token_to_compute():
    service = FakeService(100)
    first = make(service)
    tokens = list(range(16))
    first.admit("a", tokens, max_tokens=20)
    prefill(first, "a", tokens)
    second = make(service)
    # All four blocks are published, but the last one must be computed for the logits.
    assert second.admit("b", tokens, max_tokens=20).num_hit_tokens == 12
    plan = second.prepare([StepWork("b", 4)])
    # Its keys come back for all three, for the indexer searches the whole prefix.
    keyed = [restore for restore in plan.restores if restore.indexer_block]
    assert len(keyed) == 3
    host = {update.page: update.host_block for update in plan.updates}
    assert [service.key_of[host[page]] for page in range(3)] == [
        service.key_of[page.host_block] for page in first.pages("a")[:3]
    ]


def test_a_page_stays_until_its_host_copy_is_published():
    """I2: a page that is only enqueued, or only completed, must not leave the device."""
    service = FakeService(100)
    coordinator = make(service, num_device_blocks=1 + 24)
    coordinator.admit("a", [1] * 60, max_tokens=60)
    with contextlib.suppress(CapacityError):
        for _ in range(8):
            coordinator.prepare([StepWork("a", 8)])
            coordinator.enqueued(coordinator.commit("a", [1] * 8))
    at = coordinator.num_computed_tokens("a")
    assert 0 < at < 56, "the device is full before the prompt ends"
    assert coordinator.statistics.spilled_pages == 0
    pages = coordinator.pages("a")
    for page in pages[: at // BLOCK]:
        coordinator.completed("a", page.index)
    with pytest.raises(CapacityError):  # completed is not published
        coordinator.prepare([StepWork("a", 8)])
    coordinator.publish()
    plan = coordinator.prepare([StepWork("a", 8)])
    assert coordinator.statistics.spilled_pages > 0
    spilled = [update for update in plan.updates if not update.resident_blocks]
    assert all(update.host_block in service.key_of for update in spilled)
    coordinator.check_accounting()


def test_no_host_row_is_shown_to_a_step_before_publication():
    coordinator = make(FakeService(100))
    coordinator.admit("a", [1] * 8, max_tokens=16)
    plan = coordinator.prepare([StepWork("a", 8)])
    assert [update.host_block for update in plan.updates] == [0, 0]
    assert all(page.host_block for page in coordinator.pages("a"))


def test_a_step_sends_one_message_at_most_and_none_where_nothing_happened():
    service = FakeService(200)
    coordinator = make(service, num_device_blocks=150)
    for name in "abc":
        coordinator.admit(name, [ord(name)] * 8, max_tokens=16)
    before = service.messages
    coordinator.prepare([StepWork(name, 8) for name in "abc"])
    for name in "abc":
        mirrors = coordinator.commit(name, [ord(name)] * 8)
        coordinator.enqueued(mirrors)
        for mirror in mirrors:
            coordinator.completed(name, mirror.page)
    assert coordinator.publish().published == 6
    assert service.messages == before + 1
    coordinator.prepare([StepWork(name, 1) for name in "abc"])
    for name in "abc":
        coordinator.commit(name, [1])
    assert coordinator.publish().messages == 0
    assert service.messages == before + 1


def test_only_the_contiguous_completed_prefix_is_published():
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 16, max_tokens=16)
    mirrors = []
    for at in (0, 8):
        coordinator.prepare([StepWork("a", 8)])
        mirrors += coordinator.commit("a", [1] * 8)
        coordinator.enqueued(mirrors[at // BLOCK :])
    for page in (0, 2, 3):
        coordinator.completed("a", page)
    assert coordinator.publish().published == 1
    coordinator.completed("a", 1)
    assert coordinator.publish().published == 3


def test_the_loser_of_a_merge_reads_the_canonical_block_and_forgets_its_own():
    """Two engines compute one prefix at once; one copy is kept, and no hot row of the other."""
    service = FakeService(100)
    engines = [make(service), make(service)]
    own = []
    for engine in engines:
        engine.admit("a", list(range(9)), max_tokens=12)
        engine.prepare([StepWork("a", 8)])
        mirrors = engine.commit("a", list(range(8)))
        engine.enqueued(mirrors)
        own.append([mirror.host_block for mirror in mirrors])
        for mirror in mirrors:
            engine.completed("a", mirror.page)
    assert engines[0].publish().merged == 0
    assert engines[1].publish().merged == 2
    assert len(service.published_log) == 2
    assert [page.host_block for page in engines[1].pages("a")] == own[0]
    plan = engines[1].prepare([StepWork("a", 1)])
    assert set(own[1]) <= set(plan.invalidate)
    assert [u.host_block for u in plan.updates if u.page < 2] == own[0]
    service.check()


def test_a_page_that_merges_with_one_found_by_a_request_that_waits_keeps_its_keys():
    """Only a started request gives its found pages keys: the running one would search garbage."""
    service = FakeService(100)
    tokens = list(range(9))
    first, second = make(service), make(service)
    second.admit("runs", tokens, max_tokens=12)
    step(second, "runs", tokens[:8], publish=False)
    keys = [page.indexer_block for page in second.pages("runs")]
    first.admit("a", tokens, max_tokens=12)
    prefill(first, "a", tokens)
    assert second.admit("waits", tokens, max_tokens=12).num_hit_tokens == 8
    assert second.publish().merged == 2
    assert [page.indexer_block for page in second.pages("waits")] == keys
    plan = second.prepare([StepWork("runs", 1), StepWork("waits", 1)])
    assert {u.indexer_block for u in plan.updates if u.page < 2} == set(keys)
    assert not any(restore.indexer_block for restore in plan.restores)
    second.check_accounting()
    second.finish("runs")
    second.finish("waits")
    assert second.num_free_device_blocks == 39


def test_requests_of_one_worker_with_the_same_published_prefix_share_its_device_pages():
    service = FakeService(100)
    coordinator = make(service, num_device_blocks=80)
    for name in "ab":
        coordinator.admit(name, list(range(9)), max_tokens=12)
    coordinator.prepare([StepWork("a", 8), StepWork("b", 8)])
    used = coordinator.num_free_device_blocks
    for name in "ab":
        mirrors = coordinator.commit(name, list(range(8)))
        coordinator.enqueued(mirrors)
        for mirror in mirrors:
            coordinator.completed(name, mirror.page)
    coordinator.publish()
    assert coordinator.pages("a")[0] is coordinator.pages("b")[0]
    assert coordinator.num_free_device_blocks == used + 2 * 3
    coordinator.finish("a")
    coordinator.check_accounting()
    assert coordinator.pages("b")[0].is_resident
    coordinator.finish("b")
    assert coordinator.num_free_device_blocks == 79


def test_a_recycled_host_block_is_forgotten_before_any_step_can_read_it():
    service = FakeService(12)
    coordinator = make(service)
    coordinator.admit("a", [1] * 8, max_tokens=8)
    prefill(coordinator, "a", [1] * 8)
    coordinator.finish("a")
    coordinator.admit("b", [2] * 30, max_tokens=36)
    plan = coordinator.prepare([StepWork("b", 8)])
    assert set(service.reserved) <= set(plan.invalidate)


def test_a_finished_request_still_publishes_its_last_pages_then_gives_its_lease_back():
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 10, max_tokens=12)
    coordinator.prepare([StepWork("a", 8)])
    mirrors = coordinator.commit("a", [1] * 8)
    coordinator.enqueued(mirrors)
    coordinator.finish("a")
    assert coordinator.num_finishing == 1
    assert service.leases
    for mirror in mirrors:
        coordinator.completed("a", mirror.page)
    coordinator.publish()
    assert len(service.published_log) == 2
    assert not service.leases
    assert not coordinator.knows("a")
    coordinator.check_accounting()
    service.check()


def test_a_preempted_request_publishes_nothing_and_keeps_its_blocks_until_no_copy_reads_them():
    """Its device blocks are the source of a copy in flight: handed back, they would be torn."""
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 10, max_tokens=12)
    coordinator.prepare([StepWork("a", 8)])
    mirrors = coordinator.commit("a", [1] * 8)
    coordinator.enqueued(mirrors)
    free = coordinator.num_free_device_blocks
    coordinator.preempt("a")
    assert coordinator.num_free_device_blocks == free + 2  # the hot region alone
    assert service.leases
    coordinator.dropped([mirror.host_block for mirror in mirrors])
    assert coordinator.num_free_device_blocks == 39
    assert not service.leases
    assert not service.published_log


def test_decoding_goes_on_while_the_daemon_is_away_and_publication_catches_up():
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 8, max_tokens=40)
    prefill(coordinator, "a", [1] * 8)
    service.is_away = True
    for _ in range(6):
        step(coordinator, "a", [2])
    assert len(service.published_log) == 2
    assert coordinator.num_computed_tokens("a") == 14
    service.come_back()
    assert coordinator.publish().published >= 1
    for _ in range(4):
        step(coordinator, "a", [2])
    assert len(service.published_log) == 4
    service.check()


def test_a_queued_batch_with_a_request_that_ended_meanwhile_is_mirrored_again_for_the_others():
    """The daemon refuses the batch as a whole, since one of its leases is gone."""
    service = FakeService(100)
    coordinator = make(service)
    for name in "ab":
        coordinator.admit(name, [ord(name)] * 5, max_tokens=8)
        step(coordinator, name, [ord(name)] * 4, publish=False)
    service.is_away = True
    assert coordinator.publish().queued == 2
    coordinator.preempt("a")
    service.come_back()
    report = coordinator.publish()
    assert [(mirror.request_id, mirror.page) for mirror in report.mirrors] == [("b", 0)]
    coordinator.enqueued(report.mirrors)
    coordinator.completed("b", 0)
    assert coordinator.publish().published == 1
    coordinator.finish("b")
    coordinator.check_accounting()
    service.check()


def test_after_a_daemon_restart_lost_pages_get_new_blocks_and_are_mirrored_again():
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 16, max_tokens=24)
    step(coordinator, "a", [1] * 8)
    service.is_away = True
    step(coordinator, "a", [1] * 8)
    service.restart()
    report = coordinator.publish()
    assert [r.request_id for r in report.recalled] == ["a"]
    assert report.recalled[0].first_page == 2
    assert [mirror.page for mirror in report.mirrors] == [2, 3]
    coordinator.enqueued(report.mirrors)
    for mirror in report.mirrors:
        coordinator.completed("a", mirror.page)
    assert coordinator.publish().published == 2
    step(coordinator, "a", [1] * 8)
    assert len(service.published_log) == 6
    coordinator.finish("a")
    service.check()
    assert not service.leases


def test_a_request_whose_published_blocks_are_gone_is_reported_lost():
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 16, max_tokens=24)
    step(coordinator, "a", [1] * 8)
    assert coordinator.lost_requests() == []
    coordinator.verify()
    service.generation[coordinator.pages("a")[0].host_block] += 1
    assert coordinator.lost_requests() == ["a"]
    with pytest.raises(StaleBlock):
        coordinator.verify()


def test_i1_a_reader_reserves_and_publishes_nothing():
    service = FakeService(100)
    reader = make(service, role=Role.READER)
    reader.admit("a", [1] * 16, max_tokens=24)
    step(reader, "a", [1] * 8)
    assert not service.reserved
    assert not service.published_log


def test_i2_a_reader_spills_only_what_it_found_published():
    service = FakeService(100)
    writer = make(service, num_device_blocks=1 + 26)
    reader = make(service, role=Role.READER, num_device_blocks=1 + 26)
    tokens = [1] * 56
    for coordinator in (writer, reader):
        coordinator.admit("a", tokens, max_tokens=56, num_hit_tokens=0)
    with contextlib.suppress(CapacityError):
        prefill(reader, "a", tokens)
    assert 0 < reader.num_computed_tokens("a") < 56, "the device is full before the prompt ends"
    assert reader.statistics.spilled_pages == 0
    prefill(writer, "a", tokens)
    assert reader.publish().published > 0
    done = reader.num_computed_tokens("a")
    step(reader, "a", tokens[done : done + 8])
    assert reader.statistics.spilled_pages > 0
    spilled = [page for page in reader.pages("a") if page.state is PageState.SPILLED]
    assert {page.host_block for page in spilled} <= set(service.key_of)


def test_a_reader_that_does_not_find_the_writers_hit_is_told():
    service = FakeService(100)
    reader = make(service, role=Role.READER)
    with pytest.raises(StaleBlock):
        reader.admit("a", [1] * 16, max_tokens=24, num_hit_tokens=8)
    assert not service.leases


def test_speculative_tokens_that_were_rejected_are_not_part_of_the_prefix():
    service = FakeService(100)
    coordinator = make(service)
    coordinator.admit("a", [1] * 7, max_tokens=24)
    step(coordinator, "a", [1] * 7)
    coordinator.prepare([StepWork("a", 4)])
    assert len(coordinator.pages("a")) == 3
    mirrors = coordinator.commit("a", [5])  # three of four were rejected
    assert [mirror.page for mirror in mirrors] == [1]
    assert coordinator.num_computed_tokens("a") == 8
    chain = service.key_chain()
    chain.extend([1] * 7 + [5])
    coordinator.enqueued(mirrors)
    coordinator.completed("a", 1)
    coordinator.publish()
    assert service.published_log[-1][2] == chain.keys(1, 2)


def test_restored_pages_come_back_when_there_is_room_and_can_be_spilled_again():
    service = FakeService(200)
    coordinator = make(service, num_device_blocks=1 + 60, max_restores_per_step=3)
    for name in "ab":
        coordinator.admit(name, [ord(name)] * 40, max_tokens=48)
        prefill(coordinator, name, [ord(name)] * 40)
    assert coordinator.statistics.spilled_pages > 0
    coordinator.finish("b")
    plan = step(coordinator, "a", [1])
    restored = [restore for restore in plan.restores if restore.resident_blocks]
    assert 0 < len(restored) <= 3
    coordinator.check_accounting()
    step(coordinator, "a", [1])
    assert all(p.state is not PageState.RESTORING for p in coordinator.pages("a")[:5])


def test_work_that_does_not_fit_the_request_is_refused():
    coordinator = make(FakeService(100))
    coordinator.admit("a", [1] * 8, max_tokens=12)
    for work in ([StepWork("a", 0)], [StepWork("a", 9)], [StepWork("a", 4)] * 2):
        with pytest.raises(UsageError):
            coordinator.prepare(work)
    with pytest.raises(UsageError, match="no request"):
        coordinator.prepare([StepWork("z", 1)])
    with pytest.raises(UsageError, match="pass"):
        coordinator.commit("a", [1] * 8)
    coordinator.prepare([StepWork("a", 8)])
    coordinator.commit("a", [1] * 8)
    with pytest.raises(UsageError):
        coordinator.prepare([StepWork("a", 5)])


def test_every_transition_outside_the_table_is_refused_with_state_event_and_id():
    for state, event in itertools.product(PageState, PageEvent):
        page = Page(7, state, owners={"a"})
        if (state, event) in TRANSITIONS:
            page.fire(event)
            assert page.state is TRANSITIONS[state, event]
            continue
        with pytest.raises(IllegalTransition) as refused:
            page.fire(event)
        assert page.state is state
        details = refused.value.details
        assert (details["state"], details["event"], details["page"]) == (
            state.value, event.value, 7,
        )  # fmt: skip


def test_an_ended_request_cannot_end_again():
    coordinator = make(FakeService(100))
    coordinator.admit("a", [1], max_tokens=4)
    coordinator.finish("a", mode=EndMode.DISCARD)
    with pytest.raises(UsageError):
        coordinator.finish("a")
    assert RequestState.ENDED.value == "ended"


def test_the_device_pool_never_hands_out_the_null_block_and_refuses_a_double_return():
    pool = DevicePool(4)
    blocks = pool.take(3)
    assert sorted(blocks) == [1, 2, 3]
    with pytest.raises(CapacityError):
        pool.take(1)
    pool.give_back(blocks[:1])
    with pytest.raises(NotHeld):
        pool.give_back(blocks[:1])
    with pytest.raises(NotHeld):
        pool.give_back([blocks[1], blocks[1]])
    assert pool.num_free == 1
    assert pool.capacity == 3


def test_the_books_notice_a_block_with_two_owners():
    coordinator = make(FakeService(100))
    for name in "ab":
        coordinator.admit(name, [ord(name)] * 8, max_tokens=8)
    coordinator.prepare([StepWork("a", 8), StepWork("b", 8)])
    coordinator.check_accounting()
    coordinator.pages("b")[0].resident_blocks = coordinator.pages("a")[0].resident_blocks
    with pytest.raises(InternalError):
        coordinator.check_accounting()


class Progress:
    """The writer's events, with the device in the test's hand."""

    def __init__(self):
        self.is_connected = True
        self.done_step = 0
        self.asked = []

    def has_reached(self, step):
        self.asked.append(step)
        return step <= self.done_step


def ranks(service, *, progress):
    writer = make(service)
    reader = HiSparseCoordinator(service, make(service).config, role=Role.READER, progress=progress)
    for coordinator in (writer, reader):
        coordinator.admit("a", [1] * 40, max_tokens=40, num_hit_tokens=0)
    return writer, reader


def seal_a_page(coordinator):
    step(coordinator, "a", [1] * BLOCK)


def test_a_reader_looks_up_when_the_writers_copies_are_done_and_not_before():
    service, progress = FakeService(100), Progress()
    writer, reader = ranks(service, progress=progress)
    for _ in range(4):
        seal_a_page(reader)
    assert reader.statistics.control_messages == 0, "asking before is a message for nothing"
    assert progress.asked == [1] * 4
    for _ in range(4):
        seal_a_page(writer)
    progress.done_step = 4
    report = reader.publish()
    assert (report.published, report.messages) == (4, 1)
    assert reader.prepare([StepWork("a", BLOCK)]).mirror_step == 4
    assert reader.prepare([StepWork("a", BLOCK)]).mirror_step == 0


def test_i2_an_event_that_is_early_publishes_nothing():
    """The writer's CPU lags: its event still stands for a step that is long done."""
    service, progress = FakeService(100), Progress()
    writer, reader = ranks(service, progress=progress)
    progress.done_step = 100
    seal_a_page(reader)
    assert reader.statistics.control_messages == 1
    assert not any(page.is_published for page in reader.pages("a"))
    seal_a_page(writer)
    seal_a_page(reader)
    seal_a_page(reader)
    assert reader.pages("a")[0].is_published, "asks again soon: published is a step or two behind"


def test_a_reader_whose_events_say_nothing_still_finds_what_is_published():
    service, progress = FakeService(100), Progress()
    writer, reader = ranks(service, progress=progress)
    seal_a_page(reader)
    seal_a_page(writer)
    for _ in range(20):
        if reader.publish().published:
            break
        reader.statistics.steps += 1
    assert reader.pages("a")[0].is_published
    progress.is_connected = False
    seal_a_page(reader)
    seal_a_page(writer)
    for _ in range(20):
        if reader.publish().published:
            break
        reader.statistics.steps += 1
    assert reader.pages("a")[1].is_published
