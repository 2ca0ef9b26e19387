"""The machine: memory and its limits, NUMA, kernel features, clock, GPU and driver.

Everything is read below roots that tests may replace (`Roots`). Nothing is changed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from hisparse_service.cli.doctor_findings import Check, Finding, bad, good, skipped, warning
from hisparse_service.cli.operations import human_bytes
from hisparse_service.config import Settings
from hisparse_service.contract.limits import GIB, MAX_REGISTRATION_BYTES
from hisparse_service.pool import memory_limits, names, numa
from hisparse_service.pool.memory_limits import LimitReading
from hisparse_service.pool.settings import LimitSources

_MIN_KERNEL: Final = (5, 14)
"""MADV_POPULATE_READ and _WRITE."""
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_STA_UNSYNC: Final = 0x0040
_NEWEST_TABLE_LIMIT_DRIVER: Final = 580
"""From this major version on, one registration of 512 GiB or more fails."""
_CUDA_CHECK_S: Final = 60.0
_EARLIEST_TIME_S: Final = 1_750_000_000.0
"""Mid-2025: a clock before it was never set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roots:
    """Where to look. Tests put made-up trees here."""

    shm: Path = Path("/dev/shm")  # noqa: S108 - where posix_ipc's segments are
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    probe_kernel: Callable[[], list[str]] = lambda: missing_kernel_features()
    adjtimex_status: Callable[[], int] = lambda: read_adjtimex_status()
    wall_time_s: Callable[[], float] = time.time
    reserved_bytes: int = 0
    """What a daemon that runs has reserved of its pool."""

    @property
    def limits(self) -> LimitSources:
        """As `pool.memory_limits` takes them."""
        return LimitSources(shm_dir=self.shm, proc_dir=self.proc, cgroup_dir=self.cgroup)


def checks(settings: Settings, roots: Roots | None = None) -> list[Check]:
    """Those that are done at once."""
    roots = roots or Roots()
    return [
        Check("shared memory", lambda: check_shared_memory(settings, roots)),
        Check("cgroup", lambda: check_cgroup(settings, roots)),
        Check("memory", lambda: check_memory(settings, roots)),
        Check("memlock", lambda: check_memlock(settings, roots)),
        Check("huge pages", lambda: check_huge_pages(settings, roots)),
        Check("numa", lambda: check_numa(settings, roots)),
        Check("kernel", lambda: check_kernel(roots)),
        Check("clock", lambda: check_clock(roots)),
        Check("driver", lambda: check_driver(settings, roots)),
    ]


def slow_checks(settings: Settings, roots: Roots | None = None) -> list[Check]:
    """Those that start processes and touch a GPU."""
    roots = roots or Roots()
    return [Check("cuda ipc", lambda: check_cuda_ipc(settings, roots))]


# --- memory -------------------------------------------------------------------------------------


def needed_bytes(settings: Settings, roots: Roots) -> int:
    """What a start would still have to find: a pool that is there is adopted, not made anew."""
    if roots.reserved_bytes:
        return max(0, settings.pool.bytes - roots.reserved_bytes)
    name = names.segment_name(settings.instance, settings.pool.name).lstrip("/")
    try:
        found = (roots.shm / name).stat()
    except OSError:
        return settings.pool.bytes
    return 0 if found.st_size == settings.pool.bytes else settings.pool.bytes


def _against(
    check: str, reading: LimitReading | None, needed: int, remedy: str, *, unlimited: str
) -> Finding:
    if reading is None:
        return good(check, unlimited)
    left = (
        f"{reading.source} leaves {human_bytes(reading.available_bytes)} of "
        f"{human_bytes(reading.limit_bytes)}"
    )
    if not needed:
        return good(check, f"{left}; the pool is there already")
    if needed > reading.available_bytes:
        return bad(check, f"the pool needs {human_bytes(needed)}, {left}", remedy)
    return good(check, f"{left}, the pool needs {human_bytes(needed)}")


