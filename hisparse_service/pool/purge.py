"""Remove the segments of an instance that no live process owns or uses, and say what was found.

For `hisparse-service purge`: any process of the same user, no daemon needed.
"""

from __future__ import annotations

import dataclasses
import enum


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
    """Not ours: another program, user, instance or an unknown version. Left alone."""
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


def purge(instance: str, *, mode: PurgeMode = PurgeMode.REMOVE) -> tuple[Finding, ...]:
    """Look at every segment of `instance`; remove those that no live process owns or uses.

    Raises:
        ConfigError: The instance name cannot be one.
    """
    raise NotImplementedError
