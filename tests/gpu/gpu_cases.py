"""Random cases for the GPU tests: the same tensors for the reference on the CPU and the kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from worker_client.kernels.interface import (
    GroupPages,
    HotState,
    ResidencyTables,
    ResolvePlan,
    StepInputs,
    allocate_hot_state,
    allocate_plan,
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a case. Lanes are random: some -1, some twice, some on resident pages."""

    requests: int = 3
    max_reqs: int = 5
    block_size: int = 64
    top_k: int = 128
    rows: int = 1
    hot_rows: int = 256
    context: int = 2_048
    resident_share: float = 0.2
    source_blocks: int = 400
    duplicate_share: float = 0.1
    skip_share: float = 0.05
    strided: bool = False
    padding: bool = True
    fresh_share: float = 0.3
    wide_rows: bool = False

    def __str__(self) -> str:
        """Only what differs from the defaults: a readable test id."""
        default = Shape()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return "-".join(changed) or "default"


class Case:
    """Tables, state and a stream of steps on the CPU."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = torch.Generator().manual_seed(seed)
        s = shape
        self.pages = -(-s.context // s.block_size)
        hot_blocks = -(-s.hot_rows // s.block_size)
        table_rows = s.max_reqs + 2
        self.num_device_blocks = 1 + table_rows * hot_blocks + s.max_reqs * self.pages
        self.tables = ResidencyTables(
            source=self._table(table_rows, self.pages, 1, s.source_blocks),
            resident=self._resident(hot_blocks, table_rows),
            hot=self._hot(table_rows, hot_blocks),
            block_size=s.block_size,
            block_stride_rows=s.block_size * (3 if s.strided else 1),
            num_source_blocks=s.source_blocks,
            num_device_blocks=self.num_device_blocks,
        )
        self.state = allocate_hot_state(max_num_reqs=s.max_reqs, hot_rows=s.hot_rows, device="cpu")
        self.previous: torch.Tensor | None = None

    def _table(self, rows: int, columns: int, low: int, high: int) -> torch.Tensor:
        wide = torch.randint(
            low, high, (rows, columns + 3), generator=self.random, dtype=torch.int32
        )
        return wide[:, :columns] if self.shape.strided else wide[:, :columns].contiguous()

    def _resident(self, hot_blocks: int, table_rows: int) -> torch.Tensor:
        s = self.shape
        first = 1 + table_rows * hot_blocks
        own = first + torch.arange(s.max_reqs * self.pages, dtype=torch.int32)
        own = own.view(s.max_reqs, self.pages)
        kept = torch.rand(own.shape, generator=self.random) < s.resident_share
        return torch.where(kept, own, 0).to(torch.int32)

    def _hot(self, table_rows: int, hot_blocks: int) -> torch.Tensor:
        order = torch.randperm(table_rows * hot_blocks, generator=self.random) + 1
        return order.view(table_rows, hot_blocks).to(torch.int32)

    def randomise_state(self, *, clock: int) -> None:
        """Fill the state as if it had run for ``clock`` steps: empty, recent and very old slots."""
        s = self.shape
        state = self.state
        for slot in range(s.max_reqs):
            rows = torch.randperm(
                min(s.source_blocks * s.block_size, 1 << 20) - s.block_size, generator=self.random
            )
            count = min(s.hot_rows, rows.numel())
            state.host_rows[slot, :count] = rows[:count] + s.block_size
            ages = torch.randint(0, clock, (s.hot_rows,), generator=self.random, dtype=torch.int32)
            near = torch.rand(s.hot_rows, generator=self.random) < 0.3
            state.last_use[slot] = torch.where(near, clock - ages % 20, ages + 1).clamp(1, clock)
            empty = torch.rand(s.hot_rows, generator=self.random) < 0.02
            empty[count:] = True
            state.host_rows[slot, empty] = -1
            state.last_use[slot, empty] = 0
            state.clock[slot] = clock

    def step(self) -> StepInputs:
        """Draw the next step: a random order of requests, sticky positions, padding behind."""
        s = self.shape
        slots = torch.randperm(s.max_reqs, generator=self.random)[: s.requests].to(torch.int32)
        rows_each = torch.full((s.requests,), s.rows, dtype=torch.int32)
        if s.padding and s.requests > 1:
            slots[int(torch.randint(0, s.requests, (1,), generator=self.random))] = -1
            rows_each[int(torch.randint(0, s.requests, (1,), generator=self.random))] = 0
        starts = torch.zeros(s.requests + 1, dtype=torch.int32)
        starts[1:] = rows_each.cumsum(0)
        num_rows = s.requests * s.rows + (2 if s.padding else 0)
        positions = torch.randint(
            0, s.context, (num_rows, s.top_k), generator=self.random, dtype=torch.int32
        )
        if self.previous is not None:
            fresh = torch.rand(positions.shape, generator=self.random) < s.fresh_share
            positions = torch.where(fresh, positions, self.previous)
        if s.top_k > 1:
            twice = torch.rand(positions.shape, generator=self.random) < s.duplicate_share
            positions = torch.where(twice, positions.roll(1, dims=1), positions)
        skipped = torch.rand(positions.shape, generator=self.random) < s.skip_share
        self.previous = positions.clone()
        positions[skipped] = -1
        if s.strided:
            wide = torch.full((num_rows, s.top_k + 5), 7, dtype=torch.int32)
            wide[:, : s.top_k] = positions
            positions = wide[:, : s.top_k]
        return StepInputs(
            positions=positions,
            request_slots=slots,
            table_rows=(slots + 1).clamp(min=0) if s.strided else slots.clamp(min=0),
            query_starts=starts,
        )

    def plan(self, device: torch.device | str) -> ResolvePlan:
        """A plan with room to spare, its buffers poisoned."""
        s = self.shape
        plan = allocate_plan(
            max_num_requests=s.requests + 1,
            max_query_rows=s.requests * s.rows + 2,
            max_rows_per_request=s.rows,
            top_k=s.top_k,
            device=device,
            row_dtype=torch.int64 if s.wide_rows else torch.int32,
        )
        for tensor in (plan.physical_rows, plan.valid_counts, plan.miss_counts):
            tensor.fill_(-99)
        return plan


def to_device(value: object, device: torch.device | str) -> object:
    """A dataclass of tensors with its tensors copied; strides kept."""
    changed = {}
    for field in fields(value):  # type: ignore[arg-type]
        entry = getattr(value, field.name)
        if isinstance(entry, torch.Tensor):
            base = torch.empty_strided(
                entry.shape, entry.stride(), dtype=entry.dtype, device=device
            )
            entry = base.copy_(entry)
        changed[field.name] = entry
    return type(value)(**changed)


def copy_state(state: HotState, into: HotState) -> None:
    """Overwrite a state, whatever its device."""
    for name in ("host_rows", "last_use", "clock", "counters"):
        getattr(into, name).copy_(getattr(state, name))


def assert_same_state(expected: HotState, got: HotState) -> None:
    """Byte for byte."""
    for name in ("clock", "host_rows", "last_use", "counters"):
        left, right = getattr(expected, name), getattr(got, name).cpu()
        assert torch.equal(left, right), f"{name} differs at {(left != right).nonzero()[:5]}"


def assert_same_plan(expected: ResolvePlan, got: ResolvePlan, *, rows: int) -> None:
    """Byte for byte, as far as it is defined."""
    for name in ("physical_rows", "valid_counts"):
        left, right = getattr(expected, name)[:rows], getattr(got, name)[:rows].cpu()
        assert torch.equal(left, right), f"{name} differs at {(left != right).nonzero()[:5]}"
    counts = expected.miss_counts
    assert torch.equal(counts, got.miss_counts.cpu()), (counts, got.miss_counts)
    for name in ("miss_source_rows", "miss_device_rows"):
        left, right = getattr(expected, name), getattr(got, name).cpu()
        for index, count in enumerate(counts.tolist()):
            assert torch.equal(left[index, :count], right[index, :count]), (name, index)


def make_pages(
    *,
    layers: int,
    row_bytes: int,
    block_size: int,
    host_blocks: int,
    device_blocks: int,
    interleaved: bool,
    flat: bool,
    device: torch.device | str,
    seed: int,
    pinned: bool,
) -> GroupPages:
    """Random bytes in host and device pages of both layouts.

    Args:
        layers: Layers of the group.
        row_bytes: Bytes of one row.
        block_size: Rows of a block.
        host_blocks: Host blocks.
        device_blocks: Device blocks.
        interleaved: group_interleaved, else layer_major.
        flat: Whether a device block has a whole number of rows to the next.
        device: Of the device pages.
        seed: Of the bytes.
        pinned: Whether the host pages are registered.
    """
    random = torch.Generator().manual_seed(seed)
    page = block_size * row_bytes
    host_bytes = torch.randint(
        0, 256, (layers * host_blocks * page,), generator=random, dtype=torch.uint8
    )
    if pinned:
        host_bytes = host_bytes.pin_memory()
    if interleaved:
        strides = (layers * page, layers * row_bytes, 1)
        offsets = [layer * row_bytes for layer in range(layers)]
    else:
        strides = (page, row_bytes, 1)
        offsets = [layer * host_blocks * page for layer in range(layers)]
    host = tuple(
        torch.as_strided(host_bytes, (host_blocks, block_size, row_bytes), strides, offset)
        for offset in offsets
    )
    block_bytes = layers * page + (0 if flat else 16 if row_bytes > 16 else 0)
    backing = torch.randint(
        0, 256, (device_blocks * block_bytes,), generator=random, dtype=torch.uint8
    ).to(device)
    device_pages = tuple(
        torch.as_strided(
            backing, (device_blocks, block_size, row_bytes), (block_bytes, row_bytes, 1), i * page
        )
        for i in range(layers)
    )
    stride_rows = block_bytes // row_bytes if block_bytes % row_bytes == 0 else block_size
    return GroupPages(host=host, device=device_pages, block_stride_rows=stride_rows)
