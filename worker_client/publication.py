"""What a writer publishes, and what of it a daemon has not heard of yet (I2).

A completed block is published by the daemon's answer, never by its being sent: `Publications`
builds the batches, notes the answers in the leases, and keeps those that got none until a daemon
settles them. Each is then settled once: by the late answer to any of its messages, by the answer to
the batch when it is handed in again, or by the records that the daemon wrote before it died.

All with `Session.lock` held. `mirror.py` makes the copies that are reported here.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse_service.contract import limits
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    HiSparseError,
    InternalError,
    LeaseError,
    QuotaExceeded,
    ServiceUnavailable,
    StaleBlock,
    UsageError,
)
from hisparse_service.contract.messages import (
    CompletedItem,
    EnqueuedItem,
    MirrorBatch,
    MirrorReply,
    ReserveItem,
    u32_array,
)
from hisparse_service.contract.segment import BlockState
from worker_client.blocks import BlockLease, LeaseState, U32Array
from worker_client.link import NamespaceLink, count_refused, live_id, raw

__all__ = [
    "Completed",
    "Enqueued",
    "HandedIn",
    "MirrorOutcome",
    "MirrorResult",
    "Publications",
    "Reservations",
]

_BEFORE_HAND_IN: Final = declare("client.before_hand_in")
_AFTER_HAND_IN: Final = declare("client.after_hand_in")

Reservations = Sequence[tuple[BlockLease, int]]
"""(lease, number of blocks) pairs that a batch reserves besides."""


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


class Publications:
    """Mirror batches of one namespace, and those that wait for a daemon.

    Args:
        link: The namespace's; borrowed.
    """

    def __init__(self, link: NamespaceLink) -> None:
        self._link = link
        self._queued: collections.deque[_QueuedBatch] = collections.deque()
        self._num_queued = 0
        self._handed_in: collections.deque[HandedIn] = collections.deque(
            maxlen=limits.MAX_QUEUED_MIRRORS
        )

    # --- a batch and its answer -----------------------------------------------------------------

    def batch(
        self,
        request_id: int,
        enqueued: Sequence[Enqueued],
        completed: Sequence[Completed],
        reserve: Reservations,
    ) -> MirrorBatch:
        """The message that reports these, publishes them, and reserves more."""
        link = self._link
        return MirrorBatch(
            request_id,
            link.namespace_id,
            link.key_space,
            [
                EnqueuedItem(
                    item.lease.lease_id, raw(item.blocks), raw(item.generations)
                )
                for item in enqueued
            ] if enqueued else [],
            [
                CompletedItem(
                    item.lease.lease_id, item.parent, item.parent_generation, raw(item.blocks),
                    raw(item.generations), item.keys,
                    b"" if item.checksums is None else item.checksums.astype("<u8").tobytes(),
                    item.keep_duplicates,
                )
                for item in completed
            ],
            [
                ReserveItem(live_id(lease), count)
                for lease, count in reserve
                if 0 < count <= limits.MAX_RESERVE_BLOCKS or _refuse_count(count)
            ],
        )  # fmt: skip

    def note_published(
        self, completed: Sequence[Completed], reply: MirrorReply
    ) -> tuple[U32Array, U32Array]:
        """Move published blocks from reserved to pinned; gives the canonical ones.

        Raises:
            InternalError: The answer is not one to these.
        """
        link = self._link
        blocks = link.checked_blocks(reply.canonical_blocks)
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
        link.counters.add_mirrored(len(blocks), len(blocks) * link.geometry.block_stride_bytes)
        return blocks, generations

    def note_reserved(
        self, reserve: Reservations, reply: MirrorReply
    ) -> list[tuple[U32Array, U32Array]]:
        """Add what was reserved besides to its leases; gives (blocks, generations) of each.

        Raises:
            InternalError: The answer is not one to these.
        """
        link = self._link
        if len(reply.reserved) != len(reserve):
            raise InternalError(f"the daemon answered {len(reply.reserved)} reservations")
        results = []
        for (lease, _), item in zip(reserve, reply.reserved, strict=True):
            blocks = link.checked_blocks(item.blocks)
            generations = u32_array(item.generations, what="generations")
            if len(blocks):
                lease._add("reserved", blocks, generations)
                lease.deadline_ns = reply.lease_deadline_ns
                link.leases.remember(lease, item.lease_id)
            results.append((blocks, generations))
        return results

    # --- what waits for a daemon ----------------------------------------------------------------

    def queue(self, enqueued: list[Enqueued], completed: list[Completed], request_id: int) -> None:
        """Keep a batch that got no answer; `request_id` 0: it was not sent either.

        Raises:
            QuotaExceeded: MAX_QUEUED_MIRRORS blocks are kept already; these are not.
        """
        count = _count(enqueued, completed)
        if not count:
            return
        if self._num_queued + count > limits.MAX_QUEUED_MIRRORS:
            self._link.counters.add("mirrors_lost", count)
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
        self._link.counters.add("mirrors_queued", count)

    def take_handed_in(self) -> list[HandedIn]:
        """What became of queued mirrors since the last call, in their order."""
        results = list(self._handed_in)
        self._handed_in.clear()
        return results

    def settle_late(self, reply: MirrorReply) -> None:
        """The answer to a mirror batch that was queued because it came too late."""
        for batch in self._queued:
            if reply.request_id in batch.request_ids:
                self._unqueue(batch)
                self._settle(batch, reply)
                return

    def hand_in(self) -> None:
        """Send what is queued, oldest first; stops at the first that gets no answer.

        Raises:
            ServiceUnavailable: It got none.
        """
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
        def build(request_id: int) -> MirrorBatch:
            batch.request_ids.append(request_id)
            return self.batch(request_id, batch.enqueued, batch.completed, ())

        return self._link.request(build, MirrorReply)

    def _settle(self, batch: _QueuedBatch, reply: MirrorReply) -> None:
        blocks, generations = self.note_published(batch.completed, reply)
        self._link.counters.add("mirrors_handed_in", len(blocks))
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
                self._link.pin(item.lease, raw(item.blocks), raw(item.generations), timeout_s=None)
                result = (item.blocks, item.generations)
            except (StaleBlock, UsageError, LeaseError):
                result = None
        name = "mirrors_handed_in" if result else "mirrors_lost"
        self._link.counters.add(name, len(item.blocks))
        self._handed_in.append(
            HandedIn(
                completed=item,
                canonical_blocks=result[0] if result else None,
                canonical_generations=result[1] if result else None,
            )
        )

    def _is_published(self, item: Completed) -> bool:
        pool = self._link.pool
        if pool is None or pool.is_closed:
            return False
        records = pool.table[item.blocks]
        keys = np.frombuffer(item.keys, "<u8").reshape(-1, 2)
        return bool(
            (records["state"] == BlockState.PUBLISHED).all()
            and (records["generation"] == item.generations).all()
            and (records["key_low"] == keys[:, 0]).all()
            and (records["key_high"] == keys[:, 1]).all()
        )


def _refuse_count(count: int) -> bool:
    raise count_refused("a reservation of a mirror batch", count, limits.MAX_RESERVE_BLOCKS)


def _count(enqueued: Sequence[Enqueued], completed: Sequence[Completed]) -> int:
    count = 0
    for item in enqueued:
        count += len(item.blocks)
    for done in completed:
        count += len(done.blocks)
    return count
