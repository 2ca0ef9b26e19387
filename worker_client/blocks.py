"""Leases of blocks, and the check that keeps stale bytes out (I3).

A lease holds blocks for one request: *pinned* ones to read, *reserved* ones to write. What it holds
changes under `Session.lock`; `BlockLease.check` takes no lock and sends no message: it compares the
pinned (block, generation) pairs with the block table in shared memory, so a read can be checked
before and after at the price of two gathers.

    GRANTED --release--> RELEASED    --deadline passed--> EXPIRED    --daemon ended it--> REVOKED

While the daemon is away nobody renews and nobody evicts: a deadline that passes then ends nothing,
the generations alone decide, and the next daemon's answer settles the lease.

Any thread may check; a lease is changed by the thread of its request.
"""

from __future__ import annotations

import enum
import time
import warnings
from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse_service.contract.errors import (
    InternalError,
    LeaseError,
    LeaseExpired,
    LeaseLost,
    NotHeld,
    StaleBlock,
    UsageError,
)
from hisparse_service.contract.segment import BlockState

if TYPE_CHECKING:
    from worker_client.client import Namespace

U32Array = npt.NDArray[np.uint32]


class LeaseState(enum.Enum):
    """What became of a lease; see the module's header for the transitions."""

    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


_TRANSITIONS: Final = {
    LeaseState.GRANTED: (LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED),
    LeaseState.EXPIRED: (LeaseState.RELEASED, LeaseState.REVOKED),
    LeaseState.REVOKED: (LeaseState.RELEASED,),
    LeaseState.RELEASED: (),
}


def empty_blocks() -> U32Array:
    """u32 [0], read-only."""
    return _EMPTY


def as_blocks(blocks: npt.ArrayLike, what: str) -> U32Array:
    """u32 [n], contiguous. Wider integers are taken when their values fit.

    Raises:
        UsageError: Not one-dimensional integers between 0 and 2**32 - 1.
    """
    array = np.asarray(blocks)
    if array.dtype == np.uint32 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{what}: expected one row of integers, got {array.dtype} {array.shape}")
    if array.dtype != np.uint32 and array.size and not 0 <= array.min() <= array.max() < 2**32:
        raise UsageError(f"{what} lie between 0 and 2**32 - 1")
    return np.ascontiguousarray(array, np.uint32)


def _frozen(array: U32Array) -> U32Array:
    array.flags.writeable = False
    return array


def _kept(array: U32Array) -> U32Array:
    """The array itself where nobody can write to it, else a copy."""
    return _frozen(array.copy()) if array.flags.writeable else array


_MIN_ROOM: Final = 64
"""Blocks that a lease can pin more before its arrays are copied."""
_EMPTY: Final = _frozen(np.empty(0, np.uint32))
_NOTHING: Final = (_EMPTY, _EMPTY)


