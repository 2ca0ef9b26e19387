"""Plain torch on the CPU: the oracle of every kernel, and the data plane of machines without one.

Results, state included, are defined byte for byte by `interface.KernelBackend`. Unlike a kernel it
raises on an invalid lane, before anything is changed. Called on the worker's compute thread.

Rows are copied through NumPy views whose items are whole rows (``V656``): one item is one memcpy,
where torch's scattered writes work element by element.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.kernels.interface import (
    EMPTY_ROW,
    MAX_HOST_ROW_BITS,
    CheckDepth,
    Counter,
    GroupPages,
    HostLayout,
    HotState,
    Overlap,
    ResidencyTables,
    ResolvePlan,
    StepInputs,
    allocate_hot_state,
    check_block_pairs,
    check_slots,
    check_step,
    check_tensor,
)

_Rows = npt.NDArray[Any]
_Ids = npt.NDArray[np.int64]

_CHUNK_BYTES: Final = 256 * 1024
"""Rows copied at a time: small enough that they are still in the second-level cache when they are
written to their places (a quarter of its 1 MiB), large enough that the four calls a chunk, about
4 us, do not show. 128 to 512 rows of 656 B measured the same, 1,024 and more slower
(benchmarks/bench_reference_gather.py)."""

_MIN_RUN_ROWS: Final = 16
"""Destinations whose runs of adjacent rows are this long on average are written in place: a copy of
16 rows takes about 3 us, the call for one run 1 us, the second pass over the bytes 1 us."""


class ReferenceBackend:
    """The CPU implementation of `KernelBackend`."""

    name = "reference"

    def __init__(self) -> None:
        # Kept between calls: fresh memory of this size is returned to the system each time, and
        # faulting it in again took longer than copying through it.
        self._scratch = np.empty(_CHUNK_BYTES, dtype=np.uint8)
        # By identity and weak: when a group's pages go, so do the views of their memory.
        self._copies: WeakKeyDictionary[GroupPages, list[_RowCopy]] = WeakKeyDictionary()

    def make_hot_state(
        self, *, max_num_reqs: int, hot_rows: int, device: torch.device | str
    ) -> HotState:
        """Make an empty hot state; there is no workspace."""
        return allocate_hot_state(max_num_reqs=max_num_reqs, hot_rows=hot_rows, device=device)

    def resolve(
        self,
        *,
        state: HotState,
        tables: ResidencyTables,
        inputs: StepInputs,
        plan: ResolvePlan,
    ) -> None:
        """Translate one step's top-k and plan its misses: see `KernelBackend.resolve`."""
        check_step(state=state, tables=tables, inputs=inputs, plan=plan, depth=CheckDepth.VALUES)
        requests = _active_requests(inputs)
        lanes = _translate(requests, tables, inputs)
        found = _look_up(requests, lanes, state)
        _take_victims(requests, found, state)
        hot_physical = _hot_physical_rows(requests, found, tables)
        _write_plan(requests, lanes, found, hot_physical, inputs, plan)
        _write_state(requests, lanes, found, state)

    def gather(
        self, *, pages: GroupPages, plan: ResolvePlan, overlap: Overlap = Overlap.NONE
    ) -> None:
        """Copy the planned rows, host to hot, for all layers of ``pages``."""
        del overlap  # the caller waits
        counts = plan.miss_counts.tolist()
        if not any(counts):
            return
        source_rows, device_rows = plan.miss_source_rows.numpy(), plan.miss_device_rows.numpy()
        sources = np.concatenate([source_rows[i, :n] for i, n in enumerate(counts) if n])
        targets = np.concatenate([device_rows[i, :n] for i, n in enumerate(counts) if n])
        num_host_rows = pages.host[0].shape[0] * pages.block_size
        num_device_rows = pages.device[0].shape[0] * pages.block_stride_rows
        _check_range("planned host rows", sources, num_host_rows)
        _check_range("planned device rows", targets, num_device_rows)
        copies = self._copies.get(pages)
        if copies is None:
            copies = self._copies[pages] = _row_copies(pages)
        runs = _runs(targets)
        for copy in copies:
            _copy_rows(copy, sources, targets, runs, self._scratch)

    def invalidate(self, *, state: HotState, host_blocks: torch.Tensor, block_size: int) -> None:
        """Forget every hot row that lies in one of these host blocks."""
        check_tensor("host_blocks", host_blocks, dtype=torch.int32, ndim=1)
        blocks = host_blocks[host_blocks > 0].long()
        if not blocks.numel():
            return
        # An empty slot holds -1, whose block is -1: never in the list.
        gone = torch.isin(state.host_rows.div(block_size, rounding_mode="floor"), blocks)
        state.host_rows[gone] = EMPTY_ROW
        state.last_use[gone] = 0
        state.counters[Counter.INVALIDATED_ROWS] += gone.sum()

    def reset(self, *, state: HotState, request_slots: torch.Tensor) -> None:
        """Empty the hot regions of these request slots."""
        check_tensor("request_slots", request_slots, dtype=torch.int32, ndim=1)
        slots = request_slots[request_slots >= 0].long()
        _check_range("request_slots", slots.numpy(), state.max_num_reqs)
        state.host_rows[slots] = EMPTY_ROW
        state.last_use[slots] = 0
        state.clock[slots] = 0

    def mirror_blocks(
        self, *, pages: GroupPages, device_blocks: torch.Tensor, host_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, device to host."""
        pairs = _block_pairs(pages, device_blocks, host_blocks)
        _check_distinct("host_blocks", [host for _, host in pairs])
        for host_layer, device_layer in zip(pages.host, pages.device, strict=True):
            for device, host in pairs:
                host_layer[host].copy_(device_layer[device])

    def mirror_rows(
        self, *, pages: GroupPages, device_slots: torch.Tensor, host_slots: torch.Tensor
    ) -> None:
        """Copy rows, device to host."""
        size = pages.block_size
        check_tensor("host_slots", host_slots, dtype=torch.int64, shape=tuple(device_slots.shape))
        for name, slots, layers in (
            ("device_slots", device_slots, pages.device),
            ("host_slots", host_slots, pages.host),
        ):
            check_slots(
                name=name,
                slots=slots,
                num_blocks=layers[0].shape[0],
                block_size=size,
                depth=CheckDepth.VALUES,
            )
        kept = (device_slots >= 0) & (host_slots >= 0)
        device, host = device_slots[kept].numpy(), host_slots[kept].numpy()
        _check_distinct("host_slots", host.tolist())
        for host_layer, device_layer in zip(pages.host, pages.device, strict=True):
            rows = _row_items(device_layer)[device // size, device % size]
            _row_items(host_layer)[host // size, host % size] = rows

    def restore_blocks(
        self, *, pages: GroupPages, host_blocks: torch.Tensor, device_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, host to device."""
        pairs = _block_pairs(pages, device_blocks, host_blocks)
        _check_distinct("device_blocks", [device for device, _ in pairs])
        for host_layer, device_layer in zip(pages.host, pages.device, strict=True):
            for device, host in pairs:
                device_layer[device].copy_(host_layer[host])

    def stage(self, *, pages: GroupPages, host_slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy host rows into a contiguous buffer."""
        size = pages.block_size
        check_slots(
            name="host_slots",
            slots=host_slots,
            num_blocks=pages.host[0].shape[0],
            block_size=size,
            depth=CheckDepth.VALUES,
        )
        count = host_slots.shape[0]
        check_tensor("out", out, dtype=torch.uint8, ndim=3)
        if (
            out.shape[0] != pages.num_layers
            or out.shape[1] < count
            or (out.shape[2] != pages.row_bytes)
        ):
            raise GeometryError(
                f"shape of out: expected ({pages.num_layers}, >= {count}, {pages.row_bytes}), got "
                f"{tuple(out.shape)}"
            )
        kept = (host_slots >= 0).numpy()
        slots = host_slots.numpy()[kept]
        for layer, host in zip(out, pages.host, strict=True):
            rows = _row_items(host)[slots // size, slots % size]
            _row_items(layer)[:count][kept] = rows


# --- resolve -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Requests:
    """Requests of the step that are not padding, A of them, in batch order; int64 tensors."""

    batch_index: torch.Tensor
    slots: torch.Tensor
    table_rows: torch.Tensor
    owner: torch.Tensor
    """[num_query_rows]: index into the A requests, -1 = padding row."""

    @property
    def count(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True)
class _Lanes:
    """Lanes that ask for a row, in order of appearance (row by row, lane by lane)."""

    live: torch.Tensor
    """bool [num_query_rows, top_k]: which lanes these are."""
    physical: torch.Tensor
    """int64: physical row of the lanes on resident pages; 0 elsewhere."""
    is_hot: torch.Tensor
    """bool: the lanes that are not resident. What follows has their order."""
    hot_owner: torch.Tensor
    host_row: torch.Tensor


@dataclass
class _Found:
    """Distinct host rows of the step, sorted by (request, host row)."""

    owner: torch.Tensor
    host_row: torch.Tensor
    inverse: torch.Tensor
    """Per lane of `_Lanes.host_row`: index into these rows."""
    hot_slot: torch.Tensor
    """Hot slot of each row, once `_take_victims` has filled in the misses."""
    used: torch.Tensor
    """bool [A, hot_rows]: slots that hold a row of this step."""
    missed: torch.Tensor
    """Indices of the missed rows, by request, in order of first appearance."""


def _active_requests(inputs: StepInputs) -> _Requests:
    starts = inputs.query_starts.long()
    counts = starts[1:] - starts[:-1]
    active = (inputs.request_slots >= 0) & (counts > 0)
    index = torch.where(active, active.long().cumsum(0) - 1, -1)
    owner = torch.full((inputs.num_query_rows,), -1, dtype=torch.int64)
    owner[: int(starts[-1])] = index.repeat_interleave(counts)
    return _Requests(
        batch_index=active.nonzero().flatten(),
        slots=inputs.request_slots[active].long(),
        table_rows=inputs.table_rows[active].long(),
        owner=owner,
    )


def _entries(table: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Blocks at (rows, pages) as int64; 0 past the end of the table."""
    width = table.shape[1]
    if width == 0:
        return torch.zeros_like(pages)
    blocks = table[rows, pages.clamp(max=width - 1)].long()
    return torch.where(pages < width, blocks, 0)


def _translate(requests: _Requests, tables: ResidencyTables, inputs: StepInputs) -> _Lanes:
    live = (inputs.positions >= 0) & (requests.owner >= 0)[:, None]
    position = inputs.positions[live].long()
    owner = requests.owner[:, None].expand_as(live)[live]
    page, row = position // tables.block_size, position % tables.block_size
    resident = _entries(tables.resident, requests.slots[owner], page)
    is_hot = resident == 0
    hot_owner = owner[is_hot]
    source = _entries(tables.source, requests.table_rows[hot_owner], page[is_hot])
    region = _entries(tables.hot, requests.table_rows[hot_owner], torch.zeros_like(source))
    invalid = (source == 0) | (region == 0)
    if bool(invalid.any()):
        first = int(invalid.nonzero()[0])
        what = "host row" if int(source[first]) == 0 else "hot region"
        slot = int(requests.slots[hot_owner[first]])
        raise UsageError(
            f"position {int(position[is_hot][first])} of request slot {slot} has no resident page "
            f"and no {what} ({int(invalid.sum())} such lanes)",
            remedy="give each page a host block, and each request a hot region, before it is read",
            request_slot=slot,
            position=int(position[is_hot][first]),
        )
    return _Lanes(
        live=live,
        physical=torch.where(is_hot, 0, resident * tables.block_stride_rows + row),
        is_hot=is_hot,
        hot_owner=hot_owner,
        host_row=source * tables.block_size + row[is_hot],
    )


def _look_up(requests: _Requests, lanes: _Lanes, state: HotState) -> _Found:
    # Request and host row in one int64: 20 bits and 41 bits (interface.MAX_REQUEST_SLOTS).
    keys, inverse = torch.unique(
        (lanes.hot_owner << MAX_HOST_ROW_BITS) | lanes.host_row, return_inverse=True
    )
    owner, host_row = keys >> MAX_HOST_ROW_BITS, keys & ((1 << MAX_HOST_ROW_BITS) - 1)
    hot_rows = state.hot_rows
    held = state.host_rows[requests.slots]
    held_owner, held_slot = (held >= 0).nonzero(as_tuple=True)
    held_keys = (held_owner << MAX_HOST_ROW_BITS) | held[held_owner, held_slot]
    hot_slot = torch.full_like(keys, hot_rows)
    used = torch.zeros((requests.count, hot_rows), dtype=torch.bool)
    if keys.numel():
        place = torch.searchsorted(keys, held_keys).clamp(max=keys.numel() - 1)
        hit = keys[place] == held_keys
        hot_slot.scatter_reduce_(0, place[hit], held_slot[hit], reduce="amin")
    present = hot_slot < hot_rows
    used[owner[present], hot_slot[present]] = True
    first = torch.full_like(keys, inverse.numel())
    first.scatter_reduce_(0, inverse, torch.arange(inverse.numel()), reduce="amin")
    missed = (~present).nonzero().flatten()
    missed = missed[first[missed].argsort()]
    return _Found(owner, host_row, inverse, hot_slot, used, missed)


def _take_victims(requests: _Requests, found: _Found, state: HotState) -> None:
    """Give each missed row its slot; the state is not touched yet."""
    counts = torch.bincount(found.owner[found.missed], minlength=requests.count)
    victims: list[torch.Tensor] = []
    slot_numbers = torch.arange(state.hot_rows)
    for request, count in enumerate(counts.tolist()):
        if count:
            age = state.last_use[requests.slots[request]].long() * state.hot_rows + slot_numbers
            age[found.used[request]] = torch.iinfo(torch.int64).max
            oldest = age.kthvalue(count).values
            victims.append((age <= oldest).nonzero().flatten())
    if victims:
        found.hot_slot[found.missed] = torch.cat(victims)


def _hot_physical_rows(requests: _Requests, found: _Found, tables: ResidencyTables) -> torch.Tensor:
    size = tables.block_size
    block = _entries(tables.hot, requests.table_rows[found.owner], found.hot_slot // size)
    if bool((block == 0).any()):
        raise UsageError("a hot region has the null block behind its first block")
    return block * tables.block_stride_rows + found.hot_slot % size


def _write_plan(
    requests: _Requests,
    lanes: _Lanes,
    found: _Found,
    hot_physical: torch.Tensor,
    inputs: StepInputs,
    plan: ResolvePlan,
) -> None:
    physical = lanes.physical
    physical[lanes.is_hot] = hot_physical[found.inverse]
    rows = plan.physical_rows[: inputs.num_query_rows]
    rows.fill_(-1)
    rows[lanes.live] = physical.to(rows.dtype)
    plan.valid_counts[: inputs.num_query_rows] = lanes.live.sum(dim=1).int()
    owner = found.owner[found.missed]
    counts = torch.bincount(owner, minlength=requests.count)
    plan.miss_counts.zero_()
    plan.miss_counts[requests.batch_index] = counts.int()
    column = torch.arange(owner.numel()) - (counts.cumsum(0) - counts)[owner]
    place = (requests.batch_index[owner], column)
    plan.miss_source_rows[place] = found.host_row[found.missed]
    plan.miss_device_rows[place] = hot_physical[found.missed]


def _write_state(requests: _Requests, lanes: _Lanes, found: _Found, state: HotState) -> None:
    state.clock[requests.slots] += 1
    slots = requests.slots[found.owner]
    state.last_use[slots, found.hot_slot] = state.clock[slots]
    missed = found.missed
    state.host_rows[slots[missed], found.hot_slot[missed]] = found.host_row[missed]
    is_miss = torch.zeros(found.owner.numel(), dtype=torch.bool)
    is_miss[missed] = True
    miss_lanes = int(is_miss[found.inverse].sum())
    added = {
        Counter.RESIDENT_LANES: lanes.physical.numel() - lanes.host_row.numel(),
        Counter.HOT_LANES: lanes.host_row.numel() - miss_lanes,
        Counter.MISS_LANES: miss_lanes,
        Counter.MISS_ROWS: missed.numel(),
        Counter.TRANSACTIONS: requests.count,
    }
    for counter, value in added.items():
        state.counters[counter] += value


# --- copies --------------------------------------------------------------------------------------


def _row_items(pages: torch.Tensor) -> _Rows:
    """uint8 ``[..., row_bytes]`` as an array ``[...]`` of whole rows. Shares the memory."""
    row = np.dtype((np.void, pages.shape[-1]))
    items: _Rows = pages.numpy().view(row)[..., 0]
    return items


def _widen(pages: GroupPages) -> torch.Tensor:
    """Host pages of an interleaved group as ``[num_blocks, block_size, layers * row_bytes]``."""
    first = pages.host[0]
    return first.as_strided((*first.shape[:2], pages.num_layers * pages.row_bytes), first.stride())


@dataclass(frozen=True, eq=False)
class _Flat:
    """Rows on one axis, without gaps between them."""

    rows: _Rows
    first_words: npt.NDArray[np.uint64]


def _flat_rows(items: _Rows, rows_per_block: int) -> _Flat | None:
    """Rows of all blocks as one axis with ``rows_per_block`` ids a block.

    None where blocks are no whole number of rows apart, or there is something between rows.
    """
    block_stride, row_stride = items.strides
    if rows_per_block * row_stride != block_stride or row_stride != items.itemsize:
        return None
    count = (items.shape[0] - 1) * rows_per_block + items.shape[1]
    rows = np.lib.stride_tricks.as_strided(items, shape=(count,), strides=(row_stride,))
    return _Flat(rows, rows.view(np.uint64).reshape(count, -1)[:, 0])


@dataclass(frozen=True, eq=False)
class _RowCopy:
    """From one region of host memory to the layers whose rows lie side by side in it.

    ``flat_*`` index rows directly; they are None where blocks are no whole number of rows apart.
    """

    source: _Rows
    source_rows_per_block: int
    flat_source: _Flat | None
    targets: list[_Rows]
    target_rows_per_block: int
    flat_targets: list[_Flat] | None


def _row_copies(pages: GroupPages) -> list[_RowCopy]:
    if pages.host_layout is HostLayout.GROUP_INTERLEAVED:
        return [_row_copy(_widen(pages), list(pages.device), pages)]
    layers = zip(pages.host, pages.device, strict=True)
    return [_row_copy(host, [device], pages) for host, device in layers]


def _row_copy(host: torch.Tensor, layers: list[torch.Tensor], pages: GroupPages) -> _RowCopy:
    source, targets = _row_items(host), [_row_items(layer) for layer in layers]
    flat = _flat_rows(source, pages.block_size)
    if source.itemsize > _CHUNK_BYTES:
        flat = None
    flats = [_flat_rows(target, pages.block_stride_rows) for target in targets]
    known = [each for each in flats if each is not None]
    return _RowCopy(
        source=source,
        source_rows_per_block=pages.block_size,
        flat_source=flat,
        targets=targets,
        target_rows_per_block=pages.block_stride_rows,
        flat_targets=known if len(known) == len(flats) else None,
    )


def _runs(target_rows: _Ids) -> list[tuple[int, int]] | None:
    """Ranges of ids that follow each other, or None where they are too short to be worth a call."""
    # A look at a few pairs first: the whole would be a twentieth of a gather of scattered rows.
    sample = target_rows[: target_rows.size // _MIN_RUN_ROWS * _MIN_RUN_ROWS]
    pairs = sample.reshape(-1, _MIN_RUN_ROWS)
    if 2 * np.count_nonzero(pairs[:, 1] - pairs[:, 0] == 1) < len(pairs):
        return None
    breaks = np.flatnonzero(target_rows[1:] - target_rows[:-1] != 1) + 1
    if (breaks.size + 1) * _MIN_RUN_ROWS > target_rows.size:
        return None
    return list(itertools.pairwise([0, *breaks.tolist(), target_rows.size]))


def _copy_rows(
    copy: _RowCopy,
    source_rows: _Ids,
    target_rows: _Ids,
    runs: list[tuple[int, int]] | None,
    scratch: npt.NDArray[np.uint8],
) -> None:
    source, targets = copy.flat_source, copy.flat_targets
    if source is None or targets is None:
        _copy_skewed_rows(copy, source_rows, target_rows)
        return
    if len(targets) == 1 and runs is not None:
        for start, end in runs:
            place = int(target_rows[start])
            rows = source_rows[start:end]
            source.first_words[rows]  # see _copy_scattered_rows
            out = targets[0].rows[place : place + rows.size]
            source.rows.take(rows, out=out, mode="clip")
    else:
        _copy_scattered_rows(
            source, targets, source_rows, target_rows, scratch, in_runs=runs is not None
        )


def _copy_scattered_rows(
    source: _Flat,
    targets: list[_Flat],
    source_rows: _Ids,
    target_rows: _Ids,
    scratch: npt.NDArray[np.uint8],
    *,
    in_runs: bool,
) -> None:
    """By chunks that stay in the second-level cache between their two copies.

    One word of each row is read before the row is copied from, or over. These loads do not depend
    on each other, so their cache and TLB misses overlap; the row copies behind them would take them
    one by one. Measured on rows spread over 4 GB: 300 to 260 ns a row of 656 B read, 450 to 360 of
    1,152 B; on hot regions of 43 MB: 290 to 270 a scattered row of 656 B, both copies together.
    """
    wide_type, type_ = source.rows.dtype, targets[0].rows.dtype
    chunk = scratch.size // wide_type.itemsize
    buffer = scratch[: chunk * wide_type.itemsize].reshape(chunk, wide_type.itemsize)
    wide, parts = buffer.view(wide_type)[:, 0], buffer.view(type_)
    sides = [(each.rows, each.first_words, parts[:, i]) for i, each in enumerate(targets)]
    for start in range(0, source_rows.size, chunk):
        rows = source_rows[start : start + chunk]
        places = target_rows[start : start + chunk]
        count = rows.size
        source.first_words[rows]
        source.rows.take(rows, out=wide[:count], mode="clip")
        for target, first_words, part in sides:
            if not in_runs:  # the next row is adjacent: the processor fetches it by itself
                first_words[places]
            target[places] = part[:count]


def _copy_skewed_rows(copy: _RowCopy, source_rows: _Ids, target_rows: _Ids) -> None:
    """The same through (block, row): for rows that cannot be counted through."""
    size, stride = copy.source_rows_per_block, copy.target_rows_per_block
    rows = np.ascontiguousarray(copy.source[source_rows // size, source_rows % size])
    parts = rows.view(copy.targets[0].dtype).reshape(rows.size, len(copy.targets))
    for index, target in enumerate(copy.targets):
        target[target_rows // stride, target_rows % stride] = parts[:, index]


def _block_pairs(
    pages: GroupPages, device_blocks: torch.Tensor, host_blocks: torch.Tensor
) -> list[tuple[int, int]]:
    check_block_pairs(
        pages=pages,
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        depth=CheckDepth.VALUES,
    )
    pairs = zip(device_blocks.tolist(), host_blocks.tolist(), strict=True)
    return [(device, host) for device, host in pairs if device > 0 and host > 0]


def _check_distinct(name: str, ids: list[int]) -> None:
    if len(set(ids)) != len(ids):
        raise UsageError(f"{name} names one place twice: which copy would win is not defined")


def _check_range(name: str, ids: npt.NDArray[Any], count: int) -> None:
    # As unsigned numbers the negative ones are the largest: one pass finds both kinds.
    if ids.size and int(np.maximum.reduce(ids.view(f"u{ids.itemsize}"))) >= count:
        raise UsageError(
            f"{name} has values from {int(ids.min())} to {int(ids.max())}, expected 0 to "
            f"{count - 1}"
        )
