"""How a namespace gets its pool: ask for the backing, map it, register it with CUDA.

`Attachment` owns the order: map, touch the page tables, take the registration turn, register range
by range. On the thread whose CUDA context the pool is for; one attach of a namespace at a time.
`HostPool` owns what was mapped and registered, and undoes both.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import PeerError, ServiceUnavailable
from hisparse_service.contract.messages import BackingReply, RegistrationTurn, TurnReply
from worker_client.cuda_register import CudaUse, RegistrationDriver, find_driver, register_ranges
from worker_client.host_pool import HostPool
from worker_client.link import NamespaceLink, other_segment
from worker_client.session import BuildRequest

__all__ = ["ATTACH_TIMEOUT_S", "TURN_TIMEOUT_S", "Attachment"]

ATTACH_TIMEOUT_S: Final = 60.0
TURN_TIMEOUT_S: Final = 600.0
"""Many ranks with hundreds of GiB each register one after another, at 0.1 s a GiB."""
_TURN_PAUSE_S: Final = 0.005
_TURN_PAUSE_MAX_S: Final = 0.2
_AFTER_MAP: Final = declare("client.attach_after_map")
_AFTER_REGISTER: Final = declare("client.attach_after_register")


class Attachment:
    """Gives one namespace its pool.

    Args:
        link: The namespace's; borrowed.
    """

    def __init__(self, link: NamespaceLink) -> None:
        self._link = link
        self._one_at_a_time = threading.Lock()

    def attach(
        self,
        num_blocks: int,
        *,
        cuda: CudaUse,
        driver: RegistrationDriver | None,
        timeout_s: float,
    ) -> HostPool:
        """See `Namespace.attach`."""
        link = self._link
        with self._one_at_a_time:
            self._mend()
            backing = link.request(
                link.backing_request(num_blocks), BackingReply, timeout_s=timeout_s
            )
            if link.pool is not None and not link.pool.is_closed:
                if not link.pool.is_backed_by(backing):
                    raise other_segment(backing.segment_name)
                return link.pool
            if driver is None:
                driver = find_driver(cuda)
            pool = HostPool(backing, link.geometry, fingerprint=link.fingerprint)
            crash_point(_AFTER_MAP)
            try:
                pool.touch_page_tables()
                if driver is not None:
                    with self.registration_turn(timeout_s=TURN_TIMEOUT_S):
                        pool.take_registration(register_ranges(driver, pool.address, pool.ranges))
                        crash_point(_AFTER_REGISTER)
            except BaseException:
                pool.cleanup()
                raise
            link.pool = pool
            return pool

    def close(self) -> None:
        """Give the pool up: the client closes.

        Raises:
            DeviceError: CUDA would not unregister; the mapping is given up all the same.
        """
        if self._link.pool is not None:
            self._link.pool.cleanup()

    def _mend(self) -> None:
        """A pool that was given up no longer stands in the way of another one."""
        link = self._link
        with link.session.lock:
            if link.pool is not None and link.pool.is_closed:
                link.pool = None
            if link.broken is not None and link.pool is None:
                link.open()
                link.broken = None

    @contextmanager
    def registration_turn(self, *, timeout_s: float) -> Iterator[None]:
        """See `Namespace.registration_turn`."""
        try:
            self._wait_for_turn(timeout_s)
            yield
        finally:
            # Also without the turn: who gave up waiting would get it all the same, and nobody
            # after it. A daemon that died meanwhile forgot it, which is as good.
            with contextlib.suppress(PeerError):
                self._link.request(self._turn_request(release=True), TurnReply)

    def _wait_for_turn(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        pause_s = _TURN_PAUSE_S
        while True:
            turn = self._link.request(self._turn_request(release=False), TurnReply)
            if turn.granted:
                return
            if time.monotonic() >= deadline_s:
                raise ServiceUnavailable(
                    f"no turn to register within {timeout_s} s, {turn.ahead} sessions are ahead",
                    remedy="Look for a worker that hangs in cudaHostRegister",
                    timeout_s=timeout_s, ahead=turn.ahead,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _TURN_PAUSE_MAX_S)

    def _turn_request(self, *, release: bool) -> BuildRequest:
        link = self._link
        return lambda request_id: RegistrationTurn(request_id, link.namespace_id, release)
