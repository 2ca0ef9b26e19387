"""The demonstration's proof that ranks read what rank 0 computed: a ledger of rows, byte for byte.

Rank 0 notes every row as it leaves the model, before any tier has seen it, and writes a page's rows
into a file when the page is sent to its host block. Any rank that reads a row from the host pool
compares it with that file. So a wrong offset, a copy that came too late or a stale row shows, even
where it would not change a token.

One ledger file a demonstration, indexed by host block; written by rank 0 alone, before the block is
published, and read only for published blocks. Used on the worker's compute thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hisparse_service.contract.geometry import HostGeometry


class RowLedger:
    """A `MirrorAudit` over a shared file.

    Args:
        path: The file; made if it is not there.
        geometry: Of the host blocks.
        num_blocks: Host blocks, the null block included.
        writes: Whether this rank notes what it computes (rank 0).

    Attributes:
        checked_rows: Rows that were read from the host and compared, each layer's counted.
        wrong_rows: Those that differed.
        first_wrong: Where the first of them was, for people.
    """

    def __init__(
        self, path: Path, geometry: HostGeometry, num_blocks: int, *, writes: bool
    ) -> None:
        self.checked_rows = 0
        self.wrong_rows = 0
        self.first_wrong = ""
        self._geometry = geometry
        self._writes = writes
        self._rows: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
        self._pages = _map_pages(path, geometry, num_blocks)

    def computed(
        self, layer: int, request_id: str, positions: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Note rows of a request (rank 0)."""
        if not self._writes:
            return
        raw = rows.detach().contiguous().view(torch.uint8).cpu().numpy()
        end = int(positions[-1]) + 1
        held = self._rows.get((request_id, layer))
        if held is None or len(held) < end:
            grown = np.zeros((max(2 * end, 256), raw.shape[-1]), np.uint8)
            if held is not None:
                grown[: len(held)] = held
            self._rows[request_id, layer] = held = grown
        held[positions.cpu().numpy()] = raw

    def mirrored(self, request_id: str, page: int, host_block: int) -> None:
        """Write a page's rows to the ledger (rank 0)."""
        if not self._writes:
            return
        size = self._geometry.block_size
        for layer, pages in enumerate(self._pages):
            rows = self._rows[request_id, layer]
            pages[host_block] = rows[page * size : (page + 1) * size]

    def ended(self, request_id: str) -> None:
        """Forget the rows of a request."""
        for key in [key for key in self._rows if key[0] == request_id]:
            del self._rows[key]

    def read_from_host(self, layer: int, host_slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Compare rows with the ledger."""
        slots = host_slots.numpy()
        if not len(slots):
            return
        size = self._geometry.block_size
        expected = self._pages[layer][slots // size, slots % size]
        wrong = (rows.numpy() != expected).any(axis=1)
        self.checked_rows += len(slots)
        count = int(wrong.sum())
        if count and not self.first_wrong:
            slot = int(slots[int(np.argmax(wrong))])
            self.first_wrong = f"layer {layer}, host block {slot // size}, row {slot % size}"
        self.wrong_rows += count


def _map_pages(path: Path, geometry: HostGeometry, num_blocks: int) -> list[npt.NDArray[Any]]:
    """One array a layer, uint8 [num_blocks, block_size, row_bytes], over one sparse file."""
    widths = [geometry.place(layer, num_blocks).row_bytes for layer in range(geometry.num_layers)]
    sizes = [num_blocks * geometry.block_size * width for width in widths]
    with path.open("ab") as file:  # made by whichever rank comes first
        file.truncate(sum(sizes))
    whole = np.memmap(path, np.uint8, "r+")
    pages: list[npt.NDArray[Any]] = []
    start = 0
    for width, size in zip(widths, sizes, strict=True):
        shape = (num_blocks, geometry.block_size, width)
        pages.append(whole[start : start + size].reshape(shape))
        start += size
    return pages
