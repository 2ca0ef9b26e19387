"""The client's objects: one `Client` a process and daemon, one `Namespace` a model and layout.

Every request runs on the caller's thread (see session.py). What the objects know changes under
`Session.lock`; the background thread uses it too, to renew leases and to attach again after the
daemon went away. No method here holds policy: what to reserve, mirror or evict is the coordinator's
and the daemon's.

Any thread; `attach` on the thread whose CUDA context the pool is for.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import enum
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from hisparse_service.contract import limits
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    ForeignSegment,
    HiSparseError,
    InternalError,
    LeaseError,
    MalformedMessage,
    NotReady,
    PeerError,
    QuotaExceeded,
    ServiceUnavailable,
    StaleBlock,
    UsageError,
    WriterTaken,
)
from hisparse_service.contract.geometry import (
    HostGeometry,
    encode_geometry,
    namespace_fingerprint,
)
from hisparse_service.contract.keys import KeyChain, key_space
from hisparse_service.contract.messages import (
    Abandon,
    AllocateBacking,
    BackingReply,
    BlocksReply,
    CompletedItem,
    CountReply,
    Done,
    EnqueuedItem,
    Event,
    Evict,
    Free,
    LeaseReply,
    Lookup,
    MirrorBatch,
    MirrorReply,
    NamespaceReply,
    OpenNamespace,
    Pin,
    Ping,
    Pong,
    Reclaim,
    RegistrationTurn,
    ReleaseLeases,
    Reply,
    Request,
    Reserve,
    ReserveItem,
    Status,
    StatusReply,
    TakeWriter,
    TurnReply,
    Unpin,
    YieldWriter,
    decode_event,
    u32_array,
)
from hisparse_service.contract.segment import BlockState
from worker_client.blocks import (
    BlockLease,
    LeaseState,
    U32Array,
    WriterLease,
    as_blocks,
    empty_blocks,
)
from worker_client.cuda_register import CudaUse, RegistrationDriver, find_driver, register_ranges
from worker_client.device_backing import (
    CudaMemoryDriver,
    DeviceBacking,
    DeviceBackingMode,
    DeviceBackings,
    DeviceMemoryDriver,
)
from worker_client.host_pool import HostPool
from worker_client.late import Late, LateAnswers, Part
from worker_client.session import BuildRequest, ReplyT, Session, WhenAway
from worker_client.telemetry import WorkerCounters

if TYPE_CHECKING:
    import torch

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

_ATTACH_TIMEOUT_S: Final = 60.0
_TURN_TIMEOUT_S: Final = 600.0
"""Many ranks with hundreds of GiB each register one after another, at 0.1 s a GiB."""
_DEVICE_TIMEOUT_S: Final = 2 * limits.DEVICE_ANSWER_S
"""Longer than the daemon's own, so that its reason is heard."""
_READY_PAUSE_S: Final = 0.02
_TURN_PAUSE_S: Final = 0.005
_TURN_PAUSE_MAX_S: Final = 0.2
_POLL_SLICE_MS: Final = 50
_BEFORE_MIRROR: Final = declare("client.before_mirror")
_AFTER_MIRROR: Final = declare("client.after_mirror")
_AFTER_QUEUED: Final = declare("client.after_mirror_queued")
_AFTER_PUBLISHED: Final = declare("client.after_mirror_noted")
_BEFORE_HAND_IN: Final = declare("client.before_hand_in")
_AFTER_HAND_IN: Final = declare("client.after_hand_in")
_AFTER_OPEN: Final = declare("client.reattach_after_open")
_AFTER_PIN: Final = declare("client.reattach_after_pin")
_AFTER_RECLAIM: Final = declare("client.reattach_after_reclaim")
_AFTER_MAP: Final = declare("client.attach_after_map")
_AFTER_REGISTER: Final = declare("client.attach_after_register")
_RENEW_FRACTION: Final = 0.5
"""A lease is renewed when half of its time is gone."""


