"""Pings the daemon all the time and remembers the longest silence, fault by fault.

A thread of the storm's driver with a client of its own. While the daemon is stopped on purpose
(SIGSTOP) nothing counts; while it is dead, its successor's start counts.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hisparse_service.contract.errors import HiSparseError
from worker_client import connect

_PAUSE_S = 0.002
_PING_TIMEOUT_S = 1.0
_WORTH_TELLING_S = 1.5


class Prober:
    """Measures outages: the time between two answers."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._fault = "start"
        self._last_answer_s: float | None = None
        self._excused = 0
        self.pings = 0
        self.longest_s: dict[str, float] = {}
        self.gaps: list[str] = []
        """End, fault and length of the long ones, to be looked up in the daemon's log."""
        self._thread = threading.Thread(target=self._run, name="prober")
        self._thread.start()

    def during(self, fault: str) -> None:
        """What happens from now on is this fault's."""
        with self._lock:
            self._fault = fault

    @contextmanager
    def excused(self) -> Iterator[None]:
        """The daemon is stopped on purpose: until the next answer nothing counts."""
        with self._lock:
            self._excused += 1
        try:
            yield
        finally:
            with self._lock:
                self._last_answer_s = None
                self._excused -= 1

    @property
    def longest_outage_s(self) -> float:
        """Over all faults."""
        return max(self.longest_s.values(), default=0.0)

    def _answered(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self.pings += 1
            last_s = self._last_answer_s
            if last_s is not None and not self._excused:
                longest = self.longest_s.get(self._fault, 0.0)
                self.longest_s[self._fault] = max(longest, now_s - last_s)
                if now_s - last_s > _WORTH_TELLING_S:
                    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
                    self.gaps.append(f"{when} {self._fault} {now_s - last_s:.3f}")
            self._last_answer_s = now_s

    def _run(self) -> None:
        while not self._stop.is_set():
            with (
                contextlib.suppress(HiSparseError),
                connect(self._runtime, client_name="prober", timeout_s=60) as client,
            ):
                while not self._stop.is_set():
                    # A ping that runs into its deadline is sent again: the gap goes on.
                    with contextlib.suppress(HiSparseError):
                        client.ping(timeout_s=_PING_TIMEOUT_S)
                        self._answered()
                    self._stop.wait(_PAUSE_S)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()
