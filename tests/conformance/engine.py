"""vLLM's scheduler, KV cache manager, connector and binding, driven a step at a time on a CPU.

`EngineSpec` says what to build; `Worker` is one rank with vLLM's worker side; `Engine` is a
scheduler with its ranks. What the model would compute comes from model.py; everything between the
scheduler's output and the rows in the pool is vLLM's.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model
import torch

DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class EngineSpec:
    """One engine. Without an endpoint it is stock vLLM."""

    directory: str
    """Where the model's configuration is written."""
    endpoint: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 4
    num_drafts: int = 0
    """Layers of a drafter, which writes its rows after the forward."""
    eager_host_mirror: bool = True
    async_scheduling: bool = False
    """vLLM's default on GPUs: a step is scheduled before the last one's output is taken in."""
    index_group_size: int = 1
    block_size: int = 16
    fp8: bool = True
    max_model_len: int = 256
    host_blocks: int = 64
    device_blocks: int = 400
    top_k: int = 16
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    instance: str = "conf"
    world_size: int = 1
    enable_caching: bool = True
    hash_algorithm: str = "sha256_cbor"
    below_multi: bool = False
    """The connector is a child of a `MultiConnector`."""
    kv_events: bool = False


def host_page_bytes(spec: EngineSpec) -> int:
    layers = spec.num_layers + spec.num_drafts
    return layers * spec.block_size * (656 if spec.fp8 else 1152)