class BlockLease:
    """Blocks that one request holds: pinned ones to read, reserved ones to write.

    Made by `Namespace.lookup`, `reserve` and `pin`; renewed in the background until `release`.

    Attributes:
        namespace: Whose blocks these are.
        lease_id: The daemon's number in this epoch; 0 while it holds nothing.
        epoch: The daemon that granted it last.
        deadline_ns: CLOCK_MONOTONIC; moves as it is renewed.
        state: See `LeaseState`.
    """

    __slots__ = (
        "__weakref__", "_by_block", "_pinned", "_reserved", "_room", "deadline_ns", "epoch",
        "lease_id", "lost_blocks", "namespace", "state",
    )  # fmt: skip

    def __init__(self, namespace: Namespace, *, epoch: int) -> None:
        self.namespace = namespace
        self.lease_id = 0
        self.epoch = epoch
        self.deadline_ns = 0
        self.state = LeaseState.GRANTED
        self.lost_blocks: U32Array = _EMPTY
        """Reserved blocks that a new session did not get back: write and publish others."""
        self._pinned = _NOTHING
        self._reserved = _NOTHING
        self._room: U32Array | None = None
        """u32 [2, capacity]: what `_pinned` shows the beginning of, where it grows."""
        self._by_block: tuple[U32Array, U32Array, U32Array] | None = None

    @property
    def blocks(self) -> U32Array:
        """u32 [num_pinned]: readable blocks in the order they were pinned; read-only."""
        return self._pinned[0]

    @property
    def generations(self) -> U32Array:
        """u32 [num_pinned]: their generations."""
        return self._pinned[1]

    @property
    def reserved_blocks(self) -> U32Array:
        """u32 [num_reserved]: blocks to write, in the order they were reserved."""
        return self._reserved[0]

    @property
    def reserved_generations(self) -> U32Array:
        """u32 [num_reserved]: their generations."""
        return self._reserved[1]

    # --- reading --------------------------------------------------------------------------------

    def check(self, blocks: npt.ArrayLike | None = None) -> None:
        """Refuse pinned blocks whose bytes must not be used (any more).

        Args:
            blocks: Some of `self.blocks`; all of them when None.

        Raises:
            LeaseExpired: The deadline passed and the daemon is there to enforce it.
            LeaseLost: Released, or ended by the daemon.
            StaleBlock: A block was evicted, rewritten, or is of another epoch.
            NotHeld: A block that is not pinned by this lease.
        """
        self.require_granted()
        if not len(self.blocks) and blocks is None:
            return
        if self._is_of_another_epoch():
            self.namespace.wait_attached()
            self.require_granted()
            if self._is_of_another_epoch():
                raise StaleBlock(f"lease {self.lease_id} is of another epoch", remedy=_LOOK_UP)
        if time.monotonic_ns() >= self.deadline_ns and self.namespace.is_daemon_there:
            raise self._expire()
        held, generations = self._pinned
        if blocks is not None:
            held, generations = self._generations_of(as_blocks(blocks, "blocks"))
        table = self.namespace.require_pool().table
        good = (table["generation"][held] == generations) & (table["state"][held] == _PUBLISHED)
        if not good.all():
            self.namespace.counters.add("stale_reads")
            first = int(np.argmin(good))
            record = table[held[first]]
            raise StaleBlock(
                f"block {held[first]}: generation {record['generation']} in state "
                f"{record['state']}, the lease has generation {generations[first]}",
                remedy=_LOOK_UP, block=int(held[first]), generation=int(generations[first]),
                found_generation=int(record["generation"]), found_state=int(record["state"]),
            )  # fmt: skip

    def verify(self, blocks: npt.ArrayLike | None = None) -> None:
        """`check`, and compare the bytes with the checksums that their writers gave.

        About 1 ms a MB: for whoever would rather compute a prefix anew than read a flipped bit.
        Damaged blocks are reported, and the daemon takes them away from everybody. Blocks that were
        published without a checksum are only checked.

        Args:
            blocks: Some of `self.blocks`; all of them when None.

        Raises:
            DamagedBlock: Bytes that do not fit.
            StaleBlock, LeaseError, NotHeld: As of `check`.
        """
        from worker_client import damage  # which needs this module

        self.check(blocks)
        held, generations = self._pinned
        if blocks is not None:
            held, generations = self._generations_of(as_blocks(blocks, "blocks"))
        wrong = damage.find_damaged(self.namespace, held)
        # A block that was given to another meanwhile has other bytes, rightly.
        self.check(blocks)
        if wrong.any():
            raise damage.refuse(self.namespace, held[wrong], generations[wrong])

    def read_guard(self, blocks: npt.ArrayLike | None = None) -> ReadGuard:
        """``with lease.read_guard(): copy``: `check` before, and after where the copy succeeded.

        Bytes that were copied inside are good only once the block was left without an error.
        """
        return ReadGuard(self, None if blocks is None else as_blocks(blocks, "blocks"))

    def require_granted(self) -> None:
        """Raise what fits the state unless the lease is good.

        Raises:
            LeaseExpired, LeaseLost: See `check`.
        """
        if self.state is LeaseState.GRANTED:
            return
        if self.state is LeaseState.EXPIRED:
            raise _expired(self.lease_id)
        raise LeaseLost(
            f"lease {self.lease_id} was {self.state.value}", remedy="Look the keys up again"
        )

    def release(self) -> None:
        """End the pins and give the reserved blocks back. Idempotent, needs no daemon.

        No copy into a reserved block may be in flight: the block may be another writer's at once.
        """
        self.namespace.release(self)

    def _is_of_another_epoch(self) -> bool:
        # Until a new daemon settled this lease, it is as if none were there.
        return self.epoch != self.namespace.session_epoch and self.namespace.is_daemon_there

    def _expire(self) -> LeaseError:
        with self.namespace.session_lock:
            # A renewal may have come in between.
            if self.state is LeaseState.GRANTED and time.monotonic_ns() < self.deadline_ns:
                return LeaseExpired(
                    f"lease {self.lease_id} was renewed too late for this read",
                    remedy="Read again",
                )
            if self.state is LeaseState.GRANTED:
                self._move(LeaseState.EXPIRED)
                self.namespace.counters.add("leases_lost")
        return _expired(self.lease_id)

    def _generations_of(self, blocks: U32Array) -> tuple[U32Array, U32Array]:
        by_block = self._by_block
        if by_block is None or by_block[0] is not self._pinned[0]:
            held, generations = self._pinned
            order = np.argsort(held, kind="stable")
            by_block = self._by_block = (held, held[order], generations[order])
        _, held, generations = by_block
        at = np.searchsorted(held, blocks)
        inside = at < len(held)
        if not inside.all() or (held[at] != blocks).any():
            raise NotHeld(
                f"lease {self.lease_id} does not pin all of the {len(blocks)} blocks asked for",
                remedy="Read only blocks of this lease's `blocks`",
            )
        return blocks, generations[at]

    # --- changes, with Session.lock held --------------------------------------------------------

    def _move(self, state: LeaseState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise InternalError(f"lease {self.lease_id}: {self.state.value} to {state.value}")
        self.state = state

    def _revoke(self) -> None:
        if self.state in (LeaseState.GRANTED, LeaseState.EXPIRED):
            self._move(LeaseState.REVOKED)
            self.namespace.counters.add("leases_lost")

    def _end(self) -> None:
        self._move(LeaseState.RELEASED)
        self._pinned = self._reserved = _NOTHING
        self._room = None

    def _add(
        self, part: Literal["pinned", "reserved"], blocks: U32Array, generations: U32Array
    ) -> None:
        if len(blocks) != len(generations):
            raise InternalError(
                f"the daemon sent {len(blocks)} blocks and {len(generations)} generations"
            )
        old = self._pinned if part == "pinned" else self._reserved
        if not len(old[0]):
            new = (_kept(blocks), _kept(generations))
        elif part == "pinned":
            new = self._grown(blocks, generations)
        else:
            new = (
                _frozen(np.concatenate((old[0], blocks), dtype=np.uint32)),
                _frozen(np.concatenate((old[1], generations), dtype=np.uint32)),
            )
        if part == "pinned":
            self._pinned = new
        else:
            self._reserved = new

    def _grown(self, blocks: U32Array, generations: U32Array) -> tuple[U32Array, U32Array]:
        """`_pinned` and these behind it.

        A request pins a block with every few steps: what is there is not copied each time. Who
        reads the arrays of before, without the lock, sees them unchanged.
        """
        held = len(self._pinned[0])
        end = held + len(blocks)
        room = self._room
        if room is None or end > room.shape[1]:
            room = self._room = np.empty((2, end + max(_MIN_ROOM, end // 4)), np.uint32)
            room[0, :held], room[1, :held] = self._pinned
        room[0, held:end] = blocks
        room[1, held:end] = generations
        return _frozen(room[0, :end]), _frozen(room[1, :end])

    def _drop(self, part: Literal["pinned", "reserved"], blocks: U32Array | None) -> None:
        old = self._pinned if part == "pinned" else self._reserved
        new = _NOTHING
        if blocks is not None and not (len(old[0]) == len(blocks) == 1 and old[0][0] == blocks[0]):
            stay = ~np.isin(old[0], blocks)
            new = (_frozen(old[0][stay]), _frozen(old[1][stay]))
        if part == "pinned":
            self._pinned = new
            self._room = None
        else:
            self._reserved = new

    def _add_new_pins(self, blocks: U32Array, generations: U32Array) -> None:
        """`_add` of those that are not pinned yet, as the daemon counts them."""
        new = ~np.isin(blocks, self._pinned[0])
        if new.any():
            self._add("pinned", blocks[new], generations[new])

    def _lose_reserved(self) -> tuple[U32Array, U32Array]:
        lost = self._reserved
        self.lost_blocks = _frozen(np.concatenate((self.lost_blocks, lost[0])))
        self._reserved = _NOTHING
        return lost

    def _regain_reserved(self, blocks: U32Array, generations: U32Array) -> None:
        self._add("reserved", blocks, generations)
        self.lost_blocks = _frozen(self.lost_blocks[~np.isin(self.lost_blocks, blocks)])

    def __del__(self) -> None:
        if self.lease_id == 0 or self.state in (LeaseState.RELEASED, LeaseState.REVOKED):
            return
        if self.namespace.is_closed:
            return
        if len(self._reserved[0]):
            # A copy may still be writing into them: only the session's end gives them back.
            warnings.warn(
                f"lease {self.lease_id} with {len(self._reserved[0])} reserved blocks was dropped "
                "without release()",
                ResourceWarning,
                stacklevel=2,
            )
            return
        self.namespace.release_later(self.lease_id)

    def __repr__(self) -> str:
        return (
            f"BlockLease({self.lease_id}, {self.state.value}, {len(self.blocks)} pinned, "
            f"{len(self.reserved_blocks)} reserved)"
        )


_PUBLISHED: Final = int(BlockState.PUBLISHED)
"""As a plain number: numpy takes 5 us to find out that an enum's member is one."""
_LOOK_UP: Final = "Do not use the bytes; look the keys up again"


def _expired(lease_id: int) -> LeaseExpired:
    return LeaseExpired(
        f"the deadline of lease {lease_id} passed",
        remedy="Do not use the bytes; look the keys up again",
    )


class ReadGuard:
    """Checks on entry, and on an exit without an error. Made by `BlockLease.read_guard`."""

    __slots__ = ("_blocks", "_lease")

    def __init__(self, lease: BlockLease, blocks: U32Array | None) -> None:
        self._lease = lease
        self._blocks = blocks

    def __enter__(self) -> BlockLease:
        # The same blocks are checked again at the end, whatever the lease gains or gives meanwhile.
        if self._blocks is None:
            self._blocks = self._lease.blocks
        self._lease.check(self._blocks)
        return self._lease

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is None:
            self._lease.check(self._blocks)


class WriterLease(msgspec.Struct):
    """The group's writer lease; renewed in the background until `Namespace.yield_writer`."""

    lease_id: int
    epoch: int
    deadline_ns: int
    state: LeaseState = LeaseState.GRANTED
