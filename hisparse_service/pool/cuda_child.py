"""The process that keeps the pool registered with CUDA.

A process of its own (`python -m hisparse_service.pool.cuda_child`), because registration takes
global locks of the driver for a long time, may hang, and costs a context; the daemon's loop must
not know about it. Started by `cuda.CudaRegistrar` only. Ends when its parent does, in two ways: the
kernel kills it when the parent's thread ends (PR_SET_PDEATHSIG), and the end of its standard input
tells it, also where the parent was gone before the first was set up.

Speaks one JSON object a line on its standard output, see `Report`; reads nothing. What it
registered goes with the process: unregistering first would take the same locks for the same end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from hisparse_service.contract.cuda_calls import call, load_driver
from hisparse_service.contract.errors import ConfigError, DeviceError, ForeignSegment, HiSparseError
from hisparse_service.contract.limits import MAX_REGISTRATION_BYTES
from hisparse_service.pool import os_calls
from hisparse_service.pool.populate import touch_page_tables
from hisparse_service.pool.segment_file import SegmentFile, open_existing

_PORTABLE_AND_MAPPED: Final = 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the child to the parent."""

    event: str
    """started, progress, ready or failed."""
    registered_bytes: int = 0
    ranges: int = 0
    gpu_bytes: int = 0
    """GPU memory in use on the device now, less what was in use before: this context's."""
    code: str = ""
    """Of `failed`: name of the error in the tree."""
    message: str = ""
    remedy: str = ""
    cuda_error: int = 0


class Driver(Protocol):
    """The CUDA calls that are needed. Each raises DeviceError with the numeric code."""

    def open(self, gpu: int) -> None:
        """Make a context of the device current on this thread.

        Raises:
            ConfigError: No driver, or no such device.
        """

    def register(self, address: int, length_bytes: int) -> None:
        """Pin one range, portable and mapped."""

    def gpu_bytes(self) -> int:
        """GPU memory that came into use since before `open`; 0 where it cannot be told."""


class BindingsDriver:
    """`Driver` over cuda.bindings."""

    def __init__(self) -> None:
        self._cuda: Any = load_driver(otherwise="cuda.register to off")
        self._memory = GpuMemory()
        self._used_before = 0

    def open(self, gpu: int) -> None:
        """Retain the primary context of the device."""
        try:
            self._call("cuInit", 0)
            device = self._call("cuDeviceGet", gpu)
        except DeviceError as error:
            raise ConfigError(
                f"no CUDA device {gpu}: {error.message}",
                remedy="Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set cuda.register to off",
                **error.details,
            ) from error
        except RuntimeError as error:  # cuda.pathfinder found no driver library
            raise ConfigError(
                f"no CUDA driver: {error}",
                remedy="Install the NVIDIA driver, or set cuda.register to off",
            ) from error
        self._memory.find(bytes(self._call("cuDeviceGetUuid", device).bytes))
        self._used_before = self._memory.used_bytes()
        context = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxSetCurrent", context)

    def register(self, address: int, length_bytes: int) -> None:
        """CuMemHostRegister."""
        self._call("cuMemHostRegister", address, length_bytes, _PORTABLE_AND_MAPPED)

    def gpu_bytes(self) -> int:
        """NVML's figure for the device; others that start meanwhile count too."""
        return max(0, self._memory.used_bytes() - self._used_before)

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._cuda, name, *arguments)


