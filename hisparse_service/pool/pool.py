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

import dataclasses
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy.typing as npt

from hisparse_service.contract.segment import BackingRecord, Header
from hisparse_service.pool.populate import PopulateReport, Progress
from hisparse_service.pool.settings import PoolSettings


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
    """Where the pool's bytes are; the four numbers add up to `segment_bytes`."""

    segment_bytes: int
    directory_bytes: int
    """Header and backing directory."""
    tables_bytes: int
    payload_bytes: int
    free_bytes: int
    largest_free_bytes: int
    """The largest single extent: the most that one payload can take now. Part of `free_bytes`."""


class Pool:
    """The daemon's segment. Owns the file descriptor, the mapping and the owner lock."""

    @classmethod
    def create_or_adopt(
        cls,
        settings: PoolSettings,
        *,
        progress: Callable[[Progress], None] | None = None,
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
            ConfigError: The NUMA policy names nodes that are not there.
            Cancelled: `cancel` was set.
        """
        raise NotImplementedError

    # --- what it is -------------------------------------------------------------------------

    @property
    def segment_name(self) -> str:
        """Public name, as posix_ipc takes it: `/hisparse-<instance>-<pool>`."""
        raise NotImplementedError

    @property
    def device(self) -> int:
        """st_dev of the segment; with `inode` its identity, which names cannot give."""
        raise NotImplementedError

    @property
    def inode(self) -> int:
        """st_ino of the segment."""
        raise NotImplementedError

    @property
    def uuid(self) -> bytes:
        """16 random bytes from the header."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole segment."""
        raise NotImplementedError

    @property
    def header(self) -> Header:
        """The checked header."""
        raise NotImplementedError

    @property
    def adopted(self) -> bool:
        """True when the segment was there before this process."""
        raise NotImplementedError

    @property
    def notices(self) -> tuple[str, ...]:
        """What the start found that an operator should read (warning level): a pool of another
        size, a pool beside one that cannot be used, leftovers removed, a NUMA policy or huge pages
        that had no effect.
        """
        raise NotImplementedError

    @property
    def populated(self) -> PopulateReport | None:
        """How population went; None for an adopted pool."""
        raise NotImplementedError

    # --- backings ---------------------------------------------------------------------------

    def backings(self) -> tuple[Backing, ...]:
        """The backings in use, by slot. Records were checked at adoption; block records were not
        (that is the directory's: `record_checks`).
        """
        raise NotImplementedError

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
        store leaves no backing or a whole one.

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
        """
        raise NotImplementedError

    def drop_backing(self, slot: int) -> None:
        """Take the range back. The in-use byte is cleared first.

        The caller makes sure that no worker uses it any more and drops its table view.

        Raises:
            UsageError: The slot is not in use.
        """
        raise NotImplementedError

    def bytes_by_use(self) -> PoolBytes:
        """Where the pool's bytes are."""
        raise NotImplementedError

    def max_blocks(self, block_stride_bytes: int) -> int:
        """The most blocks (null block included) that one backing with this stride can have now."""
        raise NotImplementedError

    # --- the end ----------------------------------------------------------------------------

    def keep(self) -> None:
        """Close and leave the segment for the next daemon. Idempotent.

        Raises:
            UsageError: Views of the mapping are alive; the owner lock is given up all the same and
                the mapping goes with the process.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Unlink the segment if its name still stands for it (device, inode), then close.
        Idempotent; the memory goes when the last worker unmaps it.

        Raises:
            UsageError: Views of the mapping are alive; the name is gone all the same.
        """
        raise NotImplementedError

    def users_attached(self) -> bool:
        """True while a process other than the daemon holds the segment's user lock (workers take
        `flock(fd, LOCK_SH)` on the segment when they map it). One system call.
        """
        raise NotImplementedError

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.keep()
