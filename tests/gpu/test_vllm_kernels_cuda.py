"""Our kernels behind vLLM's runtime methods, on a GPU, launched and captured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "worker_client"))

from vllm_runtime_models import BLOCK_SIZE, FakeGroup, make_step

DEVICE = torch.device("cuda:0")


@pytest.mark.parametrize("num_layers", [1, 4])
def test_every_selected_row_is_its_tokens_over_many_steps(backend, num_layers):
    group = FakeGroup(DEVICE, num_layers=num_layers)
    group.kernels(backend)
    for seed in range(12):
        topk, requests = make_step(seed, DEVICE)
        group.step(topk, requests)
        torch.cuda.synchronize()
        group.check(topk, requests)
    hits, misses = group.group.swap_stats.tolist()
    assert hits > 0
    assert misses > 0


def test_recycled_blocks_are_read_again(backend):
    group = FakeGroup(DEVICE, num_layers=2)
    group.kernels(backend)
    topk, requests = make_step(1, DEVICE)
    group.step(topk, requests)
    torch.cuda.synchronize()
    for rows in group.host:
        rows.add_(1)
    recycled = torch.arange(62 * BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    group.runtimes[0].invalidate_sorted_slots(recycled, group.states.long())
    group.step(topk, requests)
    torch.cuda.synchronize()
    group.check(topk, requests)


def test_a_captured_step_replays_with_other_positions(backend):
    group = FakeGroup(DEVICE, num_layers=4)
    group.kernels(backend)
    topk, requests = make_step(0, DEVICE)
    group.step(topk, requests)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        group.step(topk, requests)
    for seed in range(1, 8):
        more, _ = make_step(seed, DEVICE)
        topk.copy_(more)
        graph.replay()
        torch.cuda.synchronize()
        group.check(topk, requests)
