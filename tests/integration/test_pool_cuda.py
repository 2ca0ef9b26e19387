"""The CUDA child and its registrar: failures, hangs and deaths that never reach the daemon.

Without a GPU. What needs one is marked `gpu`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hisparse_service.contract.errors import (
    ConfigError,
    DeviceError,
    ForeignSegment,
    UsageError,
)
from hisparse_service.contract.limits import MAX_REGISTRATION_BYTES, MIB
from hisparse_service.pool import cuda, cuda_child, os_calls
from hisparse_service.pool.cuda import CudaRegistrar, RegistrarState, RegistrarStatus
from hisparse_service.pool.cuda_child import Report, ranges_of, register_segment
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.segment_file import open_existing
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.testing.faults import FaultPlan
from hisparse_service.testing.segments import own_instance

SIZE = 4 * MIB
DEADLINE_S = 30.0


@pytest.fixture
def pool() -> Iterator[Pool]:
    with own_instance("cuda") as instance:
        made = Pool.create_or_adopt(PoolSettings(instance=instance, pool_bytes=SIZE))
        yield made
        made.release()


@pytest.fixture
def registrars() -> Iterator[list[CudaRegistrar]]:
    made: list[CudaRegistrar] = []
    yield made
    for registrar in made:
        registrar.close()
        assert registrar.wait_ended(DEADLINE_S)


def start(
    registrars: list[CudaRegistrar], pool: Pool, program: str | None = None, **options
) -> CudaRegistrar:
    """A registrar whose child runs `program`, or the real one."""
    if program is not None:
        options["command"] = [sys.executable, "-c", program]
    registrar = CudaRegistrar(pool, **options)
    registrars.append(registrar)
    registrar.start()
    return registrar


def poll_until(
    registrar: CudaRegistrar, reached: Callable[[RegistrarStatus], bool]
) -> RegistrarStatus:
    deadline = time.monotonic() + DEADLINE_S
    while not reached(status := registrar.poll()):
        assert time.monotonic() < deadline, status
        registrar.wait_ended(0.01)
        os.sched_yield()
    return status


def in_state(*states: RegistrarState) -> Callable[[RegistrarStatus], bool]:
    return lambda status: status.state in states


SAY = "import sys, time, json\nsay = lambda **r: print(json.dumps(r), flush=True)\n"
WAIT = "sys.stdin.read()\n"


# --- the protocol, parent side --------------------------------------------------------------


def test_reports_become_the_status(pool: Pool, registrars: list[CudaRegistrar]) -> None:
    program = SAY + (
        "say(event='started')\n"
        "say(event='progress', registered_bytes=1000)\n"
        f"say(event='ready', registered_bytes={SIZE}, ranges=2, gpu_bytes=500)\n"
    )
    registrar = start(registrars, pool, program + WAIT)
    status = poll_until(registrar, in_state(RegistrarState.READY))
    assert (status.registered_bytes, status.total_bytes, status.gpu_bytes) == (SIZE, SIZE, 500)
    assert status.error is None


def test_a_cuda_failure_keeps_its_number(pool: Pool, registrars: list[CudaRegistrar]) -> None:
    program = SAY + (
        "say(event='started')\n"
        "say(event='failed', code='DeviceError', message='register failed', cuda_error=2)\n"
    )
    status = poll_until(start(registrars, pool, program + WAIT), in_state(RegistrarState.FAILED))
    assert isinstance(status.error, DeviceError)
    assert status.cuda_error == 2
    assert status.registered_bytes == 0


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("print('warning: something', flush=True)\n" + WAIT, "not a report"),
        ("print('[1]', flush=True)\n" + WAIT, "not a report"),
        ("print('x' * 200000, flush=True)\n" + WAIT, "not a report"),
        ("say(event='ready')\n" + WAIT, "while starting"),
        ("say(event='dance')\n" + WAIT, "'dance'"),
        ("sys.exit(3)\n", "code 3"),
        ("import os; os.kill(os.getpid(), 9)\n", "code -9"),
        ("say(event='started'); say(event='ready'); say(event='progress')\n" + WAIT, "while ready"),
    ],
)
def test_a_child_that_misbehaves_is_a_failure_and_is_ended(
    pool: Pool, registrars: list[CudaRegistrar], program: str, says: str
) -> None:
    registrar = start(registrars, pool, SAY + program)
    status = poll_until(registrar, in_state(RegistrarState.FAILED))
    assert status.error is not None
    assert says in str(status.error)
    assert registrar.wait_ended(DEADLINE_S)


def test_a_child_that_dies_after_it_was_ready_is_told(
    pool: Pool, registrars: list[CudaRegistrar]
) -> None:
    program = "say(event='started'); say(event='ready', registered_bytes=5)\n"
    status = poll_until(start(registrars, pool, SAY + program), in_state(RegistrarState.FAILED))
    assert "no longer registered" in str(status.error)


@pytest.mark.parametrize(
    "program",
    [
        "time.sleep(1000)\n",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(event='started')\n"
        "while True: pass\n",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n",
    ],
    ids=["silent", "spinning", "stopped"],
)
def test_i7_a_child_that_hangs_is_killed_at_the_limit_and_poll_never_waits(
    pool: Pool, registrars: list[CudaRegistrar], program: str
) -> None:
    now = [0.0]
    registrar = start(registrars, pool, SAY + program, timeout_s=10.0, clock=lambda: now[0])
    assert registrar.poll().state in (RegistrarState.STARTING, RegistrarState.REGISTERING)
    now[0] = 9.0
    assert registrar.poll().state is not RegistrarState.FAILED
    now[0] = 100.0
    status = registrar.poll()
    if status.state is not RegistrarState.FAILED:
        # Its `started` came in just before and moved the limit.
        now[0] = 200.0
        status = registrar.poll()
    assert status.state is RegistrarState.FAILED
    assert "was killed" in str(status.error)
    assert registrar.wait_ended(DEADLINE_S)


def test_closing_ends_the_child_and_is_idempotent(
    pool: Pool, registrars: list[CudaRegistrar]
) -> None:
    registrar = start(registrars, pool, SAY + "say(event='started')\n" + WAIT)
    poll_until(registrar, in_state(RegistrarState.REGISTERING))
    registrar.close()
    registrar.close()
    assert registrar.wait_ended(DEADLINE_S)
    status = registrar.poll()
    assert (status.state, status.error) == (RegistrarState.CLOSED, None)


def test_closing_at_once_leaves_no_child(pool: Pool, registrars: list[CudaRegistrar]) -> None:
    registrar = start(registrars, pool, SAY + WAIT)
    registrar.close()
    assert registrar.wait_ended(DEADLINE_S)


def test_a_registrar_starts_once(pool: Pool, registrars: list[CudaRegistrar]) -> None:
    registrar = start(registrars, pool, SAY + WAIT)
    with pytest.raises(UsageError, match="started before"):
        registrar.start()


def test_a_command_that_cannot_be_run_is_a_failure(
    pool: Pool, registrars: list[CudaRegistrar]
) -> None:
    registrar = start(registrars, pool, command=["/nowhere/python"])
    status = poll_until(registrar, in_state(RegistrarState.FAILED))
    assert isinstance(status.error, ConfigError)


# --- the real child -------------------------------------------------------------------------


def test_without_a_gpu_the_real_child_says_what_to_do(
    pool: Pool, registrars: list[CudaRegistrar]
) -> None:
    if cuda.gpu_visible():
        pytest.skip("there is a GPU")
    registrar = start(registrars, pool)
    status = poll_until(registrar, in_state(RegistrarState.FAILED))
    assert isinstance(status.error, ConfigError), status.error
    assert "cuda.register" in status.error.remedy
    assert registrar.wait_ended(DEADLINE_S)


@pytest.mark.gpu
def test_the_pool_is_registered_in_ranges(pool: Pool, registrars: list[CudaRegistrar]) -> None:
    if not cuda.gpu_visible():
        pytest.skip("needs a CUDA device")
    registrar = start(registrars, pool, max_range_bytes=MIB)
    status = poll_until(registrar, in_state(RegistrarState.READY, RegistrarState.FAILED))
    assert status.error is None
    assert status.registered_bytes == SIZE
    assert status.gpu_bytes > 0


def test_explicitly_on_without_gpu_or_bindings_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_bindings_installed", lambda: True)
    with pytest.raises(ConfigError, match="no NVIDIA GPU"):
        cuda.require_available(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not cuda.gpu_visible(tmp_path)
    (tmp_path / "nvidia0").touch()
    cuda.require_available(tmp_path)
    monkeypatch.setattr(cuda, "_bindings_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"cuda\.bindings is not installed"):
        cuda.require_available(tmp_path)


HANGING_DRIVER = """
import sys, time
from hisparse_service.pool import cuda_child
class Hanging:
    def open(self, gpu):
        time.sleep(1000)
