"""Ask for 2 MiB pages, and find out whether there are any: the kernel does not say no.

Opt-in, because compaction on a fragmented host turned seconds of population into minutes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from hisparse_service.pool import os_calls

_SMAPS: Final = Path("/proc/self/smaps")
_MAPPING_LINE: Final = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")


def advise(address: int, length_bytes: int) -> str:
    """MADV_HUGEPAGE on a mapping that has no pages yet.

    Returns:
        Why it was refused; empty when it was not (which does not mean that it has an effect).
    """
    try:
        os_calls.madvise(address, length_bytes, os_calls.MADV_HUGEPAGE)
    except OSError as error:
        return f"huge pages were refused ({error})"
    return ""


def huge_bytes(address: int, smaps: Path = _SMAPS) -> int:
    """Bytes of the mapping at `address` that are mapped with 2 MiB pages. Walks its page tables."""
    inside = False
    for line in smaps.read_text().splitlines():
        match = _MAPPING_LINE.match(line)
        if match:
            inside = int(match[1], 16) == address
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0
