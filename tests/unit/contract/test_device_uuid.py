"""One spelling of a GPU's name for all processes."""

from __future__ import annotations

import pytest

from hisparse_service.contract.device_uuid import device_uuid_of_bytes, normal_device_uuid
from hisparse_service.contract.errors import UsageError

NORMAL = "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"


@pytest.mark.parametrize(
    "text",
    [
        NORMAL, NORMAL.removeprefix("GPU-"), NORMAL.upper(), f" {NORMAL}\n",
        NORMAL.removeprefix("GPU-").replace("-", ""), NORMAL.replace("GPU-", "MIG-"),
    ],
)  # fmt: skip
def test_all_spellings_are_one(text: str) -> None:
    assert normal_device_uuid(text) == NORMAL


@pytest.mark.parametrize("text", ["", "0", "GPU-1", NORMAL[:-1], NORMAL + "0", "cuda:0"])
def test_what_is_no_uuid_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a GPU's UUID"):
        normal_device_uuid(text)


def test_the_drivers_bytes_are_the_same_name() -> None:
    raw = bytes.fromhex(NORMAL.removeprefix("GPU-").replace("-", ""))
    assert device_uuid_of_bytes(raw) == NORMAL
    with pytest.raises(UsageError):
        device_uuid_of_bytes(raw[:15])
