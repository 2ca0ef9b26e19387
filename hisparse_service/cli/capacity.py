"""How many bytes a model and its load need: host pool and GPU, from the layout's own arithmetic.

Exact where the layout decides (block strides, device blocks, state tensors), and plain about what
is assumed: no prefix is shared unless said, and every request has its greatest length. Used by
`hisparse-service plan` and by the documentation. Pure: any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from hisparse_service.contract import limits
from hisparse_service.contract.errors import ConfigError
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup, round_up
from hisparse_service.contract.segment import ARENA_OFFSET, RECORD_BYTES

LATENT_ROW_BYTES: Final[Mapping[str, int]] = {"fp8_ds_mla": 656, "bfloat16": 1152}
"""Row of one token in one layer, for the latent of 512 values and the rotary key of 64."""
_LATENT_WIDTH: Final = 576
_INDEX_SCALE_BYTES: Final = 4
"""The indexer's keys are one byte a value and one float32 scale a row."""
DAEMON_BASE_BYTES: Final = 128 * limits.MIB
"""Private memory of a daemon with an empty directory (37 MiB measured) and the pages of its
libraries, with room for its HTTP thread."""
DAEMON_BYTES_PER_BLOCK: Final = 128
"""Directory and index of a full pool, per block (91 B measured with 300,000 blocks)."""
PAGE_TABLE_SHARE: Final = 8 / 4096
"""Page tables of each process that maps the pool: 8 B a page of 4 KiB."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's caches look like."""

    name: str
    group_sizes: tuple[int, ...]
    """Layers of each index group: a leader with an indexer, and those that reuse its top-k."""
    top_k: int = 2048
    index_head_dim: int = 128
    latent_width: int = _LATENT_WIDTH

    @property
    def num_layers(self) -> int:
        """Layers with sparse attention."""
        return sum(self.group_sizes)

    @property
    def index_row_bytes(self) -> int:
        """One token's key of one indexer."""
        return self.index_head_dim + _INDEX_SCALE_BYTES


def _sizes(indexer_types: Sequence[str]) -> tuple[int, ...]:
    sizes: list[int] = []
    for kind in indexer_types:
        if kind == "full" or not sizes:
            sizes.append(0)
        sizes[-1] += 1
    return tuple(sizes)


def _schedule(num_layers: int, freq: int, offset: int) -> list[str]:
    return [
        "full" if max(i - offset + 1, 0) % max(freq, 1) == 0 else "shared"
        for i in range(num_layers)
    ]


PRESETS: Final[Mapping[str, ModelShape]] = {
    "deepseek-v3.2": ModelShape(name="deepseek-v3.2", group_sizes=(1,) * 61),
    "glm-5": ModelShape(name="glm-5", group_sizes=(1,) * 78),
    "glm-5-shared": ModelShape(name="glm-5-shared", group_sizes=_sizes(_schedule(78, 4, 2))),
}
"""glm-5-shared: an indexer for every fourth layer. For any other model give its config.json."""


