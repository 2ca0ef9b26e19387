"""Device memory of the daemon's: who holds it, how long it lasts, and what a hung driver may do.

The device child is the real one with memory of its own in place of a GPU's (`testing.device`);
tests/gpu/test_device_backing_cuda.py is the same on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bound_worker
import pytest
from device_memory import (
    DEVICE,
    LAYOUT,
    SIZE,
    UUIDS,
    MemoryOpener,
    WorkerProcess,
    connect,
    open_space,
)
from helpers import DaemonProcess, RawClient, has_ended, short_directory, wait_until

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DeviceBackingTaken,
    DeviceError,
    GeometryMismatch,
    LeaseLost,
    NotReady,
    QuotaExceeded,
    UsageError,
)
from hisparse_service.contract.limits import MIB
from hisparse_service.testing.device import CONTEXT_BYTES, open_memory
from worker_client.device_allocator import DeviceAllocator, DeviceFallback
from worker_client.device_backing import DeviceBackingMode

PROGRAM = (str(Path(__file__).parents[1] / "device_daemon.py"),)
TAKEN = 4 * MIB
"""What SIZE takes: whole pages of the driver's."""


class World:
    """A daemon with device memory, and the file switches of its device."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.device = directory / "device"
        self.device.mkdir()
        self.daemon = DaemonProcess(
            directory, program=PROGRAM, testing_device_directory=str(self.device),
            **{
                "limits__heartbeat_interval_s": "0.1", "limits__session_timeout_s": "2",
                "cuda__device_backing_bytes": "16MiB", "cuda__device_backing_lease_s": "60",
                "cuda__device_backing_timeout_s": "30", **settings,
            },
        )  # fmt: skip
        self.daemon.start().wait_ready()
        self.runtime_dir = self.daemon.runtime_dir
        self.stack = contextlib.ExitStack()

    def connect(self, **who: Any) -> Any:
        client = connect(self.runtime_dir, **who)
        self.stack.callback(client.close)
        return client

    def worker(self, **who: Any) -> WorkerProcess:
        worker = WorkerProcess(self.runtime_dir, **who)
        self.stack.callback(worker.close)
        return worker

    def status(self) -> dict[str, Any]:
        with RawClient(self.runtime_dir) as client:
            client.hello(operator=True)
            return client.ask(m.StatusReply, m.Status).status

    def devices(self) -> list[dict[str, Any]]:
        return self.status()["device"]["devices"]

    def backings(self) -> list[dict[str, Any]]:
        return [backing for device in self.devices() for backing in device["backings"]]

    def wait_freed(self) -> None:
        wait_until(lambda: not self.backings(), what="device memory to be given back")

    def command(self, *arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "hisparse_service", *arguments], env=self.daemon.environment,
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip

    def close(self) -> None:
        for switch in self.device.iterdir():
            switch.unlink()
        self.stack.close()
        self.daemon.close()


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def make(**settings: str) -> World:
            world = World(stack.enter_context(short_directory()), **settings)
            stack.callback(world.close)
            return world

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def obtain(client: Any, size: int = SIZE, **options: Any) -> Any:
    options = {"layout": LAYOUT, "driver": MemoryOpener(), **options}
    return open_space(client).device_backing(size, **options)


# --- what it is for -------------------------------------------------------------------------


def test_rows_are_there_after_the_worker_was_killed(world: World) -> None:
    first = world.worker(byte=42)
    assert first.said["adopted"] is False
    assert first.said["first"] == 0, "memory is zeroed: no worker sees another's bytes"
    first.kill()
    second = world.worker(byte=43)
    assert second.said == {"adopted": True, "first": 42, "pid": second.process.pid}
    assert [each["holder_pid"] for each in world.backings()] == [second.process.pid]


def test_memory_of_a_fresh_backing_is_zero_and_the_same_object_is_given_twice(
    world: World,
) -> None:
    client = world.connect()
    backing = obtain(client)
    assert (backing.tensor.shape, backing.tensor.any()) == ((SIZE,), False)
    assert obtain(client) is backing, "an engine builds its caches twice"
    assert not backing.adopted


def test_ranks_groups_names_and_devices_have_memory_of_their_own(world: World) -> None:
    made = [
        obtain(world.connect(group="a", rank=0)),
        obtain(world.connect(group="a", rank=1)),
        obtain(world.connect(group="b", rank=0)),
        obtain(world.connect(group="c", rank=0), name="second"),
        obtain(world.connect(group="d", rank=0), driver=MemoryOpener(UUIDS[1])),
    ]
    for value, backing in enumerate(made, start=1):
        backing.tensor.fill_(value)
    assert [int(backing.tensor[-1]) for backing in made] == [1, 2, 3, 4, 5]
    by_device = {each["device_uuid"]: len(each["backings"]) for each in world.devices()}
    assert by_device == {UUIDS[0]: 4, UUIDS[1]: 1}


# --- who holds it ---------------------------------------------------------------------------


def test_another_process_cannot_have_what_a_living_one_holds(world: World) -> None:
    worker = world.worker()
    with pytest.raises(DeviceBackingTaken, match="lives") as caught:
        obtain(world.connect())
    assert caught.value.details["holder_pid"] == worker.process.pid


def test_a_stopped_worker_whose_session_timed_out_still_holds_it(
    make_world: Callable[..., World],
) -> None:
    """Its kernels may go on, or it may continue: nobody else gets the memory, nor is it freed."""
    world = make_world(cuda__device_backing_lease_s="0.2", limits__session_timeout_s="0.5")
    worker = world.worker()
    worker.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: world.status()["sessions"]["workers"] == 0, what="the session to time out")
    wait_until(lambda: [each["idle_s"] > 1.0 for each in world.backings()] == [True])
    with pytest.raises(DeviceBackingTaken):
        obtain(world.connect())
    worker.kill()
    world.wait_freed()


def test_a_detached_backing_goes_to_the_next_process_at_once(world: World) -> None:
    first = world.connect()
    driver = MemoryOpener()
    backing = obtain(first, driver=driver)
    backing.tensor.fill_(9)
    backing.close()
    backing.close()
    assert driver.mapped == 0
    worker = world.worker()
    assert (worker.said["adopted"], worker.said["first"]) == (True, 9)
    with pytest.raises(ClosedError):
        backing.check()


def test_it_is_not_unmapped_under_living_tensors(world: World) -> None:
    backing = obtain(world.connect())
    view = backing.tensor[4:8]
    with pytest.raises(UsageError, match="alive"):
        backing.close()
    view.fill_(3)
    assert int(backing.tensor[5]) == 3
    del view
    backing.close()


def test_another_layout_or_size_is_refused_and_rows_are_kept(world: World) -> None:
    client = world.connect()
    backing = obtain(client)
    backing.tensor.fill_(5)
    backing.close()
    with pytest.raises(GeometryMismatch, match="layout") as caught:
        obtain(client, layout=bytes(16))
    assert LAYOUT.hex() in str(caught.value)
    with pytest.raises(GeometryMismatch):
        obtain(client, SIZE + 1)
    assert int(obtain(client, mode=DeviceBackingMode.OPEN).tensor[0]) == 5


def test_rows_that_are_not_wanted_are_given_back_first(world: World) -> None:
    client = world.connect()
    obtain(client).tensor.fill_(5)
    fresh = obtain(client, layout=bytes(16), mode=DeviceBackingMode.CREATE)
    assert (fresh.adopted, bool(fresh.tensor.any())) == (False, False)


def test_only_what_is_there_can_be_opened(world: World) -> None:
    with pytest.raises(LeaseLost, match="no device backing"):
        obtain(world.connect(), mode=DeviceBackingMode.OPEN)
    assert world.devices() == []


# --- how long it lasts ----------------------------------------------------------------------


def test_i6_it_is_given_back_after_the_lease_without_a_holder(
    make_world: Callable[..., World],
) -> None:
    world = make_world(cuda__device_backing_lease_s="0.3")
    worker = world.worker()
    (before,) = world.devices()
    assert before["used_bytes"] == TAKEN
    worker.kill()
    world.wait_freed()
    (device,) = world.devices()
    assert (device["used_bytes"], device["child"]) == (0, "open")
    again = world.worker()
    assert (again.said["adopted"], again.said["first"]) == (False, 0)


def test_i6_a_holder_keeps_it_beyond_the_lease(make_world: Callable[..., World]) -> None:
    world = make_world(cuda__device_backing_lease_s="0.1")
    backing = obtain(world.connect())
    wait_until(lambda: world.backings()[0]["age_s"] > 1.5)
    backing.check()
    assert world.backings()[0]["state"] == "ready"


def test_i6_a_drain_gives_back_what_nobody_holds_and_refuses_more(world: World) -> None:
    held = world.connect(group="held")
    backing = obtain(held)
    world.worker(group="dead").kill()
    assert len(world.backings()) == 2
    world.command("drain")
    wait_until(lambda: [each["group"] for each in world.backings()] == ["held"])
    with pytest.raises(NotReady):
        obtain(held, name="more")
    backing.close()
    world.wait_freed()
    wait_until(lambda: not world.devices(), what="the child to end")


def test_i6_it_goes_when_its_holder_gives_it_back(world: World) -> None:
    backing = obtain(world.connect())
    handle_pid = world.devices()[0]["child_pid"]
    backing.release()
    world.wait_freed()
    fds = Path(f"/proc/{handle_pid}/fd").iterdir()
    assert not any("device-memory" in os.readlink(fd) for fd in fds)


def test_i6_an_operator_gives_back_what_nobody_holds(world: World) -> None:
    client = world.connect(group="held")
    obtain(client)
    world.worker(group="dead").kill()
    wait_until(lambda: {each["holder_session"] for each in world.backings()} > {0})
    assert json.loads(world.command("release-device", "--json")) == {"released": 1}
    wait_until(lambda: [each["group"] for each in world.backings()] == ["held"])


def test_i6_a_namespace_goes_with_its_last_device_memory(world: World) -> None:
    """It outlives its opener for the memory's sake, and no longer."""
    world.worker().kill()
    wait_until(lambda: world.status()["sessions"]["workers"] == 0)
    (namespace,) = world.status()["namespaces"]
    world.command("release-device", "--namespace", str(namespace["namespace"]))
    wait_until(lambda: world.status()["namespaces"] == [], what="the namespace to go")
    assert world.backings() == []


