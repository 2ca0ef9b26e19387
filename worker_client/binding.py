"""Worker-side wiring of HiSparse caches to attention layers: allocate, bind, initialise, resolve.

Four functions with the names, parameters, order of work and errors of vLLM's
``vllm.v1.hisparse.binding``, for our types and for vLLM's objects alike. Called by whoever starts
a worker (our integrations, or an engine), once for profiling and once for good, on the thread that
owns the device.

The host pool's memory belongs to the pool, the device backing to the returned tensors; the
runtimes and handles that are bound here borrow both.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any

import torch

from hisparse_service.contract.errors import ConfigError
from worker_client.layout import create_kv_cache_views, get_hisparse_kv_cache_groups
from worker_client.specs import (
    HISPARSE_HOT_SUFFIX,
    HISPARSE_RESIDENT_SUFFIX,
    CacheBindingError,
    CacheContractError,
    CacheSpecError,
    HiSparseConfig,
    HostPoolLike,
    is_kind,
    layer_spec,
    sibling,
    with_tensors,
)

AllocateDevice = Callable[[Any, torch.device, int], torch.Tensor]
"""Of a configuration, a device and a size in bytes: int8 [size]."""

logger = logging.getLogger(__name__)


class ResidentTable(Enum):
    """Which table says where a request's resident pages are."""

    INPUT_BLOCK_TABLE = "input_block_table"
    """The group's input block table, in batch order: the documented binding, and ours."""

    RESIDENCY = "residency"
    """One int32 ``[resident groups, max_num_requests, max_pages]`` tensor, by request state row:
    what vLLM 0.33.0 binds, because its connector's worker writes residency updates there."""


# --- resolve --------------------------------------------------------------------------------


def resolve_hisparse_specs(
    config: Any, kv_cache_spec: dict[str, Any], attn_layers: Mapping[str, Any]
) -> dict[str, Any]:
    """Resolve a common kernel block size for MLA specs and add the derived resident and hot specs.

    Args:
        config: `HiSparseConfig`, or vLLM's configuration.
        kv_cache_spec: Spec of each layer; untouched.
        attn_layers: Layer name to attention layer; only ``get_attn_backend()`` is used.

    Returns:
        `kv_cache_spec` itself where it has no MLA spec; else a new mapping with the MLA specs
        copied with the common block size, and the resident and hot specs under their names.

    Raises:
        CacheSpecError: (a `ValueError`) Several scheduler block sizes; no block size that every
            backend supports (chained to the backends' own complaint); specs that cannot be laid
            out.
        CacheContractError: (an `AssertionError`) HiSparse is switched off in `config`.
    """
    mla = {name: spec for name, spec in kv_cache_spec.items() if is_kind(spec, "MLAAttentionSpec")}
    if not mla:
        return kv_cache_spec
    block_sizes = sorted({spec.block_size for spec in mla.values()})
    if len(block_sizes) != 1:
        raise CacheSpecError(f"HiSparse requires one scheduler block size, got {block_sizes}")
    backends = [attn_layers[name].get_attn_backend() for name in mla]
    try:
        block_size = select_common_block_size(block_sizes[0], backends, list(mla.values()))
    except ValueError as error:
        raise CacheSpecError(
            "HiSparse requires a GPU block size supported by every sparse attention and indexer "
            f"backend: {error}"
        ) from error
    resolved = kv_cache_spec | {
        name: spec.copy_with_new_block_size(block_size) for name, spec in mla.items()
    }
    groups = get_hisparse_kv_cache_groups(config, resolved)
    if groups is None:
        raise CacheContractError("HiSparse is switched off in this configuration")
    return resolved | {
        name: group.kv_cache_spec
        for group in groups
        if _is_resident(group) or _is_hot(group)
        for name in group.layer_names
    }


