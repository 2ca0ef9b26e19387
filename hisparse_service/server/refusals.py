"""What is refused from peers that should know better, in the log at a bounded rate.

A frame that is no message and a Hello that is turned away each may come without end. The first of a
peer is logged at once; what follows within the interval is counted, and told in one line at its
end. Control loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    HiSparseError,
    MalformedMessage,
    MessageTooLarge,
    NotAuthorised,
    UnknownSession,
)
from hisparse_service.membership.credentials import parse_peer_address
from hisparse_service.telemetry.logs import get_logger

INTERVAL_S: Final = 10.0
MAX_PEERS: Final = 256
"""Peers that are told apart at a time; all beyond share one line."""

if TYPE_CHECKING:
    from hisparse_service.server.state import Client

log = get_logger()


@dataclass(slots=True)
class _Refused:
    due_s: float
    count: int
    """Not told yet."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the last one."""


class RefusalLog:
    """Lines `malformed_message` and `hello_refused`, one a peer and interval.

    Args:
        write: Takes an event's name and its fields; None: the log, as warnings.
    """

    def __init__(self, write: Callable[..., object] | None = None) -> None:
        self._write = write or log.warning
        self._refused: dict[tuple[str, int, int], _Refused] = {}

    def note(
        self,
        client: Client | None,
        request: m.Request | None,
        error: HiSparseError,
        *,
        peer_address: str,
        now_s: float,
    ) -> None:
        """Take note of a refusal; those that are ordinary answers are none of this one's.

        Args:
            client: Who sent it, where it has a session.
            request: None of a frame that is none.
            error: What it is answered with.
            peer_address: The kernel's word; empty where it is not known.
            now_s: `time.monotonic`.
        """
        if isinstance(error, MalformedMessage | MessageTooLarge):
            event = "malformed_message"
            if client is not None:
                client.session.statistics.malformed += 1
        elif isinstance(request, m.Hello) and not isinstance(error, UnknownSession):
            event = "hello_refused"
        else:
            return
        session, pid, uid = _who(client, peer_address)
        key = (event, session, pid)
        if key not in self._refused and len(self._refused) >= MAX_PEERS:
            key = (event, -1, -1)
        fields: dict[str, Any] = {"session": session, "pid": pid, "uid": uid}
        if isinstance(request, m.Hello):
            fields["client"] = request.client_name
        fields |= {"code": error.code, "error": error.message}
        known = self._refused.get(key)
        if known is not None:
            known.count += 1
            known.fields = fields
            return
        self._refused[key] = _Refused(now_s + INTERVAL_S, 0)
        self._write(event, count=1, **fields)

    def tick(self, now_s: float) -> None:
        """Tell what was counted in intervals that are over."""
        due = [key for key, refused in self._refused.items() if refused.due_s <= now_s]
        for key in due:
            self._tell(key, now_s)

    def close(self) -> None:
        """Tell what was not told yet. Idempotent."""
        for key in list(self._refused):
            self._tell(key, 0.0)
        self._refused.clear()

    def _tell(self, key: tuple[str, int, int], now_s: float) -> None:
        refused = self._refused[key]
        if not refused.count:
            del self._refused[key]
            return
        self._write(key[0], count=refused.count, **refused.fields)
        refused.count, refused.due_s = 0, now_s + INTERVAL_S


def _who(client: Client | None, peer_address: str) -> tuple[int, int, int]:
    """Session, pid and uid; 0, 0 and -1 where they are not known."""
    if client is not None:
        credentials = client.session.credentials
        return client.session.session_id, credentials.pid, credentials.uid
    try:
        credentials = parse_peer_address(peer_address)
    except NotAuthorised:
        return 0, 0, -1
    return 0, credentials.pid, credentials.uid
