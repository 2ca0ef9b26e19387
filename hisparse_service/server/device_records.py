"""One device backing: its states, what tells it apart, and the process that holds it.

Control loop only; `device_backings.DeviceBackings` owns all of them.
"""

from __future__ import annotations

import enum
import os
import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hisparse_service.contract import limits
from hisparse_service.contract.errors import HiSparseError, IllegalTransition

if TYPE_CHECKING:
    from hisparse_service.pool.device_process import DeviceProcess


class BackingState(enum.Enum):
    """Where a device backing stands."""

    ALLOCATING = "allocating"
    """The child was asked."""
    READY = "ready"
    """The memory is there, held or waiting for its next holder."""
    ABANDONED = "abandoned"
    """The child was asked, nobody wants it any more."""
    FREEING = "freeing"
    LOST = "lost"
    """The child died; kept until its holder knows."""
    FAILED = "failed"
    """The child refused; kept until who asked knows."""
    GONE = "gone"


class BackingEvent(enum.Enum):
    """What happens to a device backing."""

    ALLOCATED = "allocated"
    REFUSED = "refused"
    FREE = "free"
    FREED = "freed"
    CHILD_DIED = "child_died"
    TOLD = "told"


_S, _E = BackingState, BackingEvent
TRANSITIONS: Final[dict[tuple[BackingState, BackingEvent], BackingState]] = {
    (_S.ALLOCATING, _E.ALLOCATED): _S.READY,
    (_S.ALLOCATING, _E.REFUSED): _S.FAILED,
    (_S.ALLOCATING, _E.CHILD_DIED): _S.FAILED,
    (_S.ALLOCATING, _E.FREE): _S.ABANDONED,
    (_S.ABANDONED, _E.ALLOCATED): _S.FREEING,
    (_S.ABANDONED, _E.REFUSED): _S.GONE,
    (_S.ABANDONED, _E.CHILD_DIED): _S.GONE,
    (_S.READY, _E.FREE): _S.FREEING,
    (_S.READY, _E.CHILD_DIED): _S.LOST,
    (_S.FREEING, _E.FREED): _S.GONE,
    (_S.FREEING, _E.CHILD_DIED): _S.GONE,
    (_S.LOST, _E.TOLD): _S.GONE,
    (_S.FAILED, _E.TOLD): _S.GONE,
}
ON_DEVICE: Final = (_S.ALLOCATING, _S.ABANDONED, _S.READY, _S.FREEING)
"""States that take memory, or may."""


@dataclass(frozen=True, slots=True)
class BackingKey:
    """What makes two device backings the same one."""

    namespace_id: int
    group: str
    rank: int
    name: str
    device_uuid: str


class Holder:
    """The process that has the memory mapped, or may have. Owns a pidfd."""

    def __init__(self, session_id: int, pid: int) -> None:
        self.session_id = session_id
        """0: its session ended, or it said that it has nothing mapped."""
        self.pid = pid
        self._is_mapped = True
        self._until_s = 0.0
        self._pidfd = -1
        if pid > 0:
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._is_mapped = False
            except OSError:
                pass  # no descriptor left: its session tells

    def session_ended(self, *, may_live: bool, now_s: float) -> None:
        """Its session is gone; whether the process is, the pidfd says."""
        self.session_id = 0
        if self._pidfd < 0:
            self._is_mapped = self._is_mapped and may_live
            self._until_s = now_s + limits.QUARANTINE_S

    def may_use(self, now_s: float) -> bool:
        """Whether the process may still read and write the memory."""
        if not self._is_mapped:
            return False
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(0):
                return True
        elif self.session_id or now_s < self._until_s:
            return True
        self.close()
        return False

    def close(self) -> None:
        """It has nothing mapped any more. Idempotent."""
        self.session_id = 0
        self._is_mapped = False
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


@dataclass(slots=True, eq=False)
class DeviceBacking:
    """One backing."""

    backing_id: int
    key: BackingKey
    size_bytes: int
    taken_bytes: int
    """With the rounding: what counts."""
    layout: bytes
    process: DeviceProcess
    holder: Holder
    made_s: float
    state: BackingState = BackingState.ALLOCATING
    asked_s: float | None = None
    """When the child was given its last order; None once that is answered."""
    idle_since_s: float | None = None
    """Since when nobody holds it."""
    is_adopted: bool = False
    """It was held before: rows may lie on it."""
    handle: bytes = b""
    error: HiSparseError | None = None
    failed_s: float = 0.0
    """When `error` came."""

    def move(self, event: BackingEvent) -> None:
        """Follow the table.

        Raises:
            IllegalTransition: It has no such row.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransition(
                f"device backing {self.backing_id} is {self.state.value}, it cannot be "
                f"{event.value}",
                state=self.state.value, event=event.value, backing=self.backing_id,
            )  # fmt: skip
        self.state = following
