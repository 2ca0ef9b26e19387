"""Runs transformers' `GlmMoeDsaForCausalLM` with its latent KV in our three tiers.

The model is used as it is: its projections, norms, rotary embedding, indexer, experts and attention
function. Only the cache differs. Each attention layer is wrapped by a `TieredAttention` that

- stores the layer's latent rows (`kv_lora_rank` values and the rotary key) in resident pages;
- lets the model's own indexer choose the top-k (`full` layers lead an index group, `shared` layers
  follow); the indexer's keys stay on the device, in pages of their own;
- attends to the rows of the top-k and to no others: in a decode step they are where `swap_in` says,
  in a prefill chunk they are read from resident pages or staged out of the host pool.

The indexer's keys are mirrored to the host pool with the rows, as the last group of layers of each
block: without them a prefix that is found again could not be searched. They are never read there by
attention; they are copied back to the device when a request with a found prefix starts.

A `TieredModel` owns the device caches and the handles; it borrows model and host pool. It does what
a `StepPlan` says and decides nothing: requests and residency are `generation.py`'s and the
coordinator's. Used on the worker's compute thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from hisparse_service.contract.errors import ConfigError, InternalError, UsageError
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from worker_client.binding import init_hisparse_kv_cache
from worker_client.device_lists import to_device
from worker_client.host_pool import HostPool
from worker_client.integrations.transformers_graph import StaticDecode
from worker_client.integrations.transformers_steps import (
    Batch,
    DecodeMode,
    RowSource,
    Seen,
    StaticInputs,
    Step,
    StepMode,
    additive_mask,
    distinct_lanes,
    dynamic_step,
    pad_lanes,
)
from worker_client.kernels.interface import GroupPages, KernelBackend
from worker_client.layout import INDEXER_SUFFIX, build_kv_cache_config, make_layer_specs
from worker_client.mirror import BlockMirror, MirrorQueue, RowMirror
from worker_client.requests import PageMirror, PageRestore, StepPlan
from worker_client.runtime import (
    HiSparseCacheHandle,
    HiSparseIndexGroup,
    ResolvedHiSparseConfig,
    SwapStatistics,
    create_index_group_handles,
)
from worker_client.specs import BlockTables, HiSparseConfig

_SOURCE_GROUP = 0
_INDEXER_GROUP = 1
_FIRST_RESIDENT_GROUP = 2


@dataclass(frozen=True, kw_only=True)
class TierSizes:
    """Sizes of one worker's tiers.

    Attributes:
        block_size: Tokens of a block.
        num_device_blocks: Blocks of the device backing, the null block included.
        max_num_requests: Request slots.
        max_model_tokens: Longest request.
        max_step_tokens: Tokens of a prefill chunk.
        hot_rows: Hot rows of a request in each index group; None for twice the top-k.
        host_layout: Order of the rows in the host pool.
    """

    block_size: int
    num_device_blocks: int
    max_num_requests: int
    max_model_tokens: int
    max_step_tokens: int
    hot_rows: int | None = None
    host_layout: HostLayout = HostLayout.GROUP_INTERLEAVED


@dataclass(frozen=True)
class ModelShape:
    """What the tiers must know of a model.

    Attributes:
        index_groups: Layer indices, leader first.
        row_width: Elements of a latent row.
        key_width: Elements of an indexer key.
        top_k: Rows that one query selects.
        dtype: Element type of both.
    """

    index_groups: tuple[tuple[int, ...], ...]
    row_width: int
    key_width: int
    top_k: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> ModelShape:
        """Read a `GlmMoeDsaConfig`.

        Raises:
            ConfigError: The first layer shares a top-k that no layer before it made.
        """
        groups: list[list[int]] = []
        for layer, kind in enumerate(config.indexer_types[: config.num_hidden_layers]):
            if kind == "full":
                groups.append([])
            elif not groups:
                raise ConfigError("indexer_types begins with 'shared': there is no top-k to share")
            groups[-1].append(layer)
        return cls(
            index_groups=tuple(tuple(group) for group in groups),
            row_width=config.kv_lora_rank + config.qk_rope_head_dim,
            key_width=config.index_head_dim,
            top_k=config.index_topk,
            dtype=dtype,
        )

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return sum(len(group) for group in self.index_groups)

    def host_geometry(self, *, block_size: int, layout: HostLayout) -> HostGeometry:
        """Shape of a host block: the index groups, then the indexers' keys as one more group.

        Raises:
            GeometryError: Rows or keys that are no multiple of 16 B.
        """
        row_bytes = self.row_width * self.dtype.itemsize
        key_bytes = self.key_width * self.dtype.itemsize
        rows = [LayerGroup(len(group), row_bytes) for group in self.index_groups]
        return HostGeometry.make(
            layout=layout,
            block_size=block_size,
            groups=[*rows, LayerGroup(len(self.index_groups), key_bytes)],
        )


class RowAudit(Protocol):
    """Sees every row that is computed, mirrored, or read from host memory. For checks; slow."""

    def computed(
        self, layer: int, request_id: str, positions: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Rows of one request left the model.

        Args:
            layer: Layer index; the indexer's keys of the i-th leader are ``num_layers + i``.
            request_id: Whose.
            positions: int64 ``[n]``.
            rows: ``[n, width]``.
        """
        ...

    def selected(
        self, group: int, request_id: str, positions: torch.Tensor, top_k: torch.Tensor
    ) -> None:
        """An index group's leader chose the rows that some tokens of a request attend to.

        Args:
            group: Index of the index group.
            request_id: Whose.
            positions: int64 ``[n]``: the tokens.
            top_k: int32 ``[n, k]``: chosen positions, -1 = empty lane.
        """
        ...

    def read_from_host(self, layer: int, host_slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows arrived from host memory.

        Args:
            layer: As above.
            host_slots: int64 ``[n]``, on the CPU: ``block * block_size + row``.
            rows: uint8 ``[n, row_bytes]``, on the CPU.
        """
        ...


@dataclass(slots=True)
class PrefillRows:
    """Where prefill chunks found their rows, counted once for each index group."""

    resident: int = 0
    staged: int = 0


@dataclass(frozen=True)
class _ChunkPlaces:
    """Where the rows are that a prefill chunk attends to: for every layer of an index group.

    U distinct positions; S queries of k lanes.
    """

    lanes: torch.Tensor
    """int64 [S, k]: index among the U."""
    empty: torch.Tensor
    """bool [S, k]."""
    resident: torch.Tensor
    """bool [U]."""
    physical_rows: torch.Tensor
    """int64 [resident]: in the device backing."""
    host_slots: torch.Tensor
    """int64 [U - resident]: in the host pool."""


@dataclass(frozen=True)
class _Pass:
    """The forward pass under way."""

    step: Step
    rows: RowSource


class TieredAttention(nn.Module):
    """One attention layer of the model, with its cache in our tiers.

    Attributes:
        inner: The model's own layer: all weights are its.
        hisparse_cache: The layer's handle, where the binding looks for it.
        is_draft_layer: No layer of this model drafts.
    """

    is_draft_layer = False

    def __init__(
        self, inner: Any, owner: TieredModel, handle: HiSparseCacheHandle, group: int
    ) -> None:
        super().__init__()
        self.inner = inner
        self.hisparse_cache = handle
        self.layer = int(inner.layer_idx)
        self.group = group
        # Not registered as a submodule: the owner holds the model that holds this layer.
        self._owner = [owner]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        prev_topk_indices: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Attend to the top-k rows.

        Args:
            hidden_states: ``[B, S, hidden_size]``.
            position_embeddings: (cos, sin), ``[B, S, rope]`` each.
            prev_topk_indices: What the leader selected; int32 ``[B, S, k]``, -1 = empty lane.

        Returns:
            Output ``[B, S, hidden_size]``, nothing, and the top-k.
        """
        inner, under_way = self.inner, self._owner[0].under_way
        step, source = under_way.step, under_way.rows
        batch, length = hidden_states.shape[:2]
        q_resid = inner.q_a_layernorm(inner.q_a_proj(hidden_states))
        query = inner.q_b_proj(q_resid).view(batch, length, -1, inner.qk_head_dim).transpose(1, 2)
        q_pass, q_rot = query.split([inner.qk_nope_head_dim, inner.qk_rope_head_dim], dim=-1)
        latent, k_rot = inner.kv_a_proj_with_mqa(hidden_states).split(
            [inner.kv_lora_rank, inner.qk_rope_head_dim], dim=-1
        )
        latent = inner.kv_a_layernorm(latent)
        q_rot, k_rot = glm.apply_rotary_pos_emb_interleave(
            q_rot, k_rot.unsqueeze(1), *position_embeddings
        )
        rows = torch.cat((latent, k_rot.squeeze(1)), dim=-1)
        step.seen.rows[self.layer] = rows
        source.store_rows(self, rows, step)
        top_k = prev_topk_indices
        if inner.indexer is not None:
            top_k = self._select(hidden_states, q_resid, position_embeddings, under_way)
        if top_k is None:
            raise InternalError(f"layer {self.layer} follows no leader")
        query = torch.cat((q_pass, q_rot), dim=-1)
        attend = self._decode if step.mode is StepMode.DECODE else self._prefill
        output = attend(query, top_k, under_way).reshape(batch, length, -1)
        return inner.o_proj(output), None, top_k

    def _select(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        under_way: _Pass,
    ) -> torch.Tensor:
        """The model's own indexer over this worker's keys; int32 [B, S, k], -1 = empty lane."""
        step = under_way.step
        top_k: torch.Tensor = self.inner.indexer(
            hidden_states,
            q_resid,
            position_embeddings,
            step.causal[:, 0],
            step.positions,
            cache=_IndexerKeys(under_way, self),
        )
        # With fewer tokens than k the indexer also returns positions that the mask shut out.
        top_k = top_k.masked_fill(top_k > step.positions.unsqueeze(-1), -1)
        step.seen.top_k[self.group] = top_k
        return top_k

    def _decode(self, query: torch.Tensor, top_k: torch.Tensor, under_way: _Pass) -> torch.Tensor:
        """Rows of a token of each request. query [B, H, 1, D]; returns [B, 1, H, V]."""
        lanes = pad_lanes(top_k[:, 0], self.hisparse_cache.runtime.config.top_k)
        rows, empty = under_way.rows.decode_rows(self, lanes, under_way.step)
        key, value = self._expand(rows.unsqueeze(1))
        mask = additive_mask(empty, query.dtype)[:, None, None, :]
        return self._attend(query, key, value, mask)

    def _prefill(self, query: torch.Tensor, top_k: torch.Tensor, under_way: _Pass) -> torch.Tensor:
        """Rows of all queries, each fetched once. query [1, H, S, D]; returns [S, 1, H, V]."""
        rows, lanes, empty = under_way.rows.chunk_rows(self, top_k[0], under_way.step)
        mask = additive_mask(empty, query.dtype)[:, None, None, :]
        key, value = self._expand(rows[None, None])
        # [1, H, U, D] to [S, H, k, D]: each query is a batch entry of its own.
        key = key[0][:, lanes].transpose(0, 1)
        value = value[0][:, lanes].transpose(0, 1)
        return self._attend(query[0].transpose(0, 1).unsqueeze(2), key, value, mask)

    def _expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B, 1, n, row_width] to keys and values [B, H, n, D]."""
        rank = self.inner.kv_lora_rank
        expanded: tuple[torch.Tensor, torch.Tensor] = self.inner.expand_kv(
            rows[..., :rank], rows[..., rank:]
        )
        return expanded

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = glm.eager_attention_forward(
            self.inner, query, key, value, mask, scaling=self.inner.scaling
        )[0]
        return output


class _IndexerKeys:
    """What the model's indexer takes for its cache: one layer's keys of the step's requests."""

    def __init__(self, under_way: _Pass, layer: TieredAttention) -> None:
        self._under_way, self._layer = under_way, layer

    def update_indexer(self, keys: torch.Tensor, _: int) -> torch.Tensor:
        """Store the step's keys [B, S, key_width]; return all [B, context, key_width]."""
        step = self._under_way.step
        step.seen.keys[self._layer.group] = keys
        return self._under_way.rows.store_keys(self._layer, keys, step)


