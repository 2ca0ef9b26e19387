"""Requests and residency: which host blocks a request has, which of its pages are on the device.

The engine's side of HiSparse, and policy only: it holds integers and leases, never a tensor. A
step goes: `prepare` says what to copy and which table entries changed, the worker runs the step,
`commit` takes the tokens whose rows are final and returns the pages to mirror, `enqueued` and
`completed` follow their copies, `publish` tells the service (at most one message).

What it guarantees:

- A request is admitted only when every host block that it can ever need is reserved for it, and
  the device can hold its keys, its hot regions and one step's pages. So admitted requests never
  wait for each other's host blocks, and `prepare` can only be waiting for a publication that is on
  its way.
- A page leaves the device only when its host copy is published (I2), and its device blocks are
  handed back only after the last copy out of them completed, those of draft layers included.
- A host block that was recycled is forgotten by the hot maps before any request reads it.
- One coordinator of a tensor-parallel group, the WRITER, reserves, mirrors and publishes (I1). The
  others are READERs: they find the writer's blocks by key and hold leases of their own.

When the service is away, `publish` queues, running requests go on while the device has room, and
`admit` raises `ServiceUnavailable`. When another daemon took over, blocks that were reserved from
the first are reserved anew and their pages mirrored again (`PublishReport.recalled`); a request
whose published blocks are gone is lost (`lost_requests`): preempt it and compute it again.

Called on the engine's thread only; there is no lock.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from hisparse_service.contract.errors import (
    CapacityError,
    DamagedBlock,
    HiSparseError,
    InternalError,
    LeaseError,
    PublishOutOfOrder,
    ServiceUnavailable,
    StaleBlock,
    UsageError,
)
from hisparse_service.contract.keys import KeyChain
from hisparse_service.contract.limits import MAX_BATCH_ITEMS
from worker_client.blocks import BlockLease, LeaseState
from worker_client.client import Completed, Enqueued, HandedIn, MirrorOutcome, MirrorResult
from worker_client.requests import (
    Admission,
    EndMode,
    HotRegion,
    PageMirror,
    PageRestore,
    Request,
    RequestState,
    Statistics,
    StepPlan,
    StepWork,
    TableUpdate,
)
from worker_client.residency import DevicePool, Page, PageEvent, PageState

EXTRA_HOST_BLOCKS: Final = 2
"""Beyond a request's length: the null block, which the pool has, and a copy-on-write tail."""

_MAX_BACKOFF_STEPS: Final = 16


_IN_FLIGHT: Final = {
    EndMode.PUBLISH: frozenset({PageState.MIRRORING, PageState.COMPLETED}),
    EndMode.DISCARD: frozenset({PageState.MIRRORING}),
}
"""Pages whose blocks an ended request keeps: until they are published, or no copy reads them."""


class Role(enum.Enum):
    """Which rank of its tensor-parallel group this coordinator serves."""

    WRITER = "writer"
    READER = "reader"


