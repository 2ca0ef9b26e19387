"""The host pool over segments made by hand: what is checked, what is shared, what stays mapped."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import numpy as np
import posix_ipc
import pytest
import torch
from fake_daemon import PAGE, HandMadeSegment, small_geometry

from hisparse_service.contract.errors import (
    ClosedError,
    CorruptSegmentError,
    ForeignSegment,
    GeometryError,
)
from hisparse_service.contract.segment import BlockState, backing_offset
from worker_client import host_pool as host_pool_module
from worker_client.host_pool import HostPool

FINGERPRINT = bytes(range(16))


@pytest.fixture
def segment():
    made = HandMadeSegment(small_geometry(), FINGERPRINT)
    yield made
    made.remove()


@pytest.fixture
def pool(segment):
    made = HostPool(segment.reply(), segment.geometry, fingerprint=FINGERPRINT)
    yield made
    made.cleanup()


def mappings(segment):
    with open("/proc/self/maps") as maps:
        return [line for line in maps if segment.name.lstrip("/") in line]


def test_allocate_gives_int8_bytes_over_the_shared_memory(pool, segment):
    tensor = pool.allocate(1000)
    assert (tensor.dtype, tuple(tensor.shape), tensor.device.type) == (torch.int8, (1000,), "cpu")
    tensor[7] = 42
    assert segment.read(segment.payload_offset + 7, 1) == b"\x2a"
    segment.write(segment.payload_offset + 8, b"\x07")
    assert tensor[8] == 7
    assert tensor.data_ptr() == pool.address


def test_allocate_again_with_the_same_size_is_the_same_backing(pool):
    """Engines build their cache twice: once to profile."""
    assert pool.backing is None
    assert pool.allocate(1000) is pool.allocate(1000) is pool.backing


def test_allocate_with_another_size_names_both(pool):
    pool.allocate(1000)
    with pytest.raises(GeometryError, match=r"1000.*2000") as caught:
        pool.allocate(2000)
    assert caught.value.details == {"allocated_bytes": 1000, "asked_bytes": 2000}
    assert pool.allocate(1000).shape == (1000,)


@pytest.mark.parametrize("size", [0, -1, 10**9])
def test_allocate_outside_the_backing_is_an_error_and_allocates_nothing(pool, size):
    with pytest.raises(GeometryError, match=str(pool.payload_bytes)):
        pool.allocate(size)
    assert pool.backing is None


def test_registered_covers_the_payload_and_shares_the_storage(pool):
    backing = pool.allocate(1000)
    assert pool.registered.shape == (pool.payload_bytes,)
    assert pool.registered.untyped_storage().data_ptr() == backing.untyped_storage().data_ptr()
    assert pool.shared_region is pool


@pytest.mark.parametrize("layer", range(6))
def test_a_layer_view_addresses_the_rows_that_the_geometry_says(pool, segment, layer):
    view = pool.layer_view(layer)
    geometry = segment.geometry
    row_bytes = 32 if layer == 5 else 656
    assert tuple(view.shape) == (segment.num_blocks, geometry.block_size, row_bytes)
    assert pool.row_bytes(layer) == row_bytes
    view[3, 2] = layer + 1
    offset = geometry.place(layer, segment.num_blocks).row_offset(3, 2)
    data = segment.read(segment.payload_offset + offset, row_bytes)
    assert data == bytes([layer + 1]) * row_bytes


def test_layer_views_share_no_byte(pool):
    pool.registered.zero_()
    for layer in range(6):
        pool.layer_view(layer).add_(1)
    used = pool.num_blocks * pool.geometry.data_block_bytes
    assert bool((pool.registered[:used] == 1).all())
    assert bool((pool.registered[used:] == 0).all())


def test_a_checksum_sees_every_layer_and_is_never_zero(pool):
    before = pool.checksum([1, 2, 3])
    assert before.dtype == np.uint64
    assert before[0] == before[1] != 0
    for layer in range(6):
        pool.layer_view(layer)[2, 3, -1] += 1
        after = pool.checksum([1, 2, 3])
        assert after[1] != before[1]
        assert (after[0], after[2]) == (before[0], before[2])
        before = after


def test_the_block_table_is_seen_and_cannot_be_written_through(pool, segment):
    segment.set_record(5, generation=9, state=BlockState.PUBLISHED)
    assert pool.table["generation"][5] == 9
    with pytest.raises(ValueError, match="read-only"):
        pool.table["generation"][5] = 1


def test_i1_a_stray_store_outside_the_payload_faults_in_the_worker(segment):
    """Header, block tables and other namespaces' payloads are mapped read-only."""
    code = f"""
import ctypes, os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from fake_daemon import small_geometry
from hisparse_service.contract.messages import decode_reply
from worker_client.host_pool import HostPool
pool = HostPool(decode_reply(sys.stdin.buffer.read()), small_geometry(), fingerprint={FINGERPRINT})
ctypes.memset(pool.address, 1, pool.payload_bytes)
print("payload written", flush=True)
ctypes.memset(pool.address + int(sys.argv[1]), 1, 1)
"""
    from hisparse_service.contract.messages import encode

    payload = segment.geometry.pool_bytes(segment.num_blocks)
    for offset in (-1, payload):
        result = subprocess.run(
            [sys.executable, "-c", code, str(offset)], input=encode(segment.reply()),
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert result.stdout == b"payload written\n", result.stderr
        assert result.returncode == -signal.SIGSEGV


def test_touching_the_page_tables_changes_nothing_and_maps_every_page(pool, segment, monkeypatch):
    monkeypatch.setattr(host_pool_module, "_TOUCH_CHUNK_BYTES", 4 * PAGE)
    segment.write(segment.payload_offset, b"\x05" * 9)
    pool.touch_page_tables()
    assert bool((pool.registered[:9] == 5).all())
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{pool.address:x}-"))
    resident = next(line for line in lines[at:] if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 == pool.payload_bytes


def test_i4_live_views_keep_the_memory_after_cleanup(pool, segment):
    """A tensor that reads memory that was unmapped ends the process without a traceback."""
    view = pool.layer_view(1)
    table = pool.table
    view[1, 1] = 77
    pool.cleanup()
    assert int(view[1, 1, 0]) == 77
    assert len(table) == segment.num_blocks
    assert mappings(segment)
    del view, table
    gc.collect()
    assert not mappings(segment)


def test_cleanup_is_idempotent_and_later_use_raises(pool, segment):
    pool.allocate(100)
    pool.cleanup()
    pool.cleanup()
    assert pool.is_closed
    assert pool.backing is None
    assert not mappings(segment)
    for use in (lambda: pool.allocate(100), lambda: pool.registered, lambda: pool.address,
                lambda: pool.table, lambda: pool.layer_view(0)):  # fmt: skip
        with pytest.raises(ClosedError):
            use()


def test_cleanup_unregisters_before_it_unmaps(pool, segment):
    seen = []

    class Registration:
        def close(self):
            seen.append(len(mappings(segment)))

    pool.take_registration(Registration())
    assert pool.cuda_registered
    pool.cleanup()
    assert seen
    assert seen[0] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"inode": 1},
        {"device": 1},
        {"pool_uuid": bytes(16)},
        {"segment_name": "/hisparse-none-x"},
    ],
)
def test_i8_another_segment_than_the_daemons_is_foreign_and_not_mapped(segment, changes):
    with pytest.raises(ForeignSegment):
        HostPool(segment.reply(**changes), segment.geometry, fingerprint=FINGERPRINT)
    assert not mappings(segment)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_name": "/etc/passwd"},
        {"segment_name": "/hisparse-a/../b"},
        {"num_blocks": 7},
        {"num_blocks": 1},
        {"table_offset_bytes": 2**50},
        {"payload_offset_bytes": 2**50},
        {"payload_offset_bytes": 4097},
        {"payload_bytes": 1},
        {"ranges": []},
        {"ranges": [(0, 4096)]},
        {"ranges": [(0, 4096), (8192, 1 << 17)]},
    ],
)
def test_i8_an_answer_that_does_not_fit_is_refused_before_it_is_used(segment, changes):
    with pytest.raises(CorruptSegmentError):
        HostPool(segment.reply(**changes), segment.geometry, fingerprint=FINGERPRINT)
    assert not mappings(segment)


