"""Threads beside the control loop: each is named, watched, and started again when it dies.

`HelperThreads.check` is called at each tick of the loop; it never waits. A helper hands results
over with `loop.call_soon`, it never touches the loop's data.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hisparse_service.telemetry.logs import get_logger

RESTART_DELAY_S = 1.0

log = get_logger()


class Restart(enum.Enum):
    """What to do when a helper ends."""

    NEVER = "never"
    """It does one thing and hands its own failure over."""
    ALWAYS = "always"
    """It is there for as long as the daemon."""


@dataclass(slots=True, eq=False)
class _Helper:
    name: str
    target: Callable[[threading.Event], None]
    restart: Restart
    thread: threading.Thread
    restarts: int = 0
    restart_at_s: float = 0.0
    last_error: str = ""


class HelperThreads:
    """All helper threads of one daemon. Control loop only, but for the threads themselves."""

    def __init__(self) -> None:
        self._helpers: dict[str, _Helper] = {}
        self.stopping = threading.Event()
        """Each target is given it and ends soon after it is set."""

    def start(
        self, name: str, target: Callable[[threading.Event], None], *, restart: Restart
    ) -> None:
        """Start a helper; its name is also the thread's."""
        assert name not in self._helpers, name
        helper = _Helper(name, target, restart, threading.Thread())
        self._helpers[name] = helper
        self._run(helper)

    def _run(self, helper: _Helper) -> None:
        helper.thread = threading.Thread(
            target=self._body, args=(helper,), name=helper.name, daemon=True
        )
        helper.restart_at_s = 0.0
        helper.thread.start()

    def _body(self, helper: _Helper) -> None:
        try:
            helper.target(self.stopping)
        except Exception as error:
            helper.last_error = repr(error)
            log.error("helper_died", helper=helper.name, error=repr(error), exc_info=error)

    def check(self, now_s: float) -> None:
        """Start dead helpers again, a moment after their death."""
        for helper in self._helpers.values():
            if (
                helper.restart is Restart.NEVER
                or helper.thread.is_alive()
                or self.stopping.is_set()
            ):
                continue
            if helper.restart_at_s == 0.0:
                helper.restart_at_s = now_s + RESTART_DELAY_S
            elif now_s >= helper.restart_at_s:
                helper.restarts += 1
                log.warning("helper_restarted", helper=helper.name, restarts=helper.restarts)
                self._run(helper)

    def describe(self) -> dict[str, object]:
        """Name to what is known, for the status."""
        return {
            helper.name: {
                "alive": helper.thread.is_alive(),
                "permanent": helper.restart is Restart.ALWAYS,
                "restarts": helper.restarts,
                "last_error": helper.last_error,
            }
            for helper in self._helpers.values()
        }

    def stop(self, timeout_s: float) -> list[str]:
        """Have all end and wait for them. Returns the names of those that did not."""
        self.stopping.set()
        for helper in self._helpers.values():
            helper.thread.join(timeout_s)
        return [helper.name for helper in self._helpers.values() if helper.thread.is_alive()]