def test_i6_nothing_is_left_when_the_daemon_is_killed(world: World) -> None:
    obtain(world.connect())
    child = world.devices()[0]["child_pid"]
    world.daemon.kill()
    wait_until(lambda: has_ended(child), what="the child to end")


# --- when it is gone ------------------------------------------------------------------------


def hide_owner(backing: Any) -> None:
    """As in another PID namespace: only the daemon's word tells that the memory is gone."""
    assert backing._owner_pidfd >= 0
    os.close(backing._owner_pidfd)
    backing._owner_pidfd = -1


def test_i3_who_holds_memory_of_a_dead_child_is_told(world: World) -> None:
    client = world.connect()
    backing = obtain(client)
    hide_owner(backing)
    tensor = backing.tensor
    tensor.fill_(1)
    os.kill(world.devices()[0]["child_pid"], signal.SIGKILL)
    wait_until(lambda: backing.is_lost, what="the client to hear of it")
    with pytest.raises(LeaseLost, match="child on this GPU ended"):
        backing.check()
    with pytest.raises(LeaseLost):
        _ = backing.tensor
    assert world.status()["device"]["lost_total"] == 1
    del tensor
    again = obtain(client)
    assert (again.adopted, bool(again.tensor.any())) == (False, False)
    assert again.backing_id != backing.backing_id
    again.check()


