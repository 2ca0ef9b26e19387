"""The daemon's side of registering the pool with CUDA: a child process does it (`cuda_child`).

Registration makes the pages unmovable, so that workers' own registrations are faster. The driver
takes global locks meanwhile and may hang; none of that happens in this process. `start`, `poll` and
`close` return at once: control loop. One thread a registrar starts the child, reads its reports and
reaps it; it must live as long as the child, because the kernel kills the child when the *thread*
that made it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from hisparse_service.contract.errors import (
    ConfigError,
    DeviceError,
    HiSparseError,
    UsageError,
    from_wire,
)
from hisparse_service.contract.limits import MAX_REGISTRATION_BYTES
from hisparse_service.pool.cuda_child import Report
from hisparse_service.pool.pool import Pool

_MAX_LINE_BYTES: Final = 64 * 1024
DEFAULT_TIMEOUT_S: Final = 900.0
"""Without a report. One range of 256 GiB at 0.1 to 1 s a GiB."""


class RegistrarState(enum.Enum):
    """Where the child is. OFF → STARTING → REGISTERING → READY; any → FAILED, CLOSED."""

    OFF = "off"
    STARTING = "starting"
    REGISTERING = "registering"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


_TRANSITIONS: Final = {
    RegistrarState.OFF: {RegistrarState.STARTING},
    RegistrarState.STARTING: {RegistrarState.REGISTERING},
    RegistrarState.REGISTERING: {RegistrarState.REGISTERING, RegistrarState.READY},
    RegistrarState.READY: set(),
    RegistrarState.FAILED: set(),
    RegistrarState.CLOSED: set(),
}
"""FAILED and CLOSED can follow every state but themselves and each other."""

_EVENTS: Final = {
    "started": RegistrarState.REGISTERING,
    "progress": RegistrarState.REGISTERING,
    "ready": RegistrarState.READY,
    "failed": RegistrarState.FAILED,
}
_ENDED: Final = (RegistrarState.FAILED, RegistrarState.CLOSED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistrarStatus:
    """What `poll` tells."""

    state: RegistrarState
    registered_bytes: int = 0
    total_bytes: int = 0
    gpu_bytes: int = 0
    """GPU memory that the child's context takes."""
    error: HiSparseError | None = None
    """Set in FAILED: ConfigError without driver, device or bindings; DeviceError with the number
    of the failed CUDA call (details: cuda_error) otherwise."""

    @property
    def cuda_error(self) -> int:
        """Number of the failed CUDA call's error; 0 where the failure was not a CUDA call's."""
        return int(self.error.details.get("cuda_error", 0)) if self.error is not None else 0


def gpu_visible(dev_dir: Path = Path("/dev")) -> bool:
    """Whether an NVIDIA device file is there. Loads no driver."""
    return any(path.name[len("nvidia") :].isdecimal() for path in dev_dir.glob("nvidia*"))


def require_available(dev_dir: Path = Path("/dev")) -> None:
    """For a configuration that says explicitly that the pool shall be registered.

    Raises:
        ConfigError: cuda.bindings is not installed, or no GPU is visible.
    """
    if not _bindings_installed():
        raise ConfigError(
            "cuda.register is on, but cuda.bindings is not installed",
            remedy="Install hisparse-service[cuda], or set cuda.register to off",
        )
    if not gpu_visible(dev_dir):
        raise ConfigError(
            "cuda.register is on, but no NVIDIA GPU is visible",
            remedy="Give the container a GPU, or set cuda.register to off",
        )


def _bindings_installed() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:
        return False


