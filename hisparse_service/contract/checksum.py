"""The content checksum of a block, and what a check of it can find.

Optional: a writer that gives none publishes blocks that nobody can verify. It covers the block's
bytes in all layers, region by region as the geometry lays them out, so writer, readers and daemon
make the same one from the same memory. 64 bits of BLAKE2b: about 1 ms a MB, and no accident passes.

Pure: any thread of either side.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from typing import Final

from hisparse_service.contract.geometry import HostGeometry

NO_CHECKSUM: Final = 0


class Verdict(enum.IntEnum):
    """What the daemon found about a reported block."""

    STALE = 0
    """Not published with this generation (any more): nothing was checked."""
    SOUND = 1
    """Its bytes fit its checksum: nothing was changed."""
    DAMAGED = 2
    """They do not, or its record is damaged: it was withdrawn."""
    UNVERIFIABLE = 3
    """It was published without a checksum, or its pages cannot be read: it stays as it is."""
    NOT_CHECKED = 4
    """Too many blocks wait for their check: report it again, if it is met again."""


def block_extents(geometry: HostGeometry, num_blocks: int, block: int) -> list[tuple[int, int]]:
    """(offset, length) of a block's bytes in a backing's payload, in the checksum's order."""
    extents = []
    base = 0
    for size in geometry.tensor_sizes(num_blocks):
        page = size // num_blocks
        extents.append((base + block * page, page))
        base += size
    return extents


def content_checksum(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """The checksum of a block whose bytes are these, one after the other; never NO_CHECKSUM."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") or 1
