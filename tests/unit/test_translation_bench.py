"""The bare gather: its kernel compiles with every hint, and its figures keep their names."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import translation

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "translation-h200.json"
NO_LONGER_RUN = ("copy.", "pages.driver", "policy.whole_sectors", "slowest_block.")


def test_each_case_has_a_name_of_its_own_and_enough_lists() -> None:
    cases = list(translation.cases())
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.rows in translation.LISTS for case in cases)
    for case in cases:
        room = (case.destination_mb or 10**6) * 10**6 // translation.ROW_BYTES
        assert case.rows <= room, case.name


def test_measured_figures_say_what_the_case_of_their_name_says() -> None:
    cases = {case.name: asdict(case) for case in translation.cases()}
    for figure in json.loads(RESULTS.read_text()):
        name = figure["name"]
        if name.startswith(tuple(f"translation.{n}" for n in NO_LONGER_RUN)):
            continue
        case, facts = cases.pop(name), figure["parameters"]
        for key in ("rows", "is_sorted", "blocks", "threads", "unroll", "loads", "stores", "pages",
                    "flushed", "destinations", "set_aside_mib"):  # fmt: skip
            assert facts[key] == case[key], (name, key)
        rate = facts["rows"] * translation.ROW_BYTES / facts["us"] / 1e3
        assert figure["value"] == pytest.approx(rate, rel=1e-3), name
    assert not cases, "never measured"


@pytest.mark.parametrize(
    ("loads", "stores"), list(itertools.product(translation.LOADS, translation.STORES))
)
def test_the_kernel_compiles_with_every_hint(loads: str, stores: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")
    case = translation.Case(group="hints", label="any", rows=1, loads=loads, stores=stores)
    assert translation.compile_kernel(case, "sm_90").code


def test_a_hint_is_in_the_instruction_that_it_is_for() -> None:
    source = translation.source_of("evict_unchanged", "write_through")
    assert "createpolicy.fractional.L2::evict_unchanged.b64" in source
    assert translation.LOADS["evict_unchanged"] in source
    assert translation.STORES["write_through"] in source
    assert "@" not in source
