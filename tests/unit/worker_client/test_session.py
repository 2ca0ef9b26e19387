"""Sessions against a scripted ROUTER: deadlines, late replies, new sessions, forks, closing."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
from fake_daemon import FakeDaemon, short_directory, wait_until

import worker_client
from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    InternalError,
    MessageTooLarge,
    NotReady,
    ProtocolMismatch,
    ServiceUnavailable,
    UsageError,
)
from hisparse_service.contract.limits import MAX_TEXT_BYTES, MAX_WORLD_SIZE
from hisparse_service.contract.messages import (
    Done,
    Hello,
    HelloReply,
    Lookup,
    Ping,
    Pong,
    Status,
    StatusReply,
)
from worker_client import session as session_module
from worker_client.session import Identity, Session, SessionState, WhenAway


@pytest.fixture
def directory():
    with short_directory() as made:
        yield made


@pytest.fixture
def daemon(directory):
    fake = FakeDaemon(directory)
    yield fake
    fake.stop()


@pytest.fixture
def session(daemon):
    made = Session(daemon.endpoint, Identity(client_name="t"))
    made.open(timeout_s=10)
    yield made
    made.close()


class Owner:
    """Counts what a session asks of its owner."""

    def __init__(self):
        self.reattached = 0
        self.handed_in = 0
        self.late = []
        self.due = []
        self.lost = []

    def reattach(self):
        self.reattached += 1

    def hand_in(self):
        self.handed_in += 1

    def leases_to_renew(self, _now_ns):
        return self.due

    def renewed(self, _lease_ids, pong):
        self.lost += pong.lost_leases

    def late_reply(self, reply):
        self.late.append(reply)

    def housekeeping(self):
        pass


def no_answer(_request):
    return None


def ping(session, **options):
    return session.request(Ping, Pong, **options)


def test_a_request_is_answered_and_carries_the_epoch(session, daemon):
    assert ping(session).epoch == daemon.epoch == session.epoch
    assert session.state is SessionState.ALIVE


def test_no_daemon_at_all_is_service_unavailable_at_the_deadline(directory):
    with pytest.raises(ServiceUnavailable, match="no daemon listens"):
        worker_client.connect(directory, client_name="t", timeout_s=0.2)


def test_a_silent_daemon_is_service_unavailable_at_the_deadline(session, daemon):
    daemon.on[Status] = no_answer
    before = time.monotonic()
    with pytest.raises(ServiceUnavailable, match="deadline"):
        session.request(Status, StatusReply, timeout_s=0.15)
    assert time.monotonic() - before >= 0.15
    assert session.counters["request_timeouts"] == 1


def test_a_late_reply_is_dropped_and_told_to_the_owner(session, daemon):
    """Otherwise it would be taken for the answer to the next request."""
    owner = session.owner = Owner()
    kept = []
    daemon.on[Status] = kept.append
    with pytest.raises(ServiceUnavailable):
        session.request(Status, StatusReply, timeout_s=0.1)
    late = StatusReply(kept[0].request_id, daemon.epoch, {"late": True})
    daemon.send_to_all(late)
    wait_until(lambda: owner.late)
    daemon.on[Status] = lambda r: StatusReply(r.request_id, daemon.epoch, {"late": False})
    assert session.request(Status, StatusReply).status == {"late": False}
    assert owner.late == [late]
    assert owner.handed_in >= 1
    assert owner.reattached == 0


def test_i4_nobody_holds_the_lock_while_a_daemon_that_hangs_is_probed(session, daemon):
    """A decode step takes it for each mirror; it stood still for a second each time."""
    daemon.on[Ping] = daemon.on[Status] = no_answer
    with pytest.raises(ServiceUnavailable):
        session.request(Status, StatusReply, timeout_s=0.1)
    waits = []
    original = session._receive

    def receive(*arguments, **options):
        waits.append(threading.current_thread().name)
        return original(*arguments, **options)

    session._receive = receive
    before = daemon.count(Ping)
    wait_until(lambda: daemon.count(Ping) >= before + 2)
    assert not waits
    assert not session.is_alive
    del daemon.on[Ping]
    wait_until(lambda: session.is_alive)


def test_a_deadline_that_passed_is_its_callers_alone(session, daemon):
    """One impatient caller made a healthy daemon away for all of the client."""
    daemon.on[Status] = no_answer
    with session.lock:  # so that nobody revives the session meanwhile
        with pytest.raises(ServiceUnavailable, match="deadline"):
            session.request(Status, StatusReply, timeout_s=0.01)
        assert session.state is SessionState.ALIVE
        ping(session, when_away=WhenAway.FAIL)


def test_only_silence_of_a_whole_time_out_is_away(session, daemon, monkeypatch):
    monkeypatch.setattr(session_module, "_HEARTBEAT_TIMEOUT_S", 3600.0)
    daemon.on[Ping] = daemon.on[Status] = no_answer
    for _ in range(10):
        with pytest.raises(ServiceUnavailable, match="deadline"):
            session.request(Status, StatusReply, timeout_s=0.01, when_away=WhenAway.FAIL)
    wait_until(lambda: daemon.count(Ping), "a probe")
    assert session.state is SessionState.ALIVE
    monkeypatch.setattr(session_module, "_HEARTBEAT_TIMEOUT_S", 0.2)
    wait_until(lambda: session.state is SessionState.AWAY)
    del daemon.on[Ping]
    wait_until(lambda: session.is_alive)


def test_a_step_does_not_wait_for_a_daemon_that_was_in_doubt_before(session, daemon, monkeypatch):
    """It holds the lock, so that nobody else could say that the daemon is away."""
    monkeypatch.setattr(session_module, "_HEARTBEAT_TIMEOUT_S", 0.3)
    daemon.on[Ping] = daemon.on[Status] = no_answer
    caught = []

    def ask():
        with session.lock:
            for timeout_s in (0.01, 3600.0):
                try:
                    session.request(
                        Status, StatusReply, timeout_s=timeout_s, when_away=WhenAway.FAIL
                    )
                except ServiceUnavailable as error:
                    caught.append(error.message)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(20)
    assert len(caught) == 2
    assert "is away" in caught[1]
    assert session.state is SessionState.AWAY


def test_any_reply_ends_the_silence(session, daemon, monkeypatch):
    """The one that came late, too: whoever asks with short deadlines sees no others."""
    monkeypatch.setattr(session_module, "_HEARTBEAT_TIMEOUT_S", 3600.0)
    session.owner = Owner()
    daemon.on[Ping] = no_answer
    kept = []
    daemon.on[Status] = kept.append
    with session.lock:
        with pytest.raises(ServiceUnavailable):
            session.request(Status, StatusReply, timeout_s=0.01)
        daemon.send_to_all(StatusReply(kept[0].request_id, daemon.epoch, {}))
        wait_until(lambda: session._socket.poll(0))
        monkeypatch.setattr(session_module, "_HEARTBEAT_TIMEOUT_S", 0.0)  # all is too long ago
        monkeypatch.setattr(session_module, "_WAIT_SLICE_S", -3600.0)  # and nothing recent is
        with pytest.raises(ServiceUnavailable):
            session.request(Status, StatusReply, timeout_s=0.0)
        assert session.state is SessionState.ALIVE
        assert len(session.owner.late) == 1


def test_who_asks_without_time_to_wait_lets_the_background_thread_in(session, daemon, monkeypatch):
    """An engine that spun on it, with the lock around, kept the session from being revived."""
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    original, ticks = session._tick, []

    def tick():
        ticks.append(threading.current_thread().name)
        original()

    monkeypatch.setattr(session, "_tick", tick)

    def spin():
        with pytest.raises(ServiceUnavailable):
            ping(session, timeout_s=0.0)
        return ticks

    with session.lock:
        before = len(ticks)
        wait_until(lambda: len(spin()) > before, "the background thread had the lock")
    daemon.start()
    wait_until(lambda: session.is_alive)


def test_an_attempt_that_cannot_succeed_in_time_says_no_hello(session, daemon):
    """Its answer would come too late, and the next Hello's after it."""
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    with session.lock:
        hellos = daemon.count(Hello)
        daemon.start()
        wait_until(lambda: session._read_monitor() or session._connected)
        wait_until(lambda: session._thread_waits)
        session._thread_waits = False  # it is not let in: nobody else says Hello either
        for _ in range(5):
            with pytest.raises(ServiceUnavailable):
                ping(session, timeout_s=0.0)
        assert daemon.count(Hello) == hellos
    wait_until(lambda: session.is_alive)


