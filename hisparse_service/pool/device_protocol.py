"""What the daemon and its device children say to each other: one JSON object a line. Any thread."""

from __future__ import annotations

from typing import Literal

import msgspec

from hisparse_service.contract.errors import Detail


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the daemon to the child."""

    do: Literal["allocate", "free"]
    backing_id: int
    size_bytes: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the child to the daemon."""

    event: Literal["started", "opened", "allocated", "freed", "refused", "failed"]
    """refused: this order was not carried out. failed: the child ends."""
    backing_id: int = 0
    device_uuid: str = ""
    """Of `opened`: the device's own, from the driver."""
    context_bytes: int = 0
    """Of `opened`: GPU memory in use now, less what was in use before: this context's."""
    total_bytes: int = 0
    """Of `opened`: the device's memory."""
    handle: bytes = b""
    """Of `allocated`: CUDA IPC memory handle, 64 B."""
    code: str = ""
    """Of `refused` and `failed`: name of the error in the tree."""
    message: str = ""
    remedy: str = ""
    details: dict[str, Detail] = {}
