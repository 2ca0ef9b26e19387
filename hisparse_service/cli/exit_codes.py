"""What the command's exit codes mean; part of its interface."""

from __future__ import annotations

from typing import Final

from hisparse_service.contract.errors import (
    CapacityError,
    ConfigError,
    CorruptSegmentError,
    HiSparseError,
    InternalError,
    PeerError,
)

FAILED: Final = 1
"""Something else went wrong."""
USAGE: Final = 2
"""The command line is wrong (typer's own code)."""
CONFIG: Final = 3
"""Settings, runtime directory or pool size: fix them."""
CAPACITY: Final = 4
"""Not now: not ready, draining, or nothing free."""
PEER: Final = 5
"""No daemon answers there, or it speaks another version."""
SEGMENT: Final = 6
"""A segment that is not ours or is damaged."""
INTERNAL: Final = 70
"""A bug."""
INTERRUPTED: Final = 130
"""Ctrl-C (SIGINT) before the daemon ran; while it runs, it drains and ends with 0."""

_BY_TYPE: Final = (
    (ConfigError, CONFIG),
    (CapacityError, CAPACITY),
    (PeerError, PEER),
    (CorruptSegmentError, SEGMENT),
    (InternalError, INTERNAL),
)


def exit_code_of(error: HiSparseError) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _BY_TYPE if isinstance(error, kind)), FAILED)
