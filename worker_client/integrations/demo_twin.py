"""The demonstration's main witness: the same steps with every row on the device, bit for bit.

After each step of a rank, its model computes the same batch once more in the same shapes, with the
same kernels, in the same order; only where the rows are kept differs: in plain tensors on the
device, one row a position, without pages, hot regions or host memory. So nothing may differ, not by
rounding, in no type: logits, rows, keys and choices of the two must be equal bit for bit. If one
byte that the tiers gave back was not the byte that the model had stored, they are not.

A row has one history more than a position: a page that the service knew already (a prefix that was
found, a block that another request published first) has the bytes of whoever computed it first,
perhaps in another chunk and so with other rounding. Those the twin takes from the ledger, where
rank 0 wrote them as they left its model, at the moment when the tiers begin to read them from the
host; and it looks that the ledger's page is one of the same tokens.

The twin makes its own tokens: a wrong token of the tiers is not followed.

Used on the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hisparse_service.contract.errors import InternalError
from worker_client.integrations.demo_audit import RowLedger, page_digest
from worker_client.integrations.transformers import TieredAttention, TieredModel
from worker_client.integrations.transformers_steps import (
    Batch,
    Seen,
    Step,
    StepMode,
    distinct_lanes,
)
from worker_client.requests import StepPlan, TableUpdate

MAX_REPORTED_DIFFERENCES = 8
"""Lines about what differed; the first say most."""

_Place = tuple[int, int]
"""Request slot and page."""


class DeviceRows:
    """A `RowSource` in plain tensors: by request slot and position.

    Args:
        tiers: Whose shapes it has.
        num_tokens: Positions of a request: whole pages.
    """

    def __init__(self, tiers: TieredModel, num_tokens: int) -> None:
        shape, slots = tiers.shape, tiers.sizes.max_num_requests
        self._block_size = tiers.sizes.block_size
        # What was never written must not look like a row.
        self.rows = [
            torch.full(
                (slots, num_tokens, shape.row_width),
                torch.nan,
                dtype=shape.dtype,
                device=tiers.device,
            )
            for _ in range(shape.num_layers)
        ]
        self.keys = [
            torch.full(
                (slots, num_tokens, shape.key_width),
                torch.nan,
                dtype=shape.dtype,
                device=tiers.device,
            )
            for _ in shape.index_groups
        ]

    def store_rows(self, layer: TieredAttention, rows: torch.Tensor, step: Step) -> None:
        """Keep rows ``[B, S, row_width]``."""
        _store(self.rows[layer.layer], rows, step)

    def store_keys(self, layer: TieredAttention, keys: torch.Tensor, step: Step) -> torch.Tensor:
        """Keep keys ``[B, S, key_width]``; returns ``[B, context, key_width]``."""
        _store(self.keys[layer.group], keys, step)
        # As many positions as there are in whole pages, so that the strides are the tiers' too.
        size = self._block_size
        width = -(-step.context // size) * size
        kept = self.keys[layer.group][step.table_rows][:, :width].contiguous()
        return kept[:, : step.context]

    def decode_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowSource`."""
        empty = top_k < 0
        rows = self.rows[layer.layer][step.table_rows[:, None], top_k.long().clamp(min=0)]
        return rows.masked_fill(empty.unsqueeze(-1), 0), empty

    def chunk_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `RowSource`."""
        positions, lanes, empty = distinct_lanes(top_k, step.positions[0])
        return self.rows[layer.layer][step.table_rows[0], positions], lanes, empty


def _store(cache: torch.Tensor, rows: torch.Tensor, step: Step) -> None:
    """Write ``[B, S, width]`` at the step's positions; padding writes back what is there."""
    kept = (step.positions >= 0).unsqueeze(-1)
    places = step.table_rows[:, None], step.positions.clamp(min=0)
    cache[places] = torch.where(kept, rows, cache[places])


