"""What the demonstration runs: its job description, its small seeded model, its prompts.

The driver (`hisparse-service demo`) writes the job as a file; its worker processes and its
reference process read it here, so that all build the same model and prompts. Any thread.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.geometry import HostGeometry
from hisparse_service.contract.segment import ARENA_OFFSET, RECORD_BYTES
from worker_client.coordinator import CoordinatorConfig
from worker_client.integrations.transformers import ModelShape, TierSizes

# No look-up on the network: the model is made here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 256
"""Text is tokenised by bytes."""

_LAYERS = ("full", "shared", "shared", "full", "shared", "full")
_BLOCK_SIZE = 16
_TOP_K = 32
_HOT_ROWS = 64
_CHUNK_TOKENS = 96
_SPARE_DEVICE_BLOCKS = 48
"""Room for a few more resident pages than one step needs; far from the whole context."""


class RequestJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt: a shared beginning of the text, then a passage of its own."""

    name: str
    shared_bytes: Annotated[int, Meta(ge=0)]
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1)]
    """Tokens of the prompt, the shared ones included."""
    max_new_tokens: Annotated[int, Meta(ge=1)]


class DemoJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the processes of a demonstration have in common."""

    endpoint: str
    directory: str
    """Private to the demonstration: the row ledger, logits and logs."""
    text: str
    requests: list[RequestJob]
    seed: int
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    decode: Literal["static", "graph"]
    """How decode steps are run: one call after the other, or a CUDA graph that is replayed."""
    world_size: Annotated[int, Meta(ge=1)]
    group: str
    pool_bytes: int
    """Of the private daemon's pool; 0 where the daemon is somebody else's."""

    @property
    def max_tokens(self) -> int:
        """Longest request."""
        return max(request.length + request.max_new_tokens for request in self.requests)

    def prompt(self, request: RequestJob) -> list[int]:
        """The tokens of a prompt.

        Raises:
            ConfigError: The text is too short.
        """
        data = Path(self.text).read_bytes()
        own = request.length - request.shared_bytes
        passage = data[request.offset : request.offset + own]
        if len(passage) < own or request.shared_bytes > len(data):
            raise ConfigError(
                f"the text has {len(data)} bytes, a prompt needs bytes {request.offset} to "
                f"{request.offset + own}",
                remedy="Give a longer --text, or fewer requests",
                text_bytes=len(data),
            )
        return list(data[: request.shared_bytes] + passage)

    def torch_device(self) -> torch.device:
        """The device.

        Raises:
            ConfigError: There is no CUDA device.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no CUDA device", remedy="Use --device cpu")
        return torch.device(self.device)


def load_job(path: Path) -> DemoJob:
    """Read a job.

    Raises:
        ConfigError: Not a job.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=DemoJob)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no job of the demonstration ({error})") from error


def build_model(job: DemoJob) -> Any:
    """The seeded `GlmMoeDsaForCausalLM` of the demonstration, in evaluation mode on its device.

    Small, but with everything that the real ones have: index groups of three, two and one layers,
    dense and expert MLPs, a latent of 64 values beside a rotary key of 16. Sixteen indexer heads,
    because with few of them many scores are exactly 0 and the top-k is a matter of chance. All
    experts take part in each token: which of two nearly equal ones does is a matter of rounding.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=len(_LAYERS),
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=4,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_rope_head_dim=16,
        v_head_dim=32,
        qk_nope_head_dim=32,
        index_topk=_TOP_K,
        index_head_dim=32,
        index_n_heads=16,
        first_k_dense_replace=2,
        max_position_embeddings=8192,
        initializer_range=0.12,
        indexer_types=list(_LAYERS),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    # The experts of transformers that never wait for the device, so that a step can be captured:
    # the eager ones look which experts were hit, grouped_mm may read its offsets back.
    config._experts_implementation = "batched_mm"
    # Made on the CPU and then moved, so that every process and device has the same weights.
    torch.manual_seed(job.seed)
    model = GlmMoeDsaForCausalLM(config).eval()
    return model.to(device=job.torch_device(), dtype=getattr(torch, job.dtype))


def weights_digest(model: Any) -> str:
    """A name for exactly these weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tier_sizes(job: DemoJob, shape: ModelShape) -> TierSizes:
    """Tiers much smaller than the contexts: they must spill, miss, evict and restore."""
    groups = len(shape.index_groups)
    config = CoordinatorConfig(
        block_size=_BLOCK_SIZE,
        num_device_blocks=2,
        num_resident_groups=groups,
        num_hot_groups=groups,
        hot_blocks_per_request=-(-_HOT_ROWS // _BLOCK_SIZE),
        max_num_requests=len(job.requests),
        max_model_tokens=job.max_tokens,
        max_step_tokens=_CHUNK_TOKENS,
    )
    promised = sum(
        config.device_blocks_for(request.length + request.max_new_tokens)
        for request in job.requests
    )
    return TierSizes(
        block_size=_BLOCK_SIZE,
        num_device_blocks=1 + promised + _SPARE_DEVICE_BLOCKS,
        max_num_requests=len(job.requests),
        max_model_tokens=job.max_tokens,
        max_step_tokens=_CHUNK_TOKENS,
        hot_rows=_HOT_ROWS,
    )


def num_host_blocks(job: DemoJob, geometry: HostGeometry) -> int:
    """Host blocks of the namespace: what all requests need at once, if the pool has so many.

    Raises:
        ConfigError: The pool does not hold one request.
    """
    pages = [
        -(-(request.length + request.max_new_tokens) // geometry.block_size) + 1
        for request in job.requests
    ]
    needed = 1 + sum(pages)
    if not job.pool_bytes:
        return needed
    # Each of the two extents of a backing begins on an OS page.
    room = job.pool_bytes - ARENA_OFFSET - 2 * geometry.os_page_bytes
    fits = room // (geometry.block_stride_bytes + RECORD_BYTES)
    if fits <= max(pages):
        raise ConfigError(
            f"--pool-bytes {job.pool_bytes} holds {fits} host blocks of "
            f"{geometry.block_stride_bytes} bytes, one request needs {max(pages) + 1}",
            remedy="Give a larger --pool-bytes, or fewer tokens",
            needed=max(pages) + 1,
            free=fits,
        )
    return min(needed, fits)
