"""NUMA policies: parsed, and applied only where there is a choice."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from hisparse_service.contract.errors import ConfigError
from hisparse_service.pool import numa, os_calls
from hisparse_service.pool.numa import NumaMode, NumaOutcome, NumaPolicy
from hisparse_service.testing.faults import FaultPlan


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    path = tmp_path / "has_memory"
    path.write_text("0-1\n")
    return path


@pytest.fixture
def mapping():
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as mapped:
        yield mapped


@pytest.mark.parametrize(
    ("text", "expected"), [("0", (0,)), ("0-2", (0, 1, 2)), ("0-1,3\n", (0, 1, 3)), ("1,1", (1,))]
)
def test_node_lists_read_as_the_kernel_writes_them(text: str, expected: tuple[int, ...]) -> None:
    assert numa.parse_node_list(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("default", NumaPolicy(mode=NumaMode.DEFAULT)),
        ("interleave", NumaPolicy(mode=NumaMode.INTERLEAVE)),
        ("bind:0-1,3", NumaPolicy(mode=NumaMode.BIND, nodes=(0, 1, 3))),
    ],
)
def test_policies_are_parsed(text: str, expected: NumaPolicy) -> None:
    assert numa.parse_policy(text) == expected


@pytest.mark.parametrize(
    "text", ["", "bind", "bind:", "bind:x", "bind:2-1", "bind:9999", "interleave:0", "Default"]
)
def test_other_policies_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        numa.parse_policy(text)


def apply(policy: str, mapping: mmap.mmap, nodes_file: Path) -> numa.NumaReport:
    return numa.apply(
        numa.parse_policy(policy),
        address=os_calls.address_of(mapping),
        length_bytes=len(mapping),
        nodes_file=nodes_file,
    )


def test_one_node_is_reported_and_no_call_is_made(mapping: mmap.mmap, tmp_path: Path) -> None:
    one = tmp_path / "has_memory"
    one.write_text("0\n")
    with FaultPlan() as plan:
        report = apply("interleave", mapping, one)
    assert report.outcome is NumaOutcome.ONE_NODE
    assert "no effect" in report.message
    assert plan.reached == {}


def test_a_node_that_is_not_there_is_a_configuration_error(
    mapping: mmap.mmap, two_nodes: Path
) -> None:
    with pytest.raises(ConfigError, match=r"\[2\]"):
        apply("bind:1-2", mapping, two_nodes)


def test_a_refused_policy_is_reported(mapping: mmap.mmap, two_nodes: Path) -> None:
    with FaultPlan().fail_nth("os.mbind", error=errno.EPERM):
        report = apply("interleave", mapping, two_nodes)
    assert report.outcome is NumaOutcome.FAILED
    assert "refused" in report.message


def test_binding_to_a_node_is_applied_by_the_kernel(mapping: mmap.mmap, two_nodes: Path) -> None:
    # Node 0 exists on every machine; the file only claims that there is a choice.
    report = apply("bind:0", mapping, two_nodes)
    if report.outcome is NumaOutcome.FAILED and "not implemented" in report.message.lower():
        pytest.skip("this kernel has no mbind")
    assert report.outcome is NumaOutcome.APPLIED
    assert report.nodes == (0,)
    address = f"{os_calls.address_of(mapping):x}"
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    assert [line.split()[1] for line in maps if line.startswith(address)] == ["bind:0"]


def test_an_unreadable_node_file_counts_as_one_node(tmp_path: Path) -> None:
    assert numa.memory_nodes(tmp_path / "missing") == (0,)
