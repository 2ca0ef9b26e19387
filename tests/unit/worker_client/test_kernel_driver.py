"""A driver call that failed says which one, and with what number."""

from __future__ import annotations

import enum

import pytest

from hisparse_service.contract.errors import DeviceError
from worker_client.kernels.driver import check


class Result(enum.IntEnum):
    """Codes as cuda.bindings gives them."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


def test_a_failed_call_is_named_with_its_number() -> None:
    check("cuLaunchKernel", Result.CUDA_SUCCESS)
    with pytest.raises(DeviceError, match=r"cuLaunchKernel failed with CUDA error 700") as raised:
        check("cuLaunchKernel", Result.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert raised.value.details == {"cuda_error": 700, "call": "cuLaunchKernel"}
    assert raised.value.remedy
