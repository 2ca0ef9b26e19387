"""The library in every worker: attach to the pool, bind views, mirror blocks.

`connect` gives a `Client`. Importing this package loads no torch: that happens when the first
tensor is made.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hisparse_service.contract.errors import ServiceUnavailable
from hisparse_service.contract.limits import CONNECT_TIMEOUT_S
from worker_client.client import Client
from worker_client.embedded import SCHEME, EmbeddedDaemon
from worker_client.endpoint import Approach, ipc_endpoint
from worker_client.session import Identity, Session

__all__ = ["Client", "connect"]


def connect(
    endpoint: str | os.PathLike[str],
    *,
    client_name: str = "",
    group: str = "",
    rank: int = 0,
    world_size: int = 1,
    device_uuid: str = "",
    delegates_copies: bool = False,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Client:
    """Connect to a daemon, or start a private one.

    Args:
        endpoint: ``ipc://<path of control.sock>``, a runtime directory, or
            ``embedded://?pool_bytes=256MiB``: a private daemon that ends with this process.
        client_name: For people: the engine and its version, say; the program's name when empty.
        group: The tensor-parallel group (one engine); empty: a group of its own.
        rank: Of this worker in the group.
        world_size: Of the group.
        device_uuid: Of the worker's GPU; empty without one.
        delegates_copies: Other processes of the group copy into the blocks that this client
            reserves (a scheduler and its workers): they outlive it until those ended too.
        timeout_s: For the daemon to answer, its start included for ``embedded://``.

    Raises:
        UsageError: `rank` lies outside of the group, or a text is too long.
        ConfigError: The endpoint cannot be used.
        NotAuthorised: The runtime directory or the daemon is closed to this user.
        ServiceUnavailable: No answer in time; what is missing is in the message. A directory or a
            socket that is not there yet is waited for.
        NotReady: The private daemon's pool was not reserved in time.
    """
    identity = Identity(
        client_name=client_name or Path(sys.argv[0]).name,
        group=group,
        rank=rank,
        world_size=world_size,
        device_uuid=device_uuid,
        delegates_copies=delegates_copies,
    )
    identity.check()
    address = os.fspath(endpoint)
    if not address.startswith(SCHEME):
        session = Session(ipc_endpoint(address), identity)
        approach = Approach(session.endpoint)
        try:
            session.open(timeout_s=timeout_s, alive=approach)
        except ServiceUnavailable as error:
            raise approach.explain(error) from error
        return Client(session)
    daemon = EmbeddedDaemon.start(address)
    try:
        deadline_s = time.monotonic() + timeout_s
        session = Session(daemon.endpoint, identity)
        session.open(timeout_s=timeout_s, alive=daemon.check_alive)
        client = Client(session, embedded=daemon)
    except BaseException:
        daemon.stop()
        raise
    try:
        client.wait_ready(timeout_s=deadline_s - time.monotonic(), alive=daemon.check_alive)
    except BaseException:
        client.close()
        raise
    return client