def test_i3_who_holds_memory_knows_at_once_that_it_is_gone_without_a_daemon(
    world: World,
) -> None:
    """A killed daemon takes its children along, and may stay away for long."""
    backing = obtain(world.connect())
    child = world.devices()[0]["child_pid"]
    backing.check()
    world.daemon.kill()
    wait_until(lambda: has_ended(child), what="the child to end")
    with pytest.raises(LeaseLost, match="child on this GPU ended"):
        backing.check()


def test_i3_memory_of_a_dead_child_is_not_offered_to_the_next_process(world: World) -> None:
    world.worker().kill()
    wait_until(lambda: world.status()["sessions"]["workers"] == 0)
    os.kill(world.devices()[0]["child_pid"], signal.SIGKILL)
    world.wait_freed()
    assert world.worker().said["adopted"] is False


def test_i3_a_daemons_restart_is_told_and_other_memory_can_be_had(world: World) -> None:
    client = world.connect()
    backing = obtain(client)
    hide_owner(backing)
    world.daemon.kill()
    world.daemon.start().wait_ready()
    wait_until(lambda: backing.is_lost, what="the client to hear of it")
    with pytest.raises(LeaseLost, match="restarted"):
        backing.check()
    again = obtain(client)
    assert again.epoch != backing.epoch
    assert not again.adopted


