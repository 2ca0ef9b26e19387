"""One device child and its process: failures, deaths and nonsense that never reach the loop.

Without a GPU; on one: tests/gpu/test_device_backing_cuda.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from helpers import wait_until

from hisparse_service.contract.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    HiSparseError,
    LeaseLost,
)
from hisparse_service.contract.limits import MEMORY_HANDLE_BYTES
from hisparse_service.pool import cuda
from hisparse_service.pool.device_child import BindingsDeviceDriver, DeviceOwner
from hisparse_service.pool.device_process import DeviceProcess
from hisparse_service.pool.device_protocol import Answer, Order

UUID = "GPU-00000000-0000-0000-0000-000000000001"
SAY = "import sys, time\nsay = lambda text: print(text, flush=True)\n"
WAIT = "sys.stdin.read()\n"


class Loop:
    """The control loop's part: takes calls, runs them here."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.answers: list[Answer] = []
        self.ends: list[HiSparseError] = []
        self.processes: list[DeviceProcess] = []

    def start(self, program: str | None = None, command: list[str] | None = None) -> DeviceProcess:
        if program is not None:
            command = [sys.executable, "-c", SAY + program]
        process = DeviceProcess(
            UUID, call_soon=self.calls.append, command=command,
            on_answer=lambda _, answer: self.answers.append(answer),
            on_end=lambda _, error: self.ends.append(error),
        )  # fmt: skip
        self.processes.append(process)
        process.start()
        return process

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()

    def wait(self, condition: Callable[[], object]) -> None:
        def is_met() -> bool:
            self.run()
            return bool(condition())

        wait_until(is_met)

    def wait_end(self) -> HiSparseError:
        self.wait(lambda: self.ends)
        assert len(self.ends) == 1
        return self.ends[0]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    for process in made.processes:
        process.abandon(LeaseLost("the test is over"))
        assert process.wait_ended(30)


def test_orders_given_before_the_child_runs_reach_it_in_order(loop: Loop) -> None:
    process = loop.start("for line in sys.stdin: print(line, end='', file=sys.stderr)\n")
    process.send(Order(do="allocate", backing_id=1, size_bytes=5))
    process.send(Order(do="free", backing_id=1))
    echo = SAY + (
        "import json\n"
        "for line in sys.stdin:\n"
        "    order = json.loads(line)\n"
        "    say(json.dumps({'event': 'freed', 'backing_id': order['backing_id']}))\n"
    )
    other = loop.start(command=[sys.executable, "-c", echo])
    for number in range(1, 200):
        other.send(Order(do="free", backing_id=number))
    loop.wait(lambda: len(loop.answers) == 199)
    assert [answer.backing_id for answer in loop.answers] == list(range(1, 200))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("say('warning: something')\n" + WAIT, "is no answer"),
        ("say('[1]')\n" + WAIT, "is no answer"),
        ('say(\'{"event": "dance"}\')\n' + WAIT, "is no answer"),
        ("say('x' * 200000)\n" + WAIT, "is no answer"),
        ("sys.exit(3)\n", "code 3"),
        ("import os; os.kill(os.getpid(), 9)\n", "code -9"),
        ('say(\'{"event": "failed", "code": "DeviceError", "message": "m"}\')\n', "m"),
    ],
)
def test_a_child_that_misbehaves_is_ended_and_says_why(loop: Loop, program: str, says: str) -> None:
    process = loop.start(program)
    assert says in str(loop.wait_end())
    assert process.wait_ended(30)


def test_i7_a_child_that_does_not_read_is_killed_and_sending_never_waits(loop: Loop) -> None:
    process = loop.start("import time\nwhile True: time.sleep(1)\n")
    loop.wait(lambda: process.pid)
    for number in range(5_000):
        process.send(Order(do="free", backing_id=number))
    assert "does not read" in str(loop.wait_end())


def test_an_abandoned_child_is_killed_and_not_heard_any_more(loop: Loop) -> None:
    process = loop.start('say(\'{"event": "started"}\')\n' + WAIT)
    loop.wait(lambda: loop.answers)
    process.abandon(LeaseLost("enough"))
    assert process.wait_ended(30)
    loop.run()
    assert loop.ends == []


def test_a_command_that_cannot_be_run_is_a_failure(loop: Loop) -> None:
    loop.start(command=["/nowhere/python"])
    assert isinstance(loop.wait_end(), DeviceError)


def test_without_a_gpu_the_real_child_says_what_to_do(loop: Loop) -> None:
    if cuda.gpu_visible():
        pytest.skip("there is a GPU")
    loop.start()
    error = loop.wait_end()
    assert isinstance(error, ConfigError), error
    assert "cuda.device_backing_bytes" in error.remedy
    assert [answer.event for answer in loop.answers] == ["started"]