class HalfAttached(Owner):
    """Whose first attempts to attach again fail."""

    def reattach(self):
        super().reattach()
        if self.reattached < 4:
            raise ServiceUnavailable("not yet")


def test_going_and_coming_back_of_a_daemon_are_one_line_each(session, daemon, caplog):
    caplog.set_level(logging.INFO, "worker_client")
    owner = session.owner = HalfAttached()
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    with pytest.raises(ServiceUnavailable):
        ping(session, timeout_s=0.3)
    daemon.epoch = 12
    daemon.start()
    wait_until(lambda: session.is_alive and owner.reattached == 4 and owner.handed_in)
    with session.lock:
        lines = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert "is away" in lines[0][1]
    assert "the connection broke" in lines[0][1]
    assert "is back" in lines[1][1]
    assert lines[1][1].endswith("epoch 000000000000000c"), "as the daemon writes it"
    assert all(session.endpoint in text for _, text in lines)


def test_a_caller_that_lost_its_patience_is_no_line_of_the_log(session, daemon, caplog):
    caplog.set_level(logging.INFO, "worker_client")
    daemon.on[Status] = no_answer
    with pytest.raises(ServiceUnavailable):
        session.request(Status, StatusReply, timeout_s=0.01)
    wait_until(lambda: not session._in_doubt)
    session.close()
    assert not caplog.records


