"""The facade that the server calls: every request about blocks, leases and writers, validated.

Only the control loop calls it; nothing here waits, reads a clock or touches a socket: `now_s` comes
with the call, from one monotonic clock. Each method checks everything first and changes nothing
when it raises. Sessions must be opened before they ask: an unopened one gets `UnknownSession`.

Errors common to all methods with a session, a namespace or a lease:
    UnknownSession  the session was not opened, or has died
    UsageError      no such namespace, or no backing attached; malformed arguments
    LeaseLost       the lease is unknown, was released, or belongs to another session or namespace
    LeaseExpired    its deadline passed and it still holds reserved blocks (abandon or release it)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.errors import (
    ForeignKeys,
    HiSparseError,
    LeaseLost,
    QuotaExceeded,
    UnknownSession,
    UsageError,
    WriterTaken,
)
from hisparse_service.contract.ids import NO_SESSION, NamespaceId, SessionId
from hisparse_service.contract.limits import (
    ADOPTION_GRACE_S,
    BLOCK_KEY_BYTES,
    FINGERPRINT_BYTES,
    LEASE_TTL_S,
    LOOKUP_SLICE_KEYS,
    MAX_BATCH_ITEMS,
    MAX_BLOCKS_PER_BACKING,
    MAX_BLOCKS_PER_MESSAGE,
    MAX_EXPIRED_LEASES,
    MAX_KEYS,
    MAX_LEASES_PER_SESSION,
    MAX_LIST_ROWS,
    MAX_LOST_PINS,
    MAX_NAMESPACES,
    MAX_RESERVE_BLOCKS,
    QUARANTINE_S,
    WRITER_LEASE_TTL_S,
)
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.blocks import BlockDirectory
from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.index import Blocks
from hisparse_service.directory.leases import Lease, LeaseTable, SessionAccount
from hisparse_service.directory.lookup import Lookup
from hisparse_service.directory.namespaces import Namespace, Quotas, as_blocks, as_u32
from hisparse_service.directory.one_block import (
    OneCompleted,
    OneReserved,
    can_reserve_one,
    enqueue_ones,
    make_room_one,
    publish_one,
    reserve_one,
)
from hisparse_service.directory.publish import (
    check_batch_size,
    check_held,
    not_held,
    out_of_range,
    plan_batch,
    stale_block,
)
from hisparse_service.directory.results import (
    AdoptionReport,
    Audience,
    BackingMode,
    BlockInfo,
    CompletedItem,
    Counts,
    EventSink,
    ExpiryResult,
    FreeResult,
    LookupResult,
    MirrorItem,
    NamespaceEnd,
    NamespaceInfo,
    PinResult,
    Quota,
    ReleaseResult,
    ReserveResult,
    SessionEnd,
    Statistics,
    Suspect,
    U32Array,
    UnpublishedBlocks,
    Usage,
    WriterLease,
)
from hisparse_service.directory.states import BlockEvent, LeaseEvent, LeaseState

# Numbers: numpy is slow with members of enums.
_FREE: Final = int(BlockState.FREE)
_PUBLISHED: Final = int(BlockState.PUBLISHED)
P = ParamSpec("P")
R = TypeVar("R")


def _counts_refusals(
    method: Callable[Concatenate[Directory, int, int, P], R],
) -> Callable[Concatenate[Directory, int, int, P], R]:
    """Count the errors of a method whose arguments begin with session and namespace."""

    @functools.wraps(method)
    def counted(
        self: Directory, session: int, namespace: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            return method(self, session, namespace, *args, **kwargs)
        except HiSparseError as error:
            self._count_refusal(namespace, error.code)
            raise

    return counted


class Directory:
    """All namespaces of one daemon.

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
        self._hash_seed = hash_seed
        self._writer_ttl_s = writer_ttl_s
        self._adoption_grace_s = adoption_grace_s
        self._event_sink = event_sink
        self._audience = audience or Audience()
        self._quotas = Quotas(
            session_quota or Quota(max_leases=MAX_LEASES_PER_SESSION), namespace_quota or Quota()
        )
        self._leases = LeaseTable(ttl_s=lease_ttl_s)
        self._namespaces: dict[int, Namespace] = {}
        self._accounts: dict[int, SessionAccount] = {}
        self._caretaker = SessionAccount(NO_SESSION, "", 0)
        """Holds what an earlier daemon's clients were writing and reading, and what is in
        quarantine; no session has this id."""

    @property
    def epoch(self) -> int:
        """The daemon's boot id."""
        return self._epoch

    # --- namespaces ------------------------------------------------------------------------

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
        for known in self._namespaces.values():
            if known.fingerprint == fingerprint:
                if namespace not in (0, known.namespace):
                    raise UsageError(f"this namespace is {known.namespace}, not {namespace}")
                return known.namespace
        if len(self._namespaces) >= MAX_NAMESPACES:
            raise QuotaExceeded(
                f"{MAX_NAMESPACES} namespaces are open",
                remedy="Drop one that is not used any more",
                limit=MAX_NAMESPACES,
                value=len(self._namespaces),
            )
        if namespace in self._namespaces or namespace > MAX_NAMESPACES:
            raise UsageError(f"namespace id {namespace} is taken or above {MAX_NAMESPACES}")
        free_ids = (i for i in range(1, MAX_NAMESPACES + 1) if i not in self._namespaces)
        opened = NamespaceId(namespace or next(free_ids))
        self._namespaces[opened] = Namespace(
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
        owner = self._namespace(namespace)
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
        writing = self._leases.grant(self._caretaker, owner.namespace, now_s=now_s)
        found = blocks.adopt(holder=writing.lease_id)
        if found.held.size:
            writing.reserved.update(found.held.tolist())
            owner.charge(writing, reserved=len(found.held), leases=1)
        else:
            self._leases.end(writing, LeaseEvent.RELEASE)
        if found.read.size:
            reading = self._leases.grant(
                self._caretaker, owner.namespace, now_s=now_s, ttl_s=self._adoption_grace_s
            )
            blocks.pin(found.read, tick=blocks.next_tick())
            reading.pins.add(found.read)
            owner.charge(reading, pins=len(found.read), leases=1)
        return found.report

    def drop_namespace(self, namespace: int) -> NamespaceEnd:
        """Forget a namespace: revokes its leases and drops all views of its table.

        The table's bytes are left as they are: whoever gives the range out again attaches FRESH.
        """
        owner = self._namespace(namespace)
        lost = []
        for lease in self._leases.leases():
            if lease.namespace == namespace:
                if lease.account is not self._caretaker:
                    lost.append((lease.account.session_id, lease.lease_id))
                self._end_lease(owner, lease, LeaseEvent.REVOKE)
        if owner.attached is not None:
            owner.attached.detach()
        del self._namespaces[namespace]
        return NamespaceEnd(lost)

    def detach(self) -> None:
        """Drop all views of all tables and leave their bytes, for a successor that adopts them.

        What clients hold stays theirs: they reclaim and pin it there. Nothing else may be called
        afterwards.
        """
        for owner in self._namespaces.values():
            if owner.attached is not None:
                owner.attached.detach()

    def namespaces(self) -> list[NamespaceInfo]:
        """All open namespaces, by id."""
        return [self._namespaces[key].info() for key in sorted(self._namespaces)]

    # --- sessions and writers ---------------------------------------------------------------

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
        if session in self._accounts:
            raise UsageError(f"session {session} is open already", session=session)
        self._accounts[session] = SessionAccount(SessionId(session), group, rank, delegates_copies)

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
        account = self._accounts.get(session)
        if account is None:
            return SessionEnd(returned_blocks=0, dropped_pins=0, leases=0, yielded=())
        num_blocks = num_pins = 0
        leases = list(account.leases.values())
        heir = self._heir(account)
        quarantine: list[Lease] = []
        for lease in leases:
            owner = self._namespaces[lease.namespace]
            if heir is not None and lease.reserved:
                num_pins += owner.unpin_all(lease)
                self._inherit(owner, lease, heir)
                continue
            if lease.reserved and unpublished is UnpublishedBlocks.QUARANTINE:
                quarantine.append(self._keep_from_all(owner, lease, now_s))
            returned, dropped = self._end_lease(owner, lease, LeaseEvent.REVOKE)
            num_blocks += returned
            num_pins += dropped
        yielded = []
        for owner in self._namespaces.values():
            writer = owner.writers.get(account.group)
            if writer is not None and writer.session == session:
                del owner.writers[account.group]
                yielded.append((owner.namespace, account.group))
        del self._accounts[session]
        return SessionEnd(
            num_blocks, num_pins, len(leases), yielded,
            quarantine=[lease.lease_id for lease in quarantine],
            quarantined_blocks=sum(len(lease.reserved) for lease in quarantine),
        )  # fmt: skip

    def _keep_from_all(self, owner: Namespace, lease: Lease, now_s: float) -> Lease:
        """What a lease reserved becomes the caretaker's."""
        kept = self._leases.grant(self._caretaker, owner.namespace, now_s=now_s, ttl_s=QUARANTINE_S)
        owner.charge(kept, leases=1)
        owner.hand_over(lease, kept, as_blocks(lease.reserved))
        return kept

    def end_quarantine(self, lease_ids: Iterable[int]) -> int:
        """The process is dead now: its blocks return. How many; what was reclaimed is not there."""
        returned = 0
        for lease_id in lease_ids:
            lease = self._caretaker.leases.get(lease_id)
            if lease is not None:
                owner = self._namespaces[lease.namespace]
                returned += self._end_lease(owner, lease, LeaseEvent.REVOKE)[0]
        return returned

    def _heir(self, account: SessionAccount) -> SessionAccount | None:
        if not account.group or not account.delegates_copies:
            return None
        others = (a for a in self._accounts.values() if a.group == account.group)
        return next((a for a in others if a is not account), None)

    def _kept_for(self, account: SessionAccount) -> list[Lease]:
        """Leases whose blocks a session may take back, if it reserved them before."""
        kept = list(self._caretaker.leases.values())
        if account.group:
            for other in self._accounts.values():
                if other.group == account.group:
                    kept += [each for each in other.leases.values() if each.is_inherited]
        return kept

    def _inherit(self, owner: Namespace, lease: Lease, heir: SessionAccount) -> None:
        held = len(lease.reserved)
        owner.charge(lease, reserved=-held, leases=-1)
        del lease.account.leases[lease.lease_id]
        lease.account = heir
        lease.is_inherited = True
        heir.delegates_copies = True  # its heir, in turn, may be the one that copies
        heir.leases[lease.lease_id] = lease
        owner.charge(lease, reserved=held, leases=1)

    def take_writer(
        self, group: str, namespace: int, session: int, *, rank: int, now_s: float
    ) -> WriterLease:
        """Take, or renew, the writer lease of the session's group in a namespace.

        A session of a group needs it for reserve, mirror_enqueued, mirror_completed and free (they
        raise `LeaseLost` without); a session without a group has it always.

        Raises:
            WriterTaken: Another session holds it. Details: holder_session, holder_rank.
            UsageError: Not the group that the session was opened with.
        """
        account, owner = self._account(session), self._namespace(namespace)
        _check_group(account, group)
        writer = owner.writers.get(group)
        if writer is not None and writer.session != session:
            self._count_refusal(namespace, WriterTaken.__name__)
            raise WriterTaken(
                f"rank {writer.rank} (session {writer.session}) writes for group {group!r}",
                remedy="One rank of a group writes; read what it publishes, or wait for its end",
                holder_session=writer.session,
                holder_rank=writer.rank,
            )
        taken = WriterLease(
            owner.namespace, group, account.session_id, rank, now_s + self._writer_ttl_s
        )
        if group:
            owner.writers[group] = taken
        return taken

    def yield_writer(self, group: str, namespace: int, session: int) -> None:
        """Give the writer lease back. Idempotent.

        Raises:
            UsageError: Not the group that the session was opened with.
        """
        account, owner = self._account(session), self._namespace(namespace)
        _check_group(account, group)
        writer = owner.writers.get(group)
        if writer is not None and writer.session == session:
            del owner.writers[group]

    # --- blocks -----------------------------------------------------------------------------

    @_counts_refusals
    def reserve(
        self, session: int, namespace: int, num_blocks: int, lease_id: int, *, now_s: float
    ) -> ReserveResult:
        """Blocks to write, evicting least recently used ones when too few are free.

        Args:
            session: Who asks.
            namespace: Where.
            num_blocks: At least 1.
            lease_id: A lease that gets them (renewed by this); 0 makes one.
            now_s: Monotonic time.

        Raises:
            CapacityError: Too few free or evictable blocks; nothing was evicted. Details: needed,
                free, evictable.
            QuotaExceeded: Of the session or the namespace.
            LeaseLost: Also without the group's writer lease.
        """
        account, owner = self._writer(session, namespace)
        if not 1 <= num_blocks <= MAX_RESERVE_BLOCKS:
            raise UsageError(
                f"{num_blocks} blocks asked for, one request may take 1 to {MAX_RESERVE_BLOCKS}",
                remedy="Reserve in several requests",
                limit=MAX_RESERVE_BLOCKS,
                value=num_blocks,
            )
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        owner.check_quota(account, reserved=num_blocks, leases=lease is None)
        owner.make_room(num_blocks)
        lease = self._renewed(account, owner, lease, now_s)
        blocks = owner.reserve_into(lease, num_blocks)
        owner.statistics.reserves += 1
        owner.statistics.blocks_reserved += num_blocks
        return ReserveResult(
            lease.lease_id,
            lease.deadline_s,
            as_u32(blocks),
            owner.blocks.columns.generation[blocks],
        )

    @_counts_refusals
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
        account, owner = self._writer(session, namespace)
        if len(blocks) != len(generations):
            raise UsageError(f"{len(blocks)} blocks with {len(generations)} generations")
        wanted = _distinct(owner, blocks)
        columns = owner.blocks.columns
        kept = [each for each in self._kept_for(account) if each.namespace == namespace]
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        good = np.isin(columns.holder[wanted], [each.lease_id for each in kept])
        wanted = wanted[good & (columns.generation[wanted] == generations)]
        owner.check_quota(account, reserved=len(wanted), leases=lease is None)
        lease = self._renewed(account, owner, lease, now_s)
        for each in kept:
            owner.hand_over(each, lease, wanted[columns.holder[wanted] == each.lease_id])
            if not each.reserved and not len(each.pins):
                self._end_lease(owner, each, LeaseEvent.RELEASE)
        return ReserveResult(
            lease.lease_id, lease.deadline_s, as_u32(wanted), columns.generation[wanted]
        )

    @_counts_refusals
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
        account, owner = self._account(session), self._namespace(namespace)
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
            self._renewed(account, owner, lease, now_s),
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

    @_counts_refusals
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
        account, owner = self._account(session), self._namespace(namespace)
        if len(blocks) != len(generations):
            raise UsageError(f"{len(blocks)} blocks with {len(generations)} generations")
        wanted = _distinct(owner, blocks)
        columns = owner.blocks.columns
        lease = self._leases.require_live(account, owner.namespace, lease_id) if lease_id else None
        good = columns.state[wanted] == _PUBLISHED
        good &= columns.generation[wanted] == generations
        if not good.all():
            at = int(good.argmin())
            raise stale_block(owner, int(wanted[at]), int(generations[at]))
        missing = wanted if lease is None else owner.not_pinned_by(lease, wanted)
        owner.check_quota(account, pins=len(missing), leases=lease is None)
        lease = self._renewed(account, owner, lease, now_s)
        if missing.size:
            owner.pin_new_into(lease, missing, tick=owner.blocks.next_tick())
        return PinResult(lease.lease_id, lease.deadline_s)

    @_counts_refusals
    def unpin(self, session: int, namespace: int, lease_id: int, blocks: U32Array) -> None:
        """Drop pins of a lease.

        Raises:
            NotHeld: A block is not pinned by this lease.
        """
        account, owner = self._account(session), self._namespace(namespace)
        lease = self._leases.require_held(account, owner.namespace, lease_id)
        wanted = _distinct(owner, blocks)
        missing = lease.pins.missing(wanted)
        if missing.size:
            raise not_held(lease, int(missing[0]))
        owner.unpin_from(lease, wanted)

    def renew(self, session: int, lease_ids: Iterable[int], *, now_s: float) -> list[int]:
        """Extend leases, and the session's writer leases. Returns the ids that are lost."""
        account = self._account(session)
        lost = []
        for lease_id in lease_ids:
            lease = account.leases.get(lease_id)
            if lease is None or lease.state is not LeaseState.GRANTED:
                lost.append(lease_id)
            else:
                self._leases.renew(lease, now_s=now_s)
        if account.group:
            self._renew_writers(account, now_s)
        return lost

    def _renew_writers(self, account: SessionAccount, now_s: float) -> None:
        for owner in self._namespaces.values():
            writer = owner.writers.get(account.group)
            if writer is not None and writer.session == account.session_id:
                writer.deadline_s = now_s + self._writer_ttl_s

    def release_leases(self, session: int, lease_ids: Iterable[int]) -> ReleaseResult:
        """End leases: pins are dropped, blocks that were not published become free."""
        account = self._account(session)
        lost = []
        num_blocks = num_pins = 0
        for lease_id in lease_ids:
            lease = account.leases.get(lease_id)
            if lease is None:
                lost.append(lease_id)
                continue
            owner = self._namespaces[lease.namespace]
            returned, dropped = self._end_lease(owner, lease, LeaseEvent.RELEASE)
            num_blocks += returned
            num_pins += dropped
        return ReleaseResult(lost, num_blocks, num_pins)

    @_counts_refusals
    def mirror_enqueued(self, session: int, namespace: int, items: Sequence[MirrorItem]) -> None:
        """RESERVED -> WRITING (WRITING stays: a block fills row by row).

        Raises:
            StaleBlock: Wrong generation.
            NotHeld: A block is reserved by another lease (I1).
            IllegalTransition: A block is not reserved.
        """
        account, owner = self._writer(session, namespace)
        check_batch_size(items)
        checked = [
            check_held(
                owner,
                self._leases.require_live(account, owner.namespace, item.lease_id),
                item,
                BlockEvent.ENQUEUE,
            )
            for item in items
        ]
        for blocks in checked:
            if blocks.size:
                owner.blocks.start_writing(blocks)

    @_counts_refusals
    def mirror_completed(
        self, session: int, namespace: int, items: Sequence[MirrorItem]
    ) -> list[CompletedItem]:
        """Publish: every layer of these blocks is complete (I2). One answer an item, in order.

        Each block becomes a pin of its lease. Where its key is published already, that block is
        pinned instead and the own one becomes free. An item's parent may be a block of an earlier
        item of the batch. The whole batch is checked before anything changes.

        Raises:
            StaleBlock: Wrong generation of a block.
            NotHeld: A block is reserved by another lease (I1).
            IllegalTransition: Published before, or named twice in the batch.
            PublishOutOfOrder: The parent is not published (with that generation), or the key is
                published below another parent.
            QuotaExceeded: Too many pins.
        """
        account, owner = self._writer(session, namespace)
        plan = plan_batch(
            owner,
            items,
            lambda lease_id: self._leases.require_live(account, owner.namespace, lease_id),
        )
        owner.check_quota(account, pins=plan.num_blocks)
        return plan.apply()

    def publish_one(
        self, session: int, namespace: int, item: OneCompleted, *, now_s: float
    ) -> bool:
        """`mirror_completed` of one new block, and `renew` of its lease, for the common case.

        Returns:
            Whether it was done; False: nothing was changed, and `mirror_completed` says why.
        """
        account, owner = self._accounts.get(session), self._namespaces.get(namespace)
        if account is None or owner is None or not _is_writer(account, owner):
            return False
        lease = _granted(account, owner, item.lease_id)
        if lease is None or not publish_one(owner, lease, item):
            return False
        self._leases.renew(lease, now_s=now_s)
        if account.group:
            self._renew_writers(account, now_s)
        return True

    def enqueue_ones(
        self, session: int, namespace: int, handles: Sequence[tuple[int, int, int]], *, now_s: float
    ) -> bool:
        """`mirror_enqueued` of one block an item, and `renew` of their leases.

        Args:
            session: Who asks.
            namespace: Where.
            handles: (lease id, block, generation) each.
            now_s: Monotonic time.

        Returns:
            Whether it was done; False: nothing was changed, and `mirror_enqueued` says why.
        """
        account, owner = self._accounts.get(session), self._namespaces.get(namespace)
        if (
            account is None
            or owner is None
            or len(handles) > MAX_BATCH_ITEMS
            or not _is_writer(account, owner)
            or not enqueue_ones(owner, account, handles)
        ):
            return False
        for lease_id, _, _ in handles:
            self._leases.renew(account.leases[lease_id], now_s=now_s)
        if account.group:
            self._renew_writers(account, now_s)
        return True

    def reserve_one(
        self, session: int, namespace: int, lease_id: int, *, now_s: float
    ) -> OneReserved | None:
        """`reserve` of one block, for the common case.

        Returns:
            None: nothing was changed, and `reserve` says why.
        """
        account, owner = self._accounts.get(session), self._namespaces.get(namespace)
        if (
            account is None
            or owner is None
            or not _is_writer(account, owner)
            or not can_reserve_one(owner, account)
        ):
            return None
        lease = _granted(account, owner, lease_id) if lease_id else None
        if lease is None and (lease_id or not owner.has_room(account, leases=1)):
            return None
        if not make_room_one(owner):
            return None
        if lease is None:
            lease = self._renewed(account, owner, None, now_s)
        else:
            self._leases.renew(lease, now_s=now_s)
        return reserve_one(owner, lease)

    def num_free(self, namespace: int) -> int:
        """Blocks that can be reserved without evicting others."""
        return self._namespace(namespace).blocks.num_free

    @_counts_refusals
    def abandon(
        self, session: int, namespace: int, lease_id: int, blocks: U32Array | None
    ) -> U32Array:
        """Give unpublished blocks back; None: all of the lease's. Returns them, u32 [n].

        Raises:
            NotHeld: A block is not reserved by this lease.
        """
        account, owner = self._account(session), self._namespace(namespace)
        lease = self._leases.require_held(account, owner.namespace, lease_id)
        if blocks is None:
            going = np.sort(as_blocks(lease.reserved))
        else:
            going = _distinct(owner, blocks)
            foreign = owner.blocks.columns.holder[going] != lease_id
            if foreign.any():
                raise not_held(lease, int(going[int(foreign.argmax())]))
        owner.give_back(lease, going)
        return as_u32(going)

    @_counts_refusals
    def free(self, session: int, namespace: int, lease_id: int, blocks: U32Array) -> FreeResult:
        """Forget blocks of a lease.

        Reserved ones become free; pinned ones are unpinned and, when neither a reader nor a longer
        prefix needs them, dropped from the index and freed.

        Raises:
            NotHeld: A block is neither reserved nor pinned by this lease.
        """
        account, owner = self._writer(session, namespace)
        lease = self._leases.require_held(account, owner.namespace, lease_id)
        wanted = _distinct(owner, blocks, limit=MAX_RESERVE_BLOCKS)
        is_reserved = owner.blocks.columns.holder[wanted] == lease_id
        reserved, pinned = wanted[is_reserved], wanted[~is_reserved]
        missing = lease.pins.missing(pinned)
        if missing.size:
            raise not_held(lease, int(missing[0]))
        owner.give_back(lease, reserved)
        owner.unpin_from(lease, pinned)
        states = owner.blocks.columns.state[pinned]
        cleared = pinned[states == _FREE]  # withdrawn before, and let go by their last reader now
        dropped = owner.drop_unused(pinned[states == _PUBLISHED])
        owner.statistics.freed += len(dropped)
        return FreeResult(as_u32(np.concatenate((reserved, cleared, dropped))))

    def evict(
        self, namespace: int, *, num_blocks: int | None = None, blocks: U32Array | None = None
    ) -> U32Array:
        """For operators: give up published blocks that nobody reads.

        Args:
            namespace: Where.
            num_blocks: As many of the least recently used as can go, up to this.
            blocks: These (exactly one of both is given); pinned ones and those with children that
                stay are left out.

        Returns:
            The blocks that went, u32 [n].
        """
        owner = self._namespace(namespace)
        if (num_blocks is None) == (blocks is None) or (num_blocks is not None and num_blocks < 0):
            raise UsageError("evict takes either a number of blocks or their ids")
        if num_blocks is not None:
            gone = owner.evict_up_to(num_blocks)
        else:
            assert blocks is not None
            wanted = _distinct(owner, blocks)
            is_published = owner.blocks.columns.state[wanted] == _PUBLISHED
            gone = owner.drop_unused(wanted[is_published])
        owner.statistics.evictions += len(gone)
        return as_u32(gone)

    # --- damage -----------------------------------------------------------------------------

    def suspect(self, namespace: int, block: int, generation: int) -> Suspect | Verdict:
        """What a reported block must be compared with; or why it need not be (any more)."""
        blocks = self._namespace(namespace).blocks
        if not _is_published(blocks, block, generation):
            return Verdict.STALE
        checksum, is_damaged = blocks.checksum_of(block), not blocks.record_fits(block)
        if not checksum and not is_damaged:
            return Verdict.UNVERIFIABLE
        return Suspect(block, generation, checksum, is_damaged)

    def withdraw(
        self,
        namespace: int,
        block: int,
        generation: int,
        *,
        below: tuple[U32Array, U32Array],
    ) -> bool:
        """Take a damaged block, and what was published below it, away from everybody.

        Nobody finds or pins them any more; who reads them sees it in their records; they are free
        when the last reader lets them go.

        Args:
            namespace: Where.
            block: The damaged one.
            generation: Its generation when it was checked.
            below: Blocks and generations of `subtree.find_below`, at most WITHDRAW_SLICE_BLOCKS,
                deepest first. Others that lie below it may go later (`withdraw_below`).

        Returns:
            False: it is not published in that generation any more, and nothing changed.
        """
        owner = self._namespace(namespace)
        if not _is_published(owner.blocks, block, generation):
            return False
        going = owner.blocks.closed_below(below[0].astype(np.intp), below[1])
        owner.withdraw(np.concatenate((going, np.array([block], np.intp))))
        return True

    def withdraw_below(self, namespace: int, below: tuple[U32Array, U32Array]) -> None:
        """`withdraw` of more blocks below one that went already."""
        owner = self._namespace(namespace)
        going = owner.blocks.closed_below(below[0].astype(np.intp), below[1])
        if going.size:
            owner.withdraw(going)

    def count_check(self, namespace: int, verdict: Verdict) -> None:
        """Note what became of a reported block."""
        owner = self._namespaces.get(namespace)
        if owner is not None:
            checks, name = owner.statistics.checks, verdict.name.lower()
            checks[name] = checks.get(name, 0) + 1

    def num_withdrawn(self, namespace: int) -> int:
        """Withdrawn blocks that are not free yet: they are still read."""
        return self._namespace(namespace).blocks.num_withdrawn

    def lost_pins(self, session: int) -> list[tuple[int, int, int]]:
        """(namespace, block, generation) of withdrawn blocks that a session pins; MAX_LOST_PINS."""
        account = self._account(session)
        lost: list[tuple[int, int, int]] = []
        for owner in self._namespaces.values():
            if owner.attached is None or not owner.attached.num_withdrawn:
                continue
            generations = owner.attached.columns.generation_view
            pins = [
                each.pins for each in account.leases.values() if each.namespace == owner.namespace
            ]
            lost += [
                (owner.namespace, block, generations[block])
                for block in owner.attached.withdrawn().tolist()
                if any(block in held for held in pins)
            ]
        return lost[:MAX_LOST_PINS]

    def expire(self, now_s: float) -> ExpiryResult:
        """End leases whose deadline passed; MAX_EXPIRED_LEASES at most, the others next time.

        Pins are dropped. Reserved blocks of a live session are kept, because its copies may still
        be in flight: they return on abandon, free, release or death.
        """
        expired = []
        for lease in self._leases.pop_due(now_s, max_leases=MAX_EXPIRED_LEASES):
            owner = self._namespaces[lease.namespace]
            if lease.account is self._caretaker:
                # Who wanted what it kept has come for it by now, or is gone.
                self._end_lease(owner, lease, LeaseEvent.EXPIRE)
                continue
            owner.statistics.leases_expired += 1
            expired.append((lease.account.session_id, lease.lease_id))
            if lease.reserved:
                owner.unpin_all(lease)
                self._leases.expire(lease)
            else:
                self._end_lease(owner, lease, LeaseEvent.EXPIRE)
        for owner in self._namespaces.values():
            if owner.attached is not None:
                # Most are free with their last reader; this is for those whose children went later.
                owner.attached.clear_withdrawn()
        yielded = []
        deadlines = []
        for owner in self._namespaces.values():
            for group, writer in list(owner.writers.items()):
                if writer.deadline_s <= now_s:
                    del owner.writers[group]
                    yielded.append((owner.namespace, group))
                else:
                    deadlines.append(writer.deadline_s)
        next_lease_s = self._leases.next_deadline_s()
        if next_lease_s is not None:
            deadlines.append(next_lease_s)
        return ExpiryResult(min(deadlines, default=None), expired, yielded)

    # --- what is where ----------------------------------------------------------------------

    def counts(self, namespace: int) -> Counts:
        """Where the blocks are now."""
        return self._namespace(namespace).blocks.counts()

    def statistics(self, namespace: int) -> Statistics:
        """Live totals: read only."""
        return self._namespace(namespace).statistics

    def namespace_usage(self, namespace: int) -> Usage:
        """Live use of the namespace's quota: read only."""
        return self._namespace(namespace).usage

    def session_usage(self, session: int) -> Usage:
        """Live use of the session's quota: read only."""
        return self._account(session).usage

    def set_session_quota(self, quota: Quota) -> None:
        """Change the limits of each session; what is held already stays."""
        self._quotas.change(session=quota)

    def set_namespace_quota(self, quota: Quota) -> None:
        """Change the limits of each namespace; what is held already stays."""
        self._quotas.change(namespace=quota)

    def writers(self, namespace: int) -> list[WriterLease]:
        """Current writer leases of a namespace."""
        return list(self._namespace(namespace).writers.values())

    def columns(self, namespace: int) -> BlockColumns:
        """The live columns: read only, and from another thread for a picture only."""
        return self._namespace(namespace).blocks.columns

    def list_blocks(
        self,
        namespace: int,
        *,
        states: frozenset[BlockState] | None = None,
        start: int = 1,
        max_rows: int = MAX_LIST_ROWS,
    ) -> list[BlockInfo]:
        """Blocks from id `start` on, of these states (None: all), at most `max_rows`."""
        columns = self._namespace(namespace).blocks.columns
        found = np.arange(max(1, start), len(columns.state))
        if states is not None:
            found = found[np.isin(columns.state[found], list(states))]
        return [
            BlockInfo(
                block=block,
                generation=columns.generation_view[block],
                state=BlockState(columns.state_view[block]),
                readers=columns.readers_view[block],
                children=columns.children_view[block],
                depth=columns.depth_view[block],
                last_use=columns.last_use_view[block],
                lease_id=columns.holder_view[block],
            )
            for block in found[: max(0, min(max_rows, MAX_LIST_ROWS))].tolist()
        ]

    def check_invariants(self) -> None:
        """Recount everything from scratch; AssertionError where it does not agree. For tests."""
        per_namespace = {key: Usage() for key in self._namespaces}
        kept = {key: Usage() for key in self._namespaces}
        for account in (*self._accounts.values(), self._caretaker):
            total = Usage()
            of_namespace = kept if account is self._caretaker else per_namespace
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

    # --- helpers ----------------------------------------------------------------------------

    def _namespace(self, namespace: int) -> Namespace:
        found = self._namespaces.get(namespace)
        if found is None:
            raise UsageError(
                f"namespace {namespace} is not open",
                remedy="Open it by its fingerprint; ids change with the epoch",
                namespace=namespace,
            )
        return found

    def _account(self, session: int) -> SessionAccount:
        found = self._accounts.get(session)
        if found is None:
            raise UnknownSession(f"session {session} is not open", session=session)
        return found

    def _writer(self, session: int, namespace: int) -> tuple[SessionAccount, Namespace]:
        """The two, if the session may write in the namespace (I1)."""
        account, owner = self._account(session), self._namespace(namespace)
        if account.group:
            writer = owner.writers.get(account.group)
            if writer is None or writer.session != session:
                raise LeaseLost(
                    f"session {session} does not hold the writer lease of group {account.group!r}",
                    remedy="Take it with TakeWriter; one rank of a group writes",
                    session=session,
                    holder_session=0 if writer is None else writer.session,
                )
        return account, owner

    def _renewed(
        self, account: SessionAccount, owner: Namespace, lease: Lease | None, now_s: float
    ) -> Lease:
        """The lease with a new deadline; a new one for None."""
        if lease is not None:
            self._leases.renew(lease, now_s=now_s)
            return lease
        lease = self._leases.grant(account, owner.namespace, now_s=now_s)
        owner.charge(lease, leases=1)
        owner.statistics.leases_granted += 1
        return lease

    def _end_lease(self, owner: Namespace, lease: Lease, event: LeaseEvent) -> tuple[int, int]:
        returned = owner.end_holdings(lease) if owner.attached is not None else (0, 0)
        owner.charge(lease, leases=-1)
        self._leases.end(lease, event)
        return returned

    def _count_refusal(self, namespace: int, code: str) -> None:
        owner = self._namespaces.get(namespace)
        if owner is not None:
            refusals = owner.statistics.refusals
            refusals[code] = refusals.get(code, 0) + 1


def _is_published(blocks: BlockDirectory, block: int, generation: int) -> bool:
    return (
        0 < block < blocks.num_blocks
        and blocks.columns.state_view[block] == _PUBLISHED
        and blocks.columns.generation_view[block] == generation
    )


def _is_writer(account: SessionAccount, owner: Namespace) -> bool:
    """`Directory._writer` as a question."""
    if not account.group:
        return True
    writer = owner.writers.get(account.group)
    return writer is not None and writer.session == account.session_id


def _granted(account: SessionAccount, owner: Namespace, lease_id: int) -> Lease | None:
    """`LeaseTable.require_live` as a question."""
    lease = account.leases.get(lease_id)
    if lease is None or lease.state is not LeaseState.GRANTED or lease.namespace != owner.namespace:
        return None
    return lease


def _check_group(account: SessionAccount, group: str) -> None:
    if account.group != group:
        raise UsageError(
            f"session {account.session_id} is of group {account.group!r}, not {group!r}",
            session=account.session_id,
        )


def _distinct(owner: Namespace, blocks: U32Array, *, limit: int = MAX_BLOCKS_PER_MESSAGE) -> Blocks:
    """Ids as an index array, in the given order.

    Raises:
        NotHeld: An id that no block has.
        UsageError: One twice, or too many.
    """
    wanted = np.asarray(blocks).astype(np.intp)
    if not wanted.size:
        return wanted
    if len(wanted) > limit:
        raise UsageError(
            f"{len(wanted)} blocks in a request, the limit is {limit}",
            remedy="Send them in several requests",
            limit=limit,
            value=len(wanted),
        )
    if wanted.min() < 1 or wanted.max() >= owner.blocks.num_blocks:
        raise out_of_range(owner, int(wanted.max()))
    if len(set(wanted.tolist())) < len(wanted):
        raise UsageError("a block is named twice", remedy="Name each block once")
    return wanted


__all__ = ["Directory", "Lookup"]
