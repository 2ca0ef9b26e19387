"""What the GPU benchmarks run on: a registered shared-memory pool, traces, and timing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from worker_client.kernels.interface import (
    GroupPages,
    ResidencyTables,
    StepInputs,
)

DEVICE = torch.device("cuda:0")
BLOCK_SIZE = 64
GIB = 1024**3
SPIN_CYCLES = 1_200_000
"""About 0.6 ms: longer than Python takes to enqueue what is timed."""


class Pool:
    """POSIX shared memory of this process, filled with random bytes and registered."""

    def __init__(self, num_bytes: int, *, threads: int = 16) -> None:
        self.num_bytes = num_bytes
        name = f"/dev/shm/hisparse-bench-{os.getpid()}"
        try:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(name)
            os.posix_fallocate(handle, 0, mmap.PAGESIZE)
            free = os.fstatvfs(handle)
            if free.f_bavail * free.f_frsize < num_bytes:
                raise OSError("tmpfs too small")
        except OSError:
            handle = os.memfd_create("hisparse-bench")
        os.ftruncate(handle, num_bytes)
        self._map = mmap.mmap(handle, num_bytes)
        os.close(handle)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        start = time.perf_counter()
        self._fill(threads)
        filled = time.perf_counter()
        self.tensor = torch.from_numpy(self.bytes)
        code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 3)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister: {code}")
        self.fill_s = filled - start
        self.register_s = time.perf_counter() - filled

    def _fill(self, threads: int) -> None:
        source = np.random.default_rng(1).integers(0, 256, 64 * 1024**2, dtype=np.uint8)

        def fill(first: int) -> None:
            for at in range(first * source.size, self.num_bytes, threads * source.size):
                part = self.bytes[at : at + source.size]
                part[:] = source[: part.size]

        workers = [threading.Thread(target=fill, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def front(self, num_bytes: int) -> Pool:
        """The first bytes of this pool, borrowed: only this pool is closed."""
        if num_bytes > self.num_bytes:
            raise ValueError(f"front of {num_bytes} bytes of a pool of {self.num_bytes}")
        part = Pool.__new__(Pool)
        part.num_bytes = num_bytes
        part.tensor = self.tensor[:num_bytes]
        return part

    def pages(
        self, *, layers: int, row_bytes: int, interleaved: bool, device: tuple[torch.Tensor, ...]
    ) -> GroupPages:
        """The whole pool as host pages of one index group."""
        page = BLOCK_SIZE * row_bytes
        blocks = self.num_bytes // (layers * page)
        if interleaved:
            strides, step = (layers * page, layers * row_bytes, 1), row_bytes
        else:
            strides, step = (page, row_bytes, 1), blocks * page
        host = tuple(
            torch.as_strided(self.tensor, (blocks, BLOCK_SIZE, row_bytes), strides, i * step)
            for i in range(layers)
        )
        stride_rows = device[0].stride(0) // row_bytes
        return GroupPages(host=host, device=device, block_stride_rows=stride_rows)

    def close(self) -> None:
        """Unregister. The memory goes with the process."""
        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


def device_pages(*, layers: int, row_bytes: int, blocks: int) -> tuple[torch.Tensor, ...]:
    """Random device pages: all layers overlay one block-outermost backing."""
    page = BLOCK_SIZE * row_bytes
    backing = torch.randint(
        0, 256, (blocks, layers * page), dtype=torch.uint8, device=DEVICE
    ).flatten()
    return tuple(
        torch.as_strided(
            backing, (blocks, BLOCK_SIZE, row_bytes), (layers * page, row_bytes, 1), i * page
        )
        for i in range(layers)
    )


@dataclass(frozen=True)
class TraceKind:
    """How much of the top-k a step keeps, and how it draws the rest."""

    name: str
    kept_share: float
    working_share: float = 0.0
    """Of the new positions, those drawn from the request's working set; the others come uniformly
    from the whole context."""
    working_rows: int = 0
    """Size of the working set, which is drawn once."""


STICKY = TraceKind("sticky", 0.85)
TRACES = (
    STICKY,
    TraceKind("middle_low", 0.44, 0.35, 2_560),
    TraceKind("middle_high", 0.44, 0.85, 5_632),
    TraceKind("first_layers", 0.0),
)
"""The sticky trace; middle layers, where consecutive steps share 44 % of the top-k and the hit rate
depends on how much of what was left comes back (little or most of it); layers 0 and 1, where
consecutive steps share nothing."""


class Trace:
    """Top-k of consecutive steps, on the device: int32 [requests, top_k]."""

    def __init__(self, kind: TraceKind, *, requests: int, context: int, top_k: int = 2048) -> None:
        self.kind, self.top_k, self.context = kind, top_k, context
        self._random = torch.Generator(DEVICE).manual_seed(3)
        keys = self._keys(requests)
        self.current = keys.topk(top_k, dim=1, sorted=False).indices.to(torch.int32)
        if kind.working_rows:
            chosen = self._keys(requests).topk(kind.working_rows, dim=1, sorted=False).indices
            outside = torch.ones((requests, context), dtype=torch.bool, device=DEVICE)
            self._outside_working = outside.scatter_(1, chosen, False)

    def seed(self, value: int) -> None:
        """Draw all further steps from this seed."""
        self._random.manual_seed(value)

    def _keys(self, requests: int) -> torch.Tensor:
        return torch.rand((requests, self.context), generator=self._random, device=DEVICE)

    def _fresh(self, count: int) -> torch.Tensor:
        """Positions that are not in the current top-k: int64 [requests, count]."""
        keys = self._keys(self.current.shape[0])
        keys.scatter_(1, self.current.long(), -1.0)
        returning = round(count * self.kind.working_share)
        if not returning:
            return keys.topk(count, dim=1, sorted=False).indices
        inside = keys.masked_fill(self._outside_working, -1.0)
        known = inside.topk(returning, dim=1, sorted=False).indices
        keys.scatter_(1, known, -1.0)
        rest = keys.topk(count - returning, dim=1, sorted=False).indices
        return torch.cat((known, rest), dim=1)

    def advance(self) -> torch.Tensor:
        """The next step's top-k."""
        old = self.current
        kept = round(self.top_k * self.kind.kept_share)
        order = torch.rand(old.shape, generator=self._random, device=DEVICE).argsort(dim=1)
        keep = old.gather(1, order[:, :kept])
        mixed = torch.cat((keep, self._fresh(self.top_k - kept).to(torch.int32)), dim=1)
        shuffle = torch.rand(mixed.shape, generator=self._random, device=DEVICE).argsort(dim=1)
        self.current = mixed.gather(1, shuffle).contiguous()
        return self.current


