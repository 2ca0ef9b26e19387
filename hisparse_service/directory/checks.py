"""What a request says about blocks, checked; and the errors for what is wrong with it.

Changes nothing. The parts of `directory.py` call it, on the control loop.
"""

from __future__ import annotations

import numpy as np

from hisparse_service.contract.errors import NotHeld, StaleBlock, UsageError
from hisparse_service.contract.limits import MAX_BLOCKS_PER_MESSAGE
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.index import Blocks
from hisparse_service.directory.leases import Lease
from hisparse_service.directory.namespaces import Namespace
from hisparse_service.directory.results import U32Array


def distinct(owner: Namespace, blocks: U32Array, *, limit: int = MAX_BLOCKS_PER_MESSAGE) -> Blocks:
    """Ids as an index array, in the given order.

    Raises:
        NotHeld: An id that no block has.
        UsageError: One twice, or too many.
    """
    wanted = np.asarray(blocks).astype(np.intp)
    if not wanted.size:
        return wanted
    if len(wanted) > limit:
        raise UsageError(
            f"{len(wanted)} blocks in a request, the limit is {limit}",
            remedy="Send them in several requests",
            limit=limit,
            value=len(wanted),
        )
    if wanted.min() < 1 or wanted.max() >= owner.blocks.num_blocks:
        raise out_of_range(owner, int(wanted.max()))
    if len(set(wanted.tolist())) < len(wanted):
        raise UsageError("a block is named twice", remedy="Name each block once")
    return wanted


def out_of_range(namespace: Namespace, block: int) -> NotHeld:
    """The error for an id that no block has."""
    last = namespace.blocks.num_blocks - 1
    return NotHeld(f"block {block} is not between 1 and {last}", block=block, limit=last)


def stale_block(namespace: Namespace, block: int, generation: int) -> StaleBlock:
    """The error for a handle whose block was given up."""
    now = int(namespace.blocks.columns.generation[block])
    state = BlockState(namespace.blocks.columns.state_view[block]).name
    return StaleBlock(
        f"block {block} has generation {now} and is {state}, the handle says {generation}",
        remedy="Look the keys up again; do not use its bytes",
        block=block,
        generation=generation,
        generation_now=now,
    )


def not_held(lease: Lease, block: int) -> NotHeld:
    """The error for a block of somebody else."""
    return NotHeld(
        f"block {block} is not held by lease {lease.lease_id}",
        remedy="Each session writes and frees blocks of its own only",
        block=block,
        lease=lease.lease_id,
    )
