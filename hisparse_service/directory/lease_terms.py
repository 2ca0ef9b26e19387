"""How long leases last: renewed, released, expired.

What they are is in `leases.py`. Made by `directory.py`, whose head says what holds for all
requests. Control loop only.
"""

from __future__ import annotations

from collections.abc import Iterable

from hisparse_service.contract.limits import MAX_EXPIRED_LEASES
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import ExpiryResult, ReleaseResult
from hisparse_service.directory.states import LeaseEvent, LeaseState
from hisparse_service.directory.writers import Writers


class LeaseTerms:
    """Renews and ends leases, those of writers too.

    Args:
        registry: The leases and what they hold.
        writers: Whose leases last as long as others.
    """

    def __init__(self, registry: Registry, writers: Writers) -> None:
        self._registry = registry
        self._leases = registry.leases
        self._writers = writers

    def renew(self, session: int, lease_ids: Iterable[int], *, now_s: float) -> list[int]:
        """Extend leases, and the session's writer leases. Returns the ids that are lost."""
        account = self._registry.account(session)
        lost = []
        for lease_id in lease_ids:
            lease = account.leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.GRANTED:
                lost.append(lease_id)
            else:
                self._leases.renew(lease, now_s=now_s)
        if account.group:
            self._writers.renew(account, now_s)
        return lost

    def release_leases(self, session: int, lease_ids: Iterable[int]) -> ReleaseResult:
        """End leases: pins are dropped, blocks that were not published become free."""
        account = self._registry.account(session)
        lost = []
        num_blocks = num_pins = 0
        for lease_id in lease_ids:
            lease = account.leases.get(lease_id)
            if lease is None:
                lost.append(lease_id)
                continue
            owner = self._registry.namespaces[lease.namespace]
            returned, dropped = self._registry.end_lease(owner, lease, LeaseEvent.RELEASE)
            num_blocks += returned
            num_pins += dropped
        return ReleaseResult(lost, num_blocks, num_pins)

    def expire(self, now_s: float) -> ExpiryResult:
        """End leases whose deadline passed; MAX_EXPIRED_LEASES at most, the others next time.

        Pins are dropped. Reserved blocks of a live session are kept, because its copies may still
        be in flight: they return on abandon, free, release or death.
        """
        expired = []
        for lease in self._leases.pop_due(now_s, max_leases=MAX_EXPIRED_LEASES):
            owner = self._registry.namespaces[lease.namespace]
            if lease.account is self._registry.caretaker:
                # Who wanted what it kept has come for it by now, or is gone.
                self._registry.end_lease(owner, lease, LeaseEvent.EXPIRE)
                continue
            owner.statistics.leases_expired += 1
            expired.append((lease.account.session_id, lease.lease_id))
            if lease.reserved:
                owner.unpin_all(lease)
                self._leases.expire(lease)
            else:
                self._registry.end_lease(owner, lease, LeaseEvent.EXPIRE)
        for owner in self._registry.namespaces.values():
            if owner.attached is not None:
                # Most are free with their last reader; this is for those whose children went later.
                owner.attached.clear_withdrawn()
        yielded, deadlines = self._writers.expire(now_s)
        next_lease_s = self._leases.next_deadline_s()
        if next_lease_s is not None:
            deadlines.append(next_lease_s)
        return ExpiryResult(min(deadlines, default=None), expired, yielded)
