"""Client, namespace and leases against a scripted daemon and a segment made by hand."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest
import zmq
from fake_daemon import (
    DEADLINE_S,
    FakeDaemon,
    HandMadeSegment,
    short_directory,
    small_geometry,
    wait_until,
)

import worker_client
from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    DeviceError,
    ForeignSegment,
    GeometryError,
    InternalError,
    LeaseExpired,
    LeaseLost,
    NotHeld,
    QuotaExceeded,
    ServiceUnavailable,
    StaleBlock,
    UsageError,
    WriterTaken,
)
from hisparse_service.contract.geometry import namespace_fingerprint
from hisparse_service.contract.messages import (
    Abandon,
    AllocateBacking,
    BlocksReply,
    Done,
    EpochEvent,
    Free,
    Hello,
    LeaseReply,
    Lookup,
    MirrorBatch,
    MirrorReply,
    OpenNamespace,
    Pin,
    Ping,
    Pong,
    PublishedEvent,
    Reclaim,
    RegistrationTurn,
    ReleaseLeases,
    Reserve,
    ReservedItem,
    TakeWriter,
    TurnReply,
    Unpin,
    YieldWriter,
    encode,
)
from hisparse_service.contract.segment import BlockState
from worker_client import session as session_module
from worker_client.blocks import LeaseState
from worker_client.client import Completed, CudaUse, Enqueued, MirrorOutcome
from worker_client.session import SessionState

GEOMETRY = small_geometry()
FINGERPRINT = namespace_fingerprint(model="m", kv_dtype="bf16", geometry=GEOMETRY)
TTL_NS = 30 * 10**9


def u32(*values):
    return np.array(values, "<u4").tobytes()


def blocks_reply(daemon, request, blocks, *, lease_id=None, generations=None, ttl_ns=TTL_NS):
    if lease_id is None:
        lease_id = request.lease_id or 50 + daemon.count(type(request))
    generations = [7] * len(blocks) if generations is None else generations
    return BlocksReply(
        request.request_id, daemon.epoch, lease_id, time.monotonic_ns() + ttl_ns, u32(*blocks),
        u32(*generations),
    )  # fmt: skip


@pytest.fixture
def daemon():
    with short_directory() as directory:
        fake = FakeDaemon(directory)
        done = lambda r: Done(r.request_id, fake.epoch)  # noqa: E731
        for request_type in (Abandon, Free, Unpin, YieldWriter):
            fake.on[request_type] = done
        fake.on[Reserve] = lambda r: blocks_reply(fake, r, range(1, 1 + r.num_blocks))
        fake.on[Lookup] = lambda r: blocks_reply(fake, r, range(1, 1 + len(r.keys) // 16))
        fake.on[Pin] = lambda r: blocks_reply(fake, r, np.frombuffer(r.blocks, "<u4"))
        fake.on[Reclaim] = lambda r: blocks_reply(fake, r, [], lease_id=r.lease_id)
        fake.on[TakeWriter] = lambda r: LeaseReply(
            r.request_id, fake.epoch, 9, time.monotonic_ns() + TTL_NS
        )
        yield fake
        fake.stop()


@pytest.fixture
def segment(daemon):
    made = HandMadeSegment(GEOMETRY, FINGERPRINT)
    for block in range(1, 8):
        made.set_record(block, generation=7, state=BlockState.PUBLISHED)
    made.serve(daemon)
    yield made
    made.remove()


@pytest.fixture
def client(daemon):
    made = worker_client.connect(daemon.directory, client_name="t")
    yield made
    made.close()


@pytest.fixture
def namespace(client, segment):
    made = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    made.attach(8, cuda=CudaUse.OFF)
    return made


def mirror_ok(daemon, *, canonical=None):
    def answer(request):
        blocks = b"".join(item.blocks for item in request.completed)
        generations = b"".join(item.generations for item in request.completed)
        return MirrorReply(
            request.request_id, daemon.epoch, blocks if canonical is None else u32(*canonical),
            generations, time.monotonic_ns() + TTL_NS,
            [
                ReservedItem(item.lease_id or 91, u32(*range(6, 6 + item.num_blocks)), u32(7))
                for item in request.reserve
            ],
            3,
        )  # fmt: skip

    daemon.on[MirrorBatch] = answer


def completed(lease, *blocks):
    return Completed(
        lease=lease, blocks=np.array(blocks, np.uint32),
        generations=np.full(len(blocks), 7, np.uint32), keys=bytes(16 * len(blocks)),
    )  # fmt: skip


# --- namespaces and attach ----------------------------------------------------------------------


def test_opening_a_namespace_twice_gives_the_same_object(client, daemon):
    first = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    assert client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY) is first
    assert client.open_namespace(model="m", kv_dtype="fp8", geometry=GEOMETRY) is not first
    assert daemon.count(OpenNamespace) == 2
    assert first.fingerprint == FINGERPRINT


def test_attach_is_idempotent_and_maps_once(namespace, segment):
    assert namespace.attach(8, cuda=CudaUse.OFF) is namespace.pool
    with open("/proc/self/maps") as maps:
        # One mapping in three parts: read-only, the payload, read-only.
        assert sum(segment.name.lstrip("/") in line for line in maps) == 3


def test_attach_again_after_cleanup_maps_anew(namespace):
    first = namespace.pool
    first.cleanup()
    assert namespace.attach(8, cuda=CudaUse.OFF) is not first


class FakeDriver:
    def __init__(self, daemon, *, fail_at=None):
        self.daemon, self.fail_at = daemon, fail_at
        self.registered, self.turn_held = [], []

    def prepare(self):
        pass

    def register(self, address, size_bytes):
        if len(self.registered) == self.fail_at:
            return 2
        turns = [r.release for r in self.daemon.received if isinstance(r, RegistrationTurn)]
        self.turn_held.append(turns == [False])
        self.registered.append((address, size_bytes))
        return 0

    def unregister(self, address):
        assert self.registered.pop()[0] == address
        return 0

    def clear_error(self):
        pass


def test_attach_registers_every_range_within_the_turn(client, daemon, segment):
    """Registering the same pages from many ranks at once fails with ENOMEM."""
    namespace = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    waits = [1, 1]
    daemon.on[RegistrationTurn] = lambda r: TurnReply(
        r.request_id, daemon.epoch, r.release or not waits or bool(waits.pop() == 0), 1
    )
    driver = FakeDriver(daemon)
    driver.turn_held = []
    pool = namespace.attach(8, driver=driver)
    assert [(a - pool.address, a - pool.address + n) for a, n in driver.registered] == list(
        pool.ranges
    )
    turns = [r.release for r in daemon.received if isinstance(r, RegistrationTurn)]
    assert turns == [False, False, False, True]
    assert pool.cuda_registered
    namespace.attach(8, driver=driver)
    assert len(driver.registered) == 3, "nothing is registered twice"
    client.close()
    assert driver.registered == []


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_failed_registration_gives_turn_and_mapping_back(client, daemon, segment, fail_at):
    namespace = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    driver = FakeDriver(daemon, fail_at=fail_at)
    with pytest.raises(DeviceError) as caught:
        namespace.attach(8, driver=driver)
    # While the traceback's frames still hold the pool: not the collector gave the mapping back.
    assert caught.tb is not None
    assert driver.registered == []
    assert daemon.last(RegistrationTurn).release
    assert namespace.pool is None
    with open("/proc/self/maps") as maps:
        assert segment.name.lstrip("/") not in maps.read()
    assert namespace.attach(8, driver=FakeDriver(daemon)).cuda_registered


def test_a_turn_that_never_comes_is_service_unavailable(client, daemon):
    namespace = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    daemon.on[RegistrationTurn] = lambda r: TurnReply(r.request_id, daemon.epoch, False, 4)
    with (
        pytest.raises(ServiceUnavailable, match="4 sessions"),
        namespace.registration_turn(timeout_s=0.05),
    ):
        pass


@pytest.mark.parametrize(
    ("call", "limit", "value"),
    [
        (lambda space, _: space.attach(0), limits.MAX_BLOCKS_PER_BACKING, 0),
        (lambda space, _: space.attach(10**12), limits.MAX_BLOCKS_PER_BACKING, 10**12),
        (lambda space, _: space.reserve(0), limits.MAX_RESERVE_BLOCKS, 0),
        (lambda space, _: space.reserve(-1), limits.MAX_RESERVE_BLOCKS, -1),
        (lambda space, _: space.reserve(10**6), limits.MAX_RESERVE_BLOCKS, 10**6),
        (lambda space, _: space.lookup(b"abc"), 16, 3),
        (lambda space, _: space.lookup(bytes(16 * 131_073)), limits.MAX_KEYS, 131_073),
        (lambda space, lease: space.lookup_into(lease, b"abc"), 16, 3),
        (
            lambda space, lease: space.mirror(reserve=[(lease, 1), (lease, 0)]),
            limits.MAX_RESERVE_BLOCKS, 0,
        ),
        (
            lambda space, _: space.client.open_namespace(
                model="m", kv_dtype="bf16", geometry=GEOMETRY, tenant="t", name="n" * 5000
            ),
            limits.MAX_TEXT_BYTES, 5000,
        ),
    ],
)  # fmt: skip
def test_what_no_daemon_takes_is_a_usage_error_and_is_not_sent(
    namespace, daemon, call, limit, value
):
    """It came back as a malformed message: "reconnect or upgrade", for a caller's mistake."""
    lease = namespace.reserve(1)
    # The daemon of the test reads messages as the real one does, and would not survive these.
    sent = [type(each) for each in daemon.received if not isinstance(each, Ping)]
    with pytest.raises(UsageError) as caught:
        call(namespace, lease)
    assert caught.value.details == {"limit": limit, "value": value}
    assert str(value) in caught.value.message
    assert caught.value.remedy
    namespace.client.ping()
    assert [type(each) for each in daemon.received if not isinstance(each, Ping)] == sent
    assert len(lease.reserved_blocks) == 1
    lease.release()


