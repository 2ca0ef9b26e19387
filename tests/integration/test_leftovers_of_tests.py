"""A test run that was killed leaves pools; the next run removes those, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.helpers import SHM, DaemonProcess, remove_leftovers, short_directory


def ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_pools_of_ended_runs_go_and_those_of_living_runs_and_daemons_stay() -> None:
    with short_directory() as one, short_directory() as other:
        over = DaemonProcess(one, instance=f"t-{ended_pid()}-1").start()
        ours = DaemonProcess(other).start()
        try:
            (over_name,) = over.wait_ready().segments
            (our_name,) = ours.wait_ready().segments
            assert over_name not in remove_leftovers(), "its daemon lives"
            for daemon in (over, ours):
                os.kill(daemon.process.pid, signal.SIGKILL)
                daemon.process.wait()
            removed = remove_leftovers()
            assert over_name in removed
            assert our_name not in removed
            assert (SHM / our_name).exists()
        finally:
            over.close()
            ours.close()