class GpuMemory:
    """Bytes in use on one GPU, as NVML tells without a context. Never fails: only a figure."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None

    def find(self, device_uuid: bytes) -> None:
        """Look at this device from now on; at none where NVML does not know it."""
        text = device_uuid.hex()
        parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
        try:
            from cuda.bindings import nvml

            nvml.init_v2()
            self._handle = nvml.device_get_handle_by_uuid("GPU-" + "-".join(parts))
        except (ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError):
            return
        self._nvml = nvml

    def used_bytes(self) -> int:
        """In use by all processes; 0 where it cannot be told."""
        if self._nvml is None:
            return 0
        try:
            return int(self._nvml.device_get_memory_info_v2(self._handle).used)
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return 0


def ranges_of(size_bytes: int, max_range_bytes: int) -> tuple[tuple[int, int], ...]:
    """(offset, length) of the registrations: they tile the segment, none exceeds the maximum.

    Nothing copies through this process, so the seams only need to lie on pages.
    """
    if max_range_bytes < 1 or max_range_bytes % os.sysconf("SC_PAGE_SIZE"):
        raise ConfigError(f"a registration of {max_range_bytes} bytes does not end on a page")
    return tuple(
        (offset, min(max_range_bytes, size_bytes - offset))
        for offset in range(0, size_bytes, max_range_bytes)
    )


def register_segment(
    segment: SegmentFile,
    driver: Driver,
    *,
    gpu: int,
    max_range_bytes: int,
    report: Callable[[Report], None],
) -> None:
    """Map, touch the page tables in parallel, register range by range, and report each step.

    Raises:
        ConfigError: No driver or device.
        DeviceError: A call failed.
        OSError: The segment cannot be mapped.
    """
    driver.open(gpu)
    address = os_calls.address_of(segment.map())
    touch_page_tables(address=address, size_bytes=segment.size_bytes)
    done_bytes = 0
    ranges = ranges_of(segment.size_bytes, max_range_bytes)
    for offset_bytes, length_bytes in ranges:
        driver.register(address + offset_bytes, length_bytes)
        done_bytes += length_bytes
        report(Report(event="progress", registered_bytes=done_bytes))
    report(
        Report(
            event="ready", registered_bytes=done_bytes, ranges=len(ranges),
            gpu_bytes=driver.gpu_bytes(),
        )
    )  # fmt: skip


def open_expected(name: str, *, device: int, inode: int) -> SegmentFile:
    """Open the segment and make sure that it is the daemon's, not a later one under its name.

    Raises:
        ForeignSegment: Another object, or none.
    """
    try:
        segment = open_existing(name)
    except OSError as error:
        raise ForeignSegment(f"the segment {name} cannot be opened: {error}") from error
    if (segment.device, segment.inode) != (device, inode):
        segment.close()
        raise ForeignSegment(f"{name} is another object than the daemon's")
    return segment


def end_with_parent(parent_pid: int) -> None:
    """Arrange for this process to end with its parent, whichever way that goes."""
    os_calls.end_with_parent_thread(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)
    threading.Thread(target=_end_with_input, name="end-with-parent", daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)  # not sys.exit: the main thread may be in a driver call that never returns


def main(arguments: list[str] | None = None) -> int:
    """Register and wait for the end.

    Returns:
        1 after a failure, which was reported.
    """
    parser = argparse.ArgumentParser(prog="hisparse_service.pool.cuda_child")
    parser.add_argument("--segment", required=True)
    for option in ("--device", "--inode", "--gpu", "--parent-pid"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--max-range-bytes", type=int, default=MAX_REGISTRATION_BYTES)
    options = parser.parse_args(arguments)
    end_with_parent(options.parent_pid)
    # A line that a library prints must not be taken for a report.
    pipe = os.dup(1)
    os.dup2(2, 1)

    def report(line: Report) -> None:
        os.write(pipe, msgspec.json.encode(line) + b"\n")

    report(Report(event="started"))
    try:
        segment = open_expected(options.segment, device=options.device, inode=options.inode)
        register_segment(
            segment, BindingsDriver(), gpu=options.gpu,
            max_range_bytes=options.max_range_bytes, report=report,
        )  # fmt: skip
    except (HiSparseError, OSError) as error:
        report(_failure(error))
        return 1
    while True:
        signal.pause()  # `_end_with_input` ends the process


def _failure(error: HiSparseError | OSError) -> Report:
    if isinstance(error, OSError):
        return Report(event="failed", code="ConfigError", message=str(error))
    return Report(
        event="failed", code=error.code, message=error.message, remedy=error.remedy,
        cuda_error=int(error.details.get("cuda_error", 0)),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
