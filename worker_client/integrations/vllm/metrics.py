"""The pool's numbers in vLLM's registry, named as vLLM names HiSparse's own.

They ride in vLLM's connector statistics: made by the scheduler, observed in the front end. The
daemon's own metrics are beside them, at the daemon. Needs vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.stats import HiSparseKVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from worker_client.integrations.vllm.connector import SchedulerSide

GAUGES: Final = {
    "service_available": "Whether hisparse-service answers: 1 or 0.",
    "service_reserved_blocks": "Host blocks that this engine holds to write.",
    "service_pinned_blocks": "Published host blocks that this engine reads.",
}
COUNTERS: Final = {
    "service_prefix_lookups": "Prefixes that were looked up in hisparse-service.",
    "service_prefix_blocks_found": "Host blocks found by these lookups.",
    "service_published_blocks": "Host blocks that this engine published.",
    "service_duplicate_blocks": "Host blocks whose prefix was published by another request first.",
    "service_unpublished_blocks": "Complete host blocks that could not be published.",
    "service_restored_pages": "Pages whose indexer keys were restored to the GPU for a hit.",
}
"""Exported as ``vllm:hisparse_<name>``; counters get vLLM's ``_total``."""


class ServiceStats(HiSparseKVConnectorStats):  # type: ignore[misc]
    """vLLM's statistics with the service's: gauges are levels, counters are deltas."""

    def reset(self) -> None:
        """Empty lists under all names."""
        super().reset()
        for name in (*GAUGES, *COUNTERS):
            self.data[name] = []

    def aggregate(self, other: Any) -> Any:
        """Append; of the gauges the last value counts."""
        for name in other.data:
            self.data.setdefault(name, [])
        return super().aggregate(other)


def make_stats(data: dict[str, Any] | None) -> Any:
    """What the front end makes of the data that a scheduler or worker sent."""
    return ServiceStats() if data is None else ServiceStats(data={**ServiceStats().data, **data})


def scheduler_stats(below: Any, service: SchedulerSide) -> Any:
    """The scheduler's statistics of this interval."""
    if below is None:
        return None
    stats = ServiceStats(data={**ServiceStats().data, **below.data})
    host, totals = service.host, service.host.totals
    for name, value in {
        "service_available": int(service.is_available),
        "service_reserved_blocks": host.num_reserved,
        "service_pinned_blocks": len(host.pinned),
        "service_prefix_lookups": totals.lookups,
        "service_prefix_blocks_found": totals.blocks_found,
        "service_published_blocks": totals.blocks_published,
        "service_duplicate_blocks": totals.blocks_duplicate,
        "service_unpublished_blocks": totals.blocks_unpublished,
        "service_restored_pages": service.restored_pages,
    }.items():
        if name in COUNTERS:
            value, service.reported[name] = value - service.reported.get(name, 0), value
        stats.data[name] = [value]
    return stats


class ServicePromMetrics:
    """vLLM's HiSparse metrics and ours in one observer."""

    def __init__(
        self,
        below: Any,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        del vllm_config, metric_types
        self._below = below
        self._gauges = {
            name: create_metric_per_engine(
                below._gauge_cls(
                    name=f"vllm:hisparse_{name}", documentation=text,
                    multiprocess_mode="mostrecent", labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for name, text in GAUGES.items()
        }  # fmt: skip
        self._counters = {
            name: create_metric_per_engine(
                below._counter_cls(
                    name=f"vllm:hisparse_{name}", documentation=text, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one interval's statistics in."""
        self._below.observe(transfer_stats_data, engine_idx)
        for name, counter in self._counters.items():
            for value in transfer_stats_data.get(name, []):
                counter[engine_idx].inc(value)
        for name, gauge in self._gauges.items():
            values = transfer_stats_data.get(name, [])
            if values:
                gauge[engine_idx].set(values[-1])
