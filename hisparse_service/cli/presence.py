"""What can be told of a daemon that was asked and did not answer: one finding for all commands.

By its runtime directory, its lock and its socket, as another process sees them. Nothing is changed.
A command looks only when no answer came. Main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import socket
import stat
from pathlib import Path
from typing import Final

from hisparse_service.contract.errors import (
    HiSparseError,
    NotAuthorised,
    RuntimeDirectoryError,
    ServiceUnavailable,
)
from hisparse_service.membership.process_lock import Liveness, Observation, observe
from hisparse_service.server.runtime_directory import CONTROL_SOCKET_NAME, LOCK_NAME

_GREETING_S: Final = 0.2
"""libzmq greets from a thread of its own, so that even a daemon whose loop stands still does."""
_START: Final = "Start one with `hisparse-service serve`, or name the right --instance or "
_START_OR_NAME: Final = _START + "--runtime-dir"
_ADOPTED: Final = "Start it with `hisparse-service serve`: it adopts the pool that was left"


class Knock(enum.Enum):
    """How a socket answers a bare connection."""

    GREETED = "greeted"
    TURNED_AWAY = "turned_away"
    """The connection was taken and closed without a word: the daemon's user filter does that."""
    SILENT = "silent"
    """Something listens, and does not even greet: a stopped process, say."""
    REFUSED = "refused"
    """The socket is there and nobody listens."""
    MISSING = "missing"


class State(enum.Enum):
    """How a daemon that does not answer stands."""

    NOBODY = "nobody"
    """Nobody holds the lock, or there is no directory: no answer will come."""
    CLOSED = "closed"
    """This user may not enter the directory, or the daemon turns it away."""
    SILENT = "silent"
    """A process holds the lock: an answer may still come."""
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Presence:
    """What was found, in words, and what to do."""

    state: State
    found: str
    remedy: str
    owner_uid: int = -1
    """Of the directory; -1: not seen."""

    @property
    def is_certain(self) -> bool:
        """Whether waiting longer cannot help."""
        return self.state in (State.NOBODY, State.CLOSED)

    def error(self, directory: Path, asked: str = "") -> HiSparseError:
        """The error of a command that asked the daemon in `directory`.

        Args:
            directory: The runtime directory.
            asked: What was waited for, in words; empty: nothing.
        """
        if self.state is State.CLOSED:
            return NotAuthorised(
                self.found, remedy=self.remedy, uid=os.geteuid(), owner_uid=self.owner_uid
            )
        ended = f" ({asked})" if asked and not self.is_certain else ""
        return ServiceUnavailable(
            f"no daemon answers in {directory}: {self.found}{ended}", remedy=self.remedy
        )


def knock(path: Path) -> Knock:
    """Connect to a socket, see whether it greets, and hang up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_GREETING_S)
        try:
            caller.connect(os.fspath(path))
            return Knock.GREETED if caller.recv(1) else Knock.TURNED_AWAY
        except FileNotFoundError:
            return Knock.MISSING
        except ConnectionRefusedError:
            return Knock.REFUSED
        except ConnectionError:
            return Knock.TURNED_AWAY
        except OSError:  # no greeting in time, or a full queue of a process that takes nobody
            return Knock.SILENT


def look(directory: Path) -> Presence:
    """How the daemon of this runtime directory stands, for somebody whom it did not answer."""
    try:
        found = directory.stat()
    except PermissionError:
        return _closed(_nearest(directory))
    except (FileNotFoundError, NotADirectoryError):
        missing = _first_missing(directory)
        return Presence(
            state=State.NOBODY, found=f"{missing} is not there: no daemon runs here",
            remedy=_START_OR_NAME,
        )  # fmt: skip
    if not stat.S_ISDIR(found.st_mode):
        return Presence(
            state=State.NOBODY, found=f"{directory} is no directory",
            remedy="Name the daemon's runtime directory with --runtime-dir, or its --instance",
        )  # fmt: skip
    if not os.access(directory, os.R_OK | os.X_OK, effective_ids=True):
        return _closed(directory)
    try:
        seen = observe(directory / LOCK_NAME, owner_uid=found.st_uid)
    except (RuntimeDirectoryError, OSError) as error:
        return Presence(
            state=State.UNKNOWN, found=f"its lock cannot be read: {error}",
            remedy="Run as the daemon's user",
        )  # fmt: skip
    if seen.liveness is Liveness.ALIVE:
        return _of_a_living(directory, seen, found.st_uid)
    return _of_nobody(directory, seen)


def _of_nobody(directory: Path, seen: Observation) -> Presence:
    if seen.liveness is Liveness.ABSENT:
        text = f"nobody holds the lock of {directory}"
        return Presence(state=State.NOBODY, found=text, remedy=_START_OR_NAME)
    last = f"nobody holds the lock; pid {seen.pid} held it last"
    if not (directory / CONTROL_SOCKET_NAME).exists():
        return Presence(state=State.NOBODY, found=f"{last} and ended", remedy=_START_OR_NAME)
    return Presence(
        state=State.NOBODY, found=f"{last} and was killed: its socket is still there",
        remedy=_ADOPTED,
    )  # fmt: skip


def _of_a_living(directory: Path, seen: Observation, owner_uid: int) -> Presence:
    answer = knock(directory / CONTROL_SOCKET_NAME)
    if answer is Knock.TURNED_AWAY and owner_uid != os.geteuid():
        uid = os.geteuid()
        return Presence(
            state=State.CLOSED, owner_uid=owner_uid,
            found=f"the daemon in {directory} (pid {seen.pid}) runs as uid {owner_uid} and turns "
            f"this user (uid {uid}) away",
            remedy=f"Run this as uid {owner_uid}, or name {uid} in the daemon's "
            "server.allowed_uids and restart it",
        )  # fmt: skip
    if answer in (Knock.MISSING, Knock.REFUSED):
        return Presence(
            state=State.SILENT,
            found=f"pid {seen.pid} holds the lock and does not listen: it starts or ends",
            remedy="Try again in a moment; its log says what it does",
        )  # fmt: skip
    return Presence(
        state=State.SILENT, found=f"pid {seen.pid} holds the lock and does not answer",
        remedy=f"See its log and what it does (py-spy dump --pid {seen.pid}; kill -CONT "
        f"{seen.pid} where it was stopped); killing it keeps the pool for the next one",
    )  # fmt: skip


def _closed(place: Path) -> Presence:
    found = place.stat()
    return Presence(
        state=State.CLOSED, owner_uid=found.st_uid,
        found=f"this user (uid {os.geteuid()}) may not enter {place}: it belongs to uid "
        f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}",
        remedy=f"Run this as uid {found.st_uid}; server.allowed_uids helps only users who may "
        "enter the directory, such as root",
    )  # fmt: skip


def _nearest(path: Path) -> Path:
    """The closest directory above that can be looked at: the one that is closed."""
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
