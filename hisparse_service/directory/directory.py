"""The facade that the server calls: every request about blocks, leases and writers, validated.

Only the control loop calls it; nothing here waits, reads a clock or touches a socket: `now_s` comes
with the call, from one monotonic clock. Each method checks everything first and changes nothing
when it raises. Sessions must be opened before they ask: an unopened one gets `UnknownSession`.

Its methods are those of its parts, under the same names:

    backings.py       namespaces come and go, with their block tables
    sessions.py       sessions come and go; what they left can be taken back
    writers.py        which rank of a group writes
    lease_terms.py    leases are renewed, released, and expire
    reading.py        lookup, pin, unpin
    writing.py        reserve, publish, give back
    one_block.py      the same for one block, in fewer calls
    damage.py         damaged blocks are withdrawn
    operations.py     counts, lists, limits, eviction by hand

Errors common to all methods with a session, a namespace or a lease:
    UnknownSession  the session was not opened, or has died
    UsageError      no such namespace, or no backing attached; malformed arguments
    LeaseLost       the lease is unknown, was released, or belongs to another session or namespace
    LeaseExpired    its deadline passed and it still holds reserved blocks (abandon or release it)
"""

from __future__ import annotations

import numpy as np

from hisparse_service.contract.limits import (
    ADOPTION_GRACE_S,
    LEASE_TTL_S,
    MAX_LEASES_PER_SESSION,
    WRITER_LEASE_TTL_S,
)
from hisparse_service.directory.backings import Backings
from hisparse_service.directory.damage import Damage
from hisparse_service.directory.lease_terms import LeaseTerms
from hisparse_service.directory.lookup import Lookup
from hisparse_service.directory.namespaces import Quotas
from hisparse_service.directory.one_block import OneBlock
from hisparse_service.directory.operations import Operations
from hisparse_service.directory.reading import Reading
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import Audience, EventSink, Quota, Usage
from hisparse_service.directory.sessions import Sessions
from hisparse_service.directory.writers import Writers
from hisparse_service.directory.writing import Writing


