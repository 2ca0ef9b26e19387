"""What the index groups did, added to the counters that the heartbeats carry to the daemon.

Reading a group's statistics may wait for the device, so `tick` does it once a second. The engine's
thread only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from worker_client.runtime import SwapStatistics
from worker_client.telemetry import WorkerCounters

INTERVAL_S: Final = 1.0
MAX_PENDING_TIMES: Final = 1_024
"""Swaps whose device time is not read yet; beyond it they are not timed."""

_NAMES: Final = {
    "rows_read_resident": "resident_lanes",
    "rows_read_hot": "hot_lanes",
    "rows_missed": "miss_lanes",
    "bytes_gathered": "gathered_bytes",
    "swaps": "transactions",
}
"""Counter to the statistic whose growth it takes. Rows are lanes: one for each top-k entry."""


class SwapReporter:
    """Feeds one client's counters.

    Args:
        counters: Of the client.
        statistics: Totals of each index group, live. Called once a second, and again at each tick
            while it answers None: not known yet.
        clock: Stands in for `time.monotonic`.
    """

    def __init__(
        self,
        counters: WorkerCounters,
        statistics: Callable[[], Sequence[SwapStatistics] | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._statistics = statistics
        self._clock = clock
        self._reported = dict.fromkeys(_NAMES, 0)
        self._next_s = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Count the time of a swap: the device's own on CUDA, else the thread's."""
        if device.type != "cuda":
            began_s = time.perf_counter()
            yield
            self._counters.add("swap_seconds", time.perf_counter() - began_s)
            return
        # A capture records the work of later replays: timing events have no place in it.
        if len(self._pending) >= MAX_PENDING_TIMES or torch.cuda.is_current_stream_capturing():
            yield
            return
        before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before.record()
        yield
        after.record()
        self._pending.append((before, after))

    def tick(self) -> None:
        """Report, if a second has passed since the last time."""
        now_s = self._clock()
        if now_s >= self._next_s and self.report():
            self._next_s = now_s + INTERVAL_S

    def report(self) -> bool:
        """Add what came since the last report; False: the statistics are not known yet."""
        groups = self._statistics()
        if groups is None:
            return False
        for counter, field in _NAMES.items():
            total = sum(getattr(each, field) for each in groups)
            growth = total - self._reported[counter]
            if growth > 0:  # less than before: a total that is not complete yet
                self._reported[counter] = total
                self._counters.add(counter, growth)
        done = [pair for pair in self._pending if pair[1].query()]  # type: ignore[no-untyped-call]
        self._pending = [pair for pair in self._pending if pair not in done]
        if done:
            milliseconds = sum(before.elapsed_time(after) for before, after in done)
            self._counters.add("swap_seconds", milliseconds / 1e3)
        return True
