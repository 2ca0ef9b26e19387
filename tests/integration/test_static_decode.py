"""Decode steps of one shape: the same tokens, host rows that the steps copied, nothing to wait for.

What is tested here is what a CUDA graph replays; the replay itself is in tests/gpu.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from glm_models import make_model
from test_transformers_tiers import (
    BLOCK,
    NEW_TOKENS,
    assert_exact,
    assert_under_pressure,
    daemon,
    engines,
    prompts,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse_service.contract.errors import ConfigError, UsageError
from hisparse_service.contract.segment import BlockState
from worker_client.integrations.transformers import Batch, DecodeMode, StepMode, TieredModel
from worker_client.integrations.transformers_steps import StaticInputs

__all__ = ["daemon", "engines"]

WAITS_FOR_THE_DEVICE = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount",
    "lift_fresh", "tensor", "equal", "_assert_async", "allclose",
}  # fmt: skip
"""Operators that read a value back, or have shapes that depend on values, or read host memory."""


def rows_of_published_blocks(engine):
    """Host rows of every published block that rank 0 mirrored: the wrong ones, and all."""
    writer = engine.witnesses[0]
    pool = engine.generators[0].host_pool
    wrong = checked = 0
    for block, (request, page) in writer.pages.items():
        if int(pool.table["state"][block]) != int(BlockState.PUBLISHED):
            continue
        for layer in range(pool.geometry.num_layers):
            for row in range(BLOCK):
                expected = writer.rows[request, layer, page * BLOCK + row]
                wrong += not torch.equal(pool.layer_view(layer)[block, row], expected)
                checked += 1
    return wrong, checked


def test_a_static_step_gives_the_tokens_and_logits_of_a_dynamic_one(daemon, engines):
    """Requests come and go, so that there are more and less padding rows in the batch."""
    dynamic = engines(daemon, ranks=1)
    dynamic.run(prompts())
    dynamic.close()
    static = engines(daemon, decode=DecodeMode.STATIC)
    shorter = {name: prompt[1:] for name, prompt in prompts().items()}  # no prefix is found
    static.run(shorter)
    assert_exact(static, shorter)
    assert_under_pressure(static)
    static.close()
    again = engines(daemon, ranks=1, decode=DecodeMode.STATIC, before=dynamic)
    again.run(prompts())
    for name in prompts():
        ours, theirs = again.tokens[0][name], dynamic.tokens[0][name]
        assert [token.token for token in ours] == [token.token for token in theirs]
        logits = [torch.stack([token.logits for token in each]) for each in (ours, theirs)]
        assert (logits[0] - logits[1]).abs().max() <= 1e-5


def test_i2_host_rows_are_those_that_static_steps_wrote_on_the_device(daemon, engines):
    """Also of pages that a prefill began and decode steps filled."""
    engine = engines(daemon, decode=DecodeMode.STATIC)
    engine.run(prompts())
    writer, reader = engine.generators
    assert writer.statistics.mirrored_rows >= 3 * (NEW_TOKENS - 2)
    assert reader.statistics.mirrored_rows == 0
    wrong, checked = rows_of_published_blocks(engine)
    assert wrong == 0
    assert checked > 0
    assert [witness.wrong for witness in engine.witnesses] == [0, 0]


def test_rows_that_a_static_step_mirrors_wrongly_are_found(daemon, engines, monkeypatch):
    """What the test above relies on: one host slot is another row's."""
    engine = engines(daemon, ranks=1, decode=DecodeMode.STATIC)
    real = TieredModel._mirror_step

    def shifted(self, host_slots):
        real(self, torch.where(host_slots % BLOCK == 3, host_slots - 1, host_slots))

    monkeypatch.setattr(TieredModel, "_mirror_step", shifted)
    engine.run(prompts())
    assert rows_of_published_blocks(engine)[0] > 0


def test_rows_in_blocks_that_a_daemon_lost_are_mirrored_again(daemon, engines, make_daemon):
    engine = engines(daemon, ranks=2, decode=DecodeMode.STATIC)
    for name, prompt in prompts().items():
        engine.add(name, prompt)
    while len(engine.tokens[0].get("r1", ())) < 2:
        engine.step()
    daemon.kill()
    before = len(engine.tokens[0]["r0"])
    while len(engine.tokens[0]["r0"]) < before + 3:
        engine.step()
    make_daemon(daemon.directory, instance=daemon.instance, pool_bytes="8MiB").wait_ready()
    while engine.generators[0].num_requests:
        engine.step()
    engine.generators[0].drain()
    assert_exact(engine, prompts())
    assert rows_of_published_blocks(engine)[0] == 0
    assert [witness.wrong for witness in engine.witnesses] == [0, 0]


