"""Reserve every page of a segment for real, with all cores, before anybody hears of it (I5).

Threads take chunks in turn and stay in the kernel, without the GIL, for each. The calling thread
starts them, reports progress, and waits; when it returns or raises, no thread is left.

Two methods. `POPULATE_WRITE` zeroes and maps the pages in parallel, and a worker that maps the
pool later only builds page tables. `FALLOCATE` only takes the pages from the kernel, under one lock
however many threads call it, and leaves zeroing to the first touch. On 2 cores with 2 GiB the sum
of both steps is the same (3.7 + 0.5 s against 1.5 + 2.3 s), so the question is who pays: here the
daemon does, once, with all cores, and not the first worker's attach, which somebody waits for.
`benchmarks/bench_populate.py` prints both steps; `PoolSettings.populate_method` chooses.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from hisparse_service.contract.errors import ConfigError, HiSparseError, InternalError
from hisparse_service.contract.limits import MIB
from hisparse_service.pool import os_calls

CHUNK_BYTES: Final = 64 * MIB
"""At most one call's worth: 0.13 s at the 0.5 GiB/s of one slow thread, which bounds
cancellation."""
_CHUNKS_PER_THREAD: Final = 4
"""A thread takes this part of its share of what is left: chunks become smaller towards the end, so
that all threads end at about the same time."""
_CHUNK_ALIGNMENT_BYTES: Final = 2 * MIB
"""What one page of page tables maps: two threads never fill the same one."""
PROGRESS_INTERVAL_S: Final = 0.1
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Cancelled(HiSparseError):
    """Population was cancelled by the caller; nothing is left."""


class PopulateMethod(enum.Enum):
    """How pages are reserved."""

    POPULATE_WRITE = "populate_write"
    """madvise(MADV_POPULATE_WRITE): parallel, zeroes and maps the pages."""
    FALLOCATE = "fallocate"
    """posix_fallocate: one thread at a time in the kernel; for kernels before 5.14."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far population has come."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        """Mean rate since the start."""
        return self.done_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def fraction(self) -> float:
        """0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PopulateReport:
    """How population went."""

    total_bytes: int
    elapsed_s: float
    threads: int
    method: PopulateMethod


ProgressCallback = Callable[[Progress], None]


def default_threads() -> int:
    """One thread for each CPU that this process may run on."""
    return len(os.sched_getaffinity(0))


def supported_method(address: int) -> PopulateMethod:
    """The method that this kernel knows, tried on the first page of the mapping.

    Raises:
        OSError: The page cannot be had (EFAULT or ENOMEM).
    """
    try:
        os_calls.madvise(address, _PAGE_BYTES, os_calls.MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return PopulateMethod.FALLOCATE
        raise
    return PopulateMethod.POPULATE_WRITE


def populate(
    *,
    fd: int,
    address: int,
    size_bytes: int,
    threads: int = 0,
    method: PopulateMethod | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> PopulateReport:
    """Reserve all pages of a mapped object.

    Args:
        fd: The object.
        address: Where all of it is mapped, writable. Stays mapped until this returns.
        size_bytes: Bytes to reserve, from the start.
        threads: 0 for `default_threads`.
        method: None for what the kernel knows.
        progress: Called from the calling thread, about every PROGRESS_INTERVAL_S and at the end.
        cancel: Set it to give up.

    Raises:
        Cancelled: `cancel` was set.
        OSError: Pages cannot be had: ENOSPC, or EFAULT or ENOMEM where a touch would have been a
            SIGBUS.
    """
    started = time.monotonic()
    chosen = method or supported_method(address)

    def reserve(offset_bytes: int, length_bytes: int) -> None:
        if chosen is PopulateMethod.FALLOCATE:
            os_calls.fallocate(fd, offset_bytes, length_bytes)
        else:
            os_calls.madvise(address + offset_bytes, length_bytes, os_calls.MADV_POPULATE_WRITE)

    run = _Run(size_bytes, threads, reserve)
    try:
        run.start()
        while not run.wait(PROGRESS_INTERVAL_S):
            if cancel is not None and cancel.is_set():
                raise Cancelled("population was cancelled", done_bytes=run.done_bytes)
            if progress is not None:
                progress(run.progress(started))
    finally:
        run.stop()
    run.check_done()
    if cancel is not None and cancel.is_set():
        raise Cancelled("population was cancelled", done_bytes=run.done_bytes)
    if progress is not None:
        progress(run.progress(started))
    return PopulateReport(
        total_bytes=size_bytes,
        elapsed_s=time.monotonic() - started,
        threads=run.num_threads,
        method=chosen,
    )


def touch_page_tables(*, address: int, size_bytes: int, threads: int = 0) -> None:
    """Map pages that are there already, in parallel: what follows walks page tables, not faults.

    Raises:
        OSError: A page cannot be had.
    """

    def touch(offset_bytes: int, length_bytes: int) -> None:
        os_calls.madvise(address + offset_bytes, length_bytes, os_calls.MADV_POPULATE_READ)

    run = _Run(size_bytes, threads, touch)
    try:
        run.start()
    finally:
        run.stop(_Stop.WHEN_DONE)
    run.check_done()


class _Stop(enum.Enum):
    """When threads end."""

    NOW = "now"
    """After the chunk that each is at."""
    WHEN_DONE = "when_done"


class _Run:
    """Threads that call `work(offset_bytes, length_bytes)` for each chunk of [0, size_bytes).

    Shared state is under `_lock`. `stop` must be called: the threads use the mapping.
    """

    def __init__(self, size_bytes: int, threads: int, work: Callable[[int, int], None]) -> None:
        self._size_bytes = size_bytes
        self._do = work
        most = max(1, -(-size_bytes // _CHUNK_ALIGNMENT_BYTES))
        self.num_threads = min(threads or default_threads(), most)
        self._lock = threading.Lock()
        self._next_offset = 0
        self._done_bytes = 0
        self._threads: list[threading.Thread] = []
        self.error: OSError | None = None

    @property
    def done_bytes(self) -> int:
        return self._done_bytes

    def progress(self, started: float) -> Progress:
        return Progress(
            done_bytes=self._done_bytes,
            total_bytes=self._size_bytes,
            elapsed_s=time.monotonic() - started,
        )

    def start(self) -> None:
        for index in range(self.num_threads):
            thread = threading.Thread(target=self._work, name=f"pool-populate-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if index == 0:
                    raise ConfigError(
                        "no thread can be started to populate the pool",
                        remedy="Raise RLIMIT_NPROC or the pids limit of the cgroup",
                    ) from error
                self.num_threads = index  # those that run do the work
                return
            self._threads.append(thread)

    def wait(self, timeout_s: float) -> bool:
        """Whether all threads have ended; waits for one that has not."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout_s)
                break
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self, when: _Stop = _Stop.NOW) -> None:
        if when is _Stop.NOW:
            with self._lock:
                self._next_offset = self._size_bytes
        for thread in self._threads:
            thread.join()

    def check_done(self) -> None:
        """Raise what a thread met. Done is what every chunk was, not what no thread complained of.

        Raises:
            OSError: The first error of a chunk.
            InternalError: A thread ended for another reason.
        """
        if self.error is not None:
            raise self.error
        if self._done_bytes != self._size_bytes:
            raise InternalError(f"{self._done_bytes} of {self._size_bytes} bytes were populated")

    def _work(self) -> None:
        try:
            while (chunk := self._take()) is not None:
                self._do(*chunk)
                with self._lock:
                    self._done_bytes += chunk[1]
        except OSError as error:
            with self._lock:
                self.error = self.error or error
                self._next_offset = self._size_bytes

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            offset = self._next_offset
            left = self._size_bytes - offset
            length = min(_chunk_bytes(left, self.num_threads), left)
            self._next_offset += max(0, length)
        return (offset, length) if length > 0 else None


def _chunk_bytes(left_bytes: int, threads: int) -> int:
    share = -(-left_bytes // (threads * _CHUNKS_PER_THREAD))
    aligned = -(-share // _CHUNK_ALIGNMENT_BYTES) * _CHUNK_ALIGNMENT_BYTES
    return min(CHUNK_BYTES, aligned)
