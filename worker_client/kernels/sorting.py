"""Global memory of launches that sort (docs/decisions/0016-gathers-sort-and-share.md)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import torch

from worker_client.kernels.launches import CONTROL_BYTES

logger = logging.getLogger(__name__)

CONTROLS_A_CHUNK: Final = 4_096
MIN_FREE_CONTROLS: Final = 2_048
"""Launches that may be captured in a row: a graph has one a layer, and engines warm up between two
graphs."""

SORTED_ROW_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class SortMemory:
    """Memory of one launch that sorts: rows [entries, 16] uint8, and the address of its control."""

    rows: torch.Tensor
    control: int


class SortingMemory:
    """Global memory of launches that sort. On one thread.

    Two launches that may run at once must not share any. Launches of one stream follow each other
    and share theirs. A captured launch may be replayed beside anything: it has a control of its
    own for ever, and rows from the graph's memory pool.

    Controls cannot be made while a graph is captured: they would be part of it. So a call outside
    of a capture sees to it that many captured launches have theirs.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[torch.Tensor] = []
        self._free: list[int] = []
        """Addresses of controls, all zero."""
        self._of_stream: dict[int, SortMemory] = {}
        self._has_warned = False

    def prepare(self) -> None:
        """Make controls where few are left. Not in a captured region."""
        if len(self._free) >= MIN_FREE_CONTROLS:
            return
        size = CONTROLS_A_CHUNK * CONTROL_BYTES
        chunk = torch.zeros(size, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()  # other streams will use them too
        self._chunks.append(chunk)
        first = chunk.data_ptr()
        self._free += range(first + size - CONTROL_BYTES, first - 1, -CONTROL_BYTES)

    def memory(self, entries: int) -> SortMemory | None:
        """Memory for so many rows on the current stream; None where a capture has used all up."""
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self._of_capture(entries)
            self.prepare()
            stream = torch.cuda.current_stream(self._device).cuda_stream
            known = self._of_stream.get(stream)
            if known is not None and known.rows.shape[0] >= entries:
                return known
            made = self._make(entries, known.control if known else self._free.pop())
            self._of_stream[stream] = made
            return made

    def _of_capture(self, entries: int) -> SortMemory | None:
        if self._free:
            return self._make(entries, self._free.pop())
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "more than %d gathers were captured without one outside of a capture between them: "
                "further ones copy rows in the order of the plan, at half the speed",
                MIN_FREE_CONTROLS,
            )
        return None

    def _make(self, entries: int, control: int) -> SortMemory:
        shape = (entries, SORTED_ROW_BYTES)
        rows = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return SortMemory(rows=rows, control=control)
