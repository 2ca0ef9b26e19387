"""What comes before a daemon: the runtime directory, its lock, and a thread that opens the pool.

Nothing else is needed to reserve pages, and reserving them is what a start waits for. So this
imports as little as it can (no NumPy, no sockets, no logs), and the rest of the daemon is loaded
while the kernel is at work:

    with begin(settings) as begun:
        from hisparse_service.daemon import Daemon
        Daemon(settings, begun=begun).run()

Main thread.
"""

from __future__ import annotations

import gc
import signal
import time
from types import TracebackType
from typing import Final

from hisparse_service.config import Settings
from hisparse_service.membership.process_lock import ProcessLock, Role
from hisparse_service.pool.opener import PoolOpener
from hisparse_service.pool.reserver import Reserver
from hisparse_service.pool.settings import HugePages, MemoryLock, PoolSettings
from hisparse_service.server.runtime_directory import LOCK_NAME, prepare_runtime_directory

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def pool_settings(settings: Settings) -> PoolSettings:
    """What the pool is told.

    Raises:
        ConfigError: Names, sizes or policies that it cannot have.
    """
    pool = settings.pool
    nodes = ",".join(str(node) for node in pool.numa_nodes)
    policy = {"none": "default", "interleave": "interleave", "bind": f"bind:{nodes}"}[pool.numa]
    return PoolSettings(
        pool_bytes=pool.bytes,
        instance=settings.instance,
        pool_name=pool.name,
        populate_threads=pool.populate_threads,
        numa=policy,
        huge_pages=HugePages.ADVISE if pool.huge_pages == "advise" else HugePages.OFF,
        memory_lock=MemoryLock.LOCK if pool.lock_memory else MemoryLock.OFF,
    )


class Begun:
    """A start that has begun: the lock is held, the pool is being opened. Made by `begin`.

    Stop signals wait until `deliver_signals`: before the control loop has its handlers they would
    end the process at once and leave half a pool behind. Closing gives everything back.
    """

    def __init__(self, lock: ProcessLock, opener: PoolOpener, *, started_s: float) -> None:
        self.lock = lock
        self.opener = opener
        self.started_s = started_s
        """`time.monotonic` at the beginning."""
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def deliver_signals(self) -> None:
        """Let stop signals through, those that came meanwhile at once. Idempotent."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    def __enter__(self) -> Begun:
        try:
            self.opener.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        gc.enable()
        self.opener.close()
        self.lock.release()
        self.deliver_signals()


def begin(settings: Settings) -> Begun:
    """Take the runtime directory, for a start that goes on inside `with`.

    Raises:
        ConfigError: The pool's settings cannot work.
        RuntimeDirectoryError: The directory cannot be used, or a living daemon has it.
    """
    started_s = time.monotonic()
    # Until the daemon is loaded nothing becomes garbage; the collector would only look.
    gc.disable()
    told = pool_settings(settings)
    directory = settings.resolved_runtime_dir()
    prepare_runtime_directory(directory)
    lock = ProcessLock.acquire(directory / LOCK_NAME, role=Role.TOKEN)
    # Huge pages are counted in the page tables of the process that asked for them.
    reserver = Reserver.fork() if told.huge_pages is HugePages.OFF else None
    return Begun(lock, PoolOpener(told, reserver=reserver), started_s=started_s)
