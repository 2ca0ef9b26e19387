"""Stands between an embedded daemon and the process that wanted it. Run by path.

    python -I -S embedded_supervisor.py <parent pid> <runtime directory> <instance> -- <command...>

Imports the standard library only. The kernel's own parent-death signal is bound to the *thread*
that started a child, and a notebook's threads come and go. So this small process watches its parent
(a pidfd fires on SIGKILL too), ends the daemon, and then removes what a daemon that was itself
killed left behind: the segments of this instance, whose name nobody else has, and the runtime
directory. Should this process be killed, the daemon gets SIGTERM by its parent-death signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TERM_GRACE_S = 8.0
_POLL_MS = 200
_SHM = Path("/dev/shm")  # noqa: S108 - where posix_ipc's segments are


class _Stop(Exception):
    """SIGTERM: the client closes."""


def _stop(*_: object) -> None:
    raise _Stop


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(parent_pid: int, daemon: subprocess.Popen[bytes]) -> None:
    """Until the parent or the daemon ends."""
    poller = select.poll()
    try:
        for pid in (parent_pid, daemon.pid):
            poller.register(os.pidfd_open(pid), select.POLLIN)
        timeout_ms = None
    except OSError:
        timeout_ms = _POLL_MS  # an old kernel, or the parent ended already
    while os.getppid() == parent_pid and daemon.poll() is None:
        poller.poll(timeout_ms)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    daemon.terminate()
    try:
        daemon.wait(_TERM_GRACE_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def main(arguments: list[str]) -> int:
    """Run the daemon until it or the parent ends. Returns the daemon's exit status."""
    parent_pid, runtime_dir, instance = int(arguments[0]), Path(arguments[1]), arguments[2]
    command = arguments[4:]
    signal.signal(signal.SIGTERM, _stop)
    status = 1
    try:
        # Safe here: this process has one thread.
        daemon = subprocess.Popen(command, preexec_fn=_die_with_parent)
        try:
            _wait(parent_pid, daemon)
        except _Stop:
            pass
        finally:
            _end(daemon)
            status = daemon.returncode
    finally:
        for segment in _SHM.glob(f"hisparse-{instance}-*"):
            segment.unlink(missing_ok=True)
        shutil.rmtree(runtime_dir, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
