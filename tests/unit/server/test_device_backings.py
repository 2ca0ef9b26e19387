"""Who holds device memory and for how long: every state, pids that cannot be seen, a clock."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    DeviceBackingTaken,
    DeviceError,
    HiSparseError,
    IllegalTransition,
)
from hisparse_service.pool import device_process
from hisparse_service.pool.device_protocol import Answer, Order
from hisparse_service.server.device_backings import DeviceBackings, DeviceOptions
from hisparse_service.server.device_records import (
    ON_DEVICE,
    TRANSITIONS,
    BackingEvent,
    BackingKey,
    BackingState,
    DeviceBacking,
    Holder,
)

UUID = "GPU-00000000-0000-0000-0000-000000000001"
KEY = BackingKey(1, "g", 0, "", UUID)
LAYOUT = bytes(16)
SIZE = limits.DEVICE_BACKING_ALIGNMENT_BYTES


class RecordedProcess:
    """A device child that does nothing until the test says what it answers."""

    made: ClassVar[list[RecordedProcess]] = []

    def __init__(self, device_uuid: str, **callbacks: Any) -> None:
        self.device_uuid, self.pid = device_uuid, 4711
        self._on_answer, self._on_end = callbacks["on_answer"], callbacks["on_end"]
        self.orders: list[Order] = []
        self.is_ended = False
        self.made.append(self)

    def start(self) -> None:
        self.answer(Answer(event="opened", device_uuid=self.device_uuid, context_bytes=5))

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def answer(self, answer: Answer) -> None:
        self._on_answer(self, answer)

    def die(self) -> None:
        self._on_end(self, DeviceError("it died"))

    def end(self, _reason: HiSparseError) -> None:
        self.is_ended = True

    abandon = end


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordedProcess]:
    monkeypatch.setattr(device_process, "DeviceProcess", RecordedProcess)
    RecordedProcess.made = []
    return RecordedProcess.made


@pytest.fixture
def devices() -> DeviceBackings:
    return DeviceBackings(DeviceOptions(limit_bytes=64 * SIZE, lease_s=100, timeout_s=10))


def ask(
    devices: DeviceBackings, *, session: int = 1, pid: int = 0, now_s: float = 0.0
) -> DeviceBacking:
    return devices.allocate(
        KEY, size_bytes=SIZE, layout=LAYOUT, may_create=True, session_id=session, pid=pid,
        now_s=now_s,
    )  # fmt: skip


def make_ready(devices: DeviceBackings, recorded: list[RecordedProcess], **who: Any) -> int:
    backing = ask(devices, **who)
    handle = bytes(limits.MEMORY_HANDLE_BYTES)
    recorded[-1].answer(
        Answer(event="allocated", backing_id=backing.backing_id, handle=handle)
    )  # fmt: skip
    assert backing.state is BackingState.READY
    return backing.backing_id


def states(devices: DeviceBackings) -> list[str]:
    found = devices.describe(0.0)["devices"]
    return [backing["state"] for device in found for backing in device["backings"]]


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        yield child
        child.kill()


def test_every_state_and_event_that_the_table_does_not_have_is_refused(
    devices: DeviceBackings,
) -> None:
    backing = ask(devices)
    for state, event in itertools.product(BackingState, BackingEvent):
        backing.state = state
        if (state, event) in TRANSITIONS:
            backing.move(event)
            assert backing.state is TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalTransition) as caught:
                backing.move(event)
            assert caught.value.details["state"] == state.value
    # A child's death is expected wherever memory may be there, or nothing could follow it.
    assert {state for state in BackingState if (state, BackingEvent.CHILD_DIED) in TRANSITIONS} == {
        *ON_DEVICE
    }


def test_an_unseen_process_is_gone_when_its_connection_is(
    devices: DeviceBackings, recorded: list[RecordedProcess]
) -> None:
    first = make_ready(devices, recorded)
    devices.session_ended(1, may_live=False, now_s=5.0)
    assert ask(devices, session=2, now_s=6.0).backing_id == first


def test_an_unseen_process_that_fell_silent_keeps_it_for_the_quarantine(
    devices: DeviceBackings, recorded: list[RecordedProcess]
) -> None:
    first = make_ready(devices, recorded)
    devices.session_ended(1, may_live=True, now_s=5.0)
    with pytest.raises(DeviceBackingTaken):
        ask(devices, session=2, now_s=4.0 + limits.QUARANTINE_S)
    devices.tick(4.0 + limits.QUARANTINE_S, is_draining=False)
    assert states(devices) == ["ready"], "the lease is over, but it may still be used"
    assert ask(devices, session=2, now_s=5.0 + limits.QUARANTINE_S).backing_id == first


def test_the_lease_runs_from_the_end_of_the_holder(
    devices: DeviceBackings, recorded: list[RecordedProcess]
) -> None:
    make_ready(devices, recorded)
    devices.tick(1_000.0, is_draining=False)
    devices.session_ended(1, may_live=False, now_s=1_000.0)
    devices.tick(1_099.0, is_draining=False)
    assert states(devices) == ["ready"]
    devices.tick(1_100.0, is_draining=False)
    assert states(devices) == ["freeing"]
    assert [order.do for order in recorded[0].orders] == ["allocate", "free"]
    assert devices.describe(0.0)["devices"][0]["used_bytes"] == SIZE, "not before it is freed"
    recorded[0].answer(Answer(event="freed", backing_id=1))
    assert states(devices) == []
    devices.tick(1_100.0 + limits.DEVICE_CHILD_LINGER_S, is_draining=False)
    assert recorded[0].is_ended
    assert devices.describe(0.0)["devices"] == []


def test_a_namespace_that_goes_does_not_take_memory_from_under_a_living_process(
    devices: DeviceBackings, recorded: list[RecordedProcess], living: subprocess.Popen[bytes]
) -> None:
    make_ready(devices, recorded, pid=living.pid)
    devices.namespace_gone(1)
    devices.tick(1.0, is_draining=False)
    assert states(devices) == ["ready"]
    living.kill()
    living.wait()
    devices.tick(2.0, is_draining=False)
    assert states(devices) == ["freeing"]


def test_a_namespace_that_goes_takes_what_nobody_uses_with_it(
    devices: DeviceBackings, recorded: list[RecordedProcess]
) -> None:
    make_ready(devices, recorded)
    devices.session_ended(1, may_live=False, now_s=1.0)
    devices.namespace_gone(1)
    assert states(devices) == ["freeing"]
    assert ask(devices, session=2).backing_id == 2, "the number may mean another namespace now"


def test_answers_of_a_child_that_was_given_up_change_nothing(
    devices: DeviceBackings, recorded: list[RecordedProcess]
) -> None:
    make_ready(devices, recorded)
    recorded[0].die()
    assert devices.lost_of(1) == [1]
    again = ask(devices)
    assert (again.backing_id, devices.lost_of(1)) == (2, [])
    recorded[0].answer(Answer(event="allocated", backing_id=2, handle=bytes(64)))
    recorded[0].die()
    assert again.state is BackingState.ALLOCATING


@pytest.mark.parametrize(
    "nonsense",
    [
        Answer(event="freed", backing_id=99),
        Answer(event="allocated", backing_id=1, handle=bytes(63)),
        Answer(event="freed", backing_id=1),
        Answer(event="opened", device_uuid="GPU-" + "9" * 32),
        Answer(event="opened", device_uuid="nonsense"),
    ],
)
def test_i8_a_child_that_talks_nonsense_is_ended(
    devices: DeviceBackings, recorded: list[RecordedProcess], nonsense: Answer
) -> None:
    ask(devices)
    recorded[0].answer(nonsense)
    assert recorded[0].is_ended


def test_a_failure_that_nobody_fetches_is_forgotten(
    devices: DeviceBackings, recorded: list[RecordedProcess]
) -> None:
    ask(devices)
    recorded[0].answer(Answer(event="refused", backing_id=1, code="CapacityError", message="full"))
    assert states(devices) == ["failed"]
    devices.tick(59.0, is_draining=False)
    assert states(devices) == ["failed"]
    devices.tick(61.0, is_draining=False)
    assert states(devices) == []


def test_a_holder_owns_one_descriptor_and_gives_it_back(living: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    holder = Holder(1, living.pid)
    assert holder.may_use(0.0)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    living.kill()
    living.wait()
    assert not holder.may_use(0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not Holder(1, living.pid).may_use(0.0), "its process was gone before"
