"""The seed's host pool over the daemon's shared memory: map once, check first, stay.

`HostPool` owns one mapping of the pool's segment and its CUDA registration; the daemon owns the
memory. Only the namespace's own payload is mapped writable: the header, the block tables and other
namespaces' payloads are read-only here, so a stray store faults in this process.

The mapping stays where it is from attach to `cleanup`, whatever the daemon does (I4). Everything
that the segment says is checked before it is used (I8). Tensors and arrays made here keep the pages
mapped: `cleanup` never takes memory away under them, the last one to go does.

Any thread. torch is imported when the first tensor is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import posix_ipc

from hisparse_service.contract import limits
from hisparse_service.contract.checksum import block_extents, content_checksum
from hisparse_service.contract.errors import (
    ClosedError,
    CorruptSegmentError,
    ForeignSegment,
    GeometryError,
    HiSparseError,
)
from hisparse_service.contract.geometry import HostGeometry
from hisparse_service.contract.messages import BackingReply
from hisparse_service.contract.segment import (
    BACKING_RECORD_BYTES,
    HEADER_BYTES,
    backing_offset,
    table_bytes,
    table_view,
    unpack_backing,
    unpack_header,
)
from worker_client.cuda_register import CudaRegistration

if TYPE_CHECKING:
    import torch

_SEGMENT_NAME: Final = re.compile(r"/hisparse-[A-Za-z0-9._-]{1,200}")
_MADV_POPULATE_READ: Final = 22
_TOUCH_CHUNK_BYTES: Final = 64 * limits.MIB
_MAX_TOUCH_THREADS: Final = 8
"""h200.md: 16 GiB in 0.18 s with eight."""
_KEEP: Final = "The segment is left as it is; see whether the daemon was replaced, and attach again"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostPool:
    """One namespace's backing, mapped into this process. Made by `Namespace.attach`.

    Attributes:
        geometry: Shape of the blocks.
        num_blocks: Null block included.
        payload_bytes: Of the whole backing.
        ranges: [start, end) for CUDA registration, bytes from the payload's start.
        adopted: The backing was there before: it may hold prefixes.
        allocate_device: Gives the binding functions their device backing, see
            `device_allocator.DeviceAllocator`; None: they allocate it in this process.
    """

    def __init__(
        self, backing: BackingReply, geometry: HostGeometry, *, fingerprint: bytes
    ) -> None:
        """Map the backing that the daemon told of.

        Raises:
            ForeignSegment: The name means another object than the daemon's.
            CorruptSegmentError: Header or backing record fail their checks, or do not fit what the
                daemon said. Nothing stays mapped.
        """
        _check_reply(backing, geometry)
        self.geometry = geometry
        self.num_blocks = backing.num_blocks
        self.payload_bytes = backing.payload_bytes
        self.ranges: tuple[tuple[int, int], ...] = tuple(
            (start, end) for start, end in backing.ranges
        )
        self.adopted = backing.adopted
        self.allocate_device: Callable[[Any, torch.device, int], torch.Tensor] | None = None
        self._backing_reply = backing
        self._lock = threading.Lock()
        self._registration: CudaRegistration | None = None
        self._allocated_bytes: int | None = None
        self._whole: torch.Tensor | None = None
        self._backing: torch.Tensor | None = None
        self._mapping: mmap.mmap | None = _open_and_map(backing, fingerprint)
        self._payload: npt.NDArray[np.int8] | None = np.frombuffer(
            self._mapping, np.int8, count=backing.payload_bytes, offset=backing.payload_offset_bytes
        )
        self._table: npt.NDArray[Any] | None = table_view(
            memoryview(self._mapping).toreadonly(),
            table_offset_bytes=backing.table_offset_bytes,
            num_blocks=backing.num_blocks,
        )

    # --- what the pool is -----------------------------------------------------------------------

    @property
    def table(self) -> npt.NDArray[Any]:
        """`RECORD_DTYPE` [num_blocks]: the block table, read-only. Untrusted bytes (I8)."""
        if self._table is None:
            raise _closed()
        return self._table

    @property
    def address(self) -> int:
        """Of the payload's first byte in this process; the same from attach to cleanup (I4)."""
        return int(self._bytes().ctypes.data)

    @property
    def payload(self) -> npt.NDArray[np.uint8]:
        """uint8 [payload_bytes]: all blocks, for code without torch. Gone after `cleanup`."""
        return self._bytes().view(np.uint8)

    @property
    def is_closed(self) -> bool:
        """After `cleanup`."""
        return self._mapping is None

    @property
    def cuda_registered(self) -> bool:
        """Whether kernels may read this mapping."""
        return self._registration is not None

    @property
    def identity(self) -> tuple[int, int, int]:
        """(st_dev, inode, payload offset): equal in all processes that map this backing."""
        mine = self._backing_reply
        return mine.device, mine.inode, mine.payload_offset_bytes

    def is_backed_by(self, backing: BackingReply) -> bool:
        """Whether `backing` is the memory that is mapped here; asked after a daemon's restart."""
        return is_same_memory(backing, self._backing_reply)

    # --- the seed's interface -------------------------------------------------------------------

    def allocate(self, size: int) -> torch.Tensor:
        """int8 [size] over the payload's start, on the CPU. The same size gives the same tensor.

        Raises:
            GeometryError: Larger than the backing, or another size than before (names both).
        """
        with self._lock:
            if self._allocated_bytes is not None and size != self._allocated_bytes:
                raise GeometryError(
                    f"the backing was allocated with {self._allocated_bytes} bytes, "
                    f"now {size} are asked for",
                    remedy="Build the cache with the same configuration each time",
                    allocated_bytes=self._allocated_bytes, asked_bytes=size,
                )  # fmt: skip
            if not 0 < size <= self.payload_bytes:
                raise GeometryError(
                    f"{size} bytes are asked for, the backing has {self.payload_bytes}",
                    remedy="Attach with more blocks, or lower the number of host blocks",
                    asked_bytes=size, limit_bytes=self.payload_bytes,
                )  # fmt: skip
            if self._backing is None:
                self._backing = self._tensor()[:size]
                self._allocated_bytes = size
            return self._backing

    @property
    def backing(self) -> torch.Tensor | None:
        """What `allocate` gave; None before."""
        return self._backing

    @property
    def registered(self) -> torch.Tensor:
        """int8 [payload_bytes] over the whole payload; shares its storage with `backing`."""
        with self._lock:
            return self._tensor()

    @property
    def shared_region(self) -> HostPool:
        """The owner of the mapping, for code that calls ``shared_region.cleanup()``."""
        return self

    def layer_view(self, layer: int) -> torch.Tensor:
        """uint8 [num_blocks, block_size, row_bytes] of one layer, strided as the geometry says.

        Shares its storage with `registered`. Strides and offset are 64-bit (I10).
        """
        import torch

        place = self.geometry.place(layer, self.num_blocks)
        return self.registered.view(torch.uint8).as_strided(
            (self.num_blocks, self.geometry.block_size, place.row_bytes),
            (place.block_stride_bytes, place.row_stride_bytes, 1),
            place.offset_bytes,
        )

    def row_bytes(self, layer: int) -> int:
        """Bytes of one row of this layer."""
        return self.geometry.place(layer, self.num_blocks).row_bytes

    def checksum(
        self, blocks: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.uint64]:
        """u64 [len(blocks)]: a checksum of each block's bytes in all layers; never 0."""
        payload = self._bytes().data
        checksums = np.empty(len(blocks), np.uint64)
        for i, block in enumerate(blocks):
            extents = block_extents(self.geometry, self.num_blocks, int(block))
            checksums[i] = content_checksum(payload[at : at + size] for at, size in extents)
        return checksums

    # --- life -----------------------------------------------------------------------------------

    def touch_page_tables(self) -> None:
        """Fill this process's page tables for the payload, in parallel; changes no byte.

        Registration then walks entries that are there: 1.48 s became 0.61 s for 16 GiB (h200.md).
        """
        payload = self._bytes()
        start = payload.ctypes.data
        chunks = [
            (start + offset, min(_TOUCH_CHUNK_BYTES, self.payload_bytes - offset))
            for offset in range(0, self.payload_bytes, _TOUCH_CHUNK_BYTES)
        ]
        num_threads = min(_MAX_TOUCH_THREADS, os.cpu_count() or 1, len(chunks))
        if num_threads == 1:
            for chunk in chunks:
                _populate_read(chunk)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="hisparse-touch") as pool:
            list(pool.map(_populate_read, chunks))

    def take_registration(self, registration: CudaRegistration) -> None:
        """Own the CUDA registration of `ranges`; `cleanup` ends it. For `Namespace.attach`."""
        self._registration = registration

    def cleanup(self) -> None:
        """Unregister from CUDA and give the mapping up. Idempotent.

        Tensors and arrays that are still held keep the pages mapped until the last one goes.

        Raises:
            DeviceError: CUDA would not unregister; the mapping is given up all the same.
        """
        with self._lock:
            registration, self._registration = self._registration, None
            mapping, self._mapping = self._mapping, None
            self._whole = self._backing = None
            self._payload = self._table = None
            try:
                if registration is not None:
                    registration.close()
            finally:
                if mapping is not None:
                    # A view outside still exports the buffer: the pages go with the last one.
                    with contextlib.suppress(BufferError):
                        mapping.close()

    def _bytes(self) -> npt.NDArray[np.int8]:
        payload = self._payload
        if payload is None:
            raise _closed()
        return payload

    def _tensor(self) -> torch.Tensor:
        if self._whole is None:
            import torch

            # Through the array, which holds the mapping's buffer for as long as the tensor lives;
            # torch.frombuffer gives its buffer back at once and would not stop an munmap.
            self._whole = torch.from_numpy(self._bytes())
        return self._whole


