"""The segment's bytes: what was written comes back, and nothing damaged is accepted (I8)."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.contract import segment
from hisparse_service.contract.errors import CorruptSegmentError, ForeignSegment, GeometryError
from hisparse_service.contract.segment import (
    ARENA_OFFSET,
    BACKING_RECORD_BYTES,
    HEADER_BYTES,
    RECORD_DTYPE,
    BackingRecord,
    Header,
    pack_backing,
    pack_header,
    record_check,
    record_checks,
    table_view,
    unpack_backing,
    unpack_header,
)

SIZE = 1 << 30
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
names = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), max_size=30)
headers = st.builds(
    Header,
    pool_uuid=st.binary(min_size=16, max_size=16),
    instance=names,
    pool_name=names,
    segment_bytes=st.just(SIZE),
    page_bytes=st.just(4096),
    created_unix_ns=u64,
    creator_pid=u64,
)
backings = st.builds(
    BackingRecord,
    namespace=st.integers(1, 64),
    fingerprint=st.binary(min_size=16, max_size=16),
    name=names,
    geometry=st.binary(max_size=500),
    generation=u32,
    num_blocks=st.integers(2, 1000),
    table_offset_bytes=st.just(ARENA_OFFSET),
    payload_offset_bytes=st.integers(ARENA_OFFSET + 64_000, ARENA_OFFSET + 65_536),
    payload_bytes=st.integers(1, 1 << 20),
)
HEADER = Header(
    pool_uuid=bytes(range(16)), instance="a", pool_name="main", segment_bytes=SIZE,
    page_bytes=4096, created_unix_ns=1, creator_pid=2,
)  # fmt: skip
BACKING = BackingRecord(
    namespace=1, fingerprint=bytes(16), name="glm", geometry=b"geometry", generation=1,
    num_blocks=10, table_offset_bytes=ARENA_OFFSET, payload_offset_bytes=ARENA_OFFSET + 4096,
    payload_bytes=8192,
)  # fmt: skip


@given(headers)
def test_a_header_comes_back(header):
    page = pack_header(header)
    assert len(page) == HEADER_BYTES
    assert unpack_header(page, segment_bytes=SIZE) == header


@given(backings)
def test_a_backing_record_comes_back(record):
    slot = pack_backing(record)
    assert len(slot) == BACKING_RECORD_BYTES
    assert unpack_backing(slot, segment_bytes=SIZE) == record


@settings(max_examples=300)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_i8_a_header_with_any_one_byte_changed_is_refused(offset, flip):
    page = bytearray(pack_header(HEADER))
    page[offset] ^= flip
    with pytest.raises(CorruptSegmentError):
        unpack_header(bytes(page), segment_bytes=SIZE)


@settings(max_examples=300)
@given(st.integers(0, 140), st.integers(1, 255))
def test_i8_a_backing_record_with_any_one_byte_changed_is_refused(offset, flip):
    slot = bytearray(pack_backing(BACKING))
    offset %= len(bytes(slot).rstrip(b"\0"))
    slot[offset] ^= flip
    try:
        record = unpack_backing(bytes(slot), segment_bytes=SIZE)
    except CorruptSegmentError:
        return
    # Only the in-use byte itself may turn a record into an empty slot; padding is not read.
    assert record is None or (record == BACKING and offset == 1)


@given(st.binary(max_size=BACKING_RECORD_BYTES))
def test_i8_random_bytes_are_never_a_record(data):
    for reader in (
        lambda: unpack_header(data, segment_bytes=SIZE),
        lambda: unpack_backing(data.ljust(BACKING_RECORD_BYTES, b"\0"), segment_bytes=SIZE),
    ):
        with contextlib.suppress(CorruptSegmentError):
            assert reader() is None


def test_a_header_of_another_program_version_or_size_says_which():
    page = pack_header(HEADER)
    with pytest.raises(ForeignSegment, match="does not begin with"):
        unpack_header(b"ELF" + page[3:], segment_bytes=SIZE)
    newer = page[:8] + (99).to_bytes(4, "little") + page[12:]
    with pytest.raises(ForeignSegment, match="version 99, this code knows 1"):
        unpack_header(newer, segment_bytes=SIZE)
    with pytest.raises(CorruptSegmentError, match="the object has 4096"):
        unpack_header(page, segment_bytes=4096)
    with pytest.raises(CorruptSegmentError, match="a header has 4096"):
        unpack_header(page[:100], segment_bytes=100)


def test_names_and_geometry_that_do_not_fit_are_refused_when_written():
    with pytest.raises(GeometryError):
        pack_header(Header(**{**_fields(HEADER), "instance": "x" * 65}))
    with pytest.raises(GeometryError, match="at most"):
        pack_backing(BackingRecord(**{**_fields(BACKING), "geometry": bytes(9000)}))


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


@pytest.mark.parametrize(
    "change",
    [
        {"table_offset_bytes": 0},
        {"payload_offset_bytes": SIZE},
        {"payload_bytes": SIZE},
        {"payload_bytes": 0},
        {"num_blocks": 1},
        {"namespace": 0},
        {"namespace": 65},
        {"payload_offset_bytes": ARENA_OFFSET},
    ],
    ids=str,
)
def test_i8_a_backing_that_points_outside_or_overlaps_is_refused(change):
    slot = pack_backing(BackingRecord(**(_fields(BACKING) | change)))
    with pytest.raises(CorruptSegmentError):
        unpack_backing(slot, segment_bytes=SIZE)


records = st.fixed_dictionaries(
    {
        "key_low": u64, "key_high": u64, "checksum": u64, "generation": u32, "parent": u32,
        "parent_generation": u32, "depth": u32, "namespace": st.integers(0, 2**16 - 1),
        "flags": st.integers(0, 255),
    }
)  # fmt: skip


@given(st.lists(records, min_size=1, max_size=8))
def test_the_check_of_one_record_and_of_many_agree(rows):
    table = np.zeros(len(rows), RECORD_DTYPE)
    for index, row in enumerate(rows):
        for name, value in row.items():
            table[index][name] = value
    expected = [record_check(block=index, **row) for index, row in enumerate(rows)]
    assert record_checks(table).tolist() == expected
    last = np.array([len(rows) - 1])
    assert record_checks(table, last).tolist() == expected[-1:]


@given(records, st.integers(0, 2**31 - 1), st.integers(0, 58), st.integers(1, 255))
def test_i3_a_flipped_byte_or_a_moved_record_fails_its_check(row, block, offset, flip):
    table = np.zeros(1, RECORD_DTYPE)
    for name, value in row.items():
        table[0][name] = value
    check = record_check(block=block, **row)
    assert record_check(block=block + 1, **row) != check
    raw = table.view(np.uint8)
    raw[offset] ^= flip
    damaged = {name: int(table[0][name]) for name in row}
    if damaged != row:  # last_use, check and the padding are not covered
        assert record_check(block=block, **damaged) != check


def test_a_table_view_stays_inside_the_segment():
    buffer = bytearray(64 * 10)
    view = table_view(buffer, table_offset_bytes=64, num_blocks=9)
    view["generation"][8] = 7
    assert int.from_bytes(buffer[-64 + 40 : -64 + 44], "little") == 7
    for offset, num_blocks in [(64, 10), (-64, 2), (0, 0)]:
        with pytest.raises(GeometryError, match="outside the segment"):
            table_view(buffer, table_offset_bytes=offset, num_blocks=num_blocks)


def test_state_is_the_last_byte_of_a_record_that_is_stored():
    """A crash between two stores must leave a record whose state tells the truth."""
    offsets = {name: RECORD_DTYPE.fields[name][1] for name in RECORD_DTYPE.names}
    assert max(offsets, key=offsets.get) == "state"
    assert segment.RECORD_BYTES == 64