def check_shared_memory(settings: Settings, roots: Roots) -> Finding:
    """The size of /dev/shm."""
    if not roots.shm.is_dir():
        return bad("shared memory", f"{roots.shm} is not there", "Mount a tmpfs on it")
    if not os.access(roots.shm, os.W_OK):
        return bad(
            "shared memory", f"{roots.shm} is not writable", "Mount it with mode=1777, not readonly"
        )
    return _against(
        "shared memory", memory_limits.read_tmpfs(roots.shm), needed_bytes(settings, roots),
        f"Enlarge it (mount -o remount,size=... {roots.shm}; in a container --shm-size, in a pod "
        "an emptyDir with medium Memory and sizeLimit), or set a smaller pool.bytes",
        unlimited=f"{roots.shm} has no size limit",
    )  # fmt: skip


def check_cgroup(settings: Settings, roots: Roots) -> Finding:
    """The tightest memory limit of this process's groups."""
    needed = needed_bytes(settings, roots)
    needed += memory_limits.page_table_bytes(needed)
    return _against(
        "cgroup", memory_limits.read_cgroup(proc_dir=roots.proc, cgroup_dir=roots.cgroup), needed,
        "Raise the memory limit of the container or unit (MemoryMax=): shared memory counts there; "
        "or set a smaller pool.bytes",
        unlimited="no memory limit",
    )  # fmt: skip


def check_memory(settings: Settings, roots: Roots) -> Finding:
    """MemAvailable."""
    needed = needed_bytes(settings, roots)
    needed += memory_limits.page_table_bytes(needed)
    return _against(
        "memory", memory_limits.read_mem_available(roots.proc), needed,
        "Free memory (reserved huge pages do not count as available), or set a smaller pool.bytes",
        unlimited="the kernel does not tell",
    )  # fmt: skip


def check_memlock(settings: Settings, roots: Roots) -> Finding:
    """RLIMIT_MEMLOCK, where pages will be locked."""
    reading = memory_limits.read_memlock(roots.proc, getrlimit=resource.getrlimit)
    if not settings.pool.lock_memory:
        shown = "unlimited" if reading is None else human_bytes(reading.limit_bytes)
        return good("memlock", f"{shown}; pool.lock_memory is off, so nothing is locked")
    return _against(
        "memlock", reading, settings.pool.bytes,
        "Raise it (LimitMEMLOCK=infinity, --ulimit memlock=-1), grant CAP_IPC_LOCK, or set "
        "pool.lock_memory to false",
        unlimited="unlimited",
    )  # fmt: skip


def check_huge_pages(settings: Settings, roots: Roots) -> Iterator[Finding]:
    """Transparent huge pages for shared memory, and reserved ones that eat the RAM."""
    path = roots.sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    text = _read(path)
    match = re.search(r"\[(\w+)\]", text)
    mode = match.group(1) if match else "unknown"
    if settings.pool.huge_pages == "advise" and mode in ("never", "deny", "unknown"):
        yield warning(
            "huge pages", f"pool.huge_pages is advise, {path} says {mode}",
            f"echo advise > {path}, or set pool.huge_pages to never",
        )  # fmt: skip
    elif settings.pool.huge_pages == "never" and mode in ("always", "force"):
        yield warning(
            "huge pages", f"{path} says {mode}: populating may stall in compaction",
            f"echo advise > {path}",
        )  # fmt: skip
    else:
        yield good("huge pages", f"pool.huge_pages is {settings.pool.huge_pages}, shmem: {mode}")
    table = {
        words[0].rstrip(":"): int(words[1])
        for words in (line.split() for line in _read(roots.proc / "meminfo").splitlines())
        if len(words) >= 2 and words[1].isdecimal()
    }
    reserved = table.get("HugePages_Free", 0) * table.get("Hugepagesize", 0) * 1024
    total = table.get("MemTotal", 0) * 1024
    if reserved > total // 10:
        yield warning(
            "huge pages", f"{human_bytes(reserved)} are reserved as huge pages and unused; the "
            "pool cannot have them", "Lower vm.nr_hugepages if nothing else needs them",
        )  # fmt: skip


