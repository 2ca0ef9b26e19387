"""The seed's host pool over the daemon's shared memory. Signatures first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.geometry import HostGeometry

if TYPE_CHECKING:
    import torch


class HostPool:
    """One namespace's backing, mapped into this process. Made by `Namespace.attach`.

    The mapping stays where it is from attach to `cleanup` (I4). Tensors may outlive `cleanup`: the
    pages are unmapped when the last tensor goes.
    """

    geometry: HostGeometry
    num_blocks: int
    """Null block included."""
    payload_bytes: int
    address: int
    """Of the payload's first byte in this process."""
    ranges: tuple[tuple[int, int], ...]
    """[start, end) for registration, bytes from the payload's start."""
    table: npt.NDArray[Any]
    """`RECORD_DTYPE` [num_blocks], read-only."""
    adopted: bool

    def allocate(self, size: int) -> torch.Tensor:
        """int8 [size] over the payload's start. The same size again gives the same tensor.

        Raises:
            GeometryError: Larger than the backing, or another size than before (names both).
        """
        raise NotImplementedError

    @property
    def backing(self) -> torch.Tensor | None:
        """What `allocate` gave; None before."""
        raise NotImplementedError

    @property
    def registered(self) -> torch.Tensor:
        """int8 [payload_bytes]: the whole payload; shares its storage with `backing`."""
        raise NotImplementedError

    @property
    def shared_region(self) -> HostPool:
        """The owner of the mapping, for code that calls ``shared_region.cleanup()``."""
        raise NotImplementedError

    def layer_view(self, layer: int) -> torch.Tensor:
        """uint8 [num_blocks, block_size, row_bytes], strided as the geometry says."""
        raise NotImplementedError

    def row_bytes(self, layer: int) -> int:
        """Bytes of one row of this layer."""
        raise NotImplementedError

    def checksum(self, blocks: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint64]:
        """u64 [len(blocks)]: content checksum of all layers' rows of each block, never 0."""
        raise NotImplementedError

    @property
    def cuda_registered(self) -> bool:
        """Whether kernels may read this mapping."""
        raise NotImplementedError

    def cleanup(self) -> None:
        """Unregister from CUDA and give the mapping up. Idempotent."""
        raise NotImplementedError
