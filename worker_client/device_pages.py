"""Which pages of requests are on the device, which may leave it, and which come back.

Owns every device block of pages and hot regions. A page leaves only when its host copy is published
(I2); a published page that two requests share is one page. What changes in a request's tables goes
into the draft of the next plan. On the engine's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hisparse_service.contract.errors import CapacityError, InternalError
from worker_client.coordinator_config import CoordinatorConfig, Role
from worker_client.plan_draft import PlanDraft
from worker_client.requests import (
    HotRegion,
    PageRestore,
    Request,
    RequestState,
    Statistics,
    StepWork,
    TableUpdate,
)
from worker_client.residency import DevicePool, Page, PageEvent, PageState
from worker_client.roster import Roster

__all__ = ["DevicePages"]


class DevicePages:
    """The device's pages.

    Args:
        pool: Device blocks; taken and given back here alone.
        config: Sizes.
        role: A WRITER's new page must have a host block.
        roster: Whose pages they are; borrowed.
        draft: Told what the worker must write; borrowed.
        statistics: Counted into.

    Attributes:
        is_short_of_room: Whether the last step was refused: pages must be published first.
    """

    def __init__(
        self,
        pool: DevicePool,
        config: CoordinatorConfig,
        *,
        role: Role,
        roster: Roster,
        draft: PlanDraft,
        statistics: Statistics,
    ) -> None:
        self.is_short_of_room = False
        self._pool = pool
        self._config = config
        self._role = role
        self._roster = roster
        self._draft = draft
        self._statistics = statistics
        self._by_host: dict[int, Page] = {}
        """Published pages of running requests, by host block: what a prefix hit may share."""
        self._clean: OrderedDict[Page, None] = OrderedDict()
        """Pages that may be spilled, in the order in which they would be."""
        self._restoring: list[Page] = []

    def take_leased(self, request: Request, num_hits: int) -> None:
        """Make pages of the hit blocks, and keep the reserved ones for pages to come."""
        lease = request.lease
        if lease is None:
            return
        for index, (block, generation) in enumerate(
            zip(
                lease.blocks[:num_hits].tolist(), lease.generations[:num_hits].tolist(), strict=True
            )
        ):
            page = self._by_host.get(block)
            if page is None:
                page = Page(index, PageState.SPILLED, block, generation)
                self._by_host[block] = page
                self._draft.invalidate.append(block)
            page.owners.add(request.request_id)
            request.pages.append(page)
        reserved = zip(
            lease.reserved_blocks.tolist(), lease.reserved_generations.tolist(), strict=True
        )
        request.spare_host.extend(reserved)
        self._draft.invalidate.extend(block for block, _ in request.spare_host)

    # --- for a step -------------------------------------------------------------------------------

    def make_room(self, requests: Sequence[Request], work: Sequence[StepWork]) -> None:
        """Spill pages until the step's new blocks are free.

        Raises:
            CapacityError: Too few can be spilled; nothing was changed.
        """
        num_blocks = self._blocks_needed(requests, work)
        free = self._pool.num_free
        room = free + len(self._clean) * self._config.num_resident_groups
        self.is_short_of_room = num_blocks > room
        if self.is_short_of_room:
            raise CapacityError(
                f"the step needs {num_blocks} device blocks, {room} are free or can be spilled",
                remedy="Publish what is mirrored, and try again",
                needed=num_blocks,
                free=room,
            )
        while free < num_blocks:
            page, _ = self._clean.popitem(last=False)
            page.fire(PageEvent.SPILL)
            self._pool.give_back(page.resident_blocks)
            page.resident_blocks = ()
            self._note_update(page)
            self._statistics.spilled_pages += 1
            free = self._pool.num_free

    def _blocks_needed(self, requests: Sequence[Request], work: Sequence[StepWork]) -> int:
        per_page = self._config.num_resident_groups + 1
        needed = 0
        without_keys: set[Page] = set()
        for request, item in zip(requests, work, strict=True):
            pages = self._config.pages_for(request.num_computed + item.num_tokens)
            needed += max(pages - len(request.pages), 0) * per_page
            if not request.started:
                needed += self._config.hot_blocks
                without_keys.update(p for p in request.pages if not p.indexer_block)
        return needed + len(without_keys)

    def start(self, request: Request, restores: dict[Page, PageRestore]) -> HotRegion:
        """Give a request its hot regions, and the keys of its found prefix."""
        request.started = True
        config = self._config
        request.hot_blocks = self._pool.take(config.hot_blocks)
        for page in request.pages:
            if not page.indexer_block:
                (page.indexer_block,) = self._pool.take(1)
                restores[page] = PageRestore(page.host_block, (), page.indexer_block)
                self._statistics.restored_indexer_pages += 1
            self._note_update(page)
        per_group = config.hot_blocks_per_request
        return HotRegion(
            request.slot,
            tuple(
                request.hot_blocks[group * per_group : (group + 1) * per_group]
                for group in range(config.num_hot_groups)
            ),
        )

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give a request the pages that these tokens are written to."""
        pages = self._config.pages_for(request.num_computed + num_tokens)
        while len(request.pages) < pages:
            page = Page(len(request.pages), owners={request.request_id})
            if request.spare_host:
                page.host_block, page.generation = request.spare_host.pop(0)
            elif self._role is Role.WRITER and not request.wanted_blocks:
                raise InternalError(f"request {request.request_id!r} has no host block left")
            *resident, page.indexer_block = self._pool.take(self._config.num_resident_groups + 1)
            page.resident_blocks = tuple(resident)
            request.pages.append(page)
            self._note_update(page)

    def restore_recent(
        self, requests: Sequence[Request], restores: dict[Page, PageRestore]
    ) -> None:
        """Bring back the latest spilled pages while the device has room to spare.

        What is kept free is two pages for each running request, so that a page is not brought back
        only to be spilled by the next step's growth.
        """
        groups = self._config.num_resident_groups
        keep_free = 2 * (groups + 1) * self._roster.num_running
        budget = min(
            self._config.max_restores_per_step,
            max(self._pool.num_free - keep_free, 0) // groups,
        )
        for request in requests:
            for page in reversed(request.pages):
                if budget <= 0:
                    return
                if page.state is not PageState.SPILLED:
                    continue
                page.fire(PageEvent.RESTORE)
                page.resident_blocks = self._pool.take(groups)
                keys = restores[page].indexer_block if page in restores else 0
                restores[page] = PageRestore(page.host_block, page.resident_blocks, keys)
                self._restoring.append(page)
                self._note_update(page)
                self._statistics.restored_pages += 1
                budget -= 1

    def settle_restores(self) -> None:
        """The step that copied them is over, so the restored pages may be spilled again."""
        for page in self._restoring:
            if page.state is PageState.RESTORING:
                page.fire(PageEvent.RESTORED)
                self._clean[page] = None
        self._restoring.clear()

    # --- published, left --------------------------------------------------------------------------

    def publish(self, request: Request, page: Page, block: int, generation: int) -> None:
        """A page of the request is readable, in this host block: it may be spilled, and shared."""
        page.fire(PageEvent.PUBLISH)
        self._statistics.published_pages += 1
        known = self._by_host.get(block)
        if known is not None and known is not page:
            # This worker has the page already: one copy on the device is enough. Where none of its
            # requests has started, that copy has no keys yet, and these are needed.
            if not known.indexer_block:
                known.indexer_block, page.indexer_block = page.indexer_block, 0
            self._give_back(page)
            known.owners.add(request.request_id)
            request.pages[page.index] = known
            page = known
        else:
            page.host_block, page.generation = block, generation
            self._by_host[block] = page
            self._clean[page] = None
        if request.state is RequestState.FINISHING:
            self.leave(request, page)
            return
        self._note_update(page)

    def leave(self, request: Request, page: Page) -> None:
        """A request leaves a published page; the last one to leave gives its device blocks back."""
        page.owners.discard(request.request_id)
        if page.owners:
            return
        if self._by_host.get(page.host_block) is page:
            del self._by_host[page.host_block]
        self._clean.pop(page, None)
        self._give_back(page)

    def forget(self, request: Request, page: Page) -> None:
        """Give back the device blocks of a page that is not published."""
        page.owners.discard(request.request_id)
        self._give_back(page)

    def leave_slot(self, request: Request) -> None:
        """Take a request's hot regions back; nothing of its tables is written any more."""
        self._pool.give_back(request.hot_blocks)
        request.hot_blocks = ()
        self._draft.forget_slot(request.slot)

    def _give_back(self, page: Page) -> None:
        self._pool.give_back(page.device_blocks)
        page.resident_blocks, page.indexer_block = (), 0

    def _note_update(self, page: Page) -> None:
        """Write the page's entries for the next plan, for every started owner."""
        for name in page.owners:
            request = self._roster.requests[name]
            if request.started and request.state is RequestState.RUNNING:
                self._draft.updates[request.slot, page.index] = TableUpdate(
                    request.slot,
                    page.index,
                    # Before publication there is no host row to read, not even one's own (I2).
                    page.host_block if page.is_published else 0,
                    page.resident_blocks,
                    page.indexer_block,
                )

    def check_accounting(self) -> None:
        """Compare the blocks that are out with those that pages and hot regions have.

        Raises:
            InternalError: A block with no or two owners, or a clean page that is not listed.
        """
        requests = self._roster.requests.values()
        pages = {page: None for request in requests for page in request.pages if page.device_blocks}
        held = [block for page in pages for block in page.device_blocks]
        held += [block for request in requests for block in request.hot_blocks]
        used = self._pool.capacity - self._pool.num_free
        if len(held) != len(set(held)) or len(held) != used or 0 in held:
            raise InternalError(
                f"{len(held)} device blocks have owners ({len(set(held))} distinct), {used} are out"
            )
        spillable = {page for page in pages if page.state is PageState.CLEAN}
        if spillable != set(self._clean):
            raise InternalError(
                f"{len(spillable)} pages are clean, {len(self._clean)} are listed to be spilled"
            )
