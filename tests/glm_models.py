"""Small seeded models, and a host pool without a daemon, for tests of the integration."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.cache_utils import DynamicCache


def make_model(seed=0, *, top_k=16, layers=("full", "shared", "full"), heads=16):
    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=len(layers), num_attention_heads=4, num_key_value_heads=4,
        n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=48,
        q_lora_rank=48, qk_rope_head_dim=16, v_head_dim=16, qk_nope_head_dim=16,
        index_topk=top_k, index_head_dim=32, index_n_heads=heads, first_k_dense_replace=1,
        max_position_embeddings=4096, initializer_range=0.12, indexer_types=list(layers),
        bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    return GlmMoeDsaForCausalLM(config).eval()


@torch.no_grad()
def reference(model, prompt, num_tokens):
    """Greedy tokens and their logits with the model's own cache."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt)])
    tokens, rows = [], []
    for _ in range(num_tokens):
        row = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        tokens.append(int(row.argmax()))
        rows.append(row)
        ids = torch.tensor([[tokens[-1]]])
    return tokens, torch.stack(rows)


class LocalHostPool:
    """Host memory of one process, shared by its ranks."""

    def __init__(self, geometry, num_blocks):
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._bytes = torch.zeros(geometry.pool_bytes(num_blocks), dtype=torch.int8)
        self.backing = None

    @property
    def registered(self):
        return self._bytes

    @property
    def shared_region(self):
        return self

    def allocate(self, size):
        self.backing = self._bytes[:size]
        return self.backing

    def layer_view(self, layer):
        place = self.geometry.place(layer, self.num_blocks)
        return torch.as_strided(
            self._bytes.view(torch.uint8),
            (self.num_blocks, self.geometry.block_size, place.row_bytes),
            (place.block_stride_bytes, place.row_stride_bytes, 1),
            place.offset_bytes,
        )

    def cleanup(self):
        pass
