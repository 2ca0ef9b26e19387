"""The writer's mirrors: which rows are on their way to host memory, and which blocks have arrived.

A block may be published when, and only when (I2): every row of every layer of it was mirrored,
draft layers included; the copies are *completed* (the CPU saw it, not merely enqueued them); all
its tokens are accepted (a speculative row that was rejected proves nothing); and every earlier
block of its request is publishable too. This module decides that and nothing else: no sockets, no
policy. The coordinator publishes what `MirrorQueue.poll` returns.

Copies that belong to one step share one ticket: ``submit_*`` (or ``note_*`` where a captured graph
did the copy), then `MirrorQueue.seal` once, in stream order. Nothing is ever called from a stream
callback: `MirrorQueue.poll` asks the tracker, off the critical path.

Used from one thread, the worker's compute thread; there is no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    CapacityError,
    DeviceError,
    IllegalTransition,
    UsageError,
)
from worker_client.device_lists import to_device
from worker_client.kernels.interface import GroupPages, KernelBackend

__all__ = [
    "BlockMirror",
    "CompletedBlock",
    "CompletionTracker",
    "DeferredTracker",
    "EventTracker",
    "ImmediateTracker",
    "MirrorQueue",
    "RowMirror",
    "check_not_capturing",
]


_AFTER_SUBMIT: Final = declare("mirror_queue.after_submit")
_AFTER_SEAL: Final = declare("mirror_queue.after_seal")
_AFTER_COMPLETED: Final = declare("mirror_queue.after_completed")


class CompletionTracker(Protocol):
    """Tells when the copies enqueued so far have completed. Polled, never a callback."""

    def record(self) -> Any:
        """Mark this place of the current stream; returns a ticket."""
        ...

    def is_complete(self, ticket: Any) -> bool:
        """Whether everything before the ticket's place has completed.

        Raises:
            DeviceError: The device failed; nothing after this may be published.
        """
        ...

    def release(self, ticket: Any) -> None:
        """The ticket is not asked about again."""
        ...


class ImmediateTracker:
    """For copies that are complete when the call returns: the CPU reference."""

    def record(self) -> None:
        """Nothing to mark."""

    def is_complete(self, ticket: Any) -> bool:
        """Always."""
        del ticket
        return True

    def release(self, ticket: Any) -> None:
        """Nothing to give back."""
        del ticket


class DeferredTracker:
    """Completes when told: a device whose progress a test or demonstration steers."""

    def __init__(self) -> None:
        self.recorded = 0
        self.completed = 0

    def record(self) -> int:
        """Number the ticket."""
        self.recorded += 1
        return self.recorded

    def complete(self, count: int | None = None) -> None:
        """Let the next ``count`` tickets complete (all by default)."""
        left = self.recorded - self.completed
        self.completed += left if count is None else min(count, left)

    def is_complete(self, ticket: Any) -> bool:
        """Whether `complete` has reached the ticket."""
        return bool(ticket <= self.completed)

    def release(self, ticket: Any) -> None:
        """Nothing to give back."""
        del ticket


class EventTracker:
    """CUDA events on the current stream, reused, polled with ``query``."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        """Make a tracker.

        Args:
            make_event: Makes an event with ``record()`` and ``query()``; by default a CUDA event
                without timing.
        """
        self._make_event = make_event or torch.cuda.Event
        self._free: list[Any] = []

    def record(self) -> Any:
        """Record an event.

        Raises:
            UsageError: Inside a captured region: a replay would record nothing that can be asked.
        """
        check_not_capturing("an event that tells of completed mirrors")
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def is_complete(self, ticket: Any) -> bool:
        """Ask the event.

        Raises:
            DeviceError: The device failed.
        """
        try:
            return bool(ticket.query())
        except RuntimeError as error:
            raise DeviceError(
                f"the device failed while rows were mirrored: {str(error).splitlines()[0]}",
                remedy="Restart the worker: nothing that it had not published yet is",
                call="cudaEventQuery",
            ) from error

    def release(self, ticket: Any) -> None:
        """Keep the event for the next record."""
        self._free.append(ticket)


def check_not_capturing(what: str) -> None:
    """Refuse to record an event into a graph where it is meant for the host.

    Raises:
        UsageError: The current stream is being captured.
    """
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if is_built and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"{what} was recorded in a captured region",
            remedy="record it behind each replay of the graph",
        )


@dataclass(frozen=True, slots=True)
class BlockMirror:
    """One whole block to copy. ``block_index`` counts the request's blocks from 0."""

    request: Hashable
    block_index: int
    device_block: int


