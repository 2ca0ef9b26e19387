"""The pool as the server sees it: one segment, its backings, and what becomes of it at the end.

`Pool.create_or_adopt` and `release` make system calls and may take minutes: call them from a helper
thread. Everything else only reads and writes memory that is already there, and belongs to the
control loop (one thread; there is no lock).

    pool = Pool.create_or_adopt(PoolSettings(pool_bytes=8 * GIB), progress=show)
    for backing in pool.backings():          # what an adopted pool holds
        directory.load(backing.record, backing.table)
    backing = pool.make_backing(namespace=1, fingerprint=…, name="glm", geometry=blob,
                                num_blocks=1000, payload_bytes=…)
    …
    del backing                              # views go before the mapping does
    pool.keep()                              # or pool.release()
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import struct
import threading
from types import TracebackType
from typing import Any, Final

import numpy.typing as npt

from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    CorruptSegmentError,
    UsageError,
)
from hisparse_service.contract.limits import MAX_BACKINGS
from hisparse_service.contract.segment import (
    BACKING_IN_USE_OFFSET,
    BACKING_RECORD_BYTES,
    BackingRecord,
    Header,
    backing_offset,
    pack_backing,
    table_bytes,
    table_view,
    unpack_backing,
)
from hisparse_service.pool.opening import Opened, open_pool
from hisparse_service.pool.populate import PopulateReport, ProgressCallback
from hisparse_service.pool.segment_file import SegmentFile
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.pool.survey import build_arena

AFTER_TABLE: Final = declare("backing.after_table_zeroed")
AFTER_BODY: Final = declare("backing.after_body")
AFTER_IN_USE: Final = declare("backing.after_in_use")
AFTER_CLEAR: Final = declare("backing.after_clear")

_GENERATION: Final = struct.Struct("<I")
_GENERATION_OFFSET: Final = 4
"""Where a backing record has its generation; a test holds it to `pack_backing`."""
_GENERATION_MASK: Final = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backing:
    """One backing of the pool.

    `table` is a view of the segment: drop every reference to it before `release` or `keep`.
    """

    slot: int
    """Index in the backing directory; what `drop_backing` takes."""
    record: BackingRecord
    table: npt.NDArray[Any]
    """`RECORD_DTYPE` [num_blocks], writable; record 0 is the null block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolBytes:
    """Where the pool's bytes are; the first four add up to `segment_bytes`."""

    directory_bytes: int
    """Header and backing directory."""
    tables_bytes: int
    payload_bytes: int
    """Whole pages, so up to a page a backing more than the records say."""
    free_bytes: int
    segment_bytes: int
    largest_free_bytes: int
    """The largest single extent: the most that one payload can take now. Part of `free_bytes`."""


