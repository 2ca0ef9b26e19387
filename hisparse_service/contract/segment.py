"""The binary layout of a pool's segment: header, backing directory, block tables.

    offset 0        header, 4,096 B            `Header`
    4,096           backing directory          MAX_BACKINGS records of 8,192 B, `BackingRecord`
    ARENA_OFFSET    arena                      for each backing two page-aligned extents:
                                               its block table (`RECORD_DTYPE`) and its payload

The daemon alone writes everything but payloads. Workers map the segment, read the block table to
check (generation, state) around a read (I3), and treat all of it as untrusted bytes (I8): nothing
is used before `unpack` has checked magic, version, checksum and ranges. Little endian throughout.

Write order of a block record: all fields, then `check`, then `state`. A process that dies between
two stores leaves the old record or one whose state says that it holds nothing.

Pure functions over buffers: any thread; the single writer is the daemon's control loop.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.errors import GeometryError
from hisparse_service.contract.segment_header import (
    ARENA_OFFSET,
    BACKING_DIRECTORY_OFFSET,
    BACKING_IN_USE_OFFSET,
    BACKING_RECORD_BYTES,
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES,
    BackingRecord,
    Header,
    backing_offset,
    pack_backing,
    pack_header,
    table_bytes,
    unpack_backing,
    unpack_header,
)

__all__ = [
    "ARENA_OFFSET",
    "BACKING_DIRECTORY_OFFSET",
    "BACKING_IN_USE_OFFSET",
    "BACKING_RECORD_BYTES",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MAGIC",
    "RECORD_BYTES",
    "RECORD_DTYPE",
    "U64_MASK",
    "BackingRecord",
    "BlockState",
    "Header",
    "backing_offset",
    "pack_backing",
    "pack_header",
    "record_check",
    "record_checks",
    "table_bytes",
    "table_view",
    "unpack_backing",
    "unpack_header",
]

U64_MASK: Final = 2**64 - 1


class BlockState(enum.IntEnum):
    """State of one block, as it stands in its record. Transitions: directory/states.py."""

    FREE = 0
    RESERVED = 1
    WRITING = 2
    PUBLISHED = 3
    EVICTING = 4


RECORD_DTYPE: Final = np.dtype(
    {
        "names": [
            "key_low", "key_high", "last_use", "checksum", "check", "generation",
            "parent", "parent_generation", "depth", "namespace", "flags", "state",
        ],
        "formats": [
            "<u8", "<u8", "<u8", "<u8", "<u8", "<u4",
            "<u4", "<u4", "<u4", "<u2", "u1", "u1",
        ],
        "offsets": [0, 8, 16, 24, 32, 40, 44, 48, 52, 56, 58, 59],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
"""One block's record.

key_low, key_high: the two halves of the 16 B block key; last_use: twice the directory's use counter
(a number of uses, not a time), plus 1 while somebody reads the block, so that the next daemon knows
what its predecessor's clients had pinned; checksum: optional content checksum of the payload, 0 =
none; check: `record_check` of the fields, valid only in PUBLISHED; parent: block of the previous
block of the prefix (0 = first), with its generation; depth: blocks before this one in its prefix.
"""

assert RECORD_DTYPE.itemsize == RECORD_BYTES

# Odd 64-bit constants (fractional parts of square roots of the first primes). One multiply and one
# xor-shift a field: numpy does 300,000 records in milliseconds, where a CRC would take a second.
_MIX: Final = (
    0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
)  # fmt: skip
_MIX_0, _MIX_1, _MIX_2, _MIX_3, _MIX_4, _MIX_5, _MIX_6, _ = _MIX
_CHECK_SEED: Final = 0xCBBB9D5DC1059ED8


def record_check(
    *,
    block: int,
    key_low: int,
    key_high: int,
    checksum: int,
    generation: int,
    parent: int,
    parent_generation: int,
    depth: int,
    namespace: int,
    flags: int,
) -> int:
    """The 64-bit check of a published record.

    The block id is part of it: a record that was copied to another place does not pass.
    """
    # `record_checks`, written out: one is made for each block that is published, and the loop costs
    # a third more (1.8 us against 1.3).
    acc = ((_CHECK_SEED ^ key_low) * _MIX_0) & U64_MASK
    acc = ((acc ^ (acc >> 29) ^ key_high) * _MIX_1) & U64_MASK
    acc = ((acc ^ (acc >> 29) ^ checksum) * _MIX_2) & U64_MASK
    acc = ((acc ^ (acc >> 29) ^ ((parent << 32) | generation)) * _MIX_3) & U64_MASK
    acc = ((acc ^ (acc >> 29) ^ ((depth << 32) | parent_generation)) * _MIX_4) & U64_MASK
    acc = ((acc ^ (acc >> 29) ^ ((namespace << 8) | flags)) * _MIX_5) & U64_MASK
    acc = ((acc ^ (acc >> 29) ^ block) * _MIX_6) & U64_MASK
    return acc ^ (acc >> 29)


def record_checks(
    table: npt.NDArray[Any], blocks: npt.NDArray[np.integer[Any]] | None = None
) -> npt.NDArray[np.uint64]:
    """`record_check` of many records.

    Args:
        table: `RECORD_DTYPE` [num_blocks].
        blocks: Ids of the records to check; all of the table when None.

    Returns:
        u64 [len(blocks)].
    """
    rows = table if blocks is None else table[blocks]
    ids = np.arange(len(table)) if blocks is None else blocks
    u8 = np.uint64
    words = (
        rows["key_low"], rows["key_high"], rows["checksum"],
        (rows["parent"].astype(u8) << u8(32)) | rows["generation"],
        (rows["depth"].astype(u8) << u8(32)) | rows["parent_generation"],
        (rows["namespace"].astype(u8) << u8(8)) | rows["flags"],
        ids.astype(u8),
    )  # fmt: skip
    acc = np.full(len(rows), _CHECK_SEED, dtype=u8)
    for value, constant in zip(words, _MIX, strict=False):
        acc = (acc ^ value) * u8(constant)
        acc ^= acc >> u8(29)
    return acc


def table_view(segment: Any, *, table_offset_bytes: int, num_blocks: int) -> npt.NDArray[Any]:
    """A `RECORD_DTYPE` [num_blocks] view of the block table in a mapped segment.

    Raises:
        GeometryError: The table does not lie inside the buffer.
    """
    end = table_offset_bytes + table_bytes(num_blocks)
    size = memoryview(segment).nbytes
    if num_blocks < 1 or table_offset_bytes < 0 or end > size:
        raise GeometryError(
            f"block table [{table_offset_bytes}, {end}) lies outside the segment of {size} bytes",
            offset_bytes=table_offset_bytes, segment_bytes=size,
        )  # fmt: skip
    return np.frombuffer(segment, RECORD_DTYPE, count=num_blocks, offset=table_offset_bytes)
