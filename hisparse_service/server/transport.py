"""The daemon's two sockets: a ROUTER for requests, an XPUB for events, and the ROUTER's monitor.

Only here are socket options set and credentials read. Bind after the instance's lock is held: a
second bind on a live ipc path succeeds and leaves the first daemon deaf without an error.

Owned by the control loop and used on its thread only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
import zmq

from hisparse_service.contract import limits
from hisparse_service.contract.errors import RuntimeDirectoryError
from hisparse_service.server.runtime_directory import control_endpoint, events_endpoint

_MONITOR_EVENT: Final = struct.Struct("=Hi")
_IPC_FILTER_UID: Final = 59
"""ZMQ_IPC_FILTER_UID, which pyzmq does not name: the kernel's word on the peer's uid decides."""
# Of the frame's source connection; the monitor names connections by the same number.
_SOURCE_FD: Final = 2  # ZMQ_SRCFD


class Peer(msgspec.Struct, frozen=True):
    """Who sent a frame, by the kernel's word."""

    uid: int
    gid: int
    pid: int
    """0 where the peer lives in a PID namespace that is not visible from here."""
    connection_fd: int
    """Number of the daemon's end of the connection; reused after the connection closes."""


def parse_peer_address(address: str) -> tuple[int, int, int] | None:
    """(uid, gid, pid) of a Peer-Address "host:uid:gid:pid"; None when it is anything else."""
    parts = address.rsplit(":", 3)
    if len(parts) != 4:
        return None
    try:
        uid, gid, pid = (int(part) for part in parts[1:])
    except ValueError:
        return None
    return uid, gid, pid


class Transport:
    """Binds both sockets and closes them.

    Args:
        directory: The runtime directory, prepared and locked by the caller.
        allowed_uids: Users whose connections are accepted, the daemon's own included.

    Raises:
        RuntimeDirectoryError: A socket cannot be bound.
    """

    def __init__(self, directory: Path, *, allowed_uids: Iterable[int]) -> None:
        self.control_endpoint = control_endpoint(directory)
        self.events_endpoint = events_endpoint(directory)
        self._context = zmq.Context(io_threads=1)
        self.router = self._context.socket(zmq.ROUTER)
        self.publisher = self._context.socket(zmq.XPUB)
        self.monitor: zmq.Socket[bytes] | None = None
        try:
            self._set_options(allowed_uids)
            self.monitor = self.router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._bind()
        except BaseException:
            self.close()
            raise

    def _set_options(self, allowed_uids: Iterable[int]) -> None:
        for socket in (self.router, self.publisher):
            socket.setsockopt(zmq.LINGER, limits.SOCKET_LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, limits.SEND_HIGH_WATER_MARK)
            socket.setsockopt(zmq.RCVHWM, limits.RECEIVE_HIGH_WATER_MARK)
            socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
            for uid in sorted(set(allowed_uids)):
                socket.setsockopt(_IPC_FILTER_UID, uid)
        # A reply to a peer that is gone or does not read must fail here and now, not vanish.
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _bind(self) -> None:
        umask_before = os.umask(0o077)
        try:
            for socket, endpoint in (
                (self.router, self.control_endpoint),
                (self.publisher, self.events_endpoint),
            ):
                try:
                    socket.bind(endpoint)
                except zmq.ZMQError as error:
                    raise RuntimeDirectoryError(
                        f"cannot bind {endpoint}: {error.strerror}",
                        remedy="Choose another runtime_dir",
                    ) from error
        finally:
            os.umask(umask_before)

    @staticmethod
    def peer_of(frame: zmq.Frame) -> Peer | None:
        """The sender of a frame; None where the transport gave no credentials."""
        try:
            parsed = parse_peer_address(str(frame.get("Peer-Address")))
            connection_fd = int(frame.get(_SOURCE_FD))
        except (zmq.ZMQError, ValueError):
            return None
        if parsed is None:
            return None
        uid, gid, pid = parsed
        return Peer(uid=uid, gid=gid, pid=pid, connection_fd=connection_fd)

    def closed_connections(self) -> list[int]:
        """Numbers of the connections that ended since the last call, in order."""
        closed: list[int] = []
        monitor = self.monitor
        while monitor is not None:
            try:
                event, _address = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            number, value = _MONITOR_EVENT.unpack_from(event)
            if number == zmq.EVENT_DISCONNECTED:
                closed.append(value)
        return closed

    def close(self) -> None:
        """Close sockets and context. Idempotent; replies under way get the linger time."""
        if self.monitor is not None:
            self.router.disable_monitor()
            self.monitor.close(linger=0)  # pyzmq forgets it but leaves it open: term would hang
            self.monitor = None
        self.router.close()
        self.publisher.close()
        self._context.term()
