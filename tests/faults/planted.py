"""Bugs on purpose: each breaks one invariant, and a storm over it must see wrong bytes.

    python -m tests.faults.planted skip_after_check serve --instance …

runs the service's command with the bug; storm workers call `plant` themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

VARIABLE = "HISPARSE_STORM_PLANT"


def skip_after_check() -> None:
    """I3: the read guard checks before the copy only."""
    from worker_client.blocks import ReadGuard

    ReadGuard.__exit__ = lambda *_: None  # type: ignore[method-assign]


def same_generation() -> None:
    """I3: a block is given out again under the generation that it had."""
    from hisparse_service.directory import blocks

    def stay(generations: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        return generations

    blocks.next_generations = stay
    blocks.next_generation = lambda generation: generation


def publish_early() -> None:
    """I2: published first, filled then. The storm's worker looks at this itself."""


def no_quarantine() -> None:
    """I1: blocks of a process that stands still are given to others while it may write on."""
    from hisparse_service.server import clients

    returned = clients.UnpublishedBlocks.RETURN
    clients.UnpublishedBlocks = SimpleNamespace(  # type: ignore[assignment,misc]
        RETURN=returned, QUARANTINE=returned
    )


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug for bug in (skip_after_check, same_generation, publish_early, no_quarantine)
}
_IN_DAEMON = ("same_generation", "no_quarantine")


def is_planted(name: str) -> bool:
    """Whether this process has the bug."""
    return os.environ.get(VARIABLE) == name


def plant(name: str) -> None:
    """Break a worker; does nothing for no name and for the daemon's bugs."""
    if name and name not in _IN_DAEMON:
        BUGS[name]()


def main() -> None:
    """The service's command, with a bug of the daemon's."""
    name = sys.argv.pop(1)
    if name in _IN_DAEMON:
        BUGS[name]()
    from hisparse_service.cli.main import main as service

    service()


if __name__ == "__main__":
    main()
