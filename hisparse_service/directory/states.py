"""The states of blocks and leases, and every legal change between them, as data in one place.

Who may call: `directory/` alone, on the daemon's control loop. `BlockState` itself is part of the
segment's layout (contract/segment.py), because workers read it from the block table.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.errors import IllegalTransition
from hisparse_service.contract.segment import BlockState


class BlockEvent(enum.IntEnum):
    """What can happen to a block."""

    RESERVE = 0
    """A session takes it to write."""
    ENQUEUE = 1
    """The writer put copies into its stream (again, for the rows that came since)."""
    PUBLISH = 2
    """The writer's CPU saw that every layer is complete."""
    ABANDON = 3
    """The writer gives it up unpublished, dies, or lost the race for its key."""
    EVICT = 4
    """A published block without readers and children is given up."""
    CLEAR = 5
    """The eviction is finished: its generation is bumped."""
    WITHDRAW = 6
    """Its bytes are damaged, or those of a block above it: nobody finds it any more, and it is
    cleared when nobody reads it any more."""


class LeaseState(enum.IntEnum):
    """State of a lease. All but GRANTED are final."""

    GRANTED = 0
    RELEASED = 1
    EXPIRED = 2
    REVOKED = 3


class LeaseEvent(enum.IntEnum):
    """What can happen to a lease."""

    RELEASE = 0
    """Its session gives it back."""
    EXPIRE = 1
    """Its deadline passed."""
    REVOKE = 2
    """Its session died or its namespace was dropped."""


BLOCK_TRANSITIONS: Final[dict[tuple[BlockState, BlockEvent], BlockState]] = {
    (BlockState.FREE, BlockEvent.RESERVE): BlockState.RESERVED,
    (BlockState.RESERVED, BlockEvent.ENQUEUE): BlockState.WRITING,
    # A block fills row by row: each decode step may enqueue more of it.
    (BlockState.WRITING, BlockEvent.ENQUEUE): BlockState.WRITING,
    (BlockState.RESERVED, BlockEvent.PUBLISH): BlockState.PUBLISHED,
    (BlockState.WRITING, BlockEvent.PUBLISH): BlockState.PUBLISHED,
    (BlockState.RESERVED, BlockEvent.ABANDON): BlockState.FREE,
    (BlockState.WRITING, BlockEvent.ABANDON): BlockState.FREE,
    (BlockState.PUBLISHED, BlockEvent.EVICT): BlockState.EVICTING,
    (BlockState.PUBLISHED, BlockEvent.WITHDRAW): BlockState.EVICTING,
    (BlockState.EVICTING, BlockEvent.CLEAR): BlockState.FREE,
}

LEASE_TRANSITIONS: Final[dict[tuple[LeaseState, LeaseEvent], LeaseState]] = {
    (LeaseState.GRANTED, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.GRANTED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.GRANTED, LeaseEvent.REVOKE): LeaseState.REVOKED,
}


def _allowed() -> npt.NDArray[np.bool_]:
    allowed = np.zeros((len(BlockEvent), 256), dtype=np.bool_)
    for state, event in BLOCK_TRANSITIONS:
        allowed[event, state] = True
    return allowed


BLOCK_EVENT_ALLOWED: Final = _allowed()
"""bool [events, 256]: row of an event, indexed by state bytes, for whole arrays at once."""


def next_block_state(state: int, event: BlockEvent, *, block: int) -> BlockState:
    """The state after `event`.

    Raises:
        IllegalTransition: The event is not allowed in this state.
    """
    after = BLOCK_TRANSITIONS.get((BlockState(state), event))
    if after is None:
        raise illegal_block_event(state, event, block=block)
    return after


def illegal_block_event(state: int, event: BlockEvent, *, block: int) -> IllegalTransition:
    """The error for an event that is not allowed."""
    name = BlockState(state).name
    return IllegalTransition(
        f"block {block} is {name}: {event.name} is not allowed",
        remedy="A block is published once; look at what this caller did with it before",
        block=block,
        state=name,
        event=event.name,
    )


def next_lease_state(state: LeaseState, event: LeaseEvent, *, lease: int) -> LeaseState:
    """The state after `event`.

    Raises:
        IllegalTransition: The event is not allowed in this state.
    """
    after = LEASE_TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransition(
            f"lease {lease} is {state.name}: {event.name} is not allowed",
            lease=lease,
            state=state.name,
            event=event.name,
        )
    return after
