"""Sizes as people read them, for messages. Pure."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(num_bytes: int) -> str:
    """1073741824 as "1 GiB"; what has no short exact form as "1.4 GiB (1,503,238,553 bytes)"."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    text = f"{value:,.1f}".removesuffix(".0")
    if round(float(text.replace(",", "")) * 1024**unit) == num_bytes:
        return f"{text} {_UNITS[unit]}"
    return f"{text} {_UNITS[unit]} ({num_bytes:,} bytes)"


def rough_size_text(num_bytes: int) -> str:
    """The same without the exact bytes."""
    return size_text(num_bytes).partition(" (")[0]
