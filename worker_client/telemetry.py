"""The worker's own counters, sent to the daemon with each heartbeat.

The names are in `contract/counters.py`. Any thread may add.
"""

from __future__ import annotations

import threading
from typing import Final

from hisparse_service.contract.counters import WORKER_COUNTERS

COUNTERS: Final = WORKER_COUNTERS


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

    def add_mirrored(self, num_blocks: int, num_bytes: int) -> None:
        """Count what a mirror's answer says: once a step."""
        with self._lock:
            self._values["mirrored_blocks"] += num_blocks
            self._values["bytes_mirrored"] += num_bytes

    def snapshot(self) -> dict[str, float]:
        """The counters that are not 0."""
        with self._lock:
            return {name: value for name, value in self._values.items() if value}

    def __getitem__(self, name: str) -> float:
        return self._values[name]
