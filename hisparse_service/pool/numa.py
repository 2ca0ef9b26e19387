"""Which memory node a pool's pages come from.

First touch decides otherwise, and a pool that one thread touched sits on one socket. The policy is
set on the mapping before population; for shared memory it holds for the object, whoever faults.
Called from the population's thread.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Final

from hisparse_service.contract.errors import ConfigError
from hisparse_service.pool import os_calls

_NODES_FILE: Final = Path("/sys/devices/system/node/has_memory")
_MAX_NODES: Final = 1024
_MPOL_BIND: Final = 2
_MPOL_INTERLEAVE: Final = 3


class NumaMode(enum.Enum):
    """Kinds of placement."""

    DEFAULT = "default"
    INTERLEAVE = "interleave"
    BIND = "bind"


class NumaOutcome(enum.Enum):
    """What became of the policy."""

    NOT_ASKED = "not_asked"
    ONE_NODE = "one_node"
    """There is nothing to choose from."""
    APPLIED = "applied"
    FAILED = "failed"
    """The kernel refused; pages are placed by first touch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumaPolicy:
    """A parsed policy. `nodes` is empty unless the mode is BIND."""

    mode: NumaMode
    nodes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumaReport:
    """What was done."""

    outcome: NumaOutcome
    nodes: tuple[int, ...]
    message: str = ""


def parse_node_list(text: str) -> tuple[int, ...]:
    """`0-1,3` as the kernel writes it.

    Raises:
        ValueError: Not such a list, or a node number past the maximum.
    """
    nodes: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < _MAX_NODES:
            raise ValueError(f"{part!r} is not a range of nodes")
        nodes.update(range(low, high + 1))
    return tuple(sorted(nodes))


def parse_policy(text: str) -> NumaPolicy:
    """`default`, `interleave` or `bind:<nodes>`.

    Raises:
        ConfigError: Something else.
    """
    mode, colon, nodes = text.partition(":")
    try:
        if mode == NumaMode.BIND.value and colon:
            return NumaPolicy(mode=NumaMode.BIND, nodes=parse_node_list(nodes))
        if not colon and mode != NumaMode.BIND.value:
            return NumaPolicy(mode=NumaMode(mode))
    except ValueError as error:
        raise _bad_policy(text) from error
    raise _bad_policy(text)


def _bad_policy(text: str) -> ConfigError:
    return ConfigError(
        f"the NUMA policy {text!r} is not known",
        remedy="Use `default`, `interleave` or `bind:<nodes>`, as in bind:0-1,3",
    )


def memory_nodes(nodes_file: Path = _NODES_FILE) -> tuple[int, ...]:
    """Nodes that have memory; (0,) where the kernel does not tell."""
    try:
        return parse_node_list(nodes_file.read_text())
    except (OSError, ValueError):
        return (0,)


def apply(
    policy: NumaPolicy,
    *,
    address: int,
    length_bytes: int,
    nodes_file: Path = _NODES_FILE,
) -> NumaReport:
    """Set the policy on a mapping that has no pages yet. Acts only where there is a choice.

    Raises:
        ConfigError: BIND names a node without memory.
    """
    nodes = memory_nodes(nodes_file)
    missing = set(policy.nodes) - set(nodes)
    if missing:
        raise ConfigError(
            f"the NUMA policy binds to nodes {sorted(missing)}, this host has {list(nodes)}",
            remedy="Name nodes that have memory (see `numactl --hardware`)",
        )
    if policy.mode is NumaMode.DEFAULT:
        return NumaReport(outcome=NumaOutcome.NOT_ASKED, nodes=nodes)
    if len(nodes) == 1:
        return NumaReport(
            outcome=NumaOutcome.ONE_NODE,
            nodes=nodes,
            message=f"NUMA policy {policy.mode.value} has no effect: one memory node",
        )
    chosen = policy.nodes or nodes
    kernel_mode = _MPOL_BIND if policy.mode is NumaMode.BIND else _MPOL_INTERLEAVE
    try:
        os_calls.mbind(address, length_bytes, mode=kernel_mode, nodes=chosen)
    except OSError as error:
        return NumaReport(
            outcome=NumaOutcome.FAILED,
            nodes=nodes,
            message=f"NUMA policy {policy.mode.value} was refused ({error}): pages go where "
            "they are first touched",
        )
    return NumaReport(outcome=NumaOutcome.APPLIED, nodes=chosen)
