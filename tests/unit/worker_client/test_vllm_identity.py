"""Who shares with whom: geometry and identity from an engine's configuration. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hisparse_service.contract.errors import ConfigError, GeometryError
from worker_client.integrations.vllm.activation import base_version
from worker_client.integrations.vllm.connection import check_num_blocks
from worker_client.integrations.vllm.identity import (
    check_topology,
    group_name,
    model_identity,
    plan_host,
    row_format,
)
from worker_client.integrations.vllm.settings import IndexKeys, Settings

SETTINGS = Settings(endpoint="/x")
NUM_BLOCKS = 10
BLOCK_SIZE = 16
PAGE = BLOCK_SIZE * 656


def tensor(layers, *, offset, stride, host):
    return SimpleNamespace(layers=layers, offset=offset, layer_stride=stride, host_resident=host)


def cache_config(*, order=("a", "b"), page=PAGE):
    """Two source layers, in one tensor each, and an indexer layer."""
    spec = SimpleNamespace(block_size=BLOCK_SIZE, dtype="u8", cache_dtype_str="fp8_ds_mla")
    stride = NUM_BLOCKS * page
    return SimpleNamespace(
        hisparse_host_num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[
            tensor([order[0]], offset=0, stride=stride, host=True),
            tensor([order[1]], offset=stride, stride=stride, host=True),
            tensor(["a.index"], offset=0, stride=BLOCK_SIZE * 132, host=False),
        ],
        kv_cache_groups=[
            SimpleNamespace(
                host_resident=True, layer_names=["a", "b"], kv_cache_spec=spec,
                role="hisparse_source",
            ),
            SimpleNamespace(
                host_resident=False, layer_names=["a.index"], kv_cache_spec=spec,
                role="hisparse_indexer",
            ),
        ],
    )  # fmt: skip


def test_source_layers_lie_where_vllm_lays_them_and_index_keys_behind():
    plan = plan_host(cache_config(), SETTINGS)
    assert plan.source_layers == ("a", "b")
    assert plan.source_bytes == 2 * NUM_BLOCKS * PAGE
    for layer in range(2):
        place = plan.geometry.place(layer, NUM_BLOCKS)
        assert place.offset_bytes == layer * NUM_BLOCKS * PAGE
        assert (place.block_stride_bytes, place.row_bytes) == (PAGE, 656)
    behind = plan.geometry.place(2, NUM_BLOCKS)
    assert behind.offset_bytes == plan.source_bytes
    assert behind.block_stride_bytes >= plan.index_page_bytes[0] == BLOCK_SIZE * 132
    assert behind.row_bytes % 16 == 0


def test_layers_are_taken_in_the_order_of_their_bytes_not_of_their_names():
    assert plan_host(cache_config(order=("b", "a")), SETTINGS).source_layers == ("b", "a")


def test_without_index_keys_the_blocks_are_smaller():
    dropped = Settings(endpoint="/x", index_keys=IndexKeys.DROP)
    small, large = (plan_host(cache_config(), s) for s in (dropped, SETTINGS))
    assert small.index_layers == ()
    assert small.geometry.data_block_bytes < large.geometry.data_block_bytes


def test_a_layout_with_gaps_is_refused():
    config = cache_config()
    config.kv_cache_tensors[1].offset += 4096
    with pytest.raises(GeometryError, match="host layer b"):
        plan_host(config, SETTINGS)


def test_other_layer_names_or_orders_are_other_rows():
    def named(**options) -> str:
        config = cache_config(**options)
        return row_format(config, plan_host(config, SETTINGS))

    assert named() == named()
    assert named() != named(order=("b", "a"))
    assert named().startswith("fp8_ds_mla/")


def vllm_config(model, **parallel):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None, dtype="bf16", hf_config=None),
        parallel_config=SimpleNamespace(data_parallel_index=2, **parallel),
        instance_id="abc",
    )


def test_weights_that_were_replaced_under_one_path_are_other_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    first = model_identity(vllm_config(tmp_path), SETTINGS)
    assert model_identity(vllm_config(tmp_path), SETTINGS) == first
    file.write_bytes(b"other")
    assert model_identity(vllm_config(tmp_path), SETTINGS) != first
    named = Settings(endpoint="/x", model_id="mine")
    assert model_identity(vllm_config(tmp_path), named) == "mine"


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_topologies_whose_ranks_hold_different_rows_are_refused(name):
    check_topology(vllm_config("m", tensor_parallel_size=8))
    with pytest.raises(ConfigError, match=name):
        check_topology(vllm_config("m", **{name: 2}))


def test_each_data_parallel_rank_is_a_group_of_its_own():
    assert group_name(vllm_config("m")) == "vllm-abc-dp2"


def test_another_number_of_blocks_is_refused_with_a_size_that_fits():
    plan = plan_host(cache_config(), SETTINGS)
    check_num_blocks(NUM_BLOCKS, plan)
    with pytest.raises(ConfigError, match="host_pool_gib") as caught:
        check_num_blocks(12, plan)
    gib = float(caught.value.remedy.split("; ")[1].split()[0])
    per_block = 2 * PAGE
    assert int(gib * 2**30) // (-(-per_block // 4096) * 4096) == 12


@pytest.mark.parametrize(
    ("version", "base"),
    [("0.33.0", "0.33.0"), ("0.33.0+cu129", "0.33.0"), ("0.33.0.post1", "0.33.0"),
     ("0.34.0rc1", "0.34.0rc1")],
)  # fmt: skip
def test_builds_of_one_source_are_one_version(version, base):
    assert base_version(version) == base