def read_model(path: Path) -> ModelShape:
    """The shape that a model's config.json tells.

    Raises:
        ConfigError: Not readable, or no sparse-attention model.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model configuration {path} cannot be read: {error}",
            remedy="Give the config.json of the model's directory",
        ) from error
    config = found.get("text_config", found) if isinstance(found, dict) else {}
    missing = [key for key in ("num_hidden_layers", "index_topk") if key not in config]
    if missing:
        raise ConfigError(
            f"{path} has no {' and no '.join(missing)}: not a model with sparse attention",
            remedy="Name a model of the DeepSeek-V3.2 or GLM-5 family",
        )
    return ModelShape(
        name=str(config.get("model_type", path.parent.name)),
        group_sizes=_sizes(_indexer_types(config)),
        top_k=int(config["index_topk"]),
        index_head_dim=int(config.get("index_head_dim", 128)),
        latent_width=int(config.get("kv_lora_rank", 512)) + int(config.get("qk_rope_head_dim", 64)),
    )


def _indexer_types(config: Mapping[str, Any]) -> list[str]:
    num_layers = int(config["num_hidden_layers"])
    if config.get("indexer_types"):
        return [str(kind) for kind in config["indexer_types"]][:num_layers]
    pattern = config.get("index_topk_pattern")
    if pattern:
        return [{"F": "full", "S": "shared"}.get(str(c), str(c)) for c in pattern][:num_layers]
    return _schedule(
        num_layers, int(config.get("index_topk_freq", 1)),
        int(config.get("index_skip_topk_offset", 2)),
    )  # fmt: skip


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What shall fit."""

    context_tokens: int
    """Prompt and answer of the longest request."""
    concurrency: int
    """Requests that decode at once, over all engines of the node."""
    shared_prefix_tokens: int = 0
    """Of the context, what all requests have in common (a system prompt): held once."""
    kept_tokens: int = 0
    """Prefixes of ended requests that shall be found again."""
    hot_rows: int = 0
    """Hot rows a request; 0: the default, (1 + query rows) * top-k."""
    prefill_tokens: int = 8192
    """Tokens that one step prefills at most: their pages are resident until mirrored."""
    speculative_tokens: int = 0
    block_size: int = 64
    kv_dtype: str = "fp8_ds_mla"
    keeps_index_keys: bool = True
    """Whether host blocks hold the indexer's keys, so that a new engine finds prefixes again."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes, and where they come from."""

    host_block_bytes: int
    host_blocks: int
    """Null block included."""
    host_bytes_per_token: float
    table_bytes: int
    pool_bytes: int
    """The setting pool.bytes: payload, block table, header."""
    daemon_bytes: int
    """Private memory of the daemon beside the pool, its page tables included."""
    worker_page_table_bytes: int
    """Kernel memory of each worker that maps the whole pool, beside everything else."""
    hot_rows: int
    device_groups: int
    """Resident and hot groups: so often a token's page or a hot region takes a device block."""
    device_block_bytes: int
    index_blocks: int
    resident_blocks: int
    hot_blocks: int
    device_blocks: int
    """All of them and the null block."""
    device_bytes: int
    """Block-outermost backing that indexer, resident and hot groups overlay."""
    state_bytes: int
    """Hot maps and plans of all index groups."""
    gpu_bytes: int
    gpu_bytes_without: int
    """The same load with the whole cache on the GPU."""


def plan(model: ModelShape, load: Load) -> Plan:
    """Count.

    Raises:
        ConfigError: A number out of range.
    """
    _check(model, load)
    row_bytes = _row_bytes(model, load)
    geometry = HostGeometry.make(
        layout=HostLayout.GROUP_INTERLEAVED, block_size=load.block_size,
        groups=_host_groups(model, row_bytes, load),
    )  # fmt: skip
    host_blocks = _host_blocks(load)
    table_bytes = round_up(host_blocks * RECORD_BYTES, geometry.os_page_bytes)
    query_rows = 1 + load.speculative_tokens
    hot_rows = load.hot_rows or (query_rows + 1) * model.top_k
    device = _device(model, load, row_bytes, hot_rows)
    state = len(model.group_sizes) * state_bytes(
        requests=load.concurrency, hot_rows=hot_rows, query_rows=query_rows, top_k=model.top_k
    )
    tokens = load.concurrency * _blocks(load, load.context_tokens) * load.block_size
    without = tokens * (
        model.num_layers * row_bytes + len(model.group_sizes) * model.index_row_bytes
    )
    pool_bytes = ARENA_OFFSET + table_bytes + geometry.pool_bytes(host_blocks)
    page_tables = int(pool_bytes * PAGE_TABLE_SHARE)
    return Plan(
        host_block_bytes=geometry.block_stride_bytes,
        host_blocks=host_blocks,
        host_bytes_per_token=geometry.block_stride_bytes / load.block_size,
        table_bytes=table_bytes,
        pool_bytes=pool_bytes,
        daemon_bytes=DAEMON_BASE_BYTES + host_blocks * DAEMON_BYTES_PER_BLOCK + page_tables,
        worker_page_table_bytes=page_tables,
        hot_rows=hot_rows,
        state_bytes=state,
        gpu_bytes=device["device_bytes"] + state,
        gpu_bytes_without=without,
        **device,
    )


def tokens_in(model: ModelShape, load: Load, pool_bytes: int) -> int:
    """Tokens whose blocks a pool of this size holds."""
    geometry = HostGeometry.make(
        layout=HostLayout.GROUP_INTERLEAVED, block_size=load.block_size,
        groups=_host_groups(model, _row_bytes(model, load), load),
    )  # fmt: skip
    room = pool_bytes - ARENA_OFFSET - geometry.os_page_bytes
    num_blocks = room // (geometry.block_stride_bytes + RECORD_BYTES)
    return max(0, num_blocks - 1) * load.block_size