def test_a_typed_error_comes_out_as_it_is(session, daemon):
    daemon.on[Status] = lambda _: CapacityError("full", remedy="wait", needed=3, free=1)
    with pytest.raises(CapacityError, match="full") as caught:
        session.request(Status, StatusReply)
    assert caught.value.details == {"needed": 3, "free": 1}
    assert caught.value.remedy == "wait"


def test_a_reply_of_the_wrong_type_is_an_internal_error(session, daemon):
    daemon.on[Status] = lambda request: Done(request.request_id, daemon.epoch)
    with pytest.raises(InternalError, match="Done"):
        session.request(Status, StatusReply)


def test_an_unknown_session_says_hello_again_and_the_request_succeeds(session, daemon):
    owner = session.owner = Owner()
    daemon.forget_sessions.set()
    assert ping(session).epoch == daemon.epoch
    assert daemon.count(Hello) == 2
    assert owner.reattached == 1
    assert session.counters["reconnects"] == 1


def test_another_epoch_in_a_reply_makes_a_new_session(session, daemon):
    """A restart between two pings must not go unnoticed."""
    owner = session.owner = Owner()
    daemon.epoch = 12
    assert ping(session).epoch == 12
    assert session.epoch == 12
    assert owner.reattached == 1


def test_a_daemon_killed_mid_request_is_answered_by_its_successor(session, daemon, directory):
    owner = session.owner = Owner()
    daemon.on[Status] = no_answer
    answers = []
    asker = threading.Thread(
        target=lambda: answers.append(session.request(Status, StatusReply, timeout_s=15))
    )
    asker.start()
    wait_until(lambda: daemon.count(Status))
    daemon.stop()
    successor = FakeDaemon(directory, epoch=99)
    successor.on[Status] = lambda r: StatusReply(r.request_id, successor.epoch, {"from": "second"})
    try:
        asker.join(20)
        assert [reply.status for reply in answers] == [{"from": "second"}]
        assert (session.epoch, owner.reattached) == (99, 1)
    finally:
        session.close()
        successor.stop()
        daemon.start()  # for the fixture to stop


def test_a_request_that_may_not_wait_fails_as_soon_as_the_connection_breaks(
    session, daemon, directory
):
    """A decode step must not stand still for the whole deadline when the daemon is killed."""
    daemon.on[Status] = no_answer
    caught = []

    def ask():
        try:
            session.request(Status, StatusReply, timeout_s=3600, when_away=WhenAway.FAIL)
        except ServiceUnavailable as error:
            caught.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    wait_until(lambda: daemon.count(Status))
    daemon.stop()
    asker.join(20)
    assert not asker.is_alive()
    assert len(caught) == 1
    daemon.start()


