"""One `Client` a process and daemon: its connection, its namespaces, its end.

Every request runs on the caller's thread (see session.py). What the objects know changes under
`Session.lock`; the background thread uses it too, to renew leases and to attach again after the
daemon went away: `Client` is the session's owner and passes that on to its parts.

    Client -- Session            socket, registration, heartbeats            session.py
           |- LeaseBook          all leases: ids, renewal, release           lease_book.py
           |- EventStream        the daemon's events                         event_stream.py
           |- DeviceBackings     device memory by the daemon                 device_backing.py
           `- Namespace          what an engine asks for                     namespace.py
                |- NamespaceLink     requests and answers of one namespace   link.py
                |- Attachment        map and register the pool               attachment.py
                |- WriterSeat        the group's writer lease                writer.py
                |- Publications      mirror batches, and those that wait     publication.py
                `- reattach          all of it for a new daemon              reattachment.py

Any thread. What users import of these stands in `__all__`.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from hisparse_service.contract import limits
from hisparse_service.contract.errors import ClosedError, HiSparseError, NotReady
from hisparse_service.contract.geometry import HostGeometry, namespace_fingerprint
from hisparse_service.contract.messages import MirrorReply, Ping, Pong, Reply, Status, StatusReply
from worker_client.blocks import BlockLease, WriterLease
from worker_client.cuda_register import CudaUse
from worker_client.device_backing import DeviceBackings
from worker_client.event_stream import EventStream
from worker_client.lease_book import LeaseBook
from worker_client.namespace import Namespace
from worker_client.publication import (
    Completed,
    Enqueued,
    HandedIn,
    MirrorOutcome,
    MirrorResult,
)
from worker_client.session import Session, check_text

if TYPE_CHECKING:
    from worker_client.embedded import EmbeddedDaemon

__all__ = [
    "Client",
    "Completed",
    "CudaUse",
    "Enqueued",
    "EventStream",
    "HandedIn",
    "MirrorOutcome",
    "MirrorResult",
    "Namespace",
]

_READY_PAUSE_S: Final = 0.02

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_open_clients() -> None:
    # Pages are unregistered from CUDA before the process lets go of them.
    for client in list(_open_clients):
        with contextlib.suppress(HiSparseError):
            client.close()


class Client:
    """One connection of this process to a daemon. Made by `worker_client.connect`. Any thread.

    Args:
        session: Opened; owned from now on.
        embedded: A private daemon, ended by `close`.
    """

    def __init__(self, session: Session, *, embedded: EmbeddedDaemon | None = None) -> None:
        self.session = session
        self.counters = session.counters
        self.is_closed = False
        self._embedded = embedded
        self._close_lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        self.leases = LeaseBook(session)
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self.devices = DeviceBackings(self)
        session.owner = self
        _open_clients.add(self)

    @property
    def endpoint(self) -> str:
        """Where the daemon listens."""
        return self.session.endpoint

    @property
    def epoch(self) -> int:
        """Of the daemon that this client is registered with."""
        return self.session.epoch

    @property
    def session_id(self) -> int:
        """The daemon's number of this session; another one after a reconnect."""
        return 0 if self.session.hello is None else self.session.hello.session_id

    @property
    def instance(self) -> str:
        """The daemon's instance name."""
        return "" if self.session.hello is None else self.session.hello.instance

    @property
    def embedded(self) -> EmbeddedDaemon | None:
        """The private daemon of an ``embedded://`` client."""
        return self._embedded

    def ping(self, *, timeout_s: float | None = None) -> None:
        """One round trip.

        Raises:
            ServiceUnavailable: No answer before the deadline.
        """
        self.session.request(Ping, Pong, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """What ``hisparse-service status --json`` prints."""
        return self.session.request(Status, StatusReply).status

    def wait_ready(self, *, timeout_s: float, alive: Callable[[], None] = lambda: None) -> None:
        """Wait until the daemon has reserved its pool; a session it gives before that.

        Args:
            timeout_s: For all of it. Reserving takes about a second a GiB.
            alive: Called while waiting; raises to give up early.

        Raises:
            NotReady: Not before the deadline. Details: progress, 0 to 1.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status["phase"] != "starting":
                return
            alive()
            if time.monotonic() >= deadline_s:
                raise NotReady(
                    f"the pool is not reserved after {timeout_s} s, {status['progress']:.0%} is",
                    remedy="Wait longer, or use a smaller pool",
                    progress=status["progress"],
                )
            time.sleep(_READY_PAUSE_S)

    def open_namespace(
        self,
        *,
        model: str,
        kv_dtype: str,
        geometry: HostGeometry,
        tenant: str = "",
        salt: str = "",
        name: str = "",
    ) -> Namespace:
        """Name what may share blocks. Idempotent: the same arguments give the same object.

        Args:
            model: Identity of the weights, with their revision.
            kv_dtype: Format of a row.
            geometry: Shape of the blocks.
            tenant: Separates users who must not see each other's prefixes.
            salt: Anything else that changes what is stored.
            name: For people; `model` when empty.

        Raises:
            UsageError: `name` is too long.
            GeometryMismatch: Open already with another geometry.
        """
        check_text("name", name or model)
        geometry.check()
        fingerprint = namespace_fingerprint(
            model=model, kv_dtype=kv_dtype, geometry=geometry, tenant=tenant, salt=salt
        )
        with self.session.lock:
            namespace = self._namespaces.get(fingerprint)
            if namespace is None:
                made = Namespace(
                    self, name=name or model, fingerprint=fingerprint, geometry=geometry
                )
                made._open()
                # Waiting for a daemon gives the lock up: another thread may have been first.
                namespace = self._namespaces.setdefault(fingerprint, made)
            return namespace

    def events(
        self, *topics: bytes, max_queued: int = limits.RECEIVE_HIGH_WATER_MARK
    ) -> EventStream:
        """Subscribe to the daemon's events (all topics when none is named)."""
        hello = self.session.hello
        if self.is_closed or hello is None:
            raise ClosedError("the client is closed", remedy="Connect again")
        stream = EventStream(hello.events_endpoint, topics, max_queued=max_queued)
        self._streams.add(stream)
        return stream

    def close(self) -> None:
        """Leave: leases end, pools are unregistered and unmapped, the thread ends. Idempotent.

        Raises:
            DeviceError: CUDA would not unregister; everything is closed all the same.
        """
        with self._close_lock:
            if self.is_closed:
                return
            self.is_closed = True
            _open_clients.discard(self)
            with contextlib.ExitStack() as stack:
                if self._embedded is not None:
                    stack.callback(self._embedded.stop)
                stack.callback(self.session.close)
                stack.callback(self.devices.close)
                for stream in list(self._streams):
                    stack.callback(stream.close)
                for namespace in list(self._namespaces.values()):
                    stack.callback(namespace._detach)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def leases_of(self, namespace: Namespace) -> list[BlockLease]:
        """All leases of a namespace that hold something. `Session.lock` is held."""
        return self.leases.leases_of(namespace)

    # --- SessionOwner; Session.lock is held -----------------------------------------------------

    def reattach(self) -> None:
        """A new session was made."""
        self.leases.begin_session()
        for namespace in self._namespaces.values():
            namespace._reattach()
        self.devices.reattach()

    def hand_in(self) -> None:
        """The daemon answers again."""
        for namespace in self._namespaces.values():
            namespace._hand_in()

    def leases_to_renew(self, now_ns: int) -> list[int]:
        """Leases, the writer's included, whose time is half over."""
        return self.leases.due(now_ns, self._writers())

    def renewed(self, lease_ids: list[int], pong: Pong) -> None:
        """The daemon's answer to a renewal."""
        self.devices.lost(pong.lost_device_backings)
        self.leases.renewed(lease_ids, pong, self._writers())

    def late_reply(self, reply: Reply) -> None:
        """What a late reply gave goes back: its request was given up."""
        if isinstance(reply, MirrorReply):
            for namespace in self._namespaces.values():
                namespace._settle_late(reply)
        self.leases.late_reply(reply)

    def housekeeping(self) -> None:
        """Release what was dropped without a release, give back what nobody was told of."""
        self.leases.housekeeping()

    def _writers(self) -> list[WriterLease]:
        return [space.writer for space in self._namespaces.values() if space.writer is not None]
