"""A starting daemon's way to its segment: survey, decide by the table, act.

Runs on a helper thread of the daemon and may take minutes. All or nothing: what it made is gone
when it raises, and nothing that it merely found was changed, but for leftovers of dead creators and
an empty pool of another size.
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

import posix_ipc

from hisparse_service.contract.errors import (
    ConfigError,
    CorruptSegmentError,
    ForeignSegment,
    HiSparseError,
    PoolTooLarge,
    RuntimeDirectoryError,
)
from hisparse_service.contract.limits import MIB
from hisparse_service.contract.segment_header import (
    POOL_UUID_BYTES,
    BackingRecord,
    Header,
    pack_header,
)
from hisparse_service.contract.sizes import size_text
from hisparse_service.pool import huge_pages, memory_limits, names, numa, os_calls, survey
from hisparse_service.pool.populate import PopulateReport, ProgressCallback, populate
from hisparse_service.pool.recovery import (
    Action,
    Found,
    LeftoverAction,
    Name,
    decide,
    decide_leftover,
)
from hisparse_service.pool.segment_file import NameTaken, SegmentFile, create
from hisparse_service.pool.settings import HugePages, MemoryLock, PoolSettings

MAX_START_ATTEMPTS: Final = 8
"""How often the survey is repeated because another process took or gave up a name meanwhile."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SHORTAGE: Final = (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EDQUOT, errno.EAGAIN)
"""What ftruncate, fallocate, MADV_POPULATE_WRITE and mlock say where memory is short."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A segment that this process owns: mapped, its owner lock held."""

    segment: SegmentFile
    header: Header
    adopted: bool
    records: tuple[tuple[int, BackingRecord], ...] = ()
    populated: PopulateReport | None = None
    notices: tuple[str, ...] = ()


def open_pool(
    settings: PoolSettings,
    *,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
    populate: Callable[..., PopulateReport] = populate,
) -> Opened:
    """See `Pool.create_or_adopt`, whose errors these are.

    Args:
        settings: Names, size and modes.
        progress: How far population is.
        cancel: Set it to give up.
        populate: What reserves the pages: `populate.populate`, or `Reserver.populate`.
    """
    opening = _Opening(settings, progress, cancel, populate)
    for _attempt in range(MAX_START_ATTEMPTS):
        try:
            return opening.attempt()
        except NameTaken:
            continue
        except (OSError, posix_ipc.Error) as error:
            raise opening.translate(error) from error
    raise RuntimeDirectoryError(
        f"the name {names.segment_name(settings.instance, settings.pool_name)} was taken by "
        f"another process {MAX_START_ATTEMPTS} times while the pool was made",
        remedy="Two daemons of one instance are starting: stop one of them",
    )


class _Next(enum.Enum):
    """What a name that was not adopted is good for."""

    FREE = "free"
    LOOK_ON = "look_on"


