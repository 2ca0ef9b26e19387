"""Sizes and role of one worker, and what a request of a length needs of them. Frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from hisparse_service.contract.errors import UsageError

__all__ = ["EXTRA_HOST_BLOCKS", "CoordinatorConfig", "Role"]

EXTRA_HOST_BLOCKS: Final = 2
"""Beyond a request's length: the null block, which the pool has, and a copy-on-write tail."""


class Role(enum.Enum):
    """Which rank of its tensor-parallel group this coordinator serves."""

    WRITER = "writer"
    READER = "reader"


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Sizes of one worker.

    Attributes:
        block_size: Tokens of a block.
        num_device_blocks: Blocks of the device backing, the null block included.
        num_resident_groups: Device blocks that one resident page takes.
        num_hot_groups: Hot regions of a request.
        hot_blocks_per_request: Device blocks of one hot region.
        max_num_requests: Request slots.
        max_model_tokens: Longest request.
        max_step_tokens: Most tokens of one request in a step (a prefill chunk).
        max_restores_per_step: Most pages whose rows are brought back in one step.
    """

    block_size: int
    num_device_blocks: int
    num_resident_groups: int
    num_hot_groups: int
    hot_blocks_per_request: int
    max_num_requests: int
    max_model_tokens: int
    max_step_tokens: int
    max_restores_per_step: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_restores_per_step" else 1
            if value < least:
                raise UsageError(f"{name} is {value}, the least is {least}")

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def hot_blocks(self) -> int:
        """Device blocks of all hot regions of a request."""
        return self.num_hot_groups * self.hot_blocks_per_request

    @property
    def window_pages(self) -> int:
        """Pages that one step of a request can write: a chunk, and the tail that it begins in."""
        return self.pages_for(self.max_step_tokens) + 1

    def device_blocks_for(self, max_tokens: int) -> int:
        """Device blocks that a request of this length must be able to have at once.

        Its indexer keys and hot regions for good, and the pages that one step writes; all other
        pages can be spilled.
        """
        return (
            self.pages_for(max_tokens)
            + self.hot_blocks
            + min(self.window_pages, self.pages_for(max_tokens)) * self.num_resident_groups
        )

    def host_blocks_for(self, max_tokens: int) -> int:
        """Host blocks that a request of this length needs, the null block included."""
        return self.pages_for(max_tokens) + EXTRA_HOST_BLOCKS
