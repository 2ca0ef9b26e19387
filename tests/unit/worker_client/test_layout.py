"""Groups, tensors and views: every row has bytes of its own, where the formula says."""

from __future__ import annotations

import dataclasses
import math
import types
from itertools import pairwise

import pytest
import torch
from cache_models import BF16, FP8, INDEXER, Model, make_model, models, with_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract.geometry import DeviceGeometry, HostLayout
from worker_client import layout
from worker_client.specs import (
    HISPARSE_HOT_SUFFIX,
    HISPARSE_RESIDENT_SUFFIX,
    CacheContractError,
    CacheSpecError,
    IndexerSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    is_kind,
    layer_spec,
    row_bytes_of,
)


def groups_of_kind(config, kind):
    return [group for group in config.kv_cache_groups if is_kind(group.kv_cache_spec, kind)]


# --- groups ---------------------------------------------------------------------------------


@given(models())
@settings(max_examples=60, deadline=None)
def test_groups_come_source_indexer_residents_hots(model: Model):
    config = model.build()
    source, indexer, *rest = config.kv_cache_groups
    assert config.host_group_ids == (0,)
    assert list(source.layer_names) == model.source
    assert list(indexer.layer_names) == [
        name for name in model.specs if name.endswith(layout.INDEXER_SUFFIX)
    ]
    residents = groups_of_kind(config, "HiSparseResidentSpec")
    hots = groups_of_kind(config, "HiSparseHotSpec")
    assert rest == [*residents, *hots]
    assert [
        name.removesuffix(HISPARSE_RESIDENT_SUFFIX) for g in residents for name in g.layer_names
    ] == model.source
    assert [[n.removesuffix(HISPARSE_HOT_SUFFIX) for n in g.layer_names] for g in hots] == [
        [n.removesuffix(HISPARSE_RESIDENT_SUFFIX) for n in g.layer_names] for g in residents
    ]
    for resident, hot in zip(residents, hots, strict=True):
        page = resident.kv_cache_spec.page_size_bytes
        assert page == hot.kv_cache_spec.page_size_bytes
        assert {
            model.specs[name.removesuffix(HISPARSE_HOT_SUFFIX)].page_size_bytes
            for name in hot.layer_names
        } == {page}
        assert hot.kv_cache_spec.blocks_per_request == math.ceil(
            model.config.hot_rows / model.block_size
        )


@given(models())
@settings(max_examples=60, deadline=None)
def test_units_are_packed_whole_and_in_order_up_to_the_indexers_page_sum(model: Model):
    config = model.build()
    limit = config.kv_cache_groups[1].kv_cache_spec.page_size_bytes
    unit_of = {name: index for index, unit in enumerate(model.index_groups) for name in unit}
    packed = [
        [name.removesuffix(HISPARSE_HOT_SUFFIX) for name in group.layer_names]
        for group in groups_of_kind(config, "HiSparseHotSpec")
    ]

    def pages(names):
        return sum(model.specs[name].page_size_bytes for name in names)

    for names in packed:
        assert len({unit_of[name] for name in names}) == 1 or pages(names) <= limit
    for names, following in pairwise(packed):
        assert unit_of[names[-1]] != unit_of[following[0]], "a leader lost a follower"
        next_unit = model.index_groups[unit_of[following[0]]]
        assert pages(names) + pages(next_unit) > limit, "the next unit would have fitted"


def test_small_units_share_a_group_while_they_fit():
    model = make_model(num_layers=4, index_group=1, row=(32, torch.uint8))
    config = model.build()
    # 4 indexer keys of 132 B against rows of 32 B: all four units fit together.
    assert [len(group.layer_names) for group in groups_of_kind(config, "HiSparseHotSpec")] == [4]


def test_units_that_fill_the_indexers_page_sum_exactly_fit():
    # Four indexer keys of 132 B are three rows of 176 B.
    model = make_model(num_layers=4, index_group=1, row=(176, torch.uint8))
    config = model.build()
    hots = groups_of_kind(config, "HiSparseHotSpec")
    assert [len(group.layer_names) for group in hots] == [3, 1]


