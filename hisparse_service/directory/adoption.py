"""Reads a block table that an earlier daemon left, and says which blocks may be believed.

The bytes are untrusted (I8): the daemon may have died between any two stores, and whatever mapped
the segment may have written anywhere. A block survives only when its record passes its check, all
its ancestors survive, and no other survivor has its key. Pure function over one array; vectorised:
300,000 records in tens of milliseconds (benchmarks/bench_directory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.segment import BlockState, record_checks
from hisparse_service.directory.index import Blocks, Keys
from hisparse_service.directory.results import AdoptionReport, UnfinishedBlocks

_CORRUPT_GENERATION_STEP: Final = 257
"""Added to the generation of a record that fails its check: any one flipped byte changes a
generation by +-m * 256**k (0 < m < 256), which 257 is not, so that it cannot come back as the
generation that the block had."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """What `find_survivors` found."""

    blocks: Blocks
    """intp [kept], ascending."""
    keys: Keys
    """u64 [kept, 2]"""
    parents: Blocks
    """intp [kept]"""
    depths: npt.NDArray[np.uint32]
    """u32 [kept]"""
    read: Blocks
    """Those of `blocks` that somebody read when the table's daemon ended."""
    last_use: npt.NDArray[np.uint64]
    """u64 [kept]: ranks from 1 on, equal where they were equal, so that a corrupt counter
    cannot overflow."""
    checksums: npt.NDArray[np.uint64]
    """u64 [kept]: of the contents; 0 = none"""
    generations: npt.NDArray[np.uint32]
    """u32 [num_blocks]: of each block from now on."""
    given_up: Blocks
    """Blocks that are free from now on and whose generation changed."""
    held: Blocks
    """Blocks that stay RESERVED or WRITING, with their generation."""
    report: AdoptionReport


def find_survivors(
    table: npt.NDArray[Any],
    *,
    namespace: int,
    unfinished_blocks: UnfinishedBlocks = UnfinishedBlocks.FREE,
) -> Survivors:
    """Scan a table; changes nothing.

    Args:
        table: `RECORD_DTYPE` [num_blocks].
        namespace: Records of another one are not believed.
        unfinished_blocks: What becomes of blocks that were being written.
    """
    num_blocks = len(table)
    state = table["state"]
    published = state == BlockState.PUBLISHED
    published[0] = False
    generation = table["generation"].astype(np.uint32)
    sound = np.zeros(num_blocks, np.bool_)
    suspects = np.flatnonzero(published)
    sound[suspects] = record_checks(table, suspects) == table["check"][suspects]
    sound &= (table["namespace"] == namespace) & (generation != 0)
    corrupt = (published & ~sound) | (state > BlockState.EVICTING)
    corrupt[0] = False

    parents = np.where(sound, table["parent"], 0).astype(np.intp)
    linked = sound & _links_to_parent(table, sound, parents, generation)
    unique = _one_of_each_key(table, linked)
    kept = _reaches_root(unique, parents)

    unfinished = (state != BlockState.FREE) & ~published & ~corrupt
    unfinished[0] = False
    held = np.zeros(num_blocks, np.bool_)
    if unfinished_blocks is UnfinishedBlocks.HOLD:
        held = unfinished & (state != BlockState.EVICTING) & (generation != 0)
    given_up = (sound & ~kept) | (unfinished & ~held) | corrupt
    generation[given_up] += np.uint32(1)
    generation[corrupt] += np.uint32(_CORRUPT_GENERATION_STEP - 1)
    generation[generation == 0] = 1
    given_up |= generation != table["generation"]
    given_up[0] = False
    blocks = np.flatnonzero(kept)
    num_duplicates = int(np.count_nonzero(linked & ~unique))
    rows = table[blocks]
    return Survivors(
        blocks=blocks,
        keys=np.stack((rows["key_low"], rows["key_high"]), axis=1),
        parents=parents[blocks],
        depths=rows["depth"].astype(np.uint32),
        read=blocks[(rows["last_use"] & np.uint64(1)) != 0],
        last_use=_ranks(rows["last_use"] >> np.uint64(1)),
        checksums=rows["checksum"].astype(np.uint64),
        generations=generation,
        given_up=np.flatnonzero(given_up),
        held=np.flatnonzero(held),
        report=AdoptionReport(
            kept=len(blocks),
            unfinished=int(np.count_nonzero(unfinished)),
            corrupt=int(np.count_nonzero(corrupt)),
            orphans=int(np.count_nonzero(sound & ~kept)) - num_duplicates,
            duplicates=num_duplicates,
        ),
    )


def _links_to_parent(
    table: npt.NDArray[Any],
    sound: npt.NDArray[np.bool_],
    parents: Blocks,
    generation: npt.NDArray[np.uint32],
) -> npt.NDArray[np.bool_]:
    inside = parents < len(table)
    parents[~inside] = 0
    depth = table["depth"].astype(np.int64)
    first = (parents == 0) & (depth == 0) & inside
    below = (parents != 0) & sound[parents] & (depth == depth[parents] + 1)
    below &= table["parent_generation"] == generation[parents]
    linked: npt.NDArray[np.bool_] = first | below
    return linked


def _one_of_each_key(
    table: npt.NDArray[Any], linked: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    blocks = np.flatnonzero(linked)
    low, high = table["key_low"][blocks], table["key_high"][blocks]
    order = np.lexsort((blocks, high, low))
    low, high = low[order], high[order]
    again = np.zeros(len(blocks), np.bool_)
    again[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    unique = linked.copy()
    unique[blocks[order[again]]] = False
    return unique


def _reaches_root(good: npt.NDArray[np.bool_], parents: Blocks) -> npt.NDArray[np.bool_]:
    """Blocks all of whose ancestors are good.

    Each round doubles how far up it has looked: a chain of a million blocks takes 20 rounds. Depths
    grow along the links of good blocks, and only those are followed: there is no cycle.
    """
    reaches = good.copy()
    reaches[0] = True
    above = np.where(good, parents, 0)
    while above.any():
        reaches &= reaches[above]
        above = above[above]
    reaches[0] = False
    return reaches


def _ranks(last_use: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    _, inverse = np.unique(last_use, return_inverse=True)
    ranks: npt.NDArray[np.uint64] = inverse.reshape(-1).astype(np.uint64) + np.uint64(1)
    return ranks