def test_a_session_that_timed_out_and_comes_back_still_holds_it(world: World) -> None:
    """The process lived on, so nobody else could get it meanwhile."""
    client = world.connect()
    backing = obtain(client)
    backing.tensor.fill_(4)
    session = client.session_id
    with client.session.lock:  # no heartbeat gets out
        wait_until(lambda: world.status()["sessions"]["workers"] == 0, what="the session to end")
    wait_until(lambda: client.session_id != session, what="a new session")
    backing.check()
    assert int(backing.tensor[0]) == 4
    assert [each["holder_session"] for each in world.backings()] == [client.session_id]


# --- limits and failures --------------------------------------------------------------------


def test_the_limit_of_a_device_is_kept_and_named(world: World) -> None:
    client = world.connect()
    obtain(client, 8 * MIB, name="a")
    with pytest.raises(QuotaExceeded, match=r"cuda\.device_backing_bytes") as caught:
        obtain(client, 8 * MIB + 1, name="b")
    details = caught.value.details
    assert details["limit"] == 16 * MIB
    assert (details["needed"], details["free"]) == (10 * MIB, 8 * MIB)
    assert "release-device" in caught.value.remedy
    obtain(client, 8 * MIB, name="b")
    obtain(client, 16 * MIB, name="c", driver=MemoryOpener(UUIDS[1]))


def test_a_device_without_room_says_so_and_nothing_is_left(world: World) -> None:
    (world.device / "total_bytes").write_text(str(5 * MIB))
    client = world.connect()
    obtain(client)
    with pytest.raises(CapacityError) as caught:
        obtain(client, name="b")
    assert caught.value.details == {"needed": TAKEN, "free": MIB, "cuda_error": 2}
    assert [each["name"] for each in world.backings()] == [""]


def test_a_device_that_the_daemon_does_not_see_is_a_clear_error(world: World) -> None:
    (world.device / "refuse_open").touch()
    client = world.connect()
    with pytest.raises(ConfigError, match="none is GPU-"):
        obtain(client)
    assert world.devices() == []
    (world.device / "refuse_open").unlink()

    def can_be_had() -> bool:
        with contextlib.suppress(ConfigError):
            obtain(client)
        return bool(world.backings())

    wait_until(can_be_had, what="another try")


def test_it_is_off_unless_switched_on(daemon: DaemonProcess) -> None:
    with connect(daemon.runtime_dir) as client:
        with pytest.raises(ConfigError, match="allocates no device memory"):
            obtain(client)
        assert client.status()["device"]["devices"] == []


