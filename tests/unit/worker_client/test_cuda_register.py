"""Registration with a CUDA that fails where a test says so."""

from __future__ import annotations

import os

import pytest

from hisparse_service.contract.errors import DeviceError
from worker_client.cuda_register import (
    CudaRegistration,
    CudaUse,
    TorchDriver,
    find_driver,
    register_ranges,
)

RANGES = [(0, 100), (100, 250), (250, 300)]
BASE = 4096


class FakeDriver:
    """Keeps what is registered; the n-th call of a kind gives `code`."""

    def __init__(self, *, fail_register_at=None, fail_unregister_at=None, code=2):
        self.calls = []
        self.registered = {}
        self.pending_error = 0
        self._fail = {"register": fail_register_at, "unregister": fail_unregister_at}
        self._code = code

    def _call(self, kind, *arguments):
        index = sum(call[0] == kind for call in self.calls)
        self.calls.append((kind, *arguments))
        if index == self._fail.get(kind):
            self.pending_error = self._code
            return self._code
        return 0

    def prepare(self):
        self.calls.append(("prepare",))

    def register(self, address, size_bytes):
        code = self._call("register", address, size_bytes)
        if code == 0:
            self.registered[address] = size_bytes
        return code

    def unregister(self, address):
        code = self._call("unregister", address)
        if code == 0:
            del self.registered[address]
        return code

    def clear_error(self):
        self.pending_error = 0


def test_ranges_are_registered_in_order_with_a_current_context_and_undone_in_reverse():
    driver = FakeDriver()
    registration = register_ranges(driver, BASE, RANGES)
    assert driver.calls == [
        ("prepare",), ("register", 4096, 100), ("register", 4196, 150), ("register", 4346, 50),
    ]  # fmt: skip
    assert registration.num_ranges == 3
    registration.close()
    assert driver.calls[4:] == [
        ("prepare",), ("unregister", 4346), ("unregister", 4196), ("unregister", 4096),
    ]  # fmt: skip
    calls = len(driver.calls)
    registration.close()
    assert len(driver.calls) == calls


@pytest.mark.parametrize("step", range(len(RANGES)))
def test_a_range_that_fails_undoes_those_before_and_clears_the_error(step):
    """A pending error comes out of the next kernel launch as a bogus out-of-memory."""
    driver = FakeDriver(fail_register_at=step, code=2)
    with pytest.raises(DeviceError, match="error 2") as caught:
        register_ranges(driver, BASE, RANGES)
    assert driver.registered == {}
    assert driver.pending_error == 0
    assert [call[1] for call in driver.calls if call[0] == "unregister"] == [
        BASE + start for start, _ in reversed(RANGES[:step])
    ]
    assert caught.value.details == {
        "cuda_error": 2, "call": "cudaHostRegister",
        "range_start_bytes": RANGES[step][0], "range_bytes": RANGES[step][1] - RANGES[step][0],
    }  # fmt: skip


@pytest.mark.parametrize("step", range(2))
def test_a_rollback_that_fails_itself_still_tries_every_range(step):
    driver = FakeDriver(fail_register_at=2, fail_unregister_at=step)
    with pytest.raises(DeviceError, match="cudaHostRegister"):
        register_ranges(driver, BASE, RANGES)
    assert sum(call[0] == "unregister" for call in driver.calls) == 2
    assert driver.pending_error == 0


def test_an_interrupt_between_two_ranges_undoes_the_first():
    class Interrupting(FakeDriver):
        def register(self, address, size_bytes):
            if self.registered:
                raise KeyboardInterrupt
            return super().register(address, size_bytes)

    driver = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        register_ranges(driver, BASE, RANGES)
    assert driver.registered == {}


def test_unregistering_tries_every_range_and_reports_the_first_code():
    driver = FakeDriver(fail_unregister_at=0, code=713)
    registration = register_ranges(driver, BASE, RANGES)
    with pytest.raises(DeviceError, match="713"):
        registration.close()
    assert len(driver.registered) == 1
    assert driver.pending_error == 0


def test_a_runtime_that_is_gone_at_exit_is_no_error():
    driver = FakeDriver(fail_unregister_at=0, code=4)
    register_ranges(driver, BASE, RANGES).close()


def test_a_forked_child_does_not_unregister_its_parents_ranges():
    driver = FakeDriver()
    registration = register_ranges(driver, BASE, RANGES)
    child = os.fork()
    if child == 0:
        try:
            registration.close()
            os._exit(len([call for call in driver.calls if call[0] == "unregister"]))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_driver_without_a_device_unless_it_is_required():
    assert find_driver(CudaUse.OFF) is None
    import torch

    if torch.cuda.is_available():
        assert isinstance(find_driver(CudaUse.AUTO), TorchDriver)
    else:
        assert find_driver(CudaUse.AUTO) is None
        with pytest.raises(DeviceError, match="no device"):
            find_driver(CudaUse.REQUIRED)


def test_an_empty_registration_touches_no_driver():
    driver = FakeDriver()
    CudaRegistration(driver, []).close()
    assert driver.calls == []
