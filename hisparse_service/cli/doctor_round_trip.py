"""A daemon of its own and two workers: one writes a block, the other finds it and reads its bytes.

Used by `doctor` (does it work here?) and by `bench` (how fast?). No torch: the bytes are written
through the mapping that a worker's library would make.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import zmq

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import InternalError, ServiceUnavailable
from hisparse_service.contract.geometry import (
    HostGeometry,
    HostLayout,
    LayerGroup,
    encode_geometry,
)
from hisparse_service.contract.keys import key_space
from hisparse_service.pool.segment_file import open_existing
from hisparse_service.server.runtime_directory import CONTROL_SOCKET_NAME

FINGERPRINT: Final = b"hisparse-doctor!"
KEY_SPACE: Final = key_space(FINGERPRINT)
GEOMETRY: Final = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=64, groups=[LayerGroup(1, 656)]
)
ReplyT = TypeVar("ReplyT", bound=m.Reply)


@contextlib.contextmanager
def own_daemon(directory: Path, *, pool_bytes: int, timeout_s: float) -> Iterator[Path]:
    """A daemon with a small pool, ended at the end; yields its runtime directory.

    Raises:
        ServiceUnavailable: It did not become ready; the message carries the end of its log.
    """
    runtime_dir, log_path = directory / "run", directory / "log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HISPARSE_")}
    read_fd, write_fd = os.pipe()
    with log_path.open("wb") as log:
        daemon = subprocess.Popen(
            [
                sys.executable, "-m", "hisparse_service", "serve", "--runtime-dir",
                str(runtime_dir), "--instance", f"doctor-{os.getpid()}", "--pool-bytes",
                str(pool_bytes), "--set", "http.listen=", "--ready-fd", str(write_fd),
            ],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=(write_fd,),
        )  # fmt: skip
    os.close(write_fd)
    try:
        readable, _, _ = select.select([read_fd], [], [], timeout_s)
        if not readable or not os.read(read_fd, 4096).startswith(b"READY"):
            lines = log_path.read_text(errors="replace").strip().splitlines() or ["no log"]
            raise ServiceUnavailable(
                f"a daemon of its own did not become ready: {lines[-1]}",
                remedy="The line says why",
            )
        yield runtime_dir
    finally:
        os.close(read_fd)
        daemon.terminate()
        try:
            daemon.wait(timeout_s)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


class Worker:
    """One session; a context manager.

    Args:
        runtime_dir: Of the daemon.
        timeout_s: For each answer.
    """

    def __init__(self, runtime_dir: Path, *, timeout_s: float) -> None:
        self._timeout_ms = int(timeout_s * 1000)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{runtime_dir / CONTROL_SOCKET_NAME}")
        self._last_id = 0
        self.ask(
            m.HelloReply,
            m.Hello(self.next_id(), limits.PROTOCOL_MIN, limits.PROTOCOL_MAX, "doctor", "", 0, 1,
                    ""),
        )  # fmt: skip

    def next_id(self) -> int:
        """Id for the next request."""
        self._last_id += 1
        return self._last_id

    def ask(self, reply_type: type[ReplyT], request: m.Request) -> ReplyT:
        """Send, wait, check.

        Raises:
            ServiceUnavailable: No answer in time.
            HiSparseError: The daemon's error.
        """
        self._socket.send(m.encode(request))
        if not self._socket.poll(self._timeout_ms):
            raise ServiceUnavailable(f"no answer to {type(request).__name__}")
        reply = m.decode_reply(self._socket.recv())
        m.raise_for_error(reply)
        if not isinstance(reply, reply_type):
            raise InternalError(f"{type(request).__name__} was answered by {type(reply).__name__}")
        return reply

    def attach(self, num_blocks: int) -> tuple[int, m.BackingReply]:
        """Open the namespace; (its id, its backing)."""
        opened = self.ask(
            m.NamespaceReply,
            m.OpenNamespace(self.next_id(), FINGERPRINT, "doctor", encode_geometry(GEOMETRY)),
        )
        return opened.namespace_id, self.ask(
            m.BackingReply, m.AllocateBacking(self.next_id(), opened.namespace_id, num_blocks)
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()


def round_trip(directory: Path, *, timeout_s: float) -> float:
    """All of it; seconds from the daemon's start to the bytes read.

    Raises:
        HiSparseError: A step failed.
        OSError: Shared memory cannot be mapped.
    """
    began_s = time.monotonic()
    payload, key = os.urandom(GEOMETRY.block_stride_bytes), os.urandom(limits.BLOCK_KEY_BYTES)
    with (
        own_daemon(directory, pool_bytes=8 * limits.MIB, timeout_s=timeout_s) as runtime_dir,
        Worker(runtime_dir, timeout_s=timeout_s) as writer,
        Worker(runtime_dir, timeout_s=timeout_s) as reader,
    ):
        namespace, backing = writer.attach(8)
        got = writer.ask(m.BlocksReply, m.Reserve(writer.next_id(), namespace, 0, 1))
        block = int(m.u32_array(got.blocks, what="blocks")[0])
        _access(backing, block, payload)
        item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, key)
        writer.ask(m.MirrorReply, m.MirrorBatch(writer.next_id(), namespace, KEY_SPACE, [], [item]))
        namespace, backing = reader.attach(8)
        found = reader.ask(m.BlocksReply, m.Lookup(reader.next_id(), namespace, 0, KEY_SPACE, key))
        if found.blocks != got.blocks:
            raise InternalError("a published block was not found")
        if _access(backing, block, None) != payload:
            raise InternalError("a block has other bytes than were written")
        return time.monotonic() - began_s


def _access(backing: m.BackingReply, block: int, data: bytes | None) -> bytes:
    """Write a block, or read it, through a mapping of its own."""
    segment = open_existing(backing.segment_name)
    try:
        mapping = segment.map()
        stride = GEOMETRY.block_stride_bytes
        start = backing.payload_offset_bytes + block * stride
        if data is not None:
            mapping[start : start + stride] = data
        return bytes(mapping[start : start + stride])
    finally:
        segment.close()
