"""From layer specs to groups, tensors and views: where every row of every cache lies.

Called by the binding (`resolve_hisparse_specs`), the coordinator, the demonstration and tests;
pure arithmetic but for `create_kv_cache_views`, which makes views of memory that it borrows. Any
thread.

The groups, in order: the source group (host pool), the indexer group, resident groups, hot groups,
then whatever else the model has. All device groups overlay one block-outermost backing from its
first byte, because a block id belongs to one group at a time:

    block b:  | indexer pages of all leaders                      | pad |
              | pages of resident group 0 | (free)                      |
              | pages of hot group 0      | (free)                      |
              |<---------------- bytes per block ---------------------->|
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.geometry import (
    OS_PAGE_BYTES,
    HostGeometry,
    HostLayout,
    LayerGroup,
    round_up,
)
from worker_client.specs import (
    EXTRA_HOST_BLOCKS,
    HISPARSE_HOT_SUFFIX,
    HISPARSE_RESIDENT_SUFFIX,
    CacheContractError,
    CacheSpecError,
    HiSparseConfig,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    IndexerSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
    blocks_for_tokens,
    cache_role,
    is_kind,
    layer_spec,
    resolve_device_buffer_size,
    row_bytes_of,
    sibling,
)

INDEXER_SUFFIX = ".indexer"
"""`make_layer_specs` names a leader's indexer cache by the leader and this."""

_Unit = list[tuple[str, Any]]
"""An index group: its leader and followers, as (layer name, spec)."""


# --- from configuration ---------------------------------------------------------------------


def max_model_len_of(config: Any) -> int:
    """Tokens of the longest request, of our configuration or vLLM's."""
    if isinstance(config, HiSparseConfig):
        return config.max_model_len
    return int(config.model_config.max_model_len)


def hot_rows_of(config: Any, source_specs: Iterable[Any]) -> int | None:
    """Hot rows of a request under `config`, ours or vLLM's.

    Returns:
        None where an engine's configuration has HiSparse switched off.

    Raises:
        CacheSpecError: The configured rows are out of range.
    """
    specs = list(source_specs)
    if isinstance(config, HiSparseConfig):
        return resolve_device_buffer_size(
            config.device_buffer_size,
            top_k=max(spec.topk_buffer_width or config.top_k for spec in specs),
            max_decode_query_len=config.max_decode_query_len,
        )
    hisparse = getattr(getattr(config, "attention_config", None), "hisparse_config", None)
    if hisparse is None:
        return None
    top_k = max(
        spec.topk_buffer_width
        if getattr(spec, "topk_buffer_width", None) is not None
        else config.model_config.hf_config.index_topk
        for spec in specs
    )
    return resolve_device_buffer_size(
        hisparse.device_buffer_size,
        top_k=top_k,
        max_decode_query_len=_engine_decode_query_len(config),
    )


def _engine_decode_query_len(config: Any) -> int:
    """Queries of one request in a decode step of an engine: 1 + speculative tokens."""
    speculative = getattr(config, "speculative_config", None)
    num_speculative = getattr(speculative, "num_speculative_tokens", None)
    if num_speculative is None:
        return 1
    # vLLM's first model runner appends a mask slot to each verified token when it drafts in
    # parallel; its second does not.
    masks = getattr(speculative, "parallel_drafting", False) and not getattr(
        config, "use_v2_model_runner", True
    )
    return 1 + int(num_speculative) * (2 if masks else 1)


# --- specs ----------------------------------------------------------------------------------


