"""Make a process die between two steps, or a system call fail, at a named point.

The points stand in the product code (`hisparse_service.contract.crashpoints`); this decides what
happens there. Two ways to arm:

- in a child process, by the environment: ``HISPARSE_CRASH_POINT=segment.after_truncate`` or, for
  the third time that it is reached, ``segment.after_truncate:3``; an entry point calls
  `arm_from_environment` once;
- in this process, with a plan:

      with FaultPlan().fail_nth("os.madvise", nth=2, error=errno.ENOMEM):
          Pool.create_or_adopt(settings)

Points are counted under a lock: any thread may reach one.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from hisparse_service.contract import crashpoints
from hisparse_service.contract.crashpoints import Hook, PointKind

CRASH_POINT_VARIABLE: Final = "HISPARSE_CRASH_POINT"
_KINDS: Final = {PointKind.CRASH: "crash point", PointKind.CALL: "call point"}


def kill_self() -> None:
    """SIGKILL this process: no handler, no `finally`, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass
class _Fault:
    """What happens when a point is reached for the `nth` time (0: every time)."""

    kind: PointKind
    nth: int
    act: Callable[[], None]


class FaultPlan:
    """Faults by point. A context manager that arms itself; plans nest, the inner one goes first.

    `reached` counts how often each point was passed while the plan was armed: a test that expects a
    fault can assert that its point lies on the way.
    """

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        self._faults: dict[str, list[_Fault]] = {}
        self._lock = threading.Lock()
        self._before: Hook | None = None
        self._armed = False

    def kill_at(self, name: str, *, nth: int = 1) -> FaultPlan:
        """SIGKILL this process when the crash point is reached for the `nth` time."""
        return self.call_at(name, kill_self, nth=nth)

    def call_at(self, name: str, act: Callable[[], None], *, nth: int = 1) -> FaultPlan:
        """Call `act` when the crash point is reached for the `nth` time (0: every time)."""
        return self._add(name, _Fault(PointKind.CRASH, nth, act))

    def fail_nth(self, name: str, *, error: int, nth: int = 1) -> FaultPlan:
        """Have the `nth` call (0: every call) at a call point raise OSError with errno `error`."""

        def fail() -> None:
            raise OSError(error, f"{os.strerror(error)} (made to fail at {name})")

        return self._add(name, _Fault(PointKind.CALL, nth, fail))

    def _add(self, name: str, fault: _Fault) -> FaultPlan:
        if fault.nth < 0:
            raise ValueError(f"nth is {fault.nth}; 1 is the first time, 0 every time")
        self._faults.setdefault(name, []).append(fault)
        return self

    def reach(self, kind: PointKind, name: str) -> None:
        """The hook. May not return."""
        with self._lock:
            count = self.reached[name] = self.reached.get(name, 0) + 1
            due = [
                fault.act
                for fault in self._faults.get(name, ())
                if fault.kind is kind and fault.nth in (0, count)
            ]
        for act in due:
            act()
        if self._before is not None:
            self._before(kind, name)

    def arm(self) -> FaultPlan:
        """Install the plan.

        Raises:
            ValueError: A point of the plan is not declared as such by any module imported so far:
                it would never be reached.
        """
        for name, faults in self._faults.items():
            for fault in faults:
                if name not in crashpoints.declared(fault.kind):
                    raise ValueError(f"no {_KINDS[fault.kind]} is called {name!r}")
        if not self._armed:
            self._before = crashpoints.install(self.reach)
            self._armed = True
        return self

    def disarm(self) -> None:
        """Put back what was installed before. Idempotent."""
        if self._armed:
            crashpoints.install(self._before)
            self._armed = False

    def __enter__(self) -> FaultPlan:
        return self.arm()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disarm()


def arm_from_environment() -> FaultPlan | None:
    """Arm a kill if the environment asks for one. For entry points, once, before threads start.

    The name is not checked: the module that declares it may be imported later.

    Raises:
        ValueError: The count is not a number from 1.
    """
    text = os.environ.get(CRASH_POINT_VARIABLE, "")
    if not text:
        return None
    name, _colon, count = text.partition(":")
    nth = int(count or "1")
    if nth < 1:
        raise ValueError(f"{CRASH_POINT_VARIABLE}={text}: the count starts at 1")
    plan = FaultPlan().kill_at(name, nth=nth)
    plan._before, plan._armed = crashpoints.install(plan.reach), True
    return plan


def all_points(
    kind: PointKind = PointKind.CRASH, *, packages: tuple[str, ...] = ("hisparse_service",)
) -> tuple[str, ...]:
    """Every point that the packages' modules declare: imports them all.

    Args:
        kind: Crash points or call points.
        packages: Add ``worker_client`` for the client's (which imports torch).
    """
    for package in packages:
        module = importlib.import_module(package)
        for info in pkgutil.walk_packages(module.__path__, f"{package}."):
            if info.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(info.name)
            except ModuleNotFoundError as error:
                # An integration whose engine is not installed here has no points that could be hit.
                if (error.name or "").split(".")[0] in packages:
                    raise
    return crashpoints.declared(kind)
