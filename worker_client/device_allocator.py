"""Puts resident and hot rows on device memory of the daemon's, for the binding functions.

Set a `DeviceAllocator` as a pool's `allocate_device`: `allocate_hisparse_kv_caches` takes the
device backing from there. The thread that owns the device.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    GeometryMismatch,
    PeerError,
)
from worker_client.device_backing import DeviceBacking, DeviceBackingMode, DeviceMemoryDriver

if TYPE_CHECKING:
    import torch

    from worker_client.client import Namespace

logger = logging.getLogger(__name__)


def device_layout_fingerprint(kv_cache_config: Any) -> bytes:
    """16 B: which layer's rows lie where on the device backing, and in what form.

    Args:
        kv_cache_config: `KVCacheConfig`, ours or vLLM's.
    """
    specs = {
        name: _spec_text(group.kv_cache_spec, name)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    placed = [
        [list(tensor.layers), tensor.size, tensor.offset, tensor.layer_stride, tensor.block_stride,
         int(kv_cache_config.num_blocks_of(tensor)), [specs.get(name) for name in tensor.layers]]
        for tensor in kv_cache_config.kv_cache_tensors
        if not tensor.host_resident
    ]  # fmt: skip
    text = json.dumps(placed, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=limits.FINGERPRINT_BYTES).digest()


def _spec_text(group_spec: Any, layer_name: str) -> list[Any]:
    """Kind, block size and form of a row; not the whole spec, which may hold objects."""
    from worker_client.specs import layer_spec

    spec = layer_spec(group_spec, layer_name)
    return [
        type(spec).__name__,
        *(str(getattr(spec, name, None)) for name in ("block_size", "head_size", "dtype")),
    ]


class DeviceFallback(enum.Enum):
    """What `DeviceAllocator` does where the daemon cannot give device memory."""

    OWN = "own"
    """Allocate in this process, and say so in the log."""
    RAISE = "raise"


class DeviceAllocator:
    """Gives the binding functions their device backing from the daemon.

    Set it as a pool's `allocate_device` before `init_hisparse_kv_cache` or
    `allocate_hisparse_kv_caches`; afterwards `backing` tells whether rows were found.

    Args:
        namespace: Opened.
        name: Tells the backings of one rank apart.
        mode: What to do with what is there.
        fallback: What to do where there can be none.
        driver: Stands in for CUDA.

    Attributes:
        backing: What the last call gave; None: it allocated in this process.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        name: str = "",
        mode: DeviceBackingMode = DeviceBackingMode.OPEN_OR_CREATE,
        fallback: DeviceFallback = DeviceFallback.OWN,
        driver: DeviceMemoryDriver | None = None,
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._mode = mode
        self._fallback = fallback
        self._driver = driver
        self.backing: DeviceBacking | None = None

    def __call__(self, kv_cache_config: Any, device: torch.device, size_bytes: int) -> torch.Tensor:
        """int8 [size_bytes] on the device: zeros, or the rows that were there.

        Raises:
            HiSparseError: The daemon's, with `DeviceFallback.RAISE`. A layout other than the one
                that is there is `GeometryMismatch` either way: rows are not thrown away unasked.
        """
        import torch

        try:
            self.backing = self._namespace.device_backing(
                size_bytes, layout=device_layout_fingerprint(kv_cache_config), name=self._name,
                device=device, mode=self._mode, driver=self._driver,
            )  # fmt: skip
        except (ConfigError, CapacityError, DeviceError, PeerError) as error:
            if self._fallback is DeviceFallback.RAISE or isinstance(error, GeometryMismatch):
                raise
            logger.warning("device rows are allocated in this process: %s", error)
            self.backing = None
            return torch.zeros(size_bytes, dtype=torch.int8, device=device)
        return self.backing.tensor
