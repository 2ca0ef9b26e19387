"""A daemon that stands still at a named point for as long as a file is there.

Run as `python held_daemon.py <point> <file> serve ...`; the file `<file>.reached` tells that it
stands there.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from hisparse_service.cli.main import main
from hisparse_service.contract import crashpoints


def hold_at(point: str, path: Path) -> None:
    """Install the hook."""

    def reach(_kind: object, name: str) -> None:
        if name == point and path.exists():
            path.with_suffix(".reached").touch()
            while path.exists():
                threading.Event().wait(0.01)

    crashpoints.install(reach)


if __name__ == "__main__":
    hold_at(sys.argv[1], Path(sys.argv[2]))
    sys.argv[1:3] = []
    main()
