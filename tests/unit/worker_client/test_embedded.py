"""What an embedded daemon says at its end: its error where it had one."""

from __future__ import annotations

import pytest

from hisparse_service.contract.errors import ForeignSegment, PoolTooLarge
from worker_client.embedded import _error_in


def test_the_last_line_is_the_error() -> None:
    error = _error_in("2026 [info] starting\nForeignSegment: /x is not ours: why. Remove it")
    assert type(error) is ForeignSegment
    assert str(error) == "/x is not ours: why. Remove it"


def test_an_error_of_the_size_says_where_the_endpoint_has_it() -> None:
    error = _error_in("PoolTooLarge: too large. Set a smaller pool.bytes")
    assert type(error) is PoolTooLarge
    assert "pool_bytes=" in error.remedy


@pytest.mark.parametrize(
    "said", ["it said nothing", "Killed: 9", "PoolTooLarge: x\nTraceback", "", "KeyError: 3"]
)
def test_any_other_end_is_none(said: str) -> None:
    assert _error_in(said) is None
