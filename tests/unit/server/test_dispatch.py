"""Dispatch without sockets: what is admitted when, fairness, and what becomes of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FINGERPRINT, GEOMETRY, KEY_SPACE, keys_of, wait_until

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.geometry import encode_geometry
from hisparse_service.contract.segment import RECORD_DTYPE
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import BackingMode
from hisparse_service.membership.credentials import Authoriser
from hisparse_service.membership.liveness import PidWatcher
from hisparse_service.membership.sessions import SessionTable
from hisparse_service.server import dispatch
from hisparse_service.server.clients import end_connection, end_process
from hisparse_service.server.dispatch import (
    ROUTES,
    BrokenInvariantError,
    Dispatcher,
    Route,
    SendResult,
)
from hisparse_service.server.events import EventPublisher
from hisparse_service.server.state import AwaitsHelper, Phase, ServerOptions, ServerState
from hisparse_service.server.transport import ConnectionChange
from hisparse_service.telemetry.metrics import ServerMetrics
from hisparse_service.telemetry.recorder import TraceRecorder

UID = 1000
EPOCH = 77


class FakeFrame:
    """What the dispatcher reads of a `zmq.Frame`. No process has pid 0, so none is watched."""

    def __init__(
        self, data: bytes, *, uid: int = UID, connection_fd: int = 5, pid: int = 0
    ) -> None:
        self.buffer = memoryview(data)
        self._properties: dict[Any, Any] = {
            "Peer-Address": f"localhost:{uid}:{uid}:{pid}", 2: connection_fd,
        }  # fmt: skip

    def get(self, key: Any) -> Any:
        return self._properties[key]

    def __len__(self) -> int:
        return len(self.buffer)


class World:
    """A dispatcher over a real directory; replies are kept by routing id."""

    def __init__(self, *, num_blocks: int = 64) -> None:
        self.replies: list[tuple[bytes, m.Reply]] = []
        self.send_result = SendResult.SENT
        self.drains: list[tuple[float, bool]] = []
        self.watcher = PidWatcher()
        events = EventPublisher(None, epoch=EPOCH, instance="t")  # type: ignore[arg-type]
        self.state = ServerState(
            options=ServerOptions(
                instance="t", daemon_version="1", epoch=EPOCH, events_endpoint="",
                heartbeat_interval_s=1.0, session_timeout_s=15.0, lease_ttl_s=30.0, started_s=0.0,
            ),
            sessions=SessionTable(), watcher=self.watcher, events=events, metrics=ServerMetrics(),
            begin_drain=lambda *arguments: self.drains.append(arguments[:2]),
            recorder=TraceRecorder(Path("/nowhere")),
        )  # fmt: skip
        self.monitored: list[tuple[ConnectionChange, int]] = []
        """What the monitor has to say and was not read yet."""
        self.dispatcher = Dispatcher(
            self.state, authoriser=Authoriser({UID}), send=self._send,
            read_monitor=self._read_monitor,
        )  # fmt: skip
        self.num_blocks = num_blocks

    def _read_monitor(self) -> None:
        for change, connection_fd in self.monitored:
            if change is ConnectionChange.OPENED:
                self.state.ended_connections.discard(connection_fd)
            else:
                self.state.ended_connections.add(connection_fd)
                end_connection(self.state, connection_fd)
        self.monitored.clear()

    def _send(self, routing_id: bytes, frame: bytes) -> SendResult:
        if self.send_result is SendResult.SENT:
            self.replies.append((routing_id, m.decode_reply(frame)))
        return self.send_result

    def become_ready(self) -> int:
        directory = Directory(
            epoch=EPOCH, hash_seed=3, event_sink=self.state.events.on_directory_event
        )
        self.state.loaded_directory = directory
        for client in self.state.clients.values():
            directory.open_session(client.session.session_id, group=client.hello.group)
        self.state.phase = Phase.READY
        reply = self.ask(b"setup", m.Hello, 1, 1, "setup", "", 0, 1, "", connection_fd=3)
        assert isinstance(reply, m.HelloReply)
        opened = self.ask(b"setup", m.OpenNamespace, FINGERPRINT, "n", encode_geometry(GEOMETRY))
        assert isinstance(opened, m.NamespaceReply)
        self.table = np.zeros(self.num_blocks, RECORD_DTYPE)
        directory.attach_backing(opened.namespace_id, self.table, mode=BackingMode.FRESH)
        self.state.events.set_table(opened.namespace_id, self.table)
        return opened.namespace_id

    def send(
        self, who: bytes, request_type: type[m.Request], *fields: Any,
        request_id: int = 1, **frame: Any,
    ) -> None:  # fmt: skip
        data = m.encode(request_type(request_id, *fields))
        self.dispatcher.on_frame(who, FakeFrame(data, **frame))  # type: ignore[arg-type]

    def ask(self, who: bytes, request_type: type[m.Request], *fields: Any, **more: Any) -> m.Reply:
        self.replies.clear()
        self.send(who, request_type, *fields, **more)
        self.run_waiting()
        (reply,) = [reply for to, reply in self.replies if to == who]
        return reply

    def hello(self, who: bytes, *, operator: bool = False, **frame: Any) -> m.Reply:
        return self.ask(who, m.Hello, 1, 1, who.decode(), "", 0, 1, "", operator, **frame)

    def run_waiting(self) -> None:
        while self.dispatcher.waiting:
            self.dispatcher.run_slice(0.0)

    def order(self) -> list[tuple[bytes, int]]:
        return [(to, reply.request_id) for to, reply in self.replies]


def code(reply: m.Reply) -> str:
    assert isinstance(reply, m.ErrorReply), reply
    return reply.code


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.watcher.close()


@pytest.fixture
def namespace(world: World) -> int:
    return world.become_ready()


LONG_KEYS = bytes(16) * (5 * limits.LOOKUP_SLICE_KEYS)


# --- admission --------------------------------------------------------------------------------


def test_every_request_type_has_a_route() -> None:
    assert set(ROUTES) | {m.Hello} == set(m.REQUEST_TYPES.values())


def test_while_the_pool_is_populated_ping_and_status_answer_and_blocks_do_not(
    world: World,
) -> None:
    world.state.progress = 0.25
    assert isinstance(world.hello(b"a"), m.HelloReply)
    assert isinstance(world.ask(b"a", m.Ping, [5]), m.Pong)
    status = world.ask(b"a", m.Status)
    assert isinstance(status, m.StatusReply)
    assert (status.status["phase"], status.status["progress"]) == ("starting", 0.25)
    refused = world.ask(b"a", m.OpenNamespace, FINGERPRINT, "n", encode_geometry(GEOMETRY))
    assert code(refused) == "NotReady"
    assert isinstance(refused, m.ErrorReply)
    assert refused.details["progress"] == 0.25
    assert isinstance(world.ask(b"a", m.Bye), m.Done)


def test_a_session_of_before_readiness_can_work_after_it(world: World) -> None:
    world.hello(b"a")
    namespace = world.become_ready()
    assert isinstance(world.ask(b"a", m.Reserve, namespace, 0, 1), m.BlocksReply)


def test_another_uid_is_not_authorised(world: World, namespace: int) -> None:
    assert code(world.hello(b"a", uid=UID + 1)) == "NotAuthorised"
    assert b"a" not in world.state.clients


def test_a_routing_id_that_passed_to_another_process_is_no_session(
    world: World, namespace: int
) -> None:
    world.hello(b"a")
    world.ask(b"a", m.Reserve, namespace, 0, 3)
    assert code(world.ask(b"a", m.Ping, uid=UID + 1)) == "UnknownSession"
    assert world.state.directory.counts(namespace).reserved == 0


@pytest.mark.parametrize(
    "request_type", [each for each, route in ROUTES.items() if route.needs.name == "WORKER"]
)
def test_operators_are_refused_what_workers_do(
    world: World, namespace: int, request_type: type[m.Request]
) -> None:
    assert isinstance(world.hello(b"o", operator=True), m.HelloReply)
    fields: dict[type[m.Request], tuple[Any, ...]] = {
        m.Lookup: (namespace, 0, KEY_SPACE, b""), m.Pin: (namespace, 0, b"", b""),
        m.Unpin: (namespace, 1, b""), m.MirrorBatch: (namespace, KEY_SPACE),
        m.Abandon: (namespace, 1, b""), m.Free: (namespace, 1, b""), m.ReleaseLeases: ([],),
        m.RegistrationTurn: (namespace, False), m.TakeWriter: (namespace,),
        m.YieldWriter: (namespace,), m.Reclaim: (namespace, 1, b"", b""),
        m.ReportDamage: (namespace, b"", b""),
        m.OfferEvents: (namespace, "", b""), m.FetchEvents: (namespace,),
    }  # fmt: skip
    reply = world.ask(b"o", request_type, *fields[request_type])
    assert code(reply) == "NotAuthorised"


def test_a_draining_daemon_finishes_what_is_held_and_grants_nothing_new(
    world: World, namespace: int
) -> None:
    world.hello(b"a")
    got = world.ask(b"a", m.Reserve, namespace, 0, 2)
    assert isinstance(got, m.BlocksReply)
    world.state.phase = Phase.DRAINING
    assert code(world.hello(b"late", connection_fd=9)) == "NotReady"
    assert isinstance(world.hello(b"boss", operator=True, connection_fd=10), m.HelloReply)
    assert code(world.ask(b"a", m.Reserve, namespace, 0, 1)) == "NotReady"
    item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys_of(1, 2))
    more = [m.ReserveItem(got.lease_id, 1)]
    done = world.ask(b"a", m.MirrorBatch, namespace, KEY_SPACE, [], [item], more)
    assert isinstance(done, m.MirrorReply)
    assert done.canonical_blocks == got.blocks
    assert done.reserved[0].blocks == b""
    assert isinstance(world.ask(b"a", m.ReleaseLeases, [got.lease_id]), m.Done)


def test_drain_is_handed_to_the_daemon(world: World, namespace: int) -> None:
    world.hello(b"o", operator=True)
    assert isinstance(world.ask(b"o", m.Drain, True, 7.0), m.Done)
    ((_, stop),) = world.drains
    assert stop is True


# --- fairness ---------------------------------------------------------------------------------


def test_i7_others_are_answered_between_the_slices_of_a_long_lookup(
    world: World, namespace: int
) -> None:
    world.hello(b"a", connection_fd=5)
    world.hello(b"b", connection_fd=6)
    publish(world, namespace, 60)
    world.replies.clear()
    world.send(b"a", m.Lookup, namespace, 0, KEY_SPACE, LONG_KEYS, request_id=10)
    assert world.replies == []
    world.send(b"b", m.Ping, request_id=20, connection_fd=6)
    world.run_waiting()
    assert world.order() == [(b"b", 20), (b"a", 10)]


def publish(world: World, namespace: int, count: int) -> None:
    got = world.ask(b"setup", m.Reserve, namespace, 0, count)
    assert isinstance(got, m.BlocksReply)
    item = m.CompletedItem(
        got.lease_id, 0, 0, got.blocks, got.generations, keys_of(*range(1, count + 1))
    )
    reply = world.ask(b"setup", m.MirrorBatch, namespace, KEY_SPACE, [], [item])
    assert isinstance(reply, m.MirrorReply)


class CountedWork:
    """A long request of so many slices that notes each."""

    def __init__(self, name: bytes, slices: int, log: list[bytes]) -> None:
        self.name, self.left, self.log, self.cancelled = name, slices, log, False

    def step(self) -> bool:
        self.log.append(self.name)
        self.left -= 1
        return self.left <= 0

    def finish(self, now_s: float) -> m.Reply:  # noqa: ARG002
        return m.Done(1, EPOCH)

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def works(world: World, namespace: int, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Any]:
    """Makes Evict a request of as many slices as it names blocks."""
    made: dict[bytes, Any] = {"log": []}

    def handler(state: Any, client: Any, request: m.Evict, now_s: float) -> CountedWork:
        who = client.session.routing_id
        made[who] = CountedWork(who, request.num_blocks, made["log"])
        return made[who]

    monkeypatch.setitem(dispatch.ROUTES, m.Evict, Route(handler, dispatch.Needs.POOL))
    return made


def test_long_requests_of_two_sessions_take_turns(
    world: World, namespace: int, works: dict[bytes, Any]
) -> None:
    world.hello(b"a", connection_fd=5)
    world.hello(b"b", connection_fd=6)
    world.send(b"a", m.Evict, namespace, 3)
    world.send(b"b", m.Evict, namespace, 2)
    world.run_waiting()
    assert works["log"] == [b"a", b"b", b"a", b"b", b"a"]


def test_requests_of_one_session_stay_in_order_behind_a_long_one(
    world: World, namespace: int, works: dict[bytes, Any]
) -> None:
    world.hello(b"a")
    world.replies.clear()
    world.send(b"a", m.Evict, namespace, 3, request_id=1)
    world.send(b"a", m.Reserve, namespace, 0, 1, request_id=2)
    world.send(b"a", m.Ping, request_id=3)
    world.send(b"a", m.Evict, namespace, 2, request_id=4)
    world.run_waiting()
    # CountedWork answers with id 1; ping overtakes, the reservation does not.
    assert [request_id for _, request_id in world.order()] == [3, 1, 2, 1]


class ParkedWork(AwaitsHelper):
    """A request that waits until the test answers in the helper's place."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = False

    def answer(self) -> None:
        self.is_ready = True
        self.resume()

    def finish(self, now_s: float) -> m.Reply:  # noqa: ARG002
        return m.Done(1, EPOCH)

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def parked(world: World, namespace: int, monkeypatch: pytest.MonkeyPatch) -> list[ParkedWork]:
    """Makes ReportDamage wait for the test."""
    made: list[ParkedWork] = []

    def handler(state: Any, client: Any, request: m.ReportDamage, now_s: float) -> ParkedWork:
        made.append(ParkedWork())
        return made[-1]

    monkeypatch.setitem(dispatch.ROUTES, m.ReportDamage, Route(handler, dispatch.Needs.WORKER))
    return made


