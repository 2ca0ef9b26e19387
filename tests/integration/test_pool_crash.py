"""A creator killed at any step: the next start makes the pool anew and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hisparse_service.contract.limits import MIB
from hisparse_service.pool import names, survey
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.purge import Verdict, purge
from hisparse_service.pool.recovery import Owner
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.testing.faults import all_points
from hisparse_service.testing.segments import own_instance, run_creator

SIZE = 4 * MIB
KILLED = -9
BEFORE_PUBLICATION = (
    "segment.after_create", "segment.after_lock", "segment.after_truncate", "segment.after_map",
    "segment.after_populate", "segment.after_header_body", "segment.after_header",
)  # fmt: skip
AFTER_PUBLICATION = (
    "segment.after_link", "segment.after_publish", "backing.after_table_zeroed",
    "backing.after_body", "backing.after_in_use", "backing.after_clear",
)  # fmt: skip
AFTER_THE_END = ("segment.after_unlink",)
HOLDS_A_BACKING = ("backing.after_in_use",)


@pytest.fixture
def instance() -> Iterator[str]:
    with own_instance("crash") as name:
        yield name


def test_every_crash_point_of_the_pool_is_tested_here() -> None:
    points = [
        point
        for point in all_points(packages=("hisparse_service.pool",))
        if point.startswith(("segment.", "backing."))
    ]
    assert points == sorted(BEFORE_PUBLICATION + AFTER_PUBLICATION + AFTER_THE_END)


def restart(instance: str) -> Pool:
    return Pool.create_or_adopt(PoolSettings(instance=instance, pool_bytes=SIZE))


@pytest.mark.parametrize("point", BEFORE_PUBLICATION)
def test_i6_a_creator_killed_before_publication_leaves_nothing_after_the_next_start(
    instance: str, point: str
) -> None:
    assert run_creator(instance, pool_bytes=SIZE, crash_point=point) == KILLED
    (leftover,) = survey.list_names(instance)
    parsed = names.parse(leftover)
    assert parsed is not None
    assert parsed.creator_pid is not None
    pool = restart(instance)
    assert not pool.adopted
    assert survey.list_names(instance) == (pool.segment_name,)
    assert any(leftover in notice for notice in pool.notices)
    pool.release()
    assert survey.list_names(instance) == ()


@pytest.mark.parametrize("point", BEFORE_PUBLICATION)
def test_i6_purge_removes_what_a_killed_creator_left(instance: str, point: str) -> None:
    assert run_creator(instance, pool_bytes=SIZE, crash_point=point) == KILLED
    (finding,) = purge(instance)
    assert finding.verdict is Verdict.REMOVED
    assert survey.list_names(instance) == ()


@pytest.mark.parametrize("point", AFTER_PUBLICATION)
def test_i6_a_daemon_killed_after_publication_leaves_a_pool_that_is_adopted_whole(
    instance: str, point: str
) -> None:
    assert run_creator(instance, pool_bytes=SIZE, crash_point=point) == KILLED
    pool = restart(instance)
    assert pool.adopted
    assert survey.list_names(instance) == (pool.segment_name,)
    backings = pool.backings()
    assert len(backings) == (1 if point in HOLDS_A_BACKING else 0)
    for backing in backings:
        assert backing.record.name == "model"
        assert not backing.table.view("u1").any()
    again = pool.make_backing(
        namespace=1, fingerprint=b"f" * 16, name="model", geometry=b"g", num_blocks=64,
        payload_bytes=64 * 4096,
    )  # fmt: skip
    use = pool.bytes_by_use()
    assert use.tables_bytes == (len(backings) + 1) * 4096
    del backings, again
    if point in HOLDS_A_BACKING:
        del backing
    pool.release()
    assert survey.list_names(instance) == ()


def test_i6_a_daemon_killed_after_unlink_leaves_nothing(instance: str) -> None:
    assert run_creator(instance, pool_bytes=SIZE, crash_point=AFTER_THE_END[0]) == KILLED
    assert survey.list_names(instance) == ()


def test_the_creator_that_is_not_killed_ends_well(instance: str) -> None:
    assert run_creator(instance, pool_bytes=SIZE) == 0
    assert survey.list_names(instance) == ()


def test_a_segment_that_a_live_process_is_making_is_not_a_leftover(instance: str) -> None:
    """Seen from another start while the first still populates."""
    seen: list[Owner] = []

    def look(progress: object) -> None:
        (building,) = survey.list_names(instance)
        found = survey.look(building)
        assert found is not None
        seen.append(found.owner)
        found.close()
        (finding,) = purge(instance)
        assert finding.verdict is Verdict.OWNED

    pool = Pool.create_or_adopt(PoolSettings(instance=instance, pool_bytes=SIZE), progress=look)
    assert seen[-1] is Owner.HELD
    pool.release()