def select_common_block_size(block_size: int, backends: Sequence[Any], specs: Sequence[Any]) -> int:
    """Return `block_size` if every backend supports it, else the greatest divisor that all do.

    Args:
        block_size: The scheduler's block size, in tokens.
        backends: One a spec, with ``get_supported_kernel_block_sizes([spec])`` (ints are exact
            sizes, objects with ``base`` stand for its multiples) and ``get_name()``.
        specs: One a backend.

    Raises:
        CacheSpecError: No such size; the message lists what each backend supports.
    """
    supported = [
        _supported_sizes(backend, spec) for backend, spec in zip(backends, specs, strict=True)
    ]
    # A multiple-of answer that takes a divisor takes the block size too, so that only the exact
    # sizes can be answers when the block size itself is none.
    exact = {size for sizes in supported for size in sizes if isinstance(size, int)}
    divisors = sorted((size for size in exact if size > 0 and block_size % size == 0), reverse=True)
    for candidate in (block_size, *divisors):
        if all(any(_accepts(size, candidate) for size in sizes) for sizes in supported):
            return candidate
    complaint = "; ".join(
        f"{backend.get_name()}: {sizes}" for backend, sizes in zip(backends, supported, strict=True)
    )
    raise CacheSpecError(f"No common block size for {block_size} ({complaint})")


def _supported_sizes(backend: Any, spec: Any) -> list[Any]:
    ask: Callable[..., Any] = backend.get_supported_kernel_block_sizes
    # Backends of older engines take no spec.
    takes_spec = bool(inspect.signature(ask).parameters)
    return list(ask(spec) if takes_spec else ask())


def _accepts(supported: Any, block_size: int) -> bool:
    if isinstance(supported, int):
        return block_size == supported
    base = getattr(supported, "base", None)
    if not isinstance(base, int):
        raise CacheSpecError(f"Unknown supported size: {supported}")
    return block_size % base == 0


# --- allocate -------------------------------------------------------------------------------


def allocate_kv_cache(
    kv_cache_config: Any,
    device: torch.device,
    layout: Any,
    kernel_block_sizes: Sequence[int] | None = None,
    allocate_device: AllocateDevice | None = None,
) -> dict[str, torch.Tensor]:
    """Allocate one backing on `device` and view it as one cache a layer.

    Args:
        kv_cache_config: `KVCacheConfig`, ours or vLLM's.
        device: Where the backing is made.
        layout: `KVCacheLayout`, ours or vLLM's.
        kernel_block_sizes: Tokens in a block of the views, by group index.
        allocate_device: Gives the backing, of zeros or with the rows that an earlier process left
            on it (`device_allocator.DeviceAllocator`); None: zeros of this process's own.

    Returns:
        ``[blocks, heads, rows, content]`` a layer; the raw int8 ``[size]`` backing for layers
        whose spec has no layer views (resident and hot caches). Empty without tensors.

    Raises:
        CacheContractError: Tensors of several sizes, a layer that is in no group, or a kernel
            block size that does not divide the block size.
        CacheSpecError: A view that does not fit; see `create_kv_cache_views`.
    """
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        return {}
    sizes = sorted({tensor.size for tensor in tensors})
    if len(sizes) != 1:
        raise CacheContractError(f"KV cache tensors must share one backing allocation, got {sizes}")
    if allocate_device is None:
        backing = torch.zeros(sizes[0], dtype=torch.int8, device=device)
    else:
        backing = allocate_device(kv_cache_config, device, sizes[0])
    caches: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        group_id, spec = _group_of(kv_cache_config, tensor.layers[0])
        if not spec.has_layer_views:
            caches.update((name, backing) for name in tensor.layers)
            continue
        kernel_block_size = None
        if kernel_block_sizes is not None and group_id < len(kernel_block_sizes):
            kernel_block_size = kernel_block_sizes[group_id]
        views = create_kv_cache_views(
            backing,
            spec,
            kv_cache_config.num_blocks_of(tensor),
            layout,
            tensor,
            kernel_block_size=kernel_block_size,
        )
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


def _group_of(kv_cache_config: Any, layer_name: str) -> tuple[int, Any]:
    """Return (index of the layer's group, the layer's spec)."""
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        if layer_name in group.layer_names:
            return group_id, layer_spec(group.kv_cache_spec, layer_name)
    raise CacheContractError(f"the tensor of {layer_name} belongs to no cache group")


