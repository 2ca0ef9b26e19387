"""Shared memory of a resolve block: where the hash of wanted rows lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIN_TABLE_FACTOR: Final = 1.25


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """Shared memory of one resolve block (place_tables in resolve.cu).

    Attributes:
        table_slots: Slots of the hash of wanted rows.
        cached_pages: Pages whose places are kept in shared memory: all of the tables, or none.
        shared_bytes: Dynamic shared memory.
        workspace_bytes: Bytes in the workspace for each request slot; 0 with the hash in shared
            memory.
    """

    table_slots: int
    cached_pages: int
    shared_bytes: int
    workspace_bytes: int

    @property
    def in_workspace(self) -> bool:
        """Whether the hash is in the workspace."""
        return self.workspace_bytes > 0


def plan_tables(
    *,
    max_lanes: int,
    hot_rows: int,
    cached_hot_blocks: int,
    num_pages: int,
    key_bytes: int,
    table_factor: float,
    budget_bytes: int,
) -> TableLayout:
    """Place the hash of wanted rows: in shared memory if 1.25 slots a row fit there.

    Args:
        max_lanes: Most rows that one transaction may want.
        hot_rows: Hot slots of a request.
        cached_hot_blocks: Entries of the hot block table kept in shared memory.
        num_pages: Pages of the block tables; kept there too where two slots a row are left.
        key_bytes: 4 or 8.
        table_factor: Slots wanted for each row.
        budget_bytes: Dynamic shared memory of a block.
    """
    # Every warp has whole steps of 128 slots and 64 or 128 lanes: see share_of_warp.
    always = -(-hot_rows // 4_096) * 4_096 + _padded(4 * cached_hot_blocks)
    lanes = _padded(4 * padded_lanes(max_lanes)) + 2 * _padded(2 * max_lanes)
    slot_bytes = key_bytes + 4
    pages = _padded(4 * num_pages)
    for cached, least in ((num_pages, 2.0), (0, _MIN_TABLE_FACTOR)):
        fixed = always + lanes + (pages if cached else 0)
        room = (budget_bytes - fixed - 64) // slot_bytes // 4 * 4
        if room < int(max_lanes * least) + 4:
            continue
        slots = min(room, max(int(max_lanes * table_factor) // 4 * 4, 64))
        return TableLayout(
            table_slots=slots,
            cached_pages=cached,
            shared_bytes=fixed + _padded(key_bytes * slots) + _padded(4 * slots),
            workspace_bytes=0,
        )
    slots = max(2 * max_lanes // 4 * 4, 64)
    cached = num_pages if always + pages <= budget_bytes else 0
    return TableLayout(
        table_slots=slots,
        cached_pages=cached,
        shared_bytes=always + (pages if cached else 0),
        workspace_bytes=lanes + _padded(key_bytes * slots) + _padded(4 * slots),
    )


def padded_lanes(max_lanes: int) -> int:
    """Lanes of a transaction, rounded up to whole steps of all warps."""
    return -(-max_lanes // 2_048) * 2_048


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
