"""Names of segments: unique, and taken apart as they were made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.limits import MAX_POOL_BYTES
from hisparse_service.pool import names
from hisparse_service.pool.settings import PoolSettings

instances = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
pools = st.from_regex(r"[A-Za-z0-9_]{1,32}", fullmatch=True)


@given(
    instances, pools, st.integers(1, names.MAX_BESIDE), st.integers(1, 2**22), st.integers(0, 15)
)
def test_a_name_tells_instance_pool_and_creator(
    instance: str, pool: str, number: int, pid: int, attempt: int
) -> None:
    pool_name = names.beside_name(pool, number)
    public = names.segment_name(instance, pool_name)
    assert names.parse(public) == names.ParsedName(
        instance=instance, pool_name=pool_name, creator_pid=None
    )
    building = names.building_name(public, pid=pid, attempt=attempt)
    assert names.parse(building) == names.ParsedName(
        instance=instance, pool_name=pool_name, creator_pid=pid
    )
    assert len(building) <= 255


@given(instances, pools, instances, pools)
def test_two_instances_never_share_a_name(
    instance: str, pool: str, other: str, other_pool: str
) -> None:
    same = names.segment_name(instance, pool) == names.segment_name(other, other_pool)
    assert same == ((instance, pool) == (other, other_pool))


@pytest.mark.parametrize(
    "name", ["/psm_123", "/hisparse-", "/hisparse-a", "/hisparse-a-b.c", "/hisparse-a-b.new-x", ""]
)
def test_names_of_others_are_not_ours(name: str) -> None:
    assert names.parse(name) is None


@pytest.mark.parametrize("instance", ["", "a/b", "a.b", "x" * 65, "a b", "ä"])
def test_an_instance_name_that_does_not_fit_is_refused(instance: str) -> None:
    with pytest.raises(ConfigError, match="instance name"):
        PoolSettings(instance=instance, pool_bytes=2**20)


@pytest.mark.parametrize("pool_name", ["", "a-b", "a.2", "x" * 33])
def test_a_pool_name_that_does_not_fit_is_refused(pool_name: str) -> None:
    with pytest.raises(ConfigError, match="pool name"):
        PoolSettings(pool_name=pool_name, pool_bytes=2**20)


@pytest.mark.parametrize("pool_bytes", [0, -1, 2**20 - 1, MAX_POOL_BYTES + 1])
def test_a_pool_size_out_of_range_is_refused(pool_bytes: int) -> None:
    with pytest.raises(ConfigError, match="pool_bytes"):
        PoolSettings(pool_bytes=pool_bytes)


@pytest.mark.parametrize("threads", [-1, 257])
def test_a_number_of_threads_out_of_range_is_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match="populate_threads"):
        PoolSettings(pool_bytes=2**20, populate_threads=threads)


def test_an_unknown_numa_policy_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match="NUMA"):
        PoolSettings(pool_bytes=2**20, numa="spread")