def allocate_hisparse_kv_caches(
    kv_cache_config: Any,
    device: torch.device,
    layout: Any,
    kernel_block_sizes: list[int],
    host_pool: HostPoolLike,
) -> dict[str, torch.Tensor]:
    """Allocate the host pool separately from the shared device backing.

    Args:
        kv_cache_config: `KVCacheConfig`, ours or vLLM's; unchanged.
        device: Where the device backing is made.
        layout: `KVCacheLayout`, ours or vLLM's.
        kernel_block_sizes: Tokens in a block of the views, by group index.
        host_pool: Gives the host backing, in one ``allocate(size)``.

    Returns:
        A cache for each layer: ``[blocks, heads, rows, content]`` for source layers (host),
        indexers and others (device), the raw int8 device backing for resident and hot names.
        A source view's rows are adjacent in layer-major pools (vLLM's LBNHC) and
        ``layers * row_bytes`` apart in interleaved ones; either way block and row merge into one
        axis, ``view(-1, row_width)``.

    Raises:
        CacheSpecError: (a `ValueError`) Host tensors of several sizes or none; not exactly one
            host group; views that do not fit; a pool whose own geometry is another one.
        CacheContractError: (an `AssertionError`) Device tensors of several sizes, a layer that is
            in no group, or a kernel block size that does not divide the block size.
    """
    tensors = kv_cache_config.kv_cache_tensors
    device_config = with_tensors(
        kv_cache_config, [tensor for tensor in tensors if not tensor.host_resident]
    )
    # A pool of the service's may keep the device rows too, beyond this process's end.
    allocate_device = getattr(host_pool, "allocate_device", None)
    caches = allocate_kv_cache(device_config, device, layout, kernel_block_sizes, allocate_device)
    host_tensors = [tensor for tensor in tensors if tensor.host_resident]
    sizes = sorted({tensor.size for tensor in host_tensors})
    if len(sizes) != 1:
        raise CacheSpecError(
            f"HiSparse host tensors must all have one size, got {sizes} B in "
            f"{len(host_tensors)} host tensors"
        )
    group_id = _host_group_id(kv_cache_config)
    _check_pool_geometry(kv_cache_config, host_tensors, host_pool)
    backing = host_pool.allocate(sizes[0])
    group_spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
    for tensor in host_tensors:
        spec = layer_spec(group_spec, tensor.layers[0])
        kernel_block_size = kernel_block_sizes[group_id]
        storage_block_size = getattr(spec, "storage_block_size", None)
        if is_kind(spec, "MLAAttentionSpec") and storage_block_size is not None:
            kernel_block_size = storage_block_size
        views = create_kv_cache_views(
            backing,
            spec,
            kv_cache_config.num_blocks_of(tensor),
            layout,
            tensor,
            kernel_block_size=kernel_block_size,
        )
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


