"""An operator's connection to a running daemon: one request, one reply, a deadline.

Not the workers' library: no heartbeats, nothing held, no torch. Main thread of a command.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import zmq

import hisparse_service
from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import ServiceUnavailable
from hisparse_service.server.runtime_directory import CONTROL_SOCKET_NAME, check_path_length

ReplyT = TypeVar("ReplyT", bound=m.Reply)


class OperatorConnection:
    """Says Hello as an operator at once; a context manager.

    Args:
        directory: The daemon's runtime directory.
        timeout_s: For each answer.

    Raises:
        ServiceUnavailable: No socket there, or no answer before the deadline.
        HiSparseError: What the daemon answers to the Hello.
    """

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        check_path_length(directory)
        self._directory = directory
        self._timeout_s = timeout_s
        self._last_id = 0
        path = directory / CONTROL_SOCKET_NAME
        if not path.exists():
            raise self._unavailable("no socket is there")
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
            ServiceUnavailable: No answer before the deadline.
            HiSparseError: The daemon's error.
        """
        self._socket.send(m.encode(request))
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            left_ms = int((deadline_s - time.monotonic()) * 1000)
            if left_ms <= 0 or not self._socket.poll(left_ms):
                raise self._unavailable(f"no answer within {self._timeout_s:g} s")
            reply = m.decode_reply(self._socket.recv())
            if reply.request_id != request.request_id:
                continue
            m.raise_for_error(reply)
            if not isinstance(reply, reply_type):
                raise self._unavailable(f"it answered with {type(reply).__name__}")
            return reply

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

    def _unavailable(self, what: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"no daemon answers in {self._directory}: {what}",
            remedy="Start one with `hisparse-service serve`, or name the right --instance or "
            "--runtime-dir",
        )