def is_same_memory(one: BackingReply, other: BackingReply) -> bool:
    """Whether two answers of daemons name the same bytes of the same segment."""
    return (
        (one.device, one.inode, one.pool_uuid) == (other.device, other.inode, other.pool_uuid)
        and (one.num_blocks, one.payload_bytes) == (other.num_blocks, other.payload_bytes)
        and one.payload_offset_bytes == other.payload_offset_bytes
        and one.table_offset_bytes == other.table_offset_bytes
    )


def _closed() -> ClosedError:
    return ClosedError("the host pool was cleaned up", remedy="Attach again")


def _check_reply(backing: BackingReply, geometry: HostGeometry) -> None:
    """Refuse what the daemon cannot mean, before any of it is used."""
    page = geometry.os_page_bytes
    end = backing.payload_offset_bytes + backing.payload_bytes
    table_end = backing.table_offset_bytes + table_bytes(backing.num_blocks)
    tiles = [0, *(edge for bounds in backing.ranges for edge in bounds), backing.payload_bytes]
    fits = (
        _SEGMENT_NAME.fullmatch(backing.segment_name) is not None
        and 2 <= backing.num_blocks <= limits.MAX_BLOCKS_PER_BACKING
        and backing.payload_bytes == geometry.pool_bytes(backing.num_blocks)
        and 0 < backing.table_offset_bytes < table_end <= backing.segment_bytes
        and 0 < backing.payload_offset_bytes < end <= backing.segment_bytes
        and backing.payload_offset_bytes % page == 0
        and (table_end <= backing.payload_offset_bytes or end <= backing.table_offset_bytes)
        and 1 <= len(backing.ranges) <= limits.MAX_REGISTRATION_RANGES
        and all(tiles[i] == tiles[i + 1] for i in range(0, len(tiles), 2))
        and all(start < stop for start, stop in backing.ranges)
    )
    if not fits:
        raise CorruptSegmentError(
            f"the daemon's answer about {backing.segment_name!r} does not fit the geometry",
            remedy=_KEEP, num_blocks=backing.num_blocks, payload_bytes=backing.payload_bytes,
            expected_payload_bytes=geometry.pool_bytes(max(backing.num_blocks, 0)),
        )  # fmt: skip


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    try:
        segment = posix_ipc.SharedMemory(name)
    except (posix_ipc.ExistentialError, posix_ipc.PermissionsError, OSError) as error:
        raise ForeignSegment(
            f"the segment {name} cannot be opened: {error}",
            remedy="Client and daemon must share /dev/shm and the user; in containers, mount it",
        ) from error
    try:
        yield segment.fd
    finally:
        segment.close_fd()


