"""The process that owns device memory for workers: one GPU, one context, any number of backings.

A process of its own (`python -m hisparse_service.pool.device_child`), one a GPU, because a driver
call may hang, because a context costs GPU memory that must be given back, and because what it
allocated must outlive the workers, not the daemon. Started by `device_process.DeviceProcess` only.

Reads one `Order` a line (JSON) from its standard input and says one `Answer` a line on its standard
output; orders are carried out one after another on the main thread. A second thread reads them, so
that the end of the input, which means that the daemon is gone, ends this process even while the
driver hangs; the kernel kills it when the daemon's thread that made it ends (PR_SET_PDEATHSIG).

The memory is zeroed before its handle leaves this process: no worker sees another's bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import msgspec

from hisparse_service.contract.cuda_calls import call, check, load_driver
from hisparse_service.contract.device_uuid import device_uuid_of_bytes, normal_device_uuid
from hisparse_service.contract.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    HiSparseError,
)
from hisparse_service.contract.limits import MEMORY_HANDLE_BYTES
from hisparse_service.pool import os_calls
from hisparse_service.pool.cuda_child import GpuMemory
from hisparse_service.pool.device_protocol import Answer, Order

_OUT_OF_MEMORY: Final = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class DeviceDriver(Protocol):
    """The CUDA calls that are needed. Each raises DeviceError with the numeric code."""

    def open(self, device_uuid: str) -> Answer:
        """Make a context of this device current on this thread; its `opened`.

        Raises:
            ConfigError: No driver, or no such device.
        """

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        """(address, IPC handle) of zeroed memory.

        Raises:
            CapacityError: The device has not that much.
        """

    def free(self, address: int) -> None:
        """Give it back."""


class BindingsDeviceDriver:
    """`DeviceDriver` over cuda.bindings."""

    def __init__(self) -> None:
        self._cuda: Any = load_driver(otherwise="cuda.device_backing_bytes to 0")

    def open(self, device_uuid: str) -> Answer:
        """Retain the primary context of the device with this UUID, whatever its index."""
        device = self._find(device_uuid)
        memory = GpuMemory()
        memory.find(bytes(self._call("cuDeviceGetUuid", device).bytes))
        used_before = memory.used_bytes()
        self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", device))
        self._call("cuCtxSynchronize")  # the context's memory is taken no later than here
        return Answer(
            event="opened",
            device_uuid=device_uuid_of_bytes(bytes(self._call("cuDeviceGetUuid", device).bytes)),
            context_bytes=max(0, memory.used_bytes() - used_before),
            total_bytes=int(self._call("cuDeviceTotalMem", device)),
        )

    def _find(self, device_uuid: str) -> Any:
        try:
            self._call("cuInit", 0)
            devices = [
                self._call("cuDeviceGet", index) for index in range(self._call("cuDeviceGetCount"))
            ]
        except (DeviceError, RuntimeError) as error:  # cuda.pathfinder found no driver library
            raise ConfigError(
                f"no CUDA driver or device: {error}",
                remedy="Check `nvidia-smi`, or set cuda.device_backing_bytes to 0",
            ) from error
        for device in devices:
            raw = bytes(self._call("cuDeviceGetUuid", device).bytes)
            if device_uuid_of_bytes(raw) == device_uuid:
                return device
        raise ConfigError(
            f"the daemon sees {len(devices)} CUDA devices, none is {device_uuid}",
            remedy="Give the daemon the workers' GPUs (CUDA_VISIBLE_DEVICES, --gpus); "
            "`nvidia-smi -L` lists them",
            num_devices=len(devices),
        )

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        """CuMemAlloc, zeroed and exported."""
        code, address = self._cuda.cuMemAlloc(size_bytes)
        if int(code) == _OUT_OF_MEMORY:
            free, total = self._cuda.cuMemGetInfo()[1:]
            raise CapacityError(
                f"the device has {free} bytes free of {total}, {size_bytes} were asked for",
                remedy="Ask for less, or end what else uses this GPU",
                needed=size_bytes, free=int(free), cuda_error=_OUT_OF_MEMORY,
            )  # fmt: skip
        check("cuMemAlloc", code)
        try:
            self._call("cuMemsetD8", address, 0, size_bytes)
            self._call("cuCtxSynchronize")
            handle = self._call("cuIpcGetMemHandle", address)
        except BaseException:
            self._cuda.cuMemFree(address)
            raise
        # By its address: cuda.bindings 13.5 names no fields of this structure.
        return int(address), ctypes.string_at(int(handle.getPtr()), MEMORY_HANDLE_BYTES)

    def free(self, address: int) -> None:
        """CuMemFree."""
        self._call("cuMemFree", address)

    def _call(self, name: str, *arguments: Any) -> Any:
        return call(self._cuda, name, *arguments)


class DeviceOwner:
    """Carries out orders on one device. Main thread only.

    Args:
        driver: The CUDA calls.
        report: Takes each answer.
    """

    def __init__(self, driver: DeviceDriver, report: Callable[[Answer], None]) -> None:
        self._driver = driver
        self._report = report
        self._addresses: dict[int, int] = {}

    def open(self, device_uuid: str) -> None:
        """Open the device.

        Raises:
            ConfigError: No driver, or no such device.
            DeviceError: A call failed.
        """
        self._report(self._driver.open(device_uuid))

    def carry_out(self, order: Order) -> None:
        """One order. What is not free to be had is refused; the child goes on.

        Raises:
            DeviceError: Freeing failed: the context is broken, and everything on it with it.
        """
        backing_id = order.backing_id
        if order.do == "free":
            address = self._addresses.pop(backing_id, None)
            if address is not None:
                self._driver.free(address)
            self._report(Answer(event="freed", backing_id=backing_id))
            return
        try:
            self._addresses[backing_id], handle = self._driver.allocate(order.size_bytes)
        except HiSparseError as error:
            self._report(_answer_of(error, event="refused", backing_id=backing_id))
            return
        self._report(Answer(event="allocated", backing_id=backing_id, handle=handle))


def _answer_of(
    error: HiSparseError, *, event: Literal["refused", "failed"], backing_id: int = 0
) -> Answer:
    return Answer(
        event=event, backing_id=backing_id, code=error.code, message=error.message,
        remedy=error.remedy, details=error.details,
    )  # fmt: skip


def _read_orders(orders: queue.SimpleQueue[Order]) -> None:
    """On a thread: hand orders over until the input ends, then end the process."""
    unread = b""
    try:
        # Not sys.stdin: its lock, held while reading, is fatal to an interpreter that ends.
        while chunk := os.read(0, 4096):
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                orders.put(msgspec.json.decode(line, type=Order))
    finally:
        os._exit(0)  # not sys.exit: the main thread may be in a driver call that never returns


def main(
    arguments: list[str] | None = None,
    *,
    make_driver: Callable[[], DeviceDriver] = BindingsDeviceDriver,
) -> int:
    """Open the device and carry out orders until the input ends.

    Args:
        arguments: Of the command line.
        make_driver: Stands in for CUDA.

    Returns:
        1 after a failure, which was reported.
    """
    parser = argparse.ArgumentParser(prog="hisparse_service.pool.device_child")
    parser.add_argument("--device-uuid", required=True, type=normal_device_uuid)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args(arguments)
    os_calls.end_with_parent_thread(signal.SIGKILL)
    if os.getppid() != options.parent_pid:
        os._exit(0)
    # Ctrl-C and systemd reach the daemon's children too, and the daemon drains: its workers still
    # use this memory. It ends when the daemon does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    # A line that a library prints must not be taken for an answer.
    pipe = os.dup(1)
    os.dup2(2, 1)

    def report(answer: Answer) -> None:
        os.write(pipe, msgspec.json.encode(answer) + b"\n")

    report(Answer(event="started"))
    try:
        owner = DeviceOwner(make_driver(), report)
        owner.open(options.device_uuid)
        while True:
            owner.carry_out(orders.get())
    except HiSparseError as error:
        report(_answer_of(error, event="failed"))
        return 1


if __name__ == "__main__":
    sys.exit(main())
