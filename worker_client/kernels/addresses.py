"""Where a device reads and writes the pages of an index group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse_service.contract.errors import UsageError
from worker_client.kernels.interface import GroupPages, HostLayout


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Addresses of up to MAX_LAYERS_A_LAUNCH layers, and their strides in bytes."""

    host: tuple[int, ...]
    device: tuple[int, ...]
    host_block_bytes: int
    host_row_bytes: int
    host_bytes: int
    device_block_bytes: int
    row_bytes: int
    block_size: int
    block_stride_rows: int
    adjacent: bool

    @property
    def is_device_flat(self) -> bool:
        """Whether physical row p lies at p * row_bytes."""
        return self.block_stride_rows * self.row_bytes == self.device_block_bytes


def layers_of(pages: GroupPages) -> Layers:
    """Addresses of these pages, at most MAX_LAYERS_A_LAUNCH layers.

    Raises:
        UsageError: Host pages that are not registered in this process.
    """
    device = pages.device[0]
    return Layers(
        host=tuple(_device_address(layer) for layer in pages.host),
        device=tuple(layer.data_ptr() for layer in pages.device),
        host_block_bytes=pages.host[0].stride(0),
        host_row_bytes=pages.host[0].stride(1),
        host_bytes=pages.host[0].shape[0] * pages.host[0].stride(0),
        device_block_bytes=device.stride(0),
        row_bytes=pages.row_bytes,
        block_size=pages.block_size,
        block_stride_rows=pages.block_stride_rows,
        adjacent=pages.host_layout is HostLayout.GROUP_INTERLEAVED,
    )


def _device_address(layer: torch.Tensor) -> int:
    """Where the device reads a layer's host pages: both ends must be in registered memory.

    Raises:
        UsageError: They are not, or not at one distance from the host's addresses.
    """
    first = layer.data_ptr()
    size = sum((n - 1) * s for n, s in zip(layer.shape, layer.stride(), strict=True)) + 1
    start, end = (_mapped_address(address) for address in (first, first + size - 1))
    if end - start != size - 1:
        raise UsageError("the device maps the two ends of a layer's host pages at other distances")
    return start


def _mapped_address(address: int) -> int:
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    error, mapped = driver.cuPointerGetAttribute(attribute, address)
    if int(error) or not int(mapped):
        raise UsageError(
            f"host page at {address:#x} is not registered with CUDA (error {int(error)})",
            remedy="Attach the host pool with registration before binding its pages",
            cuda_error=int(error),
            call="cuPointerGetAttribute",
        )
    return int(mapped)