class Directory:
    """All namespaces of one daemon.

    The parts' methods are bound here instead of called from methods of its own: a decode step asks
    a few times, and every Python call on its way costs more than it looks (decision 0017).

    Args:
        epoch: The daemon's boot id.
        hash_seed: Secret random bits (128), so that no client can choose keys that collide.
        lease_ttl_s: Time to live of leases, from each grant and renewal.
        writer_ttl_s: The same for writer leases.
        adoption_grace_s: How long blocks that were read when an earlier daemon ended cannot be
            evicted: their readers pin them again meanwhile.
        session_quota: Limits of each session.
        namespace_quota: Limits of each namespace.
        event_sink: Called after each publication and eviction.
        audience: Of the sink; events that nobody hears are not made. None: there always is one.
    """

    def __init__(
        self,
        *,
        epoch: int,
        hash_seed: int = 0,
        lease_ttl_s: float = LEASE_TTL_S,
        writer_ttl_s: float = WRITER_LEASE_TTL_S,
        adoption_grace_s: float = ADOPTION_GRACE_S,
        session_quota: Quota | None = None,
        namespace_quota: Quota | None = None,
        event_sink: EventSink | None = None,
        audience: Audience | None = None,
    ) -> None:
        self._epoch = epoch
        quotas = Quotas(
            session_quota or Quota(max_leases=MAX_LEASES_PER_SESSION), namespace_quota or Quota()
        )
        self._registry = registry = Registry(lease_ttl_s=lease_ttl_s)
        self._namespaces, self._leases = registry.namespaces, registry.leases
        writers = Writers(registry, ttl_s=writer_ttl_s)
        self._bind_namespaces(
            Backings(
                registry,
                hash_seed=hash_seed,
                adoption_grace_s=adoption_grace_s,
                quotas=quotas,
                event_sink=event_sink,
                audience=audience or Audience(),
            )
        )
        self._bind_sessions(Sessions(registry, writers), writers, LeaseTerms(registry, writers))
        self._bind_reading(Reading(registry))
        self._bind_writing(Writing(registry, writers), OneBlock(registry, writers))
        self._bind_damage(Damage(registry))
        self._bind_operations(Operations(registry, quotas))

    def _bind_namespaces(self, backings: Backings) -> None:
        self.open_namespace = backings.open_namespace
        self.attach_backing = backings.attach_backing
        self.drop_namespace = backings.drop_namespace
        self.namespaces = backings.namespaces
        self.detach = backings.detach

    def _bind_sessions(self, sessions: Sessions, writers: Writers, terms: LeaseTerms) -> None:
        self.open_session = sessions.open_session
        self.session_died = sessions.session_died
        self.end_quarantine = sessions.end_quarantine
        self.reclaim = sessions.reclaim

        self.take_writer = writers.take_writer
        self.yield_writer = writers.yield_writer

        self.renew = terms.renew
        self.release_leases = terms.release_leases
        self.expire = terms.expire

    def _bind_reading(self, reading: Reading) -> None:
        self.begin_lookup = reading.begin_lookup
        self.lookup = reading.lookup
        self.pin = reading.pin
        self.unpin = reading.unpin

    def _bind_writing(self, writing: Writing, one_block: OneBlock) -> None:
        self.reserve = writing.reserve
        self.mirror_enqueued = writing.mirror_enqueued
        self.mirror_completed = writing.mirror_completed
        self.abandon = writing.abandon
        self.free = writing.free

        self.reserve_one = one_block.reserve_one
        self.enqueue_ones = one_block.enqueue_ones
        self.publish_one = one_block.publish_one

    def _bind_damage(self, damage: Damage) -> None:
        self.suspect = damage.suspect
        self.withdraw = damage.withdraw
        self.withdraw_below = damage.withdraw_below
        self.count_check = damage.count_check
        self.num_withdrawn = damage.num_withdrawn
        self.lost_pins = damage.lost_pins

    def _bind_operations(self, operations: Operations) -> None:
        self.counts = operations.counts
        self.num_free = operations.num_free
        self.statistics = operations.statistics
        self.namespace_usage = operations.namespace_usage
        self.session_usage = operations.session_usage
        self.writers = operations.writers
        self.columns = operations.columns
        self.list_blocks = operations.list_blocks
        self.evict = operations.evict
        self.set_session_quota = operations.set_session_quota
        self.set_namespace_quota = operations.set_namespace_quota

    @property
    def epoch(self) -> int:
        """The daemon's boot id."""
        return self._epoch

    def check_invariants(self) -> None:
        """Recount everything from scratch; AssertionError where it does not agree. For tests."""
        caretaker = self._registry.caretaker
        per_namespace = {key: Usage() for key in self._namespaces}
        kept = {key: Usage() for key in self._namespaces}
        for account in (*self._registry.accounts.values(), caretaker):
            total = Usage()
            of_namespace = kept if account is caretaker else per_namespace
            for lease in account.leases.values():
                for usage in (total, of_namespace[lease.namespace]):
                    usage.reserved_blocks += len(lease.reserved)
                    usage.pins += len(lease.pins)
                    usage.leases += 1
                columns = self._namespaces[lease.namespace].blocks.columns
                assert all(columns.holder[block] == lease.lease_id for block in lease.reserved)
            assert total == account.usage
        assert len(self._leases) == sum(
            usage.leases for usage in (*per_namespace.values(), *kept.values())
        )
        for key, usage in per_namespace.items():
            owner = self._namespaces[key]
            assert usage == owner.usage
            if owner.attached is not None:
                owner.attached.check_invariants()
                columns = owner.attached.columns
                num_reserved = usage.reserved_blocks + kept[key].reserved_blocks
                assert np.count_nonzero(columns.holder) == num_reserved
                assert int(columns.readers.sum()) == usage.pins + kept[key].pins


__all__ = ["Directory", "Lookup"]
