"""Notices the end of client processes through pidfds, behind one descriptor for the poller.

Only the control loop calls it. No call blocks. A pidfd names a process, not a number: once it is
open, reuse of the pid cannot confuse it. Between connecting and opening the number could be reused:
a client that announces its start time closes that gap.
"""

from __future__ import annotations

import enum
import os
import select
from types import TracebackType
from typing import Final

from hisparse_service.contract.limits import MAX_SESSIONS

_START_TICKS_FIELD: Final = 19
"""Field 22 of /proc/<pid>/stat, counted from the state that follows the command name."""


class WatchResult(enum.Enum):
    """What came of a `PidWatcher.watch`."""

    WATCHED = "watched"
    NOT_WATCHABLE = "not_watchable"
    """Pid 0 (another PID namespace), or no descriptor left: its socket and its heartbeats must
    tell."""
    GONE = "gone"
    """The process that connected has ended already."""
    REUSED = "reused"
    """The pid belongs to a process with another start time: the client is dead."""


def process_start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is not visible here."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    # The command name may hold spaces and parentheses: count from its last one.
    fields = line[line.rfind(b")") + 2 :].split()
    return int(fields[_START_TICKS_FIELD]) if len(fields) > _START_TICKS_FIELD else None


class PidWatcher:
    """Watches processes; `fileno()` is readable when one has ended.

    Owns its epoll descriptor and one pidfd a watched key, closed by `unwatch`, `poll` or `close`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pidfd_by_key: dict[int, int] = {}
        self._key_by_pidfd: dict[int, int] = {}

    def __enter__(self) -> PidWatcher:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._pidfd_by_key)

    def fileno(self) -> int:
        """Descriptor for a poller; readable when `poll` has something to say."""
        return self._epoll.fileno()

    def watch(self, key: int, pid: int, *, start_ticks: int | None = None) -> WatchResult:
        """Watch a process under a key of the caller (a session id).

        Args:
            key: What `poll` returns. Not watched yet.
            pid: In this PID namespace.
            start_ticks: What the client says of its start (`process_start_ticks` of itself).
        """
        assert key not in self._pidfd_by_key, key
        if pid <= 0:
            return WatchResult.NOT_WATCHABLE
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return WatchResult.GONE
        except OSError:
            return WatchResult.NOT_WATCHABLE
        try:
            # After opening: what is read now belongs to the process that the pidfd holds, or to a
            # later one if that ended meanwhile, and then the pidfd fires at once.
            found = process_start_ticks(pid)
            if start_ticks is not None and found is not None and found != start_ticks:
                os.close(pidfd)
                return WatchResult.REUSED
            self._epoll.register(pidfd, select.EPOLLIN)
        except BaseException:
            os.close(pidfd)
            raise
        self._pidfd_by_key[key] = pidfd
        self._key_by_pidfd[pidfd] = key
        return WatchResult.WATCHED

    def watches(self, key: int) -> bool:
        """Whether the end of this key's process will be told."""
        return key in self._pidfd_by_key

    def unwatch(self, key: int) -> None:
        """Stop watching. Unknown keys are ignored."""
        pidfd = self._pidfd_by_key.pop(key, None)
        if pidfd is not None:
            del self._key_by_pidfd[pidfd]
            self._epoll.unregister(pidfd)
            os.close(pidfd)

    def poll(self) -> list[int]:
        """Keys whose processes ended since the last call; they are not watched any more."""
        events = self._epoll.poll(0, MAX_SESSIONS)
        keys = [self._key_by_pidfd[pidfd] for pidfd, _ in events]
        for key in keys:
            self.unwatch(key)
        return keys

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for pidfd in self._key_by_pidfd:
            os.close(pidfd)
        self._pidfd_by_key.clear()
        self._key_by_pidfd.clear()
        self._epoll.close()
