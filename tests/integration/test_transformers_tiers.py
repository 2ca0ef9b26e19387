"""A real model over a real daemon: tokens and logits are those of the model's own cache.

The tiers are a fraction of the contexts, so that pages are spilled, rows missed, hot rows evicted
and pages restored in every run; each test that compares tokens also looks that they were.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from glm_models import make_model, reference
from helpers import wait_until

import worker_client
from hisparse_service.contract.errors import ConfigError, LeaseError, UsageError, WriterTaken
from hisparse_service.contract.geometry import HostLayout
from hisparse_service.contract.segment import BlockState
from worker_client.client import CudaUse
from worker_client.coordinator import Role
from worker_client.integrations.demo_audit import ChoiceCheck
from worker_client.integrations.generation import Generator, GeneratorOptions
from worker_client.integrations.transformers import (
    Batch,
    ModelShape,
    StepMode,
    TieredAttention,
    TieredModel,
    TierSizes,
)

BLOCK = 8
NEW_TOKENS = 16
LENGTHS = (210, 250, 290)
HOST_BLOCKS = 140
_groups = itertools.count(1)


def prompts(count=3):
    """Byte strings that begin alike and do not repeat themselves."""
    random = np.random.default_rng(7)
    shared = random.integers(0, 256, 64).tolist()
    return {
        f"r{index}": shared + random.integers(0, 256, LENGTHS[index] - 64).tolist()
        for index in range(count)
    }


class Witness:
    """Notes choices and what was read from the host; compares rows with what was computed."""

    def __init__(self, shape, others=None):
        self.shape = shape
        self.choices = {}
        self.rows = {} if others is None else others.rows
        self.pages = {} if others is None else others.pages
        self.reads = 0
        self.wrong = 0
        self.states = set()
        self.pool = None

    def computed(self, layer, request_id, positions, rows):
        for position, row in zip(positions.tolist(), rows, strict=True):
            self.rows[request_id, layer, position] = row.clone().view(torch.uint8)

    def selected(self, group, request_id, positions, top_k):
        shape = (len(self.shape.index_groups), 512, self.shape.top_k)
        own = self.choices.setdefault(request_id, np.full(shape, -1, np.int16))
        own[group, positions.numpy(), : top_k.shape[1]] = top_k.numpy()

    def mirrored(self, request_id, page, host_block):
        self.pages[host_block] = (request_id, page)

    def ended(self, request_id):
        pass

    def read_from_host(self, layer, host_slots, rows):
        for slot, row in zip(host_slots.tolist(), rows, strict=True):
            block, offset = divmod(slot, BLOCK)
            self.states.add(int(self.pool.table["state"][block]))
            request_id, page = self.pages[block]
            expected = self.rows[request_id, layer, page * BLOCK + offset]
            self.reads += 1
            self.wrong += not torch.equal(expected, row)


class Engine:
    """A tensor-parallel group: one generator a rank, each with a connection of its own."""

    def __init__(
        self, daemon, *, ranks=2, layout=HostLayout.GROUP_INTERLEAVED, before=None, **opts
    ):
        self.group = f"engine-{next(_groups)}"
        sizes = TierSizes(
            block_size=BLOCK, num_device_blocks=opts.pop("num_device_blocks", 196),
            max_num_requests=4, max_model_tokens=312, max_step_tokens=40, host_layout=layout,
        )  # fmt: skip
        self.clients = [
            worker_client.connect(
                str(daemon.runtime_dir), client_name="test", group=self.group, rank=rank,
                world_size=ranks,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.witnesses, self.generators = [], []
        for rank, client in enumerate(self.clients):
            client.wait_ready(timeout_s=30)
            model = make_model()
            shape = ModelShape.of(model.config, torch.float32)
            namespace = client.open_namespace(
                model="tiny", kv_dtype="float32",
                geometry=shape.host_geometry(block_size=BLOCK, layout=layout),
            )  # fmt: skip
            first = before.witnesses[0] if before else None
            witness = Witness(shape, self.witnesses[0] if rank else first)
            options = GeneratorOptions(
                role=Role.READER if rank else Role.WRITER, num_host_blocks=HOST_BLOCKS,
                cuda=CudaUse.OFF, audit=witness, **opts,
            )  # fmt: skip
            self.generators.append(Generator(model, namespace, sizes, options))
            witness.pool = self.generators[-1].host_pool
            self.witnesses.append(witness)
        self.tokens = [{} for _ in self.clients]
        self.hits = {}

    def add(self, name, prompt, new_tokens=NEW_TOKENS):
        hit = None
        for generator in self.generators:
            admission = generator.add(name, prompt, max_new_tokens=new_tokens, num_hit_tokens=hit)
            hit = admission.num_hit_tokens
        self.hits[name] = hit

    def step(self):
        for generator, tokens in zip(self.generators, self.tokens, strict=True):
            for token in generator.step():
                tokens.setdefault(token.request_id, []).append(token)
            generator.coordinator.check_accounting()

    def run(self, requests):
        for name, prompt in requests.items():
            self.add(name, prompt)
        while self.generators[0].num_requests:
            self.step()
        for generator in self.generators:
            generator.drain()

    def close(self):
        for generator, client in zip(self.generators, self.clients, strict=True):
            generator.close()
            client.close()
        self.generators, self.clients = [], []
        for witness in self.witnesses:
            witness.pool = None


@pytest.fixture
def daemon(make_daemon):
    return make_daemon(pool_bytes="8MiB").wait_ready()


@pytest.fixture
def engines():
    made = []

    def make(daemon, **options):
        made.append(Engine(daemon, **options))
        return made[-1]

    yield make
    while made:  # nothing may hold a view of the pool when the test is over
        made.pop().close()


def assert_exact(engine, requests, *, choices=None):
    """Each rank's tokens and logits are those of the model's own cache."""
    model = make_model()
    check = ChoiceCheck(model, tolerance=1e-5)
    for name, prompt in requests.items():
        check.begin(choices[name] if choices else engine.witnesses[0].choices[name])
        tokens, logits = reference(model, prompt, NEW_TOKENS)
        for own in engine.tokens:
            assert [token.token for token in own[name]] == tokens
            difference = (torch.stack([token.logits for token in own[name]]) - logits).abs()
            assert difference.max() <= 1e-4
    assert check.take()["wrong_choices"] == 0


def assert_under_pressure(engine):
    for generator in engine.generators:
        coordinator, swaps = generator.coordinator.statistics, generator.tiers.swap_statistics()
        assert coordinator.spilled_pages > 0
        assert coordinator.restored_pages > 0
        assert sum(swap.miss_rows for swap in swaps) > generator.tiers.num_hot_rows()
        assert sum(swap.hot_lanes for swap in swaps) > 0


@pytest.mark.parametrize("layout", HostLayout)
def test_tokens_and_logits_are_those_of_the_models_own_cache(daemon, engines, layout):
    """Several requests at once, chunked prefill and batched decoding, on a writer and a reader."""
    engine = engines(daemon, layout=layout)
    engine.run(prompts())
    assert_exact(engine, prompts())
    assert_under_pressure(engine)
    assert [witness.wrong for witness in engine.witnesses] == [0, 0]
    # The shared beginning was computed three times and is kept once.
    assert engine.generators[0].coordinator.statistics.merged_pages == 2 * (64 // BLOCK)


def test_i2_a_reader_reads_only_published_blocks_and_rank_0s_bytes(daemon, engines):
    engine = engines(daemon)
    engine.run(prompts())
    writer, reader = engine.witnesses
    assert reader.reads > 0
    assert reader.states == {int(BlockState.PUBLISHED)}
    assert reader.wrong == 0
    assert writer.states == {int(BlockState.PUBLISHED)}


def test_the_witness_notices_a_changed_row(daemon, engines):
    """What the other tests rely on: one bit of a host row, changed behind everyone's back."""
    engine = engines(daemon)
    for name, prompt in prompts().items():
        engine.add(name, prompt)
    while not engine.tokens[0].get("r2"):
        engine.step()
    for page in engine.generators[1].coordinator.pages("r2"):
        if not page.is_resident:
            for layer in range(3):
                engine.generators[0].host_pool.layer_view(layer)[page.host_block, :, 0] ^= 1
    while engine.generators[0].num_requests:
        engine.step()
    assert engine.witnesses[1].wrong > 0


