"""Our kernels behind vLLM's runtime methods, on a GPU, launched and captured."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "worker_client"))

from vllm_runtime_models import BLOCK_SIZE, FakeGroup, make_step

from worker_client.integrations.vllm.swap_figures import SwapSampler

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


@pytest.mark.parametrize("ours", [True, False])
def test_a_sample_of_the_counts_never_waits_for_the_device(backend, ours):
    """Torch raises where a step would wait; the sample is behind work that is under way."""
    group = FakeGroup(DEVICE, num_layers=2)
    group.group.copy_stream = torch.cuda.Stream(DEVICE)
    kernels = group.kernels(backend)
    topk, requests = make_step(3, DEVICE)
    group.step(topk, requests)
    sampler = SwapSampler(
        [group.group], counters=[kernels.state.counters] if ours else (),
        current_stream=torch.cuda.current_stream,
    )  # fmt: skip
    torch.cuda.synchronize()
    with torch.cuda.stream(group.group.copy_stream):
        torch.cuda._sleep(2_000_000_000)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        assert sampler() is None
        assert sampler() is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = sampler()
    assert found is not None
    hits, misses = group.group.swap_stats.tolist()
    assert sum(each.miss_rows for each in found) == misses > 0
    assert sum(each.hot_lanes for each in found) == hits
    assert sum(each.gathered_bytes for each in found) == misses * 2 * 656
