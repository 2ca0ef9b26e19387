"""Population: parallel, cancellable, and whole or an error."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from hisparse_service.contract import crashpoints
from hisparse_service.contract.crashpoints import PointKind
from hisparse_service.contract.errors import ConfigError, InternalError
from hisparse_service.contract.limits import MIB
from hisparse_service.pool import os_calls
from hisparse_service.pool.populate import (
    Cancelled,
    PopulateMethod,
    Progress,
    populate,
    supported_method,
    touch_page_tables,
)
from hisparse_service.testing.faults import FaultPlan

SIZE = 32 * MIB


class Object:
    """A sparse shared-memory object without a name, mapped."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("populate")
        os.ftruncate(self.fd, SIZE)
        self.mapping = mmap.mmap(self.fd, SIZE)

    @property
    def target(self) -> dict[str, int]:
        address = os_calls.address_of(self.mapping)
        return {"fd": self.fd, "address": address, "size_bytes": SIZE}

    @property
    def reserved_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def sparse() -> Iterator[Object]:
    made = Object()
    yield made
    made.mapping.close()
    os.close(made.fd)


@pytest.mark.parametrize("method", PopulateMethod)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_pages_are_reserved_and_keep_their_zeros(
    sparse: Object, method: PopulateMethod, threads: int
) -> None:
    report = populate(**sparse.target, method=method, threads=threads)
    assert sparse.reserved_bytes == SIZE
    assert (report.total_bytes, report.threads, report.method) == (SIZE, threads, method)
    assert sparse.mapping[:4096] == bytes(4096)


def test_more_threads_than_chunks_are_not_started(sparse: Object) -> None:
    report = populate(**{**sparse.target, "size_bytes": 4096}, threads=64)
    assert report.threads == 1
    assert sparse.reserved_bytes == 4096


def test_pages_that_were_written_keep_their_bytes(sparse: Object) -> None:
    sparse.mapping[5 * MIB : 5 * MIB + 4] = b"here"
    populate(**sparse.target)
    assert sparse.mapping[5 * MIB : 5 * MIB + 4] == b"here"
    touch_page_tables(address=sparse.target["address"], size_bytes=SIZE)
    assert sparse.mapping[5 * MIB : 5 * MIB + 4] == b"here"


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_the_first_error_of_a_thread_is_raised_and_no_thread_is_left(
    sparse: Object, nth: int
) -> None:
    before = threading.active_count()
    with (
        FaultPlan().fail_nth("os.madvise", error=errno.EFAULT, nth=nth),
        pytest.raises(OSError, match="made to fail") as error,
    ):
        populate(**sparse.target, threads=2)
    assert error.value.errno == errno.EFAULT
    assert threading.active_count() == before


def test_a_page_that_cannot_be_had_is_not_taken_for_an_old_kernel(sparse: Object) -> None:
    address = sparse.target["address"]
    with (
        FaultPlan().fail_nth("os.madvise", error=errno.ENOMEM),
        pytest.raises(OSError, match="madvise") as error,
    ):
        supported_method(address)
    assert error.value.errno == errno.ENOMEM
    with FaultPlan().fail_nth("os.madvise", error=errno.EINVAL):
        assert supported_method(address) is PopulateMethod.FALLOCATE
    assert supported_method(address) is PopulateMethod.POPULATE_WRITE


def test_cancelling_stops_in_the_middle(sparse: Object) -> None:
    """One chunk a tick of progress, of four in all; it is cancelled at the first tick."""
    permits, cancel = threading.Semaphore(1), threading.Event()
    ticks: list[Progress] = []

    def gate(kind: PointKind, name: str) -> None:
        if name == "os.madvise" and threading.current_thread() is not threading.main_thread():
            permits.acquire(timeout=0.5)

    def tick(progress: Progress) -> None:
        ticks.append(progress)
        permits.release()
        cancel.set()

    before = crashpoints.install(gate)
    try:
        with pytest.raises(Cancelled) as error:
            populate(**sparse.target, threads=1, progress=tick, cancel=cancel)
    finally:
        crashpoints.install(before)
    assert 0 < error.value.details["done_bytes"] < SIZE
    assert sparse.reserved_bytes < SIZE


def test_a_thread_that_ends_for_another_reason_is_not_taken_for_success(
    sparse: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(address: int, length_bytes: int, advice: int) -> None:
        if length_bytes > 4096:
            raise MemoryError("in a thread")

    monkeypatch.setattr(os_calls, "madvise", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _arguments: None)
    with pytest.raises(InternalError, match="0 of"):
        populate(**sparse.target, threads=2)


def test_fewer_threads_than_asked_still_populate_everything(
    sparse: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    allowed = [1]

    def limited(thread: threading.Thread) -> None:
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert populate(**sparse.target, threads=4).threads == 1
    assert sparse.reserved_bytes == SIZE
    with pytest.raises(ConfigError, match="no thread"):
        populate(**sparse.target, threads=4)
