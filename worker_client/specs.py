"""The words in which caches are described: specs, groups, tensors, configs and block tables.

They exist so that the client can lay out, allocate and bind caches without an engine. Each type
has the attributes of vLLM 0.33.0's type of the same name, and the rest of the client reads only
those attributes (`is_kind` compares class names), so that an engine's own objects can be passed
wherever ours can. vLLM is never imported.

All types are frozen values: usable on any thread. Sizes, strides and offsets are bytes unless the
name says otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from fractions import Fraction
from typing import Any, Protocol, Self

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, UsageError

HISPARSE_RESIDENT_SUFFIX = ".hisparse_resident"
"""A layer's resident cache is named by the layer and this."""

HISPARSE_HOT_SUFFIX = ".hisparse_hot"
"""A layer's hot cache is named by the layer and this."""

EXTRA_HOST_BLOCKS = 2
"""Host blocks beyond a request's length: the null block and a copy-on-write tail."""


class CacheSpecError(GeometryError, ValueError):
    """Specs, groups or sizes that cannot be laid out. Also a `ValueError`, as engines expect."""


class CacheBindingError(UsageError, RuntimeError):
    """Caches that do not fit each other at binding. Also a `RuntimeError`, as engines expect."""


class CacheContractError(UsageError, AssertionError):
    """A caller's promise that does not hold (wrong suffix, unregistered pool, foreign storage).

    Also an `AssertionError`: vLLM only asserts these.
    """


class SparseCacheRole(StrEnum):
    """What a layer's MLA cache holds."""

    SPARSE = "sparse"
    """Latent rows that top-k selects; full copy in the host pool."""
    INDEXER = "indexer"
    """Keys of the indexer; they stay on the device."""


class KVCacheLayout(Enum):
    """Physical order of the axes (layer, block, head, token, content) of a backing.

    Names and values are those of vLLM's enum of this name.
    """

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)

    @property
    def stride_order(self) -> tuple[int, ...]:
        """Logical axes, from the outermost in memory to the innermost."""
        return self.value

    @property
    def is_block_outermost(self) -> bool:
        """Whether one block's bytes of all layers lie together."""
        return self.stride_order[0] == 1


