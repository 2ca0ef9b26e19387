"""The bare gather of the benchmark copies the rows that its lists name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.gpu import translation
from benchmarks.gpu.workloads import Pool

CASE = translation.Case(group="test", label="any", rows=4_099, destination_mb=8, blocks=7)
POOL_BYTES = 256 * 1024**2


@pytest.fixture(scope="module")
def bench() -> Iterator[translation.Bench]:
    pool = Pool(POOL_BYTES)
    yield translation.Bench(pool.tensor)
    pool.close()


@pytest.mark.parametrize("loads", list(translation.LOADS))
@pytest.mark.parametrize("stores", list(translation.STORES))
@pytest.mark.parametrize("is_sorted", [True, False])
def test_all_rows_are_copied(
    bench: translation.Bench, loads: str, stores: str, is_sorted: bool
) -> None:
    case = replace(CASE, loads=loads, stores=stores, is_sorted=is_sorted)
    (lists,) = bench.lists(case, 1)
    target = bench.target(case).zero_()
    bench.launch(case, target, *lists)
    bench.check(target, *lists, count=case.rows)


def test_a_row_that_was_not_copied_is_found(bench: translation.Bench) -> None:
    (lists,) = bench.lists(CASE, 1)
    with pytest.raises(RuntimeError, match="the row on the device is not the host's"):
        bench.check(bench.target(CASE).zero_(), *lists)


def test_huge_pages_are_registered_and_read() -> None:
    try:
        memory = translation.HugePages(64 * 1024**2)
    except OSError as error:
        pytest.skip(f"{error}")
    try:
        bench = translation.Bench(memory.tensor)
        (lists,) = bench.lists(CASE, 1)
        target = bench.target(CASE)
        bench.launch(CASE, target, *lists)
        bench.check(target, *lists)
    finally:
        memory.close()
