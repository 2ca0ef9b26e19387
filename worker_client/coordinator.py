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

    HiSparseCoordinator    the calls of a step, in their order
     |- Roster             requests, slots, promises, leases              roster.py
     |- HostClaims         a new request's prefix and reservation         host_claim.py
     |- DevicePages        which pages are on the device                  device_pages.py
     |- PagePublisher      what a writer mirrored becomes readable        page_publisher.py
     |- PageFinder         what a reader's writer published is found      page_finder.py
     `- PlanDraft          what the next plan will say                    plan_draft.py

Called on the engine's thread only; there is no lock. What a worker needs of these stands in
`__all__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from hisparse_service.contract.errors import CapacityError, UsageError
from worker_client.block_service import BlockContent, BlockService, MirrorProgress
from worker_client.coordinator_config import EXTRA_HOST_BLOCKS, CoordinatorConfig, Role
from worker_client.device_pages import DevicePages
from worker_client.host_claim import HostClaims
from worker_client.page_finder import PageFinder
from worker_client.page_publisher import PagePublisher
from worker_client.plan_draft import PlanDraft
from worker_client.requests import (
    Admission,
    EndMode,
    HotRegion,
    PageMirror,
    PageRestore,
    PublishReport,
    Recalled,
    Request,
    RequestState,
    Statistics,
    StepPlan,
    StepWork,
    mirror_of,
)
from worker_client.residency import DevicePool, Page, PageEvent, PageState
from worker_client.roster import Roster

__all__ = [
    "EXTRA_HOST_BLOCKS",
    "BlockContent",
    "BlockService",
    "CoordinatorConfig",
    "HiSparseCoordinator",
    "MirrorProgress",
    "PublishReport",
    "Recalled",
    "Role",
]