def test_a_text_that_is_no_uuid_is_refused(world: World) -> None:
    with pytest.raises(UsageError, match="not a GPU's UUID"):
        obtain(world.connect(), driver=MemoryOpener("GPU-1"))


def test_i7_a_hung_driver_stops_neither_pings_nor_others(make_world: Callable[..., World]) -> None:
    world = make_world(cuda__device_backing_timeout_s="0.5")
    held = world.connect(group="held")
    backing = obtain(held)
    (world.device / "wedge").touch()
    other = world.connect(group="other")
    with pytest.raises(DeviceError, match="has not answered"):
        obtain(other)
    for _ in range(20):
        other.ping(timeout_s=1.0)
    with pytest.raises(DeviceError, match="has not answered"):
        obtain(other, name="fails at once")
    assert world.devices()[0]["child"] == "silent"
    backing.check()
    (world.device / "wedge").unlink()
    # The memory that came too late goes back, and what was held is as it was.
    wait_until(lambda: [each["group"] for each in world.backings()] == ["held"])
    obtain(other).check()
    backing.check()


def test_i7_a_hung_child_that_holds_nothing_is_replaced(make_world: Callable[..., World]) -> None:
    world = make_world(cuda__device_backing_timeout_s="0.3")
    (world.device / "wedge").touch()
    client = world.connect()
    with pytest.raises(DeviceError, match="answer"):
        obtain(client)
    wait_until(lambda: not world.devices(), what="the child to be killed")
    (world.device / "wedge").unlink()

    def can_be_had() -> bool:
        with contextlib.suppress(DeviceError):
            obtain(client)
        return bool(world.backings())

    wait_until(can_be_had, what="another child")


def test_a_context_that_cannot_free_takes_its_child_with_it(world: World) -> None:
    first, second = world.connect(group="a"), world.connect(group="b")
    going, staying = obtain(first), obtain(second)
    (world.device / "fail_free").touch()
    going.release()
    wait_until(lambda: staying.is_lost, what="the other holder to hear of it")


def test_a_worker_that_dies_while_it_waits_leaves_nothing(
    make_world: Callable[..., World],
) -> None:
    world = make_world(cuda__device_backing_lease_s="0.2")
    (world.device / "wedge").touch()
    namespace = 0
    with RawClient(world.runtime_dir) as client:
        client.hello(group="g")
        namespace = client.open()
        reply = client.ask(
            m.DeviceBackingReply, m.AllocateDeviceBacking, namespace, "", UUIDS[0], SIZE, LAYOUT
        )
        assert (reply.ready, reply.handle) == (False, b"")
    (world.device / "wedge").unlink()
    # This process goes on, and might have it mapped: only its word or its end give it back.
    with RawClient(world.runtime_dir) as client:
        client.hello(group="g")
        fields = (namespace, "", UUIDS[0], "detach")
        assert client.ask(m.CountReply, m.ReleaseDeviceBacking, *fields).count == 1
        world.wait_freed()
        assert client.ask(m.CountReply, m.ReleaseDeviceBacking, *fields).count == 0


def test_a_handle_means_nothing_after_its_memory_was_given_back(world: World) -> None:
    with RawClient(world.runtime_dir) as client:
        client.hello(group="g")
        fields = (client.open(), "", UUIDS[0], SIZE, LAYOUT)
        wait_until(lambda: client.ask(m.DeviceBackingReply, m.AllocateDeviceBacking, *fields).ready)
        reply = client.ask(m.DeviceBackingReply, m.AllocateDeviceBacking, *fields)
        open_memory(reply.handle).close()
        client.ask(m.CountReply, m.ReleaseDeviceBacking, *fields[:3], "give_back")
        world.wait_freed()
        with pytest.raises(OSError, match=r"."):
            open_memory(reply.handle)