def test_the_lock_is_free_while_a_request_waits_for_a_daemon_that_is_away(
    session, daemon, monkeypatch
):
    """Whoever holds it around its request, for as long as it has patience, stops all others."""
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    original, waiting, answers = session._read_monitor, set(), []

    def read_monitor():
        waiting.add(threading.current_thread().name)
        original()

    monkeypatch.setattr(session, "_read_monitor", read_monitor)

    def ask():
        with session.lock:
            answers.append(ping(session, timeout_s=3600))

    asker = threading.Thread(target=ask, name="asker")
    asker.start()
    wait_until(lambda: "asker" in waiting)
    assert session.lock.acquire(timeout=20)
    session.lock.release()
    with pytest.raises(ServiceUnavailable, match="away"):
        ping(session, when_away=WhenAway.FAIL)
    assert not answers
    daemon.epoch = 12
    daemon.start()
    asker.join(20)
    assert [answer.epoch for answer in answers] == [12]


def test_a_successor_that_refuses_tells_whoever_waits(session, daemon):
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    daemon.on[Hello] = lambda _: ProtocolMismatch("1 to 1 and 7 to 9 do not meet")
    daemon.start()
    with pytest.raises(ProtocolMismatch):
        ping(session, timeout_s=20)


def test_a_successor_that_is_not_ready_is_waited_for_until_the_deadline(session, daemon):
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    daemon.on[Hello] = lambda _: NotReady("populating", progress=0.5)
    daemon.start()
    wait_until(lambda: session._connected)
    with pytest.raises(NotReady, match="populating"):
        ping(session, timeout_s=0.2)
    del daemon.on[Hello]
    ping(session, timeout_s=20)


def test_the_background_thread_finds_a_restarted_daemon_by_itself(session, daemon, directory):
    owner = session.owner = Owner()
    daemon.stop()
    wait_until(lambda: not session.is_alive)
    daemon.epoch = 77
    daemon.start()
    wait_until(lambda: session.is_alive and session.epoch == 77)
    assert owner.reattached == 1


def test_heartbeats_flow_from_registration_on(session, daemon):
    """A worker that is idle before its first use must not be reaped."""
    wait_until(lambda: daemon.count(Ping) >= 2)


@pytest.mark.parametrize(("session_timeout_s", "quiet_s"), [(150.0, 30.0), (75.0, 15.0)])
def test_a_quiet_client_beats_less_often_and_leaves_room_for_five_in_the_time_out(
    daemon, monkeypatch, session_timeout_s, quiet_s
):
    """Sixteen idle workers woke the daemon sixteen times a second for nothing."""
    monkeypatch.setattr(session_module, "_COUNTERS_EVERY_S", 3600.0)
    daemon.on[Hello] = lambda r: HelloReply(
        r.request_id, daemon.epoch, 1, 1, 10.0, session_timeout_s, "fake", "0", "ipc://none"
    )
    session = Session(daemon.endpoint, Identity(client_name="t"))
    session.open(timeout_s=10)

    def beats_after(silent_s: float) -> bool:
        """Whether the thread, which sleeps for 10 s, would beat after so much silence."""
        before = daemon.count(Ping)
        session._last_reply_s -= silent_s
        session._heartbeat_reply_s -= silent_s
        session._tick()
        return daemon.count(Ping) > before

    with session.lock:
        assert beats_after(9.5)  # Hello was no heartbeat
        assert not beats_after(quiet_s - 2)
        assert beats_after(1.5)
        ping(session)
        assert not beats_after(8.5)
        assert beats_after(1.0)
        assert not beats_after(9.5)
    session.close()


def test_leases_are_renewed_though_traffic_is_recent(session, daemon, monkeypatch):
    monkeypatch.setattr(session_module, "_COUNTERS_EVERY_S", 3600.0)
    wait_until(lambda: session._counters_sent_s)  # from here on only leases make it send
    owner = session.owner = Owner()
    owner.due = [5, 6]
    daemon.on[Ping] = lambda r: Pong(r.request_id, daemon.epoch, 1, [6] if r.renew_leases else [])
    wait_until(lambda: ping(session) and owner.lost)
    assert 6 in owner.lost


