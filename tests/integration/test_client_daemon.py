"""The client against a real daemon: sharing, publication, kills and restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from real_daemon import running_daemon, wait_until

import worker_client
from hisparse_service.contract.errors import (
    CapacityError,
    ForeignKeys,
    GeometryMismatch,
    LeaseError,
    LeaseLost,
    NotHeld,
    ServiceUnavailable,
    StaleBlock,
    WriterTaken,
)
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.messages import EvictedEvent, PublishedEvent
from worker_client.blocks import LeaseState
from worker_client.client import Completed, CudaUse, MirrorOutcome

NUM_BLOCKS = 32
GEOMETRY = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED,
    block_size=4,
    groups=[LayerGroup(2, 656), LayerGroup(1, 32)],
)


@pytest.fixture
def daemon():
    with running_daemon() as made:
        yield made


def connect(daemon, **who):
    return worker_client.connect(daemon.directory, client_name="test", timeout_s=30, **who)


def open_and_attach(client, *, model="m"):
    client.wait_ready(timeout_s=30)
    namespace = client.open_namespace(model=model, kv_dtype="bf16", geometry=GEOMETRY)
    namespace.attach(NUM_BLOCKS, cuda=CudaUse.OFF)
    return namespace


@pytest.fixture
def client(daemon):
    made = connect(daemon)
    yield made
    made.close()


@pytest.fixture
def namespace(client):
    return open_and_attach(client)


def fill(namespace, block, value):
    for layer in range(GEOMETRY.num_layers):
        namespace.pool.layer_view(layer)[int(block)] = value


def content(namespace, block):
    return [
        int(namespace.pool.layer_view(layer)[int(block)].unique().item())
        for layer in range(GEOMETRY.num_layers)
    ]


def write_prefix(namespace, chain, *, value=1, lease=None, start=0):
    """Reserve, fill and publish the chain's blocks from `start` on; returns the lease."""
    lease = namespace.reserve(chain.num_blocks - start, lease=lease)
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    for i, block in enumerate(blocks):
        fill(namespace, block, value + i)
    result = namespace.mirror(
        completed=[
            Completed(
                lease=lease, blocks=blocks, generations=generations, keys=chain.keys(start),
                parent=0, parent_generation=0, checksums=namespace.pool.checksum(blocks),
            )
        ]
    )  # fmt: skip
    assert result.outcome is MirrorOutcome.ACKNOWLEDGED
    return lease


def chain_of(namespace, *tokens):
    chain = namespace.key_chain()
    chain.extend(tokens)
    return chain


def test_what_one_client_publishes_another_finds_and_reads(daemon, client, namespace):
    chain = chain_of(namespace, *range(12))
    write_prefix(namespace, chain, value=10).release()
    with connect(daemon) as reader:
        other = open_and_attach(reader)
        longer = chain_of(other, *range(12), 99, 98, 97, 96)
        lease = other.lookup(longer)
        assert len(lease.blocks) == 3
        with lease.read_guard():
            assert [content(other, block) for block in lease.blocks] == [
                [10] * 3,
                [11] * 3,
                [12] * 3,
            ]
        assert other.pool.address != namespace.pool.address
        table = other.pool.table["checksum"][lease.blocks]
        assert (table == other.pool.checksum(lease.blocks)).all()
        assert other.lookup(chain_of(other, 7, 7, 7, 7)).blocks.tolist() == []


def test_i2_a_reserved_block_is_not_found_before_it_is_published(daemon, namespace):
    chain = chain_of(namespace, *range(4))
    lease = namespace.reserve(1)
    fill(namespace, lease.reserved_blocks[0], 5)
    assert len(namespace.lookup(chain).blocks) == 0
    with pytest.raises(NotHeld):
        lease.check(lease.reserved_blocks)
    lease.release()


def test_a_prefix_that_two_engines_compute_is_kept_once(daemon, client, namespace):
    chain = chain_of(namespace, *range(8))
    with connect(daemon) as second:
        other = open_and_attach(second)
        loser = other.reserve(2)
        winner = write_prefix(namespace, chain)
        mine, generations = loser.reserved_blocks, loser.reserved_generations
        assert not set(mine) & set(winner.blocks)
        result = other.mirror(
            completed=[
                Completed(lease=loser, blocks=mine, generations=generations, keys=chain.keys())
            ]
        )
        assert result.canonical_blocks.tolist() == winner.blocks.tolist()
        assert loser.blocks.tolist() == winner.blocks.tolist()
        assert result.num_free == NUM_BLOCKS - 1 - 2
        loser.check()
    winner.release()