cuda_child.BindingsDriver = Hanging
sys.exit(cuda_child.main(sys.argv[1:]))
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:],
                          "--parent-pid", str(os.getpid())],
                         stdin=STDIN, stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
time.sleep(1000)
"""


def child_options(pool: Pool) -> list[str]:
    return [
        "--segment", pool.segment_name, "--device", str(pool.device),
        "--inode", str(pool.inode), "--gpu", "0",
    ]  # fmt: skip


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.parametrize("stdin", ["subprocess.PIPE", "None"], ids=["pipe", "signal_only"])
def test_i6_a_child_in_a_hung_driver_call_ends_when_its_parent_is_killed(
    pool: Pool, stdin: str
) -> None:
    """With `None` the child's input is this test's pipe, which stays open: the signal is alone."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("STDIN", stdin), HANGING_DRIVER,
         *child_options(pool)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid, report = parent.stdout.readline().decode().split(" ", 1)
    assert json.loads(report) == {"event": "started"}
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not gone(int(pid)):
            assert time.monotonic() < deadline
            os.sched_yield()
    finally:
        parent.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_i6_the_end_of_its_input_alone_ends_a_child_in_a_hung_driver_call(pool: Pool) -> None:
    options = [*child_options(pool), "--parent-pid", str(os.getpid())]
    with subprocess.Popen(
        [sys.executable, "-c", HANGING_DRIVER, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert b"started" in child.stdout.readline()
        assert child.stdin is not None
        try:
            child.stdin.close()
            assert child.wait(DEADLINE_S) == 0
        finally:
            child.kill()


def test_a_child_whose_parent_is_gone_already_does_nothing(pool: Pool) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hisparse_service.pool.cuda_child", *child_options(pool),
         "--parent-pid", "1000000000"],
        capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"")


