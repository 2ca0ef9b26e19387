"""One `Namespace` a model and layout: what its engine asks for, block by block.

The object that engines, the coordinator and integrations hold. Its parts do the work: `link.py`
asks and notes answers, `attachment.py` maps and registers, `publication.py` keeps what is to be
published, `writer.py` holds the group's writer lease, `reattachment.py` makes all of it known to a
new daemon. What they hold changes with `Session.lock` held, also in the background thread.

No method here holds policy: what to reserve, mirror or evict is the coordinator's and the daemon's.
A decode step is one `mirror`: a call more on its way costs more than it looks (decision 0017), so
`reserve`, `lookup` and `mirror` stand here and call the parts directly.

Any thread; `attach` on the thread whose CUDA context the pool is for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import numpy.typing as npt

from hisparse_service.contract import limits
from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import HiSparseError, ServiceUnavailable, UsageError
from hisparse_service.contract.geometry import HostGeometry
from hisparse_service.contract.keys import KeyChain
from hisparse_service.contract.messages import (
    Abandon,
    CountReply,
    Done,
    Evict,
    Free,
    Lookup,
    MirrorBatch,
    MirrorReply,
    Request,
    Reserve,
    Unpin,
    u32_array,
)
from worker_client.attachment import ATTACH_TIMEOUT_S, TURN_TIMEOUT_S, Attachment
from worker_client.blocks import BlockLease, U32Array, WriterLease, as_blocks, empty_blocks
from worker_client.cuda_register import CudaUse, RegistrationDriver
from worker_client.damage import report_damage
from worker_client.device_backing import (
    CudaMemoryDriver,
    DeviceBacking,
    DeviceBackingMode,
    DeviceMemoryDriver,
)
from worker_client.host_pool import HostPool
from worker_client.late import Late
from worker_client.link import NamespaceLink, count_refused, keys_refused, live_id
from worker_client.publication import (
    Completed,
    Enqueued,
    HandedIn,
    MirrorOutcome,
    MirrorResult,
    Publications,
    Reservations,
)
from worker_client.reattachment import reattach
from worker_client.session import SessionState, WhenAway
from worker_client.writer import WriterSeat

if TYPE_CHECKING:
    import torch

    from worker_client.client import Client

__all__ = ["Namespace"]

_DEVICE_TIMEOUT_S: Final = 2 * limits.DEVICE_ANSWER_S
"""Longer than the daemon's own, so that its reason is heard."""
_MAX_KEYS_BYTES: Final = limits.MAX_KEYS * limits.BLOCK_KEY_BYTES
_BEFORE_MIRROR: Final = declare("client.before_mirror")
_AFTER_MIRROR: Final = declare("client.after_mirror")
_AFTER_QUEUED: Final = declare("client.after_mirror_queued")
_AFTER_PUBLISHED: Final = declare("client.after_mirror_noted")


