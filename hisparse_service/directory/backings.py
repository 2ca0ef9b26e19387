"""Namespaces come and go, and with them the block tables that back them.

Made by `directory.py`, whose head says what holds for all requests. Control loop only.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from hisparse_service.contract.errors import QuotaExceeded, UsageError
from hisparse_service.contract.ids import NamespaceId
from hisparse_service.contract.limits import (
    FINGERPRINT_BYTES,
    MAX_BLOCKS_PER_BACKING,
    MAX_NAMESPACES,
)
from hisparse_service.directory.blocks import BlockDirectory
from hisparse_service.directory.namespaces import Namespace, Quotas
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import (
    AdoptionReport,
    Audience,
    BackingMode,
    EventSink,
    NamespaceEnd,
    NamespaceInfo,
)
from hisparse_service.directory.states import LeaseEvent


class Backings:
    """Opens namespaces, attaches their block tables, and lets them go.

    Args:
        registry: Where namespaces are entered.
        hash_seed: See `Directory`.
        adoption_grace_s: See `Directory`.
        quotas: Of all namespaces.
        event_sink: Of all namespaces.
        audience: Of the sink.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        hash_seed: int,
        adoption_grace_s: float,
        quotas: Quotas,
        event_sink: EventSink | None,
        audience: Audience,
    ) -> None:
        self._registry = registry
        self._leases = registry.leases
        self._hash_seed = hash_seed
        self._adoption_grace_s = adoption_grace_s
        self._quotas = quotas
        self._event_sink = event_sink
        self._audience = audience

    def open_namespace(
        self, fingerprint: bytes, *, name: str, block_size: int, namespace: int = 0
    ) -> NamespaceId:
        """The id of the namespace with this fingerprint; opened when it is new. Idempotent.

        Args:
            fingerprint: 16 B.
            name: For people.
            block_size: Tokens a block.
            namespace: The id it must get (adoption); 0 = any.

        Raises:
            QuotaExceeded: MAX_NAMESPACES are open.
            UsageError: The id is taken by another fingerprint, or this one has another id.
        """
        if len(fingerprint) != FINGERPRINT_BYTES or block_size < 1 or namespace < 0:
            raise UsageError(
                f"a namespace needs a fingerprint of {FINGERPRINT_BYTES} B and a block size of 1 "
                f"or more, got {len(fingerprint)} B and {block_size}"
            )
        namespaces = self._registry.namespaces
        for known in namespaces.values():
            if known.fingerprint == fingerprint:
                if namespace not in (0, known.namespace):
                    raise UsageError(f"this namespace is {known.namespace}, not {namespace}")
                return known.namespace
        if len(namespaces) >= MAX_NAMESPACES:
            raise QuotaExceeded(
                f"{MAX_NAMESPACES} namespaces are open",
                remedy="Drop one that is not used any more",
                limit=MAX_NAMESPACES,
                value=len(namespaces),
            )
        if namespace in namespaces or namespace > MAX_NAMESPACES:
            raise UsageError(f"namespace id {namespace} is taken or above {MAX_NAMESPACES}")
        free_ids = (i for i in range(1, MAX_NAMESPACES + 1) if i not in namespaces)
        opened = NamespaceId(namespace or next(free_ids))
        namespaces[opened] = Namespace(
            opened,
            fingerprint,
            name=name,
            block_size=block_size,
            quotas=self._quotas,
            event_sink=self._event_sink,
            audience=self._audience,
        )
        return opened

    def attach_backing(
        self,
        namespace: int,
        table: npt.NDArray[Any],
        *,
        mode: BackingMode,
        now_s: float | None = None,
    ) -> AdoptionReport:
        """Take over the namespace's block table; the directory is its only writer from now on.

        Args:
            namespace: Its id; also stands in each record.
            table: `RECORD_DTYPE` [num_blocks], writable, contiguous. Borrowed until
                `drop_namespace`, which drops every view of it.
            mode: Whether to keep what is published in it.
            now_s: When adopting, keep what was being written for a lease's time from now, so that
                its writers can `reclaim` it, and what was read for the adoption grace, so that its
                readers can `pin` it; None: neither.

        Raises:
            UsageError: There is a backing already, or the array is not such a table.
        """
        owner = self._registry.namespace(namespace)
        if owner.attached is not None:
            raise UsageError(f"namespace {namespace} has a backing already")
        if len(table) > MAX_BLOCKS_PER_BACKING:
            raise UsageError(f"{len(table)} blocks, the limit is {MAX_BLOCKS_PER_BACKING}")
        blocks = BlockDirectory(table, namespace=namespace, hash_seed=self._hash_seed)
        if mode is BackingMode.ADOPT:
            report = self._adopt(owner, blocks, now_s)
        else:
            blocks.start_fresh()
            report = AdoptionReport(kept=0, unfinished=0, corrupt=0, orphans=0, duplicates=0)
        owner.attached = blocks
        return report

    def _adopt(
        self, owner: Namespace, blocks: BlockDirectory, now_s: float | None
    ) -> AdoptionReport:
        if now_s is None:
            return blocks.adopt().report
        writing = self._leases.grant(self._registry.caretaker, owner.namespace, now_s=now_s)
        found = blocks.adopt(holder=writing.lease_id)
        if found.held.size:
            writing.reserved.update(found.held.tolist())
            owner.charge(writing, reserved=len(found.held), leases=1)
        else:
            self._leases.end(writing, LeaseEvent.RELEASE)
        if found.read.size:
            reading = self._leases.grant(
                self._registry.caretaker, owner.namespace, now_s=now_s, ttl_s=self._adoption_grace_s
            )
            blocks.pin(found.read, tick=blocks.next_tick())
            reading.pins.add(found.read)
            owner.charge(reading, pins=len(found.read), leases=1)
        return found.report

    def drop_namespace(self, namespace: int) -> NamespaceEnd:
        """Forget a namespace: revokes its leases and drops all views of its table.

        The table's bytes are left as they are: whoever gives the range out again attaches FRESH.
        """
        owner = self._registry.namespace(namespace)
        lost = []
        for lease in self._leases.leases():
            if lease.namespace == namespace:
                if lease.account is not self._registry.caretaker:
                    lost.append((lease.account.session_id, lease.lease_id))
                self._registry.end_lease(owner, lease, LeaseEvent.REVOKE)
        if owner.attached is not None:
            owner.attached.detach()
        del self._registry.namespaces[namespace]
        return NamespaceEnd(lost)

    def detach(self) -> None:
        """Drop all views of all tables and leave their bytes, for a successor that adopts them.

        What clients hold stays theirs: they reclaim and pin it there. Nothing else may be called
        afterwards.
        """
        for owner in self._registry.namespaces.values():
            if owner.attached is not None:
                owner.attached.detach()

    def namespaces(self) -> list[NamespaceInfo]:
        """All open namespaces, by id."""
        namespaces = self._registry.namespaces
        return [namespaces[key].info() for key in sorted(namespaces)]
