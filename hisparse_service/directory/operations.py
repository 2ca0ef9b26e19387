"""What operators, metrics and answers ask about whole namespaces; eviction by hand.

Made by `directory.py`, whose head says what holds for all requests. Control loop only, but for
`columns`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.limits import MAX_LIST_ROWS
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.checks import distinct
from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.namespaces import Quotas, as_u32
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import (
    BlockInfo,
    Counts,
    Quota,
    Statistics,
    U32Array,
    Usage,
    WriterLease,
)

_PUBLISHED: Final = int(BlockState.PUBLISHED)  # numpy is slow with members of enums


class Operations:
    """Counts, lists, limits.

    Args:
        registry: The namespaces and sessions.
        quotas: In force for all of them.
    """

    def __init__(self, registry: Registry, quotas: Quotas) -> None:
        self._registry = registry
        self._quotas = quotas

    def counts(self, namespace: int) -> Counts:
        """Where the blocks are now."""
        return self._registry.namespace(namespace).blocks.counts()

    def num_free(self, namespace: int) -> int:
        """Blocks that can be reserved without evicting others."""
        return self._registry.namespace(namespace).blocks.num_free

    def statistics(self, namespace: int) -> Statistics:
        """Live totals: read only."""
        return self._registry.namespace(namespace).statistics

    def namespace_usage(self, namespace: int) -> Usage:
        """Live use of the namespace's quota: read only."""
        return self._registry.namespace(namespace).usage

    def session_usage(self, session: int) -> Usage:
        """Live use of the session's quota: read only."""
        return self._registry.account(session).usage

    def writers(self, namespace: int) -> list[WriterLease]:
        """Current writer leases of a namespace."""
        return list(self._registry.namespace(namespace).writers.values())

    def columns(self, namespace: int) -> BlockColumns:
        """The live columns: read only, and from another thread for a picture only."""
        return self._registry.namespace(namespace).blocks.columns

    def list_blocks(
        self,
        namespace: int,
        *,
        states: frozenset[BlockState] | None = None,
        start: int = 1,
        max_rows: int = MAX_LIST_ROWS,
    ) -> list[BlockInfo]:
        """Blocks from id `start` on, of these states (None: all), at most `max_rows`."""
        columns = self._registry.namespace(namespace).blocks.columns
        found = np.arange(max(1, start), len(columns.state))
        if states is not None:
            found = found[np.isin(columns.state[found], list(states))]
        return [
            BlockInfo(
                block=block,
                generation=columns.generation_view[block],
                state=BlockState(columns.state_view[block]),
                readers=columns.readers_view[block],
                children=columns.children_view[block],
                depth=columns.depth_view[block],
                last_use=columns.last_use_view[block],
                lease_id=columns.holder_view[block],
            )
            for block in found[: max(0, min(max_rows, MAX_LIST_ROWS))].tolist()
        ]

    def evict(
        self, namespace: int, *, num_blocks: int | None = None, blocks: U32Array | None = None
    ) -> U32Array:
        """For operators: give up published blocks that nobody reads.

        Args:
            namespace: Where.
            num_blocks: As many of the least recently used as can go, up to this.
            blocks: These (exactly one of both is given); pinned ones and those with children that
                stay are left out.

        Returns:
            The blocks that went, u32 [n].
        """
        owner = self._registry.namespace(namespace)
        if (num_blocks is None) == (blocks is None) or (num_blocks is not None and num_blocks < 0):
            raise UsageError("evict takes either a number of blocks or their ids")
        if num_blocks is not None:
            gone = owner.evict_up_to(num_blocks)
        else:
            assert blocks is not None
            wanted = distinct(owner, blocks)
            is_published = owner.blocks.columns.state[wanted] == _PUBLISHED
            gone = owner.drop_unused(wanted[is_published])
        owner.statistics.evictions += len(gone)
        return as_u32(gone)

    def set_session_quota(self, quota: Quota) -> None:
        """Change the limits of each session; what is held already stays."""
        self._quotas.change(session=quota)

    def set_namespace_quota(self, quota: Quota) -> None:
        """Change the limits of each namespace; what is held already stays."""
        self._quotas.change(namespace=quota)
