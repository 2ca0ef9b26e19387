"""Copies of control messages for whoever looks at all of them: a recording, or spans.

The control loop only appends to a queue; encoding and writing are the taker's, on a thread of its
own. Without a taker the loop has no tap and pays nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from hisparse_service.contract import messages as m
from hisparse_service.contract.limits import MIB

MAX_QUEUED_MESSAGES: Final = 65_536
MAX_QUEUED_BYTES: Final = 64 * MIB


class Answered(NamedTuple):
    """One request and what it was answered with. Messages are frozen: any thread may read them."""

    session_id: int
    request: m.Request
    reply: m.Reply
    started_ns: int
    """CLOCK_MONOTONIC, at the receipt."""
    ended_ns: int
    frame_bytes: int


class MessageTap:
    """A bounded queue from the control loop to one taker."""

    def __init__(self) -> None:
        self._queue: deque[Answered] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self.dropped = 0
        """Messages for which there was no room. Written by the control loop."""

    def offer(self, answered: Answered) -> None:
        """Queue it, or count it as dropped. Control loop."""
        waiting_bytes = self._put_bytes - self._taken_bytes
        if len(self._queue) >= MAX_QUEUED_MESSAGES or waiting_bytes > MAX_QUEUED_BYTES:
            self.dropped += 1
            return
        self._put_bytes += answered.frame_bytes
        self._queue.append(answered)

    def take(self) -> list[Answered]:
        """All that is queued, in order. The taker's thread."""
        taken = [self._queue.popleft() for _ in range(len(self._queue))]
        self._taken_bytes += sum(each.frame_bytes for each in taken)
        return taken
