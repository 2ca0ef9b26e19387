"""The counters that workers report, added up so that one scrape shows the node.

A worker reports totals since its client was made. What the daemon exports must only grow, whatever
connects again: a session's growth is what counts, and a client that comes back (it says so by its
own `reconnects`) goes on from what its last session reported. Control loop only; the totals may be
read by any thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from hisparse_service.contract.counters import WORKER_COUNTERS

MAX_DEPARTED: Final = 512
"""Ended sessions whose last report is remembered, for a client that connects again."""

Identity = tuple[int, str, str, int]
"""(pid, client name, group, rank) of a client."""


class WorkerTotals:
    """Sums over all sessions since the daemon started."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = dict.fromkeys(WORKER_COUNTERS, 0.0)
        self._reported: dict[int, Mapping[str, float]] = {}
        self._departed: OrderedDict[Identity, Mapping[str, float]] = OrderedDict()

    def report(self, session_id: int, identity: Identity, counters: Mapping[str, float]) -> None:
        """Take a session's report in."""
        before = self._reported.get(session_id)
        if before is None:
            before = self._first(identity, counters)
        self._reported[session_id] = counters
        totals = self.totals
        for name, value in counters.items():
            # Unknown names are ignored, and a counter that fell counts as begun anew.
            if name in totals:
                was = before.get(name, 0.0)
                totals[name] += value - was if value >= was else value

    def _first(self, identity: Identity, counters: Mapping[str, float]) -> Mapping[str, float]:
        """What a session's first report is compared with."""
        departed = self._departed.pop(identity, None)
        if not counters.get("reconnects"):
            return {}
        # Without a predecessor here, an earlier daemon has counted what it reports now.
        return departed if departed is not None else counters

    def ended(self, session_id: int, identity: Identity) -> None:
        """A session ended; its part of the sums stays."""
        last = self._reported.pop(session_id, None)
        if last is None:
            return
        self._departed[identity] = last
        self._departed.move_to_end(identity)
        if len(self._departed) > MAX_DEPARTED:
            self._departed.popitem(last=False)