def make_layer_specs(
    index_groups: Sequence[Sequence[str]],
    *,
    block_size: int,
    row_width: int,
    dtype: torch.dtype,
    indexer_width: int,
    indexer_dtype: torch.dtype,
    draft_layers: Iterable[str] = (),
) -> dict[str, MLAAttentionSpec]:
    """Return the specs of a model whose layers all have one row width.

    Args:
        index_groups: Layer names by index group, leader first.
        block_size: Tokens in a block.
        row_width: Elements of a latent row.
        dtype: Element type of a latent row.
        indexer_width: Elements of an indexer key.
        indexer_dtype: Element type of an indexer key.
        draft_layers: Layers of `index_groups` that a draft model owns.

    Returns:
        Each layer's spec in order, then each leader's indexer under ``<leader>.indexer``.
    """
    drafts = frozenset(draft_layers)
    specs: dict[str, MLAAttentionSpec] = {}
    for group in index_groups:
        for position, name in enumerate(group):
            specs[name] = MLAAttentionSpec(
                block_size=block_size,
                head_size=row_width,
                dtype=dtype,
                is_index_group_leader=position == 0,
                is_draft=name in drafts,
            )
    for group in index_groups:
        specs[group[0] + INDEXER_SUFFIX] = IndexerSpec(
            block_size=block_size,
            head_size=indexer_width,
            dtype=indexer_dtype,
            is_draft=group[0] in drafts,
        )
    return specs


