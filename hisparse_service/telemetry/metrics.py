"""Numbers of the daemon: counted on the control loop in plain integers, collected when asked for.

prometheus_client is imported only by `registry`, and its own counters are not used: `observe` of
a labelled histogram costs as much as decoding a request, an addition to a list a tenth of that.

`ServerMetrics` is written by the control loop. `registry` may be scraped by another thread: it
reads the last snapshot that the loop made, never the live directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_MIN_BIT: Final = 13
_MAX_BIT: Final = 34
"""Buckets are powers of two of nanoseconds: 8 us to 17 s."""
NUM_BUCKETS: Final = _MAX_BIT - _MIN_BIT + 2
_UPPER_BOUNDS_S: Final = tuple(float(1 << bit) / 1e9 for bit in range(_MIN_BIT, _MAX_BIT + 1))


class LatencyHistogram:
    """How long requests of one type took in the daemon, from receipt to reply."""

    __slots__ = ("buckets", "count", "sum_ns")

    def __init__(self) -> None:
        self.buckets = [0] * NUM_BUCKETS
        self.count = 0
        self.sum_ns = 0

    def observe_ns(self, elapsed_ns: int) -> None:
        """Count one request."""
        bit = elapsed_ns.bit_length()
        at = 0 if bit <= _MIN_BIT else NUM_BUCKETS - 1 if bit > _MAX_BIT else bit - _MIN_BIT
        self.buckets[at] += 1
        self.count += 1
        self.sum_ns += elapsed_ns

    def quantile_s(self, share: float) -> float:
        """Upper bound of the bucket that holds this share of the requests; 0 without any."""
        wanted, seen = share * self.count, 0
        for index, count in enumerate(self.buckets):
            seen += count
            if count and seen >= wanted:
                return _UPPER_BOUNDS_S[min(index, len(_UPPER_BOUNDS_S) - 1)]
        return 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound in seconds, requests up to it), as Prometheus wants it."""
        rows, seen = [], 0
        for bound, count in zip(_UPPER_BOUNDS_S, self.buckets, strict=False):
            seen += count
            rows.append((repr(bound), float(seen)))
        rows.append(("+Inf", float(self.count)))
        return rows


