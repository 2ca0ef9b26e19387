"""Adoption: what a daemon left is taken over whole, and what cannot be trusted is left alone."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse_service.contract.errors import CorruptSegmentError, ForeignSegment
from hisparse_service.contract.limits import MIB
from hisparse_service.contract.segment import (
    FORMAT_VERSION,
    HEADER_BYTES,
    backing_offset,
    pack_backing,
    pack_header,
)
from hisparse_service.pool import names, survey
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.segment_file import shm_path
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.testing.segments import corrupt_backing, cut, flip_byte, own_instance

SIZE = 8 * MIB
GEOMETRY = b"geometry"


@pytest.fixture
def instance() -> Iterator[str]:
    with own_instance("adopt") as name:
        yield name


def open_pool(instance: str, *, size: int = SIZE) -> Pool:
    return Pool.create_or_adopt(PoolSettings(instance=instance, pool_bytes=size))


def fill(pool: Pool, *, namespace: int = 1) -> None:
    backing = pool.make_backing(
        namespace=namespace, fingerprint=bytes([namespace]) * 16, name="model", geometry=GEOMETRY,
        num_blocks=100, payload_bytes=100 * 4096,
    )  # fmt: skip
    backing.table["state"][5] = 3
    backing.table["key_low"][5] = 1000 + namespace


def left_behind(instance: str) -> str:
    """A pool with one backing whose daemon is gone; its name."""
    pool = open_pool(instance)
    fill(pool)
    pool.keep()
    return pool.segment_name


def snapshot(name: str) -> tuple[int, bytes]:
    path = Path(shm_path(name))
    return path.stat().st_ino, path.read_bytes()


def test_i6_a_kept_pool_is_adopted_with_its_backings(instance: str) -> None:
    first = open_pool(instance)
    fill(first, namespace=1)
    fill(first, namespace=2)
    first.drop_backing(0)
    fill(first, namespace=3)
    expected = [(backing.slot, backing.record) for backing in first.backings()]
    identity = (first.device, first.inode, first.uuid, first.bytes_by_use())
    first.keep()
    second = open_pool(instance)
    assert second.adopted
    assert second.populated is None
    assert second.notices == ()
    assert [(backing.slot, backing.record) for backing in second.backings()] == expected
    assert (second.device, second.inode, second.uuid, second.bytes_by_use()) == identity
    tables = [int(backing.table["key_low"][5]) for backing in second.backings()]
    assert tables == [1003, 1002]
    second.release()


KEEPER = """
import signal, sys
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.settings import PoolSettings
pool = Pool.create_or_adopt(PoolSettings(instance=sys.argv[1], pool_bytes=int(sys.argv[2])))
backing = pool.make_backing(namespace=1, fingerprint=b"f" * 16, name="model", geometry=b"g",
                            num_blocks=10, payload_bytes=40960)
