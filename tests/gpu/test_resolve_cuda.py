"""The resolve kernel against the reference: results and state, byte for byte, over steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_cases import (
    Case,
    Shape,
    assert_same_plan,
    assert_same_state,
    copy_state,
    to_device,
)

from worker_client.kernels.interface import Counter, StepInputs, allocate_hot_state

DEVICE = torch.device("cuda:0")

SHAPES = [
    Shape(),
    Shape(padding=False, requests=1, max_reqs=1),
    Shape(requests=16, max_reqs=20, top_k=2_048, hot_rows=4_096, context=30_000),
    Shape(requests=4, top_k=2_048, hot_rows=6_144, context=65_536, source_blocks=5_000),
    Shape(top_k=2_048, hot_rows=2_048, fresh_share=1.0, resident_share=0.0),
    Shape(rows=4, top_k=256, hot_rows=1_024),
    Shape(rows=4, top_k=2_048, hot_rows=8_192, context=40_000, fresh_share=0.15),
    Shape(rows=3, top_k=100, hot_rows=333, block_size=16),
    Shape(rows=2, top_k=17, hot_rows=50, block_size=16, context=500),
    Shape(top_k=1, hot_rows=1, context=100, skip_share=0.0),
    Shape(top_k=7, hot_rows=33, block_size=256),
    Shape(top_k=128, hot_rows=301, block_size=48, strided=True),
    Shape(top_k=4_096, hot_rows=5_000, block_size=16, context=60_000, source_blocks=9_000),
    Shape(top_k=128, hot_rows=256, block_size=128, strided=True, wide_rows=True),
    Shape(resident_share=1.0),
    Shape(resident_share=0.0, duplicate_share=0.9),
    Shape(requests=200, max_reqs=256, top_k=300, hot_rows=700),
    # Shared memory does not hold these: the hash is in the workspace.
    Shape(rows=8, top_k=4_096, hot_rows=32_768, context=200_000, requests=2, max_reqs=2,
          source_blocks=20_000),
    Shape(rows=8, top_k=2_048, hot_rows=16_400, context=60_000, requests=2, max_reqs=3,
          source_blocks=9_000),
    # Host rows past 2**32: 64-bit keys.
    Shape(source_blocks=2**31 - 1, top_k=512, hot_rows=1_024, context=8_192),
    Shape(source_blocks=2**30, top_k=2_048, hot_rows=8_192, rows=4, context=40_000),
]  # fmt: skip


def run_both(case: Case, backend, reference, *, steps: int) -> None:
    state = backend.make_hot_state(
        max_num_reqs=case.shape.max_reqs, hot_rows=case.shape.hot_rows, device=DEVICE
    )
    copy_state(case.state, state)
    tables = to_device(case.tables, DEVICE)
    plan, expected = case.plan(DEVICE), case.plan("cpu")
    for _ in range(steps):
        inputs = case.step()
        reference.resolve(state=case.state, tables=case.tables, inputs=inputs, plan=expected)
        backend.resolve(state=state, tables=tables, inputs=to_device(inputs, DEVICE), plan=plan)
        assert_same_plan(expected, plan, rows=inputs.num_query_rows)
        assert_same_state(case.state, state)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_resolve_agrees_with_the_reference_over_steps(backend, reference, shape: Shape) -> None:
    run_both(Case(shape, seed=1), backend, reference, steps=4 if shape.top_k > 1_000 else 9)


@pytest.mark.parametrize("clock", [3, 250, 300, 100_000, 2**31 - 9])
@pytest.mark.parametrize("hot_rows", [256, 300, 4_096])
def test_victims_are_the_least_recently_used_however_old(
    backend, reference, clock: int, hot_rows: int
) -> None:
    shape = Shape(hot_rows=hot_rows, top_k=hot_rows // 2, fresh_share=1.0, context=8_000)
    case = Case(shape, seed=clock % 1_000)
    case.randomise_state(clock=clock)
    run_both(case, backend, reference, steps=3)


@pytest.mark.parametrize("hint", [1, 6, 61, 62, 63, 255])
def test_a_wrong_hint_changes_no_result(backend, reference, hint: int) -> None:
    case = Case(Shape(hot_rows=512, top_k=200, context=8_000), seed=hint)
    case.randomise_state(clock=90)
    state = backend.make_hot_state(max_num_reqs=5, hot_rows=512, device=DEVICE)
    copy_state(case.state, state)
    tables = to_device(case.tables, DEVICE)
    plan, expected = case.plan(DEVICE), case.plan("cpu")
    for _ in range(4):
        state.workspace.zero_()
        state.workspace[:, 0] = hint
        inputs = case.step()
        reference.resolve(state=case.state, tables=case.tables, inputs=inputs, plan=expected)
        backend.resolve(state=state, tables=tables, inputs=to_device(inputs, DEVICE), plan=plan)
        assert_same_plan(expected, plan, rows=inputs.num_query_rows)
        assert_same_state(case.state, state)


def test_a_state_without_a_workspace_works_where_shared_memory_is_enough(
    backend, reference
) -> None:
    case = Case(Shape(), seed=17)
    state = allocate_hot_state(max_num_reqs=5, hot_rows=256, device=DEVICE)
    tables = to_device(case.tables, DEVICE)
    plan, expected = case.plan(DEVICE), case.plan("cpu")
    for _ in range(5):
        inputs = case.step()
        reference.resolve(state=case.state, tables=case.tables, inputs=inputs, plan=expected)
        backend.resolve(state=state, tables=tables, inputs=to_device(inputs, DEVICE), plan=plan)
        assert_same_plan(expected, plan, rows=inputs.num_query_rows)
        assert_same_state(case.state, state)


def test_512_threads_agree_too(backend, reference) -> None:
    from worker_client.kernels.cuda import CudaBackend, CudaTuning

    made = CudaBackend(DEVICE, tuning=CudaTuning(resolve_threads=512))
    shape = Shape(requests=9, max_reqs=12, top_k=2_048, hot_rows=4_096, context=30_000)
    case = Case(shape, seed=5)
    case.randomise_state(clock=400)
    run_both(case, made, reference, steps=3)


def test_all_lanes_resident_touch_no_slot(backend, reference) -> None:
    case = Case(Shape(resident_share=1.0, padding=False), seed=3)
    run_both(case, backend, reference, steps=2)
    assert int((case.state.host_rows >= 0).sum()) == 0
    assert int(case.state.counters[Counter.RESIDENT_LANES]) > 0


def test_invalid_lanes_are_minus_one_and_counted(backend, reference) -> None:
    case = Case(Shape(padding=False, skip_share=0.0), seed=4)
    state = backend.make_hot_state(max_num_reqs=5, hot_rows=256, device=DEVICE)
    inputs = case.step()
    bad = torch.rand(inputs.positions.shape) < 0.1
    # Past the end of both tables.
    wrong = torch.where(bad, case.shape.context + 5, inputs.positions).to(torch.int32)
    clean = torch.where(bad, -1, inputs.positions).to(torch.int32)
    expected, plan = case.plan("cpu"), case.plan(DEVICE)
    reference.resolve(
        state=case.state, tables=case.tables, inputs=replace(inputs, positions=clean), plan=expected
    )
    backend.resolve(
        state=state,
        tables=to_device(case.tables, DEVICE),
        inputs=to_device(replace(inputs, positions=wrong), DEVICE),
        plan=plan,
    )
    assert int(state.counters[Counter.INVALID_LANES]) == int(bad.sum()) > 0
    case.state.counters[Counter.INVALID_LANES] = int(bad.sum())
    assert_same_plan(expected, plan, rows=inputs.num_query_rows)
    assert_same_state(case.state, state)


def test_a_block_past_the_end_is_invalid_not_a_wild_access(backend) -> None:
    case = Case(Shape(padding=False, resident_share=0.0, skip_share=0.0), seed=6)
    case.tables.source[:] = case.shape.source_blocks + 17
    state = backend.make_hot_state(max_num_reqs=5, hot_rows=256, device=DEVICE)
    plan, inputs = case.plan(DEVICE), case.step()
    backend.resolve(
        state=state,
        tables=to_device(case.tables, DEVICE),
        inputs=to_device(inputs, DEVICE),
        plan=plan,
    )
    assert int(plan.miss_counts[: case.shape.requests].sum()) == 0
    assert bool((plan.physical_rows[: inputs.num_query_rows] == -1).all())


def test_a_request_without_a_hot_region_reads_resident_pages_only(backend) -> None:
    case = Case(Shape(padding=False, resident_share=0.5, skip_share=0.0), seed=7)
    case.tables.hot[:] = 0
    state = backend.make_hot_state(max_num_reqs=5, hot_rows=256, device=DEVICE)
    plan, inputs = case.plan(DEVICE), case.step()
    backend.resolve(
        state=state,
        tables=to_device(case.tables, DEVICE),
        inputs=to_device(inputs, DEVICE),
        plan=plan,
    )
    counters = state.counters.tolist()
    assert counters[Counter.MISS_ROWS] == 0
    assert counters[Counter.INVALID_LANES] > 0
    assert counters[Counter.RESIDENT_LANES] + counters[Counter.INVALID_LANES] == (
        inputs.positions.numel()
    )


def test_a_captured_step_replays_with_new_inputs(backend, reference) -> None:
    case = Case(Shape(requests=4, top_k=512, hot_rows=1_024, padding=False), seed=8)
    state = backend.make_hot_state(max_num_reqs=5, hot_rows=1_024, device=DEVICE)
    tables = to_device(case.tables, DEVICE)
    plan, expected = case.plan(DEVICE), case.plan("cpu")
    first = case.step()
    static: StepInputs = to_device(first, DEVICE)
    backend.resolve(state=state, tables=tables, inputs=static, plan=plan)  # warm
    backend.reset(state=state, request_slots=torch.arange(5, dtype=torch.int32, device=DEVICE))
    state.counters.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.resolve(state=state, tables=tables, inputs=static, plan=plan)
    for index in range(6):
        inputs = case.step() if index else first
        if index == 3:  # padded batch: rows and requests of the last replay must not stay
            inputs.request_slots[2:] = -1
        for name in ("positions", "request_slots", "table_rows", "query_starts"):
            getattr(static, name).copy_(getattr(inputs, name))
        graph.replay()
        reference.resolve(state=case.state, tables=case.tables, inputs=inputs, plan=expected)
        assert_same_plan(expected, plan, rows=inputs.num_query_rows)
        assert_same_state(case.state, state)


def test_invalidate_forgets_every_duplicate_in_every_request(backend, reference) -> None:
    for block_size, count in ((64, 1), (64, 300), (48, 9_000), (1, 5_000)):
        case = Case(Shape(block_size=block_size, hot_rows=1_024, context=4_096), seed=9)
        case.randomise_state(clock=50)
        state = backend.make_hot_state(max_num_reqs=5, hot_rows=1_024, device=DEVICE)
        copy_state(case.state, state)
        blocks = torch.randint(-3, case.shape.source_blocks, (count,), dtype=torch.int32)
        reference.invalidate(state=case.state, host_blocks=blocks, block_size=block_size)
        backend.invalidate(state=state, host_blocks=blocks.to(DEVICE), block_size=block_size)
        assert_same_state(case.state, state)


def test_reset_empties_the_named_slots_only(backend, reference) -> None:
    case = Case(Shape(hot_rows=777), seed=10)
    case.randomise_state(clock=50)
    state = backend.make_hot_state(max_num_reqs=5, hot_rows=777, device=DEVICE)
    copy_state(case.state, state)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32)
    reference.reset(state=case.state, request_slots=slots)
    backend.reset(state=state, request_slots=slots.to(DEVICE))
    assert_same_state(case.state, state)
