"""Which bytes of a segment are given out: a first-fit extent allocator.

Nothing of it is stored: an adopted pool's arena is rebuilt from its backing records with `reserve`.
Pure; the owner's thread. Linear in the number of free extents: at most two a backing, and one.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from hisparse_service.contract.errors import CapacityError, CorruptSegmentError, InternalError


class Extent(NamedTuple):
    """Bytes [offset_bytes, offset_bytes + length_bytes)."""

    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """One past the last byte."""
        return self.offset_bytes + self.length_bytes


class Arena:
    """Free extents of [start_bytes, end_bytes), in order, no two of them adjacent.

    Args:
        start_bytes: First byte, on a page.
        end_bytes: One past the last byte; the rest of a page that does not fill is left out.
        page_bytes: Alignment and granularity of every extent.
    """

    def __init__(self, *, start_bytes: int, end_bytes: int, page_bytes: int) -> None:
        if page_bytes < 1 or start_bytes % page_bytes:
            raise InternalError(f"arena start {start_bytes} is not on a page of {page_bytes}")
        self.page_bytes = page_bytes
        self.start_bytes = start_bytes
        self.end_bytes = max(start_bytes, end_bytes // page_bytes * page_bytes)
        self._free: list[Extent] = []
        if self.end_bytes > start_bytes:
            self._free.append(Extent(start_bytes, self.end_bytes - start_bytes))

    @property
    def total_bytes(self) -> int:
        """Bytes given out and free together."""
        return self.end_bytes - self.start_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of all free extents."""
        return sum(extent.length_bytes for extent in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest free extent."""
        return max((extent.length_bytes for extent in self._free), default=0)

    def round_up(self, length_bytes: int) -> int:
        """`length_bytes` as whole pages."""
        return -(-length_bytes // self.page_bytes) * self.page_bytes

    def allocate(self, length_bytes: int) -> int:
        """Take the first free extent that is large enough.

        Returns:
            Its offset, on a page.

        Raises:
            CapacityError: None is large enough; nothing changed.
        """
        needed = self.round_up(length_bytes)
        if needed <= 0:
            raise InternalError(f"an extent of {length_bytes} bytes was asked for")
        for index, extent in enumerate(self._free):
            if extent.length_bytes >= needed:
                self._take(index, extent.offset_bytes, needed)
                return extent.offset_bytes
        raise CapacityError(
            f"the pool has no extent of {needed} bytes: {self.free_bytes} are free, the largest "
            f"extent has {self.largest_free_bytes}",
            remedy="Ask for fewer blocks, drop a backing that is not used, or enlarge the pool",
            needed=needed,
            free=self.largest_free_bytes,
        )

    def reserve(self, offset_bytes: int, length_bytes: int) -> None:
        """Take a given extent, as a backing record says.

        Raises:
            CorruptSegmentError: Not on a page, outside the arena, or taken; nothing changed.
        """
        length = self.round_up(length_bytes)
        index = bisect.bisect_right(self._free, (offset_bytes, self.end_bytes)) - 1
        fits = (
            length > 0
            and offset_bytes % self.page_bytes == 0
            and index >= 0
            and offset_bytes + length <= self._free[index].end_bytes
        )
        if not fits:
            raise CorruptSegmentError(
                f"the extent [{offset_bytes}, {offset_bytes + length}) overlaps another or is "
                "not on a page of the arena",
                remedy="The segment is left as it is; start under another instance name",
                offset_bytes=offset_bytes,
                length_bytes=length_bytes,
            )
        self._take(index, offset_bytes, length)

    def free(self, offset_bytes: int, length_bytes: int) -> None:
        """Give an extent back and join it with its free neighbours.

        Raises:
            InternalError: Not an extent that was given out; nothing changed.
        """
        length = self.round_up(length_bytes)
        extent = Extent(offset_bytes, length)
        index = bisect.bisect_left(self._free, extent)
        before = self._free[index - 1] if index > 0 else None
        after = self._free[index] if index < len(self._free) else None
        given_out = (
            length > 0
            and offset_bytes % self.page_bytes == 0
            and offset_bytes >= (before.end_bytes if before else self.start_bytes)
            and extent.end_bytes <= (after.offset_bytes if after else self.end_bytes)
        )
        if not given_out:
            raise InternalError(f"extent [{offset_bytes}, {extent.end_bytes}) was not given out")
        start, end = extent.offset_bytes, extent.end_bytes
        first, last = index, index
        if before and before.end_bytes == start:
            start, first = before.offset_bytes, index - 1
        if after and after.offset_bytes == end:
            end, last = after.end_bytes, index + 1
        self._free[first:last] = [Extent(start, end - start)]

    def free_extents(self) -> tuple[Extent, ...]:
        """The free extents, in order."""
        return tuple(self._free)

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            InternalError: One is broken.
        """
        previous_end = -1
        for extent in self._free:
            sound = (
                extent.length_bytes > 0
                and extent.offset_bytes % self.page_bytes == 0
                and extent.length_bytes % self.page_bytes == 0
                and extent.offset_bytes > previous_end
                and self.start_bytes <= extent.offset_bytes
                and extent.end_bytes <= self.end_bytes
            )
            if not sound:
                raise InternalError(f"free extent {extent} is not sound in {self._free}")
            previous_end = extent.end_bytes

    def _take(self, index: int, offset_bytes: int, length_bytes: int) -> None:
        extent = self._free[index]
        left = Extent(extent.offset_bytes, offset_bytes - extent.offset_bytes)
        end = offset_bytes + length_bytes
        right = Extent(end, extent.end_bytes - end)
        self._free[index : index + 1] = [part for part in (left, right) if part.length_bytes]
