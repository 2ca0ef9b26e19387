"""Events between processes without a device: what `worker_client.events` needs of a driver.

An event is two 64-bit numbers in a file that both processes read: how often it was recorded, and
how many of these records are done. The maker is the device: it says when work is done.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

from hisparse_service.contract.errors import DeviceError

DEADLINE_S = 30.0
_WORDS = struct.Struct("<QQ")


class FileEvent:
    """One event; `wait` waits on the CPU what a stream would wait on the device."""

    def __init__(self, path: Path, index: int) -> None:
        self._path = path
        self._offset = index * _WORDS.size
        self.waits = 0

    def _read(self) -> tuple[int, int]:
        # No descriptor is kept: events of a closed writer live as long as the process.
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            found = os.pread(descriptor, _WORDS.size, self._offset)
        finally:
            os.close(descriptor)
        recorded, done = _WORDS.unpack(found.ljust(_WORDS.size, b"\0"))
        return recorded, done

    def _write(self, recorded: int, done: int) -> None:
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, _WORDS.pack(recorded, done), self._offset)
        finally:
            os.close(descriptor)

    def record(self) -> None:
        recorded, done = self._read()
        self._write(recorded + 1, done)

    def complete(self) -> None:
        """The device has done what was recorded so far."""
        recorded, _ = self._read()
        self._write(recorded, recorded)

    def query(self) -> bool:
        recorded, done = self._read()
        return done >= recorded

    def wait(self) -> None:
        self.waits += 1
        wanted, end_s = self._read()[0], time.monotonic() + DEADLINE_S
        while self._read()[1] < wanted:
            assert time.monotonic() < end_s, "the event was never completed"
            threading.Event().wait(0.0005)


class FileEventDriver:
    """Makes events in a file of its own, opens those of any other."""

    device_uuid = "no-device"

    def __init__(self, directory: Path, *, name: str = "events") -> None:
        self._name = name
        self.directory = directory
        self.made: list[FileEvent] = []
        self.opened: list[FileEvent] = []
        self.refuses = False

    def create(self) -> tuple[FileEvent, bytes]:
        path = self.directory / self._name
        if not self.made:
            path.write_bytes(b"")
        event = FileEvent(path, len(self.made))
        handle = self._name.encode().ljust(60, b"\0") + len(self.made).to_bytes(4, "little")
        self.made.append(event)
        return event, handle

    def open(self, handle: bytes) -> FileEvent:
        name = handle[:60].rstrip(b"\0").decode(errors="replace")
        if self.refuses or not (self.directory / name).is_file():
            raise DeviceError("cudaIpcOpenEventHandle failed", call="cudaIpcOpenEventHandle")
        event = FileEvent(self.directory / name, int.from_bytes(handle[60:], "little"))
        self.opened.append(event)
        return event
