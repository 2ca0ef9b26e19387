"""CUDA events of a group's writer, shared with its other ranks: for speed, never for safety.

The writer makes a ring of interprocess events once and records event ``step % ring`` behind the
mirrors of a step. Their IPC handles go through the daemon (`OfferEvents`, `FetchEvents`); a peer
opens each once. A peer may ask whether the copies of a step are done, and make its stream wait for
them. It reads a block only when the block's record is published all the same (I2), for an event
cannot carry that proof:

- a step that the writer's CPU has not recorded yet finds the record before it, a ring earlier, and
  does not wait;
- a step that is more than a ring old finds a later record, and waits longer than it must;
- a writer that died records nothing any more: a stream that waits for a copy which was in flight
  then may wait for ever. Its group dies with it, so events are given to no other group.

Event handles need a /dev/shm that both processes share (memory handles do not). Handles are bytes
from another process: they are opened by the driver, which refuses what is none.

On the thread whose streams record and wait; nothing here is called from a stream callback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.device_uuid import normal_device_uuid
from hisparse_service.contract.errors import (
    ClosedError,
    DeviceError,
    HiSparseError,
    InternalError,
    LeaseError,
    MalformedMessage,
    PeerError,
    ServiceUnavailable,
    UsageError,
)
from hisparse_service.contract.messages import (
    Done,
    EventsReply,
    FetchEvents,
    OfferEvents,
    event_handles,
)
from worker_client.client import Namespace
from worker_client.mirror import check_not_capturing
from worker_client.session import WhenAway

__all__ = [
    "EventDriver",
    "PeerEvents",
    "SharedEvent",
    "TorchEventDriver",
    "WriterEvents",
    "WriterTracker",
]

DEFAULT_RING: Final = 32
"""Steps that the writer's device may be behind before a peer waits for a later one."""

_FIRST_RETRY_TICKS: Final = 1
_MAX_RETRY_TICKS: Final = 1_024
_REFRESH_TICKS: Final = 4_096
"""A peer asks this seldom whether its writer was replaced; a round trip takes 0.1 ms."""


class SharedEvent(Protocol):
    """An event that two processes know: `torch.cuda.Event(interprocess=True)` is one."""

    def record(self) -> None:
        """Behind everything that the current stream has."""
        ...

    def query(self) -> bool:
        """Whether the work before the last record is done; true where there is none."""
        ...

    def wait(self) -> None:
        """The current stream goes on behind the last record."""
        ...


class EventDriver(Protocol):
    """Makes and opens events on one device."""

    @property
    def device_uuid(self) -> str:
        """Of that device."""
        ...

    def create(self) -> tuple[SharedEvent, bytes]:
        """Make an event; returns it with its IPC handle.

        Raises:
            DeviceError: The driver would not.
        """
        ...

    def open(self, handle: bytes) -> SharedEvent:
        """Open another process's event.

        Raises:
            DeviceError: The driver would not.
        """
        ...


class TorchEventDriver:
    """Events of torch, on one CUDA device.

    Args:
        device: Of the streams that record and wait.

    Raises:
        UsageError: Not a CUDA device, or ROCm: there the 33rd wait on an opened event reads past
            the event's memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda" or torch.version.hip is not None:
            raise UsageError(
                f"events are shared between CUDA processes, got {self.device} "
                f"(ROCm {torch.version.hip})",
                remedy="Run without shared events: nothing but speed depends on them",
            )

    @property
    def device_uuid(self) -> str:
        """In the spelling of `contract.device_uuid`."""
        return normal_device_uuid(str(torch.cuda.get_device_properties(self.device).uuid))

    def create(self) -> tuple[SharedEvent, bytes]:
        """An event without timing, which IPC demands, and its handle."""
        with torch.cuda.device(self.device), _driver_errors("cudaIpcGetEventHandle"):
            event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            return event, bytes(event.ipc_handle())  # type: ignore[no-untyped-call]

    def open(self, handle: bytes) -> SharedEvent:
        """The writer's event, in this process and on this device."""
        with torch.cuda.device(self.device), _driver_errors("cudaIpcOpenEventHandle"):
            event: SharedEvent = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
                self.device, handle
            )
            return event


