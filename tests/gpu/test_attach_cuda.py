"""What goes on beside an attach while the real driver registers its pages.

The same with a stand-in for the driver: tests/unit/worker_client/test_attach.py, and
tests/integration/test_client_attach.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from helpers import DaemonProcess, short_directory, wait_until

import worker_client
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.limits import MIB
from worker_client.client import Client, CudaUse, Namespace
from worker_client.cuda_register import TorchDriver
from worker_client.host_pool import HostPool

pytestmark = pytest.mark.timeout(300)

BIG = HostGeometry.make(layout=HostLayout.LAYER_MAJOR, block_size=64, groups=[LayerGroup(16, 1152)])
SMALL = HostGeometry.make(layout=HostLayout.LAYER_MAJOR, block_size=4, groups=[LayerGroup(1, 32)])
BIG_BLOCKS = 2048 * MIB // BIG.block_stride_bytes
DEADLINE_S = 120.0


class Watched(TorchDriver):
    """CUDA's own registration; tells when it is inside, and waits there for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.done, self.go = threading.Event(), threading.Event(), threading.Event()
        self.go.set()
        self.num_calls = 0

    def register(self, address: int, size_bytes: int) -> int:
        self.num_calls += 1
        self.inside.set()
        assert self.go.wait(DEADLINE_S)
        try:
            return super().register(address, size_bytes)
        finally:
            self.done.set()


class Attach:
    """On a thread of its own, which is the one whose context the pool is for."""

    def __init__(self, namespace: Namespace, driver: Watched) -> None:
        self._pools: list[HostPool] = []
        self._thread = threading.Thread(
            target=lambda: self._pools.append(namespace.attach(BIG_BLOCKS, driver=driver))
        )
        self._thread.start()

    def result(self) -> HostPool:
        self._thread.join(DEADLINE_S)
        (pool,) = self._pools
        return pool


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with short_directory() as directory:
        made = DaemonProcess(directory, pool_bytes="2304MiB").start().wait_ready()
        yield made
        made.close()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    made = worker_client.connect(daemon.runtime_dir, client_name="gpu", timeout_s=30)
    made.wait_ready(timeout_s=60)
    yield made
    made.close()


@pytest.fixture
def big(client: Client) -> Namespace:
    return client.open_namespace(model="big", kv_dtype="bf16", geometry=BIG)


def rows_on_the_device(pool: HostPool) -> torch.Tensor:
    """The first MiB, read by the copy engine through the registration."""
    return pool.registered[:MIB].to("cuda:0", non_blocking=True).cpu()


def test_i7_lookups_pass_while_the_driver_registers_a_big_pool(
    client: Client, big: Namespace
) -> None:
    """The driver works for tenths of a second a GiB: neither lock nor interpreter is held."""
    small = client.open_namespace(model="small", kv_dtype="bf16", geometry=SMALL)
    small.attach(8, cuda=CudaUse.OFF)
    driver = Watched()
    attach = Attach(big, driver)
    assert driver.inside.wait(DEADLINE_S)
    passed = 0
    while not driver.done.is_set():
        small.lookup(bytes(16))
        passed += not driver.done.is_set()
    assert attach.result().cuda_registered
    assert passed > 0


def test_i4_a_daemon_killed_while_pages_are_registered_leaves_a_pool_that_the_gpu_reads(
    daemon: DaemonProcess, client: Client, big: Namespace
) -> None:
    driver = Watched()
    driver.go.clear()
    attach = Attach(big, driver)
    assert driver.inside.wait(DEADLINE_S)
    epoch = client.epoch
    daemon.kill()
    daemon.start().wait_ready()
    wait_until(lambda: client.epoch != epoch and client.session.is_alive)
    driver.go.set()
    pool = attach.result()
    assert driver.num_calls == len(pool.ranges)
    pool.registered[:MIB] = torch.arange(MIB, dtype=torch.int64).to(torch.int8)
    assert torch.equal(rows_on_the_device(pool), pool.registered[:MIB])
    assert big.pool is pool