def test_the_real_child_outlives_the_signals_that_make_a_daemon_drain(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and a stopping unit reach it too, while workers still use its memory."""
    from hisparse_service.testing.device import COMMAND, DIRECTORY_VARIABLE

    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    process = loop.start(command=COMMAND)
    loop.wait(lambda: "opened" in [answer.event for answer in loop.answers])
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    process.send(Order(do="allocate", backing_id=1, size_bytes=4096))
    loop.wait(lambda: [answer.event for answer in loop.answers][-1] == "allocated")


# --- the driver -----------------------------------------------------------------------------


class Code(int):
    @property
    def name(self) -> str:
        return f"CUDA_ERROR_{int(self)}"


class StandInUuid:
    def __init__(self, index: int) -> None:
        self.bytes = bytes(15) + bytes([index])


class StandInHandle:
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(bytes(range(64)), 64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.buffer)


class StandInCuda:
    """The calls of cuda.bindings.driver that the driver makes; `fail` maps a name to a code."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., tuple[object, ...]]:
        def call(*arguments: object) -> tuple[object, ...]:
            self.calls.append(name)
            if name in self.fail:
                return (Code(self.fail[name]), None)
            if name == "cuDeviceGetUuid":
                return (Code(0), StandInUuid(int(str(arguments[0]))))
            values: dict[str, tuple[object, ...]] = {
                "cuDeviceGetCount": (2,),
                "cuDeviceGet": arguments,
                "cuDeviceTotalMem": (100,),
                "cuDevicePrimaryCtxRetain": ("context",),
                "cuMemAlloc": (4096,),
                "cuMemGetInfo": (60, 100),
                "cuIpcGetMemHandle": (StandInHandle(),),
            }
            return (Code(0), *values.get(name, ()))

        return call


@pytest.fixture
def stand_in() -> StandInCuda:
    return StandInCuda()


@pytest.fixture
def driver(stand_in: StandInCuda) -> BindingsDeviceDriver:
    pytest.importorskip("cuda.bindings")
    made = BindingsDeviceDriver()
    made._cuda = stand_in
    return made


def test_the_device_is_found_by_its_uuid_whatever_its_index(
    driver: BindingsDeviceDriver, stand_in: StandInCuda
) -> None:
    opened = driver.open(UUID)
    assert (opened.event, opened.device_uuid, opened.total_bytes) == ("opened", UUID, 100)
    assert "cuCtxSetCurrent" in stand_in.calls
    with pytest.raises(ConfigError, match=r"2 CUDA devices, none is GPU-.*0009"):
        driver.open("GPU-00000000-0000-0000-0000-000000000009")


def test_memory_is_zeroed_before_its_handle_leaves(
    driver: BindingsDeviceDriver, stand_in: StandInCuda
) -> None:
    address, handle = driver.allocate(4096)
    assert (address, handle) == (4096, bytes(range(MEMORY_HANDLE_BYTES)))
    assert stand_in.calls == ["cuMemAlloc", "cuMemsetD8", "cuCtxSynchronize", "cuIpcGetMemHandle"]


def test_memory_that_cannot_be_exported_is_freed(
    driver: BindingsDeviceDriver, stand_in: StandInCuda
) -> None:
    stand_in.fail = {"cuIpcGetMemHandle": 801}
    with pytest.raises(DeviceError) as caught:
        driver.allocate(4096)
    assert caught.value.details["cuda_error"] == 801
    assert stand_in.calls[-1] == "cuMemFree"


def test_a_full_device_is_a_lack_of_capacity_with_both_numbers(
    driver: BindingsDeviceDriver, stand_in: StandInCuda
) -> None:
    stand_in.fail = {"cuMemAlloc": 2}
    answers: list[Answer] = []
    owner = DeviceOwner(driver, answers.append)
    owner.carry_out(Order(do="allocate", backing_id=7, size_bytes=80))
    (answer,) = answers
    assert (answer.event, answer.backing_id, answer.code) == ("refused", 7, CapacityError.__name__)
    assert answer.details == {"needed": 80, "free": 60, "cuda_error": 2}
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer


def test_a_failed_free_ends_the_child(driver: BindingsDeviceDriver, stand_in: StandInCuda) -> None:
    """The context is broken, and all that lies in it."""
    owner = DeviceOwner(driver, [].append)
    owner.carry_out(Order(do="allocate", backing_id=1, size_bytes=1))
    stand_in.fail = {"cuMemFree": 700}
    with pytest.raises(DeviceError):
        owner.carry_out(Order(do="free", backing_id=1))
