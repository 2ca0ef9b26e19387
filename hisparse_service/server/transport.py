"""The daemon's sockets: a ROUTER for requests, an XPUB for events, and the ROUTER's monitor.

Only here are socket options set. Bind after the instance's lock is held: a
second bind on a live ipc path succeeds and leaves the first daemon deaf without an error.

Owned by the control loop and used on its thread only.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import zmq

from hisparse_service.contract import limits
from hisparse_service.contract.errors import RuntimeDirectoryError
from hisparse_service.server.runtime_directory import control_endpoint, events_endpoint

_MONITOR_EVENT: Final = struct.Struct("=Hi")
ROUTER_RECEIVE_HIGH_WATER_MARK: Final = 32
"""Messages of one connection read ahead: of MAX_FRAME_BYTES each that is 256 MiB at worst. What
comes beyond waits in the client."""
ROUTER_SEND_HIGH_WATER_MARK: Final = 2 * limits.MAX_IN_FLIGHT_PER_SESSION
"""Replies that wait for one client to read; a client may have half as many requests under way."""
_IPC_FILTER_UID: Final = 59
"""ZMQ_IPC_FILTER_UID, which pyzmq does not name: the kernel's word on the peer's uid decides."""


WAKE_ROUTING_ID: Final = b"loop-waker"
"""Of the socket that only the waker has; a client that takes this name is turned away."""
_WAKE_ENDPOINT: Final = "inproc://loop-waker"


class ConnectionChange(enum.Enum):
    """What the monitor says of a connection. Its number may be another's after its end."""

    OPENED = "opened"
    ENDED = "ended"


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
        self._bound: list[str] = []
        self.wake = self._context.socket(zmq.DEALER)
        """Connected to the ROUTER inside this process; the waker's."""
        try:
            self._set_options(allowed_uids)
            self.monitor = self.router.get_monitor_socket(
                zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            )
            self.wake.setsockopt(zmq.ROUTING_ID, WAKE_ROUTING_ID)
            self.wake.setsockopt(zmq.LINGER, 0)
            # Before anybody can connect, so that the name is taken.
            self.router.bind(_WAKE_ENDPOINT)
            self.wake.connect(_WAKE_ENDPOINT)
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
        self.router.setsockopt(zmq.SNDHWM, ROUTER_SEND_HIGH_WATER_MARK)
        self.router.setsockopt(zmq.RCVHWM, ROUTER_RECEIVE_HIGH_WATER_MARK)
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
                    self._bound.append(endpoint)
                except zmq.ZMQError as error:
                    raise RuntimeDirectoryError(
                        f"cannot bind {endpoint}: {error.strerror}",
                        remedy="Choose another runtime_dir",
                    ) from error
        finally:
            os.umask(umask_before)

    @property
    def monitor_fd(self) -> int:
        """Readable when a connection was made or ended."""
        assert self.monitor is not None, "closed"
        return int(self.monitor.getsockopt(zmq.FD))

    def connection_changes(self) -> list[tuple[ConnectionChange, int]]:
        """What happened to connections since the last call, in order, with their numbers."""
        changes: list[tuple[ConnectionChange, int]] = []
        monitor = self.monitor
        while monitor is not None:
            try:
                event, _address = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            number, value = _MONITOR_EVENT.unpack_from(event)
            if number == zmq.EVENT_DISCONNECTED:
                changes.append((ConnectionChange.ENDED, value))
            elif number == zmq.EVENT_ACCEPTED:
                changes.append((ConnectionChange.OPENED, value))
        return changes

    def close(self) -> None:
        """Close sockets and context. Idempotent; replies under way get the linger time."""
        if self.monitor is not None:
            self.router.disable_monitor()
            self.monitor.close(linger=0)  # pyzmq forgets it but leaves it open: term would hang
            self.monitor = None
        self.wake.close()
        self.router.close()
        self.publisher.close()
        self._context.term()
        # libzmq leaves the names. The lock is still held, so they cannot be a successor's.
        for endpoint in self._bound:
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        self._bound.clear()
