"""The calculator counts what the layout, the pool and the kernels really take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hisparse_service.cli import capacity
from hisparse_service.cli.capacity import PRESETS, Load, ModelShape
from hisparse_service.cli.main import app
from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.geometry import HostLayout, round_up
from hisparse_service.contract.limits import GIB
from hisparse_service.contract.segment import ARENA_OFFSET, RECORD_BYTES
from worker_client.kernels.interface import HotState, allocate_hot_state, allocate_plan
from worker_client.layout import build_kv_cache_config, make_layer_specs
from worker_client.specs import HiSparseConfig

LOAD = Load(context_tokens=4096, concurrency=3, keeps_index_keys=False)
MODELS = [
    *PRESETS.values(),
    ModelShape(name="uneven", group_sizes=(1, 3, 2, 5), top_k=64, index_head_dim=28),
]


def index_groups(model: ModelShape) -> list[list[str]]:
    return [[f"l{g}.{i}" for i in range(size)] for g, size in enumerate(model.group_sizes)]


def real_layout(model: ModelShape, load: Load, found: capacity.Plan) -> Any:
    """The worker's own layout of the same model."""
    row = capacity.LATENT_ROW_BYTES[load.kv_dtype]
    config = HiSparseConfig(
        max_model_len=load.context_tokens, max_num_requests=load.concurrency, top_k=model.top_k,
        max_num_batched_tokens=8192,
        device_buffer_size=found.hot_rows,
        max_decode_query_len=1 + load.speculative_tokens,
    )  # fmt: skip
    groups = index_groups(model)
    specs = make_layer_specs(
        groups, block_size=load.block_size, row_width=row, dtype=torch.uint8,
        indexer_width=model.index_row_bytes, indexer_dtype=torch.uint8,
    )  # fmt: skip
    return build_kv_cache_config(
        config, specs, num_device_blocks=found.device_blocks, num_host_blocks=found.host_blocks,
        host_layout=HostLayout.GROUP_INTERLEAVED,
    )  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("kv_dtype", list(capacity.LATENT_ROW_BYTES))
def test_blocks_are_those_of_the_workers_layout(model: ModelShape, kv_dtype: str) -> None:
    load = Load(
        context_tokens=4096, concurrency=3, kv_dtype=kv_dtype, keeps_index_keys=False,
        speculative_tokens=1,
    )  # fmt: skip
    found = capacity.plan(model, load)
    real = real_layout(model, load, found)
    assert found.host_block_bytes == real.host_block_stride
    device = next(tensor for tensor in real.kv_cache_tensors if not tensor.host_resident)
    assert found.device_block_bytes == device.block_stride
    hot = [g for g in real.kv_cache_groups if type(g.kv_cache_spec).__name__ == "HiSparseHotSpec"]
    assert found.device_groups == len(hot)
    assert found.hot_blocks == len(hot) * 3 * hot[0].kv_cache_spec.blocks_per_request


def test_state_bytes_are_those_of_the_tensors() -> None:
    sizes = {"requests": 5, "hot_rows": 192, "query_rows": 2, "top_k": 64}
    state: HotState = allocate_hot_state(max_num_reqs=5, hot_rows=192, device="cpu")
    plan = allocate_plan(
        max_num_requests=5, max_query_rows=10, max_rows_per_request=2, top_k=64, device="cpu"
    )
    tensors = [
        state.host_rows, state.last_use, state.clock, plan.physical_rows, plan.valid_counts,
        plan.miss_source_rows, plan.miss_device_rows, plan.miss_counts,
    ]  # fmt: skip
    assert capacity.state_bytes(**sizes) == sum(t.numel() * t.element_size() for t in tensors)


