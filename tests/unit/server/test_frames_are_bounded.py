"""I7, I8: what a frame may cost before it is refused does not grow with what it claims to hold."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import MalformedMessage


def nested(element: bytes, count: int = limits.MAX_MESSAGE_BYTES - 65_536) -> bytes:
    """Arrays of 8,192 elements of one byte, some four million in all."""
    inner = b"\xdc\x20\x00" + element * 8_192
    return b"\xdc" + struct.pack(">H", count // 8_192) + inner * (count // 8_192)


MANY_COUNTERS = b"\xdf" + struct.pack(">I", 300_000) + b"".join(
    b"\xa6%06x\xca\0\0\0\0" % number for number in range(300_000)
)  # fmt: skip
FRAMES = {
    "empty_arrays_as_lease_ids": b"\x93\x02\x07" + nested(b"\x90"),
    "empty_maps_as_lease_ids": b"\x93\x02\x07" + nested(b"\x80"),
    "numbers_as_request_id": b"\x92\x02" + nested(b"\x01"),
    "four_million_lease_ids": b"\x93\x02\x07\xdd\x00\x3f\x00\x00" + b"\x01" * 0x3F0000,
    "too_many_counters": b"\x94\x02\x07\x90" + MANY_COUNTERS,
    "batch_of_arrays": b"\x95\x18\x07\x01\xc4\x08" + bytes(8) + nested(b"\x90"),
}


def peak_bytes(frame: bytes) -> int:
    tracemalloc.start()
    try:
        m.decode_request(frame)
    except MalformedMessage:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_i7_a_frame_of_four_million_things_is_refused_before_they_are_made(frame: bytes) -> None:
    assert len(frame) <= limits.MAX_MESSAGE_BYTES
    with pytest.raises(MalformedMessage):
        m.decode_request(frame)
    assert peak_bytes(frame) < 256 * limits.KIB


@pytest.mark.parametrize("element", [b"\x90", b"\x80", b"\x01", b"\xa0"])
def test_i7_fields_of_a_newer_peer_are_skipped_without_being_made(element: bytes) -> None:
    frame = b"\x95\x02\x07\x90\x80" + nested(element)
    assert m.decode_request(frame) == m.Ping(7)
    assert peak_bytes(frame) < 256 * limits.KIB


def test_i8_nesting_beyond_any_depth_is_refused() -> None:
    for head in (b"", b"\x95\x02\x07\x90\x80"):
        with pytest.raises(MalformedMessage):
            m.decode_request(head + b"\x91" * 1_000_000 + b"\x01")
