"""`bench` marks what misses its bound."""

from __future__ import annotations

import pytest

from hisparse_service.cli import bench


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.37, "over"), (1.3, "within"), (1.304, "within"), (0.9, "within")]
)
def test_a_ratio_beyond_its_bound_is_marked(ratio: float, verdict: str) -> None:
    """Before, 1.37 stood beside 1.3 without a word."""
    assert bench._verdict(ratio, 1.3) == verdict