@contextlib.contextmanager
def _driver_errors(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(
            f"{call} failed: {str(error).splitlines()[0]}",
            remedy="Events need one /dev/shm for all ranks (one pod, or the host's); without them "
            "everything works, slower",
            call=call,
        ) from error


_retired: list[SharedEvent] = []
"""Events of writers that were closed. A peer may have them open, and using an event whose maker
destroyed it is undefined: they go with the process."""


class WriterEvents:
    """The ring of the group's writer. Made once; records by step number.

    Args:
        namespace: Attached, with the writer lease of its group.
        driver: Makes the events.
        num_events: Length of the ring.

    Raises:
        UsageError: A ring that is too long or empty.
        DeviceError: No events; nothing was offered.
    """

    def __init__(
        self, namespace: Namespace, driver: EventDriver, *, num_events: int = DEFAULT_RING
    ) -> None:
        if not 1 <= num_events <= limits.MAX_SHARED_EVENTS:
            raise UsageError(
                f"a ring of {num_events} events, expected 1 to {limits.MAX_SHARED_EVENTS}",
                limit=limits.MAX_SHARED_EVENTS,
                value=num_events,
            )
        self.last_step = 0
        self._namespace = namespace
        self._device_uuid = driver.device_uuid
        made = [driver.create() for _ in range(num_events)]
        self._events: list[SharedEvent] = [event for event, _ in made]
        self._handles = b"".join(handle for _, handle in made)
        if len(self._handles) != num_events * limits.EVENT_HANDLE_BYTES:
            raise InternalError(f"{num_events} event handles have {len(self._handles)} bytes")
        self._offered_epoch = 0

    @property
    def num_events(self) -> int:
        """Length of the ring."""
        return len(self._events)

    def offer(self) -> None:
        """Give the handles to the daemon, for the peers of the group.

        Raises:
            LeaseLost: This session does not hold the writer lease.
            ServiceUnavailable: The daemon is away.
        """
        self._send(self._device_uuid, self._handles)
        self._offered_epoch = self._namespace.session_epoch

    def tick(self) -> None:
        """Between steps: offer again where another daemon has taken over. Raises nothing."""
        namespace = self._namespace
        if self._offered_epoch == namespace.session_epoch or not namespace.is_daemon_there:
            return
        with contextlib.suppress(ServiceUnavailable):
            try:
                self.offer()
            except HiSparseError:
                # The lease is gone: who has it now offers events of its own.
                self._offered_epoch = namespace.session_epoch

    def record(self, step: int) -> None:
        """Record the step's event behind everything that the current stream has.

        Not inside a captured region: behind the graph's replay.

        Raises:
            UsageError: A step before the last one, or inside a captured region.
            ClosedError: After `close`.
        """
        check_not_capturing("a writer's event")
        if step < self.last_step:
            raise UsageError(f"step {step} after step {self.last_step}: peers would miss the later")
        self._event_of(step).record()
        self.last_step = step

    def is_complete(self, step: int) -> bool:
        """Whether the copies of a recorded step are done. Never true too early.

        Raises:
            ClosedError: After `close`.
        """
        return bool(self._event_of(step).query())

    def close(self) -> None:
        """Withdraw the offer. Idempotent; the events live as long as the process."""
        if not self._events:
            return
        if self._offered_epoch == self._namespace.session_epoch:
            with contextlib.suppress(PeerError, LeaseError, UsageError):
                self._send("", b"")
        _retired.extend(self._events)
        self._events = []

    def _event_of(self, step: int) -> SharedEvent:
        if not self._events:
            raise ClosedError("the writer's events were closed")
        return self._events[step % len(self._events)]

    def _send(self, device_uuid: str, handles: bytes) -> None:
        namespace = self._namespace
        namespace.client.session.request(
            lambda request_id: OfferEvents(
                request_id, namespace.namespace_id, device_uuid, handles
            ),
            Done,
            when_away=WhenAway.FAIL,
        )


class WriterTracker:
    """A `CompletionTracker` whose tickets are the ring's events: one record serves all ranks.

    Args:
        events: The ring.
        step: The step that copies belong to; called where a ticket is recorded.
    """

    def __init__(self, events: WriterEvents, step: Callable[[], int]) -> None:
        self._events = events
        self._step = step

    def record(self) -> int:
        """Record the step's event; its number is the ticket."""
        step = self._step()
        self._events.record(step)
        return step

    def is_complete(self, ticket: Any) -> bool:
        """Ask the ticket's event. Once the ring has passed it by, a later step's: never early."""
        return self._events.is_complete(ticket)

    def release(self, ticket: Any) -> None:
        """The ring keeps its events."""
        del ticket


class PeerEvents:
    """The writer's events as another rank of its group sees them.

    Attributes:
        failure: Why the writer's events could not be opened, or None.
        writer_device_uuid: GPU that records them; empty without an offer.
    """

    def __init__(self, namespace: Namespace, driver: EventDriver) -> None:
        """Open nothing yet.

        Args:
            namespace: Attached, of a client with the writer's group.
            driver: Opens the events.
        """
        self.failure: HiSparseError | None = None
        self.writer_device_uuid = ""
        self._namespace = namespace
        self._driver = driver
        self._events: Sequence[SharedEvent] = ()
        self._handles = b""
        self._known = (0, 0)
        """(epoch, number) of the last offer that was looked at."""
        self._asked_epoch = 0
        self._next_tick = 0
        self._ticks = 0
        self._retry_ticks = _FIRST_RETRY_TICKS

    @property
    def is_connected(self) -> bool:
        """Whether the writer's events are open."""
        return bool(self._events)

    def refresh(self) -> bool:
        """Ask the daemon for the writer's offer; open each handle that is new, once.

        Returns:
            Whether events are open now.

        Raises:
            DeviceError: A handle could not be opened (each rank needs the same /dev/shm). It is
                not tried again before the writer offers others.
            UsageError: This session is the writer, or has no group.
            ServiceUnavailable: The daemon is away; what is open stays open.
        """
        namespace = self._namespace
        reply = namespace.client.session.request(
            lambda request_id: FetchEvents(request_id, namespace.namespace_id),
            EventsReply,
            when_away=WhenAway.FAIL,
        )
        self._asked_epoch = reply.epoch
        self.writer_device_uuid = reply.device_uuid
        if reply.handles and reply.writer_session == namespace.client.session_id:
            raise UsageError("this rank is the writer: it has the events that it made")
        known = (reply.epoch, reply.number)
        if reply.handles and reply.handles == self._handles:
            self._known = known  # the same writer, offered to another daemon
        elif self._known != known or not reply.handles:
            self._forget(known)
            self._events = self._open(reply.handles)
            self._handles = reply.handles
        return self.is_connected

    def tick(self) -> None:
        """Between steps: find the writer's events, seldom and with back-off. Raises nothing."""
        self._ticks += 1
        is_new_daemon = self._asked_epoch != self._namespace.session_epoch
        if (not is_new_daemon and self._ticks < self._next_tick) or (
            not self._namespace.is_daemon_there
        ):
            return
        with contextlib.suppress(HiSparseError):
            self.refresh()
        self._asked_epoch = self._namespace.session_epoch
        if self.is_connected:
            wait, self._retry_ticks = _REFRESH_TICKS, _FIRST_RETRY_TICKS
        else:
            wait = self._retry_ticks
            self._retry_ticks = min(2 * self._retry_ticks, _MAX_RETRY_TICKS)
        self._next_tick = self._ticks + wait

    def has_reached(self, step: int) -> bool:
        """Whether the writer's copies of a step look done: a reason to look, not a proof."""
        if not self._events:
            return False
        return bool(self._events[step % len(self._events)].query())

    def wait(self, step: int) -> None:
        """Make the current stream wait for the writer's copies of a step, if they are in flight.

        Without open events it does nothing.

        Raises:
            UsageError: Inside a captured region: the step is this replay's, not every one's.
        """
        if not self._events:
            return
        check_not_capturing("a wait for a writer's event")
        event = self._events[step % len(self._events)]
        # Published rows are there: asking costs less than a wait in the stream.
        if not event.query():
            event.wait()

    def close(self) -> None:
        """Close the events. Idempotent."""
        self._forget((0, 0))

    def _forget(self, known: tuple[int, int]) -> None:
        self._events, self._handles, self._known, self.failure = (), b"", known, None

    def _open(self, handles: bytes) -> list[SharedEvent]:
        try:
            found = event_handles(handles)
            if len(found) > limits.MAX_SHARED_EVENTS:
                raise MalformedMessage(
                    f"the daemon named {len(found)} events, the limit is "
                    f"{limits.MAX_SHARED_EVENTS}",
                    limit=limits.MAX_SHARED_EVENTS,
                )
            return [self._driver.open(handle) for handle in found]
        except HiSparseError as error:
            self.failure = error
            raise