def test_i7_what_waits_for_a_helper_keeps_the_loop_from_nothing(
    world: World, namespace: int, parked: list[ParkedWork]
) -> None:
    world.hello(b"a", connection_fd=5)
    world.hello(b"b", connection_fd=6)
    world.replies.clear()
    world.send(b"a", m.ReportDamage, namespace, b"", b"", request_id=1)
    world.send(b"a", m.Reserve, namespace, 0, 1, request_id=2)
    world.send(b"a", m.Ping, request_id=3)
    world.send(b"b", m.Reserve, namespace, 0, 1, request_id=4)
    assert not world.dispatcher.waiting, "the loop sleeps"
    assert world.order() == [(b"a", 3), (b"b", 4)]
    parked[0].answer()
    world.run_waiting()
    assert world.order()[2:] == [(b"a", 1), (b"a", 2)]


def test_a_request_behind_another_one_is_parked_when_its_turn_comes(
    world: World, namespace: int, parked: list[ParkedWork], works: dict[bytes, Any]
) -> None:
    world.hello(b"a")
    world.replies.clear()
    world.send(b"a", m.Evict, namespace, 3)
    world.send(b"a", m.ReportDamage, namespace, b"", b"")
    world.run_waiting()
    assert len(parked) == 1
    assert len(world.order()) == 1
    parked[0].answer()
    world.run_waiting()
    assert len(world.order()) == 2


