"""What a request took whose answer came after its caller had given up: it goes back.

A request that timed out, or that Ctrl-C interrupted, may be carried out all the same. A new lease
is then released as a whole; but an engine keeps one lease for its life, and blocks that the daemon
counts to it and the engine does not know of would be lost to everybody.

Kept by `lease_book.py`; all with `Session.lock` held.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import numpy as np

from hisparse_service.contract.limits import MAX_LEASES_PER_SESSION
from worker_client.blocks import BlockLease, LeaseState, U32Array

Part = Literal["pinned", "reserved"]
"""Of a lease: what a request adds its blocks to."""

_MAX_GIVEN_UP: Final = MAX_LEASES_PER_SESSION
"""Requests without an answer that are remembered; a daemon that answers none is soon away."""


class Late(NamedTuple):
    """Blocks that the daemon gave to a lease unnoticed."""

    lease: BlockLease
    part: Part
    blocks: U32Array


class LateAnswers:
    """Remembers requests that were given up, and what came of them."""

    def __init__(self) -> None:
        self._given_up: dict[int, Part] = {}
        self._came: collections.deque[tuple[weakref.ref[BlockLease], Part, U32Array]] = (
            collections.deque(maxlen=_MAX_GIVEN_UP)
        )

    def give_up(self, request_id: int, part: Part) -> None:
        """Nobody waits for this answer any more."""
        self._given_up[request_id] = part
        if len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def came(self, request_id: int, lease: BlockLease, blocks: U32Array) -> None:
        """An answer to a request that was given up."""
        part = self._given_up.pop(request_id, None)
        if part is not None:
            self.took(lease, part, blocks)

    def took(self, lease: BlockLease, part: Part, blocks: U32Array) -> None:
        """The daemon counts these blocks to the lease, and nobody was told."""
        if len(blocks):
            self._came.append((weakref.ref(lease), part, blocks))

    def take(self) -> Iterator[Late]:
        """What is to go back now: what the lease does not know of; each once."""
        for _ in range(len(self._came)):
            reference, part, blocks = self._came.popleft()
            lease = reference()
            if lease is None or lease.state is not LeaseState.GRANTED:
                continue  # all of it went, or goes, with the lease
            known = lease.blocks if part == "pinned" else lease.reserved_blocks
            unknown = np.unique(blocks[~np.isin(blocks, known)])
            if len(unknown):
                yield Late(lease, part, unknown)

    def clear(self) -> None:
        """A new session counts to each lease what its client knows of."""
        self._given_up.clear()
        self._came.clear()
