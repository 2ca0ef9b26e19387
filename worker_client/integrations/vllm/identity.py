"""Which engines share blocks, and who a process is: names and fingerprints from vLLM's config.

Two engines share when everything here is equal: the weights, the row format, the layers in the
order of their bytes, the block size. Pure but for file sizes and times of a local model directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hisparse_service.contract.errors import ConfigError, GeometryError
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup, round_up
from hisparse_service.contract.limits import ROW_ALIGNMENT_BYTES
from worker_client.integrations.vllm.settings import IndexKeys, Settings
from worker_client.specs import layer_spec

SOURCE_ROLE = "hisparse_source"
INDEXER_ROLE = "hisparse_indexer"


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's host layout as a geometry of ours."""

    geometry: HostGeometry
    num_blocks: int
    """Null block included."""
    source_bytes: int
    """What vLLM allocates: the first bytes of the backing, in its own layout."""
    source_layers: tuple[str, ...]
    """In the order of their bytes; layer i of the geometry."""
    index_layers: tuple[str, ...]
    """Behind them in the geometry; empty where their keys are not kept."""
    index_page_bytes: tuple[int, ...]
    """Bytes of a block's keys, one an index layer; its page in the geometry may be longer."""


def plan_host(kv_cache_config: Any, settings: Settings) -> HostPlan:
    """The geometry of a vLLM cache configuration.

    Raises:
        GeometryError: A layout that vLLM 0.33.0 does not make.
    """
    source_group = _group(kv_cache_config, host_resident=True)
    num_blocks = int(kv_cache_config.hisparse_host_num_blocks)
    places = sorted(
        (
            (tensor.offset + index * tensor.layer_stride, tensor.layer_stride, name)
            for tensor in kv_cache_config.kv_cache_tensors
            if tensor.host_resident
            for index, name in enumerate(tensor.layers)
        ),
        key=lambda place: place[0],
    )
    block_size = int(source_group.kv_cache_spec.block_size)
    groups: list[LayerGroup] = []
    end = 0
    for offset, layer_stride, name in places:
        # From the tensors alone: the scheduler's copy of the configuration has lost the layers'
        # own specs.
        page, rest = divmod(layer_stride, num_blocks)
        if offset != end or rest or page % block_size:
            raise GeometryError(
                f"host layer {name} lies at byte {offset} with stride {layer_stride}, expected "
                f"{end} and {num_blocks} pages of whole rows"
            )
        end += layer_stride
        groups.append(LayerGroup(1, page // block_size))
    index_layers: tuple[str, ...] = ()
    index_pages: tuple[int, ...] = ()
    if settings.index_keys is IndexKeys.KEEP:
        index_layers, index_pages = _index_layers(kv_cache_config)
        groups += [
            LayerGroup(1, round_up(-(-page // block_size), ROW_ALIGNMENT_BYTES))
            for page in index_pages
        ]
    return HostPlan(
        geometry=HostGeometry.make(
            layout=HostLayout.LAYER_MAJOR, block_size=block_size, groups=groups
        ),
        num_blocks=num_blocks,
        source_bytes=end,
        source_layers=tuple(name for _, _, name in places),
        index_layers=index_layers,
        index_page_bytes=index_pages,
    )


def _group(kv_cache_config: Any, *, host_resident: bool) -> Any:
    groups = [g for g in kv_cache_config.kv_cache_groups if g.host_resident is host_resident]
    if len(groups) != 1:
        raise GeometryError(f"{len(groups)} host groups; one is expected")
    return groups[0]


def index_group_id(kv_cache_config: Any) -> int | None:
    """Which cache group holds the indexer's keys."""
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        if str(getattr(group.role, "value", group.role)) == INDEXER_ROLE:
            return group_id
    return None


def _index_layers(kv_cache_config: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    group_id = index_group_id(kv_cache_config)
    if group_id is None:
        return (), ()
    names = tuple(kv_cache_config.kv_cache_groups[group_id].layer_names)
    # vLLM's device layout of HiSparse is block-outermost: layers lie a page apart.
    pages = {
        name: int(tensor.layer_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        if not tensor.host_resident
        for name in tensor.layers
    }
    return names, tuple(pages[name] for name in names)


def model_identity(vllm_config: Any, settings: Settings) -> str:
    """Identity of the weights: what two engines must agree on to share rows.

    A local directory is named by its weight files' names, sizes and times: weights that were
    replaced under the same path are other weights.
    """
    if settings.model_id:
        return settings.model_id
    model = getattr(vllm_config, "model_config", None)
    parts: list[Any] = [_weights_of(model)]
    parts.append(_config_digest(getattr(model, "hf_config", None)))
    parts.append(str(getattr(model, "dtype", "")))
    parts.append(str(getattr(model, "quantization", "") or ""))
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        parts += [_weights_of(draft), _config_digest(getattr(draft, "hf_config", None))]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    return f"{getattr(model, 'model', 'model')}@{digest}"


def _weights_of(model: Any) -> list[Any]:
    name = str(getattr(model, "model", ""))
    directory = Path(name)
    if not directory.is_dir():
        return [name, str(getattr(model, "revision", "") or "")]
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _config_digest(hf_config: Any) -> str:
    to_dict = getattr(hf_config, "to_dict", None)
    if to_dict is None:
        return ""
    values: Mapping[str, Any] = to_dict()
    kept = {k: v for k, v in values.items() if k not in ("transformers_version", "_name_or_path")}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def row_format(kv_cache_config: Any, plan: HostPlan) -> str:
    """Format of the rows, with the layers' names in the order of their bytes.

    Equal in workers and scheduler: of several row formats the first layer's is named, the others
    differ by their row bytes, which the geometry has.
    """
    group = _group(kv_cache_config, host_resident=True)
    spec = layer_spec(group.kv_cache_spec, group.layer_names[0])
    kind = getattr(spec, "cache_dtype_str", None) or str(spec.dtype)
    names = "\n".join((*plan.source_layers, "", *plan.index_layers))
    return f"{kind}/{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"


def check_topology(vllm_config: Any) -> None:
    """Refuse topologies whose ranks hold different rows of one layer.

    Raises:
        ConfigError: With what is not supported.
    """
    parallel = vllm_config.parallel_config
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = int(getattr(parallel, name, 1) or 1)
        if size > 1:
            raise ConfigError(
                f"{what} ({name}={size}) gives each rank other rows; one pool cannot serve them",
                remedy="vLLM's HiSparse does not support it either; use tensor parallelism",
            )


def group_name(vllm_config: Any) -> str:
    """Name of the engine's group of sessions: its scheduler and its workers."""
    index = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return f"vllm-{vllm_config.instance_id}-dp{index}"


__all__ = [
    "HostPlan",
    "check_topology",
    "group_name",
    "index_group_id",
    "model_identity",
    "plan_host",
    "row_format",
]
