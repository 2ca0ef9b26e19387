"""Sizes of a hot region, resolved and checked once: what all layers of an index group agree on."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError
from worker_client.kernels.interface import check_rows_per_request, check_top_k

__all__ = ["ResolvedHiSparseConfig"]


@dataclass(frozen=True, kw_only=True)
class ResolvedHiSparseConfig:
    """Sizes of a hot region. Make it with `resolve`.

    Attributes:
        top_k: Rows that the indexer selects for one query row.
        device_buffer_size: Hot rows of a request.
        max_decode_query_len: Query rows of a request in one decode step (1 + speculative tokens).
    """

    top_k: int
    device_buffer_size: int
    max_decode_query_len: int = 1

    def __post_init__(self) -> None:
        check_top_k(self.top_k)
        check_rows_per_request(self.max_decode_query_len)
        values = (
            f"device_buffer_size={self.device_buffer_size}, "
            f"max_decode_query_len={self.max_decode_query_len}, top_k={self.top_k}"
        )
        if self.device_buffer_size < self.max_union_rows:
            raise GeometryError(
                f"device_buffer_size must cover max_decode_query_len * top_k = "
                f"{self.max_union_rows} rows: {values}",
                remedy=f"set device_buffer_size to {self.max_union_rows} or more",
                device_buffer_size=self.device_buffer_size,
                needed=self.max_union_rows,
            )
        if self.device_buffer_size > limits.MAX_HOT_ROWS:
            raise GeometryError(
                f"device_buffer_size passes {limits.MAX_HOT_ROWS}, hot slots are 16-bit: {values}",
                remedy=f"set device_buffer_size to {limits.MAX_HOT_ROWS} or less",
                device_buffer_size=self.device_buffer_size,
                limit=limits.MAX_HOT_ROWS,
            )

    @classmethod
    def resolve(
        cls,
        *,
        top_k: int,
        max_decode_query_len: int = 1,
        device_buffer_size: int | None = None,
    ) -> ResolvedHiSparseConfig:
        """Fill in the default: every row that one step can select, and one top-k of slack.

        Raises:
            GeometryError: Names all values and the limit that is broken.
        """
        if device_buffer_size is None:
            device_buffer_size = (max_decode_query_len + 1) * top_k
        return cls(
            top_k=top_k,
            device_buffer_size=device_buffer_size,
            max_decode_query_len=max_decode_query_len,
        )

    @property
    def max_union_rows(self) -> int:
        """Most distinct rows that one request selects in one step."""
        return self.max_decode_query_len * self.top_k

    def blocks_per_request(self, block_size: int) -> int:
        """Blocks of one request's hot region."""
        return -(-self.device_buffer_size // block_size)
