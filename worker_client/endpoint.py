"""Where a daemon is: an endpoint taken apart, and what stands between this process and it.

`Approach` looks at the socket's path while `connect` waits. What no waiting can mend is raised at
once: a path of another kind, a directory or a daemon that is closed to this user. What may still
come (a directory, a socket, somebody who listens) is waited for, and named when it did not come.

The thread that connects.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Final

from hisparse_service.contract.errors import ConfigError, NotAuthorised, ServiceUnavailable
from hisparse_service.contract.limits import MAX_UNIX_PATH_BYTES

__all__ = ["Approach", "ipc_endpoint"]

_SOCKET_NAME: Final = "control.sock"
_GREETING_S: Final = 0.2
"""libzmq greets from a thread of its own, so that even a daemon whose loop stands still does."""
_KNOCK_EVERY_S: Final = 0.1
_SURE_AFTER: Final = 2
"""Knocks in a row that were turned away: a daemon that ends just now may do that once."""

logger = logging.getLogger(__name__)


def ipc_endpoint(address: str) -> str:
    """``ipc://`` and the path of the control socket, of an endpoint as users write it.

    Raises:
        ConfigError: Empty, of another scheme, or longer than a socket's path can be.
    """
    scheme, separator, path = address.rpartition("://")
    if separator and scheme != "ipc":
        raise ConfigError(
            f"the endpoint {address!r} has the scheme {scheme!r}",
            remedy="Use ipc://, the daemon's runtime directory, or embedded://",
        )
    if not path:
        raise ConfigError(
            f"the endpoint {address!r} names no daemon",
            remedy="Give the daemon's runtime directory, ipc:// and the path of its control.sock, "
            "or embedded://",
        )
    if not separator:
        path = str(Path(path).absolute() / _SOCKET_NAME)
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path!r} has {len(os.fsencode(path))} bytes, "
            f"allowed are 1 to {MAX_UNIX_PATH_BYTES}",
            remedy="Give the daemon a shorter runtime directory",
        )
    return f"ipc://{path}"


class Approach:
    """What can be seen of a daemon from outside. Call it while waiting for its answer.

    Args:
        endpoint: As `ipc_endpoint` gives it.
    """

    def __init__(self, endpoint: str) -> None:
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._knock_s = 0.0
        self._turned_away = 0
        self._has_warned = False

    def __call__(self) -> None:
        """Raise what no waiting can mend; say once in the log what is waited for.

        Raises:
            ConfigError: The path leads to something that is no directory or no socket.
            NotAuthorised: The directory, or the daemon, is closed to this user.
        """
        directory = self._path.parent
        try:
            found = directory.stat()
        except PermissionError:
            raise _closed(_nearest(directory)) from None
        except NotADirectoryError:
            raise self._no_directory(_nearest(directory)) from None
        except OSError:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("no such directory: %s; waiting for it", _first_missing(directory))
            return
        if not stat.S_ISDIR(found.st_mode):
            raise self._no_directory(directory)
        try:
            mode = self._path.stat().st_mode
        except PermissionError:
            raise _closed(directory) from None
        except OSError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"{self._path} is no socket",
                remedy="Give the daemon's runtime directory, or ipc:// and its control.sock",
            )
        if found.st_uid != os.geteuid():
            self._see_whether_turned_away(found.st_uid)

    def explain(self, error: ServiceUnavailable) -> ServiceUnavailable:
        """The error of a wait that ended, with what is missing."""
        directory = self._path.parent
        if not directory.exists():
            what = f"no such directory: {_first_missing(directory)}"
        elif not self._path.exists():
            what = f"no {self._path.name} in {directory}: no daemon runs there"
        else:
            return self._explain_socket(error)
        return ServiceUnavailable(
            f"{error.message}: {what}",
            remedy="Start the daemon, or give the runtime directory that it has; in a container, "
            "mount it",
        )

    def _explain_socket(self, error: ServiceUnavailable) -> ServiceUnavailable:
        answer = _knock(self._path)
        if answer is ConnectionRefusedError:
            return ServiceUnavailable(
                f"{error.message}: the socket is there and nobody listens, the daemon was killed",
                remedy="Start it again: it adopts the pool that was left",
            )
        if answer is TimeoutError:
            return ServiceUnavailable(
                f"no answer from the daemon in {self._path.parent}: its socket is taken and does "
                "not even greet, it hangs or is stopped",
                remedy="`hisparse-service doctor` names its process",
            )
        return error

    def _no_directory(self, path: Path) -> ConfigError:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.stat().st_mode):
                return ConfigError(
                    f"{path} is a socket, not a runtime directory",
                    remedy=f"Write ipc://{path}, or the directory that it lies in",
                )
        return ConfigError(
            f"no such directory: {path} is a file", remedy="Give the daemon's runtime directory"
        )

    def _see_whether_turned_away(self, owner_uid: int) -> None:
        now_s = time.monotonic()
        if now_s - self._knock_s < _KNOCK_EVERY_S:
            return
        self._knock_s = now_s
        is_turned_away = _knock(self._path) is ConnectionError
        self._turned_away = self._turned_away + 1 if is_turned_away else 0
        if self._turned_away >= _SURE_AFTER:
            uid = os.geteuid()
            raise NotAuthorised(
                f"the daemon in {self._path.parent} runs as uid {owner_uid} and turns this user "
                f"(uid {uid}) away",
                remedy=f"Run this as uid {owner_uid}, or name {uid} in the daemon's "
                "server.allowed_uids and restart it",
                uid=uid, owner_uid=owner_uid,
            )  # fmt: skip


def _knock(path: Path) -> type[OSError] | None:
    """Connect, see whether the socket greets, and hang up; None: it does.

    Returns:
        ConnectionError where the connection was taken and closed without a word, which is how a
        daemon treats users whom it does not let in; otherwise what went wrong.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_GREETING_S)
        try:
            caller.connect(os.fspath(path))
            return None if caller.recv(1) else ConnectionError
        except ConnectionRefusedError:
            return ConnectionRefusedError
        except ConnectionError:
            return ConnectionError
        except (TimeoutError, BlockingIOError):
            return TimeoutError
        except OSError:
            return OSError


def _closed(place: Path) -> NotAuthorised:
    found = place.stat()
    return NotAuthorised(
        f"this user (uid {os.geteuid()}) may not enter {place}: it belongs to uid {found.st_uid} "
        f"and has mode {stat.S_IMODE(found.st_mode):04o}",
        remedy=f"Run this as uid {found.st_uid}; server.allowed_uids helps only users who may "
        "enter the directory, such as root",
        uid=os.geteuid(), owner_uid=found.st_uid,
    )  # fmt: skip


def _nearest(path: Path) -> Path:
    """The closest directory above that can be looked at."""
    for each in path.parents:
        with contextlib.suppress(OSError):
            each.stat()
            return each
    return Path("/")


def _first_missing(path: Path) -> Path:
    """The topmost part of the path that is not there."""
    missing = path
    for each in path.parents:
        if each.exists():
            break
        missing = each
    return missing