class BlockService(Protocol):
    """What the coordinator needs of the service: `worker_client.client.Namespace` has it."""

    @property
    def is_daemon_there(self) -> bool:
        """Whether the daemon answered last time."""
        ...

    def key_chain(self, *, salt: bytes = b"") -> KeyChain:
        """An empty chain for one request."""
        ...

    def reserve(
        self, num_blocks: int, *, lease: BlockLease | None = None, timeout_s: float | None = None
    ) -> BlockLease:
        """Take free blocks to write."""
        ...

    def lookup(
        self,
        keys: KeyChain | bytes,
        *,
        lease: BlockLease | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> BlockLease:
        """Pin the longest published prefix of these keys."""
        ...

    def mirror(
        self,
        *,
        enqueued: Sequence[Enqueued] = (),
        completed: Sequence[Completed] = (),
        reserve: Sequence[tuple[BlockLease, int]] = (),
    ) -> MirrorResult:
        """Report mirrors, publish, reserve more."""
        ...

    def handed_in(self) -> list[HandedIn]:
        """What became of queued mirrors."""
        ...

    def release(self, *leases: BlockLease) -> None:
        """End leases."""
        ...


class BlockContent(Protocol):
    """The bytes of host blocks: `worker_client.host_pool.HostPool` has them."""

    def checksum(self, blocks: Any) -> Any:
        """u64 [len(blocks)]: of each block's bytes."""
        ...


class MirrorProgress(Protocol):
    """How far the writer's copies look to be: `worker_client.events.PeerEvents` has it."""

    @property
    def is_connected(self) -> bool:
        """Whether `has_reached` can tell anything."""
        ...

    def has_reached(self, step: int) -> bool:
        """Whether the copies of a step look done: a reason to look them up, never a proof."""
        ...


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Sizes of one worker.

    Attributes:
        block_size: Tokens of a block.
        num_device_blocks: Blocks of the device backing, the null block included.
        num_resident_groups: Device blocks that one resident page takes.
        num_hot_groups: Hot regions of a request.
        hot_blocks_per_request: Device blocks of one hot region.
        max_num_requests: Request slots.
        max_model_tokens: Longest request.
        max_step_tokens: Most tokens of one request in a step (a prefill chunk).
        max_restores_per_step: Most pages whose rows are brought back in one step.
    """

    block_size: int
    num_device_blocks: int
    num_resident_groups: int
    num_hot_groups: int
    hot_blocks_per_request: int
    max_num_requests: int
    max_model_tokens: int
    max_step_tokens: int
    max_restores_per_step: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_restores_per_step" else 1
            if value < least:
                raise UsageError(f"{name} is {value}, the least is {least}")

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def hot_blocks(self) -> int:
        """Device blocks of all hot regions of a request."""
        return self.num_hot_groups * self.hot_blocks_per_request

    @property
    def window_pages(self) -> int:
        """Pages that one step of a request can write: a chunk, and the tail that it begins in."""
        return self.pages_for(self.max_step_tokens) + 1

    def device_blocks_for(self, max_tokens: int) -> int:
        """Device blocks that a request of this length must be able to have at once.

        Its indexer keys and hot regions for good, and the pages that one step writes; all other
        pages can be spilled.
        """
        return (
            self.pages_for(max_tokens)
            + self.hot_blocks
            + min(self.window_pages, self.pages_for(max_tokens)) * self.num_resident_groups
        )

    def host_blocks_for(self, max_tokens: int) -> int:
        """Host blocks that a request of this length needs, the null block included."""
        return self.pages_for(max_tokens) + EXTRA_HOST_BLOCKS


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


class HiSparseCoordinator:
    """Requests to host blocks and device pages of one worker.

    Args:
        service: The namespace.
        config: Sizes.
        role: WRITER for the rank that holds the group's writer lease, READER for the others.
        progress: Tells a reader when its writer's copies are done, so that it looks up once and
            then, instead of trying. The group's ranks must step alike.
        content: With it a writer gives each block that it publishes a checksum, and compares the
            bytes of a found prefix with theirs before a request is built on it. 1 ms a MB each.
    """

    def __init__(
        self,
        service: BlockService,
        config: CoordinatorConfig,
        *,
        role: Role,
        progress: MirrorProgress | None = None,
        content: BlockContent | None = None,
    ) -> None:
        self.config = config
        self.role = role
        self.statistics = Statistics()
        self._service = service
        self._device = DevicePool(config.num_device_blocks)
        self._committed_blocks = 0
        self._free_slots: deque[int] = deque(range(config.max_num_requests))
        self._requests: dict[str, Request] = {}
        self._by_host: dict[int, Page] = {}
        """Published pages of running requests, by host block: what a prefix hit may share."""
        self._clean: OrderedDict[Page, None] = OrderedDict()
        """Pages that may be spilled, in the order in which they would be."""
        self._restoring: list[Page] = []
        self._enqueued: list[tuple[Request, Page]] = []
        self._handed: list[tuple[Completed, list[tuple[Request, Page]]]] = []
        self._invalidate: list[int] = []
        self._updates: dict[tuple[int, int], TableUpdate] = {}
        self._is_short_of_room = False
        self._progress = progress
        self._content = content if role is Role.WRITER else None
        self._lost: set[str] = set()
        """Requests whose next page has a parent that was withdrawn: they publish no more."""
        self._mirror_step = 0
        """Last step whose mirrors a reader found since the last plan."""

    # --- what is there ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that can be stepped."""
        return sum(r.state is RequestState.RUNNING for r in self._requests.values())

    @property
    def num_finishing(self) -> int:
        """Ended requests whose last pages are still on their way to the host."""
        return sum(r.state is RequestState.FINISHING for r in self._requests.values())

    @property
    def num_free_device_blocks(self) -> int:
        """Device blocks that nobody has."""
        return self._device.num_free

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a request whose rows exist."""
        return self._running(request_id).num_computed

    def knows(self, request_id: str) -> bool:
        """Whether the request runs, or waits for its last pages."""
        return request_id in self._requests

    def pages(self, request_id: str) -> Sequence[Page]:
        """A request's pages, to look at."""
        return tuple(self._find(request_id).pages)

    # --- admission --------------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        salt: bytes = b"",
        num_hit_tokens: int | None = None,
    ) -> Admission:
        """Let a request in, with all that it can need reserved, or change nothing.

        Args:
            request_id: Its name.
            prompt: Its tokens so far, at least one.
            max_tokens: Greatest length that it may reach, prompt included.
            salt: Separates users of one namespace.
            num_hit_tokens: For a reader: the hit that the group's writer was told. None to take
                the longest hit.

        Raises:
            CapacityError: No request slot, or too few device or host blocks now. Retry later.
            ServiceUnavailable: The service is away.
            StaleBlock: The writer's hit is not there for this reader.
            UsageError: The name is taken, an empty prompt, or a length out of range.
        """
        self._check_new(request_id, prompt, max_tokens)
        committed = self.config.device_blocks_for(max_tokens)
        self._check_room(committed)
        chain = self._service.key_chain(salt=salt)
        chain.extend(prompt)
        try:
            lease = self._find_prefix(chain, len(prompt), num_hit_tokens)
            hits = 0 if lease is None else len(lease.blocks)
            reserved = 0
            if self.role is Role.WRITER:
                # The null block is the pool's own and is not reserved.
                reserved = self.config.host_blocks_for(max_tokens) - 1 - hits
                lease = self._reserve(reserved, lease)
        except CapacityError:
            self.statistics.refused_requests += 1
            raise
        request = Request(
            request_id=request_id,
            slot=self._free_slots.popleft(),
            lease=lease,
            chain=chain,
            max_tokens=max_tokens,
            prompt_tokens=len(prompt),
            committed_blocks=committed,
            num_computed=hits * self.config.block_size,
        )
        self._committed_blocks += committed
        self._requests[request_id] = request
        self._take_leased(request, hits)
        self.statistics.admitted_requests += 1
        self.statistics.hit_tokens += request.num_computed
        return Admission(
            request_slot=request.slot,
            num_hit_tokens=request.num_computed,
            num_host_blocks=reserved,
        )

    def _check_new(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        if request_id in self._requests:
            raise UsageError(f"request {request_id!r} exists")
        if not 1 <= len(prompt) <= max_tokens <= self.config.max_model_tokens:
            raise UsageError(
                f"request {request_id!r}: a prompt of {len(prompt)} tokens and at most "
                f"{max_tokens} in all do not fit 1 to {self.config.max_model_tokens}",
                limit=self.config.max_model_tokens,
            )

    def _check_room(self, committed: int) -> None:
        free = self._device.capacity - self._committed_blocks
        if committed > free or not self._free_slots:
            self.statistics.refused_requests += 1
            raise CapacityError(
                f"the request needs {committed} device blocks and a slot; {max(free, 0)} blocks "
                f"are not promised and {len(self._free_slots)} slots are free",
                remedy="Wait for a request to end",
                needed=committed,
                free=max(free, 0),
            )

    def _find_prefix(
        self, chain: KeyChain, prompt_tokens: int, num_hit_tokens: int | None
    ) -> BlockLease | None:
        """Pin the published prefix. At least one token stays to be computed: its logits are due."""
        size = self.config.block_size
        stop = (prompt_tokens - 1) // size if num_hit_tokens is None else num_hit_tokens // size
        if stop == 0:
            return None
        self.statistics.control_messages += 1
        lease = self._service.lookup(chain, stop=stop)
        if self._content is not None and len(lease.blocks):
            lease = self._with_good_bytes(lease, chain)
        if num_hit_tokens is not None and len(lease.blocks) < stop:
            found = len(lease.blocks)
            self._release(lease)
            raise StaleBlock(
                f"the writer found {stop} blocks of this prefix, this reader {found}",
                remedy="Admit the request again on every rank",
                needed=stop,
                found=found,
            )
        return lease

    def _with_good_bytes(self, lease: BlockLease, chain: KeyChain) -> BlockLease:
        """The prefix that a lookup found, up to its first block whose bytes are damaged."""
        stop = len(lease.blocks)
        while stop:
            try:
                lease.verify()
                break
            except StaleBlock as error:
                # What the daemon did about it does not matter here: this request stays away.
                at = np.flatnonzero(lease.blocks == int(error.details.get("block", 0)))
                stop = int(at[0]) if len(at) else 0
                self.statistics.damaged_hits += isinstance(error, DamagedBlock)
            self._release(lease)
            self.statistics.control_messages += 1
            lease = self._service.lookup(chain, stop=stop)
        return lease

    def _reserve(self, num_blocks: int, lease: BlockLease | None) -> BlockLease:
        self.statistics.control_messages += 1
        try:
            return self._service.reserve(num_blocks, lease=lease)
        except BaseException:
            if lease is not None:
                self._release(lease)
            raise

    def _take_leased(self, request: Request, hits: int) -> None:
        """Make pages of the hit blocks, and keep the reserved ones for pages to come."""
        lease = request.lease
        if lease is None:
            return
        for index, (block, generation) in enumerate(
            zip(lease.blocks[:hits].tolist(), lease.generations[:hits].tolist(), strict=True)
        ):
            page = self._by_host.get(block)
            if page is None:
                page = Page(index, PageState.SPILLED, block, generation)
                self._by_host[block] = page
                self._invalidate.append(block)
            page.owners.add(request.request_id)
            request.pages.append(page)
        reserved = zip(
            lease.reserved_blocks.tolist(), lease.reserved_generations.tolist(), strict=True
        )
        request.spare_host.extend(reserved)
        self._invalidate.extend(block for block, _ in request.spare_host)

    # --- before a step ----------------------------------------------------------------------------

    def prepare(self, work: Sequence[StepWork]) -> StepPlan:
        """Give the step its device blocks: new pages, hot regions, keys of found prefixes.

        Args:
            work: Requests of the step, each once, with the tokens it computes.

        Raises:
            CapacityError: Too few device blocks are free or can be spilled: publications are on
                their way. Nothing was changed; `publish` and try again.
            UsageError: An unknown request, one twice, or tokens out of range.
        """
        self._settle_restores()
        requests = [self._check_work(item) for item in work]
        if len({r.request_id for r in requests}) != len(requests):
            raise UsageError("a request occurs twice in one step")
        self._make_room(self._blocks_needed(requests, work))
        reset: list[int] = []
        regions: list[HotRegion] = []
        restores: dict[Page, PageRestore] = {}
        for request, item in zip(requests, work, strict=True):
            if not request.started:
                reset.append(request.slot)
                regions.append(self._start(request, restores))
            self._grow(request, item.num_tokens)
        self._restore_recent(requests, restores)
        self.statistics.steps += 1
        self.statistics.invalidated_blocks += len(self._invalidate)
        plan = StepPlan(
            invalidate=tuple(self._invalidate),
            reset_slots=tuple(reset),
            hot_regions=tuple(regions),
            restores=tuple(restores.values()),
            updates=tuple(self._updates.values()),
            mirror_step=self._mirror_step,
        )
        self._invalidate.clear()
        self._updates.clear()
        self._mirror_step = 0
        return plan

    def _check_work(self, item: StepWork) -> Request:
        request = self._running(item.request_id)
        end = request.num_computed + item.num_tokens
        if not 1 <= item.num_tokens <= self.config.max_step_tokens or end > request.max_tokens:
            raise UsageError(
                f"{item.num_tokens} tokens for request {item.request_id!r} after "
                f"{request.num_computed}: at most {self.config.max_step_tokens} a step and "
                f"{request.max_tokens} in all"
            )
        return request

    def _blocks_needed(self, requests: Sequence[Request], work: Sequence[StepWork]) -> int:
        per_page = self.config.num_resident_groups + 1
        needed = 0
        without_keys: set[Page] = set()
        for request, item in zip(requests, work, strict=True):
            pages = self.config.pages_for(request.num_computed + item.num_tokens)
            needed += max(pages - len(request.pages), 0) * per_page
            if not request.started:
                needed += self.config.hot_blocks
                without_keys.update(p for p in request.pages if not p.indexer_block)
        return needed + len(without_keys)

    def _make_room(self, num_blocks: int) -> None:
        groups = self.config.num_resident_groups
        room = self._device.num_free + len(self._clean) * groups
        self._is_short_of_room = num_blocks > room
        if self._is_short_of_room:
            raise CapacityError(
                f"the step needs {num_blocks} device blocks, {room} are free or can be spilled",
                remedy="Publish what is mirrored, and try again",
                needed=num_blocks,
                free=room,
            )
        while self._device.num_free < num_blocks:
            page, _ = self._clean.popitem(last=False)
            page.fire(PageEvent.SPILL)
            self._device.give_back(page.resident_blocks)
            page.resident_blocks = ()
            self._note_update(page)
            self.statistics.spilled_pages += 1

    def _start(self, request: Request, restores: dict[Page, PageRestore]) -> HotRegion:
        """Give a request its hot regions, and the keys of its found prefix."""
        request.started = True
        config = self.config
        request.hot_blocks = self._device.take(config.hot_blocks)
        for page in request.pages:
            if not page.indexer_block:
                (page.indexer_block,) = self._device.take(1)
                restores[page] = PageRestore(page.host_block, (), page.indexer_block)
                self.statistics.restored_indexer_pages += 1
            self._note_update(page)
        per_group = config.hot_blocks_per_request
        return HotRegion(
            request.slot,
            tuple(
                request.hot_blocks[group * per_group : (group + 1) * per_group]
                for group in range(config.num_hot_groups)
            ),
        )

    def _grow(self, request: Request, num_tokens: int) -> None:
        pages = self.config.pages_for(request.num_computed + num_tokens)
        while len(request.pages) < pages:
            page = Page(len(request.pages), owners={request.request_id})
            if request.spare_host:
                page.host_block, page.generation = request.spare_host.pop(0)
            elif self.role is Role.WRITER and not request.wanted_blocks:
                raise InternalError(f"request {request.request_id!r} has no host block left")
            *resident, page.indexer_block = self._device.take(self.config.num_resident_groups + 1)
            page.resident_blocks = tuple(resident)
            request.pages.append(page)
            self._note_update(page)

    def _restore_recent(
        self, requests: Sequence[Request], restores: dict[Page, PageRestore]
    ) -> None:
        """Bring back the latest spilled pages while the device has room to spare.

        What is kept free is two pages for each running request, so that a page is not brought back
        only to be spilled by the next step's growth.
        """
        groups = self.config.num_resident_groups
        keep_free = 2 * (groups + 1) * self.num_running
        budget = min(
            self.config.max_restores_per_step,
            max(self._device.num_free - keep_free, 0) // groups,
        )
        for request in requests:
            for page in reversed(request.pages):
                if budget <= 0:
                    return
                if page.state is not PageState.SPILLED:
                    continue
                page.fire(PageEvent.RESTORE)
                page.resident_blocks = self._device.take(groups)
                keys = restores[page].indexer_block if page in restores else 0
                restores[page] = PageRestore(page.host_block, page.resident_blocks, keys)
                self._restoring.append(page)
                self._note_update(page)
                self.statistics.restored_pages += 1
                budget -= 1

    def _settle_restores(self) -> None:
        """The step that copied them is over, so the restored pages may be spilled again."""
        for page in self._restoring:
            if page.state is PageState.RESTORING:
                page.fire(PageEvent.RESTORED)
                self._clean[page] = None
        self._restoring.clear()

    # --- after a step -----------------------------------------------------------------------------

    def commit(self, request_id: str, tokens: Sequence[int]) -> list[PageMirror]:
        """Take the tokens whose rows the step computed and that are accepted.

        Args:
            request_id: A request of the last `prepare`.
            tokens: Their ids. Fewer than were prepared where speculative ones were rejected.

        Returns:
            Pages that became whole: the writer mirrors them, then calls `enqueued`. Empty for a
            reader.

        Raises:
            UsageError: More tokens than pages were prepared for, or others than the prompt's.
        """
        self._settle_restores()
        request = self._running(request_id)
        end = request.num_computed + len(tokens)
        if self.config.pages_for(end) > len(request.pages):
            raise UsageError(
                f"request {request_id!r}: {len(tokens)} tokens after {request.num_computed} pass "
                f"the {len(request.pages)} pages that were prepared"
            )
        # The prompt is in the chain since admission.
        known = request.chain.num_tokens - request.num_computed
        request.chain.extend(tokens[max(known, 0) :])
        first = request.num_computed // self.config.block_size
        request.num_computed = end
        mirrors: list[PageMirror] = []
        for page in request.pages[first : end // self.config.block_size]:
            page.fire(PageEvent.SEAL)
            page.sealed_step = self.statistics.steps
            if page.host_block:
                mirrors.append(_mirror_of(request, page))
        return mirrors

    def enqueued(self, mirrors: Iterable[PageMirror]) -> None:
        """The copies of these pages are in stream order, every layer of them."""
        for mirror in mirrors:
            request = self._find(mirror.request_id)
            page = request.pages[mirror.page]
            page.fire(PageEvent.ENQUEUE)
            self._enqueued.append((request, page))
            self.statistics.mirrored_pages += 1

    def completed(self, request_id: str, page_index: int) -> None:
        """The CPU saw the copies of this page complete (`MirrorQueue.poll`)."""
        self._find(request_id).pages[page_index].fire(PageEvent.COMPLETE)

    def dropped(self, host_blocks: Iterable[int]) -> None:
        """No copy into these host blocks is in flight any more (`MirrorQueue.poll_dropped`).

        Blocks that no discarded request has are ignored: they were lost with a daemon.
        """
        blocks = set(host_blocks)
        discarded = [r for r in self._requests.values() if r.end_mode is EndMode.DISCARD]
        for request in discarded if blocks else ():
            done = [page for page in request.pages if page.host_block in blocks]
            for page in done:
                self._forget_page(request, page)
                request.pages.remove(page)
            self._end_if_done(request)

    def publish(self) -> PublishReport:
        """Tell the service what was mirrored and completed; find what others published.

        The writer sends one message at most, none where nothing happened. A reader looks up the
        requests that have whole pages which it has not seen published: at once where the device
        is short of room, else in growing intervals.

        Raises:
            LeaseError: A lease of a running request is gone.
        """
        if self.role is Role.READER:
            return self._discover()
        before = (self.statistics.published_pages, self.statistics.merged_pages)
        if self._lost:
            self._end_lost()
        self._settle_handed_in()
        recalled = self._recall_lost()
        queued = messages = 0
        mirrors: list[PageMirror] = []
        runs = self._completed_runs()
        wanting = [r for r in self._requests.values() if r.wanted_blocks and _is_granted(r)]
        self._enqueued = [item for item in self._enqueued if _is_granted(item[0])]
        if self._enqueued or runs or wanting:
            messages = 1
            self.statistics.control_messages += 1
            items = [self._completed_item(request, pages) for request, pages in runs]
            try:
                result = self._service.mirror(
                    enqueued=_enqueued_items(self._enqueued),
                    completed=items,
                    reserve=[(_lease_of(r), r.wanted_blocks) for r in wanting],
                )
            except HiSparseError as error:
                # Nothing changed. It may be that another daemon took over while we asked, or that
                # damage was found in a prefix: what is not to blame is published the next time.
                self._settle_handed_in()
                recalled += self._recall_lost()
                is_known = isinstance(error, PublishOutOfOrder) and self._note_lost(runs)
                if not recalled and not is_known:
                    raise
            else:
                self._enqueued = []
                queued = self._take_result(result, items, runs)
                mirrors = self._take_reserved(wanting, result)
        return PublishReport(
            published=self.statistics.published_pages - before[0],
            merged=self.statistics.merged_pages - before[1],
            queued=queued,
            messages=messages,
            recalled=tuple(recalled),
            mirrors=tuple(mirrors),
        )

    def _note_lost(self, runs: Sequence[tuple[Request, list[Page]]]) -> bool:
        """Find the requests whose published blocks are gone; False: there is none."""
        lost = [request.request_id for request, _ in runs if not _holds_its_blocks(request)]
        self._lost.update(lost)
        return bool(lost)

    def _end_lost(self) -> None:
        """Requests that ended and whose last pages can hang nowhere any more.

        Running ones are `lost_requests`: the engine computes them anew.
        """
        self._lost &= set(self._requests)
        for request in [self._requests[name] for name in self._lost]:
            if request.state is not RequestState.FINISHING or any(
                page.state is PageState.MIRRORING for page in request.pages
            ):
                continue
            for page in request.pages:
                if not page.is_published:
                    self._forget_page(request, page)
            request.pages.clear()
            self._end(request)

    def _take_result(
        self,
        result: MirrorResult,
        items: Sequence[Completed],
        runs: Sequence[tuple[Request, list[Page]]],
    ) -> int:
        """Note what was published; returns how many pages wait in the client instead."""
        pages = [(request, page) for request, run in runs for page in run]
        if result.outcome is MirrorOutcome.ACKNOWLEDGED:
            self._settle(pages, result.canonical_blocks, result.canonical_generations)
            return 0
        for item, (request, run) in zip(items, runs, strict=True):
            self._handed.append((item, [(request, page) for page in run]))
        return len(pages)

    def _take_reserved(self, wanting: Sequence[Request], result: MirrorResult) -> list[PageMirror]:
        """Give reserved blocks to the pages that lost theirs; returns what to mirror again."""
        mirrors: list[PageMirror] = []
        for request, (blocks, generations) in zip(wanting, result.reserved, strict=True):
            if not len(blocks):
                continue  # no room now: asked for again
            request.wanted_blocks = 0
            request.spare_host = list(zip(blocks.tolist(), generations.tolist(), strict=True))
            self._invalidate.extend(blocks.tolist())
            for page in request.pages:
                if page.host_block:
                    continue
                page.host_block, page.generation = request.spare_host.pop(0)
                if page.state is PageState.SEALED:
                    mirrors.append(_mirror_of(request, page))
        return mirrors

    def _recall_lost(self) -> list[Recalled]:
        """Take back the pages whose reserved blocks a new daemon did not give us again."""
        recalled: list[Recalled] = []
        handed = {page for _, pages in self._handed for _, page in pages}
        for request in self._requests.values():
            lost = 0 if request.lease is None else len(request.lease.lost_blocks)
            if lost == request.num_lost_blocks or request.end_mode is EndMode.DISCARD:
                continue
            request.num_lost_blocks = lost
            request.spare_host.clear()
            self._enqueued = [item for item in self._enqueued if item[0] is not request]
            for page in request.pages:
                if not page.is_published and page not in handed:
                    self._recall(page)
            kept = sum(page.host_block > 0 for page in request.pages)
            pages = len(request.pages)
            if request.state is RequestState.RUNNING:
                pages = self.config.pages_for(request.max_tokens) + 1
            request.wanted_blocks = pages - kept
            recalled.append(
                Recalled(request.request_id, request.num_published(), request.num_computed)
            )
        return recalled

    def _recall(self, page: Page) -> None:
        if page.state in (PageState.MIRRORING, PageState.COMPLETED):
            page.fire(PageEvent.RECALL)
            self.statistics.recalled_pages += 1
        page.host_block = page.generation = 0

    def _completed_runs(self) -> list[tuple[Request, list[Page]]]:
        """For each request, the completed pages that continue its published prefix."""
        waiting = {id(request) for _, pages in self._handed for request, _ in pages}
        runs: list[tuple[Request, list[Page]]] = []
        for request in self._requests.values():
            # The parent of the next page is known only when the queued ones are settled.
            if id(request) in waiting or not _is_granted(request):
                continue
            if request.request_id in self._lost:
                continue
            run: list[Page] = []
            for page in request.pages[request.num_published() :]:
                if page.state is not PageState.COMPLETED:
                    break
                run.append(page)
            if run:
                runs.append((request, run))
        return runs[:MAX_BATCH_ITEMS]

    def _completed_item(self, request: Request, pages: Sequence[Page]) -> Completed:
        first = pages[0].index
        parent = request.pages[first - 1] if first else None
        blocks = _u32(page.host_block for page in pages)
        return Completed(
            lease=_lease_of(request),
            blocks=blocks,
            generations=_u32(page.generation for page in pages),
            keys=request.chain.keys(first, first + len(pages)),
            parent=parent.host_block if parent else 0,
            parent_generation=parent.generation if parent else 0,
            checksums=None if self._content is None else self._content.checksum(blocks),
        )

    def _settle(
        self,
        pages: Sequence[tuple[Request, Page]],
        canonical_blocks: Any,
        canonical_generations: Any,
    ) -> None:
        """Note what was published, and the block that holds it now."""
        for (request, page), block, generation in zip(
            pages, canonical_blocks.tolist(), canonical_generations.tolist(), strict=True
        ):
            self._published(request, page, block, generation)
        for request in {id(request): request for request, _ in pages}.values():
            self._end_if_done(request)

    def _published(self, request: Request, page: Page, block: int, generation: int) -> None:
        page.fire(PageEvent.PUBLISH)
        self.statistics.published_pages += 1
        if self.role is Role.READER:
            self._mirror_step = max(self._mirror_step, page.sealed_step)
        if self.role is Role.WRITER and block != page.host_block:
            self.statistics.merged_pages += 1
            # The loser's block went back to the service: it is not ours to read any more.
            self._invalidate.append(page.host_block)
        known = self._by_host.get(block)
        if known is not None and known is not page:
            # This worker has the page already: one copy on the device is enough.
            self._device.give_back(page.device_blocks)
            page.resident_blocks, page.indexer_block = (), 0
            known.owners.add(request.request_id)
            request.pages[page.index] = known
            page = known
        else:
            page.host_block, page.generation = block, generation
            self._by_host[block] = page
            self._clean[page] = None
        if request.state is RequestState.FINISHING:
            self._disown(request, page)
            return
        self._note_update(page)

    def _settle_handed_in(self) -> None:
        """Take the service's answers to what was queued while it was away."""
        if not self._handed:
            return
        for answer in self._service.handed_in():
            at = next(
                (i for i, (item, _) in enumerate(self._handed) if item is answer.completed), None
            )
            if at is None:
                continue
            _, pages = self._handed.pop(at)
            if not pages:  # its request was discarded meanwhile
                continue
            if answer.canonical_blocks is not None and answer.canonical_generations is not None:
                self._settle(pages, answer.canonical_blocks, answer.canonical_generations)
                continue
            request = pages[0][0]
            for _, page in pages:
                self._recall(page)
            # The same daemon may have refused them; ask for other blocks in any case.
            request.num_lost_blocks = -1

    def _discover(self) -> PublishReport:
        """A reader's publication: find the writer's blocks by their keys."""
        published = messages = 0
        for request in list(self._requests.values()):
            start = request.num_published()
            stop = start
            while stop < len(request.pages) and request.pages[stop].state is PageState.SEALED:
                stop += 1
            if start == stop or not self._service.is_daemon_there:
                continue
            if not self._is_lookup_due(request, request.pages[start]):
                continue
            messages += 1
            found = self._look_up(request, start, stop)
            published += found
            wait = 1 if found else min(request.lookup_backoff_steps * 2, _MAX_BACKOFF_STEPS)
            request.lookup_backoff_steps = wait
            request.next_lookup_step = self.statistics.steps + wait
        self.statistics.control_messages += messages
        return PublishReport(published=published, messages=messages)

    def _is_lookup_due(self, request: Request, page: Page) -> bool:
        """Whether to ask for a page that the writer may have published by now."""
        steps = self.statistics.steps
        if self._is_short_of_room:
            return True
        progress = self._progress
        if progress is None or not progress.is_connected or page.sealed_step <= request.hinted_step:
            return steps >= request.next_lookup_step
        if progress.has_reached(page.sealed_step):
            # The writer publishes in its next step or two: from here on ask soon again.
            request.hinted_step, request.lookup_backoff_steps = page.sealed_step, 1
            return True
        # Its copies are under way, so asking is idle; but events prove nothing, not even this.
        return steps >= page.sealed_step + _MAX_BACKOFF_STEPS and steps >= request.next_lookup_step

    def _look_up(self, request: Request, start: int, stop: int) -> int:
        """Map the published ones of pages [start, stop); returns how many."""
        before = 0 if request.lease is None else len(request.lease.blocks)
        try:
            lease = self._service.lookup(request.chain, lease=request.lease, start=start, stop=stop)
        except (ServiceUnavailable, LeaseError):
            return 0  # `verify` and `lost_requests` tell of a lost lease
        request.lease = lease
        blocks, generations = lease.blocks[before:], lease.generations[before:]
        self._invalidate.extend(blocks.tolist())
        found = [(request, page) for page in request.pages[start : start + len(blocks)]]
        self._settle(found, blocks, generations)
        return len(blocks)

    # --- the end of a request ---------------------------------------------------------------------

    def finish(self, request_id: str, *, mode: EndMode = EndMode.PUBLISH) -> None:
        """End a request, between steps. Its slot is free at once.

        With PUBLISH its whole pages are still mirrored and published. With DISCARD nothing more is
        published; pages whose copies are in flight keep their blocks until `dropped`. Either way
        its lease is given back when no copy of it is in flight.

        Raises:
            UsageError: No such running request.
        """
        self._settle_restores()
        request = self._running(request_id)
        request.end_mode = mode
        waiting = [page for page in request.pages if page.state in _IN_FLIGHT[mode]]
        published = [page for page in request.pages if page.is_published]
        for page in request.pages:
            if page.is_published:
                self._disown(request, page)
            elif page.state not in _IN_FLIGHT[mode]:
                self._forget_page(request, page)
        # Published parents stay in the list of a request that still publishes: it chains to them.
        request.pages = [*published, *waiting] if mode is EndMode.PUBLISH else waiting
        if mode is EndMode.DISCARD:
            self._handed = [
                (item, [] if pages and pages[0][0] is request else pages)
                for item, pages in self._handed
            ]
        self._device.give_back(request.hot_blocks)
        request.hot_blocks = ()
        self._committed_blocks -= request.committed_blocks
        self._free_slots.append(request.slot)
        self._updates = {k: v for k, v in self._updates.items() if k[0] != request.slot}
        if waiting:
            request.enter(RequestState.FINISHING)
        else:
            self._end(request)

    def preempt(self, request_id: str) -> None:
        """Take a request off the device; admit it again later, with its tokens so far as prompt."""
        self.finish(request_id, mode=EndMode.DISCARD)

    def verify(self) -> None:
        """Check that all blocks which the last step may have read are still what they were (I3).

        Raises:
            StaleBlock, LeaseError: The step's results must not be used.
        """
        for request in self._requests.values():
            if request.lease is not None and request.state is RequestState.RUNNING:
                request.lease.check()

    def lost_requests(self) -> list[str]:
        """Running requests whose published blocks are gone: preempt them and compute them again."""
        return [
            request.request_id
            for request in self._requests.values()
            if request.state is RequestState.RUNNING and not _holds_its_blocks(request)
        ]

    def close(self) -> None:
        """Give all leases back. For a worker that stops: its copies must have completed."""
        leases = [r.lease for r in self._requests.values() if r.lease is not None]
        self._requests.clear()
        if leases:
            self._release(*leases)

    def _end_if_done(self, request: Request) -> None:
        if request.state is RequestState.FINISHING and all(
            page.is_published for page in request.pages
        ):
            self._end(request)

    def _end(self, request: Request) -> None:
        request.enter(RequestState.ENDED)
        del self._requests[request.request_id]
        self._lost.discard(request.request_id)
        self._enqueued = [item for item in self._enqueued if item[0] is not request]
        if request.lease is not None:
            self._release(request.lease)

    def _release(self, *leases: BlockLease) -> None:
        self.statistics.control_messages += 1
        self._service.release(*leases)

    def _disown(self, request: Request, page: Page) -> None:
        """A request leaves a published page; the last one to leave gives its device blocks back."""
        page.owners.discard(request.request_id)
        if page.owners:
            return
        if self._by_host.get(page.host_block) is page:
            del self._by_host[page.host_block]
        self._clean.pop(page, None)
        self._device.give_back(page.device_blocks)
        page.resident_blocks, page.indexer_block = (), 0

    def _forget_page(self, request: Request, page: Page) -> None:
        """Give back the device blocks of a page that is not published."""
        page.owners.discard(request.request_id)
        self._device.give_back(page.device_blocks)
        page.resident_blocks, page.indexer_block = (), 0

    # --- tables -----------------------------------------------------------------------------------

    def _note_update(self, page: Page) -> None:
        """Write the page's entries for the next plan, for every started owner."""
        for name in page.owners:
            request = self._requests[name]
            if request.started and request.state is RequestState.RUNNING:
                self._updates[request.slot, page.index] = TableUpdate(
                    request.slot,
                    page.index,
                    # Before publication there is no host row to read, not even one's own (I2).
                    page.host_block if page.is_published else 0,
                    page.resident_blocks,
                    page.indexer_block,
                )

    def _find(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            raise UsageError(f"no request {request_id!r}")
        return request

    def _running(self, request_id: str) -> Request:
        request = self._find(request_id)
        if request.state is not RequestState.RUNNING:
            raise UsageError(f"request {request_id!r} is {request.state.value}")
        return request

    def check_accounting(self) -> None:
        """Compare all books with each other; for tests, and for whoever suspects a leak.

        Raises:
            InternalError: Device blocks with no or two owners, or promises that do not add up.
        """
        pages = {
            page: None
            for request in self._requests.values()
            for page in request.pages
            if page.device_blocks
        }
        held = [block for page in pages for block in page.device_blocks]
        held += [block for request in self._requests.values() for block in request.hot_blocks]
        used = self._device.capacity - self._device.num_free
        promised = sum(
            r.committed_blocks for r in self._requests.values() if r.state is RequestState.RUNNING
        )
        if len(held) != len(set(held)) or len(held) != used or 0 in held:
            raise InternalError(
                f"{len(held)} device blocks have owners ({len(set(held))} distinct), {used} are out"
            )
        if promised != self._committed_blocks or promised > self._device.capacity:
            raise InternalError(
                f"{promised} device blocks are promised, the books say {self._committed_blocks}"
            )
        spillable = {page for page in pages if page.state is PageState.CLEAN}
        if spillable != set(self._clean):
            raise InternalError(
                f"{len(spillable)} pages are clean, {len(self._clean)} are listed to be spilled"
            )


def _enqueued_items(pages: Sequence[tuple[Request, Page]]) -> list[Enqueued]:
    by_request: dict[str, list[tuple[Request, Page]]] = {}
    for request, page in pages:
        by_request.setdefault(request.request_id, []).append((request, page))
    return [
        Enqueued(
            lease=_lease_of(run[0][0]),
            blocks=_u32(page.host_block for _, page in run),
            generations=_u32(page.generation for _, page in run),
        )
        for run in by_request.values()
    ]


def _mirror_of(request: Request, page: Page) -> PageMirror:
    return PageMirror(
        request.request_id,
        page.index,
        page.host_block,
        page.resident_blocks,
        page.indexer_block,
    )


def _is_granted(request: Request) -> bool:
    return request.lease is None or request.lease.state is LeaseState.GRANTED


def _holds_its_blocks(request: Request) -> bool:
    """Whether what the request read and published is still what it was."""
    if request.lease is None:
        return True
    try:
        request.lease.check()
    except (StaleBlock, LeaseError):
        return False
    return True


def _lease_of(request: Request) -> BlockLease:
    if request.lease is None:
        raise InternalError(f"request {request.request_id!r} has no lease")
    return request.lease


def _u32(values: Iterable[int]) -> Any:
    return np.fromiter(values, dtype=np.uint32)
