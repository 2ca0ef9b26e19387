"""Device memory of the daemon's on a real GPU: the real daemon, its real child, real CUDA IPC.

The same promises without a GPU: tests/integration/test_device_backing.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bound_worker
import pytest
import torch
from helpers import DaemonProcess, RawClient, short_directory, wait_until

import worker_client
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    CapacityError,
    ConfigError,
    DeviceBackingTaken,
    UsageError,
)
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.limits import GIB, MIB

pytestmark = pytest.mark.timeout(300)

DEVICE = torch.device("cuda", 0)
LAYOUT = bytes(range(16))
GEOMETRY = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED, block_size=4, groups=[LayerGroup(1, 32)]
)
ENDED_S = 60.0
SLACK_BYTES = 256 * MIB
"""What other users of the GPU, this process included, may take or give back meanwhile."""


class World:
    """A daemon that may allocate on all GPUs."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.daemon = DaemonProcess(
            directory, pool_bytes="64MiB",
            **{
                "cuda__device_backing_bytes": "4096GiB", "cuda__device_backing_lease_s": "120",
                "limits__heartbeat_interval_s": "0.2", "limits__session_timeout_s": "5",
                **settings,
            },
        )  # fmt: skip
        self.daemon.start().wait_ready()
        self.stack = contextlib.ExitStack()

    def space(self, **who: Any) -> Any:
        client = worker_client.connect(
            self.daemon.runtime_dir, **{"group": "engine", "timeout_s": 30, **who}
        )
        self.stack.callback(client.close)
        client.wait_ready(timeout_s=60)
        return client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)

    def devices(self) -> list[dict[str, Any]]:
        with RawClient(self.daemon.runtime_dir) as client:
            client.hello(operator=True)
            found: list[dict[str, Any]] = client.ask(m.StatusReply, m.Status).status["device"][
                "devices"
            ]
            return found

    def backings(self) -> list[dict[str, Any]]:
        return [backing for device in self.devices() for backing in device["backings"]]

    def bound_worker(self) -> bound_worker.WorkerProcess:
        worker = bound_worker.WorkerProcess(self.daemon.runtime_dir, "cuda")
        self.stack.callback(worker.kill)
        return worker


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def make(**settings: str) -> World:
            world = World(stack.enter_context(short_directory()), **settings)
            stack.callback(world.daemon.close)
            stack.enter_context(world.stack)
            return world

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def own_uuid(index: int = 0) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def free_bytes() -> int:
    return torch.cuda.mem_get_info(DEVICE)[0]


def test_rows_are_there_after_the_worker_was_killed_and_views_lie_on_them(world: World) -> None:
    first = world.bound_worker()
    assert (first.found["adopted"], first.found["bound"]) == (False, True)
    assert first.found["uuid"] == own_uuid()
    written = first.tell("write 5")["digest"]
    assert written != first.found["digest"]
    first.kill()
    second = world.bound_worker()
    assert second.found == {**first.found, "adopted": True, "digest": written}
    assert second.tell("write 6")["digest"] != written


