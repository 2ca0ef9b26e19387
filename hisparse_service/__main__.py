"""`python -m hisparse_service`: the same as the command `hisparse-service`."""

from __future__ import annotations

from hisparse_service.cli.entry import main

if __name__ == "__main__":
    main()