def test_i1_a_group_has_one_writer_and_the_others_cannot_reserve(daemon, engines):
    engine = engines(daemon)
    namespace = engine.clients[1].open_namespace(
        model="tiny", kv_dtype="float32", geometry=engine.generators[0].host_pool.geometry
    )
    with pytest.raises(WriterTaken):
        namespace.take_writer()
    with pytest.raises((LeaseError, UsageError)):
        namespace.reserve(1)
    engine.run(prompts(1))
    assert engine.generators[1].coordinator.statistics.mirrored_pages == 0
    assert engine.generators[1].coordinator.statistics.published_pages > 0


def test_new_workers_find_the_prefixes_of_those_that_ended(daemon, engines):
    first = engines(daemon)
    first.run(prompts())
    first.close()
    second = engines(daemon, before=first)
    second.run(prompts())
    assert second.hits == {
        name: (len(prompt) - 1) // BLOCK * BLOCK for name, prompt in prompts().items()
    }
    assert all(witness.reads for witness in second.witnesses)
    computed = second.generators[0].statistics.prefilled_tokens
    assert computed < sum(map(len, prompts().values())) // 20
    choices = first.witnesses[0].choices
    for name, prompt in prompts().items():  # what was found was chosen by the first workers
        done = second.hits[name]
        choices[name][:, done:] = second.witnesses[0].choices[name][:, done:]
        assert len(prompt) > done
    assert_exact(second, prompts(), choices=choices)
    assert [witness.wrong for witness in second.witnesses] == [0, 0]


