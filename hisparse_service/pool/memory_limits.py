"""The four limits that can refuse a pool, read before a byte is reserved (I5).

Each has its own remedy, so each is its own `PoolTooLarge`. All are read from files and calls whose
roots are settings, so that tests can show a made-up cgroup tree. Any thread; only reads.

A limit that cannot be read (no such file system, no permission) does not refuse: the reservation
itself still fails cleanly where memory is short.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from hisparse_service.contract.errors import PoolTooLarge
from hisparse_service.contract.sizes import rough_size_text, size_text
from hisparse_service.pool.settings import LimitSources, MemoryLock

_CAP_IPC_LOCK: Final = 14
_V1_UNLIMITED_BYTES: Final = 2**62
"""cgroup v1 writes "no limit" as the largest multiple of the page below 2^63."""
_PTE_BYTES: Final = 8
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class LimitName(enum.Enum):
    """The four limits."""

    TMPFS = "tmpfs"
    CGROUP = "cgroup"
    MEM_AVAILABLE = "mem_available"
    MEMLOCK = "memlock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitReading:
    """One limit as it stands now."""

    limit: LimitName
    limit_bytes: int
    """The maximum itself."""
    available_bytes: int
    """What is left of it for a new pool."""
    source: str
    """The file or call that it was read from."""


_REMEDIES: Final = {
    LimitName.TMPFS: (
        "Enlarge /dev/shm (`mount -o remount,size=…`; in a container `--shm-size` or an emptyDir "
        "with medium Memory), set a smaller pool.bytes, or remove pools that nobody uses "
        "(`hisparse-service purge`: the prefixes that they keep are lost)"
    ),
    LimitName.CGROUP: (
        "Raise the memory limit of the container or slice (shared memory counts there), or set a "
        "smaller pool.bytes"
    ),
    LimitName.MEM_AVAILABLE: (
        "Free memory on this host (reserved huge pages do not count as available), or set a "
        "smaller pool.bytes"
    ),
    LimitName.MEMLOCK: (
        "Raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK=, `--ulimit memlock=-1`), give the "
        "process CAP_IPC_LOCK, or turn pool.lock_memory off"
    ),
}


def page_table_bytes(pool_bytes: int) -> int:
    """Page tables that mapping the pool once with 4 KiB pages takes: memory beside the pool."""
    return pool_bytes // _PAGE_BYTES * _PTE_BYTES


def read_limits(
    *, memory_lock: MemoryLock = MemoryLock.OFF, sources: LimitSources | None = None
) -> tuple[LimitReading, ...]:
    """The limits that apply, in the order in which they are checked. Missing: not limited.

    Args:
        memory_lock: RLIMIT_MEMLOCK only counts where pages will be locked.
        sources: Where to read.
    """
    sources = sources or LimitSources()
    readings = [
        read_tmpfs(sources.shm_dir),
        read_cgroup(proc_dir=sources.proc_dir, cgroup_dir=sources.cgroup_dir),
        read_mem_available(sources.proc_dir),
    ]
    if memory_lock is MemoryLock.LOCK:
        readings.append(read_memlock(sources.proc_dir))
    return tuple(reading for reading in readings if reading is not None)


def check_limits(
    pool_bytes: int,
    *,
    memory_lock: MemoryLock = MemoryLock.OFF,
    sources: LimitSources | None = None,
) -> tuple[LimitReading, ...]:
    """Refuse a pool that one of the limits cannot hold.

    Returns:
        The readings, for the log.

    Raises:
        PoolTooLarge: Details: limit, limit_bytes, available_bytes, needed_bytes.
    """
    readings = read_limits(memory_lock=memory_lock, sources=sources)
    for reading in readings:
        needed = pool_bytes
        if reading.limit in (LimitName.CGROUP, LimitName.MEM_AVAILABLE):
            needed += page_table_bytes(pool_bytes)
        if needed > reading.available_bytes:
            raise pool_too_large(reading, needed_bytes=needed)
    return readings


def pool_too_large(reading: LimitReading, *, needed_bytes: int) -> PoolTooLarge:
    """The error for one limit, with the numbers and the remedy."""
    sizes = (needed_bytes, reading.available_bytes)
    texts = [rough_size_text(each) for each in sizes]
    if texts[0] == texts[1]:
        texts = [size_text(each) for each in sizes]
    return PoolTooLarge(
        f"the pool needs {texts[0]}, {reading.source} leaves {texts[1]} of "
        f"{rough_size_text(reading.limit_bytes)} "
        f"(limit: {reading.limit.value})",
        remedy=_REMEDIES[reading.limit],
        limit=reading.limit.value,
        limit_bytes=reading.limit_bytes,
        available_bytes=reading.available_bytes,
        needed_bytes=needed_bytes,
    )


def read_tmpfs(shm_dir: Path) -> LimitReading | None:
    """Size and free bytes of the file system that holds shared memory; None where unlimited."""
    try:
        stat = os.statvfs(shm_dir)
    except OSError:
        return None
    if stat.f_blocks == 0:
        return None  # tmpfs mounted with size=0
    return LimitReading(
        limit=LimitName.TMPFS,
        limit_bytes=stat.f_blocks * stat.f_frsize,
        available_bytes=stat.f_bavail * stat.f_frsize,
        source=f"the size of {shm_dir}",
    )


def read_mem_available(proc_dir: Path) -> LimitReading | None:
    """MemTotal and MemAvailable of the host."""
    fields = _read_table(proc_dir / "meminfo")
    if "MemAvailable" not in fields or "MemTotal" not in fields:
        return None
    return LimitReading(
        limit=LimitName.MEM_AVAILABLE,
        limit_bytes=fields["MemTotal"] * 1024,
        available_bytes=fields["MemAvailable"] * 1024,
        source=f"MemAvailable in {proc_dir / 'meminfo'}",
    )


def read_memlock(
    proc_dir: Path,
    *,
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit,
) -> LimitReading | None:
    """RLIMIT_MEMLOCK; None where it is infinite or CAP_IPC_LOCK lifts it."""
    soft, _hard = getrlimit(resource.RLIMIT_MEMLOCK)
    status = _read_lines(proc_dir / "self" / "status")
    capabilities = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    if soft == resource.RLIM_INFINITY or int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        return None
    locked_kib = next((int(line.split()[1]) for line in status if line.startswith("VmLck:")), 0)
    return LimitReading(
        limit=LimitName.MEMLOCK,
        limit_bytes=soft,
        available_bytes=max(0, soft - locked_kib * 1024),
        source="RLIMIT_MEMLOCK",
    )


def read_cgroup(*, proc_dir: Path, cgroup_dir: Path) -> LimitReading | None:
    """The tightest memory limit on the path of this process's cgroups; None where there is none.

    Both hierarchies are looked at. Limits nest: a child may have none of its own, or a larger one
    than its parent, and shared memory is charged to all of them.
    """
    readings = list(_cgroup_readings(proc_dir, cgroup_dir))
    return min(readings, key=lambda reading: reading.available_bytes, default=None)


def _cgroup_readings(proc_dir: Path, cgroup_dir: Path) -> Iterator[LimitReading]:
    for line in _read_lines(proc_dir / "self" / "cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and controllers == "":
            # Mounted at the top, or at `unified` beside the v1 controllers.
            for root in (cgroup_dir, cgroup_dir / "unified"):
                yield from _readings_up(root, path, _read_v2)
        elif "memory" in controllers.split(","):
            yield from _readings_up(cgroup_dir / "memory", path, _read_v1)


def _readings_up(
    root: Path, path: str, read: Callable[[Path], LimitReading | None]
) -> Iterator[LimitReading]:
    """The limits of the group at `path` and of all its parents up to the root of the mount.

    In a container `path` may be the host's and not exist below the mount; the mount's own root is
    then the container's group, and the walk ends there.
    """
    relative = [part for part in path.split("/") if part not in ("", ".", "..")]
    for depth in range(len(relative), -1, -1):
        reading = read(root.joinpath(*relative[:depth]))
        if reading is not None:
            yield reading


def _read_v2(group: Path) -> LimitReading | None:
    limit, used = _read_number(group / "memory.max"), _read_number(group / "memory.current")
    if limit is None or used is None:
        return None  # "max", or the root group, which has neither file
    stat = _read_table(group / "memory.stat")
    reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return _cgroup_reading(group / "memory.max", limit, used - reclaimable)


def _read_v1(group: Path) -> LimitReading | None:
    limit = _read_number(group / "memory.limit_in_bytes")
    used = _read_number(group / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _V1_UNLIMITED_BYTES:
        return None
    stat = _read_table(group / "memory.stat")
    reclaimable = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return _cgroup_reading(group / "memory.limit_in_bytes", limit, used - reclaimable)


def _cgroup_reading(source: Path, limit_bytes: int, used_bytes: int) -> LimitReading:
    """Page cache of files is given back under pressure, so it is not counted as used.

    Shared memory is: the kernel keeps it on the anonymous lists, outside both file counters.
    """
    available = limit_bytes - max(0, used_bytes)
    return LimitReading(
        limit=LimitName.CGROUP,
        limit_bytes=limit_bytes,
        available_bytes=max(0, available),
        source=str(source),
    )


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _read_number(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _read_table(path: Path) -> dict[str, int]:
    """`name value` lines, with or without a colon and a unit."""
    table = {}
    for line in _read_lines(path):
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            table[words[0].rstrip(":")] = int(words[1])
    return table