class _Opening:
    """One start. Keeps what an operator should read."""

    def __init__(
        self,
        settings: PoolSettings,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
        populate: Callable[..., PopulateReport],
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._cancel = cancel
        self._populate = populate
        self._size_bytes = -(-settings.pool_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._notices: dict[str, None] = {}  # in order, each once

    def attempt(self) -> Opened:
        self._remove_leftovers()
        free_name: str | None = None
        for number in range(1, names.MAX_BESIDE + 1):
            pool_name = names.beside_name(self._settings.pool_name, number)
            found = survey.look(names.segment_name(self._settings.instance, pool_name))
            try:
                opened = self._act(found, number)
            except BaseException:
                if found is not None:
                    found.close()
                raise
            if isinstance(opened, Opened):
                return opened
            if opened is _Next.FREE:
                free_name = free_name or pool_name
        if free_name is None:
            raise CorruptSegmentError(
                f"{names.MAX_BESIDE} pools that cannot be used stand under the names of "
                f"{names.segment_name(self._settings.instance, self._settings.pool_name)}",
                remedy="`hisparse-service purge` removes those that nobody uses",
            )
        return self._create(free_name)

    # --- what stands there ------------------------------------------------------------------

    def _remove_leftovers(self) -> None:
        for name in survey.list_names(self._settings.instance):
            parsed = names.parse(name)
            ours = parsed is not None and parsed.pool_name.split(".")[0] == self._settings.pool_name
            if not ours or parsed is None or parsed.creator_pid is None:
                continue
            found = survey.look(name)
            if found is None:
                continue
            try:
                action = decide_leftover(found.header_found, found.owner)
                if action is LeftoverAction.REMOVE_LEFTOVER and found.segment is not None:
                    found.segment.unlink()
                    self._notice(f"{name} was removed: its creator died before it was finished")
                elif action is LeftoverAction.LEAVE_AND_REPORT:
                    self._notice(f"{name} was left alone: {found.reason}")
            finally:
                found.close()

    def _act(self, found: survey.Survey | None, number: int) -> Opened | _Next:
        """Adopt, refuse, or say what the name is good for."""
        if found is None:
            assert decide(Found(name=Name.ABSENT)) is Action.CREATE
            return _Next.FREE
        action = decide(found.found(wanted_bytes=self._size_bytes))
        if action is Action.ADOPT:
            return self._adopt(found)
        if action is Action.ADOPT_OTHER_SIZE:
            assert found.segment is not None
            self._notice(
                f"{found.name} has {size_text(found.segment.size_bytes)}, pool.bytes asks for "
                f"{size_text(self._size_bytes)}: adopted as it is, because it is in use or holds "
                "backings"
            )
            return self._adopt(found)
        if action is Action.REPLACE:
            assert found.segment is not None
            found.segment.unlink()
            found.close()
            self._notice(f"{found.name} was empty and of another size: it is made anew")
            return _Next.FREE
        if action is Action.REFUSE_LIVE:
            raise _refuse_live(found)
        if action is Action.REFUSE_FOREIGN and number == 1:
            raise _refuse_foreign(found)
        found.close()
        self._notice(f"{found.name} cannot be used and was left alone: {found.reason}")
        return _Next.LOOK_ON

    def _adopt(self, found: survey.Survey) -> Opened:
        assert found.segment is not None
        assert found.header is not None
        found.segment.map()
        self._lock_pages(found.segment)
        return Opened(
            segment=found.segment, header=found.header, adopted=True, records=found.records,
            notices=tuple(self._notices),
        )  # fmt: skip

    # --- a new one --------------------------------------------------------------------------

    def _create(self, pool_name: str) -> Opened:
        settings = self._settings
        memory_limits.check_limits(
            self._size_bytes, memory_lock=settings.memory_lock, sources=settings.sources
        )
        header = Header(
            pool_uuid=os.urandom(POOL_UUID_BYTES), instance=settings.instance, pool_name=pool_name,
            segment_bytes=self._size_bytes, page_bytes=_PAGE_BYTES,
            created_unix_ns=time.time_ns(), creator_pid=os.getpid(),
        )  # fmt: skip
        reports: list[PopulateReport] = []
        segment = create(
            names.segment_name(settings.instance, pool_name),
            size_bytes=self._size_bytes,
            fill=lambda building: reports.append(self._fill(building)),
            header=pack_header(header),
        )
        return Opened(
            segment=segment, header=header, adopted=False, populated=reports[0],
            notices=tuple(self._notices),
        )  # fmt: skip

    def _fill(self, segment: SegmentFile) -> PopulateReport:
        """Placement and page size first: they only hold for pages that are not there yet."""
        settings = self._settings
        address = os_calls.address_of(segment.mapping)
        placed = numa.apply(
            numa.parse_policy(settings.numa), address=address, length_bytes=self._size_bytes
        )
        if placed.message:
            self._notice(placed.message)
        asked_huge = settings.huge_pages is HugePages.ADVISE
        refusal = huge_pages.advise(address, self._size_bytes) if asked_huge else ""
        report = self._populate(
            fd=segment.fd, address=address, size_bytes=self._size_bytes,
            threads=settings.populate_threads, method=settings.populate_method,
            progress=self._progress, cancel=self._cancel,
        )  # fmt: skip
        if asked_huge:
            huge = huge_pages.huge_bytes(address)
            self._notice(
                refusal
                or f"huge pages: {huge // MIB} MiB of {self._size_bytes // MIB} MiB are "
                "mapped with them"
            )
        self._lock_pages(segment)
        return report

    def _lock_pages(self, segment: SegmentFile) -> None:
        if self._settings.memory_lock is MemoryLock.LOCK:
            os_calls.mlock(os_calls.address_of(segment.mapping), segment.size_bytes)

    # --- what to say ------------------------------------------------------------------------

    def _notice(self, text: str) -> None:
        self._notices[text] = None

    def translate(self, error: OSError | posix_ipc.Error) -> HiSparseError:
        """The error tree's word for a failed call; the caller keeps the cause."""
        if isinstance(error, OSError) and error.errno in _SHORTAGE:
            return self._too_large(error)
        return ConfigError(
            f"shared memory cannot be used: {error}",
            remedy="Check that /dev/shm is mounted, writable, and that descriptors are left",
        )

    def _too_large(self, error: OSError) -> PoolTooLarge:
        """Which limit it was: the one with the least left, now that the pool did not fit."""
        settings = self._settings
        readings = memory_limits.read_limits(
            memory_lock=settings.memory_lock, sources=settings.sources
        )
        if not readings:
            return PoolTooLarge(
                f"the pool's {size_text(self._size_bytes)} cannot be reserved: {error}",
                remedy="Set a smaller pool.bytes",
                limit="unknown", limit_bytes=0, needed_bytes=self._size_bytes,
            )  # fmt: skip
        tightest = min(readings, key=lambda reading: reading.available_bytes)
        if tightest.available_bytes > self._size_bytes:
            return PoolTooLarge(
                f"the pool's {size_text(self._size_bytes)} could not be reserved: {error}; now "
                f"that they were given back, {tightest.source} leaves "
                f"{size_text(tightest.available_bytes)} (limit: {tightest.limit.value})",
                remedy="Look what took memory at that time, or ended the process (`dmesg`), and "
                "start again; or set a smaller pool.bytes",
                limit=tightest.limit.value, limit_bytes=tightest.limit_bytes,
                available_bytes=tightest.available_bytes, needed_bytes=self._size_bytes,
            )  # fmt: skip
        return memory_limits.pool_too_large(tightest, needed_bytes=self._size_bytes)


def _refuse_live(found: survey.Survey) -> RuntimeDirectoryError:
    pid = found.header.creator_pid if found.header is not None else 0
    return RuntimeDirectoryError(
        f"the segment {found.name} is owned by a live daemon (made by pid {pid})",
        remedy="Stop that daemon, hand over to this one, or use another instance name",
    )


def _refuse_foreign(found: survey.Survey) -> ForeignSegment:
    return ForeignSegment(
        f"the segment name {found.name} is taken by something that is not ours: {found.reason}",
        remedy="It was left as it is; choose another instance or pool name, or remove it by hand",
    )