def test_layers_of_two_page_sizes_in_one_hot_group_are_refused():
    model = make_model(num_layers=2, index_group=2)
    model = with_spec(model, model.source[1], head_size=BF16[0], dtype=BF16[1])
    with pytest.raises(CacheSpecError, match="require one page size") as caught:
        model.build()
    assert str(16 * 656) in str(caught.value)
    assert str(16 * 1152) in str(caught.value)


def test_a_first_layer_without_a_leaders_mark_still_begins_a_unit():
    model = make_model(num_layers=3, index_group=3)
    model = with_spec(model, model.source[0], is_index_group_leader=False)
    (hot,) = groups_of_kind(model.build(), "HiSparseHotSpec")
    assert len(hot.layer_names) == 3


def test_without_an_mla_spec_there_are_no_groups():
    model = make_model()
    assert layout.get_hisparse_kv_cache_groups(model.config, {}) is None
    other = {"conv": KVCacheSpec(block_size=16)}
    assert layout.get_hisparse_kv_cache_groups(model.config, other) is None
    with pytest.raises(CacheSpecError, match="got none"):
        layout.build_kv_cache_config(model.config, other, num_device_blocks=2, num_host_blocks=9)


@pytest.mark.parametrize("kind", ["source", "indexer"])
def test_latent_and_indexer_layers_are_both_needed(kind):
    model = make_model()
    wanted = {
        name: spec
        for name, spec in model.specs.items()
        if name.endswith(layout.INDEXER_SUFFIX) == (kind == "source")
    }
    with pytest.raises(CacheSpecError, match="sparse-MLA and indexer"):
        layout.get_hisparse_kv_cache_groups(model.config, wanted)


def test_several_block_sizes_are_refused():
    model = make_model()
    model = with_spec(model, model.source[0], block_size=32)
    with pytest.raises(CacheSpecError, match=r"one resolved GPU block size, got \[16, 32\]"):
        model.build()


@pytest.mark.parametrize("width", [655, 664, 8])
def test_rows_that_are_not_a_multiple_of_16_bytes_are_refused(width):
    model = make_model(row=(width, torch.uint8))
    with pytest.raises(CacheSpecError, match="not a multiple of 16") as caught:
        model.build()
    assert caught.value.details["value"] == width


def test_deepseek_v4_is_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class EngineSpec(MLAAttentionSpec):
        model_version: str = "deepseek_v4"

    model = make_model()
    spec = EngineSpec(block_size=16, head_size=656, dtype=torch.uint8)
    with pytest.raises(CacheSpecError, match="DeepSeek V4"):
        layout.get_hisparse_kv_cache_groups(model.config, {**model.specs, "v4": spec})


def test_derived_specs_of_an_earlier_call_are_laid_out_anew():
    model = make_model()
    groups = layout.get_hisparse_kv_cache_groups(model.config, model.specs)
    derived = {name: group.kv_cache_spec for group in groups[2:] for name in group.layer_names}
    assert layout.get_hisparse_kv_cache_groups(model.config, {**model.specs, **derived}) == groups


def test_other_layers_get_groups_of_their_own_at_the_end():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class StateSpec(KVCacheSpec):
        @property
        def page_size_bytes(self):
            return 4096

    model = make_model()
    others = {"conv.0": StateSpec(block_size=16), "conv.1": StateSpec(block_size=16)}
    groups = layout.get_hisparse_kv_cache_groups(model.config, {**others, **model.specs})
    assert list(groups[-1].layer_names) == ["conv.0", "conv.1"]
    assert not groups[-1].host_resident
    assert groups[:-1] == layout.get_hisparse_kv_cache_groups(model.config, model.specs)


# --- configuration --------------------------------------------------------------------------


