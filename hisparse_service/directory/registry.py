"""Who may ask, where, and under which lease: what all requests look up first.

One object that the parts of `directory.py` share. It holds what is open and leased; what a request
does with it is theirs. Control loop only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from hisparse_service.contract.errors import HiSparseError, UnknownSession, UsageError
from hisparse_service.contract.ids import NO_SESSION
from hisparse_service.directory.leases import Lease, LeaseTable, SessionAccount
from hisparse_service.directory.namespaces import Namespace
from hisparse_service.directory.states import LeaseEvent


class Registry:
    """Open namespaces, open sessions, and the leases between them.

    Args:
        lease_ttl_s: Time to live of leases, from each grant and renewal.
    """

    def __init__(self, *, lease_ttl_s: float) -> None:
        self.leases = LeaseTable(ttl_s=lease_ttl_s)
        self.namespaces: dict[int, Namespace] = {}
        """By id; `backings.py` opens and drops them."""
        self.accounts: dict[int, SessionAccount] = {}
        """By session; `sessions.py` opens and ends them."""
        self.caretaker = SessionAccount(NO_SESSION, "", 0)
        """Holds what an earlier daemon's clients were writing and reading, and what is in
        quarantine; no session has this id."""

    def namespace(self, namespace: int) -> Namespace:
        """The open namespace of this id.

        Raises:
            UsageError: There is none.
        """
        found = self.namespaces.get(namespace)
        if found is None:
            raise UsageError(
                f"namespace {namespace} is not open",
                remedy="Open it by its fingerprint; ids change with the epoch",
                namespace=namespace,
            )
        return found

    def account(self, session: int) -> SessionAccount:
        """What is known of a session.

        Raises:
            UnknownSession: It was not opened, or has died.
        """
        found = self.accounts.get(session)
        if found is None:
            raise UnknownSession(f"session {session} is not open", session=session)
        return found

    def renewed(
        self, account: SessionAccount, owner: Namespace, lease: Lease | None, now_s: float
    ) -> Lease:
        """The lease with a new deadline; a new one for None."""
        if lease is not None:
            self.leases.renew(lease, now_s=now_s)
            return lease
        lease = self.leases.grant(account, owner.namespace, now_s=now_s)
        owner.charge(lease, leases=1)
        owner.statistics.leases_granted += 1
        return lease

    def end_lease(self, owner: Namespace, lease: Lease, event: LeaseEvent) -> tuple[int, int]:
        """Give back all that a lease holds, and forget it: (unpublished blocks, pins)."""
        returned = owner.end_holdings(lease) if owner.attached is not None else (0, 0)
        owner.charge(lease, leases=-1)
        self.leases.end(lease, event)
        return returned

    def count_refusal(self, namespace: int, code: str) -> None:
        """Note that a request was refused, where there is such a namespace."""
        owner = self.namespaces.get(namespace)
        if owner is not None:
            refusals = owner.statistics.refusals
            refusals[code] = refusals.get(code, 0) + 1


class _HasRegistry(Protocol):
    _registry: Registry


P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part", bound=_HasRegistry)


def counts_refusals(
    method: Callable[Concatenate[Part, int, int, P], R],
) -> Callable[Concatenate[Part, int, int, P], R]:
    """Count the errors of a method whose arguments begin with session and namespace."""

    @functools.wraps(method)
    def counted(
        self: Part, session: int, namespace: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            return method(self, session, namespace, *args, **kwargs)
        except HiSparseError as error:
            self._registry.count_refusal(namespace, error.code)
            raise

    return counted