def test_a_session_that_ends_while_a_helper_works_for_it_is_not_stepped(
    world: World, namespace: int, parked: list[ParkedWork]
) -> None:
    world.hello(b"a")
    world.send(b"a", m.ReportDamage, namespace, b"", b"")
    assert isinstance(world.ask(b"a", m.Bye), m.Done)
    assert parked[0].cancelled
    parked[0].answer()
    assert not world.dispatcher.waiting


def test_waiting_requests_are_bounded_in_number(
    world: World, namespace: int, works: dict[bytes, Any]
) -> None:
    world.hello(b"a")
    world.send(b"a", m.Evict, namespace, 1)
    for _ in range(limits.MAX_IN_FLIGHT_PER_SESSION - 1):
        world.send(b"a", m.Reserve, namespace, 0, 1)
    world.replies.clear()
    world.send(b"a", m.Reserve, namespace, 0, 1, request_id=99)
    ((_, reply),) = world.replies
    assert (code(reply), reply.request_id) == ("QuotaExceeded", 99)


def test_waiting_requests_are_bounded_in_bytes(
    world: World, namespace: int, works: dict[bytes, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_PENDING_BYTES_PER_SESSION", 100_000)
    world.hello(b"a")
    world.send(b"a", m.Evict, namespace, 1)
    world.send(b"a", m.Lookup, namespace, 0, KEY_SPACE, bytes(60_000))
    world.replies.clear()
    world.send(b"a", m.Lookup, namespace, 0, KEY_SPACE, bytes(60_000))
    assert code(world.replies[0][1]) == "QuotaExceeded"
    world.run_waiting()


def test_the_end_of_a_session_cancels_its_long_request(
    world: World, namespace: int, works: dict[bytes, Any]
) -> None:
    world.hello(b"a", connection_fd=5)
    world.send(b"a", m.Evict, namespace, 50)
    world.dispatcher.run_slice(0.0)
    end_connection(world.state, 5)
    world.run_waiting()
    assert works[b"a"].cancelled
    assert works["log"] == [b"a"]
    assert b"a" not in world.state.clients


# --- errors and replies -----------------------------------------------------------------------


def replace_ping(monkeypatch: pytest.MonkeyPatch, raises: Callable[[], Exception]) -> None:
    def handler(*_: Any) -> m.Reply:
        raise raises()

    monkeypatch.setitem(dispatch.ROUTES, m.Ping, Route(handler, dispatch.Needs.SESSION))


def test_a_bug_in_a_handler_is_answered_counted_and_survived(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.hello(b"a")
    replace_ping(monkeypatch, lambda: KeyError("secret"))
    reply = world.ask(b"a", m.Ping)
    assert code(reply) == "InternalError"
    assert isinstance(reply, m.ErrorReply)
    assert "secret" not in reply.message
    assert world.state.metrics.unexpected_errors == 1
    assert isinstance(world.ask(b"a", m.Status), m.StatusReply)


def test_a_broken_invariant_stops_the_daemon(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.hello(b"a")
    replace_ping(monkeypatch, lambda: AssertionError("free + reserved"))
    with pytest.raises(BrokenInvariantError, match=r"free \+ reserved"):
        world.send(b"a", m.Ping)


def test_i7_a_reply_that_is_not_read_is_dropped_and_counted(world: World) -> None:
    world.hello(b"a")
    world.send_result = SendResult.NOT_READ
    world.send(b"a", m.Ping)
    assert world.state.metrics.replies_dropped == 1
    assert b"a" in world.state.clients


def test_i9_a_reply_to_nobody_ends_the_session(world: World, namespace: int) -> None:
    world.hello(b"a")
    world.ask(b"a", m.Reserve, namespace, 0, 4)
    world.send_result = SendResult.GONE
    world.send(b"a", m.Ping)
    assert b"a" not in world.state.clients
    assert world.state.directory.counts(namespace).reserved == 0
    assert world.state.metrics.deaths == {"disconnected": 1}


def test_i9_a_hello_on_a_reused_connection_number_ends_the_older_session(
    world: World, namespace: int
) -> None:
    world.hello(b"a", connection_fd=8)
    assert isinstance(world.hello(b"b", connection_fd=8), m.HelloReply)
    assert b"a" not in world.state.clients
    assert b"b" in world.state.clients


def test_i9_a_new_connection_is_not_taken_for_the_ended_one_whose_number_it_has(
    world: World, namespace: int
) -> None:
    """The monitor is read when the loop comes to it: its news may be older than a Hello."""
    world.hello(b"a", connection_fd=8)
    world.monitored = [(ConnectionChange.ENDED, 8), (ConnectionChange.OPENED, 8)]
    assert isinstance(world.hello(b"b", connection_fd=8), m.HelloReply)
    assert b"a" not in world.state.clients
    world._read_monitor()
    assert b"b" in world.state.clients
    world.monitored = [
        (ConnectionChange.ENDED, 8), (ConnectionChange.OPENED, 8), (ConnectionChange.ENDED, 8)
    ]  # fmt: skip
    assert code(world.hello(b"c", connection_fd=8)) == "UnknownSession"


def test_i1_blocks_of_a_process_that_only_lost_its_connection_are_given_to_nobody(
    world: World, namespace: int
) -> None:
    """Its copies go on; a block that is another's meanwhile would get two writers."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        world.hello(b"a", connection_fd=8, pid=process.pid)
        got = world.ask(b"a", m.Reserve, namespace, 0, 4, connection_fd=8, pid=process.pid)
        assert isinstance(got, m.BlocksReply)
        session_id = world.state.clients[b"a"].session.session_id
        end_connection(world.state, 8)
        assert world.state.directory.counts(namespace).reserved == 4
        end_connection(world.state, 8)  # the number's next connection ends too
        assert world.state.directory.counts(namespace).reserved == 4

        world.hello(b"b", connection_fd=9, pid=process.pid)
        back = world.ask(
            b"b", m.Reclaim, namespace, 0, got.blocks[:8], got.generations[:8],
            connection_fd=9, pid=process.pid,
        )  # fmt: skip
        assert isinstance(back, m.BlocksReply)
        assert back.blocks == got.blocks[:8]
        process.kill()
    assert sorted(wait_until(world.watcher.poll)) == [session_id, session_id + 1]
    for ended in (session_id, session_id + 1):
        end_process(world.state, ended)
    assert world.state.directory.counts(namespace).reserved == 0


def test_a_namespace_without_backing_goes_with_its_last_opener(
    world: World, namespace: int
) -> None:
    world.hello(b"a", connection_fd=5)
    world.hello(b"b", connection_fd=6)
    other = b"other-fingerprin"
    for who in (b"a", b"b"):
        world.ask(who, m.OpenNamespace, other, "n", encode_geometry(GEOMETRY))
    before = len(world.state.namespaces)
    end_connection(world.state, 5)
    assert len(world.state.namespaces) == before
    end_connection(world.state, 6)
    assert len(world.state.namespaces) == before - 1
    assert other not in world.state.by_fingerprint


def test_every_request_is_counted_by_type_and_every_error_by_code(
    world: World, namespace: int
) -> None:
    world.hello(b"a")
    world.ask(b"a", m.Ping)
    world.ask(b"a", m.Reserve, namespace, 0, 1000)
    assert world.state.metrics.latency_of("Ping").count == 1
    assert world.state.metrics.latency_of("Reserve").count == 1
    assert world.state.metrics.errors == {"CapacityError": 1}


def test_i6_the_events_that_a_session_offered_go_with_it(world: World, namespace: int) -> None:
    """Nobody may have to ask for them before their memory is free."""
    offers = world.state.namespaces[namespace].event_offers
    for end in (m.Bye, m.YieldWriter):
        world.ask(b"w", m.Hello, 1, 1, "w", "tp", 0, 1, "", False)
        world.ask(b"w", m.TakeWriter, namespace)
        assert isinstance(world.ask(b"w", m.OfferEvents, namespace, "", bytes(64)), m.Done)
        assert set(offers) == {"tp"}
        fields = (namespace,) if end is m.YieldWriter else ()
        assert isinstance(world.ask(b"w", end, *fields), m.Done)
        assert not offers
