"""Gathers beside the computation: a side stream that an index group's rows are copied on.

As soon as a leader's plan is known, the rows of its group are on their way: the copies are forked
off the compute stream behind the resolve, and each layer joins them where it first reads its rows.
What is computed in between (the rest of the leader's projections, the layers before a follower)
hides the copies. Fork and join are events, so a captured graph has them as edges.

Layers of one launch arrive together. `GatherSplit` says how many launches there are: one for the
whole group reads a row's layers side by side (group_interleaved), but lets the leader wait for
rows that only its followers read. The leader's launch is waited for at once, so it takes all the
multiprocessors it can use; what the others take is the caller's choice (`Overlap`).

The compute stream may do anything between fork and join but what the copies touch: it must not
resolve with the same plan (`GroupPrefetch.start` waits for that itself), nor read or overwrite hot
rows of layers that it has not joined. Every fork is joined before a capture ends.

On the worker's compute thread only.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch

from hisparse_service.contract.errors import UsageError
from worker_client.kernels.interface import Overlap

__all__ = ["CopyLane", "GatherSplit", "GroupPrefetch", "InlineLane", "SideStream", "lane_for"]


class GatherSplit(enum.Enum):
    """Which layers of a group share a launch, in the order of the launches."""

    GROUP = "group"
    """All: one launch."""
    LEADER_FIRST = "leader_first"
    """The leader, then all followers."""
    LAYERS = "layers"
    """One launch a layer."""

    def parts(self, num_layers: int) -> list[tuple[int, int]]:
        """Ranges ``[start, stop)`` of layers, one a launch."""
        bounds = {
            GatherSplit.GROUP: [0],
            GatherSplit.LEADER_FIRST: [0, 1][:num_layers],
            GatherSplit.LAYERS: list(range(num_layers)),
        }[self]
        return list(zip(bounds, [*bounds[1:], num_layers], strict=True))


class CopyLane(Protocol):
    """A place beside the current stream. Its own work is in order."""

    def make_mark(self) -> Any:
        """A mark, to be placed again and again."""
        ...

    def fork(self, mark: Any) -> contextlib.AbstractContextManager[None]:
        """Work inside runs behind what the current stream has now, and beside what follows.

        Args:
            mark: Placed on the current stream.
        """
        ...

    def place(self, mark: Any) -> None:
        """Inside `fork`: behind the work so far."""
        ...

    def join(self, mark: Any) -> None:
        """The current stream goes on behind a placed mark."""
        ...


class InlineLane:
    """For copies that are done when the call returns: the CPU reference."""

    def make_mark(self) -> None:
        """Nothing to mark."""

    @contextlib.contextmanager
    def fork(self, mark: Any) -> Iterator[None]:
        """Work runs where it stands."""
        del mark
        yield

    def place(self, mark: Any) -> None:
        """Nothing to mark."""

    def join(self, mark: Any) -> None:
        """Nothing to wait for."""


_GATHER_PRIORITY: Final = -1
"""Above the compute stream's: its few blocks start when a multiprocessor has room, not after all
blocks of a kernel that fills the device."""


class SideStream:
    """A CUDA stream beside torch's current one.

    Args:
        device: A CUDA device.
        priority: As `torch.cuda.Stream` takes it; lower goes first.
    """

    def __init__(self, device: torch.device | str, *, priority: int = _GATHER_PRIORITY) -> None:
        found = torch.device(device)
        if found.type != "cuda":
            raise UsageError(f"a side stream needs a CUDA device, got {found}")
        self.stream = torch.cuda.Stream(found, priority=priority)  # type: ignore[no-untyped-call]

    def make_mark(self) -> torch.cuda.Event:
        """A CUDA event without timing."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def fork(self, mark: torch.cuda.Event) -> Iterator[None]:
        """The side stream is current inside."""
        mark.record(torch.cuda.current_stream(self.stream.device))
        self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            yield

    def place(self, mark: torch.cuda.Event) -> None:
        """Record the event on the side stream."""
        mark.record(self.stream)

    def join(self, mark: torch.cuda.Event) -> None:
        """The current stream waits for the event."""
        torch.cuda.current_stream(self.stream.device).wait_event(mark)


def lane_for(device: torch.device | str) -> CopyLane:
    """A side stream on CUDA, else the place where copies are done at once."""
    return SideStream(device) if torch.device(device).type == "cuda" else InlineLane()


class GroupPrefetch:
    """Copies of one index group that were forked off, and which layers have joined them.

    Args:
        lane: Shared by all groups of a device: their copies then go in the order of the layers.
        split: Launches of the group.
        num_layers: Layers of the group.
        overlap: Of launches without the leader's rows.
    """

    def __init__(
        self,
        lane: CopyLane,
        *,
        split: GatherSplit,
        num_layers: int,
        overlap: Overlap = Overlap.NONE,
    ) -> None:
        self.lane = lane
        self.overlap = overlap
        self.parts = split.parts(num_layers)
        self._part_of = [
            part for part, (start, stop) in enumerate(self.parts) for _ in range(start, stop)
        ]
        self._fork = lane.make_mark()
        self._marks = [lane.make_mark() for _ in self.parts]
        self._pending: set[int] = set()
        """Parts that no layer has joined yet."""

    @property
    def num_pending(self) -> int:
        """Launches that the compute stream has not joined."""
        return len(self._pending)

    def start(self, gather: Callable[[int, int, Overlap], None]) -> None:
        """Fork the copies off, behind what the current stream has.

        Args:
            gather: Enqueues the copies of layers ``[start, stop)`` on the current stream.

        Raises:
            UsageError: Copies of the step before are not joined: `wait_all` comes first.
        """
        if self._pending:
            raise UsageError(
                f"{len(self._pending)} launches of the step before are not joined",
                remedy="call wait_all before the plan is written again",
            )
        with self.lane.fork(self._fork):
            for part, (start, stop) in enumerate(self.parts):
                gather(start, stop, self.overlap if start else Overlap.NONE)
                self.lane.place(self._marks[part])
                self._pending.add(part)

    def wait(self, layer: int) -> None:
        """The current stream goes on when the layer's rows are there. Idempotent."""
        part = self._part_of[layer]
        if part in self._pending:
            # The lane is in order: what was launched before is there too.
            self.lane.join(self._marks[part])
            self._pending = {other for other in self._pending if other > part}

    def wait_all(self) -> None:
        """The current stream goes on behind all copies of the group. Idempotent."""
        if self._pending:
            self.wait(len(self._part_of) - 1)
