"""A daemon whose device children need no GPU. Run as `python device_daemon.py serve ...`."""

from __future__ import annotations

from hisparse_service.cli.main import main
from hisparse_service.pool import device_process
from hisparse_service.testing.device import COMMAND

if __name__ == "__main__":
    device_process.CHILD_COMMAND[:] = COMMAND
    main()