backing.table["depth"][3] = 12345
print(pool.inode, flush=True)
signal.pause()
"""


def test_i6_a_killed_daemons_pool_is_adopted_with_every_store_it_made(instance: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KEEPER, instance, str(SIZE)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    inode = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    pool = open_pool(instance)
    assert (pool.adopted, pool.inode) == (True, inode)
    assert pool.backings()[0].table["depth"][3] == 12345
    pool.release()


def test_a_pool_of_another_size_that_holds_backings_is_adopted_with_a_warning(
    instance: str,
) -> None:
    left_behind(instance)
    pool = open_pool(instance, size=2 * SIZE)
    assert (pool.adopted, pool.size_bytes) == (True, SIZE)
    assert any("adopted as it is" in notice for notice in pool.notices)
    pool.release()


def test_an_empty_pool_of_another_size_is_made_anew_unless_it_is_used(instance: str) -> None:
    first = open_pool(instance)
    first.keep()
    with Path(shm_path(first.segment_name)).open("r+b") as worker:
        fcntl.flock(worker.fileno(), fcntl.LOCK_SH)
        used = open_pool(instance, size=2 * SIZE)
        assert (used.adopted, used.inode) == (True, first.inode)
        used.keep()
    second = open_pool(instance, size=2 * SIZE)
    assert (second.adopted, second.size_bytes) == (False, 2 * SIZE)
    assert survey.list_names(instance) == (second.segment_name,)
    second.release()


def wrong_version(name: str) -> None:
    with Path(shm_path(name)).open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", FORMAT_VERSION + 1))


def punch_hole(name: str) -> None:
    """Sparse in the middle: it would read as zeros and fault later."""
    size = os.stat(shm_path(name)).st_size
    cut(name, size - MIB)
    cut(name, size)


def overlapping_backing(name: str) -> None:
    found = survey.look(name)
    assert found is not None
    _slot, record = found.records[0]
    found.close()
    with Path(shm_path(name)).open("r+b") as file:
        file.seek(backing_offset(1))
        file.write(pack_backing(record))


DAMAGE = {
    "header checksum": lambda name: flip_byte(name, 40),
    "header padding": lambda name: flip_byte(name, HEADER_BYTES - 1),
    "header length field": lambda name: flip_byte(name, 12),
    "format version": wrong_version,
    "backing checksum": corrupt_backing,
    "backing in-use byte": lambda name: flip_byte(name, backing_offset(0)),
    "overlapping backings": overlapping_backing,
    "cut in the arena": lambda name: cut(name, SIZE - MIB),
    "cut in the directory": lambda name: cut(name, 8192),
    "cut in the header": lambda name: cut(name, 100),
    "holes": punch_hole,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_i8_a_pool_that_cannot_be_trusted_is_left_alone_and_one_starts_beside_it(
    instance: str, damage: str
) -> None:
    name = left_behind(instance)
    DAMAGE[damage](name)
    before = snapshot(name)
    pool = open_pool(instance)
    assert not pool.adopted
    assert pool.segment_name == name + ".2"
    assert pool.header.pool_name == "main.2"
    assert any(name in notice and "left alone" in notice for notice in pool.notices)
    fill(pool)
    pool.keep()
    assert snapshot(name) == before
    again = open_pool(instance)
    assert (again.adopted, again.segment_name) == (True, name + ".2")
    again.release()
    assert snapshot(name) == before


@pytest.mark.parametrize("offset", [0, 3])
def test_i8_a_segment_without_our_magic_is_foreign(instance: str, offset: int) -> None:
    name = left_behind(instance)
    flip_byte(name, offset)
    before = snapshot(name)
    with pytest.raises(ForeignSegment):
        open_pool(instance)
    assert snapshot(name) == before


@pytest.mark.parametrize("change", ["instance", "pool_name"])
def test_a_segment_of_another_instance_under_our_name_is_foreign(
    instance: str, change: str
) -> None:
    pool = open_pool(instance)
    header = {**{field: getattr(pool.header, field) for field in pool.header.__struct_fields__}}
    header[change] = "other"
    name = pool.segment_name
    pool.keep()
    with Path(shm_path(name)).open("r+b") as file:
        file.write(pack_header(type(pool.header)(**header)))
    with pytest.raises(ForeignSegment, match="another name"):
        open_pool(instance)


def test_the_good_pool_beside_is_found_when_the_bad_one_is_gone(instance: str) -> None:
    name = left_behind(instance)
    flip_byte(name, 40)
    beside = open_pool(instance)
    fill(beside)
    beside.keep()
    Path(shm_path(name)).unlink()
    again = open_pool(instance)
    assert (again.adopted, again.segment_name) == (True, name + ".2")
    again.release()


def test_when_all_names_hold_untrusted_pools_the_start_is_refused(instance: str) -> None:
    for number in range(1, names.MAX_BESIDE + 1):
        pool = open_pool(instance)
        assert pool.header.pool_name == names.beside_name("main", number)
        pool.keep()
        flip_byte(pool.segment_name, 40)
    with pytest.raises(CorruptSegmentError, match="purge"):
        open_pool(instance)
    assert len(survey.list_names(instance)) == names.MAX_BESIDE


@pytest.mark.parametrize("step", range(0, HEADER_BYTES, 61))
def test_i8_no_changed_byte_of_the_header_is_accepted(instance: str, step: int) -> None:
    name = left_behind(instance)
    flip_byte(name, step)
    found = survey.look(name)
    assert found is not None
    assert found.header is None
    found.close()
