"""Addresses: every row has its own bytes, and CUDA can register what holds them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract.errors import GeometryError
from hisparse_service.contract.geometry import (
    OS_PAGE_BYTES,
    DeviceGeometry,
    HostGeometry,
    HostLayout,
    LayerGroup,
    decode_geometry,
    encode_geometry,
    namespace_fingerprint,
    registration_ranges,
    round_up,
)

P = OS_PAGE_BYTES

groups = st.lists(
    st.builds(LayerGroup, st.integers(1, 5), st.integers(1, 80).map(lambda n: n * 16)),
    min_size=1,
    max_size=6,
)
geometries = st.builds(
    lambda layout, block_size, groups: HostGeometry.make(
        layout=layout, block_size=block_size, groups=groups
    ),
    st.sampled_from(HostLayout),
    st.sampled_from([1, 3, 16, 64, 128]),
    groups,
)


def interval(geometry: HostGeometry, num_blocks: int, layer: int, block: int, row: int):
    place = geometry.place(layer, num_blocks)
    start = place.row_offset(block, row)
    return start, start + place.row_bytes


@given(geometries, st.integers(2, 5))
def test_no_two_rows_share_a_byte_and_all_lie_in_the_backing(geometry, num_blocks):
    intervals = sorted(
        interval(geometry, num_blocks, layer, block, row)
        for layer in range(geometry.num_layers)
        for block in range(num_blocks)
        for row in range(geometry.block_size)
    )
    assert intervals[0][0] == 0
    assert intervals[-1][1] <= geometry.pool_bytes(num_blocks)
    for (_, end), (start, _) in itertools.pairwise(intervals):
        assert end <= start
    used = sum(end - start for start, end in intervals)
    assert used == num_blocks * geometry.data_block_bytes


@given(geometries, st.integers(2, 40), st.integers(1, 4000))
def test_every_page_lies_inside_exactly_one_registration_range(geometry, num_blocks, chunk_pages):
    total = geometry.pool_bytes(num_blocks)
    try:
        ranges = geometry.registration_ranges(num_blocks, max_chunk_bytes=chunk_pages * P)
    except GeometryError:
        # No seam: some page-aligned run of blocks is longer than the limit.
        assert chunk_pages * P < total
        return
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end == start
    for start, end in ranges:
        assert 0 < end - start <= chunk_pages * P
        assert start % P == 0
    seams = [start for start, _ in ranges[1:]]
    region_start = 0
    for size in geometry.tensor_sizes(num_blocks):
        page = size // num_blocks
        for seam in seams:
            # A seam inside a region falls between two of its blocks.
            if region_start < seam < region_start + size:
                assert (seam - region_start) % page == 0
        region_start += size


def test_registration_ranges_of_the_known_case():
    assert registration_ranges([12 * P, 20 * P], 4, 8 * P, 10 * P) == (
        (0, 9 * P),
        (9 * P, 17 * P),
        (17 * P, 27 * P),
        (27 * P, 32 * P),
    )


def test_a_seam_falls_where_a_block_boundary_meets_an_os_page():
    page = 64 * 656  # 10.25 OS pages: block boundaries meet OS pages every fourth block
    ranges = registration_ranges([page * 1024], 1024, 44 * 1024, 100 * P)
    for start, _ in ranges[1:]:
        assert start % P == 0
        assert start >= page * 1024 or start % (4 * page) == 0


def test_an_unreachable_seam_is_an_error_that_names_the_limit():
    with pytest.raises(GeometryError, match="no block boundary"):
        registration_ranges([64 * P], 4, 16 * P, 8 * P)


@pytest.mark.parametrize(
    ("tensor_sizes", "num_blocks", "stride"),
    [([12 * P], 5, 8 * P), ([80 * P], 4, 8 * P), ([12 * P], 4, 8 * P + 16), ([0], 4, 8 * P)],
    ids=["not-divisible", "too-large", "no-whole-pages", "empty"],
)
def test_tensors_that_do_not_fit_are_refused(tensor_sizes, num_blocks, stride):
    with pytest.raises(GeometryError):
        registration_ranges(tensor_sizes, num_blocks, stride, 10 * P)


def test_layer_major_is_vllms_order():
    geometry = HostGeometry.make(
        layout=HostLayout.LAYER_MAJOR, block_size=64, groups=[LayerGroup(2, 656)] * 2
    )
    page, n = 64 * 656, 10
    for layer, block, row in [(0, 0, 0), (1, 3, 5), (3, 9, 63)]:
        assert geometry.place(layer, n).row_offset(block, row) == (
            layer * n * page + block * page + row * 656
        )


def test_group_interleaved_puts_one_misss_layers_side_by_side():
    geometry = HostGeometry.make(
        layout=HostLayout.GROUP_INTERLEAVED,
        block_size=64,
        groups=[LayerGroup(4, 656), LayerGroup(4, 1152)],
    )
    n = 7
    offsets = [geometry.place(layer, n).row_offset(3, 9) for layer in range(4)]
    assert offsets == [(3 * 64 + 9) * 4 * 656 + i * 656 for i in range(4)]
    base = n * 64 * 4 * 656
    assert geometry.place(6, n).row_offset(2, 1) == base + (2 * 64 + 1) * 4 * 1152 + 2 * 1152


@pytest.mark.parametrize("layout", HostLayout)
def test_i10_rows_beyond_2_to_33_have_exact_addresses(layout):
    """A 32-bit product anywhere would wrap: 2^33 rows of 656 B are 5.6 TB."""
    geometry = HostGeometry.make(layout=layout, block_size=64, groups=[LayerGroup(1, 656)])
    num_blocks = 2**33 // 64
    assert geometry.place(0, num_blocks).row_offset(num_blocks - 1, 63) == (2**33 - 1) * 656
    ranges = geometry.registration_ranges(num_blocks)
    assert ranges[-1][1] == num_blocks * round_up(64 * 656, P)


@given(geometries)
def test_geometry_survives_its_encoding(geometry):
    assert decode_geometry(encode_geometry(geometry)) == geometry


@given(st.binary(max_size=64))
def test_i8_bytes_that_are_no_geometry_are_refused(data):
    try:
        geometry = decode_geometry(data)
    except GeometryError:
        return
    geometry.check()


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"block_size": 4096},
        {"groups": []},
        {"groups": [LayerGroup(1, 650)]},
        {"groups": [LayerGroup(1, 0)]},
        {"groups": [LayerGroup(0, 16)]},
        {"groups": [LayerGroup(1, 1 << 20)]},
        {"groups": [LayerGroup(1024, 16)] * 2},
        {"os_page_bytes": 5000},
    ],
    ids=str,
)
def test_geometry_that_does_not_fit_is_refused(change):
    good = {"layout": HostLayout.LAYER_MAJOR, "block_size": 64, "groups": [LayerGroup(1, 656)]}
    HostGeometry.make(**good)
    with pytest.raises(GeometryError):
        HostGeometry.make(**(good | change))


def test_a_row_that_is_no_multiple_of_16_bytes_is_named():
    with pytest.raises(GeometryError, match=r"row_bytes 650 is no multiple of 16"):
        HostGeometry.make(layout=HostLayout.LAYER_MAJOR, block_size=64, groups=[LayerGroup(1, 650)])


def test_a_long_run_of_groups_takes_few_bytes():
    geometry = HostGeometry.make(
        layout=HostLayout.GROUP_INTERLEAVED, block_size=64, groups=[LayerGroup(1, 656)] * 1024
    )
    assert len(encode_geometry(geometry)) < 64


def test_the_fingerprint_changes_with_everything_that_forbids_sharing():
    geometry = HostGeometry.make(
        layout=HostLayout.LAYER_MAJOR, block_size=64, groups=[LayerGroup(2, 656)]
    )
    other = HostGeometry.make(
        layout=HostLayout.LAYER_MAJOR, block_size=32, groups=[LayerGroup(2, 656)]
    )
    base = {"model": "m", "kv_dtype": "fp8_ds_mla", "geometry": geometry}
    changes = [
        {},
        {"model": "n"},
        {"kv_dtype": "bfloat16"},
        {"geometry": other},
        {"tenant": "t"},
        {"salt": "t"},
    ]
    prints = {namespace_fingerprint(**(base | change)) for change in changes}
    assert len(prints) == len(changes)


device_geometries = st.builds(
    lambda layers, rows, block_size, offset, gap, tail: (
        layers,
        DeviceGeometry(
            block_stride_bytes=offset + layers * (block_size * rows + gap) + tail,
            offset_bytes=offset,
            layer_stride_bytes=block_size * rows + gap,
            row_bytes=rows,
            block_size=block_size,
        ),
    ),
    st.integers(1, 5),
    st.integers(1, 50).map(lambda n: n * 16),
    st.sampled_from([1, 16, 64]),
    st.integers(0, 4096),
    st.integers(0, 64),
    st.integers(0, 64),
)


@given(device_geometries)
def test_device_rows_of_a_group_share_no_byte(layers_and_geometry):
    num_layers, geometry = layers_and_geometry
    geometry.check(num_layers=num_layers)
    offsets = sorted(
        geometry.row_offset(block, layer, row)
        for block in range(3)
        for layer in range(num_layers)
        for row in range(geometry.block_size)
    )
    for low, high in itertools.pairwise(offsets):
        assert high - low >= geometry.row_bytes


def test_each_layer_has_its_own_device_offset():
    geometry = DeviceGeometry(
        block_stride_bytes=10_000, offset_bytes=160, layer_stride_bytes=1_024, row_bytes=16,
        block_size=64,
    )  # fmt: skip
    assert geometry.row_offset(2, 3, 5) == 2 * 10_000 + 160 + 3 * 1_024 + 5 * 16
    with pytest.raises(GeometryError, match="end at byte"):
        geometry.check(num_layers=10)
