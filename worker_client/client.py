"""The client's objects: Client, Namespace, and what travels between them. Signatures first."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse_service.contract.geometry import HostGeometry
from hisparse_service.contract.keys import KeyChain
from hisparse_service.contract.messages import Event
from worker_client.blocks import BlockLease, U32Array, WriterLease
from worker_client.host_pool import HostPool


class CudaUse(enum.Enum):
    """Whether `attach` registers the mapping with CUDA."""

    AUTO = "auto"
    """Register where a CUDA device is visible; a failure is an error."""
    REQUIRED = "required"
    OFF = "off"


class Enqueued(msgspec.Struct, frozen=True, kw_only=True):
    """Reserved blocks of a lease whose copies are in stream order."""

    lease: BlockLease
    blocks: U32Array
    generations: U32Array


class Completed(msgspec.Struct, frozen=True, kw_only=True):
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


class MirrorOutcome(enum.Enum):
    """ACKNOWLEDGED: published. QUEUED: the daemon is away; handed in when it is back."""

    ACKNOWLEDGED = "acknowledged"
    QUEUED = "queued"


class MirrorResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one `Namespace.mirror` did."""

    outcome: MirrorOutcome
    canonical_blocks: U32Array
    """u32: for each completed block in order, the block that holds its key now; empty if QUEUED."""
    canonical_generations: U32Array
    reserved: list[tuple[U32Array, U32Array]]
    """(blocks, generations) for each requested reservation; empty arrays where there was no room."""
    num_free: int


class HandedIn(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of one queued `Completed`: published (canonical arrays) or lost (None)."""

    completed: Completed
    canonical_blocks: U32Array | None
    canonical_generations: U32Array | None


class Namespace:
    """What this client may share blocks with. Made by `Client.open_namespace`. Any thread."""

    name: str
    fingerprint: bytes
    geometry: HostGeometry
    namespace_id: int
    """The daemon's number for it in this epoch."""
    pool: HostPool | None
    """Set by `attach`."""
    writer: WriterLease | None

    def key_chain(self, *, salt: bytes = b"") -> KeyChain:
        """An empty chain for one request."""
        raise NotImplementedError

    def attach(self, num_blocks: int, *, cuda: CudaUse = CudaUse.AUTO) -> HostPool:
        """Map the backing (null block included). Idempotent: the same `HostPool` again."""
        raise NotImplementedError

    @contextmanager
    def registration_turn(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Wait for the turn to register pages with CUDA, and give it back."""
        raise NotImplementedError

    def take_writer(self) -> WriterLease:
        """Become the group's writer. Raises WriterTaken. Idempotent."""
        raise NotImplementedError

    def yield_writer(self) -> None:
        """Give the writer lease back. Idempotent."""
        raise NotImplementedError

    def reserve(
        self, num_blocks: int, *, lease: BlockLease | None = None, timeout_s: float | None = None
    ) -> BlockLease:
        """Take free blocks to write: the last `num_blocks` of `lease.reserved_blocks`.

        Raises:
            CapacityError (nothing changed), LeaseError (not the writer), ServiceUnavailable.
        """
        raise NotImplementedError

    def lookup(
        self,
        keys: KeyChain | bytes,
        *,
        lease: BlockLease | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> BlockLease:
        """Pin the longest published prefix of keys [start, stop): appended to `lease.blocks`.

        Without a hit the lease has no blocks and id 0; it can be used all the same.
        """
        raise NotImplementedError

    def pin(
        self, blocks: U32Array, generations: U32Array, *, lease: BlockLease | None = None
    ) -> BlockLease:
        """Pin published blocks by id. Raises StaleBlock where a generation no longer matches."""
        raise NotImplementedError

    def unpin(self, lease: BlockLease, blocks: U32Array) -> None:
        """End the lease's pins on these blocks."""
        raise NotImplementedError

    def mirror(
        self,
        *,
        enqueued: Sequence[Enqueued] = (),
        completed: Sequence[Completed] = (),
        reserve: Sequence[tuple[BlockLease, int]] = (),
    ) -> MirrorResult:
        """Report mirrors, publish completed blocks, reserve more: one message.

        Completed blocks leave `lease.reserved_blocks`; their canonical blocks join `lease.blocks`.
        While the daemon is away, completed ones are kept (QUEUED) and nothing waits.
        """
        raise NotImplementedError

    def handed_in(self) -> list[HandedIn]:
        """What became of queued mirrors since the last call."""
        raise NotImplementedError

    def abandon(self, lease: BlockLease, blocks: U32Array | None = None) -> None:
        """Give reserved blocks back unpublished; all of the lease's when None."""
        raise NotImplementedError

    def free(self, lease: BlockLease, blocks: U32Array) -> None:
        """Give back blocks that the lease holds: reserved ones return, pinned ones are forgotten."""
        raise NotImplementedError

    def release(self, *leases: BlockLease) -> None:
        """End leases, in one message. Idempotent."""
        raise NotImplementedError


class EventStream:
    """Iterator over the daemon's events; a bounded queue, so events may be missed. One thread."""

    def next(self, *, timeout_s: float) -> Event | None:
        """The next event, or None at the deadline."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Event]:
        raise NotImplementedError

    def __enter__(self) -> EventStream:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Idempotent."""
        raise NotImplementedError


class Client:
    """One connection of this process to the daemon. Made by `worker_client.connect`. Any thread."""

    endpoint: str
    epoch: int
    session_id: int
    instance: str

    def ping(self, *, timeout_s: float | None = None) -> None:
        """One round trip."""
        raise NotImplementedError

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
        """Name what may share blocks. Idempotent. Raises GeometryMismatch."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """What `hisparse-service status --json` prints."""
        raise NotImplementedError

    def events(self, *topics: bytes, max_queued: int = 1000) -> EventStream:
        """Subscribe (all topics when none is named)."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave: leases end, mappings go. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Client:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError
