"""Token, monitor and cleaner over a real flock, with the other side in a process of its own."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hisparse_service.contract.errors import ClosedError, RuntimeDirectoryError
from hisparse_service.membership.process_lock import Liveness, ProcessLock, Role, observe

_HOLD = """
import sys
from pathlib import Path
from hisparse_service.membership.process_lock import ProcessLock, Role
lock = ProcessLock.acquire(Path(sys.argv[1]), role=Role.TOKEN)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(path: Path):
    """Another process that holds the token until it is killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert select.select([child.stdout], [], [], 30.0)[0]
        assert child.stdout.readline() == b"held\n"
        yield child
    finally:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        child.wait()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "daemon.lock"


def test_a_second_daemon_is_refused_and_told_who_holds_the_lock(path):
    with holder(path) as child:
        for role in Role:
            with pytest.raises(RuntimeDirectoryError) as error:
                ProcessLock.acquire(path, role=role)
            assert "hisparse-service handover" in error.value.remedy
            assert error.value.details == {"holder_pid": child.pid}
        seen = observe(path)
        assert (seen.liveness, seen.pid) == (Liveness.ALIVE, child.pid)
        assert seen.start_ticks > 0


def test_the_lock_dies_with_a_killed_process_and_its_successor_takes_it(path):
    with holder(path) as child:
        child.kill()
        child.wait()
        seen = observe(path)
        assert (seen.liveness, seen.pid) == (Liveness.DEAD, child.pid)
        with ProcessLock.acquire(path, role=Role.TOKEN) as lock:
            assert lock.is_held
            assert observe(path).liveness is Liveness.ALIVE
            assert observe(path).pid == os.getpid()
    assert not lock.is_held
    assert observe(path).liveness is Liveness.DEAD


def test_a_monitor_changes_nothing(path):
    assert observe(path).liveness is Liveness.ABSENT
    assert not path.exists()
    path.write_text("rubbish that is no pid")
    seen = observe(path)
    assert (seen.liveness, seen.pid) == (Liveness.DEAD, 0)
    assert path.read_text() == "rubbish that is no pid"


def test_only_one_cleaner_removes_and_while_no_token_lives(path):
    with holder(path):
        pass
    cleaner = ProcessLock.acquire(path, role=Role.CLEANER)
    for role in Role:
        with pytest.raises(RuntimeDirectoryError):
            ProcessLock.acquire(path, role=role)
    cleaner.remove()
    assert observe(path).liveness is Liveness.ABSENT
    cleaner.release()
    with pytest.raises(ClosedError):
        cleaner.remove()


def test_a_cleaner_does_not_remove_the_file_of_the_next_generation(path):
    cleaner = ProcessLock.acquire(path, role=Role.CLEANER)
    path.unlink()
    with ProcessLock.acquire(path, role=Role.TOKEN):
        cleaner.remove()
        assert observe(path).liveness is Liveness.ALIVE


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_taken_for_the_lock(path, monkeypatch):
    """The cleaner unlinks between a starting daemon's open and its flock."""
    from hisparse_service.membership import process_lock

    real_lock, opened = process_lock._lock, []

    def remove_before_the_first_lock(fd: int, wait_s: float) -> bool:
        if not opened:
            opened.append(fd)
            path.unlink()
        return real_lock(fd, wait_s)

    monkeypatch.setattr(process_lock, "_lock", remove_before_the_first_lock)
    with ProcessLock.acquire(path, role=Role.TOKEN):
        assert opened
        assert path.exists()
        assert observe(path).liveness is Liveness.ALIVE


def test_a_look_by_a_monitor_does_not_keep_a_daemon_from_starting(path):
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            observe(path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(50):
            ProcessLock.acquire(path, role=Role.TOKEN).release()
    finally:
        stop.set()
        looker.join()


def test_what_is_not_our_plain_file_is_refused(path, tmp_path):
    target = tmp_path / "target"
    target.write_text("")
    path.symlink_to(target)
    with pytest.raises(RuntimeDirectoryError):
        ProcessLock.acquire(path, role=Role.TOKEN)
    with pytest.raises(RuntimeDirectoryError):
        ProcessLock.acquire(tmp_path / "missing" / "daemon.lock", role=Role.TOKEN)
    path.unlink()
    path.mkdir()
    with pytest.raises(RuntimeDirectoryError):
        ProcessLock.acquire(path, role=Role.TOKEN)
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(RuntimeDirectoryError):
        ProcessLock.acquire(path, role=Role.TOKEN)


def test_another_users_file_is_refused(path, monkeypatch):
    ProcessLock.acquire(path, role=Role.TOKEN).release()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RuntimeDirectoryError):
        observe(path)


def test_every_descriptor_is_closed_whatever_happens(path):
    before = len(os.listdir("/proc/self/fd"))
    with ProcessLock.acquire(path, role=Role.TOKEN):
        for _ in range(3):
            with pytest.raises(RuntimeDirectoryError):
                ProcessLock.acquire(path, role=Role.CLEANER)
            observe(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert path.stat().st_mode & 0o777 == 0o600
