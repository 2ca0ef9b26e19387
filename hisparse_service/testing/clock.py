"""A clock that moves only when told, for everything that takes `now_s` or a clock function.

Shipped so that users of the package can test their own time-outs. Any thread; not synchronised.
"""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds under the test's control; call it like `time.monotonic`."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        """The same as `now_s`."""
        return self._now_s

    @property
    def now_s(self) -> float:
        """Now, in seconds since an arbitrary start."""
        return self._now_s

    def advance(self, seconds_s: float) -> float:
        """Move forward and return the new time.

        Raises:
            ValueError: Backwards: a monotonic clock cannot.
        """
        if seconds_s < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds_s} s")
        self._now_s += seconds_s
        return self._now_s