@dataclass(frozen=True)
class MultipleOf:
    """A backend's answer "any multiple of `base` tokens" for its kernel block sizes."""

    base: int


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Cache format of one layer.

    Args:
        block_size: Tokens in a block.
    """

    block_size: int

    def __post_init__(self) -> None:
        if not limits.MIN_BLOCK_SIZE <= self.block_size <= limits.MAX_BLOCK_SIZE:
            raise CacheSpecError(
                f"block_size is {self.block_size}, allowed are {limits.MIN_BLOCK_SIZE} to "
                f"{limits.MAX_BLOCK_SIZE} tokens",
                value=self.block_size,
                limit=limits.MAX_BLOCK_SIZE,
            )

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    @property
    def has_layer_views(self) -> bool:
        """Whether allocation makes a view a layer; otherwise the layer gets the raw backing."""
        return True

    @property
    def uses_slot_mapping(self) -> bool:
        """Whether the group has a slot mapping (a row of the cache for each token of a step)."""
        return True

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return a copy with `block_size` tokens in a block."""
        return dataclasses.replace(self, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    """One latent vector (row) a token: what sparse attention reads.

    Args:
        block_size: Tokens in a block.
        head_size: Row width, in elements of `dtype`.
        dtype: Element type of the view: `torch.uint8` for packed fp8 rows (656 wide),
            `torch.bfloat16` for 576-wide rows, `torch.float32` in CPU demonstrations.
        storage_block_size: Rows of one block of the view, where the storage's blocks are smaller
            than `block_size`; None means `block_size`, or the kernel's choice.
        cache_role: Latent rows or indexer keys.
        is_index_group_leader: Whether this layer has an indexer of its own; the following
            layers without one reuse its top-k.
        topk_buffer_width: Rows that top-k selects at most; None leaves it to the configuration.
        is_draft: Whether a draft model owns the layer. Does not take part in equality.
    """

    head_size: int
    dtype: torch.dtype
    storage_block_size: int | None = None
    cache_role: SparseCacheRole = SparseCacheRole.SPARSE
    is_index_group_leader: bool = False
    topk_buffer_width: int | None = None
    is_draft: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_size < 1 or self.row_bytes > limits.MAX_ROW_BYTES:
            raise CacheSpecError(
                f"a row of {self.head_size} {self.dtype} has {self.row_bytes} B, allowed are 1 to "
                f"{limits.MAX_ROW_BYTES}",
                value=self.row_bytes,
                limit=limits.MAX_ROW_BYTES,
            )
        storage = self.storage_block_size
        if storage is not None and (storage < 1 or self.block_size % storage):
            raise CacheSpecError(
                f"storage_block_size {storage} does not divide block_size {self.block_size}",
                value=storage,
                limit=self.block_size,
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.head_size * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer: `block_size` rows."""
        return self.block_size * self.row_bytes

    @property
    def num_heads(self) -> int:
        """Head slots of a page: one latent vector stands for all heads."""
        return 1

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one stored state, which is a row."""
        return self.row_bytes

    @property
    def tokens_per_state(self) -> int | Fraction:
        """Tokens that one stored row stands for."""
        return 1

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """Rows in a kernel block of `kernel_block_size` tokens."""
        return kernel_block_size

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return a copy with `block_size` tokens in a block, storage blocks not above that."""
        storage = self.storage_block_size
        if storage is not None:
            storage = math.gcd(storage, block_size)
        return dataclasses.replace(self, block_size=block_size, storage_block_size=storage)


@dataclass(frozen=True, kw_only=True)
class IndexerSpec(MLAAttentionSpec):
    """The indexer's keys of one leader layer: an MLA spec that stays on the device."""

    cache_role: SparseCacheRole = SparseCacheRole.INDEXER


@dataclass(frozen=True, kw_only=True)
class HiSparseResidentSpec(KVCacheSpec):
    """Device pages of recent blocks, which can be given up once their host copy is published.

    Args:
        block_size: Tokens in a block.
        page_size: Bytes of one layer's block.
    """

    page_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.page_size

    @property
    def has_layer_views(self) -> bool:
        """False: the binding makes the view."""
        return False


@dataclass(frozen=True, kw_only=True)
class HiSparseHotSpec(KVCacheSpec):
    """A request's LRU of rows on the device.

    Args:
        block_size: Rows in a block.
        page_size: Bytes of one layer's block.
        blocks_per_request: Blocks that each running request holds.
    """

    page_size: int
    blocks_per_request: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.page_size

    @property
    def has_layer_views(self) -> bool:
        """False: the binding makes the view."""
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        """False: hot rows are placed by the LRU, not by token."""
        return False


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """A group whose layers have specs of one kind and one block size, but maybe several widths.

    Args:
        block_size: Tokens in a block, the same for every layer.
        kv_cache_specs: The spec of each layer, in layer order.
    """

    kv_cache_specs: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kv_cache_specs:
            raise CacheSpecError("a uniform-type group needs at least one layer", value=0, limit=1)
        sizes = sorted({spec.block_size for spec in self.kv_cache_specs.values()})
        if sizes != [self.block_size]:
            raise CacheSpecError(
                f"a uniform-type group has one block size ({self.block_size}), its layers have "
                f"{sizes}"
            )
        object.__setattr__(self, "kv_cache_specs", dict(self.kv_cache_specs))

    @classmethod
    def from_specs(cls, kv_cache_specs: Mapping[str, Any]) -> Self:
        """Make the group spec of `kv_cache_specs`.

        Raises:
            CacheSpecError: No layer, or layers of several block sizes.
        """
        first = next(iter(kv_cache_specs.values()), None)
        block_size = 1 if first is None else first.block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of all layers together, without padding."""
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """Return a copy in which every layer has `block_size` tokens in a block."""
        specs = {
            name: spec.copy_with_new_block_size(block_size)
            for name, spec in self.kv_cache_specs.items()
        }
        return dataclasses.replace(self, block_size=block_size, kv_cache_specs=specs)


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """Where the pages of some layers lie in a backing.

    Row ``r`` of block ``b`` of ``layers[i]`` starts at byte
    ``offset + i * layer_stride + b * block_stride + r * row_stride`` of the backing. Tensors may
    overlap: groups share the device backing, and a block id belongs to one group at a time.

    Args:
        size: Bytes of the whole backing (not of this tensor's part).
        layers: Layer names, in the order of their pages.
        layer_stride: Bytes from a layer's block 0 to the next layer's.
        block_stride: Bytes from a block to the next of the same layer.
        offset: Byte of block 0 of ``layers[0]``.
        host_resident: Whether the backing is the host pool.
        row_stride: Bytes from a row to the next. None (vLLM's tensors have no such field) means
            that the rows of a page are adjacent.
    """

    size: int
    layers: Sequence[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False
    row_stride: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        numbers = (self.size, self.layer_stride, self.block_stride, self.row_stride or 1)
        if not self.layers or min(numbers) < 1 or self.offset < 0:
            raise CacheSpecError(
                f"a tensor needs layers, a size and positive strides, got {len(self.layers)} "
                f"layers, size {self.size}, layer_stride {self.layer_stride}, block_stride "
                f"{self.block_stride}, row_stride {self.row_stride}, offset {self.offset} B"
            )


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    Args:
        layer_names: The layers, in order.
        kv_cache_spec: The spec of every layer, or a `UniformTypeKVCacheSpecs`.
        host_resident: Whether the group lives in the host pool.
    """

    layer_names: Sequence[str]
    kv_cache_spec: Any
    host_resident: bool = False


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """Everything that allocation and binding need to know of a model's caches.

    Args:
        num_blocks: Device blocks, the null block included.
        kv_cache_tensors: Host tensors first, then the device's.
        kv_cache_groups: Source, indexer, resident groups, hot groups, then any others.
        host_num_blocks: Host blocks, the null block included; None without a host group.
        host_block_stride: Bytes of the pool that one host block takes (padding included).
    """

    num_blocks: int
    kv_cache_tensors: Sequence[KVCacheTensor]
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    host_num_blocks: int | None = None
    host_block_stride: int | None = None

    @property
    def host_group_ids(self) -> tuple[int, ...]:
        """Indices of the groups that live in the host pool."""
        return tuple(
            index for index, group in enumerate(self.kv_cache_groups) if group.host_resident
        )

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Blocks that can be addressed in the backing of `tensor`.

        Raises:
            CacheContractError: A host tensor in a configuration without host blocks.
        """
        if not tensor.host_resident:
            return self.num_blocks
        if self.host_num_blocks is None:
            raise CacheContractError(
                f"the tensor of {tensor.layers[0]} is host-resident, but the configuration has no "
                "host_num_blocks"
            )
        return self.host_num_blocks

    @property
    def hisparse_host_num_blocks(self) -> int | None:
        """The same as `host_num_blocks`, by its name in vLLM."""
        return self.host_num_blocks

    @property
    def hisparse_host_block_stride(self) -> int | None:
        """The same as `host_block_stride`, by its name in vLLM."""
        return self.host_block_stride


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The device tables of every group, by group index. The tensors belong to the caller.

    Args:
        input_block_tables: int32 ``[max_num_requests, max_blocks_of_group]``; 0 is the null block.
        slot_mappings: int64 ``[max_num_batched_tokens]``; -1 where a token has no row.
    """

    input_block_tables: Sequence[torch.Tensor]
    slot_mappings: Sequence[torch.Tensor]

    @classmethod
    def allocate(
        cls,
        kv_cache_config: KVCacheConfig,
        *,
        max_num_requests: int,
        max_num_batched_tokens: int,
        max_model_len_tokens: int,
        device: torch.device | str,
    ) -> Self:
        """Make empty tables for `kv_cache_config`: all null blocks, all slots -1."""
        tables: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        for group in kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            width = blocks_for_tokens(max_model_len_tokens, spec.block_size)
            if is_kind(spec, "HiSparseHotSpec"):
                width = spec.blocks_per_request
            tables.append(torch.zeros((max_num_requests, width), dtype=torch.int32, device=device))
            slots.append(
                torch.full((max_num_batched_tokens,), -1, dtype=torch.int64, device=device)
            )
        return cls(input_block_tables=tables, slot_mappings=slots)


class HostPoolLike(Protocol):
    """What binding needs of a host pool: ours, and vLLM's `HiSparseHostPool`."""

    @property
    def backing(self) -> torch.Tensor | None:
        """int8 ``[size]`` bytes of host memory; None before `allocate`."""

    @property
    def registered(self) -> torch.Tensor | None:
        """int8 ``[registered bytes]``, same storage as `backing`; None before `allocate`."""

    @property
    def shared_region(self) -> Any:
        """None, or an object with ``cleanup()``."""

    def allocate(self, size: int, /) -> torch.Tensor:
        """Return the backing of `size` bytes, the same one each time."""


HostPoolFactory = Callable[[Any, Any], HostPoolLike]
"""Called with (config, kv_cache_config); returns the pool, not yet allocated."""


@dataclass(frozen=True, kw_only=True)
class HiSparseConfig:
    """Sizes of a HiSparse worker, in place of an engine's configuration.

    Args:
        top_k: Rows that one query selects.
        max_num_requests: Requests in a step.
        max_num_batched_tokens: Tokens in a step.
        max_model_len: Tokens of the longest request.
        max_decode_query_len: Queries of one request in a decode step (1 + speculative tokens).
        device_buffer_size: Hot rows of a request; None for
            ``(max_decode_query_len + 1) * top_k``.
        kv_cache_layout: Layout of the device backing; block-outermost.
        host_pool_factory: Makes the host pool in `binding.init_hisparse_kv_cache`.

    Raises:
        CacheSpecError: The hot rows are outside ``max_decode_query_len * top_k`` to 32,768.
    """

    top_k: int
    max_num_requests: int
    max_num_batched_tokens: int
    max_model_len: int
    max_decode_query_len: int = 1
    device_buffer_size: int | None = None
    kv_cache_layout: KVCacheLayout = KVCacheLayout.BLNHC
    host_pool_factory: HostPoolFactory | None = None

    def __post_init__(self) -> None:
        for name in (
            "top_k",
            "max_num_requests",
            "max_num_batched_tokens",
            "max_model_len",
            "max_decode_query_len",
        ):
            if getattr(self, name) < 1:
                raise CacheSpecError(f"{name} is {getattr(self, name)}, it must be at least 1")
        _ = self.hot_rows

    @property
    def hot_rows(self) -> int:
        """Hot rows of a request: `device_buffer_size`, or its default."""
        return resolve_device_buffer_size(
            self.device_buffer_size,
            top_k=self.top_k,
            max_decode_query_len=self.max_decode_query_len,
        )


def resolve_device_buffer_size(
    device_buffer_size: int | None, *, top_k: int, max_decode_query_len: int
) -> int:
    """Return the hot rows of a request.

    Args:
        device_buffer_size: Configured rows; None for ``(max_decode_query_len + 1) * top_k``:
            the worst-case union of a speculative run and one more top-k of LRU slack.
        top_k: Rows that one query selects.
        max_decode_query_len: Queries of one request in a decode step.

    Raises:
        CacheSpecError: Fewer than ``max_decode_query_len * top_k`` rows, or more than 32,768.
    """
    least = max_decode_query_len * top_k
    rows = least + top_k if device_buffer_size is None else device_buffer_size
    if rows < least:
        raise CacheSpecError(
            f"device_buffer_size is {rows} rows, but {max_decode_query_len} queries of top-k "
            f"{top_k} can select {least}",
            remedy=f"Set device_buffer_size to at least {least}",
            value=rows,
            limit=least,
        )
    if rows > limits.MAX_HOT_ROWS:
        raise CacheSpecError(
            f"device_buffer_size is {rows} rows, hot slots are 16-bit: at most "
            f"{limits.MAX_HOT_ROWS}",
            remedy="Lower device_buffer_size or the number of speculative tokens",
            value=rows,
            limit=limits.MAX_HOT_ROWS,
        )
    return rows


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_size)


def is_kind(value: object, class_name: str) -> bool:
    """Whether `value` is an instance of a class of this name, ours or an engine's."""
    return any(base.__name__ == class_name for base in type(value).__mro__)


def cache_role(spec: Any) -> SparseCacheRole:
    """The role of an MLA spec; specs that do not say are latent rows."""
    role = getattr(spec, "cache_role", SparseCacheRole.SPARSE)
    return SparseCacheRole(getattr(role, "value", role))


def row_bytes_of(spec: Any) -> int:
    """Bytes of one row of an MLA spec, ours or vLLM's."""
    return int(spec.num_heads * spec.state_content_size_bytes)


def layer_spec(group_spec: Any, layer_name: str) -> Any:
    """The spec of one layer of a group: its own in a uniform-type group, else the group's."""
    if is_kind(group_spec, "UniformTypeKVCacheSpecs"):
        return group_spec.kv_cache_specs[layer_name]
    return group_spec


def sibling(value: object, name: str) -> Any:
    """What the module that defines the type of `value` (or of a base of it) calls `name`, or None.

    Things derived from an engine's objects are made by the engine's own classes and functions,
    found this way, so that the engine gets back what it knows without being imported here.
    """
    for base in type(value).__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        if found is not None:
            return found
    return None


def with_tensors(kv_cache_config: Any, tensors: Sequence[Any]) -> Any:
    """Return a copy of `kv_cache_config` (ours or vLLM's) with other tensors."""
    changed = copy.copy(kv_cache_config)
    object.__setattr__(changed, "kv_cache_tensors", list(tensors))
    return changed