# --- leases and reads ---------------------------------------------------------------------------


def test_a_lookup_pins_into_a_lease_and_reserve_adds_to_it(namespace, daemon):
    chain = namespace.key_chain()
    chain.extend(range(12))
    lease = namespace.lookup(chain)
    assert lease.blocks.tolist() == [1, 2, 3]
    assert lease.generations.tolist() == [7, 7, 7]
    assert daemon.last(Lookup).keys == chain.keys()
    assert namespace.reserve(2, lease=lease) is lease
    assert daemon.last(Reserve).lease_id == lease.lease_id != 0
    assert lease.reserved_blocks.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        lease.blocks[0] = 5
    lease.release()


def test_a_lookup_without_a_hit_gives_a_lease_that_can_be_used(namespace, daemon):
    daemon.on[Lookup] = lambda r: blocks_reply(daemon, r, [], lease_id=r.lease_id)
    lease = namespace.lookup(bytes(16))
    assert (lease.lease_id, len(lease.blocks)) == (0, 0)
    lease.check()
    namespace.reserve(1, lease=lease)
    assert lease.lease_id != 0
    lease.release()


def test_i3_a_good_read_passes_before_and_after(namespace):
    lease = namespace.lookup(bytes(48))
    with lease.read_guard() as guarded:
        assert guarded is lease
    with lease.read_guard([2]):
        pass


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 8},
        {"state": BlockState.FREE},
        {"state": BlockState.EVICTING},
        {"state": BlockState.RESERVED},
        {"generation": 6},
    ],
)
def test_i3_a_stale_block_is_an_error_before_and_after_the_copy(namespace, segment, change):
    lease = namespace.lookup(bytes(48))
    entered = False

    def read(change_inside):
        nonlocal entered
        with lease.read_guard():
            entered = True
            if change_inside:
                segment.set_record(2, **change)

    with pytest.raises(StaleBlock) as caught:
        read(change_inside=True)
    assert entered
    assert caught.value.details["block"] == 2
    entered = False
    with pytest.raises(StaleBlock):
        read(change_inside=False)
    assert not entered
    lease.check([1, 3])


