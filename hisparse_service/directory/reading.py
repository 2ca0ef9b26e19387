"""Requests of readers: find published blocks, pin them, let them go.

Made by `directory.py`, whose head says what holds for all requests. Control loop only.
"""

from __future__ import annotations

from typing import Final

from hisparse_service.contract.errors import ForeignKeys, UsageError
from hisparse_service.contract.limits import BLOCK_KEY_BYTES, LOOKUP_SLICE_KEYS, MAX_KEYS
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.checks import distinct, not_held, stale_block
from hisparse_service.directory.lookup import Lookup
from hisparse_service.directory.registry import Registry, counts_refusals
from hisparse_service.directory.results import LookupResult, PinResult, U32Array

_PUBLISHED: Final = int(BlockState.PUBLISHED)  # numpy is slow with members of enums


class Reading:
    """Lookups and pins.

    Args:
        registry: The sessions, namespaces and leases.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._leases = registry.leases

    @counts_refusals
    def begin_lookup(
        self,
        session: int,
        namespace: int,
        key_space: bytes,
        keys: bytes,
        lease_id: int,
        *,
        now_s: float,
    ) -> Lookup:
        """Look up the longest published prefix of `keys` (n * 16 B) and pin it, in slices.

        Args:
            session: Who asks.
            namespace: Where.
            key_space: 8 B tag that the keys were made for.
            keys: Chained keys, at most MAX_KEYS: from the first block on, or from the one behind
                a block that the lease pins.
            lease_id: A lease that gets the pins (renewed by this); 0 makes one.
            now_s: Monotonic time.

        Raises:
            ForeignKeys: The tag is another namespace's.
            QuotaExceeded: No further lease. (Steps raise it for pins; the lookup is cancelled.)
        """
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
        owner.blocks  # noqa: B018  raises without a backing
        num_keys, rest = divmod(len(keys), BLOCK_KEY_BYTES)
        if rest or num_keys > MAX_KEYS:
            raise UsageError(
                f"{len(keys)} B are not 0 to {MAX_KEYS} keys of {BLOCK_KEY_BYTES} B",
                limit=MAX_KEYS,
                value=num_keys,
            )
        if key_space != owner.key_space:
            raise ForeignKeys(
                f"the keys were made for another namespace than {namespace} ({owner.name})",
                remedy="Make keys with the fingerprint that this namespace was opened with",
                namespace=namespace,
            )
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        owner.check_quota(account, leases=lease is None)
        return Lookup(
            owner,
            self._leases,
            self._registry.renewed(account, owner, lease, now_s),
            keys,
            is_new_lease=lease is None,
        )

    def lookup(
        self,
        session: int,
        namespace: int,
        key_space: bytes,
        keys: bytes,
        lease_id: int,
        *,
        now_s: float,
    ) -> LookupResult:
        """`begin_lookup`, all steps and `finish` at once."""
        running = self.begin_lookup(session, namespace, key_space, keys, lease_id, now_s=now_s)
        while not running.step(LOOKUP_SLICE_KEYS):
            pass
        return running.finish(now_s)

    @counts_refusals
    def pin(
        self,
        session: int,
        namespace: int,
        lease_id: int,
        blocks: U32Array,
        generations: U32Array,
        *,
        now_s: float,
    ) -> PinResult:
        """Pin published blocks by their handles. Pinning twice in a lease counts once.

        Raises:
            StaleBlock: A block is not published with that generation (any more).
            QuotaExceeded: Too many pins or leases.
        """
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
        if len(blocks) != len(generations):
            raise UsageError(f"{len(blocks)} blocks with {len(generations)} generations")
        wanted = distinct(owner, blocks)
        columns = owner.blocks.columns
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        good = columns.state[wanted] == _PUBLISHED
        good &= columns.generation[wanted] == generations
        if not good.all():
            at = int(good.argmin())
            raise stale_block(owner, int(wanted[at]), int(generations[at]))
        missing = wanted if lease is None else owner.not_pinned_by(lease, wanted)
        owner.check_quota(account, pins=len(missing), leases=lease is None)
        lease = self._registry.renewed(account, owner, lease, now_s)
        if missing.size:
            owner.pin_new_into(lease, missing, tick=owner.blocks.next_tick())
        return PinResult(lease.lease_id, lease.deadline_s)

    @counts_refusals
    def unpin(self, session: int, namespace: int, lease_id: int, blocks: U32Array) -> None:
        """Drop pins of a lease.

        Raises:
            NotHeld: A block is not pinned by this lease.
        """
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
        lease = self._leases.require_held(account, owner.namespace, lease_id)
        wanted = distinct(owner, blocks)
        missing = lease.pins.missing(wanted)
        if missing.size:
            raise not_held(lease, int(missing[0]))
        owner.unpin_from(lease, wanted)
