"""Decode steps as a captured graph replays them: the same tensors each time, other values in them.

Two index groups of target layers and one draft layer; some requests, each with speculative tokens
of which a random part is accepted; draft rows written by a graph of their own, of all tokens before
it is known which are accepted, or of the accepted ones a step late. What is published may be read
from the host only from then on, and older pages are. A ledger in plain Python knows what every row
must hold.

A row tells what it is: its first column has (step, position, layer), the others count up from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_client.kernels.interface import KernelBackend
from worker_client.mirror import BlockMirror, CompletionTracker, MirrorQueue, RowMirror
from worker_client.prefetch import CopyLane, GatherSplit
from worker_client.runtime import (
    HiSparseCacheHandle,
    ResolvedHiSparseConfig,
    create_index_group_handles,
    enable_prefetch,
    initialize_hisparse_runtime_buffers,
)

SIZE = 16
WIDTH = 164
ROW_BYTES = WIDTH * 4  # 656
REQUESTS = 3
SLOTS = REQUESTS + 1  # one of padding
QUERY = 3  # one token and two speculative ones
TOKENS = REQUESTS * QUERY + 2  # two of padding
TOP_K = 32
PREFIX_PAGES = 4
PAGES = 14
STEPS = 40
HOT_BLOCKS = 10
DEVICE_BLOCKS = 1 + SLOTS * (PAGES + HOT_BLOCKS)
HOST_BLOCKS = 1 + REQUESTS * PAGES
GROUPS = (4, 2, 1)
"""Layers of each unit; the last is the draft layer."""
DRAFT = len(GROUPS) - 1
FIRST_LAYER = (0, 4, 6)
NUM_LAYERS = sum(GROUPS)


def value_of(layer: int, position: int, step: int) -> int:
    """First column of a row."""
    return ((step * 1024 + position) * 16 + layer) * 1024


def resident_block(request: int, page: int) -> int:
    return 1 + request * PAGES + page


class Unit:
    """One index group with its device backing and host pages."""

    def __init__(self, index: int, device: torch.device, backend: KernelBackend | None) -> None:
        self.layers, self.first = GROUPS[index], FIRST_LAYER[index]
        self.handles: list[HiSparseCacheHandle] = create_index_group_handles(
            ResolvedHiSparseConfig(
                top_k=TOP_K, device_buffer_size=HOT_BLOCKS * SIZE, max_decode_query_len=QUERY
            ),
            num_layers=self.layers,
            row_width=WIDTH,
            kv_dtype=torch.int32,
            device=device,
            backend=backend,
        )
        page = SIZE * ROW_BYTES
        self.backing = torch.zeros(
            DEVICE_BLOCKS * self.layers * page, dtype=torch.int8, device=device
        )
        self.pool = torch.zeros(HOST_BLOCKS * self.layers * page, dtype=torch.int8)
        if device.type == "cuda":
            self.pool = self.pool.pin_memory()
        self.is_interleaved = index == 0

    def host(self, layer: int) -> torch.Tensor:
        """int32 [HOST_BLOCKS, SIZE, WIDTH]."""
        words = self.pool.view(torch.int32)
        shape = (HOST_BLOCKS, SIZE, WIDTH)
        if self.is_interleaved:
            strides = (self.layers * SIZE * WIDTH, self.layers * WIDTH, 1)
            return words.as_strided(shape, strides, layer * WIDTH)
        return words.view(self.layers, *shape)[layer]

    def bind(self, tables: dict[str, torch.Tensor]) -> None:
        for layer, handle in enumerate(self.handles):
            sizes = {
                "byte_offset": layer * SIZE * ROW_BYTES,
                "block_stride": self.layers * SIZE * ROW_BYTES,
                "num_blocks": DEVICE_BLOCKS,
                "block_size": SIZE,
            }
            handle.bind_cache(
                self.backing, **sizes, block_table=tables["resident"],
                slot_mapping=tables["slots"],
            )  # fmt: skip
            handle.runtime.bind_hot_cache(self.backing, **sizes, block_table=tables["hot"])
            handle.runtime.bind_source_cache(self.host(layer), registered_host_pool=self.pool)
            handle.runtime.resident_source_index = 0
            handle.source_block_table = tables["source"]
            handle.mirror_slot_mapping = tables["mirror_slots"]
        initialize_hisparse_runtime_buffers(self.handles, max_num_reqs=SLOTS)


@dataclass
class Ledger:
    """What was written when. -1: never, or by a step whose token was rejected."""

    target: list[list[int]]
    draft: list[list[int]]

    def step_of(self, layer: int, request: int, position: int) -> int:
        rows = self.draft if layer >= FIRST_LAYER[DRAFT] else self.target
        return rows[request][position]


class ReplayedSteps:
    """The world. `run` plays all steps; a test looks at what is there then.

    Args:
        device: Where the steps run.
        tracker: Tells when mirrors are complete.
        before_poll: Called before each poll: to let copies complete, or to wait for them.
        split: Launches of a prefetch; None: no prefetch.
        capture: Makes of a function what replays it; None: the function itself.
        backend: Kernels.
        lane: Of the prefetch.
    """

    def __init__(
        self,
        device: str,
        *,
        tracker: CompletionTracker,
        before_poll: Callable[[], None] = lambda: None,
        split: GatherSplit | None = None,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
        backend: KernelBackend | None = None,
        lane: CopyLane | None = None,
        seed: int = 1,
    ) -> None:
        self.device = torch.device(device)
        self.random = random.Random(seed)
        self.before_poll = before_poll
        self.units = [Unit(index, self.device, backend) for index in range(len(GROUPS))]
        self._make_inputs()
        handles = [handle for unit in self.units for handle in unit.handles]
        if split is not None:
            enable_prefetch(handles, split=split, lane=lane)
        self.queue = MirrorQueue(
            num_units=len(GROUPS), block_size=SIZE, tracker=tracker,
            backend=self.units[0].handles[0].runtime.index_group.backend,
        )  # fmt: skip
        self.accepted = [PREFIX_PAGES * SIZE] * REQUESTS
        self.num_steps = 0
        self.rejected = 0
        self.published: list[set[int]] = [set() for _ in range(REQUESTS)]
        self.from_host = 0
        length = PAGES * SIZE
        self.ledger = Ledger(
            [[-1] * length for _ in range(REQUESTS)], [[-1] * length for _ in range(REQUESTS)]
        )
        self.wanted: list[torch.Tensor] = []
        self.late_drafts: list[tuple[int, int]] = []
        blocks = list(range(1, HOST_BLOCKS))
        self.random.shuffle(blocks)
        self.host_blocks = [blocks[r * PAGES : (r + 1) * PAGES] for r in range(REQUESTS)]
        self.blocks_known = [0] * REQUESTS
        self._prefill()
        self.replay_target = (capture or (lambda step: step))(self._target_step)
        self.replay_draft = (capture or (lambda step: step))(self._draft_step)
        self.step_number.zero_()

    def _make_inputs(self) -> None:
        def ints(*shape: int, value: int = -1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        i32 = torch.int32
        self.step_number = ints(1, value=0)
        self.inputs = {
            "slots": ints(TOKENS), "mirror_slots": ints(TOKENS), "at": ints(TOKENS, value=0),
            "positions": ints(TOKENS, TOP_K, dtype=i32),
            "request_slots": ints(SLOTS, dtype=i32),
            "query_starts": ints(SLOTS + 1, value=0, dtype=i32),
        }  # fmt: skip
        self.draft = {name: self.inputs[name].clone() for name in ("slots", "mirror_slots", "at")}
        hot = 1 + SLOTS * PAGES + torch.arange(SLOTS * HOT_BLOCKS, dtype=i32)
        tables = {
            "resident": ints(SLOTS, PAGES, value=0, dtype=i32),
            "source": ints(SLOTS, PAGES, value=0, dtype=i32),
            "hot": hot.view(SLOTS, HOT_BLOCKS).to(self.device),
        }
        self.tables = tables
        for index, unit in enumerate(self.units):
            mappings = self.draft if index == DRAFT else self.inputs
            unit.bind(tables | {name: mappings[name] for name in ("slots", "mirror_slots")})
        # Row 0 is for the padded steps that precede a capture.
        self.seen = ints(STEPS + 1, FIRST_LAYER[DRAFT], TOKENS, TOP_K, 2, dtype=i32)

    # --- what runs on the device ------------------------------------------------------------------

    def _rows(self, layer: int, at: torch.Tensor) -> torch.Tensor:
        """int32 [TOKENS, WIDTH] of this step; only device tensors change from step to step."""
        first = ((self.step_number * 1024 + at) * 16 + layer) * 1024
        columns = torch.arange(WIDTH, device=self.device)
        return (first.unsqueeze(1) + columns).to(torch.int32)

    def _write(self, handle: HiSparseCacheHandle, layer: int, at: torch.Tensor) -> None:
        view, slots = handle.write_target(TOKENS)
        view.write_slots(slots, self._rows(layer, at))

    def _mirror(self, unit: Unit) -> None:
        pages, device_slots, host_slots = unit.handles[0].group_mirror_target(TOKENS)
        unit.handles[0].runtime.index_group.backend.mirror_rows(
            pages=pages, device_slots=device_slots, host_slots=host_slots
        )

    def _target_step(self) -> None:
        self.step_number += 1
        seen = []
        for unit in self.units[:DRAFT]:
            for index, handle in enumerate(unit.handles):
                arguments = {
                    "request_slots": self.inputs["request_slots"],
                    "query_starts": self.inputs["query_starts"],
                }
                if index == 0:
                    physical = handle.begin_swap(self.inputs["positions"], **arguments)
                    self._write_group(unit)
                    handle.wait_rows()
                else:
                    physical = handle.swap_in(self.inputs["positions"], **arguments)
                rows = handle.runtime.hot.read(physical.clamp(min=0))
                ends = torch.stack((rows[..., 0], rows[..., -1]), dim=-1)
                seen.append(torch.where((physical >= 0).unsqueeze(-1), ends, -1))
            self._mirror(unit)
        index = self.step_number % (STEPS + 1)
        self.seen.index_copy_(0, index, torch.stack(seen).unsqueeze(0))

    def _write_group(self, unit: Unit) -> None:
        for index, handle in enumerate(unit.handles):
            self._write(handle, unit.first + index, self.inputs["at"])

    def _draft_step(self) -> None:
        unit = self.units[DRAFT]
        self._write(unit.handles[0], unit.first, self.draft["at"])
        self._mirror(unit)

    # --- what the host does -----------------------------------------------------------------------

    def _prefill(self) -> None:
        """Whole pages, written by step 0, mirrored as blocks and published."""
        for request in range(REQUESTS):
            self.queue.open_request(request)
            self._know_blocks(request, PREFIX_PAGES * SIZE)
            for page in range(PREFIX_PAGES):
                positions = torch.arange(page * SIZE, (page + 1) * SIZE)
                for rows in (self.ledger.target, self.ledger.draft):
                    rows[request][page * SIZE : (page + 1) * SIZE] = [0] * SIZE
                for unit in self.units:
                    for index, handle in enumerate(unit.handles):
                        rows = self._rows(unit.first + index, positions.to(self.device))
                        assert handle.view is not None
                        handle.view.cache[resident_block(request, page)] = rows
        for index, unit in enumerate(self.units):
            mirrors = [
                BlockMirror(request, page, resident_block(request, page))
                for request in range(REQUESTS)
                for page in range(PREFIX_PAGES)
            ]
            pages = unit.handles[0].runtime.index_group.pages()
            self.queue.submit_blocks(index, pages, mirrors)
        for request in range(REQUESTS):
            self.queue.accept(request, self.accepted[request])
        self.queue.seal()
        self.drain()
        assert all(len(found) == PREFIX_PAGES for found in self.published)

    def _know_blocks(self, request: int, tokens: int) -> None:
        """Pages that these tokens lie in are resident, and have a host block to go to."""
        for page in range(self.blocks_known[request], -(-tokens // SIZE)):
            self.queue.add_block(request, page, self.host_blocks[request][page])
            self.tables["resident"][request, page] = resident_block(request, page)
            self.blocks_known[request] = page + 1

    def _slots(self, request: int, position: int) -> tuple[int, int]:
        page, row = divmod(position, SIZE)
        return (
            resident_block(request, page) * SIZE + row,
            self.host_blocks[request][page] * SIZE + row,
        )

    def _fill(self, into: dict[str, torch.Tensor], tokens: list[tuple[int, int]]) -> None:
        """Slot mappings of these (request, position); the rest is padding."""
        columns: dict[str, list[int]] = {"slots": [], "mirror_slots": [], "at": []}
        for request, position in tokens:
            device_slot, host_slot = self._slots(request, position)
            columns["slots"].append(device_slot)
            columns["mirror_slots"].append(host_slot)
            columns["at"].append(position)
        for name, values in columns.items():
            padding = [0 if name == "at" else -1] * (TOKENS - len(values))
            self._put(into[name], torch.tensor(values + padding))

    def _prepare(self) -> list[tuple[int, int]]:
        order = list(range(REQUESTS))
        self.random.shuffle(order)
        tokens, positions = [], []
        for request in order:
            start = self.accepted[request]
            self._know_blocks(request, start + QUERY)
            for row in range(QUERY):
                tokens.append((request, start + row))
                chosen = self.random.choices(range(start + row + 1), k=TOP_K)
                positions.append([p if self.random.random() > 0.05 else -1 for p in chosen])
        self._fill(self.inputs, tokens)
        want = torch.full((FIRST_LAYER[DRAFT], TOKENS, TOP_K, 2), -1, dtype=torch.int32)
        self.num_steps += 1
        for request, position in tokens:
            self.ledger.target[request][position] = self.num_steps
        for row, ((request, _), lanes) in enumerate(zip(tokens, positions, strict=True)):
            for lane, position in enumerate(lanes):
                if position < 0:
                    continue
                step = self.ledger.target[request][position]
                for layer in range(FIRST_LAYER[DRAFT]):
                    first = value_of(layer, position, step)
                    want[layer, row, lane] = torch.tensor([first, first + WIDTH - 1])
        self.wanted.append(want)
        padding = [[-1] * TOP_K] * (TOKENS - len(positions))
        starts = [QUERY * index for index in range(REQUESTS + 1)]
        for name, values in (
            ("positions", positions + padding),
            ("request_slots", [*order, -1]),
            ("query_starts", [*starts, starts[-1]]),
        ):
            self._put(self.inputs[name], torch.tensor(values, dtype=torch.int32))
        return tokens

    def _put(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """In stream order and without waiting: the host runs ahead of the device."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        into.copy_(values, non_blocking=True)

    def _note(self, unit: int, tokens: list[tuple[int, int]]) -> None:
        self.queue.note_rows(
            unit,
            [
                RowMirror(
                    request, position // SIZE, resident_block(request, position // SIZE),
                    row=position % SIZE,
                )
                for request, position in tokens
            ],
        )  # fmt: skip

    def step(self) -> None:
        """One decode step of all requests, draft rows that are due, and a poll."""
        tokens = self._prepare()
        self.replay_target()
        for unit in range(DRAFT):
            self._note(unit, tokens)
        self._run_draft(self.late_drafts)
        is_early = self.random.random() < 0.5
        if is_early:
            self._run_draft(tokens)
        if self.random.random() < 0.5:
            self.queue.seal()
            self.before_poll()
            self._take_published()  # nothing of this step: it is not known what is accepted
        self.late_drafts = []
        for request in range(REQUESTS):
            self._accept(request, self.random.randint(1, QUERY), is_early=is_early)
        self.queue.seal()
        self.before_poll()
        self._take_published()

    def _accept(self, request: int, count: int, *, is_early: bool) -> None:
        start = self.accepted[request]
        if not is_early:
            self.late_drafts += [(request, start + row) for row in range(count)]
        self.accepted[request] = start + count
        self.queue.accept(request, start + count)
        for position in range(start + count, start + QUERY):
            self.ledger.target[request][position] = self.ledger.draft[request][position] = -1
            self.rejected += 1

    def _run_draft(self, tokens: list[tuple[int, int]]) -> None:
        """Draft rows of these tokens; of none, it is a replay with padding alone."""
        self._fill(self.draft, tokens)
        self.replay_draft()
        for request, position in tokens:
            self.ledger.draft[request][position] = self.num_steps
        self._note(DRAFT, tokens)

    def run(self, steps: int = STEPS) -> None:
        """All steps, then the last draft rows; everything that may be published is."""
        for _ in range(steps):
            self.step()
        self._run_draft(self.late_drafts)
        self.late_drafts = []
        self.queue.seal()
        self.drain()

    def drain(self) -> None:
        """Wait for the device, and take what completed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        while self.queue.num_in_flight_batches:
            self.before_poll()
            self._take_published()
        self._take_published()

    def _take_published(self) -> None:
        for block in self.queue.poll():
            request = int(str(block.request))
            self.check_host_page(request, block.block_index)
            self.published[request].add(block.block_index)
            self.tables["source"][request, block.block_index] = block.host_block
        for request in range(REQUESTS):
            # The two latest pages stay on the device, as do those that are not published.
            for page in self.published[request]:
                if page < self.accepted[request] // SIZE - 1:
                    self.tables["resident"][request, page] = 0

    # --- checks -----------------------------------------------------------------------------------

    def check_host_page(self, request: int, page: int) -> None:
        """Every row of every layer is the accepted one, as a CPU sees it without waiting (I2)."""
        for position in range(page * SIZE, (page + 1) * SIZE):
            self.check_host_row(request, position)

    def check_host_row(self, request: int, position: int) -> None:
        page, offset = divmod(position, SIZE)
        block = self.host_blocks[request][page]
        columns = torch.arange(WIDTH, dtype=torch.int32)
        for unit in self.units:
            for index in range(unit.layers):
                layer = unit.first + index
                step = self.ledger.step_of(layer, request, position)
                assert step >= 0, f"request {request} position {position} was rejected, or is late"
                want = value_of(layer, position, step) + columns
                got = unit.host(index)[block, offset]
                assert torch.equal(got, want), (request, position, layer, step, int(got[0]))

    def check_everything(self) -> None:
        """After `run`: rows on both sides, what was read, what was published."""
        for request in range(REQUESTS):
            length = self.accepted[request]
            assert self.published[request] == set(range(length // SIZE))
            for position in range(length):
                self.check_host_row(request, position)
        self.check_device_rows()
        assert self.rejected > 0
        want = torch.stack(self.wanted)
        got = self.seen[1 : len(self.wanted) + 1].cpu()
        assert torch.equal(got, want), (got != want).nonzero()[:5]
        misses = [unit.handles[0].runtime.statistics().miss_rows for unit in self.units[:DRAFT]]
        assert all(count > 0 for count in misses), "nothing was read from the host"

    def check_device_rows(self) -> None:
        """The host rows after all replays equal the device rows."""
        for unit in self.units:
            for index, handle in enumerate(unit.handles):
                assert handle.view is not None
                device = handle.view.cache.cpu()
                host = unit.host(index)
                for request in range(REQUESTS):
                    for page in range(-(-self.accepted[request] // SIZE)):
                        count = min(self.accepted[request] - page * SIZE, SIZE)
                        assert torch.equal(
                            host[self.host_blocks[request][page], :count],
                            device[resident_block(request, page), :count],
                        ), (unit.first + index, request, page)
