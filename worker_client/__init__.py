"""The library in every worker: attach to the pool, bind views, mirror blocks.

`connect` gives a `Client`. Importing this package loads no torch: that happens when the first
tensor is made.
"""

from __future__ import annotations

import os

from hisparse_service.contract.limits import CONNECT_TIMEOUT_S
from worker_client.client import Client

__all__ = ["Client", "connect"]


def connect(
    endpoint: str | os.PathLike[str],
    *,
    client_name: str,
    group: str = "",
    rank: int = 0,
    world_size: int = 1,
    device_uuid: str = "",
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Client:
    """Connect to a daemon, or start a private one.

    Args:
        endpoint: ``ipc://<path of control.sock>``, a runtime directory, or
            ``embedded://?pool_bytes=256MiB``: a private daemon that ends with this process.
        client_name: For people: the engine and its version, say.
        group: The tensor-parallel group (one engine); empty: a group of its own.
        rank: Of this worker in the group.
        world_size: Of the group.
        device_uuid: Of the worker's GPU; empty without one.
        timeout_s: For the daemon to answer, its start included for ``embedded://``.

    Raises:
        ConfigError: The endpoint cannot be used.
        ServiceUnavailable: No answer in time.
    """
    raise NotImplementedError
