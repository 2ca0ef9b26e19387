"""Lists of numbers for a kernel: how a step hands them to the device without waiting for it.

`torch.tensor(values, device="cuda")` copies from pageable memory, and that copy waits for
everything before it on the stream: a step would stand still until its own copies are done. From
pinned memory it is only enqueued; torch keeps the pinned piece until the copy has read it. Used by
`mirror.py` and the integrations on the worker's compute thread; not for captured regions, where a
list must already be on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["to_device"]


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers as a tensor on the device, the copy enqueued on the current stream.

    Args:
        values: Numbers, or sequences of them of one length.
        dtype: Of the result.
        device: Where the result lives.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    pinned = torch.tensor(values, dtype=dtype, pin_memory=True)
    return pinned.to(device, non_blocking=True)
