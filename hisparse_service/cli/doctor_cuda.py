"""Does CUDA IPC work here: run as a process of its own by `hisparse-service doctor`.

The parent allocates a page of device memory and writes a pattern; its child, started afresh, opens
the memory by its IPC handle and reads the pattern back. On the way it registers a page of shared
memory, as workers do. Says one line; exit status 0 when both worked.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import Any, Final

from hisparse_service.contract.limits import MEMORY_HANDLE_BYTES

_PATTERN: Final = bytes(range(256)) * 16
_CHILD_S: Final = 30.0
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE_AND_MAPPED: Final = 3


class _CudaFailedError(Exception):
    pass


def _call(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver

    code, *values = getattr(driver, name)(*arguments)
    if int(code) != 0:
        raise _CudaFailedError(f"{name} failed with {code.name} ({int(code)})")
    return values[0] if values else None


def _context() -> None:
    _call("cuInit", 0)
    _call("cuCtxSetCurrent", _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", 0)))


def _register_page() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        anchor = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(anchor)
        _call("cuMemHostRegister", address, mmap.PAGESIZE, _PORTABLE_AND_MAPPED)
        _call("cuMemHostUnregister", address)
        del anchor


def _parent() -> None:
    _context()
    _register_page()
    memory = _call("cuMemAlloc", len(_PATTERN))
    _call("cuMemcpyHtoD", memory, _PATTERN, len(_PATTERN))
    # By its address: cuda.bindings 13.5 names no fields of this structure.
    handle = ctypes.string_at(int(_call("cuIpcGetMemHandle", memory).getPtr()), MEMORY_HANDLE_BYTES)
    child = subprocess.run(
        [sys.executable, "-m", "hisparse_service.cli.doctor_cuda", handle.hex()],
        capture_output=True, text=True, timeout=_CHILD_S, check=False,
    )  # fmt: skip
    _call("cuMemFree", memory)
    if child.returncode != 0:
        lines = (child.stdout or child.stderr).strip().splitlines() or ["it said nothing"]
        raise _CudaFailedError(f"the other process: {lines[-1]}")


def _child(handle_hex: str) -> None:
    from cuda.bindings import driver

    _context()
    handle = driver.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), bytes.fromhex(handle_hex), MEMORY_HANDLE_BYTES)
    memory = _call("cuIpcOpenMemHandle", handle, _LAZY_PEER_ACCESS)
    found = bytearray(len(_PATTERN))
    _call("cuMemcpyDtoH", found, memory, len(_PATTERN))
    _call("cuIpcCloseMemHandle", memory)
    if found != _PATTERN:
        raise _CudaFailedError("other bytes than were written")


def main(arguments: list[str]) -> int:
    """Parent without arguments, child with the handle."""
    try:
        if arguments:
            _child(arguments[0])
        else:
            _parent()
    except _CudaFailedError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    except (ImportError, RuntimeError, subprocess.TimeoutExpired) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write("device memory of one process was read by another, a host page registered\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
