"""Our four functions beside vLLM's own, on generated configurations and generated damage.

Both get the same objects of vLLM. Compared are names and their order, shapes, strides, storage
offsets, dtypes and sizes of all tensors, what handles and runtimes are bound to, and errors.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch

CASES = int(os.environ.get("CONFORMANCE_CASES", "600"))
SEED = int(os.environ.get("CONFORMANCE_SEED", "20261201"))
DAMAGE = ("two_sizes", "two_hosts", "suffix", "host_hot", "source", "strides", "handle", "no_hot",
          "unregistered")  # fmt: skip
FEATURES = {
    "torch.uint8", "torch.bfloat16", "1 layers", "78 layers", "1 host tensors", "2 host tensors",
    "0 drafts", "1 drafts", "2 drafts", "index groups of 1", "index groups of 4",
    *(f"blocks of {size}" for size in (16, 32, 64, 128)),
}  # fmt: skip
"""What the generated cases that go through must have among them."""
CPU = torch.device("cpu")


class Pool:
    """A host pool with the attributes that both use."""

    def __init__(self) -> None:
        self.shared_region = Namespace(cleanup=lambda: None)
        self.backing: Any = None
        self.registered: Any = None

    def allocate(self, size: int) -> torch.Tensor:
        self.registered = torch.zeros(size + 4096, dtype=torch.int8)
        self.backing = self.registered[:size]
        return self.backing


def description(tensor: torch.Tensor) -> tuple:
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )  # fmt: skip


class Case:
    """One generated configuration."""

    def __init__(self, generator: random.Random) -> None:
        from vllm.v1.attention.backend import MultipleOf
        from vllm.v1.kv_cache_layout import KVCacheLayout

        self.generator = generator
        self.layout = generator.choice([KVCacheLayout.BLNHC, KVCacheLayout.BLHNC])
        self.block_size = generator.choice([16, 32, 64, 128])
        self.num_drafts = generator.choice([0, 0, 1, 2])
        num_layers = generator.choice([1, 78, *[generator.randint(2, 77)] * 6])
        self.names = [f"layer.{i}" for i in range(num_layers)]
        self.names += [f"draft.{i}" for i in range(self.num_drafts)]
        self.specs = self._specs()
        sizes = generator.choice([[MultipleOf(16)], [16], [64, 32]])
        more = generator.choice([[MultipleOf(1)], [32, 16]])
        self.layers = {
            name: _attention_layer(_backend(more if "idx" in name else sizes))
            for name in self.specs
        }
        self.config = self._config()
        self.damage = generator.choice([*[""] * 20, *DAMAGE])

    def _specs(self) -> dict[str, Any]:
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

        g = self.generator
        group, fp8, top_k = g.choice([1, 4]), g.random() < 0.5, g.choice([None, 64])
        self.group_size = group
        mixed = self.num_drafts and g.random() < 0.4
        specs: dict[str, Any] = {}
        for i, name in enumerate(self.names):
            is_draft = name.startswith("draft")
            row_fp8 = fp8 ^ bool(mixed and is_draft)
            leads = is_draft or i % group == 0
            specs[name] = MLAAttentionSpec(
                block_size=self.block_size, num_kv_heads=1, head_size=576,
                dtype=torch.uint8 if row_fp8 else torch.bfloat16,
                state_content_bytes=656 if row_fp8 else None,
                cache_dtype_str="fp8_ds_mla" if row_fp8 else None,
                is_index_group_leader=leads, topk_buffer_width=top_k,
            )  # fmt: skip
            if leads and g.random() < 0.97:
                specs[f"{name}.idx"] = MLAAttentionSpec(
                    block_size=self.block_size, num_kv_heads=1, head_size=132, dtype=torch.uint8,
                    cache_role=SparseCacheRole.INDEXER,
                    state_content_bytes=g.choice([132, 132, 132, 2000]),
                )  # fmt: skip
        if g.random() < 0.03:
            last = next(reversed(specs))
            specs[last] = dataclasses.replace(specs[last], block_size=self.block_size * 2)
        return specs

    def _config(self) -> Any:
        g = self.generator
        speculative = g.random() < 0.3
        return Namespace(
            attention_config=Namespace(
                hisparse_config=Namespace(
                    device_buffer_size=g.choice([*[None] * 9, 192, 63]), eager_host_mirror=True
                )
            ),
            model_config=Namespace(
                hf_config=Namespace(index_topk=64), max_model_len=g.choice([100, 700])
            ),
            speculative_config=Namespace(num_speculative_tokens=1, parallel_drafting=False)
            if speculative
            else None,
            parallel_config=Namespace(tensor_parallel_size=1),
            kv_transfer_config=None,
            cache_config=Namespace(
                get_resolved_kv_cache_layout=lambda: self.layout,
                prefix_cache_retention_interval=None, num_gpu_blocks_override=None,
            ),
            scheduler_config=Namespace(max_num_seqs=3, max_num_batched_tokens=17),
            instance_id="generated",
        )  # fmt: skip

    def cache_config(self, resolved: dict[str, Any]) -> tuple[Any, list[int]]:
        from vllm.v1.core.kv_cache_planning import _get_kv_cache_bytes_per_block
        from vllm.v1.hisparse import layout as theirs

        from worker_client import layout as ours

        g = self.generator
        groups = theirs.get_hisparse_kv_cache_groups(self.config, dict(resolved))
        mine = ours.get_hisparse_kv_cache_groups(self.config, dict(resolved))
        assert [_group(x) for x in groups] == [_group(x) for x in mine]
        device = [group for group in groups if not group.host_resident]
        per_block = _get_kv_cache_bytes_per_block(device, self.layout)
        source = groups[0].kv_cache_spec
        pages = -(-self.config.model_config.max_model_len // source.block_size) + 2
        config = theirs.get_hisparse_kv_cache_config(
            self.config, groups, per_block * g.randint(2, 4), pages * source.page_size_bytes
        )
        sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        if g.random() < 0.3:
            sizes[0] = g.choice([8, 4, sizes[0], 7])
        return config, sizes

    def features(self, config: Any) -> set[str]:
        """What of all that must be covered this case has."""
        hosts = sum(tensor.host_resident for tensor in config.kv_cache_tensors)
        formats = {str(self.specs[name].dtype) for name in self.names}
        return formats | {
            f"blocks of {self.block_size}", f"index groups of {self.group_size}",
            f"{hosts} host tensors", f"{self.num_drafts} drafts", str(self.layout),
            f"{len(self.names) - self.num_drafts} layers",
        }  # fmt: skip

    def context(self) -> dict[str, Any]:
        """Attention layers with unbound handles of vLLM."""
        from vllm.v1.hisparse.runtime import HiSparseCacheHandle, HiSparseRuntime

        layers = {}
        for name in self.names:
            runtime = HiSparseRuntime.__new__(HiSparseRuntime)
            spec = self.specs[name]
            runtime.kv_dtype = spec.dtype
            runtime.row_width = spec.state_content_size_bytes // spec.dtype.itemsize
            runtime.resident_source_index = -1
            runtime.shared_host_region = None
            layers[name] = Namespace(
                hisparse_cache=HiSparseCacheHandle(runtime), is_draft_layer=name.startswith("draft")
            )
        return layers

    def tables(self, config: Any) -> Any:
        return Namespace(
            input_block_tables=[
                torch.zeros(
                    (3, getattr(group.kv_cache_spec, "blocks_per_request", 9)), dtype=torch.int32
                )
                for group in config.kv_cache_groups
            ],
            slot_mappings=[torch.zeros(17, dtype=torch.int64) for _ in config.kv_cache_groups],
        )


def _attention_layer(backend: type) -> Namespace:
    return Namespace(get_attn_backend=lambda: backend)


def _group(group: Any) -> tuple:
    spec = group.kv_cache_spec
    return (
        list(group.layer_names), group.host_resident, type(spec).__name__, spec.block_size,
        spec.page_size_bytes, getattr(spec, "blocks_per_request", None),
    )  # fmt: skip


def _backend(sizes: list[Any]) -> type:
    class Backend:
        get_name = staticmethod(lambda: f"backend of {sizes}")
        get_supported_kernel_block_sizes = staticmethod(lambda _spec=None: sizes)

    return Backend


class Errors(Counter):
    """Errors that both raised, by kind."""


def both(theirs, ours, errors: Errors) -> tuple[Any, Any] | None:
    """Run both; None where both raised fitting errors."""
    results: list[Any] = []
    for function in (theirs, ours):
        try:
            results.append(("value", function()))
        except Exception as error:
            results.append(("error", error))
    (their_kind, their_result), (our_kind, our_result) = results
    if their_kind == our_kind == "value":
        return their_result, our_result
    assert their_kind == our_kind, (their_result, our_result)
    assert isinstance(our_result, type(their_result)), (their_result, our_result)
    errors[type(their_result).__name__] += 1
    return None


def damage_after_layout(case: Case, config: Any) -> None:
    if case.damage == "two_sizes":
        config.kv_cache_tensors[0].size += 4096
    if case.damage == "two_hosts":
        config.kv_cache_groups[1].host_resident = True


def damage_before_binding(case: Case, config: Any, sides: list[Any]) -> None:
    if case.damage == "suffix":
        config.kv_cache_groups[2].layer_names[0] += "x"
    if case.damage == "host_hot":
        config.kv_cache_tensors[-1].host_resident = True
    if case.damage == "strides":
        config.kv_cache_tensors[-1].offset += 16
        config.num_blocks -= 1
    if case.damage == "no_hot":
        config.kv_cache_groups = [
            g for g in config.kv_cache_groups if "Hot" not in type(g.kv_cache_spec).__name__
        ]
    for caches, context, pool in sides:
        if case.damage == "source":
            caches["layer.0"] = caches["layer.0"].clone()
        if case.damage == "handle":
            context["layer.0"].hisparse_cache = None
        if case.damage == "unregistered":
            pool.registered = None


def bound(handle: Any) -> tuple:
    """All that a handle and its runtime were bound to."""
    runtime = handle.runtime
    return (
        description(handle.view.cache), description(handle.view.attention_cache),
        handle.view.block_size, handle.view.attention_block_stride,
        description(runtime.hot.cache), description(runtime.hot.attention_cache),
        description(runtime.host_cache), description(handle.residency),
        description(handle.block_table), handle.draft_layer, runtime.resident_source_index,
        id(handle.slot_mapping), id(handle.source_block_table), id(handle.mirror_slot_mapping),
        id(runtime.hot_block_table),
    )  # fmt: skip


def check_case(generator: random.Random, errors: Errors) -> set[str]:
    """One case; what it covers when it went through the binding, else nothing."""
    from vllm.v1.hisparse import binding as theirs

    from worker_client import binding as ours

    case = Case(generator)
    result = both(
        lambda: theirs.resolve_hisparse_specs(case.config, dict(case.specs), case.layers),
        lambda: ours.resolve_hisparse_specs(case.config, dict(case.specs), case.layers),
        errors,
    )
    if result is None:
        return set()
    assert list(result[0]) == list(result[1])
    assert result[0] == result[1]
    config, sizes = case.cache_config(result[0])
    damage_after_layout(case, config)
    pools = (Pool(), Pool())
    before = repr(config)
    result = both(
        lambda: theirs.allocate_hisparse_kv_caches(config, CPU, case.layout, sizes, pools[0]),
        lambda: ours.allocate_hisparse_kv_caches(config, CPU, case.layout, sizes, pools[1]),
        errors,
    )
    assert repr(config) == before
    if result is None:
        return set()
    assert list(result[0]) == list(result[1])
    for name in result[0]:
        assert description(result[0][name]) == description(result[1][name]), name
    is_bound = check_binding(case, config, result, pools, errors)
    return case.features(config) if is_bound else set()


def check_binding(
    case: Case, config: Any, caches: tuple[Any, Any], pools: tuple[Pool, Pool], errors: Errors
) -> bool:
    """Bind what both allocated; True when it went through."""
    from vllm.v1.hisparse import binding as theirs

    from worker_client import binding as ours

    contexts = (case.context(), case.context())
    damage_before_binding(case, config, list(zip(caches, contexts, pools, strict=True)))
    tables = case.tables(config)
    handles = both(
        *(
            lambda module=module, at=at: module.bind_hisparse_kv_caches(
                forward_context=contexts[at], kv_cache_config=config, kv_caches=caches[at],
                block_tables=tables, host_pool=pools[at],
            )
            for at, module in enumerate((theirs, ours))
        ),
        errors,
    )  # fmt: skip
    if handles is None:
        return False
    assert list(caches[0]) == list(caches[1])
    assert [description(t) for t in caches[0].values()] == [
        description(t) for t in caches[1].values()
    ]
    assert len(handles[0]) == len(handles[1])
    for mine, yours in zip(*handles, strict=True):
        assert bound(mine) == bound(yours)
    return True


@pytest.mark.timeout(600)
def test_generated_configurations_and_damage(vllm):
    errors = Errors()
    bound: set[str] = set()
    num_bound = 0
    for number in range(CASES):
        generator = random.Random(SEED * 1_000_003 + number)
        try:
            features = check_case(generator, errors)
        except BaseException as error:
            error.add_note(f"CONFORMANCE_SEED={SEED}, case {number}")
            raise
        num_bound += bool(features)
        bound |= features
    assert num_bound > CASES // 3
    assert {"ValueError", "AssertionError", "RuntimeError"} <= set(errors)
    assert bound >= FEATURES, FEATURES - bound


def _good_case() -> tuple[Case, Any, list[int]]:
    """The first generated case that goes through undamaged."""
    from vllm.v1.hisparse import binding as theirs

    for number in range(1000):
        case = Case(random.Random(SEED + number))
        try:
            resolved = theirs.resolve_hisparse_specs(case.config, dict(case.specs), case.layers)
            config, _ = case.cache_config(resolved)
        except (ValueError, AssertionError):
            continue
        return case, config, [g.kv_cache_spec.block_size for g in config.kv_cache_groups]
    raise AssertionError("no good case")


@pytest.mark.parametrize("fails_at", ["", "allocate", "bind"])
def test_init_makes_binds_and_cleans_up_as_vllms_does(vllm, monkeypatch, fails_at):
    from vllm.v1.hisparse import binding as theirs

    from worker_client import binding as ours

    case, config, sizes = _good_case()
    tables = case.tables(config)

    def run(init) -> tuple[list[str], Any]:
        log: list[str] = []

        class CountingPool(Pool):
            def allocate(self, size: int) -> torch.Tensor:
                log.append("allocate")
                if fails_at == "allocate":
                    raise RuntimeError("injected")
                return super().allocate(size)

        def make(*_: Any) -> Pool:
            log.append("make")
            pool = CountingPool()
            pool.shared_region.cleanup = lambda: log.append("cleanup")
            return pool

        context = case.context()
        if fails_at == "bind":
            context[case.names[0]].hisparse_cache = None
        monkeypatch.setattr(theirs, "get_hisparse_host_pool", make)
        case.config.host_pool_factory = make
        try:
            caches = init(config, CPU, sizes, case.config, context, tables)
        except (RuntimeError, AssertionError) as error:
            return log, type(error)
        states = {id(x.hisparse_cache.runtime.request_state_indices) for x in context.values()}
        return log, (list(caches), [description(t) for t in caches.values()], len(states))

    (their_log, their_result), (our_log, our_result) = (
        run(module.init_hisparse_kv_cache) for module in (theirs, ours)
    )
    assert our_log == their_log
    if fails_at:
        assert their_log[-1] == "cleanup"
        assert issubclass(our_result, their_result)
    else:
        assert our_result == their_result
