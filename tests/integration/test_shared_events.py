"""Event handles of a writer through the daemon: who may offer, who may fetch, and when they go."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from helpers import RawClient, wait_until

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import LeaseLost, MalformedMessage, UsageError

HANDLES = bytes(range(64)) + bytes(64)
OTHER_HANDLES = bytes([7]) * 64

OFFER_AND_WAIT = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from helpers import RawClient
from hisparse_service.contract import messages as m
client = RawClient(Path(sys.argv[1]))
client.hello(group="tp", rank=0)
namespace = client.open()
client.ask(m.LeaseReply, m.TakeWriter, namespace)
client.ask(m.Done, m.OfferEvents, namespace, "GPU-0", bytes([7]) * 64)
print("offered", flush=True)
sys.stdin.read()
"""


def fetch(client: RawClient, namespace: int) -> m.EventsReply:
    return client.ask(m.EventsReply, m.FetchEvents, namespace)


def has_offer(client: RawClient, namespace: int) -> bool:
    return bool(fetch(client, namespace).handles)


def test_peers_of_the_group_get_the_writers_handles_and_nobody_else(connect) -> None:
    writer, peer, stranger = (
        connect(group="tp", rank=0), connect(group="tp", rank=1), connect(group="other"),
    )  # fmt: skip
    namespace = writer.open()
    for client in (peer, stranger):
        assert client.open() == namespace
    assert fetch(peer, namespace) == m.EventsReply(peer.last_id, peer.epoch, 0, "", b"", 0)
    writer.ask(m.LeaseReply, m.TakeWriter, namespace)
    writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", HANDLES)
    found = fetch(peer, namespace)
    assert (found.writer_session, found.device_uuid) == (writer.session_id, "GPU-0")
    assert m.event_handles(found.handles) == [HANDLES[:64], HANDLES[64:]]
    assert fetch(writer, namespace).handles == HANDLES
    assert not has_offer(stranger, namespace)


def test_i1_only_the_writer_of_a_group_offers_events(connect) -> None:
    """Events of another rank would tell of copies that are not the published ones."""
    writer, peer, alone = connect(group="tp"), connect(group="tp", rank=1), connect()
    namespace = writer.open()
    writer.ask(m.LeaseReply, m.TakeWriter, namespace)
    for client in (peer, alone):
        client.open()
    with pytest.raises(LeaseLost, match="writer lease") as caught:
        peer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", HANDLES)
    assert caught.value.details["holder_session"] == writer.session_id
    for request in ((m.OfferEvents, namespace, "", HANDLES), (m.FetchEvents, namespace)):
        with pytest.raises(UsageError, match="without a group"):
            alone.ask(m.Done, *request)
    assert not has_offer(peer, namespace)


def test_a_later_offer_replaces_the_earlier_one_and_an_empty_one_withdraws_it(connect) -> None:
    writer, peer = connect(group="tp"), connect(group="tp", rank=1)
    namespace = writer.open()
    peer.open()
    writer.ask(m.LeaseReply, m.TakeWriter, namespace)
    writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", HANDLES)
    first = fetch(peer, namespace)
    writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", OTHER_HANDLES)
    second = fetch(peer, namespace)
    assert second.handles == OTHER_HANDLES
    assert second.number != first.number
    writer.ask(m.Done, m.OfferEvents, namespace, "", b"")
    assert not has_offer(peer, namespace)


def test_an_offer_that_is_too_long_or_in_pieces_is_refused_and_changes_nothing(connect) -> None:
    writer = connect(group="tp")
    namespace = writer.open()
    writer.ask(m.LeaseReply, m.TakeWriter, namespace)
    writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", HANDLES)
    for handles in (bytes(63), bytes(64 * (limits.MAX_SHARED_EVENTS + 1))):
        with pytest.raises(MalformedMessage, match="handles"):
            writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", handles)
    assert fetch(writer, namespace).handles == HANDLES


def test_an_offer_goes_with_the_writer_lease(connect) -> None:
    writer, peer = connect(group="tp"), connect(group="tp", rank=1)
    namespace = writer.open()
    peer.open()
    writer.ask(m.LeaseReply, m.TakeWriter, namespace)
    writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", HANDLES)
    writer.ask(m.Done, m.YieldWriter, namespace)
    assert not has_offer(peer, namespace)
    peer.ask(m.LeaseReply, m.TakeWriter, namespace)
    peer.ask(m.Done, m.OfferEvents, namespace, "GPU-1", OTHER_HANDLES)
    assert fetch(writer, namespace).writer_session == peer.session_id


def test_i6_i9_the_offer_of_a_killed_writer_is_gone(daemon, connect) -> None:
    peer = connect(group="tp", rank=1)
    namespace = peer.open()
    process = subprocess.Popen(
        [sys.executable, "-c", OFFER_AND_WAIT, str(daemon.runtime_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"offered\n"
        assert has_offer(peer, namespace)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        wait_until(lambda: not has_offer(peer, namespace), what="the offer to be withdrawn")
    finally:
        process.kill()
        process.wait(30)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def test_a_writer_lease_that_ran_out_ends_the_offer(make_daemon) -> None:
    """The session lives on its requests, but renews no lease: it sends no heartbeat."""
    daemon = make_daemon(
        limits__heartbeat_interval_s="0.2", limits__session_timeout_s="1",
        limits__lease_ttl_s="1.2", limits__writer_lease_ttl_s="1.2",
    ).wait_ready()  # fmt: skip
    with RawClient(daemon.runtime_dir) as writer:
        writer.hello(group="tp")
        namespace = writer.open()
        writer.ask(m.LeaseReply, m.TakeWriter, namespace)
        writer.ask(m.Done, m.OfferEvents, namespace, "GPU-0", HANDLES)
        assert has_offer(writer, namespace)
        wait_until(lambda: not has_offer(writer, namespace), what="the writer lease to run out")
