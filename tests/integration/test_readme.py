"""What the README tells a stranger to do, done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_tour_in_python_runs_as_it_is_printed():
    (tour,) = fenced("python")
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", tour], cwd=ROOT, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "found 1 block: [1], the bytes that were written: True\n"


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 15
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_the_limits_that_are_named_are_those_of_the_code():
    from hisparse_service.contract import limits

    for named in (
        limits.MAX_KEYS, limits.MAX_RESERVE_BLOCKS, limits.MAX_HOT_ROWS, limits.MAX_TOP_K,
        limits.MAX_BLOCK_SIZE, limits.MAX_SESSIONS, limits.MAX_BACKINGS,
        int(limits.LEASE_TTL_S), limits.MAX_ROW_BYTES // limits.KIB,
        limits.MAX_POOL_BYTES // (limits.GIB * limits.KIB), int(limits.QUARANTINE_S) // 60,
    ):  # fmt: skip
        assert re.search(rf"(?<![\d,]){named:,}(?![\d,])", README), named
