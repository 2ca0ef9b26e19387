"""Specs, groups, tensors and configurations as values."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, HiSparseError, UsageError
from worker_client import specs
from worker_client.specs import (
    BlockTables,
    CacheBindingError,
    CacheContractError,
    CacheSpecError,
    HiSparseConfig,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    IndexerSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)


def fp8(block_size: int = 64, **changes: object) -> MLAAttentionSpec:
    spec = MLAAttentionSpec(block_size=block_size, head_size=656, dtype=torch.uint8)
    return dataclasses.replace(spec, **changes)


@pytest.mark.parametrize(
    ("width", "dtype", "row_bytes"),
    [(656, torch.uint8, 656), (576, torch.bfloat16, 1152), (80, torch.float32, 320)],
)
def test_a_page_is_block_size_rows(width, dtype, row_bytes):
    spec = MLAAttentionSpec(block_size=16, head_size=width, dtype=dtype)
    assert (spec.row_bytes, spec.page_size_bytes) == (row_bytes, 16 * row_bytes)
    assert specs.row_bytes_of(spec) == row_bytes
    assert (spec.num_heads, spec.get_num_kernel_states(8), spec.tokens_per_state) == (1, 8, 1)


def test_a_copy_with_another_block_size_leaves_the_original():
    spec = fp8(64, storage_block_size=32, is_index_group_leader=True)
    copy = spec.copy_with_new_block_size(16)
    assert (spec.block_size, spec.storage_block_size) == (64, 32)
    assert (copy.block_size, copy.storage_block_size) == (16, 16)
    assert copy.is_index_group_leader
    assert copy.page_size_bytes * 4 == spec.page_size_bytes


def test_draft_ownership_does_not_make_specs_differ():
    assert fp8(is_draft=True) == fp8()
    assert hash(fp8(is_draft=True)) == hash(fp8())


@pytest.mark.parametrize(
    "make",
    [
        lambda: fp8(0),
        lambda: fp8(limits.MAX_BLOCK_SIZE + 1),
        lambda: fp8(head_size=0),
        lambda: fp8(head_size=limits.MAX_ROW_BYTES + 1),
        lambda: fp8(64, storage_block_size=48),
        lambda: fp8(64, storage_block_size=0),
        lambda: UniformTypeKVCacheSpecs.from_specs({}),
        lambda: UniformTypeKVCacheSpecs.from_specs({"a": fp8(16), "b": fp8(32)}),
        lambda: KVCacheTensor(size=8, layers=[], layer_stride=1, block_stride=1),
        lambda: KVCacheTensor(size=8, layers=["a"], layer_stride=0, block_stride=1),
        lambda: KVCacheTensor(size=8, layers=["a"], layer_stride=1, block_stride=0),
        lambda: KVCacheTensor(size=8, layers=["a"], layer_stride=1, block_stride=1, row_stride=-1),
        lambda: KVCacheTensor(size=8, layers=["a"], layer_stride=1, block_stride=1, offset=-1),
    ],
)
def test_sizes_that_address_nothing_are_refused(make):
    with pytest.raises(CacheSpecError):
        make()


def test_errors_are_also_the_builtin_errors_that_engines_catch():
    assert issubclass(CacheSpecError, (GeometryError, ValueError))
    assert issubclass(CacheSpecError, ValueError)
    assert issubclass(CacheBindingError, UsageError)
    assert issubclass(CacheBindingError, RuntimeError)
    assert issubclass(CacheContractError, UsageError)
    assert issubclass(CacheContractError, AssertionError)
    for kind in (CacheSpecError, CacheBindingError, CacheContractError):
        assert HiSparseError.registry[kind.__name__] is kind


def test_a_uniform_group_sums_its_layers_and_keeps_their_order():
    layers = {"a": fp8(32), "b": MLAAttentionSpec(block_size=32, head_size=576, dtype=torch.half)}
    group = UniformTypeKVCacheSpecs.from_specs(layers)
    assert group.block_size == 32
    assert list(group.kv_cache_specs) == ["a", "b"]
    assert group.page_size_bytes == 32 * (656 + 1152)
    layers.clear()
    assert list(group.kv_cache_specs) == ["a", "b"]
    smaller = group.copy_with_new_block_size(16)
    assert smaller.page_size_bytes * 2 == group.page_size_bytes
    assert group.kv_cache_specs["a"].block_size == 32


@given(
    top_k=st.integers(1, limits.MAX_TOP_K),
    queries=st.integers(1, limits.MAX_SPECULATIVE_ROWS),
    size=st.one_of(st.none(), st.integers(1, 2 * limits.MAX_HOT_ROWS)),
)
def test_hot_rows_cover_the_step_and_fit_16_bit(top_k, queries, size):
    expected = (queries + 1) * top_k if size is None else size
    if queries * top_k <= expected <= limits.MAX_HOT_ROWS:
        got = specs.resolve_device_buffer_size(size, top_k=top_k, max_decode_query_len=queries)
        assert got == expected
    else:
        with pytest.raises(CacheSpecError, match="device_buffer_size") as caught:
            specs.resolve_device_buffer_size(size, top_k=top_k, max_decode_query_len=queries)
        assert caught.value.details["value"] == expected


def test_a_configuration_checks_its_sizes_when_it_is_made():
    good = HiSparseConfig(
        top_k=2048, max_num_requests=4, max_num_batched_tokens=64, max_model_len=4096
    )
    assert good.hot_rows == 4096
    for change in (
        {"top_k": 0},
        {"max_num_requests": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 0},
        {"max_decode_query_len": 0},
        {"device_buffer_size": 2047},
        {"device_buffer_size": limits.MAX_HOT_ROWS + 1},
    ):
        with pytest.raises(CacheSpecError):
            dataclasses.replace(good, **change)


def two_group_config(**changes: object) -> KVCacheConfig:
    host = KVCacheTensor(
        size=640, layers=["a"], layer_stride=640, block_stride=64, host_resident=True
    )
    device = KVCacheTensor(size=320, layers=["b"], layer_stride=320, block_stride=64)
    config = KVCacheConfig(
        num_blocks=5,
        kv_cache_tensors=[host, device],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=["b"], kv_cache_spec=fp8(16)),
            KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=fp8(16), host_resident=True),
        ],
        host_num_blocks=10,
        host_block_stride=4096,
    )
    return dataclasses.replace(config, **changes)


def test_a_config_tells_host_groups_and_the_blocks_of_each_backing():
    config = two_group_config()
    assert config.host_group_ids == (1,)
    assert [config.num_blocks_of(tensor) for tensor in config.kv_cache_tensors] == [10, 5]
    assert (config.hisparse_host_num_blocks, config.hisparse_host_block_stride) == (10, 4096)


def test_a_host_tensor_needs_host_blocks():
    config = two_group_config(host_num_blocks=None)
    with pytest.raises(CacheContractError, match="host_num_blocks"):
        config.num_blocks_of(config.kv_cache_tensors[0])


def test_a_copy_with_other_tensors_leaves_the_config():
    config = two_group_config()
    copy = specs.with_tensors(config, config.kv_cache_tensors[1:])
    assert len(config.kv_cache_tensors) == 2
    assert [tensor.layers for tensor in copy.kv_cache_tensors] == [("b",)]
    assert copy.num_blocks == config.num_blocks


def test_block_tables_have_a_column_for_each_page_or_hot_block():
    groups = [
        KVCacheGroupSpec(
            layer_names=["a"], kv_cache_spec=HiSparseResidentSpec(block_size=16, page_size=256)
        ),
        KVCacheGroupSpec(
            layer_names=["b"],
            kv_cache_spec=HiSparseHotSpec(block_size=16, page_size=256, blocks_per_request=3),
        ),
    ]
    tables = BlockTables.allocate(
        two_group_config(kv_cache_groups=groups),
        max_num_requests=2,
        max_num_batched_tokens=7,
        max_model_len_tokens=100,
        device="cpu",
    )
    assert [tuple(table.shape) for table in tables.input_block_tables] == [(2, 7), (2, 3)]
    assert all(int(table.abs().sum()) == 0 for table in tables.input_block_tables)
    assert all(slots.tolist() == [-1] * 7 for slots in tables.slot_mappings)
    assert {table.dtype for table in tables.input_block_tables} == {torch.int32}
    assert {slots.dtype for slots in tables.slot_mappings} == {torch.int64}


def test_kinds_are_told_by_class_name_through_subclasses():
    engine_spec = type("MLAAttentionSpec", (), {})
    subclass = type("EngineSpecial", (engine_spec,), {})
    assert specs.is_kind(engine_spec(), "MLAAttentionSpec")
    assert specs.is_kind(subclass(), "MLAAttentionSpec")
    assert specs.is_kind(
        IndexerSpec(block_size=16, head_size=4, dtype=torch.int8), "MLAAttentionSpec"
    )
    assert not specs.is_kind(object(), "MLAAttentionSpec")


def test_roles_are_told_by_value_and_default_to_latent_rows():
    role = types.SimpleNamespace(value="indexer")
    assert specs.cache_role(types.SimpleNamespace(cache_role=role)) is SparseCacheRole.INDEXER
    assert specs.cache_role(types.SimpleNamespace()) is SparseCacheRole.SPARSE
    assert specs.cache_role(IndexerSpec(block_size=16, head_size=4, dtype=torch.int8)) is (
        SparseCacheRole.INDEXER
    )


def test_a_sibling_comes_from_the_module_of_the_nearest_class_that_has_it(monkeypatch):
    module = types.ModuleType("engine_module")
    module.Wanted = object()
    monkeypatch.setitem(sys.modules, "engine_module", module)
    base = type("Base", (), {"__module__": "engine_module"})
    derived = type("Derived", (base,), {})
    assert specs.sibling(derived(), "Wanted") is module.Wanted
    assert specs.sibling(derived(), "NoSuchThing") is None
    assert specs.sibling(fp8(), "HiSparseHotSpec") is HiSparseHotSpec


def test_layouts_are_vllms_permutations():
    assert KVCacheLayout.BLNHC.is_block_outermost
    assert not KVCacheLayout.LBNHC.is_block_outermost
    for layout in KVCacheLayout:
        assert "".join("LBHNC"[axis] for axis in layout.stride_order) == layout.name
