"""One forward pass of a tiered model: what it computes, its tensors, where its rows are kept.

A `Step` is made of a `Batch` in one of two ways. A *dynamic* step has the shapes of its batch. A
*static* decode step has the same shapes every time, whatever the batch: one row for each request
slot, of which the unused ones are padding, and the longest context; all that changes from one step
to the next lies in one tensor, so that a captured step can be replayed. Padding rows have request
slot, position and host slot -1 and change nothing.

Values and tensors only; the worker's compute thread.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from hisparse_service.contract.errors import UsageError
from worker_client.device_lists import to_device

if TYPE_CHECKING:
    from worker_client.integrations.transformers import TieredAttention

PADDING = -1
"""Request slot, position and host slot of a row that is there for its shape alone."""


class StepMode(enum.Enum):
    """What a forward pass computes."""

    PREFILL = "prefill"
    """A chunk of one request."""
    DECODE = "decode"
    """One token of each of several requests."""


class DecodeMode(enum.Enum):
    """How decode steps are run."""

    DYNAMIC = "dynamic"
    """With the shapes of each batch."""
    STATIC = "static"
    """With the same shapes every time, one call after the other."""
    GRAPH = "graph"
    """The static step, captured once in a CUDA graph and replayed."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward pass.

    Attributes:
        mode: See `StepMode`.
        request_ids: Its requests.
        request_slots: Their slots.
        starts: Tokens of each that are computed already.
        tokens: Tokens of each to compute: a chunk, or one for each request.
        host_slots: Where a decode step mirrors the row of each request, ``block * block_size +
            row`` in the host pool, -1 for nowhere. Empty: it mirrors nothing.
    """

    mode: StepMode
    request_ids: tuple[str, ...]
    request_slots: tuple[int, ...]
    starts: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    host_slots: tuple[int, ...] = ()

    def check(self) -> None:
        """Refuse what no forward pass computes.

        Raises:
            UsageError: Neither one chunk of one request nor one token of each.
        """
        is_decode = self.mode is StepMode.DECODE
        if any(len(t) != 1 for t in self.tokens) if is_decode else len(self.tokens) != 1:
            raise UsageError("a batch is one chunk of one request, or one token of each")


@dataclass
class Seen:
    """Tensors that left the model in a pass, for checks; those of a captured step are the graph's.

    Attributes:
        rows: By layer, ``[B, S, row_width]``.
        keys: By index group, ``[B, S, key_width]``.
        top_k: By index group, int32 ``[B, S, k]``, -1 = empty lane.
    """

    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    top_k: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """Tensors of a forward pass. B requests, S tokens each (B or S is 1)."""

    mode: StepMode
    tokens: torch.Tensor
    """int64 [B, S]."""
    positions: torch.Tensor
    """int64 [B, S]; -1 = padding."""
    slots: torch.Tensor
    """int32 [B]: request slots; -1 = padding."""
    query_starts: torch.Tensor
    """int32 [B + 1]."""
    context: int
    """Tokens that a query can select from: those of the longest request, or as many as fit."""
    causal: torch.Tensor
    """bool [B, 1, S, context]."""
    host_slots: torch.Tensor | None
    """int64 [B]: where the rows of a decode step are mirrored; -1 = nowhere."""
    seen: Seen = field(default_factory=Seen)

    @property
    def table_rows(self) -> torch.Tensor:
        """int64 [B]: rows of the block tables; padding reads some other request's."""
        return self.slots.long().clamp(min=0)


class RowSource(Protocol):
    """Where a forward pass puts its rows and finds those that it attends to."""

    def store_rows(self, layer: TieredAttention, rows: torch.Tensor, step: Step) -> None:
        """Keep the step's latent rows ``[B, S, row_width]`` of a layer."""
        ...

    def store_keys(self, layer: TieredAttention, keys: torch.Tensor, step: Step) -> torch.Tensor:
        """Keep the step's indexer keys ``[B, S, key_width]``; all of them, ``[B, context, ..]``."""
        ...

    def decode_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the rows of a decode step's top-k.

        Args:
            layer: Whose.
            top_k: int32 ``[B, k]``: positions, -1 = empty lane.
            step: The pass under way.

        Returns:
            ``[B, k, row_width]``, zeros in empty lanes, and which are empty, bool ``[B, k]``.
        """
        ...

    def chunk_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the rows of a prefill chunk's top-k, each once.

        Args:
            layer: Whose.
            top_k: int32 ``[S, k]``.
            step: The pass under way.

        Returns:
            U rows ``[U, row_width]``, the lanes as indices into them, int64 ``[S, k]``, and which
            lanes are empty, bool ``[S, k]``.
        """
        ...


