"""Metrics, health, status and the page over HTTP, on threads that nothing of the daemon waits for.

`HttpService.run` is a helper thread's body: it accepts, reads and writes (waitress's own loop, so a
slow client costs a descriptor, no thread). Two more threads answer, from what the control loop and
the sampler left. None of them calls the control loop or waits for it (I7).

The number of connections is bounded, and at the bound the one that was silent longest goes: a
probe always gets in. While the address is taken (a predecessor that drains, another instance) the
daemon serves its workers without and tries again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hisparse_service.contract.errors import ConfigError
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.web import Application, Trust

MAX_CONNECTIONS: Final = 64
"""Of each socket."""
IDLE_TIMEOUT_S: Final = 30.0
"""Without a byte in either direction, whoever the fault is."""
_MAX_HEADER_BYTES: Final = 16 * 1024
_MAX_BODY_BYTES: Final = 1024
_ANSWERING_THREADS: Final = 2
_TURN_S: Final = 1.0
_RETRY_S: Final = 0.5

log = get_logger()


def read_token(path: Path) -> str:
    """The first line of a token file.

    Raises:
        ConfigError: It cannot be read, or its first line is empty.
    """
    try:
        token = path.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"http.token_file {path} cannot be read: {error}",
            remedy="Give its path, and let the daemon's user read it",
        ) from error
    if not token:
        raise ConfigError(
            f"http.token_file {path} has an empty first line", remedy="Write a token into it"
        )
    return token


class HttpService:
    """Listens where it is told to, until it is told to stop.

    Args:
        application: What answers.
        address: (host, port), port 0 for a free one; None: no TCP.
        socket_path: Of the UNIX socket; None: none.
    """

    def __init__(
        self,
        application: Application,
        *,
        address: tuple[str, int] | None,
        socket_path: Path | None,
    ) -> None:
        self._application = application
        self._address = address
        self._socket_path = socket_path
        self._map: dict[int, Any] = {}
        self._servers: list[Any] = []
        self._pull: Callable[[], None] | None = None
        self._pull_lock = threading.Lock()
        self._error = ""
        self._bound: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to listen on."""
        return self._address is not None or self._socket_path is not None

    def describe(self) -> dict[str, Any]:
        """Where it listens, and why not. Any thread."""
        return {"listening": list(self._bound), "error": self._error}

    def wake(self) -> None:
        """Have `run` look at its stop event now. Any thread."""
        with self._pull_lock, contextlib.suppress(OSError):
            if self._pull is not None:
                self._pull()

    # --- the helper thread ------------------------------------------------------------------

    def run(self, stopping: threading.Event) -> None:
        """Bind, serve, close."""
        sockets = self._bind(stopping)
        if not sockets:
            return
        try:
            log.info("http_listening", addresses=list(self._bound))
            if self._wait_for_client(sockets, stopping):
                self._serve(sockets, stopping)
        finally:
            self._close(sockets)

    def _wait_for_client(self, sockets: list[socket.socket], stopping: threading.Event) -> bool:
        """Until somebody connects. Only then is there a server: a start has better to do."""
        wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._pull = functools.partial(os.eventfd_write, wake_fd, 1)
            poller = select.poll()
            for fd in (wake_fd, *(each.fileno() for each in sockets)):
                poller.register(fd, select.POLLIN)
            while not stopping.is_set():
                if any(fd != wake_fd for fd, _ in poller.poll()):
                    return True
            return False
        finally:
            with self._pull_lock:  # its number may be another's a moment later
                self._pull = None
                os.close(wake_fd)

    def _serve(self, sockets: list[socket.socket], stopping: threading.Event) -> None:
        from waitress import wasyncore

        _route_logs()
        for each in sockets:
            self._servers.append(self._make_server(each))
        self._pull = self._servers[0].pull_trigger
        while not stopping.is_set():
            wasyncore.loop(timeout=_TURN_S, use_poll=True, map=self._map, count=1)
            self._drop_silent()

    def _make_server(self, listening: socket.socket) -> Any:
        from waitress import create_server
        from waitress.channel import HTTPChannel

        is_unix = listening.family == socket.AF_UNIX
        application = self._application.wsgi(Trust.SOCKET if is_unix else Trust.TOKEN)
        server = create_server(
            application, map=self._map, sockets=[listening], threads=_ANSWERING_THREADS,
            connection_limit=8 * MAX_CONNECTIONS, backlog=128,
            max_request_header_size=_MAX_HEADER_BYTES, max_request_body_size=_MAX_BODY_BYTES,
            channel_timeout=int(IDLE_TIMEOUT_S), cleanup_interval=3600, ident="hisparse-service",
            clear_untrusted_proxy_headers=True, log_socket_errors=False,
        )  # fmt: skip

        def make_channel(*arguments: Any, **options: Any) -> Any:
            channels = server.active_channels
            if len(channels) >= MAX_CONNECTIONS:
                min(channels.values(), key=lambda each: each.last_activity).handle_close()
            return HTTPChannel(*arguments, **options)

        server.channel_class = make_channel
        return server

    def _drop_silent(self) -> None:
        # waitress's own time-out waits for a stuck client to read, which it may never do.
        cutoff = time.time() - IDLE_TIMEOUT_S
        for server in self._servers:
            for channel in list(server.active_channels.values()):
                if not channel.requests and channel.last_activity < cutoff:
                    channel.handle_close()

    def _close(self, sockets: list[socket.socket]) -> None:
        with self._pull_lock:
            self._pull = None
        for server in self._servers:
            server.task_dispatcher.shutdown(timeout=1.0)
        for each in list(self._map.values()):
            with contextlib.suppress(OSError):
                each.close()
        self._map.clear()
        self._servers.clear()
        self._bound.clear()
        for each in sockets:
            each.close()
        if self._socket_path is not None and any(s.family == socket.AF_UNIX for s in sockets):
            self._socket_path.unlink(missing_ok=True)

    # --- binding ----------------------------------------------------------------------------

    def _bind(self, stopping: threading.Event) -> list[socket.socket]:
        """All sockets that are wanted; tries until it has them or is told to stop."""
        bound: list[socket.socket] = []
        wanted: list[Callable[[], tuple[socket.socket, str]]] = []
        if self._address is not None:
            wanted.append(self._bind_tcp)
        if self._socket_path is not None:
            wanted.append(self._bind_unix)
        while wanted and not stopping.is_set():
            try:
                made, name = wanted[0]()
            except OSError as error:
                if str(error) != self._error:
                    self._error = str(error)
                    log.warning(
                        "http_address_unavailable", error=self._error,
                        remedy="Set http.listen or http.socket to another address; trying again",
                    )  # fmt: skip
                stopping.wait(_RETRY_S)
                continue
            wanted.pop(0)
            bound.append(made)
            self._bound.append(name)
        if stopping.is_set():
            for each in bound:
                each.close()
            self._bound.clear()
            return []
        self._error = ""
        return bound

    def _bind_tcp(self) -> tuple[socket.socket, str]:
        assert self._address is not None
        host, port = self._address
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(128)
        except OSError as error:
            made.close()
            raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
        shown = f"[{host}]" if ":" in host else host
        return made, f"http://{shown}:{made.getsockname()[1]}"

    def _bind_unix(self) -> tuple[socket.socket, str]:
        path = self._socket_path
        assert path is not None
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _remove_dead_socket(path)
            made.bind(os.fspath(path))
            path.chmod(0o600)
            made.listen(128)
        except OSError as error:
            made.close()
            raise OSError(error.errno, f"{path}: {error.strerror or error}") from error
        return made, f"unix:{path}"


def _remove_dead_socket(path: Path) -> None:
    """A socket that nobody listens on goes; anything else at that path stays, and bind fails."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)


class _ToStructlog(logging.Handler):
    """waitress speaks through the standard library's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning("http_server", message=record.getMessage()[:300])


def _route_logs() -> None:
    library = logging.getLogger("waitress")
    if not any(isinstance(handler, _ToStructlog) for handler in library.handlers):
        library.addHandler(_ToStructlog())
    library.propagate = False
    library.setLevel(logging.WARNING)
    # "Task queue depth" tells of more requests at once than threads: no news with two of them.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