def test_the_pool_holds_what_was_asked_for_and_not_a_block_more() -> None:
    model = PRESETS["deepseek-v3.2"]
    found = capacity.plan(model, LOAD)
    assert found.host_blocks == 1 + 3 * (4096 // 64 + 1)
    assert found.pool_bytes == (
        ARENA_OFFSET + round_up(found.host_blocks * RECORD_BYTES, 4096)
        + found.host_blocks * found.host_block_bytes
    )  # fmt: skip
    held = capacity.tokens_in(model, LOAD, found.pool_bytes)
    assert (found.host_blocks - 2) * 64 <= held <= (found.host_blocks - 1) * 64


def test_a_shared_prefix_is_counted_once_and_kept_tokens_on_top() -> None:
    model = PRESETS["glm-5"]

    def blocks(**change: int) -> int:
        sizes = {"context_tokens": 4096, "concurrency": 3} | change
        return capacity.plan(model, Load(**sizes)).host_blocks

    assert blocks(shared_prefix_tokens=1024) == blocks() - 2 * 16
    assert blocks(kept_tokens=640) == blocks() + 10


def test_index_keys_cost_their_padded_rows() -> None:
    model = PRESETS["deepseek-v3.2"]
    kept = capacity.plan(model, Load(context_tokens=64, concurrency=1))
    assert kept.host_block_bytes == round_up(61 * 64 * (656 + 144), 4096)


def test_the_row_formats_are_those_of_the_design() -> None:
    wide = ModelShape(name="m", group_sizes=(1,))
    for kv_dtype, row_bytes in capacity.LATENT_ROW_BYTES.items():
        load = Load(context_tokens=64, concurrency=1, kv_dtype=kv_dtype, keeps_index_keys=False)
        assert capacity.plan(wide, load).host_block_bytes == round_up(64 * row_bytes, 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"context_tokens": 0}, {"concurrency": 0}, {"hot_rows": 2047}, {"hot_rows": 32769},
        {"block_size": 2048}, {"speculative_tokens": 8}, {"kv_dtype": "fp4"},
        {"shared_prefix_tokens": 4097},
    ],
)  # fmt: skip
def test_impossible_loads_are_refused(change: dict[str, Any]) -> None:
    load = Load(**({"context_tokens": 4096, "concurrency": 1} | change))
    with pytest.raises(ConfigError):
        capacity.plan(PRESETS["deepseek-v3.2"], load)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"indexer_types": ["full", "shared", "full"]}, (2, 1)),
        ({"index_topk_pattern": "FSS"}, (3,)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (2, 1)),
        ({}, (1, 1, 1)),
    ],
)
def test_a_models_own_configuration_is_read(
    tmp_path: Path, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 3, "index_topk": 512, **config}))
    shape = capacity.read_model(path)
    assert (shape.group_sizes, shape.top_k) == (sizes, 512)


def test_the_presets_are_the_models_own_configurations(tmp_path: Path) -> None:
    from transformers import DeepseekV32Config, GlmMoeDsaConfig

    path = tmp_path / "config.json"
    for config, name in (
        (DeepseekV32Config(), "deepseek-v3.2"),
        (GlmMoeDsaConfig(), "glm-5"),
        (GlmMoeDsaConfig(index_topk_freq=4), "glm-5-shared"),
    ):
        path.write_text(config.to_json_string(use_diff=False))
        shape, preset = capacity.read_model(path), PRESETS[name]
        assert shape.group_sizes == preset.group_sizes
        assert (shape.top_k, shape.index_head_dim) == (preset.top_k, preset.index_head_dim)
        assert shape.latent_width == preset.latent_width


@pytest.mark.parametrize("text", ["", "[]", '{"num_hidden_layers": 3}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        capacity.read_model(path)


def test_the_command_prints_a_size_that_the_settings_take() -> None:
    arguments = ["plan", "--context", "131072", "--concurrency", "64", "--pool-bytes", "256GiB"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert 'set pool.bytes = "' in shown.output
    assert "a pool of 256GiB holds" in shown.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert 300 * GIB < found["plan"]["pool_bytes"] < 400 * GIB
    assert found["plan"]["gpu_bytes"] < found["plan"]["gpu_bytes_without"]
    assert found["tokens_in_pool"] > 131072


def test_an_unknown_model_names_the_known_ones() -> None:
    done = CliRunner().invoke(
        app, ["plan", "--context", "1", "--concurrency", "1", "--model", "glm"]
    )
    assert isinstance(done.exception, ConfigError)
    assert "glm-5" in str(done.exception)
