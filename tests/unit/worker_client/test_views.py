"""Views of a shared backing: every byte where the geometry says, everything else refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract.errors import GeometryError
from worker_client.views import PagedCacheView


def bind(raw, **changes) -> PagedCacheView:
    arguments = {
        "dtype": torch.float32,
        "row_width": 8,
        "byte_offset": 0,
        "block_stride": 4 * 32,
        "num_blocks": 4,
        "block_size": 4,
    } | changes
    return PagedCacheView.bind(raw, **arguments)


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(1, 5),
    block_size=st.integers(1, 6),
    row_width=st.integers(1, 9),
    offset=st.integers(0, 5),
    spare=st.integers(0, 20),
    start=st.integers(0, 3),
)
def test_every_row_lies_at_offset_plus_block_stride_plus_row(
    num_blocks, block_size, row_width, offset, spare, start
):
    """A wrong offset decodes noise: the bytes are compared at the address the design gives."""
    stride = (block_size * row_width + spare) * 2
    total = 2 * start + 2 * offset + num_blocks * stride
    storage = torch.randint(0, 256, (total,)).to(torch.uint8)
    raw = storage[2 * start :]
    view = bind(
        raw,
        dtype=torch.int16,
        row_width=row_width,
        byte_offset=2 * offset,
        block_stride=stride,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    row_bytes = 2 * row_width
    for block in range(num_blocks):
        for row in range(block_size):
            first = 2 * start + 2 * offset + block * stride + row * row_bytes
            want = storage[first : first + row_bytes].clone().view(torch.int16)
            assert torch.equal(view.cache[block, row], want)
            physical = block * view.block_stride_rows + row
            assert torch.equal(view.read(torch.tensor(physical)), want)
            if view.is_flat:
                assert torch.equal(view.attention_cache[physical], want)
    assert view.is_flat == (stride % row_bytes == 0)


def test_the_attention_view_is_flat_over_the_whole_backing():
    raw = torch.zeros(1024, dtype=torch.int8)
    view = bind(raw, byte_offset=128, block_stride=256, num_blocks=3)
    assert view.attention_cache.shape == ((1024 - 128) // 32, 8)
    assert view.attention_cache.is_contiguous()
    assert view.block_stride_rows == view.attention_block_stride == 8


def test_a_stride_of_no_whole_rows_falls_back_to_the_paged_view():
    raw = torch.zeros(1024, dtype=torch.int8)
    view = bind(raw, block_stride=128 + 16)
    assert not view.is_flat
    assert view.attention_cache is view.cache
    assert view.block_stride_rows == view.block_size == 4


def test_views_share_the_backing_and_write_by_slot():
    raw = torch.zeros(1024, dtype=torch.uint8)
    view = bind(raw, byte_offset=16, block_stride=240)
    rows = torch.arange(24, dtype=torch.float32).reshape(3, 8)
    view.write_slots(torch.tensor([5, -1, 14]), rows)
    assert torch.equal(view.cache[1, 1], rows[0])
    assert torch.equal(view.cache[3, 2], rows[2])
    assert view.cache.abs().sum() == rows[0].sum() + rows[2].sum()
    first = 16 + 240 + 32
    assert torch.equal(raw[first : first + 32], rows[0].view(torch.uint8))
    assert view.byte_pages().shape == (4, 4, 32)
    with pytest.raises(GeometryError, match="rows to store"):
        view.write_slots(torch.tensor([5]), rows[:1].double())


def test_i10_offsets_past_2_31_are_not_truncated():
    """Sizes of a real backing, on the meta device: nothing is allocated."""
    raw = torch.empty(2**37, dtype=torch.uint8, device="meta")
    view = bind(
        raw,
        dtype=torch.uint8,
        row_width=656,
        byte_offset=2**36,
        block_stride=656 * 2**20,
        num_blocks=100,
        block_size=64,
    )
    assert view.cache.storage_offset() == 2**36
    assert view.cache.stride() == (656 * 2**20, 656, 1)
    assert view.cache[99, 63].storage_offset() == 2**36 + 99 * 656 * 2**20 + 63 * 656
    assert view.attention_cache.shape[0] == 2**36 // 656


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"byte_offset": 2}, "byte offset of 2 bytes is no whole number of 4-byte elements"),
        ({"block_stride": 130}, "block stride of 130 bytes"),
        ({"block_stride": 96}, "blocks overlap: block stride 96 bytes, page 128 bytes"),
        ({"num_blocks": 9}, "ends at byte 1152, the backing has 1024"),
        ({"byte_offset": 544}, "ends at byte 1056"),
        ({"byte_offset": -4}, "must be positive"),
        ({"num_blocks": 0}, "must be positive"),
        ({"block_size": 0}, "must be positive"),
        ({"row_width": 0}, "must be positive"),
    ],
)
def test_a_view_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(GeometryError, match=message):
        bind(torch.zeros(1024, dtype=torch.int8), **changes)


def test_a_backing_that_is_strided_or_misaligned_is_refused():
    with pytest.raises(GeometryError, match="must be contiguous"):
        bind(torch.zeros(64, 64, dtype=torch.int8).t())
    with pytest.raises(GeometryError, match="starts at byte 2"):
        bind(torch.zeros(1024, dtype=torch.int8)[2:])