def test_two_engines_with_one_prompt_keep_it_once(daemon, engines):
    one, two = engines(daemon, ranks=1), engines(daemon, ranks=1)
    two.witnesses[0].rows, two.witnesses[0].pages = one.witnesses[0].rows, one.witnesses[0].pages
    for engine in (one, two):
        engine.add("r0", prompts()["r0"])
    while one.generators[0].num_requests or two.generators[0].num_requests:
        one.step()
        two.step()
    for engine in (one, two):
        engine.generators[0].drain()
    merged = [e.generators[0].coordinator.statistics.merged_pages for e in (one, two)]
    pages = (len(prompts()["r0"]) + NEW_TOKENS - 1) // BLOCK
    assert sum(merged) == pages
    for engine in (one, two):
        assert_exact(engine, prompts(1))


def test_a_preempted_request_finds_what_it_published_and_goes_on_exactly(daemon, engines):
    engine = engines(daemon, ranks=1)
    requests = prompts(2)
    for name, prompt in requests.items():
        engine.add(name, prompt)
    while len(engine.tokens[0].get("r0", ())) < 4:
        engine.step()
    tokens = engine.generators[0].preempt("r0")
    assert tokens[: len(requests["r0"])] == requests["r0"]
    engine.step()
    engine.add("r0", tokens, NEW_TOKENS - len(engine.tokens[0]["r0"]))
    assert engine.hits["r0"] >= len(requests["r0"]) // BLOCK * BLOCK
    while engine.generators[0].num_requests:
        engine.step()
    assert_exact(engine, requests)


class SlowTracker:
    """Copies complete some polls after they were enqueued, oldest first."""

    def __init__(self, polls):
        self.polls = polls

    def record(self):
        return [self.polls]

    def is_complete(self, ticket):
        ticket[0] -= 1
        return ticket[0] <= 0

    def release(self, ticket):
        pass


def test_copies_that_complete_late_delay_publication_and_nothing_else(daemon, engines):
    engine = engines(daemon, ranks=1, tracker=SlowTracker(7))
    engine.run(prompts())
    assert_exact(engine, prompts())
    assert engine.witnesses[0].wrong == 0
    assert engine.generators[0].statistics.waits > 0


def test_decoding_goes_on_exactly_through_a_daemon_that_is_killed_and_replaced(
    daemon, engines, make_daemon
):
    """Leased blocks are read on; what was not published is mirrored again for the successor."""
    engine = engines(daemon, ranks=2)
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
    wait_until(lambda: _settled(engine.generators[0]), what="the last pages are published")
    assert_exact(engine, prompts())
    assert [witness.wrong for witness in engine.witnesses] == [0, 0]
    assert engine.clients[0].counters.snapshot()["reconnects"] >= 1


def _settled(generator):
    generator.settle()
    return generator.coordinator.num_finishing == 0


def test_a_model_with_another_attention_or_geometry_is_refused_and_left_as_it_was(daemon, engines):
    engine = engines(daemon, ranks=1)
    pool, sizes = engine.generators[0].host_pool, engine.generators[0].tiers.sizes
    other = make_model(layers=("full", "full"))
    with pytest.raises(ConfigError, match="geometry"):
        TieredModel(other, pool, sizes)
    other.config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match="sdpa"):
        TieredModel(other, pool, sizes)
    assert not any(isinstance(layer.self_attn, TieredAttention) for layer in other.model.layers)
    with pytest.raises(ConfigError, match="shared"):
        ModelShape.of(make_model(layers=("shared", "full")).config, torch.float32)


def test_a_token_that_the_model_does_not_know_is_refused_before_anything_is_reserved(
    daemon, engines
):
    engine = engines(daemon, ranks=1)
    with pytest.raises(UsageError, match="256"):
        engine.add("a", [1, 2, 256])
    assert engine.generators[0].coordinator.statistics.control_messages == 0


def test_the_wrapped_model_cannot_be_run_past_its_tiers(daemon, engines):
    engine = engines(daemon, ranks=1)
    tiers = engine.generators[0].tiers
    with pytest.raises(UsageError, match="wrapped"):
        tiers.model(
            input_ids=torch.zeros((1, 4), dtype=torch.long),
            attention_mask={"indexed_attention": None},
            use_cache=False,
        )
    two = Batch(
        mode=StepMode.PREFILL, request_ids=("a", "b"), request_slots=(0, 1), starts=(0, 0),
        tokens=((1,), (1,)),
    )  # fmt: skip
    with pytest.raises(UsageError, match="one chunk"):
        tiers.forward(two)
    model = tiers.model
    engine.close()
    tokens, _ = reference(model, [1, 2, 3], 1)
    assert len(tokens) == 1