def test_an_error_inside_the_guard_is_not_hidden(namespace, segment):
    lease = namespace.lookup(bytes(48))

    def read():
        with lease.read_guard():
            segment.set_record(2, generation=8)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()


def test_a_block_that_is_not_pinned_cannot_be_checked(namespace):
    lease = namespace.lookup(bytes(48))
    for blocks in ([4], [1, 7], [2**32 - 1]):
        with pytest.raises(NotHeld):
            lease.check(blocks)
    lease.check([3, 1, 1])


def test_i3_an_expired_lease_never_returns_bytes(namespace, daemon):
    daemon.on[Ping] = lambda r: Pong(r.request_id, daemon.epoch, 0, [])  # renews nothing
    daemon.on[Lookup] = lambda r: blocks_reply(daemon, r, [1], ttl_ns=200 * 10**6)
    lease = namespace.lookup(bytes(16))
    with pytest.raises(LeaseExpired), lease.read_guard():
        wait_until(lambda: time.monotonic_ns() > lease.deadline_ns)
    assert lease.state is LeaseState.EXPIRED
    with pytest.raises(LeaseExpired):
        lease.check()
    with pytest.raises(LeaseExpired):
        namespace.reserve(1, lease=lease)


def test_leases_are_renewed_in_the_background_and_a_lost_one_is_marked(namespace, daemon):
    daemon.on[Lookup] = lambda r: blocks_reply(daemon, r, [1], ttl_ns=10**9)
    kept, lost = namespace.lookup(bytes(16)), namespace.lookup(bytes(16))
    assert kept.lease_id != lost.lease_id
    daemon.on[Ping] = lambda r: Pong(
        r.request_id, daemon.epoch, time.monotonic_ns() + 10**9,
        [lost.lease_id] if lost.lease_id in r.renew_leases else [],
    )  # fmt: skip
    deadline = kept.deadline_ns
    wait_until(lambda: kept.deadline_ns > deadline and lost.state is LeaseState.REVOKED)
    kept.check()
    with pytest.raises(LeaseLost):
        lost.check()


