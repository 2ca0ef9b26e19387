"""The storm sees what it is there to see: a planted bug gives wrong bytes, no bug gives none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.faults import planted

KILLS = 20
SEEDS = range(5, 11)


def run_storm(*options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.storm", "--workers", "3", *options],
        check=False, capture_output=True, text=True, timeout=300,
        env={k: v for k, v in os.environ.items() if k != planted.VARIABLE},
    )  # fmt: skip
    assert done.stdout, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, summary


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", ["skip_after_check", "same_generation", "publish_early"])
def test_a_planted_bug_is_seen_as_wrong_bytes(bug: str) -> None:
    """Where a stop strikes is chance: a few storms, until one saw it."""
    for seed in SEEDS:
        status, summary = run_storm(
            "--kills", "6", "--seed", str(seed), "--plant", bug, "--only", "kill_worker",
            "stop_worker",
        )  # fmt: skip
        if summary["wrong_bytes"]:
            assert status == 1
            return
    pytest.fail(f"{len(SEEDS)} storms did not see {bug}")


@pytest.mark.timeout(300)
def test_i6_a_short_storm_leaves_no_wrong_byte_and_no_leak() -> None:
    status, summary = run_storm("--kills", str(KILLS), "--seed", "4")
    assert summary["kills"] >= KILLS
    assert {name: summary[name] for name in ("wrong_bytes", "leaked_bytes", "leaked_blocks")} == {
        "wrong_bytes": 0, "leaked_bytes": 0, "leaked_blocks": 0,
    }  # fmt: skip
    assert summary["failures"] == []
    assert status == 0
