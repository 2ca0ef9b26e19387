"""The four limits, read from made-up trees: each with its own error, number and remedy."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hisparse_service.contract.errors import PoolTooLarge
from hisparse_service.contract.limits import GIB, MIB
from hisparse_service.pool import memory_limits
from hisparse_service.pool.memory_limits import (
    LimitName,
    check_limits,
    page_table_bytes,
    read_cgroup,
    read_limits,
    read_mem_available,
    read_memlock,
    read_tmpfs,
)
from hisparse_service.pool.settings import LimitSources, MemoryLock

CAP_IPC_LOCK = 1 << 14


class Tree:
    """A made-up host: proc and cgroup directories."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: {64 * MIB} kB\nMemAvailable: {32 * MIB} kB\n", root)
        self.write("proc/self/status", "CapEff:\t0000000000000000\nVmLck:\t 0 kB\n", root)
        self.write("proc/self/cgroup", "", root)
        self.root = root

    def write(self, path: str, text: str, root: Path | None = None) -> None:
        target = (root or self.root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def v2(self, group: str, *, limit: int | str, used: int = 0, file_cache: int = 0) -> None:
        base = f"cgroup/{group}" if group else "cgroup"
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", f"anon 5\ninactive_file {file_cache}\nshmem 7\n")

    def v1(self, group: str, *, limit: int, used: int = 0, file_cache: int = 0) -> None:
        base = f"cgroup/memory/{group}" if group else "cgroup/memory"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.stat", f"cache 9\ntotal_inactive_file {file_cache}\n")

    def reading(self) -> memory_limits.LimitReading | None:
        return read_cgroup(proc_dir=self.proc, cgroup_dir=self.cgroup)

    @property
    def sources(self) -> LimitSources:
        return LimitSources(proc_dir=self.proc, cgroup_dir=self.cgroup)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_v2_takes_the_tightest_limit_on_the_path(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/b/c\n")
    tree.v2("a", limit=8 * GIB, used=7 * GIB)
    tree.v2("a/b", limit=4 * GIB, used=GIB)
    tree.v2("a/b/c", limit="max", used=GIB)
    reading = tree.reading()
    assert reading is not None
    assert (reading.limit_bytes, reading.available_bytes) == (8 * GIB, GIB)
    assert reading.source.endswith("a/memory.max")


def test_a_sibling_group_does_not_count(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/b\n")
    tree.v2("a/b", limit=4 * GIB)
    tree.v2("a/other", limit=1)
    reading = tree.reading()
    assert reading is not None
    assert reading.available_bytes == 4 * GIB


def test_page_cache_of_files_is_not_counted_as_used_but_shared_memory_is(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.v2("", limit=4 * GIB, used=3 * GIB, file_cache=2 * GIB)
    reading = tree.reading()
    assert reading is not None
    assert reading.available_bytes == 3 * GIB


def test_a_container_that_sees_the_hosts_path_is_held_to_its_own_root(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/kubepods/pod123/abc\n")
    tree.v2("", limit=2 * GIB)
    reading = tree.reading()
    assert reading is not None
    assert reading.limit_bytes == 2 * GIB


def test_v1_limits_nest_and_unlimited_ones_do_not_count(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n")
    tree.v1("", limit=9223372036854771712)
    tree.v1("docker", limit=6 * GIB, used=GIB)
    tree.v1("docker/abc", limit=9223372036854771712)
    reading = tree.reading()
    assert reading is not None
    assert (reading.limit_bytes, reading.available_bytes) == (6 * GIB, 5 * GIB)


def test_both_hierarchies_are_looked_at(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "4:memory:/x\n0::/y\n")
    tree.v1("x", limit=6 * GIB)
    tree.write("cgroup/unified/y/memory.max", f"{3 * GIB}\n")
    tree.write("cgroup/unified/y/memory.current", "0\n")
    reading = tree.reading()
    assert reading is not None
    assert reading.limit_bytes == 3 * GIB


def test_use_above_the_limit_leaves_nothing(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.v2("", limit=GIB, used=2 * GIB)
    reading = tree.reading()
    assert reading is not None
    assert reading.available_bytes == 0


def test_no_limit_and_unreadable_files_do_not_refuse(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/a/../b\nrubbish\n")
    tree.v2("b", limit="max")
    assert tree.reading() is None
    tree.write("proc/meminfo", "MemTotal: 5 kB\n")
    assert read_mem_available(tree.proc) is None
    assert read_tmpfs(tree.root / "missing") is None


def test_the_cgroup_refuses_with_limit_need_and_remedy(tree: Tree) -> None:
    tree.write("proc/self/cgroup", "0::/\n")
    tree.v2("", limit=40 * MIB, used=8 * MIB)
    needed = 32 * MIB + page_table_bytes(32 * MIB)
    with pytest.raises(PoolTooLarge) as error:
        check_limits(32 * MIB, sources=tree.sources)
    assert error.value.details == {
        "limit": "cgroup",
        "limit_bytes": 40 * MIB,
        "available_bytes": 32 * MIB,
        "needed_bytes": needed,
    }
    assert "memory limit of the container" in error.value.remedy
    check_limits(31 * MIB, sources=tree.sources)


def test_free_memory_refuses_although_reserved_huge_pages_look_free(tree: Tree) -> None:
    kib = 1024
    tree.write(
        "proc/meminfo",
        f"MemTotal: {64 * GIB // kib} kB\nMemFree: {60 * GIB // kib} kB\n"
        f"MemAvailable: {16 * MIB // kib} kB\nHugePages_Total: 30000\n",
    )
    with pytest.raises(PoolTooLarge) as error:
        check_limits(17 * MIB, sources=tree.sources)
    assert error.value.details["limit"] == LimitName.MEM_AVAILABLE.value
    assert error.value.details["available_bytes"] == 16 * MIB
    assert "huge pages" in error.value.remedy


def test_tmpfs_is_the_first_limit_of_the_four(tree: Tree) -> None:
    with pytest.raises(PoolTooLarge) as error:
        check_limits(2**50, sources=tree.sources)
    assert error.value.details["limit"] == LimitName.TMPFS.value
    assert "--shm-size" in error.value.remedy


def memlock(tree: Tree, soft: int) -> memory_limits.LimitReading | None:
    return read_memlock(tree.proc, getrlimit=lambda _which: (soft, soft))


def test_memlock_counts_what_is_locked_already(tree: Tree) -> None:
    tree.write("proc/self/status", "CapEff:\t0000000000000000\nVmLck:\t 1024 kB\n")
    reading = memlock(tree, 8 * MIB)
    assert reading is not None
    assert (reading.limit_bytes, reading.available_bytes) == (8 * MIB, 7 * MIB)


def test_memlock_does_not_apply_to_the_privileged_or_the_unlimited(tree: Tree) -> None:
    assert memlock(tree, resource.RLIM_INFINITY) is None
    tree.write("proc/self/status", f"CapEff:\t{CAP_IPC_LOCK:016x}\n")
    assert memlock(tree, 8 * MIB) is None
    tree.write("proc/self/status", f"CapEff:\t{~CAP_IPC_LOCK & (2**41 - 1):016x}\n")
    assert memlock(tree, 8 * MIB) is not None


def test_memlock_refuses_only_where_pages_will_be_locked(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = memlock(tree, 8 * MIB)
    monkeypatch.setattr(memory_limits, "read_memlock", lambda _proc_dir: reading)
    check_limits(16 * MIB, sources=tree.sources)
    with pytest.raises(PoolTooLarge) as error:
        check_limits(16 * MIB, memory_lock=MemoryLock.LOCK, sources=tree.sources)
    assert error.value.details["limit"] == LimitName.MEMLOCK.value
    assert "RLIMIT_MEMLOCK" in error.value.remedy


def test_the_real_machine_is_readable() -> None:
    names = [reading.limit for reading in read_limits()]
    assert LimitName.MEM_AVAILABLE in names
    assert len(names) == len(set(names))


def test_the_message_is_in_units_that_people_read_and_names_the_setting(tree: Tree) -> None:
    """Before: "512,000.0 MiB", `pool_bytes`, and `purge` without a word of what it destroys."""
    tree.write("proc/self/cgroup", "0::/a\n")
    tree.v2("a", limit=8 * GIB)
    reading = tree.reading()
    assert reading is not None
    said = str(memory_limits.pool_too_large(reading, needed_bytes=500 * GIB))
    assert "needs 500 GiB" in said
    assert "leaves 8 GiB of 8 GiB" in said
    said = str(memory_limits.pool_too_large(reading, needed_bytes=8 * GIB + 4096))
    assert "needs 8 GiB (8,589,938,688 bytes)" in said
    for remedy in memory_limits._REMEDIES.values():
        assert "pool." in remedy
        assert "pool_bytes" not in remedy
        assert "purge" not in remedy or "prefixes that they keep are lost" in remedy