def engine_config(**changes):
    values = {
        "device_buffer_size": None,
        "num_speculative_tokens": None,
        "parallel_drafting": False,
        "use_v2_model_runner": True,
        **changes,
    }
    return types.SimpleNamespace(
        attention_config=types.SimpleNamespace(
            hisparse_config=types.SimpleNamespace(device_buffer_size=values["device_buffer_size"])
        ),
        model_config=types.SimpleNamespace(
            hf_config=types.SimpleNamespace(index_topk=2048), max_model_len=77
        ),
        speculative_config=types.SimpleNamespace(
            num_speculative_tokens=values["num_speculative_tokens"],
            parallel_drafting=values["parallel_drafting"],
        ),
        use_v2_model_runner=values["use_v2_model_runner"],
    )


@pytest.mark.parametrize(
    ("changes", "hot_rows"),
    [
        ({}, 2 * 2048),
        ({"num_speculative_tokens": 3}, 5 * 2048),
        ({"num_speculative_tokens": 1, "parallel_drafting": True}, 3 * 2048),
        (
            {
                "num_speculative_tokens": 1,
                "parallel_drafting": True,
                "use_v2_model_runner": False,
            },
            4 * 2048,
        ),
        ({"device_buffer_size": 6144}, 6144),
    ],
)
def test_hot_rows_of_an_engines_configuration(changes, hot_rows):
    specs = [MLAAttentionSpec(block_size=16, head_size=656, dtype=torch.uint8)]
    assert layout.hot_rows_of(engine_config(**changes), specs) == hot_rows


def test_a_specs_top_k_buffer_comes_before_the_models():
    spec = MLAAttentionSpec(block_size=16, head_size=656, dtype=torch.uint8, topk_buffer_width=2176)
    assert layout.hot_rows_of(engine_config(), [spec]) == 2 * 2176
    assert layout.hot_rows_of(make_model(top_k=24).config, [spec]) == 2 * 2176


def test_an_engine_with_hisparse_off_has_no_groups():
    config = types.SimpleNamespace(attention_config=types.SimpleNamespace(hisparse_config=None))
    assert layout.get_hisparse_kv_cache_groups(config, make_model().specs) is None


def test_too_few_hot_rows_in_an_engines_configuration_are_refused():
    spec = MLAAttentionSpec(block_size=16, head_size=656, dtype=torch.uint8)
    with pytest.raises(CacheSpecError, match="can select 2048"):
        layout.hot_rows_of(engine_config(device_buffer_size=2047), [spec])


def test_the_longest_request_is_read_from_either_configuration():
    assert layout.max_model_len_of(engine_config()) == 77
    assert layout.max_model_len_of(make_model(max_model_len=41).config) == 41


@given(length=st.integers(1, 10_000), block_size=st.sampled_from([1, 16, 64, 128]))
def test_a_host_pool_holds_a_longest_request_and_two_blocks(length, block_size):
    needed = layout.required_host_blocks(length, block_size)
    assert needed == math.ceil(length / block_size) + 2
    layout.check_host_blocks(needed, max_model_len_tokens=length, block_size=block_size)
    with pytest.raises(CacheSpecError) as caught:
        layout.check_host_blocks(needed - 1, max_model_len_tokens=length, block_size=block_size)
    assert caught.value.details == {"needed": needed, "value": needed - 1}


def test_the_builder_refuses_a_host_pool_that_is_one_block_short():
    model = make_model()
    model.build()
    with pytest.raises(CacheSpecError, match="max_model_len"):
        model.build(num_host_blocks=model.num_host_blocks - 1)


def test_the_builder_refuses_device_sizes_and_layouts_that_cannot_work():
    model = make_model()
    with pytest.raises(CacheSpecError, match="device backing has 1 blocks"):
        model.build(num_device_blocks=1)
    changed = dataclasses.replace(model.config, kv_cache_layout=KVCacheLayout.LBNHC)
    with pytest.raises(CacheSpecError, match="block-outermost"):
        dataclasses.replace(model, config=changed).build()


def test_index_groups_mark_the_leaders_of_a_copy():
    model = make_model(num_layers=4, index_group=1)
    pairs = [model.source[:2], model.source[2:]]
    marked = layout.with_index_groups(model.specs, pairs)
    assert [marked[name].is_index_group_leader for name in model.source] == [True, False] * 2
    assert all(model.specs[name].is_index_group_leader for name in model.source)
    config = model.build(index_groups=pairs)
    hosts = [tensor.layers for tensor in config.kv_cache_tensors if tensor.host_resident]
    assert hosts == [tuple(pair) for pair in pairs]


