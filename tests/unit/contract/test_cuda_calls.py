"""Driver calls without a driver: a stand-in for one that fails, which is what these are about."""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace

import pytest

from hisparse_service.contract.cuda_calls import call, load_driver
from hisparse_service.contract.errors import ConfigError, DeviceError


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


def driver(code: Code, *values: int) -> SimpleNamespace:
    return SimpleNamespace(cuSomething=lambda *_: (code, *values))


def test_a_call_gives_what_stands_beside_its_code() -> None:
    assert call(driver(Code.CUDA_SUCCESS, 7), "cuSomething", 1, 2) == 7
    assert call(driver(Code.CUDA_SUCCESS), "cuSomething") is None


def test_a_call_that_fails_says_which_and_how() -> None:
    with pytest.raises(DeviceError, match=r"cuSomething.*CUDA_ERROR_OUT_OF_MEMORY \(2\)") as caught:
        call(driver(Code.CUDA_ERROR_OUT_OF_MEMORY, 0), "cuSomething")
    assert caught.value.details == {"cuda_error": 2, "call": "cuSomething"}


def test_a_missing_package_names_the_setting_that_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError) as caught:
        load_driver(otherwise="cuda.register to off")
    assert "cuda.register to off" in str(caught.value.remedy)