class Enqueued(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Reserved blocks of a lease whose copies are in stream order."""

    lease: BlockLease
    blocks: U32Array
    generations: U32Array


class Completed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Reserved blocks of a lease whose every layer the CPU saw complete, in prefix order."""

    lease: BlockLease
    blocks: U32Array
    generations: U32Array
    keys: bytes
    """16 B a block."""
    parent: int = 0
    """The block before the first one; 0: it begins the prefix."""
    parent_generation: int = 0
    checksums: npt.NDArray[np.uint64] | None = None
    keep_duplicates: bool = False
    """Own blocks whose keys are published already stay reserved; see `messages.CompletedItem`."""


class MirrorOutcome(enum.Enum):
    """What became of a `Namespace.mirror`."""

    ACKNOWLEDGED = "acknowledged"
    """The daemon published the completed blocks."""
    QUEUED = "queued"
    """The daemon is away; handed in when it is back, see `Namespace.handed_in`."""


class MirrorResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one `Namespace.mirror` did."""

    outcome: MirrorOutcome
    canonical_blocks: U32Array
    """u32: for each completed block in order, the block that holds its key now; empty if QUEUED."""
    canonical_generations: U32Array
    reserved: list[tuple[U32Array, U32Array]]
    """(blocks, generations) for each requested reservation; empty where there was no room."""
    num_free: int


class HandedIn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The fate of one queued `Completed`: published (canonical arrays) or lost (None)."""

    completed: Completed
    canonical_blocks: U32Array | None
    canonical_generations: U32Array | None


class _QueuedBatch(msgspec.Struct, kw_only=True, eq=False):
    """Mirrors that the daemon may not have heard of."""

    enqueued: list[Enqueued]
    completed: list[Completed]
    request_ids: list[int]
    """Of the messages that got no answer; the late reply to any of them settles the batch."""


class Namespace:
    """What this client shares blocks with. Made by `Client.open_namespace`. Any thread.

    Attributes:
        name: For people.
        fingerprint: 16 B: what may share blocks.
        geometry: Shape of the blocks.
        namespace_id: The daemon's number for it in this epoch.
        pool: The mapped backing; None before `attach`.
        writer: The group's writer lease while this client holds it.
    """

    def __init__(
        self, client: Client, *, name: str, fingerprint: bytes, geometry: HostGeometry
    ) -> None:
        self.client = client
        self.name = name
        self.fingerprint = fingerprint
        self.geometry = geometry
        self.namespace_id = 0
        self.pool: HostPool | None = None
        self.writer: WriterLease | None = None
        self.counters: WorkerCounters = client.counters
        self._session: Session = client.session
        self._key_space = key_space(fingerprint)
        self._attach_lock = threading.Lock()
        self._queued: collections.deque[_QueuedBatch] = collections.deque()
        self._num_queued = 0
        self._handed_in: collections.deque[HandedIn] = collections.deque(
            maxlen=limits.MAX_QUEUED_MIRRORS
        )
        self._broken: HiSparseError | None = None

    # --- seams of BlockLease --------------------------------------------------------------------

    @property
    def session_lock(self) -> threading.RLock:
        """Guards what leases hold."""
        return self._session.lock

    @property
    def session_epoch(self) -> int:
        """Of the daemon that the session is registered with."""
        return self._session.epoch

    @property
    def is_daemon_there(self) -> bool:
        """Whether the daemon answered last time."""
        return self._session.is_alive

    @property
    def is_closed(self) -> bool:
        """The client was closed."""
        return self.client.is_closed

    def wait_attached(self) -> None:
        """Wait until an attach that is going on is over: it holds the session's lock."""
        with self._session.lock:
            pass

    def require_pool(self) -> HostPool:
        """The mapped backing.

        Raises:
            UsageError: Not attached.
        """
        if self.pool is None:
            raise UsageError(f"namespace {self.name!r} is not attached", remedy="Call attach first")
        return self.pool

    def release_later(self, lease_id: int) -> None:
        """A lease was dropped without release; from a finaliser, so nothing is sent here."""
        self.client.release_later(lease_id)

    # --- backing --------------------------------------------------------------------------------

    def key_chain(self, *, salt: bytes = b"") -> KeyChain:
        """An empty chain for the keys of one request."""
        return KeyChain(self.fingerprint, self.geometry.block_size, salt=salt)

    def attach(
        self,
        num_blocks: int,
        *,
        cuda: CudaUse = CudaUse.AUTO,
        driver: RegistrationDriver | None = None,
        timeout_s: float = _ATTACH_TIMEOUT_S,
    ) -> HostPool:
        """Map the backing, touch its page tables, register it with CUDA. Idempotent.

        Args:
            num_blocks: Null block included. Fewer than the backing has gives all of it.
            cuda: Whether to register.
            driver: Stands in for the CUDA driver.
            timeout_s: For the daemon to give the backing.

        Returns:
            The same `HostPool` each time until its `cleanup`.

        Raises:
            GeometryMismatch: More blocks than the backing has.
            CapacityError: The pool has no room for it.
            CorruptSegmentError: The segment fails its checks.
            DeviceError: It could not be registered; nothing stays mapped.
        """
        with self._attach_lock:
            self._mend()
            backing = self._request(
                lambda request_id: AllocateBacking(request_id, self.namespace_id, num_blocks),
                BackingReply,
                timeout_s=timeout_s,
            )
            if self.pool is not None and not self.pool.is_closed:
                if not self.pool.is_backed_by(backing):
                    raise _other_segment(backing.segment_name)
                return self.pool
            if driver is None:
                driver = find_driver(cuda)
            pool = HostPool(backing, self.geometry, fingerprint=self.fingerprint)
            crash_point(_AFTER_MAP)
            try:
                pool.touch_page_tables()
                if driver is not None:
                    with self.registration_turn():
                        pool.take_registration(register_ranges(driver, pool.address, pool.ranges))
                        crash_point(_AFTER_REGISTER)
            except BaseException:
                pool.cleanup()
                raise
            self.pool = pool
            return pool

    def _mend(self) -> None:
        """A pool that was given up no longer stands in the way of another one."""
        with self._session.lock:
            if self.pool is not None and self.pool.is_closed:
                self.pool = None
            if self._broken is not None and self.pool is None:
                self.open()
                self._broken = None

    @contextmanager
    def registration_turn(self, *, timeout_s: float = _TURN_TIMEOUT_S) -> Iterator[None]:
        """Wait for the turn to register pages with CUDA; give it back at the end.

        Many ranks that register the same pages at once fail with ENOMEM, a page-migration race.

        Raises:
            ServiceUnavailable: Not granted before the deadline.
        """
        try:
            self._wait_for_turn(timeout_s)
            yield
        finally:
            # Also without the turn: who gave up waiting would get it all the same, and nobody
            # after it. A daemon that died meanwhile forgot it, which is as good.
            with contextlib.suppress(PeerError):
                self._request(
                    lambda request_id: RegistrationTurn(request_id, self.namespace_id, True),
                    TurnReply,
                )

    def _wait_for_turn(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        pause_s = _TURN_PAUSE_S
        while True:
            turn = self._request(
                lambda request_id: RegistrationTurn(request_id, self.namespace_id, False), TurnReply
            )
            if turn.granted:
                return
            if time.monotonic() >= deadline_s:
                raise ServiceUnavailable(
                    f"no turn to register within {timeout_s} s, {turn.ahead} sessions are ahead",
                    remedy="Look for a worker that hangs in cudaHostRegister",
                    timeout_s=timeout_s, ahead=turn.ahead,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _TURN_PAUSE_MAX_S)

    def device_backing(
        self,
        size_bytes: int,
        *,
        layout: bytes,
        device: torch.device | None = None,
        name: str = "",
        mode: DeviceBackingMode = DeviceBackingMode.OPEN_OR_CREATE,
        timeout_s: float = _DEVICE_TIMEOUT_S,
        driver: DeviceMemoryDriver | None = None,
    ) -> DeviceBacking:
        """Device memory that the daemon allocates for this rank, and that outlives this process.

        Found again by the next process with this namespace, group, rank and name on the same GPU.
        Idempotent: the same size and layout give the same object until it is closed.

        Args:
            size_bytes: Of the tensor; zeros where nothing was there.
            layout: 16 B, what lies where on it (`device_allocator.device_layout_fingerprint`):
                whoever finds it must say the same.
            device: This process's; torch's current one when None.
            name: Tells the backings of one rank apart.
            mode: What to do with what is there.
            timeout_s: For the driver to allocate it.
            driver: Stands in for CUDA.

        Raises:
            ConfigError: The daemon allocates no device memory, or does not see this GPU.
            QuotaExceeded: Beyond the daemon's limit for this GPU.
            CapacityError: The GPU has not that much memory.
            GeometryMismatch: It is there with another size or layout.
            DeviceBackingTaken: Another process holds it, or may still use it.
            LeaseLost: `DeviceBackingMode.OPEN`, and there is none.
            DeviceError: The driver failed or hangs.
        """
        driver = driver if driver is not None else CudaMemoryDriver()
        device = device if device is not None else driver.current_device()
        return self.client.devices.obtain(
            self, size_bytes, layout=layout, name=name, device=device, mode=mode,
            timeout_s=timeout_s, driver=driver,
        )  # fmt: skip

    # --- writer ---------------------------------------------------------------------------------

    def take_writer(self) -> WriterLease:
        """Become the writer of this client's group. Idempotent.

        Raises:
            WriterTaken: Another rank is.
        """
        with self._session.lock:
            reply = self._request(
                lambda request_id: TakeWriter(request_id, self.namespace_id), LeaseReply
            )
            self._note_deadline(reply.lease_deadline_ns)
            self.writer = WriterLease(reply.lease_id, self._session.epoch, reply.lease_deadline_ns)
            return self.writer

    def yield_writer(self) -> None:
        """Give the writer lease back. Idempotent; with the daemon away it ends by itself."""
        with self._session.lock:
            writer, self.writer = self.writer, None
            if writer is None or writer.state is not LeaseState.GRANTED:
                return
            writer.state = LeaseState.RELEASED
            with contextlib.suppress(ServiceUnavailable, LeaseError):
                self._request(
                    lambda request_id: YieldWriter(request_id, self.namespace_id), Done,
                    when_away=WhenAway.FAIL,
                )  # fmt: skip

    # --- blocks ---------------------------------------------------------------------------------

    def reserve(
        self, num_blocks: int, *, lease: BlockLease | None = None, timeout_s: float | None = None
    ) -> BlockLease:
        """Take free blocks to write: the last `num_blocks` of the lease's `reserved_blocks`.

        Raises:
            CapacityError: Not enough are free or can be evicted; nothing changed.
            LeaseError: This client is not the group's writer, or the lease ended.
            ServiceUnavailable: No answer before the deadline.
        """
        with self._session.lock:
            lease = self._usable_lease(lease)
            reply = self._request_blocks(
                lambda request_id: Reserve(
                    request_id, self.namespace_id, self._live_id(lease), num_blocks
                ),
                "reserved",
                timeout_s=timeout_s,
            )
            self._take_blocks(lease, "reserved", reply)
            return lease

    def lookup(
        self,
        keys: KeyChain | bytes,
        *,
        lease: BlockLease | None = None,
        start: int = 0,
        stop: int | None = None,
        timeout_s: float | None = None,
    ) -> BlockLease:
        """Pin the longest published prefix of keys [start, stop): appended to `lease.blocks`.

        A lookup without a hit pins nothing; the lease (its id may be 0) can be used all the same.

        Raises:
            ForeignKeys: A chain of another namespace.
        """
        space = self._key_space
        if isinstance(keys, KeyChain):
            data, space = keys.keys(start, stop), keys.key_space
        else:
            width = limits.BLOCK_KEY_BYTES
            data = keys[start * width : None if stop is None else stop * width]
        with self._session.lock:
            lease = self._usable_lease(lease)
            reply = self._request_blocks(
                lambda request_id: Lookup(
                    request_id, self.namespace_id, self._live_id(lease), space, data
                ),
                "pinned",
                timeout_s=timeout_s,
            )
            self._take_blocks(lease, "pinned", reply)
            return lease

    def lookup_into(
        self, lease: BlockLease, keys: bytes, *, timeout_s: float | None = None
    ) -> tuple[U32Array, U32Array]:
        """`lookup` for one long-lived lease: what it pinned before is pinned once.

        Args:
            lease: Gets the pins that it has not.
            keys: 16 B each, from the first block of a prefix on.
            timeout_s: For the answer. A daemon that is away is not waited for.

        Returns:
            (blocks, generations), u32 [num_hits] in the order of the keys, all of them pinned.

        Raises:
            ServiceUnavailable: The daemon is away.
        """
        with self._session.lock:
            self._usable_lease(lease)
            reply = self._request_blocks(
                lambda request_id: Lookup(
                    request_id, self.namespace_id, self._live_id(lease), self._key_space, keys
                ),
                "pinned",
                timeout_s=timeout_s, when_away=WhenAway.FAIL,
            )  # fmt: skip
            blocks = self._checked_blocks(reply.blocks)
            generations = u32_array(reply.generations, what="generations")
            lease._add_new_pins(blocks, generations)
            self._note_lease(lease, reply)
            return blocks, generations

    def pin(
        self,
        blocks: npt.ArrayLike,
        generations: npt.ArrayLike,
        *,
        lease: BlockLease | None = None,
        timeout_s: float | None = None,
    ) -> BlockLease:
        """Pin published blocks by id: appended to `lease.blocks`.

        Raises:
            StaleBlock: A generation no longer matches; nothing was pinned.
        """
        raw_blocks = as_blocks(blocks, "blocks").tobytes()
        raw_generations = as_blocks(generations, "generations").tobytes()
        with self._session.lock:
            lease = self._usable_lease(lease)
            reply = self._request_blocks(
                lambda request_id: Pin(
                    request_id, self.namespace_id, self._live_id(lease), raw_blocks, raw_generations
                ),
                "pinned",
                timeout_s=timeout_s,
            )
            self._take_blocks(lease, "pinned", reply)
            return lease

    def unpin(
        self, lease: BlockLease, blocks: npt.ArrayLike, *, timeout_s: float | None = None
    ) -> None:
        """End the lease's pins on these blocks.

        Raises:
            NotHeld: The lease does not pin one of them; nothing changed.
            ServiceUnavailable: No answer before the deadline. The lease has them no more, since the
                daemon may carry it out at any time; it is asked again in the background.
        """
        array = as_blocks(blocks, "blocks")
        with self._session.lock:
            lease.require_granted()
            try:
                self._request(
                    lambda request_id: Unpin(
                        request_id, self.namespace_id, self._live_id(lease), array.tobytes()
                    ),
                    Done,
                    timeout_s=timeout_s,
                )
            except ServiceUnavailable:
                self.client.late.took(lease, "pinned", array)
                lease._drop("pinned", array)
                raise
            lease._drop("pinned", array)

    def abandon(
        self,
        lease: BlockLease,
        blocks: npt.ArrayLike | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Give reserved blocks back unpublished; all of the lease's when None.

        No copy into them may be in flight.

        Raises:
            NotHeld: The lease did not reserve one of them; nothing changed.
            ServiceUnavailable: As of `unpin`.
        """
        array = empty_blocks() if blocks is None else as_blocks(blocks, "blocks")
        with self._session.lock:
            lease.require_granted()
            if blocks is not None and not len(array):
                return  # no blocks on the wire mean all of them
            given = lease.reserved_blocks if blocks is None else array
            try:
                if lease.lease_id:
                    self._request(
                        lambda request_id: Abandon(
                            request_id, self.namespace_id, self._live_id(lease), array.tobytes()
                        ),
                        Done,
                        timeout_s=timeout_s,
                    )
            except ServiceUnavailable:
                self.client.late.took(lease, "reserved", given)
                lease._drop("reserved", given)
                raise
            lease._drop("reserved", given)

    def free(self, lease: BlockLease, blocks: npt.ArrayLike) -> None:
        """Give back blocks that the lease holds: reserved ones return, pinned ones are forgotten.

        Raises:
            NotHeld: The lease does not hold one of them; nothing changed.
        """
        array = as_blocks(blocks, "blocks")
        with self._session.lock:
            lease.require_granted()
            self._request(
                lambda request_id: Free(
                    request_id, self.namespace_id, self._live_id(lease), array.tobytes()
                ),
                Done,
            )
            lease._drop("reserved", array)
            lease._drop("pinned", array)

    def evict(self, num_blocks: int | None = None) -> int:
        """Give up published blocks that nobody reads, whoever published them.

        For operators, and for engines whose weights changed. Least recently used first.

        Args:
            num_blocks: At most so many; all of them when None.

        Returns:
            How many went.
        """
        gone = 0
        while num_blocks is None or gone < num_blocks:
            wanted = limits.MAX_RESERVE_BLOCKS
            if num_blocks is not None:
                wanted = min(wanted, num_blocks - gone)

            def build(request_id: int, wanted: int = wanted) -> Request:
                return Evict(request_id, self.namespace_id, wanted)

            count = self._request(build, CountReply).count
            gone += count
            if count < wanted:
                break
        return gone

    def release(self, *leases: BlockLease) -> None:
        """End leases, in one message. Idempotent, and never waits for a daemon that is away.

        Their pins end, their reserved blocks return: no copy into those may be in flight.
        """
        with self._session.lock:
            lease_ids = [lease.lease_id for lease in leases if self.client.forget(lease)]
            self.client.release_ids([lease_id for lease_id in lease_ids if lease_id])

    # --- mirrors --------------------------------------------------------------------------------

    def mirror(
        self,
        *,
        enqueued: Sequence[Enqueued] = (),
        completed: Sequence[Completed] = (),
        reserve: Sequence[tuple[BlockLease, int]] = (),
        timeout_s: float | None = None,
    ) -> MirrorResult:
        """Report mirrors, publish completed blocks, reserve more: one message a decode step.

        Completed blocks leave `lease.reserved_blocks`, their canonical blocks join `lease.blocks`.
        While the daemon is away nothing waits: mirrors are kept (QUEUED) and nothing is reserved.

        Raises:
            QuotaExceeded: MAX_QUEUED_MIRRORS blocks are kept already; these are not.
            UsageError, LeaseError: The daemon's; nothing changed.
        """
        for item in enqueued:
            item.lease.require_granted()
        for done in completed:
            done.lease.require_granted()
        with self._session.lock:
            sent_id = 0
            crash_point(_BEFORE_MIRROR)

            def build(request_id: int) -> MirrorBatch:
                nonlocal sent_id
                sent_id = request_id
                return self._mirror_batch(request_id, enqueued, completed, reserve)

            try:
                reply = self._request(
                    build, MirrorReply, timeout_s=timeout_s, when_away=WhenAway.FAIL
                )
            except ServiceUnavailable:
                self._queue(list(enqueued), list(completed), sent_id)
                crash_point(_AFTER_QUEUED)
                nothing = empty_blocks()
                return MirrorResult(
                    outcome=MirrorOutcome.QUEUED, canonical_blocks=nothing,
                    canonical_generations=nothing, reserved=[(nothing, nothing)] * len(reserve),
                    num_free=0,
                )  # fmt: skip
            except HiSparseError:
                raise
            except BaseException:
                # Ctrl-C while waiting: the daemon may carry it out, and its answer is still read.
                if sent_id:
                    self._queue(list(enqueued), list(completed), sent_id)
                raise
            crash_point(_AFTER_MIRROR)
            blocks, generations = self._publish(completed, reply)
            crash_point(_AFTER_PUBLISHED)
            return MirrorResult(
                outcome=MirrorOutcome.ACKNOWLEDGED, canonical_blocks=blocks,
                canonical_generations=generations, reserved=self._reserved(reserve, reply),
                num_free=reply.num_free,
            )  # fmt: skip

    def handed_in(self) -> list[HandedIn]:
        """What became of queued mirrors since the last call, in their order."""
        with self._session.lock:
            results = list(self._handed_in)
            self._handed_in.clear()
            return results

    def _mirror_batch(
        self,
        request_id: int,
        enqueued: Sequence[Enqueued],
        completed: Sequence[Completed],
        reserve: Sequence[tuple[BlockLease, int]],
    ) -> MirrorBatch:
        return MirrorBatch(
            request_id,
            self.namespace_id,
            self._key_space,
            [
                EnqueuedItem(
                    item.lease.lease_id, _raw(item.blocks), _raw(item.generations)
                )
                for item in enqueued
            ] if enqueued else [],
            [
                CompletedItem(
                    item.lease.lease_id, item.parent, item.parent_generation, _raw(item.blocks),
                    _raw(item.generations), item.keys,
                    b"" if item.checksums is None else item.checksums.astype("<u8").tobytes(),
                    item.keep_duplicates,
                )
                for item in completed
            ],
            [ReserveItem(self._live_id(lease), count) for lease, count in reserve],
        )  # fmt: skip

    def _publish(
        self, completed: Sequence[Completed], reply: MirrorReply
    ) -> tuple[U32Array, U32Array]:
        blocks = self._checked_blocks(reply.canonical_blocks)
        generations = u32_array(reply.canonical_generations, what="canonical generations")
        if len(blocks) != _count((), completed):
            raise InternalError(f"the daemon answered {len(blocks)} blocks of a mirror batch")
        at = 0
        for item in completed:
            end = at + len(item.blocks)
            canonical = blocks[at:end]
            if item.keep_duplicates:
                item.lease._drop("reserved", item.blocks[item.blocks == canonical])
                item.lease._add_new_pins(canonical, generations[at:end])
            else:
                item.lease._drop("reserved", item.blocks)
                item.lease._add("pinned", canonical, generations[at:end])
            item.lease.deadline_ns = reply.lease_deadline_ns
            at = end
        self.counters.add_mirrored(len(blocks), len(blocks) * self.geometry.block_stride_bytes)
        return blocks, generations

    def _reserved(
        self, reserve: Sequence[tuple[BlockLease, int]], reply: MirrorReply
    ) -> list[tuple[U32Array, U32Array]]:
        if len(reply.reserved) != len(reserve):
            raise InternalError(f"the daemon answered {len(reply.reserved)} reservations")
        results = []
        for (lease, _), item in zip(reserve, reply.reserved, strict=True):
            blocks = self._checked_blocks(item.blocks)
            generations = u32_array(item.generations, what="generations")
            if len(blocks):
                lease._add("reserved", blocks, generations)
                lease.deadline_ns = reply.lease_deadline_ns
                self.client.remember(lease, item.lease_id)
            results.append((blocks, generations))
        return results

    def _queue(self, enqueued: list[Enqueued], completed: list[Completed], request_id: int) -> None:
        count = _count(enqueued, completed)
        if not count:
            return
        if self._num_queued + count > limits.MAX_QUEUED_MIRRORS:
            self.counters.add("mirrors_lost", count)
            raise QuotaExceeded(
                f"{self._num_queued} blocks wait for the daemon, {count} more are too many",
                remedy="Stop mirroring until the daemon is back; these blocks stay unpublished",
                limit=limits.MAX_QUEUED_MIRRORS, value=self._num_queued + count,
                needed=count, free=limits.MAX_QUEUED_MIRRORS - self._num_queued,
            )  # fmt: skip
        self._num_queued += count
        self._queued.append(
            _QueuedBatch(enqueued=enqueued, completed=completed, request_ids=[request_id])
        )
        self.counters.add("mirrors_queued", count)

    # --- after the daemon was away; Session.lock is held ----------------------------------------

    def settle_late(self, reply: MirrorReply) -> None:
        """The answer to a mirror batch that was queued because it came too late."""
        for batch in self._queued:
            if reply.request_id in batch.request_ids:
                self._unqueue(batch)
                self._settle(batch, reply)
                return

    def hand_in(self) -> None:
        """Send what is queued, oldest first; stops at the first that gets no answer."""
        while self._queued:
            batch = self._queued[0]
            reply: MirrorReply | None
            crash_point(_BEFORE_HAND_IN)
            try:
                reply = self._send_again(batch)
            except ServiceUnavailable:
                raise
            except HiSparseError:
                reply = None
            if batch not in self._queued:
                continue  # the late reply to an earlier attempt came first and settled it
            self._unqueue(batch)
            crash_point(_AFTER_HAND_IN)
            if reply is not None:
                self._settle(batch, reply)
            else:
                for item in batch.completed:
                    self._recover_published(item)

    def _unqueue(self, batch: _QueuedBatch) -> None:
        self._queued.remove(batch)
        self._num_queued -= _count(batch.enqueued, batch.completed)

    def _send_again(self, batch: _QueuedBatch) -> MirrorReply:
        if self._broken is not None:
            raise self._broken

        def build(request_id: int) -> MirrorBatch:
            batch.request_ids.append(request_id)
            return self._mirror_batch(request_id, batch.enqueued, batch.completed, ())

        return self._session.request(build, MirrorReply)

    def _settle(self, batch: _QueuedBatch, reply: MirrorReply) -> None:
        blocks, generations = self._publish(batch.completed, reply)
        self.counters.add("mirrors_handed_in", len(blocks))
        at = 0
        for item in batch.completed:
            end = at + len(item.blocks)
            self._handed_in.append(
                HandedIn(
                    completed=item, canonical_blocks=blocks[at:end],
                    canonical_generations=generations[at:end],
                )
            )  # fmt: skip
            at = end

    def _recover_published(self, item: Completed) -> None:
        """The daemon may have published these and died before it said so: look, then pin."""
        result: tuple[U32Array, U32Array] | None = None
        if item.lease.state is LeaseState.GRANTED and self._is_published(item):
            try:
                self.pin(item.blocks, item.generations, lease=item.lease)
                result = (item.blocks, item.generations)
            except (StaleBlock, UsageError, LeaseError):
                result = None
        name = "mirrors_handed_in" if result else "mirrors_lost"
        self.counters.add(name, len(item.blocks))
        self._handed_in.append(
            HandedIn(
                completed=item,
                canonical_blocks=result[0] if result else None,
                canonical_generations=result[1] if result else None,
            )
        )

    def _is_published(self, item: Completed) -> bool:
        if self.pool is None or self.pool.is_closed:
            return False
        records = self.pool.table[item.blocks]
        keys = np.frombuffer(item.keys, "<u8").reshape(-1, 2)
        return bool(
            (records["state"] == BlockState.PUBLISHED).all()
            and (records["generation"] == item.generations).all()
            and (records["key_low"] == keys[:, 0]).all()
            and (records["key_high"] == keys[:, 1]).all()
        )

    def reattach(self) -> None:
        """Make this namespace, its writer and its leases known to a new session.

        What cannot be had again is marked: the pool (`ForeignSegment` on its next use) or single
        leases (REVOKED). The mapping itself stays as it is and nothing is registered again (I4).
        """
        leases = self.client.leases_of(self)
        try:
            self.open()
            if self.pool is not None and not self.pool.is_closed:
                self._check_same_segment(self.pool)
        except NotReady as error:
            raise ServiceUnavailable(error.message, remedy=error.remedy) from error
        except (ConfigError, CapacityError, ForeignSegment, UsageError) as error:
            self._broken = error
            for lease in leases:
                lease._lose_reserved()
                lease._revoke()
                lease.lease_id = 0
            return
        self._broken = None
        crash_point(_AFTER_OPEN)
        self._retake_writer()
        for lease in leases:
            self._repin(lease)

    def open(self) -> None:
        """Tell the daemon of this namespace; learns its number in this epoch."""
        self.namespace_id = self._session.request(
            lambda request_id: OpenNamespace(
                request_id, self.fingerprint, self.name, encode_geometry(self.geometry)
            ),
            NamespaceReply,
        ).namespace_id

    def _check_same_segment(self, pool: HostPool) -> None:
        backing = self._session.request(
            lambda request_id: AllocateBacking(request_id, self.namespace_id, pool.num_blocks),
            BackingReply,
        )
        if not pool.is_backed_by(backing):
            raise _other_segment(backing.segment_name)

    def _retake_writer(self) -> None:
        writer = self.writer
        if writer is None or writer.state is not LeaseState.GRANTED:
            return
        try:
            reply = self._session.request(
                lambda request_id: TakeWriter(request_id, self.namespace_id), LeaseReply
            )
        except (WriterTaken, UsageError):
            writer.state = LeaseState.REVOKED
            self.counters.add("leases_lost")
            return
        writer.lease_id, writer.epoch = reply.lease_id, self._session.epoch
        writer.deadline_ns = reply.lease_deadline_ns

    def _repin(self, lease: BlockLease) -> None:
        lease.lease_id = 0
        if lease.state is not LeaseState.GRANTED:
            lease._lose_reserved()
            return
        try:
            self._pin_again(lease)
        except (StaleBlock, UsageError, LeaseError, CapacityError):
            if lease.lease_id:  # what was pinned before the refusal
                self.client.release_later(lease.lease_id)
            lease._lose_reserved()
            lease._revoke()
            return
        if len(lease.reserved_blocks):
            self._reclaim(lease)
            crash_point(_AFTER_RECLAIM)
        lease.epoch = self._session.epoch

    def _pin_again(self, lease: BlockLease) -> None:
        """All that the lease pinned, each block once, in as many messages as it takes."""
        _, first = np.unique(lease.blocks, return_index=True)
        order = np.sort(first)
        for part in _slices(len(order)):
            blocks = lease.blocks[order[part]].tobytes()
            generations = lease.generations[order[part]].tobytes()

            def build(request_id: int, blocks: bytes = blocks, gens: bytes = generations) -> Pin:
                return Pin(request_id, self.namespace_id, lease.lease_id, blocks, gens)

            reply = self._session.request(build, BlocksReply)
            lease.deadline_ns = reply.lease_deadline_ns
            self.client.remember(lease, reply.lease_id)
            crash_point(_AFTER_PIN)

    def _reclaim(self, lease: BlockLease) -> None:
        """Get reserved blocks back from a daemon that adopted the pool; copies go on into them.

        Nothing changes where the daemon goes away again meanwhile: the next one is asked for them.
        """
        blocks, generations = lease.reserved_blocks, lease.reserved_generations
        kept: list[BlocksReply] = []
        for part in _slices(len(blocks)):
            asked = _raw(blocks[part]), _raw(generations[part])

            def build(request_id: int, asked: tuple[bytes, bytes] = asked) -> Reclaim:
                return Reclaim(request_id, self.namespace_id, lease.lease_id, *asked)

            try:
                kept.append(self._session.request(build, BlocksReply))
            except (UsageError, LeaseError, CapacityError, MalformedMessage):
                break
            self.client.remember(lease, kept[-1].lease_id)
        lease._lose_reserved()
        for reply in kept:
            lease._regain_reserved(
                self._checked_blocks(reply.blocks), u32_array(reply.generations, what="generations")
            )
            lease.deadline_ns = reply.lease_deadline_ns

    # --- small parts ----------------------------------------------------------------------------

    def _request(
        self,
        build: BuildRequest,
        reply_type: type[ReplyT],
        *,
        timeout_s: float | None = None,
        when_away: WhenAway = WhenAway.WAIT,
    ) -> ReplyT:
        if self._broken is not None:
            raise self._broken
        return self._session.request(build, reply_type, timeout_s=timeout_s, when_away=when_away)

    def _request_blocks(
        self,
        build: BuildRequest,
        part: Part,
        *,
        timeout_s: float | None,
        when_away: WhenAway = WhenAway.WAIT,
    ) -> BlocksReply:
        """A request whose blocks join a part of a lease; they go back if its answer is too late."""
        sent_id = 0

        def noted(request_id: int) -> Request:
            nonlocal sent_id
            request = build(request_id)
            sent_id = request_id
            return request

        try:
            return self._request(noted, BlocksReply, timeout_s=timeout_s, when_away=when_away)
        except BaseException:  # Ctrl-C too
            if sent_id:
                self.client.late.give_up(sent_id, part)
            raise

    def give_back_late(self, late: Late) -> None:
        """Blocks that the daemon counts to a lease and that nobody was told of."""
        raw = late.blocks.tobytes()

        def build(request_id: int) -> Request:
            lease_id = self._live_id(late.lease)
            if late.part == "reserved":
                return Abandon(request_id, self.namespace_id, lease_id, raw)
            return Unpin(request_id, self.namespace_id, lease_id, raw)

        try:
            self._request(build, Done, when_away=WhenAway.FAIL)
        except ServiceUnavailable:
            self.client.late.took(late.lease, late.part, late.blocks)
        except (UsageError, LeaseError):
            pass  # they went with something else

    def _usable_lease(self, lease: BlockLease | None) -> BlockLease:
        if lease is None:
            return BlockLease(self, epoch=self._session.epoch)
        if lease.namespace is not self:
            raise UsageError(f"lease {lease.lease_id} is of namespace {lease.namespace.name!r}")
        lease.require_granted()
        return lease

    def _live_id(self, lease: BlockLease) -> int:
        # Asked while a request is built: a retry after a new session must not use a dead lease.
        lease.require_granted()
        return lease.lease_id

    def _take_blocks(self, lease: BlockLease, part: Any, reply: BlocksReply) -> None:
        blocks = self._checked_blocks(reply.blocks)
        lease._add(part, blocks, u32_array(reply.generations, what="generations"))
        self._note_lease(lease, reply)

    def _note_lease(self, lease: BlockLease, reply: BlocksReply) -> None:
        if reply.lease_id:
            lease.epoch = reply.epoch
            lease.deadline_ns = reply.lease_deadline_ns
            self._note_deadline(reply.lease_deadline_ns)
            self.client.remember(lease, reply.lease_id)

    def _note_deadline(self, deadline_ns: int) -> None:
        self.client.note_ttl(deadline_ns - time.monotonic_ns())

    def _checked_blocks(self, raw: bytes) -> U32Array:
        blocks = u32_array(raw, what="blocks")
        if self.pool is None or not len(blocks):
            return blocks
        highest = blocks.item() if len(blocks) == 1 else int(blocks.max())
        if highest >= self.pool.num_blocks:
            raise InternalError(
                f"the daemon named block {highest} of {self.pool.num_blocks}",
                block=highest, num_blocks=self.pool.num_blocks,
            )  # fmt: skip
        return blocks


def _raw(blocks: npt.ArrayLike) -> bytes:
    return as_blocks(blocks, "blocks and generations").tobytes()


def _slices(count: int) -> Iterator[slice]:
    """Parts of `count` blocks that a message may carry."""
    step = limits.MAX_BLOCKS_PER_MESSAGE
    return (slice(start, start + step) for start in range(0, count, step))


def _count(enqueued: Sequence[Enqueued], completed: Sequence[Completed]) -> int:
    count = 0
    for item in enqueued:
        count += len(item.blocks)
    for done in completed:
        count += len(done.blocks)
    return count


def _other_segment(name: str) -> ForeignSegment:
    return ForeignSegment(
        f"the daemon now serves another segment ({name}) than the one that is mapped here",
        remedy="The mapping stays as it is, but nothing in it is served: clean the pool up, attach "
        "again and capture CUDA graphs anew",
    )


class EventStream:
    """Iterator over the daemon's events. Made by `Client.events`; one thread, any may close it.

    The queue is bounded and a daemon that restarts sends nothing meanwhile: events may be missed.
    An `EpochEvent` with another epoch says that everything may have changed.
    """

    def __init__(self, endpoint: str, topics: Sequence[bytes], *, max_queued: int) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._closed = False
        self._pid = os.getpid()
        try:
            self._socket.setsockopt(zmq.RCVHWM, max_queued)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
            for topic in topics or (b"",):
                self._socket.setsockopt(zmq.SUBSCRIBE, topic)
            self._socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def next(self, *, timeout_s: float) -> Event | None:
        """The next event; None at the deadline.

        Raises:
            ClosedError: Closed, meanwhile or before.
            MalformedMessage: The daemon sent something that is no event.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_ms = int(max(0.0, deadline_s - time.monotonic()) * 1000)
            # In slices, so that another thread can close the stream between two.
            with self._lock:
                if self._closed or os.getpid() != self._pid:
                    raise ClosedError("the event stream is closed", remedy="Subscribe again")
                if self._socket.poll(min(left_ms, _POLL_SLICE_MS)):
                    return decode_event(self._socket.recv_multipart()[-1])
            if left_ms <= 0:
                return None

    def __iter__(self) -> Iterator[Event]:
        while True:
            try:
                event = self.next(timeout_s=3600.0)
            except ClosedError:
                return
            if event is not None:
                yield event

    def close(self) -> None:
        """End the subscription. Idempotent."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._socket.close(linger=0)
            self._context.term()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        self._leases: weakref.WeakSet[BlockLease] = weakref.WeakSet()
        self._by_id: weakref.WeakValueDictionary[int, BlockLease] = weakref.WeakValueDictionary()
        self._unreleased: collections.deque[int] = collections.deque(
            maxlen=limits.MAX_LEASES_PER_SESSION
        )
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self.late = LateAnswers()
        self.devices = DeviceBackings(self)
        self._ttl_ns = int(limits.LEASE_TTL_S * 1e9)
        self._next_renewal_ns = 0
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
            GeometryMismatch: Open already with another geometry.
        """
        geometry.check()
        fingerprint = namespace_fingerprint(
            model=model, kv_dtype=kv_dtype, geometry=geometry, tenant=tenant, salt=salt
        )
        with self.session.lock:
            namespace = self._namespaces.get(fingerprint)
            if namespace is None:
                namespace = Namespace(
                    self, name=name or model, fingerprint=fingerprint, geometry=geometry
                )
                namespace.open()
                self._namespaces[fingerprint] = namespace
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
                for namespace in self._namespaces.values():
                    if namespace.pool is not None:
                        stack.callback(namespace.pool.cleanup)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- leases; Session.lock is held -----------------------------------------------------------

    def remember(self, lease: BlockLease, lease_id: int) -> None:
        """Renew this lease from now on, under this id."""
        if lease.lease_id != lease_id:
            lease.lease_id = lease_id
            self._by_id[lease_id] = lease
            self._leases.add(lease)

    def forget(self, lease: BlockLease) -> bool:
        """End a lease here; True when it was not ended before."""
        if lease.state is LeaseState.RELEASED:
            return False
        known = lease.state is not LeaseState.REVOKED
        lease._end()
        self._leases.discard(lease)
        if self._by_id.get(lease.lease_id) is lease:
            del self._by_id[lease.lease_id]
        return known

    def release_later(self, lease_id: int) -> None:
        """Release with the next heartbeat. Takes no lock: finalisers call it."""
        self._unreleased.append(lease_id)

    def release_ids(self, lease_ids: Sequence[int]) -> None:
        """Tell the daemon; later, if it is away."""
        for start in range(0, len(lease_ids), limits.MAX_LIST_ITEMS):
            part = list(lease_ids[start : start + limits.MAX_LIST_ITEMS])

            def build(request_id: int, part: list[int] = part) -> Request:
                return ReleaseLeases(request_id, part)

            try:
                self.session.request(build, Done, when_away=WhenAway.FAIL)
            except ServiceUnavailable:
                self._unreleased.extend(part)
            except LeaseError:
                pass  # it ended before we said so

    def leases_of(self, namespace: Namespace) -> list[BlockLease]:
        """All leases of a namespace that hold something."""
        return [lease for lease in self._leases if lease.namespace is namespace]

    def note_ttl(self, ttl_ns: int) -> None:
        """How long the daemon's leases last: the shortest seen."""
        if 0 < ttl_ns < self._ttl_ns:
            self._ttl_ns = ttl_ns
            self._next_renewal_ns = 0

    # --- SessionOwner; Session.lock is held -----------------------------------------------------

    def reattach(self) -> None:
        """A new session was made."""
        self._unreleased.clear()  # ids of the old session mean nothing in the new one
        self.late.clear()
        self._by_id.clear()
        for namespace in self._namespaces.values():
            namespace.reattach()
        self.devices.reattach()

    def hand_in(self) -> None:
        """The daemon answers again."""
        for namespace in self._namespaces.values():
            namespace.hand_in()

    def leases_to_renew(self, now_ns: int) -> list[int]:
        """Leases, the writer's included, whose time is half over."""
        if now_ns < self._next_renewal_ns:
            return []
        self._next_renewal_ns = now_ns + self._ttl_ns // 4
        due_ns = now_ns + int(self._ttl_ns * _RENEW_FRACTION)
        due = [
            lease.lease_id
            for lease in self._by_id.values()
            if lease.state is LeaseState.GRANTED and lease.deadline_ns < due_ns
        ]
        due.extend(
            writer.lease_id
            for writer in self._writers()
            if writer.state is LeaseState.GRANTED and writer.deadline_ns < due_ns
        )
        return due

    def _writers(self) -> list[WriterLease]:
        return [space.writer for space in self._namespaces.values() if space.writer is not None]

    def renewed(self, lease_ids: list[int], pong: Pong) -> None:
        """The daemon's answer to a renewal."""
        self.devices.lost(pong.lost_device_backings)
        lost = set(pong.lost_leases)
        for lease_id in lease_ids:
            lease = self._by_id.get(lease_id)
            if lease is None:
                continue
            if lease_id in lost:
                lease._revoke()
            else:
                lease.deadline_ns = pong.lease_deadline_ns
        for writer in self._writers():
            if writer.lease_id in lost:
                writer.state = LeaseState.REVOKED
            elif writer.lease_id in lease_ids:
                writer.deadline_ns = pong.lease_deadline_ns

    def late_reply(self, reply: Reply) -> None:
        """What a late reply gave goes back: its request was given up."""
        if isinstance(reply, MirrorReply):
            for namespace in self._namespaces.values():
                namespace.settle_late(reply)
            for item in reply.reserved:
                blocks = u32_array(item.blocks, what="blocks")
                lease = self._by_id.get(item.lease_id)
                if lease is not None:
                    self.late.took(lease, "reserved", blocks)
                elif len(blocks):
                    self.release_later(item.lease_id)
        elif isinstance(reply, BlocksReply) and reply.lease_id:
            lease = self._by_id.get(reply.lease_id)
            if lease is not None:
                self.late.came(
                    reply.request_id, lease, u32_array(reply.blocks, what="blocks")
                )  # fmt: skip
            else:
                self.release_later(reply.lease_id)

    def housekeeping(self) -> None:
        """Release what was dropped without a release, give back what nobody was told of."""
        for late in list(self.late.take()):
            late.lease.namespace.give_back_late(late)
        if self._unreleased:
            lease_ids = [lease_id for lease_id in self._drain_unreleased() if lease_id]
            self.release_ids(lease_ids)

    def _drain_unreleased(self) -> Iterator[int]:
        for _ in range(len(self._unreleased)):
            yield self._unreleased.popleft()
