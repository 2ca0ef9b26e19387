"""What a running daemon does for its clients, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq
from helpers import KEY_SPACE, DaemonProcess, RawClient, keys_of, wait_until

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m

Connect = Callable[..., RawClient]


def test_two_engines_that_compute_the_same_prefix_end_with_one_copy(connect: Connect) -> None:
    first, second = connect(), connect()
    namespace = first.open()
    second.open()
    one = first.publish(namespace, keys_of(1, 2))
    mine = second.ask(m.BlocksReply, m.Reserve, namespace, 0, 2)
    item = m.CompletedItem(mine.lease_id, 0, 0, mine.blocks, mine.generations, keys_of(1, 2))
    reply = second.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
    assert reply.canonical_blocks == one.blocks
    assert reply.canonical_generations == one.generations
    assert first.counts(namespace)["pinned"] == 2
    assert first.counts(namespace)["free"] == 61


def test_one_batch_publishes_and_reserves_and_a_reservation_that_fails_undoes_nothing(
    connect: Connect,
) -> None:
    client = connect()
    namespace = client.open()
    got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys_of(1))
    more = [m.ReserveItem(got.lease_id, 2), m.ReserveItem(got.lease_id, 1000)]
    reply = client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item], more)
    assert [len(each.blocks) for each in reply.reserved] == [8, 0]
    assert reply.canonical_blocks == got.blocks
    assert reply.num_free == 60
    assert client.counts(namespace)["reserved"] == 2


def test_leases_are_renewed_by_ping_and_lost_ones_are_named(connect: Connect) -> None:
    client = connect()
    namespace = client.open()
    lease = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    reply = client.ask(m.Pong, m.Ping, [lease.lease_id, 999], {"rows": 1.5})
    assert reply.lost_leases == [999]
    assert reply.lease_deadline_ns >= lease.lease_deadline_ns


def test_a_lookup_that_ends_in_a_miss_returns_the_prefix(connect: Connect) -> None:
    client, other = connect(), connect()
    namespace = client.open()
    got = client.publish(namespace, keys_of(1, 2, 3))
    found = other.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2, 9, 3))
    assert found.blocks == got.blocks[:8]
    assert found.generations == got.generations[:8]
    nothing = other.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(9))
    assert (nothing.lease_id, nothing.blocks) == (0, b"")


def test_a_lookup_of_many_slices_finds_all(make_daemon: Callable[..., DaemonProcess]) -> None:
    count = 2 * limits.LOOKUP_SLICE_KEYS + 17
    keys = keys_of(*range(1, count + 1))
    with make_daemon(pool_bytes="96MiB").wait_ready().client() as client:
        namespace = client.open(count + 1)
        got = client.publish(namespace, keys)
        found = client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys)
        assert found.blocks == got.blocks
        assert found.generations == got.generations


def test_events_tell_of_publication_and_eviction_and_the_epoch(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect()
    operator = connect(operator=True)
    namespace = client.open()
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.connect(f"ipc://{daemon.runtime_dir}/events.sock")
        events.subscribe(b"")
        topic, frame = events.recv_multipart()
        assert topic == m.TOPIC_EPOCH
        epoch = m.decode_event(frame)
        assert isinstance(epoch, m.EpochEvent)
        assert (epoch.epoch, epoch.instance) == (client.epoch, daemon.instance)
        got = client.publish(namespace, keys_of(1, 2))

        def next_event(wanted: bytes) -> m.Event:
            while True:
                topic, frame = events.recv_multipart()
                if topic == wanted:
                    return m.decode_event(frame)

        published = next_event(m.TOPIC_PUBLISHED)
        assert isinstance(published, m.PublishedEvent)
        assert (published.blocks, published.generations) == (got.blocks, got.generations)
        assert published.keys == keys_of(1, 2)
        client.ask(m.Done, m.ReleaseLeases, [got.lease_id])
        assert operator.ask(m.CountReply, m.Evict, namespace, 10).count == 2
        evicted = next_event(m.TOPIC_EVICTED)
        assert isinstance(evicted, m.EvictedEvent)
        assert set(_ids(evicted.blocks)) <= set(_ids(got.blocks))


def _ids(blocks: bytes) -> list[int]:
    return [int(block) for block in m.u32_array(blocks, what="blocks")]


def test_an_operator_sees_sessions_and_blocks(connect: Connect) -> None:
    client, operator = connect(group="tp", rank=3), connect(operator=True)
    namespace = client.open()
    client.ask(m.LeaseReply, m.TakeWriter, namespace)
    client.publish(namespace, keys_of(1, 2))
    client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
    client.ask(m.Pong, m.Ping, [], {"rows_missed": 4.0})
    rows = operator.ask(m.ListReply, m.Sessions).rows
    (worker,) = [row for row in rows if row["kind"] == "worker"]
    assert (worker["rank"], worker["pins"], worker["reserved_blocks"]) == (3, 2, 1)
    assert worker["counters"] == {"rows_missed": 4.0}
    listed = operator.ask(m.ListReply, m.ListBlocks, namespace, "published", 0)
    assert [row["state"] for row in listed.rows] == ["PUBLISHED"] * 2
    later = operator.ask(
        m.ListReply, m.ListBlocks, namespace, "published", listed.rows[-1]["block"] + 1
    )
    assert later.rows == []


# --- nobody can stop the daemon ---------------------------------------------------------------


def test_i7_ping_is_answered_while_garbage_floods_in(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect()
    stop = threading.Event()
    flooded = threading.Event()

    def flood() -> None:
        with RawClient(daemon.runtime_dir) as stranger:
            stranger.socket.setsockopt(zmq.SNDTIMEO, 100)
            while not stop.is_set():
                for frame in (b"\xc1" * 5_000, b"\x91" * 90_000, b"\x92" + b"\xcc\x01" * 5_000):
                    try:
                        stranger.socket.send(frame)
                    except zmq.Again:
                        flooded.set()
                flooded.set()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert flooded.wait(30)
        for _ in range(50):
            client.ask(m.Pong, m.Ping)
    finally:
        stop.set()
        thread.join()
    status = client.ask(m.StatusReply, m.Status).status
    assert status["malformed"] > 0
    assert status["unexpected_errors"] == 0


def test_i7_a_client_that_does_not_read_loses_replies_and_nobody_else_does(
    connect: Connect,
) -> None:
    client, deaf = connect(), connect()
    deaf.socket.setsockopt(zmq.SNDTIMEO, 200)
    namespace = client.open()
    deaf.open()
    keys = keys_of(*range(1, 51))
    client.publish(namespace, keys)

    def is_dropping() -> bool:
        try:
            for _ in range(200):
                deaf.send(m.Sessions)
        except zmq.Again:
            pass
        client.ask(m.Pong, m.Ping)
        return bool(client.ask(m.StatusReply, m.Status).status["replies_dropped"] > 0)

    wait_until(is_dropping)
    found = client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys)
    assert len(found.blocks) == 200


def test_i7_ping_is_answered_while_others_look_up_all_the_time(connect: Connect) -> None:
    client, greedy = connect(), connect()
    namespace = client.open()
    greedy.open()
    keys = bytes(16) * limits.MAX_KEYS
    for _ in range(4):
        greedy.send(m.Lookup, namespace, 0, KEY_SPACE, keys)
        client.ask(m.Pong, m.Ping)
    for _ in range(4):
        assert isinstance(greedy.receive(), m.BlocksReply)


def test_requests_beyond_the_limit_in_flight_are_refused(connect: Connect) -> None:
    client, greedy = connect(), connect()
    namespace = client.open()
    greedy.open()
    count = 40_000
    # The first is long; what follows it waits in the daemon. Together they stay below the replies
    # that the daemon keeps for a peer that does not read: above that it drops them, on purpose.
    sent = [greedy.send(m.Lookup, namespace, 0, KEY_SPACE, bytes(16) * count)]
    sent += [
        greedy.send(m.Unpin, namespace, 1, b"")
        for _ in range(limits.MAX_IN_FLIGHT_PER_SESSION + 32)
    ]
    replies = [greedy.receive() for _ in sent]
    assert {reply.request_id for reply in replies} == set(sent)
    client.ask(m.Pong, m.Ping)
