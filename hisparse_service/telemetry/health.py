"""Is it alive, is it ready: what probes ask, answered without the control loop.

Any thread; reads a few plain values that the loop writes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_SILENCE_S: Final = 1.0
"""The control loop comes round at least twice a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a probe is told."""

    is_good: bool
    body: dict[str, Any]


class Health:
    """Looks at the loop's last turn and at its last snapshot.

    Args:
        last_turn_s: When the loop last came round (monotonic).
        snapshot: The last status that the loop made; empty before the first.
        clock: Stands in for `time.monotonic`.
    """

    def __init__(
        self,
        *,
        last_turn_s: Callable[[], float],
        snapshot: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._last_turn_s = last_turn_s
        self._snapshot = snapshot
        self._clock = clock

    def alive(self) -> Answer:
        """Whether the loop turned within a second. Not whether it can serve: see `ready`."""
        silent_s = max(0.0, self._clock() - self._last_turn_s())
        is_good = silent_s <= MAX_SILENCE_S
        body: dict[str, Any] = {"ok": is_good, "loop_silent_s": round(silent_s, 3)}
        if not is_good:
            body["reason"] = f"the control loop did not turn for {silent_s:.1f} s"
        return Answer(is_good=is_good, body=body)

    def ready(self) -> Answer:
        """Whether workers are accepted: pool populated, socket bound, not draining."""
        alive = self.alive()
        if not alive.is_good:
            return alive
        snapshot = self._snapshot()
        phase, progress = snapshot.get("phase", "starting"), snapshot.get("progress", 0.0)
        body: dict[str, Any] = {"ok": phase == "ready", "phase": phase, "progress": progress}
        restarts = {
            name: helper["restarts"]
            for name, helper in snapshot.get("helpers", {}).items()
            if helper["restarts"]
        }
        if restarts:
            body["helper_restarts"] = restarts
        if phase == "starting":
            body["reason"] = f"the pool is being populated: {progress:.0%}"
        elif phase != "ready":
            body["reason"] = "no new sessions are taken: draining"
        return Answer(is_good=phase == "ready", body=body)
