"""Remove the segments of an instance that no live process owns or uses, and say what was found.

For `hisparse-service purge`: any process of the same user, no daemon needed. A name is never proof.
Four things are, all of them together: the header names this instance (or was never finished), the
owner lock was free and is held from here on, nobody holds the user lock, and no process that can be
seen has it mapped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from pathlib import Path
from typing import Final

from hisparse_service.pool import names, survey
from hisparse_service.pool.recovery import Contents, HeaderFound, Owner, Users
from hisparse_service.pool.segment_file import SegmentFile

_PROC: Final = Path("/proc")


class Verdict(enum.Enum):
    """What was found out about one segment."""

    REMOVED = "removed"
    REMOVABLE = "removable"
    """Only looked at (`PurgeMode.REPORT`): nobody owns or uses it."""
    OWNED = "owned"
    """A live daemon holds the owner lock."""
    IN_USE = "in_use"
    """A live process has it mapped, or holds the user lock."""
    FOREIGN = "foreign"
    """Not ours: another program, instance or an unknown version. Left alone."""
    UNSEEN = "unseen"
    """It could not be opened, as another user's cannot: it may be a pool in use. Left alone."""
    GONE = "gone"
    """It went, or its name passed to another segment, while it was looked at."""


class PurgeMode(enum.Enum):
    """What to do with what nobody owns."""

    REMOVE = "remove"
    REPORT = "report"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One segment under the instance's names."""

    name: str
    size_bytes: int
    verdict: Verdict
    reason: str
    is_damaged: bool = False
    """Of ours, and no daemon could adopt it."""
    owner_uid: int | None = None
    """Set for what could not be opened."""


def purge(instance: str, *, mode: PurgeMode = PurgeMode.REMOVE) -> tuple[Finding, ...]:
    """Look at every segment of `instance`; remove those that no live process owns or uses.

    A segment of ours whose header or contents are corrupt is removed too: this is the operator's
    word, where a starting daemon leaves it alone.

    Raises:
        ConfigError: The instance name cannot be one.
    """
    names.check_instance_name(instance)
    return tuple(purge_one(name, mode) for name in survey.list_names(instance))


def purge_one(name: str, mode: PurgeMode) -> Finding:
    """Look at one segment; remove it if nobody owns or uses it and `mode` says so."""
    found = survey.look(name)
    if found is None:
        return Finding(name=name, size_bytes=0, verdict=Verdict.GONE, reason="it went meanwhile")
    try:
        unopened = found.unopened
        seen = found.segment or unopened
        size = seen.size_bytes if seen is not None else 0
        verdict, reason = _judge(name, found)
        if verdict is Verdict.REMOVABLE and mode is PurgeMode.REMOVE and found.segment is not None:
            verdict = Verdict.REMOVED if found.segment.unlink() else Verdict.GONE
        is_damaged = found.header is None or found.contents is Contents.CORRUPT
        return Finding(
            name=name, size_bytes=size, verdict=verdict, reason=reason, is_damaged=is_damaged,
            owner_uid=unopened.owner_uid if unopened is not None else None,
        )  # fmt: skip
    finally:
        found.close()


def _judge(name: str, found: survey.Survey) -> tuple[Verdict, str]:
    if found.segment is None:
        may_live = found.unopened is not None and found.unopened.is_regular
        return Verdict.UNSEEN if may_live else Verdict.FOREIGN, found.reason
    parsed = names.parse(name)
    building = parsed is not None and parsed.creator_pid is not None
    unfinished = found.header_found is HeaderFound.UNFINISHED
    foreign = (HeaderFound.FOREIGN, HeaderFound.WRONG_VERSION)
    is_foreign = found.header_found in foreign or (unfinished and not building)
    # Of another version, say: what it is cannot be told, that it lives can.
    prefix = f"{found.reason}; " if is_foreign else ""
    if found.owner is Owner.HELD:
        return Verdict.OWNED, f"{prefix}a live daemon holds its owner lock"
    if found.users is Users.ATTACHED:
        return Verdict.IN_USE, f"{prefix}a live process holds its user lock"
    mappers = mapping_pids(found.segment)
    if mappers:
        return Verdict.IN_USE, f"{prefix}mapped by pid {', '.join(map(str, mappers))}"
    if is_foreign:
        return Verdict.FOREIGN, found.reason
    return Verdict.REMOVABLE, found.reason or "no live process owns or uses it"


def mapping_pids(segment: SegmentFile, proc_dir: Path = _PROC) -> tuple[int, ...]:
    """Processes that have the segment mapped, of those whose maps may be read.

    Segments have mode 0600, so only this user's and root's processes can be among the others;
    those of other PID namespaces are told by their user lock.
    """
    device = f"{os.major(segment.device):02x}:{os.minor(segment.device):02x}"
    wanted = [device, str(segment.inode)]
    pids = []
    for entry in proc_dir.iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            lines = (entry / "maps").read_text(errors="replace").splitlines()
            if any(line.split(None, 5)[3:5] == wanted for line in lines):
                pids.append(int(entry.name))
    return tuple(sorted(pids))