def test_release_is_idempotent_and_ends_the_lease(namespace, daemon):
    lease = namespace.lookup(bytes(16))
    lease_id = lease.lease_id
    lease.release()
    lease.release()
    assert daemon.count(ReleaseLeases) == 1
    assert daemon.last(ReleaseLeases).lease_ids == [lease_id]
    with pytest.raises(LeaseLost):
        lease.check()
    with pytest.raises(LeaseLost):
        namespace.reserve(1, lease=lease)


def test_a_dropped_lease_is_released_with_the_next_heartbeat(namespace, daemon):
    """Lookup pins that the engine never uses must not leak."""
    lease = namespace.lookup(bytes(16))
    lease_id = lease.lease_id
    del lease
    gc.collect()
    wait_until(lambda: daemon.count(ReleaseLeases))
    assert daemon.last(ReleaseLeases).lease_ids == [lease_id]


def test_a_dropped_lease_with_reserved_blocks_warns_and_is_kept_by_the_daemon(namespace, daemon):
    """A copy may still be writing into them: another writer must not get them."""
    lease = namespace.reserve(1)
    with pytest.warns(ResourceWarning, match="reserved"):
        lease.__del__()
    lease.release()


def test_the_result_of_a_reserve_that_came_too_late_goes_back(namespace, daemon):
    """Nobody knows of these blocks; without a release they were lost until the session ends."""
    kept = []
    daemon.on[Reserve] = kept.append
    with pytest.raises(ServiceUnavailable):
        namespace.reserve(2, timeout_s=0.1)
    daemon.send_to_all(blocks_reply(daemon, kept[0], [1, 2], lease_id=77))
    wait_until(lambda: daemon.count(ReleaseLeases))
    assert daemon.last(ReleaseLeases).lease_ids == [77]


def test_unpin_abandon_and_free_take_blocks_out_of_the_lease(namespace, daemon):
    lease = namespace.lookup(bytes(48))
    namespace.reserve(3, lease=lease)
    namespace.unpin(lease, [2])
    assert lease.blocks.tolist() == [1, 3]
    namespace.abandon(lease, [])
    assert daemon.count(Abandon) == 0, "no blocks on the wire would mean all of them"
    namespace.abandon(lease, [1])
    assert lease.reserved_blocks.tolist() == [2, 3]
    namespace.free(lease, [3])
    assert (lease.blocks.tolist(), lease.reserved_blocks.tolist()) == ([1], [2])
    namespace.abandon(lease)
    assert daemon.last(Abandon).blocks == b""
    assert len(lease.reserved_blocks) == 0


def test_an_error_of_the_daemon_leaves_the_lease_as_it_was(namespace, daemon):
    lease = namespace.lookup(bytes(48))
    daemon.on[Unpin] = lambda _: NotHeld("no")
    with pytest.raises(NotHeld):
        namespace.unpin(lease, [2])
    daemon.on[Reserve] = lambda _: CapacityError("full", needed=1, free=0)
    with pytest.raises(CapacityError):
        namespace.reserve(1, lease=lease)
    assert (lease.blocks.tolist(), len(lease.reserved_blocks)) == ([1, 2, 3], 0)


def test_i8_a_block_outside_the_backing_is_refused(namespace, daemon):
    daemon.on[Lookup] = lambda r: blocks_reply(daemon, r, [8])
    with pytest.raises(InternalError, match="block 8 of 8"):
        namespace.lookup(bytes(16))


