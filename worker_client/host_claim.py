"""The host blocks of a new request: the prefix that is published already, and the rest reserved.

All of them or none: what was pinned goes back when the rest is not to be had. Asks the service and
keeps nothing. On the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hisparse_service.contract.errors import DamagedBlock, StaleBlock
from hisparse_service.contract.keys import KeyChain
from worker_client.block_service import BlockService
from worker_client.blocks import BlockLease
from worker_client.coordinator_config import CoordinatorConfig, Role
from worker_client.requests import Statistics

__all__ = ["HostClaim", "HostClaims"]


@dataclass(frozen=True, slots=True)
class HostClaim:
    """What a request got.

    Attributes:
        lease: Pins the prefix and holds the reserved blocks; None for a reader without a prefix.
        num_hits: Blocks of the prefix.
        num_reserved: Blocks to write, growth included (0 for a reader).
    """

    lease: BlockLease | None
    num_hits: int
    num_reserved: int


class HostClaims:
    """Gets requests their host blocks.

    Args:
        service: The namespace; borrowed.
        config: Sizes.
        role: A READER reserves nothing.
        verifies: Whether the bytes of a found prefix are compared with their checksums.
        statistics: Counted into.
    """

    def __init__(
        self,
        service: BlockService,
        config: CoordinatorConfig,
        *,
        role: Role,
        verifies: bool,
        statistics: Statistics,
    ) -> None:
        self._service = service
        self._config = config
        self._role = role
        self._verifies = verifies
        self._statistics = statistics

    def claim(
        self,
        chain: KeyChain,
        *,
        prompt_tokens: int,
        max_tokens: int,
        num_hit_tokens: int | None,
    ) -> HostClaim:
        """Every host block that the request can ever need, or none.

        Args:
            chain: Of its prompt.
            prompt_tokens: Length of the prompt.
            max_tokens: Greatest length that it may reach.
            num_hit_tokens: See `HiSparseCoordinator.admit`.

        Raises:
            CapacityError: Too few host blocks now.
            ServiceUnavailable: The service is away.
            StaleBlock: The writer's hit is not there for this reader.
        """
        lease = self._find_prefix(chain, prompt_tokens, num_hit_tokens)
        hits = 0 if lease is None else len(lease.blocks)
        if self._role is Role.READER:
            return HostClaim(lease, hits, 0)
        # The null block is the pool's own and is not reserved.
        needed = self._config.host_blocks_for(max_tokens) - 1 - hits
        return HostClaim(self._reserve(needed, lease), hits, needed)

    def _find_prefix(
        self, chain: KeyChain, prompt_tokens: int, num_hit_tokens: int | None
    ) -> BlockLease | None:
        """Pin the published prefix. At least one token stays to be computed: its logits are due."""
        size = self._config.block_size
        stop = (prompt_tokens - 1) // size if num_hit_tokens is None else num_hit_tokens // size
        if stop == 0:
            return None
        self._statistics.control_messages += 1
        lease = self._service.lookup(chain, stop=stop)
        if self._verifies and len(lease.blocks):
            lease = self._with_good_bytes(lease, chain)
        if num_hit_tokens is not None and len(lease.blocks) < stop:
            found = len(lease.blocks)
            self._release(lease)
            raise StaleBlock(
                f"the writer found {stop} blocks of this prefix, this reader {found}",
                remedy="Admit the request again on every rank",
                needed=stop,
                found=found,
            )
        return lease

    def _with_good_bytes(self, lease: BlockLease, chain: KeyChain) -> BlockLease:
        """The prefix that a lookup found, up to its first block whose bytes are damaged."""
        stop = len(lease.blocks)
        while stop:
            try:
                lease.verify()
                break
            except StaleBlock as error:
                # What the daemon did about it does not matter here: this request stays away.
                at = np.flatnonzero(lease.blocks == int(error.details.get("block", 0)))
                stop = int(at[0]) if len(at) else 0
                self._statistics.damaged_hits += isinstance(error, DamagedBlock)
            self._release(lease)
            self._statistics.control_messages += 1
            lease = self._service.lookup(chain, stop=stop)
        return lease

    def _reserve(self, num_blocks: int, lease: BlockLease | None) -> BlockLease:
        self._statistics.control_messages += 1
        try:
            return self._service.reserve(num_blocks, lease=lease)
        except BaseException:
            if lease is not None:
                self._release(lease)
            raise

    def _release(self, lease: BlockLease) -> None:
        self._statistics.control_messages += 1
        self._service.release(lease)
