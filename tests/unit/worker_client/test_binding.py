"""The four binding functions, on our types and on objects shaped like an engine's."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types

import numpy as np
import pytest
import torch
from cache_models import BF16, FP8, Model, make_model, marker, models
from hypothesis import given, settings

from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.geometry import HostLayout
from worker_client import binding, layout
from worker_client.runtime import ResolvedHiSparseConfig, create_index_group_handles
from worker_client.specs import (
    HISPARSE_HOT_SUFFIX,
    HISPARSE_RESIDENT_SUFFIX,
    BlockTables,
    CacheBindingError,
    CacheContractError,
    CacheSpecError,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MultipleOf,
    is_kind,
)
from worker_client.views import PagedCacheView

CPU = torch.device("cpu")


class Region:
    """A shared region that counts its clean-ups."""

    def __init__(self) -> None:
        self.cleanups = 0
        self.failure: Exception | None = None

    def cleanup(self) -> None:
        self.cleanups += 1
        if self.failure is not None:
            raise self.failure


class MemoryPool:
    """A host pool of this process's memory: what binding needs of one, and a log of the calls."""

    def __init__(self, *, shared_region: Region | None = None) -> None:
        self.sizes: list[int] = []
        self.backing: torch.Tensor | None = None
        self.registered: torch.Tensor | None = None
        self.shared_region = shared_region
        self.cleanups = 0

    def allocate(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        # Like the service's: the backing begins inside a larger storage and is shorter than it.
        storage = torch.zeros(4096 + size + 4096, dtype=torch.int8)
        self.registered = storage[4096:]
        self.backing = self.registered[:size]
        return self.backing

    def cleanup(self) -> None:
        self.cleanups += 1


class EngineRuntime:
    """The attributes and calls of an engine's runtime that binding uses."""

    def __init__(self, row_width: int, kv_dtype: torch.dtype) -> None:
        self.row_width, self.kv_dtype = row_width, kv_dtype
        self.resident_source_index = -1
        self.shared_host_region: Region | None = None

    def bind_hot_cache(self, raw_tensor, *, block_table, **places):
        self.hot = PagedCacheView.bind(
            raw_tensor, dtype=self.kv_dtype, row_width=self.row_width, **places
        )
        self.hot_block_table = block_table

    def bind_source_cache(self, kv_cache, *, registered_host_pool=None):
        self.source = kv_cache.view(-1, kv_cache.shape[-1])
        self.registered_host_pool = registered_host_pool


class EngineHandle:
    """The attributes and calls of an engine's cache handle that binding uses."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self.runtime = runtime
        self.view: PagedCacheView | None = None
        self.residency: torch.Tensor | None = None
        self.draft_layer = False

    def bind_cache(self, raw_tensor, *, block_table, slot_mapping, **places):
        self.view = PagedCacheView.bind(
            raw_tensor, dtype=self.runtime.kv_dtype, row_width=self.runtime.row_width, **places
        )
        self.block_table, self.slot_mapping = block_table, slot_mapping


VllmHandle = type(
    "HiSparseCacheHandle", (EngineHandle,), {"__module__": "vllm.v1.hisparse.runtime"}
)


class Engine:
    """An engine's mutable configuration: only the attributes that vLLM's objects have."""

    @staticmethod
    def config(ours):
        made = {"__init__": lambda self, **values: self.__dict__.update(values)}
        tensor_type = type("KVCacheTensor", (), made)
        group_type = type("KVCacheGroupSpec", (), made)

        def host_group_ids(self):
            return tuple(i for i, g in enumerate(self.kv_cache_groups) if g.host_resident)

        def num_blocks_of(self, tensor):
            return self.hisparse_host_num_blocks if tensor.host_resident else self.num_blocks

        config_type = type(
            "KVCacheConfig",
            (),
            {
                **made,
                "host_group_ids": property(host_group_ids),
                "num_blocks_of": num_blocks_of,
            },
        )
        fields = ("size", "layer_stride", "block_stride", "offset", "host_resident")
        return config_type(
            num_blocks=ours.num_blocks,
            hisparse_host_num_blocks=ours.host_num_blocks,
            kv_cache_tensors=[
                tensor_type(layers=list(t.layers), **{name: getattr(t, name) for name in fields})
                for t in ours.kv_cache_tensors
            ],
            kv_cache_groups=[
                group_type(
                    layer_names=list(g.layer_names),
                    kv_cache_spec=g.kv_cache_spec,
                    host_resident=g.host_resident,
                )
                for g in ours.kv_cache_groups
            ],
        )


class Setup:
    """A model with everything that binding takes, changeable before `allocate` and `bind`."""

    def __init__(self, model: Model, *, handles: str = "ours", config: object = None) -> None:
        self.model = model
        self.config = model.build() if config is None else config
        self.pool = MemoryPool(shared_region=Region())
        self.context = {
            name: types.SimpleNamespace(
                hisparse_cache=handle, is_draft_layer=name in model.draft_layers
            )
            for name, handle in self._handles(handles).items()
        }
        self.tables = BlockTables.allocate(
            model.build(),
            max_num_requests=model.config.max_num_requests,
            max_num_batched_tokens=model.config.max_num_batched_tokens,
            max_model_len_tokens=model.config.max_model_len,
            device="cpu",
        )
        self.caches: dict[str, torch.Tensor] = {}

    def _handles(self, kind: str) -> dict[str, object]:
        sizes = ResolvedHiSparseConfig.resolve(top_k=self.model.config.top_k)
        made: dict[str, object] = {}
        for group in self.model.index_groups:
            spec = self.model.specs[group[0]]
            if kind == "ours":
                handles = create_index_group_handles(
                    sizes,
                    num_layers=len(group),
                    row_width=spec.head_size,
                    kv_dtype=spec.dtype,
                    device="cpu",
                )
            else:
                handle_type = VllmHandle if kind == "vllm" else EngineHandle
                handles = [handle_type(EngineRuntime(spec.head_size, spec.dtype)) for _ in group]
            made.update(zip(group, handles, strict=True))
        return made

    def handle(self, name: str):
        return self.context[name].hisparse_cache

    def kernel_block_sizes(self) -> list[int]:
        return [group.kv_cache_spec.block_size for group in self.config.kv_cache_groups]

    def allocate(self) -> dict[str, torch.Tensor]:
        self.caches = binding.allocate_hisparse_kv_caches(
            self.config, CPU, KVCacheLayout.BLNHC, self.kernel_block_sizes(), self.pool
        )
        return self.caches

    def bind(self) -> list:
        return binding.bind_hisparse_kv_caches(
            forward_context=self.context,
            kv_cache_config=self.config,
            kv_caches=self.caches,
            block_tables=self.tables,
            host_pool=self.pool,
        )

    def change(self, **changes: object) -> None:
        self.config = dataclasses.replace(self.config, **changes)

    def change_tensors(self, suffix: str, **changes: object) -> None:
        self.change(
            kv_cache_tensors=[
                dataclasses.replace(tensor, **changes)
                if tensor.layers[0].endswith(suffix)
                else tensor
                for tensor in self.config.kv_cache_tensors
            ]
        )

    def groups(self, kind: str) -> list[tuple[int, object]]:
        return [
            (index, group)
            for index, group in enumerate(self.config.kv_cache_groups)
            if is_kind(group.kv_cache_spec, kind)
        ]


@pytest.fixture
def setup() -> Setup:
    return Setup(make_model(num_layers=4, index_group=2, num_draft_layers=1))


# --- allocate -------------------------------------------------------------------------------


@given(models(max_layers=12))
@settings(max_examples=40, deadline=None)
def test_allocation_gives_each_layer_its_cache(model: Model):
    setup = Setup(model, handles="engine")
    before = copy.deepcopy(setup.config)
    caches = setup.allocate()
    assert setup.config == before, "the caller's configuration was changed"
    host_size = sum(model.row_bytes.values()) * model.block_size * model.num_host_blocks
    assert setup.pool.sizes == [host_size], "the pool is allocated once, with its exact size"
    assert set(caches) == {
        *model.specs,
        *(name + HISPARSE_RESIDENT_SUFFIX for name in model.source),
        *(name + HISPARSE_HOT_SUFFIX for name in model.source),
    }
    for name, spec in model.specs.items():
        blocks = model.num_host_blocks if name in model.row_bytes else model.num_device_blocks
        assert caches[name].shape == (blocks, 1, model.block_size, spec.head_size)
        assert caches[name].dtype == spec.dtype
    pool_storage = setup.pool.registered.untyped_storage().data_ptr()
    device_storages = {
        cache.untyped_storage().data_ptr()
        for name, cache in caches.items()
        if name not in model.row_bytes
    }
    assert {caches[name].untyped_storage().data_ptr() for name in model.source} == {pool_storage}
    assert len(device_storages) == 1
    assert pool_storage not in device_storages
    raw = caches[model.source[0] + HISPARSE_RESIDENT_SUFFIX]
    assert (raw.dtype, raw.dim()) == (torch.int8, 1)
    assert raw.numel() == setup.config.kv_cache_tensors[-1].size


def test_an_engines_mutable_configuration_is_not_changed():
    model = make_model(num_layers=2, host_layout=HostLayout.LAYER_MAJOR)
    setup = Setup(model, config=Engine.config(model.build()))
    tensors = list(setup.config.kv_cache_tensors)
    setup.allocate()
    assert setup.config.kv_cache_tensors == tensors


def test_the_device_backing_is_zeroed_and_made_before_the_pool_is_allocated(setup, monkeypatch):
    order = []
    ordinary = binding.allocate_kv_cache
    monkeypatch.setattr(
        binding,
        "allocate_kv_cache",
        lambda config, *rest: order.append(("device", config)) or ordinary(config, *rest),
    )
    allocate = setup.pool.allocate
    setup.pool.allocate = lambda size: order.append(("pool", size)) or allocate(size)
    caches = setup.allocate()
    assert [what for what, _ in order] == ["device", "pool"]
    assert not any(tensor.host_resident for tensor in order[0][1].kv_cache_tensors)
    assert not caches[setup.model.source[0] + HISPARSE_HOT_SUFFIX].any()


@pytest.mark.parametrize("sizes", [[], [4096, 8192]])
def test_host_tensors_of_no_or_several_sizes_are_refused_with_what_was_found(setup, sizes):
    hosts = [tensor for tensor in setup.config.kv_cache_tensors if tensor.host_resident]
    device = [tensor for tensor in setup.config.kv_cache_tensors if not tensor.host_resident]
    changed = [
        dataclasses.replace(tensor, size=size) for tensor, size in zip(hosts, sizes, strict=False)
    ]
    setup.change(kv_cache_tensors=[*changed, *device])
    with pytest.raises(ValueError, match="one size") as caught:
        setup.allocate()
    assert isinstance(caught.value, CacheSpecError)
    assert str(sizes) in str(caught.value)
    assert setup.pool.sizes == []


@pytest.mark.parametrize("host_groups", [[], [0, 1]])
def test_no_or_several_host_groups_are_refused_with_what_was_found(setup, host_groups):
    setup.change(
        kv_cache_groups=[
            dataclasses.replace(group, host_resident=index in host_groups)
            for index, group in enumerate(setup.config.kv_cache_groups)
        ]
    )
    with pytest.raises(ValueError, match="exactly one host group") as caught:
        setup.allocate()
    assert str(host_groups) in str(caught.value)
    assert setup.pool.sizes == []


def test_device_tensors_of_several_sizes_are_refused(setup):
    setup.change_tensors(HISPARSE_HOT_SUFFIX, size=setup.config.kv_cache_tensors[-1].size * 2)
    with pytest.raises(CacheContractError, match="share one backing allocation"):
        setup.allocate()


def test_a_tensor_of_no_group_is_refused(setup):
    setup.change(kv_cache_groups=setup.config.kv_cache_groups[:-1])
    with pytest.raises(CacheContractError, match="belongs to no cache group"):
        setup.allocate()


def test_without_device_tensors_only_the_host_is_allocated(setup):
    hosts = [tensor for tensor in setup.config.kv_cache_tensors if tensor.host_resident]
    setup.change(kv_cache_tensors=hosts)
    assert list(setup.allocate()) == setup.model.source


@pytest.mark.parametrize("host_layout", list(HostLayout))
def test_host_views_are_cut_by_the_kernel_block_size(host_layout):
    model = make_model(num_layers=4, index_group=4, host_layout=host_layout)
    setup = Setup(model)
    setup.kernel_block_sizes = lambda: [8, *[16] * (len(setup.config.kv_cache_groups) - 1)]
    caches = setup.allocate()
    for name in model.source:
        assert caches[name].shape == (2 * model.num_host_blocks, 1, 8, 656)
    indexer = caches[model.source[0] + layout.INDEXER_SUFFIX]
    assert indexer.shape[2] == 16, "the device group has a kernel block size of its own"


def test_a_storage_block_size_comes_before_the_kernels():
    model = make_model(num_layers=2)
    model = dataclasses.replace(
        model,
        specs={
            name: dataclasses.replace(spec, storage_block_size=4) if name in model.source else spec
            for name, spec in model.specs.items()
        },
    )
    caches = Setup(model).allocate()
    for name in model.source:
        assert caches[name].shape[:3] == (4 * model.num_host_blocks, 1, 4)


def test_each_tensor_of_a_uniform_group_has_the_spec_of_its_first_layer():
    setup = Setup(make_model(num_layers=2, num_draft_layers=1, draft_row=BF16))
    caches = setup.allocate()
    assert caches[setup.model.source[0]].dtype == FP8[1]
    assert caches[setup.model.source[-1]].dtype == BF16[1]
    assert caches[setup.model.source[-1]].shape[3] == 576


def test_a_plain_group_spec_stands_for_all_its_layers():
    setup = Setup(make_model(num_layers=2))
    source, *rest = setup.config.kv_cache_groups
    spec = source.kv_cache_spec.kv_cache_specs[setup.model.source[0]]
    setup.change(kv_cache_groups=[dataclasses.replace(source, kv_cache_spec=spec), *rest])
    assert setup.allocate()[setup.model.source[1]].shape[2:] == (16, 656)


class GeometryPool(MemoryPool):
    """A pool that, like the service's, has a geometry and a number of blocks of its own."""

    def __init__(self, model: Model, *, extra_blocks: int = 0, host_layout=None) -> None:
        super().__init__()
        sources = {name: model.specs[name] for name in model.source}
        self.geometry = layout.host_geometry(sources, host_layout or model.host_layout)
        self.num_blocks = model.num_host_blocks + extra_blocks


@pytest.mark.parametrize("host_layout", list(HostLayout))
def test_a_pool_with_the_same_geometry_is_taken(host_layout):
    setup = Setup(make_model(num_layers=6, num_draft_layers=1, host_layout=host_layout))
    setup.pool = GeometryPool(setup.model)
    setup.allocate()
    assert len(setup.pool.sizes) == 1


def test_a_pool_with_more_blocks_or_another_layout_is_refused():
    setup = Setup(make_model(num_layers=4))
    setup.pool = GeometryPool(setup.model, extra_blocks=1)
    with pytest.raises(CacheSpecError, match="the pool has 6"):
        setup.allocate()
    setup.pool = GeometryPool(setup.model, host_layout=HostLayout.LAYER_MAJOR)
    with pytest.raises(CacheSpecError, match="layer_major"):
        setup.allocate()
    assert setup.pool.sizes == []


# --- bind -----------------------------------------------------------------------------------


def device_place(model: Model, config, name: str) -> tuple[int, int]:
    """(byte offset in a block, bytes per block), from the model alone."""
    groups = [g for g in config.kv_cache_groups if is_kind(g.kv_cache_spec, "HiSparseHotSpec")]
    (group,) = [g for g in groups if name + HISPARSE_HOT_SUFFIX in g.layer_names]
    page = model.block_size * model.row_bytes[name]
    index = list(group.layer_names).index(name + HISPARSE_HOT_SUFFIX)
    return index * page, layout.device_bytes_per_block(config.kv_cache_groups[1:])


def sample(count: int) -> list[int]:
    return sorted({0, 1, count // 2, count - 1} & set(range(count)))


@given(models())
@settings(max_examples=30, deadline=None)
def test_markers_written_through_resident_views_lie_at_the_formulas_addresses(model: Model):
    """The harm: with the group's offset for all layers, each layer reads another's rows."""
    setup = Setup(model)
    raw = setup.allocate()[model.source[0] + HISPARSE_HOT_SUFFIX].view(torch.uint8)
    setup.bind()
    for _, group in setup.groups("HiSparseHotSpec"):
        raw.zero_()
        names = [name.removesuffix(HISPARSE_HOT_SUFFIX) for name in group.layer_names]
        written = {}
        for name in names:
            cache = setup.handle(name).view.cache.view(torch.uint8)
            for block in range(model.num_device_blocks):
                for row in sample(model.block_size):
                    written[name, block, row] = marker(model.source.index(name), block, row)
                    cache[block, row, :8] = torch.tensor(written[name, block, row]).byte()
        for (name, block, row), expected in written.items():
            offset, block_stride = device_place(model, setup.config, name)
            address = block * block_stride + offset + row * model.row_bytes[name]
            assert raw[address : address + 8].tolist() == expected
            hot = setup.handle(name).runtime.hot.cache.view(torch.uint8)
            assert hot[block, row, :8].tolist() == expected, "hot must overlay resident exactly"
        assert int((raw != 0).sum()) == 8 * len(written), "a row was written twice"


@given(models())
@settings(max_examples=30, deadline=None)
def test_markers_written_through_source_views_lie_where_the_geometry_says(model: Model):
    setup = Setup(model)
    setup.allocate()
    setup.bind()
    sources = {name: model.specs[name] for name in model.source}
    geometry = layout.host_geometry(sources, model.host_layout)
    pool = setup.pool.backing.view(torch.uint8)
    written = {}
    for layer, name in enumerate(model.source):
        cache = setup.caches[name].view(torch.uint8)
        for block in sample(model.num_host_blocks):
            for row in sample(model.block_size):
                written[layer, block, row] = marker(layer, block, row)
                cache[block, 0, row, :8] = torch.tensor(written[layer, block, row]).byte()
    for (layer, block, row), expected in written.items():
        address = geometry.place(layer, model.num_host_blocks).row_offset(block, row)
        assert pool[address : address + 8].tolist() == expected
        source = setup.handle(model.source[layer]).runtime.source.view(torch.uint8)
        assert source[block, row, :8].tolist() == expected
    assert int((pool != 0).sum()) == 8 * len(written), "a row was written twice"


def test_caches_after_binding_hold_resident_views_and_no_hot_ones(setup):
    raw = setup.allocate()[setup.model.source[0] + HISPARSE_RESIDENT_SUFFIX]
    handles = setup.bind()
    names = setup.model.source
    assert handles == [setup.handle(name) for name in names]
    for name in names:
        assert setup.caches[name + HISPARSE_RESIDENT_SUFFIX] is setup.handle(name).view.cache
        assert name + HISPARSE_HOT_SUFFIX not in setup.caches
    view = setup.handle(names[0]).view.cache
    assert view.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    assert view.shape == (setup.config.num_blocks, 16, 656)


def test_each_handle_gets_its_groups_tables(setup):
    setup.allocate()
    setup.bind()
    tables = setup.tables
    for source_index, (group_id, group) in enumerate(setup.groups("HiSparseResidentSpec")):
        for cache_name in group.layer_names:
            handle = setup.handle(cache_name.removesuffix(HISPARSE_RESIDENT_SUFFIX))
            assert handle.runtime.resident_source_index == source_index
            assert handle.block_table is tables.input_block_tables[group_id]
            assert handle.slot_mapping is tables.slot_mappings[group_id]
            assert handle.residency is None
    for group_id, group in setup.groups("HiSparseHotSpec"):
        for cache_name in group.layer_names:
            handle = setup.handle(cache_name.removesuffix(HISPARSE_HOT_SUFFIX))
            assert handle.runtime.hot_block_table is tables.input_block_tables[group_id]
            assert handle.source_block_table is tables.input_block_tables[0]
            assert handle.mirror_slot_mapping is tables.slot_mappings[0]
            assert handle.runtime.shared_host_region is setup.pool.shared_region
            assert handle.runtime.registered_host_pool is setup.pool.registered


def test_draft_layers_are_marked(setup):
    setup.allocate()
    setup.bind()
    drafts = {name for name in setup.model.source if setup.handle(name).draft_layer}
    assert drafts == setup.model.draft_layers
    assert drafts


def test_the_source_group_need_not_be_the_first():
    setup = Setup(make_model(num_layers=2))
    groups = list(setup.config.kv_cache_groups)
    setup.change(kv_cache_groups=[*groups[1:], groups[0]])
    setup.tables = BlockTables(
        input_block_tables=[
            *setup.tables.input_block_tables[1:],
            setup.tables.input_block_tables[0],
        ],
        slot_mappings=[*setup.tables.slot_mappings[1:], setup.tables.slot_mappings[0]],
    )
    setup.allocate()
    handles = setup.bind()
    assert handles[0].source_block_table is setup.tables.input_block_tables[-1]
    assert handles[0].mirror_slot_mapping is setup.tables.slot_mappings[-1]


def test_an_engines_objects_and_foreign_handles_bind_like_ours():
    model = make_model(num_layers=3, index_group=3, host_layout=HostLayout.LAYER_MAJOR)
    setup = Setup(model, handles="engine", config=Engine.config(model.build()))
    setup.allocate()
    setup.bind()
    group_id, _ = setup.groups("HiSparseResidentSpec")[0]
    for index, name in enumerate(model.source):
        handle = setup.handle(name)
        assert handle.block_table is setup.tables.input_block_tables[group_id]
        assert handle.view.cache.data_ptr() - handle.view.cache.untyped_storage().data_ptr() == (
            index * 16 * 656
        )
        assert handle.runtime.source.shape == (model.num_host_blocks * 16, 656)


def test_vllms_handles_are_bound_to_one_residency_tensor():
    model = make_model(num_layers=4, index_group=2, host_layout=HostLayout.LAYER_MAJOR)
    setup = Setup(model, handles="vllm", config=Engine.config(model.build()))
    setup.allocate()
    handles = setup.bind()
    residency = handles[0].residency
    residents = setup.groups("HiSparseResidentSpec")
    max_pages = setup.tables.input_block_tables[residents[0][0]].shape[1]
    assert residency.shape == (len(residents), model.config.max_num_requests, max_pages)
    assert residency.dtype == torch.int32
    assert not residency.any()
    for source_index, (group_id, group) in enumerate(residents):
        for cache_name in group.layer_names:
            handle = setup.handle(cache_name.removesuffix(HISPARSE_RESIDENT_SUFFIX))
            assert handle.residency is residency
            assert handle.block_table.data_ptr() == residency[source_index].data_ptr()
            assert handle.slot_mapping is setup.tables.slot_mappings[group_id]


def test_vllms_residency_needs_resident_tables_of_one_shape():
    model = make_model(num_layers=4, index_group=2)
    setup = Setup(model, handles="vllm")
    tables = list(setup.tables.input_block_tables)
    (_, _), (group_id, _) = setup.groups("HiSparseResidentSpec")
    tables[group_id] = tables[group_id][:, :1]
    setup.tables = dataclasses.replace(setup.tables, input_block_tables=tables)
    setup.allocate()
    with pytest.raises(CacheContractError, match="one shape"):
        setup.bind()


def test_a_pool_that_is_not_registered_is_refused_before_anything_is_bound(setup):
    setup.allocate()
    setup.pool.registered = None
    with pytest.raises(CacheContractError, match="registered"):
        setup.bind()
    assert setup.handle(setup.model.source[0]).view is None


@pytest.mark.parametrize("suffix", [HISPARSE_RESIDENT_SUFFIX, HISPARSE_HOT_SUFFIX])
def test_a_cache_name_without_its_suffix_is_refused(setup, suffix):
    setup.allocate()
    setup.change(
        kv_cache_groups=[
            dataclasses.replace(
                group, layer_names=[name.replace(suffix, ".other") for name in group.layer_names]
            )
            for group in setup.config.kv_cache_groups
        ]
    )
    with pytest.raises(CacheContractError, match=f"does not end with {suffix}"):
        setup.bind()


@pytest.mark.parametrize("suffix", [HISPARSE_RESIDENT_SUFFIX, HISPARSE_HOT_SUFFIX])
def test_a_device_cache_in_the_host_pool_is_refused(setup, suffix):
    setup.allocate()
    setup.change_tensors(suffix, host_resident=True)
    with pytest.raises(CacheContractError, match="must not be host-resident"):
        setup.bind()


def test_a_layer_without_a_handle_is_refused(setup):
    setup.allocate()
    setup.context[setup.model.source[1]].hisparse_cache = None
    with pytest.raises(CacheContractError, match=r"layers\.1\.attn has no HiSparse cache handle"):
        setup.bind()


def test_hot_tensors_in_two_backings_are_refused(setup):
    caches = setup.allocate()
    last = setup.model.source[-1] + HISPARSE_HOT_SUFFIX
    caches[last] = caches[last].clone()
    with pytest.raises(RuntimeError, match="hot tensors must share one GPU backing") as caught:
        setup.bind()
    assert isinstance(caught.value, CacheBindingError)


@pytest.mark.parametrize("change", ["storage", "address", "stride"])
def test_resident_and_hot_caches_that_do_not_overlay_are_refused(setup, change):
    caches = setup.allocate()
    tensor = next(
        tensor
        for tensor in setup.config.kv_cache_tensors
        if tensor.layers[0].endswith(HISPARSE_HOT_SUFFIX)
    )
    if change == "storage":
        copied = caches[tensor.layers[0]].clone()
        caches.update((name, copied) for name in list(caches) if name.endswith(HISPARSE_HOT_SUFFIX))
    elif change == "address":
        setup.change(num_blocks=setup.config.num_blocks - 1)
        setup.change_tensors(HISPARSE_HOT_SUFFIX, offset=656)
    else:
        setup.change(num_blocks=setup.config.num_blocks - 1)
        setup.change_tensors(HISPARSE_HOT_SUFFIX, block_stride=tensor.block_stride + 656)
    with pytest.raises(RuntimeError, match="resident and hot layouts must match") as caught:
        setup.bind()
    assert isinstance(caught.value, CacheBindingError)


def test_equal_addresses_in_two_storages_do_not_overlay(setup):
    """Two tensors made over one buffer: equal now, but nothing keeps them together."""
    caches = setup.allocate()
    raw = caches[setup.model.source[0] + HISPARSE_HOT_SUFFIX]
    shared = np.zeros(4096 + raw.numel(), dtype=np.int8)
    resident, hot = torch.from_numpy(shared)[4096:], torch.from_numpy(shared[4096:])
    assert resident.data_ptr() == hot.data_ptr()
    for name in list(caches):
        if name.endswith((HISPARSE_RESIDENT_SUFFIX, HISPARSE_HOT_SUFFIX)):
            caches[name] = hot if name.endswith(HISPARSE_HOT_SUFFIX) else resident
    with pytest.raises(CacheBindingError, match="layouts must match"):
        setup.bind()


def test_a_hot_cache_without_a_resident_one_is_refused(setup):
    setup.allocate()
    setup.change(
        kv_cache_groups=[
            group
            for group in setup.config.kv_cache_groups
            if not is_kind(group.kv_cache_spec, "HiSparseResidentSpec")
        ]
    )
    with pytest.raises(CacheContractError, match="no resident cache"):
        setup.bind()


def test_a_source_cache_outside_the_registered_pool_is_refused(setup):
    caches = setup.allocate()
    name = setup.model.source[0]
    caches[name] = caches[name].clone()
    with pytest.raises(CacheContractError, match=f"{name} does not lie in the registered"):
        setup.bind()


def test_without_hot_caches_binding_fails(setup):
    setup.allocate()
    setup.change(
        kv_cache_groups=[
            group
            for group in setup.config.kv_cache_groups
            if not is_kind(group.kv_cache_spec, "HiSparseHotSpec")
        ]
    )
    with pytest.raises(RuntimeError, match="found no hot-cache handles") as caught:
        setup.bind()
    assert isinstance(caught.value, CacheBindingError)


# --- initialise -----------------------------------------------------------------------------


def initialise(setup: Setup, config: object = None) -> dict[str, torch.Tensor]:
    made = config or dataclasses.replace(
        setup.model.config, host_pool_factory=lambda *_: setup.pool
    )
    return binding.init_hisparse_kv_cache(
        setup.config, CPU, setup.kernel_block_sizes(), made, setup.context, setup.tables
    )


def test_initialisation_allocates_binds_and_makes_the_runtimes_buffers(setup):
    seen = []
    config = dataclasses.replace(
        setup.model.config, host_pool_factory=lambda *args: seen.append(args) or setup.pool
    )
    caches = initialise(setup, config)
    assert seen == [(config, setup.config)]
    assert set(caches) == {
        *setup.model.specs,
        *(name + HISPARSE_RESIDENT_SUFFIX for name in setup.model.source),
    }
    for name in setup.model.source:
        group = setup.handle(name).runtime.index_group
        assert group.state.max_num_reqs == setup.model.config.max_num_requests
    assert setup.pool.shared_region.cleanups == 0


class Failure(Exception):
    """Raised by the step under test."""


def fail(*_args: object, **_kwargs: object) -> None:
    raise Failure("step")


FAILING_STEPS = ["allocate", "bind", "buffers", "interrupt"]


def break_step(setup: Setup, step: str, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    if step == "allocate":
        setup.pool.allocate = fail
    elif step == "bind":
        setup.handle(setup.model.source[0]).bind_cache = fail
    elif step == "buffers":
        setup.handle(setup.model.source[0]).runtime.initialize_buffers = fail
    else:

        def interrupt(_size: int) -> None:
            raise KeyboardInterrupt

        setup.pool.allocate = interrupt
        return KeyboardInterrupt
    return Failure


@pytest.mark.parametrize("step", FAILING_STEPS)
def test_a_failed_initialisation_cleans_the_shared_region_and_passes_the_error_on(
    setup, step, monkeypatch
):
    expected = break_step(setup, step, monkeypatch)
    with pytest.raises(expected) as caught:
        initialise(setup)
    assert type(caught.value) is expected
    assert caught.value.__cause__ is None
    assert setup.pool.shared_region.cleanups == 1
    assert setup.pool.cleanups == 0


def test_a_pool_without_a_shared_region_is_cleaned_up_itself(setup, monkeypatch):
    setup.pool.shared_region = None
    with pytest.raises(break_step(setup, "bind", monkeypatch)):
        initialise(setup)
    assert setup.pool.cleanups == 1


def test_a_clean_up_that_fails_does_not_hide_the_error(setup, monkeypatch, caplog):
    setup.pool.shared_region.failure = OSError("busy")
    with pytest.raises(break_step(setup, "bind", monkeypatch)):
        initialise(setup)
    assert setup.pool.shared_region.cleanups == 1
    assert "could not be cleaned up" in caplog.text


def test_a_factory_that_fails_leaves_nothing_to_clean(setup):
    config = dataclasses.replace(setup.model.config, host_pool_factory=fail)
    with pytest.raises(Failure):
        initialise(setup, config)
    assert setup.pool.shared_region.cleanups == 0


def test_a_configuration_without_a_factory_is_refused(setup):
    with pytest.raises(ConfigError, match="host_pool_factory"):
        initialise(setup, setup.model.config)


def test_an_engines_configuration_and_runtime_module_are_used(monkeypatch):
    model = make_model(num_layers=2, host_layout=HostLayout.LAYER_MAJOR)
    setup = Setup(model, handles="vllm", config=Engine.config(model.build()))
    seen = {}

    def initialize_hisparse_runtime_buffers(cache_handles, *, max_num_reqs):
        seen.update(handles=cache_handles, max_num_reqs=max_num_reqs)

    module = types.ModuleType("vllm.v1.hisparse.runtime")
    module.initialize_hisparse_runtime_buffers = initialize_hisparse_runtime_buffers
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = types.SimpleNamespace(
        cache_config=types.SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC
        ),
        scheduler_config=types.SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=50),
        kv_transfer_config=types.SimpleNamespace(
            kv_connector_extra_config={"host_pool_factory": lambda *_: setup.pool}
        ),
    )
    initialise(setup, config)
    assert seen == {
        "handles": [setup.handle(name) for name in model.source],
        "max_num_reqs": 5,
    }


# --- resolve --------------------------------------------------------------------------------


class Backend:
    """An attention backend that supports some kernel block sizes."""

    def __init__(self, name: str, *sizes: object) -> None:
        self.name, self.sizes = name, sizes
        self.asked: list[object] = []

    def get_name(self) -> str:
        return self.name

    def get_supported_kernel_block_sizes(self, kv_cache_spec: object = None) -> list[object]:
        self.asked.append(kv_cache_spec)
        return list(self.sizes)


class OldBackend(Backend):
    """A backend of an engine that did not pass specs."""

    def get_supported_kernel_block_sizes(self) -> list[object]:
        return list(self.sizes)


def resolve(model: Model, sparse: Backend, indexer: Backend, specs=None):
    def layer(backend: Backend) -> types.SimpleNamespace:
        return types.SimpleNamespace(get_attn_backend=lambda: backend)

    layers = {
        name: layer(indexer if name.endswith(layout.INDEXER_SUFFIX) else sparse)
        for name in model.specs
    }
    return binding.resolve_hisparse_specs(
        model.config, model.specs if specs is None else specs, layers
    )


def test_without_an_mla_spec_the_mapping_comes_back_as_it_is():
    specs = {"conv": KVCacheSpec(block_size=16)}
    assert binding.resolve_hisparse_specs(make_model().config, specs, {}) is specs


def test_several_scheduler_block_sizes_are_refused():
    model = make_model()
    first = model.source[0]
    specs = {**model.specs, first: model.specs[first].copy_with_new_block_size(32)}
    with pytest.raises(ValueError, match="requires one scheduler block size") as caught:
        resolve(model, Backend("A", 16), Backend("B", 16), specs)
    assert "[16, 32]" in str(caught.value)


@pytest.mark.parametrize(
    ("sparse", "indexer", "expected"),
    [
        ([MultipleOf(1)], [MultipleOf(16)], 128),
        ([64], [MultipleOf(16)], 64),
        ([128, 64, 32], [32, 64], 64),
        ([16, 48], [MultipleOf(8)], 16),
        ([128], [MultipleOf(128)], 128),
    ],
)
def test_the_kernel_block_size_is_the_greatest_that_every_backend_supports(
    sparse, indexer, expected
):
    model = make_model(num_layers=2, block_size=128)
    before = dict(model.specs)
    resolved = resolve(model, Backend("Sparse", *sparse), Backend("Indexer", *indexer))
    assert {resolved[name].block_size for name in model.specs} == {expected}
    assert model.specs == before, "the inputs were changed"


def test_backends_are_asked_with_their_layers_spec_and_old_ones_without():
    model = make_model(num_layers=2, block_size=64)
    indexer = Backend("Indexer", 64)
    resolve(model, OldBackend("Sparse", 64), indexer)
    assert indexer.asked == [model.specs[model.source[0] + layout.INDEXER_SUFFIX]]


def test_no_common_kernel_block_size_names_the_backends_and_chains_their_complaint():
    model = make_model(block_size=64)
    with pytest.raises(ValueError, match="supported by every sparse attention") as caught:
        resolve(model, Backend("FlashMLA", 64), Backend("DeepGEMM", 32))
    assert isinstance(caught.value, CacheSpecError)
    assert "FlashMLA: [64]" in str(caught.value)
    assert "DeepGEMM: [32]" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) in str(caught.value)


def test_a_divisor_of_a_multiple_of_rule_is_not_guessed():
    model = make_model(block_size=64)
    with pytest.raises(ValueError, match="No common block size for 64"):
        resolve(model, Backend("A", MultipleOf(48)), Backend("B", MultipleOf(48)))


def test_an_unknown_kind_of_supported_size_is_refused():
    with pytest.raises(ValueError, match="Unknown supported size: sixty-four"):
        resolve(make_model(), Backend("A", "sixty-four"), Backend("B", 16))


def test_resident_and_hot_specs_are_added_under_their_names():
    model = make_model(num_layers=4, index_group=2, block_size=64, top_k=100)
    other = KVCacheSpec(block_size=16)
    resolved = resolve(
        model, Backend("A", 32), Backend("B", MultipleOf(1)), {"conv": other, **model.specs}
    )
    assert list(resolved) == [
        "conv",
        *model.specs,
        *(name + HISPARSE_RESIDENT_SUFFIX for name in model.source),
        *(name + HISPARSE_HOT_SUFFIX for name in model.source),
    ]
    assert resolved["conv"] is other
    for name in model.source:
        resident = resolved[name + HISPARSE_RESIDENT_SUFFIX]
        hot = resolved[name + HISPARSE_HOT_SUFFIX]
        assert (resident.block_size, resident.page_size_bytes) == (32, 32 * 656)
        assert (hot.block_size, hot.page_size_bytes) == (32, 32 * 656)
        assert hot.blocks_per_request == 7, "ceil(2 * 100 / 32)"


def test_derived_specs_are_made_by_the_module_of_the_engines_specs(monkeypatch):
    module = types.ModuleType("engine_specs")
    made = dataclasses.make_dataclass(
        "HiSparseResidentSpec", ["block_size", "page_size"], frozen=True, kw_only=True
    )
    module.HiSparseResidentSpec = made
    monkeypatch.setitem(sys.modules, "engine_specs", module)
    model = make_model(num_layers=1)
    name = model.source[0]
    engine_type = type("EngineMLA", (type(model.specs[name]),), {"__module__": "engine_specs"})
    spec = model.specs[name]
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    resolved = resolve(
        model, Backend("A", 16), Backend("B", 16), {**model.specs, name: engine_type(**fields)}
    )
    assert type(resolved[name + HISPARSE_RESIDENT_SUFFIX]) is made


def test_resolving_with_hisparse_switched_off_is_refused():
    model = make_model()
    off = types.SimpleNamespace(attention_config=types.SimpleNamespace(hisparse_config=None))
    with pytest.raises(CacheContractError, match="switched off"):
        resolve(dataclasses.replace(model, config=off), Backend("A", 16), Backend("B", 16))


def test_groups_of_resolved_specs_are_those_that_the_builder_makes():
    model = make_model(num_layers=3)
    resolved = resolve(model, Backend("A", 16), Backend("B", 16))
    assert layout.get_hisparse_kv_cache_groups(model.config, resolved) == list(
        model.build().kv_cache_groups
    )
    assert isinstance(model.build().kv_cache_groups[0], KVCacheGroupSpec)
