"""Calls of the CUDA driver through cuda.bindings, with this project's errors.

Shared by the worker's kernels and the two kinds of children of the daemon that have a CUDA context
(`pool/cuda_child.py`, `pool/device_child.py`); the daemon itself never imports a driver.
"""

from __future__ import annotations

from typing import Any

from hisparse_service.contract.errors import ConfigError, DeviceError


def load_driver(*, otherwise: str = "") -> Any:
    """The module `cuda.bindings.driver`.

    Args:
        otherwise: The setting that does without it, for the remedy; empty: none.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"cuda.bindings cannot be imported: {error}",
            remedy="Install hisparse-service[cuda]" + (otherwise and f", or set {otherwise}"),
        ) from error
    return driver


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """The value that a driver function returns beside its code; None where it returns none.

    Raises:
        DeviceError: With the code and the name of the call.
    """
    code, *values = getattr(driver, name)(*arguments)
    check(name, code)
    return values[0] if values else None


def check(name: str, code: Any) -> None:
    """Raise what a code means.

    Raises:
        DeviceError: It is not 0.
    """
    if int(code) != 0:
        raise DeviceError(
            f"{name} failed with {code.name} ({int(code)})",
            remedy="See the CUDA driver's list of errors for this number",
            cuda_error=int(code),
            call=name,
        )
