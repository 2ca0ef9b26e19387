"""What goes on beside an attach, and what may happen to it: silence, other daemons, a close."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from fake_daemon import (
    DEADLINE_S,
    FakeDaemon,
    HandMadeSegment,
    short_directory,
    small_geometry,
    wait_until,
)

import worker_client
from hisparse_service.contract.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    ForeignSegment,
    HiSparseError,
    ServiceUnavailable,
)
from hisparse_service.contract.geometry import namespace_fingerprint
from hisparse_service.contract.messages import (
    AllocateBacking,
    BlocksReply,
    Lookup,
    NamespaceReply,
    OpenNamespace,
    Ping,
    RegistrationTurn,
    Reserve,
    TurnReply,
)
from hisparse_service.contract.segment import BlockState
from worker_client import attachment as attachment_module
from worker_client.client import Completed, CudaUse, MirrorOutcome
from worker_client.host_pool import HostPool

GEOMETRY = small_geometry()
LONG_S = 3600.0
"""An attach with so much patience held the other threads for as long."""


def fingerprint_of(model):
    return namespace_fingerprint(model=model, kv_dtype="bf16", geometry=GEOMETRY)


def u32(*values):
    return np.array(values, "<u4").tobytes()


@pytest.fixture
def daemon():
    with short_directory() as directory:
        fake = FakeDaemon(directory)

        def blocks(request):
            count = getattr(request, "num_blocks", 1)
            return BlocksReply(
                request.request_id, fake.epoch, request.lease_id or 50 + len(fake.received),
                time.monotonic_ns() + 30 * 10**9, u32(*range(1, 1 + count)), u32(*[7] * count),
            )  # fmt: skip

        fake.on[Lookup] = fake.on[Reserve] = blocks
        yield fake
        fake.stop()


@pytest.fixture
def segment(daemon):
    made = HandMadeSegment(GEOMETRY, fingerprint_of("m"))
    for block in range(1, 8):
        made.set_record(block, generation=7, state=BlockState.PUBLISHED)
    made.serve(daemon)
    yield made
    made.remove()


@pytest.fixture
def other_segment(segment):
    made = HandMadeSegment(GEOMETRY, fingerprint_of("m"))
    yield made
    made.remove()


@pytest.fixture
def client(daemon):
    made = worker_client.connect(daemon.directory, client_name="t")
    yield made
    made.close()


@pytest.fixture
def namespace(client, segment):
    return client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)


class HeldDriver:
    """Stands in for CUDA: registers nothing, and stands still in the first range until `go`."""

    def __init__(self):
        self.inside, self.go = threading.Event(), threading.Event()
        self.registered = []
        self.num_calls = 0

    def prepare(self):
        pass

    def register(self, address, size_bytes):
        self.num_calls += 1
        self.inside.set()
        assert self.go.wait(DEADLINE_S)
        self.registered.append((address, size_bytes))
        return 0

    def unregister(self, address):
        self.registered = [each for each in self.registered if each[0] != address]
        return 0

    def clear_error(self):
        pass


@pytest.fixture
def waiting(client, monkeypatch):
    """Names of the threads that looked whether a daemon is there since the test began."""
    original, names = client.session._read_monitor, set()

    def read_monitor():
        names.add(threading.current_thread().name)
        original()

    monkeypatch.setattr(client.session, "_read_monitor", read_monitor)
    return names


ATTACHING = "attaching"


class Attaching:
    """An attach on a thread of its own."""

    def __init__(self, namespace, **options):
        self.pool, self.error = None, None
        self._arguments = (namespace, {"cuda": CudaUse.OFF, "timeout_s": LONG_S} | options)
        self.thread = threading.Thread(target=self._run, name=ATTACHING)
        self.thread.start()

    def _run(self):
        namespace, options = self._arguments
        try:
            self.pool = namespace.attach(8, **options)
        except HiSparseError as error:
            self.error = error

    @property
    def goes_on(self):
        return self.thread.is_alive()

    def result(self):
        self.thread.join(DEADLINE_S)
        assert not self.goes_on
        if self.error is not None:
            raise self.error
        return self.pool


@contextlib.contextmanager
def attaching(namespace, driver=None, **options):
    """Ends the attach, however the test ends."""
    made = Attaching(namespace, driver=driver, **options)
    try:
        yield made
    finally:
        if driver is not None:
            driver.go.set()
        made.thread.join(1.0)
        if made.goes_on:
            namespace.client.close()
        made.thread.join(DEADLINE_S)


def beside(call):
    """What `call` gives on another thread; it must not wait for the attach."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert results, "it waits behind the attach"
    return results[0]