@dataclass(slots=True, eq=False)
class ServerMetrics:
    """Live totals of the control loop; only ever grow, but for `snapshot`."""

    latency: dict[str, LatencyHistogram] = field(default_factory=dict)
    """By request type."""
    errors: dict[str, int] = field(default_factory=dict)
    """Error replies by code."""
    replies_dropped: int = 0
    """Because the client does not read."""
    replies_unroutable: int = 0
    """Because the client is gone."""
    malformed: int = 0
    unexpected_errors: int = 0
    sessions_total: int = 0
    deaths: dict[str, int] = field(default_factory=dict)
    """Sessions ended, by how it was noticed."""
    received_bytes: int = 0
    sent_bytes: int = 0
    snapshot: dict[str, Any] = field(default_factory=dict)
    """The last status that the loop made; replaced as a whole, so another thread may read it."""

    def count_error(self, code: str) -> None:
        """Count an error reply."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def count_death(self, cause: str) -> None:
        """Count the end of a session."""
        self.deaths[cause] = self.deaths.get(cause, 0) + 1

    def latency_of(self, request_type: str) -> LatencyHistogram:
        """The histogram of a request type, made when it is first asked for."""
        found = self.latency.get(request_type)
        if found is None:
            found = self.latency[request_type] = LatencyHistogram()
        return found


def registry(metrics: ServerMetrics) -> CollectorRegistry:
    """A Prometheus registry of its own that reads `metrics` at each scrape. Any thread."""
    from prometheus_client import CollectorRegistry

    class _Collector:
        def collect(self) -> Iterator[Metric]:
            yield from _server_metrics(metrics)
            yield from _pool_metrics(metrics.snapshot)

    made = CollectorRegistry(auto_describe=False)
    made.register(_Collector())
    return made


def _server_metrics(metrics: ServerMetrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    latency = HistogramMetricFamily(
        "hisparse_control_latency_seconds",
        "From receipt of a request to its reply, in the daemon",
        labels=["request"],
    )
    for name, histogram in sorted(metrics.latency.items()):
        latency.add_metric([name], histogram.cumulative(), histogram.sum_ns / 1e9)
    yield latency
    errors = CounterMetricFamily(
        "hisparse_control_errors", "Requests answered with an error", labels=["code"]
    )
    for code, count in sorted(metrics.errors.items()):
        errors.add_metric([code], count)
    yield errors
    deaths = CounterMetricFamily(
        "hisparse_session_ends", "Sessions ended, by how it was noticed", labels=["cause"]
    )
    for cause, count in sorted(metrics.deaths.items()):
        deaths.add_metric([cause], count)
    yield deaths
    for name, text, value in (
        ("hisparse_sessions_opened", "Sessions opened", metrics.sessions_total),
        ("hisparse_replies_dropped", "Replies a client did not read", metrics.replies_dropped),
        ("hisparse_replies_unroutable", "Replies to clients gone", metrics.replies_unroutable),
        ("hisparse_malformed_messages", "Frames that are no message", metrics.malformed),
        ("hisparse_unexpected_errors", "Bugs met and survived", metrics.unexpected_errors),
        ("hisparse_control_received_bytes", "Bytes of requests", metrics.received_bytes),
        ("hisparse_control_sent_bytes", "Bytes of replies", metrics.sent_bytes),
    ):
        yield CounterMetricFamily(name, text, value=value)


_NAMESPACE_COUNTERS: Final = {
    "lookups": ("hisparse_lookups", "Lookup requests"),
    "keys_asked": ("hisparse_lookup_keys", "Keys asked for"),
    "keys_hit": ("hisparse_lookup_hit_blocks", "Keys found published"),
    "tokens_hit": ("hisparse_lookup_hit_tokens", "Tokens of the keys found"),
    "blocks_reserved": ("hisparse_blocks_reserved", "Blocks given out to write"),
    "publishes": ("hisparse_blocks_published", "Blocks published"),
    "duplicates_merged": ("hisparse_blocks_merged", "Blocks whose key was published before"),
    "evictions": ("hisparse_blocks_evicted", "Blocks evicted"),
    "freed": ("hisparse_blocks_freed", "Published blocks given up by their reader"),
    "abandoned": ("hisparse_blocks_abandoned", "Unpublished blocks that returned"),
    "leases_granted": ("hisparse_leases_granted", "Leases granted"),
    "leases_expired": ("hisparse_leases_expired", "Leases whose deadline passed"),
}


def _pool_metrics(snapshot: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    pool = snapshot.get("pool") or {}
    pool_bytes = GaugeMetricFamily("hisparse_pool_bytes", "Bytes of the pool", labels=["use"])
    for use in ("directory", "tables", "payload", "free"):
        if f"{use}_bytes" in pool:
            pool_bytes.add_metric([use], pool[f"{use}_bytes"])
    yield pool_bytes
    sessions = GaugeMetricFamily("hisparse_sessions", "Sessions now", labels=["kind"])
    for kind in ("workers", "operators"):
        sessions.add_metric([kind], snapshot.get("sessions", {}).get(kind, 0))
    yield sessions
    blocks = GaugeMetricFamily("hisparse_blocks", "Blocks now", labels=["namespace", "state"])
    namespaces = snapshot.get("namespaces", [])
    for namespace in namespaces:
        for state, count in namespace["blocks"].items():
            if state != "capacity":
                blocks.add_metric([str(namespace["namespace"]), state], count)
    yield blocks
    for key, (name, text) in _NAMESPACE_COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=["namespace"])
        for namespace in namespaces:
            family.add_metric([str(namespace["namespace"])], namespace["statistics"][key])
        yield family
    yield GaugeMetricFamily(
        "hisparse_population_ratio", "Share of the pool that is populated",
        value=snapshot.get("progress", 0.0),
    )  # fmt: skip