@pytest.mark.parametrize(
    "change",
    [
        lambda names: [names[:-1]],
        lambda names: [[*names, "another"]],
        lambda names: [names[::-1]],
        lambda names: [[*names, names[0]]],
    ],
)
def test_index_groups_that_are_not_the_models_layers_are_refused(change):
    model = make_model(num_layers=3)
    with pytest.raises(CacheSpecError, match="index groups"):
        model.build(index_groups=change(model.source))


# --- addresses ------------------------------------------------------------------------------


def pages_of(config, tensor, spec):
    """(first byte, bytes between rows, row bytes) of every (layer, block) of a tensor."""
    row_bytes = row_bytes_of(spec) if hasattr(spec, "num_heads") else None
    for index in range(len(tensor.layers)):
        for block in range(config.num_blocks_of(tensor)):
            first = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
            yield first, tensor.row_stride or row_bytes, row_bytes


@given(models())
@settings(max_examples=60, deadline=None)
def test_host_rows_tile_the_pool_exactly(model: Model):
    """No two (layer, block, row) share a byte, and no byte is left between them."""
    config = model.build()
    hosts = [tensor for tensor in config.kv_cache_tensors if tensor.host_resident]
    sizes = {tensor.size for tensor in hosts}
    assert len(sizes) == 1
    spans = []
    for tensor in hosts:
        spec = model.specs[tensor.layers[0]]
        for first, row_stride, row_bytes in pages_of(config, tensor, spec):
            spans.extend(
                (first + row * row_stride, first + row * row_stride + row_bytes)
                for row in range(spec.block_size)
            )
    spans.sort()
    assert spans[0][0] == 0
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] == sizes.pop()
    stride = config.host_block_stride
    assert stride % 4096 == 0
    assert 0 <= stride - sum(model.row_bytes.values()) * model.block_size < 4096


@given(models())
@settings(max_examples=60, deadline=None)
def test_host_tensors_lie_where_the_services_geometry_says(model: Model):
    config = model.build()
    source_specs = config.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    geometry = layout.host_geometry(source_specs, model.host_layout)
    assert geometry.block_stride_bytes == config.host_block_stride
    layers = []
    for tensor in config.kv_cache_tensors:
        if not tensor.host_resident:
            continue
        for index, name in enumerate(tensor.layers):
            place = geometry.place(model.source.index(name), model.num_host_blocks)
            row_bytes = model.row_bytes[name]
            assert tensor.offset + index * tensor.layer_stride == place.offset_bytes
            assert tensor.block_stride == place.block_stride_bytes
            assert (tensor.row_stride or row_bytes) == place.row_stride_bytes
            layers.append(name)
    assert layers == model.source


def test_two_row_formats_make_two_layer_major_tensors():
    model = make_model(
        num_layers=4, num_draft_layers=1, draft_row=BF16, host_layout=HostLayout.LAYER_MAJOR
    )
    hosts = [t for t in model.build().kv_cache_tensors if t.host_resident]
    assert [len(tensor.layers) for tensor in hosts] == [4, 1]
    assert hosts[1].offset == 4 * model.num_host_blocks * 16 * 656


@given(models())
@settings(max_examples=60, deadline=None)
def test_device_groups_overlay_one_backing_and_layers_of_a_group_do_not(model: Model):
    config = model.build()
    device = [tensor for tensor in config.kv_cache_tensors if not tensor.host_resident]
    (stride,) = {tensor.block_stride for tensor in device}
    assert {tensor.size for tensor in device} == {model.num_device_blocks * stride}
    place = {
        name: tensor.offset + index * tensor.layer_stride
        for tensor in device
        for index, name in enumerate(tensor.layers)
    }
    for group in config.kv_cache_groups[1:]:
        end = 0
        for name in group.layer_names:
            assert place[name] == end, "pages of a group are adjacent, from the block's first byte"
            end += layer_spec(group.kv_cache_spec, name).page_size_bytes
        assert end <= stride
    for name in model.source:
        assert place[name + HISPARSE_RESIDENT_SUFFIX] == place[name + HISPARSE_HOT_SUFFIX]
    for group in groups_of_kind(config, "HiSparseHotSpec"):
        assert stride % group.kv_cache_spec.page_size_bytes == 0, "hot rows must be one flat view"