def write_model(spec: EngineSpec) -> Path:
    """A model's directory, as far as vLLM's configuration reads it."""
    directory = Path(spec.directory)
    directory.mkdir(exist_ok=True, parents=True)
    values = {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "kv_lora_rank": 512, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
        "v_head_dim": 64, "index_topk": spec.top_k, "index_n_heads": 4, "index_head_dim": 128,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
        "vocab_size": model.VOCABULARY, "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def make_config(spec: EngineSpec) -> Any:
    """VLLM's configuration. HiSparse is set after the checks that ask for a GPU."""
    import vllm.config as c
    from vllm.config.attention import HiSparseConfig

    directory = write_model(spec)
    model_config = c.ModelConfig(
        model=str(directory), skip_tokenizer_init=True, max_model_len=spec.max_model_len,
        dtype="bfloat16",
    )  # fmt: skip
    cache_config = c.CacheConfig(
        block_size=spec.block_size, enable_prefix_caching=spec.enable_caching,
        prefix_caching_hash_algo=spec.hash_algorithm,
    )  # fmt: skip
    config = c.VllmConfig(
        model_config=model_config, cache_config=cache_config,
        scheduler_config=c.SchedulerConfig(
            max_num_seqs=spec.max_num_seqs, max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len, is_encoder_decoder=False,
        ),
        parallel_config=c.ParallelConfig(),
    )  # fmt: skip
    extra: dict[str, Any] = {
        "host_pool_gib": spec.host_blocks * -(-host_page_bytes(spec) // 4096) * 4096 / 2**30
    }
    if spec.endpoint:
        extra["hisparse_service.endpoint"] = spec.endpoint
    name, extra = "HiSparseConnector", {**extra, **spec.extra}
    if spec.below_multi:
        child = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        name, extra = "MultiConnector", {"connectors": [child]}
    config.kv_transfer_config = c.KVTransferConfig(
        kv_connector=name, kv_role="kv_both", engine_id=spec.instance,
        kv_connector_extra_config=extra,
    )  # fmt: skip
    if spec.kv_events:
        config.kv_events_config = c.KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.attention_config.hisparse_config = HiSparseConfig(
        device_buffer_size=4 * spec.top_k, eager_host_mirror=spec.eager_host_mirror
    )
    config.instance_id = spec.instance
    # vLLM turns these off for a CPU; a GPU engine has them.
    cache_config.enable_prefix_caching = spec.enable_caching
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = spec.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.async_scheduling = spec.async_scheduling
    config.parallel_config.tensor_parallel_size = spec.world_size
    cache_config.kv_cache_layout = "BLHNC"
    return config


class _Backend:
    """An attention backend, as far as the resolution of block sizes asks one."""

    @staticmethod
    def get_name() -> str:
        return "conformance"

    @staticmethod
    def get_supported_kernel_block_sizes(_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(1)]


def layer_names(spec: EngineSpec) -> list[str]:
    """The target's layers, then the drafter's."""
    return [f"layers.{i}" for i in range(spec.num_layers)] + [
        f"draft.{i}" for i in range(spec.num_drafts)
    ]


def layer_specs(spec: EngineSpec) -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    specs: dict[str, Any] = {}
    for i, name in enumerate(layer_names(spec)):
        leads = i >= spec.num_layers or i % spec.index_group_size == 0
        specs[name] = MLAAttentionSpec(
            block_size=spec.block_size, num_kv_heads=1, head_size=576,
            dtype=torch.uint8 if spec.fp8 else torch.bfloat16,
            state_content_bytes=656 if spec.fp8 else None,
            cache_dtype_str="fp8_ds_mla" if spec.fp8 else None,
            is_index_group_leader=leads,
        )  # fmt: skip
        if leads:
            specs[f"{name}.indexer"] = MLAAttentionSpec(
                block_size=spec.block_size, num_kv_heads=1, head_size=132, dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )  # fmt: skip
    return specs


def make_cache_config(spec: EngineSpec, config: Any) -> Any:
    """VLLM's own layout of this engine's caches."""
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_bytes_per_block
    from vllm.v1.hisparse.binding import resolve_hisparse_specs
    from vllm.v1.hisparse.layout import (
        get_hisparse_host_pool_bytes,
        get_hisparse_kv_cache_config,
        get_hisparse_kv_cache_groups,
    )

    specs = layer_specs(spec)
    layers = {name: SimpleNamespace(get_attn_backend=lambda: _Backend) for name in specs}
    resolved = resolve_hisparse_specs(config, specs, layers)
    groups = get_hisparse_kv_cache_groups(config, resolved)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    per_block = _get_kv_cache_bytes_per_block([g for g in groups if not g.host_resident], layout)
    return get_hisparse_kv_cache_config(
        config, groups, per_block * spec.device_blocks, get_hisparse_host_pool_bytes(config)
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def init_ranks(rank: int, world_size: int, port: int) -> None:
    """VLLM's tensor-parallel group over gloo, once a process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo"
        )
        parallel_state.initialize_model_parallel(world_size)


@dataclass
class _Request:
    tokens: list[int]
    blocks: list[list[int]]
    state: int


class Worker:
    """One rank: vLLM's binding and connector worker around rows from model.py."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.hisparse.binding import init_hisparse_kv_cache

        self.spec = spec
        self.config = make_config(spec)
        self.cache_config = make_cache_config(spec, self.config)
        self.layers = layer_names(spec)
        self.drafts = self.layers[spec.num_layers :]
        self.context = self._attention_layers()
        self.config.compilation_config.static_forward_context = self.context
        groups = self.cache_config.kv_cache_groups
        pages = -(-spec.max_model_len // spec.block_size)
        self.tables = SimpleNamespace(
            input_block_tables=[
                torch.zeros((spec.max_num_seqs, self._table_width(group, pages)), dtype=torch.int32)
                for group in groups
            ],
            slot_mappings=[
                torch.full((spec.max_num_batched_tokens,), -1, dtype=torch.int64) for _ in groups
            ],
        )
        sizes = [group.kv_cache_spec.block_size for group in groups]
        self.caches = init_hisparse_kv_cache(
            self.cache_config, DEVICE, sizes, self.config, self.context, self.tables
        )
        self.connector = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.cache_config
        )
        self.connector.register_kv_caches(self.caches)
        self.requests: dict[str, _Request] = {}
        self.rows_checked = 0
        self.selected = 0

    @staticmethod
    def _table_width(group: Any, pages: int) -> int:
        return int(getattr(group.kv_cache_spec, "blocks_per_request", pages))

    def _attention_layers(self) -> dict[str, Any]:
        from vllm.v1.hisparse.runtime import create_hisparse_cache_handle

        context: dict[str, Any] = {}
        group = None
        for i, name in enumerate(self.layers):
            leads = name in self.drafts or i % self.spec.index_group_size == 0
            if leads:
                group = SimpleNamespace(
                    hisparse_group=None, side_stream=torch.Stream(),
                    logical_topk_ready=torch.Event(), has_indexer=True,
                )  # fmt: skip
            handle = create_hisparse_cache_handle(
                self.config, self.spec.top_k, is_index_group_leader=leads,
                row_width=656 if self.spec.fp8 else 576,
                kv_dtype=torch.uint8 if self.spec.fp8 else torch.bfloat16,
                index_group=group, device=DEVICE,
            )  # fmt: skip
            context[name] = SimpleNamespace(
                hisparse_cache=handle, is_draft_layer=name in self.drafts
            )
            if leads:
                leader = handle
            else:
                leader.index_group_caches.append(handle)
        return context

    def handle(self, layer: str) -> Any:
        return self.context[layer].hisparse_cache

    # --- a step -----------------------------------------------------------------------------

    def step(self, output: Any) -> tuple[dict[str, int], Any, Any]:
        """Run one step; returns (request to its new token, worker metadata, statistics)."""
        from vllm.forward_context import set_forward_context

        self._update_requests(output)
        order = list(output.num_scheduled_tokens)
        counts = [output.num_scheduled_tokens[request_id] for request_id in order]
        starts = self._starts(output)
        attention = self._attention_metadata(counts)
        self._fill_tables(order, counts, starts)
        states = torch.tensor([self.requests[r].state for r in order], dtype=torch.int32)
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        with set_forward_context(None, self.config):
            if order:
                self.connector.start_load_kv(
                    None, request_state_indices=states, request_ids=order,
                    attn_metadata=dict.fromkeys(self.layers, attention), num_tokens=sum(counts),
                )  # fmt: skip
                self._forward(order, counts, starts)
                self.connector.finish_forward()
                self._draft()
            else:
                self.connector.start_load_kv(None, num_tokens=0)
        statistics = self.connector.get_kv_connector_stats()
        metadata = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return self._sample(order, counts, starts), metadata, statistics

    def _update_requests(self, output: Any) -> None:
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            request = self.requests.get(request_id)
            if request is not None:
                request.state = -1
            if request_id in output.finished_req_ids:
                self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = _Request(
                # A request that was preempted comes again as a new one, its output included.
                list(new.prefill_token_ids or new.prompt_token_ids),
                [list(ids) for ids in new.block_ids],
                self._state(),
            )
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            request = self.requests[request_id]
            if request_id in cached.resumed_req_ids:
                request.blocks = [list(ids) for ids in blocks]
                request.state = self._state()
            elif blocks is not None:
                for held, more in zip(request.blocks, blocks, strict=True):
                    held.extend(more)

    def _state(self) -> int:
        used = {request.state for request in self.requests.values()}
        return next(i for i in range(self.spec.max_num_seqs) if i not in used)

    @staticmethod
    def _starts(output: Any) -> dict[str, int]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return starts

    @staticmethod
    def _attention_metadata(counts: Sequence[int]) -> Any:
        total = sum(counts)
        decode = all(count == 1 for count in counts)
        return SimpleNamespace(
            num_actual_tokens=total, num_decode_tokens=total if decode else 0,
            max_query_len=max(counts, default=0), num_reqs=len(counts),
            req_id_per_token=torch.tensor(
                [i for i, count in enumerate(counts) for _ in range(count)], dtype=torch.int32
            ),
        )  # fmt: skip

    def _fill_tables(
        self, order: Sequence[str], counts: Sequence[int], starts: dict[str, int]
    ) -> None:
        size = self.spec.block_size
        for group_id in range(len(self.cache_config.kv_cache_groups)):
            table = self.tables.input_block_tables[group_id]
            slots = self.tables.slot_mappings[group_id]
            table.zero_()
            slots.fill_(-1)
            at = 0
            for i, (request_id, count) in enumerate(zip(order, counts, strict=True)):
                blocks = self.requests[request_id].blocks[group_id]
                table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                for position in range(starts[request_id], starts[request_id] + count):
                    page, offset = divmod(position, size)
                    if page < len(blocks) and blocks[page]:
                        slots[at] = blocks[page] * size + offset
                    at += 1

    def _forward(self, order: Sequence[str], counts: Sequence[int], starts: dict[str, int]) -> None:
        digests = {r: model.prefix_digests(self.requests[r].tokens) for r in order}
        written = [
            (request_id, position)
            for request_id, count in zip(order, counts, strict=True)
            for position in range(starts[request_id], starts[request_id] + count)
        ]
        before = {request_id: starts[request_id] - 1 for request_id in order}
        for layer in self.drafts:
            self._check_context(layer, order, before, [1] * len(order), digests)
        self._write_index_keys(written, digests, drafts=False)
        for layer in self.layers[: self.spec.num_layers]:
            self._write_rows(layer, written, digests)
            self._check_context(layer, order, starts, counts, digests)
            if all(count == 1 for count in counts):
                self._check_selection(layer, order, starts, digests)
            self.handle(layer).finish_kv_update()
        self._drafted = (written, digests)

    def _draft(self) -> None:
        """The drafter runs after the forward, and after its mirrors were enqueued."""
        written, digests = self._drafted
        for layer in self.drafts:
            self._write_rows(layer, written, digests, is_draft=True)
        self._write_index_keys(written, digests, drafts=True)

    def _write_rows(
        self, layer: str, written: Any, digests: Any, *, is_draft: bool = False
    ) -> None:
        size, handle = self.spec.block_size, self.handle(layer)
        if is_draft:
            cache, slots = handle.view.cache, handle.slot_mapping[: len(written)]
        else:
            cache, slots, num_rows = handle.write_target(len(written), len(written))
            written = written[:num_rows]
        for (request_id, position), slot in zip(written, slots.tolist(), strict=True):
            assert slot >= 0, (layer, request_id, position)
            cache[slot // size, slot % size] = model.row(
                layer, digests[request_id][position], cache
            )

    def _write_index_keys(self, written: Any, digests: Any, *, drafts: bool) -> None:
        group_id = 1
        size = self.spec.block_size
        for name in self.cache_config.kv_cache_groups[group_id].layer_names:
            if name.startswith("draft") != drafts:
                continue
            cache = self.caches[name]
            flat = cache.view(cache.shape[0], -1, cache.shape[-1])
            for request_id, position in written:
                page, offset = divmod(position, size)
                block = self.requests[request_id].blocks[group_id][page]
                flat[block, offset] = model.row(name, digests[request_id][position], flat)

    def _check_context(
        self, layer: str, order: Any, starts: Any, counts: Any, digests: Any
    ) -> None:
        """Read rows of the context as attention would: resident ones, else the host's."""
        size = self.spec.block_size
        handle = self.handle(layer)
        host = handle.runtime.host_cache
        for i, request_id in enumerate(order):
            state = self.requests[request_id].state
            end = starts[request_id] + counts[i]
            for position in {0, end // 2, max(end - counts[i] - 1, 0), end - 1}:
                if end == 0:
                    continue  # a drafter that has not run yet
                page, offset = divmod(position, size)
                resident = int(handle.residency[handle.runtime.resident_source_index][state, page])
                if resident:
                    found = handle.view.cache[resident, offset]
                else:
                    block = int(handle.source_block_table[i, page])
                    assert block, (layer, request_id, position)
                    found = host[block * size + offset]
                expected = model.row(layer, digests[request_id][position], found)
                assert model.same(found, expected), (layer, request_id, position, resident)
                self.rows_checked += 1
        if layer in self.layers[: self.spec.num_layers]:
            self._check_index_keys(order, starts, counts, digests)

    def _check_selection(self, layer: str, order: Any, starts: Any, digests: Any) -> None:
        """Top-k through vLLM's runtime, as attention asks for it: the rows must be the tokens'."""
        handle, top_k = self.handle(layer), self.spec.top_k
        leader = handle.runtime.index_group.leader
        positions = torch.full((len(order), top_k), -1, dtype=torch.int32)
        for i, request_id in enumerate(order):
            length = starts[request_id] + 1
            chosen = sorted(
                {(starts[request_id] * 7 + lane * 13) % length for lane in range(top_k)}
            )
            positions[i, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        assert leader is handle.runtime or handle.runtime in leader.index_group.followers
        physical, valid = handle.swap_in(
            torch.arange(len(order), dtype=torch.int32),
            handle.source_block_table, positions, block_size=self.spec.block_size,
            num_valid_rows=torch.tensor(len(order)), return_valid_counts=True,
        )  # fmt: skip
        rows = handle.runtime.hot.attention_cache.view(-1, handle.runtime.row_width)
        for i, request_id in enumerate(order):
            wanted = positions[i].tolist()
            assert int(valid[i]) == sum(position >= 0 for position in wanted)
            for lane, position in enumerate(wanted):
                at = int(physical[i, lane])
                if position < 0:
                    assert at == -1
                    continue
                expected = model.row(layer, digests[request_id][position], rows)
                assert model.same(rows[at], expected), (layer, request_id, position, at)
                self.selected += 1

    def _check_index_keys(self, order: Any, starts: Any, counts: Any, digests: Any) -> None:
        group_id, size = 1, self.spec.block_size
        for name in self.cache_config.kv_cache_groups[group_id].layer_names:
            cache = self.caches[name]
            flat = cache.view(cache.shape[0], -1, cache.shape[-1])
            for i, request_id in enumerate(order):
                end = starts[request_id] + (0 if name.startswith("draft") else counts[i])
                for position in {0, end // 2, end - 1} if end else ():
                    block = self.requests[request_id].blocks[group_id][position // size]
                    found = flat[block, position % size]
                    expected = model.row(name, digests[request_id][position], found)
                    assert model.same(found, expected), (name, request_id, position)

    def _sample(self, order: Any, counts: Any, starts: Any) -> dict[str, int]:
        sampled = {}
        for request_id, count in zip(order, counts, strict=True):
            request = self.requests[request_id]
            if starts[request_id] + count == len(request.tokens):
                sampled[request_id] = model.next_token(request.tokens)
                request.tokens.append(sampled[request_id])
        return sampled

    def shutdown(self) -> None:
        self.connector.shutdown()


class Engine:
    """A scheduler with its ranks; rank 0 lives in this process."""

    def __init__(self, spec: EngineSpec, *, peers: Sequence[Any] = ()) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
        )
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.spec = spec
        self.peers = peers
        self.worker = Worker(spec)
        for peer in peers:
            assert peer.recv() == "ready"
        config = self.config = self.worker.config
        config.cache_config.num_gpu_blocks = self.worker.cache_config.num_blocks
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(spec.block_size, hash_function)
        self.scheduler = (AsyncScheduler if spec.async_scheduling else Scheduler)(
            config,
            generate_scheduler_kv_cache_config([self.worker.cache_config]),
            StructuredOutputManager(config),
            spec.block_size,
            spec.block_size,
            log_stats=True,
        )
        self.is_shut_down = False
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self.statistics: list[dict[str, Any]] = []
        self.outputs: dict[str, list[int]] = {}
        self.cached_tokens: dict[str, int] = {}

    @property
    def connector(self) -> Any:
        """The HiSparse connector of the scheduler."""
        connector = self.scheduler.connector
        return connector.sub_connectors[0] if self.spec.below_multi else connector

    @property
    def host_pool(self) -> Any:
        return self.connector.connector_scheduler.coordinator.get_host_block_pool()

    def add(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 4) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.scheduler.add_request(
            Request(request_id, list(prompt), parameters, None, block_hasher=self.hasher)
        )
        self.outputs[request_id] = []

    def step(self) -> Any:
        """One step of vLLM's loop."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        for peer in self.peers:
            peer.send(output)
        for new in output.scheduled_new_reqs:
            self.cached_tokens.setdefault(new.req_id, new.num_computed_tokens)
        sampled, *parts = self.worker.step(output)
        for peer in self.peers:
            theirs, *more = peer.recv()
            assert theirs == sampled
            parts = [
                mine.aggregate(other) if mine and other else mine or other
                for mine, other in zip(parts, more, strict=True)
            ]
        metadata, statistics = parts
        order = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=order, req_id_to_index={r: i for i, r in enumerate(order)},
            sampled_token_ids=[[sampled[r]] if r in sampled else [] for r in order],
            kv_connector_output=KVConnectorOutput(
                kv_connector_worker_meta=metadata, kv_connector_stats=statistics
            ),
        )  # fmt: skip
        for request_id, token in sampled.items():
            self.outputs[request_id].append(token)
        self._in_flight.append((output, result))
        if not self.spec.async_scheduling or len(self._in_flight) > 1 or not order:
            self._take_in()
        return output

    def _take_in(self) -> None:
        outputs = self.scheduler.update_from_output(*self._in_flight.popleft())
        for one in outputs.values():
            stats = one.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.statistics.append(stats.kv_connector_stats)

    def run(self, *, timeout_s: float = 60.0) -> None:
        """Until nothing is left to do, the pages' transfers included."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._in_flight and not self.scheduler.has_unfinished_requests():
                self._take_in()
                continue
            if not self.scheduler.has_requests() and not self.connector.has_pending_push_work():
                return
            self.step()
        raise AssertionError(f"not done after {timeout_s} s: {self.scheduler.requests}")

    def generate(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 4) -> list[int]:
        self.add(request_id, prompt, max_tokens=max_tokens)
        self.run()
        return self.outputs[request_id]

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.scheduler.shutdown()
        self.worker.shutdown()
        for peer in self.peers:
            peer.send(None)


def expected_tokens(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What any engine must answer."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(model.next_token(tokens))
    return tokens[len(prompt) :]
