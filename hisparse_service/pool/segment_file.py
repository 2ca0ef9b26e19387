"""One segment of POSIX shared memory as an open file: made, published, opened, unlinked, closed.

Two locks tell who is alive. Both die with their process and work across PID namespaces:

- the **owner lock**, an exclusive open-file-description lock on byte 0, is held by the one daemon
  that owns the segment, from the moment it exists under its temporary name;
- the **user lock**, `flock(fd, LOCK_SH)`, is held by every worker that maps it.

Whoever removes a segment holds its owner lock, and whoever makes one looks, once it has the lock,
whether its name is still its own; so nobody removes what another is just making.

Any thread; one thread at a time for each object.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable
from typing import Final

import posix_ipc

from hisparse_service.contract.crashpoints import PointKind, call_point, crash_point, declare
from hisparse_service.contract.errors import ClosedError, UsageError
from hisparse_service.contract.segment_header import MAGIC
from hisparse_service.pool import names

SHM_DIR: Final = "/dev/shm"  # noqa: S108 - where glibc's shm_open keeps names, by definition
SEGMENT_MODE: Final = 0o600
MAX_NAME_ATTEMPTS: Final = 16

AFTER_CREATE: Final = declare("segment.after_create")
AFTER_LOCK: Final = declare("segment.after_lock")
AFTER_TRUNCATE: Final = declare("segment.after_truncate")
AFTER_MAP: Final = declare("segment.after_map")
AFTER_POPULATE: Final = declare("segment.after_populate")
AFTER_HEADER_BODY: Final = declare("segment.after_header_body")
AFTER_HEADER: Final = declare("segment.after_header")
AFTER_LINK: Final = declare("segment.after_link")
AFTER_PUBLISH: Final = declare("segment.after_publish")
AFTER_UNLINK: Final = declare("segment.after_unlink")

_CALL_SHM_OPEN: Final = declare("os.shm_open", PointKind.CALL)
_CALL_LOCK: Final = declare("os.lock", PointKind.CALL)
_CALL_TRUNCATE: Final = declare("os.ftruncate", PointKind.CALL)
_CALL_MMAP: Final = declare("os.mmap", PointKind.CALL)
_CALL_LINK: Final = declare("os.link", PointKind.CALL)
_CALL_UNLINK: Final = declare("os.unlink", PointKind.CALL)

# struct flock: l_type, l_whence, l_start, l_len, l_pid, as native C lays it out on 64 bits.
_FLOCK: Final = struct.Struct("@hhqqi4x")


class NameTaken(Exception):
    """The public name is there already; look at it again."""


class SegmentFile:
    """An open segment. Owns the descriptor, the mapping (once mapped) and the owner lock (if held).

    Made by `create` and `open_existing` only.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self._fd = fd
        self._mapping: mmap.mmap | None = None
        self._owner_locked = False
        status = os.fstat(fd)
        self.device = status.st_dev
        self.inode = status.st_ino
        self.size_bytes = status.st_size

    @property
    def fd(self) -> int:
        """The descriptor.

        Raises:
            ClosedError: After close.
        """
        if self._fd < 0:
            raise ClosedError(f"the segment {self.name} is closed")
        return self._fd

    @property
    def mapping(self) -> mmap.mmap:
        """The shared, writable mapping of the whole segment.

        Raises:
            ClosedError: Not mapped, or closed.
        """
        if self._mapping is None:
            raise ClosedError(f"the segment {self.name} is not mapped")
        return self._mapping

    def status(self) -> os.stat_result:
        """Fstat of the open object, whatever its name stands for by now."""
        return os.fstat(self.fd)

    def truncate(self, size_bytes: int) -> None:
        """Give the object its size. No page is reserved yet."""
        call_point(_CALL_TRUNCATE)
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes

    def map(self) -> mmap.mmap:
        """Map all of it. The size must have been checked against fstat."""
        if self._mapping is None:
            call_point(_CALL_MMAP)
            self._mapping = mmap.mmap(self.fd, self.size_bytes)
        return self._mapping

    # --- locks ------------------------------------------------------------------------------

    def try_lock_owner(self) -> bool:
        """Take the owner lock; False when another open file holds it."""
        call_point(_CALL_LOCK)
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        self._owner_locked = True
        return True

    def users_attached(self) -> bool:
        """True while another open file holds the user lock.

        Workers wait for their shared lock, so the instant for which it is taken here is harmless.
        """
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return False

    # --- names ------------------------------------------------------------------------------

    def is_named(self, name: str) -> bool:
        """Whether `name` stands for this very object (device and inode)."""
        try:
            status = os.stat(shm_path(name), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode)

    def unlink(self) -> bool:
        """Remove the name if it still stands for this object; False when it does not.

        Raises:
            UsageError: The owner lock is not held: whoever holds it could be using the name.
        """
        if not self._owner_locked:
            raise UsageError(f"{self.name} must not be unlinked without its owner lock")
        if not self.is_named(self.name):
            return False
        call_point(_CALL_UNLINK)
        posix_ipc.unlink_shared_memory(self.name)
        crash_point(AFTER_UNLINK)
        return True

    def publish(self, public_name: str) -> None:
        """Give the object its public name, without replacing anything, and drop the temporary one.

        A process that dies between the two leaves both; the next start removes the temporary one.

        Raises:
            NameTaken: The public name is there already.
        """
        call_point(_CALL_LINK)
        try:
            os.link(shm_path(self.name), shm_path(public_name), follow_symlinks=False)
        except FileExistsError as error:
            raise NameTaken(public_name) from error
        crash_point(AFTER_LINK)
        building, self.name = self.name, public_name
        os.unlink(shm_path(building))
        crash_point(AFTER_PUBLISH)

    # --- the end ----------------------------------------------------------------------------

    def disown(self) -> None:
        """Give up the owner lock and the descriptor; the mapping stays. Idempotent."""
        if self._fd >= 0:
            if self._owner_locked:
                # The mapping holds a duplicate of the descriptor, so closing would not be enough.
                unlock = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, unlock)
                self._owner_locked = False
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Give up the owner lock, the descriptor and the mapping. Idempotent.

        Raises:
            UsageError: Views of the mapping are alive. Lock and descriptor are gone all the same;
                close again once the views are.
        """
        self.disown()
        if self._mapping is not None:
            try:
                self._mapping.close()
            except BufferError as error:
                raise UsageError(
                    f"views of the mapping of {self.name} are still alive",
                    remedy="Drop every table view before the pool is closed",
                ) from error
            self._mapping = None


def shm_path(name: str) -> str:
    """Path of the object `name` (`/…`) in the file system of shared memory."""
    return SHM_DIR + name


def open_existing(name: str) -> SegmentFile:
    """Open a segment that is there. Nothing is mapped, locked or trusted yet.

    Raises:
        FileNotFoundError: No such name.
        PermissionError: It belongs to another user, or is not a regular file.
    """
    call_point(_CALL_SHM_OPEN)
    # Not posix_ipc: it turns the errors of a directory, link or socket under our name into less
    # telling ones, and a FIFO must not block.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(shm_path(name), flags)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise PermissionError(error.errno, f"{name} is not a shared memory object") from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(
            errno.EPERM, f"{name} is not a shared memory object of uid {os.geteuid()}"
        )
    return SegmentFile(name, fd)


def create(
    public_name: str,
    *,
    size_bytes: int,
    fill: Callable[[SegmentFile], None],
    header: bytes,
) -> SegmentFile:
    """Make a segment: temporary name, size, pages, header, and only then the public name.

    All or nothing: when it raises, no name is left and the memory is given back.

    Args:
        public_name: `/…`; nothing may stand there.
        size_bytes: A multiple of the page.
        fill: Reserves every page of the mapped segment; nothing was written to it before.
        header: The first page.

    Returns:
        The segment, mapped, published, its owner lock held.

    Raises:
        NameTaken: The public name is there already.
        OSError: A call failed.
    """
    segment = _create_building(public_name)
    try:
        segment.truncate(size_bytes)
        crash_point(AFTER_TRUNCATE)
        mapping = segment.map()
        crash_point(AFTER_MAP)
        fill(segment)
        crash_point(AFTER_POPULATE)
        # The magic is stored last: what lacks it is unfinished, what has it has a whole header.
        mapping[len(MAGIC) : len(header)] = header[len(MAGIC) :]
        crash_point(AFTER_HEADER_BODY)
        mapping[: len(MAGIC)] = header[: len(MAGIC)]
        crash_point(AFTER_HEADER)
        segment.publish(public_name)
    except BaseException:
        with contextlib.suppress(OSError, posix_ipc.Error):
            segment.unlink()
        segment.close()
        raise
    return segment


def _create_building(public_name: str) -> SegmentFile:
    """An empty segment under a temporary name that nobody else can be using, its lock held."""
    for attempt in range(MAX_NAME_ATTEMPTS):
        name = names.building_name(public_name, pid=os.getpid(), attempt=attempt)
        call_point(_CALL_SHM_OPEN)
        try:
            shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=SEGMENT_MODE, size=0)
        except posix_ipc.ExistentialError:
            continue  # of a process with the same pid, in another PID namespace
        segment = SegmentFile(name, shared.fd)
        try:
            crash_point(AFTER_CREATE)
            ours = segment.try_lock_owner() and segment.is_named(name)
            crash_point(AFTER_LOCK)
        except BaseException:
            _remove_just_created(segment)
            raise
        if ours:
            return segment
        segment.close()  # a cleaner saw it before it was locked and has removed it, or is about to
    raise FileExistsError(errno.EEXIST, f"no free temporary name for {public_name}")


def _remove_just_created(segment: SegmentFile) -> None:
    """Undo the creation when even the lock could not be had: the name is ours by O_EXCL."""
    if segment.is_named(segment.name):
        posix_ipc.unlink_shared_memory(segment.name)
    segment.close()