def test_a_lease_of_another_namespace_is_a_usage_error(client, namespace):
    other = client.open_namespace(model="other", kv_dtype="bf16", geometry=GEOMETRY)
    with pytest.raises(UsageError, match="namespace 'm'"):
        other.reserve(1, lease=namespace.lookup(bytes(16)))


@pytest.mark.parametrize("blocks", [[-1], [2**32], [1.5], [[1]], ["a"]])
def test_what_is_no_block_id_is_a_usage_error(namespace, blocks):
    with pytest.raises(UsageError):
        namespace.pin(blocks, [1])


# --- writer and mirrors -------------------------------------------------------------------------


def test_the_writer_lease_is_taken_and_given_back(namespace, daemon):
    writer = namespace.take_writer()
    assert (writer.lease_id, namespace.writer) == (9, writer)
    namespace.yield_writer()
    namespace.yield_writer()
    assert daemon.count(YieldWriter) == 1
    assert namespace.writer is None
    assert writer.state is LeaseState.RELEASED
    daemon.on[TakeWriter] = lambda _: WriterTaken("rank 0 has it")
    with pytest.raises(WriterTaken):
        namespace.take_writer()


def test_a_mirror_batch_publishes_and_takes_the_canonical_blocks(namespace, daemon):
    mirror_ok(daemon, canonical=[1, 5])
    lease = namespace.reserve(3)
    more = namespace.reserve(1)
    result = namespace.mirror(
        enqueued=[Enqueued(lease=lease, blocks=lease.reserved_blocks[2:], generations=u32_of(7))],
        completed=[completed(lease, 1, 2)],
        reserve=[(more, 1)],
    )
    assert result.outcome is MirrorOutcome.ACKNOWLEDGED
    assert result.canonical_blocks.tolist() == [1, 5] == lease.blocks.tolist()
    assert lease.reserved_blocks.tolist() == [3]
    assert more.reserved_blocks.tolist() == [1, 6]
    assert [r[0].tolist() for r in result.reserved] == [[6]]
    assert result.num_free == 3
    assert daemon.count(MirrorBatch) == 1
    for held in (lease, more):
        held.release()


def u32_of(*values):
    return np.array(values, np.uint32)


def test_i2_mirrors_of_a_time_without_daemon_are_kept_and_nothing_waits(namespace, daemon):
    lease = namespace.reserve(2)
    daemon.stop()
    wait_until(lambda: not namespace.is_daemon_there)
    before = time.monotonic()
    result = namespace.mirror(completed=[completed(lease, 1)], reserve=[(lease, 1)], timeout_s=3600)
    assert time.monotonic() - before < DEADLINE_S
    assert result.outcome is MirrorOutcome.QUEUED
    assert [len(blocks) for blocks, _ in result.reserved] == [0]
    assert lease.reserved_blocks.tolist() == [1, 2], "a lost ack publishes nothing"
    assert len(lease.blocks) == 0
    daemon.start()
    lease.release()


def test_queued_mirrors_are_bounded(namespace, daemon, monkeypatch):
    monkeypatch.setattr(limits, "MAX_QUEUED_MIRRORS", 2)
    lease = namespace.reserve(3)
    daemon.stop()
    wait_until(lambda: not namespace.is_daemon_there)
    namespace.mirror(completed=[completed(lease, 1, 2)])
    with pytest.raises(QuotaExceeded) as caught:
        namespace.mirror(completed=[completed(lease, 3)])
    assert caught.value.details["limit"] == 2
    daemon.start()
    lease.release()


def test_a_step_goes_on_after_another_callers_deadline_passed(namespace, daemon):
    """A ping with 0.1 ms of patience made the next mirror QUEUED and lookups fail, daemon idle."""
    lease = namespace.reserve(2)
    mirror_ok(daemon)
    daemon.on[Ping] = lambda _: None
    with namespace.session_lock:  # so that nobody revives the session meanwhile
        with pytest.raises(ServiceUnavailable):
            namespace.client.ping(timeout_s=1e-4)
        result = namespace.mirror(completed=[completed(lease, 1)])
        assert result.outcome is MirrorOutcome.ACKNOWLEDGED
        blocks, _ = namespace.lookup_into(lease, bytes(16))
        assert blocks.tolist() == [1]
    del daemon.on[Ping]
    lease.release()


