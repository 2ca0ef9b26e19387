"""Names of segments: made and taken apart in one place.

    /hisparse-<instance>-<pool>                  a pool
    /hisparse-<instance>-<pool>.<n>              the n-th one that was started beside another
    …either of them….new-<pid>[-<k>]             one that is being built

A pool's name has no `-` and neither has a `.`, so a name belongs to one instance only. A name alone
proves nothing all the same: the header must name the same instance before anything is removed.

Pure: any thread.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from hisparse_service.contract.errors import ConfigError

PREFIX: Final = "/hisparse-"
MAX_BESIDE: Final = 8
"""Numbered pools that may stand beside one that cannot be used."""

_INSTANCE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POOL: Final = re.compile(r"[A-Za-z0-9_]{1,32}")
_NAME: Final = re.compile(
    r"/?hisparse-(?P<instance>[A-Za-z0-9_-]{1,64})-(?P<pool>[A-Za-z0-9_]{1,32})"
    r"(?:\.(?P<beside>[1-9][0-9]{0,2}))?"
    r"(?:\.new-(?P<pid>[1-9][0-9]{0,9})(?:-[0-9]{1,3})?)?"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedName:
    """A segment's name, taken apart."""

    instance: str
    pool_name: str
    """With the number of a pool that stands beside: `main.2`."""
    creator_pid: int | None
    """Set in the name of a segment that is being built."""


def check_instance_name(instance: str) -> str:
    """Give `instance` back.

    Raises:
        ConfigError: Empty, too long, or other letters than the names of segments can carry.
    """
    if not _INSTANCE.fullmatch(instance):
        raise ConfigError(
            f"the instance name {instance!r} does not fit a segment's name",
            remedy="Use 1 to 64 letters, digits, `_` or `-`",
        )
    return instance


def check_pool_name(pool_name: str) -> str:
    """Give `pool_name` back.

    Raises:
        ConfigError: Empty, too long, or other letters than the names of segments can carry.
    """
    if not _POOL.fullmatch(pool_name):
        raise ConfigError(
            f"the pool name {pool_name!r} does not fit a segment's name",
            remedy="Use 1 to 32 letters, digits or `_`",
        )
    return pool_name


def segment_name(instance: str, pool_name: str) -> str:
    """`/hisparse-<instance>-<pool>`, as posix_ipc takes it."""
    return f"{PREFIX}{instance}-{pool_name}"


def beside_name(pool_name: str, number: int) -> str:
    """Pool name of candidate `number`: 1 is the pool itself, 2 the first one beside it."""
    return pool_name if number == 1 else f"{pool_name}.{number}"


def building_name(public_name: str, *, pid: int, attempt: int = 0) -> str:
    """Name of a segment while process `pid` builds it."""
    suffix = f"-{attempt}" if attempt else ""
    return f"{public_name}.new-{pid}{suffix}"


def parse(name: str) -> ParsedName | None:
    """Take a segment's name apart; None where it is not one of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    beside, pid = match["beside"], match["pid"]
    return ParsedName(
        instance=match["instance"],
        pool_name=match["pool"] + (f".{beside}" if beside else ""),
        creator_pid=int(pid) if pid else None,
    )