def test_i1_one_rank_of_a_group_writes(daemon):
    with (
        connect(daemon, group="tp", rank=0, world_size=2) as first,
        connect(daemon, group="tp", rank=1, world_size=2) as second,
    ):
        writer, reader = open_and_attach(first), open_and_attach(second)
        writer.take_writer()
        with pytest.raises(WriterTaken):
            reader.take_writer()
        with pytest.raises(LeaseError):
            reader.reserve(1)
        lease = write_prefix(writer, chain_of(writer, 1, 2, 3, 4))
        assert reader.lookup(chain_of(reader, 1, 2, 3, 4)).blocks.tolist() == lease.blocks.tolist()
        writer.yield_writer()
        reader.take_writer()
        reader.reserve(1).release()
        lease.release()


def test_i9_the_next_rank_takes_over_from_one_that_was_killed(daemon, client):
    code = """
import sys, worker_client
from test_client_daemon import open_and_attach
client = worker_client.connect(sys.argv[1], client_name='victim', group='tp')
namespace = open_and_attach(client)
namespace.take_writer()
lease = namespace.reserve(5)
print('ready', flush=True)
sys.stdin.read()
"""
    victim = subprocess.Popen(
        [sys.executable, "-c", code, str(daemon.directory)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, cwd="tests/integration",
    )  # fmt: skip
    with victim:
        assert victim.stdout.readline() == b"ready\n"
        with connect(daemon, group="tp", rank=1, world_size=2) as heir:
            namespace = open_and_attach(heir)
            with pytest.raises(WriterTaken):
                namespace.take_writer()
            victim.kill()

            def taken():
                try:
                    return namespace.take_writer()
                except WriterTaken:
                    return None

            wait_until(taken)

            def reserved():
                # The connection is gone before the process is: until then its blocks are kept (I1).
                try:
                    return namespace.reserve(NUM_BLOCKS - 1)
                except CapacityError:
                    return None

            wait_until(reserved).release()


def test_exhaustion_is_a_capacity_error_and_changes_nothing(namespace):
    lease = namespace.reserve(NUM_BLOCKS - 1)
    with pytest.raises(CapacityError) as caught:
        namespace.reserve(1)
    assert caught.value.details["needed"] == 1
    assert len(lease.reserved_blocks) == NUM_BLOCKS - 1
    assert 0 not in lease.reserved_blocks, "the null block is never handed out"
    namespace.abandon(lease)
    namespace.reserve(1, lease=lease)
    lease.release()


def test_keys_of_another_namespace_are_refused(client, namespace):
    other = client.open_namespace(model="another", kv_dtype="bf16", geometry=GEOMETRY)
    with pytest.raises(ForeignKeys):
        namespace.lookup(chain_of(other, 1, 2, 3, 4))


def test_attach_with_more_blocks_than_the_backing_has_is_refused(daemon, client, namespace):
    with connect(daemon) as second:
        other = second.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
        with pytest.raises(GeometryMismatch):
            other.attach(NUM_BLOCKS + 1, cuda=CudaUse.OFF)
        assert other.attach(NUM_BLOCKS - 1, cuda=CudaUse.OFF).num_blocks == NUM_BLOCKS


def test_i3_a_block_evicted_after_its_release_is_stale_for_its_old_handle(namespace):
    lease = write_prefix(namespace, chain_of(namespace, 1, 2, 3, 4))
    blocks, generations = lease.blocks, lease.generations
    lease.release()
    with pytest.raises(LeaseLost):
        lease.check()
    everything = namespace.reserve(NUM_BLOCKS - 1)  # evicts it
    with pytest.raises(StaleBlock):
        namespace.pin(blocks, generations)
    everything.release()


def test_events_tell_of_publication_and_eviction(client, namespace):
    with client.events(b"published", b"evicted") as stream:
        wait_until(lambda: client.status()["event_topics"] >= 2)
        chain = chain_of(namespace, 1, 2, 3, 4)
        lease = write_prefix(namespace, chain)
        block = lease.blocks[0]
        event = stream.next(timeout_s=30)
        assert isinstance(event, PublishedEvent)
        assert event.keys == chain.keys()
        lease.release()
        namespace.reserve(NUM_BLOCKS - 1).release()
        event = stream.next(timeout_s=30)
        assert isinstance(event, EvictedEvent)
        assert np.frombuffer(event.blocks, "<u4").tolist() == [block]


def test_a_client_that_closes_is_forgotten(daemon, client):
    with connect(daemon):
        wait_until(lambda: client.status()["sessions"]["workers"] == 2)
    wait_until(lambda: client.status()["sessions"]["workers"] == 1)


def test_i4_reads_go_on_through_a_kill_and_the_successor_is_attached_to(daemon, client, namespace):
    chain = chain_of(namespace, *range(8))
    lease = write_prefix(namespace, chain, value=3)
    address, epoch = namespace.pool.address, client.epoch
    daemon.kill()
    wait_until(lambda: not namespace.is_daemon_there)
    with lease.read_guard():
        assert content(namespace, lease.blocks[1]) == [4] * 3
    with pytest.raises(ServiceUnavailable):
        namespace.reserve(1, timeout_s=0.2)
    daemon.start()
    wait_until(lambda: lease.epoch not in (0, epoch), "attached again")
    assert lease.state is LeaseState.GRANTED
    with lease.read_guard():
        assert content(namespace, lease.blocks[1]) == [4] * 3
    assert namespace.pool.address == address
    assert namespace.lookup(chain).blocks.tolist() == lease.blocks.tolist()
    write_prefix(namespace, chain_of(namespace, 50, 51, 52, 53)).release()


def test_i1_blocks_being_written_survive_the_daemon_and_are_published_by_the_next(
    daemon, client, namespace
):
    chain = chain_of(namespace, *range(8))
    lease = namespace.reserve(2)
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    daemon.kill()
    wait_until(lambda: not namespace.is_daemon_there)
    for i, block in enumerate(blocks):
        fill(namespace, block, 60 + i)
    done = Completed(lease=lease, blocks=blocks, generations=generations, keys=chain.keys())
    assert namespace.mirror(completed=[done]).outcome is MirrorOutcome.QUEUED
    daemon.start()
    handed_in = wait_until(namespace.handed_in)
    assert handed_in[0].canonical_blocks.tolist() == blocks.tolist()
    assert len(lease.lost_blocks) == 0
    lease.check()
    assert namespace.lookup(chain).blocks.tolist() == blocks.tolist()
    assert content(namespace, blocks[1]) == [61] * 3


def test_a_request_that_was_waiting_when_the_daemon_was_killed_gets_the_successors_answer(
    daemon, client, namespace
):
    daemon.signal(signal.SIGSTOP)
    leases = []
    asker = threading.Thread(target=lambda: leases.append(namespace.reserve(2, timeout_s=60)))
    asker.start()
    daemon.kill()
    daemon.start()
    asker.join(60)
    assert [len(lease.reserved_blocks) for lease in leases] == [2]
    leases[0].release()


def test_i2_mirrors_completed_while_the_daemon_is_stopped_are_published_once(
    daemon, client, namespace
):
    chain = chain_of(namespace, 1, 2, 3, 4)
    lease = namespace.reserve(1)
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    daemon.signal(signal.SIGSTOP)
    done = Completed(lease=lease, blocks=blocks, generations=generations, keys=chain.keys())
    result = namespace.mirror(completed=[done], timeout_s=0.2)
    assert result.outcome is MirrorOutcome.QUEUED
    before = time.monotonic()
    assert namespace.mirror(timeout_s=3600).outcome is MirrorOutcome.QUEUED
    assert time.monotonic() - before < 60
    daemon.signal(signal.SIGCONT)
    handed_in = wait_until(namespace.handed_in)
    assert [item.canonical_blocks.tolist() for item in handed_in] == [blocks.tolist()]
    lease.check()
    assert client.counters["mirrors_lost"] == 0
    lease.release()


def test_two_daemons_answer_their_own_clients(daemon, client):
    with running_daemon() as second, connect(second) as other:
        assert other.instance == second.instance != client.instance
        other.ping()
        client.ping()
