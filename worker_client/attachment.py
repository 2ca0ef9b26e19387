"""How a namespace gets its pool: ask for the backing, map it, register it with CUDA.

`Attachment` owns the order: map, touch the page tables, take the registration turn, register range
by range. On the thread whose CUDA context the pool is for; one attach of a namespace at a time.
`HostPool` owns what was mapped and registered, and undoes both.

An attach of hundreds of GiB takes minutes, and the process goes on meanwhile: `Session.lock` is
held for single messages only, none of which waits longer than `_ANSWER_S` for a daemon that hangs.
So a daemon may be replaced during an attach, and the client may be closed:

    found at the end                                        then
    the session of the beginning                            the pool is the namespace's
    a new session, the daemon names the mapped memory       the pool is the namespace's
    a new session, it names other memory                    undone, and done again with that (I3)
    no daemon                                               the pool is the namespace's; the next
                                                            session compares it (reattachment.py)
    the client was closed                                   undone, `ClosedError` (I6)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    ClosedError,
    ForeignSegment,
    HiSparseError,
    PeerError,
    ServiceUnavailable,
)
from hisparse_service.contract.messages import (
    BackingReply,
    HelloReply,
    RegistrationTurn,
    TurnReply,
)
from worker_client.cuda_register import CudaUse, RegistrationDriver, find_driver, register_ranges
from worker_client.host_pool import HostPool, is_same_memory
from worker_client.link import NamespaceLink, other_segment
from worker_client.session import BuildRequest

__all__ = ["ATTACH_TIMEOUT_S", "TURN_TIMEOUT_S", "Attachment"]

ATTACH_TIMEOUT_S: Final = 60.0
TURN_TIMEOUT_S: Final = 600.0
"""Many ranks with hundreds of GiB each register one after another, at 0.1 s a GiB."""
_ANSWER_S: Final = 1.0
"""The daemon answers within 0.1 s whatever happens (I7); ten times that is silence, in which the
other threads of this client get their say."""
_PAUSE_S: Final = 0.005
_PAUSE_MAX_S: Final = 0.2
_MAX_ATTEMPTS: Final = 4
"""Daemons that one attach may see come."""
_AFTER_MAP: Final = declare("client.attach_after_map")
_AFTER_REGISTER: Final = declare("client.attach_after_register")

AnswerT = TypeVar("AnswerT")
AskBacking = Callable[[], BackingReply]


class _Patience:
    """What is left of one time-out that several questions share; work between them is not counted.

    Args:
        timeout_s: For all of them.
    """

    def __init__(self, timeout_s: float) -> None:
        self._left_s = timeout_s

    @contextmanager
    def spent(self) -> Iterator[float]:
        """The deadline of one question, CLOCK_MONOTONIC in s."""
        began_s = time.monotonic()
        try:
            yield began_s + self._left_s
        finally:
            self._left_s -= time.monotonic() - began_s


class Attachment:
    """Gives one namespace its pool.

    Args:
        link: The namespace's; borrowed.
    """

    def __init__(self, link: NamespaceLink) -> None:
        self._link = link
        self._one_at_a_time = threading.Lock()
        self._end = threading.Lock()
        """Between the end of an attach and `close`: exactly one of them undoes a mapping."""
        self._is_closed = False

    def attach(
        self,
        num_blocks: int,
        *,
        cuda: CudaUse,
        driver: RegistrationDriver | None,
        timeout_s: float,
        turn_timeout_s: float = TURN_TIMEOUT_S,
    ) -> HostPool:
        """See `Namespace.attach`."""
        with self._one_at_a_time:
            patience = _Patience(timeout_s)
            ask = partial(self._ask, num_blocks, patience)
            self._patiently(self._mend, patience)
            for _ in range(_MAX_ATTEMPTS):
                seen = self._link.session.hello
                backing = ask()
                pool = self._link.pool
                if pool is not None and not pool.is_closed:
                    if not pool.is_backed_by(backing):
                        raise other_segment(backing.segment_name)
                    return pool
                if driver is None:
                    driver = find_driver(cuda)
                made = self._map(backing, ask)
                if made is not None and self._finish(made, driver, seen, ask, turn_timeout_s):
                    return made
            raise ServiceUnavailable(
                f"the daemon was replaced {_MAX_ATTEMPTS} times during one attach",
                remedy="See why it does not stay (`hisparse-service status`) and attach again",
            )

    def close(self) -> None:
        """Give the pool up: the client closes. An attach that is going on undoes its own.

        Raises:
            DeviceError: CUDA would not unregister; the mapping is given up all the same.
        """
        with self._end:
            self._is_closed = True
            pool = self._link.pool
        if pool is not None:
            pool.cleanup()

    def _mend(self, timeout_s: float) -> None:
        """A pool that was given up no longer stands in the way of another one."""
        link = self._link
        with link.session.lock:
            if link.pool is not None and link.pool.is_closed:
                link.pool = None
            if link.broken is not None and link.pool is None:
                link.open(timeout_s=timeout_s)
                link.broken = None

    def _ask(self, num_blocks: int, patience: _Patience) -> BackingReply:
        build = self._link.backing_request(num_blocks)
        return self._patiently(
            lambda slice_s: self._link.request(build, BackingReply, timeout_s=slice_s),
            patience,
        )

    def _map(self, backing: BackingReply, ask: AskBacking) -> HostPool | None:
        """Map it; None where a new daemon has other memory by now."""
        try:
            return HostPool(backing, self._link.geometry, fingerprint=self._link.fingerprint)
        except ForeignSegment:
            if is_same_memory(ask(), backing):
                raise
            return None

    def _finish(
        self,
        pool: HostPool,
        driver: RegistrationDriver | None,
        seen: HelloReply | None,
        ask: AskBacking,
        turn_timeout_s: float,
    ) -> bool:
        """Register what was mapped and hand it over; False where it was undone for a new daemon."""
        try:
            crash_point(_AFTER_MAP)
            pool.touch_page_tables()
            if driver is not None:
                with self.registration_turn(timeout_s=turn_timeout_s):
                    pool.take_registration(register_ranges(driver, pool.address, pool.ranges))
                    crash_point(_AFTER_REGISTER)
            for _ in range(_MAX_ATTEMPTS):
                if self._hand_over(pool, seen):
                    return True
                seen = self._link.session.hello
                if not pool.is_backed_by(ask()):
                    break
        except BaseException:
            pool.cleanup()
            raise
        pool.cleanup()
        return False

    def _hand_over(self, pool: HostPool, seen: HelloReply | None) -> bool:
        """Make it the namespace's pool, if the session is the one in which it was named.

        Raises:
            ClosedError: The client was closed meanwhile.
        """
        # The lock keeps a new session out: it compares the namespace's pool, or none is there yet.
        with self._link.session.lock, self._end:
            if self._is_closed:
                raise ClosedError("the client is closed", remedy="Connect again")
            if self._link.session.hello is not seen:
                return False
            self._link.pool = pool
            return True

    @contextmanager
    def registration_turn(self, *, timeout_s: float) -> Iterator[None]:
        """See `Namespace.registration_turn`."""
        try:
            self._wait_for_turn(timeout_s)
            yield
        except BaseException:
            # Also without the turn: who gave up waiting would get it all the same, and nobody
            # after it. Why it cannot be given back says less than what went wrong.
            with contextlib.suppress(HiSparseError):
                self._give_turn_back()
            raise
        with contextlib.suppress(PeerError):  # a daemon that died forgot it, which is as good
            self._give_turn_back()

    def _give_turn_back(self) -> None:
        self._link.request(self._turn_request(release=True), TurnReply)

    def _wait_for_turn(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        pause_s = _PAUSE_S
        while True:
            try:
                turn = self._link.request(
                    self._turn_request(release=False), TurnReply,
                    timeout_s=min(max(deadline_s - time.monotonic(), _PAUSE_MAX_S), _ANSWER_S),
                )  # fmt: skip
            except ServiceUnavailable:
                if time.monotonic() >= deadline_s:
                    raise
                pause_s = _PAUSE_MAX_S
            else:
                if turn.granted:
                    return
                if time.monotonic() >= deadline_s:
                    raise ServiceUnavailable(
                        f"no turn to register within {timeout_s} s, {turn.ahead} sessions are "
                        "ahead",
                        remedy="Look for a worker that hangs in cudaHostRegister",
                        timeout_s=timeout_s, ahead=turn.ahead,
                    )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    def _turn_request(self, *, release: bool) -> BuildRequest:
        link = self._link
        return lambda request_id: RegistrationTurn(request_id, link.namespace_id, release)

    def _patiently(self, ask: Callable[[float], AnswerT], patience: _Patience) -> AnswerT:
        """Ask until it is answered, for `_ANSWER_S` each time; the others ask in between.

        What is asked so may be asked twice: the daemon gives the same answer.

        Raises:
            ServiceUnavailable: Not while the patience lasted.
        """
        with patience.spent() as deadline_s:
            while True:
                try:
                    return ask(min(max(deadline_s - time.monotonic(), 0.0), _ANSWER_S))
                except ServiceUnavailable:
                    if time.monotonic() >= deadline_s:
                        raise
                # Without it the next question is there before a thread that waits for the lock.
                time.sleep(min(_PAUSE_MAX_S, max(deadline_s - time.monotonic(), 0.0)))
