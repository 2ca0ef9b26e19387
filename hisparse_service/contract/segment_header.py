"""A segment's header and backing directory: what a start reads and writes before anything else.

The whole layout is told in `segment.py`, which has the block tables and hands these names on. They
stand apart because the tables need NumPy, and pages are reserved while it is being imported.

Pure functions over buffers: any thread.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

from hisparse_service.contract.errors import CorruptSegmentError, ForeignSegment, GeometryError
from hisparse_service.contract.limits import (
    FINGERPRINT_BYTES,
    MAX_BACKINGS,
    MAX_BLOCKS_PER_BACKING,
    MAX_NAMESPACES,
    MAX_POOL_BYTES,
)

MAGIC: Final = b"HISPARSE"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 4096
POOL_UUID_BYTES: Final = 16
BACKING_RECORD_BYTES: Final = 8192
BACKING_DIRECTORY_OFFSET: Final = HEADER_BYTES
ARENA_OFFSET: Final = BACKING_DIRECTORY_OFFSET + MAX_BACKINGS * BACKING_RECORD_BYTES
RECORD_BYTES: Final = 64


def table_bytes(num_blocks: int) -> int:
    """Bytes of the block table of a backing with `num_blocks` blocks, the null block included."""
    return num_blocks * RECORD_BYTES


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first page of a segment. Written once, before the segment gets its public name."""

    pool_uuid: bytes
    """16 random bytes: this segment and no other."""
    instance: str
    """Name of the instance that made it, at most 64 bytes of UTF-8."""
    pool_name: str
    """At most 64 bytes of UTF-8."""
    segment_bytes: int
    """Size of the whole segment, header included."""
    page_bytes: int
    """OS page that extents are aligned to."""
    created_unix_ns: int
    creator_pid: int


_HEADER = struct.Struct("<8sII16s64s64sQQQQ")
# magic, version, header length, uuid, instance, pool, segment bytes, page, created, pid
_CRC = struct.Struct("<I")


