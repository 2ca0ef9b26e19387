"""Where the command `hisparse-service` begins.

A plain `serve` goes straight to the daemon; everything else is typer's (`main.py`), which takes
longer to import than reserving hundreds of MiB.
"""

from __future__ import annotations

import sys

from hisparse_service.cli import serve_start
from hisparse_service.contract.errors import HiSparseError


def main() -> None:
    """Run the command line; ends the process."""
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