@dataclass
class TwinCounts:
    """What was compared, and what was not equal.

    Attributes:
        steps: Batches.
        logits: Rows of logits, one a request and batch.
        rows: Latent rows and keys, each layer's counted.
        choices: Top-k choices, one a token and index group.
        pages: Pages whose bytes were taken from the ledger.
        unequal_logits: Of `logits`, not equal bit for bit.
        unequal_rows: Of `rows`.
        unequal_choices: Of `choices`.
        wrong_tokens: Tokens that the tiers computed with and the twin did not generate.
        foreign_pages: Of `pages`, those of other tokens than the request's.
        largest: Greatest difference of a logit.
        lines: What differed first, for people.
    """

    steps: int = 0
    logits: int = 0
    rows: int = 0
    choices: int = 0
    pages: int = 0
    unequal_logits: int = 0
    unequal_rows: int = 0
    unequal_choices: int = 0
    wrong_tokens: int = 0
    foreign_pages: int = 0
    largest: float = 0.0
    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Keep a line, if it is one of the first."""
        if len(self.lines) < MAX_REPORTED_DIFFERENCES:
            self.lines.append(line)


class DeviceTwin:
    """A `StepWitness` that computes each step again over `DeviceRows`.

    Args:
        tiers: What it watches; its model computes both.
        ledger: Rows of host blocks.

    Attributes:
        counts: What was found.
    """

    def __init__(self, tiers: TieredModel, ledger: RowLedger) -> None:
        self.counts = TwinCounts()
        self._tiers = tiers
        self._ledger = ledger
        self._size = tiers.sizes.block_size
        num_pages = -(-tiers.sizes.max_model_tokens // self._size)
        self._rows = DeviceRows(tiers, num_pages * self._size)
        self._tokens: dict[str, list[int]] = {}
        """By request: the prompt, and what the twin generated."""
        self._names: dict[int, str] = {}
        """By request slot: the request."""
        self._places: dict[_Place, TableUpdate] = {}
        self._owners: dict[int, _Place] = {}
        """By device block: the page that it was last said to hold, its rows or its keys."""

    # --- what the tiers are told ------------------------------------------------------------------

    def admitted(self, request_id: str, request_slot: int, tokens: Sequence[int]) -> None:
        """A request begins: its tokens are the prompt's."""
        self._tokens[request_id] = list(tokens)
        self._names[request_slot] = request_id
        for place in [place for place in self._places if place[0] == request_slot]:
            del self._places[place]

    def tokens_of(self, request_id: str) -> Sequence[int]:
        """The prompt of a request, and what the twin generated, also after its end."""
        return self._tokens[request_id]

    def applied(self, plan: StepPlan) -> None:
        """Follow pages that were given other bytes than those that the request computed."""
        restored = {block for restore in plan.restores for block in restore.resident_blocks}
        restored |= {restore.indexer_block for restore in plan.restores} - {0}
        for update in plan.updates:
            place = update.request_slot, update.page
            before = self._places.get(place)
            self._follow_rows(update, before, restored)
            self._follow_keys(update, before, restored)
        for update in plan.updates:
            place = update.request_slot, update.page
            self._places[place] = update
            for block in (*update.resident_blocks, update.indexer_block):
                self._owners[block] = place

    def _follow_rows(
        self, update: TableUpdate, before: TableUpdate | None, restored: set[int]
    ) -> None:
        blocks = update.resident_blocks
        if not blocks or blocks[0] in restored:
            self._from_ledger(update, range(self._tiers.shape.num_layers), self._rows.rows)
        elif before is None or before.resident_blocks != blocks:
            self._from_other(update, self._owners.get(blocks[0]), self._rows.rows)

    def _follow_keys(
        self, update: TableUpdate, before: TableUpdate | None, restored: set[int]
    ) -> None:
        first = self._tiers.shape.num_layers
        if update.indexer_block in restored:
            layers = range(first, first + len(self._rows.keys))
            self._from_ledger(update, layers, self._rows.keys)
        elif before is None or before.indexer_block != update.indexer_block:
            self._from_other(update, self._owners.get(update.indexer_block), self._rows.keys)

    def _from_ledger(
        self, update: TableUpdate, layers: range, caches: Sequence[torch.Tensor]
    ) -> None:
        slot, page, size = update.request_slot, update.page, self._size
        self.counts.pages += 1
        digest = page_digest(self._tokens[self._names[slot]], (page + 1) * size)
        if self._ledger.digest(update.host_block) != digest:
            self.counts.foreign_pages += 1
            self.counts.note(
                f"page {page} of {self._names[slot]} was given host block {update.host_block}, "
                "which holds other tokens"
            )
        for layer, cache in zip(layers, caches, strict=True):
            rows = torch.from_numpy(self._ledger.page(layer, update.host_block).copy())
            cache[slot, page * size : (page + 1) * size] = rows.view(cache.dtype).to(cache.device)

    def _from_other(
        self, update: TableUpdate, other: _Place | None, caches: Sequence[torch.Tensor]
    ) -> None:
        """The request reads the device blocks of another one's page of the same tokens.

        A page that begins has blocks that were free, and whatever is taken over is overwritten.
        """
        if other is None or other == (update.request_slot, update.page):
            return
        size = self._size
        for cache in caches:
            theirs = cache[other[0], other[1] * size : (other[1] + 1) * size].clone()
            cache[update.request_slot, update.page * size : (update.page + 1) * size] = theirs

    # --- what they computed -----------------------------------------------------------------------

    def stepped(self, batch: Batch, logits: torch.Tensor) -> None:
        """Compute the batch here and compare."""
        seen = self._tiers.last_seen
        own_logits, own_seen = self._tiers.forward_elsewhere(batch, self._rows)
        counts, where = self.counts, _Where(batch, counts_step=self.counts.steps)
        counts.steps += 1
        self._check_tokens(batch, where)
        self._compare_seen(batch, seen, own_seen, where)
        equal = _equal_rows(logits, own_logits)
        counts.logits += len(equal)
        counts.unequal_logits += int((~equal).sum())
        if not bool(equal.all()):
            difference = (logits.float() - own_logits.float()).abs().nan_to_num(torch.inf).amax(-1)
            counts.largest = max(counts.largest, float(difference.max()))
            counts.note(f"{where.row(equal)}: logits differ by up to {float(difference.max()):.1e}")
        self._take_tokens(batch, own_logits)

    def _check_tokens(self, batch: Batch, where: _Where) -> None:
        for name, start, tokens in zip(batch.request_ids, batch.starts, batch.tokens, strict=True):
            own = self._tokens[name][start : start + len(tokens)]
            wrong = sum(a != b for a, b in zip(own, tokens, strict=False))
            wrong += abs(len(own) - len(tokens))
            if wrong:
                self.counts.wrong_tokens += wrong
                self.counts.note(f"{where.step}: {name} went on with another token")

    def _take_tokens(self, batch: Batch, logits: torch.Tensor) -> None:
        """Add the tokens that the twin generates, where a batch ends with the last known one."""
        tokens = logits.float().cpu().argmax(dim=-1).tolist()
        for name, start, own, token in zip(
            batch.request_ids, batch.starts, batch.tokens, tokens, strict=True
        ):
            if start + len(own) == len(self._tokens[name]):
                self._tokens[name].append(token)

    def _compare_seen(self, batch: Batch, seen: Seen, own: Seen, where: _Where) -> None:
        """Rows, keys and choices, layer by layer: the first that differs is named."""
        count = len(batch.request_ids)
        for layer in sorted(seen.rows):
            self._compare_rows(f"rows of layer {layer}", seen.rows[layer][:count],
                               own.rows[layer][:count], where)  # fmt: skip
        for group in sorted(seen.keys):
            self._compare_rows(f"keys of index group {group}", seen.keys[group][:count],
                               own.keys[group][:count], where)  # fmt: skip
        for group in sorted(seen.top_k):
            ours, theirs = seen.top_k[group][:count], own.top_k[group][:count]
            equal = _equal_rows(ours.flatten(0, 1), theirs.flatten(0, 1))
            self.counts.choices += len(equal)
            self.counts.unequal_choices += int((~equal).sum())
            if not bool(equal.all()):
                alike = _overlap(ours.flatten(0, 1)[~equal], theirs.flatten(0, 1)[~equal])
                self.counts.note(
                    f"{where.row(equal)}: choices of index group {group} differ, {alike:.1%} alike"
                )

    def _compare_rows(
        self, what: str, ours: torch.Tensor, theirs: torch.Tensor, where: _Where
    ) -> None:
        equal = _equal_rows(ours.flatten(0, 1), theirs.flatten(0, 1))
        self.counts.rows += len(equal)
        unequal = int((~equal).sum())
        self.counts.unequal_rows += unequal
        if unequal:
            largest = float((ours.float() - theirs.float()).abs().nan_to_num(torch.inf).max())
            self.counts.note(
                f"{where.row(equal)}: {what} differ ({unequal} of {len(equal)}, by up to "
                f"{largest:.1e})"
            )

    def report(self) -> dict[str, Any]:
        """The counts, for JSON."""
        return {f"twin_{name}": value for name, value in vars(self.counts).items()}


