"""Matrix products that stand for the computation beside the data plane."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.workloads import DEVICE, median, time_us


@dataclass(frozen=True, kw_only=True)
class Shape:
    """bf16 ``[rows, inner] x [inner, columns]``."""

    name: str
    rows: int
    inner: int
    columns: int


SHAPES = (
    Shape(name="dense", rows=4_096, inner=7_168, columns=8_192),
    Shape(name="fine", rows=8_192, inner=2_048, columns=8_192),
    Shape(name="decode", rows=64, inner=7_168, columns=8_192),
)
"""``dense`` has 1,024 tiles of 128 x 256: 7.8 waves of 132 multiprocessors, so that a few fewer of
them cost a whole wave; ``fine`` has twice as many, each shorter; ``decode`` reads 117 MB of weights
for 64 rows and waits for device memory."""

MIN_COUNT_TO_ROUND = 5
"""Products of a chain from which on rounding their number is near enough to a wanted time."""


class Product:
    """The operands of one shape, and chains of its product."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        draw = {"device": DEVICE, "dtype": torch.bfloat16}
        self._left = torch.randn((shape.rows, shape.inner), **draw)
        self._right = torch.randn((shape.inner, shape.columns), **draw)
        self._one_us: float | None = None
        self._out = torch.empty((shape.rows, shape.columns), **draw)

    def run(self, count: int = 1) -> None:
        """Enqueue the product ``count`` times on the current stream."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def time_us(self, count: int = 40) -> float:
        """Microseconds of one product in a chain, on a device that is warm."""
        self.run(3 * count)
        times = time_us(lambda _: self.run(count), repeats=5, spin_cycles=4_000_000)
        return median(times) / count

    def count_for(self, chain_us: float) -> int:
        """How many take about so long."""
        if self._one_us is None:
            self._one_us = self.time_us()
        return max(2, round(chain_us / self._one_us))


def calibrated(shape: Shape, target_us: float) -> tuple[Product, int]:
    """A product and how many of it take ``target_us``; few are fitted by their inner size."""
    product = Product(shape)
    one = product.time_us()
    count = max(1, round(target_us / one))
    if count < MIN_COUNT_TO_ROUND:
        inner = max(64, round(shape.inner * target_us / (one * count) / 64) * 64)
        product = Product(
            Shape(name=shape.name, rows=shape.rows, inner=inner, columns=shape.columns)
        )
    return product, count
