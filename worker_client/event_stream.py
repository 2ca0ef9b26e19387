"""The daemon's events as an iterator: a SUB socket and a context of its own.

Made by `Client.events`, which closes what is still open when it closes. Nothing here touches the
session: a consumer that is slow, or that waits, keeps no request waiting.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import zmq

from hisparse_service.contract import limits
from hisparse_service.contract.errors import ClosedError
from hisparse_service.contract.messages import Event, decode_event

__all__ = ["EventStream"]

_POLL_SLICE_MS: Final = 50


class EventStream:
    """Iterator over the daemon's events. Made by `Client.events`; one thread, any may close it.

    The queue is bounded and a daemon that restarts sends nothing meanwhile: events may be missed.
    An `EpochEvent` with another epoch says that everything may have changed.
    """

    def __init__(self, endpoint: str, topics: Sequence[bytes], *, max_queued: int) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._closed = False
        self._pid = os.getpid()
        try:
            self._socket.setsockopt(zmq.RCVHWM, max_queued)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
            for topic in topics or (b"",):
                self._socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def next(self, *, timeout_s: float) -> Event | None:
        """The next event; None at the deadline.

        Raises:
            ClosedError: Closed, meanwhile or before.
            MalformedMessage: The daemon sent something that is no event.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_ms = int(max(0.0, deadline_s - time.monotonic()) * 1000)
            # In slices, so that another thread can close the stream between two.
            with self._lock:
                if self._closed or os.getpid() != self._pid:
                    raise ClosedError("the event stream is closed", remedy="Subscribe again")
                if self._socket.poll(min(left_ms, _POLL_SLICE_MS)):
                    return decode_event(self._socket.recv_multipart()[-1])
            if left_ms <= 0:
                return None

    def __iter__(self) -> Iterator[Event]:
        while True:
            try:
                event = self.next(timeout_s=3600.0)
            except ClosedError:
                return
            if event is not None:
                yield event

    def close(self) -> None:
        """End the subscription. Idempotent."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._socket.close(linger=0)
            self._context.term()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
