"""A latency histogram that costs the control loop a shift and an addition.

prometheus_client's own costs as much as decoding a request. Written by one thread; a reader in
another may see a sample in `count` before it sees it in a bucket.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MIN_BIT: Final = 13
_MAX_BIT: Final = 34
"""Buckets are powers of two of nanoseconds: 8 us to 17 s."""
NUM_BUCKETS: Final = _MAX_BIT - _MIN_BIT + 2
_UPPER_BOUNDS_S: Final = tuple(float(1 << bit) / 1e9 for bit in range(_MIN_BIT, _MAX_BIT + 1))


class LatencyHistogram:
    """How long something took, in buckets of a factor of two."""

    __slots__ = ("buckets", "count", "sum_ns")

    def __init__(self) -> None:
        self.buckets = [0] * NUM_BUCKETS
        self.count = 0
        self.sum_ns = 0

    def observe_ns(self, elapsed_ns: int) -> None:
        """Count one."""
        bit = elapsed_ns.bit_length()
        at = 0 if bit <= _MIN_BIT else NUM_BUCKETS - 1 if bit > _MAX_BIT else bit - _MIN_BIT
        self.buckets[at] += 1
        self.count += 1
        self.sum_ns += elapsed_ns

    def observe_many_ns(self, elapsed_ns: npt.NDArray[Any]) -> None:
        """Count many at once: i64 [n]."""
        # Of a whole number below 2^53, frexp's exponent is its bit length.
        _, bits = np.frexp(elapsed_ns.astype(np.float64))
        at = np.clip(bits - _MIN_BIT, 0, NUM_BUCKETS - 1)
        for index, count in enumerate(np.bincount(at, minlength=NUM_BUCKETS).tolist()):
            self.buckets[index] += count
        self.count += len(elapsed_ns)
        self.sum_ns += int(elapsed_ns.sum())

    def quantile_s(self, share: float) -> float:
        """Upper bound of the bucket that holds this share of the samples; 0 without any."""
        wanted, seen = share * self.count, 0
        for index, count in enumerate(self.buckets):
            seen += count
            if count and seen >= wanted:
                return _UPPER_BOUNDS_S[min(index, len(_UPPER_BOUNDS_S) - 1)]
        return 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound in seconds, samples up to it), as Prometheus wants it."""
        rows, seen = [], 0
        buckets = list(self.buckets)
        for bound, count in zip(_UPPER_BOUNDS_S, buckets, strict=False):
            seen += count
            rows.append((repr(bound), float(seen)))
        rows.append(("+Inf", float(seen + buckets[-1])))
        return rows
