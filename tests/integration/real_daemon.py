"""A real daemon process for the client's tests, with an instance and a directory of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
"""A daemon's start takes half a second, and more than 10 on a machine that is busy otherwise."""
SHM = Path("/dev/shm")


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """Poll a condition until it is true; fail at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not reached: {what or condition}")
        threading.Event().wait(0.01)


class RealDaemon:
    """`python -m hisparse_service serve`; may be killed and started again on the same pool."""

    def __init__(self, *, pool_bytes: str = "32MiB", **settings: str) -> None:
        self.instance = f"wct-{os.getpid()}-{secrets.token_hex(4)}"
        self.directory = Path(tempfile.mkdtemp(prefix="wct-", dir="/tmp"))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
        self.environment = kept | {
            "HISPARSE_INSTANCE": self.instance,
            "HISPARSE_RUNTIME_DIR": str(self.directory),
            "HISPARSE_POOL__BYTES": pool_bytes,
            "HISPARSE_HTTP__LISTEN": "",
            **settings,
        }
        self.start()

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hisparse_service", "serve"],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def wait_listening(self) -> None:
        """Clients give up connecting before a busy machine has started a daemon."""
        wait_until(
            lambda: (self.directory / "control.sock").exists() or self.process.poll() is not None,
            "the daemon listens",
        )

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def segments(self) -> list[str]:
        return sorted(path.name for path in SHM.glob(f"hisparse-{self.instance}-*"))

    def end(self) -> list[str]:
        """SIGTERM; returns the segments that are left, and removes them."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        left = self.segments()
        for name in left:
            (SHM / name).unlink(missing_ok=True)
        shutil.rmtree(self.directory)
        return left


@contextlib.contextmanager
def running_daemon(**settings: str) -> Iterator[RealDaemon]:
    daemon = RealDaemon(**settings)
    try:
        daemon.wait_listening()
        yield daemon
    finally:
        daemon.end()
