"""Distinct types for the numbers that travel between both sides, so that two cannot be swapped.

Pure: usable on any thread of either side.
"""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in its backing. 0 is the null block and is never handed out."""

Generation = NewType("Generation", int)
"""How often a block was reassigned; part of every handle. u32, starts at 1."""

NamespaceId = NewType("NamespaceId", int)
"""The daemon's short name of a namespace in this epoch. u16, starts at 1."""

SessionId = NewType("SessionId", int)
"""One connected client process. Unique in an epoch, starts at 1."""

LeaseId = NewType("LeaseId", int)
"""Unique in an epoch, starts at 1. 0 in a request asks for a new lease."""

Epoch = NewType("Epoch", int)
"""The daemon's boot id: random non-zero u64, in every reply."""

NO_LEASE = LeaseId(0)
NO_SESSION = SessionId(0)
