"""Look at what stands under a name: its locks, and every byte that would be trusted.

Nothing is mapped (a short file would be a SIGBUS) and nothing is changed. What is found stays open
with its owner lock held, so that it cannot change until something was done about it. Any thread.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Final

from hisparse_service.contract.errors import CorruptSegmentError, ForeignSegment
from hisparse_service.contract.limits import MAX_BACKINGS
from hisparse_service.contract.segment_header import (
    ARENA_OFFSET,
    BACKING_DIRECTORY_OFFSET,
    BACKING_RECORD_BYTES,
    HEADER_BYTES,
    MAGIC,
    BackingRecord,
    Header,
    table_bytes,
    unpack_backing,
    unpack_header,
)
from hisparse_service.pool import names
from hisparse_service.pool.arena import Arena
from hisparse_service.pool.recovery import Contents, Found, HeaderFound, Name, Owner, Size, Users
from hisparse_service.pool.segment_file import SHM_DIR, SegmentFile, open_existing, shm_path

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_LOCK_ATTEMPTS: Final = 5
_LOCK_RETRY_S: Final = 0.02
_BLOCK_BYTES: Final = 512
"""Unit of st_blocks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unopened:
    """What a name alone tells of something that this process may not open."""

    owner_uid: int
    size_bytes: int
    is_regular: bool
    """A file, as segments are: it may be a pool, and it may live."""


@dataclasses.dataclass
class Survey:
    """What was found under one name. Close it, or take its segment over."""

    name: str
    header_found: HeaderFound
    owner: Owner = Owner.FREE
    contents: Contents = Contents.EMPTY
    users: Users = Users.NONE
    reason: str = ""
    """Why it is not good, for people."""
    segment: SegmentFile | None = None
    """Open, its owner lock held where `owner` is FREE. None for what could not be opened."""
    unopened: Unopened | None = None
    """Set where `segment` is None."""
    header: Header | None = None
    """Set where `header_found` is GOOD."""
    records: tuple[tuple[int, BackingRecord], ...] = ()
    """(slot, record), where `contents` is BACKINGS."""

    def found(self, *, wanted_bytes: int) -> Found:
        """The row's input."""
        same = self.segment is not None and self.segment.size_bytes == wanted_bytes
        return Found(
            name=Name.PRESENT,
            header=self.header_found,
            owner=self.owner,
            size=Size.SAME if same else Size.DIFFERENT,
            contents=self.contents,
            users=self.users,
        )

    def close(self) -> None:
        """Give up the lock and the descriptor. Idempotent."""
        if self.segment is not None:
            self.segment.close()


def look(name: str) -> Survey | None:
    """Survey one name; None where nothing is there.

    Raises:
        OSError: It cannot be looked at now (no descriptors left, say).
    """
    try:
        segment = open_existing(name)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        return _look_outside(name, error)
    try:
        return _look_inside(name, segment)
    except BaseException:
        segment.close()
        raise


def _look_outside(name: str, error: PermissionError) -> Survey | None:
    """What could not be opened, by what everybody may see of it."""
    try:
        status = os.lstat(shm_path(name))
    except FileNotFoundError:
        return None
    unopened = Unopened(
        owner_uid=status.st_uid, size_bytes=status.st_size, is_regular=stat.S_ISREG(status.st_mode)
    )
    reason = error.strerror or str(error)
    if unopened.is_regular:
        asking = os.geteuid()
        reason = (
            f"it belongs to uid {status.st_uid}; this user ({asking}) cannot see whether it lives"
            if status.st_uid != asking
            else f"it cannot be opened ({reason}): whether it lives cannot be seen"
        )
    return Survey(name=name, header_found=HeaderFound.FOREIGN, reason=reason, unopened=unopened)


def _look_inside(name: str, segment: SegmentFile) -> Survey | None:
    survey = Survey(name=name, header_found=HeaderFound.GOOD, segment=segment)
    survey.owner = _lock(segment)
    if not segment.is_named(name):
        survey.close()  # it went, or was replaced, between the open and the lock
        return None
    if segment.users_attached():
        survey.users = Users.ATTACHED
    segment.size_bytes = segment.status().st_size
    _check_header(survey, segment)
    if survey.header is not None:
        _check_contents(survey, segment)
    return survey


