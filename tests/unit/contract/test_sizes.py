"""Sizes in messages: short where that is exact, with the bytes where it is not."""

from __future__ import annotations

import pytest

from hisparse_service.contract.sizes import rough_size_text, size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (2**21, "2 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**46, "64 TiB"),
        (500 * 2**30, "500 GiB"),
        (2**30 + 1, "1 GiB (1,073,741,825 bytes)"),
        (2**60, "1,048,576 TiB"),
    ],
)
def test_a_size_is_never_off_without_saying_so(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
    assert rough_size_text(num_bytes) == text.partition(" (")[0]
