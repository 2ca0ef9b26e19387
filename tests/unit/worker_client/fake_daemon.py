"""A ROUTER that answers as a test says, and segments made by hand, for the client's tests."""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import zmq

from hisparse_service.contract.errors import HiSparseError, UnknownSession
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup, encode_geometry
from hisparse_service.contract.messages import (
    AllocateBacking,
    BackingReply,
    Bye,
    Done,
    Hello,
    HelloReply,
    NamespaceReply,
    OpenNamespace,
    Ping,
    Pong,
    RegistrationTurn,
    ReleaseLeases,
    Reply,
    Request,
    TurnReply,
    decode_request,
    encode,
    error_reply,
)
from hisparse_service.contract.segment import (
    ARENA_OFFSET,
    RECORD_DTYPE,
    BackingRecord,
    Header,
    backing_offset,
    pack_backing,
    pack_header,
    table_bytes,
)

DEADLINE_S = 20.0
PAGE = 4096


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """Poll a condition until it is true; fail at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not reached: {what or condition}")
        threading.Event().wait(0.005)


class FakeDaemon:
    """One thread with a ROUTER. `on[RequestType] = function(request) -> Reply | None | error`."""

    def __init__(self, directory: Path, *, epoch: int = 11) -> None:
        self.directory = directory
        self.epoch = epoch
        self.on: dict[type[Request], Callable[[Any], Reply | HiSparseError | None]] = {}
        self.received: list[Request] = []
        self.known: set[bytes] = set()
        self.forget_sessions = threading.Event()
        self.outbox: collections.deque[Reply] = collections.deque()
        self.start()

    def start(self) -> None:
        """After `stop`: the same daemon, which knows nobody."""
        self.known.clear()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.directory}/control.sock"

    def count(self, request_type: type[Request]) -> int:
        return sum(type(request) is request_type for request in self.received)

    def last(self, request_type: type[Request]) -> Any:
        return [request for request in self.received if type(request) is request_type][-1]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        self._socket.close(linger=0)
        self._context.term()

    def send_to_all(self, reply: Reply) -> None:
        """A reply that nobody waits for any more; sent by the daemon's own thread."""
        self.outbox.append(reply)

    def _run(self) -> None:
        while not self._stop.is_set():
            while self.outbox:
                frame = encode(self.outbox.popleft())
                for peer in self.known:
                    self._socket.send_multipart([peer, frame])
            if not self._socket.poll(5):
                continue
            if self.forget_sessions.is_set():
                self.known.clear()
                self.forget_sessions.clear()
            peer, frame = self._socket.recv_multipart()
            request = decode_request(frame)
            self.received.append(request)
            if isinstance(request, Hello):
                self.known.add(peer)
            if peer not in self.known:
                reply: Reply | HiSparseError | None = UnknownSession("who are you")
            else:
                handler = self.on.get(type(request), self._default)
                reply = handler(request)
            if isinstance(reply, HiSparseError):
                reply = error_reply(request.request_id, self.epoch, reply)
            if reply is not None:
                self._socket.send_multipart([peer, encode(reply)])

    def _default(self, request: Request) -> Reply | HiSparseError:
        rid, epoch = request.request_id, self.epoch
        if isinstance(request, Hello):
            events = f"ipc://{self.directory}/events.sock"
            return HelloReply(rid, epoch, 1, len(self.known), 0.2, 15.0, "fake", "0", events)
        if isinstance(request, Ping):
            return Pong(rid, epoch, time.monotonic_ns() + 30 * 10**9, [])
        if isinstance(request, OpenNamespace):
            return NamespaceReply(rid, epoch, 1, 0)
        if isinstance(request, RegistrationTurn):
            return TurnReply(rid, epoch, not request.release, 0)
        if isinstance(request, Bye | ReleaseLeases):
            return Done(rid, epoch)
        return HiSparseError(f"the fake has no answer to {request}")


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """The tmp_path of pytest can be too long for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="hspt-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def small_geometry() -> HostGeometry:
    return HostGeometry.make(
        layout=HostLayout.GROUP_INTERLEAVED,
        block_size=4,
        groups=[LayerGroup(1, 656), LayerGroup(4, 656), LayerGroup(1, 32)],
    )


class HandMadeSegment:
    """A segment with one backing, as a daemon would make it."""

    def __init__(self, geometry: HostGeometry, fingerprint: bytes, *, num_blocks: int = 8) -> None:
        self.name = f"/hisparse-wctest-{os.getpid()}-{secrets.token_hex(4)}"
        self.geometry, self.num_blocks = geometry, num_blocks
        self.table_offset = -(-ARENA_OFFSET // PAGE) * PAGE
        self.payload_offset = self.table_offset + -(-table_bytes(num_blocks) // PAGE) * PAGE
        payload = geometry.pool_bytes(num_blocks)
        self.size = self.payload_offset + payload + PAGE
        segment = posix_ipc.SharedMemory(self.name, posix_ipc.O_CREX, mode=0o600, size=self.size)
        self.fd = segment.fd
        self.uuid = secrets.token_bytes(16)
        header = Header(
            pool_uuid=self.uuid, instance="wctest", pool_name="p", segment_bytes=self.size,
            page_bytes=PAGE, created_unix_ns=1, creator_pid=os.getpid(),
        )  # fmt: skip
        self.write(0, pack_header(header))
        record = BackingRecord(
            namespace=1, fingerprint=fingerprint, name="n", geometry=encode_geometry(geometry),
            generation=1, num_blocks=num_blocks, table_offset_bytes=self.table_offset,
            payload_offset_bytes=self.payload_offset, payload_bytes=payload,
        )  # fmt: skip
        self.write(backing_offset(0), pack_backing(record))

    def write(self, offset: int, data: bytes) -> None:
        os.pwrite(self.fd, data, offset)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.fd, size, offset)

    def set_record(self, block: int, **fields: int) -> None:
        record = np.frombuffer(
            bytearray(self.read(self.table_offset + block * 64, 64)), RECORD_DTYPE
        )
        for name, value in fields.items():
            record[name] = value
        self.write(self.table_offset + block * 64, record.tobytes())

    def reply(self, request_id: int = 1, epoch: int = 11, **changes: Any) -> BackingReply:
        found = os.fstat(self.fd)
        values: dict[str, Any] = {
            "segment_name": self.name, "device": found.st_dev, "inode": found.st_ino,
            "segment_bytes": self.size, "pool_uuid": self.uuid, "num_blocks": self.num_blocks,
            "table_offset_bytes": self.table_offset, "payload_offset_bytes": self.payload_offset,
            "payload_bytes": self.geometry.pool_bytes(self.num_blocks),
            "ranges": [
                (0, 4 * PAGE), (4 * PAGE, 9 * PAGE),
                (9 * PAGE, self.geometry.pool_bytes(self.num_blocks)),
            ],
            "generation": 1, "adopted": False,
        }  # fmt: skip
        return BackingReply(request_id, epoch, **(values | changes))

    def serve(self, daemon: FakeDaemon) -> None:
        daemon.on[AllocateBacking] = lambda r: self.reply(r.request_id, daemon.epoch)

    def remove(self) -> None:
        posix_ipc.unlink_shared_memory(self.name)
        os.close(self.fd)
