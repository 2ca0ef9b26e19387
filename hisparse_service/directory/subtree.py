"""Which published blocks lie below one: a picture, made beside the control loop.

It looks through all blocks of a backing, tens of milliseconds for a million, so a helper thread
makes it from columns that change under it. Hence the generations: a block that is still published
in the generation that was read here still has the parent that was read here, because a parent keeps
its id while it has children. `Directory.withdraw` takes no other.

Pure; any thread.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.results import U32Array

_PUBLISHED: Final = int(BlockState.PUBLISHED)


def find_below(columns: BlockColumns, block: int) -> tuple[U32Array, U32Array]:
    """Published blocks whose prefix contains `block`, with generations: u32 [n] each.

    Deepest first, so that any beginning of them holds only blocks whose children it holds too.
    """
    if not columns.children_view[block]:
        return np.zeros(0, np.uint32), np.zeros(0, np.uint32)
    generations = columns.generation.copy()
    found = np.flatnonzero(columns.state == _PUBLISHED)
    above = np.zeros(len(columns.state), np.uint32)
    above[found] = columns.parent[found]
    above[block] = 0
    is_below = np.zeros(len(above), np.bool_)
    is_below[block] = True
    # Each round doubles how far up it has looked: a chain of a million blocks takes 20 rounds.
    # Depths grow along the links, so none is a cycle; torn ones could make one, hence the bound.
    for _ in range(len(above).bit_length() + 1):
        here = above[found]
        is_below[found] |= is_below[here]
        if not here.any():
            break
        above[found] = above[here]
    is_below[block] = False
    going = np.flatnonzero(is_below)
    going = going[columns.generation[going] == generations[going]]
    order = np.argsort(-columns.depth[going].astype(np.int64), kind="stable")
    going = going[order]
    return going.astype(np.uint32), generations[going]
