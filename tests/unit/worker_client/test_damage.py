"""Reports of damage as the client makes them: in parts, and to daemons older and newer than it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from fake_daemon import FakeDaemon, HandMadeSegment, short_directory, small_geometry

import worker_client
from hisparse_service.contract import limits
from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.errors import (
    DamagedBlock,
    InternalError,
    MalformedMessage,
    StaleBlock,
    UsageError,
)
from hisparse_service.contract.geometry import namespace_fingerprint
from hisparse_service.contract.messages import (
    BlocksReply,
    DamageReply,
    Pin,
    Pong,
    ReportDamage,
    decode_reply,
    encode,
)
from hisparse_service.contract.segment import BlockState
from worker_client.client import CudaUse, Namespace

GEOMETRY = small_geometry()
FINGERPRINT = namespace_fingerprint(model="m", kv_dtype="bf16", geometry=GEOMETRY)
DEADLINE_NS = 2**62


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with short_directory() as directory:
        fake = FakeDaemon(directory)
        fake.on[Pin] = lambda r: BlocksReply(
            r.request_id, fake.epoch, 5, DEADLINE_NS, r.blocks, r.generations
        )
        yield fake
        fake.stop()


@pytest.fixture
def segment(daemon: FakeDaemon) -> Iterator[HandMadeSegment]:
    made = HandMadeSegment(GEOMETRY, FINGERPRINT)
    for block in range(1, 8):
        made.set_record(block, generation=7, state=BlockState.PUBLISHED)
    made.serve(daemon)
    yield made
    made.remove()


@pytest.fixture
def namespace(daemon: FakeDaemon, segment: HandMadeSegment) -> Iterator[Namespace]:
    with worker_client.connect(daemon.directory, client_name="t") as client:
        made = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
        made.attach(8, cuda=CudaUse.OFF)
        yield made


def answers(daemon: FakeDaemon, *verdicts: int) -> None:
    daemon.on[ReportDamage] = lambda r: DamageReply(r.request_id, daemon.epoch, bytes(verdicts))


def test_a_daemon_that_knows_no_reports_has_checked_nothing(
    daemon: FakeDaemon, segment: HandMadeSegment, namespace: Namespace
) -> None:
    daemon.on[ReportDamage] = lambda _: MalformedMessage("no request has the tag 29")
    assert namespace.report_damage([1, 2], [7, 7]) == [Verdict.NOT_CHECKED] * 2
    segment.set_record(2, generation=7, state=BlockState.PUBLISHED, checksum=1)
    lease = namespace.pin([1, 2], [7, 7])
    with pytest.raises(DamagedBlock) as caught:
        lease.verify()
    assert caught.value.details["verdict"] == "not_checked"
    assert namespace.counters["damaged_reads"] == 1


def test_a_verdict_of_a_newer_daemon_is_no_withdrawal(
    daemon: FakeDaemon, namespace: Namespace
) -> None:
    answers(daemon, 2, 77)
    assert namespace.report_damage([1, 2], [7, 7]) == [Verdict.DAMAGED, Verdict.UNVERIFIABLE]


def test_a_long_report_goes_in_parts(daemon: FakeDaemon, namespace: Namespace) -> None:
    daemon.on[ReportDamage] = lambda r: DamageReply(
        r.request_id, daemon.epoch, bytes([Verdict.SOUND] * (len(r.blocks) // 4))
    )
    count = 2 * limits.MAX_REPORTED_BLOCKS + 1
    assert namespace.report_damage(range(count), range(count)) == [Verdict.SOUND] * count
    assert daemon.count(ReportDamage) == 3


def test_answers_and_questions_of_unequal_length_are_refused(
    daemon: FakeDaemon, namespace: Namespace
) -> None:
    with pytest.raises(UsageError):
        namespace.report_damage([1, 2], [7])
    answers(daemon, 1)
    with pytest.raises(InternalError):
        namespace.report_damage([1, 2], [7, 7])


def test_bytes_that_changed_because_the_block_is_anothers_now_are_not_reported(
    daemon: FakeDaemon,
    segment: HandMadeSegment,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment.set_record(2, generation=7, state=BlockState.PUBLISHED, checksum=1)
    lease = namespace.pin([2], [7])
    pool = namespace.require_pool()

    def rewritten(blocks: object) -> np.ndarray:
        segment.set_record(2, generation=8, state=BlockState.PUBLISHED, checksum=1)
        return np.array([99], np.uint64)

    monkeypatch.setattr(pool, "checksum", rewritten)
    with pytest.raises(StaleBlock) as caught:
        lease.verify()
    assert not isinstance(caught.value, DamagedBlock)
    assert daemon.count(ReportDamage) == 0


def test_an_older_daemons_heartbeat_tells_of_no_lost_pins() -> None:
    tag, *fields = [2, 1, 11, 5, [], []]
    pong = decode_reply(msgspec.msgpack.encode([tag, *fields]))
    assert isinstance(pong, Pong)
    assert pong.lost_pins == []
    assert decode_reply(encode(Pong(1, 11, 5, [], [], [(1, 2, 3)]))).lost_pins == [(1, 2, 3)]