def state_bytes(*, requests: int, hot_rows: int, query_rows: int, top_k: int) -> int:
    """Hot map (host row and last use of each slot) and plan of one index group."""
    hot_map = requests * (hot_rows * (8 + 4) + 4)
    lanes = requests * query_rows * top_k
    # Physical rows; then the misses' source and device rows, each wide enough for every lane.
    step_plan = lanes * 4 + requests * query_rows * 4 + 2 * lanes * 8 + requests * 4
    return hot_map + step_plan


def _row_bytes(model: ModelShape, load: Load) -> int:
    if load.kv_dtype not in LATENT_ROW_BYTES:
        raise ConfigError(
            f"no row format is called {load.kv_dtype!r}",
            remedy=f"Known are {', '.join(LATENT_ROW_BYTES)}",
        )
    if load.kv_dtype == "bfloat16":
        return 2 * model.latent_width
    # One byte a latent value, a float32 scale for each 128 of them, the rotary key in bfloat16.
    rotary = 64
    latent = model.latent_width - rotary
    return latent + latent // 128 * 4 + 2 * rotary


def _host_groups(model: ModelShape, row_bytes: int, load: Load) -> list[LayerGroup]:
    groups = [LayerGroup(size, row_bytes) for size in model.group_sizes]
    if load.keeps_index_keys:
        padded = round_up(model.index_row_bytes, limits.ROW_ALIGNMENT_BYTES)
        groups += [LayerGroup(1, padded) for _ in model.group_sizes]
    return groups


def _blocks(load: Load, tokens: int) -> int:
    return -(-tokens // load.block_size)


def _host_blocks(load: Load) -> int:
    shared = load.shared_prefix_tokens // load.block_size
    own = _blocks(load, load.context_tokens) - shared
    # One block more a request for the copy-on-write tail, one null block for all.
    requests = load.concurrency * (own + 1)
    return 1 + shared + requests + _blocks(load, load.kept_tokens)


def _packed(model: ModelShape, page_bytes: int, index_page_bytes: int) -> list[int]:
    """Layers of each resident group: whole index groups, while they fit in the indexers' pages."""
    packed: list[int] = []
    for size in model.group_sizes:
        if not packed or (packed[-1] + size) * page_bytes > index_page_bytes:
            packed.append(0)
        packed[-1] += size
    return packed


def _device(model: ModelShape, load: Load, row_bytes: int, hot_rows: int) -> dict[str, int]:
    page = load.block_size * row_bytes
    index_pages = load.block_size * model.index_row_bytes * len(model.group_sizes)
    packed = _packed(model, page, index_pages)
    stride = round_up(max(index_pages, max(packed) * page), page)
    index_blocks = load.concurrency * (_blocks(load, load.context_tokens) + 1)
    # The page being written of each request, and those of one prefill step.
    resident = len(packed) * (load.concurrency + _blocks(load, load.prefill_tokens))
    hot = len(packed) * load.concurrency * _blocks(load, hot_rows)
    blocks = 1 + index_blocks + resident + hot
    return {
        "device_groups": len(packed), "device_block_bytes": stride, "index_blocks": index_blocks,
        "resident_blocks": resident, "hot_blocks": hot, "device_blocks": blocks,
        "device_bytes": blocks * stride,
    }  # fmt: skip


def _check(model: ModelShape, load: Load) -> None:
    query_rows = 1 + load.speculative_tokens
    least_hot, most_hot = query_rows * model.top_k, limits.MAX_HOT_ROWS
    checks = (
        ("context", load.context_tokens, 1, 2**31),
        ("concurrency", load.concurrency, 1, 65_536),
        ("shared prefix", load.shared_prefix_tokens, 0, load.context_tokens),
        ("kept tokens", load.kept_tokens, 0, 2**40),
        ("prefill tokens", load.prefill_tokens, 0, 2**31),
        ("speculative tokens", load.speculative_tokens, 0, limits.MAX_SPECULATIVE_ROWS - 1),
        ("block size", load.block_size, limits.MIN_BLOCK_SIZE, limits.MAX_BLOCK_SIZE),
        ("hot rows", load.hot_rows or least_hot, least_hot, most_hot),
    )
    for what, value, low, high in checks:
        if not low <= value <= high or not math.isfinite(value):
            raise ConfigError(
                f"{what} is {value}, it must lie between {low} and {high}",
                remedy="Correct that option",
            )
