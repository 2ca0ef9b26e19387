"""The demonstration's twin: equal to the tiers bit for bit, and different as soon as a byte is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from glm_models import LocalHostPool, make_model
from test_transformers_tiers import BLOCK, HOST_BLOCKS, daemon, engines, prompts

from hisparse_service.contract.geometry import HostLayout
from hisparse_service.contract.segment import BlockState
from worker_client.integrations.demo_audit import RowLedger, page_digest
from worker_client.integrations.demo_twin import DeviceTwin
from worker_client.integrations.transformers import DecodeMode, ModelShape

__all__ = ["daemon", "engines"]

LAYOUT = HostLayout.GROUP_INTERLEAVED


class Watched:
    """An engine of one rank with a twin and a ledger."""

    def __init__(self, engines, daemon, path, **options):
        shape = ModelShape.of(make_model().config, torch.float32)
        geometry = shape.host_geometry(block_size=BLOCK, layout=LAYOUT)
        self.ledger = RowLedger(path, geometry, HOST_BLOCKS, choices=AllChoices())
        self.twins = []

        def make(tiers):
            self.twins.append(DeviceTwin(tiers, self.ledger))
            tiers.audit = self.ledger
            self.ledger.tokens_of = self.twins[-1].tokens_of
            return self.twins[-1]

        self.engine = engines(daemon, ranks=1, witness=make, **options)
        # Pages go to the ledger instead of the tests' own witness.
        generator = self.engine.generators[0]
        generator.options = Options(generator.options, self.ledger)

    @property
    def counts(self):
        return self.twins[-1].counts


class AllChoices:
    """Choices that nobody looks at."""

    def of(self, _):
        return np.zeros((3, 512, 16), np.int16)


class Options:
    """A generator's options with another audit."""

    def __init__(self, options, audit):
        self._options, self.audit = options, audit

    def __getattr__(self, name):
        return getattr(self._options, name)


def is_equal(counts):
    return not (counts.unequal_logits or counts.unequal_rows or counts.unequal_choices)


@pytest.mark.parametrize("decode", [DecodeMode.DYNAMIC, DecodeMode.STATIC])
def test_the_twin_equals_the_tiers_bit_for_bit(daemon, engines, tmp_path, decode):
    watched = Watched(engines, daemon, tmp_path / "ledger", decode=decode)
    watched.engine.run(prompts())
    counts = watched.counts
    assert is_equal(counts), counts.lines
    assert counts.wrong_tokens == counts.foreign_pages == 0
    assert counts.pages > 0
    assert counts.logits >= 3 * 16
    watched.engine.close()


def test_the_twin_follows_prefixes_that_others_computed(daemon, engines, tmp_path):
    """In other chunks, so perhaps with other rounding: the bytes that count are the first ones."""
    first = Watched(engines, daemon, tmp_path / "ledger")
    first.engine.run(prompts())
    first.engine.close()
    second = Watched(engines, daemon, tmp_path / "ledger", decode=DecodeMode.STATIC)
    second.engine.run(prompts())
    counts = second.counts
    assert is_equal(counts), counts.lines
    assert counts.foreign_pages == 0
    assert counts.pages > 80
    second.engine.close()


def damage_hot_rows(tiers):
    for group in tiers.index_groups:
        for runtime in group.runtimes:
            runtime.hot.cache.view(torch.uint8)[1:, :, 1] ^= 1


def damage_host_rows(generator):
    blocks = [p.host_block for p in generator.coordinator.pages("r2") if not p.is_resident]
    assert blocks
    for layer in range(3):
        generator.host_pool.layer_view(layer)[blocks, :, 1] ^= 1


@pytest.mark.parametrize("where", ["device", "host"])
def test_one_wrong_bit_in_a_row_makes_them_differ(daemon, engines, tmp_path, where):
    watched = Watched(engines, daemon, tmp_path / "ledger")
    generator = watched.engine.generators[0]
    for name, prompt in prompts().items():
        watched.engine.add(name, prompt)
    while not watched.engine.tokens[0].get("r2"):
        watched.engine.step()
    assert is_equal(watched.counts)
    if where == "device":
        damage_hot_rows(generator.tiers)
    else:
        damage_host_rows(generator)
    for _ in range(4):
        watched.engine.step()
    counts = watched.counts
    assert counts.unequal_logits > 0
    assert counts.largest > 0
    assert any("rows of layer" in line and "token" in line for line in counts.lines)


def test_a_page_of_other_tokens_is_found(daemon, engines, tmp_path):
    watched = Watched(engines, daemon, tmp_path / "ledger")
    for name, prompt in prompts().items():
        watched.engine.add(name, prompt)
    while not watched.engine.tokens[0].get("r2"):
        watched.engine.step()
    watched.ledger._digests[:] = 7
    while watched.engine.generators[0].num_requests:
        watched.engine.step()
    assert watched.counts.foreign_pages > 0
    assert any("other tokens" in line for line in watched.counts.lines)


def test_a_wrong_token_is_not_followed(daemon, engines, tmp_path):
    watched = Watched(engines, daemon, tmp_path / "ledger")
    watched.engine.add("r0", prompts()["r0"])
    while len(watched.engine.tokens[0].get("r0", ())) < 3:
        watched.engine.step()
    sequence = watched.engine.generators[0]._sequences["r0"]
    sequence.tokens[-1] = (sequence.tokens[-1] + 1) % 256
    watched.engine.step()
    assert watched.counts.wrong_tokens == 1
    assert any("another token" in line for line in watched.counts.lines)


def test_a_page_is_named_by_all_tokens_before_its_end():
    tokens = list(range(40))
    assert page_digest(tokens, 16) == page_digest([*tokens[:16], 99], 16)
    assert page_digest(tokens, 16) != page_digest([1, *tokens[1:]], 16)
    assert page_digest(tokens, 16) != page_digest(tokens, 24)


def test_the_ledger_compares_published_pages_of_the_pool_alone(tmp_path):
    shape = ModelShape.of(make_model().config, torch.float32)
    geometry = shape.host_geometry(block_size=BLOCK, layout=LAYOUT)
    pool = LocalHostPool(geometry, 4)
    pool.allocate(geometry.pool_bytes(4))
    pool.table = np.zeros(4, [("state", np.uint8)])
    ledger = RowLedger(tmp_path / "ledger", geometry, 4, choices=AllChoices())
    tokens = list(range(BLOCK))
    ledger.tokens_of = lambda _: tokens
    positions = torch.arange(BLOCK)
    for layer in range(geometry.num_layers):
        width = pool.layer_view(layer).shape[2]
        rows = torch.full((BLOCK, width), 5 + layer, dtype=torch.uint8)
        ledger.computed(layer, "a", positions, rows)
    for block in (1, 2, 3):
        ledger.mirrored("a", 0, block)
    assert ledger.digest(1) == page_digest(tokens, BLOCK)
    assert not any(ledger.digest(0))
    pool.table["state"][[1, 2]] = int(BlockState.PUBLISHED)
    for layer in range(geometry.num_layers):
        pool.layer_view(layer)[1] = 5 + layer
        pool.layer_view(layer)[2] = 5 + layer
    assert ledger.compare_pool(pool) == (2, 0)
    pool.layer_view(geometry.num_layers - 1)[2, 3, 1] ^= 1
    assert ledger.compare_pool(pool) == (2, 1)
