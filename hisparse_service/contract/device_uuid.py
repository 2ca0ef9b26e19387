"""How a GPU is named between processes: by its UUID, in one spelling.

Indexes mean another device in each process (CUDA_VISIBLE_DEVICES); torch, NVML and the driver each
write the UUID in a form of their own. Pure: any thread of either side.
"""

from __future__ import annotations

import re
from typing import Final

from hisparse_service.contract.errors import UsageError

_FORM: Final = re.compile(
    r"(?:(?:GPU|MIG)-)?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})",
    re.IGNORECASE,
)


def normal_device_uuid(text: str) -> str:
    """``GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx``, of any spelling of it.

    Raises:
        UsageError: It is no UUID.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text[:64]!r} is not a GPU's UUID",
            remedy="Give what `nvidia-smi -L` or torch.cuda.get_device_properties(i).uuid say",
        )
    return "GPU-" + "-".join(match.groups()).lower()


def device_uuid_of_bytes(raw: bytes) -> str:
    """The same, of the 16 bytes that the driver gives.

    Raises:
        UsageError: Not 16 bytes.
    """
    return normal_device_uuid(raw.hex())