def test_a_mirror_that_got_no_answer_in_time_is_handed_in_though_the_daemon_was_never_away(
    namespace, daemon, monkeypatch
):
    monkeypatch.setattr(session_module, "_HEARTBEAT_TIMEOUT_S", 3600.0)
    lease = namespace.reserve(1)
    daemon.on[MirrorBatch] = lambda _: None
    result = namespace.mirror(completed=[completed(lease, 1)], timeout_s=0.01)
    assert result.outcome is MirrorOutcome.QUEUED
    with namespace.session_lock:
        mirror_ok(daemon)
    if not namespace.client.counters["mirrors_handed_in"]:
        wait_until(lambda: daemon.count(MirrorBatch) == 2, "sent again")
    (handed_in,) = wait_until(namespace.handed_in)
    assert handed_in.canonical_blocks.tolist() == [1]
    lease.release()


def test_a_lookup_of_a_step_takes_no_lock_while_the_daemon_is_away(namespace, daemon):
    """Who looked up again and again kept it from the thread that revives the session."""
    lease = namespace.reserve(1)
    daemon.stop()
    wait_until(lambda: not namespace.is_daemon_there)
    refused = []

    def look_up():
        with pytest.raises(ServiceUnavailable, match="away"):
            namespace.lookup_into(lease, bytes(16))
        refused.append(True)

    wait_until(lambda: namespace.client.session.state is SessionState.AWAY)
    with namespace.session_lock:
        thread = threading.Thread(target=look_up)
        thread.start()
        wait_until(lambda: refused, "refused at once")
    thread.join()
    daemon.start()
    lease.release()


def test_a_mirror_whose_answer_came_late_is_settled_by_it_and_not_sent_twice(namespace, daemon):
    """Sent again, it would be a double publish."""
    lease = namespace.reserve(1)
    kept = []
    daemon.on[MirrorBatch] = kept.append
    daemon.on[Ping] = lambda _: None  # a daemon answers in order, so nothing before the late reply
    result = namespace.mirror(completed=[completed(lease, 1)], timeout_s=0.1)
    assert result.outcome is MirrorOutcome.QUEUED
    late = MirrorReply(kept[0].request_id, daemon.epoch, u32(1), u32(7), 2**62, [], 0)
    daemon.send_to_all(late)
    wait_until(lambda: not daemon.outbox)
    del daemon.on[Ping]
    results = wait_until(namespace.handed_in)
    assert results[0].canonical_blocks.tolist() == [1]
    assert lease.blocks.tolist() == [1]
    assert daemon.count(MirrorBatch) == 1
    lease.release()


# --- a new daemon -------------------------------------------------------------------------------


def restart(daemon, *, epoch=22):
    daemon.stop()
    daemon.epoch = epoch
    daemon.start()


def test_i4_a_restart_keeps_mapping_and_pins_and_registers_nothing_twice(client, daemon, segment):
    namespace = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    driver = FakeDriver(daemon)
    pool = namespace.attach(8, driver=driver)
    namespace.take_writer()
    lease = namespace.lookup(bytes(48))
    old_id, address = lease.lease_id, pool.address
    daemon.on[Pin] = lambda r: blocks_reply(
        daemon, r, np.frombuffer(r.blocks, "<u4"), lease_id=old_id + 1000
    )
    turns = daemon.count(RegistrationTurn)
    daemon.stop()
    wait_until(lambda: not client.session.is_alive)
    lease.check()  # reads of leased blocks go on
    with pytest.raises(ServiceUnavailable):
        namespace.reserve(1, timeout_s=0.1)
    daemon.epoch = 22
    daemon.start()
    wait_until(lambda: client.session.is_alive and lease.epoch == 22)
    assert (lease.lease_id, lease.state) == (old_id + 1000, LeaseState.GRANTED)
    assert daemon.last(Pin).lease_id == 0
    assert np.frombuffer(daemon.last(Pin).blocks, "<u4").tolist() == [1, 2, 3]
    lease.check()
    assert namespace.writer.epoch == 22
    assert sorted(client.leases_to_renew(2**62)) == [9, old_id + 1000]
    assert (pool.address, namespace.pool) == (address, pool)
    assert len(driver.registered) == 3
    assert daemon.count(RegistrationTurn) == turns
    assert namespace.attach(8, driver=driver) is pool


