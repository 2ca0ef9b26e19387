"""The daemon's side of registering the pool with CUDA: a child process does it (`cuda_child`).

Registration makes the pages unmovable, so that workers' own registrations are faster. The driver
takes global locks meanwhile and may hang; none of that happens in this process. `start`, `poll` and
`close` return at once: control loop.
"""

from __future__ import annotations

import dataclasses
import enum

from hisparse_service.pool.pool import Pool


class RegistrarState(enum.Enum):
    """Where the child is. OFF → STARTING → REGISTERING → READY; any → FAILED, CLOSED."""

    OFF = "off"
    STARTING = "starting"
    REGISTERING = "registering"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegistrarStatus:
    """What `poll` tells."""

    state: RegistrarState
    registered_bytes: int = 0
    total_bytes: int = 0
    gpu_bytes: int = 0
    """GPU memory that the child's context takes."""
    cuda_error: int = 0
    """Number of the failed CUDA call's error; 0 where the failure was not a CUDA call's."""
    message: str = ""


class CudaRegistrar:
    """Starts, watches and ends the child that keeps the pool registered."""

    def __init__(self, pool: Pool, *, device: int = 0, timeout_s: float = 900.0) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the child. Returns at once.

        Raises:
            ConfigError: cuda.bindings is not installed.
            UsageError: Started before.
        """
        raise NotImplementedError

    def poll(self) -> RegistrarStatus:
        """What is known now. Never waits. A child that makes no progress for `timeout_s` is killed
        and reported as FAILED.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Tell the child to end and stop watching. Idempotent; does not wait for the child (its
        pages may keep it in the kernel for tens of seconds).
        """
        raise NotImplementedError
