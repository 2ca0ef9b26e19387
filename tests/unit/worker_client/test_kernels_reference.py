"""The reference kernels against a model made of dictionaries, and every edge of the interface."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.kernels import backend_for
from worker_client.kernels.interface import (
    Counter,
    GroupPages,
    HostLayout,
    HotState,
    ResidencyTables,
    ResolvePlan,
    StepInputs,
    allocate_hot_state,
    allocate_plan,
    check_hot_size,
    check_row_bytes,
    check_step,
)
from worker_client.kernels.reference import ReferenceBackend

BACKEND = ReferenceBackend()


def i32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- the model: one dictionary a request, no tensors, nothing shared with the code under test -----


class DictModel:
    """hot[slot] = (host_row, last_use) of one request, in the plainest way."""

    def __init__(self, hot_rows: int) -> None:
        self.hot_rows = hot_rows
        self.row_in: dict[int, int] = {}
        self.used_at: dict[int, int] = dict.fromkeys(range(hot_rows), 0)
        self.clock = 0

    def step(self, rows, resident, source, hot_blocks, block_size, stride):
        """Returns (physical rows, [(host row, physical row)] to copy)."""
        self.clock += 1
        wanted: list[int] = []
        for lanes in rows:
            for position in lanes:
                if position >= 0 and not resident.get(position // block_size):
                    host_row = source[position // block_size] * block_size + position % block_size
                    if host_row not in wanted:
                        wanted.append(host_row)
        slot_of = {row: slot for slot, row in self.row_in.items()}
        misses = [row for row in wanted if row not in slot_of]
        kept = {slot_of[row] for row in wanted if row in slot_of}
        candidates = sorted(
            (self.used_at[slot], slot) for slot in range(self.hot_rows) if slot not in kept
        )
        victims = sorted(slot for _, slot in candidates[: len(misses)])
        for row, slot in zip(misses, victims, strict=True):
            self.row_in[slot] = row
        slot_of = {row: slot for slot, row in self.row_in.items()}
        for row in wanted:
            self.used_at[slot_of[row]] = self.clock

        def hot_physical(slot):
            return hot_blocks[slot // block_size] * stride + slot % block_size

        def answer(position):
            if position < 0:
                return -1
            page, row = divmod(position, block_size)
            if resident.get(page):
                return resident[page] * stride + row
            return hot_physical(slot_of[source[page] * block_size + row])

        copies = [(row, hot_physical(slot_of[row])) for row in misses]
        return [[answer(p) for p in lanes] for lanes in rows], copies

    def forget_blocks(self, blocks, block_size):
        for slot in [s for s, row in self.row_in.items() if row // block_size in blocks]:
            del self.row_in[slot]
            self.used_at[slot] = 0


class World:
    """Tables, state and plan of a small server, and the models beside them."""

    def __init__(
        self, *, num_slots=4, num_pages=6, block_size=4, top_k=5, query_len=2, hot_rows=12, stride=7
    ):
        self.block_size, self.top_k, self.query_len, self.stride = (
            block_size,
            top_k,
            query_len,
            stride,
        )
        self.num_slots, self.num_pages, self.hot_rows = num_slots, num_pages, hot_rows
        hot_blocks = -(-hot_rows // block_size)
        hot = 1 + torch.randperm(num_slots * hot_blocks).reshape(num_slots, hot_blocks)
        self.first_resident = 1 + num_slots * hot_blocks
        self.tables = ResidencyTables(
            source=torch.zeros((num_slots, num_pages), dtype=torch.int32),
            resident=torch.zeros((num_slots, num_pages), dtype=torch.int32),
            hot=hot.int(),
            block_size=block_size,
            block_stride_rows=stride,
            num_source_blocks=1000,
            num_device_blocks=self.first_resident + num_slots * num_pages,
        )
        self.state = allocate_hot_state(max_num_reqs=num_slots, hot_rows=hot_rows, device="cpu")
        self.plan = allocate_plan(
            max_num_requests=num_slots + 2,
            max_query_rows=(num_slots + 2) * query_len,
            max_rows_per_request=query_len,
            top_k=top_k,
            device="cpu",
        )
        self.models = [DictModel(hot_rows) for _ in range(num_slots)]

    def inputs(self, requests, padding_rows=0) -> StepInputs:
        """``requests``: list of (slot, rows of positions)."""
        rows = [lanes for _, query in requests for lanes in query]
        rows += [[0] * self.top_k] * padding_rows
        starts = [0]
        for _, query in requests:
            starts.append(starts[-1] + len(query))
        slots = i32([slot for slot, _ in requests])
        return StepInputs(
            positions=i32(rows).reshape(-1, self.top_k),
            request_slots=slots,
            table_rows=slots,
            query_starts=i32(starts),
        )

    def resolve(self, requests, padding_rows=0) -> ResolvePlan:
        BACKEND.resolve(
            state=self.state,
            tables=self.tables,
            inputs=self.inputs(requests, padding_rows),
            plan=self.plan,
        )
        return self.plan

    def copies(self, index):
        count = int(self.plan.miss_counts[index])
        return list(
            zip(
                self.plan.miss_source_rows[index, :count].tolist(),
                self.plan.miss_device_rows[index, :count].tolist(),
                strict=True,
            )
        )

    def snapshot(self):
        state = self.state
        return [t.clone() for t in (state.host_rows, state.last_use, state.clock, state.counters)]

    def check_models(self):
        for slot, model in enumerate(self.models):
            want_rows = [model.row_in.get(s, -1) for s in range(self.hot_rows)]
            want_use = [model.used_at[s] for s in range(self.hot_rows)]
            assert self.state.host_rows[slot].tolist() == want_rows
            assert self.state.last_use[slot].tolist() == want_use
            assert int(self.state.clock[slot]) == model.clock


def same(before, state: HotState) -> bool:
    after = (state.host_rows, state.last_use, state.clock, state.counters)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@st.composite
def histories(draw):
    """A seed for the tables and a list of operations over four request slots."""
    query = st.lists(st.lists(st.integers(-1, 23), min_size=5, max_size=5), min_size=1, max_size=2)
    step = st.tuples(
        st.just("step"),
        st.lists(
            st.tuples(st.integers(-1, 3), query),
            max_size=5,
            unique_by=lambda request: request[0] if request[0] >= 0 else object(),
        ),
        st.integers(0, 2),
    )
    invalidate = st.tuples(
        st.just("invalidate"), st.lists(st.integers(-1, 40), max_size=4), st.just(0)
    )
    reset = st.tuples(st.just("reset"), st.lists(st.integers(-1, 3), max_size=2), st.just(0))
    resident = st.tuples(st.just("resident"), st.integers(0, 2**30), st.just(0))
    operations = st.lists(st.one_of(step, step, step, invalidate, reset, resident), max_size=8)
    return draw(st.integers(0, 2**30)), draw(operations)


def draw_residency(world: World, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = world.tables.resident.shape
    ids = world.first_resident + torch.arange(shape.numel()).reshape(shape)
    is_resident = torch.rand(shape, generator=generator) < 0.3
    world.tables.resident.copy_(torch.where(is_resident, ids, 0).int())


def run_step(world: World, requests, padding_rows: int) -> None:
    plan = world.resolve(requests, padding_rows)
    size, stride = world.block_size, world.stride
    row = 0
    for index, (slot, query) in enumerate(requests):
        if slot < 0:
            want, copies = [[-1] * world.top_k for _ in query], []
        else:
            want, copies = world.models[slot].step(
                query,
                dict(enumerate(world.tables.resident[slot].tolist())),
                world.tables.source[slot].tolist(),
                world.tables.hot[slot].tolist(),
                size,
                stride,
            )
        got = plan.physical_rows[row : row + len(query)].tolist()
        assert got == want
        counts = plan.valid_counts[row : row + len(query)].tolist()
        assert counts == [sum(value >= 0 for value in lanes) for lanes in want]
        assert world.copies(index) == copies
        row += len(query)
    assert (plan.physical_rows[row : row + padding_rows] == -1).all()
    assert (plan.miss_counts[len(requests) :] == 0).all()


@settings(max_examples=150, deadline=None)
@given(histories())
def test_resolve_agrees_with_a_model_of_dictionaries(history):
    seed, operations = history
    torch.manual_seed(seed)
    world = World()
    # Few host blocks, so that requests share some of them.
    world.tables.source.copy_(torch.stack([1 + torch.randperm(12)[:6] for _ in range(4)]).int())
    draw_residency(world, seed)
    for kind, argument, padding_rows in operations:
        if kind == "step":
            run_step(world, argument, padding_rows)
        elif kind == "invalidate":
            BACKEND.invalidate(
                state=world.state, host_blocks=i32(argument), block_size=world.block_size
            )
            for model in world.models:
                model.forget_blocks({b for b in argument if b > 0}, world.block_size)
        elif kind == "reset":
            BACKEND.reset(state=world.state, request_slots=i32(argument))
            for slot in argument:
                if slot >= 0:
                    world.models[slot] = DictModel(world.hot_rows)
        else:
            draw_residency(world, argument)
        world.check_models()


def filled_world(**sizes) -> World:
    world = World(**sizes)
    shape = world.tables.source.shape
    world.tables.source.copy_(1 + torch.arange(shape.numel()).reshape(shape).int())
    return world


def test_lanes_of_minus_one_stay_and_touch_nothing():
    world = filled_world()
    plan = world.resolve([(0, [[-1] * 5])])
    assert plan.physical_rows[0].tolist() == [-1] * 5
    assert plan.valid_counts[0] == 0
    assert plan.miss_counts.sum() == 0
    assert (world.state.host_rows == -1).all()
    assert world.state.counters[Counter.MISS_LANES] == 0


def test_padding_requests_and_rows_leave_the_state_alone():
    world = filled_world()
    world.resolve([(1, [[0, 1, 2, 3, 4]])])
    before = world.snapshot()
    plan = world.resolve([(-1, [[5, 6, 7, 8, 9], [1, 1, 1, 1, 1]]), (-1, [])], padding_rows=3)
    assert same(before, world.state)
    assert (plan.physical_rows[:5] == -1).all()
    assert (plan.valid_counts[:5] == 0).all()
    assert (plan.miss_counts == 0).all()


def test_duplicates_are_one_miss_and_the_same_row():
    world = filled_world()
    plan = world.resolve([(2, [[9, 9, -1, 9, 9], [9, 9, 9, 9, 9]])])
    assert plan.miss_counts[0] == 1
    rows = plan.physical_rows[:2].flatten()
    assert rows[rows >= 0].unique().numel() == 1
    assert world.state.counters[Counter.MISS_LANES] == 9
    assert world.state.counters[Counter.MISS_ROWS] == 1


def test_speculative_rows_are_one_transaction():
    """No row of the run may evict what another row of it needs, whatever their order."""
    world = filled_world(hot_rows=10)
    world.resolve([(0, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])])
    plan = world.resolve([(0, [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]])])
    assert plan.physical_rows[:2].unique().numel() == 10
    assert world.state.counters[Counter.HOT_LANES] == 5
    assert world.state.clock[0] == 2


def test_resident_rows_are_answered_without_touching_the_hot_map():
    world = filled_world()
    world.tables.resident[0, 1] = world.first_resident + 3
    plan = world.resolve([(0, [[4, 5, 6, 7, -1]])])
    base = (world.first_resident + 3) * world.stride
    assert plan.physical_rows[0].tolist() == [base, base + 1, base + 2, base + 3, -1]
    assert (world.state.host_rows == -1).all()
    assert world.state.counters[Counter.RESIDENT_LANES] == 4


def test_counters_add_up_to_the_valid_lanes():
    world = filled_world()
    world.tables.resident[3, 0] = world.first_resident
    world.resolve([(3, [[0, 1, 8, 9, -1]])])
    world.resolve([(3, [[8, 9, 10, 11, 2]]), (1, [[0, 0, 0, 0, 0]])])
    values = world.state.counters.tolist()
    assert values[Counter.RESIDENT_LANES] == 3
    assert values[Counter.HOT_LANES] == 2
    assert values[Counter.MISS_LANES] == 2 + 2 + 5
    assert values[Counter.MISS_ROWS] == 2 + 2 + 1
    assert values[Counter.TRANSACTIONS] == 3


@pytest.mark.parametrize("case", ["no host row", "past the table", "no hot region"])
def test_an_invalid_lane_raises_before_anything_changed(case):
    world = filled_world()
    position = 8
    if case == "no host row":
        world.tables.source[0, 2] = 0
    elif case == "past the table":
        position = world.num_pages * world.block_size
    else:
        world.tables.hot[0] = 0
    before, rows = world.snapshot(), world.plan.physical_rows.clone()
    with pytest.raises(UsageError, match=f"position {position} of request slot 0") as caught:
        world.resolve([(1, [[0, 1, 2, 3, 4]]), (0, [[position, 0, -1, -1, -1]])])
    assert caught.value.details["position"] == position
    assert same(before, world.state)
    assert torch.equal(rows, world.plan.physical_rows)


def test_a_request_without_a_hot_region_may_read_resident_pages():
    world = filled_world()
    world.tables.hot[0] = 0
    world.tables.resident[0] = world.first_resident + torch.arange(6).int()
    plan = world.resolve([(0, [[0, 7, 23, -1, 4]])])
    assert plan.valid_counts[0] == 4


def test_a_hole_in_a_hot_region_is_refused():
    world = filled_world()
    world.tables.hot[0, 1] = 0
    with pytest.raises(UsageError, match="null block behind"):
        world.resolve([(0, [[0, 1, 2, 3, 4]])])
    assert (world.state.host_rows == -1).all()


def test_tables_by_batch_row_are_read_at_table_rows():
    world = filled_world()
    order = torch.tensor([2, 0, 3, 1])
    by_slot = world.resolve([(0, [[0, 1, 2, 3, 4]]), (3, [[5, 6, 7, 8, 9]])])
    want = by_slot.physical_rows[:2].clone()
    other = filled_world()
    other.tables.source.copy_(world.tables.source[order])
    other.tables.hot.copy_(world.tables.hot[order])
    inputs = other.inputs([(0, [[0, 1, 2, 3, 4]]), (3, [[5, 6, 7, 8, 9]])])
    inputs = StepInputs(
        positions=inputs.positions,
        request_slots=inputs.request_slots,
        table_rows=i32([1, 2]),
        query_starts=inputs.query_starts,
    )
    BACKEND.resolve(state=other.state, tables=other.tables, inputs=inputs, plan=other.plan)
    assert torch.equal(other.plan.physical_rows[:2], want)
    assert torch.equal(other.state.host_rows, world.state.host_rows)


def test_i10_rows_are_64_bit():
    """Host rows above 2^33 and physical rows above 2^31, without allocating such a pool."""
    block_size, stride, blocks = 1024, 2**20, 2**31 - 1
    state = allocate_hot_state(max_num_reqs=1, hot_rows=4, device="cpu")
    tables = ResidencyTables(
        source=i32([[blocks - 1, 7]]),
        resident=i32([[0, 0]]),
        hot=i32([[2**20]]),
        block_size=block_size,
        block_stride_rows=stride,
        num_source_blocks=blocks,
        num_device_blocks=2**21,
    )
    slots = i32([0])
    inputs = StepInputs(
        positions=i32([[1023, 1024]]),
        request_slots=slots,
        table_rows=slots,
        query_starts=i32([0, 1]),
    )
    sizes = {
        "max_num_requests": 1,
        "max_query_rows": 1,
        "max_rows_per_request": 1,
        "top_k": 2,
        "device": "cpu",
    }
    narrow = allocate_plan(**sizes)
    with pytest.raises(GeometryError, match="do not fit in int32"):
        BACKEND.resolve(state=state, tables=tables, inputs=inputs, plan=narrow)
    plan = allocate_plan(**sizes, row_dtype=torch.int64)
    BACKEND.resolve(state=state, tables=tables, inputs=inputs, plan=plan)
    assert plan.miss_source_rows[0].tolist() == [(blocks - 1) * 1024 + 1023, 7 * 1024]
    assert plan.physical_rows[0].tolist() == [2**40, 2**40 + 1]
    assert plan.miss_device_rows[0].tolist() == [2**40, 2**40 + 1]
    BACKEND.invalidate(state=state, host_blocks=i32([blocks - 1]), block_size=block_size)
    assert state.host_rows[0].tolist() == [-1, 7 * 1024, -1, -1]


def test_invalidate_forgets_all_duplicates_of_a_recycled_block():
    world = World()
    world.tables.source.fill_(9)  # all requests share one host block
    for slot in range(4):
        world.resolve([(slot, [[0, 1, 2, 3, -1]])])
    # Duplicates inside one request should not occur; they must not survive if they do.
    world.state.host_rows[2, 7] = 9 * world.block_size + 1
    world.state.host_rows[2, 8] = 10 * world.block_size
    BACKEND.invalidate(state=world.state, host_blocks=i32([0, 9, -1, 9]), block_size=4)
    left = world.state.host_rows[world.state.host_rows >= 0]
    assert left.tolist() == [10 * world.block_size]
    assert world.state.counters[Counter.INVALIDATED_ROWS] == 17
    plan = world.resolve([(2, [[0, 1, 2, 3, -1]])])
    assert plan.miss_counts[0] == 4


def test_invalidate_of_padding_only_changes_nothing():
    world = filled_world()
    world.resolve([(0, [[0, 1, 2, 3, 4]])])
    before = world.snapshot()
    BACKEND.invalidate(state=world.state, host_blocks=i32([0, -1, 0]), block_size=4)
    BACKEND.invalidate(state=world.state, host_blocks=i32([]), block_size=4)
    BACKEND.reset(state=world.state, request_slots=i32([-1, -1]))
    assert same(before, world.state)


# --- bytes ----------------------------------------------------------------------------------------


def make_pages(
    layout: HostLayout,
    *,
    layers=3,
    row_bytes=48,
    block_size=4,
    host_blocks=9,
    device_blocks=8,
    spare_bytes=0,
) -> GroupPages:
    """An index group on a backing where other layers lie between its blocks."""
    page = block_size * row_bytes
    if layout is HostLayout.LAYER_MAJOR:
        pool = torch.randint(0, 256, (layers, host_blocks, block_size, row_bytes))
        host = tuple(pool.to(torch.uint8).unbind(0))
    else:
        pool = torch.randint(0, 256, (host_blocks, block_size, layers, row_bytes))
        host = tuple(pool.to(torch.uint8).unbind(2))
    stride = (layers + 1) * page + spare_bytes
    backing = torch.randint(0, 256, (device_blocks * stride,)).to(torch.uint8)
    device = tuple(
        backing.as_strided((device_blocks, block_size, row_bytes), (stride, row_bytes, 1), i * page)
        for i in range(layers)
    )
    rows = block_size if stride % row_bytes else stride // row_bytes
    return GroupPages(host=host, device=device, block_stride_rows=rows)


LAYOUTS = [HostLayout.LAYER_MAJOR, HostLayout.GROUP_INTERLEAVED]
SPARE = [0, 16]


def plan_of(pages: GroupPages, copies) -> ResolvePlan:
    plan = allocate_plan(
        max_num_requests=len(copies),
        max_query_rows=len(copies),
        max_rows_per_request=1,
        top_k=max(1, *(len(c) for c in copies)),
        device="cpu",
    )
    for index, rows in enumerate(copies):
        plan.miss_counts[index] = len(rows)
        for column, (block, row, device_block, device_row) in enumerate(rows):
            plan.miss_source_rows[index, column] = block * pages.block_size + row
            plan.miss_device_rows[index, column] = (
                device_block * pages.block_stride_rows + device_row
            )
    return plan


def expect_gather(pages: GroupPages, copies) -> list[torch.Tensor]:
    want = [layer.clone() for layer in pages.device]
    for rows in copies:
        for block, row, device_block, device_row in rows:
            for layer in range(pages.num_layers):
                want[layer][device_block, device_row] = pages.host[layer][block, row]
    return want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spare_bytes", SPARE)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    row_bytes=st.sampled_from([16, 48, 656]),
    part=st.sampled_from([(0, 3), (0, 2), (1, 3)]),
)
def test_gather_copies_exactly_the_planned_rows(layout, spare_bytes, seed, counts, row_bytes, part):
    torch.manual_seed(seed)
    whole = make_pages(layout, row_bytes=row_bytes, spare_bytes=spare_bytes)
    others = {i: whole.device[i].clone() for i in range(3) if not part[0] <= i < part[1]}
    pages = whole.layers(*part)
    assert pages.host_layout is layout
    places = torch.randperm(8 * 4)[: sum(counts)]
    copies, taken = [], 0
    for count in counts:
        mine = places[taken : taken + count]
        taken += count
        copies.append(
            [
                (
                    int(torch.randint(0, 9, ())),
                    int(torch.randint(0, 4, ())),
                    int(p // 4),
                    int(p % 4),
                )
                for p in mine
            ]
        )
    want = expect_gather(pages, copies)
    host = [layer.clone() for layer in pages.host]
    BACKEND.gather(pages=pages, plan=plan_of(pages, copies))
    for layer in range(pages.num_layers):
        assert torch.equal(pages.device[layer], want[layer])
        assert torch.equal(pages.host[layer], host[layer])
    assert all(torch.equal(whole.device[i], before) for i, before in others.items())


@pytest.mark.parametrize("layers", [1, 2])
def test_gather_writes_runs_and_chunks_in_the_right_places(layers):
    """More rows than one chunk holds, first scattered, then adjacent."""
    torch.manual_seed(5)
    pages = make_pages(
        HostLayout.LAYER_MAJOR,
        layers=layers,
        row_bytes=4096,
        block_size=32,
        host_blocks=20,
        device_blocks=12,
    )
    for order in (torch.randperm(12 * 32)[:300], torch.arange(300)):
        copies = [
            [
                (int(s) % 20, int(s) % 32, int(p) // 32, int(p) % 32)
                for s, p in zip(torch.randint(0, 640, (300,)), order, strict=True)
            ]
        ]
        want = expect_gather(pages, copies)
        BACKEND.gather(pages=pages, plan=plan_of(pages, copies))
        assert all(torch.equal(a, b) for a, b in zip(pages.device, want, strict=True))


def test_gather_refuses_a_plan_of_other_pages():
    pages = make_pages(HostLayout.LAYER_MAJOR)
    before = [layer.clone() for layer in pages.device]
    for copies in ([[(1, 1, 2, 2), (9, 0, 1, 1)]], [[(1, 1, 8, 0)]]):
        with pytest.raises(UsageError, match="planned"):
            BACKEND.gather(pages=pages, plan=plan_of(pages, copies))
    assert all(torch.equal(a, b) for a, b in zip(pages.device, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spare_bytes", SPARE)
def test_mirror_then_restore_brings_back_the_same_bytes(layout, spare_bytes):
    pages = make_pages(layout, spare_bytes=spare_bytes)
    before = [layer.clone() for layer in pages.device]
    host_before = [layer.clone() for layer in pages.host]
    device_blocks, host_blocks = i32([3, 5, -1, 0, 2]), i32([7, 1, 2, 3, 0])
    BACKEND.mirror_blocks(pages=pages, device_blocks=device_blocks, host_blocks=host_blocks)
    for layer in range(3):
        assert torch.equal(pages.host[layer][7], before[layer][3])
        assert torch.equal(pages.host[layer][1], before[layer][5])
        untouched = [0, 2, 3, 4, 5, 6, 8]
        assert torch.equal(pages.host[layer][untouched], host_before[layer][untouched])
        pages.device[layer][3:6] = 0
    BACKEND.restore_blocks(pages=pages, host_blocks=i32([7, 1]), device_blocks=i32([3, 5]))
    for layer in range(3):
        assert torch.equal(pages.device[layer][[3, 5]], before[layer][[3, 5]])
        assert (pages.device[layer][4] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spare_bytes", SPARE)
def test_mirrored_rows_land_in_their_host_slots_only(layout, spare_bytes):
    pages = make_pages(layout, spare_bytes=spare_bytes)
    want = [layer.clone() for layer in pages.host]
    moves = [(3, 1, 7, 1), (3, 2, 7, 2), (5, 0, 1, 3)]
    for device_block, row, host_block, host_row in moves:
        for layer in range(3):
            want[layer][host_block, host_row] = pages.device[layer][device_block, row]
    slots = [(d * 4 + r, h * 4 + q) for d, r, h, q in moves] + [(-1, 5), (6, -1)]
    BACKEND.mirror_rows(
        pages=pages,
        device_slots=torch.tensor([d for d, _ in slots]),
        host_slots=torch.tensor([h for _, h in slots]),
    )
    assert all(torch.equal(a, b) for a, b in zip(pages.host, want, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stage_fills_a_contiguous_buffer_and_skips_padding(layout):
    pages = make_pages(layout)
    slots = torch.tensor([5, -1, 35, 5])
    out = torch.full((1, 6, 48), 255, dtype=torch.uint8)
    BACKEND.stage(pages=pages.layers(1, 2), host_slots=slots, out=out)
    assert torch.equal(out[0, 0], pages.host[1][1, 1])
    assert torch.equal(out[0, 2], pages.host[1][8, 3])
    assert torch.equal(out[0, 3], out[0, 0])
    assert (out[0, [1, 4, 5]] == 255).all()


def test_copies_refuse_ids_past_the_end_and_one_place_twice():
    pages = make_pages(HostLayout.LAYER_MAJOR)
    before = [layer.clone() for layer in pages.host]
    with pytest.raises(UsageError, match="host_blocks has values from 9 to 9"):
        BACKEND.mirror_blocks(pages=pages, device_blocks=i32([1]), host_blocks=i32([9]))
    with pytest.raises(UsageError, match="twice"):
        BACKEND.mirror_blocks(pages=pages, device_blocks=i32([1, 2]), host_blocks=i32([3, 3]))
    with pytest.raises(UsageError, match="twice"):
        BACKEND.restore_blocks(pages=pages, device_blocks=i32([2, 2]), host_blocks=i32([3, 4]))
    with pytest.raises(UsageError, match="device_slots"):
        BACKEND.mirror_rows(
            pages=pages, device_slots=torch.tensor([32]), host_slots=torch.tensor([0])
        )
    with pytest.raises(GeometryError, match="shape of out"):
        BACKEND.stage(
            pages=pages,
            host_slots=torch.tensor([1]),
            out=torch.zeros((1, 1, 48), dtype=torch.uint8),
        )
    assert all(torch.equal(a, b) for a, b in zip(pages.host, before, strict=True))


# --- the door -------------------------------------------------------------------------------------


def test_pages_that_16_byte_lanes_cannot_copy_are_refused():
    def pages(row_bytes=32, host_offset=0, device_rows=4, block_stride_rows=4, dtype=torch.uint8):
        pool = torch.zeros(4096, dtype=dtype)
        host = pool.as_strided((2, 4, row_bytes), (4 * row_bytes, row_bytes, 1), host_offset)
        device = torch.zeros((3, device_rows, row_bytes), dtype=torch.uint8)
        return GroupPages(host=(host,), device=(device,), block_stride_rows=block_stride_rows)

    assert pages().row_bytes == 32
    with pytest.raises(GeometryError, match="multiple of 16"):
        pages(row_bytes=24)
    with pytest.raises(GeometryError, match="data pointer"):
        pages(host_offset=8)
    with pytest.raises(GeometryError, match="block_size, row_bytes"):
        pages(device_rows=8)
    with pytest.raises(GeometryError, match="block_stride_rows is 5"):
        pages(block_stride_rows=5)
    with pytest.raises(GeometryError, match="dtype"):
        pages(dtype=torch.int8)
    with pytest.raises(GeometryError, match="one host and one device"):
        GroupPages(host=(), device=(), block_stride_rows=4)


def test_sizes_past_their_limits_are_refused_with_all_values():
    for row_bytes in (0, 24, 8, limits.MAX_ROW_BYTES + 16):
        with pytest.raises(GeometryError, match=f"{row_bytes} bytes, expected a multiple of 16"):
            check_row_bytes(row_bytes)
    check_row_bytes(656)
    with pytest.raises(GeometryError, match="32769 hot rows"):
        check_hot_size(hot_rows=limits.MAX_HOT_ROWS + 1, max_query_rows=1, top_k=1)
    with pytest.raises(GeometryError, match=r"9 hot rows .* 10 .*max_query_rows=2, top_k=5"):
        check_hot_size(hot_rows=9, max_query_rows=2, top_k=5)
    check_hot_size(hot_rows=10, max_query_rows=2, top_k=5)
    with pytest.raises(GeometryError, match="top_k is 4097"):
        allocate_plan(
            max_num_requests=1,
            max_query_rows=1,
            max_rows_per_request=1,
            top_k=limits.MAX_TOP_K + 1,
            device="cpu",
        )
    with pytest.raises(GeometryError, match="9 query rows a request"):
        allocate_plan(
            max_num_requests=1,
            max_query_rows=9,
            max_rows_per_request=limits.MAX_SPECULATIVE_ROWS + 1,
            top_k=1,
            device="cpu",
        )


def test_steps_that_do_not_fit_the_buffers_are_refused():
    world = filled_world()
    short = filled_world(hot_rows=9)
    with pytest.raises(GeometryError, match="9 hot rows"):
        short.resolve([(0, [[0, 1, 2, 3, 4]])])
    with pytest.raises(GeometryError, match="query rows and 7 requests"):
        world.resolve([(-1, [])] * 6 + [(0, [[0] * 5])])
    wide = World(top_k=6)
    with pytest.raises(GeometryError, match="top_k is 6"):
        check_step(
            state=world.state, tables=world.tables, inputs=wide.inputs([(0, [[0] * 6])]),
            plan=world.plan,
        )  # fmt: skip
    with pytest.raises(GeometryError, match="dtype of positions"):
        StepInputs(
            positions=torch.zeros((1, 5), dtype=torch.int64),
            request_slots=i32([0]),
            table_rows=i32([0]),
            query_starts=i32([0, 1]),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.tables.source.__setitem__((0, 0), 1000), "source table"),
        (lambda w: w.tables.source.__setitem__((0, 0), -1), "source table"),
        (lambda w: w.tables.resident.__setitem__((0, 5), 10**6), "resident table"),
        (lambda w: w.tables.hot.__setitem__((0, 0), 10**6), "hot table"),
    ],
)
def test_block_ids_out_of_range_are_refused(change, message):
    world = filled_world()
    change(world)
    before = world.snapshot()
    with pytest.raises(UsageError, match=message):
        world.resolve([(0, [[0, 1, 2, 3, 4]])])
    assert same(before, world.state)


def test_steps_with_impossible_rows_are_refused():
    world = filled_world()
    row = [0, 1, 2, 3, 4]
    for requests, message in (
        ([(0, [row]), (0, [row])], "twice"),
        ([(4, [row])], "request_slots has values"),
        ([(0, [row, row, row])], "3 query rows in one request"),
        ([(0, [[-2, 0, 0, 0, 0]])], "positions has values"),
    ):
        with pytest.raises(UsageError, match=message):
            world.resolve(requests)
    for starts in ([1, 1], [0, 9], [0, -1]):
        inputs = StepInputs(
            positions=i32([row]), request_slots=i32([0]), table_rows=i32([0]),
            query_starts=i32(starts),
        )  # fmt: skip
        with pytest.raises(UsageError, match="query_starts"):
            BACKEND.resolve(state=world.state, tables=world.tables, inputs=inputs, plan=world.plan)


def test_a_machine_without_kernels_gets_the_reference():
    assert backend_for("cpu").name == "reference"