class _Where:
    """Names steps, requests and positions."""

    def __init__(self, batch: Batch, *, counts_step: int) -> None:
        self.batch = batch
        self.step = f"step {counts_step} ({batch.mode.value})"

    def row(self, equal: torch.Tensor) -> str:
        """The first row that is not equal, of bool ``[tokens or requests]``."""
        index = int((~equal).nonzero()[0])
        batch = self.batch
        request, token = (index, 0) if batch.mode is StepMode.DECODE else (0, index)
        if len(equal) == len(batch.request_ids) == 1:
            token = len(batch.tokens[0]) - 1
        return f"{self.step}, {batch.request_ids[request]}, token {batch.starts[request] + token}"


def _equal_rows(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Which rows of two ``[n, width]`` have the same bits, bool ``[n]`` on the CPU."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise InternalError(
            f"the twin computed {tuple(theirs.shape)} of {theirs.dtype}, the tiers "
            f"{tuple(ours.shape)} of {ours.dtype}"
        )
    bits = ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)
    return torch.eq(*bits).all(dim=-1).cpu()


def _overlap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Part of the lanes ``[n, k]`` that the two have in common."""
    ours_np, theirs_np = ours.cpu().numpy(), theirs.cpu().numpy()
    common = [np.intersect1d(a, b).size for a, b in zip(ours_np, theirs_np, strict=True)]
    return float(np.sum(common) / max(ours_np.size, 1))


__all__ = ["MAX_REPORTED_DIFFERENCES", "DeviceRows", "DeviceTwin", "TwinCounts"]
