"""The few Linux calls that Python 3.11 lacks, through ctypes. Each releases the GIL while it runs.

The seam where tests make the n-th call fail: every call passes its `call_point` first.
Any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

from hisparse_service.contract.crashpoints import PointKind, call_point, declare

MADV_HUGEPAGE: Final = 14
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14. EFAULT or ENOMEM where a touch would have been a SIGBUS."""

PR_SET_PDEATHSIG: Final = 1

_CALL_MADVISE = declare("os.madvise", PointKind.CALL)
_CALL_FALLOCATE = declare("os.fallocate", PointKind.CALL)
_CALL_MBIND = declare("os.mbind", PointKind.CALL)
_CALL_MLOCK = declare("os.mlock", PointKind.CALL)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.syscall.restype = ctypes.c_long

_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235}


def address_of(mapping: mmap.mmap) -> int:
    """Address of a writable mapping. Valid until it is closed, which nothing here prevents."""
    anchor = ctypes.c_char.from_buffer(mapping)
    return ctypes.addressof(anchor)


def madvise(address: int, length_bytes: int, advice: int) -> None:
    """Advise the kernel about pages that are mapped.

    Raises:
        OSError: With its errno.
    """
    call_point(_CALL_MADVISE)
    if _libc.madvise(address, length_bytes, advice) != 0:
        _raise("madvise")


def fallocate(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Reserve pages of a file; an interrupted call is made again.

    Raises:
        OSError: With its errno.
    """
    call_point(_CALL_FALLOCATE)
    os.posix_fallocate(fd, offset_bytes, length_bytes)


def mlock(address: int, length_bytes: int) -> None:
    """Keep pages from being swapped out.

    Raises:
        OSError: With its errno.
    """
    call_point(_CALL_MLOCK)
    if _libc.mlock(address, length_bytes) != 0:
        _raise("mlock")


def mbind(address: int, length_bytes: int, *, mode: int, nodes: tuple[int, ...]) -> None:
    """Set the NUMA policy of pages that are not there yet.

    Raises:
        OSError: With its errno; ENOSYS on a machine whose call number is not known here.
    """
    call_point(_CALL_MBIND)
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        raise OSError(38, "mbind: call number unknown on this machine")
    bits_per_word = 64
    num_words = max(nodes, default=0) // bits_per_word + 1
    mask = (ctypes.c_ulong * num_words)()
    for node in nodes:
        mask[node // bits_per_word] |= 1 << node % bits_per_word
    # The kernel reads maxnode - 1 bits.
    max_node = num_words * bits_per_word + 1
    result = _libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(length_bytes),
        ctypes.c_int(mode), mask, ctypes.c_ulong(max_node), ctypes.c_uint(0),
    )  # fmt: skip
    if result != 0:
        _raise("mbind")


def end_with_parent_thread(signal_number: int) -> None:
    """Have the kernel send `signal_number` to this process when the thread that made it ends.

    Raises:
        OSError: With its errno.
    """
    if _libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        _raise("prctl")


def _raise(call: str) -> None:
    error = ctypes.get_errno()
    raise OSError(error, f"{call}: {os.strerror(error)}")
