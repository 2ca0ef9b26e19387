"""Events on the XPUB socket: published, evicted, epoch. Sent only while somebody listens.

An event is a hint, never a right: a subscriber that is too slow loses some (the socket drops above
its high-water mark) and a handle is checked against the block table all the same.
Control loop only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy.typing as npt
import zmq

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.limits import BLOCK_KEY_BYTES, MAX_EVENT_BLOCKS
from hisparse_service.directory.results import Audience, DirectoryEvent, EventKind, U32Array

EPOCH_INTERVAL_S: Final = 5.0
"""A subscriber that joined late learns the epoch after at most this."""
MAX_SUBSCRIPTIONS: Final = 4_096
"""Distinct prefixes remembered; beyond it every event counts as wanted."""


class EventPublisher:
    """Publishes on a bound XPUB socket that it borrows from the transport."""

    def __init__(self, socket: zmq.Socket[bytes], *, epoch: int, instance: str) -> None:
        self._socket = socket
        self._epoch = epoch
        self._epoch_event = m.encode(m.EpochEvent(epoch=epoch, instance=instance))
        self._prefixes: set[bytes] = set()
        self.audience = Audience(is_there=False)
        """Whether anybody wants events of the directory."""
        self._wants_all = False
        self._next_epoch_s = 0.0
        self._tables: dict[int, npt.NDArray[Any]] = {}
        self.sent_total = 0

    @property
    def num_subscriptions(self) -> int:
        """Distinct topics that are subscribed to."""
        return len(self._prefixes)

    def set_table(self, namespace_id: int, table: npt.NDArray[Any] | None) -> None:
        """Where the generations of a namespace's blocks stand; None before its mapping goes."""
        if table is None:
            self._tables.pop(namespace_id, None)
        else:
            self._tables[namespace_id] = table

    def read_subscriptions(self) -> None:
        """Take note of who joined and left. Call when the socket's descriptor is readable."""
        is_new = False
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            prefix = frame[1:]
            if frame[:1] == b"\x01":
                is_new = True
                if len(self._prefixes) >= MAX_SUBSCRIPTIONS or len(prefix) > limits.MAX_TEXT_BYTES:
                    self._wants_all = True
                else:
                    self._prefixes.add(prefix)
            elif frame[:1] == b"\x00":
                self._prefixes.discard(prefix)
        self.audience.is_there = self._is_wanted(m.TOPIC_PUBLISHED) or self._is_wanted(
            m.TOPIC_EVICTED
        )
        if is_new:
            self._send(m.TOPIC_EPOCH, self._epoch_event)

    def tick(self, now_s: float) -> None:
        """Send the epoch now and then."""
        if now_s >= self._next_epoch_s:
            self._next_epoch_s = now_s + EPOCH_INTERVAL_S
            self._send(m.TOPIC_EPOCH, self._epoch_event)

    def on_directory_event(self, event: DirectoryEvent) -> None:
        """The directory's event sink: after a publication or an eviction."""
        is_published = event.kind is EventKind.PUBLISHED
        topic = m.TOPIC_PUBLISHED if is_published else m.TOPIC_EVICTED
        if not self._is_wanted(topic):
            return
        for start in range(0, len(event.blocks), MAX_EVENT_BLOCKS):
            stop = start + MAX_EVENT_BLOCKS
            keys = event.keys[start * BLOCK_KEY_BYTES : stop * BLOCK_KEY_BYTES]
            self._send(
                topic,
                self._encode(event, event.blocks[start:stop], keys, is_published=is_published),
            )

    def _encode(
        self, event: DirectoryEvent, blocks: U32Array, keys: bytes, *, is_published: bool
    ) -> bytes:
        namespace = int(event.namespace)
        if not is_published:
            return m.encode(m.EvictedEvent(self._epoch, namespace, blocks.tobytes(), keys))
        generations = self._tables[namespace]["generation"][blocks]
        return m.encode(
            m.PublishedEvent(self._epoch, namespace, blocks.tobytes(), generations.tobytes(), keys)
        )

    def _is_wanted(self, topic: bytes) -> bool:
        return self._wants_all or any(topic.startswith(prefix) for prefix in self._prefixes)

    def _send(self, topic: bytes, payload: bytes) -> None:
        if not self._is_wanted(topic):
            return
        try:
            self._socket.send(topic, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return
        self.sent_total += 1
