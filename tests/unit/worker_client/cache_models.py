"""Models to lay out: drawn by hypothesis, and the markers that byte tests write and look for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from hisparse_service.contract.geometry import HostLayout
from worker_client.layout import build_kv_cache_config, make_layer_specs, required_host_blocks
from worker_client.specs import HiSparseConfig, KVCacheConfig, MLAAttentionSpec

FP8 = (656, torch.uint8)
BF16 = (576, torch.bfloat16)
INDEXER = (132, torch.uint8)


@dataclass(frozen=True)
class Model:
    """What a test lays out."""

    config: HiSparseConfig
    specs: dict[str, MLAAttentionSpec]
    index_groups: list[list[str]]
    draft_layers: frozenset[str]
    num_device_blocks: int
    num_host_blocks: int
    host_layout: HostLayout

    @property
    def source(self) -> list[str]:
        return [name for group in self.index_groups for name in group]

    @property
    def row_bytes(self) -> dict[str, int]:
        return {name: self.specs[name].row_bytes for name in self.source}

    @property
    def block_size(self) -> int:
        return self.specs[self.source[0]].block_size

    def build(self, **changes: object) -> KVCacheConfig:
        settings = {
            "num_device_blocks": self.num_device_blocks,
            "num_host_blocks": self.num_host_blocks,
            "host_layout": self.host_layout,
            **changes,
        }
        return build_kv_cache_config(self.config, self.specs, **settings)


def make_model(
    *,
    num_layers: int = 4,
    index_group: int = 4,
    row: tuple[int, torch.dtype] = FP8,
    num_draft_layers: int = 0,
    draft_row: tuple[int, torch.dtype] | None = None,
    block_size: int = 16,
    num_device_blocks: int = 3,
    host_layout: HostLayout = HostLayout.GROUP_INTERLEAVED,
    top_k: int = 24,
    max_model_len: int = 40,
    spare_host_blocks: int = 0,
) -> Model:
    """Make a model; draft layers are leaders of their own and may have another row format."""
    names = [f"layers.{index}.attn" for index in range(num_layers)]
    groups = [names[start : start + index_group] for start in range(0, num_layers, index_group)]
    drafts = [f"draft.{index}.attn" for index in range(num_draft_layers)]
    shared = {
        "block_size": block_size,
        "indexer_width": INDEXER[0],
        "indexer_dtype": INDEXER[1],
    }
    specs = make_layer_specs(groups, row_width=row[0], dtype=row[1], **shared)
    draft_format = draft_row or row
    draft_specs = make_layer_specs(
        [[name] for name in drafts],
        row_width=draft_format[0],
        dtype=draft_format[1],
        draft_layers=drafts,
        **shared,
    )
    config = HiSparseConfig(
        top_k=top_k, max_num_requests=2, max_num_batched_tokens=8, max_model_len=max_model_len
    )
    return Model(
        config=config,
        specs={**specs, **draft_specs},
        index_groups=[*groups, *([name] for name in drafts)],
        draft_layers=frozenset(drafts),
        num_device_blocks=num_device_blocks,
        num_host_blocks=required_host_blocks(max_model_len, block_size) + spare_host_blocks,
        host_layout=host_layout,
    )


@st.composite
def models(draw: st.DrawFn, *, max_layers: int = 78) -> Model:
    """Layers 1 to `max_layers`, index groups of 1 and 4, both row formats, 0 to 2 draft layers."""
    row = draw(st.sampled_from([FP8, BF16]))
    num_draft = draw(st.integers(0, 2))
    # Hot groups hold one page size, and a draft layer's unit may be packed with the target's, so
    # that another format is drawn only where the indexers' pages leave no room for both.
    mixed = num_draft == 1 and row == FP8 and draw(st.booleans())
    index_group = draw(st.sampled_from([1, 4]))
    num_layers = draw(st.integers(1, max_layers))
    if mixed:
        num_layers = min(num_layers, index_group)
    return make_model(
        num_layers=num_layers,
        index_group=index_group,
        row=row,
        num_draft_layers=num_draft,
        draft_row=BF16 if mixed else None,
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        num_device_blocks=draw(st.integers(2, 5)),
        host_layout=draw(st.sampled_from(list(HostLayout))),
        max_model_len=draw(st.integers(1, 300)),
        spare_host_blocks=draw(st.integers(0, 2)),
    )


def marker(layer: int, block: int, row: int) -> list[int]:
    """Eight bytes that name a row, none of them zero."""
    value = ((layer + 1) * 1009 + block) * 1009 + row
    return [(value >> shift & 0x7F) | 0x80 for shift in range(0, 56, 7)]


def with_spec(model: Model, name: str, **changes: object) -> Model:
    """The model with one layer's spec changed."""
    changed = replace(model.specs[name], **changes)
    return replace(model, specs={**model.specs, name: changed})
