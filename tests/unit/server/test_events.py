"""Events: only while somebody listens, split, and never waiting for a slow subscriber."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from helpers import keys_of, wait_until

from hisparse_service.contract import messages as m
from hisparse_service.contract.ids import NamespaceId
from hisparse_service.contract.limits import MAX_EVENT_BLOCKS
from hisparse_service.contract.segment import RECORD_DTYPE
from hisparse_service.directory.results import DirectoryEvent, EventKind
from hisparse_service.server.events import EPOCH_INTERVAL_S, EventPublisher


class Pair:
    """A publisher and a subscriber of one process."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.xpub = self.context.socket(zmq.XPUB)
        self.xpub.bind("inproc://events")
        self.publisher = EventPublisher(self.xpub, epoch=9, instance="i")
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect("inproc://events")
        table = np.zeros(3 * MAX_EVENT_BLOCKS, RECORD_DTYPE)
        table["generation"] = np.arange(len(table)) + 5
        self.publisher.set_table(1, table)

    def subscribe(self, topic: bytes) -> None:
        before = self.publisher.num_subscriptions
        self.sub.subscribe(topic)

        def is_known() -> bool:
            self.publisher.read_subscriptions()
            return self.publisher.num_subscriptions > before

        wait_until(is_known)

    def next(self) -> tuple[bytes, m.Event]:
        assert self.sub.poll(10_000)
        topic, frame = self.sub.recv_multipart()
        return topic, m.decode_event(frame)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.context.destroy(linger=0)


def event(kind: EventKind, count: int) -> DirectoryEvent:
    blocks = np.arange(1, count + 1, dtype=np.uint32)
    return DirectoryEvent(kind, NamespaceId(1), blocks, keys_of(*range(1, count + 1)))


def test_nothing_is_sent_without_a_subscriber(pair: Pair) -> None:
    pair.publisher.on_directory_event(event(EventKind.PUBLISHED, 2))
    pair.publisher.tick(0.0)
    assert pair.publisher.sent_total == 0


def test_the_directory_is_told_whether_anybody_listens(pair: Pair) -> None:
    audience = pair.publisher.audience
    pair.subscribe(m.TOPIC_EPOCH)
    assert not audience.is_there
    pair.subscribe(m.TOPIC_PUBLISHED)
    assert audience.is_there
    pair.sub.unsubscribe(m.TOPIC_PUBLISHED)

    def is_gone() -> bool:
        pair.publisher.read_subscriptions()
        return not audience.is_there

    wait_until(is_gone)


def test_only_the_topics_asked_for_are_sent(pair: Pair) -> None:
    pair.subscribe(m.TOPIC_EVICTED)
    pair.publisher.on_directory_event(event(EventKind.PUBLISHED, 2))
    assert pair.publisher.sent_total == 0
    pair.publisher.on_directory_event(event(EventKind.EVICTED, 2))
    topic, got = pair.next()
    assert topic == m.TOPIC_EVICTED
    assert isinstance(got, m.EvictedEvent)
    assert got.keys == keys_of(1, 2)


def test_a_published_event_carries_the_generations_of_the_table(pair: Pair) -> None:
    pair.subscribe(m.TOPIC_PUBLISHED)
    pair.publisher.on_directory_event(event(EventKind.PUBLISHED, 2))
    _, got = pair.next()
    assert isinstance(got, m.PublishedEvent)
    assert m.u32_array(got.generations, what="generations").tolist() == [6, 7]


def test_a_long_event_is_split(pair: Pair) -> None:
    pair.subscribe(m.TOPIC_PUBLISHED)
    count = MAX_EVENT_BLOCKS + 3
    pair.publisher.on_directory_event(event(EventKind.PUBLISHED, count))
    parts = [pair.next()[1] for _ in range(2)]
    assert all(isinstance(part, m.PublishedEvent) for part in parts)
    blocks = b"".join(part.blocks for part in parts)  # type: ignore[union-attr]
    keys = b"".join(part.keys for part in parts)  # type: ignore[union-attr]
    assert m.u32_array(blocks, what="blocks").tolist() == list(range(1, count + 1))
    assert keys == keys_of(*range(1, count + 1))


def test_the_epoch_reaches_a_late_subscriber_at_once_and_again_now_and_then(pair: Pair) -> None:
    pair.subscribe(m.TOPIC_EPOCH)
    assert pair.next() == (m.TOPIC_EPOCH, m.EpochEvent(9, "i"))
    for now_s, sent in ((100.0, 2), (100.0 + EPOCH_INTERVAL_S / 2, 2), (101 + EPOCH_INTERVAL_S, 3)):
        pair.publisher.tick(now_s)
        assert pair.publisher.sent_total == sent


def test_i7_a_subscriber_that_does_not_read_stops_nothing(pair: Pair) -> None:
    pair.subscribe(b"")
    for _ in range(5_000):
        pair.publisher.on_directory_event(event(EventKind.PUBLISHED, 100))
    assert pair.publisher.sent_total == 5_001


def test_an_ended_subscription_is_forgotten(pair: Pair) -> None:
    pair.subscribe(m.TOPIC_PUBLISHED)
    pair.sub.unsubscribe(m.TOPIC_PUBLISHED)

    def is_forgotten() -> bool:
        pair.publisher.read_subscriptions()
        return pair.publisher.num_subscriptions == 0

    wait_until(is_forgotten)
