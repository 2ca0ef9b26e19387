"""Global memory of launches that sort (docs/decisions/0016-gathers-sort-and-share.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from worker_client.kernels.launches import CONTROL_BYTES

MAX_SORTS: Final = 4_096
"""Launches that sort and were captured in graphs, and streams that sort, each with its own control.
Whoever comes later copies its rows in the order of the plan."""

SORTED_ROW_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class SortMemory:
    """Memory of one launch that sorts: rows [entries, 16] uint8, and the address of its control."""

    rows: torch.Tensor
    control: int


class SortingMemory:
    """Global memory of launches that sort.

    Two launches that may run at once must not share any. Launches of one stream follow each other
    and share theirs. A captured launch may be replayed beside anything: it has a control of its
    own for ever, and rows from the graph's memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._controls: torch.Tensor | None = None
        self._used = 0
        self._of_stream: dict[int, SortMemory] = {}

    def prepare(self) -> None:
        """Allocate the controls. Not in a captured region."""
        size = MAX_SORTS * CONTROL_BYTES
        self._controls = torch.zeros(size, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # other streams will use them too

    def memory(self, entries: int) -> SortMemory | None:
        """Memory for so many rows on the current stream; None when all controls are in use."""
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self._make(entries, self._next_control())
            stream = torch.cuda.current_stream(self._device).cuda_stream
            known = self._of_stream.get(stream)
            if known is not None and known.rows.shape[0] >= entries:
                return known
            made = self._make(entries, known.control if known else self._next_control())
            if made is not None:
                self._of_stream[stream] = made
            return made

    def _next_control(self) -> int | None:
        if self._controls is None or self._used == MAX_SORTS:
            return None
        self._used += 1
        return self._controls.data_ptr() + (self._used - 1) * CONTROL_BYTES

    def _make(self, entries: int, control: int | None) -> SortMemory | None:
        if control is None:
            return None
        shape = (entries, SORTED_ROW_BYTES)
        rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return SortMemory(rows=rows, control=control)
