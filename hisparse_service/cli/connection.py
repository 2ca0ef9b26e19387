"""An operator's connection to a running daemon: one request, one reply, a deadline.

Not the workers' library: no heartbeats, nothing held, no torch. Main thread of a command.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import zmq

import hisparse_service
from hisparse_service.cli import presence
from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import ServiceUnavailable
from hisparse_service.server.runtime_directory import CONTROL_SOCKET_NAME, check_path_length

ReplyT = TypeVar("ReplyT", bound=m.Reply)
_LOOK_SOON_S: Final = 0.1
_LOOK_LATER_S: Final = 1.0
_SURE_AFTER: Final = 2
"""Looks in a row that found nobody: between a daemon and its successor there is an instant."""


class OperatorConnection:
    """Says Hello as an operator at once; a context manager.

    Args:
        directory: The daemon's runtime directory.
        timeout_s: For each answer.

    Raises:
        ServiceUnavailable: Nobody is there, or no answer before the deadline.
        NotAuthorised: The directory or the daemon is closed to this user.
        HiSparseError: What the daemon answers to the Hello.
    """

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        check_path_length(directory)
        self._directory = directory
        self._timeout_s = timeout_s
        self._last_id = 0
        path = directory / CONTROL_SOCKET_NAME
        if not os.access(path, os.F_OK):
            raise presence.look(directory).error(directory)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, 4 * limits.MAX_FRAME_BYTES)
            self._socket.connect(f"ipc://{path}")
            self.hello = self.ask(
                m.HelloReply,
                m.Hello(
                    self.next_id(), limits.PROTOCOL_MIN, limits.PROTOCOL_MAX,
                    f"hisparse-service {hisparse_service.__version__}", "", 0, 1, "",
                    operator=True,
                ),
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def next_id(self) -> int:
        """Id for the next request."""
        self._last_id += 1
        return self._last_id

    def ask(self, reply_type: type[ReplyT], request: m.Request) -> ReplyT:
        """Send a request and wait for its reply.

        Raises:
            ServiceUnavailable: No answer before the deadline, or it is known that none will come.
            NotAuthorised: The daemon is closed to this user.
            HiSparseError: The daemon's error.
        """
        self._socket.send(m.encode(request))
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            self._wait(deadline_s)
            reply = m.decode_reply(self._socket.recv())
            if reply.request_id != request.request_id:
                continue
            m.raise_for_error(reply)
            if not isinstance(reply, reply_type):
                raise ServiceUnavailable(
                    f"the daemon in {self._directory} answered with {type(reply).__name__}",
                    remedy="Command and daemon differ in version: upgrade the older one",
                )
            return reply

    def _wait(self, deadline_s: float) -> None:
        """Until something can be received, or until it is known that nothing will come."""
        looks = sure = 0
        while True:
            left_s = deadline_s - time.monotonic()
            pause_s = _LOOK_SOON_S if looks < _SURE_AFTER else _LOOK_LATER_S
            if self._socket.poll(max(0, int(min(left_s, pause_s) * 1000))):
                return
            seen = presence.look(self._directory)
            looks, sure = looks + 1, sure + 1 if seen.is_certain else 0
            if sure >= _SURE_AFTER or time.monotonic() >= deadline_s:
                raise seen.error(self._directory, f"asked for {self._timeout_s:g} s")

    def is_answering(self) -> bool:
        """Whether the daemon still answers within the timeout."""
        try:
            self.ask(m.Pong, m.Ping(self.next_id()))
        except ServiceUnavailable:
            return False
        return True

    def close(self) -> None:
        """Close. Idempotent."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> OperatorConnection:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
