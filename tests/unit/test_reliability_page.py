"""Every test that docs/reliability.md names as the proof of a promise exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGINNING = re.compile(r"\b(test_[a-z0-9_]+)(…?)(?=[`:.…]|$)")


def test_each_promise_names_a_test_that_exists() -> None:
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    functions = set(re.findall(r"def (test_[a-z0-9_]+)", "\n".join(sources.values())))
    files = {path.stem for path in sources}
    named = BEGINNING.findall(PAGE.read_text())
    assert len(named) > 40
    missing = [
        name
        for name, is_cut in named
        if name not in files | functions
        and not (is_cut and any(each.startswith(name) for each in functions))
    ]
    assert missing == []