def _check_pool_geometry(
    kv_cache_config: Any, host_tensors: Sequence[Any], host_pool: HostPoolLike
) -> None:
    """Refuse a pool whose geometry puts rows elsewhere than the configuration does.

    The service may give a backing of more blocks than were asked for, which moves every layer but
    the first; another engine's published rows would then be read as noise. Pools without a
    geometry (private ones, and vLLM's) have nobody to disagree with.
    """
    geometry = getattr(host_pool, "geometry", None)
    if geometry is None:
        return
    num_blocks = int(getattr(host_pool, "num_blocks", 0))
    wanted = {kv_cache_config.num_blocks_of(tensor) for tensor in host_tensors}
    if wanted != {num_blocks}:
        raise CacheSpecError(
            f"the configuration has {sorted(wanted)} host blocks, the pool has {num_blocks}",
            remedy="Lay the caches out with the pool's number of blocks",
            value=num_blocks,
        )
    ours = sorted(
        (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in host_tensors
        for index in range(len(tensor.layers))
    )
    places = [geometry.place(layer, num_blocks) for layer in range(geometry.num_layers)]
    theirs = sorted((place.offset_bytes, place.block_stride_bytes) for place in places)
    if ours != theirs:
        raise CacheSpecError(
            f"the configuration places {len(ours)} layers in the host pool otherwise than the "
            f"pool's geometry ({geometry.layout.value}, {len(theirs)} layers)",
            remedy="Lay the caches out with the host layout of the namespace",
        )


def _host_group_id(kv_cache_config: Any) -> int:
    group_ids = tuple(kv_cache_config.host_group_ids)
    if len(group_ids) != 1:
        raise CacheSpecError(
            f"HiSparse requires exactly one host group, got {len(group_ids)}: {list(group_ids)}"
        )
    return int(group_ids[0])


# --- bind -----------------------------------------------------------------------------------


def bind_hisparse_kv_caches(
    *,
    forward_context: Mapping[str, Any],
    kv_cache_config: Any,
    kv_caches: MutableMapping[str, torch.Tensor],
    block_tables: Any,
    host_pool: HostPoolLike,
) -> list[Any]:
    """Bind existing cache storage and block tables; return the bound handles.

    Resident tables: a handle of ours is bound to its group's input block table, as the reference
    describes. vLLM 0.33.0's own code differs: it makes one zeroed tensor for all resident groups,
    binds each handle to its group's part and keeps the whole as ``handle.residency``, where its
    connector later writes. A handle that is vLLM's gets that form, or its engine could not tell it
    where pages are; see `ResidentTable`. In both forms the slot mapping is the group's.

    Args:
        forward_context: Layer name to attention layer, which has ``hisparse_cache`` (the handle)
            and ``is_draft_layer``.
        kv_cache_config: `KVCacheConfig`, ours or vLLM's; unchanged.
        kv_caches: What `allocate_hisparse_kv_caches` returned. Resident entries become the bound
            views, hot entries are removed: they are raw storage of the runtimes, and nothing
            downstream registers them.
        block_tables: `BlockTables`, ours or vLLM's.
        host_pool: Allocated and registered.

    Returns:
        A handle for each source layer, in the order of the hot groups.

    Raises:
        CacheBindingError: (a `RuntimeError`) Hot tensors in several backings, resident and hot
            views that do not lie on each other, or no hot cache at all.
        CacheSpecError: (a `ValueError`) Not exactly one host group.
        CacheContractError: (an `AssertionError`) The pool is not registered, a name has the wrong
            suffix, a resident or hot tensor is in the host pool, a layer has no handle, or a
            source cache is not in the registered pool.
    """
    if host_pool.registered is None:
        raise CacheContractError("the host pool must be allocated and registered before binding")
    places = _places(kv_cache_config)
    _bind_resident(forward_context, kv_cache_config, kv_caches, block_tables, places)
    handles = _bind_hot_and_source(
        forward_context, kv_cache_config, kv_caches, block_tables, places, host_pool
    )
    if not handles:
        raise CacheBindingError("HiSparse found no hot-cache handles")
    source_group = _host_group_id(kv_cache_config)
    for handle in handles:
        handle.source_block_table = block_tables.input_block_tables[source_group]
        handle.mirror_slot_mapping = block_tables.slot_mappings[source_group]
    return handles


_Places = Mapping[str, tuple[Any, int]]
"""Layer name to (its tensor, byte of its block 0)."""


def _places(kv_cache_config: Any) -> _Places:
    """Each layer's own byte offset: with the group's for all, layers would read each other."""
    return {
        name: (tensor, tensor.offset + index * tensor.layer_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }


def _bind_resident(
    forward_context: Mapping[str, Any],
    kv_cache_config: Any,
    kv_caches: MutableMapping[str, torch.Tensor],
    block_tables: Any,
    places: _Places,
) -> None:
    resident_groups = [
        (group_id, group)
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if _is_resident(group)
    ]
    group_ids = [group_id for group_id, _ in resident_groups]
    residency: torch.Tensor | None = None
    for source_index, (group_id, group) in enumerate(resident_groups):
        for cache_name in group.layer_names:
            layer_name = _strip_suffix(cache_name, HISPARSE_RESIDENT_SUFFIX)
            tensor, byte_offset = _device_place(places, cache_name)
            handle = _handle_of(forward_context, layer_name)
            table = block_tables.input_block_tables[group_id]
            if _resident_table(handle) is ResidentTable.RESIDENCY:
                if residency is None:
                    residency = _make_residency(block_tables, group_ids)
                table = residency[source_index]
                handle.residency = residency
            handle.bind_cache(
                kv_caches[cache_name],
                byte_offset=byte_offset,
                block_stride=tensor.block_stride,
                num_blocks=kv_cache_config.num_blocks,
                block_size=group.kv_cache_spec.block_size,
                block_table=table,
                slot_mapping=block_tables.slot_mappings[group_id],
            )
            kv_caches[cache_name] = handle.view.cache
            handle.runtime.resident_source_index = source_index


def _bind_hot_and_source(
    forward_context: Mapping[str, Any],
    kv_cache_config: Any,
    kv_caches: MutableMapping[str, torch.Tensor],
    block_tables: Any,
    places: _Places,
    host_pool: HostPoolLike,
) -> list[Any]:
    hot_backing: torch.Tensor | None = None
    handles: list[Any] = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        if not _is_hot(group):
            continue
        for cache_name in group.layer_names:
            layer_name = _strip_suffix(cache_name, HISPARSE_HOT_SUFFIX)
            raw = kv_caches[cache_name]
            if hot_backing is None:
                hot_backing = raw
            elif not _same_storage(hot_backing, raw):
                raise CacheBindingError(
                    "HiSparse hot tensors must share one GPU backing; that of "
                    f"{cache_name} is another one"
                )
            handle = _handle_of(forward_context, layer_name)
            tensor, byte_offset = _device_place(places, cache_name)
            handle.runtime.bind_hot_cache(
                raw,
                byte_offset=byte_offset,
                block_stride=tensor.block_stride,
                num_blocks=kv_cache_config.num_blocks,
                block_size=group.kv_cache_spec.block_size,
                block_table=block_tables.input_block_tables[group_id],
            )
            _check_overlay(handle, layer_name)
            _bind_source(handle, forward_context[layer_name], layer_name, kv_caches, host_pool)
            handles.append(handle)
            del kv_caches[cache_name]
    return handles


def _check_overlay(handle: Any, layer_name: str) -> None:
    """A physical row id must mean the same bytes, whether a resident or a hot block holds it."""
    if handle.view is None:
        raise CacheContractError(f"{layer_name} has a hot cache but no resident cache")
    resident, hot = handle.view.cache, handle.runtime.hot.cache
    if (
        not _same_storage(resident, hot)
        or resident.data_ptr() != hot.data_ptr()
        or resident.stride() != hot.stride()
    ):
        raise CacheBindingError(
            f"HiSparse resident and hot layouts must match; those of {layer_name} differ: "
            f"strides {resident.stride()} and {hot.stride()}, distance "
            f"{hot.data_ptr() - resident.data_ptr()} B"
        )


def _bind_source(
    handle: Any,
    layer: Any,
    layer_name: str,
    kv_caches: Mapping[str, torch.Tensor],
    host_pool: HostPoolLike,
) -> None:
    source, registered = kv_caches[layer_name], host_pool.registered
    if registered is None or not _same_storage(source, registered):
        raise CacheContractError(
            f"the source cache of {layer_name} does not lie in the registered host pool"
        )
    # Runtimes address a row as (block, row): the head axis, which has one slot in an MLA cache,
    # means nothing to them.
    rows = source.squeeze(1) if source.dim() == 4 and source.shape[1] == 1 else source
    handle.draft_layer = layer.is_draft_layer
    handle.runtime.shared_host_region = host_pool.shared_region
    handle.runtime.bind_source_cache(rows, registered_host_pool=registered)


def _is_resident(group: Any) -> bool:
    return is_kind(group.kv_cache_spec, "HiSparseResidentSpec")


def _is_hot(group: Any) -> bool:
    return is_kind(group.kv_cache_spec, "HiSparseHotSpec")


def _strip_suffix(cache_name: str, suffix: str) -> str:
    if not cache_name.endswith(suffix):
        raise CacheContractError(f"the cache name {cache_name} does not end with {suffix}")
    return cache_name[: -len(suffix)]


def _device_place(places: _Places, cache_name: str) -> tuple[Any, int]:
    tensor, byte_offset = places[cache_name]
    if tensor.host_resident:
        raise CacheContractError(f"the tensor of {cache_name} must not be host-resident")
    return tensor, byte_offset


def _handle_of(forward_context: Mapping[str, Any], layer_name: str) -> Any:
    handle = forward_context[layer_name].hisparse_cache
    if handle is None:
        raise CacheContractError(f"the attention layer {layer_name} has no HiSparse cache handle")
    return handle


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _resident_table(handle: Any) -> ResidentTable:
    """Handles of vLLM's classes take the residency form, all others the reference's."""
    of_vllm = any(base.__module__.startswith("vllm.") for base in type(handle).__mro__)
    if of_vllm and hasattr(handle, "residency"):
        return ResidentTable.RESIDENCY
    return ResidentTable.INPUT_BLOCK_TABLE


def _make_residency(block_tables: Any, group_ids: Sequence[int]) -> torch.Tensor:
    """Return zeros, int32 ``[len(group_ids), max_num_requests, max_pages]``: no page resident."""
    tables = [block_tables.input_block_tables[group_id] for group_id in group_ids]
    shapes = {tuple(table.shape) for table in tables}
    if len(shapes) != 1:
        raise CacheContractError(
            f"the block tables of resident groups must have one shape, got {sorted(shapes)}"
        )
    return torch.zeros((len(group_ids), *shapes.pop()), dtype=torch.int32, device=tables[0].device)


# --- initialise -----------------------------------------------------------------------------


def init_hisparse_kv_cache(
    kv_cache_config: Any,
    device: torch.device,
    kernel_block_sizes: list[int],
    config: Any,
    forward_context: Mapping[str, Any],
    block_tables: Any,
) -> dict[str, torch.Tensor]:
    """Allocate and bind HiSparse caches within the caller's allocation context.

    Creates the host pool through ``config.host_pool_factory(config, kv_cache_config)``, allocates,
    binds, and initialises the runtimes' buffers from the greatest number of requests and of
    batched tokens. On failure after the pool exists its shared region is cleaned up (or the pool,
    where it has none) and the error goes on unchanged; caches bound until then are not unbound.

    Args:
        kv_cache_config: `KVCacheConfig`, ours or vLLM's; unchanged.
        device: Where the device backing is made.
        kernel_block_sizes: Tokens in a block of the views, by group index.
        config: `HiSparseConfig`, or an engine's configuration that has a ``host_pool_factory``
            (as an attribute, or in its connector's extra configuration).
        forward_context: See `bind_hisparse_kv_caches`.
        block_tables: See `bind_hisparse_kv_caches`.

    Returns:
        The caches of all layers, resident ones as bound views, without the hot ones.

    Raises:
        ConfigError: No host pool factory.
        Exception: Whatever the pool, the allocation or the binding raises.
    """
    host_pool = _host_pool_factory(config)(config, kv_cache_config)
    try:
        kv_caches = allocate_hisparse_kv_caches(
            kv_cache_config, device, _device_layout(config), kernel_block_sizes, host_pool
        )
        handles = bind_hisparse_kv_caches(
            forward_context=forward_context,
            kv_cache_config=kv_cache_config,
            kv_caches=kv_caches,
            block_tables=block_tables,
            host_pool=host_pool,
        )
        _initialize_runtimes(handles, config)
    except BaseException:
        _clean_up(host_pool)
        raise
    return kv_caches


def _host_pool_factory(config: Any) -> Callable[[Any, Any], HostPoolLike]:
    factory = getattr(config, "host_pool_factory", None)
    if factory is None:
        transfer = getattr(config, "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None) or {}
        factory = extra.get("host_pool_factory")
    if not callable(factory):
        raise ConfigError(
            f"{type(config).__name__} has no host_pool_factory",
            remedy="Set host_pool_factory to a function of (config, kv_cache_config)",
        )
    made: Callable[[Any, Any], HostPoolLike] = factory
    return made


def _device_layout(config: Any) -> Any:
    if isinstance(config, HiSparseConfig):
        return config.kv_cache_layout
    return config.cache_config.get_resolved_kv_cache_layout()


def _initialize_runtimes(handles: Sequence[Any], config: Any) -> None:
    """Hand the step's sizes to the runtimes, through the module that defines the handles.

    That is `initialize_hisparse_runtime_buffers` of our `worker_client.runtime` or of an engine's
    runtime; engines differ in which of the two sizes it takes.
    """
    if isinstance(config, HiSparseConfig):
        max_num_reqs, max_num_batched_tokens = (
            config.max_num_requests,
            config.max_num_batched_tokens,
        )
    else:
        scheduler = config.scheduler_config
        max_num_reqs = scheduler.max_num_seqs
        max_num_batched_tokens = scheduler.max_num_batched_tokens
    initialize = sibling(handles[0], "initialize_hisparse_runtime_buffers")
    if initialize is None:
        raise CacheContractError(
            f"no module of {type(handles[0]).__name__} has initialize_hisparse_runtime_buffers"
        )
    sizes = {"max_num_reqs": max_num_reqs, "max_num_batched_tokens": max_num_batched_tokens}
    accepted = inspect.signature(initialize).parameters
    initialize(list(handles), **{name: size for name, size in sizes.items() if name in accepted})


def _clean_up(host_pool: HostPoolLike) -> None:
    """Release the pool without hiding the error that is on its way up."""
    owner = host_pool.shared_region if host_pool.shared_region is not None else host_pool
    cleanup = getattr(owner, "cleanup", None)
    if cleanup is None:
        return
    try:
        cleanup()
    except Exception:
        logger.exception("the host pool could not be cleaned up after a failed initialisation")
