"""Leases: rights with a deadline, what each holds, and which end next.

Pure bookkeeping: it knows who may hold what until when, not what a block is. Only `directory/`
calls it, on the control loop; time comes with each call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hisparse_service.contract.errors import LeaseExpired, LeaseLost
from hisparse_service.contract.ids import LeaseId, NamespaceId, SessionId
from hisparse_service.directory.index import Blocks
from hisparse_service.directory.results import Usage
from hisparse_service.directory.states import LeaseEvent, LeaseState, next_lease_state

_MIN_SWEEP_ENTRIES: Final = 4096
"""Below this many deadlines those of ended leases are not worth a sweep."""


class PinSet:
    """The blocks that one lease pins, each once.

    A lookup of a long prefix adds tens of thousands at once and most are dropped together again: so
    they stay an array until somebody asks for single ones.
    """

    __slots__ = ("_chunks", "_count", "_set")

    def __init__(self) -> None:
        self._set: set[int] = set()
        self._chunks: list[Blocks] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _single(self) -> set[int]:
        for chunk in self._chunks:
            self._set.update(chunk.tolist())
        self._chunks.clear()
        return self._set

    def __contains__(self, block: int) -> bool:
        return block in self._single()

    def missing(self, blocks: Blocks) -> Blocks:
        """Those of `blocks` (distinct) that are not in."""
        if not self._count:
            return blocks
        held = self._single()
        mask = np.fromiter((b not in held for b in blocks.tolist()), np.bool_, len(blocks))
        found: Blocks = blocks[mask]
        return found

    def add(self, blocks: Blocks) -> None:
        """Add blocks that are distinct and not in."""
        self._chunks.append(blocks)
        self._count += len(blocks)

    def add_one(self, block: int) -> None:
        """Add a block that is not in."""
        self._set.add(block)
        self._count += 1

    def remove(self, blocks: Blocks) -> None:
        """Remove blocks that are distinct and in."""
        self._single().difference_update(blocks.tolist())
        self._count -= len(blocks)

    def drain(self) -> Blocks:
        """Empty it; what was in, in no order."""
        chunks = [*self._chunks, np.fromiter(self._set, np.intp, len(self._set))]
        self._chunks.clear()
        self._set.clear()
        self._count = 0
        return np.concatenate(chunks)


@dataclass(slots=True, eq=False)
class SessionAccount:
    """What the directory knows of one session."""

    session_id: SessionId
    group: str
    rank: int
    delegates_copies: bool = False
    """Others of its group copy into what it reserves."""
    usage: Usage = field(default_factory=Usage)
    leases: dict[int, Lease] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Lease:
    """A right of one session in one namespace until a deadline."""

    lease_id: LeaseId
    account: SessionAccount
    namespace: NamespaceId
    deadline_s: float
    state: LeaseState = LeaseState.GRANTED
    reserved: set[int] = field(default_factory=set)
    """Blocks in RESERVED or WRITING."""
    pins: PinSet = field(default_factory=PinSet)
    is_inherited: bool = False
    """Reserved by another session of the group, which ended; that one may take it back."""


class LeaseTable:
    """All leases of one daemon.

    Args:
        ttl_s: From each grant and renewal.
    """

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._next_id = 1
        self._leases: dict[int, Lease] = {}
        # One entry a granted lease. A renewal leaves it as it is: the entry that comes up too early
        # is put in again with the real deadline.
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def leases(self) -> Iterable[Lease]:
        """All that were not removed."""
        return list(self._leases.values())

    def grant(
        self,
        account: SessionAccount,
        namespace: NamespaceId,
        *,
        now_s: float,
        ttl_s: float | None = None,
    ) -> Lease:
        """A new lease; `ttl_s` where it is to have another time than all others."""
        deadline_s = now_s + (self._ttl_s if ttl_s is None else ttl_s)
        lease = Lease(LeaseId(self._next_id), account, namespace, deadline_s)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        account.leases[lease.lease_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline_s, lease.lease_id))
        if len(self._deadlines) > _MIN_SWEEP_ENTRIES + 2 * len(self._leases):
            # Leases that were released long before their deadline.
            self._deadlines = [item for item in self._deadlines if item[1] in self._leases]
            heapq.heapify(self._deadlines)
        return lease

    def find(self, account: SessionAccount, lease_id: int) -> Lease | None:
        """A lease of this session in any state, None when there is none."""
        return account.leases.get(lease_id)

    def require_held(self, account: SessionAccount, namespace: NamespaceId, lease_id: int) -> Lease:
        """A lease that may still be given back: granted, or expired with reserved blocks.

        Raises:
            LeaseLost: Unknown, or of another session or namespace.
        """
        lease = account.leases.get(lease_id)
        if lease is None or lease.namespace != namespace:
            raise LeaseLost(
                f"session {account.session_id} holds no lease {lease_id} in namespace {namespace}",
                remedy="It was released or it expired; take a new one",
                lease=lease_id,
                session=account.session_id,
                namespace=namespace,
            )
        return lease

    def require_live(self, account: SessionAccount, namespace: NamespaceId, lease_id: int) -> Lease:
        """A granted lease.

        Raises:
            LeaseLost: Unknown, or of another session or namespace.
            LeaseExpired: It expired and still holds reserved blocks.
        """
        lease = self.require_held(account, namespace, lease_id)
        if lease.state is not LeaseState.GRANTED:
            raise LeaseExpired(
                f"lease {lease_id} expired and holds {len(lease.reserved)} blocks",
                remedy="Abandon its blocks or release it, then take a new one",
                lease=lease_id,
                reserved_blocks=len(lease.reserved),
            )
        return lease

    def renew(self, lease: Lease, *, now_s: float) -> None:
        """Extend a granted lease; never shortens it."""
        deadline_s = now_s + self._ttl_s
        if deadline_s > lease.deadline_s:
            lease.deadline_s = deadline_s

    def end(self, lease: Lease, event: LeaseEvent) -> None:
        """Change the state of a lease, and forget it. One that expired before is only forgotten."""
        if lease.state is LeaseState.GRANTED:
            lease.state = next_lease_state(lease.state, event, lease=lease.lease_id)
        del self._leases[lease.lease_id]
        del lease.account.leases[lease.lease_id]

    def expire(self, lease: Lease) -> None:
        """GRANTED -> EXPIRED, still known because of the blocks that it reserved."""
        lease.state = next_lease_state(lease.state, LeaseEvent.EXPIRE, lease=lease.lease_id)

    def pop_due(self, now_s: float, *, max_leases: int) -> list[Lease]:
        """Granted leases whose deadline passed, so many at most. The caller expires each."""
        due: list[Lease] = []
        while len(due) < max_leases and self._deadlines and self._deadlines[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.GRANTED:
                continue
            if lease.deadline_s > now_s:
                heapq.heappush(self._deadlines, (lease.deadline_s, lease_id))
            else:
                due.append(lease)
        return due

    def next_deadline_s(self) -> float | None:
        """The earliest time at which `pop_due` may find one; too early after a renewal."""
        while self._deadlines:
            deadline_s, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is not None and lease.state is LeaseState.GRANTED:
                return deadline_s
            heapq.heappop(self._deadlines)
        return None
