"""Leases of blocks, and the check that keeps stale bytes out (I3). Signatures first."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from worker_client.client import Namespace

U32Array = npt.NDArray[np.uint32]


class LeaseState(enum.Enum):
    """GRANTED -> RELEASED (by us), EXPIRED (its deadline passed), REVOKED (the daemon ended it)."""

    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class BlockLease:
    """Blocks that one request holds: pinned ones to read, reserved ones to write.

    Made by `Namespace.lookup`, `reserve` and `pin`. Renewed in the background until `release`.
    """

    namespace: Namespace
    lease_id: int
    epoch: int
    deadline_ns: int
    state: LeaseState

    @property
    def blocks(self) -> U32Array:
        """u32 [num_pinned]: readable blocks in the order they were pinned; read-only."""
        raise NotImplementedError

    @property
    def generations(self) -> U32Array:
        """u32 [num_pinned]: their generations."""
        raise NotImplementedError

    @property
    def reserved_blocks(self) -> U32Array:
        """u32 [num_reserved]: blocks to write, in the order they were reserved."""
        raise NotImplementedError

    @property
    def reserved_generations(self) -> U32Array:
        """u32 [num_reserved]: their generations."""
        raise NotImplementedError

    def check(self, blocks: U32Array | None = None) -> None:
        """Refuse pinned blocks whose bytes must not be used; asks shared memory, not the daemon.

        Raises:
            LeaseExpired, LeaseLost, StaleBlock, NotHeld (a block that is not pinned here).
        """
        raise NotImplementedError

    def read_guard(self, blocks: U32Array | None = None) -> ReadGuard:
        """`with lease.read_guard(): copy` - `check` before and after (I3)."""
        raise NotImplementedError

    def release(self) -> None:
        """End the pins and give the reserved blocks back. Idempotent, never waits for a dead daemon."""
        raise NotImplementedError


class ReadGuard:
    """Checks on entry and on a clean exit."""

    def __enter__(self) -> BlockLease:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        raise NotImplementedError


class WriterLease(msgspec.Struct):
    """The group's writer lease; renewed in the background until `Namespace.yield_writer`."""

    lease_id: int
    epoch: int
    deadline_ns: int
    state: LeaseState = LeaseState.GRANTED
