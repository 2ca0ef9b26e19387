"""What the coordinator and the worker tell each other: admissions, step plans, mirrors, tables.

Plain values without tensors. The coordinator makes them, a worker's runner (`integrations/`)
carries them out in the order of `StepPlan`'s fields. Any thread. `Request`, at the end, is what the
coordinator's parts know of a request; it goes no further.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hisparse_service.contract.errors import (
    IllegalTransition,
    InternalError,
    LeaseError,
    StaleBlock,
)
from hisparse_service.contract.keys import KeyChain
from worker_client.blocks import BlockLease, LeaseState
from worker_client.residency import Page


class RequestState(enum.Enum):
    """RUNNING -> FINISHING (its last pages are on their way to the host) -> ENDED."""

    RUNNING = "running"
    FINISHING = "finishing"
    ENDED = "ended"


class EndMode(enum.Enum):
    """What becomes of the pages that are not published when a request ends."""

    PUBLISH = "publish"
    """It finished: whole pages are still mirrored and published."""
    DISCARD = "discard"
    """Preempted or aborted: a cancelled step proves nothing, so nothing more is published."""


_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.RUNNING: frozenset({RequestState.FINISHING, RequestState.ENDED}),
    RequestState.FINISHING: frozenset({RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request was let in.

    Attributes:
        request_slot: Its row in the tables and in the hot state.
        num_hit_tokens: Tokens at the start of its prompt whose rows need not be computed.
        num_host_blocks: Host blocks that were reserved for it, growth included (0 for a reader).
    """

    request_slot: int
    num_hit_tokens: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """Tokens of one request that the next step computes."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HotRegion:
    """Device blocks of a request's hot region, for each hot group."""

    request_slot: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PageRestore:
    """Copy a published page back: to its resident blocks (if any), its keys to `indexer_block`.

    0 stands for no indexer block.
    """

    host_block: int
    resident_blocks: tuple[int, ...]
    indexer_block: int


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """One entry of a request's tables.

    Attributes:
        request_slot: Row.
        page: Column.
        host_block: 0 = no host row.
        resident_blocks: One a resident group; empty = read from host.
        indexer_block: Device block of its indexer keys.
    """

    request_slot: int
    page: int
    host_block: int
    resident_blocks: tuple[int, ...]
    indexer_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the worker does before a step's forward pass, field by field.

    Attributes:
        invalidate: Host blocks that every hot map must forget: they were recycled.
        reset_slots: Request slots whose hot regions begin empty.
        hot_regions: New rows of the hot block tables.
        restores: Copies from host to device.
        updates: Changed entries of the source, resident and indexer tables.
        mirror_step: For a reader: last step whose mirrors became readable since the last plan, 0
            for none. The stream may wait for the writer's event of it (`PeerEvents.wait`).
    """

    invalidate: tuple[int, ...] = ()
    reset_slots: tuple[int, ...] = ()
    hot_regions: tuple[HotRegion, ...] = ()
    restores: tuple[PageRestore, ...] = ()
    updates: tuple[TableUpdate, ...] = ()
    mirror_step: int = 0


@dataclass(frozen=True, slots=True)
class PageMirror:
    """A page whose every row is final: to be copied to its host block (writer only)."""

    request_id: str
    page: int
    host_block: int
    resident_blocks: tuple[int, ...]
    indexer_block: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """A request that begins anew in the mirror queue.

    Attributes:
        request_id: Its name.
        first_page: Pages before it are published.
        num_tokens: Tokens whose rows exist.
    """

    request_id: str
    first_page: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What one `publish` did.

    Attributes:
        published: Pages that became readable (or were found readable, by a reader).
        merged: Those of them for which another block was published first.
        queued: Pages handed to the client while the service is away.
        messages: Requests sent.
        recalled: Requests whose unpublished pages were lost with a daemon: what the mirror queue
            knows of them is void.
        mirrors: Pages to mirror now, as those of `commit`.
    """

    published: int = 0
    merged: int = 0
    queued: int = 0
    messages: int = 0
    recalled: tuple[Recalled, ...] = ()
    mirrors: tuple[PageMirror, ...] = ()


@dataclass(slots=True, kw_only=True)
class Statistics:
    """What the coordinator did since it was made."""

    control_messages: int = 0
    """Requests to the service, of all kinds."""
    steps: int = 0
    admitted_requests: int = 0
    refused_requests: int = 0
    hit_tokens: int = 0
    mirrored_pages: int = 0
    published_pages: int = 0
    """Pages that this coordinator published, or found published (reader)."""
    recalled_pages: int = 0
    """Pages that had to be mirrored anew, because a daemon lost the first copy."""
    merged_pages: int = 0
    """Pages for which another block with the same tokens was published first."""
    spilled_pages: int = 0
    restored_pages: int = 0
    """Pages whose latent rows came back to the device."""
    restored_indexer_pages: int = 0
    invalidated_blocks: int = 0
    damaged_hits: int = 0
    """Found prefixes that were cut because the bytes of a block were damaged."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The coordinator's record of a request. For its parts alone."""

    request_id: str
    slot: int
    lease: BlockLease | None
    """None for a reader until its first block is published."""
    chain: KeyChain
    max_tokens: int
    prompt_tokens: int
    committed_blocks: int
    state: RequestState = RequestState.RUNNING
    num_computed: int = 0
    pages: list[Page] = field(default_factory=list)
    spare_host: list[tuple[int, int]] = field(default_factory=list)
    """Reserved (block, generation) pairs that no page has yet, in order."""
    end_mode: EndMode | None = None
    """Set when it ends."""
    num_lost_blocks: int = 0
    """Of `lease.lost_blocks`: those that are known to be lost."""
    wanted_blocks: int = 0
    """Host blocks to reserve anew, after a daemon did not give back what was reserved."""
    hot_blocks: tuple[int, ...] = ()
    started: bool = False
    """Whether a step of it was prepared: its tables are the worker's."""
    next_lookup_step: int = 0
    lookup_backoff_steps: int = 1
    hinted_step: int = 0
    """Last step whose mirrors the writer's events said to be done."""

    def enter(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            IllegalTransition: Not allowed from here.
        """
        if state not in _NEXT[self.state]:
            raise IllegalTransition(
                f"request {self.request_id!r} is {self.state.value}, it cannot become "
                f"{state.value}",
                state=self.state.value,
                event=state.value,
            )
        self.state = state

    def num_published(self) -> int:
        """Pages of the published prefix."""
        for count, page in enumerate(self.pages):
            if not page.is_published:
                return count
        return len(self.pages)

    @property
    def held_lease(self) -> BlockLease:
        """Its lease, where it must have one: a writer's requests do.

        Raises:
            InternalError: It has none.
        """
        if self.lease is None:
            raise InternalError(f"request {self.request_id!r} has no lease")
        return self.lease

    @property
    def is_granted(self) -> bool:
        """Whether nothing is known against its lease."""
        return self.lease is None or self.lease.state is LeaseState.GRANTED

    def holds_its_blocks(self) -> bool:
        """Whether what it read and published is still what it was."""
        if self.lease is None:
            return True
        try:
            self.lease.check()
        except (StaleBlock, LeaseError):
            return False
        return True


def mirror_of(request: Request, page: Page) -> PageMirror:
    """What to mirror of a request's page: its rows are final, and it has a host block."""
    return PageMirror(
        request.request_id,
        page.index,
        page.host_block,
        page.resident_blocks,
        page.indexer_block,
    )
