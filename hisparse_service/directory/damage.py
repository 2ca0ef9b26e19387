"""Blocks that a reader reported as damaged: looked at, withdrawn, and who still reads them.

Made by `directory.py`, whose head says what holds for all requests. Control loop only.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.limits import MAX_LOST_PINS
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.blocks import BlockDirectory
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import Suspect, U32Array

_PUBLISHED: Final = int(BlockState.PUBLISHED)  # numpy is slow with members of enums


class Damage:
    """Takes damaged blocks away. It checks no bytes: `server/block_checks.py` does.

    Args:
        registry: The namespaces and sessions.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def suspect(self, namespace: int, block: int, generation: int) -> Suspect | Verdict:
        """What a reported block must be compared with; or why it need not be (any more)."""
        blocks = self._registry.namespace(namespace).blocks
        if not _is_published(blocks, block, generation):
            return Verdict.STALE
        checksum, is_damaged = blocks.checksum_of(block), not blocks.record_fits(block)
        if not checksum and not is_damaged:
            return Verdict.UNVERIFIABLE
        return Suspect(block, generation, checksum, is_damaged)

    def withdraw(
        self,
        namespace: int,
        block: int,
        generation: int,
        *,
        below: tuple[U32Array, U32Array],
    ) -> bool:
        """Take a damaged block, and what was published below it, away from everybody.

        Nobody finds or pins them any more; who reads them sees it in their records; they are free
        when the last reader lets them go.

        Args:
            namespace: Where.
            block: The damaged one.
            generation: Its generation when it was checked.
            below: Blocks and generations of `subtree.find_below`, at most WITHDRAW_SLICE_BLOCKS,
                deepest first. Others that lie below it may go later (`withdraw_below`).

        Returns:
            False: it is not published in that generation any more, and nothing changed.
        """
        owner = self._registry.namespace(namespace)
        if not _is_published(owner.blocks, block, generation):
            return False
        going = owner.blocks.closed_below(below[0].astype(np.intp), below[1])
        owner.withdraw(np.concatenate((going, np.array([block], np.intp))))
        return True

    def withdraw_below(self, namespace: int, below: tuple[U32Array, U32Array]) -> None:
        """`withdraw` of more blocks below one that went already."""
        owner = self._registry.namespace(namespace)
        going = owner.blocks.closed_below(below[0].astype(np.intp), below[1])
        if going.size:
            owner.withdraw(going)

    def count_check(self, namespace: int, verdict: Verdict) -> None:
        """Note what became of a reported block."""
        owner = self._registry.namespaces.get(namespace)
        if owner is not None:
            checks, name = owner.statistics.checks, verdict.name.lower()
            checks[name] = checks.get(name, 0) + 1

    def num_withdrawn(self, namespace: int) -> int:
        """Withdrawn blocks that are not free yet: they are still read."""
        return self._registry.namespace(namespace).blocks.num_withdrawn

    def lost_pins(self, session: int) -> list[tuple[int, int, int]]:
        """(namespace, block, generation) of withdrawn blocks that a session pins; MAX_LOST_PINS."""
        account = self._registry.account(session)
        lost: list[tuple[int, int, int]] = []
        for owner in self._registry.namespaces.values():
            if owner.attached is None or not owner.attached.num_withdrawn:
                continue
            generations = owner.attached.columns.generation_view
            pins = [
                each.pins for each in account.leases.values() if each.namespace == owner.namespace
            ]
            lost += [
                (owner.namespace, block, generations[block])
                for block in owner.attached.withdrawn().tolist()
                if any(block in held for held in pins)
            ]
        return lost[:MAX_LOST_PINS]


def _is_published(blocks: BlockDirectory, block: int, generation: int) -> bool:
    return (
        0 < block < blocks.num_blocks
        and blocks.columns.state_view[block] == _PUBLISHED
        and blocks.columns.generation_view[block] == generation
    )
