"""Names of the counters that workers report of themselves in their heartbeats.

The daemon adds the counters of all its workers and exports each under
``hisparse_worker_<name>_total``; a name that is not here is ignored. Pure.
"""

from __future__ import annotations

from typing import Final

WORKER_COUNTERS: Final = (
    "request_timeouts",
    "reconnects",
    "late_replies",
    "leases_lost",
    "stale_reads",
    "damaged_reads",
    "mirrored_blocks",
    "mirrors_queued",
    "mirrors_handed_in",
    "mirrors_lost",
    "rows_read_resident",
    "rows_read_hot",
    "rows_missed",
    "bytes_gathered",
    "bytes_mirrored",
    "swaps",
    "swap_seconds",
)
"""Every counter of a worker; all only grow while the client lives."""
