"""What the runtime's parts check at their doors: bound, long enough, inside the host pool."""

from __future__ import annotations

from typing import TypeVar

import torch

from hisparse_service.contract.errors import UsageError

__all__ = ["bound", "check_inside", "first_slots"]

_T = TypeVar("_T")


def bound(value: _T | None, call: str) -> _T:
    """What a call binds.

    Raises:
        UsageError: It was not called yet.
    """
    if value is None:
        raise UsageError(f"not bound yet: {call} comes first")
    return value


def first_slots(slots: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """The slots of the first tokens of a batch: ``[count]``, a view.

    Raises:
        UsageError: The mapping holds fewer.
    """
    if not 0 <= count <= slots.shape[0]:
        raise UsageError(f"{count} tokens, the {name} holds {slots.shape[0]}")
    return slots[:count]


def check_inside(source: torch.Tensor, pool: torch.Tensor) -> None:
    """Whether a layer's strided host cache lies in the registered pool: storage and bytes.

    Raises:
        UsageError: It does not: the device could not read all of it.
    """
    if source.untyped_storage().data_ptr() != pool.untyped_storage().data_ptr():
        raise UsageError(
            "the source cache is not in the storage of the registered host pool",
            remedy="make its view from HostPool.backing",
        )
    last = sum(
        (size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True)
    )
    start = source.data_ptr()
    end = start + (last + 1) * source.element_size()
    pool_start = pool.data_ptr()
    pool_end = pool_start + pool.numel() * pool.element_size()
    if start < pool_start or end > pool_end:
        raise UsageError(
            f"the source cache ends {end - pool_start} bytes into a registered pool of "
            f"{pool_end - pool_start} bytes"
        )