def with_index_groups(
    kv_cache_spec: Mapping[str, Any], index_groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the specs with leaders marked as `index_groups` says; the input is untouched.

    Raises:
        CacheSpecError: The groups do not hold each source layer once, in the order of the specs.
    """
    source = [
        name
        for name, spec in kv_cache_spec.items()
        if is_kind(spec, "MLAAttentionSpec") and cache_role(spec) is SparseCacheRole.SPARSE
    ]
    named = [name for group in index_groups for name in group]
    if named != source:
        raise CacheSpecError(
            f"the index groups name the layers {named}, the specs have the source layers {source}",
            remedy="List every source layer once, in the order of the specs",
        )
    leaders = {group[0] for group in index_groups if group}
    changed = {
        name: dataclasses.replace(kv_cache_spec[name], is_index_group_leader=name in leaders)
        for name in source
    }
    return {**kv_cache_spec, **changed}


# --- groups ---------------------------------------------------------------------------------


def get_hisparse_kv_cache_groups(
    config: Any, kv_cache_spec: Mapping[str, Any]
) -> list[KVCacheGroupSpec] | None:
    """Lay the layers out in groups.

    Args:
        config: `HiSparseConfig`, or vLLM's configuration.
        kv_cache_spec: Spec of each layer, in layer order; resident and hot specs of an earlier
            call are ignored and made anew.

    Returns:
        Source, indexer, resident groups, hot groups, others; None without an MLA spec, or where
        an engine's configuration has HiSparse switched off.

    Raises:
        CacheSpecError: No latent or no indexer layer, several block sizes, a row that is not a
            multiple of 16 B, or layers of several page sizes in one hot group.
    """
    mla = {name: spec for name, spec in kv_cache_spec.items() if is_kind(spec, "MLAAttentionSpec")}
    if not mla:
        return None
    source, indexer = _split_by_role(mla)
    hot_rows = hot_rows_of(config, source.values())
    if hot_rows is None:
        return None
    block_sizes = sorted({spec.block_size for spec in mla.values()})
    if len(block_sizes) != 1:
        raise CacheSpecError(f"HiSparse requires one resolved GPU block size, got {block_sizes}")
    blocks_per_request = blocks_for_tokens(hot_rows, block_sizes[0])
    indexer_page_bytes = sum(spec.page_size_bytes for spec in indexer.values())
    packed = _pack_units(_index_units(source), indexer_page_bytes)
    return [
        KVCacheGroupSpec(
            layer_names=list(source),
            kv_cache_spec=UniformTypeKVCacheSpecs.from_specs(source),
            host_resident=True,
        ),
        KVCacheGroupSpec(
            layer_names=list(indexer), kv_cache_spec=UniformTypeKVCacheSpecs.from_specs(indexer)
        ),
        *(_resident_group(layers) for layers in packed),
        *(_hot_group(layers, blocks_per_request) for layers in packed),
        *_other_groups(kv_cache_spec),
    ]


def _split_by_role(mla: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (latent specs, indexer specs), each in the order of `mla`."""
    if any(getattr(spec, "model_version", None) == "deepseek_v4" for spec in mla.values()):
        raise CacheSpecError("HiSparse does not support DeepSeek V4")
    source = {
        name: spec for name, spec in mla.items() if cache_role(spec) is SparseCacheRole.SPARSE
    }
    indexer = {name: spec for name, spec in mla.items() if name not in source}
    if not source or not indexer:
        raise CacheSpecError(
            f"HiSparse requires sparse-MLA and indexer cache specs, got {len(source)} and "
            f"{len(indexer)}"
        )
    for name, spec in source.items():
        if row_bytes_of(spec) % limits.ROW_ALIGNMENT_BYTES:
            raise CacheSpecError(
                f"rows of {name} have {row_bytes_of(spec)} B, not a multiple of "
                f"{limits.ROW_ALIGNMENT_BYTES}",
                value=row_bytes_of(spec),
                limit=limits.ROW_ALIGNMENT_BYTES,
            )
    return source, indexer


def _index_units(source: Mapping[str, Any]) -> list[_Unit]:
    """Cut the layers, in order, into a leader and its followers each."""
    units: list[_Unit] = []
    for name, spec in source.items():
        if not units or getattr(spec, "is_index_group_leader", False):
            units.append([])
        units[-1].append((name, spec))
    return units


def _pack_units(units: Iterable[_Unit], indexer_page_bytes: int) -> list[_Unit]:
    """Put whole units together, in order, while their pages fit in the indexer's page sum.

    A unit alone may be larger than that: it then has a group to itself.
    """
    packed: list[_Unit] = []
    used_bytes = 0
    for unit in units:
        unit_bytes = sum(spec.page_size_bytes for _, spec in unit)
        if not packed or used_bytes + unit_bytes > indexer_page_bytes:
            packed.append([])
            used_bytes = 0
        packed[-1].extend(unit)
        used_bytes += unit_bytes
    for layers in packed:
        page_sizes = sorted({spec.page_size_bytes for _, spec in layers})
        if len(page_sizes) != 1:
            raise CacheSpecError(
                f"HiSparse hot-cache groups require one page size, got {page_sizes} for "
                f"{[name for name, _ in layers]}"
            )
    return packed


def _resident_group(layers: _Unit) -> KVCacheGroupSpec:
    spec = layers[0][1]
    make = sibling(spec, "HiSparseResidentSpec") or HiSparseResidentSpec
    return KVCacheGroupSpec(
        layer_names=[name + HISPARSE_RESIDENT_SUFFIX for name, _ in layers],
        kv_cache_spec=make(block_size=spec.block_size, page_size=spec.page_size_bytes),
    )


def _hot_group(layers: _Unit, blocks_per_request: int) -> KVCacheGroupSpec:
    spec = layers[0][1]
    make = sibling(spec, "HiSparseHotSpec") or HiSparseHotSpec
    return KVCacheGroupSpec(
        layer_names=[name + HISPARSE_HOT_SUFFIX for name, _ in layers],
        kv_cache_spec=make(
            block_size=spec.block_size,
            page_size=spec.page_size_bytes,
            blocks_per_request=blocks_per_request,
        ),
    )


def _other_groups(kv_cache_spec: Mapping[str, Any]) -> list[KVCacheGroupSpec]:
    """One group for each distinct spec of the layers that HiSparse leaves alone."""
    ours = ("MLAAttentionSpec", "HiSparseResidentSpec", "HiSparseHotSpec")
    layers_of: dict[Any, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        if not any(is_kind(spec, kind) for kind in ours):
            layers_of.setdefault(spec, []).append(name)
    return [
        KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec) for spec, names in layers_of.items()
    ]


# --- sizes ----------------------------------------------------------------------------------


def required_host_blocks(max_model_len_tokens: int, block_size: int) -> int:
    """Host blocks that one request of the greatest length needs.

    Every page needs its host block before the request is admitted, or requests wait for each
    other for ever; and the null block and a copy-on-write tail come on top.
    """
    return blocks_for_tokens(max_model_len_tokens, block_size) + EXTRA_HOST_BLOCKS


def check_host_blocks(num_host_blocks: int, *, max_model_len_tokens: int, block_size: int) -> None:
    """Refuse a host pool that cannot hold one request of the greatest length.

    Raises:
        CacheSpecError: Details: needed, value (blocks).
    """
    needed = required_host_blocks(max_model_len_tokens, block_size)
    if num_host_blocks < needed:
        raise CacheSpecError(
            f"the host pool has {num_host_blocks} blocks, but max_model_len "
            f"{max_model_len_tokens} at block size {block_size} needs {needed}",
            remedy="Enlarge the host pool or lower max_model_len",
            needed=needed,
            value=num_host_blocks,
        )


def device_bytes_per_block(device_groups: Iterable[Any]) -> int:
    """Stride of the shared device backing, in bytes.

    The largest group's pages, rounded up so that a block is a whole number of every hot page:
    then hot rows can be addressed in one flat view (`block * block_stride_rows + row`).
    """
    largest = 0
    alignments = [1]
    for group in device_groups:
        specs = [layer_spec(group.kv_cache_spec, name) for name in group.layer_names]
        largest = max(largest, sum(spec.page_size_bytes for spec in specs))
        if is_kind(group.kv_cache_spec, "HiSparseHotSpec"):
            alignments.append(group.kv_cache_spec.page_size_bytes)
        alignments.extend(
            spec.get_block_stride_alignment()
            for spec in specs
            if hasattr(spec, "get_block_stride_alignment")
        )
    return round_up(largest, math.lcm(*alignments))


# --- the whole configuration ----------------------------------------------------------------


def build_kv_cache_config(
    config: HiSparseConfig,
    kv_cache_spec: Mapping[str, Any],
    *,
    index_groups: Sequence[Sequence[str]] | None = None,
    num_device_blocks: int,
    num_host_blocks: int,
    host_layout: HostLayout = HostLayout.GROUP_INTERLEAVED,
    os_page_bytes: int = OS_PAGE_BYTES,
) -> KVCacheConfig:
    """Lay out a model's caches completely.

    Args:
        config: Sizes of the worker.
        kv_cache_spec: Spec of each layer (`make_layer_specs`), in layer order.
        index_groups: Layer names by index group, leader first; None to keep the specs' marks.
        num_device_blocks: Blocks of the device backing, the null block included.
        num_host_blocks: Blocks of the host pool, the null block included.
        host_layout: Order of the rows in the host pool.
        os_page_bytes: Host blocks take a multiple of this of the pool.

    Raises:
        CacheSpecError: Specs that do not fit each other, a host pool too small for one request,
            fewer than two device blocks, or a device layout that is not block-outermost.
    """
    if index_groups is not None:
        kv_cache_spec = with_index_groups(kv_cache_spec, index_groups)
    groups = get_hisparse_kv_cache_groups(config, kv_cache_spec)
    if groups is None:
        raise CacheSpecError("HiSparse requires sparse-MLA and indexer cache specs, got none")
    _check_device(config, num_device_blocks)
    source, *device_groups = groups
    check_host_blocks(
        num_host_blocks,
        max_model_len_tokens=config.max_model_len,
        block_size=source.kv_cache_spec.block_size,
    )
    source_specs = source.kv_cache_spec.kv_cache_specs
    geometry = host_geometry(source_specs, host_layout, os_page_bytes=os_page_bytes)
    return KVCacheConfig(
        num_blocks=num_device_blocks,
        kv_cache_tensors=[
            *_host_tensors(source_specs, geometry, num_host_blocks),
            *_device_tensors(device_groups, num_device_blocks),
        ],
        kv_cache_groups=groups,
        host_num_blocks=num_host_blocks,
        host_block_stride=geometry.block_stride_bytes,
    )


def _check_device(config: HiSparseConfig, num_device_blocks: int) -> None:
    if not config.kv_cache_layout.is_block_outermost:
        raise CacheSpecError(
            f"HiSparse requires a block-outermost KV layout, got {config.kv_cache_layout.name}"
        )
    if not 2 <= num_device_blocks <= limits.MAX_BLOCKS_PER_BACKING:
        raise CacheSpecError(
            f"the device backing has {num_device_blocks} blocks, allowed are 2 (the null block "
            f"and one more) to {limits.MAX_BLOCKS_PER_BACKING}",
            value=num_device_blocks,
            limit=2,
        )


def host_geometry(
    source_specs: Mapping[str, Any],
    host_layout: HostLayout,
    *,
    os_page_bytes: int = OS_PAGE_BYTES,
) -> HostGeometry:
    """Return the host geometry of the source layers: what the service is told of the namespace.

    Args:
        source_specs: Spec of each latent layer, in layer order, leaders marked.
        host_layout: Order of the rows in the host pool.
        os_page_bytes: Host blocks take a multiple of this of the pool.

    Raises:
        GeometryError: Rows that are not a multiple of 16 B, or sizes out of range.
    """
    units = _index_units(source_specs)
    return HostGeometry.make(
        layout=host_layout,
        block_size=next(iter(source_specs.values())).block_size,
        groups=[LayerGroup(len(unit), row_bytes_of(unit[0][1])) for unit in units],
        os_page_bytes=os_page_bytes,
    )


def _host_tensors(
    specs: Mapping[str, Any], geometry: HostGeometry, num_blocks: int
) -> list[KVCacheTensor]:
    """Place the source layers in the host pool as `geometry` says.

    A tensor is an index group (interleaved), or the neighbouring layers of one page format
    (layer-major): in both, its layers are evenly spaced.
    """
    interleaved = geometry.layout is HostLayout.GROUP_INTERLEAVED
    runs = _index_units(specs) if interleaved else _same_format_runs(specs)
    tensors: list[KVCacheTensor] = []
    layer = 0
    for run in runs:
        place = geometry.place(layer, num_blocks)
        tensors.append(
            KVCacheTensor(
                size=num_blocks * geometry.data_block_bytes,
                layers=[name for name, _ in run],
                layer_stride=(
                    place.row_bytes if interleaved else num_blocks * place.block_stride_bytes
                ),
                block_stride=place.block_stride_bytes,
                offset=place.offset_bytes,
                host_resident=True,
                row_stride=place.row_stride_bytes if interleaved else None,
            )
        )
        layer += len(run)
    return tensors


def _same_format_runs(specs: Mapping[str, Any]) -> list[_Unit]:
    """Cut the layers, in order, where the page format changes."""

    def page_format(item: tuple[str, Any]) -> tuple[int, int, torch.dtype]:
        spec = item[1]
        return spec.page_size_bytes, row_bytes_of(spec), spec.dtype

    return [list(run) for _, run in itertools.groupby(specs.items(), key=page_format)]


def _device_tensors(
    device_groups: Sequence[KVCacheGroupSpec], num_blocks: int
) -> list[KVCacheTensor]:
    """Place every device group over the same blocks, its layers' pages one after the other."""
    block_stride = device_bytes_per_block(device_groups)
    tensors: list[KVCacheTensor] = []
    for group in device_groups:
        specs = {name: layer_spec(group.kv_cache_spec, name) for name in group.layer_names}
        runs: dict[Any, list[str]] = {}
        for name, spec in specs.items():
            runs.setdefault(spec, []).append(name)
        offset = 0
        for spec, names in runs.items():
            tensors.append(
                KVCacheTensor(
                    size=num_blocks * block_stride,
                    layers=names,
                    layer_stride=spec.page_size_bytes,
                    block_stride=block_stride,
                    offset=offset,
                )
            )
            offset += len(names) * spec.page_size_bytes
    return tensors


# --- views ----------------------------------------------------------------------------------


def create_kv_cache_views(
    raw: torch.Tensor,
    spec: Any,
    num_blocks: int,
    layout: Any,
    tensor: Any,
    kernel_block_size: int | None = None,
) -> list[torch.Tensor]:
    """View a flat backing as one cache a layer.

    Args:
        raw: int8 ``[size]``, borrowed; its own storage offset counts.
        spec: Spec of the tensor's layers (ours or vLLM's).
        num_blocks: Blocks of the backing.
        layout: `KVCacheLayout`, ours or vLLM's: order of the axes that `tensor` does not fix.
        tensor: `KVCacheTensor`, ours or vLLM's.
        kernel_block_size: Tokens in a block of the view; None for the spec's block size. A
            smaller one cuts each block into equal parts.

    Returns:
        For each layer ``[num_blocks * parts, heads, rows, content]`` of the spec's dtype (int8
        where it has none): heads is 1 for MLA, content the row width in elements.

    Raises:
        CacheContractError: A kernel block size that does not divide the spec's.
        CacheSpecError: Blocks that cannot be cut because their rows are not evenly spaced,
            offsets or strides that are not whole elements, or a view that passes the end of `raw`.
    """
    kernel = spec.block_size if kernel_block_size is None else kernel_block_size
    if kernel < 1 or spec.block_size % kernel:
        raise CacheContractError(
            f"kernel block size {kernel} must divide the cache block size {spec.block_size}",
            value=kernel,
            limit=spec.block_size,
        )
    parts = spec.block_size // kernel
    shape = (
        num_blocks * parts,
        spec.num_heads,
        spec.get_num_kernel_states(kernel),
        spec.state_content_size_bytes,
    )
    row_stride = getattr(tensor, "row_stride", None)
    if parts > 1:
        _check_parts(spec, layout, tensor, parts, shape)
    strides = _view_strides(
        (len(tensor.layers), *shape),
        layout.stride_order,
        (tensor.layer_stride, tensor.block_stride // parts, None, row_stride, None),
    )
    dtype = getattr(spec, "dtype", torch.int8)
    _check_view(raw, tensor, shape, strides, dtype)
    first = raw.storage_offset() + tensor.offset
    return [
        torch.as_strided(raw, shape, strides[1:], first + index * tensor.layer_stride).view(dtype)
        for index in range(len(tensor.layers))
    ]


def _check_parts(spec: Any, layout: Any, tensor: Any, parts: int, shape: tuple[int, ...]) -> None:
    """Blocks can be cut only where their rows are evenly spaced from one block to the next."""
    row_stride = getattr(tensor, "row_stride", None)
    part_bytes = math.prod(shape[1:]) if row_stride is None else shape[2] * row_stride
    if tensor.block_stride != parts * part_bytes:
        raise CacheSpecError(
            f"the KV cache layout ({layout.name}) does not store blocks as dense, unpadded pages "
            f"(block stride {tensor.block_stride} != page {parts * part_bytes}), so a block of "
            f"{spec.block_size} cannot be split into {parts} kernel blocks",
            remedy="Use the kernel's block size as block size, or a layer-compact layout",
            value=tensor.block_stride,
            limit=parts * part_bytes,
        )


def _view_strides(
    shape: tuple[int, ...], order: Sequence[int], fixed: Sequence[int | None]
) -> tuple[int, ...]:
    """Byte strides of logical axes (layer, block, head, row, content), innermost first."""
    strides = [0] * len(shape)
    span = 1
    for axis in reversed(order):
        strides[axis] = fixed[axis] or span
        span = strides[axis] * shape[axis]
    return tuple(strides)


def _check_view(
    raw: torch.Tensor,
    tensor: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    if raw.itemsize != 1 or raw.dim() != 1 or not raw.is_contiguous():
        raise CacheSpecError(
            f"a backing must be flat bytes, got {raw.dtype} {list(raw.shape)} with strides "
            f"{list(raw.stride())}"
        )
    elements = (raw.storage_offset() + tensor.offset, *strides[:-1], shape[-1])
    if any(value % dtype.itemsize for value in elements):
        raise CacheSpecError(
            f"the cache of {tensor.layers[0]} has offset and strides "
            f"{list(elements)} B, not whole {dtype} elements of {dtype.itemsize} B"
        )
    sizes = (len(tensor.layers), *shape)
    end = (
        tensor.offset
        + 1
        + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    )
    if tensor.offset < 0 or end > raw.numel():
        raise CacheSpecError(
            f"the cache of {list(tensor.layers)} ends at byte {end} of a backing of {raw.numel()}",
            needed=end,
            value=raw.numel(),
        )
