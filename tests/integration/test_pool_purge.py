"""Purge removes what no live process owns or uses, and nothing else."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.limits import MIB
from hisparse_service.pool import names, survey
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.purge import PurgeMode, Verdict, purge
from hisparse_service.pool.segment_file import open_existing, shm_path
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.testing.segments import cut, flip_byte, make_foreign, own_instance

SIZE = 2 * MIB


@pytest.fixture
def instance() -> Iterator[str]:
    with own_instance("purge") as name:
        yield name


def open_pool(instance: str, pool_name: str = "main") -> Pool:
    return Pool.create_or_adopt(
        PoolSettings(instance=instance, pool_name=pool_name, pool_bytes=SIZE)
    )


def left_behind(instance: str, pool_name: str = "main") -> str:
    pool = open_pool(instance, pool_name)
    pool.keep()
    return pool.segment_name


def test_an_abandoned_pool_is_removed_and_told(instance: str) -> None:
    name = left_behind(instance)
    (report,) = purge(instance, mode=PurgeMode.REPORT)
    assert (report.name, report.size_bytes, report.verdict) == (name, SIZE, Verdict.REMOVABLE)
    assert survey.list_names(instance) == (name,)
    (finding,) = purge(instance)
    assert (finding.name, finding.verdict) == (name, Verdict.REMOVED)
    assert purge(instance) == ()


def test_a_pool_of_a_live_daemon_stays(instance: str) -> None:
    pool = open_pool(instance)
    (finding,) = purge(instance)
    assert finding.verdict is Verdict.OWNED
    assert survey.list_names(instance) == (pool.segment_name,)
    pool.release()


def test_pools_of_other_instances_stay_even_where_the_names_begin_alike(instance: str) -> None:
    with own_instance(f"{instance}-other") as longer:
        kept = [left_behind(f"{instance}x"), left_behind(longer)]
        try:
            left_behind(instance)
            assert [finding.verdict for finding in purge(instance)] == [Verdict.REMOVED]
            assert all(Path(shm_path(name)).exists() for name in kept)
        finally:
            purge(f"{instance}x")


def test_a_renamed_pool_of_another_instance_stays(instance: str) -> None:
    with own_instance("purge-source") as other:
        source = left_behind(other)
        target = names.segment_name(instance, "main")
        os.rename(shm_path(source), shm_path(target))
        (finding,) = purge(instance)
        assert finding.verdict is Verdict.FOREIGN
        assert Path(shm_path(target)).exists()


def test_a_pool_that_a_worker_holds_stays(instance: str) -> None:
    name = left_behind(instance)
    with Path(shm_path(name)).open("r+b") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        (finding,) = purge(instance)
    assert finding.verdict is Verdict.IN_USE
    assert Path(shm_path(name)).exists()


MAPPER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(fd, 0)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_a_pool_that_a_process_has_mapped_without_the_lock_stays(instance: str) -> None:
    name = left_behind(instance)
    with subprocess.Popen(
        [sys.executable, "-c", MAPPER, shm_path(name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        (finding,) = purge(instance)
        assert finding.verdict is Verdict.IN_USE
        assert str(child.pid) in finding.reason
        child.communicate(timeout=30)
    (finding,) = purge(instance)
    assert finding.verdict is Verdict.REMOVED


@pytest.mark.parametrize("damage", ["header", "cut"])
def test_a_corrupt_pool_of_ours_is_removed_at_the_operators_word(
    instance: str, damage: str
) -> None:
    name = left_behind(instance)
    flip_byte(name, 40) if damage == "header" else cut(name, MIB)
    (finding,) = purge(instance)
    assert finding.verdict is Verdict.REMOVED
    assert finding.reason


def test_foreign_objects_and_unknown_versions_stay(instance: str) -> None:
    foreign = names.segment_name(instance, "main")
    make_foreign(foreign)
    unknown = left_behind(instance, "second")
    flip_byte(unknown, 8)
    blank = names.segment_name(instance, "third")
    make_foreign(blank, bytes(8192))
    assert [finding.verdict for finding in purge(instance)] == [Verdict.FOREIGN] * 3
    assert survey.list_names(instance) == (foreign, unknown, blank)


def test_a_building_name_with_foreign_content_stays(instance: str) -> None:
    name = names.building_name(names.segment_name(instance, "main"), pid=4_000_000)
    make_foreign(name)
    (finding,) = purge(instance)
    assert finding.verdict is Verdict.FOREIGN
    pool = open_pool(instance)
    assert any(name in notice and "left alone" in notice for notice in pool.notices)
    assert Path(shm_path(name)).exists()
    pool.release()


def test_a_name_that_passes_on_meanwhile_is_not_removed(instance: str) -> None:
    name = left_behind(instance)
    old = open_existing(name)
    assert old.try_lock_owner()
    Path(shm_path(name)).unlink()
    device, inode = make_foreign(name)
    assert not old.unlink()
    status = Path(shm_path(name)).stat()
    assert (status.st_dev, status.st_ino) == (device, inode)
    assert stat.S_ISREG(status.st_mode)
    old.close()


def test_an_adopted_mapping_is_not_mistaken_for_a_worker(instance: str) -> None:
    """The looker itself maps nothing: its own pid is never among the users."""
    left_behind(instance)
    before = mmap.mmap(-1, mmap.PAGESIZE)
    (finding,) = purge(instance, mode=PurgeMode.REPORT)
    before.close()
    assert finding.verdict is Verdict.REMOVABLE


def test_an_instance_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError):
        purge("*")
