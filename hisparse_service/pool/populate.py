"""Reserve every page of a segment for real, with all cores, before anybody hears of it (I5)."""

from __future__ import annotations

import dataclasses
import enum

from hisparse_service.contract.errors import HiSparseError


class Cancelled(HiSparseError):
    """Population was cancelled by the caller; nothing is left."""


class PopulateMethod(enum.Enum):
    """How pages are reserved."""

    POPULATE_WRITE = "populate_write"
    """madvise(MADV_POPULATE_WRITE): parallel, zeroes and maps the pages."""
    FALLOCATE = "fallocate"
    """posix_fallocate: one thread at a time in the kernel; for kernels before 5.14."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far population has come."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        """Mean rate since the start."""
        return self.done_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def fraction(self) -> float:
        """0 to 1."""
        return self.done_bytes / self.total_bytes if self.total_bytes else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PopulateReport:
    """How population went."""

    total_bytes: int
    elapsed_s: float
    threads: int
    method: PopulateMethod
