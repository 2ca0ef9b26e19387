"""The one interface of the data plane: what `reference.py` does on a CPU and kernels do on a GPU.

Everything that a step needs is a tensor of fixed shape inside a frozen dataclass, so that an
implementation can be captured in a CUDA graph: no operation allocates, none returns a Python
number, counts live in tensors. Shapes, dtypes and strides are checked once, when a dataclass is
made (the door); `check_*` with `CheckDepth.VALUES` also reads the values, which a GPU cannot do
without waiting, so there only tests and the reference do it.

Words used here:

- *request slot*: row of the hot state that a request owns from admission to its end.
- *slot (of a row)*: ``block * block_size + row``, as engines write it in slot mappings.
- *host row*: slot in the host pool, int64, below ``2**MAX_HOST_ROW_BITS``.
- *physical row*: row id in a layer's attention view,
  ``block * block_stride_rows + row``; the same id is right for every layer of an index group.

Called by the runtime's parts and `mirror.py` only, on the worker's compute thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, UsageError

MAX_HOST_ROW_BITS: Final = 41
"""A host row is below MAX_BLOCKS_PER_BACKING * MAX_BLOCK_SIZE = 2**41."""

MAX_REQUEST_SLOTS: Final = 1 << 20
EMPTY_ROW: Final = -1
"""Hot slot that holds no row; also the id of padding lanes and padding requests."""


class Counter(enum.IntEnum):
    """Index into `HotState.counters`. Only ever added to; read them when the stream is idle."""

    RESIDENT_LANES = 0
    """Top-k lanes answered by a resident page."""
    HOT_LANES = 1
    """Lanes answered by a hot row that an earlier step brought."""
    MISS_LANES = 2
    """Lanes on rows that this step had to plan (a duplicate lane counts too)."""
    MISS_ROWS = 3
    """Distinct rows planned: what the gather copies, once per layer."""
    INVALID_LANES = 4
    """Lanes with neither a resident page nor a host row (written as -1)."""
    TRANSACTIONS = 5
    """Requests resolved (one a step, whatever its number of query rows)."""
    INVALIDATED_ROWS = 6
    """Hot rows forgotten by `invalidate`."""


class CheckDepth(enum.Enum):
    """How much a check looks at."""

    SHAPES = "shapes"
    """dtype, shape, strides, device and limits: no access to the data."""
    VALUES = "values"
    """Also that ids are in range: reads the tensors, so it waits for the device."""


class Overlap(enum.Enum):
    """What the device does while rows are copied."""

    NONE = "none"
    """It waits for them: the copy may take what it can use."""

    COMPUTE = "compute"
    """It computes, on another stream: the copy leaves the multiprocessors to that."""


class HostLayout(enum.Enum):
    """How an index group's rows lie in host memory."""

    LAYER_MAJOR = "layer_major"
    """Each layer is a region of its own."""
    GROUP_INTERLEAVED = "group_interleaved"
    """The rows of the group's layers lie side by side: one miss is one contiguous read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HotState:
    """What is in the hot regions of all request slots. Updated in place by the operations.

    Attributes:
        host_rows: int64 ``[max_num_reqs, hot_rows]``, contiguous: host row in each hot slot, -1
            where empty. A host row occurs at most once in a request.
        last_use: int32 ``[max_num_reqs, hot_rows]``, contiguous: the request's clock when the slot
            was used last; 0 where empty.
        clock: int32 ``[max_num_reqs]``: resolves done for the slot since its reset.
        counters: int64 ``[len(Counter)]``.
        workspace: What an implementation keeps beside (for example a hash of host_rows), or None.
            Only the implementation that made it may look inside.
    """

    host_rows: torch.Tensor
    last_use: torch.Tensor
    clock: torch.Tensor
    counters: torch.Tensor
    workspace: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("host_rows", self.host_rows, dtype=torch.int64, ndim=2)
        shape = tuple(self.host_rows.shape)
        device = self.host_rows.device
        check_tensor("last_use", self.last_use, dtype=torch.int32, shape=shape, device=device)
        check_tensor("clock", self.clock, dtype=torch.int32, shape=shape[:1], device=device)
        check_tensor(
            "counters", self.counters, dtype=torch.int64, shape=(len(Counter),), device=device
        )
        if not (self.host_rows.is_contiguous() and self.last_use.is_contiguous()):
            raise GeometryError("host_rows and last_use must be contiguous")
        check_hot_size(hot_rows=shape[1], max_query_rows=1, top_k=1)
        if not 0 < shape[0] <= MAX_REQUEST_SLOTS:
            raise GeometryError(
                f"hot state has {shape[0]} request slots, the limit is {MAX_REQUEST_SLOTS}"
            )

    @property
    def max_num_reqs(self) -> int:
        """Number of request slots."""
        return self.host_rows.shape[0]

    @property
    def hot_rows(self) -> int:
        """Hot slots of each request."""
        return self.host_rows.shape[1]


def allocate_hot_state(
    *,
    max_num_reqs: int,
    hot_rows: int,
    device: torch.device | str,
    workspace: torch.Tensor | None = None,
) -> HotState:
    """Make an empty hot state.

    Raises:
        GeometryError: The sizes pass a limit.
    """
    check_hot_size(hot_rows=hot_rows, max_query_rows=1, top_k=1)
    shape = (max_num_reqs, hot_rows)
    return HotState(
        host_rows=torch.full(shape, EMPTY_ROW, dtype=torch.int64, device=device),
        last_use=torch.zeros(shape, dtype=torch.int32, device=device),
        clock=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        counters=torch.zeros(len(Counter), dtype=torch.int64, device=device),
        workspace=workspace,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidencyTables:
    """Block tables of all requests. Borrowed: the engine writes them between steps.

    Attributes:
        source: int32 ``[table_rows, num_pages]``: host block of each page, 0 = no host row.
        resident: int32 ``[max_num_reqs, num_pages]``, by request slot: device block of each page,
            0 = read from host. May have fewer pages than ``source``: what lies behind is not
            resident.
        hot: int32 ``[table_rows, num_hot_blocks]``: device blocks of the hot region. A row that
            starts with 0 has no hot region: its request may read resident pages only.
        block_size: Rows of a block, the same in all three.
        block_stride_rows: Physical rows from one device block to the next.
        num_source_blocks: Host blocks, the null block included.
        num_device_blocks: Device blocks, the null block included.

    ``source`` and ``hot`` are read at `StepInputs.table_rows`, so they may be the engine's tables
    of the batch or tables by request slot. Rows may be strided, columns may not.
    """

    source: torch.Tensor
    resident: torch.Tensor
    hot: torch.Tensor
    block_size: int
    block_stride_rows: int
    num_source_blocks: int
    num_device_blocks: int

    def __post_init__(self) -> None:
        device = self.source.device
        for name in ("source", "resident", "hot"):
            check_tensor(name, getattr(self, name), dtype=torch.int32, ndim=2, device=device)
            check_unit_stride(name, getattr(self, name))
        check_block_size(self.block_size)
        if self.block_stride_rows < self.block_size:
            raise GeometryError(
                f"block stride of {self.block_stride_rows} rows is less than the block size "
                f"{self.block_size}"
            )
        if not 0 < self.num_source_blocks <= limits.MAX_BLOCKS_PER_BACKING:
            raise GeometryError(
                f"num_source_blocks is {self.num_source_blocks}, expected 1 to "
                f"{limits.MAX_BLOCKS_PER_BACKING}"
            )
        if not 0 < self.num_device_blocks <= limits.MAX_BLOCKS_PER_BACKING:
            raise GeometryError(
                f"num_device_blocks is {self.num_device_blocks}, expected 1 to "
                f"{limits.MAX_BLOCKS_PER_BACKING}"
            )

    @property
    def max_physical_row(self) -> int:
        """Largest physical row id of any block."""
        return (self.num_device_blocks - 1) * self.block_stride_rows + self.block_size - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """One step's top-k, by query row, and which rows belong to which request.

    Attributes:
        positions: int32 ``[num_query_rows, top_k]``: token positions of the request; -1 lanes stay
            -1 and touch nothing; duplicates are legal.
        request_slots: int32 ``[num_requests]``: request slot of each request, -1 = padding. No slot
            occurs twice.
        table_rows: int32 ``[num_requests]``: row of the request in the source and hot tables. The
            same tensor as ``request_slots`` where these tables are by request slot.
        query_starts: int32 ``[num_requests + 1]``, ascending from 0: query rows
            ``query_starts[i] .. query_starts[i + 1]`` are request i's and resolve as one
            transaction. Rows at and after the last entry are padding.
    """

    positions: torch.Tensor
    request_slots: torch.Tensor
    table_rows: torch.Tensor
    query_starts: torch.Tensor

    def __post_init__(self) -> None:
        device = self.positions.device
        check_tensor("positions", self.positions, dtype=torch.int32, ndim=2)
        check_unit_stride("positions", self.positions)
        check_top_k(self.positions.shape[1])
        check_tensor("request_slots", self.request_slots, dtype=torch.int32, ndim=1, device=device)
        count = self.request_slots.shape[0]
        check_tensor(
            "table_rows", self.table_rows, dtype=torch.int32, shape=(count,), device=device
        )
        check_tensor(
            "query_starts", self.query_starts, dtype=torch.int32, shape=(count + 1,), device=device
        )

    @property
    def num_query_rows(self) -> int:
        """Query rows, padding included."""
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests, padding included."""
        return self.request_slots.shape[0]

    @property
    def top_k(self) -> int:
        """Lanes of a query row."""
        return self.positions.shape[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvePlan:
    """Where `resolve` writes: allocated once, shared by all layers of an index group.

    Attributes:
        physical_rows: int32 or int64 ``[max_query_rows, top_k]``: physical row of each lane, -1
            for -1 lanes, padding and invalid lanes. Rows past the step's are left as they are.
        valid_counts: int32 ``[max_query_rows]``: lanes of the row that are not -1.
        miss_source_rows: int64 ``[max_num_requests, max_misses]``: host rows to copy, per request
            of the step, in order of first appearance (row by row, lane by lane).
        miss_device_rows: int64, same shape: physical rows to copy them to.
        miss_counts: int32 ``[max_num_requests]``: planned rows of each request of the step; 0 for
            padding and for requests past the step's. Entries past the count are not defined.
    """

    physical_rows: torch.Tensor
    valid_counts: torch.Tensor
    miss_source_rows: torch.Tensor
    miss_device_rows: torch.Tensor
    miss_counts: torch.Tensor

    def __post_init__(self) -> None:
        if self.physical_rows.dtype not in (torch.int32, torch.int64):
            raise GeometryError(
                f"physical_rows has dtype {self.physical_rows.dtype}, expected int32 or int64"
            )
        device = self.physical_rows.device
        rows = self.physical_rows.shape[0]
        check_tensor("valid_counts", self.valid_counts, dtype=torch.int32, shape=(rows,))
        check_tensor("miss_source_rows", self.miss_source_rows, dtype=torch.int64, ndim=2)
        shape = tuple(self.miss_source_rows.shape)
        check_tensor(
            "miss_device_rows", self.miss_device_rows, dtype=torch.int64, shape=shape, device=device
        )
        check_tensor("miss_counts", self.miss_counts, dtype=torch.int32, shape=shape[:1])
        for name in ("physical_rows", "miss_source_rows", "miss_device_rows"):
            if not getattr(self, name).is_contiguous():
                raise GeometryError(f"{name} must be contiguous")

    @property
    def max_query_rows(self) -> int:
        """Query rows that fit."""
        return self.physical_rows.shape[0]

    @property
    def max_num_requests(self) -> int:
        """Requests of one step that fit."""
        return self.miss_counts.shape[0]


def allocate_plan(
    *,
    max_num_requests: int,
    max_query_rows: int,
    max_rows_per_request: int,
    top_k: int,
    device: torch.device | str,
    row_dtype: torch.dtype = torch.int32,
) -> ResolvePlan:
    """Make the buffers of a plan.

    Args:
        max_num_requests: Requests of one step.
        max_query_rows: Query rows of one step, over all requests.
        max_rows_per_request: Query rows of one request in one step.
        top_k: Lanes of a query row.
        device: Where the kernels run.
        row_dtype: int32, or int64 where a physical row does not fit in 31 bits.

    Raises:
        GeometryError: A size passes its limit.
    """
    check_top_k(top_k)
    check_rows_per_request(max_rows_per_request)
    misses = (max_num_requests, max_rows_per_request * top_k)
    return ResolvePlan(
        physical_rows=torch.full((max_query_rows, top_k), -1, dtype=row_dtype, device=device),
        valid_counts=torch.zeros(max_query_rows, dtype=torch.int32, device=device),
        miss_source_rows=torch.full(misses, -1, dtype=torch.int64, device=device),
        miss_device_rows=torch.full(misses, -1, dtype=torch.int64, device=device),
        miss_counts=torch.zeros(max_num_requests, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupPages:
    """Bytes of all layers of an index group, in host memory and on the device. Borrowed.

    Attributes:
        host: Per layer, uint8 ``[num_source_blocks, block_size, row_bytes]`` on the CPU, strided:
            ``layer_major`` or ``group_interleaved`` only differ in strides and data pointers.
        device: Per layer, uint8 ``[num_device_blocks, block_size, row_bytes]`` on the compute
            device; the same strides in every layer, rows of a block contiguous.
        block_stride_rows: Physical rows from one device block to the next. Physical row p is row
            ``p % block_stride_rows`` of block ``p // block_stride_rows``.

    All pointers and strides are multiples of 16 bytes.
    """

    host: tuple[torch.Tensor, ...]
    device: tuple[torch.Tensor, ...]
    block_stride_rows: int

    def __post_init__(self) -> None:
        check_pages(self)

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.host)

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self.host[0].shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one layer's row."""
        return self.host[0].shape[2]

    @property
    def host_layout(self) -> HostLayout:
        """GROUP_INTERLEAVED where layer i's rows start right behind layer i - 1's.

        So are the followers of an interleaved group without their leader: they lie side by side in
        rows that are wider than they are.
        """
        first = self.host[0]
        adjacent = all(
            layer.data_ptr() == first.data_ptr() + index * self.row_bytes
            for index, layer in enumerate(self.host)
        )
        room = first.stride(1) >= self.num_layers * self.row_bytes
        if self.num_layers > 1 and adjacent and room:
            return HostLayout.GROUP_INTERLEAVED
        return HostLayout.LAYER_MAJOR

    def layers(self, start: int, stop: int) -> GroupPages:
        """The same pages, layers ``start .. stop`` only."""
        return GroupPages(
            host=self.host[start:stop],
            device=self.device[start:stop],
            block_stride_rows=self.block_stride_rows,
        )


class KernelBackend(Protocol):
    """What each implementation offers. All work goes to the current stream, in call order."""

    name: str

    def make_hot_state(
        self, *, max_num_reqs: int, hot_rows: int, device: torch.device | str
    ) -> HotState:
        """Make an empty hot state, with this implementation's workspace. Allocates."""
        ...

    def resolve(
        self,
        *,
        state: HotState,
        tables: ResidencyTables,
        inputs: StepInputs,
        plan: ResolvePlan,
    ) -> None:
        """Translate one step's top-k and plan its misses. Each request is one transaction.

        The order is fixed, so that two implementations can be compared byte for byte:

        1. The request's clock goes up by one (requests with slot -1 or without query rows are
           skipped: state untouched, lanes -1, count 0).
        2. Lane with position p < 0: -1. Page ``p // block_size`` with a resident block: that
           block's physical row. Else its host row is looked up in the request's hot slots.
        3. Slots that hold a row of this step are *used*. Rows that are in no slot are the misses, m
           of them, in order of first appearance.
        4. The victims are the m slots of those not used with the least (last_use, slot). Empty
           slots have last_use 0, so they go first. Miss i takes the i-th victim *by slot number*.
        5. ``last_use`` of used slots and victims becomes the clock.

        A lane with neither a resident block nor a host row, past the end of the tables, or in need
        of a hot region where there is none, is invalid: kernels write -1 and count it; the
        reference raises before it changes anything.

        Raises:
            UsageError: (reference only) An invalid lane, or values out of range.
        """
        ...

    def gather(
        self, *, pages: GroupPages, plan: ResolvePlan, overlap: Overlap = Overlap.NONE
    ) -> None:
        """Copy the planned rows, host to hot, for all layers of ``pages``.

        Args:
            pages: Host and device pages of the layers.
            plan: Of the step; not gathered into the same pages by two streams at once.
            overlap: What else the device does meanwhile. Changes how fast, not what is copied.
        """
        ...

    def invalidate(self, *, state: HotState, host_blocks: torch.Tensor, block_size: int) -> None:
        """Forget every hot row, of every request, that lies in one of these host blocks.

        Args:
            state: Updated in place: the slots become empty.
            host_blocks: int32 ``[n]``, any order, duplicates legal; entries below 1 are padding.
            block_size: Rows of a block.
        """
        ...

    def reset(self, *, state: HotState, request_slots: torch.Tensor) -> None:
        """Empty the hot regions of these request slots, clocks included.

        Args:
            state: Updated in place.
            request_slots: int32 ``[n]``; -1 is padding.
        """
        ...

    def mirror_blocks(
        self, *, pages: GroupPages, device_blocks: torch.Tensor, host_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, device to host, all layers of ``pages``.

        Args:
            pages: The layers to copy (see `GroupPages.layers` for a part of them).
            device_blocks: int32 ``[n]``; pairs with an entry below 1 are padding.
            host_blocks: int32 ``[n]``; no block twice.
        """
        ...

    def mirror_rows(
        self, *, pages: GroupPages, device_slots: torch.Tensor, host_slots: torch.Tensor
    ) -> None:
        """Copy rows, device to host: those that one decode step wrote.

        Args:
            pages: The layers to copy.
            device_slots: int64 ``[n]``: ``block * block_size + row`` (the resident slot mapping);
                pairs with a negative entry are padding.
            host_slots: int64 ``[n]``: the same in host blocks (the mirror slot mapping).
        """
        ...

    def restore_blocks(
        self, *, pages: GroupPages, host_blocks: torch.Tensor, device_blocks: torch.Tensor
    ) -> None:
        """Copy whole blocks, host to device, all layers of ``pages``; else as `mirror_blocks`."""
        ...

    def stage(self, *, pages: GroupPages, host_slots: torch.Tensor, out: torch.Tensor) -> None:
        """Copy host rows into a contiguous buffer (prefill over host context).

        Args:
            pages: The layers to copy (usually one: ``pages.layers(i, i + 1)``).
            host_slots: int64 ``[n]``; a negative entry leaves its row of ``out`` as it is.
            out: uint8 ``[num_layers, >= n, row_bytes]``, contiguous, on the compute device.
        """
        ...


# --- checks: what a kernel would trap on ---------------------------------------------------------


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of another dtype, shape or device; nothing is ever cast.

    Raises:
        GeometryError: With expected and got.
    """
    if tensor.dtype != dtype:
        raise GeometryError(f"dtype of {name}: expected {dtype}, got {tensor.dtype}")
    if ndim is not None and tensor.dim() != ndim:
        raise GeometryError(
            f"shape of {name}: expected {ndim} dimensions, got {tuple(tensor.shape)}"
        )
    if shape is not None and tuple(tensor.shape) != shape:
        raise GeometryError(f"shape of {name}: expected {shape}, got {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise GeometryError(f"device of {name}: expected {device}, got {tensor.device}")


def check_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is strided.

    Raises:
        GeometryError: With the stride.
    """
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise GeometryError(f"last stride of {name}: expected 1, got {tensor.stride(-1)}")


def check_block_size(block_size: int) -> None:
    """Refuse a block size outside the limits.

    Raises:
        GeometryError: With value and limits.
    """
    if not limits.MIN_BLOCK_SIZE <= block_size <= limits.MAX_BLOCK_SIZE:
        raise GeometryError(
            f"block size is {block_size}, expected {limits.MIN_BLOCK_SIZE} to "
            f"{limits.MAX_BLOCK_SIZE}",
            block_size=block_size,
        )


def check_row_bytes(row_bytes: int) -> None:
    """Refuse rows that 16-byte lanes cannot copy.

    Raises:
        GeometryError: With the value.
    """
    if not 0 < row_bytes <= limits.MAX_ROW_BYTES or row_bytes % limits.ROW_ALIGNMENT_BYTES:
        raise GeometryError(
            f"a row has {row_bytes} bytes, expected a multiple of {limits.ROW_ALIGNMENT_BYTES} up "
            f"to {limits.MAX_ROW_BYTES}",
            remedy="pad the row to the next multiple of 16 bytes",
            row_bytes=row_bytes,
        )


def check_top_k(top_k: int) -> None:
    """Refuse a top-k that no kernel is built for.

    Raises:
        GeometryError: With value and limit.
    """
    if not 0 < top_k <= limits.MAX_TOP_K:
        raise GeometryError(f"top_k is {top_k}, expected 1 to {limits.MAX_TOP_K}", top_k=top_k)


def check_rows_per_request(rows: int) -> None:
    """Refuse more query rows of one request than a transaction holds.

    Raises:
        GeometryError: With value and limit.
    """
    if not 0 < rows <= limits.MAX_SPECULATIVE_ROWS:
        raise GeometryError(
            f"{rows} query rows a request, expected 1 to {limits.MAX_SPECULATIVE_ROWS}"
        )


def check_hot_size(*, hot_rows: int, max_query_rows: int, top_k: int) -> None:
    """Refuse a hot region that 16-bit slots or one step's rows do not fit in.

    Args:
        hot_rows: Hot slots of a request.
        max_query_rows: Query rows of one request in one step.
        top_k: Lanes of a query row.

    Raises:
        GeometryError: With all values.
    """
    if not 0 < hot_rows <= limits.MAX_HOT_ROWS:
        raise GeometryError(
            f"{hot_rows} hot rows a request, expected 1 to {limits.MAX_HOT_ROWS}: hot slots are "
            "16-bit",
            remedy="lower device_buffer_size",
            hot_rows=hot_rows,
            limit=limits.MAX_HOT_ROWS,
        )
    if hot_rows < max_query_rows * top_k:
        raise GeometryError(
            f"{hot_rows} hot rows a request are less than the {max_query_rows * top_k} that one "
            f"step may need (max_query_rows={max_query_rows}, top_k={top_k})",
            remedy="raise device_buffer_size or lower the number of speculative tokens",
            hot_rows=hot_rows,
            needed=max_query_rows * top_k,
        )


def check_pages(pages: GroupPages) -> None:
    """Refuse pages that 16-byte copies cannot address.

    Raises:
        GeometryError: Layers that differ, host tensors that are not in host memory, rows or strides
            that are no multiple of 16 bytes.
    """
    if not pages.host or len(pages.host) != len(pages.device):
        raise GeometryError(
            f"an index group needs one host and one device tensor a layer, got "
            f"{len(pages.host)} and {len(pages.device)}"
        )
    if len(pages.host) > limits.MAX_LAYERS:
        raise GeometryError(f"{len(pages.host)} layers in a group, limit {limits.MAX_LAYERS}")
    host_shape, device_shape = tuple(pages.host[0].shape), tuple(pages.device[0].shape)
    for side, layers, shape in (
        ("host", pages.host, host_shape),
        ("device", pages.device, device_shape),
    ):
        for index, tensor in enumerate(layers):
            name = f"{side} pages of layer {index}"
            check_tensor(name, tensor, dtype=torch.uint8, ndim=3, device=layers[0].device)
            check_tensor(name, tensor, dtype=torch.uint8, shape=shape)
            _check_alignment(name, tensor)
            if tensor.stride() != layers[0].stride():
                raise GeometryError(
                    f"strides of {name}: expected {layers[0].stride()}, got {tensor.stride()}"
                )
    if pages.host[0].device.type != "cpu":
        raise GeometryError(f"host pages must be in host memory, got {pages.host[0].device}")
    if host_shape[1:] != device_shape[1:]:
        raise GeometryError(
            f"host pages have [block_size, row_bytes] {host_shape[1:]}, device pages "
            f"{device_shape[1:]}"
        )
    check_block_size(host_shape[1])
    check_row_bytes(host_shape[2])
    _check_device_stride(pages)


def _check_device_stride(pages: GroupPages) -> None:
    first = pages.device[0]
    if first.shape[1] > 1 and first.stride(1) != pages.row_bytes:
        raise GeometryError(
            f"rows of a device block must be contiguous: stride {first.stride(1)}, row of "
            f"{pages.row_bytes} bytes"
        )
    rows = pages.block_stride_rows
    flat = rows * pages.row_bytes == first.stride(0)
    if not flat and rows != pages.block_size:
        raise GeometryError(
            f"block_stride_rows is {rows}, but the device block stride of {first.stride(0)} bytes "
            f"has {first.stride(0) / pages.row_bytes:g} rows of {pages.row_bytes} bytes and a "
            f"block {pages.block_size}"
        )


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    check_unit_stride(name, tensor)
    unit = limits.ROW_ALIGNMENT_BYTES
    offsets = {
        "data pointer": tensor.data_ptr(),
        "block stride": tensor.stride(0),
        "row stride": tensor.stride(1),
    }
    for what, value in offsets.items():
        if value % unit:
            raise GeometryError(f"{what} of {name} is {value}, expected a multiple of {unit}")


def check_step(
    *,
    state: HotState,
    tables: ResidencyTables,
    inputs: StepInputs,
    plan: ResolvePlan,
    depth: CheckDepth = CheckDepth.SHAPES,
) -> None:
    """Refuse what `resolve` would trap on.

    Raises:
        GeometryError: Shapes, dtypes or limits that do not fit each other.
        UsageError: (VALUES) Ids out of range, a request slot twice, query rows out of order.
    """
    if inputs.num_query_rows > plan.max_query_rows or inputs.num_requests > plan.max_num_requests:
        raise GeometryError(
            f"step of {inputs.num_query_rows} query rows and {inputs.num_requests} requests, the "
            f"plan holds {plan.max_query_rows} and {plan.max_num_requests}"
        )
    if inputs.top_k != plan.physical_rows.shape[1]:
        raise GeometryError(
            f"top_k is {inputs.top_k}, the plan was made for {plan.physical_rows.shape[1]}"
        )
    max_misses = plan.miss_source_rows.shape[1]
    max_rows = max_misses // inputs.top_k
    check_hot_size(hot_rows=state.hot_rows, max_query_rows=max_rows, top_k=inputs.top_k)
    if tables.resident.shape[0] < state.max_num_reqs:
        raise GeometryError(
            f"resident table has {tables.resident.shape[0]} rows, the hot state "
            f"{state.max_num_reqs} request slots"
        )
    if tables.hot.shape[1] * tables.block_size < state.hot_rows:
        raise GeometryError(
            f"hot table of {tables.hot.shape[1]} blocks of {tables.block_size} rows cannot hold "
            f"{state.hot_rows} hot rows"
        )
    if plan.physical_rows.dtype == torch.int32 and tables.max_physical_row > 2**31 - 1:
        raise GeometryError(
            f"physical rows up to {tables.max_physical_row} do not fit in int32",
            remedy="make the plan with row_dtype=torch.int64",
        )
    for name, tensor in (("tables", tables.source), ("inputs", inputs.positions)):
        if tensor.device != state.host_rows.device:
            raise GeometryError(
                f"device of {name}: expected {state.host_rows.device}, got {tensor.device}"
            )
    if depth is CheckDepth.VALUES:
        _check_step_values(state, tables, inputs, max_rows)


def _check_step_values(
    state: HotState, tables: ResidencyTables, inputs: StepInputs, max_rows: int
) -> None:
    slots = inputs.request_slots
    active = slots >= 0
    _check_ids("request_slots", slots, low=-1, high=state.max_num_reqs - 1)
    if torch.unique(slots[active]).numel() != int(active.sum()):
        raise UsageError(f"a request slot occurs twice in one step: {slots.tolist()}")
    table_rows = inputs.table_rows[active]
    num_rows = min(tables.source.shape[0], tables.hot.shape[0])
    _check_ids("table_rows", table_rows, low=0, high=num_rows - 1)
    starts = inputs.query_starts
    counts = starts[1:] - starts[:-1]
    if int(starts[0]) != 0 or int(starts[-1]) > inputs.num_query_rows or bool((counts < 0).any()):
        raise UsageError(
            f"query_starts must ascend from 0 to at most {inputs.num_query_rows}, got "
            f"{starts.tolist()}"
        )
    if counts.numel() and int(counts[active].amax() if bool(active.any()) else 0) > max_rows:
        raise UsageError(
            f"{int(counts[active].amax())} query rows in one request, the plan holds {max_rows}"
        )
    _check_ids("positions", inputs.positions, low=-1, high=2**31 - 1)
    last = tables.num_source_blocks - 1
    _check_ids("source table", tables.source[table_rows.long()], low=0, high=last)
    last = tables.num_device_blocks - 1
    _check_ids("resident table", tables.resident[slots[active].long()], low=0, high=last)
    _check_ids("hot table", tables.hot[table_rows.long()], low=0, high=last)


def check_block_pairs(
    *,
    pages: GroupPages,
    device_blocks: torch.Tensor,
    host_blocks: torch.Tensor,
    depth: CheckDepth = CheckDepth.SHAPES,
) -> None:
    """Refuse block lists that `mirror_blocks` and `restore_blocks` would trap on.

    Raises:
        GeometryError: dtype or shape.
        UsageError: (VALUES) A block id past the end.
    """
    check_tensor("device_blocks", device_blocks, dtype=torch.int32, ndim=1)
    check_tensor("host_blocks", host_blocks, dtype=torch.int32, shape=tuple(device_blocks.shape))
    if depth is CheckDepth.VALUES:
        _check_ids("device_blocks", device_blocks, low=-1, high=pages.device[0].shape[0] - 1)
        _check_ids("host_blocks", host_blocks, low=-1, high=pages.host[0].shape[0] - 1)


def check_slots(
    *,
    name: str,
    slots: torch.Tensor,
    num_blocks: int,
    block_size: int,
    depth: CheckDepth = CheckDepth.SHAPES,
) -> None:
    """Refuse row slots that `mirror_rows` and `stage` would trap on.

    Raises:
        GeometryError: dtype or shape.
        UsageError: (VALUES) A slot past the end.
    """
    check_tensor(name, slots, dtype=torch.int64, ndim=1)
    if depth is CheckDepth.VALUES:
        _check_ids(name, slots, low=-1, high=num_blocks * block_size - 1)


def _check_ids(name: str, ids: torch.Tensor, *, low: int, high: int) -> None:
    if not ids.numel():
        return
    least, most = int(ids.amin()), int(ids.amax())
    if least < low or most > high:
        raise UsageError(
            f"{name} has values from {least} to {most}, expected {low} to {high}",
            least=least,
            most=most,
            low=low,
            high=high,
        )
