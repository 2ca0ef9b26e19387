"""The threads that look at the daemon: sampler, HTTP, recorder, and spans where they are asked for.

Made and stopped by the daemon on the control loop; each runs as a helper thread and is started
again when it dies.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path

from hisparse_service.config import Settings, parse_listen
from hisparse_service.contract.errors import ConfigError
from hisparse_service.server.helpers import HelperThreads, Restart
from hisparse_service.server.loop import ControlLoop
from hisparse_service.server.state import ServerState
from hisparse_service.telemetry.health import Health
from hisparse_service.telemetry.http import HttpService, read_token
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.sampler import Sampler
from hisparse_service.telemetry.tracing import SpanExporter
from hisparse_service.telemetry.web import Application

log = get_logger()


class TokenFile:
    """The token in a file, read again when the file changes. HTTP threads.

    Args:
        path: Of the file; None: there is no token.

    Raises:
        ConfigError: It cannot be read now.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read_ns = self._changed_ns()
        self._token = read_token(path) if path is not None else ""

    def _changed_ns(self) -> int:
        try:
            return self._path.stat().st_mtime_ns if self._path is not None else 0
        except OSError:
            return 0

    def __call__(self) -> str:
        """The token now; of a file that became unreadable, the one before."""
        if self._path is None:
            return ""
        with self._lock:
            changed_ns = self._changed_ns()
            if changed_ns not in (0, self._read_ns):
                self._read_ns = changed_ns
                try:
                    self._token = read_token(self._path)
                except ConfigError as error:
                    log.warning("http_token_unreadable", error=error.message)
            return self._token


class Observers:
    """Wires them to the control loop's state.

    Raises:
        ConfigError: The token file cannot be read, or spans are asked for and not installed.
    """

    def __init__(self, settings: Settings, state: ServerState, loop: ControlLoop) -> None:
        self._state = state
        metrics = state.metrics
        health = Health(last_turn_s=lambda: loop.last_turn_s, snapshot=lambda: metrics.snapshot)
        token_file = settings.http.token_file
        self._sampler = Sampler(
            metrics, call_soon=loop.call_soon, take_longest_turn_s=loop.take_longest_turn_s,
        )  # fmt: skip
        self._http = HttpService(
            Application(
                metrics, health, overview=lambda: self._sampler.overview,
                token=TokenFile(Path(token_file) if token_file else None),
            ),
            address=_address(settings), socket_path=_socket_path(settings),
        )  # fmt: skip
        self._spans: SpanExporter | None = None
        if settings.tracing.otlp_endpoint:
            self._spans = SpanExporter(
                settings.tracing.otlp_endpoint, sample_ratio=settings.tracing.sample_ratio,
                instance=settings.instance, version=state.options.daemon_version,
            )  # fmt: skip
            state.taps = (*state.taps, self._spans.tap)
        state.describe_http = self._http.describe
        state.overview = lambda: self._sampler.short_overview

    def start(self, helpers: HelperThreads) -> None:
        """Start their threads."""
        always = functools.partial(helpers.start, restart=Restart.ALWAYS)
        always("trace-recorder", self._state.recorder.run)
        always("sampler", self._sampler.run)
        if self._http.is_wanted:
            always("http", self._http.run)
        if self._spans is not None:
            always("spans", self._spans.run)

    def wake(self) -> None:
        """Have them see that they shall stop. After the stop event was set."""
        self._state.recorder.close()
        self._http.wake()


def _address(settings: Settings) -> tuple[str, int] | None:
    listen = parse_listen(settings.http.listen)
    return (listen.host, listen.port) if listen is not None else None


def _socket_path(settings: Settings) -> Path | None:
    if not settings.http.socket:
        return None
    return settings.resolved_runtime_dir() / settings.http.socket