def dynamic_step(batch: Batch, device: torch.device) -> Step:
    """A step with the shapes of its batch.

    Raises:
        UsageError: The batch is neither a chunk nor a decode step.
    """
    batch.check()
    length = len(batch.tokens[0])
    starts = to_device(batch.starts, torch.int64, device)
    positions = starts[:, None] + torch.arange(length, device=device)
    context = max(batch.starts) + length
    columns = torch.arange(context, device=device)
    host_slots = None
    if batch.host_slots:
        host_slots = to_device(batch.host_slots, torch.int64, device)
    return Step(
        mode=batch.mode,
        tokens=to_device(batch.tokens, torch.int64, device),
        positions=positions,
        slots=to_device(batch.request_slots, torch.int32, device),
        query_starts=torch.arange(len(batch.tokens) + 1, dtype=torch.int32, device=device),
        context=context,
        causal=(columns <= positions.unsqueeze(-1)).unsqueeze(1),
        host_slots=host_slots,
    )


class StaticInputs:
    """What changes from one static decode step to the next, in one tensor on the device.

    Args:
        max_num_requests: Rows of every step.
        context: Tokens that every query can select from.
        device: Where the model is.
        mirrors: Whether the steps mirror their rows.
    """

    def __init__(
        self, *, max_num_requests: int, context: int, device: torch.device, mirrors: bool
    ) -> None:
        self.max_num_requests = max_num_requests
        self.context = context
        self._mirrors = mirrors
        self._values = torch.empty((4, max_num_requests), dtype=torch.int64, device=device)
        self._columns = torch.arange(context, device=device)
        self._query_starts = torch.arange(max_num_requests + 1, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Make all rows padding: a step that changes nothing."""
        self._fill((), (), (), ())

    def set(self, batch: Batch) -> None:
        """Take a decode batch.

        Raises:
            UsageError: More requests than rows, no decode batch, or rows to mirror where the steps
                were made without.
        """
        batch.check()
        if batch.mode is not StepMode.DECODE or len(batch.tokens) > self.max_num_requests:
            raise UsageError(
                f"{batch.mode.value} of {len(batch.tokens)} requests: a static step decodes up to "
                f"{self.max_num_requests}"
            )
        if batch.host_slots and not self._mirrors:
            raise UsageError("the static step was made without mirrors")
        self._fill(
            [t[0] for t in batch.tokens], batch.starts, batch.request_slots, batch.host_slots
        )

    def _fill(self, *rows: Sequence[int]) -> None:
        # A token of padding must be one that the model has an embedding for.
        fillers = (0, PADDING, PADDING, PADDING)
        width = self.max_num_requests
        self._values.copy_(
            to_device(
                [
                    [*row, *[filler] * (width - len(row))]
                    for row, filler in zip(rows, fillers, strict=True)
                ],
                torch.int64,
                self._values.device,
            )
        )

    def step(self) -> Step:
        """The step, computed from the tensor alone: nothing here waits for the device."""
        tokens, positions, slots, host_slots = self._values.unbind(0)
        positions = positions.unsqueeze(1)
        return Step(
            mode=StepMode.DECODE,
            tokens=tokens.unsqueeze(1),
            positions=positions,
            slots=slots.to(torch.int32),
            query_starts=self._query_starts,
            context=self.context,
            causal=(self._columns <= positions.unsqueeze(-1)).unsqueeze(1),
            host_slots=host_slots if self._mirrors else None,
        )


def distinct_lanes(
    top_k: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct rows that the queries of a chunk select.

    Args:
        top_k: int32 ``[S, k]``, -1 = empty lane.
        positions: int64 ``[S]``: the queries.

    Returns:
        Their positions, int64 ``[U]``, the lanes as indices into them, int64 ``[S, k]``, and which
        lanes are empty, bool ``[S, k]``. An empty lane repeats the query's own row.
    """
    empty = top_k < 0
    lanes = torch.where(empty, positions.unsqueeze(-1), top_k.long())
    chosen, lanes = torch.unique(lanes, return_inverse=True)
    return chosen, lanes, empty


def pad_lanes(top_k: torch.Tensor, num_lanes: int) -> torch.Tensor:
    """Fill up int32 ``[B, <= num_lanes]`` with empty lanes: plans have a fixed shape."""
    missing = num_lanes - top_k.shape[1]
    return torch.nn.functional.pad(top_k, (0, missing), value=-1) if missing else top_k


def additive_mask(empty: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores: nothing, or the least value where a lane is empty."""
    mask = torch.zeros(empty.shape, dtype=dtype, device=empty.device)
    return mask.masked_fill(empty, torch.finfo(dtype).min)


__all__ = [
    "PADDING",
    "Batch",
    "DecodeMode",
    "RowSource",
    "Seen",
    "StaticInputs",
    "Step",
    "StepMode",
    "additive_mask",
    "distinct_lanes",
    "dynamic_step",
    "pad_lanes",
]