def maps(segment):
    with open("/proc/self/maps") as lines:
        return segment.name.lstrip("/") in lines.read()


# --- the others go on ---------------------------------------------------------------------------


def test_a_lookup_completes_while_the_answer_to_an_attach_is_awaited(namespace, daemon, segment):
    """The session's lock was held until the answer came or the attach lost its patience."""
    asked = threading.Event()
    daemon.on[AllocateBacking] = lambda _: asked.set()
    with attaching(namespace) as attach:
        assert asked.wait(DEADLINE_S)
        lease = beside(lambda: namespace.lookup(bytes(16)))
        assert lease.blocks.tolist() == [1]
        beats = daemon.count(Ping)
        wait_until(lambda: daemon.count(Ping) >= beats + 2, "heartbeats")
        assert attach.goes_on
        beside(lease.release)
        segment.serve(daemon)
        assert attach.result() is namespace.pool


def test_i4_a_decode_step_does_not_wait_behind_an_attach_that_waits_for_a_daemon(
    client, namespace, daemon, waiting
):
    """Its mirrors are kept at once, its leases end; with the lock held it stood still."""
    lease, other = namespace.reserve(1), namespace.lookup(bytes(16))
    daemon.stop()
    wait_until(lambda: not client.session.is_alive)
    with attaching(namespace) as attach:
        wait_until(lambda: ATTACHING in waiting, "the attach waits")
        done = Completed(
            lease=lease, blocks=lease.reserved_blocks, generations=lease.reserved_generations,
            keys=bytes(16),
        )  # fmt: skip
        assert beside(lambda: namespace.mirror(completed=[done])).outcome is MirrorOutcome.QUEUED
        beside(lambda: namespace.release(other, lease))
        with pytest.raises(ServiceUnavailable, match="no daemon listens"):
            namespace.reserve(1, timeout_s=0.1)
        assert attach.goes_on
        daemon.start()
        assert attach.result() is namespace.pool


def test_i7_requests_and_heartbeats_pass_while_pages_are_registered(namespace, daemon):
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        beside(lambda: namespace.lookup(bytes(16))).release()
        beats = daemon.count(Ping)
        wait_until(lambda: daemon.count(Ping) > beats, "a heartbeat")
        assert attach.goes_on
        driver.go.set()
        assert attach.result().cuda_registered


