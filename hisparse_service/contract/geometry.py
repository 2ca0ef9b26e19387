"""All address arithmetic of both sides: where each (layer, block, row) lies, once, in integers.

Host side. A backing of `num_blocks` blocks is a row of *regions*, one a group of layers:

    layer_major         each layer is a group of its own (compatible with vLLM's LBNHC)
                        base_l + block * page + row * row_bytes
    group_interleaved   the rows of an index group's layers are adjacent: a miss of the group reads
                        num_layers * row_bytes contiguous bytes
                        base_g + (block * block_size + row) * (L * row_bytes) + i * row_bytes

The first is the second with L = 1, so there is one formula. A region holds `num_blocks * page * L`
bytes; the regions lie one after another, and what is left up to `num_blocks * block_stride_bytes`
is padding at the end.

Device side. Resident and hot groups overlay one block-outermost backing:
base + block * block_stride + offset + i * layer_stride + row * row_bytes.

Python integers are unbounded; the arrays made from these numbers are int64 on both sides (I10).
Pure: any thread.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import msgspec

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError

OS_PAGE_BYTES: Final = 4096
_ENCODING_VERSION: Final = 1


class HostLayout(enum.StrEnum):
    """How the rows of an index group's layers lie in host memory."""

    LAYER_MAJOR = "layer_major"
    GROUP_INTERLEAVED = "group_interleaved"


class LayerGroup(msgspec.Struct, frozen=True, array_like=True):
    """An index group: a leader layer and its followers, all with rows of one size."""

    num_layers: int
    row_bytes: int


class LayerPlace(msgspec.Struct, frozen=True):
    """Where one layer's rows are: offset + block * block_stride + row * row_stride, in bytes."""

    offset_bytes: int
    block_stride_bytes: int
    row_stride_bytes: int
    row_bytes: int

    def row_offset(self, block: int, row: int) -> int:
        """Byte offset of a row from the backing's start."""
        return self.offset_bytes + block * self.block_stride_bytes + row * self.row_stride_bytes