# --- binding, and what an operator sees -----------------------------------------------------


def test_views_of_the_binding_functions_lie_on_it_and_a_killed_worker_leaves_its_rows(
    world: World,
) -> None:
    first = bound_worker.WorkerProcess(world.runtime_dir, "cpu")
    world.stack.callback(first.kill)
    assert (first.found["adopted"], first.found["bound"]) == (False, True)
    written = first.tell("write 5")
    assert written["digest"] != first.found["digest"]
    first.kill()
    second = bound_worker.WorkerProcess(world.runtime_dir, "cpu")
    world.stack.callback(second.kill)
    assert second.found == {**first.found, "adopted": True, "digest": written["digest"]}


class Tensor:
    def __init__(self, block_stride: int) -> None:
        self.layers, self.size, self.offset = ["l"], SIZE, 0
        self.layer_stride, self.block_stride, self.host_resident = 8, block_stride, False


class Config:
    kv_cache_groups = ()

    def __init__(self, block_stride: int) -> None:
        self.kv_cache_tensors = [Tensor(block_stride)]

    def num_blocks_of(self, _tensor: Tensor) -> int:
        return 4


def test_an_allocator_finds_rows_of_the_same_configuration_only(world: World) -> None:
    space = open_space(world.connect())
    allocate = DeviceAllocator(space, driver=MemoryOpener())
    allocate(Config(64), DEVICE, SIZE).fill_(6)
    assert allocate.backing is not None
    assert not allocate.backing.adopted
    allocate.backing.close()
    assert int(allocate(Config(64), DEVICE, SIZE)[0]) == 6
    assert allocate.backing.adopted
    allocate.backing.close()
    with pytest.raises(GeometryMismatch):
        allocate(Config(128), DEVICE, SIZE)


def test_an_allocator_falls_back_to_memory_of_its_own(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    space = open_space(world.connect())
    too_much = 64 * MIB
    allocate = DeviceAllocator(space, driver=MemoryOpener())
    tensor = allocate(Config(64), DEVICE, too_much)
    assert (tensor.numel(), bool(tensor.any()), allocate.backing) == (too_much, False, None)
    assert "cuda.device_backing_bytes" in caplog.text
    strict = DeviceAllocator(space, driver=MemoryOpener(), fallback=DeviceFallback.RAISE)
    with pytest.raises(QuotaExceeded):
        strict(Config(64), DEVICE, too_much)


def test_device_memory_is_accounted_for_an_operator(world: World) -> None:
    client = world.connect(group="engine", rank=3)
    obtain(client, name="kv")
    (device,) = world.devices()
    (backing,) = device["backings"]
    assert device["device_uuid"] == UUIDS[0]
    assert (device["context_bytes"], device["used_bytes"]) == (CONTEXT_BYTES, TAKEN)
    assert device["child"] == "open"
    assert backing["holder_pid"] == os.getpid()
    assert backing["holder_session"] == client.session_id
    assert (backing["group"], backing["rank"], backing["name"]) == ("engine", 3, "kv")
    assert (backing["bytes"], backing["state"]) == (TAKEN, "ready")
    shown = world.command("status")
    assert f"device {UUIDS[0]}  4.0 MiB of 16.0 MiB allocated for workers" in shown
    assert "context 476.8 MiB" in shown
    assert f" {os.getpid()} " in shown


def test_a_client_that_leaves_lets_go_of_it(world: World) -> None:
    client = connect(world.runtime_dir)
    obtain(client).tensor.fill_(8)
    client.close()
    assert world.worker().said["first"] == 8


def test_limits_fit_each_other() -> None:
    assert limits.DEVICE_BACKING_ALIGNMENT_BYTES == 2 * MIB
    # A child's pipe takes all orders that can be under way: the loop never waits for it.
    assert limits.MAX_DEVICE_BACKINGS * 2 * 120 <= 64 * limits.KIB