def pack_header(header: Header) -> bytes:
    """The HEADER_BYTES bytes of the first page.

    Raises:
        GeometryError: A name or a size does not fit its field.
    """
    instance, pool = header.instance.encode(), header.pool_name.encode()
    if len(instance) > 64 or len(pool) > 64 or len(header.pool_uuid) != POOL_UUID_BYTES:
        raise GeometryError(
            "instance and pool names take at most 64 bytes, the uuid exactly 16",
            instance_bytes=len(instance), pool_name_bytes=len(pool),
        )  # fmt: skip
    body = _HEADER.pack(
        MAGIC, FORMAT_VERSION, HEADER_BYTES, header.pool_uuid, instance, pool,
        header.segment_bytes, header.page_bytes, header.created_unix_ns, header.creator_pid,
    )  # fmt: skip
    return (body + _CRC.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\0")


def unpack_header(page: bytes | memoryview, *, segment_bytes: int) -> Header:
    """Read and check the first page of a segment.

    Args:
        page: At least HEADER_BYTES bytes.
        segment_bytes: The real size of the object, as fstat tells.

    Raises:
        ForeignSegment: Not ours (magic), or a format version that this code does not know.
        CorruptSegmentError: Checksum, size or fields are wrong.
    """
    page = bytes(page[:HEADER_BYTES])
    if len(page) < HEADER_BYTES:
        raise CorruptSegmentError(
            f"the segment has {len(page)} bytes, a header has {HEADER_BYTES}",
            remedy="It was cut short or never finished; `hisparse-service purge` can remove it",
            segment_bytes=segment_bytes,
        )
    magic, version, length, uuid, instance, pool, size, page_bytes, created, pid = (
        _HEADER.unpack_from(page)
    )
    if magic != MAGIC:
        raise ForeignSegment(
            f"the segment does not begin with {MAGIC!r}",
            remedy="Another program owns this name; choose another instance or pool name",
        )
    if version != FORMAT_VERSION or length != HEADER_BYTES:
        raise ForeignSegment(
            f"segment format version {version}, this code knows {FORMAT_VERSION}",
            remedy="Run the version that made it, or another instance name beside it",
            version=version, known_version=FORMAT_VERSION,
        )  # fmt: skip
    (crc,) = _CRC.unpack_from(page, _HEADER.size)
    if crc != zlib.crc32(page[: _HEADER.size]) or any(page[_HEADER.size + _CRC.size :]):
        raise CorruptSegmentError("the header's checksum is wrong", remedy=_DO_NOT_USE)
    if size != segment_bytes or not ARENA_OFFSET < size <= MAX_POOL_BYTES:
        raise CorruptSegmentError(
            f"the header says {size} bytes, the object has {segment_bytes}",
            remedy=_DO_NOT_USE, header_bytes=size, segment_bytes=segment_bytes,
        )  # fmt: skip
    try:
        names = [raw.rstrip(b"\0").decode() for raw in (instance, pool)]
    except UnicodeDecodeError as error:
        raise CorruptSegmentError(
            "a name in the header is not UTF-8", remedy=_DO_NOT_USE
        ) from error
    return Header(
        pool_uuid=uuid, instance=names[0], pool_name=names[1], segment_bytes=size,
        page_bytes=page_bytes, created_unix_ns=created, creator_pid=pid,
    )  # fmt: skip


_DO_NOT_USE: Final = "The segment is left as it is; start under another instance name, or purge it"


class BackingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One backing: a range of the pool given to a namespace."""

    namespace: int
    """1 to MAX_NAMESPACES; also stands in each block record."""
    fingerprint: bytes
    """16 B: what may share blocks (see geometry.namespace_fingerprint)."""
    name: str
    """For people: the model's name, say."""
    geometry: bytes
    """`geometry.encode_geometry` of the namespace's host geometry."""
    generation: int
    """Counts how often this slot of the directory was given out."""
    num_blocks: int
    """Null block included."""
    table_offset_bytes: int
    payload_offset_bytes: int
    payload_bytes: int


_BACKING = struct.Struct("<BxHI16sQQQQI")
# in use, namespace, generation, fingerprint, blocks, table, payload, payload bytes, blob length
BACKING_IN_USE_OFFSET: Final = 0
"""The byte that makes a slot valid; stored last when a backing is made, first when it goes."""


def backing_offset(index: int) -> int:
    """Byte offset of slot `index` of the backing directory."""
    return BACKING_DIRECTORY_OFFSET + index * BACKING_RECORD_BYTES


def pack_backing(record: BackingRecord) -> bytes:
    """The BACKING_RECORD_BYTES bytes of one slot, the in-use byte set.

    Raises:
        GeometryError: Name and geometry are too long for a slot.
    """
    blob = msgspec.msgpack.encode((record.name, record.geometry))
    head = _BACKING.pack(
        1, record.namespace, record.generation, record.fingerprint, record.num_blocks,
        record.table_offset_bytes, record.payload_offset_bytes, record.payload_bytes, len(blob),
    )  # fmt: skip
    body = head + blob
    if len(body) + _CRC.size > BACKING_RECORD_BYTES:
        raise GeometryError(
            f"a backing's name and geometry take {len(blob)} bytes, at most "
            f"{BACKING_RECORD_BYTES - _BACKING.size - _CRC.size} fit",
            remedy="Use fewer distinct layer groups or a shorter name",
        )
    return (body + _CRC.pack(zlib.crc32(body))).ljust(BACKING_RECORD_BYTES, b"\0")


def unpack_backing(slot: bytes | memoryview, *, segment_bytes: int) -> BackingRecord | None:
    """Read and check one slot of the backing directory; None where the slot is empty.

    Raises:
        CorruptSegmentError: The slot is in use and fails a check.
    """
    slot = bytes(slot[:BACKING_RECORD_BYTES])
    if len(slot) < BACKING_RECORD_BYTES:
        raise CorruptSegmentError("a backing record is cut short", remedy=_DO_NOT_USE)
    (
        in_use,
        namespace,
        generation,
        fingerprint,
        num_blocks,
        table,
        payload,
        payload_bytes,
        length,
    ) = _BACKING.unpack_from(slot)
    if in_use == 0:
        return None
    end = _BACKING.size + length
    if in_use != 1 or end + _CRC.size > BACKING_RECORD_BYTES:
        raise CorruptSegmentError("a backing record's length is wrong", remedy=_DO_NOT_USE)
    (crc,) = _CRC.unpack_from(slot, end)
    if crc != zlib.crc32(slot[:end]) or any(slot[end + _CRC.size :]):
        raise CorruptSegmentError("a backing record's checksum is wrong", remedy=_DO_NOT_USE)
    try:
        name, geometry = msgspec.msgpack.decode(slot[_BACKING.size : end], type=tuple[str, bytes])
    except msgspec.MsgspecError as error:
        raise CorruptSegmentError(
            "a backing's geometry cannot be read", remedy=_DO_NOT_USE
        ) from error
    fits = (
        1 <= namespace <= MAX_NAMESPACES
        and 2 <= num_blocks <= MAX_BLOCKS_PER_BACKING
        and len(fingerprint) == FINGERPRINT_BYTES
        and ARENA_OFFSET <= table <= segment_bytes - table_bytes(num_blocks)
        and ARENA_OFFSET <= payload <= segment_bytes - payload_bytes
        and payload_bytes > 0
        and (payload + payload_bytes <= table or table + table_bytes(num_blocks) <= payload)
    )
    if not fits:
        raise CorruptSegmentError(
            "a backing record points outside the segment", remedy=_DO_NOT_USE,
            num_blocks=num_blocks, table_offset_bytes=table, payload_offset_bytes=payload,
        )  # fmt: skip
    return BackingRecord(
        namespace=namespace, fingerprint=fingerprint, name=name, geometry=geometry,
        generation=generation, num_blocks=num_blocks, table_offset_bytes=table,
        payload_offset_bytes=payload, payload_bytes=payload_bytes,
    )  # fmt: skip
