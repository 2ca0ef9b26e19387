"""Register a worker's mapping with CUDA, so that kernels can read host memory in place.

Order, which HostPool and Namespace keep: map, touch the page tables, take the registration turn,
register range by range. A range that fails undoes the ones before it, in reverse, and clears the
CUDA error state: a pending error would come out of the next kernel launch as a bogus out-of-memory.
A pool that kernels read and that is not registered is an error, never a warning.

`RegistrationDriver` is the seam to CUDA, small enough that a test can fail each of its steps.
Registration needs a current context on the calling thread, so it happens on the thread that
attaches, never on the heartbeat thread. torch is imported only where a CUDA device may be there.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from hisparse_service.contract.errors import DeviceError

_PORTABLE: Final = 1
_MAPPED: Final = 2
CUDA_SUCCESS: Final = 0
_RUNTIME_UNLOADING: Final = 4
"""cudaErrorCudartUnloading: the process ends and the driver has let go of everything."""


class CudaUse(enum.Enum):
    """Whether `Namespace.attach` registers the mapping with CUDA."""

    AUTO = "auto"
    """Where a CUDA device is visible; a failure there is an error."""
    REQUIRED = "required"
    OFF = "off"


class RegistrationDriver(Protocol):
    """The CUDA calls that registration needs. Codes are cudaError_t numbers; 0 is success."""

    def prepare(self) -> None:
        """Make the device's context current on this thread."""

    def register(self, address: int, size_bytes: int) -> int:
        """Page-lock [address, address + size_bytes) for every context, mapped for the device."""

    def unregister(self, address: int) -> int:
        """Undo one `register`."""

    def clear_error(self) -> None:
        """Take the pending error away from this thread."""


class TorchDriver:
    """CUDA's runtime as torch loaded it: one library, so one error state.

    Raises:
        DeviceError: torch has no CUDA, or sees no device.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(
                "CUDA was required and torch sees no device",
                remedy="Install a CUDA build of torch and a driver, or attach with CudaUse.OFF",
            )
        self._torch: Any = torch
        self._device = torch.cuda.current_device()
        self._runtime: Any = self._torch.cuda.cudart()
        self._take_error = _loaded_cudart_get_last_error()

    def prepare(self) -> None:
        """Make the device's primary context current on this thread."""
        self._torch.cuda.set_device(self._device)
        self._torch.cuda.current_stream(self._device).query()

    def register(self, address: int, size_bytes: int) -> int:
        """`cudaHostRegister`, portable and mapped. The GIL is released meanwhile."""
        return int(self._runtime.cudaHostRegister(address, size_bytes, _PORTABLE | _MAPPED))

    def unregister(self, address: int) -> int:
        """`cudaHostUnregister`."""
        return int(self._runtime.cudaHostUnregister(address))

    def clear_error(self) -> None:
        """`cudaGetLastError`, which torch does not export."""
        if self._take_error is not None:
            self._take_error()


def _loaded_cudart_get_last_error() -> Any:
    """`cudaGetLastError` of the libcudart that is loaded already; None where there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.partition("/")
        if "libcudart" in path[2].rpartition("/")[2]:
            return ctypes.CDLL("/" + path[2]).cudaGetLastError
    return None


def find_driver(use: CudaUse) -> RegistrationDriver | None:
    """The driver to register with; None where there is nothing to do.

    Raises:
        DeviceError: REQUIRED and there is no CUDA device.
    """
    if use is CudaUse.OFF:
        return None
    if use is CudaUse.AUTO:
        # Importing torch to learn that there is no GPU costs a second: look for the driver first.
        if "torch" not in sys.modules and not Path("/dev/nvidiactl").exists():
            return None
        import torch

        if not torch.cuda.is_available():
            return None
    return TorchDriver()


class CudaRegistration:
    """Ranges of one mapping that are registered; the owner of their registration.

    Made by `register_ranges`. Any thread may close it, once nothing on the device reads the memory.
    """

    def __init__(self, driver: RegistrationDriver, addresses: list[int]) -> None:
        self._driver = driver
        self._addresses = addresses
        self._pid = os.getpid()

    @property
    def num_ranges(self) -> int:
        """Ranges registered now."""
        return len(self._addresses)

    def close(self) -> None:
        """Unregister in reverse order. Idempotent; every range is tried.

        Raises:
            DeviceError: With the number of the first failure.
        """
        addresses, self._addresses = self._addresses, []
        if not addresses or os.getpid() != self._pid:
            return  # a forked child has the mapping but not the registration
        self._driver.prepare()
        first_code = _undo(self._driver, addresses)
        if first_code not in (CUDA_SUCCESS, _RUNTIME_UNLOADING):
            raise _device_error(first_code, "cudaHostUnregister", f"{len(addresses)} ranges")


def register_ranges(
    driver: RegistrationDriver, base_address: int, ranges: Sequence[tuple[int, int]]
) -> CudaRegistration:
    """Register each [start, end) of a mapping, all or none.

    Args:
        driver: The CUDA calls.
        base_address: Where offset 0 of the ranges is mapped in this process.
        ranges: In bytes from there, in order.

    Raises:
        DeviceError: A range could not be registered; none of them is registered any more, and the
            error state is clear. Details: cuda_error, call, range_start_bytes, range_bytes.
    """
    driver.prepare()
    done: list[int] = []
    try:
        for start, end in ranges:
            code = driver.register(base_address + start, end - start)
            if code != CUDA_SUCCESS:
                raise _device_error(
                    code, "cudaHostRegister", f"bytes [{start}, {end})",
                    range_start_bytes=start, range_bytes=end - start,
                )  # fmt: skip
            done.append(base_address + start)
    except BaseException:
        _undo(driver, done)
        driver.clear_error()
        raise
    return CudaRegistration(driver, done)


def _undo(driver: RegistrationDriver, addresses: list[int]) -> int:
    """Unregister in reverse, all of them. Returns the first code that is no success."""
    first_code = CUDA_SUCCESS
    for address in reversed(addresses):
        code = driver.unregister(address)
        if code != CUDA_SUCCESS and first_code == CUDA_SUCCESS:
            first_code = code
    if first_code != CUDA_SUCCESS:
        driver.clear_error()
    return first_code


def _device_error(code: int, call: str, what: str, **details: int) -> DeviceError:
    return DeviceError(
        f"{call} of {what} failed with CUDA error {code}",
        remedy="2: memory or its limits are short (ulimit -l, cgroup), or another process registers"
        " the same pages now; 712: registered before. See docs/troubleshooting",
        cuda_error=code, call=call, **details,
    )  # fmt: skip
