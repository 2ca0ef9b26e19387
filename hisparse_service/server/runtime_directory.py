"""The runtime directory: checked before anything is put into it.

It holds the lock, the control socket and the event socket. Whoever can write there can take the
daemon's place, so it must be a real directory, ours, and closed to others.

Called by the daemon at start and by the CLI, on the main thread.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from hisparse_service.contract import limits
from hisparse_service.contract.errors import RuntimeDirectoryError

LOCK_NAME: Final = "daemon.lock"
CONTROL_SOCKET_NAME: Final = "control.sock"
EVENTS_SOCKET_NAME: Final = "events.sock"


def control_endpoint(directory: Path) -> str:
    """Where clients connect their DEALER."""
    return f"ipc://{directory / CONTROL_SOCKET_NAME}"


def events_endpoint(directory: Path) -> str:
    """Where clients connect their SUB."""
    return f"ipc://{directory / EVENTS_SOCKET_NAME}"


def check_path_length(directory: Path) -> None:
    """Refuse a path that no socket address can hold.

    Raises:
        RuntimeDirectoryError: The longest socket path has more bytes than the kernel takes.
    """
    longest = len(os.fsencode(directory / CONTROL_SOCKET_NAME))
    if longest > limits.MAX_UNIX_PATH_BYTES:
        raise RuntimeDirectoryError(
            f"the socket path {directory / CONTROL_SOCKET_NAME} has {longest} bytes, the kernel "
            f"takes {limits.MAX_UNIX_PATH_BYTES}",
            remedy="Choose a shorter runtime_dir",
            limit_bytes=limits.MAX_UNIX_PATH_BYTES, path_bytes=longest,
        )  # fmt: skip


def prepare_runtime_directory(directory: Path) -> None:
    """Make the directory (mode 0700) or check that the one there is ours alone.

    Raises:
        RuntimeDirectoryError: Too long a path, not a directory, another's, or open to others.
    """
    check_path_length(directory)
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise RuntimeDirectoryError(
            f"the runtime directory {directory} cannot be made: {error.strerror}",
            remedy="Set runtime_dir to a place that this user may write to",
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirectoryError(
            f"{directory} is no directory (a link is not followed)",
            remedy="Remove it or choose another runtime_dir",
        )
    if found.st_uid != os.geteuid():
        raise RuntimeDirectoryError(
            f"{directory} belongs to uid {found.st_uid}, the daemon runs as {os.geteuid()}",
            remedy="Choose another runtime_dir, or run as its owner",
            owner_uid=found.st_uid, uid=os.geteuid(),
        )  # fmt: skip
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise RuntimeDirectoryError(
            f"{directory} has mode {mode:04o}: others could take the daemon's sockets",
            remedy=f"chmod 700 {directory}",
            mode=f"{mode:04o}",
        )