def test_reads_of_leased_blocks_go_on_past_their_deadline_while_the_daemon_is_away(
    namespace, daemon, segment
):
    """Nobody evicts while nobody is there; the generation still decides."""
    daemon.on[Lookup] = lambda r: blocks_reply(daemon, r, [1, 2], ttl_ns=300 * 10**6)
    lease = namespace.lookup(bytes(32))
    daemon.stop()
    wait_until(lambda: not namespace.is_daemon_there)
    wait_until(lambda: time.monotonic_ns() > lease.deadline_ns)
    lease.check()
    segment.set_record(2, generation=8)
    with pytest.raises(StaleBlock):
        lease.check()
    daemon.start()


def test_a_lease_whose_blocks_went_meanwhile_is_lost(namespace, daemon):
    lease, other = namespace.lookup(bytes(48)), namespace.lookup(bytes(16))

    def pin(request):
        if request.blocks == u32(1, 2, 3):
            return StaleBlock("block 2 was evicted")
        return blocks_reply(daemon, request, [1])

    daemon.on[Pin] = pin
    restart(daemon)
    wait_until(lambda: lease.state is LeaseState.REVOKED and other.epoch == 22)
    with pytest.raises(LeaseLost):
        lease.check()
    other.check()


def test_new_lease_ids_that_equal_old_ones_mix_up_nothing(namespace, daemon):
    """Ids start from 1 again in each epoch."""
    leases = [namespace.pin([block], [7]) for block in (1, 2, 3)]
    old = [lease.lease_id for lease in leases]
    fresh = list(reversed(old))
    daemon.on[Pin] = lambda r: blocks_reply(
        daemon, r, np.frombuffer(r.blocks, "<u4"), lease_id=fresh.pop()
    )
    restart(daemon)
    wait_until(lambda: all(lease.epoch == 22 for lease in leases))
    assert sorted(lease.lease_id for lease in leases) == sorted(old)
    due = namespace.client.leases_to_renew(2**62)
    assert sorted(due) == sorted(old)
    for lease in leases:
        lease.release()
    assert namespace.client.leases_of(namespace) == []


def test_i4_another_segment_after_a_restart_is_an_error_and_the_mapping_stays(
    client, namespace, daemon, segment
):
    lease = namespace.lookup(bytes(16))
    view = namespace.pool.layer_view(0)
    daemon.on[AllocateBacking] = lambda r: segment.reply(
        r.request_id, daemon.epoch, inode=segment.reply().inode + 1
    )
    restart(daemon)
    wait_until(lambda: lease.state is LeaseState.REVOKED)
    with pytest.raises(ForeignSegment):
        namespace.reserve(1)
    int(view[1, 1, 1])
    namespace.pool.cleanup()
    segment.serve(daemon)
    namespace.attach(8, cuda=CudaUse.OFF)
    namespace.reserve(1).release()


def test_completed_mirrors_are_handed_in_to_the_next_daemon(namespace, daemon, segment):
    lease = namespace.reserve(2)
    daemon.stop()
    wait_until(lambda: not namespace.is_daemon_there)
    namespace.mirror(completed=[completed(lease, 1)])
    mirror_ok(daemon)
    daemon.epoch = 22
    daemon.start()
    results = wait_until(namespace.handed_in)
    assert results[0].completed.lease is lease
    assert results[0].canonical_blocks.tolist() == [1]
    assert lease.lost_blocks.tolist() == [1, 2]
    lease.release()


def test_i1_reserved_blocks_that_the_next_daemon_kept_are_written_on(namespace, daemon):
    """Copies into them are in flight: nobody else may have got them meanwhile."""
    lease, other = namespace.reserve(3), namespace.reserve(1)
    daemon.on[Reclaim] = lambda r: (
        blocks_reply(daemon, r, [1, 3], lease_id=700)
        if len(r.blocks) == 12
        else UsageError("no such blocks")
    )
    restart(daemon)
    wait_until(lambda: lease.epoch == other.epoch == 22)
    request = daemon.last(Reclaim)
    assert request.lease_id == 0
    assert (lease.lease_id, lease.reserved_blocks.tolist()) == (700, [1, 3])
    assert lease.reserved_generations.tolist() == [7, 7]
    assert lease.lost_blocks.tolist() == [2]
    assert (other.reserved_blocks.tolist(), other.lost_blocks.tolist()) == ([], [1])
    lease.release()


def test_an_attach_that_fails_half_way_is_done_again_as_a_whole(namespace, daemon):
    lease = namespace.lookup(bytes(48))
    failed = threading.Event()

    def fail(_request):
        failed.set()
        return InternalError("a bug in the daemon")

    daemon.on[Pin] = fail
    restart(daemon)
    wait_until(failed.is_set)
    lease.check()  # nobody settled it yet, so its blocks' generations decide
    daemon.on[Pin] = lambda r: blocks_reply(daemon, r, [1, 2, 3])
    wait_until(lambda: lease.epoch == 22)
    lease.check()


