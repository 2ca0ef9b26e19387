"""vLLM's HiSparse over the service: a plugin for released vLLM, no fork and no edit.

vLLM calls `register` in the engine core and in each worker (entry point group
``vllm.general_plugins``). It puts two of vLLM's names behind ours: the host pool's class and the
factory's entry for ``HiSparseConnector``. Both ask the engine's configuration and give vLLM's own
where no endpoint is set. See docs/vllm.md.

Importing this package loads neither vLLM nor torch.
"""

from __future__ import annotations

from worker_client.integrations.vllm.activation import SUPPORTED_VERSIONS, register

__all__ = ["SUPPORTED_VERSIONS", "register"]
