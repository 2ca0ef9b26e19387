"""Starts that are killed, interrupted or begun in a poor environment, and the start after them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.helpers import (
    DEADLINE_S,
    DaemonProcess,
    daemons_in_one_directory,
    short_directory,
    unique_instance,
    wait_until,
)
from tests.integration.test_pool_reserver import run

LARGE = "1GiB"
"""Its pages take long enough to be caught while they are reserved."""
CLOSE_STANDARD_FILES = (
    "-c",
    "import os, sys\n"
    "for number in range(3): os.close(number)\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'hisparse_service', *sys.argv[1:]])",
)
IGNORING_SIGCHLD = (
    sys.executable,
    "-c",
    "import os, signal, sys\n"
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "os.execv(sys.argv[1], sys.argv[1:])",
)


@pytest.fixture
def make() -> Iterator:
    with daemons_in_one_directory() as start:
        yield start


def reserving_child(daemon: DaemonProcess) -> psutil.Process:
    """Once the segment is being filled."""
    wait_until(lambda: daemon.segments, what="the pool is being made")
    (child,) = psutil.Process(daemon.process.pid).children()
    return child


def test_a_start_at_once_after_a_killed_one_is_ready_and_leaves_one_pool(make) -> None:
    first = make(pool_bytes=LARGE)
    reserving_child(first)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(DEADLINE_S)
    second = make(instance=first.instance, pool_bytes="64MiB").wait_ready()
    assert len(second.segments) == 1
    assert second.terminate() == 0
    assert second.segments == []


def test_a_killed_reserving_process_is_named_as_what_went_wrong(make) -> None:
    """Limits that have room are no explanation, and send an operator the wrong way."""
    daemon = make(pool_bytes=LARGE)
    reserving_child(daemon).kill()
    assert daemon.process.wait(DEADLINE_S) == 3, daemon.log
    assert "the process that reserves the pages was killed" in daemon.log
    assert "dmesg" in daemon.log
    assert daemon.segments == []


def test_closed_standard_files_are_not_taken_by_the_pool(make) -> None:
    """What a library prints would be written into whatever became descriptor 2."""
    daemon = make(program=CLOSE_STANDARD_FILES).wait_ready()
    descriptors = [os.readlink(f"/proc/{daemon.process.pid}/fd/{number}") for number in range(3)]
    assert descriptors == [os.devnull] * 3
    assert daemon.terminate() == 0
    assert daemon.segments == []


def test_ctrl_c_while_waiting_for_a_predecessor_is_no_traceback(make) -> None:
    running = make().wait_ready()
    waiting = make(instance=running.instance, arguments=("--standby", "60"))
    line = os.read(waiting._ready_fd, 100)
    assert line == b"STANDBY\n", waiting.log
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.process.wait(DEADLINE_S) == 130
    assert "Traceback" not in waiting.log


# --- the child -----------------------------------------------------------------------------------


def test_the_owner_lock_does_not_live_on_in_the_child() -> None:
    """A daemon that was killed would be taken for a living one as long as its child dies."""
    found = run("""
from hisparse_service.pool.segment_file import SegmentFile
os.kill(child, signal.SIGSTOP)
segment = SegmentFile("memfd", sparse())
again = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDWR)
owned = segment.try_lock_owner()
reserver._send_task(segment.fd, bytes(16))
os.close(segment.fd)  # as a process that ends: without unlocking
say(owned=owned, free=SegmentFile("memfd", again).try_lock_owner())
reserver.close()
""")
    assert found == {"owned": True, "free": True}


def test_a_second_segment_is_reserved_too() -> None:
    """The name of the first was taken meanwhile: the opener looks, and fills, again."""
    found = run("""
import mmap
from hisparse_service.pool import os_calls
done = []
for _ in range(2):
    fd = sparse()
    mapping = mmap.mmap(fd, SIZE)
    reserver.populate(fd=fd, address=os_calls.address_of(mapping), size_bytes=SIZE)
    done.append(reserved(fd))
reserver.close()
say(done=done, size=SIZE)
""")
    assert found["done"] == [found["size"]] * 2


def test_a_child_is_reaped_where_ignored_sigchld_was_inherited() -> None:
    """The kernel would reap it, and the pid that is killed afterwards be another process's."""
    found = run(
        """
fd = sparse()
reserver.populate(fd=fd, address=0, size_bytes=SIZE)
error = failure(reserver.close)
say(error=str(error), gone=is_gone(child))
""",
        around=IGNORING_SIGCHLD,
    )
    assert found == {"error": "None", "gone": True}


def test_a_start_without_a_thread_to_be_had_says_so_and_gives_all_back() -> None:
    with short_directory() as directory:
        found = run(
            """
import resource
from hisparse_service import start
from hisparse_service.config import load_settings
reserver.close()
settings = load_settings(flags={
    "runtime_dir": sys.argv[1], "instance": sys.argv[2], "pool.bytes": str(SIZE)
}).settings
begun = start.begin(settings)
child = begun.opener._reserver._pid
pages = int(Path("/proc/self/statm").read_text().split()[0])
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MIB, before[1]))
error = failure(begun.__enter__)
resource.setrlimit(resource.RLIMIT_AS, before)
say(code=error.code, hint="RLIMIT_NPROC" in str(error), gone=is_gone(child),
    is_held=begun.lock.is_held,
    blocked=len(set(start.STOP_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())))
""",
            str(directory / "run"),
            unique_instance("nothread"),
        )
    assert found == {
        "code": "ConfigError", "hint": True, "gone": True, "is_held": False, "blocked": 0,
    }  # fmt: skip