def _open_and_map(backing: BackingReply, fingerprint: bytes) -> mmap.mmap:
    with _opened(backing.segment_name) as fd:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (backing.device, backing.inode):
            raise ForeignSegment(
                f"{backing.segment_name} is another object (device {found.st_dev}, inode "
                f"{found.st_ino}) than the daemon's ({backing.device}, {backing.inode})",
                remedy="Client and daemon see different /dev/shm mounts, or the name was replaced",
            )
        header = unpack_header(os.pread(fd, HEADER_BYTES, 0), segment_bytes=found.st_size)
        if header.pool_uuid != backing.pool_uuid or found.st_size != backing.segment_bytes:
            raise ForeignSegment(
                f"{backing.segment_name} has another uuid or size than the daemon says",
                remedy=_KEEP, segment_bytes=found.st_size, expected_bytes=backing.segment_bytes,
            )  # fmt: skip
        _check_backing_record(fd, backing, fingerprint, found.st_size)
        # The user lock: as long as the mapping lives (it keeps the open file), no daemon releases
        # and no operator purges the segment, whatever PID namespace they look from.
        fcntl.flock(fd, fcntl.LOCK_SH)
        mapping = mmap.mmap(fd, found.st_size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        _write_protect(mapping, backing)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _check_backing_record(
    fd: int, backing: BackingReply, fingerprint: bytes, segment_bytes: int
) -> None:
    """The segment's own directory must tell the same as the daemon."""
    errors: list[HiSparseError] = []
    for slot in range(limits.MAX_BACKINGS):
        data = os.pread(fd, BACKING_RECORD_BYTES, backing_offset(slot))
        try:
            record = unpack_backing(data, segment_bytes=segment_bytes)
        except CorruptSegmentError as error:
            errors.append(error)
            continue
        if record is None or record.payload_offset_bytes != backing.payload_offset_bytes:
            continue
        if (
            record.fingerprint == fingerprint
            and record.num_blocks == backing.num_blocks
            and record.payload_bytes == backing.payload_bytes
            and record.table_offset_bytes == backing.table_offset_bytes
        ):
            return
        break
    raise CorruptSegmentError(
        f"no record of {backing.segment_name} is the backing that the daemon told of"
        + (f"; {len(errors)} records are damaged" if errors else ""),
        remedy=_KEEP,
    ) from (errors[0] if errors else None)


def _write_protect(mapping: mmap.mmap, backing: BackingReply) -> None:
    """Everything but the payload becomes read-only in this process."""
    whole = np.frombuffer(mapping, np.uint8)
    base, size = int(whole.ctypes.data), len(mapping)
    del whole
    payload_end = backing.payload_offset_bytes + backing.payload_bytes
    for start, end in ((0, backing.payload_offset_bytes), (payload_end, size)):
        if end > start and _libc.mprotect(base + start, end - start, mmap.PROT_READ) != 0:
            code = ctypes.get_errno()
            raise CorruptSegmentError(
                f"mprotect of bytes [{start}, {end}) failed: {os.strerror(code)}",
                remedy="Extents must begin on an OS page of this machine", errno=code,
            )  # fmt: skip


def _populate_read(chunk: tuple[int, int]) -> None:
    address, size_bytes = chunk
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_READ) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise CorruptSegmentError(
            f"touching {size_bytes} bytes of the pool failed: {os.strerror(code)}",
            remedy=_KEEP, errno=code,
        )  # fmt: skip
    # A kernel before 5.14: read one byte a page instead.
    view = (ctypes.c_ubyte * size_bytes).from_address(address)
    np.frombuffer(memoryview(view), np.uint8)[:: mmap.PAGESIZE].max(initial=0)
