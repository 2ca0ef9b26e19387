"""Structured logs on standard error: one event a line, with a stable name, at a bounded rate.

Event names are part of what an operator greps for: lower case, words joined by `_`. Token ids, keys
and payload bytes never go into them. Any thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal

import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_EVENT_NAMES: Final = 1_024
"""Names whose rate is kept; the table is emptied when it is full."""

EventDict = MutableMapping[str, Any]


class RateLimiter:
    """A structlog processor that lets each event name pass so many times a second.

    The first line of the next second says how many were left out (`suppressed`).
    """

    def __init__(
        self, events_per_second: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = events_per_second
        self._clock = clock
        self._lock = threading.Lock()
        self._by_event: dict[str, tuple[int, int]] = {}

    def __call__(self, _logger: Any, _method: str, event_dict: EventDict) -> EventDict:
        """Count the event; drop it beyond the limit."""
        name, second = str(event_dict.get("event")), int(self._clock())
        with self._lock:
            if len(self._by_event) >= MAX_EVENT_NAMES:
                self._by_event.clear()
            began, count = self._by_event.get(name, (second, 0))
            suppressed = max(0, count - self._limit) if began != second else 0
            count = count + 1 if began == second else 1
            self._by_event[name] = (second, count)
        if count > self._limit:
            raise structlog.DropEvent
        if suppressed:
            event_dict["suppressed"] = suppressed
        return event_dict


def configure_logs(
    *, format: Literal["console", "json"], level: str, events_per_second: int
) -> None:
    """Set structlog up for this process."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            RateLimiter(events_per_second),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks
            if format == "json"
            else structlog.processors.StackInfoRenderer(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS.get(level, logging.INFO)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def get_logger(**bound: Any) -> Any:
    """A logger; usable before `configure_logs`."""
    return structlog.get_logger(**bound)