def test_i8_a_name_that_was_replaced_is_foreign(segment):
    """The daemon's own segment was unlinked and another one took the name."""
    reply = segment.reply()
    posix_ipc.unlink_shared_memory(segment.name)
    other = posix_ipc.SharedMemory(segment.name, posix_ipc.O_CREX, size=segment.size)
    os.pwrite(other.fd, segment.read(0, 1 << 20), 0)
    other.close_fd()
    with pytest.raises(ForeignSegment, match="inode"):
        HostPool(reply, segment.geometry, fingerprint=FINGERPRINT)


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 40, 200, 4000])
def test_i8_a_damaged_header_is_refused(segment, offset):
    byte = segment.read(offset, 1)[0]
    segment.write(offset, bytes([byte ^ 0x40]))
    with pytest.raises(CorruptSegmentError):
        HostPool(segment.reply(), segment.geometry, fingerprint=FINGERPRINT)
    assert not mappings(segment)


def test_i8_a_segment_cut_short_is_refused(segment):
    reply = segment.reply()
    os.ftruncate(segment.fd, segment.size - PAGE)
    with pytest.raises(CorruptSegmentError):
        HostPool(reply, segment.geometry, fingerprint=FINGERPRINT)


@pytest.mark.parametrize("offset", [0, 2, 5, 60])
def test_i8_a_damaged_backing_record_is_refused(segment, offset):
    at = backing_offset(0) + offset
    segment.write(at, bytes([segment.read(at, 1)[0] ^ 0x01]))
    with pytest.raises(CorruptSegmentError):
        HostPool(segment.reply(), segment.geometry, fingerprint=FINGERPRINT)
    assert not mappings(segment)


def test_a_backing_of_another_namespace_is_refused(segment):
    with pytest.raises(CorruptSegmentError):
        HostPool(segment.reply(), segment.geometry, fingerprint=bytes(16))


def test_opening_leaves_one_descriptor_and_cleanup_none(segment):
    before = len(os.listdir("/proc/self/fd"))
    pool = HostPool(segment.reply(), segment.geometry, fingerprint=FINGERPRINT)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    pool.cleanup()
    assert len(os.listdir("/proc/self/fd")) == before