@dataclass
class _IndexerPages:
    """The leaders' keys on the device and in the host pool, as one group of layers."""

    caches: list[torch.Tensor]
    """One a leader: [num_blocks, block_size, key_width], strided."""
    pages: GroupPages


class TieredModel:
    """A model whose attention layers read from our tiers.

    Args:
        model: `GlmMoeDsaForCausalLM` in evaluation mode, on its device. Its attention layers are
            wrapped until `close`.
        host_pool: Attached, with `ModelShape.host_geometry`.
        sizes: Sizes of the tiers.
        decode: How decode steps are run. GRAPH needs a model that can be captured: experts that run
            without waiting for the device, as transformers' ``batched_mm`` does.
        mirrors_rows: Whether static decode steps mirror their rows (the writer's do).
        audit: Sees rows, for checks.

    Raises:
        ConfigError: Sizes that do not fit, another geometry in the host pool, an attention
            implementation other than ``eager``, or GRAPH without a CUDA device.
    """

    def __init__(
        self,
        model: Any,
        host_pool: HostPool,
        sizes: TierSizes,
        *,
        decode: DecodeMode = DecodeMode.DYNAMIC,
        mirrors_rows: bool = False,
        audit: RowAudit | None = None,
    ) -> None:
        if model.config._attn_implementation != "eager":
            raise ConfigError(
                f"attention implementation {model.config._attn_implementation!r} is not supported",
                remedy="Make the model with attn_implementation='eager'",
            )
        weight = model.get_input_embeddings().weight
        self.model = model
        self.sizes = sizes
        self.device: torch.device = weight.device
        self.shape = ModelShape.of(model.config, weight.dtype)
        self.audit = audit
        self.timed_swap: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered around each swap: for who measures."""
        self.prefill_rows = PrefillRows()
        self.dropped_hot_rows = 0
        self.last_seen = Seen()
        """What left the model in the last `forward`."""
        expected = self.shape.host_geometry(block_size=sizes.block_size, layout=sizes.host_layout)
        if host_pool.geometry != expected:
            raise ConfigError("the host pool was attached with another geometry than the model's")
        self._pass: _Pass | None = None
        self._chunks: dict[int, _ChunkPlaces] = {}
        self._static: StaticDecode | None = None
        self._layers = self._wrap()
        try:
            self._bind(host_pool)
            if decode is not DecodeMode.DYNAMIC:
                self._static = self._make_static(decode, mirrors_rows=mirrors_rows)
        except BaseException:
            self.close()
            raise

    # --- making -----------------------------------------------------------------------------------

    def _wrap(self) -> list[TieredAttention]:
        config = ResolvedHiSparseConfig.resolve(
            top_k=self.shape.top_k, device_buffer_size=self.sizes.hot_rows
        )
        layers: list[TieredAttention] = []
        for index, group in enumerate(self.shape.index_groups):
            handles = create_index_group_handles(
                config,
                num_layers=len(group),
                row_width=self.shape.row_width,
                kv_dtype=self.shape.dtype,
                device=self.device,
            )
            for layer, handle in zip(group, handles, strict=True):
                decoder = self.model.model.layers[layer]
                decoder.self_attn = TieredAttention(decoder.self_attn, self, handle, index)
                layers.append(decoder.self_attn)
        return layers

    def _bind(self, host_pool: HostPool) -> None:
        sizes, shape = self.sizes, self.shape
        names = [tuple(_name(layer) for layer in group) for group in shape.index_groups]
        config = HiSparseConfig(
            top_k=shape.top_k,
            max_num_requests=sizes.max_num_requests,
            max_num_batched_tokens=max(sizes.max_step_tokens, sizes.max_num_requests),
            max_model_len=sizes.max_model_tokens,
            device_buffer_size=sizes.hot_rows,
            host_pool_factory=lambda *_: _SourcePart(host_pool, len(shape.index_groups)),
        )
        specs = make_layer_specs(
            names,
            block_size=sizes.block_size,
            row_width=shape.row_width,
            dtype=shape.dtype,
            indexer_width=shape.key_width,
            indexer_dtype=shape.dtype,
        )
        kv_cache_config = build_kv_cache_config(
            config,
            specs,
            num_device_blocks=sizes.num_device_blocks,
            num_host_blocks=host_pool.num_blocks,
            host_layout=sizes.host_layout,
        )
        self.tables = BlockTables.allocate(
            kv_cache_config,
            max_num_requests=sizes.max_num_requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len_tokens=sizes.max_model_tokens,
            device=self.device,
        )
        caches = init_hisparse_kv_cache(
            kv_cache_config,
            self.device,
            [sizes.block_size] * len(kv_cache_config.kv_cache_groups),
            config,
            {_name(layer.layer): layer for layer in self._layers},
            self.tables,
        )
        self.num_resident_groups = (len(kv_cache_config.kv_cache_groups) - 2) // 2
        self.hot_blocks_per_request = self.tables.input_block_tables[-1].shape[1]
        self._indexer = _bind_indexer(
            [caches[group[0] + INDEXER_SUFFIX] for group in names], host_pool, shape
        )

    def _make_static(self, mode: DecodeMode, *, mirrors_rows: bool) -> StaticDecode:
        num_pages = self.tables.input_block_tables[_INDEXER_GROUP].shape[1]
        inputs = StaticInputs(
            max_num_requests=self.sizes.max_num_requests,
            context=num_pages * self.sizes.block_size,
            device=self.device,
            mirrors=mirrors_rows,
        )
        return StaticDecode(
            inputs, lambda step: self._run(step, self), mode=mode, device=self.device
        )

    @property
    def replays(self) -> int:
        """Decode steps that were a replayed CUDA graph."""
        return 0 if self._static is None else self._static.replays

    @property
    def index_groups(self) -> list[HiSparseIndexGroup]:
        """The index groups, in layer order."""
        return [
            layer.hisparse_cache.runtime.index_group
            for layer in self._layers
            if layer.hisparse_cache.runtime.is_group_leader
        ]

    @property
    def backend(self) -> KernelBackend:
        """The kernels in use."""
        return self._layers[0].hisparse_cache.runtime.index_group.backend

    @property
    def num_mirror_units(self) -> int:
        """Copies that make a block whole: one an index group, one for the indexers' keys."""
        return len(self.shape.index_groups) + 1

    def close(self) -> None:
        """Give the model its own attention layers back. Idempotent."""
        for decoder in self.model.model.layers:
            if isinstance(decoder.self_attn, TieredAttention):
                decoder.self_attn = decoder.self_attn.inner

    # --- what a step plan says --------------------------------------------------------------------

    def apply(self, plan: StepPlan) -> None:
        """Carry a plan out: hot maps, tables, then copies back from the host."""
        if plan.invalidate:
            blocks = self._int32(plan.invalidate)
            for group in self.index_groups:
                group.leader.invalidate(blocks)
        if plan.reset_slots:
            self._reset(plan.reset_slots)
        for region in plan.hot_regions:
            first = _FIRST_RESIDENT_GROUP + self.num_resident_groups
            for table, hot in zip(
                self.tables.input_block_tables[first:], region.blocks, strict=True
            ):
                table[region.request_slot, : len(hot)] = self._int32(hot)
        if plan.updates:
            self._update_tables(plan)
        if plan.restores:
            self._restore(plan.restores)

    def _reset(self, request_slots: Sequence[int]) -> None:
        slots = self._int32(request_slots)
        for group in self.index_groups:
            state = group.state
            if state is not None:
                self.dropped_hot_rows += int((state.host_rows[slots.long()] >= 0).sum())
            group.leader.reset(slots)
        for table in self.tables.input_block_tables:
            table[slots.long()] = 0

    def _update_tables(self, plan: StepPlan) -> None:
        rows = self._int64([update.request_slot for update in plan.updates])
        columns = self._int64([update.page for update in plan.updates])
        tables = self.tables.input_block_tables
        tables[_SOURCE_GROUP][rows, columns] = self._int32([u.host_block for u in plan.updates])
        tables[_INDEXER_GROUP][rows, columns] = self._int32([u.indexer_block for u in plan.updates])
        for group in range(self.num_resident_groups):
            tables[_FIRST_RESIDENT_GROUP + group][rows, columns] = self._int32(
                [u.resident_blocks[group] if u.resident_blocks else 0 for u in plan.updates]
            )

    def _restore(self, restores: Sequence[PageRestore]) -> None:
        with_keys = [restore for restore in restores if restore.indexer_block]
        if with_keys:
            host = self._int32([restore.host_block for restore in with_keys])
            device = self._int32([restore.indexer_block for restore in with_keys])
            self.backend.restore_blocks(
                pages=self._indexer.pages, host_blocks=host, device_blocks=device
            )
            self._audit_pages(self._indexer.pages, self.shape.num_layers, host, device)
        with_rows = [restore for restore in restores if restore.resident_blocks]
        if not with_rows:
            return
        host = self._int32([restore.host_block for restore in with_rows])
        for unit, group in enumerate(self.index_groups):
            resident = group.leader.resident_source_index
            device = self._int32([restore.resident_blocks[resident] for restore in with_rows])
            self.backend.restore_blocks(pages=group.pages(), host_blocks=host, device_blocks=device)
            self._audit_pages(group.pages(), self.shape.index_groups[unit][0], host, device)

    def submit_mirrors(
        self, queue: MirrorQueue, mirrors: Sequence[PageMirror], spans: Sequence[int] = ()
    ) -> None:
        """Enqueue the copies of whole pages to the host, every unit of them.

        Args:
            queue: Takes note of them.
            mirrors: The pages.
            spans: For each page, its first row that decode steps mirrored already, and all behind
                it; the block size where they mirrored none. Empty: none of any page.
        """
        size = self.sizes.block_size
        for mirror in mirrors:
            queue.add_block(mirror.request_id, mirror.page, mirror.host_block)
        firsts = spans or [size] * len(mirrors)
        for unit, (pages, blocks) in enumerate(self._mirror_units(mirrors)):
            whole: list[BlockMirror] = []
            rest: list[RowMirror] = []
            done: list[RowMirror] = []
            for mirror, block, first in zip(mirrors, blocks, firsts, strict=True):
                name, page = mirror.request_id, mirror.page
                if first == size:
                    whole.append(BlockMirror(name, page, block))
                    continue
                done.append(RowMirror(name, page, block, first, size - first))
                if first:
                    rest.append(RowMirror(name, page, block, 0, first))
            queue.submit_blocks(unit, pages, whole)
            queue.submit_rows(unit, pages, rest)
            queue.note_rows(unit, done)

    def _mirror_units(
        self, mirrors: Sequence[PageMirror]
    ) -> Iterator[tuple[GroupPages, list[int]]]:
        """Each unit's pages, and where these pages lie in them."""
        for group in self.index_groups:
            resident = group.leader.resident_source_index
            yield group.pages(), [mirror.resident_blocks[resident] for mirror in mirrors]
        yield self._indexer.pages, [mirror.indexer_block for mirror in mirrors]

    # --- a forward pass ---------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the tokens of a batch; their pages must be prepared and applied.

        Returns:
            Logits of each request's last token, ``[B, vocab]`` of the model's dtype; those of a
            static step are valid until the next one.

        Raises:
            UsageError: The batch is neither a chunk nor a decode step.
        """
        if self._static is not None and batch.mode is StepMode.DECODE:
            self._static.prepare()
            self._static.inputs.set(batch)
            step, logits = self._static()
        else:
            step = dynamic_step(batch, self.device)
            logits = self._run(step, self)
        self._audit(batch, step)
        self.last_seen = step.seen
        return logits[: len(batch.request_ids)]

    @torch.no_grad()
    def forward_elsewhere(self, batch: Batch, rows: RowSource) -> tuple[torch.Tensor, Seen]:
        """Compute a batch that `forward` just computed, in the same shapes, over other rows.

        Args:
            batch: The last one.
            rows: Where its rows are kept and found; no tier and no table is touched.

        Returns:
            Logits as `forward` does, and what left the model.
        """
        if self._static is not None and batch.mode is StepMode.DECODE:
            step = self._static.inputs.step()
        else:
            step = dynamic_step(batch, self.device)
        return self._run(step, rows)[: len(batch.request_ids)], step.seen

    def _run(self, step: Step, rows: RowSource) -> torch.Tensor:
        """Run the model; returns the logits of the last tokens, [B, vocab]. May be captured."""
        self._pass = _Pass(step, rows)
        self._chunks.clear()
        try:
            if rows is self:
                self._map_slots(step)
            logits: torch.Tensor = self.model(
                input_ids=step.tokens,
                position_ids=step.positions,
                # A mapping is taken as it is: the wrapped layers make no use of the model's mask.
                # Its keys are the layers' types, which earlier releases named otherwise.
                attention_mask=dict.fromkeys(
                    ("indexed_attention", *(self.model.config.layer_types or ()))
                ),
                use_cache=False,
                logits_to_keep=1,
            ).logits
            if rows is self and step.host_slots is not None:
                self._mirror_step(step.host_slots)
        finally:
            self._pass = None
        return logits[:, -1]

    @property
    def under_way(self) -> _Pass:
        """The forward pass under way.

        Raises:
            UsageError: There is none: the wrapped model was called directly.
        """
        if self._pass is None:
            raise UsageError(
                "the model's attention layers are wrapped: run it through TieredModel.forward",
                remedy="Or call TieredModel.close first",
            )
        return self._pass

    def _map_slots(self, step: Step) -> None:
        """Fill the slot mappings of the indexer and resident groups with this step's tokens."""
        size = self.sizes.block_size
        positions = step.positions.clamp(min=0)
        rows = step.table_rows[:, None].expand_as(positions)
        for group in range(_INDEXER_GROUP, _FIRST_RESIDENT_GROUP + self.num_resident_groups):
            blocks = self.tables.input_block_tables[group][rows, positions // size].long()
            mapped = (blocks * size + positions % size).masked_fill(step.positions < 0, -1)
            self.tables.slot_mappings[group][: mapped.numel()] = mapped.flatten()

    def _mirror_step(self, host_slots: torch.Tensor) -> None:
        """Copy the rows that a decode step wrote to the host, every unit of them."""
        count = host_slots.shape[0]
        for group in self.index_groups:
            resident = _FIRST_RESIDENT_GROUP + group.leader.resident_source_index
            self.backend.mirror_rows(
                pages=group.pages(),
                device_slots=self.tables.slot_mappings[resident][:count],
                host_slots=host_slots,
            )
        self.backend.mirror_rows(
            pages=self._indexer.pages,
            device_slots=self.tables.slot_mappings[_INDEXER_GROUP][:count],
            host_slots=host_slots,
        )

    def store_rows(self, layer: TieredAttention, rows: torch.Tensor, step: Step) -> None:
        """Write the step's latent rows [B, S, row_width] to the layer's resident pages."""
        del step
        flat = rows.flatten(0, 1)
        view, slots = layer.hisparse_cache.write_target(flat.shape[0])
        self._write(view.cache, slots, flat)

    def store_keys(self, layer: TieredAttention, keys: torch.Tensor, step: Step) -> torch.Tensor:
        """Write the step's indexer keys [B, S, key_width]; return all [B, context, key_width]."""
        cache = self._indexer.caches[layer.group]
        flat = keys.flatten(0, 1)
        self._write(cache, self.tables.slot_mappings[_INDEXER_GROUP][: flat.shape[0]], flat)
        num_pages = -(-step.context // self.sizes.block_size)
        table = self.tables.input_block_tables[_INDEXER_GROUP][step.table_rows, :num_pages]
        return cache[table.long()].flatten(1, 2)[:, : step.context]

    def _write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows [n, width] in pages by slot [n]; without shapes that depend on values.

        Padding writes the null block's first row back to where it is.
        """
        size = self.sizes.block_size
        kept, places = slots >= 0, slots.clamp(min=0)
        blocks, offsets = places // size, places % size
        cache[blocks, offsets] = torch.where(kept[:, None], rows, cache[blocks, offsets])

    def decode_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows where `swap_in` put them: see `RowSource`."""
        handle = layer.hisparse_cache
        with self.timed_swap():
            physical = handle.swap_in(
                top_k, request_slots=step.slots, query_starts=step.query_starts
            )
        empty = physical < 0
        rows = handle.runtime.hot.read(physical.clamp(min=0))
        # Whatever the null block holds must not get into a sum, not even times zero.
        return rows.masked_fill(empty.unsqueeze(-1), 0), empty

    def chunk_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows from resident pages, or staged out of the host pool: see `RowSource`.

        The leader's places serve its followers.
        """
        places = self._chunks.get(layer.group)
        if places is None:
            places = self._chunks[layer.group] = self._find_chunk_rows(layer, top_k, step)
        return self._fetch_rows(layer, places), places.lanes, places.empty

    def _find_chunk_rows(
        self, layer: TieredAttention, top_k: torch.Tensor, step: Step
    ) -> _ChunkPlaces:
        positions, lanes, empty = distinct_lanes(top_k, step.positions[0])
        tables = layer.hisparse_cache.tables()
        slot = step.table_rows[0]
        pages, rows = positions // tables.block_size, positions % tables.block_size
        device_blocks = tables.resident[slot, pages].long()
        host_blocks = tables.source[slot, pages].long()
        resident = device_blocks > 0
        if bool((~resident & (host_blocks == 0)).any()):
            raise InternalError(f"request slot {int(slot)} selects rows that are nowhere")
        self.prefill_rows.resident += int(resident.sum())
        self.prefill_rows.staged += int((~resident).sum())
        return _ChunkPlaces(
            lanes=lanes,
            empty=empty,
            resident=resident,
            physical_rows=(device_blocks * tables.block_stride_rows + rows)[resident],
            host_slots=(host_blocks * tables.block_size + rows)[~resident],
        )

    def _fetch_rows(self, layer: TieredAttention, places: _ChunkPlaces) -> torch.Tensor:
        """A chunk's rows of one layer, [U, row_width]: resident ones, and staged ones."""
        runtime = layer.hisparse_cache.runtime
        rows = torch.empty(
            (places.resident.shape[0], self.shape.row_width),
            dtype=self.shape.dtype,
            device=self.device,
        )
        rows[places.resident] = runtime.hot.read(places.physical_rows)
        count = places.host_slots.shape[0]
        if count:
            index = runtime.layer_index
            staged = torch.empty(
                (1, count, runtime.row_bytes), dtype=torch.uint8, device=self.device
            )
            runtime.index_group.backend.stage(
                pages=runtime.index_group.pages().layers(index, index + 1),
                host_slots=places.host_slots,
                out=staged,
            )
            rows[~places.resident] = staged[0].view(self.shape.dtype)
            if self.audit is not None:
                self.audit.read_from_host(layer.layer, places.host_slots.cpu(), staged[0].cpu())
        return rows

    # --- checks -----------------------------------------------------------------------------------

    def swap_statistics(self) -> list[SwapStatistics]:
        """The counters of each index group."""
        return [group.leader.statistics() for group in self.index_groups]

    def num_hot_rows(self) -> int:
        """Rows in all hot regions now, over all index groups."""
        return sum(
            int((group.state.host_rows >= 0).sum())
            for group in self.index_groups
            if group.state is not None
        )

    def _audit(self, batch: Batch, step: Step) -> None:
        """Show the audit what a pass computed, chose, and read from the host to decode."""
        if self.audit is None:
            return
        seen = step.seen
        computed = [*seen.rows.items()]
        computed += [(self.shape.num_layers + group, keys) for group, keys in seen.keys.items()]
        for index, request_id in enumerate(batch.request_ids):
            positions = step.positions[index]
            for layer, rows in computed:
                self.audit.computed(layer, request_id, positions, rows[index])
            for leader, top_k in seen.top_k.items():
                self.audit.selected(leader, request_id, positions, top_k[index])
        if batch.mode is StepMode.DECODE:
            for unit, group in enumerate(self.index_groups):
                self._audit_swap(self.audit, group, unit, len(batch.request_ids))

    def _audit_swap(
        self, audit: RowAudit, group: HiSparseIndexGroup, unit: int, num_requests: int
    ) -> None:
        """Show the audit every row that the last `swap_in` of a group copied, in all layers.

        They are where it put them until the group's next one.
        """
        plan = group.plan
        if plan is None:
            return
        for request, count in enumerate(plan.miss_counts[:num_requests].tolist()):
            host_slots = plan.miss_source_rows[request, :count].cpu()
            device_rows = plan.miss_device_rows[request, :count]
            for layer, runtime in zip(self.shape.index_groups[unit], group.runtimes, strict=True):
                rows = runtime.hot.read(device_rows).view(torch.uint8).cpu()
                audit.read_from_host(layer, host_slots, rows)

    def _audit_pages(
        self, pages: GroupPages, first_layer: int, host: torch.Tensor, device: torch.Tensor
    ) -> None:
        if self.audit is None:
            return
        size = self.sizes.block_size
        slots = (host.long()[:, None] * size + torch.arange(size, device=self.device)).flatten()
        for index, layer_pages in enumerate(pages.device):
            rows = layer_pages[device.long()].flatten(0, 1).cpu()
            self.audit.read_from_host(first_layer + index, slots.cpu(), rows)

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(values, torch.int32, self.device)

    def _int64(self, values: Sequence[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)


class _SourcePart:
    """The part of a host pool that holds latent rows, as the binding is to see it.

    The indexers' keys come last in a block, so the rows lie where they would without them.
    """

    def __init__(self, pool: HostPool, num_groups: int) -> None:
        self._pool = pool
        self.num_blocks = pool.num_blocks
        whole = pool.geometry
        self.geometry = HostGeometry.make(
            layout=whole.layout,
            block_size=whole.block_size,
            groups=whole.groups[:num_groups],
            os_page_bytes=whole.os_page_bytes,
        )

    @property
    def backing(self) -> torch.Tensor | None:
        return self._pool.backing

    @property
    def registered(self) -> torch.Tensor | None:
        return self._pool.registered

    @property
    def shared_region(self) -> Any:
        return self._pool.shared_region

    def allocate(self, size: int, /) -> torch.Tensor:
        return self._pool.allocate(size)


def _bind_indexer(
    caches: Sequence[torch.Tensor], host_pool: HostPool, shape: ModelShape
) -> _IndexerPages:
    """Pair the leaders' key caches with their rows in the host pool."""
    keys = [cache.squeeze(1) for cache in caches]
    key_bytes = shape.key_width * shape.dtype.itemsize
    stride_bytes = keys[0].stride(0) * shape.dtype.itemsize
    whole = stride_bytes % key_bytes == 0
    return _IndexerPages(
        caches=keys,
        pages=GroupPages(
            host=tuple(
                host_pool.layer_view(shape.num_layers + index) for index in range(len(keys))
            ),
            device=tuple(cache.view(torch.uint8) for cache in keys),
            block_stride_rows=stride_bytes // key_bytes if whole else keys[0].shape[1],
        ),
    )


def _name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


__all__ = [
    "Batch",
    "DecodeMode",
    "ModelShape",
    "PrefillRows",
    "RowAudit",
    "StepMode",
    "TierSizes",
    "TieredAttention",
    "TieredModel",
]
