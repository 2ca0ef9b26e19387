"""Who a peer is, as the kernel says, and whether it may connect.

libzmq gives the credentials of an ipc peer (SO_PEERCRED) with every message, as the string
``host:uid:gid:pid`` in the frame's Peer-Address. The pid is 0 where the peer lives in a PID
namespace that the daemon cannot see. Pure: any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hisparse_service.contract.errors import NotAuthorised

_ADDRESS: Final = re.compile(
    r"(?P<host>[A-Za-z0-9._-]{1,255}):(?P<uid>[0-9]{1,10}):(?P<gid>[0-9]{1,10}):(?P<pid>[0-9]{1,10})"
)
_MAX_ID: Final = 2**32 - 1
_MAX_PID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of the process that connected, at the moment when it connected."""

    uid: int
    gid: int
    pid: int
    """In the daemon's PID namespace; 0 = not visible from here."""


def parse_peer_address(address: str) -> Credentials:
    """Read ``host:uid:gid:pid``.

    Raises:
        NotAuthorised: Anything else: a peer without kernel credentials is nobody.
    """
    match = _ADDRESS.fullmatch(address)
    if match is not None:
        uid, gid, pid = (int(match[name]) for name in ("uid", "gid", "pid"))
        if uid <= _MAX_ID and gid <= _MAX_ID and pid <= _MAX_PID:
            return Credentials(uid=uid, gid=gid, pid=pid)
    raise NotAuthorised(
        f"peer address {address[:300]!r} is not host:uid:gid:pid",
        remedy="Connect through the daemon's ipc:// socket; other transports carry no credentials",
    )


class Authoriser:
    """The users who may connect.

    Args:
        allowed_uids: Usually the daemon's own uid alone.
    """

    def __init__(self, allowed_uids: Iterable[int]) -> None:
        self._allowed = frozenset(allowed_uids)

    @property
    def allowed_uids(self) -> frozenset[int]:
        """The users who may connect."""
        return self._allowed

    def check(self, credentials: Credentials) -> None:
        """Let an allowed peer pass.

        Raises:
            NotAuthorised: The uid is not in the set.
        """
        if credentials.uid not in self._allowed:
            raise NotAuthorised(
                f"uid {credentials.uid} may not connect; allowed: {sorted(self._allowed)}",
                remedy="Run the client as the daemon's user, or add the uid to the allowed ones",
                uid=credentials.uid,
            )
