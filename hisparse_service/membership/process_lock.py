"""Which daemon owns a runtime directory: a lock that dies with its process, in three roles.

    token     held by the living daemon: "I live"
    monitor   asks whether a token lives, without owning anything
    cleaner   the sole right to remove what a dead daemon left: proof that no token lives, and that
              none begins to live meanwhile

All three are one `flock` on one file. The file itself is no sign of anything: it is left behind by
SIGKILL on purpose, and only a cleaner removes it. Called at start, at stop and by operators, and
never on the control loop (`acquire` may wait some milliseconds for a monitor's look to end).
The lock belongs to the open file: a forked child that keeps the descriptor keeps the lock.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from hisparse_service.contract.errors import ClosedError, RuntimeDirectoryError
from hisparse_service.membership.liveness import process_start_ticks

_MONITOR_WAIT_S: Final = 0.05
"""A monitor holds a shared lock for microseconds while it looks; a token waits that out."""
_RETRY_S: Final = 0.002
_MAX_REPLACED: Final = 16
"""How often the file may be replaced under our hands before that is called an error."""


class Role(enum.Enum):
    """What a `ProcessLock` is held for."""

    TOKEN = "token"  # noqa: S105
    CLEANER = "cleaner"


class Liveness(enum.Enum):
    """What a monitor sees."""

    ALIVE = "alive"
    DEAD = "dead"
    """The file is there and nobody holds it: its daemon ended without cleaning."""
    ABSENT = "absent"
    """No file: no daemon was here, or it was cleaned."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a monitor sees. The pid is what the holder wrote: for messages, not for decisions."""

    liveness: Liveness
    pid: int = 0
    """Of the last holder, in its own PID namespace; 0 = unknown."""
    start_ticks: int = 0


class ProcessLock:
    """An exclusively held lock file. Made by `acquire`; closed by `release`.

    Usable as a context manager.
    """

    def __init__(self, path: Path, fd: int, role: Role) -> None:
        self._path = path
        self._fd = fd
        self._role = role

    @classmethod
    def acquire(cls, path: Path, *, role: Role, wait_s: float = _MONITOR_WAIT_S) -> ProcessLock:
        """Take the lock, as a daemon (TOKEN) or to clean up after a dead one (CLEANER).

        Args:
            path: The lock file.
            role: What for.
            wait_s: How long to wait for a holder to end; at least a monitor's look.

        Raises:
            RuntimeDirectoryError: A living process holds it (details: holder_pid), or the file is
                not ours.
        """
        for _ in range(_MAX_REPLACED):
            fd = _open(path)
            try:
                if not _lock(fd, wait_s):
                    raise _held(path, fd)
                # A cleaner may have removed the file between our open and our lock: such a lock
                # guards nothing.
                if _is_same_file(path, fd):
                    _write_holder(fd)
                    return cls(path, fd, role)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        raise RuntimeDirectoryError(
            f"{path} is replaced again and again",
            remedy="Look for something that removes files in the runtime directory",
        )

    def __enter__(self) -> ProcessLock:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def role(self) -> Role:
        """What it is held for."""
        return self._role

    @property
    def is_held(self) -> bool:
        """Whether `release` was not called yet."""
        return self._fd >= 0

    def remove(self) -> None:
        """Remove the lock file, as the last thing of a clean-up, and release. Cleaners only.

        Raises:
            ClosedError: Released already.
        """
        if self._fd < 0:
            raise ClosedError("the lock was released")
        assert self._role is Role.CLEANER, self._role
        try:
            if _is_same_file(self._path, self._fd):
                self._path.unlink(missing_ok=True)
        finally:
            self.release()

    def release(self) -> None:
        """Let go; the file stays. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def observe(path: Path, *, owner_uid: int | None = None) -> Observation:
    """Whether the daemon of this lock file lives. Changes nothing.

    Args:
        path: The lock file.
        owner_uid: Whose it must be; this process's user when None. Root may ask for another's.

    Raises:
        RuntimeDirectoryError: The file is another's, or cannot be opened.
    """
    try:
        # Without write access: the directory may be mounted read-only where a monitor looks.
        fd = _open(path, os.O_RDONLY | os.O_NONBLOCK, owner_uid=owner_uid)
    except FileNotFoundError:
        return Observation(Liveness.ABSENT)
    try:
        pid, start_ticks = _read_holder(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Observation(Liveness.ALIVE, pid, start_ticks)
        return Observation(Liveness.DEAD, pid, start_ticks)
    finally:
        os.close(fd)


def _open(path: Path, flags: int = os.O_RDWR | os.O_CREAT, *, owner_uid: int | None = None) -> int:
    owner_uid = os.geteuid() if owner_uid is None else owner_uid
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            raise RuntimeDirectoryError(
                f"{path.parent} does not exist", remedy="Create it with mode 0700"
            ) from None
        raise
    except OSError as error:
        raise RuntimeDirectoryError(
            f"cannot open {path}: {error.strerror}",
            remedy="The runtime directory must be this user's, and a lock file no link",
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != owner_uid:
        os.close(fd)
        raise RuntimeDirectoryError(
            f"{path} belongs to uid {found.st_uid}, not to {owner_uid}, or is no plain file",
            remedy="Choose another runtime directory or instance name",
            uid=found.st_uid,
        )
    return fd


def _lock(fd: int, wait_s: float) -> bool:
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_s:
                return False
            time.sleep(_RETRY_S)
        else:
            return True


def _held(path: Path, fd: int) -> RuntimeDirectoryError:
    pid, _ = _read_holder(fd)
    return RuntimeDirectoryError(
        f"a living process (pid {pid or 'unknown'}) holds {path}",
        remedy="Stop it, replace it by a new one (`hisparse-service handover`), or choose another "
        "instance name",
        holder_pid=pid,
    )


def _is_same_file(path: Path, fd: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)


def _write_holder(fd: int) -> None:
    text = f"{os.getpid()} {process_start_ticks(os.getpid()) or 0}\n".encode()
    # Information only: a full file system must not keep a daemon from starting.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, text, 0)


def _read_holder(fd: int) -> tuple[int, int]:
    fields = os.pread(fd, 64, 0).split()
    if len(fields) == 2 and all(field.isdigit() for field in fields):
        return int(fields[0]), int(fields[1])
    return 0, 0
