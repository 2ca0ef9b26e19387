"""Sessions come and go; what they were writing when they went is kept, and may be taken back.

It is kept by the caretaker of the registry (quarantine; adoption, see `backings.py`) or by another
session of the group, which inherits it. Made by `directory.py`, whose head says what holds for all
requests. Control loop only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.ids import SessionId
from hisparse_service.contract.limits import QUARANTINE_S
from hisparse_service.directory.checks import distinct
from hisparse_service.directory.leases import Lease, SessionAccount
from hisparse_service.directory.namespaces import Namespace, as_blocks, as_u32
from hisparse_service.directory.registry import Registry, counts_refusals
from hisparse_service.directory.results import (
    ReserveResult,
    SessionEnd,
    U32Array,
    UnpublishedBlocks,
)
from hisparse_service.directory.states import LeaseEvent
from hisparse_service.directory.writers import Writers


class Sessions:
    """Opens sessions, ends them, and finds what they left.

    Args:
        registry: Where sessions are entered.
        writers: Whose leases end with their sessions.
    """

    def __init__(self, registry: Registry, writers: Writers) -> None:
        self._registry = registry
        self._leases = registry.leases
        self._writers = writers

    def open_session(
        self, session: int, *, group: str = "", rank: int = 0, delegates_copies: bool = False
    ) -> None:
        """Let a session ask.

        Args:
            session: Its id.
            group: Its tensor-parallel group; empty: a group of its own.
            rank: In the group.
            delegates_copies: Other sessions of the group copy into the blocks that it reserves.

        Raises:
            UsageError: The id is open already.
        """
        if session in self._registry.accounts:
            raise UsageError(f"session {session} is open already", session=session)
        self._registry.accounts[session] = SessionAccount(
            SessionId(session), group, rank, delegates_copies
        )

    def session_died(
        self,
        session: int,
        *,
        unpublished: UnpublishedBlocks = UnpublishedBlocks.RETURN,
        now_s: float = 0.0,
    ) -> SessionEnd:
        """End a session, however it ended. Unknown or dead ones are ignored.

        Its unpublished blocks return, its pins end, its published blocks stay (I9). Where others of
        its group copy for it, one of them inherits the unpublished blocks and they return with the
        last: an engine's workers may still be copying into blocks that its scheduler, which died,
        had reserved (I1). A session that only fell silent ends with its unpublished blocks in
        quarantine; until `end_quarantine` it may `reclaim` them.
        """
        account = self._registry.accounts.get(session)
        if account is None:
            return SessionEnd(returned_blocks=0, dropped_pins=0, leases=0, yielded=())
        num_blocks = num_pins = 0
        leases = list(account.leases.values())
        heir = self._heir(account)
        quarantine: list[Lease] = []
        for lease in leases:
            owner = self._registry.namespaces[lease.namespace]
            if heir is not None and lease.reserved:
                num_pins += owner.unpin_all(lease)
                self._inherit(owner, lease, heir)
                continue
            if lease.reserved and unpublished is UnpublishedBlocks.QUARANTINE:
                quarantine.append(self._keep_from_all(owner, lease, now_s))
            returned, dropped = self._registry.end_lease(owner, lease, LeaseEvent.REVOKE)
            num_blocks += returned
            num_pins += dropped
        yielded = self._writers.end_session(account)
        del self._registry.accounts[session]
        return SessionEnd(
            num_blocks, num_pins, len(leases), yielded,
            quarantine=[lease.lease_id for lease in quarantine],
            quarantined_blocks=sum(len(lease.reserved) for lease in quarantine),
        )  # fmt: skip

    def _heir(self, account: SessionAccount) -> SessionAccount | None:
        if not account.group or not account.delegates_copies:
            return None
        others = (a for a in self._registry.accounts.values() if a.group == account.group)
        return next((a for a in others if a is not account), None)

    def _inherit(self, owner: Namespace, lease: Lease, heir: SessionAccount) -> None:
        held = len(lease.reserved)
        owner.charge(lease, reserved=-held, leases=-1)
        del lease.account.leases[lease.lease_id]
        lease.account = heir
        lease.is_inherited = True
        heir.delegates_copies = True  # its heir, in turn, may be the one that copies
        heir.leases[lease.lease_id] = lease
        owner.charge(lease, reserved=held, leases=1)

    def _keep_from_all(self, owner: Namespace, lease: Lease, now_s: float) -> Lease:
        """What a lease reserved becomes the caretaker's."""
        kept = self._leases.grant(
            self._registry.caretaker, owner.namespace, now_s=now_s, ttl_s=QUARANTINE_S
        )
        owner.charge(kept, leases=1)
        owner.hand_over(lease, kept, as_blocks(lease.reserved))
        return kept

    def end_quarantine(self, lease_ids: Iterable[int]) -> int:
        """The process is dead now: its blocks return. How many; what was reclaimed is not there."""
        returned = 0
        for lease_id in lease_ids:
            lease = self._registry.caretaker.leases.get(lease_id)
            if lease is not None:
                owner = self._registry.namespaces[lease.namespace]
                returned += self._registry.end_lease(owner, lease, LeaseEvent.REVOKE)[0]
        return returned

    @counts_refusals
    def reclaim(
        self,
        session: int,
        namespace: int,
        lease_id: int,
        blocks: U32Array,
        generations: U32Array,
        *,
        now_s: float,
    ) -> ReserveResult:
        """Take blocks back that were being written when an earlier daemon, or the session, ended.

        Args:
            session: Of the process that had reserved them.
            namespace: Where.
            lease_id: A lease that gets them (renewed by this); 0 makes one.
            blocks: u32 [n]
            generations: u32 [n]: as they were; others are not given.
            now_s: Monotonic time.

        Returns:
            Those that the lease holds now, in the order asked; the rest is lost.

        Raises:
            QuotaExceeded: Of the session or the namespace.
            LeaseLost: Also without the group's writer lease.
        """
        account, owner = self._writers.require(session, namespace)
        if len(blocks) != len(generations):
            raise UsageError(f"{len(blocks)} blocks with {len(generations)} generations")
        wanted = distinct(owner, blocks)
        columns = owner.blocks.columns
        kept = [each for each in self._kept_for(account) if each.namespace == namespace]
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        good = np.isin(columns.holder[wanted], [each.lease_id for each in kept])
        wanted = wanted[good & (columns.generation[wanted] == generations)]
        owner.check_quota(account, reserved=len(wanted), leases=lease is None)
        lease = self._registry.renewed(account, owner, lease, now_s)
        for each in kept:
            owner.hand_over(each, lease, wanted[columns.holder[wanted] == each.lease_id])
            if not each.reserved and not len(each.pins):
                self._registry.end_lease(owner, each, LeaseEvent.RELEASE)
        return ReserveResult(
            lease.lease_id, lease.deadline_s, as_u32(wanted), columns.generation[wanted]
        )

    def _kept_for(self, account: SessionAccount) -> list[Lease]:
        """Leases whose blocks a session may take back, if it reserved them before."""
        kept = list(self._registry.caretaker.leases.values())
        if account.group:
            for other in self._registry.accounts.values():
                if other.group == account.group:
                    kept += [each for each in other.leases.values() if each.is_inherited]
        return kept
