"""Workers through a restart of the daemon: what goes on, what waits, what comes back."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import DaemonProcess, wait_until

import worker_client
from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    CapacityError,
    LeaseError,
    QuotaExceeded,
    ServiceUnavailable,
    StaleBlock,
)
from hisparse_service.contract.keys import KeyChain
from tests.faults.prober import Prober
from tests.faults.scenario import SHORT_TIMES, segments_of
from tests.faults.storm_worker import GEOMETRY, NUM_BLOCKS
from worker_client.blocks import BlockLease, LeaseState
from worker_client.client import Client, Completed, MirrorOutcome, Namespace

MakeDaemon = Callable[..., DaemonProcess]
REATTACH_S = 1.0


class CountingDriver:
    """Stands in for the CUDA driver and counts what is registered."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []

    def prepare(self) -> None: ...

    def register(self, address: int, size_bytes: int) -> int:
        self.registered.append((address, size_bytes))
        return 0

    def unregister(self, address: int) -> int:  # noqa: ARG002
        return 0

    def clear_error(self) -> None: ...


class Worker:
    """A client with its namespace attached."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.driver = CountingDriver()
        self.client: Client = worker_client.connect(
            daemon.runtime_dir, client_name="worker", timeout_s=30
        )
        self.client.wait_ready(timeout_s=30)
        self.namespace: Namespace = self.client.open_namespace(
            model="restart", kv_dtype="rows", geometry=GEOMETRY
        )
        self.namespace.attach(NUM_BLOCKS, driver=self.driver)

    def chain(self, *tokens: int) -> KeyChain:
        chain = self.namespace.key_chain()
        chain.extend([token for token in tokens for _ in range(4)])
        return chain

    def fill(self, block: int, value: int) -> None:
        stride = GEOMETRY.place(0, NUM_BLOCKS).block_stride_bytes
        self.namespace.pool.payload[block * stride : (block + 1) * stride] = value

    def content(self, block: int) -> set[int]:
        stride = GEOMETRY.place(0, NUM_BLOCKS).block_stride_bytes
        return set(self.namespace.pool.payload[block * stride : (block + 1) * stride].tolist())

    def publish(self, *tokens: int, value: int = 7) -> BlockLease:
        lease = self.namespace.reserve(len(tokens))
        for block in lease.reserved_blocks:
            self.fill(int(block), value)
        assert self.hand_in(lease, *tokens) is MirrorOutcome.ACKNOWLEDGED
        return lease

    def hand_in(self, lease: BlockLease, *tokens: int) -> MirrorOutcome:
        completed = Completed(
            lease=lease, blocks=lease.reserved_blocks, generations=lease.reserved_generations,
            keys=self.chain(*tokens).keys(),
        )  # fmt: skip
        return self.namespace.mirror(completed=[completed], timeout_s=1.0).outcome

    def wait_for_epoch_after(self, epoch: int) -> None:
        wait_until(lambda: self.client.epoch != epoch and self.client.session.is_alive)

    def vanish(self) -> None:
        """Close without a word."""
        self.client.session._say_bye = lambda: 0
        self.client.close()


@pytest.fixture
def worker(daemon: DaemonProcess) -> Iterator[Worker]:
    made = Worker(daemon)
    yield made
    made.client.close()


def restart(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.start().wait_ready()


def test_i4_reads_and_gathers_go_on_at_the_same_address_while_the_daemon_is_away(
    daemon: DaemonProcess, worker: Worker
) -> None:
    import torch

    lease = worker.publish(1, 2, 3)
    pool = worker.namespace.pool
    address, view = pool.address, pool.layer_view(0)
    rows, block = torch.arange(4), int(lease.blocks[1])
    epoch = worker.client.epoch
    daemon.kill()
    wait_until(lambda: not worker.client.session.is_alive)

    def check_reads(view: torch.Tensor) -> None:
        with lease.read_guard():
            assert worker.content(block) == {7}
            # What a gather does: rows picked out of host memory through the mapped view.
            assert view[block].index_select(0, rows).unique().tolist() == [7]
        assert pool.address == address == pool.registered.data_ptr()

    check_reads(view)
    daemon.start().wait_ready()
    worker.wait_for_epoch_after(epoch)
    check_reads(view)
    del view
    lease.release()


def test_i4_a_purge_while_the_daemon_is_dead_spares_the_workers_memory(
    daemon: DaemonProcess, worker: Worker
) -> None:
    lease = worker.publish(1)
    daemon.kill()
    purge = subprocess.run(
        [sys.executable, "-m", "hisparse_service", "purge", "--instance", daemon.instance,
         "--json"],
        check=True, capture_output=True,
    )  # fmt: skip
    (found,) = json.loads(purge.stdout)
    assert found["verdict"] == "in_use"
    assert daemon.segments
    assert worker.content(int(lease.blocks[0])) == {7}
    lease.release()


def test_i4_attachment_is_renewed_within_a_second_and_registers_nothing_twice(
    daemon: DaemonProcess, worker: Worker
) -> None:
    lease = worker.publish(1, 2)
    registered = list(worker.driver.registered)
    assert registered
    took_s = []
    for _ in range(3):
        epoch = worker.client.epoch
        restart(daemon)
        began_s = time.monotonic()
        worker.wait_for_epoch_after(epoch)
        took_s.append(time.monotonic() - began_s)
        lease.check()
    assert min(took_s) < REATTACH_S, took_s
    assert worker.driver.registered == registered
    assert worker.client.status()["sessions"]["workers"] == 1
    lease.release()


def test_allocation_raises_service_unavailable_at_its_deadline(
    daemon: DaemonProcess, worker: Worker
) -> None:
    daemon.kill()
    began_s = time.monotonic()
    with pytest.raises(ServiceUnavailable):
        worker.namespace.reserve(1, timeout_s=0.3)
    assert time.monotonic() - began_s >= 0.3


def test_i2_mirrors_that_complete_while_the_daemon_is_dead_are_kept_and_handed_in(
    daemon: DaemonProcess, worker: Worker
) -> None:
    lease = worker.namespace.reserve(2)
    daemon.kill()
    wait_until(lambda: not worker.client.session.is_alive)
    for block in lease.reserved_blocks:
        worker.fill(int(block), 9)
    assert worker.hand_in(lease, 5, 6) is MirrorOutcome.QUEUED
    daemon.start().wait_ready()
    (item,) = wait_until(worker.namespace.handed_in)
    assert item.canonical_blocks is not None
    found = worker.namespace.lookup(worker.chain(5, 6))
    assert found.blocks.tolist() == item.canonical_blocks.tolist()
    assert worker.content(int(found.blocks[1])) == {9}
    assert worker.client.counters["mirrors_lost"] == 0
    found.release()
    lease.release()


def test_i2_mirrors_completed_across_a_regular_restart_are_published_too(
    daemon: DaemonProcess, worker: Worker
) -> None:
    """SIGTERM with workers attached must not take their reserved blocks away."""
    lease = worker.namespace.reserve(2)
    blocks, epoch = lease.reserved_blocks.tolist(), worker.client.epoch
    assert daemon.terminate() == 0
    assert daemon.segments
    daemon.start().wait_ready()
    worker.wait_for_epoch_after(epoch)
    assert lease.reserved_blocks.tolist() == blocks
    assert worker.hand_in(lease, 5, 6) is MirrorOutcome.ACKNOWLEDGED
    lease.release()


def test_mirrors_are_kept_up_to_a_bound(
    daemon: DaemonProcess, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_QUEUED_MIRRORS", 3)
    lease, other = worker.namespace.reserve(2), worker.namespace.reserve(2)
    daemon.kill()
    wait_until(lambda: not worker.client.session.is_alive)
    assert worker.hand_in(lease, 5, 6) is MirrorOutcome.QUEUED
    with pytest.raises(QuotaExceeded) as caught:
        worker.hand_in(other, 7, 8)
    assert caught.value.details["limit"] == 3
    daemon.start().wait_ready()
    assert len(wait_until(worker.namespace.handed_in)) == 1
    lease.release()
    other.release()


def test_i3_what_was_read_before_the_restart_is_not_evicted_before_its_readers_are_back(
    daemon: DaemonProcess,
) -> None:
    """A reader stands still while another worker takes all that the new daemon would give."""
    reader, writer = Worker(daemon), Worker(daemon)
    held = reader.publish(1, 2, 3)
    reader.publish(4, 5).release()
    epoch = writer.client.epoch
    with reader.client.session.lock:  # its background thread cannot attach again meanwhile
        restart(daemon)
        writer.wait_for_epoch_after(epoch)
        taken = writer.namespace.reserve(NUM_BLOCKS - 1 - 3)
        assert not set(taken.reserved_blocks) & set(held.blocks)
    wait_until(lambda: held.epoch == writer.client.epoch)
    with held.read_guard():
        assert reader.content(int(held.blocks[2])) == {7}
    held.release()
    taken.release()
    reader.client.close()
    writer.client.close()


def test_i6_the_grace_after_an_adoption_ends(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SHORT_TIMES).wait_ready()
    reader = Worker(daemon)
    lease = reader.publish(1, 2, 3)
    namespace_id = reader.namespace.namespace_id
    daemon.kill()
    reader.vanish()  # it never comes back
    daemon.start().wait_ready()
    with daemon.client() as client:
        wait_until(lambda: client.counts(namespace_id)["pinned"] == 0)
        assert client.counts(namespace_id)["published"] == 3
    del lease


def test_a_restarted_engine_finds_its_namespace_populated_pages_and_prefixes(
    daemon: DaemonProcess, worker: Worker
) -> None:
    worker.publish(1, 2, 3).release()
    worker.client.close()
    restart(daemon)
    again = Worker(daemon)
    assert again.namespace.pool.adopted
    found = again.namespace.lookup(again.chain(1, 2, 3))
    assert len(found.blocks) == 3
    assert again.content(int(found.blocks[0])) == {7}
    status = (Path("/dev/shm") / daemon.segments[0]).stat()
    assert status.st_blocks * 512 >= status.st_size, "every page is there"
    found.release()
    again.client.close()


def test_i3_a_lease_that_ran_out_while_its_holder_stood_still_never_returns_bytes(
    make_daemon: MakeDaemon,
) -> None:
    """The holder is stopped between its copy and the check after it."""
    daemon = make_daemon(**SHORT_TIMES).wait_ready()
    reader, writer = Worker(daemon), Worker(daemon)
    held = reader.publish(1, 2, 3)
    guard = held.read_guard()
    guard.__enter__()
    with reader.client.session.lock:  # no heartbeat: silent, as under SIGSTOP
        taken = wait_until(lambda: take_all(writer))
    with pytest.raises((StaleBlock, LeaseError)):
        guard.__exit__(None, None, None)
    taken.release()
    for each in (reader, writer):
        each.client.close()


def take_all(writer: Worker) -> BlockLease | None:
    with contextlib.suppress(CapacityError):
        return writer.namespace.reserve(NUM_BLOCKS - 1)
    return None


# --- handover ---------------------------------------------------------------------------------


def test_i4_a_handover_leaves_no_second_without_an_answer(
    daemon: DaemonProcess, worker: Worker
) -> None:
    held, reserved = worker.publish(1, 2, 3), worker.namespace.reserve(2)
    epoch, blocks = worker.client.epoch, reserved.reserved_blocks.tolist()
    prober = Prober(str(daemon.runtime_dir))
    try:
        wait_until(lambda: prober.pings > 10)
        report = hand_over(daemon)
        worker.wait_for_epoch_after(epoch)
        pings = prober.pings
        wait_until(lambda: prober.pings > pings + 10)
    finally:
        prober.close()
    try:
        assert daemon.process.wait(30) == 0
        assert prober.longest_outage_s < 1.0, prober.longest_s
        assert held.state is LeaseState.GRANTED
        held.check()
        assert reserved.reserved_blocks.tolist() == blocks
        assert worker.hand_in(reserved, 8, 9) is MirrorOutcome.ACKNOWLEDGED
        held.release()
        reserved.release()
        worker.client.close()
    finally:
        end_process(report["pid"])
    assert segments_of(daemon.instance) == []


def test_a_handover_without_workers_keeps_the_pool(daemon: DaemonProcess, worker: Worker) -> None:
    worker.publish(1, 2).release()
    worker.client.close()
    report = hand_over(daemon)
    assert daemon.process.wait(30) == 0
    try:
        again = Worker(daemon)
        found = again.namespace.lookup(again.chain(1, 2))
        assert len(found.blocks) == 2
        found.release()
        again.client.close()
    finally:
        end_process(report["pid"])
    assert segments_of(daemon.instance) == []


def test_a_handover_whose_successor_cannot_start_leaves_the_old_daemon_alone(
    daemon: DaemonProcess, worker: Worker
) -> None:
    daemon.environment["HISPARSE_LOG__LEVEL"] = "nonsense"
    done = run_handover(daemon)
    assert done.returncode != 0
    assert daemon.process.poll() is None
    worker.client.ping()


def run_handover(daemon: DaemonProcess) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, "-m", "hisparse_service", "handover", "--json",
            "--log-file", str(daemon.log_path),
        ],
        env=daemon.environment, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def hand_over(daemon: DaemonProcess) -> dict[str, int]:
    done = run_handover(daemon)
    assert done.returncode == 0, done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    return report


def end_process(pid: int) -> None:
    """SIGTERM to a process that is not our child, and wait for it."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        assert select.select([pidfd], [], [], 30)[0]
    finally:
        os.close(pidfd)