def check_numa(settings: Settings, roots: Roots) -> Finding:
    """Nodes against the policy."""
    nodes = numa.memory_nodes(roots.sys / "devices/system/node/has_memory")
    policy = settings.pool.numa
    missing = sorted(set(settings.pool.numa_nodes) - set(nodes))
    if missing:
        return bad(
            "numa", f"pool.numa_nodes names {missing}, this machine has {list(nodes)}",
            "Name nodes that have memory (numactl --hardware)",
        )  # fmt: skip
    if len(nodes) > 1 and policy == "none":
        return warning(
            "numa", f"{len(nodes)} nodes and pool.numa is none: pages go where they are first "
            "touched", "Set pool.numa to interleave, or bind to the node of the GPUs",
        )  # fmt: skip
    return good("numa", f"nodes {', '.join(map(str, nodes))}, pool.numa is {policy}")


# --- kernel and clock ---------------------------------------------------------------------------


def missing_kernel_features() -> list[str]:
    """What this kernel (or a seccomp filter) refuses, tried for real."""
    missing = []
    try:
        os.close(os.memfd_create("hisparse-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        missing.append(f"memfd_create ({error.strerror})")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        missing.append(f"pidfd_open ({error.strerror})")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        anchor = ctypes.c_char.from_buffer(page)
        for name, advice in (
            ("MADV_POPULATE_READ", _MADV_POPULATE_READ),
            ("MADV_POPULATE_WRITE", _MADV_POPULATE_WRITE),
        ):
            if libc.madvise(ctypes.addressof(anchor), mmap.PAGESIZE, advice) != 0:
                missing.append(f"{name} ({os.strerror(ctypes.get_errno())})")
        del anchor
    return missing


def check_kernel(roots: Roots) -> Finding:
    """memfd, pidfd and MADV_POPULATE."""
    release = os.uname().release
    missing = roots.probe_kernel()
    if not missing:
        return good("kernel", f"{release}: memfd, pidfd and MADV_POPULATE work")
    needed = ".".join(map(str, _MIN_KERNEL))
    remedy = f"Use Linux {needed} or newer, and let the seccomp profile pass these calls"
    text = f"{release} refuses {', '.join(missing)}"
    if any(feature.startswith("MADV") for feature in missing) and len(missing) <= 2:
        return warning("kernel", f"{text}: populating is slower", remedy)
    return bad("kernel", text, remedy)


def read_adjtimex_status() -> int:
    """The kernel's clock status bits (adjtimex); -1 where it may not be asked."""
    # struct timex: modes, four longs and the status follow each other, padded as in C.
    buffer = (ctypes.c_long * 26)()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer)) < 0:
        return -1
    return int(ctypes.c_int.from_buffer(buffer, 5 * ctypes.sizeof(ctypes.c_long)).value)


def check_clock(roots: Roots) -> Finding:
    """The monotonic clock, which deadlines are told in, and the wall clock, which logs have."""
    offsets = _read(roots.proc / "self" / "timens_offsets")
    moved = [line.split() for line in offsets.splitlines() if line.strip()]
    if any(words[0] == "monotonic" and words[1:] != ["0", "0"] for words in moved):
        return bad(
            "clock", "this process lives in a time namespace whose monotonic clock is moved: "
            "deadlines would be wrong", "Run daemon and workers in the same time namespace",
        )  # fmt: skip
    now_s = roots.wall_time_s()
    if now_s < _EARLIEST_TIME_S:
        shown = time.strftime("%Y-%m-%d", time.gmtime(now_s))
        return warning(
            "clock", f"the wall clock says {shown}", "Set it (chrony, systemd-timesyncd)"
        )
    status = roots.adjtimex_status()
    if status >= 0 and status & _STA_UNSYNC:
        return warning(
            "clock", "monotonic agrees; the wall clock is not synchronised: times in logs and "
            "spans may be off", "Run chrony or systemd-timesyncd on the host",
        )  # fmt: skip
    return good("clock", "monotonic not moved, wall clock plausible")


