"""The data plane: one interface, a CPU reference, and GPU kernels that must agree with it.

The runtime's parts and `mirror.py` are the only callers, on the worker's compute thread.
"""

from __future__ import annotations

import torch

from worker_client.kernels.interface import KernelBackend
from worker_client.kernels.reference import ReferenceBackend

__all__ = ["KernelBackend", "ReferenceBackend", "backend_for"]


def backend_for(device: torch.device | str) -> KernelBackend:
    """Return the implementation for a device: the reference wherever there are no kernels."""
    if torch.device(device).type != "cuda":
        return ReferenceBackend()
    from worker_client.kernels.cuda import CudaBackend  # needs cuda-core, which a CPU does without

    return CudaBackend(device)