@given(models())
@settings(max_examples=40, deadline=None)
def test_device_tensors_of_rows_pass_the_contracts_check(model: Model):
    config = model.build()
    for tensor in config.kv_cache_tensors:
        if not tensor.layers[0].endswith((HISPARSE_RESIDENT_SUFFIX, HISPARSE_HOT_SUFFIX)):
            continue
        source = tensor.layers[0].rsplit(".", 1)[0]
        DeviceGeometry(
            block_stride_bytes=tensor.block_stride,
            offset_bytes=tensor.offset,
            layer_stride_bytes=tensor.layer_stride,
            row_bytes=model.row_bytes[source],
            block_size=model.block_size,
        ).check(num_layers=len(tensor.layers))


def test_indexers_of_two_widths_lie_one_after_the_other():
    model = make_model(num_layers=3, index_group=1)
    name = model.source[1] + layout.INDEXER_SUFFIX
    config = with_spec(model, name, head_size=260).build()
    indexers = set(config.kv_cache_groups[1].layer_names)
    tensors = [tensor for tensor in config.kv_cache_tensors if set(tensor.layers) <= indexers]
    assert [(len(t.layers), t.offset, t.layer_stride) for t in tensors] == [
        (2, 0, 16 * 132),
        (1, 2 * 16 * 132, 16 * 260),
    ]


def test_block_strides_follow_the_alignment_that_specs_ask_for():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class AlignedSpec(IndexerSpec):
        def get_block_stride_alignment(self):
            return 4096

    model = make_model(num_layers=1)
    indexer = model.source[0] + layout.INDEXER_SUFFIX
    aligned = AlignedSpec(block_size=16, head_size=INDEXER[0], dtype=INDEXER[1])
    model = dataclasses.replace(model, specs={**model.specs, indexer: aligned})
    assert model.build().kv_cache_tensors[-1].block_stride % 4096 == 0


# --- views ----------------------------------------------------------------------------------


def one_tensor(spec, num_layers, num_blocks, **changes):
    page = spec.page_size_bytes
    values = {
        "size": num_layers * num_blocks * page,
        "layers": [f"l{index}" for index in range(num_layers)],
        "layer_stride": num_blocks * page,
        "block_stride": page,
        **changes,
    }
    return KVCacheTensor(**values)


def bytes_of(size, offset=0):
    return torch.zeros(size + offset, dtype=torch.int8)[offset:]


