"""Our kernels behind vLLM's runtime methods, on a CPU; tests/gpu has the same on a GPU."""

from __future__ import annotations

import pytest
import torch
from vllm_runtime_models import BLOCK_SIZE, FakeGroup, make_step

from hisparse_service.contract.errors import UsageError
from worker_client.kernels import ReferenceBackend

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_layers", [1, 4])
def test_every_selected_row_is_its_tokens_over_many_steps(num_layers):
    group = FakeGroup(CPU, num_layers=num_layers)
    group.kernels(ReferenceBackend())
    for seed in range(12):
        topk, requests = make_step(seed, CPU)
        group.step(topk, requests)
        group.check(topk, requests)
    hits, misses = group.group.swap_stats.tolist()
    assert hits > 0
    assert misses > 0


def test_recycled_and_rewritten_blocks_are_read_again():
    group = FakeGroup(CPU, num_layers=2)
    group.kernels(ReferenceBackend())
    topk, requests = make_step(1, CPU)
    group.step(topk, requests)
    for rows in group.host:
        rows.add_(1)
    recycled = torch.arange(31 * BLOCK_SIZE, dtype=torch.int32)
    group.runtimes[0].invalidate_sorted_slots(recycled, group.states.long())
    written = torch.arange(31 * BLOCK_SIZE, 62 * BLOCK_SIZE)
    group.runtimes[0].invalidate_written_slots(written, torch.zeros(len(written)))
    group.step(topk, requests)
    group.check(topk, requests)


def test_a_reset_forgets_every_row():
    group = FakeGroup(CPU, num_layers=1)
    kernels = group.kernels(ReferenceBackend())
    topk, requests = make_step(1, CPU)
    group.step(topk, requests)
    group.runtimes[0].reset_hot_state()
    assert (kernels.state.host_rows == -1).all()
    group.step(topk, requests)
    group.check(topk, requests)


def test_another_block_size_is_refused():
    group = FakeGroup(CPU, num_layers=1)
    kernels = group.kernels(ReferenceBackend())
    topk, requests = make_step(1, CPU)
    with pytest.raises(UsageError, match="block size 32"):
        kernels.resolve(
            req_id_per_token=requests, block_table=group.source, topk_indices=topk, block_size=32,
            shared_rows=slice(0, 1),
        )  # fmt: skip