def make_tables(
    *,
    requests: int,
    context: int,
    hot_rows: int,
    host_blocks: int,
    device_blocks: int,
    block_stride_rows: int = BLOCK_SIZE,
) -> ResidencyTables:
    """Nothing resident; the blocks of each request are random host blocks."""
    pages = context // BLOCK_SIZE
    hot_blocks = -(-hot_rows // BLOCK_SIZE)
    random = torch.Generator().manual_seed(5)
    source = torch.randperm(host_blocks - 1, generator=random)[: requests * pages] + 1
    hot = torch.randperm(device_blocks - 1, generator=random)[: requests * hot_blocks] + 1
    return ResidencyTables(
        source=source.view(requests, pages).to(torch.int32).to(DEVICE),
        resident=torch.zeros((requests, pages), dtype=torch.int32, device=DEVICE),
        hot=hot.view(requests, hot_blocks).to(torch.int32).to(DEVICE),
        block_size=BLOCK_SIZE,
        block_stride_rows=block_stride_rows,
        num_source_blocks=host_blocks,
        num_device_blocks=device_blocks,
    )


def step_inputs(positions: torch.Tensor, order: torch.Tensor, rows: int = 1) -> StepInputs:
    """One step with the batch in this order; positions are by request slot."""
    requests = order.shape[0]
    mixed = positions.view(requests, rows, -1)[order.long()].reshape(requests * rows, -1)
    return StepInputs(
        positions=mixed.contiguous(),
        request_slots=order,
        table_rows=order,
        query_starts=torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=DEVICE),
    )


def random_orders(requests: int) -> Iterator[torch.Tensor]:
    """Fresh batch orders without end."""
    random = torch.Generator().manual_seed(9)
    while True:
        yield torch.randperm(requests, generator=random).to(torch.int32).to(DEVICE)


_FLUSH: list[torch.Tensor] = []


def flush_l2() -> None:
    """Write more than the second-level cache holds."""
    if not _FLUSH:
        _FLUSH.append(torch.empty(192 * 1024**2, dtype=torch.uint8, device=DEVICE))
    _FLUSH[0].fill_(7)


@contextlib.contextmanager
def l2_aside(num_bytes: int) -> Iterator[int]:
    """Set second-level cache aside for persisting accesses, which nobody here makes.

    Args:
        num_bytes: More than the device allows is as much as it allows.

    Yields:
        Bytes that the driver set aside: it rounds up.

    Raises:
        RuntimeError: The driver refuses.
    """
    from cuda.bindings import driver

    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE

    def checked(result: tuple[object, ...]) -> int:
        if int(result[0]):  # type: ignore[call-overload]
            raise RuntimeError(f"setting cache aside: {result[0]}")
        return int(result[1]) if len(result) > 1 else 0  # type: ignore[call-overload]

    torch.cuda.current_stream()
    before = checked(driver.cuCtxGetLimit(limit))
    most = checked(driver.cuDeviceGetAttribute(attribute, DEVICE.index))
    checked(driver.cuCtxSetLimit(limit, min(num_bytes, most)))
    try:
        yield checked(driver.cuCtxGetLimit(limit))
    finally:
        torch.cuda.synchronize()
        checked(driver.cuCtxSetLimit(limit, before))


def time_us(
    work: Callable[[int], object],
    *,
    before: Callable[[int], object] = lambda _: None,
    repeats: int = 15,
    warm: int = 3,
    spin_cycles: int = SPIN_CYCLES,
) -> list[float]:
    """Microseconds of ``work(i)`` between two events, queued behind a spin.

    Args:
        work: Enqueues what is timed.
        before: Enqueues what comes before and is not timed.
        repeats: Timed calls.
        warm: Calls before them.
        spin_cycles: Clock cycles of the spin: more where enqueueing takes longer.
    """
    times = []
    for index in range(warm + repeats):
        before(index)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(spin_cycles)
        start.record()
        work(index)
        end.record()
        torch.cuda.synchronize()
        if index >= warm:
            times.append(start.elapsed_time(end) * 1000)
    return times


def median(values: list[float]) -> float:
    """Middle value."""
    return statistics.median(values)


def driver_version() -> str:
    """As the driver says."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    text = ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    library.nvmlSystemGetDriverVersion(text, 96)
    return text.value.decode()
