"""A reader's publication: it finds the pages that its group's writer published, by their keys.

Asking costs a message, so it asks when the writer's events say that copies are done, when the
device is short of room, and else in growing intervals. On the engine's thread.
"""

from __future__ import annotations

from typing import Final

from hisparse_service.contract.errors import LeaseError, ServiceUnavailable
from worker_client.block_service import BlockService, MirrorProgress
from worker_client.device_pages import DevicePages
from worker_client.plan_draft import PlanDraft
from worker_client.requests import PublishReport, Request, Statistics
from worker_client.residency import Page, PageState
from worker_client.roster import Roster

__all__ = ["PageFinder"]

_MAX_BACKOFF_STEPS: Final = 16


class PageFinder:
    """Looks up what a reader's requests have written and not yet seen published.

    Args:
        service: The namespace; borrowed.
        roster: The requests; borrowed.
        pages: Told what was found; borrowed.
        draft: Told of found blocks, and of the steps whose mirrors they are; borrowed.
        progress: How far the writer's copies look to be, or None.
        statistics: Counted into; its steps are the clock.
    """

    def __init__(
        self,
        service: BlockService,
        *,
        roster: Roster,
        pages: DevicePages,
        draft: PlanDraft,
        progress: MirrorProgress | None,
        statistics: Statistics,
    ) -> None:
        self._service = service
        self._roster = roster
        self._pages = pages
        self._draft = draft
        self._progress = progress
        self._statistics = statistics

    def find(self) -> PublishReport:
        """Ask for the whole pages of every request for which it is time to ask."""
        published = messages = 0
        for request in list(self._roster.requests.values()):
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
            request.next_lookup_step = self._statistics.steps + wait
        self._statistics.control_messages += messages
        return PublishReport(published=published, messages=messages)

    def _is_lookup_due(self, request: Request, page: Page) -> bool:
        """Whether to ask for a page that the writer may have published by now."""
        steps = self._statistics.steps
        if self._pages.is_short_of_room:
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
        blocks = lease.blocks[before:].tolist()
        generations = lease.generations[before:].tolist()
        self._draft.invalidate.extend(blocks)
        found = request.pages[start : start + len(blocks)]
        for page, block, generation in zip(found, blocks, generations, strict=True):
            self._pages.publish(request, page, block, generation)
            self._draft.mirror_step = max(self._draft.mirror_step, page.sealed_step)
        self._roster.end_if_done(request)
        return len(blocks)
