"""Pages of requests: their states, and the pool of device blocks that they live in.

Bookkeeping of the coordinator, without tensors and without a service: integers in, integers out.
One transition table says what may happen to a page; nothing else decides it. Used by the
coordinator's parts alone, on the engine's thread.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hisparse_service.contract.errors import (
    CapacityError,
    IllegalTransition,
    NotHeld,
    UsageError,
)
from hisparse_service.contract.limits import MAX_BLOCKS_PER_BACKING


class PageState(enum.Enum):
    """Where the rows of a page are, and whether they may leave the device."""

    FILLING = "filling"
    """Rows are still being written; device only."""
    SEALED = "sealed"
    """All rows are accepted; the device has the only copy that we know of."""
    MIRRORING = "mirroring"
    """The copies of every layer, draft layers included, are in stream order."""
    COMPLETED = "completed"
    """The CPU saw those copies complete; the service has not yet said that they are published."""
    CLEAN = "clean"
    """Published, and on the device too."""
    SPILLED = "spilled"
    """Published, in host memory only."""
    RESTORING = "restoring"
    """Published; the copy back to the device is in stream order."""


class PageEvent(enum.Enum):
    """What happens to a page."""

    SEAL = "seal"
    ENQUEUE = "enqueue"
    COMPLETE = "complete"
    PUBLISH = "publish"
    SPILL = "spill"
    RESTORE = "restore"
    RESTORED = "restored"
    RECALL = "recall"
    """The service does not have the page: it must be mirrored again."""


TRANSITIONS: Final[Mapping[tuple[PageState, PageEvent], PageState]] = {
    (PageState.FILLING, PageEvent.SEAL): PageState.SEALED,
    (PageState.SEALED, PageEvent.ENQUEUE): PageState.MIRRORING,
    (PageState.MIRRORING, PageEvent.COMPLETE): PageState.COMPLETED,
    (PageState.COMPLETED, PageEvent.PUBLISH): PageState.CLEAN,
    # A reader mirrors nothing: it finds what the group's writer published.
    (PageState.SEALED, PageEvent.PUBLISH): PageState.CLEAN,
    (PageState.CLEAN, PageEvent.SPILL): PageState.SPILLED,
    (PageState.SPILLED, PageEvent.RESTORE): PageState.RESTORING,
    (PageState.RESTORING, PageEvent.RESTORED): PageState.CLEAN,
    (PageState.MIRRORING, PageEvent.RECALL): PageState.SEALED,
    (PageState.COMPLETED, PageEvent.RECALL): PageState.SEALED,
}
"""Anything else is an `IllegalTransition`. SPILL is legal in CLEAN alone: a page whose host copy is
not published never leaves the device."""

PUBLISHED_STATES: Final = frozenset({PageState.CLEAN, PageState.SPILLED, PageState.RESTORING})


@dataclass(slots=True, eq=False)
class Page:
    """One block of tokens. Requests that share a published prefix share the object.

    Attributes:
        index: Position in its requests, counted in blocks from 0.
        state: See `PageState`; changed by `fire` alone.
        host_block: Host block of its rows, 0 while it has none (a reader before publication).
        generation: That block's generation.
        resident_blocks: One device block a resident group; empty where the page is not resident.
        indexer_block: Device block of its indexer keys, 0 before they are there.
        owners: Names of the requests whose context it is part of.
        sealed_step: Step after which its rows were final; 0 for a page that was found.
    """

    index: int
    state: PageState = PageState.FILLING
    host_block: int = 0
    generation: int = 0
    resident_blocks: tuple[int, ...] = ()
    indexer_block: int = 0
    owners: set[str] = field(default_factory=set)
    sealed_step: int = 0

    @property
    def is_published(self) -> bool:
        """Whether its host copy may be read."""
        return self.state in PUBLISHED_STATES

    @property
    def is_resident(self) -> bool:
        """Whether the device holds its rows (or will, in stream order)."""
        return bool(self.resident_blocks)

    @property
    def device_blocks(self) -> tuple[int, ...]:
        """All device blocks that it occupies."""
        return (*self.resident_blocks, *((self.indexer_block,) if self.indexer_block else ()))

    def fire(self, event: PageEvent) -> None:
        """Take the transition.

        Raises:
            IllegalTransition: The event is not allowed in this state; nothing was changed.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(
                f"page {self.index} of {sorted(self.owners)} is {self.state.value}: "
                f"{event.value} is not allowed",
                state=self.state.value,
                event=event.value,
                page=self.index,
                host_block=self.host_block,
            )
        self.state = target


class DevicePool:
    """Device blocks of all groups. Block 0 is the null block and is never handed out.

    Args:
        num_blocks: Blocks of the device backing, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        if not 2 <= num_blocks <= MAX_BLOCKS_PER_BACKING:
            raise UsageError(
                f"a device pool of {num_blocks} blocks: the null block and one more is the least",
                limit=MAX_BLOCKS_PER_BACKING,
            )
        self._free: deque[int] = deque(range(1, num_blocks))
        self._used: set[int] = set()

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free) + len(self._used)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """Hand blocks out.

        Raises:
            CapacityError: Fewer are free; nothing was changed.
        """
        if num_blocks > len(self._free):
            raise CapacityError(
                f"{num_blocks} device blocks are needed, {len(self._free)} are free",
                remedy="Wait for pages to be published, or run fewer requests",
                needed=num_blocks,
                free=len(self._free),
            )
        blocks = tuple(self._free.popleft() for _ in range(num_blocks))
        self._used.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            NotHeld: One of them was not handed out (or is given back twice); nothing was changed.
        """
        returned = tuple(blocks)
        foreign = [block for block in returned if block not in self._used]
        if foreign or len(set(returned)) != len(returned):
            raise NotHeld(f"device blocks {foreign or list(returned)} are not handed out")
        self._used.difference_update(returned)
        self._free.extend(returned)