def test_hello_waits_while_the_pool_is_not_ready(directory, daemon):
    answers = [NotReady("populating", progress=0.5)]

    def hello(request):
        return answers.pop() if answers else daemon._default(request)

    daemon.on[Hello] = hello
    session = Session(daemon.endpoint, Identity(client_name="t"))
    session.open(timeout_s=10)
    assert daemon.count(Hello) == 2
    session.close()


def test_a_refused_hello_is_raised_and_leaves_nothing_open(daemon):
    daemon.on[Hello] = lambda _: ProtocolMismatch("1 to 1 and 7 to 9 do not meet")
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolMismatch):
        Session(daemon.endpoint, Identity(client_name="t")).open(timeout_s=5)
    assert threading.active_count() == threads
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 1)


def test_hello_tells_who_the_worker_is(daemon):
    with worker_client.connect(
        daemon.directory, client_name="engine 1", group="tp", rank=3, world_size=4, device_uuid="u"
    ):
        hello = daemon.last(Hello)
    assert (hello.client_name, hello.group, hello.rank, hello.world_size, hello.device_uuid) == (
        "engine 1", "tp", 3, 4, "u",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("who", "limit", "value"),
    [
        ({"rank": 5, "world_size": 1}, 0, 5),
        ({"rank": -1, "world_size": 2}, 1, -1),
        ({"world_size": 0}, MAX_WORLD_SIZE, 0),
        ({"client_name": "x" * 5000}, MAX_TEXT_BYTES, 5000),
        ({"group": "x" * 5000}, MAX_TEXT_BYTES, 5000),
        ({"device_uuid": "x" * 5000}, MAX_TEXT_BYTES, 5000),
    ],
)
def test_a_worker_that_cannot_be_is_a_usage_error(daemon, who, limit, value):
    """The daemon's word for it was "reconnect or upgrade"; of the rank it said nothing."""
    with pytest.raises(UsageError) as caught:
        worker_client.connect(daemon.directory, timeout_s=1, **who)
    assert caught.value.details == {"limit": limit, "value": value}
    assert caught.value.remedy
    assert daemon.count(Hello) == 0


def test_close_is_idempotent_and_later_use_raises(session, daemon):
    session.close()
    session.close()
    with pytest.raises(ClosedError):
        ping(session)
    assert session.state is SessionState.CLOSED


def test_close_leaves_no_thread_and_no_descriptor(daemon):
    session = Session(daemon.endpoint, Identity(client_name="warm"))
    session.open(timeout_s=10)
    session.close()
    wait_until(lambda: not any(t.name == "hisparse-heartbeat" for t in threading.enumerate()))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        session = Session(daemon.endpoint, Identity(client_name="t"))
        session.open(timeout_s=10)
        ping(session)
        session.close()
    # The router's side of a connection closes a moment later, in its own thread.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_close_does_not_wait_for_a_request_that_waits_for_a_silent_daemon(session, daemon):
    daemon.on[Status] = no_answer
    caught = []

    def ask():
        try:
            session.request(Status, StatusReply, timeout_s=3600)
        except ClosedError as error:
            caught.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    wait_until(lambda: daemon.count(Status))
    session.close()
    asker.join(20)
    assert len(caught) == 1


def test_a_forked_child_may_not_use_the_session_and_does_not_disturb_it(session):
    """It would share the parent's socket: replies would go to whoever reads first."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(30)  # a child that waits for an answer ends as a failure
        try:
            try:
                ping(session)
            except ClosedError:
                session.close()
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ping(session)


def test_two_threads_share_a_session(session):
    failures = []

    def work():
        try:
            for _ in range(200):
                ping(session)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_a_request_too_long_is_refused_before_it_is_sent(session, daemon):
    with pytest.raises(MessageTooLarge):
        session.request(
            lambda request_id: Lookup(request_id, 1, 0, bytes(8), bytes(5 * 2**20)), StatusReply
        )
    assert daemon.count(Lookup) == 0
    ping(session)


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [("tcp://127.0.0.1:1", "tcp"), ("ipc://" + "/x" * 60, "107"), ("embedded://?pool=1", "pool")],
)
def test_an_endpoint_that_cannot_work_is_a_config_error(endpoint, words):
    with pytest.raises(ConfigError, match=words):
        worker_client.connect(endpoint, client_name="t", timeout_s=1)