def test_two_threads_that_open_a_namespace_while_the_daemon_is_away_get_one(
    client, segment, daemon, waiting
):
    """Waiting gives the lock up: both find that there is none yet."""
    daemon.stop()
    wait_until(lambda: not client.session.is_alive)
    opened = []

    def ask():
        opened.append(client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY))

    threads = [threading.Thread(target=ask, name=name) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    wait_until(lambda: {"one", "two"} <= waiting, "both wait")
    daemon.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(opened) == 2
    assert opened[0] is opened[1]


# --- patience -------------------------------------------------------------------------------------


class Clock:
    """Stands in for the time module; goes on by what is slept, and by what a test says."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s


def test_the_questions_of_an_attach_share_its_time_out(namespace, daemon, segment, monkeypatch):
    """Each of them had all of it anew."""
    clock, asked = Clock(), []
    monkeypatch.setattr(attachment_module, "time", clock)
    original = namespace._link.request

    def request(build, reply_type, *, timeout_s=None, **options):
        asked.append(timeout_s)
        clock.now_s += 1.75
        return original(build, reply_type, **options)

    monkeypatch.setattr(namespace._link, "request", request)
    daemon.on[AllocateBacking] = lambda r: segment.reply(r.request_id, inode=1)
    with pytest.raises(ForeignSegment):
        namespace.attach(8, cuda=CudaUse.OFF, timeout_s=2.5)
    assert asked == [1.0, 0.75]


def test_work_between_its_questions_costs_an_attach_no_patience(
    namespace, daemon, segment, monkeypatch
):
    """Registering hundreds of GiB takes longer than any patience with the daemon."""
    clock, asked = Clock(), []
    monkeypatch.setattr(attachment_module, "time", clock)
    original = namespace._link.request

    def request(build, reply_type, *, timeout_s=None, **options):
        asked.append(timeout_s)
        return original(build, reply_type, **options)

    monkeypatch.setattr(namespace._link, "request", request)
    touch = HostPool.touch_page_tables

    def touch_long(pool):
        clock.now_s += 3600.0
        restart(daemon, epoch=22)
        wait_until(lambda: namespace.client.epoch == 22)
        touch(pool)

    monkeypatch.setattr(HostPool, "touch_page_tables", touch_long)
    assert namespace.attach(8, cuda=CudaUse.OFF, timeout_s=5.0) is namespace.pool
    assert asked == [1.0, 1.0]


def test_the_wait_for_the_turn_ends_when_the_caller_says(namespace, daemon, segment):
    """It was ten minutes, whatever `timeout_s` said."""
    daemon.on[RegistrationTurn] = lambda r: TurnReply(r.request_id, daemon.epoch, False, 4)
    with pytest.raises(ServiceUnavailable, match="4 sessions"):
        namespace.attach(8, driver=HeldDriver(), timeout_s=LONG_S, turn_timeout_s=0.05)
    assert daemon.last(RegistrationTurn).release
    assert namespace.pool is None
    assert not maps(segment)


class FailingDriver(HeldDriver):
    """Whose first range cannot be registered."""

    def register(self, address, size_bytes):
        super().register(address, size_bytes)
        self.registered.clear()
        return 2


def test_a_failed_registration_is_told_though_the_client_was_closed(client, namespace, segment):
    """The turn could not be given back, and that hid why there was nothing to give it back for."""
    driver = FailingDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        client.close()
        driver.go.set()
        with pytest.raises(DeviceError):
            attach.result()
    assert not maps(segment)


def test_a_failed_registration_is_told_though_the_new_daemon_refuses_the_namespace(
    client, namespace, daemon, segment
):
    driver = FailingDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        daemon.on[OpenNamespace] = lambda _: ConfigError("another geometry")
        restart(daemon, epoch=22)
        wait_until(lambda: client.epoch == 22 and client.session.is_alive)
        driver.go.set()
        with pytest.raises(DeviceError):
            attach.result()
    assert not maps(segment)


# --- another daemon during an attach --------------------------------------------------------------


def restart(daemon, *, epoch):
    daemon.stop()
    daemon.epoch = epoch
    daemon.start()


def test_i4_a_daemon_that_restarts_during_an_attach_finds_the_pool_registered_once(
    client, namespace, daemon, segment
):
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        restart(daemon, epoch=22)
        wait_until(lambda: client.epoch == 22)
        asked = daemon.count(AllocateBacking)
        driver.go.set()
        pool = attach.result()
        assert namespace.pool is pool
        assert driver.num_calls == len(pool.ranges)
        assert daemon.count(AllocateBacking) == asked + 1, "the new daemon was not asked"
    lease = namespace.lookup(bytes(16))
    lease.check()
    lease.release()


def test_a_session_that_ends_during_an_attach_changes_nothing(client, namespace, daemon):
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        hello = client.session.hello
        daemon.forget_sessions.set()
        wait_until(lambda: client.session.hello is not hello)
        driver.go.set()
        assert attach.result() is namespace.pool
    assert driver.num_calls == len(namespace.pool.ranges)


def test_i3_a_daemon_with_another_segment_is_attached_to_instead(
    client, namespace, daemon, segment, other_segment
):
    """Block ids of the new daemon would have been looked up in the old one's table."""
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        other_segment.serve(daemon)
        other_segment.set_record(1, generation=7, state=BlockState.PUBLISHED)
        restart(daemon, epoch=22)
        wait_until(lambda: client.epoch == 22)
        driver.go.set()
        pool = attach.result()
        assert pool.identity[1] == other_segment.reply().inode
        assert not maps(segment)
        assert len(driver.registered) == len(pool.ranges), "what was undone is registered"
    lease = namespace.lookup(bytes(16))
    lease.check()
    other_segment.set_record(1, generation=8)
    with pytest.raises(HiSparseError, match="generation"):
        lease.check()
    lease.release()


def test_a_daemon_that_was_replaced_before_its_segment_was_mapped_is_asked_again(
    namespace, daemon, segment, other_segment
):
    def answer(request):
        if daemon.count(AllocateBacking) == 1:
            return segment.reply(request.request_id, inode=1)
        return other_segment.reply(request.request_id)

    daemon.on[AllocateBacking] = answer
    assert namespace.attach(8, cuda=CudaUse.OFF).identity[1] == other_segment.reply().inode


def test_i8_a_segment_that_is_not_what_the_daemon_says_is_foreign_all_the_same(
    namespace, daemon, segment
):
    daemon.on[AllocateBacking] = lambda r: segment.reply(r.request_id, inode=1)
    with pytest.raises(ForeignSegment, match="another object"):
        namespace.attach(8, cuda=CudaUse.OFF)
    assert namespace.pool is None


def test_an_attach_gives_up_on_daemons_that_do_not_stay(namespace, daemon, segment):
    inodes = iter(range(1, 100))
    daemon.on[AllocateBacking] = lambda r: segment.reply(r.request_id, inode=next(inodes))
    with pytest.raises(ServiceUnavailable, match="replaced 4 times"):
        namespace.attach(8, cuda=CudaUse.OFF)
    assert not maps(segment)


def test_i4_a_daemon_that_is_gone_when_the_attach_ends_is_compared_when_it_is_back(
    client, namespace, daemon, segment, other_segment
):
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        daemon.stop()
        wait_until(lambda: not client.session.is_alive)
        client.session._timeout_s = 0.05  # for the turn that is given back to nobody
        driver.go.set()
        pool = attach.result()
        assert namespace.pool is pool
    other_segment.serve(daemon)
    daemon.epoch = 22
    daemon.start()
    wait_until(lambda: client.epoch == 22)
    with pytest.raises(ForeignSegment):
        namespace.lookup(bytes(16))
    assert not pool.is_closed, "the mapping stays"


def test_a_rank_that_waits_for_its_turn_outlasts_a_daemon_that_is_away(
    client, namespace, daemon, monkeypatch
):
    monkeypatch.setattr(attachment_module, "_ANSWER_S", 0.02)
    granted = threading.Event()
    daemon.on[RegistrationTurn] = lambda r: TurnReply(
        r.request_id, daemon.epoch, r.release or granted.is_set(), 1
    )
    driver = HeldDriver()
    driver.go.set()
    with attaching(namespace, driver) as attach:
        wait_until(lambda: daemon.count(RegistrationTurn))
        daemon.stop()
        timeouts = count_unanswered(client.session, monkeypatch)
        wait_until(lambda: len(timeouts) >= 3, "unanswered turns")
        assert attach.goes_on
        granted.set()
        daemon.epoch = 22
        daemon.start()
        assert attach.result().cuda_registered


def count_unanswered(session, monkeypatch):
    original, unanswered = session.request, []

    def request(*arguments, **options):
        try:
            return original(*arguments, **options)
        except ServiceUnavailable:
            unanswered.append(threading.current_thread().name)
            raise

    monkeypatch.setattr(session, "request", request)
    return unanswered


def test_a_namespace_that_the_new_daemon_refuses_ends_the_attach_and_nothing_stays(
    client, namespace, daemon, segment
):
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        daemon.on[OpenNamespace] = lambda _: ConfigError("another geometry")
        restart(daemon, epoch=22)
        wait_until(lambda: client.epoch == 22 and client.session.is_alive)
        driver.go.set()
        with pytest.raises(ConfigError, match="another geometry"):
            attach.result()
    assert driver.registered == []
    assert not maps(segment)
    daemon.on[OpenNamespace] = lambda r: NamespaceReply(r.request_id, daemon.epoch, 1, 0)
    assert namespace.attach(8, cuda=CudaUse.OFF) is namespace.pool


# --- close during an attach -----------------------------------------------------------------------


def test_i6_a_client_closed_while_pages_are_registered_keeps_neither_them_nor_the_mapping(
    client, namespace, segment
):
    driver = HeldDriver()
    with attaching(namespace, driver) as attach:
        assert driver.inside.wait(DEADLINE_S)
        client.close()
        driver.go.set()
        with pytest.raises(ClosedError):
            attach.result()
    assert driver.registered == []
    assert not maps(segment)
    assert namespace.pool is None


def test_i6_a_client_closed_while_pages_are_touched_keeps_no_mapping(
    client, namespace, segment, monkeypatch
):
    """Nothing is sent after the mapping where there is no GPU: nothing else would notice."""
    inside, go = threading.Event(), threading.Event()
    touch = HostPool.touch_page_tables

    def held(pool):
        inside.set()
        assert go.wait(DEADLINE_S)
        touch(pool)

    monkeypatch.setattr(HostPool, "touch_page_tables", held)
    with attaching(namespace) as attach:
        try:
            assert inside.wait(DEADLINE_S)
            client.close()
        finally:
            go.set()
        with pytest.raises(ClosedError):
            attach.result()
    assert not maps(segment)
    assert namespace.pool is None


def test_close_does_not_wait_for_an_attach_that_waits_for_a_daemon(
    client, namespace, daemon, waiting
):
    daemon.stop()
    wait_until(lambda: not client.session.is_alive)
    with attaching(namespace) as attach:
        wait_until(lambda: ATTACHING in waiting, "the attach waits")
        beside(client.close)
        with pytest.raises(ClosedError):
            attach.result()
    daemon.start()
