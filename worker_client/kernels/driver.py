"""Calls of the CUDA driver in the process of the worker."""

from __future__ import annotations

from typing import Any

from hisparse_service.contract import cuda_calls


def call(name: str, *arguments: Any) -> Any:
    """The value that a driver function returns beside its code; None where it returns none.

    Raises:
        DeviceError: With the code and the name of the call.
    """
    from cuda.bindings import driver

    return cuda_calls.call(driver, name, *arguments)


def device_attribute(index: int, name: str) -> int:
    """CU_DEVICE_ATTRIBUTE_<name> of a device."""
    from cuda.bindings import driver

    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", attribute, driver.CUdevice(index)))


def set_l2_aside(index: int, num_bytes: int) -> None:
    """Raise the current context's limit of cache for persisting accesses; never lower it."""
    from cuda.bindings import driver

    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    wanted = min(num_bytes, device_attribute(index, "MAX_PERSISTING_L2_CACHE_SIZE"))
    if wanted > call("cuCtxGetLimit", limit):
        call("cuCtxSetLimit", limit, wanted)