@dataclass(frozen=True, slots=True)
class RowMirror:
    """A span of rows of one block to copy: rows ``row .. row + count``."""

    request: Hashable
    block_index: int
    device_block: int
    row: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class CompletedBlock:
    """A block whose every byte is in host memory: may be published now, in this order."""

    request: Hashable
    block_index: int
    host_block: int


@dataclass(slots=True)
class _Block:
    """Progress of one block: per unit, rows mirrored (a bit each) and the last batch that did."""

    host_block: int
    rows: list[int]
    last_batch: list[int]


@dataclass(slots=True)
class _Request:
    next_index: int
    """Blocks before it are published, or were handed out by `poll`."""
    accepted_tokens: int = 0
    blocks: dict[int, _Block] = field(default_factory=dict)


_NO_BATCH: Final = 0


class MirrorQueue:
    """Mirrors of one worker's requests, from enqueue to "may be published".

    A *unit* is what is mirrored at once: an index group, or a layer; draft layers are units of
    their own. A block needs all ``num_units`` of them.
    """

    def __init__(
        self,
        *,
        num_units: int,
        block_size: int,
        tracker: CompletionTracker,
        backend: KernelBackend,
        max_blocks: int = limits.MAX_QUEUED_MIRRORS,
    ) -> None:
        """Make an empty queue.

        Args:
            num_units: Units that every block consists of.
            block_size: Rows of a block.
            tracker: Tells when copies have completed.
            backend: Does the copies of ``submit_*``.
            max_blocks: Most blocks that are tracked at once: mirrored in part, in flight, or
                completed and not yet published.
        """
        if num_units < 1 or block_size < 1 or max_blocks < 1:
            raise UsageError(
                f"num_units={num_units}, block_size={block_size} and max_blocks={max_blocks} must "
                "be positive"
            )
        self._num_units = num_units
        self._block_size = block_size
        self._tracker = tracker
        self._backend = backend
        self._max_blocks = max_blocks
        self._requests: dict[Hashable, _Request] = {}
        self._num_blocks = 0
        self._open_batch = 1
        self._open_used = False
        self._completed_batch = _NO_BATCH
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._dropped: deque[tuple[int, int]] = deque()

    # --- requests --------------------------------------------------------------------------------

    def open_request(self, request: Hashable, *, first_block: int = 0) -> None:
        """Start to track a request.

        Args:
            request: Its name.
            first_block: Blocks before it are published already (a prefix that was found).

        Raises:
            IllegalTransition: It is open.
        """
        if request in self._requests:
            raise IllegalTransition(f"request {request!r} is open already", state="open")
        self._requests[request] = _Request(
            next_index=first_block, accepted_tokens=first_block * self._block_size
        )

    def add_block(self, request: Hashable, block_index: int, host_block: int) -> None:
        """Say where a block of the request goes in host memory, before its first mirror.

        Raises:
            UsageError: Unknown request, null block, or a block that is known or published.
            CapacityError: ``max_blocks`` are tracked. Nothing was changed.
        """
        state = self._request(request)
        if host_block < 1:
            raise UsageError(
                f"host block {host_block} is never mirrored into (0 is the null block)"
            )
        if block_index < state.next_index or block_index in state.blocks:
            raise UsageError(f"block {block_index} of request {request!r} is known already")
        if self.num_tracked_blocks >= self._max_blocks:
            raise CapacityError(
                f"{self._max_blocks} blocks wait for their mirrors or their publication",
                remedy="poll and publish before mirroring more",
                needed=1,
                free=0,
            )
        units = self._num_units
        state.blocks[block_index] = _Block(host_block, [0] * units, [_NO_BATCH] * units)
        self._num_blocks += 1

    def accept(self, request: Hashable, num_tokens: int) -> None:
        """Say how many tokens of the request are final. What was mirrored past them is void.

        To be called after each step, once its speculative tokens are accepted or rejected. A row
        past ``num_tokens`` must be mirrored again when its position is computed again.

        Raises:
            UsageError: Unknown request, or fewer tokens than were accepted before.
        """
        state = self._request(request)
        if num_tokens < state.accepted_tokens:
            raise UsageError(
                f"request {request!r} had {state.accepted_tokens} accepted tokens, now {num_tokens}"
            )
        state.accepted_tokens = num_tokens
        size = self._block_size
        for index, block in state.blocks.items():
            kept = min(max(num_tokens - index * size, 0), size)
            if kept < size:
                mask = (1 << kept) - 1
                block.rows = [rows & mask for rows in block.rows]

    def drop_request(self, request: Hashable) -> None:
        """Forget a request (finished, aborted, preempted): nothing more of it is published.

        Its unpublished host blocks come out of `poll_dropped` once no copy into them is in flight;
        only then may they be given back.

        Raises:
            UsageError: Unknown request.
        """
        state = self._request(request)
        del self._requests[request]
        # In flight at this moment; batches complete in order, so the latest one decides.
        self._dropped.extend(
            (max(block.last_batch), block.host_block) for block in state.blocks.values()
        )

    # --- copies ----------------------------------------------------------------------------------

    def submit_blocks(self, unit: int, pages: GroupPages, mirrors: Sequence[BlockMirror]) -> None:
        """Enqueue whole blocks of one unit on the current stream.

        Raises:
            UsageError: Unknown unit, request or block. Nothing was enqueued.
        """
        self._check_unit(unit)
        blocks = [self._block(mirror.request, mirror.block_index) for mirror in mirrors]
        if not blocks:
            return
        device = pages.device[0].device
        self._backend.mirror_blocks(
            pages=pages,
            device_blocks=to_device(
                [mirror.device_block for mirror in mirrors], torch.int32, device
            ),
            host_blocks=to_device([block.host_block for block in blocks], torch.int32, device),
        )
        crash_point(_AFTER_SUBMIT)
        for block in blocks:
            self._note(block, unit, (1 << self._block_size) - 1)

    def submit_rows(self, unit: int, pages: GroupPages, mirrors: Sequence[RowMirror]) -> None:
        """Enqueue spans of rows of one unit: what a decode step wrote.

        Raises:
            UsageError: Unknown unit, request or block, or rows past the block. Nothing was
                enqueued.
        """
        self._check_unit(unit)
        found = [(mirror, *self._span(mirror)) for mirror in mirrors]
        if not found:
            return
        size = self._block_size
        device_slots = [
            mirror.device_block * size + mirror.row + row
            for mirror, _, _ in found
            for row in range(mirror.count)
        ]
        host_slots = [
            block.host_block * size + mirror.row + row
            for mirror, block, _ in found
            for row in range(mirror.count)
        ]
        device = pages.device[0].device
        self._backend.mirror_rows(
            pages=pages,
            device_slots=to_device(device_slots, torch.int64, device),
            host_slots=to_device(host_slots, torch.int64, device),
        )
        for _, block, mask in found:
            self._note(block, unit, mask)

    def note_rows(self, unit: int, mirrors: Sequence[RowMirror]) -> None:
        """Record copies that something else enqueued (a replayed graph), before `seal`.

        Rows of tokens that were rejected already are not noted: what is noted behind an `accept`
        is of the tokens that come next. A draft layer that writes late writes accepted tokens.

        Raises:
            UsageError: As `submit_rows`.
        """
        self._check_unit(unit)
        for block, mask in [self._span(mirror) for mirror in mirrors]:
            self._note(block, unit, mask)

    def seal(self) -> None:
        """End the step's batch: everything submitted or noted since the last call gets a ticket."""
        if not self._open_used:
            return
        self._in_flight.append((self._open_batch, self._tracker.record()))
        crash_point(_AFTER_SEAL)
        self._open_batch += 1
        self._open_used = False

    # --- results ---------------------------------------------------------------------------------

    def poll(self, limit: int | None = None) -> list[CompletedBlock]:
        """Take the blocks that may be published now.

        Args:
            limit: Most blocks to take; the rest stays queued (a daemon that is away).

        Returns:
            Blocks of each request in order, each once. What is returned is the caller's: it must
            publish it or give the host block back.
        """
        self._advance()
        crash_point(_AFTER_COMPLETED)
        taken: list[CompletedBlock] = []
        for name, request in self._requests.items():
            while limit is None or len(taken) < limit:
                index = request.next_index
                block = request.blocks.get(index)
                if block is None or not self._is_publishable(request, index, block):
                    break
                del request.blocks[index]
                request.next_index += 1
                self._num_blocks -= 1
                taken.append(CompletedBlock(name, index, block.host_block))
        return taken

    def poll_dropped(self) -> list[int]:
        """Take the host blocks of dropped requests that no copy writes any more."""
        self._advance()
        free: list[int] = []
        waiting: deque[tuple[int, int]] = deque()
        for last_batch, host_block in self._dropped:
            if last_batch <= self._completed_batch:
                free.append(host_block)
                self._num_blocks -= 1
            else:
                waiting.append((last_batch, host_block))
        self._dropped = waiting
        return free

    def is_completed(self, request: Hashable, block_index: int) -> bool:
        """Whether every unit of the block is in host memory, whatever the blocks before it are.

        Raises:
            UsageError: Unknown request.
        """
        state = self._request(request)
        if block_index < state.next_index:
            return True
        self._advance()
        block = state.blocks.get(block_index)
        return block is not None and self._is_publishable(state, block_index, block)

    @property
    def num_tracked_blocks(self) -> int:
        """Blocks that count against the limit."""
        return self._num_blocks

    @property
    def num_in_flight_batches(self) -> int:
        """Sealed batches that have not been seen to complete."""
        return len(self._in_flight)

    # --- inside ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._in_flight and self._tracker.is_complete(self._in_flight[0][1]):
            self._completed_batch, ticket = self._in_flight.popleft()
            self._tracker.release(ticket)

    def _is_publishable(self, request: _Request, index: int, block: _Block) -> bool:
        full = (1 << self._block_size) - 1
        return (
            (index + 1) * self._block_size <= request.accepted_tokens
            and all(rows == full for rows in block.rows)
            and max(block.last_batch) <= self._completed_batch
        )

    def _note(self, block: _Block, unit: int, mask: int) -> None:
        block.rows[unit] |= mask
        block.last_batch[unit] = self._open_batch
        self._open_used = True

    def _span(self, mirror: RowMirror) -> tuple[_Block, int]:
        block = self._block(mirror.request, mirror.block_index)
        end = mirror.row + mirror.count
        if mirror.row < 0 or mirror.count < 1 or end > self._block_size:
            raise UsageError(f"rows {mirror.row} to {end} of a block of {self._block_size} rows")
        return block, ((1 << mirror.count) - 1) << mirror.row

    def _check_unit(self, unit: int) -> None:
        if not 0 <= unit < self._num_units:
            raise UsageError(f"unit {unit}, this queue has {self._num_units}")

    def _request(self, request: Hashable) -> _Request:
        state = self._requests.get(request)
        if state is None:
            raise UsageError(f"request {request!r} is not open")
        return state

    def _block(self, request: Hashable, block_index: int) -> _Block:
        block = self._request(request).blocks.get(block_index)
        if block is None:
            raise UsageError(
                f"block {block_index} of request {request!r} is not known, or published already",
                remedy="call add_block before its first mirror",
            )
        return block
