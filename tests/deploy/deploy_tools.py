"""What the tests of deploy/ share: where things are, and tools that a machine may lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMMAND = Path(sys.executable).with_name("hisparse-service")
_TOOLS = ROOT / ".tools" / "usr" / "bin"
"""Where deploy/setup-tools.sh unpacks what is not installed."""


def find_tool(name: str) -> str:
    """Its path; the test is skipped where neither the machine nor setup-tools.sh has it."""
    beside_python = Path(sys.executable).with_name(name)
    for candidate in (beside_python, _TOOLS / name):
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: run deploy/setup-tools.sh")
    return found


def run(
    arguments: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; both streams in `stdout`."""
    return subprocess.run(
        [str(argument) for argument in arguments], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
        env=None if environment is None else dict(environment),
    )  # fmt: skip
