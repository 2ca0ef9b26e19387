"""Segments of real shared memory: made whole or not at all, and removed only when they are ours."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    ForeignSegment,
    GeometryError,
    PoolTooLarge,
    RuntimeDirectoryError,
    UsageError,
)
from hisparse_service.contract.limits import MAX_BACKINGS, MIB
from hisparse_service.contract.segment import ARENA_OFFSET, unpack_header
from hisparse_service.pool import names, segment_file, survey
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.populate import Cancelled, PopulateMethod, Progress
from hisparse_service.pool.segment_file import shm_path
from hisparse_service.pool.settings import HugePages, MemoryLock, PoolSettings
from hisparse_service.testing.faults import FaultPlan, all_points
from hisparse_service.testing.segments import make_foreign, own_instance

SIZE = 8 * MIB


@pytest.fixture
def instance() -> Iterator[str]:
    with own_instance("seg") as name:
        yield name
        assert survey.list_names(name) == (), "the test left a segment behind"


def settings(instance: str, **changes) -> PoolSettings:
    return PoolSettings(**{"instance": instance, "pool_bytes": SIZE, **changes})


def path_of(instance: str, pool_name: str = "main") -> Path:
    return Path(shm_path(names.segment_name(instance, pool_name)))


def make_backing(pool: Pool, *, num_blocks: int = 64, payload_bytes: int = 64 * 4096):
    return pool.make_backing(
        namespace=1,
        fingerprint=b"f" * 16,
        name="model",
        geometry=b"geometry",
        num_blocks=num_blocks,
        payload_bytes=payload_bytes,
    )


def test_a_new_pool_is_private_has_its_header_and_its_identity(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    status = path_of(instance).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (status.st_dev, status.st_ino) == (pool.device, pool.inode)
    header = unpack_header(path_of(instance).read_bytes()[:4096], segment_bytes=status.st_size)
    assert header == pool.header
    assert (header.instance, header.pool_name) == (instance, "main")
    assert (pool.adopted, len(pool.uuid), pool.size_bytes) == (False, 16, SIZE)
    assert os.listdir(path_of(instance).parent).count(path_of(instance).name) == 1
    pool.release()
    assert not path_of(instance).exists()


@pytest.mark.parametrize("method", PopulateMethod)
def test_i5_every_page_is_reserved_before_the_name_is_public(
    instance: str, method: PopulateMethod
) -> None:
    reserved_at_publication: list[tuple[int, bool]] = []

    def look() -> None:
        (building,) = survey.list_names(instance)
        blocks = os.stat(shm_path(building)).st_blocks
        reserved_at_publication.append((blocks * 512, path_of(instance).exists()))

    with FaultPlan().call_at(segment_file.AFTER_HEADER, look):
        pool = Pool.create_or_adopt(settings(instance, populate_method=method))
    assert reserved_at_publication == [(SIZE, False)]
    pool.release()


def test_progress_ends_at_the_whole_and_comes_from_the_calling_thread(instance: str) -> None:
    seen: list[tuple[Progress, int]] = []
    pool = Pool.create_or_adopt(
        settings(instance, populate_threads=2),
        progress=lambda progress: seen.append((progress, threading.get_ident())),
    )
    last = seen[-1][0]
    assert (last.done_bytes, last.total_bytes, last.fraction) == (SIZE, SIZE, 1.0)
    assert last.bytes_per_s > 0
    assert {thread for _progress, thread in seen} == {threading.get_ident()}
    assert pool.populated is not None
    assert pool.populated.threads == 2
    pool.release()


def test_a_cancelled_start_leaves_nothing_not_even_a_thread(instance: str) -> None:
    cancel = threading.Event()
    cancel.set()
    before = threading.active_count()
    with pytest.raises(Cancelled):
        Pool.create_or_adopt(settings(instance, pool_bytes=64 * MIB), cancel=cancel)
    assert survey.list_names(instance) == ()
    assert threading.active_count() == before


def test_a_failing_progress_callback_leaves_nothing(instance: str) -> None:
    def fail(progress: Progress) -> None:
        raise ValueError("terminal went away")

    with pytest.raises(ValueError, match="terminal"):
        Pool.create_or_adopt(settings(instance), progress=fail)
    assert survey.list_names(instance) == ()


CALLS = (
    "os.shm_open", "os.lock", "os.ftruncate", "os.mmap", "os.madvise", "os.mlock", "os.link",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("error", "expected"), [(errno.ENOSPC, PoolTooLarge), (errno.EPERM, ConfigError)]
)
def test_i6_a_call_that_fails_leaves_nothing_and_is_a_typed_error(
    instance: str, call: str, error: int, expected: type[Exception]
) -> None:
    # The first ones only look whether something is there, one for each name.
    nth = names.MAX_BESIDE + 1 if call == "os.shm_open" else 1
    before = os.listdir("/proc/self/fd")
    with (
        FaultPlan().fail_nth(call, error=error, nth=nth) as plan,
        pytest.raises(expected) as raised,
    ):
        Pool.create_or_adopt(settings(instance, memory_lock=MemoryLock.LOCK))
    assert plan.reached[call] >= nth
    assert isinstance(raised.value.__cause__, OSError)
    assert survey.list_names(instance) == ()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_shortage_of_descriptors_is_not_taken_for_a_foreign_segment(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    pool.keep()
    with (
        FaultPlan().fail_nth("os.shm_open", error=errno.EMFILE),
        pytest.raises(ConfigError, match="descriptors"),
    ):
        Pool.create_or_adopt(settings(instance))
    pool = Pool.create_or_adopt(settings(instance))
    assert pool.adopted
    pool.release()


def test_a_kernel_without_populate_write_falls_back_to_fallocate(instance: str) -> None:
    with FaultPlan().fail_nth("os.madvise", error=errno.EINVAL):
        pool = Pool.create_or_adopt(settings(instance))
    assert pool.populated is not None
    assert pool.populated.method is PopulateMethod.FALLOCATE
    assert path_of(instance).stat().st_blocks * 512 == SIZE
    pool.release()


def test_huge_pages_are_opt_in_and_their_outcome_is_told(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance, huge_pages=HugePages.ADVISE))
    assert any("huge pages" in notice for notice in pool.notices)
    pool.release()
    with FaultPlan().fail_nth("os.madvise", error=errno.EINVAL):
        pool = Pool.create_or_adopt(settings(instance, huge_pages=HugePages.ADVISE))
    assert any("refused" in notice for notice in pool.notices)
    pool.release()


def test_locked_pages_are_locked(instance: str) -> None:
    def locked_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

    before = locked_kib()
    pool = Pool.create_or_adopt(settings(instance, memory_lock=MemoryLock.LOCK))
    assert locked_kib() - before == SIZE // 1024
    pool.release()
    assert locked_kib() == before


def test_a_name_taken_by_a_foreign_object_is_refused_and_untouched(instance: str) -> None:
    identity = make_foreign(names.segment_name(instance, "main"), b"x" * 5000)
    with pytest.raises(ForeignSegment, match="not ours"):
        Pool.create_or_adopt(settings(instance))
    status = path_of(instance).stat()
    assert (status.st_dev, status.st_ino) == identity
    assert path_of(instance).read_bytes() == b"x" * 5000
    assert len(survey.list_names(instance)) == 1
    path_of(instance).unlink()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "empty"])
def test_things_that_are_no_segments_are_foreign(instance: str, kind: str, tmp_path: Path) -> None:
    path = path_of(instance)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.touch()
    try:
        with pytest.raises(ForeignSegment):
            Pool.create_or_adopt(settings(instance))
        assert path.is_symlink() or path.exists()
        assert not (tmp_path / "elsewhere").exists()
    finally:
        path.rmdir() if kind == "directory" else path.unlink()


def test_another_users_segment_is_foreign(instance: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make another user's file")
    make_foreign(names.segment_name(instance, "main"))
    os.chown(path_of(instance), 12345, 12345)
    with pytest.raises(ForeignSegment, match="uid"):
        Pool.create_or_adopt(settings(instance))
    path_of(instance).unlink()


def test_a_pool_owned_by_a_live_daemon_is_refused(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    with pytest.raises(RuntimeDirectoryError, match="live daemon"):
        Pool.create_or_adopt(settings(instance))
    pool.release()


def test_a_name_that_is_taken_during_population_is_looked_at_again(instance: str) -> None:
    """Two daemons start at once: one publishes, the other finds it and is refused."""
    winners: list[Pool] = []
    plan = FaultPlan()

    def win() -> None:
        with FaultPlan():
            winners.append(Pool.create_or_adopt(settings(instance)))

    plan.call_at(segment_file.AFTER_HEADER, win)
    with plan, pytest.raises(RuntimeDirectoryError, match="live daemon"):
        Pool.create_or_adopt(settings(instance))
    (winner,) = winners
    assert survey.list_names(instance) == (winner.segment_name,)
    winner.release()


def test_a_cleaner_that_sees_a_segment_before_its_lock_costs_only_another_name(
    instance: str,
) -> None:
    """Between shm_open and the lock another start may take it for a dead creator's leftover."""

    def clean() -> None:
        (building,) = survey.list_names(instance)
        found = survey.look(building)
        assert found is not None
        assert found.segment is not None
        assert found.segment.unlink()
        found.close()

    with FaultPlan().call_at(segment_file.AFTER_CREATE, clean):
        pool = Pool.create_or_adopt(settings(instance))
    assert path_of(instance).stat().st_ino == pool.inode
    pool.release()


