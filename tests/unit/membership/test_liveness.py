"""Ends of real processes through pidfds."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from hisparse_service.membership.liveness import PidWatcher, WatchResult, process_start_ticks

DEADLINE_MS = 10_000


@pytest.fixture
def children():
    started: list[subprocess.Popen] = []

    def start() -> subprocess.Popen:
        # Waits for the end of its input: it cannot outlive the test by much.
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.stdin.close()
        child.wait()


@pytest.fixture
def watcher():
    with PidWatcher() as made:
        yield made


def readable(watcher: PidWatcher, timeout_ms: int = DEADLINE_MS) -> bool:
    """What the server's poller does: wait for the one descriptor."""
    poller = select.poll()
    poller.register(watcher.fileno(), select.POLLIN)
    return bool(poller.poll(timeout_ms))


def test_i9_a_killed_process_makes_the_watchers_descriptor_readable(watcher, children):
    dies, lives = children(), children()
    assert watcher.watch(7, dies.pid) is WatchResult.WATCHED
    assert watcher.watch(8, lives.pid) is WatchResult.WATCHED
    assert not readable(watcher, 0)
    assert watcher.poll() == []
    dies.send_signal(signal.SIGKILL)
    assert readable(watcher)
    assert watcher.poll() == [7]
    assert len(watcher) == 1
    assert not readable(watcher, 0)


def test_i9_a_stopped_process_is_not_a_dead_one(watcher, children):
    child = children()
    watcher.watch(1, child.pid)
    child.send_signal(signal.SIGSTOP)
    assert os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT) is not None
    assert not readable(watcher, 0)
    child.send_signal(signal.SIGCONT)


def test_i9_a_zombie_counts_as_ended(watcher, children):
    child = children()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert watcher.watch(1, child.pid) is WatchResult.WATCHED
    assert readable(watcher)
    assert watcher.poll() == [1]


def test_a_pid_that_is_not_visible_cannot_be_watched(watcher, children):
    for pid in (0, -1):
        assert watcher.watch(1, pid) is WatchResult.NOT_WATCHABLE
    gone = children()
    gone.kill()
    gone.wait()
    assert watcher.watch(1, gone.pid) is WatchResult.GONE
    assert len(watcher) == 0


def test_a_reused_pid_is_told_by_its_start_time(watcher, children):
    child = children()
    start_ticks = process_start_ticks(child.pid)
    assert start_ticks is not None
    assert watcher.watch(1, child.pid, start_ticks=start_ticks + 1) is WatchResult.REUSED
    assert watcher.watch(1, child.pid, start_ticks=start_ticks) is WatchResult.WATCHED


def test_a_command_name_with_parentheses_does_not_confuse_the_start_time():
    code = (
        "import sys\n"
        "open('/proc/self/comm', 'w').write('a) R 1 (b')\n"
        "print(open('/proc/self/stat').read().rsplit(')', 1)[1].split()[19], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        expected = int(child.stdout.readline())  # and now it has its name
        assert process_start_ticks(child.pid) == expected
    assert process_start_ticks(2**22 + 1) is None


def test_unwatched_processes_are_not_reported_and_nothing_stays_open(children):
    before = len(os.listdir("/proc/self/fd"))
    watcher = PidWatcher()
    first, second = children(), children()
    watcher.watch(1, first.pid)
    watcher.watch(2, second.pid)
    watcher.unwatch(1)
    watcher.unwatch(1)
    first.kill()
    second.kill()
    assert readable(watcher)
    assert watcher.poll() == [2]
    watcher.close()
    watcher.close()
    pipes = 2
    assert len(os.listdir("/proc/self/fd")) == before + pipes