def test_i6_its_bytes_and_the_context_come_back_after_the_lease(
    make_world: Callable[..., World], capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world(cuda__device_backing_lease_s="2")
    torch.cuda.synchronize()
    before = free_bytes()
    size = 2 * GIB
    worker = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(world.daemon.runtime_dir), str(size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with worker:
        try:
            assert worker.stdout is not None
            said = json.loads(worker.stdout.readline())
            assert said["zeros"] is True
            assert free_bytes() < before - size
            (device,) = world.devices()
            assert device["device_uuid"] == own_uuid()
            assert device["used_bytes"] == size
            assert device["context_bytes"] > 50 * MIB
        finally:
            worker.kill()
    wait_until(lambda: not world.backings(), ENDED_S, what="the lease to end")
    wait_until(lambda: free_bytes() > before - GIB, ENDED_S, what="the memory to come back")
    wait_until(lambda: not world.devices(), ENDED_S, what="the child to end")
    wait_until(lambda: free_bytes() > before - SLACK_BYTES, ENDED_S, what="the context's memory")
    with capsys.disabled():
        sys.stdout.write(
            f"\ncontext of the child: {device['context_bytes'] / MIB:.0f} MiB; 2 GiB allocated "
            f"with the child's start in {said['first_s']:.3f} s, opened again in "
            f"{said['again_s'] * 1e3:.1f} ms\n"
        )


HOLD = f"""
import json, sys, time, torch, worker_client
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
torch.zeros(1, device="cuda")
client = worker_client.connect(sys.argv[1], group="engine", timeout_s=30)
client.wait_ready(timeout_s=60)
geometry = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED, block_size=4, groups=[LayerGroup(1, 32)])
space = client.open_namespace(model="m", kv_dtype="bf16", geometry=geometry)
began = time.perf_counter()
backing = space.device_backing(int(sys.argv[2]), layout={LAYOUT!r})
first_s = time.perf_counter() - began
zeros = not bool(backing.tensor.any())
backing.close()
began = time.perf_counter()
backing = space.device_backing(int(sys.argv[2]), layout={LAYOUT!r})
again_s = time.perf_counter() - began
print(json.dumps({{"zeros": zeros, "first_s": first_s, "again_s": again_s}}), flush=True)
sys.stdin.read()
"""


def write_by_a_graph(backing: Any) -> None:
    """Every third row of 1 KiB becomes 77s."""
    rows = backing.tensor.view(torch.int32).view(-1, 256)
    value = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    at = torch.arange(0, rows.shape[0], 3, device=DEVICE)

    def step() -> None:
        rows.index_copy_(0, at, value.expand(at.numel(), 256).contiguous())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    value.fill_(77)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((rows[at] == 77).all())
    assert not rows[1::3].any()


def test_kernels_and_graphs_write_into_it_without_a_copy(world: World) -> None:
    backing = world.space().device_backing(64 * MIB, layout=LAYOUT)
    write_by_a_graph(backing)
    backing.close()
    again = world.space(client_name="other").device_backing(64 * MIB, layout=LAYOUT)
    assert again.adopted
    assert int(again.tensor.view(torch.int32)[0]) == 77


def test_it_is_not_unmapped_under_living_tensors(world: World) -> None:
    backing = world.space().device_backing(4 * MIB, layout=LAYOUT)
    view = backing.tensor[100:200]
    with pytest.raises(UsageError, match="alive"):
        backing.close()
    view.fill_(3)
    assert int(backing.tensor[150]) == 3
    del view
    backing.close()
    assert [each["holder_session"] for each in world.backings()] == [0]


def test_another_process_cannot_have_what_a_living_one_holds(world: World) -> None:
    worker = world.bound_worker()
    (backing,) = world.backings()
    assert backing["holder_pid"] == worker.process.pid
    fields = (
        backing["namespace"], "", own_uuid(), worker.found["bytes"],
        bytes.fromhex(backing["layout"]),
    )  # fmt: skip
    with RawClient(world.daemon.runtime_dir) as client:
        client.hello(group="bound")
        with pytest.raises(DeviceBackingTaken, match="lives"):
            client.ask(m.DeviceBackingReply, m.AllocateDeviceBacking, *fields)


def test_more_than_the_device_has_is_a_lack_of_capacity(world: World) -> None:
    total = torch.cuda.mem_get_info(DEVICE)[1]
    space = world.space()
    with pytest.raises(CapacityError) as caught:
        space.device_backing(total + GIB, layout=LAYOUT)
    assert caught.value.details["cuda_error"] == 2
    assert 0 < int(caught.value.details["free"]) <= total
    space.device_backing(2 * MIB, layout=LAYOUT).release()


def test_a_device_that_is_not_there_is_a_clear_error(world: World) -> None:
    with RawClient(world.daemon.runtime_dir) as client:
        client.hello(group="g")
        fields = (client.open(), "", "GPU-" + "0" * 32, MIB, LAYOUT)

        def refused() -> str:
            try:
                client.ask(m.DeviceBackingReply, m.AllocateDeviceBacking, *fields)
            except ConfigError as error:
                return error.message
            return ""

        assert "none is GPU-00000000" in wait_until(refused)


LOST = f"""
import json, os, signal, sys, time, torch, worker_client
from hisparse_service.contract.errors import LeaseLost
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
client = worker_client.connect(sys.argv[1], group="engine", timeout_s=30)
client.wait_ready(timeout_s=60)
geometry = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED, block_size=4, groups=[LayerGroup(1, 32)])
space = client.open_namespace(model="m", kv_dtype="bf16", geometry=geometry)
backing = space.device_backing(8 << 20, layout={LAYOUT!r})
tensor = backing.tensor
tensor.fill_(9)
torch.cuda.synchronize()
os.kill(client.status()["device"]["devices"][0]["child_pid"], signal.SIGKILL)
deadline = time.monotonic() + 60
while not backing.is_lost and time.monotonic() < deadline:
    time.sleep(0.02)
try:
    backing.check()
    told = False
except LeaseLost:
    told = True
try:
    mapped = f"readable, {{int((tensor == 9).sum())}} of {{tensor.numel()}} bytes as written"
except Exception as error:
    mapped = f"{{type(error).__name__}}: {{error}}".splitlines()[0]
print(json.dumps({{"told": told, "mapped": mapped}}), flush=True)
del tensor
again = space.device_backing(8 << 20, layout={LAYOUT!r})
print(json.dumps({{"adopted": again.adopted, "zeros": not bool(again.tensor.any())}}), flush=True)
"""


def test_i3_who_holds_memory_of_a_killed_child_is_told_and_can_have_other(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: CUDA promises nothing about memory whose owner died."""
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(world.daemon.runtime_dir)],
        text=True, capture_output=True, timeout=200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    assert lines[0]["told"] is True
    with capsys.disabled():
        sys.stdout.write(f"\nmapping after its owner was killed: {lines[0]['mapped']}\n")
    assert lines[1:] == [{"adopted": False, "zeros": True}], done.stderr


def test_a_restarted_daemon_is_told_and_rows_can_be_had_anew(world: World) -> None:
    space = world.space()
    backing = space.device_backing(4 * MIB, layout=LAYOUT)
    world.daemon.kill()
    world.daemon.start().wait_ready()
    wait_until(lambda: backing.is_lost, what="the client to hear of it")
    again = space.device_backing(4 * MIB, layout=LAYOUT)
    assert not again.adopted
    assert not bool(again.tensor.any())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_a_child_and_memory_of_its_own(world: World) -> None:
    space = world.space()
    made = [
        space.device_backing(4 * MIB, layout=LAYOUT, device=torch.device("cuda", index))
        for index in range(torch.cuda.device_count())
    ]
    for index, backing in enumerate(made):
        assert backing.tensor.device.index == index
        backing.tensor.fill_(index + 1)
    assert [int(backing.tensor[-1]) for backing in made] == list(range(1, len(made) + 1))
    assert {each["device_uuid"] for each in world.devices()} == {
        own_uuid(index) for index in range(len(made))
    }


def test_opening_what_is_there_takes_milliseconds(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """No assertion on time: the figure is printed for the documentation."""
    space = world.space()
    space.device_backing(GIB, layout=LAYOUT).close()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        backing = space.device_backing(GIB, layout=LAYOUT)
        times.append(time.perf_counter() - began)
        assert backing.adopted
        backing.close()
    with capsys.disabled():
        sys.stdout.write(f"\n1 GiB opened again in {sorted(times)[2] * 1e3:.1f} ms (median of 5)\n")