def test_the_child_refuses_a_later_segment_under_the_same_name(pool: Pool) -> None:
    segment = cuda_child.open_expected(pool.segment_name, device=pool.device, inode=pool.inode)
    segment.close()
    with pytest.raises(ForeignSegment, match="another object"):
        cuda_child.open_expected(pool.segment_name, device=pool.device, inode=pool.inode + 1)
    with pytest.raises(ForeignSegment, match="cannot be opened"):
        cuda_child.open_expected("/hisparse-none-here", device=1, inode=1)


class RecordingDriver:
    """Stands for CUDA; fails the nth registration."""

    def __init__(self, *, fail_at: int = 0) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fail_at = fail_at

    def open(self, gpu: int) -> None:
        self.gpu = gpu

    def register(self, address: int, length_bytes: int) -> None:
        self.calls.append((address, length_bytes))
        if len(self.calls) == self.fail_at:
            raise DeviceError("cuMemHostRegister failed", cuda_error=2, call="cuMemHostRegister")

    def gpu_bytes(self) -> int:
        return 123


def run_registration(pool: Pool, driver: RecordingDriver) -> list[Report]:
    reports: list[Report] = []
    segment = open_existing(pool.segment_name)
    try:
        register_segment(segment, driver, gpu=3, max_range_bytes=MIB + 4096, report=reports.append)
    finally:
        segment.close()
    return reports


def test_all_of_the_segment_is_registered_range_by_range_with_progress(pool: Pool) -> None:
    driver = RecordingDriver()
    reports = run_registration(pool, driver)
    base = driver.calls[0][0]
    step = MIB + 4096
    assert [(address - base, length) for address, length in driver.calls] == [
        (0, step), (step, step), (2 * step, step), (3 * step, SIZE - 3 * step)
    ]  # fmt: skip
    assert driver.gpu == 3
    assert [report.registered_bytes for report in reports] == [
        step, 2 * step, 3 * step, SIZE, SIZE
    ]  # fmt: skip
    assert reports[-1] == Report(event="ready", registered_bytes=SIZE, ranges=4, gpu_bytes=123)


def test_a_failed_range_ends_the_registration_with_its_number(pool: Pool) -> None:
    driver = RecordingDriver(fail_at=2)
    with pytest.raises(DeviceError) as error:
        run_registration(pool, driver)
    assert len(driver.calls) == 2
    assert cuda_child._failure(error.value).cuda_error == 2


def test_pages_that_cannot_be_touched_end_the_registration(pool: Pool) -> None:
    driver = RecordingDriver()
    with (
        FaultPlan().fail_nth("os.madvise", error=errno.EFAULT),
        pytest.raises(OSError, match="madvise"),
    ):
        run_registration(pool, driver)
    assert driver.calls == []


@pytest.mark.parametrize("size", [4096, MAX_REGISTRATION_BYTES, 5 * MAX_REGISTRATION_BYTES + 4096])
def test_ranges_tile_and_none_is_longer_than_the_limit(size: int) -> None:
    ranges = ranges_of(size, MAX_REGISTRATION_BYTES)
    assert sum(length for _offset, length in ranges) == size
    assert max(length for _offset, length in ranges) <= MAX_REGISTRATION_BYTES
    assert all(before[0] + before[1] == after[0] for before, after in itertools.pairwise(ranges))


@pytest.mark.parametrize("limit", [0, 4095, -4096])
def test_a_range_that_does_not_end_on_a_page_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError):
        ranges_of(8192, limit)


def test_the_calls_that_python_lacks_report_their_errno() -> None:
    with pytest.raises(OSError, match="madvise") as error:
        os_calls.madvise(1, 4096, os_calls.MADV_POPULATE_WRITE)
    assert error.value.errno == errno.EINVAL