def test_release_does_not_remove_a_later_segment_under_the_same_name(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    path_of(instance).unlink()
    identity = make_foreign(pool.segment_name)
    pool.release()
    status = path_of(instance).stat()
    assert (status.st_dev, status.st_ino) == identity
    path_of(instance).unlink()


def test_a_segment_cannot_be_unlinked_without_its_owner_lock(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    other = segment_file.open_existing(pool.segment_name)
    assert not other.try_lock_owner()
    with pytest.raises(UsageError, match="owner lock"):
        other.unlink()
    other.close()
    pool.release()


def test_closing_is_idempotent_and_later_use_raises(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    pool.release()
    pool.release()
    pool.keep()
    for use in (pool.users_attached, lambda: make_backing(pool), lambda: pool.drop_backing(0)):
        with pytest.raises(ClosedError):
            use()


def test_live_views_are_named_and_the_segment_is_given_up_all_the_same(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    backing = make_backing(pool)
    with pytest.raises(UsageError, match="views of the mapping"):
        pool.release()
    assert not path_of(instance).exists()
    backing.table["state"][1] = 3
    del backing
    pool.release()


def test_a_pool_that_was_kept_with_live_views_can_be_adopted_all_the_same(instance: str) -> None:
    """The mapping holds a duplicate of the descriptor: the lock must be given up by itself."""
    pool = Pool.create_or_adopt(settings(instance))
    backing = make_backing(pool)
    with pytest.raises(UsageError, match="views of the mapping"):
        pool.keep()
    successor = Pool.create_or_adopt(settings(instance))
    assert (successor.adopted, successor.inode) == (True, pool.inode)
    del backing
    pool.keep()
    successor.release()


def test_i4_a_workers_mapping_outlives_release(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    with path_of(instance).open("r+b") as file:
        worker = mmap.mmap(file.fileno(), SIZE)
    worker[ARENA_OFFSET] = 77
    pool.release()
    assert worker[ARENA_OFFSET] == 77
    worker.close()


def test_the_user_lock_tells_whether_workers_are_attached(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    assert not pool.users_attached()
    with path_of(instance).open("r+b") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH)
        worker = mmap.mmap(file.fileno(), SIZE)
    assert pool.users_attached(), "the mapping keeps the lock when the descriptor is closed"
    worker.close()
    assert not pool.users_attached()
    pool.release()


# --- backings -------------------------------------------------------------------------------


def test_a_backing_has_a_zeroed_table_even_where_another_was_before(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    first = make_backing(pool)
    first.table.view("u1")[:] = 0xAA
    pool.drop_backing(first.slot)
    second = make_backing(pool)
    assert second.record.table_offset_bytes == first.record.table_offset_bytes
    assert second.record.generation == first.record.generation + 1
    assert not second.table.view("u1").any()
    del first, second
    pool.release()


def test_a_slots_generation_survives_the_daemon(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    assert make_backing(pool).record.generation == 1
    pool.drop_backing(0)
    pool.keep()
    pool = Pool.create_or_adopt(settings(instance))
    assert make_backing(pool).record.generation == 2
    pool.release()


def test_the_bytes_by_use_add_up_and_a_backing_too_large_changes_nothing(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))

    def total() -> int:
        use = pool.bytes_by_use()
        assert use.segment_bytes == SIZE
        return use.directory_bytes + use.tables_bytes + use.payload_bytes + use.free_bytes

    before = pool.bytes_by_use()
    assert (before.directory_bytes, total()) == (ARENA_OFFSET, SIZE)
    with pytest.raises(CapacityError) as error:
        make_backing(pool, payload_bytes=SIZE)
    assert error.value.details["needed"] == SIZE
    with pytest.raises(GeometryError):
        pool.make_backing(
            namespace=1, fingerprint=b"f" * 16, name="m", geometry=b"g" * 9000,
            num_blocks=2, payload_bytes=4096,
        )  # fmt: skip
    with pytest.raises(UsageError):
        pool.make_backing(
            namespace=0, fingerprint=b"f" * 16, name="m", geometry=b"g",
            num_blocks=2, payload_bytes=4096,
        )  # fmt: skip
    for num_blocks, payload_bytes in ((1, 4096), (2, 0)):
        with pytest.raises(UsageError):
            make_backing(pool, num_blocks=num_blocks, payload_bytes=payload_bytes)
    assert pool.bytes_by_use() == before
    make_backing(pool, payload_bytes=5000)
    use = pool.bytes_by_use()
    assert (use.tables_bytes, use.payload_bytes, total()) == (4096, 8192, SIZE)
    pool.release()


@pytest.mark.parametrize("stride", [4096, 5000, 100_000, 3 * MIB])
def test_max_blocks_is_exactly_what_fits(instance: str, stride: int) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    count = pool.max_blocks(stride)
    assert count >= 2
    with pytest.raises(CapacityError):
        make_backing(pool, num_blocks=count + 1, payload_bytes=(count + 1) * stride)
    make_backing(pool, num_blocks=count, payload_bytes=count * stride)
    assert pool.max_blocks(SIZE) == 0
    with pytest.raises(UsageError):
        pool.max_blocks(0)
    pool.release()


def test_the_backing_directory_fills_up_and_slots_are_used_again(instance: str) -> None:
    pool = Pool.create_or_adopt(settings(instance))
    slots = [make_backing(pool, num_blocks=2, payload_bytes=4096).slot for _ in range(MAX_BACKINGS)]
    assert slots == list(range(MAX_BACKINGS))
    with pytest.raises(CapacityError, match="backings"):
        make_backing(pool, num_blocks=2, payload_bytes=4096)
    pool.drop_backing(7)
    with pytest.raises(UsageError, match="slot 7"):
        pool.drop_backing(7)
    assert make_backing(pool, num_blocks=2, payload_bytes=4096).slot == 7
    pool.release()


def test_every_step_of_creation_and_of_a_backing_has_its_crash_point(instance: str) -> None:
    points = {
        point
        for point in all_points(packages=("hisparse_service.pool",))
        if point.startswith(("segment.", "backing."))
    }
    with FaultPlan() as plan:
        pool = Pool.create_or_adopt(settings(instance))
        make_backing(pool)
        pool.drop_backing(0)
        pool.release()
    assert points <= set(plan.reached)