def test_a_step_of_padding_changes_nothing(daemon, engines):
    engine = engines(daemon, ranks=1, decode=DecodeMode.STATIC)
    engine.add("r0", prompts()["r0"])
    while len(engine.tokens[0].get("r0", ())) < 5:
        engine.step()
    tiers, pool = engine.generators[0].tiers, engine.generators[0].host_pool

    def everything():
        kept = [runtime.hot_backing for runtime in (tiers.index_groups[0].leader,)]
        kept += list(tiers._indexer.caches) + list(tiers.tables.input_block_tables) + [pool.backing]
        for group in tiers.index_groups:
            state = group.state
            kept += [state.host_rows, state.last_use, state.clock, state.counters]
        return [tensor.clone() for tensor in kept]

    before = everything()
    tiers._static.inputs.clear()
    tiers._static()
    for old, new in zip(before, everything(), strict=True):
        assert torch.equal(old, new)


class Operators(TorchDispatchMode):
    """Names of all operators, and of those whose operands are masks."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.names.add(name)
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.names.add("nonzero")
        return func(*args, **(kwargs or {}))


class NoKernels:
    """In place of the kernels, which launch and do no more."""

    def resolve(self, **_):
        pass

    def gather(self, **_):
        pass

    def mirror_rows(self, **_):
        pass


def operators_of_a_step(tiers):
    for group in tiers.index_groups:
        group.backend = NoKernels()
    with torch.no_grad(), Operators() as seen:
        tiers._static()
    return seen.names


def test_a_static_step_has_no_operator_that_waits_for_the_device(daemon, engines):
    """Every one of them would end a capture."""
    engine = engines(daemon, ranks=1, decode=DecodeMode.STATIC)
    engine.run(prompts(1))
    tiers = engine.generators[0].tiers
    tiers.model.config._experts_implementation = "batched_mm"
    names = operators_of_a_step(tiers)
    assert {"topk", "index_put_"} <= names
    assert not names & WAITS_FOR_THE_DEVICE
    tiers.model.config._experts_implementation = "eager"
    assert names != operators_of_a_step(tiers)
    assert "nonzero" in operators_of_a_step(tiers)  # so they are seen


def test_a_step_cannot_be_captured_without_a_cuda_device(daemon, engines):
    engine = engines(daemon, ranks=1)
    pool, sizes = engine.generators[0].host_pool, engine.generators[0].tiers.sizes
    model = make_model()
    with pytest.raises(ConfigError, match="CUDA graphs"):
        TieredModel(model, pool, sizes, decode=DecodeMode.GRAPH)
    assert type(model.model.layers[0].self_attn).__name__ == "GlmMoeDsaAttention"


def test_a_static_step_refuses_what_does_not_fit_it():
    inputs = StaticInputs(max_num_requests=2, context=16, device=torch.device("cpu"), mirrors=False)
    three = Batch(
        mode=StepMode.DECODE, request_ids=("a", "b", "c"), request_slots=(0, 1, 2),
        starts=(4, 4, 4), tokens=((1,), (1,), (1,)),
    )  # fmt: skip
    with pytest.raises(UsageError, match="up to 2"):
        inputs.set(three)
    chunk = Batch(
        mode=StepMode.PREFILL, request_ids=("a",), request_slots=(0,), starts=(0,), tokens=((1, 2),)
    )
    with pytest.raises(UsageError, match="prefill"):
        inputs.set(chunk)
    one = Batch(
        mode=StepMode.DECODE, request_ids=("a",), request_slots=(1,), starts=(4,), tokens=((7,),),
        host_slots=(9,),
    )  # fmt: skip
    with pytest.raises(UsageError, match="without mirrors"):
        inputs.set(one)
    mirroring = StaticInputs(
        max_num_requests=2, context=16, device=torch.device("cpu"), mirrors=True
    )
    mirroring.set(one)
    step = mirroring.step()
    assert step.tokens.tolist() == [[7], [0]]
    assert step.positions.tolist() == [[4], [-1]]
    assert step.slots.tolist() == [1, -1]
    assert step.host_slots.tolist() == [9, -1]
    assert np.array_equal(step.causal[:, 0, 0].sum(dim=-1), [5, 0])
