"""The scheduler's share of the directory against a real daemon: no vLLM needed."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from real_daemon import running_daemon, wait_until

from hisparse_service.contract.errors import ServiceUnavailable
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from worker_client import connect
from worker_client.client import Completed
from worker_client.integrations.vllm import host_blocks
from worker_client.integrations.vllm.host_blocks import HostBlocks, Publication
from worker_client.integrations.vllm.settings import WhenAway

GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=16, groups=[LayerGroup(1, 64)]
)
NUM_BLOCKS = 33


@pytest.fixture(autouse=True)
def patient_scheduler(monkeypatch) -> None:
    """A lookup that a busy machine answers after a second finds nothing: not what is tested."""
    monkeypatch.setattr(host_blocks, "_ANSWER_TIMEOUT_S", 30.0)


@pytest.fixture
def daemon() -> Iterator[object]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def make_host(daemon) -> Iterator[object]:
    clients, hosts = [], []  # hosts live as long: their leases end with the client

    def make(*, spare_blocks: int = 2, **options) -> HostBlocks:
        client = connect(daemon.directory, client_name="host blocks")
        clients.append(client)
        wait_until(lambda: client.status()["phase"] == "ready", "ready")
        namespace = client.open_namespace(model="m", kv_dtype="u8", geometry=GEOMETRY)
        namespace.attach(NUM_BLOCKS)
        hosts.append(HostBlocks(namespace, spare_blocks=spare_blocks, **options))
        return hosts[-1]

    yield make
    for client in clients:
        client.close()


def keys(host: HostBlocks, *names: int) -> bytes:
    chain = host.namespace.key_chain()
    chain.extend_hashes(bytes([name]) for name in names)
    return chain.keys()


def publish(host: HostBlocks, *names: int) -> list[int]:
    blocks = host.reserve(len(names))[: len(names)]
    host.publish(Publication(blocks=blocks, keys=keys(host, *names), parent=0))
    host.flush_publications()
    return blocks


def test_spare_blocks_come_along_while_there_are_enough(make_host):
    host = make_host(spare_blocks=4)
    assert len(host.reserve(3)) == 7
    assert len(host.reserve(23)) == 23
    rest = NUM_BLOCKS - 1 - host.num_reserved
    assert len(host.reserve(rest + 1)) < rest + 1
    assert host.totals.refused_reservations == 1


def test_what_one_publishes_the_other_finds_and_lets_go(make_host):
    first, second = make_host(), make_host()
    blocks = publish(first, 1, 2, 3)
    assert second.lookup(keys(second, 1, 2, 9)) == blocks[:2]
    assert second.take_loose() == set(blocks[:2])
    assert set(second.unpin(blocks[:2])) == set(blocks[:2])
    assert not second.pinned


def test_a_duplicate_stays_the_engines_own_and_its_children_follow_the_published_one(make_host):
    first, second = make_host(), make_host()
    published = publish(first, 1, 2)
    own = publish(second, 1, 2)
    assert not set(own) & set(published)
    assert second.totals.blocks_duplicate == 2
    assert all(second.is_needed(block) for block in published)
    (child, *_) = second.reserve(1)
    second.publish(Publication(blocks=[child], keys=keys(second, 1, 2, 3)[-16:], parent=own[1]))
    second.flush_publications()
    assert first.lookup(keys(first, 1, 2, 3)) == [*published, child]
    for block in own:
        second.reuse(block)
    assert second.take_loose() >= set(published)
    assert not any(second.is_needed(block) for block in published)


def test_blocks_go_back_only_behind_their_fence(make_host):
    host = make_host(spare_blocks=0)
    blocks = host.reserve(3)
    host.give_back(blocks, fence=7)
    host.flush_returns(completed_fence=7)
    assert host.num_reserved == 3
    host.flush_returns(completed_fence=8)
    assert host.num_reserved == 0


def test_a_daemon_that_comes_back_gives_blocks_back_and_publishes_what_waited(daemon, make_host):
    host = make_host(spare_blocks=0)
    first, second, third = host.reserve(3)
    daemon.kill()
    wait_until(lambda: not host.namespace.is_daemon_there, "away")
    host.publish(Publication(blocks=[first], keys=keys(host, 1), parent=0))
    host.flush_publications()
    assert host.is_waiting(first)
    assert host.lookup(keys(host, 1)) == []
    assert host.reserve(1) == []
    daemon.start()
    wait_until(lambda: host.namespace.is_daemon_there, "back")
    wait_until(lambda: (host.flush_publications(), not host.is_waiting(first))[1], "handed in")
    assert host.take_lost() == set()
    assert host.pinned == {first}
    host.publish(Publication(blocks=[second], keys=keys(host, 1, 2)[-16:], parent=first))
    host.flush_publications()
    assert host.lookup(keys(host, 1, 2)) == [first, second]
    assert third in host.namespace.require_pool().table["state"].nonzero()[0]


def test_what_is_handed_in_during_a_reservation_hides_no_block(make_host, monkeypatch):
    """The engine would neither use nor return what it was not told of."""
    host = make_host(spare_blocks=0)
    (first, _) = host.reserve(2)
    reserve = host.namespace.reserve

    def later(*arguments, **options):
        host.publish(Publication(blocks=[first], keys=keys(host, 1), parent=0))
        host.flush_publications()
        return reserve(*arguments, **options)

    monkeypatch.setattr(host.namespace, "reserve", later)
    assert len(host.reserve(3)) == 3
    assert host.num_reserved == 1 + 3


def blocks_of(host: HostBlocks) -> dict[str, int]:
    (namespace,) = host.namespace.client.status()["namespaces"]
    return namespace["blocks"]


def test_i3_a_block_that_was_let_go_without_an_answer_is_no_hit_and_loses_no_later_pin(
    daemon, make_host, monkeypatch
):
    """The daemon lets it go when it wakes, and may evict it: whoever read it on would be wrong."""
    host = make_host()
    (block,) = publish(host, 1)
    monkeypatch.setattr(host_blocks, "_ANSWER_TIMEOUT_S", 0.2)
    daemon.signal(signal.SIGSTOP)
    try:
        assert host.unpin([block]) == [block]
        assert not host.pinned
    finally:
        daemon.signal(signal.SIGCONT)
    wait_until(lambda: host.namespace.is_daemon_there, "awake")
    wait_until(lambda: blocks_of(host)["pinned"] == 0, "let go")
    monkeypatch.setattr(host_blocks, "_ANSWER_TIMEOUT_S", 30.0)
    assert host.lookup(keys(host, 1)) == [block]
    with host.namespace.session_lock:
        host.namespace.client.housekeeping()
    assert blocks_of(host)["pinned"] == 1


def test_i1_a_block_given_back_without_an_answer_is_not_taken_from_who_has_it_next(
    daemon, make_host, monkeypatch
):
    host = make_host(spare_blocks=0)
    host.give_back(host.reserve(NUM_BLOCKS - 1), fence=0)
    monkeypatch.setattr(host_blocks, "_ANSWER_TIMEOUT_S", 0.2)
    daemon.signal(signal.SIGSTOP)
    try:
        host.flush_returns(completed_fence=1)
        assert host.num_reserved == 0
    finally:
        daemon.signal(signal.SIGCONT)
    monkeypatch.setattr(host_blocks, "_ANSWER_TIMEOUT_S", 30.0)
    wait_until(lambda: host.namespace.is_daemon_there, "awake")
    wait_until(lambda: len(host.reserve(4)) == 4, "blocks again")
    with host.namespace.session_lock:
        host.namespace.client.housekeeping()
    host.flush_returns(completed_fence=1)
    assert blocks_of(host)["reserved"] == host.num_reserved == 4


def test_with_fail_a_long_absence_is_an_error(daemon, make_host):
    host = make_host(spare_blocks=0, when_away=WhenAway.FAIL, away_limit_s=0.05)
    daemon.kill()
    wait_until(lambda: not host.namespace.is_daemon_there, "away")

    def gave_up() -> bool:
        try:
            return host.reserve(1) == ["never"]
        except ServiceUnavailable as error:
            return "traffic" in error.remedy

    wait_until(gave_up, "gave up")


def checked_prefix(host: HostBlocks, *names: int) -> tuple[list[int], list[int]]:
    """Blocks with checksums, as an engine publishes them that maps the pool, and generations."""
    namespace = host.namespace
    lease = namespace.reserve(len(names))
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    namespace.mirror(
        completed=[
            Completed(
                lease=lease, blocks=blocks, generations=generations, keys=keys(host, *names),
                checksums=namespace.require_pool().checksum(blocks),
            )
        ]
    )  # fmt: skip
    lease.release()
    return blocks.tolist(), generations.tolist()


def test_rows_that_are_wrong_are_reported_before_they_are_let_go(make_host):
    first, second, third = make_host(), make_host(), make_host()
    blocks, _ = checked_prefix(third, 1, 2, 3)
    for host in (first, second):
        assert host.lookup(keys(host, 1, 2, 3)) == blocks
    first.namespace.require_pool().layer_view(0)[blocks[1], 0, 0] ^= 1
    assert first.forget(blocks[1:2]) == blocks[1:2]
    assert third.lookup(keys(third, 1, 2, 3)) == blocks[:1], "though the second engine reads it"
    lost = wait_until(second.take_withdrawn)
    assert lost == set(blocks[1:])
    assert not second.take_withdrawn(), "each is told once"
    assert second.forget(blocks[1:]) == blocks[1:]
    first.unpin(blocks[:1])
    first.forget(blocks[2:])
    (namespace,) = first.namespace.client.status()["namespaces"]
    assert namespace["withdrawn"] == 0


def test_an_engine_that_holds_a_withdrawn_block_survives_a_restart_of_the_daemon(daemon, make_host):
    host, other = make_host(), make_host()
    blocks, generations = checked_prefix(other, 1, 2, 3)
    assert host.lookup(keys(host, 1, 2, 3)) == blocks
    host.namespace.require_pool().layer_view(0)[blocks[2], 0, 0] ^= 1
    other.namespace.report_damage(blocks[2:], generations[2:])
    assert wait_until(host.take_withdrawn) == {blocks[2]}
    daemon.kill()
    daemon.start()
    wait_until(lambda: host.namespace.is_daemon_there and other.namespace.is_daemon_there)
    assert host.take_lost() == set(), "its lease is good"
    assert host.lookup(keys(host, 1, 2, 3)) == blocks[:2]
    host.unpin(blocks[:2])
