"""A long attach, against a real daemon that is killed, replaced or stopped meanwhile."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from real_daemon import DEADLINE_S, SHM, running_daemon, wait_until
from test_client_daemon import (
    GEOMETRY,
    NUM_BLOCKS,
    chain_of,
    connect,
    content,
    open_and_attach,
    write_prefix,
)

from hisparse_service.contract.errors import ClosedError, HiSparseError
from worker_client.client import Completed, CudaUse, MirrorOutcome


@pytest.fixture
def daemon():
    with running_daemon() as made:
        yield made


@pytest.fixture
def client(daemon):
    made = connect(daemon)
    yield made
    made.close()


class HeldDriver:
    """Stands in for CUDA and stands still in the first range until `go`."""

    def __init__(self):
        self.inside, self.go = threading.Event(), threading.Event()
        self.registered = 0

    def prepare(self): ...

    def register(self, _address, _size_bytes):
        self.inside.set()
        assert self.go.wait(DEADLINE_S)
        self.registered += 1
        return 0

    def unregister(self, _address):
        self.registered -= 1
        return 0

    def clear_error(self): ...


class HeldAttach:
    """An attach on its own thread, held up in the registration; ends with the block."""

    def __init__(self, client, *, model="m"):
        self.driver = HeldDriver()
        client.wait_ready(timeout_s=DEADLINE_S)
        self.namespace = client.open_namespace(model=model, kv_dtype="bf16", geometry=GEOMETRY)
        self.pool, self.error = None, None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.pool = self.namespace.attach(NUM_BLOCKS, driver=self.driver, timeout_s=DEADLINE_S)
        except HiSparseError as error:
            self.error = error

    def __enter__(self):
        self._thread.start()
        assert self.driver.inside.wait(DEADLINE_S)
        return self

    def __exit__(self, *_):
        self.driver.go.set()
        self._thread.join(DEADLINE_S)

    def finish(self):
        self.driver.go.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.pool


def segment_maps(daemon):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"hisparse-{daemon.instance}" in line]


def test_other_namespaces_are_looked_up_mirrored_and_read_while_one_is_attached(daemon, client):
    other = open_and_attach(client, model="other")
    with HeldAttach(client) as attach:
        lease = write_prefix(other, chain_of(other, *range(8)), value=3)
        found = other.lookup(chain_of(other, *range(8)))
        with found.read_guard():
            assert content(other, found.blocks[1]) == [4] * 3
        attach.finish()
    found.release()
    lease.release()


def test_i4_a_daemon_killed_during_an_attach_is_succeeded_and_the_pool_is_what_it_serves(
    daemon, client
):
    with connect(daemon) as first:
        writer = open_and_attach(first)
        chain = chain_of(writer, *range(8))
        write_prefix(writer, chain, value=5).release()
        epoch = client.epoch
        with HeldAttach(client) as attach:
            daemon.kill()
            daemon.start()
            wait_until(lambda: epoch not in (client.epoch, first.epoch), "new sessions")
            pool = attach.finish()
        assert attach.driver.registered == len(pool.ranges)
        assert pool.identity == writer.pool.identity
        lease = attach.namespace.lookup(chain)
        with lease.read_guard():
            assert [content(attach.namespace, block) for block in lease.blocks] == [
                [5] * 3,
                [6] * 3,
            ]
        lease.release()


def test_i3_the_segment_of_a_daemon_that_began_anew_is_attached_to_instead(daemon, client):
    """What was being registered is nobody's any more: rows written there would be lost."""
    epoch = client.epoch
    with HeldAttach(client) as attach:
        daemon.kill()
        for name in daemon.segments():
            (SHM / name).unlink()
        daemon.start()
        wait_until(lambda: client.epoch != epoch and client.session.is_alive, "a new session")
        client.wait_ready(timeout_s=DEADLINE_S)
        pool = attach.finish()
    assert attach.driver.registered == len(pool.ranges)
    assert not [line for line in segment_maps(daemon) if "(deleted)" in line]
    chain = chain_of(attach.namespace, *range(4))
    write_prefix(attach.namespace, chain, value=9).release()
    with connect(daemon) as second:
        reader = open_and_attach(second)
        assert reader.pool.identity == pool.identity
        lease = reader.lookup(chain)
        assert [content(reader, block) for block in lease.blocks] == [[9] * 3]
        lease.release()


def test_a_decode_step_goes_on_while_an_attach_asks_a_daemon_that_hangs(daemon, client):
    other = open_and_attach(client, model="other")
    lease = other.reserve(1)
    done = Completed(
        lease=lease, blocks=lease.reserved_blocks, generations=lease.reserved_generations,
        keys=chain_of(other, *range(4)).keys(),
    )  # fmt: skip
    namespace = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    attached, results = [], []
    daemon.signal(signal.SIGSTOP)
    attach = threading.Thread(
        target=lambda: attached.append(
            namespace.attach(NUM_BLOCKS, cuda=CudaUse.OFF, timeout_s=3600)
        )
    )
    attach.start()
    try:
        wait_until(lambda: not client.session.is_alive, "the attach found it silent")
        step = threading.Thread(target=lambda: results.append(other.mirror(completed=[done])))
        step.start()
        step.join(DEADLINE_S)
        assert [result.outcome for result in results] == [MirrorOutcome.QUEUED]
        assert attach.is_alive()
    finally:
        daemon.signal(signal.SIGCONT)
        attach.join(DEADLINE_S)
    assert attached == [namespace.pool]
    (handed_in,) = wait_until(other.handed_in)
    assert handed_in.canonical_blocks.tolist() == done.blocks.tolist()
    lease.release()


def test_i6_a_client_closed_during_an_attach_leaves_neither_mapping_nor_turn(daemon, client):
    with HeldAttach(client) as attach:
        client.close()
        with pytest.raises(ClosedError):
            attach.finish()
    assert attach.driver.registered == 0
    assert not segment_maps(daemon)
    with connect(daemon) as second:
        namespace = second.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
        driver = HeldDriver()
        driver.go.set()
        assert namespace.attach(NUM_BLOCKS, driver=driver).cuda_registered
