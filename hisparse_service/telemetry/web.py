"""What each path answers. A WSGI application, so any server and any test may call it.

    /metrics        Prometheus or OpenMetrics text        token
    /healthz        the control loop turned               open
    /readyz         workers are accepted                  open
    /status         the status as JSON                    token
    /overview.json  what the page shows                   token
    /               the page                              token

Read only, from snapshots; any thread.
"""

from __future__ import annotations

import base64
import binascii
import enum
import functools
import hmac
import importlib.resources
import threading
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Final

import msgspec

from hisparse_service.telemetry.health import Answer, Health
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.metrics import ServerMetrics, registry

WATCH_S: Final = 10.0
"""How long rows of sessions and the occupancy are made after somebody looked."""
_JSON: Final = "application/json"

Environ = dict[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Wsgi = Callable[[Environ, StartResponse], Iterable[bytes]]

log = get_logger()


class Trust(enum.Enum):
    """What a request has to show."""

    TOKEN = "token"  # noqa: S105 - a word, no secret
    """The token, if there is one: it came by TCP."""
    SOCKET = "socket"
    """Nothing: the UNIX socket's mode let it in."""


class Application:
    """Answers requests.

    Args:
        metrics: Of the control loop.
        health: For the probes.
        overview: The sampler's last overview, as JSON.
        token: What requests by TCP must carry; empty: nothing. Called for each.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        health: Health,
        *,
        overview: Callable[[], bytes],
        token: Callable[[], str],
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._overview = overview
        self._token = token
        self._lock = threading.Lock()
        self._rendered: dict[str, tuple[Any, bytes, str]] = {}
        self._registry: Any = None

    def wsgi(self, trust: Trust) -> Wsgi:
        """The application for requests that came a certain way."""
        return functools.partial(self._answer, trust)

    def _answer(self, trust: Trust, environ: Environ, start: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "/")
        if method not in ("GET", "HEAD"):
            return _reply(start, "405 Method Not Allowed", _json({"error": "only GET and HEAD"}))
        if path == "/healthz":
            return _probe(start, self._health.alive())
        if path == "/readyz":
            return _probe(start, self._health.ready())
        if trust is Trust.TOKEN and not self._may(environ.get("HTTP_AUTHORIZATION", "")):
            return _reply(
                start, "401 Unauthorized", _json({"error": "a token is needed"}),
                ("WWW-Authenticate", 'Basic realm="hisparse-service", charset="UTF-8"'),
            )  # fmt: skip
        if path == "/metrics":
            body, kind = self._metrics_text(environ.get("HTTP_ACCEPT", ""))
            return _reply(start, "200 OK", body, kind=kind)
        if path == "/status":
            return _reply(start, "200 OK", _json(self._metrics.snapshot))
        if path == "/overview.json":
            self._watch()
            return _reply(start, "200 OK", self._overview())
        if path == "/":
            self._watch()
            body, policy = page()
            return _reply(
                start, "200 OK", body, ("Content-Security-Policy", policy),
                kind="text/html; charset=utf-8",
            )  # fmt: skip
        return _reply(start, "404 Not Found", _json({"error": "no such page"}))

    def _watch(self) -> None:
        self._metrics.watched_until_s = time.monotonic() + WATCH_S

    def _may(self, header: str) -> bool:
        """Bearer for programs; Basic with any user name for browsers, which ask for it."""
        wanted = self._token()
        if not wanted:
            return True
        scheme, _, value = header.partition(" ")
        given = ""
        if scheme.lower() == "bearer":
            given = value.strip()
        elif scheme.lower() == "basic":
            try:
                decoded = base64.b64decode(value.strip(), validate=True).decode("utf-8")
            except (binascii.Error, UnicodeDecodeError):
                return False
            given = decoded.partition(":")[2]
        return hmac.compare_digest(given.encode(), wanted.encode())

    def _metrics_text(self, accept: str) -> tuple[bytes, str]:
        """Rendered once a snapshot, however often it is asked for."""
        from prometheus_client.exposition import choose_encoder

        with self._lock:
            if self._registry is None:
                self._registry = registry(self._metrics)
            encode, kind = choose_encoder(accept)
            snapshot = self._metrics.snapshot
            made_of, body, _ = self._rendered.get(kind, (None, b"", ""))
            if made_of is not snapshot or not snapshot:
                body = encode(self._registry)
                if len(self._rendered) > 8:
                    self._rendered.clear()
                self._rendered[kind] = (snapshot, body, kind)
            return body, kind


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _probe(start: StartResponse, answer: Answer) -> Iterable[bytes]:
    status = "200 OK" if answer.is_good else "503 Service Unavailable"
    return _reply(start, status, _json(answer.body))


def _reply(
    start: StartResponse, status: str, body: bytes, *headers: tuple[str, str], kind: str = _JSON
) -> Iterable[bytes]:
    start(
        status,
        [
            ("Content-Type", kind), ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), *headers,
        ],
    )  # fmt: skip
    return [body]


@functools.cache
def page() -> tuple[bytes, str]:
    """The page and the policy that lets its own style and script run, and nothing else."""
    text = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")

    def digest(tag: str) -> str:
        inner = text.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
        return base64.b64encode(sha256(inner.encode()).digest()).decode()

    policy = (
        f"default-src 'none'; style-src 'sha256-{digest('style')}'; "
        f"script-src 'sha256-{digest('script')}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy
