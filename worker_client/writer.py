"""The group's writer lease in one client: taken, given back, taken again from a new daemon (I1).

All with `Session.lock` held.
"""

from __future__ import annotations

import contextlib

from hisparse_service.contract.errors import (
    LeaseError,
    ServiceUnavailable,
    UsageError,
    WriterTaken,
)
from hisparse_service.contract.messages import Done, LeaseReply, Request, TakeWriter, YieldWriter
from worker_client.blocks import LeaseState, WriterLease
from worker_client.link import NamespaceLink
from worker_client.session import WhenAway

__all__ = ["WriterSeat"]


class WriterSeat:
    """Whether this client is its group's writer in one namespace.

    Args:
        link: The namespace's; borrowed.

    Attributes:
        lease: Held; None: it is not.
    """

    def __init__(self, link: NamespaceLink) -> None:
        self.lease: WriterLease | None = None
        self._link = link

    def take(self) -> WriterLease:
        """See `Namespace.take_writer`."""
        link = self._link
        reply = link.request(self._take_request, LeaseReply)
        link.note_deadline(reply.lease_deadline_ns)
        self.lease = WriterLease(reply.lease_id, link.session.epoch, reply.lease_deadline_ns)
        return self.lease

    def give_back(self) -> None:
        """See `Namespace.yield_writer`."""
        lease, self.lease = self.lease, None
        if lease is None or lease.state is not LeaseState.GRANTED:
            return
        lease.state = LeaseState.RELEASED
        with contextlib.suppress(ServiceUnavailable, LeaseError):
            self._link.request(
                lambda request_id: YieldWriter(request_id, self._link.namespace_id), Done,
                when_away=WhenAway.FAIL,
            )  # fmt: skip

    def retake(self) -> None:
        """Take it from a new daemon; it is lost where another rank was first."""
        lease, link = self.lease, self._link
        if lease is None or lease.state is not LeaseState.GRANTED:
            return
        try:
            reply = link.session.request(self._take_request, LeaseReply)
        except (WriterTaken, UsageError):
            lease.state = LeaseState.REVOKED
            link.counters.add("leases_lost")
            return
        lease.lease_id, lease.epoch = reply.lease_id, link.session.epoch
        lease.deadline_ns = reply.lease_deadline_ns

    def _take_request(self, request_id: int) -> Request:
        return TakeWriter(request_id, self._link.namespace_id)
