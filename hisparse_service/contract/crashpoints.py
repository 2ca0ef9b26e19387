"""Named places where a test may kill the process or make a system call fail.

Compiled in everywhere, so that what is tested is what runs; an unarmed one costs one global load
and a comparison. This module only holds the hook: `hisparse_service.testing.faults` decides what
happens at a point (it may import `os` and `signal`, the contract may not).

Each point is declared once, at import, in the module that uses it:

    _AFTER_TRUNCATE = crashpoints.declare("segment.after_truncate")
    ...
    crash_point(_AFTER_TRUNCATE)

Any thread of either side. `install` is for tests and for the entry points' arming from the
environment; it is not synchronised with threads that are already running.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final


class PointKind(enum.Enum):
    """What may be armed at a point."""

    CRASH = "crash"
    """Between two steps: the process may be killed here."""
    CALL = "call"
    """Just before a system call: the call may be made to fail here."""


Hook = Callable[[PointKind, str], None]
"""Called at each point that is reached while installed. May kill the process or raise OSError."""

_declared: Final[dict[str, PointKind]] = {}
_hook: Hook | None = None


def declare(name: str, kind: PointKind = PointKind.CRASH) -> str:
    """Add `name` to the registry and give it back.

    Args:
        name: ``<area>.<step>``, unique in the program.
        kind: What may be armed there.

    Raises:
        ValueError: Declared before with the other kind.
    """
    if _declared.setdefault(name, kind) is not kind:
        raise ValueError(f"the point {name!r} is declared as {_declared[name]} already")
    return name


def declared(kind: PointKind = PointKind.CRASH) -> tuple[str, ...]:
    """Names of the points that the modules imported so far declare, sorted.

    `hisparse_service.testing.faults.all_points` imports every module first.
    """
    return tuple(sorted(name for name, its_kind in _declared.items() if its_kind is kind))


def install(hook: Hook | None) -> Hook | None:
    """Set (None: remove) the hook; gives back the one before."""
    global _hook
    before, _hook = _hook, hook
    return before


def crash_point(name: str) -> None:
    """A place between two steps. Does nothing unless a hook is installed."""
    if _hook is not None:
        _hook(PointKind.CRASH, name)


def call_point(name: str) -> None:
    """A place just before a system call. Does nothing unless a hook is installed.

    Raises:
        OSError: The hook was told to fail this call.
    """
    if _hook is not None:
        _hook(PointKind.CALL, name)
