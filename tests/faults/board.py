"""A small shared file in which workers keep counts that survive their SIGKILL."""

from __future__ import annotations

import enum
import mmap
import pathlib
from types import TracebackType

import numpy as np


class Count(enum.IntEnum):
    """Columns of the board, one u64 each."""

    OPERATIONS = 0
    READS = 1
    PUBLISHED_BLOCKS = 2
    WRONG_BYTES = 3
    STALE_RAISED = 4
    UNAVAILABLE = 5
    INCARNATIONS = 6
    UNEXPECTED = 7
    REFUSED = 8
    HANDED_IN = 9
    MIRRORS_LOST = 10
    MIRRORS_GIVEN_UP = 11


class Board:
    """u64 [num_workers, len(Count)] in a file. One writer a row."""

    def __init__(self, path: pathlib.Path, num_workers: int) -> None:
        size = num_workers * len(Count) * 8
        if not path.exists():
            path.write_bytes(bytes(size))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), size)
        self.counts = np.frombuffer(self._map, np.uint64).reshape(num_workers, len(Count))

    def add(self, worker: int, count: Count, amount: int = 1) -> None:
        """Add to one count."""
        self.counts[worker, count] += np.uint64(amount)

    def raise_to(self, worker: int, count: Count, value: int) -> None:
        """Keep the largest value."""
        self.counts[worker, count] = max(int(self.counts[worker, count]), value)

    def total(self, count: Count) -> int:
        """Sum over the workers."""
        return int(self.counts[:, count].sum())

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self.counts
        self._map.close()
        self._file.close()
