"""A lookup in slices, so that other clients are served in between.

Each step pins what it found at once: what one step returned cannot be evicted before the next. Only
the control loop calls it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hisparse_service.contract.errors import LeaseLost, QuotaExceeded, UsageError
from hisparse_service.contract.ids import NO_LEASE
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.blocks import NO_BLOCKS
from hisparse_service.directory.index import Blocks, as_keys
from hisparse_service.directory.leases import Lease, LeaseTable
from hisparse_service.directory.namespaces import Namespace, as_u32
from hisparse_service.directory.results import LookupResult
from hisparse_service.directory.states import LeaseEvent, LeaseState

_GRANTED: Final = LeaseState.GRANTED
_PUBLISHED: Final = int(BlockState.PUBLISHED)


class Lookup:
    """One running lookup. Made by `Directory.begin_lookup`.

    Steps and `finish` raise `LeaseLost` when the lease ended meanwhile (expiry, release, death, a
    dropped namespace).
    """

    def __init__(
        self,
        namespace: Namespace,
        leases: LeaseTable,
        lease: Lease,
        keys: bytes,
        *,
        is_new_lease: bool,
    ) -> None:
        self._namespace = namespace
        self._leases = leases
        self._lease = lease
        self._is_new_lease = is_new_lease
        self._keys = as_keys(keys)
        self._at = 0
        self._last = 0
        self._found: list[Blocks] = []
        self._is_done = not len(self._keys)
        namespace.statistics.lookups += 1
        namespace.statistics.keys_asked += len(self._keys)

    @property
    def is_done(self) -> bool:
        """Whether `finish` may be called."""
        return self._is_done

    def step(self, max_keys: int) -> bool:
        """Look up at most `max_keys` more keys; True when there is nothing left to do.

        Raises:
            LeaseLost: The lease ended.
            QuotaExceeded: Too many pins; the lookup is cancelled.
        """
        self._check_lease()
        if self._is_done:
            return True
        part = self._keys[self._at : self._at + max(1, max_keys)]
        blocks = self._namespace.blocks
        if not self._at and not self._is_new_lease:
            self._last = self._pinned_parent()
        found = blocks.match_prefix(part, after=self._last)
        if found.size:
            tick = blocks.next_tick()
            try:
                if self._is_new_lease:
                    # Its id is not known to anybody: only this lookup pins into it, and no block
                    # is twice in a prefix.
                    self._namespace.pin_new_into(self._lease, found, tick=tick)
                else:
                    self._namespace.pin_into(self._lease, found, tick=tick)
            except QuotaExceeded:
                self.cancel()
                raise
            self._found.append(found)
            self._last = int(found[-1])
        self._at += len(part)
        self._is_done = len(found) < len(part) or self._at >= len(self._keys)
        return self._is_done

    def _pinned_parent(self) -> int:
        """The block above the first key, if the lease pins it; 0 otherwise.

        So a lookup may go on where an earlier one of the lease ended, without its keys again.
        """
        blocks = self._namespace.blocks
        first = blocks.index.find_one(int(self._keys[0, 0]), int(self._keys[0, 1]))
        parent = int(blocks.columns.parent[first]) if first else 0
        if parent and not len(self._lease.pins.missing(np.array([parent], np.intp))):
            return parent
        return 0

    def finish(self, now_s: float) -> LookupResult:
        """The result; the lease's deadline counts from now.

        Raises:
            UsageError: Not done yet.
            LeaseLost: The lease ended.
        """
        self._check_lease()
        if not self._is_done:
            raise UsageError("the lookup is not done", remedy="Call step until it returns True")
        if len(self._found) == 1:
            (found,) = self._found
        else:
            found = np.concatenate(self._found) if self._found else NO_BLOCKS
        if self._namespace.blocks.num_withdrawn:
            found = self._without_withdrawn(found)
        statistics = self._namespace.statistics
        statistics.keys_hit += len(found)
        statistics.tokens_hit += len(found) * self._namespace.block_size
        if self._is_new_lease and not len(found):
            self.cancel()
            return LookupResult(NO_LEASE, now_s, as_u32(NO_BLOCKS), as_u32(NO_BLOCKS))
        self._leases.renew(self._lease, now_s=now_s)
        self._found = []
        return LookupResult(
            lease_id=self._lease.lease_id,
            deadline_s=self._lease.deadline_s,
            blocks=as_u32(found),
            generations=self._namespace.blocks.columns.generation[found],
        )

    def _without_withdrawn(self, found: Blocks) -> Blocks:
        """Cut before the first block that was withdrawn since an earlier step found it."""
        good = self._namespace.blocks.columns.state[found] == _PUBLISHED
        if good.all():
            return found
        at = int(good.argmin())
        if self._is_new_lease:
            self._namespace.unpin_from(self._lease, found[at:])
        # Other leases may have pinned some of them before: those go when the client, which the
        # heartbeat tells of them, lets them go.
        return found[:at]

    def cancel(self) -> None:
        """Give up: drops the lease when this lookup made it. Idempotent."""
        self._is_done = True
        if self._is_new_lease and self._lease.state is LeaseState.GRANTED:
            self._namespace.end_holdings(self._lease)
            self._namespace.charge(self._lease, leases=-1)
            self._leases.end(self._lease, LeaseEvent.RELEASE)

    def _check_lease(self) -> None:
        if self._lease.state is not _GRANTED:
            raise LeaseLost(
                f"lease {self._lease.lease_id} ended during the lookup ({self._lease.state.name})",
                remedy="Look the keys up again",
                lease=self._lease.lease_id,
            )
