"""A device child without a GPU: its "device memory" is memory of its own process.

`python -m hisparse_service.testing.device` takes the place of `pool.device_child` and is it, but
for the driver. As with CUDA, another process opens the memory by a handle of 64 bytes and keeps
what it has mapped; nobody can open it any more once its owner freed it or ended. `open_memory` is
that other process's part.

What it does on purpose is told by files in the directory that `DIRECTORY_VARIABLE` names, looked
at before each order: `wedge` (hang while it is there), `total_bytes` (how much the device has),
`refuse_open` (no such device), `fail_free` (a broken context).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Final

from hisparse_service.contract.errors import CapacityError, ConfigError, DeviceError
from hisparse_service.contract.limits import GIB, MEMORY_HANDLE_BYTES
from hisparse_service.pool.device_child import main
from hisparse_service.pool.device_protocol import Answer

DIRECTORY_VARIABLE: Final = "HISPARSE_TESTING_DEVICE_DIRECTORY"
CONTEXT_BYTES: Final = 500_000_000
COMMAND: Final = [sys.executable, "-m", "hisparse_service.testing.device"]


class MemoryDriver:
    """`DeviceDriver` over anonymous memory files."""

    def __init__(self) -> None:
        self._directory = Path(os.environ[DIRECTORY_VARIABLE])
        self._sizes: dict[int, int] = {}

    def open(self, device_uuid: str) -> Answer:
        """Any UUID is a device here."""
        self._obey()
        if (self._directory / "refuse_open").exists():
            raise ConfigError(f"the daemon sees 0 CUDA devices, none is {device_uuid}")
        return Answer(
            event="opened", device_uuid=device_uuid, context_bytes=CONTEXT_BYTES,
            total_bytes=self._total_bytes(),
        )  # fmt: skip

    def allocate(self, size_bytes: int) -> tuple[int, bytes]:
        """An anonymous file; its descriptor stands for the address."""
        self._obey()
        free = self._total_bytes() - sum(self._sizes.values())
        if size_bytes > free:
            raise CapacityError(
                f"the device has {free} bytes free, {size_bytes} were asked for",
                needed=size_bytes, free=free, cuda_error=2,
            )  # fmt: skip
        fd = os.memfd_create("device-memory")
        os.ftruncate(fd, size_bytes)
        self._sizes[fd] = size_bytes
        handle = f"{os.getpid()}:{fd}:{size_bytes}:".encode()
        return fd, handle.ljust(MEMORY_HANDLE_BYTES, b"\0")

    def free(self, address: int) -> None:
        """Close the file."""
        self._obey()
        if (self._directory / "fail_free").exists():
            raise DeviceError("cuMemFree failed with 700", cuda_error=700, call="cuMemFree")
        del self._sizes[address]
        os.close(address)

    def _total_bytes(self) -> int:
        path = self._directory / "total_bytes"
        return int(path.read_text()) if path.exists() else GIB

    def _obey(self) -> None:
        while (self._directory / "wedge").exists():
            threading.Event().wait(0.01)


def open_memory(handle: bytes) -> mmap.mmap:
    """Map what a `MemoryDriver` allocated.

    Raises:
        OSError: It is not there any more.
    """
    pid, fd, size, _ = handle.split(b":", 3)
    with open(f"/proc/{int(pid)}/fd/{int(fd)}", "r+b") as file:
        return mmap.mmap(file.fileno(), int(size))


def address_of(mapping: mmap.mmap) -> int:
    """Where it is mapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


if __name__ == "__main__":
    sys.exit(main(make_driver=MemoryDriver))
