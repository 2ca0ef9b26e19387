"""The writer's publication: what was mirrored and completed becomes readable by everybody (I2).

One message a step at most. What the service cannot answer waits in the client (`handed`), what a
new daemon does not have is mirrored anew (`Recalled`), and where a published parent is gone, its
request publishes no more (`lost`). `worker_client.publication` sends what is put together here.

On the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hisparse_service.contract.errors import HiSparseError, PublishOutOfOrder
from hisparse_service.contract.limits import MAX_BATCH_ITEMS
from worker_client.block_service import BlockContent, BlockService
from worker_client.coordinator_config import CoordinatorConfig
from worker_client.device_pages import DevicePages
from worker_client.plan_draft import PlanDraft
from worker_client.publication import Completed, Enqueued, MirrorOutcome, MirrorResult
from worker_client.requests import (
    EndMode,
    PageMirror,
    PublishReport,
    Recalled,
    Request,
    RequestState,
    Statistics,
    mirror_of,
)
from worker_client.residency import Page, PageEvent, PageState
from worker_client.roster import Roster

__all__ = ["PagePublisher"]

Run = tuple[Request, list[Page]]
"""Completed pages that continue the published prefix of their request."""


class PagePublisher:
    """Publishes the pages of a writer's requests.

    Args:
        service: The namespace; borrowed.
        config: Sizes.
        roster: The requests; borrowed.
        pages: Told what was published; borrowed.
        draft: Told of host blocks that are others' now, or new; borrowed.
        content: Gives each published block its checksum, or None for none. 1 ms a MB.
        statistics: Counted into.
    """

    def __init__(
        self,
        service: BlockService,
        config: CoordinatorConfig,
        *,
        roster: Roster,
        pages: DevicePages,
        draft: PlanDraft,
        content: BlockContent | None,
        statistics: Statistics,
    ) -> None:
        self._service = service
        self._config = config
        self._roster = roster
        self._pages = pages
        self._draft = draft
        self._content = content
        self._statistics = statistics
        self._enqueued: list[tuple[Request, Page]] = []
        """Pages whose copies are in stream order, and the service was not told."""
        self._handed: list[tuple[Completed, Run]] = []
        """What the client keeps for a daemon that is away; no pages: the request was discarded."""
        self._lost: set[Request] = set()
        """Requests whose next page has a parent that was withdrawn: they publish no more."""

    def enqueued(self, mirrors: Iterable[PageMirror]) -> None:
        """The copies of these pages are in stream order, every layer of them."""
        for mirror in mirrors:
            request = self._roster.find(mirror.request_id)
            page = request.pages[mirror.page]
            page.fire(PageEvent.ENQUEUE)
            self._enqueued.append((request, page))
            self._statistics.mirrored_pages += 1

    def discard(self, request: Request) -> None:
        """Nothing of this request is to be published any more."""
        self._handed = [
            (item, (owner, [] if owner is request else pages))
            for item, (owner, pages) in self._handed
        ]

    def publish(self) -> PublishReport:
        """Tell the service what happened since the last time, if anything did.

        Raises:
            LeaseError: A lease of a running request is gone.
        """
        statistics = self._statistics
        before = (statistics.published_pages, statistics.merged_pages)
        if self._lost:
            self._end_lost()
        if self._handed:
            self._settle_handed_in()
        recalled = self._recall_lost()
        queued = messages = 0
        mirrors: list[PageMirror] = []
        runs = self._completed_runs()
        wanting = [r for r in self._roster.requests.values() if r.wanted_blocks and r.is_granted]
        if self._enqueued:
            self._enqueued = [
                (request, page)
                for request, page in self._enqueued
                if request.state is not RequestState.ENDED and request.is_granted
            ]
        if self._enqueued or runs or wanting:
            messages = 1
            statistics.control_messages += 1
            items = [self._completed_item(request, pages) for request, pages in runs]
            try:
                result = self._service.mirror(
                    enqueued=_enqueued_items(self._enqueued),
                    completed=items,
                    reserve=[(r.held_lease, r.wanted_blocks) for r in wanting],
                )
            except HiSparseError as error:
                # Nothing changed. It may be that another daemon took over while we asked, or that
                # damage was found in a prefix: what is not to blame is published the next time.
                if self._handed:
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
            published=statistics.published_pages - before[0],
            merged=statistics.merged_pages - before[1],
            queued=queued,
            messages=messages,
            recalled=tuple(recalled),
            mirrors=tuple(mirrors),
        )

    # --- what is told -----------------------------------------------------------------------------

    def _completed_runs(self) -> list[Run]:
        """For each request, the completed pages that continue its published prefix."""
        # The parent of the next page is known only when the queued ones are settled.
        waiting = {request for _, (request, pages) in self._handed if pages}
        runs: list[Run] = []
        for request in self._roster.requests.values():
            if request in waiting or request in self._lost or not request.is_granted:
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
            lease=request.held_lease,
            blocks=blocks,
            generations=_u32(page.generation for page in pages),
            keys=request.chain.keys(first, first + len(pages)),
            parent=parent.host_block if parent else 0,
            parent_generation=parent.generation if parent else 0,
            checksums=None if self._content is None else self._content.checksum(blocks),
        )

    # --- what the service answers -----------------------------------------------------------------

    def _take_result(
        self, result: MirrorResult, items: Sequence[Completed], runs: Sequence[Run]
    ) -> int:
        """Note what was published; returns how many pages wait in the client instead."""
        if result.outcome is MirrorOutcome.ACKNOWLEDGED:
            self._settle(runs, result.canonical_blocks, result.canonical_generations)
            return 0
        self._handed.extend(zip(items, runs, strict=True))
        return sum(len(pages) for _, pages in runs)

    def _settle(
        self, runs: Sequence[Run], canonical_blocks: Any, canonical_generations: Any
    ) -> None:
        """Note what was published, and the block that holds it now."""
        published = [(request, page) for request, pages in runs for page in pages]
        for (request, page), block, generation in zip(
            published, canonical_blocks.tolist(), canonical_generations.tolist(), strict=True
        ):
            own = page.host_block
            self._pages.publish(request, page, block, generation)
            if block != own:
                self._statistics.merged_pages += 1
                # The loser's block went back to the service: it is not ours to read any more.
                self._draft.invalidate.append(own)
        for request, _ in runs:
            self._roster.end_if_done(request)

    def _settle_handed_in(self) -> None:
        """Take the service's answers to what was queued while it was away."""
        for answer in self._service.handed_in():
            at = next(
                (i for i, (item, _) in enumerate(self._handed) if item is answer.completed), None
            )
            if at is None:
                continue
            _, (request, pages) = self._handed.pop(at)
            if not pages:  # its request was discarded meanwhile
                continue
            if answer.canonical_blocks is not None and answer.canonical_generations is not None:
                self._settle(
                    [(request, pages)], answer.canonical_blocks, answer.canonical_generations
                )
                continue
            for page in pages:
                self._recall(page)
            # The same daemon may have refused them; ask for other blocks in any case.
            request.num_lost_blocks = -1

    def _take_reserved(self, wanting: Sequence[Request], result: MirrorResult) -> list[PageMirror]:
        """Give reserved blocks to the pages that lost theirs; returns what to mirror again."""
        mirrors: list[PageMirror] = []
        for request, (blocks, generations) in zip(wanting, result.reserved, strict=True):
            if not len(blocks):
                continue  # no room now: asked for again
            request.wanted_blocks = 0
            request.spare_host = list(zip(blocks.tolist(), generations.tolist(), strict=True))
            self._draft.invalidate.extend(blocks.tolist())
            for page in request.pages:
                if page.host_block:
                    continue
                page.host_block, page.generation = request.spare_host.pop(0)
                if page.state is PageState.SEALED:
                    mirrors.append(mirror_of(request, page))
        return mirrors

    # --- what was lost ----------------------------------------------------------------------------

    def _recall_lost(self) -> list[Recalled]:
        """Take back the pages whose reserved blocks a new daemon did not give us again."""
        recalled: list[Recalled] = []
        for request in self._roster.requests.values():
            lost = 0 if request.lease is None else len(request.lease.lost_blocks)
            if lost == request.num_lost_blocks or request.end_mode is EndMode.DISCARD:
                continue
            request.num_lost_blocks = lost
            request.spare_host.clear()
            self._enqueued = [item for item in self._enqueued if item[0] is not request]
            handed = {page for _, (_, pages) in self._handed for page in pages}
            for page in request.pages:
                if not page.is_published and page not in handed:
                    self._recall(page)
            kept = sum(page.host_block > 0 for page in request.pages)
            num_pages = len(request.pages)
            if request.state is RequestState.RUNNING:
                num_pages = self._config.pages_for(request.max_tokens) + 1
            request.wanted_blocks = num_pages - kept
            recalled.append(
                Recalled(request.request_id, request.num_published(), request.num_computed)
            )
        return recalled

    def _recall(self, page: Page) -> None:
        if page.state in (PageState.MIRRORING, PageState.COMPLETED):
            page.fire(PageEvent.RECALL)
            self._statistics.recalled_pages += 1
        page.host_block = page.generation = 0

    def _note_lost(self, runs: Sequence[Run]) -> bool:
        """Find the requests whose published blocks are gone; False: there is none."""
        lost = [request for request, _ in runs if not request.holds_its_blocks()]
        self._lost.update(lost)
        return bool(lost)

    def _end_lost(self) -> None:
        """Requests that ended and whose last pages can hang nowhere any more.

        Running ones are `lost_requests`: the engine computes them anew.
        """
        self._lost = {request for request in self._lost if self._roster.has(request)}
        for request in self._lost:
            if request.state is not RequestState.FINISHING or any(
                page.state is PageState.MIRRORING for page in request.pages
            ):
                continue
            for page in request.pages:
                if not page.is_published:
                    self._pages.forget(request, page)
            request.pages.clear()
            self._roster.end(request)


def _enqueued_items(pages: Sequence[tuple[Request, Page]]) -> list[Enqueued]:
    by_request: dict[str, list[tuple[Request, Page]]] = {}
    for request, page in pages:
        by_request.setdefault(request.request_id, []).append((request, page))
    return [
        Enqueued(
            lease=run[0][0].held_lease,
            blocks=_u32(page.host_block for _, page in run),
            generations=_u32(page.generation for _, page in run),
        )
        for run in by_request.values()
    ]


def _u32(values: Iterable[int]) -> Any:
    return np.fromiter(values, dtype=np.uint32)
