"""The writer lease of a group in a namespace: one rank of a tensor-parallel group writes (I1).

Made by `directory.py`, whose head says what holds for all requests. Control loop only.
"""

from __future__ import annotations

from hisparse_service.contract.errors import LeaseLost, UsageError, WriterTaken
from hisparse_service.contract.ids import NamespaceId
from hisparse_service.directory.leases import SessionAccount
from hisparse_service.directory.namespaces import Namespace
from hisparse_service.directory.registry import Registry
from hisparse_service.directory.results import WriterLease


class Writers:
    """Who writes for its group. The leases themselves stand in their namespaces.

    Args:
        registry: The sessions and namespaces.
        ttl_s: From each grant and renewal.
    """

    def __init__(self, registry: Registry, *, ttl_s: float) -> None:
        self._registry = registry
        self._ttl_s = ttl_s

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
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
        _check_group(account, group)
        writer = owner.writers.get(group)
        if writer is not None and writer.session != session:
            self._registry.count_refusal(namespace, WriterTaken.__name__)
            raise WriterTaken(
                f"rank {writer.rank} (session {writer.session}) writes for group {group!r}",
                remedy="One rank of a group writes; read what it publishes, or wait for its end",
                holder_session=writer.session,
                holder_rank=writer.rank,
            )
        taken = WriterLease(owner.namespace, group, account.session_id, rank, now_s + self._ttl_s)
        if group:
            owner.writers[group] = taken
        return taken

    def yield_writer(self, group: str, namespace: int, session: int) -> None:
        """Give the writer lease back. Idempotent.

        Raises:
            UsageError: Not the group that the session was opened with.
        """
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
        _check_group(account, group)
        writer = owner.writers.get(group)
        if writer is not None and writer.session == session:
            del owner.writers[group]

    def require(self, session: int, namespace: int) -> tuple[SessionAccount, Namespace]:
        """The two, if the session may write in the namespace (I1).

        Raises:
            LeaseLost: Another session of its group writes, or none.
        """
        account, owner = self._registry.account(session), self._registry.namespace(namespace)
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

    def renew(self, account: SessionAccount, now_s: float) -> None:
        """Extend the writer leases that a session of a group holds."""
        for owner in self._registry.namespaces.values():
            writer = owner.writers.get(account.group)
            if writer is not None and writer.session == account.session_id:
                writer.deadline_s = now_s + self._ttl_s

    def end_session(self, account: SessionAccount) -> list[tuple[NamespaceId, str]]:
        """Give back the writer leases that a session holds: (namespace, group) each."""
        yielded = []
        for owner in self._registry.namespaces.values():
            writer = owner.writers.get(account.group)
            if writer is not None and writer.session == account.session_id:
                del owner.writers[account.group]
                yielded.append((owner.namespace, account.group))
        return yielded

    def expire(self, now_s: float) -> tuple[list[tuple[NamespaceId, str]], list[float]]:
        """End those whose deadline passed: (namespace, group) each; deadlines of the others."""
        yielded = []
        deadlines = []
        for owner in self._registry.namespaces.values():
            for group, writer in list(owner.writers.items()):
                if writer.deadline_s <= now_s:
                    del owner.writers[group]
                    yielded.append((owner.namespace, group))
                else:
                    deadlines.append(writer.deadline_s)
        return yielded, deadlines


def is_writer(account: SessionAccount, owner: Namespace) -> bool:
    """`Writers.require` as a question."""
    if not account.group:
        return True
    writer = owner.writers.get(account.group)
    return writer is not None and writer.session == account.session_id


def _check_group(account: SessionAccount, group: str) -> None:
    if account.group != group:
        raise UsageError(
            f"session {account.session_id} is of group {account.group!r}, not {group!r}",
            session=account.session_id,
        )
