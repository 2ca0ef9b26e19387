"""The worker's own counters, sent to the daemon with each heartbeat.

The names are the contract: the daemon adds the counters of all its workers and exports each under
``hisparse_worker_<name>_total``; a name that it does not know is ignored. Any thread may add.
"""

from __future__ import annotations

import threading
from typing import Final

COUNTERS: Final = (
    "request_timeouts",
    "reconnects",
    "late_replies",
    "leases_lost",
    "stale_reads",
    "mirrored_blocks",
    "mirrors_queued",
    "mirrors_handed_in",
    "mirrors_lost",
    "rows_read_resident",
    "rows_read_hot",
    "rows_missed",
    "bytes_gathered",
    "bytes_mirrored",
)
"""Every counter of a worker; all only grow."""


class WorkerCounters:
    """Counts since this client connected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(COUNTERS, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Count.

        Raises:
            KeyError: No such counter.
        """
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        """The counters that are not 0."""
        with self._lock:
            return {name: value for name, value in self._values.items() if value}

    def __getitem__(self, name: str) -> float:
        return self._values[name]