def test_a_mirror_that_the_dead_daemon_had_published_is_found_by_its_record(
    namespace, daemon, segment
):
    """The daemon published, then died before it said so."""
    lease, other = namespace.reserve(1), namespace.reserve(1)
    daemon.stop()
    wait_until(lambda: not namespace.is_daemon_there)
    namespace.mirror(completed=[completed(lease, 1)])
    namespace.mirror(completed=[completed(other, 2)])
    segment.set_record(2, state=BlockState.FREE, generation=8)
    daemon.on[MirrorBatch] = lambda _: LeaseLost("no such lease")
    daemon.epoch = 22
    daemon.start()
    results = wait_until(namespace.handed_in)
    assert results[0].canonical_blocks.tolist() == [1] == lease.blocks.tolist()
    assert results[1].canonical_blocks is None
    assert namespace.counters["mirrors_lost"] == 1
    for held in (lease, other):
        held.release()


def test_a_daemon_that_dies_again_while_attaching_loses_no_lease(namespace, daemon):
    lease = namespace.lookup(bytes(48))
    died = threading.Event()
    daemon.on[Pin] = lambda _: died.set()
    restart(daemon)
    wait_until(died.is_set)
    daemon.on[Pin] = lambda r: blocks_reply(daemon, r, [1, 2, 3])
    restart(daemon, epoch=33)
    wait_until(lambda: lease.epoch == 33)
    lease.check()


# --- events and the end -------------------------------------------------------------------------


def test_events_are_received_until_the_client_closes(client, daemon):
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.bind(f"ipc://{daemon.directory}/events.sock")
        stream = client.events(b"published")
        assert publisher.poll(20_000)
        assert publisher.recv() == b"\x01published"
        assert stream.next(timeout_s=0.0) is None
        event = PublishedEvent(1, 1, u32(1), u32(1), bytes(16))
        publisher.send_multipart([b"epoch", encode(EpochEvent(1, "x"))])
        publisher.send_multipart([b"published", encode(event)])
        assert stream.next(timeout_s=20) == event
        ended = threading.Event()
        reader = threading.Thread(target=lambda: (list(stream), ended.set()))
        reader.start()
        client.close()
        reader.join(20)
        assert ended.is_set()
    with pytest.raises(ClosedError):
        stream.next(timeout_s=0)
    with pytest.raises(ClosedError):
        client.events()


def test_close_is_idempotent_and_later_use_raises(client, namespace, daemon):
    pool = namespace.pool
    with client:
        pass
    client.close()
    assert pool.is_closed
    for use in (client.ping, client.status, lambda: namespace.reserve(1)):
        with pytest.raises(ClosedError):
            use()


def test_close_with_live_tensors_does_not_crash(client, namespace):
    view = namespace.pool.layer_view(2)
    client.close()
    view[1] = 3
    assert int(view[1, 0, 0]) == 3


def test_two_clients_of_one_process_are_two_sessions(client, daemon):
    with worker_client.connect(daemon.endpoint, client_name="second") as second:
        second.ping()
        client.ping()
        assert second.session_id != client.session_id
    client.ping()


def test_a_geometry_that_cannot_work_is_refused_before_it_is_sent(client, daemon):
    from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup

    bad = HostGeometry(layout=HostLayout.LAYER_MAJOR, block_size=4, groups=(LayerGroup(1, 24),))
    with pytest.raises(GeometryError, match="16"):
        client.open_namespace(model="m", kv_dtype="x", geometry=bad)
    assert daemon.count(OpenNamespace) == 0


def test_importing_the_package_loads_no_torch():
    import subprocess
    import sys

    code = "import sys, worker_client, worker_client.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_process_that_forgets_to_close_says_bye_at_its_end(daemon):
    import subprocess
    import sys

    code = (
        "import sys, worker_client\n"
        "client = worker_client.connect(sys.argv[1], client_name='forgetful')"
    )
    subprocess.run([sys.executable, "-c", code, daemon.endpoint], check=True, timeout=60)
    assert daemon.last(Hello).client_name == "forgetful"
    assert os.getpid()
    from hisparse_service.contract.messages import Bye

    wait_until(lambda: daemon.count(Bye) == 1)