# --- GPU ----------------------------------------------------------------------------------------


def has_gpu(roots: Roots) -> bool:
    """Whether an NVIDIA device file is there. Loads no driver."""
    return any(path.name.removeprefix("nvidia").isdecimal() for path in roots.dev.glob("nvidia*"))


def check_driver(settings: Settings, roots: Roots) -> Iterator[Finding]:
    """The driver's version, and what it can register at once."""
    if not has_gpu(roots):
        wanted = _what_needs_cuda(settings)
        if wanted:
            yield bad(
                "driver", f"{wanted} is on and no NVIDIA GPU is visible",
                f"Give the container a GPU (device plugin, --gpus), or switch {wanted} off",
            )  # fmt: skip
        else:
            yield skipped("driver", "no NVIDIA GPU is visible here")
        return
    text = _read(roots.proc / "driver/nvidia/version")
    match = re.search(r"\b(\d+)\.(\d+)(?:\.(\d+))?\b", text)
    if match is None:
        yield bad(
            "driver", f"device files are there, {roots.proc / 'driver/nvidia/version'} is not",
            "Load the driver on the host (nvidia-smi), or mount its libraries into the container",
        )  # fmt: skip
        return
    version, major = match.group(0), int(match.group(1))
    one = human_bytes(MAX_REGISTRATION_BYTES)
    if major >= _NEWEST_TABLE_LIMIT_DRIVER and settings.pool.bytes >= 512 * GIB:
        yield good(
            "driver", f"{version}: refuses 512 GiB and more in one registration; the pool is "
            f"registered in ranges of {one}",
        )  # fmt: skip
    else:
        yield good("driver", f"{version}; the pool is registered in ranges of at most {one}")
    wanted = _what_needs_cuda(settings)
    if wanted and not _has_bindings():
        yield bad(
            "driver", f"{wanted} is on and cuda.bindings is not installed",
            f"Install hisparse-service[cuda], or switch {wanted} off",
        )  # fmt: skip


def _what_needs_cuda(settings: Settings) -> str:
    """A setting that has the daemon call CUDA; empty: none."""
    if settings.cuda.register:
        return "cuda.register"
    return "cuda.device_backing_bytes" if settings.cuda.device_backing_bytes else ""


def _has_bindings() -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:
        return False


def check_cuda_ipc(settings: Settings, roots: Roots) -> Finding:  # noqa: ARG001
    """Device memory of one process, read by another; registration of shared memory on the way."""
    if not has_gpu(roots):
        return skipped("cuda ipc", "no NVIDIA GPU is visible here")
    if not _has_bindings():
        return warning(
            "cuda ipc", "cuda.bindings is not installed here, so it was not tried",
            "Install hisparse-service[cuda] to have it checked",
        )  # fmt: skip
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "hisparse_service.cli.doctor_cuda"], capture_output=True,
            text=True, timeout=_CUDA_CHECK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return bad(
            "cuda ipc", f"no answer of the driver within {_CUDA_CHECK_S:.0f} s",
            "Look for a hung driver (dmesg, nvidia-smi)",
        )  # fmt: skip
    lines = (
        ran.stdout.strip().splitlines() or ran.stderr.strip().splitlines() or ["it said nothing"]
    )
    if ran.returncode == 0:
        return good("cuda ipc", lines[-1])
    return bad(
        "cuda ipc", lines[-1],
        "Let both processes see the same GPU and share an IPC namespace (hostIPC, --ipc=host), and "
        "see nvidia-smi -q for MIG and compute mode",
    )  # fmt: skip


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            raise
        return ""