def _lock(segment: SegmentFile) -> Owner:
    """Try a few times: another survey (a purge, say) may hold the lock for an instant."""
    for _attempt in range(_LOCK_ATTEMPTS):
        if segment.try_lock_owner():
            return Owner.FREE
        time.sleep(_LOCK_RETRY_S)
    return Owner.HELD


def _check_header(survey: Survey, segment: SegmentFile) -> None:
    page = os.pread(segment.fd, HEADER_BYTES, 0)
    if page[: len(MAGIC)] in (b"", bytes(len(MAGIC))):
        survey.header_found, survey.reason = HeaderFound.UNFINISHED, "it has no header"
        return
    if page[: len(MAGIC)] != MAGIC:
        survey.header_found = HeaderFound.FOREIGN
        survey.reason = f"it does not begin with {MAGIC!r}"
        return
    try:
        header = unpack_header(page, segment_bytes=segment.size_bytes)
    except ForeignSegment as error:
        survey.header_found, survey.reason = HeaderFound.WRONG_VERSION, error.message
        return
    except CorruptSegmentError as error:
        survey.header_found, survey.reason = HeaderFound.CORRUPT, error.message
        return
    parsed = names.parse(survey.name)
    if parsed is None or (header.instance, header.pool_name) != (parsed.instance, parsed.pool_name):
        survey.header_found = HeaderFound.FOREIGN
        survey.reason = (
            f"its header says instance {header.instance!r}, pool {header.pool_name!r}: another name"
        )
        return
    missing = segment.size_bytes - segment.status().st_blocks * _BLOCK_BYTES
    page_bytes = header.page_bytes
    on_pages = page_bytes > 0 and not page_bytes % _PAGE_BYTES
    if missing > 0 or not on_pages or header.segment_bytes % page_bytes:
        survey.header_found = HeaderFound.CORRUPT
        survey.reason = (
            f"{missing} bytes of it are not reserved (it was cut or has holes)"
            if missing > 0
            else f"it was made with pages of {page_bytes} bytes, they have {_PAGE_BYTES} here"
        )
        return
    survey.header = header


def _check_contents(survey: Survey, segment: SegmentFile) -> None:
    assert survey.header is not None
    try:
        records = tuple(read_backings(segment))
        build_arena(survey.header, (record for _slot, record in records))
    except CorruptSegmentError as error:
        survey.contents, survey.reason = Contents.CORRUPT, f"backing directory: {error.message}"
        return
    survey.records = records
    survey.contents = Contents.BACKINGS if records else Contents.EMPTY


def read_backings(segment: SegmentFile) -> Iterator[tuple[int, BackingRecord]]:
    """The used slots of the backing directory and their checked records.

    Raises:
        CorruptSegmentError: A record fails a check.
    """
    length = MAX_BACKINGS * BACKING_RECORD_BYTES
    directory = memoryview(os.pread(segment.fd, length, BACKING_DIRECTORY_OFFSET))
    for slot in range(MAX_BACKINGS):
        raw = directory[slot * BACKING_RECORD_BYTES : (slot + 1) * BACKING_RECORD_BYTES]
        record = unpack_backing(raw, segment_bytes=segment.size_bytes)
        if record is not None:
            yield slot, record


def build_arena(header: Header, records: Iterable[BackingRecord]) -> Arena:
    """The arena of a segment with these backings.

    Raises:
        CorruptSegmentError: Two extents overlap, or one is not on a page.
    """
    start = -(-ARENA_OFFSET // header.page_bytes) * header.page_bytes
    arena = Arena(start_bytes=start, end_bytes=header.segment_bytes, page_bytes=header.page_bytes)
    for record in records:
        arena.reserve(record.table_offset_bytes, table_bytes(record.num_blocks))
        arena.reserve(record.payload_offset_bytes, record.payload_bytes)
    return arena


def list_names(instance: str) -> tuple[str, ...]:
    """Names (`/…`) in shared memory that can belong to `instance`, sorted."""
    found = []
    for entry in os.listdir(SHM_DIR):
        parsed = names.parse(entry)
        if parsed is not None and parsed.instance == instance:
            found.append(f"/{entry}")
    return tuple(sorted(found))
