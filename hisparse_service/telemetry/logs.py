"""Structured logs on standard error: one event a line, with a stable name, at a bounded rate.

Event names are part of what an operator greps for: lower case, words joined by `_`. Token ids,
keys, secrets and payload bytes never go into them: `redact` is the last line of that defence. The
last events are kept for the status page and `hisparse-service top`. Any thread.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal

import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_EVENT_NAMES: Final = 1_024
"""Names whose rate is kept; the table is emptied when it is full."""

MAX_RECENT_EVENTS: Final = 200
MAX_VALUE_CHARACTERS: Final = 1_024
"""Of one value in a log line; a client's text may be as long."""
_SECRET_WORDS: Final = frozenset(
    ("token", "tokens", "secret", "secrets", "password", "authorization", "credential", "key",
     "keys", "payload", "cookie")
)  # fmt: skip
"""A field with one of these words in its name is not shown, unless it only counts."""
_COUNTING_WORDS: Final = frozenset(("num", "count", "total", "max", "hit", "asked", "bytes"))

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


def redact(_logger: Any, _method: str, event_dict: EventDict) -> EventDict:
    """A structlog processor that shows no secrets and no bytes, and bounds each value."""
    for name, value in event_dict.items():
        if isinstance(value, bytes | bytearray | memoryview):
            event_dict[name] = f"({len(value)} bytes)"
        elif name in ("event", "exc_info"):
            continue
        elif _is_secret(name) and value:
            event_dict[name] = "(not shown)"
        elif isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
            event_dict[name] = value[:MAX_VALUE_CHARACTERS] + "..."
    return event_dict


@functools.lru_cache(MAX_EVENT_NAMES)
def _is_secret(name: str) -> bool:
    words = set(name.lower().split("_"))
    return bool(words & _SECRET_WORDS) and not words & _COUNTING_WORDS


class RecentEvents:
    """The last events, for people who look: a structlog processor."""

    def __init__(self) -> None:
        self._events: deque[dict[str, str]] = deque(maxlen=MAX_RECENT_EVENTS)

    def __call__(self, _logger: Any, _method: str, event_dict: EventDict) -> EventDict:
        """Keep it; changes nothing."""
        hidden = ("event", "level", "timestamp", "exc_info", "suppressed")
        text = " ".join(f"{key}={value}" for key, value in event_dict.items() if key not in hidden)
        self._events.append(
            {
                "time": str(event_dict.get("timestamp", "")),
                "level": str(event_dict.get("level", "")),
                "event": str(event_dict.get("event", "")),
                "text": text[:300],
            }
        )
        return event_dict

    def last(self, count: int = MAX_RECENT_EVENTS) -> list[dict[str, str]]:
        """The newest `count`, oldest first. Any thread."""
        return list(self._events.copy())[-count:]

    def clear(self) -> None:
        """Forget all."""
        self._events.clear()


recent_events: Final = RecentEvents()
"""Of this process."""


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
            redact,
            recent_events,
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