class Namespace:
    """What this client shares blocks with. Made by `Client.open_namespace`. Any thread.

    Attributes:
        name: For people.
        fingerprint: 16 B: what may share blocks.
        geometry: Shape of the blocks.
    """

    def __init__(
        self, client: Client, *, name: str, fingerprint: bytes, geometry: HostGeometry
    ) -> None:
        self.client = client
        self.name = name
        self.fingerprint = fingerprint
        self.geometry = geometry
        self.counters = client.counters
        self._session = client.session
        self._leases = client.leases
        self._link = NamespaceLink(
            client.session, client.leases, name=name, fingerprint=fingerprint, geometry=geometry
        )
        self._attachment = Attachment(self._link)
        self._writer = WriterSeat(self._link)
        self._publications = Publications(self._link)

    @property
    def namespace_id(self) -> int:
        """The daemon's number for it in this epoch."""
        return self._link.namespace_id

    @property
    def pool(self) -> HostPool | None:
        """The mapped backing; None before `attach`."""
        return self._link.pool

    @property
    def writer(self) -> WriterLease | None:
        """The group's writer lease while this client holds it."""
        return self._writer.lease

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
        """Wait until a new session knows all of this client's: it holds the lock until then."""
        with self._session.lock:
            pass

    def require_pool(self) -> HostPool:
        """The mapped backing.

        Raises:
            UsageError: Not attached.
        """
        pool = self._link.pool
        if pool is None:
            raise UsageError(f"namespace {self.name!r} is not attached", remedy="Call attach first")
        return pool

    def release_later(self, lease_id: int) -> None:
        """A lease was dropped without release; from a finaliser, so nothing is sent here."""
        self._leases.release_later(lease_id)

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
        timeout_s: float = ATTACH_TIMEOUT_S,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> HostPool:
        """Map the backing, touch its page tables, register it with CUDA. Idempotent.

        What it waits for others is bounded by the two time-outs together; its own work takes as
        long as it takes, about 0.1 s a GiB. A second attach of the same namespace, by another
        thread, waits for the first and gives its pool.

        Args:
            num_blocks: Null block included. Fewer than the backing has gives all of it.
            cuda: Whether to register.
            driver: Stands in for the CUDA driver.
            timeout_s: For all answers of the daemon together. Mapping, registering and the wait for
                the turn do not count.
            turn_timeout_s: For the turn to register, behind the sessions that are ahead. Only where
                something is registered.

        Returns:
            The same `HostPool` each time until its `cleanup`.

        Raises:
            UsageError: `num_blocks` is not within 1 to MAX_BLOCKS_PER_BACKING.
            ServiceUnavailable: No answer, or no turn, in time; nothing stays mapped.
            GeometryMismatch: More blocks than the backing has.
            CapacityError: The pool has no room for it.
            CorruptSegmentError: The segment fails its checks.
            DeviceError: It could not be registered; nothing stays mapped.
        """
        if not 0 < num_blocks <= limits.MAX_BLOCKS_PER_BACKING:
            raise count_refused("attach", num_blocks, limits.MAX_BLOCKS_PER_BACKING)
        return self._attachment.attach(
            num_blocks, cuda=cuda, driver=driver, timeout_s=timeout_s, turn_timeout_s=turn_timeout_s
        )

    def registration_turn(
        self, *, timeout_s: float = TURN_TIMEOUT_S
    ) -> AbstractContextManager[None]:
        """Wait for the turn to register pages with CUDA; give it back at the end.

        Many ranks that register the same pages at once fail with ENOMEM, a page-migration race.

        Raises:
            ServiceUnavailable: Not granted before the deadline.
        """
        return self._attachment.registration_turn(timeout_s=timeout_s)

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
            return self._writer.take()

    def yield_writer(self) -> None:
        """Give the writer lease back. Idempotent; with the daemon away it ends by itself."""
        with self._session.lock:
            self._writer.give_back()

    # --- blocks ---------------------------------------------------------------------------------

    def reserve(
        self, num_blocks: int, *, lease: BlockLease | None = None, timeout_s: float | None = None
    ) -> BlockLease:
        """Take free blocks to write: the last `num_blocks` of the lease's `reserved_blocks`.

        Raises:
            UsageError: `num_blocks` is not within 1 to MAX_RESERVE_BLOCKS.
            CapacityError: Not enough are free or can be evicted; nothing changed.
            LeaseError: This client is not the group's writer, or the lease ended.
            ServiceUnavailable: No answer before the deadline.
        """
        if not 0 < num_blocks <= limits.MAX_RESERVE_BLOCKS:
            raise count_refused("reserve", num_blocks, limits.MAX_RESERVE_BLOCKS)
        with self._session.lock:
            lease = self._usable_lease(lease)
            reply = self._link.request_blocks(
                lambda request_id: Reserve(
                    request_id, self._link.namespace_id, live_id(lease), num_blocks
                ),
                "reserved",
                timeout_s=timeout_s,
            )
            self._link.take_blocks(lease, "reserved", reply)
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
            UsageError: No whole keys, or more than MAX_KEYS.
            ServiceUnavailable: No answer before the deadline; nothing is pinned, what a late answer
                pins goes back.
        """
        space = self._link.key_space
        if isinstance(keys, KeyChain):
            data, space = keys.keys(start, stop), keys.key_space
        else:
            width = limits.BLOCK_KEY_BYTES
            data = keys[start * width : None if stop is None else stop * width]
        size = len(data)
        if size % limits.BLOCK_KEY_BYTES or size > _MAX_KEYS_BYTES:
            raise keys_refused(size)
        with self._session.lock:
            lease = self._usable_lease(lease)
            reply = self._link.request_blocks(
                lambda request_id: Lookup(
                    request_id, self._link.namespace_id, live_id(lease), space, data
                ),
                "pinned",
                timeout_s=timeout_s,
            )
            self._link.take_blocks(lease, "pinned", reply)
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
            UsageError: No whole keys, or more than MAX_KEYS.
            ServiceUnavailable: The daemon is away, or gave no answer before the deadline.
        """
        size = len(keys)
        if size % limits.BLOCK_KEY_BYTES or size > _MAX_KEYS_BYTES:
            raise keys_refused(size)
        if self._session.state is SessionState.AWAY:
            # Before the lock is asked for: who looks up again and again would keep it from the
            # thread that revives the session.
            raise self._session.away_error()
        with self._session.lock:
            self._usable_lease(lease)
            reply = self._link.request_blocks(
                lambda request_id: Lookup(
                    request_id, self._link.namespace_id, live_id(lease), self._link.key_space, keys
                ),
                "pinned",
                timeout_s=timeout_s, when_away=WhenAway.FAIL,
            )  # fmt: skip
            blocks = self._link.checked_blocks(reply.blocks)
            generations = u32_array(reply.generations, what="generations")
            lease._add_new_pins(blocks, generations)
            self._link.note_lease(lease, reply)
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
            ServiceUnavailable: As of `lookup`.
        """
        raw_blocks = as_blocks(blocks, "blocks").tobytes()
        raw_generations = as_blocks(generations, "generations").tobytes()
        with self._session.lock:
            lease = self._usable_lease(lease)
            self._link.pin(lease, raw_blocks, raw_generations, timeout_s=timeout_s)
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
                self._link.request(
                    lambda request_id: Unpin(
                        request_id, self._link.namespace_id, live_id(lease), array.tobytes()
                    ),
                    Done,
                    timeout_s=timeout_s,
                )
            except ServiceUnavailable:
                self._leases.late.took(lease, "pinned", array)
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
                    self._link.request(
                        lambda request_id: Abandon(
                            request_id, self._link.namespace_id, live_id(lease), array.tobytes()
                        ),
                        Done,
                        timeout_s=timeout_s,
                    )
            except ServiceUnavailable:
                self._leases.late.took(lease, "reserved", given)
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
            self._link.request(
                lambda request_id: Free(
                    request_id, self._link.namespace_id, live_id(lease), array.tobytes()
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
                return Evict(request_id, self._link.namespace_id, wanted)

            count = self._link.request(build, CountReply).count
            gone += count
            if count < wanted:
                break
        return gone

    def release(self, *leases: BlockLease) -> None:
        """End leases, in one message. Idempotent, and never waits for a daemon that is away.

        Their pins end, their reserved blocks return: no copy into those may be in flight.
        """
        with self._session.lock:
            lease_ids = [lease.lease_id for lease in leases if self._leases.forget(lease)]
            self._leases.release_ids([lease_id for lease_id in lease_ids if lease_id])

    # --- damage ---------------------------------------------------------------------------------

    def report_damage(
        self, blocks: npt.ArrayLike, generations: npt.ArrayLike, *, timeout_s: float | None = None
    ) -> list[Verdict]:
        """Have the daemon check published blocks whose bytes look wrong; see `damage.py`.

        Raises:
            ServiceUnavailable: No answer before the deadline. The daemon may still carry it out.
        """
        return report_damage(self, blocks, generations, timeout_s=timeout_s)

    def take_lost_pins(self) -> dict[int, int]:
        """Block to generation of what this client pins and the daemon withdrew as damaged.

        For processes that do not map the pool; `BlockLease.check` sees it at once. Told with each
        heartbeat until they are unpinned. A restarted daemon is not asked for them again.
        """
        with self._session.lock:
            lost = self._leases.take_lost_pins(self._link.namespace_id)
            self._link.given_up.update(lost.items())
            return lost

    # --- mirrors --------------------------------------------------------------------------------

    def mirror(
        self,
        *,
        enqueued: Sequence[Enqueued] = (),
        completed: Sequence[Completed] = (),
        reserve: Reservations = (),
        timeout_s: float | None = None,
    ) -> MirrorResult:
        """Report mirrors, publish completed blocks, reserve more: one message a decode step.

        Completed blocks leave `lease.reserved_blocks`, their canonical blocks join `lease.blocks`.
        While the daemon is away nothing waits: mirrors are kept (QUEUED) and nothing is reserved.
        So are those without an answer before the deadline; an answer that comes later settles them.

        Raises:
            QuotaExceeded: MAX_QUEUED_MIRRORS blocks are kept already; these are not.
            UsageError: A reservation is not of 1 to MAX_RESERVE_BLOCKS blocks; or the daemon's.
            LeaseError: The daemon's. Nothing changed, as after each UsageError.
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
                return self._publications.batch(request_id, enqueued, completed, reserve)

            try:
                reply = self._link.request(
                    build, MirrorReply, timeout_s=timeout_s, when_away=WhenAway.FAIL
                )
            except ServiceUnavailable:
                self._publications.queue(list(enqueued), list(completed), sent_id)
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
                    self._publications.queue(list(enqueued), list(completed), sent_id)
                raise
            crash_point(_AFTER_MIRROR)
            blocks, generations = self._publications.note_published(completed, reply)
            crash_point(_AFTER_PUBLISHED)
            return MirrorResult(
                outcome=MirrorOutcome.ACKNOWLEDGED, canonical_blocks=blocks,
                canonical_generations=generations,
                reserved=self._publications.note_reserved(reserve, reply), num_free=reply.num_free,
            )  # fmt: skip

    def handed_in(self) -> list[HandedIn]:
        """What became of queued mirrors since the last call, in their order."""
        with self._session.lock:
            return self._publications.take_handed_in()

    # --- for the client: after the daemon was away; Session.lock is held -----------------------

    def _open(self) -> None:
        """Tell the daemon of this namespace; learns its number in this epoch."""
        self._link.open()

    def _reattach(self) -> None:
        """Make this namespace, its writer and its leases known to a new session."""
        reattach(self._link, self._writer, self._leases.leases_of(self))

    def _hand_in(self) -> None:
        """Send the mirrors that are queued, oldest first; stops at one that gets no answer."""
        self._publications.hand_in()

    def _settle_late(self, reply: MirrorReply) -> None:
        """The answer to a mirror batch that was queued because it came too late."""
        self._publications.settle_late(reply)

    def _give_back_late(self, late: Late) -> None:
        """Blocks that the daemon counts to a lease and that nobody was told of."""
        self._link.give_back_late(late)

    def _detach(self) -> None:
        """Give the pool up for good: the client closes."""
        self._attachment.close()

    def _usable_lease(self, lease: BlockLease | None) -> BlockLease:
        if lease is None:
            return BlockLease(self, epoch=self._session.epoch)
        if lease.namespace is not self:
            raise UsageError(f"lease {lease.lease_id} is of namespace {lease.namespace.name!r}")
        lease.require_granted()
        return lease