class HostGeometry(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The shape of a namespace's blocks in host memory.

    Args:
        layout: See the module's header.
        block_size: Tokens a block.
        groups: The index groups in layer order.
        os_page_bytes: What block strides and registration seams are rounded to.

    Raises:
        GeometryError: From `check`, which `decode_geometry` and `make` call.
    """

    layout: HostLayout
    block_size: int
    groups: tuple[LayerGroup, ...]
    os_page_bytes: int = OS_PAGE_BYTES

    @classmethod
    def make(
        cls,
        *,
        layout: HostLayout,
        block_size: int,
        groups: Sequence[LayerGroup],
        os_page_bytes: int = OS_PAGE_BYTES,
    ) -> HostGeometry:
        """A checked geometry.

        Raises:
            GeometryError: A size out of range, or rows that are no multiple of 16 B.
        """
        geometry = cls(
            layout=layout,
            block_size=block_size,
            groups=tuple(groups),
            os_page_bytes=os_page_bytes,
        )
        geometry.check()
        return geometry

    def check(self) -> None:
        """Refuse sizes that kernels or the daemon could not work with.

        Raises:
            GeometryError: With the field, its value and the limit.
        """
        _in_range("block_size", self.block_size, limits.MIN_BLOCK_SIZE, limits.MAX_BLOCK_SIZE)
        _in_range("os_page_bytes", self.os_page_bytes, OS_PAGE_BYTES, limits.GIB)
        if self.os_page_bytes & (self.os_page_bytes - 1):
            raise GeometryError(f"os_page_bytes {self.os_page_bytes} is no power of two")
        for group in self.groups:
            _in_range("num_layers of a group", group.num_layers, 1, limits.MAX_LAYERS)
            check_row_bytes(group.row_bytes)
        _in_range("number of layers", self.num_layers, 1, limits.MAX_LAYERS)

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(group.num_layers for group in self.groups)

    @cached_property
    def _regions(self) -> tuple[LayerGroup, ...]:
        if self.layout is HostLayout.GROUP_INTERLEAVED:
            return self.groups
        return tuple(
            LayerGroup(1, group.row_bytes) for group in self.groups for _ in range(group.num_layers)
        )

    @cached_property
    def _regions_block_bytes(self) -> tuple[int, ...]:
        return tuple(self.block_size * r.num_layers * r.row_bytes for r in self._regions)

    @cached_property
    def _layer_index(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (region, i) for region, r in enumerate(self._regions) for i in range(r.num_layers)
        )

    @property
    def data_block_bytes(self) -> int:
        """Bytes of one block over all layers, without padding."""
        return sum(self._regions_block_bytes)

    @cached_property
    def block_stride_bytes(self) -> int:
        """What one block costs of the pool: `data_block_bytes` rounded up to the OS page."""
        return round_up(self.data_block_bytes, self.os_page_bytes)

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of a backing with `num_blocks` blocks, the null block included."""
        return num_blocks * self.block_stride_bytes

    def tensor_sizes(self, num_blocks: int) -> tuple[int, ...]:
        """Bytes of each region of a backing, in order."""
        return tuple(num_blocks * size for size in self._regions_block_bytes)

    def place(self, layer: int, num_blocks: int) -> LayerPlace:
        """Where the rows of `layer` are in a backing of `num_blocks` blocks.

        Raises:
            GeometryError: No such layer.
        """
        if not 0 <= layer < len(self._layer_index):
            raise GeometryError(
                f"layer {layer} of {len(self._layer_index)}", remedy="Layers count from 0"
            )
        region_index, i = self._layer_index[layer]
        region = self._regions[region_index]
        row_stride = region.num_layers * region.row_bytes
        base = num_blocks * sum(self._regions_block_bytes[:region_index])
        return LayerPlace(
            offset_bytes=base + i * region.row_bytes,
            block_stride_bytes=self.block_size * row_stride,
            row_stride_bytes=row_stride,
            row_bytes=region.row_bytes,
        )

    def registration_ranges(
        self, num_blocks: int, *, max_chunk_bytes: int = limits.MAX_REGISTRATION_BYTES
    ) -> tuple[tuple[int, int], ...]:
        """`registration_ranges` of a backing with this geometry."""
        return registration_ranges(
            self.tensor_sizes(num_blocks),
            num_blocks,
            self.block_stride_bytes,
            max_chunk_bytes,
            os_page_bytes=self.os_page_bytes,
        )


class DeviceGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One cache group's rows in the block-outermost device backing.

    `offset_bytes` is that of the group's first layer; each next one is `layer_stride_bytes` on.
    """

    block_stride_bytes: int
    offset_bytes: int
    layer_stride_bytes: int
    row_bytes: int
    block_size: int

    def layer_offset_bytes(self, layer_index: int) -> int:
        """Byte offset of a layer's first row in block 0.

        Of the layer, not of the group: a public implementation used the group's offset for every
        layer and decoded noise.
        """
        return self.offset_bytes + layer_index * self.layer_stride_bytes

    def row_offset(self, block: int, layer_index: int, row: int) -> int:
        """Byte offset of a row from the backing's start."""
        return (
            block * self.block_stride_bytes
            + self.layer_offset_bytes(layer_index)
            + row * self.row_bytes
        )

    def check(self, *, num_layers: int) -> None:
        """Refuse a geometry whose layers overlap or leave their block.

        Raises:
            GeometryError: With the sizes.
        """
        check_row_bytes(self.row_bytes)
        page = self.block_size * self.row_bytes
        if num_layers > 1 and self.layer_stride_bytes < page:
            raise GeometryError(
                f"layers {self.layer_stride_bytes} bytes apart overlap: a page has {page} bytes"
            )
        end = self.layer_offset_bytes(num_layers - 1) + page
        if self.offset_bytes < 0 or end > self.block_stride_bytes:
            raise GeometryError(
                f"{num_layers} layers end at byte {end} of a block of {self.block_stride_bytes}"
            )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def check_row_bytes(row_bytes: int) -> None:
    """Rows are copied 16 B a lane.

    Raises:
        GeometryError: Not a positive multiple of 16, or above the limit.
    """
    _in_range("row_bytes", row_bytes, limits.ROW_ALIGNMENT_BYTES, limits.MAX_ROW_BYTES)
    if row_bytes % limits.ROW_ALIGNMENT_BYTES:
        raise GeometryError(
            f"row_bytes {row_bytes} is no multiple of {limits.ROW_ALIGNMENT_BYTES}",
            remedy="Pad the row",
            row_bytes=row_bytes,
            multiple_bytes=limits.ROW_ALIGNMENT_BYTES,
        )


def _in_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise GeometryError(f"{what} is {value}, allowed are {low} to {high}", value=value)


def registration_ranges(
    tensor_sizes: Sequence[int],
    num_blocks: int,
    host_block_stride: int,
    max_chunk_bytes: int,
    *,
    os_page_bytes: int = OS_PAGE_BYTES,
) -> tuple[tuple[int, int], ...]:
    """Cut a backing into ranges that CUDA can register one by one.

    A batch copy refuses a descriptor that crosses two registrations, so each seam is a block
    boundary of the tensor that it cuts, and an OS page, because registration works on pages.

    Args:
        tensor_sizes: Bytes of each tensor (region), one after another from offset 0; each holds
            `num_blocks` equal pages.
        num_blocks: Blocks of the backing.
        host_block_stride: Bytes of the backing a block; what the tensors leave is padding at the
            end and may be cut at any page.
        max_chunk_bytes: Longest range.
        os_page_bytes: The OS page.

    Returns:
        [start, end) in bytes, in order, tiling [0, num_blocks * host_block_stride).

    Raises:
        GeometryError: Sizes that do not divide or fit, or no legal seam within the limit.
    """
    total = num_blocks * host_block_stride
    if num_blocks < 1 or total % os_page_bytes:
        raise GeometryError(
            f"{num_blocks} blocks of {host_block_stride} bytes are no whole number of OS pages",
            os_page_bytes=os_page_bytes,
        )
    starts = [0, *itertools.accumulate(tensor_sizes)]
    if starts[-1] > total:
        raise GeometryError(
            f"the tensors take {starts[-1]} bytes, the backing has {total}",
            needed_bytes=starts[-1],
            limit_bytes=total,
        )
    for size in tensor_sizes:
        if size <= 0 or size % num_blocks:
            raise GeometryError(f"a tensor of {size} bytes does not hold {num_blocks} equal pages")
    ranges: list[tuple[int, int]] = []
    start = 0
    while total - start > max_chunk_bytes:
        end = _last_seam(starts, num_blocks, start, start + max_chunk_bytes, os_page_bytes)
        if end is None:
            raise GeometryError(
                f"no block boundary on an OS page within {max_chunk_bytes} bytes of {start}",
                remedy="Raise the chunk limit, or choose a block size whose pages divide OS pages",
                max_chunk_bytes=max_chunk_bytes,
            )
        ranges.append((start, end))
        start = end
    ranges.append((start, total))
    return tuple(ranges)


def _last_seam(
    starts: Sequence[int], num_blocks: int, lower: int, upper: int, os_page_bytes: int
) -> int | None:
    """The last legal seam in (lower, upper], or None."""
    if upper >= starts[-1]:
        in_padding = upper // os_page_bytes * os_page_bytes
        if in_padding >= starts[-1] and in_padding > lower:
            return in_padding
    for tensor_start, tensor_end in reversed(list(itertools.pairwise(starts))):
        if tensor_start >= upper or tensor_end <= lower:
            continue
        page_bytes = (tensor_end - tensor_start) // num_blocks
        block = (min(upper, tensor_end) - tensor_start) // page_bytes
        # Block boundaries meet OS pages with this period, so that many steps back find one or none.
        period = os_page_bytes // math.gcd(page_bytes, os_page_bytes)
        for candidate in range(block, max(block - period, -1), -1):
            seam = tensor_start + candidate * page_bytes
            if seam <= lower:
                break
            if seam % os_page_bytes == 0:
                return seam
    return None


def encode_geometry(geometry: HostGeometry) -> bytes:
    """The bytes that travel in `OpenNamespace` and stand in the segment.

    Runs of equal groups are counted, so that 78 layers take a few bytes.
    """
    runs = [
        (len(list(run)), group.num_layers, group.row_bytes)
        for group, run in itertools.groupby(geometry.groups)
    ]
    return msgspec.msgpack.encode(
        (
            _ENCODING_VERSION,
            geometry.layout.value,
            geometry.block_size,
            geometry.os_page_bytes,
            runs,
        )
    )


def decode_geometry(data: bytes) -> HostGeometry:
    """Read and check `encode_geometry`'s bytes.

    Raises:
        GeometryError: Not its bytes, an unknown version, or sizes out of range.
    """
    try:
        version, layout, block_size, os_page_bytes, runs = msgspec.msgpack.decode(
            data, type=tuple[int, HostLayout, int, int, list[tuple[int, int, int]]]
        )
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise GeometryError(f"not an encoded geometry ({error})") from error
    if version != _ENCODING_VERSION:
        raise GeometryError(f"geometry encoding {version}, this code knows {_ENCODING_VERSION}")
    if not runs or any(count < 1 for count, _, _ in runs):
        raise GeometryError("a geometry has at least one group, and runs of at least one")
    _in_range("number of groups", sum(count for count, _, _ in runs), 1, limits.MAX_LAYERS)
    return HostGeometry.make(
        layout=layout,
        block_size=block_size,
        groups=[LayerGroup(n, row) for count, n, row in runs for _ in range(count)],
        os_page_bytes=os_page_bytes,
    )


def namespace_fingerprint(
    *, model: str, kv_dtype: str, geometry: HostGeometry, tenant: str = "", salt: str = ""
) -> bytes:
    """What may share blocks, as 16 B: equal only if all of these are equal.

    Args:
        model: Identity of the weights: a name with its revision, or a checksum. Two models that
            share a name must not share this.
        kv_dtype: Format of a row: ``fp8_ds_mla``, ``bfloat16``, ...
        geometry: Shape of the blocks.
        tenant: Separates users who must not see each other's prefixes.
        salt: Anything else that changes what is stored.
    """
    data = msgspec.msgpack.encode((model, kv_dtype, encode_geometry(geometry), tenant, salt))
    return hashlib.blake2b(
        data, digest_size=limits.FINGERPRINT_BYTES, person=b"hisparse-ns-v1"
    ).digest()
