"""The file that a recording of control messages is: written by the daemon, read by `trace replay`.

A MessagePack stream: one map (the header), then one array a message
``[start_us, duration_us, session_id, request, reply]``, both as they travel on the wire. Keys of
blocks are in it, tokens are not. Any thread; a file has one writer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Final, NamedTuple

import msgpack
import msgspec
from msgspec import Meta

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import UsageError
from hisparse_service.telemetry.taps import Answered

FORMAT: Final = "hisparse-trace"
VERSION: Final = 1
_MAX_RECORD_BYTES: Final = 4 * limits.MAX_FRAME_BYTES


class RecordedNamespace(msgspec.Struct, frozen=True):
    """A namespace that was open when the recording began."""

    namespace_id: int
    fingerprint: bytes
    name: str
    geometry: bytes
    num_blocks: int
    """Of its backing; 0 without one."""


class RecordedSession(msgspec.Struct, frozen=True):
    """A session that was there when the recording began."""

    session_id: int
    hello: bytes
    """Its Hello, as on the wire."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay has to know before the first message."""

    format: str = FORMAT
    version: Annotated[int, Meta(ge=1)] = VERSION
    instance: str
    daemon_version: str
    protocol: int
    started_at: str
    """ISO 8601, UTC."""
    namespaces: list[RecordedNamespace]
    sessions: list[RecordedSession]


class Recorded(NamedTuple):
    """One message of a recording."""

    start_us: int
    """Since the first message."""
    duration_us: int
    session_id: int
    request: m.Request
    reply: m.Reply


class TraceWriter:
    """Writes a new file (mode 0600); never over one that is there.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, path: Path, header: Header) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO = os.fdopen(fd, "wb")
        self._packer = msgpack.Packer()
        self._first_ns = 0
        self.written_bytes = 0
        self._write(msgspec.msgpack.encode(header))

    def add(self, answered: Answered) -> None:
        """Append one message.

        Raises:
            OSError: The file system refused it.
        """
        self._first_ns = self._first_ns or answered.started_ns
        self._write(
            self._packer.pack(
                [
                    max(0, answered.started_ns - self._first_ns) // 1000,
                    (answered.ended_ns - answered.started_ns) // 1000,
                    answered.session_id, m.encode(answered.request), m.encode(answered.reply),
                ]
            )
        )  # fmt: skip

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.written_bytes += len(data)

    def close(self) -> None:
        """Flush and close. Idempotent."""
        self._file.close()


class TraceReader:
    """Reads a recording; nothing in it is trusted.

    Raises:
        UsageError: It is no recording, or of another version.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._unpacker = msgpack.Unpacker(
            self._file, max_buffer_size=_MAX_RECORD_BYTES, max_bin_len=limits.MAX_FRAME_BYTES,
            max_str_len=limits.MAX_TEXT_BYTES * 4, max_array_len=limits.MAX_LIST_ITEMS,
            max_map_len=64, max_ext_len=0,
        )  # fmt: skip
        try:
            self.header = msgspec.convert(next(self._unpacker), Header, builtin_types=(bytes,))
        except (ValueError, TypeError, StopIteration, msgspec.ValidationError) as error:
            self._file.close()
            raise UsageError(
                f"{path} is no recording of control messages: {error}",
                remedy="Name a file that `hisparse-service trace record` wrote",
            ) from error
        if (self.header.format, self.header.version) != (FORMAT, VERSION):
            self._file.close()
            raise UsageError(
                f"{path} is {self.header.format!r} version {self.header.version}, this reads "
                f"{FORMAT!r} version {VERSION}",
                remedy="Use the hisparse-service that recorded it",
            )

    def __iter__(self) -> Iterator[Recorded]:
        """The messages, in the order in which they were answered. A cut tail is left out."""
        try:
            for record in self._unpacker:
                start_us, duration_us, session_id, request, reply = record
                yield Recorded(
                    int(start_us), int(duration_us), int(session_id),
                    m.decode_request(request), m.decode_reply(reply),
                )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise UsageError(f"{self._path} is damaged: {error}") from error

    def close(self) -> None:
        """Close. Idempotent."""
        self._file.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
