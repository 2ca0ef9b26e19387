"""Where the command `hisparse-service` begins.

A plain `serve` goes straight to the daemon; everything else is typer's (`main.py`), which takes
longer to import than reserving hundreds of MiB.
"""

from __future__ import annotations

import os
import sys

from hisparse_service.cli import serve_start
from hisparse_service.contract.errors import HiSparseError


def main() -> None:
    """Run the command line; ends the process."""
    _open_standard_files()
    words = sys.argv[1:]
    options = serve_start.quick_options(words[1:]) if words[:1] == ["serve"] else None
    if options is None:
        from hisparse_service.cli.main import main as typer_main

        typer_main()
        return
    try:
        serve_start.run(options)
    except HiSparseError as error:
        from hisparse_service.cli.exit_codes import exit_code_of

        print(f"{error.code}: {error}", file=sys.stderr)
        raise SystemExit(exit_code_of(error)) from None
    except KeyboardInterrupt:  # before there is a daemon that drains, or while it waits for another
        from hisparse_service.cli.exit_codes import INTERRUPTED

        raise SystemExit(INTERRUPTED) from None


def _open_standard_files() -> None:
    """Let nothing else be descriptor 0, 1 or 2, whoever started this with those closed.

    Libraries write to descriptor 2 unasked, and the next file to be opened may be the lock or the
    pool.
    """
    lowest = os.open(os.devnull, os.O_RDWR)
    while lowest <= 2:
        lowest = os.dup(lowest)
    os.close(lowest)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
