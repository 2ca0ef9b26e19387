"""The child that reserves a pool's pages: all of them or an error, and it dies with its maker.

Each part runs in a process of its own: the child is forked from one that has a single thread.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.helpers import has_ended, unique_instance, wait_until
from tests.integration.test_pool_small_tmpfs import ENTER, MOUNT, REASON

PRELUDE = """
import json, os, signal, sys, threading
from hisparse_service.contract.errors import HiSparseError
from hisparse_service.contract.limits import MIB
from hisparse_service.pool import opener, survey
from hisparse_service.pool.populate import PopulateMethod, populate
from hisparse_service.pool.reserver import Reserver
from hisparse_service.pool.settings import LimitSources, PoolSettings
from pathlib import Path
SIZE = 32 * MIB
def sparse(size=SIZE):
    fd = os.memfd_create("reserver")
    os.ftruncate(fd, size)
    return fd
def reserved(fd):
    return os.fstat(fd).st_blocks * 512
def failure(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except (OSError, HiSparseError) as error:
        return error
def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
def say(**facts):
    print(json.dumps(facts))
reserver = Reserver.fork()
child = reserver._pid
"""


def run(program: str, *arguments: str, around: tuple[str, ...] = ()) -> dict:
    done = subprocess.run(
        [*around, sys.executable, "-c", PRELUDE + program, *arguments],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", ["None", "PopulateMethod.FALLOCATE"])
def test_all_pages_are_reserved_and_the_maker_maps_none_of_them(method: str) -> None:
    found = run(f"""
fd, seen = sparse(), []
report = reserver.populate(fd=fd, address=0, size_bytes=SIZE, threads=2, method={method},
                           progress=lambda each: seen.append(each.fraction))
reserver.close()
say(reserved=reserved(fd), size=SIZE, threads=report.threads, last=seen[-1],
    method=report.method.value, gone=is_gone(child), zeros=not any(os.pread(fd, SIZE, 0)))
""")
    assert found["reserved"] == found["size"]
    assert found["method"] == ("fallocate" if "FALLOCATE" in method else "populate_write")
    assert (found["threads"], found["last"], found["gone"], found["zeros"]) == (2, 1.0, True, True)


def test_cancelling_ends_the_child() -> None:
    found = run("""
cancel = threading.Event()
cancel.set()
error = failure(reserver.populate, fd=sparse(), address=0, size_bytes=SIZE, cancel=cancel)
say(error=type(error).__name__, gone=is_gone(child))
""")
    assert found == {"error": "Cancelled", "gone": True}


def test_a_killed_child_is_a_shortage_of_memory_and_leaves_no_segment() -> None:
    """It is what the kernel's out-of-memory killer does; the daemon must not wait for ever."""
    found = run(
        """
os.kill(child, signal.SIGKILL)
settings = PoolSettings(instance=sys.argv[1], pool_bytes=SIZE)
opening = opener.PoolOpener(settings, reserver=reserver)
opening.start()
error = failure(opening.take, threading.Event())
say(code=error.code, left=survey.list_names(sys.argv[1]))
""",
        unique_instance("rsv"),
    )
    assert found == {"code": "PoolTooLarge", "left": []}


def test_pages_that_were_not_reserved_are_noticed() -> None:
    found = run("""
import hisparse_service.pool.reserver as module
fd = sparse()
error = failure(module._check_reserved, fd, SIZE)
os.posix_fallocate(fd, 0, SIZE)
say(before=str(error), after=str(failure(module._check_reserved, fd, SIZE)))
reserver.close()
""")
    assert "0 of 33554432 bytes" in found["before"]
    assert found["after"] == "None"


@pytest.mark.skipif(bool(REASON), reason=f"needs unshare and mount: {REASON}")
def test_a_full_file_system_is_refused_by_the_child_too() -> None:
    """The limits said that it fits: only the reservation itself finds out."""
    found = run(
        """
import hisparse_service.pool.memory_limits as limits
limits.read_tmpfs = lambda shm_dir: None
os.posix_fallocate(os.open("/dev/shm/other", os.O_RDWR | os.O_CREAT), 0, 48 * MIB)
opening = opener.PoolOpener(PoolSettings(instance="small", pool_bytes=SIZE), reserver=reserver)
opening.start()
error = failure(opening.take, threading.Event())
say(code=error.code, left=os.listdir("/dev/shm"))
""",
        around=(*ENTER, "sh", "-c", MOUNT, "sh"),
    )
    assert found == {"code": "PoolTooLarge", "left": ["other"]}


def test_the_child_dies_with_its_maker() -> None:
    """Otherwise a killed daemon's memory, and its owner lock, would live on."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + "print(child, flush=True); signal.pause()"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        child = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
    wait_until(lambda: has_ended(child))


def test_the_child_keeps_no_descriptor_of_its_maker() -> None:
    """Whoever reads a pipe of the maker to its end would wait for the child as well."""
    found = run("""
reserver.close()
read_fd, write_fd = os.pipe()
reserver = Reserver.fork()
os.close(write_fd)
end = os.read(read_fd, 1)
say(end=end.decode(), waits=not is_gone(reserver._pid))
reserver.close()
""")
    assert found == {"end": "", "waits": True}