class CudaRegistrar:
    """Starts, watches and ends the child that keeps the pool registered.

    Args:
        pool: What to register. It may be closed before the child ends.
        gpu: Index of the device that gets the context, as CUDA counts.
        timeout_s: A child that reports nothing for that long is killed.
        max_range_bytes: One registration.
        command: The child's command line; tests put a misbehaving one here.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        gpu: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_range_bytes: int = MAX_REGISTRATION_BYTES,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = list(command) if command is not None else [
            sys.executable, "-m", "hisparse_service.pool.cuda_child",
            "--segment", pool.segment_name, "--device", str(pool.device),
            "--inode", str(pool.inode), "--gpu", str(gpu), "--parent-pid", str(os.getpid()),
            "--max-range-bytes", str(max_range_bytes),
        ]  # fmt: skip
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._status = RegistrarStatus(state=RegistrarState.OFF, total_bytes=pool.size_bytes)
        self._last_report_s = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start the child. Returns at once.

        Raises:
            UsageError: Started before.
        """
        with self._lock:
            if self._status.state is not RegistrarState.OFF:
                raise UsageError(f"the registrar was started before: {self._status.state.value}")
            self._status = dataclasses.replace(self._status, state=RegistrarState.STARTING)
            self._last_report_s = self._clock()
            self._watcher = threading.Thread(target=self._watch, name="cuda-watch", daemon=True)
        self._watcher.start()

    def poll(self) -> RegistrarStatus:
        """What is known now. Never waits.

        A child that reports nothing for `timeout_s` is killed and its state is FAILED.
        """
        with self._lock:
            waiting = self._status.state in (RegistrarState.STARTING, RegistrarState.REGISTERING)
            silent_s = self._clock() - self._last_report_s
            if waiting and silent_s > self._timeout_s:
                self._fail(
                    DeviceError(
                        f"the CUDA child reported nothing for {silent_s:.0f} s (limit "
                        f"{self._timeout_s:.0f} s) and was killed",
                        remedy="Look for a hung driver (`dmesg`, `nvidia-smi`); workers register "
                        "their own mappings all the same",
                    )
                )
            return self._status

    def close(self) -> None:
        """Kill the child and stop watching. Idempotent.

        Does not wait for the child: its pinned pages may keep it in the kernel for tens of seconds.
        """
        with self._lock:
            if self._status.state is not RegistrarState.CLOSED:
                self._status = dataclasses.replace(self._status, state=RegistrarState.CLOSED)
            self._kill()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the child is reaped. For the end of the process and for tests."""
        if self._watcher is not None:
            self._watcher.join(timeout_s)
            return not self._watcher.is_alive()
        return True

    # --- the watching thread ----------------------------------------------------------------

    def _watch(self) -> None:
        try:
            child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True
            )
        except OSError as error:
            with self._lock:
                self._fail(ConfigError(f"the CUDA child cannot be started: {error}"))
            return
        assert child.stdout is not None
        assert child.stdin is not None
        with self._lock:
            self._child = child
            if self._status.state in _ENDED:
                self._kill()
        while line := child.stdout.readline(_MAX_LINE_BYTES):
            with self._lock:
                self._take(line)
        child.stdout.close()
        with contextlib.suppress(OSError):
            child.stdin.close()
        code = child.wait()
        with self._lock:
            self._child = None
            self._fail(
                DeviceError(
                    f"the CUDA child ended with code {code}: the pool is no longer registered",
                    remedy="See its last lines in the daemon's standard error; workers register "
                    "their own mappings all the same",
                )
            )

    def _take(self, line: bytes) -> None:
        """One line from the child. Under the lock."""
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.MsgspecError:
            self._fail(DeviceError(f"the CUDA child said {line[:100]!r}, which is not a report"))
            return
        if self._status.state in _ENDED:
            return
        following = _EVENTS.get(report.event)
        if following is RegistrarState.FAILED:
            details = {"cuda_error": report.cuda_error} if report.cuda_error else {}
            self._fail(from_wire(report.code, report.message, report.remedy, details))
        elif following is None or following not in _TRANSITIONS[self._status.state]:
            self._fail(
                DeviceError(
                    f"the CUDA child reported {report.event!r} while {self._status.state.value}"
                )
            )
        else:
            self._last_report_s = self._clock()
            self._status = dataclasses.replace(
                self._status, state=following, gpu_bytes=report.gpu_bytes,
                registered_bytes=report.registered_bytes,
            )  # fmt: skip

    def _fail(self, error: HiSparseError) -> None:
        """Under the lock. The first failure stays; after close there is none."""
        if self._status.state not in _ENDED:
            self._status = dataclasses.replace(
                self._status, state=RegistrarState.FAILED, registered_bytes=0, error=error
            )
        self._kill()

    def _kill(self) -> None:
        """Under the lock. Only sends a signal; the watching thread reaps."""
        if self._child is not None:
            self._child.kill()
