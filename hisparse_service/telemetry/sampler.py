"""Once a second: a sample of the totals, and while somebody looks, the picture of all.

A helper thread of its own runs it. It reads what the control loop left (the last snapshot and
counters) and the blocks' states; what it makes is replaced as a whole, so HTTP threads and the
control loop may take it at any time.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from hisparse_service.telemetry.logs import get_logger, recent_events
from hisparse_service.telemetry.metrics import ServerMetrics

INTERVAL_S: Final = 1.0
HISTORY_SAMPLES: Final = 300
"""Five minutes."""
SHORT_HISTORY_SAMPLES: Final = 60
"""What travels in a control message."""
RATE_WINDOW_S: Final = 10.0
MAX_CELLS: Final = 1_024
"""Of the occupancy map, all namespaces together."""
MAX_SHOWN_SESSIONS: Final = 256
SLOW_TURN_S: Final = 0.1
"""What ping and health must answer within (I7)."""
_TURNS_KEPT: Final = 60
_SHOWN: Final = (
    "instance", "version", "phase", "progress", "uptime_s", "pool", "namespaces", "sessions",
    "requests", "errors", "helpers", "cuda", "workers", "limits", "http",
)  # fmt: skip
"""Of the snapshot."""

COUNTED: Final = (
    "requests", "errors", "keys_asked", "keys_hit", "tokens_hit", "published", "published_bytes",
    "reserved", "evictions", "refusals", "rows_resident", "rows_hot", "rows_missed",
    "bytes_gathered",
)  # fmt: skip
"""Totals whose rates are shown."""
GAUGES: Final = ("free_bytes", "reserved_bytes", "published_bytes_now", "pinned_bytes", "workers")
"""Levels whose history is shown."""

log = get_logger()


class Sampler:
    """Makes overviews.

    Args:
        metrics: Of the control loop.
        call_soon: Has the loop call something; probes its lag.
        take_longest_turn_s: The loop's longest turn since the last call.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        call_soon: Callable[[Callable[[], None]], None],
        take_longest_turn_s: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._call_soon = call_soon
        self._take_longest_turn_s = take_longest_turn_s
        self._samples: deque[tuple[float, dict[str, float], dict[str, float]]] = deque(
            maxlen=HISTORY_SAMPLES + 1
        )
        self._turns_s: deque[float] = deque(maxlen=_TURNS_KEPT)
        self._probe_is_out = False
        self.overview: bytes = b"{}"
        """JSON for the page."""
        self.short_overview: bytes = b"\x80"
        """MessagePack for `hisparse-service top`."""

    def run(self, stopping: threading.Event) -> None:
        """Sample until `stopping` is set."""
        while not stopping.wait(INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        """Take one sample now."""
        metrics = self._metrics
        longest_s = self._take_longest_turn_s()
        if longest_s > SLOW_TURN_S:
            log.warning("slow_turn", seconds=round(longest_s, 3))
        self._turns_s.append(longest_s)
        metrics.longest_turn_s = max(self._turns_s)
        self._probe()
        snapshot = metrics.snapshot
        if not snapshot:
            return
        at_s = float(snapshot["uptime_s"])
        if self._samples and at_s <= self._samples[-1][0]:
            return
        self._samples.append((at_s, *_sample_of(metrics, snapshot)))
        if time.monotonic() < metrics.watched_until_s:
            full = self._overview(snapshot)
            self.overview = msgspec.json.encode(full)
            short = full | {"history": self._history(SHORT_HISTORY_SAMPLES)}
            self.short_overview = msgspec.msgpack.encode(short)

    def _probe(self) -> None:
        """Measure how long the loop takes to come to a call. One at a time."""
        if self._probe_is_out:
            return
        self._probe_is_out = True
        put_ns = time.monotonic_ns()

        def answer() -> None:
            self._metrics.loop_lag.observe_ns(time.monotonic_ns() - put_ns)
            self._probe_is_out = False

        self._call_soon(answer)

    # --- what is shown ----------------------------------------------------------------------

    def _overview(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        made = {name: snapshot[name] for name in _SHOWN}
        now = datetime.datetime.now(datetime.UTC)
        return made | {
            "at": now.isoformat(timespec="milliseconds"),
            "epoch": snapshot["epoch"],
            "session_rows": self._metrics.session_rows[:MAX_SHOWN_SESSIONS],
            "rates": self._rates(),
            "history": self._history(HISTORY_SAMPLES),
            "occupancy": self._occupancy(),
            "publication_lag_s": max(
                (view.publication_lag_s(time.monotonic_ns()) for view in self._views()),
                default=0.0,
            ),
            "events": recent_events.last(100),
            "longest_turn_s": round(self._metrics.longest_turn_s, 6),
        }

    def _views(self) -> list[Any]:
        return list(self._metrics.backings.copy().values())

    def _rates(self) -> dict[str, float]:
        """A second, over the last `RATE_WINDOW_S`."""
        if len(self._samples) < 2:
            return dict.fromkeys(COUNTED, 0.0)
        end_s, newest, _ = self._samples[-1]
        start_s, oldest, _ = next(
            sample for sample in self._samples if sample[0] >= end_s - RATE_WINDOW_S
        )
        if end_s == start_s:
            start_s, oldest, _ = self._samples[-2]
        # A namespace that went takes its totals with it: that is no negative rate.
        return {
            name: max(0.0, round((newest[name] - oldest[name]) / (end_s - start_s), 3))
            for name in COUNTED
        }

    def _history(self, count: int) -> dict[str, Any]:
        samples = list(self._samples)[-(count + 1) :]
        pairs = list(itertools.pairwise(samples))
        series: dict[str, list[float]] = {
            name: [
                max(0.0, round((after[1][name] - before[1][name]) / (after[0] - before[0]), 2))
                for before, after in pairs
            ]
            for name in COUNTED
        }
        series |= {name: [after[2][name] for _, after in pairs] for name in GAUGES}
        return {"interval_s": INTERVAL_S, "series": series}

    def _occupancy(self) -> list[dict[str, Any]]:
        """Cells are shared out by the bytes of the backings."""
        views = self._views()
        sizes = [view.num_blocks * view.block_stride_bytes for view in views]
        total = max(1, sum(sizes))
        return [
            view.occupancy(max(16, MAX_CELLS * size // total))
            for view, size in zip(views, sizes, strict=True)
        ]


def _sample_of(
    metrics: ServerMetrics, snapshot: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    counted = dict.fromkeys(COUNTED, 0.0)
    gauges = dict.fromkeys(GAUGES, 0.0)
    counted["requests"] = sum(each["count"] for each in snapshot["requests"].values())
    counted["errors"] = sum(snapshot["errors"].values())
    for namespace in snapshot["namespaces"]:
        statistics, stride = namespace["statistics"], namespace["block_stride_bytes"]
        counted["keys_asked"] += statistics["keys_asked"]
        counted["keys_hit"] += statistics["keys_hit"]
        counted["tokens_hit"] += statistics["tokens_hit"]
        counted["published"] += statistics["publishes"]
        counted["published_bytes"] += statistics["publishes"] * stride
        counted["reserved"] += statistics["blocks_reserved"]
        counted["evictions"] += statistics["evictions"]
        counted["refusals"] += sum(statistics["refusals"].values())
        for gauge, state in (
            ("free_bytes", "free"), ("reserved_bytes", "reserved"),
            ("published_bytes_now", "published"), ("pinned_bytes", "pinned"),
        ):  # fmt: skip
            gauges[gauge] += namespace["blocks"].get(state, 0) * stride
    totals = metrics.workers.totals
    counted["rows_resident"] = totals["rows_read_resident"]
    counted["rows_hot"] = totals["rows_read_hot"]
    counted["rows_missed"] = totals["rows_missed"]
    counted["bytes_gathered"] = totals["bytes_gathered"]
    gauges["workers"] = snapshot["sessions"]["workers"]
    return counted, gauges
