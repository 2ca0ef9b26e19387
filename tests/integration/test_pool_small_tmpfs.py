"""Real limits: a world of its own with a 64 MiB /dev/shm (mount, pid and network namespaces)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ENTER = ("unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc")
MOUNT = 'mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && exec "$@"'


def _why_not() -> str:
    try:
        tried = subprocess.run(
            [*ENTER, "sh", "-c", MOUNT, "sh", "true"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip() or "unshare failed"


REASON = _why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"needs unshare and mount: {REASON}")

PRELUDE = """
import json, os, resource
from hisparse_service.contract.errors import HiSparseError
from hisparse_service.contract.limits import MIB
from hisparse_service.pool import memory_limits
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.purge import purge
from hisparse_service.pool.settings import LimitSources, MemoryLock, PoolSettings
from pathlib import Path
def attempt(**settings):
    try:
        pool = Pool.create_or_adopt(PoolSettings(instance="small", **settings))
    except HiSparseError as error:
        return {"code": error.code, "remedy": error.remedy, **error.details}
    pool.release()
    return {"code": "ok"}
def say(**facts):
    print(json.dumps({**facts, "left": os.listdir("/dev/shm")}))
"""


def inside(program: str) -> dict:
    done = subprocess.run(
        [*ENTER, "sh", "-c", MOUNT, "sh", sys.executable, "-c", PRELUDE + program],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_i5_a_pool_larger_than_the_tmpfs_is_refused_with_the_numbers() -> None:
    found = inside("say(**attempt(pool_bytes=65 * MIB))")
    assert found["code"] == "PoolTooLarge"
    assert found["limit"] == "tmpfs"
    assert (found["limit_bytes"], found["needed_bytes"]) == (64 * 2**20, 65 * 2**20)
    assert "--shm-size" in found["remedy"]
    assert found["left"] == []


def test_i5_a_pool_of_exactly_the_tmpfs_fits_and_goes() -> None:
    assert inside("say(**attempt(pool_bytes=64 * MIB))") == {"code": "ok", "left": []}


def test_i5_what_others_took_counts() -> None:
    found = inside(
        "open('/dev/shm/other', 'wb').write(bytes(40 * MIB))\nsay(**attempt(pool_bytes=32 * MIB))"
    )
    assert (found["code"], found["limit"]) == ("PoolTooLarge", "tmpfs")
    assert found["available_bytes"] <= 24 * 2**20
    assert found["left"] == ["other"]


@pytest.mark.parametrize("method", ["POPULATE_WRITE", "FALLOCATE"])
def test_i5_a_tmpfs_that_fills_up_during_population_is_an_error_and_no_sigbus(method: str) -> None:
    """The check passed, then another process took the pages."""
    found = inside(
        "from hisparse_service.pool.populate import PopulateMethod\n"
        "from hisparse_service.pool import segment_file\n"
        "from hisparse_service.testing.faults import FaultPlan\n"
        "steal = lambda: open('/dev/shm/other', 'wb').write(bytes(40 * MIB))\n"
        "with FaultPlan().call_at(segment_file.AFTER_MAP, steal):\n"
        f"    facts = attempt(pool_bytes=48 * MIB, populate_method=PopulateMethod.{method})\n"
        "say(**facts)"
    )
    assert (found["code"], found["limit"]) == ("PoolTooLarge", "tmpfs")
    assert found["left"] == ["other"]


def test_a_leftover_of_a_dead_creator_makes_room_for_the_next_start() -> None:
    found = inside(
        "from hisparse_service.testing.segments import run_creator\n"
        "code = run_creator('small', pool_bytes=48 * MIB, crash_point='segment.after_header')\n"
        "say(killed=code, before=os.listdir('/dev/shm'), **attempt(pool_bytes=48 * MIB))"
    )
    assert (found["killed"], len(found["before"])) == (-9, 1)
    assert (found["code"], found["left"]) == ("ok", [])


def test_memlock_refuses_a_pool_that_is_to_be_locked_by_the_unprivileged() -> None:
    found = inside(
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 * MIB, 8 * MIB))\n"
        "os.setuid(12345)\n"
        "plain = attempt(pool_bytes=16 * MIB)['code']\n"
        "say(plain=plain, **attempt(pool_bytes=16 * MIB, memory_lock=MemoryLock.LOCK))"
    )
    assert found["plain"] == "ok"
    assert (found["code"], found["limit"]) == ("PoolTooLarge", "memlock")
    assert found["limit_bytes"] == 8 * 2**20
    assert found["left"] == []


def test_a_made_up_cgroup_refuses_and_nothing_is_made(tmp_path: Path) -> None:
    found = inside(
        f"root = Path({str(tmp_path)!r})\n"
        "(root / 'proc/self').mkdir(parents=True); (root / 'cg').mkdir()\n"
        "(root / 'proc/self/cgroup').write_text('0::/')\n"
        "(root / 'cg/memory.max').write_text(str(20 * MIB))\n"
        "(root / 'cg/memory.current').write_text(str(10 * MIB))\n"
        "sources = LimitSources(proc_dir=root / 'proc', cgroup_dir=root / 'cg')\n"
        "say(**attempt(pool_bytes=16 * MIB, sources=sources))"
    )
    assert (found["code"], found["limit"]) == ("PoolTooLarge", "cgroup")
    assert found["left"] == []


def test_a_locked_segment_is_seen_as_owned_across_pid_namespaces() -> None:
    """Pids mean nothing here; the lock does."""
    found = inside(
        "import subprocess\n"
        "pool = Pool.create_or_adopt(PoolSettings(instance='small', pool_bytes=8 * MIB))\n"
        "program = 'from hisparse_service.pool.purge import purge; "
        'print(purge("small")[0].verdict.value)\'\n'
        "enter = ['unshare', '--pid', '--fork', '--mount-proc', os.sys.executable, '-c']\n"
        "done = subprocess.run([*enter, program], capture_output=True, text=True)\n"
        "verdict = done.stdout.strip()\n"
        "kept = os.listdir('/dev/shm')\n"
        "pool.release()\n"
        "say(verdict=verdict, kept=kept)"
    )
    assert (found["verdict"], len(found["kept"]), found["left"]) == ("owned", 1, [])
