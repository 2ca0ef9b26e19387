"""Refused frames and Hellos in the log: each peer is seen at once, none can fill the disk."""

from __future__ import annotations

from typing import Any

import pytest

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    CapacityError,
    HiSparseError,
    MalformedMessage,
    MessageTooLarge,
    ProtocolMismatch,
    UnknownSession,
)
from hisparse_service.server.refusals import INTERVAL_S, MAX_PEERS, RefusalLog

HELLO = m.Hello(1, 9, 9, "engine", "", 0, 1, "")
BAD = MalformedMessage("no message")


class Lines:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.log = RefusalLog(self._write)

    def _write(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields))

    def note(
        self, error: HiSparseError = BAD, *, pid: int = 7, now_s: float = 0.0,
        request: m.Request | None = None,
    ) -> None:  # fmt: skip
        self.log.note(None, request, error, peer_address=f"h:3:3:{pid}", now_s=now_s)

    @property
    def counts(self) -> list[int]:
        return [fields["count"] for _, fields in self.told]


@pytest.fixture
def lines() -> Lines:
    return Lines()


def test_the_first_is_told_at_once_and_the_rest_in_one_line_an_interval(lines: Lines) -> None:
    for _ in range(1000):
        lines.note()
    assert lines.counts == [1]
    lines.log.tick(INTERVAL_S - 1)
    assert lines.counts == [1]
    lines.log.tick(INTERVAL_S)
    assert lines.counts == [1, 999]
    lines.note(now_s=INTERVAL_S + 1)
    assert lines.counts == [1, 999], "within the next interval"
    lines.log.tick(2 * INTERVAL_S)
    assert lines.counts == [1, 999, 1]


def test_a_peer_that_was_quiet_for_an_interval_is_told_at_once_again(lines: Lines) -> None:
    lines.note()
    lines.log.tick(INTERVAL_S)
    lines.note(now_s=INTERVAL_S)
    assert lines.counts == [1, 1]


def test_what_was_counted_is_not_lost_at_the_end(lines: Lines) -> None:
    for _ in range(3):
        lines.note()
    lines.log.close()
    lines.log.close()
    assert lines.counts == [1, 2]


def test_peers_are_told_apart_up_to_a_maximum(lines: Lines) -> None:
    for pid in range(1, 3 * MAX_PEERS):
        lines.note(pid=pid)
    assert len(lines.told) == MAX_PEERS + 1
    assert {fields["pid"] for _, fields in lines.told} >= {1, MAX_PEERS}
    lines.log.close()
    assert sum(lines.counts) == 3 * MAX_PEERS - 1


def test_a_refused_hello_says_who_and_why(lines: Lines) -> None:
    lines.note(ProtocolMismatch("speaks 9 to 9"), request=HELLO)
    (event, fields) = lines.told[0]
    assert event == "hello_refused"
    assert fields == {
        "count": 1, "session": 0, "pid": 7, "uid": 3, "client": "engine",
        "code": "ProtocolMismatch", "error": "speaks 9 to 9",
    }  # fmt: skip


def test_ordinary_answers_are_none_of_its_business(lines: Lines) -> None:
    lines.note(CapacityError("none free"), request=m.Reserve(1, 1, 0, 1))
    lines.note(UnknownSession("gone"), request=HELLO)
    lines.note(UnknownSession("say Hello"), request=m.Ping(1))
    assert not lines.told
    lines.note(MessageTooLarge("too long"))
    assert [event for event, _ in lines.told] == ["malformed_message"]


def test_a_peer_without_credentials_is_told_too(lines: Lines) -> None:
    lines.log.note(None, None, BAD, peer_address="nobody", now_s=0.0)
    assert lines.told[0][1]["uid"] == -1
