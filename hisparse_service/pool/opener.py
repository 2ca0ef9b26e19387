"""A pool being opened on a thread of its own, from the first moment that a process can.

    opener = PoolOpener(settings)
    opener.start()                          # pages are being reserved from here on
    …                                       # import, bind
    opened = opener.take(stopping, progress=show)

Imports neither NumPy nor anything that does: reserving pages takes all cores inside the kernel, and
what else a daemon needs is loaded meanwhile. Made, started, taken from and closed by one thread at
a time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final

from hisparse_service.contract.errors import ConfigError, UsageError
from hisparse_service.pool.opening import Opened, open_pool
from hisparse_service.pool.populate import (
    PROGRESS_INTERVAL_S,
    Cancelled,
    Progress,
    ProgressCallback,
    populate,
)
from hisparse_service.pool.reserver import Reserver
from hisparse_service.pool.settings import PoolSettings

_JOIN_S: Final = 30.0
"""Populating looks at its cancellation after each chunk; what takes longer is stuck in a call."""


class PoolOpener:
    """Owns what `open_pool` made until `take` hands it over."""

    def __init__(self, settings: PoolSettings, *, reserver: Reserver | None = None) -> None:
        """`reserver` reserves the pages and is closed here; None: threads of this process do."""
        self._settings = settings
        self._reserver = reserver
        self._cancel = threading.Event()
        self._done = threading.Event()
        self._progress: Progress | None = None
        self._opened: Opened | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Returns at once.

        Raises:
            ConfigError: No thread can be had. The opener was not started.
        """
        thread = threading.Thread(target=self._open, name="pool-reserver", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ConfigError(
                "no thread can be started to open the pool",
                remedy="Raise RLIMIT_NPROC, RLIMIT_AS or the pids limit of the cgroup",
            ) from error
        self._thread = thread

    def take(
        self, stopping: threading.Event, *, progress: ProgressCallback | None = None
    ) -> Opened:
        """Wait for the pool and take it over: from now on the caller closes it.

        Args:
            stopping: Set it to give up.
            progress: Called while pages are reserved, about every PROGRESS_INTERVAL_S and once at
                the end, from the calling thread.

        Raises:
            Cancelled: `stopping` was set, or `close` was called.
            HiSparseError: What `open_pool` raised.
            UsageError: It was taken already, or never started.
        """
        if self._thread is None:
            raise UsageError("the opener was not started")
        told: Progress | None = None
        while not self._done.wait(PROGRESS_INTERVAL_S):
            if stopping.is_set():
                self.close()
                raise Cancelled("opening the pool was cancelled")
            if progress is not None and self._progress is not None and self._progress is not told:
                told = self._progress
                progress(told)
        if self._error is not None:
            raise self._error
        opened, self._opened = self._opened, None
        if opened is None:
            raise UsageError("the opened pool was taken already")
        if progress is not None and self._progress is not None and self._progress is not told:
            progress(self._progress)
        return opened

    def close(self) -> None:
        """Give up, and give back what was opened and not taken. Idempotent.

        A pool that was made goes; one that was adopted stays for the next daemon.
        """
        self._cancel.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        elif self._reserver is not None:
            self._reserver.close()
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            if not opened.adopted and not opened.segment.users_attached():
                with contextlib.suppress(OSError):
                    opened.segment.unlink()
        finally:
            opened.segment.close()

    def _open(self) -> None:
        try:
            self._opened = open_pool(
                self._settings, progress=self._on_progress, cancel=self._cancel,
                populate=self._reserver.populate if self._reserver is not None else populate,
            )  # fmt: skip
        except Exception as error:
            self._error = error  # raised again where the pool is waited for
        finally:
            self._done.set()
            if self._reserver is not None:
                self._reserver.close()

    def _on_progress(self, progress: Progress) -> None:
        self._progress = progress
