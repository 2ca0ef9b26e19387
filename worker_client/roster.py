"""The requests of one worker: who is there, their slots, and the device blocks promised to them.

A request is added when its host blocks are its own, `leave` gives its slot and its promise to
others, and `end` its lease, which may be some steps later: its last pages are still on their way.
On the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hisparse_service.contract.errors import CapacityError, InternalError, UsageError
from hisparse_service.contract.keys import KeyChain
from worker_client.block_service import BlockService
from worker_client.blocks import BlockLease
from worker_client.coordinator_config import CoordinatorConfig
from worker_client.requests import Request, RequestState, Statistics

__all__ = ["Roster"]


class Roster:
    """Owns the requests, their slots and their leases.

    Args:
        service: Takes leases back; borrowed.
        config: Sizes.
        num_device_blocks: Device blocks that can be promised.
        statistics: Counted into.

    Attributes:
        requests: By name, in the order of admission. For others to look at.
    """

    def __init__(
        self,
        service: BlockService,
        config: CoordinatorConfig,
        *,
        num_device_blocks: int,
        statistics: Statistics,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self._service = service
        self._config = config
        self._num_device_blocks = num_device_blocks
        self._statistics = statistics
        self._promised_blocks = 0
        self._free_slots: deque[int] = deque(range(config.max_num_requests))

    @property
    def num_running(self) -> int:
        """Requests that can be stepped."""
        return sum(r.state is RequestState.RUNNING for r in self.requests.values())

    @property
    def num_finishing(self) -> int:
        """Ended requests whose last pages are still on their way to the host."""
        return sum(r.state is RequestState.FINISHING for r in self.requests.values())

    def has(self, request: Request) -> bool:
        """Whether it did not end; another one may have its name."""
        return self.requests.get(request.request_id) is request

    def find(self, request_id: str) -> Request:
        """A request that is there.

        Raises:
            UsageError: It is not.
        """
        request = self.requests.get(request_id)
        if request is None:
            raise UsageError(f"no request {request_id!r}")
        return request

    def running(self, request_id: str) -> Request:
        """A request that can be stepped.

        Raises:
            UsageError: It is not there, or it ended.
        """
        request = self.find(request_id)
        if request.state is not RequestState.RUNNING:
            raise UsageError(f"request {request_id!r} is {request.state.value}")
        return request

    # --- in ---------------------------------------------------------------------------------------

    def check_new(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Whether such a request can be at all, and has room on the device now.

        Raises:
            CapacityError: No request slot, or too few device blocks that are not promised.
            UsageError: The name is taken, an empty prompt, or a length out of range.
        """
        if request_id in self.requests:
            raise UsageError(f"request {request_id!r} exists")
        if not 1 <= len(prompt) <= max_tokens <= self._config.max_model_tokens:
            raise UsageError(
                f"request {request_id!r}: a prompt of {len(prompt)} tokens and at most "
                f"{max_tokens} in all do not fit 1 to {self._config.max_model_tokens}",
                limit=self._config.max_model_tokens,
            )
        needed = self._config.device_blocks_for(max_tokens)
        free = self._num_device_blocks - self._promised_blocks
        if needed > free or not self._free_slots:
            raise CapacityError(
                f"the request needs {needed} device blocks and a slot; {max(free, 0)} blocks "
                f"are not promised and {len(self._free_slots)} slots are free",
                remedy="Wait for a request to end",
                needed=needed,
                free=max(free, 0),
            )

    def add(
        self,
        request_id: str,
        *,
        lease: BlockLease | None,
        chain: KeyChain,
        max_tokens: int,
        prompt_tokens: int,
        num_computed: int,
    ) -> Request:
        """Give a request, which `check_new` let in, its slot and its promise."""
        request = Request(
            request_id=request_id,
            slot=self._free_slots.popleft(),
            lease=lease,
            chain=chain,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            committed_blocks=self._config.device_blocks_for(max_tokens),
            num_computed=num_computed,
        )
        self._promised_blocks += request.committed_blocks
        self.requests[request_id] = request
        return request

    # --- out --------------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """It is stepped no more: its slot and its promise are free at once."""
        self._promised_blocks -= request.committed_blocks
        self._free_slots.append(request.slot)

    def end_if_done(self, request: Request) -> None:
        """End it when it waits for no page any more."""
        if request.state is RequestState.FINISHING and all(
            page.is_published for page in request.pages
        ):
            self.end(request)

    def end(self, request: Request) -> None:
        """Forget it and give its lease back: no copy of it is in flight."""
        request.enter(RequestState.ENDED)
        del self.requests[request.request_id]
        if request.lease is not None:
            self._release(request.lease)

    def close(self) -> None:
        """Give all leases back."""
        leases = [r.lease for r in self.requests.values() if r.lease is not None]
        self.requests.clear()
        if leases:
            self._release(*leases)

    def _release(self, *leases: BlockLease) -> None:
        self._statistics.control_messages += 1
        self._service.release(*leases)

    def check_accounting(self) -> None:
        """Compare what is promised with what the requests have.

        Raises:
            InternalError: They differ, or more is promised than there is.
        """
        promised = sum(
            r.committed_blocks for r in self.requests.values() if r.state is RequestState.RUNNING
        )
        if promised != self._promised_blocks or promised > self._num_device_blocks:
            raise InternalError(
                f"{promised} device blocks are promised, the books say {self._promised_blocks}"
            )