class Pool:
    """The daemon's segment. Owns the file descriptor, the mapping and the owner lock."""

    def __init__(self, opened: Opened) -> None:
        """Use `create_or_adopt` or `take_over`."""
        self._segment: SegmentFile = opened.segment
        self._header = opened.header
        self._adopted = opened.adopted
        self._notices = opened.notices
        self._populated = opened.populated
        self._records: dict[int, BackingRecord] = dict(opened.records)
        self._arena = build_arena(opened.header, self._records.values())
        self._closed = False

    @classmethod
    def create_or_adopt(
        cls,
        settings: PoolSettings,
        *,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Pool:
        """Take over the pool that is there, or make one. Follows the table in `recovery.py`.

        All or nothing: when it raises, everything that it made is removed again.

        Args:
            settings: Names, size and modes.
            progress: Called about ten times a second while pages are populated, from the calling
                thread, and once at the end. Not called when a pool is adopted.
            cancel: Set it to give up; `Cancelled` is raised.

        Raises:
            PoolTooLarge: One of the four memory limits cannot hold the pool.
            ForeignSegment: The name is taken by something that is not ours.
            RuntimeDirectoryError: A live daemon owns the pool.
            ConfigError: The NUMA policy names nodes that are not there, or shared memory cannot
                be used.
            CorruptSegmentError: So many untrusted pools stand there that no name is left.
            Cancelled: `cancel` was set.
        """
        return cls.take_over(open_pool(settings, progress=progress, cancel=cancel))

    @classmethod
    def take_over(cls, opened: Opened) -> Pool:
        """The pool of what `open_pool` made or found; it is closed when this raises."""
        try:
            return cls(opened)
        except BaseException:
            opened.segment.close()
            raise

    # --- what it is -------------------------------------------------------------------------

    @property
    def segment_name(self) -> str:
        """Public name, as posix_ipc takes it: `/hisparse-<instance>-<pool>`."""
        return self._segment.name

    @property
    def device(self) -> int:
        """st_dev of the segment; with `inode` its identity, which names cannot give."""
        return self._segment.device

    @property
    def inode(self) -> int:
        """st_ino of the segment."""
        return self._segment.inode

    @property
    def uuid(self) -> bytes:
        """16 random bytes from the header."""
        return self._header.pool_uuid

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self._header.segment_bytes

    @property
    def header(self) -> Header:
        """The checked header."""
        return self._header

    @property
    def adopted(self) -> bool:
        """True when the segment was there before this process."""
        return self._adopted

    @property
    def notices(self) -> tuple[str, ...]:
        """What the start found that an operator should read (warning level).

        A pool of another size, a pool beside one that cannot be used, leftovers removed, a NUMA
        policy or huge pages that had no effect.
        """
        return self._notices

    @property
    def populated(self) -> PopulateReport | None:
        """How population went; None for an adopted pool."""
        return self._populated

    # --- backings ---------------------------------------------------------------------------

    def backings(self) -> tuple[Backing, ...]:
        """The backings in use, by slot.

        Records were checked at adoption; block records were not (that is the directory's:
        `record_checks`).
        """
        return tuple(
            Backing(slot=slot, record=record, table=self._table(record))
            for slot, record in sorted(self._records.items())
        )

    def make_backing(
        self,
        *,
        namespace: int,
        fingerprint: bytes,
        name: str,
        geometry: bytes,
        num_blocks: int,
        payload_bytes: int,
    ) -> Backing:
        """Give a range of the pool to a namespace: two extents and a slot of the directory.

        The block table is zeroed first and the slot's in-use byte is stored last, so a crash at any
        store leaves no backing or a whole one. When it raises, nothing changed.

        Args:
            namespace: 1 to MAX_NAMESPACES.
            fingerprint: 16 B, `geometry.namespace_fingerprint`.
            name: For people.
            geometry: `geometry.encode_geometry`.
            num_blocks: The null block included.
            payload_bytes: Rounded up to a page in the arena, not in the record.

        Raises:
            CapacityError: No free slot, or no extent that large (details: needed, free).
            GeometryError: Fields that a record cannot hold.
            UsageError: Fields that would not be accepted at adoption.
        """
        mapping = self._open().mapping
        slot = self._free_slot()
        table_offset, payload_offset = self._allocate(num_blocks, payload_bytes)
        try:
            record = BackingRecord(
                namespace=namespace, fingerprint=fingerprint, name=name, geometry=geometry,
                generation=self._next_generation(slot), num_blocks=num_blocks,
                table_offset_bytes=table_offset, payload_offset_bytes=payload_offset,
                payload_bytes=payload_bytes,
            )  # fmt: skip
            packed = _pack_checked(record, self.size_bytes)
            table = self._table(record)
        except BaseException:
            self._free(table_offset, num_blocks, payload_offset, payload_bytes)
            raise
        table.view("u1")[:] = 0
        crash_point(AFTER_TABLE)
        start = backing_offset(slot)
        body = start + BACKING_IN_USE_OFFSET + 1
        mapping[body : start + BACKING_RECORD_BYTES] = packed[BACKING_IN_USE_OFFSET + 1 :]
        crash_point(AFTER_BODY)
        mapping[start + BACKING_IN_USE_OFFSET] = packed[BACKING_IN_USE_OFFSET]
        crash_point(AFTER_IN_USE)
        self._records[slot] = record
        return Backing(slot=slot, record=record, table=table)

    def drop_backing(self, slot: int) -> None:
        """Take the range back. The in-use byte is cleared first.

        The caller makes sure that no worker uses it any more and drops its table view.

        Raises:
            UsageError: The slot is not in use.
        """
        mapping = self._open().mapping
        record = self._records.get(slot)
        if record is None:
            raise UsageError(f"slot {slot} of the backing directory is not in use")
        mapping[backing_offset(slot) + BACKING_IN_USE_OFFSET] = 0
        crash_point(AFTER_CLEAR)
        del self._records[slot]
        self._free(
            record.table_offset_bytes, record.num_blocks,
            record.payload_offset_bytes, record.payload_bytes,
        )  # fmt: skip

    def bytes_by_use(self) -> PoolBytes:
        """Where the pool's bytes are."""
        arena, records = self._arena, self._records.values()
        return PoolBytes(
            segment_bytes=self.size_bytes,
            directory_bytes=self.size_bytes - arena.total_bytes,
            tables_bytes=sum(arena.round_up(table_bytes(each.num_blocks)) for each in records),
            payload_bytes=sum(arena.round_up(each.payload_bytes) for each in records),
            free_bytes=arena.free_bytes,
            largest_free_bytes=arena.largest_free_bytes,
        )

    def max_blocks(self, block_stride_bytes: int) -> int:
        """The most blocks (null block included) that one backing with this stride can have now.

        Table and payload are taken from the same extent; 0 where not even two blocks fit.
        """
        if block_stride_bytes < 1:
            raise UsageError(f"a block stride of {block_stride_bytes} bytes")
        arena, room = self._arena, self._arena.largest_free_bytes
        count = room // (block_stride_bytes + table_bytes(1))
        while count > 0 and (
            arena.round_up(table_bytes(count)) + arena.round_up(count * block_stride_bytes) > room
        ):
            count -= 1
        return count if count >= 2 else 0

    # --- the end ----------------------------------------------------------------------------

    def unlink(self) -> None:
        """The first half of `release`: the name goes; `keep` must follow."""
        if not self._closed:
            self._segment.unlink()

    def disown(self) -> None:
        """Let the next daemon adopt the segment from now on; `keep` must follow. Idempotent.

        Unmapping hundreds of GiB takes seconds: a successor need not wait for it.
        """
        self._closed = True
        self._segment.disown()

    def keep(self) -> None:
        """Close and leave the segment for the next daemon. Idempotent.

        Raises:
            UsageError: Views of the mapping are alive; the owner lock is given up all the same and
                the mapping goes with the process.
        """
        self._closed = True
        self._segment.close()

    def release(self) -> None:
        """Unlink the segment, then close. Idempotent.

        The name is removed only if it still stands for this object (device, inode). The memory
        goes when the last worker unmaps it.

        Raises:
            UsageError: Views of the mapping are alive; the name is gone all the same.
        """
        self.unlink()
        self.keep()

    def read_into(self, buffer: memoryview, *, offset_bytes: int) -> None:
        """Fill a buffer from the segment, through its descriptor. Any thread.

        An access through the mapping to memory that the hardware lost would end the process; this
        fails.

        Raises:
            OSError: The bytes cannot be read, or are not there.
            ClosedError: The pool was closed.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self._open().fd, [buffer[done:]], offset_bytes + done)
            if not count:
                raise OSError(errno.ENODATA, "the segment ends before", self._segment.name)
            done += count

    def users_attached(self) -> bool:
        """True while a process other than the daemon holds the segment's user lock.

        Workers take `flock(fd, LOCK_SH)` on the segment when they map it. One system call.
        """
        return self._open().users_attached()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The views of a failing caller are still in its traceback: do not hide its error.
        with contextlib.suppress(UsageError) if exc is not None else contextlib.nullcontext():
            self.keep()

    # --- inside -----------------------------------------------------------------------------

    def _open(self) -> SegmentFile:
        if self._closed:
            raise ClosedError(f"the pool {self._segment.name} is closed")
        return self._segment

    def _table(self, record: BackingRecord) -> npt.NDArray[Any]:
        return table_view(
            self._open().mapping,
            table_offset_bytes=record.table_offset_bytes,
            num_blocks=record.num_blocks,
        )

    def _free_slot(self) -> int:
        for slot in range(MAX_BACKINGS):
            if slot not in self._records:
                return slot
        raise CapacityError(
            f"all {MAX_BACKINGS} backings of the pool are in use",
            remedy="Drop a backing that is not used, or serve this model from another pool",
            needed=1,
            free=0,
        )

    def _next_generation(self, slot: int) -> int:
        """One more than the slot's last record says, which is only a number: it was never trusted.

        0 is left out, so that it can stand for "none".
        """
        offset = backing_offset(slot) + _GENERATION_OFFSET
        (last,) = _GENERATION.unpack_from(self._open().mapping, offset)
        return int(last + 1) & _GENERATION_MASK or 1

    def _allocate(self, num_blocks: int, payload_bytes: int) -> tuple[int, int]:
        if num_blocks < 2 or payload_bytes < 1:
            raise UsageError(
                f"a backing of {num_blocks} blocks and {payload_bytes} bytes",
                remedy="A backing has the null block and at least one more, and a payload",
            )
        table_offset = self._arena.allocate(table_bytes(num_blocks))
        try:
            return table_offset, self._arena.allocate(payload_bytes)
        except BaseException:
            self._arena.free(table_offset, table_bytes(num_blocks))
            raise

    def _free(
        self, table_offset: int, num_blocks: int, payload_offset: int, payload_bytes: int
    ) -> None:
        self._arena.free(table_offset, table_bytes(num_blocks))
        self._arena.free(payload_offset, payload_bytes)


def _pack_checked(record: BackingRecord, segment_bytes: int) -> bytes:
    """The record's bytes, after the check that the next daemon will make.

    Raises:
        UsageError: A field that would not be accepted then.
    """
    packed = pack_backing(record)
    try:
        same = unpack_backing(packed, segment_bytes=segment_bytes) == record
    except CorruptSegmentError as error:
        raise UsageError(
            f"a backing of namespace {record.namespace} with {record.num_blocks} blocks and a "
            f"fingerprint of {len(record.fingerprint)} bytes would not be adopted",
        ) from error
    if not same:
        raise UsageError(f"the backing {record.name!r} does not survive its record")
    return packed
