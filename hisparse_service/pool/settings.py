"""What the pool must be told: sizes, names and modes, already parsed.

`hisparse_service.config` makes it from file, environment and flags; nothing in `pool/` reads those.
Immutable: any thread.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path

from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.limits import MAX_POOL_BYTES, MIB
from hisparse_service.pool.names import check_instance_name, check_pool_name
from hisparse_service.pool.numa import parse_policy
from hisparse_service.pool.populate import PopulateMethod

MIN_POOL_BYTES = 1 * MIB
MAX_POPULATE_THREADS = 256


class HugePages(enum.Enum):
    """Whether the kernel is asked for 2 MiB pages."""

    OFF = "off"
    ADVISE = "advise"
    """MADV_HUGEPAGE before population. On a fragmented host compaction can take minutes."""


class MemoryLock(enum.Enum):
    """Whether the daemon keeps the pool's pages from being swapped out."""

    OFF = "off"
    LOCK = "lock"
    """mlock of the whole pool; counts against RLIMIT_MEMLOCK."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitSources:
    """Where the four memory limits are read from; a test points them at made-up trees."""

    shm_dir: Path = Path("/dev/shm")  # noqa: S108 - the mount that glibc's shm_open uses
    proc_dir: Path = Path("/proc")
    cgroup_dir: Path = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Settings of one pool.

    Raises:
        ConfigError: A name, a policy or a size that cannot work.
    """

    pool_bytes: int
    """The whole segment: header and backing directory (516 KiB) included. Rounded up to a page."""
    instance: str = "default"
    """Letters, digits, `_` and `-`, at most 64."""
    pool_name: str = "main"
    """Letters, digits and `_`, at most 32."""
    populate_threads: int = 0
    """0: one for each CPU that this process may run on."""
    populate_method: PopulateMethod | None = None
    """None: POPULATE_WRITE where the kernel has it (see populate.py for the trade)."""
    numa: str = "default"
    """`default`, `interleave` or `bind:<nodes>` (as in `bind:0-1,3`)."""
    huge_pages: HugePages = HugePages.OFF
    memory_lock: MemoryLock = MemoryLock.OFF
    sources: LimitSources = LimitSources()

    def __post_init__(self) -> None:
        check_instance_name(self.instance)
        check_pool_name(self.pool_name)
        parse_policy(self.numa)
        if not MIN_POOL_BYTES <= self.pool_bytes <= MAX_POOL_BYTES:
            raise ConfigError(
                f"pool_bytes is {self.pool_bytes}, it can be {MIN_POOL_BYTES} to {MAX_POOL_BYTES}",
                remedy="Set pool_bytes within that range",
                limit_bytes=MAX_POOL_BYTES, value_bytes=self.pool_bytes,
            )  # fmt: skip
        if not 0 <= self.populate_threads <= MAX_POPULATE_THREADS:
            raise ConfigError(
                f"populate_threads is {self.populate_threads}, it can be 0 to "
                f"{MAX_POPULATE_THREADS}",
                remedy="Use 0 for one thread a CPU",
            )
