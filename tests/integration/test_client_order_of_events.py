"""What the client does when answers come late, twice, or not at all, against a real daemon."""

from __future__ import annotations

import _thread
import signal

import numpy as np
import pytest
from real_daemon import running_daemon, wait_until
from test_client_daemon import chain_of, connect, fill, open_and_attach, write_prefix

from hisparse_service.contract import limits
from hisparse_service.contract.errors import ServiceUnavailable
from worker_client.blocks import LeaseState
from worker_client.client import Completed, MirrorOutcome

SHORT_S = 0.3


@pytest.fixture
def daemon():
    with running_daemon() as made:
        yield made


@pytest.fixture
def client(daemon):
    made = connect(daemon)
    yield made
    made.close()


@pytest.fixture
def namespace(client):
    return open_and_attach(client)


def counts(daemon):
    with connect(daemon) as watcher:
        (found,) = watcher.status()["namespaces"]
        return found["blocks"]


def stopped(daemon):
    """The daemon answers nothing inside, and everything after."""

    class Stopped:
        def __enter__(self):
            daemon.signal(signal.SIGSTOP)

        def __exit__(self, *_):
            daemon.signal(signal.SIGCONT)

    return Stopped()


def test_i6_a_reservation_whose_answer_came_too_late_goes_back(daemon, namespace):
    """An engine keeps one lease for its life: what it does not know of would be lost to all."""
    lease = namespace.reserve(1)
    with stopped(daemon), pytest.raises(ServiceUnavailable):
        namespace.reserve(3, lease=lease, timeout_s=SHORT_S)
    wait_until(lambda: counts(daemon)["reserved"] == 1)
    assert len(lease.reserved_blocks) == 1
    assert lease.state is LeaseState.GRANTED
    lease.release()


def test_i6_a_reservation_in_a_mirror_whose_answer_came_too_late_goes_back(daemon, namespace):
    lease, other = namespace.reserve(1), namespace.reserve(1)
    chain = chain_of(namespace, *range(4))
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    with stopped(daemon):
        item = Completed(lease=lease, blocks=blocks, generations=generations, keys=chain.keys())
        result = namespace.mirror(completed=[item], reserve=[(other, 5)], timeout_s=SHORT_S)
        assert result.outcome is MirrorOutcome.QUEUED
    wait_until(lambda: counts(daemon) | {"free": 0} == {
        "capacity": 31, "free": 0, "reserved": 1, "published": 0, "pinned": 1,
    })  # fmt: skip
    assert len(other.reserved_blocks) == 1
    lease.release()
    other.release()


def test_i6_pins_whose_answer_came_too_late_end(daemon, namespace):
    chain = chain_of(namespace, *range(12))
    write_prefix(namespace, chain).release()
    lease = namespace.lookup(chain, stop=1)
    kept = lease.blocks.tolist()
    with stopped(daemon), pytest.raises(ServiceUnavailable):
        namespace.lookup_into(lease, chain.keys(), timeout_s=SHORT_S)
    wait_until(lambda: counts(daemon)["pinned"] == 1)
    assert counts(daemon)["published"] == 2
    assert lease.blocks.tolist() == kept
    lease.check()
    lease.release()


def test_i2_a_mirror_that_was_interrupted_by_the_keyboard_is_settled(daemon, client, namespace):
    """Ctrl-C comes while the answer is awaited; the daemon published the block all the same."""
    lease = namespace.reserve(1)
    chain = chain_of(namespace, *range(4))
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    fill(namespace, blocks[0], 7)
    original = client.session._receive

    def receive(*arguments, **options):
        client.session._receive = original
        _thread.interrupt_main()
        return original(*arguments, **options)

    with stopped(daemon):
        client.session._receive = receive
        with pytest.raises(KeyboardInterrupt):
            namespace.mirror(
                completed=[
                    Completed(
                        lease=lease, blocks=blocks, generations=generations, keys=chain.keys()
                    )
                ],
                timeout_s=20,
            )
    client.ping(timeout_s=20)
    (handed_in,) = wait_until(namespace.handed_in)
    assert handed_in.canonical_blocks.tolist() == blocks.tolist()
    assert not len(lease.reserved_blocks)
    assert lease.blocks.tolist() == blocks.tolist()
    lease.release()
    wait_until(lambda: counts(daemon)["published"] == 1)


def test_a_lease_that_found_a_prefix_twice_survives_a_restart(daemon, client, namespace):
    chain = chain_of(namespace, *range(12))
    write_prefix(namespace, chain).release()
    lease = namespace.lookup(chain)
    namespace.lookup(chain, lease=lease)
    epoch = client.epoch
    daemon.kill()
    daemon.start()
    wait_until(lambda: client.epoch != epoch)
    lease.check()
    assert lease.state is LeaseState.GRANTED
    assert counts(daemon)["pinned"] == 3
    lease.release()
    wait_until(lambda: counts(daemon)["pinned"] == 0)


def test_a_lease_with_more_blocks_than_a_message_carries_survives_a_restart(
    daemon, client, namespace, monkeypatch
):
    """An engine of a large node pins more than MAX_BLOCKS_PER_MESSAGE in its one lease."""
    chain = chain_of(namespace, *range(28))
    lease = write_prefix(namespace, chain)
    namespace.reserve(5, lease=lease)
    reserved = lease.reserved_blocks.tolist()
    sent = []
    monkeypatch.setattr(limits, "MAX_BLOCKS_PER_MESSAGE", 3)
    original = client.session._exchange

    def exchange(build, *arguments, **options):
        def noted(request_id):
            request = build(request_id)
            sent.append(len(getattr(request, "blocks", b"")) // 4)
            return request

        return original(noted, *arguments, **options)

    monkeypatch.setattr(client.session, "_exchange", exchange)
    epoch = client.epoch
    daemon.kill()
    daemon.start()
    wait_until(lambda: client.epoch != epoch)
    lease.check()
    assert max(sent) == 3
    assert lease.reserved_blocks.tolist() == reserved
    assert not len(lease.lost_blocks)
    found = counts(daemon)
    assert (found["pinned"], found["reserved"]) == (7, 5)
    lease.release()
    wait_until(lambda: counts(daemon)["reserved"] == 0)


def test_i3_a_lease_whose_blocks_were_partly_evicted_by_a_restart_leaves_no_pins(
    daemon, client, namespace, monkeypatch
):
    chain = chain_of(namespace, *range(16))
    lease = write_prefix(namespace, chain)
    monkeypatch.setattr(limits, "MAX_BLOCKS_PER_MESSAGE", 2)
    generations = np.array(lease.generations)
    generations[3] += 1  # what the table would say, had the block been given to somebody else
    lease._pinned = (lease.blocks, generations)
    epoch = client.epoch
    daemon.kill()
    daemon.start()
    wait_until(lambda: client.epoch != epoch)
    wait_until(lambda: lease.state is LeaseState.REVOKED)
    wait_until(lambda: counts(daemon)["pinned"] == 0)


def test_a_worker_that_gave_up_waiting_for_its_turn_to_register_keeps_nobody_waiting(
    daemon, namespace
):
    with connect(daemon) as second, connect(daemon) as third:
        impatient, patient = open_and_attach(second), open_and_attach(third)
        with (
            namespace.registration_turn(),
            pytest.raises(ServiceUnavailable, match="1 sessions"),
            impatient.registration_turn(timeout_s=0.1),
        ):
            pytest.fail("two have the turn")
        with patient.registration_turn(timeout_s=20):
            pass
