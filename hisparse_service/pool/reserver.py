"""A process that reserves a pool's pages, so that its maker can go on.

Populating holds the address space's lock (`mmap_lock`) for reading, a chunk at a time. In the
process that meanwhile imports modules, which maps memory hundreds of times, each mapping waits for
the chunks under way, and the next chunks wait for it: imports and populating stood still in turn
(2 GiB on 2 cores took 2.0 s instead of 0.65 s). A child has an address space of its own; the pages
belong to the segment, whoever touches them first.

The child is forked while its maker has one thread, before there are locks and sockets to inherit.
It waits for a segment, populates it with its own threads, says how far it is, and ends. It dies
with its maker. The maker's page tables stay empty, as they are when a pool is adopted.

It gets an open file of its own: the owner lock hangs on the maker's, and must not live on in a
child that takes its time to die (unmapping a large pool does).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import socket
import struct
import threading
import time
from typing import Final, NoReturn

from hisparse_service.pool import os_calls
from hisparse_service.pool.populate import (
    PROGRESS_INTERVAL_S,
    Cancelled,
    PopulateMethod,
    PopulateReport,
    Progress,
    ProgressCallback,
    populate,
)

_TASK: Final = struct.Struct("<QIi")
"""Bytes of the segment, threads, method."""
_WORD: Final = struct.Struct("<iIiQ")
"""errno (0: none), threads, method, bytes done; what went wrong follows as text. The last word of a
success has `_DONE`."""
_DONE: Final = -1
_MAX_WORD_BYTES: Final = 1024
_METHODS: Final = (None, *PopulateMethod)
_MAX_FDS: Final = 1


class Reserver:
    """The waiting child. Owns its socket and its pid; one thread at a time."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._pid = pid
        self._socket = sock
        self._is_used = False

    @classmethod
    def fork(cls) -> Reserver | None:
        """Make the child; None where no process can be had.

        Call it while this process has one thread.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            # Inherited: the kernel would reap children itself, and their pids be somebody else's.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        maker = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return None
        if pid == 0:
            _live(theirs, maker)
        theirs.close()
        return cls(pid, ours)

    def populate(
        self,
        *,
        fd: int,
        address: int,
        size_bytes: int,
        threads: int = 0,
        method: PopulateMethod | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> PopulateReport:
        """`populate.populate`, in the child the first time and in this process from then on.

        A second time comes where the name of the first segment was taken meanwhile.

        Raises:
            Cancelled: `cancel` was set.
            OSError: As there, EIO for what is no error of a call; ENOMEM where the child was
                killed, which is what the kernel does to a process for which there is no memory.
        """
        if self._is_used:
            return populate(
                fd=fd, address=address, size_bytes=size_bytes, threads=threads, method=method,
                progress=progress, cancel=cancel,
            )  # fmt: skip
        self._is_used = True
        started = time.monotonic()
        self._send_task(fd, _TASK.pack(size_bytes, threads, _METHODS.index(method)))
        while True:
            if cancel is not None and cancel.is_set():
                self.close()
                raise Cancelled("population was cancelled")
            try:
                word = self._socket.recv(_MAX_WORD_BYTES)
            except TimeoutError:
                continue
            except OSError:
                word = b""
            if len(word) < _WORD.size:
                raise OSError(errno.ENOMEM, "the process that reserves the pages was killed")
            error, num_threads, used, done_bytes = _WORD.unpack_from(word)
            if error > 0:
                raise OSError(error, word[_WORD.size :].decode(errors="replace"))
            elapsed_s = time.monotonic() - started
            if progress is not None:
                progress(
                    Progress(done_bytes=done_bytes, total_bytes=size_bytes, elapsed_s=elapsed_s)
                )
            if error == _DONE:
                break
        _check_reserved(fd, size_bytes)
        return PopulateReport(
            total_bytes=size_bytes, elapsed_s=elapsed_s, threads=num_threads,
            method=_METHODS[used] or PopulateMethod.POPULATE_WRITE,
        )  # fmt: skip

    def _send_task(self, fd: int, task: bytes) -> None:
        self._socket.settimeout(PROGRESS_INTERVAL_S)
        own_file = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a child that is gone is noticed at once
                socket.send_fds(self._socket, [task], [own_file])
        finally:
            os.close(own_file)

    def close(self) -> None:
        """End the child, whatever it is doing, and reap it. Idempotent."""
        pid, self._pid = self._pid, 0
        if pid:
            self._socket.close()
            os.kill(pid, signal.SIGKILL)  # not reaped yet: the pid is its own
            os.waitpid(pid, 0)


def _check_reserved(fd: int, size_bytes: int) -> None:
    """Done is what the file system counts, not what another process says."""
    reserved = os.fstat(fd).st_blocks * 512
    if reserved < size_bytes:
        raise OSError(errno.ENOSPC, f"{reserved} of {size_bytes} bytes were reserved")


# --- the child -----------------------------------------------------------------------------------


def _live(sock: socket.socket, maker: int) -> NoReturn:
    try:
        os_calls.end_with_parent_thread(signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all of a group
            signal.signal(number, signal.SIG_IGN)
        _close_all_but(sock.fileno())
        if os.getppid() == maker:
            _work(sock)
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Locks and pipes of the maker are not the child's to keep open."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _work(sock: socket.socket) -> None:
    task, fds, _flags, _address = socket.recv_fds(sock, _TASK.size, _MAX_FDS)
    if len(task) != _TASK.size or not fds:
        return  # the maker ended, or adopts a pool
    size_bytes, threads, method = _TASK.unpack(task)
    try:
        mapping = mmap.mmap(fds[0], size_bytes)
        report = populate(
            fd=fds[0], address=os_calls.address_of(mapping), size_bytes=size_bytes,
            threads=threads, method=_METHODS[method],
            progress=lambda progress: _say(sock, done_bytes=progress.done_bytes),
        )  # fmt: skip
    except OSError as error:
        _say(sock, error.errno or errno.EIO, text=str(error.strerror))
    except Exception as error:
        _say(sock, errno.EIO, text=str(error))
    else:
        _say(sock, _DONE, report.threads, _METHODS.index(report.method), size_bytes)


def _say(
    sock: socket.socket, error: int = 0, threads: int = 0, method: int = 0, done_bytes: int = 0,
    *, text: str = "",
) -> None:  # fmt: skip
    word = _WORD.pack(error, threads, method, done_bytes)
    sock.send((word + text.encode())[:_MAX_WORD_BYTES])