@pytest.mark.parametrize("kernel_block_size", [None, 16, 8, 4])
@pytest.mark.parametrize("kv_layout", list(KVCacheLayout))
@pytest.mark.parametrize("width_dtype", [FP8, BF16])
def test_views_address_rows_by_the_formula(width_dtype, kv_layout, kernel_block_size):
    spec = MLAAttentionSpec(block_size=16, head_size=width_dtype[0], dtype=width_dtype[1])
    tensor = one_tensor(spec, 3, 4)
    raw = bytes_of(tensor.size, offset=128)
    views = layout.create_kv_cache_views(raw, spec, 4, kv_layout, tensor, kernel_block_size)
    kernel = kernel_block_size or 16
    for index, view in enumerate(views):
        assert view.shape == (4 * 16 // kernel, 1, kernel, spec.head_size)
        assert view.dtype == spec.dtype
        for block, row in ((0, 0), (3, 15), (2, 7)):
            cell = view[block * (16 // kernel) + row // kernel, 0, row % kernel]
            expected = (
                tensor.offset
                + index * tensor.layer_stride
                + block * tensor.block_stride
                + row * spec.row_bytes
            )
            assert cell.data_ptr() - raw.data_ptr() == expected


def test_interleaved_views_keep_rows_apart_and_merge_block_and_row():
    spec = MLAAttentionSpec(block_size=16, head_size=BF16[0], dtype=BF16[1])
    row, num_layers = spec.row_bytes, 4
    tensor = one_tensor(
        spec,
        num_layers,
        3,
        layer_stride=row,
        block_stride=num_layers * spec.page_size_bytes,
        row_stride=num_layers * row,
    )
    raw = bytes_of(tensor.size)
    for kernel in (16, 8):
        views = layout.create_kv_cache_views(raw, spec, 3, KVCacheLayout.BLNHC, tensor, kernel)
        for index, view in enumerate(views):
            flat = view.view(-1, spec.head_size)
            for position in (0, 17, 47):
                assert flat[position].data_ptr() - raw.data_ptr() == (
                    position * num_layers * row + index * row
                )


def test_blocks_of_a_shared_device_block_cannot_be_cut():
    spec = MLAAttentionSpec(block_size=16, head_size=32, dtype=torch.uint8)
    tensor = one_tensor(spec, 2, 3, layer_stride=512, block_stride=1024)
    raw = bytes_of(tensor.size)
    layout.create_kv_cache_views(raw, spec, 3, KVCacheLayout.BLNHC, tensor, 16)
    with pytest.raises(CacheSpecError, match=r"does not store blocks as dense.*1024 != page 512"):
        layout.create_kv_cache_views(raw, spec, 3, KVCacheLayout.BLNHC, tensor, 8)


@pytest.mark.parametrize("kernel_block_size", [0, 5, 32])
def test_a_kernel_block_size_must_divide_the_block_size(kernel_block_size):
    spec = MLAAttentionSpec(block_size=16, head_size=32, dtype=torch.uint8)
    tensor = one_tensor(spec, 1, 2)
    with pytest.raises(CacheContractError, match="must divide"):
        layout.create_kv_cache_views(
            bytes_of(tensor.size), spec, 2, KVCacheLayout.LBNHC, tensor, kernel_block_size
        )


@pytest.mark.parametrize(
    ("changes", "raw_offset"),
    [({"offset": 1}, 0), ({"block_stride": 1025}, 0), ({"layer_stride": 2049}, 0), ({}, 1)],
)
def test_views_of_broken_elements_are_refused(changes, raw_offset):
    spec = MLAAttentionSpec(block_size=16, head_size=32, dtype=torch.bfloat16)
    tensor = one_tensor(spec, 2, 2, **changes)
    with pytest.raises(CacheSpecError, match="not whole"):
        layout.create_kv_cache_views(
            bytes_of(tensor.size + 4096, raw_offset), spec, 2, KVCacheLayout.LBNHC, tensor
        )


def test_a_view_may_end_with_the_backing_but_not_pass_it():
    spec = MLAAttentionSpec(block_size=16, head_size=32, dtype=torch.uint8)
    tensor = one_tensor(spec, 2, 3)
    storage = torch.zeros(tensor.size + 64, dtype=torch.int8)
    layout.create_kv_cache_views(storage[: tensor.size], spec, 3, KVCacheLayout.LBNHC, tensor)
    with pytest.raises(CacheSpecError, match="ends at byte") as caught:
        # The storage behind the backing is longer: what lies there is not the backing's.
        layout.create_kv_cache_views(
            storage[: tensor.size - 1], spec, 3, KVCacheLayout.LBNHC, tensor
        )
    assert caught.value.details == {"needed": tensor.size, "value": tensor.size - 1}


@pytest.mark.parametrize(
    "raw",
    [
        torch.zeros(512, dtype=torch.int16),
        torch.zeros(32, 32, dtype=torch.int8),
        torch.zeros(2048, dtype=torch.int8)[::2],
    ],
)
def test_a_backing_must_be_flat_bytes(raw):
    spec = MLAAttentionSpec(block_size=16, head_size=32, dtype=torch.uint8)
    with pytest.raises(CacheSpecError, match="flat bytes"):
        layout.create_kv_cache_views(raw, spec, 2, KVCacheLayout.LBNHC, one_tensor(spec, 1, 2))
