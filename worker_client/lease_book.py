"""All leases of one client: which id the daemon has for them, when they are due, what goes back.

One `LeaseBook` a client; its namespaces share it, since the daemon renews and releases leases of
all namespaces in one message. It asks for no blocks: `link.py` does, and notes the answers here.

Every method comes with `Session.lock` held, except `release_later`.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from hisparse_service.contract import limits
from hisparse_service.contract.errors import LeaseError, ServiceUnavailable
from hisparse_service.contract.messages import (
    BlocksReply,
    Done,
    MirrorReply,
    Pong,
    ReleaseLeases,
    Reply,
    Request,
    u32_array,
)
from worker_client.blocks import BlockLease, LeaseState, WriterLease
from worker_client.late import LateAnswers
from worker_client.session import Session, WhenAway

if TYPE_CHECKING:
    from worker_client.namespace import Namespace

__all__ = ["LeaseBook"]

_RENEW_FRACTION: Final = 0.5
"""A lease is renewed when half of its time is gone."""


class LeaseBook:
    """The leases of one client.

    Args:
        session: Carries the releases; borrowed.

    Attributes:
        late: What requests took that were given up.
    """

    def __init__(self, session: Session) -> None:
        self.late = LateAnswers()
        self._session = session
        self._leases: weakref.WeakSet[BlockLease] = weakref.WeakSet()
        self._by_id: weakref.WeakValueDictionary[int, BlockLease] = weakref.WeakValueDictionary()
        self._unreleased: collections.deque[int] = collections.deque(
            maxlen=limits.MAX_LEASES_PER_SESSION
        )
        self._ttl_ns = int(limits.LEASE_TTL_S * 1e9)
        self._next_renewal_ns = 0
        self.lost_pins: list[tuple[int, int, int]] = []
        """(namespace, block, generation) that the daemon withdrew, as the last heartbeat told."""

    # --- which there are ------------------------------------------------------------------------

    def remember(self, lease: BlockLease, lease_id: int) -> None:
        """Renew this lease from now on, under this id."""
        if lease.lease_id != lease_id:
            lease.lease_id = lease_id
            self._by_id[lease_id] = lease
            self._leases.add(lease)

    def forget(self, lease: BlockLease) -> bool:
        """End a lease here; True when it was not ended before."""
        if lease.state is LeaseState.RELEASED:
            return False
        known = lease.state is not LeaseState.REVOKED
        lease._end()
        self._leases.discard(lease)
        if self._by_id.get(lease.lease_id) is lease:
            del self._by_id[lease.lease_id]
        return known

    def leases_of(self, namespace: Namespace) -> list[BlockLease]:
        """All leases of a namespace that hold something."""
        return [lease for lease in self._leases if lease.namespace is namespace]

    def begin_session(self) -> None:
        """Ids of the old session mean nothing in the new one."""
        self._unreleased.clear()
        self.late.clear()
        self._by_id.clear()

    # --- renewal --------------------------------------------------------------------------------

    def note_ttl(self, ttl_ns: int) -> None:
        """How long the daemon's leases last: the shortest seen."""
        if 0 < ttl_ns < self._ttl_ns:
            self._ttl_ns = ttl_ns
            self._next_renewal_ns = 0

    def due(self, now_ns: int, writers: Iterable[WriterLease]) -> list[int]:
        """Leases, the writers' included, whose time is half over."""
        if now_ns < self._next_renewal_ns:
            return []
        self._next_renewal_ns = now_ns + self._ttl_ns // 4
        due_ns = now_ns + int(self._ttl_ns * _RENEW_FRACTION)
        due = [
            lease.lease_id
            for lease in self._by_id.values()
            if lease.state is LeaseState.GRANTED and lease.deadline_ns < due_ns
        ]
        due.extend(
            writer.lease_id
            for writer in writers
            if writer.state is LeaseState.GRANTED and writer.deadline_ns < due_ns
        )
        return due

    def renewed(self, lease_ids: list[int], pong: Pong, writers: Iterable[WriterLease]) -> None:
        """The daemon's answer to a renewal."""
        self.lost_pins = pong.lost_pins
        lost = set(pong.lost_leases)
        for lease_id in lease_ids:
            lease = self._by_id.get(lease_id)
            if lease is None:
                continue
            if lease_id in lost:
                lease._revoke()
            else:
                lease.deadline_ns = pong.lease_deadline_ns
        for writer in writers:
            if writer.lease_id in lost:
                writer.state = LeaseState.REVOKED
            elif writer.lease_id in lease_ids:
                writer.deadline_ns = pong.lease_deadline_ns

    def take_lost_pins(self, namespace_id: int) -> dict[int, int]:
        """Block to generation of a namespace's lost pins; told again while they are pinned."""
        own = {block: of for where, block, of in self.lost_pins if where == namespace_id}
        self.lost_pins = [each for each in self.lost_pins if each[0] != namespace_id]
        return own

    # --- release --------------------------------------------------------------------------------

    def release_later(self, lease_id: int) -> None:
        """Release with the next heartbeat. Takes no lock: finalisers call it."""
        self._unreleased.append(lease_id)

    def release_ids(self, lease_ids: Sequence[int]) -> None:
        """Tell the daemon; later, if it is away."""
        for start in range(0, len(lease_ids), limits.MAX_LIST_ITEMS):
            part = list(lease_ids[start : start + limits.MAX_LIST_ITEMS])

            def build(request_id: int, part: list[int] = part) -> Request:
                return ReleaseLeases(request_id, part)

            try:
                self._session.request(build, Done, when_away=WhenAway.FAIL)
            except ServiceUnavailable:
                self._unreleased.extend(part)
            except LeaseError:
                pass  # it ended before we said so

    def late_reply(self, reply: Reply) -> None:
        """What a late reply gave goes back: its request was given up."""
        if isinstance(reply, MirrorReply):
            for item in reply.reserved:
                blocks = u32_array(item.blocks, what="blocks")
                lease = self._by_id.get(item.lease_id)
                if lease is not None:
                    self.late.took(lease, "reserved", blocks)
                elif len(blocks):
                    self.release_later(item.lease_id)
        elif isinstance(reply, BlocksReply) and reply.lease_id:
            lease = self._by_id.get(reply.lease_id)
            if lease is not None:
                blocks = u32_array(reply.blocks, what="blocks")
                self.late.came(reply.request_id, lease, blocks)
            else:
                self.release_later(reply.lease_id)

    def housekeeping(self) -> None:
        """Release what was dropped without a release, give back what nobody was told of."""
        for late in list(self.late.take()):
            late.lease.namespace._give_back_late(late)
        if self._unreleased:
            lease_ids = [lease_id for lease_id in self._drain_unreleased() if lease_id]
            self.release_ids(lease_ids)

    def _drain_unreleased(self) -> Iterator[int]:
        for _ in range(len(self._unreleased)):
            yield self._unreleased.popleft()
