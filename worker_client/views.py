"""Strided views of one layer's cache inside a shared device backing.

All index arithmetic of a bound cache starts here, so that a wrong offset is refused at bind time
instead of being read as noise. Called while caches are bound, on the worker's main thread; a bound
view is immutable and may be read from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse_service.contract.errors import GeometryError


@dataclass(frozen=True)
class PagedCacheView:
    """One layer's blocks inside a raw backing. Borrows the backing's storage.

    Attributes:
        cache: ``[num_blocks, block_size, row_width]``, strides ``(block stride, row_width, 1)`` in
            elements.
        attention_cache: Where the block stride is a whole number of rows: contiguous
            ``[num_rows, row_width]``, flat over the whole backing from this layer's first byte on.
            It covers other layers' bytes too: only physical rows of own blocks may be read.
            Elsewhere ``cache``.
        block_size: Rows of a block.
        block_stride_rows: Physical rows from one block to the next: physical row =
            ``block * block_stride_rows + row``.
    """

    cache: torch.Tensor
    attention_cache: torch.Tensor
    block_size: int
    block_stride_rows: int

    @classmethod
    def bind(
        cls,
        raw: torch.Tensor,
        *,
        dtype: torch.dtype,
        row_width: int,
        byte_offset: int,
        block_stride: int,
        num_blocks: int,
        block_size: int,
    ) -> PagedCacheView:
        """Make the views of one layer.

        Args:
            raw: Contiguous tensor of any dtype, the backing or a part of it.
            dtype: Element type of the cache.
            row_width: Elements of a row.
            byte_offset: First byte of the layer's block 0, counted from raw's first byte. It is
                the layer's own offset, not the group's.
            block_stride: Bytes from one block to the next.
            num_blocks: Blocks, the null block included.
            block_size: Rows of a block.

        Raises:
            GeometryError: Offset or stride that is not a whole number of elements, blocks that
                overlap, or a view that passes the end of ``raw``.
        """
        itemsize = dtype.itemsize
        row_bytes = row_width * itemsize
        flat = _flatten(raw, dtype)
        _check_view(
            raw_bytes=raw.numel() * raw.element_size(),
            itemsize=itemsize,
            row_bytes=row_bytes,
            byte_offset=byte_offset,
            block_stride=block_stride,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        first = flat.storage_offset() + byte_offset // itemsize
        cache = torch.as_strided(
            flat,
            size=(num_blocks, block_size, row_width),
            stride=(block_stride // itemsize, row_width, 1),
            storage_offset=first,
        )
        if block_stride % row_bytes:
            return cls(cache, cache, block_size, block_size)
        num_rows = (flat.numel() * itemsize - byte_offset) // row_bytes
        rows = torch.as_strided(flat, (num_rows, row_width), (row_width, 1), first)
        return cls(cache, rows, block_size, block_stride // row_bytes)

    @property
    def attention_block_stride(self) -> int:
        """Other name of ``block_stride_rows``, as attention backends call it."""
        return self.block_stride_rows

    @property
    def row_width(self) -> int:
        """Elements of a row."""
        return self.cache.shape[2]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.cache.shape[2] * self.cache.element_size()

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.cache.shape[0]

    @property
    def is_flat(self) -> bool:
        """Whether ``attention_cache`` is the flat view: indexed by physical row alone."""
        return self.attention_cache.dim() == 2

    def byte_pages(self) -> torch.Tensor:
        """``cache`` as uint8 ``[num_blocks, block_size, row_bytes]``: what kernels copy."""
        return self.cache.view(torch.uint8)

    def read(self, physical_rows: torch.Tensor) -> torch.Tensor:
        """Gather rows by physical row id.

        Args:
            physical_rows: int32 or int64, any shape, no negative entries.

        Returns:
            ``[*physical_rows.shape, row_width]``, a copy.
        """
        if self.is_flat:
            return self.attention_cache[physical_rows.long()]
        rows = physical_rows.long()
        return self.cache[rows // self.block_stride_rows, rows % self.block_stride_rows]

    def write_slots(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store rows by slot (``block * block_size + row``); negative slots are padding.

        On a GPU it may be captured in a graph.

        Args:
            slots: int64 ``[n]``.
            rows: ``[n, row_width]`` of the view's dtype.

        Raises:
            GeometryError: dtype or shape of ``rows``.
        """
        if rows.dtype != self.cache.dtype or rows.shape != (slots.shape[0], self.row_width):
            raise GeometryError(
                f"rows to store: expected {self.cache.dtype} "
                f"{(slots.shape[0], self.row_width)}, got {rows.dtype} {tuple(rows.shape)}"
            )
        kept = slots >= 0
        if slots.device.type == "cpu":
            slots, rows = slots[kept].long(), rows[kept]
        else:
            # No selection by mask, whose size the host would have to read: a captured graph cannot.
            # Padding writes the null block's first row back to where it is.
            slots = slots.clamp(min=0).long()
            rows = torch.where(kept.unsqueeze(1), rows, self.cache[0, 0])
        self.cache[slots // self.block_size, slots % self.block_size] = rows


def _flatten(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The backing as a 1-D tensor of ``dtype`` (a tail shorter than one element is left out)."""
    if not raw.is_contiguous():
        raise GeometryError(
            f"a backing must be contiguous, got shape {tuple(raw.shape)} with strides "
            f"{tuple(raw.stride())}"
        )
    start_bytes = raw.storage_offset() * raw.element_size()
    if start_bytes % dtype.itemsize:
        raise GeometryError(
            f"the backing starts at byte {start_bytes} of its storage, which is no whole number "
            f"of {dtype.itemsize}-byte elements"
        )
    raw_bytes = raw.view(-1).view(torch.uint8)
    whole = raw_bytes.numel() // dtype.itemsize * dtype.itemsize
    return raw_bytes[:whole].view(dtype)


def _check_view(
    *,
    raw_bytes: int,
    itemsize: int,
    row_bytes: int,
    byte_offset: int,
    block_stride: int,
    num_blocks: int,
    block_size: int,
) -> None:
    if row_bytes <= 0 or num_blocks <= 0 or block_size <= 0 or byte_offset < 0:
        raise GeometryError(
            f"sizes must be positive: row of {row_bytes} bytes, {num_blocks} blocks of "
            f"{block_size} rows at byte {byte_offset}"
        )
    for name, value in (("byte offset", byte_offset), ("block stride", block_stride)):
        if value % itemsize:
            raise GeometryError(
                f"{name} of {value} bytes is no whole number of {itemsize}-byte elements"
            )
    page_bytes = block_size * row_bytes
    if block_stride < page_bytes:
        raise GeometryError(
            f"blocks overlap: block stride {block_stride} bytes, page {page_bytes} bytes"
        )
    end = byte_offset + (num_blocks - 1) * block_stride + page_bytes
    if end > raw_bytes:
        raise GeometryError(
            f"the view ends at byte {end}, the backing has {raw_bytes} ({num_blocks} blocks, "
            f"stride {block_stride}, offset {byte_offset}, page {page_bytes})",
            end_bytes=end,
            raw_bytes=raw_bytes,
        )