_IN_FLIGHT: Final = {
    EndMode.PUBLISH: frozenset({PageState.MIRRORING, PageState.COMPLETED}),
    EndMode.DISCARD: frozenset({PageState.MIRRORING}),
}
"""Pages whose blocks an ended request keeps: until they are published, or no copy reads them."""


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
        self.statistics = statistics = Statistics()
        content = content if role is Role.WRITER else None
        self._service = service
        self._device = DevicePool(config.num_device_blocks)
        self._draft = draft = PlanDraft()
        self._roster = roster = Roster(
            service, config, num_device_blocks=self._device.capacity, statistics=statistics
        )
        self._claims = HostClaims(
            service, config, role=role, verifies=content is not None, statistics=statistics
        )
        self._pages = pages = DevicePages(
            self._device, config, role=role, roster=roster, draft=draft, statistics=statistics
        )
        self._publisher = PagePublisher(
            service, config, roster=roster, pages=pages, draft=draft, content=content,
            statistics=statistics,
        )  # fmt: skip
        self._finder = PageFinder(
            service, roster=roster, pages=pages, draft=draft, progress=progress,
            statistics=statistics,
        )  # fmt: skip

    # --- what is there ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that can be stepped."""
        return self._roster.num_running

    @property
    def num_finishing(self) -> int:
        """Ended requests whose last pages are still on their way to the host."""
        return self._roster.num_finishing

    @property
    def num_free_device_blocks(self) -> int:
        """Device blocks that nobody has."""
        return self._device.num_free

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a request whose rows exist."""
        return self._roster.running(request_id).num_computed

    def knows(self, request_id: str) -> bool:
        """Whether the request runs, or waits for its last pages."""
        return request_id in self._roster.requests

    def pages(self, request_id: str) -> Sequence[Page]:
        """A request's pages, to look at."""
        return tuple(self._roster.find(request_id).pages)

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
        try:
            self._roster.check_new(request_id, prompt, max_tokens)
            chain = self._service.key_chain(salt=salt)
            chain.extend(prompt)
            claim = self._claims.claim(
                chain,
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                num_hit_tokens=num_hit_tokens,
            )
        except CapacityError:
            self.statistics.refused_requests += 1
            raise
        request = self._roster.add(
            request_id,
            lease=claim.lease,
            chain=chain,
            max_tokens=max_tokens,
            prompt_tokens=len(prompt),
            num_computed=claim.num_hits * self.config.block_size,
        )
        self._pages.take_leased(request, claim.num_hits)
        self.statistics.admitted_requests += 1
        self.statistics.hit_tokens += request.num_computed
        return Admission(
            request_slot=request.slot,
            num_hit_tokens=request.num_computed,
            num_host_blocks=claim.num_reserved,
        )

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
        pages = self._pages
        pages.settle_restores()
        requests = [self._check_work(item) for item in work]
        if len({r.request_id for r in requests}) != len(requests):
            raise UsageError("a request occurs twice in one step")
        pages.make_room(requests, work)
        reset: list[int] = []
        regions: list[HotRegion] = []
        restores: dict[Page, PageRestore] = {}
        for request, item in zip(requests, work, strict=True):
            if not request.started:
                reset.append(request.slot)
                regions.append(pages.start(request, restores))
            pages.grow(request, item.num_tokens)
        pages.restore_recent(requests, restores)
        plan = self._draft.take(reset_slots=reset, hot_regions=regions, restores=restores.values())
        self.statistics.steps += 1
        self.statistics.invalidated_blocks += len(plan.invalidate)
        return plan

    def _check_work(self, item: StepWork) -> Request:
        request = self._roster.running(item.request_id)
        end = request.num_computed + item.num_tokens
        if not 1 <= item.num_tokens <= self.config.max_step_tokens or end > request.max_tokens:
            raise UsageError(
                f"{item.num_tokens} tokens for request {item.request_id!r} after "
                f"{request.num_computed}: at most {self.config.max_step_tokens} a step and "
                f"{request.max_tokens} in all"
            )
        return request

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
        self._pages.settle_restores()
        request = self._roster.running(request_id)
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
                mirrors.append(mirror_of(request, page))
        return mirrors

    def enqueued(self, mirrors: Iterable[PageMirror]) -> None:
        """The copies of these pages are in stream order, every layer of them."""
        self._publisher.enqueued(mirrors)

    def completed(self, request_id: str, page_index: int) -> None:
        """The CPU saw the copies of this page complete (`MirrorQueue.poll`)."""
        self._roster.find(request_id).pages[page_index].fire(PageEvent.COMPLETE)

    def dropped(self, host_blocks: Iterable[int]) -> None:
        """No copy into these host blocks is in flight any more (`MirrorQueue.poll_dropped`).

        Blocks that no discarded request has are ignored: they were lost with a daemon.
        """
        blocks = set(host_blocks)
        discarded = [r for r in self._roster.requests.values() if r.end_mode is EndMode.DISCARD]
        for request in discarded if blocks else ():
            done = [page for page in request.pages if page.host_block in blocks]
            for page in done:
                self._pages.forget(request, page)
                request.pages.remove(page)
            self._roster.end_if_done(request)

    def publish(self) -> PublishReport:
        """Tell the service what was mirrored and completed; find what others published.

        The writer sends one message at most, none where nothing happened. A reader looks up the
        requests that have whole pages which it has not seen published: at once where the device
        is short of room, else in growing intervals.

        Raises:
            LeaseError: A lease of a running request is gone.
        """
        # Each rank has both: `commit` gives a reader nothing to mirror, so its publisher rests.
        return self._finder.find() if self.role is Role.READER else self._publisher.publish()

    # --- the end of a request ---------------------------------------------------------------------

    def finish(self, request_id: str, *, mode: EndMode = EndMode.PUBLISH) -> None:
        """End a request, between steps. Its slot is free at once.

        With PUBLISH its whole pages are still mirrored and published. With DISCARD nothing more is
        published; pages whose copies are in flight keep their blocks until `dropped`. Either way
        its lease is given back when no copy of it is in flight.

        Raises:
            UsageError: No such running request.
        """
        self._pages.settle_restores()
        request = self._roster.running(request_id)
        request.end_mode = mode
        waiting: list[Page] = []
        published: list[Page] = []
        for page in request.pages:
            if page.is_published:
                published.append(page)
                self._pages.leave(request, page)
            elif page.state in _IN_FLIGHT[mode]:
                waiting.append(page)
            else:
                self._pages.forget(request, page)
        # Published parents stay in the list of a request that still publishes: it chains to them.
        request.pages = [*published, *waiting] if mode is EndMode.PUBLISH else waiting
        if mode is EndMode.DISCARD:
            self._publisher.discard(request)
        self._pages.leave_slot(request)
        self._roster.leave(request)
        if waiting:
            request.enter(RequestState.FINISHING)
        else:
            self._roster.end(request)

    def preempt(self, request_id: str) -> None:
        """Take a request off the device; admit it again later, with its tokens so far as prompt."""
        self.finish(request_id, mode=EndMode.DISCARD)

    def verify(self) -> None:
        """Check that all blocks which the last step may have read are still what they were (I3).

        Raises:
            StaleBlock, LeaseError: The step's results must not be used.
        """
        for request in self._roster.requests.values():
            if request.lease is not None and request.state is RequestState.RUNNING:
                request.lease.check()

    def lost_requests(self) -> list[str]:
        """Running requests whose published blocks are gone: preempt them and compute them again."""
        return [
            request.request_id
            for request in self._roster.requests.values()
            if request.state is RequestState.RUNNING and not request.holds_its_blocks()
        ]

    def close(self) -> None:
        """Give all leases back. For a worker that stops: its copies must have completed."""
        self._roster.close()

    def check_accounting(self) -> None:
        """Compare all books with each other; for tests, and for whoever suspects a leak.

        Raises:
            InternalError: Device blocks with no or two owners, or promises that do not add up.
        """
        self._pages.check_accounting()
        self._roster.check_accounting()
