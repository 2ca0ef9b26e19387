"""Numbers of the daemon: counted on the control loop in plain integers, collected when asked for.

prometheus_client is imported only by `registry`, and its own counters are not used: `observe` of
a labelled histogram costs as much as decoding a request, an addition to a list a tenth of that.

`ServerMetrics` is written by the control loop. `registry` may be scraped by another thread: it
reads the last snapshot that the loop made and copies of plain dicts, never the live directory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hisparse_service.telemetry.backings import BackingView
from hisparse_service.telemetry.device_metrics import device_metrics
from hisparse_service.telemetry.histogram import LatencyHistogram
from hisparse_service.telemetry.workers import WorkerTotals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["LatencyHistogram", "ServerMetrics", "registry"]

MAX_NAME_CHARACTERS: Final = 128
"""Of a namespace's name, which a client chose, in a label."""


@dataclass(slots=True, eq=False)
class ServerMetrics:
    """Live totals of the control loop; only ever grow, but for `snapshot` and what follows it."""

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
    loop_lag: LatencyHistogram = field(default_factory=LatencyHistogram)
    """How long the loop takes to come to what another thread hands to it; probed once a second."""
    longest_turn_s: float = 0.0
    """Of the last minute; written by the sampler's thread."""
    adopted_blocks: dict[str, int] = field(default_factory=dict)
    """What adopting an earlier daemon's pool found, by outcome."""
    adoptions: int = 0
    """Pools taken over from an earlier daemon."""
    workers: WorkerTotals = field(default_factory=WorkerTotals)
    backings: dict[int, BackingView] = field(default_factory=dict)
    """By namespace id."""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """The last status that the loop made; replaced as a whole, so another thread may read it."""
    session_rows: list[dict[str, Any]] = field(default_factory=list)
    """The sessions at the last tick, while somebody watches; replaced as a whole."""
    watched_until_s: float = 0.0
    """Until when the loop makes `session_rows` (monotonic). Any thread sets it."""

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
            snapshot = metrics.snapshot
            yield from _control_metrics(metrics)
            yield from _service_metrics(metrics, snapshot)
            yield from _pool_metrics(snapshot)
            yield from _namespace_metrics(snapshot.get("namespaces", []))
            yield from _mirror_metrics(list(metrics.backings.values()))
            yield from _cuda_metrics(snapshot.get("cuda") or {})
            yield from device_metrics(snapshot.get("device") or {})
            yield from _worker_metrics(metrics.workers)

    made = CollectorRegistry(auto_describe=False)
    made.register(_Collector())
    return made


def _control_metrics(metrics: ServerMetrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    latency = HistogramMetricFamily(
        "hisparse_control_latency_seconds",
        "From receipt of a request to its reply, in the daemon",
        labels=["request"],
    )
    for name, histogram in sorted(metrics.latency.copy().items()):
        if not histogram.count:
            continue
        latency.add_metric([name], histogram.cumulative(), histogram.sum_ns / 1e9)
    yield latency
    lag = HistogramMetricFamily(
        "hisparse_loop_lag_seconds", "Until the control loop came to a probe, once a second"
    )
    lag.add_metric([], metrics.loop_lag.cumulative(), metrics.loop_lag.sum_ns / 1e9)
    yield lag
    for name, label, text, counts in (
        ("hisparse_control_errors", "code", "Requests answered with an error", metrics.errors),
        ("hisparse_session_ends", "cause", "Sessions ended, by how it was noticed",
         metrics.deaths),
    ):  # fmt: skip
        family = CounterMetricFamily(name, text, labels=[label])
        for key, count in sorted(counts.copy().items()):
            family.add_metric([key], count)
        yield family
    for name, text, value in (
        ("hisparse_sessions_opened", "Sessions opened", metrics.sessions_total),
        ("hisparse_replies_dropped", "Replies a client did not read", metrics.replies_dropped),
        ("hisparse_replies_unroutable", "Replies to clients gone", metrics.replies_unroutable),
        ("hisparse_malformed_messages", "Frames that are no message", metrics.malformed),
        ("hisparse_unexpected_errors", "Bugs met and survived", metrics.unexpected_errors),
        ("hisparse_control_received_bytes", "Bytes of requests", metrics.received_bytes),
        ("hisparse_control_sent_bytes", "Bytes of replies", metrics.sent_bytes),
        ("hisparse_adoptions", "Pools taken over from an earlier daemon", metrics.adoptions),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _service_metrics(metrics: ServerMetrics, snapshot: dict[str, Any]) -> Iterator[Metric]:
    """The daemon as a whole: version, phase, threads, sessions."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    known = {name: str(snapshot.get(name, "")) for name in ("instance", "version")}
    yield InfoMetricFamily("hisparse_build", "Instance and version", value=known)
    phase = GaugeMetricFamily("hisparse_phase", "1 for what the service does now", labels=["phase"])
    for name in ("starting", "ready", "draining", "stopped"):
        phase.add_metric([name], snapshot.get("phase") == name)
    yield phase
    yield GaugeMetricFamily(
        "hisparse_uptime_seconds", "Since the daemon started", value=snapshot.get("uptime_s", 0.0)
    )
    yield GaugeMetricFamily(
        "hisparse_loop_longest_turn_seconds", "Longest turn of the control loop in a minute",
        value=metrics.longest_turn_s,
    )  # fmt: skip
    alive = GaugeMetricFamily("hisparse_helper_alive", "Whether a thread runs", labels=["helper"])
    restarts = CounterMetricFamily(
        "hisparse_helper_restarts", "Threads that died and were started again", labels=["helper"]
    )
    for name, helper in snapshot.get("helpers", {}).items():
        if helper.get("permanent", True):
            alive.add_metric([name], helper["alive"])
        restarts.add_metric([name], helper["restarts"])
    yield alive
    yield restarts
    sessions = GaugeMetricFamily("hisparse_sessions", "Sessions now", labels=["kind", "state"])
    for kind, by_state in snapshot.get("sessions", {}).get("by_state", {}).items():
        for state, count in by_state.items():
            sessions.add_metric([kind, state], count)
    yield sessions
    yield GaugeMetricFamily(
        "hisparse_sessions_quarantined", "Ended sessions whose process may still write",
        value=snapshot.get("sessions", {}).get("quarantined", 0),
    )  # fmt: skip
    adopted = GaugeMetricFamily(
        "hisparse_adopted_blocks", "Blocks found in an earlier daemon's pool", labels=["outcome"]
    )
    for outcome, count in sorted(metrics.adopted_blocks.copy().items()):
        adopted.add_metric([outcome], count)
    yield adopted


_NAMESPACE_COUNTERS: Final = {
    "lookups": ("hisparse_lookups", "Lookup requests"),
    "keys_asked": ("hisparse_lookup_keys", "Keys asked for"),
    "tokens_asked": ("hisparse_lookup_tokens", "Tokens of the keys asked for"),
    "keys_hit": ("hisparse_lookup_hit_blocks", "Keys found published"),
    "tokens_hit": ("hisparse_lookup_hit_tokens", "Tokens of the keys found"),
    "reserves": ("hisparse_allocations", "Reserve requests that were granted"),
    "blocks_reserved": ("hisparse_blocks_reserved", "Blocks given out to write"),
    "publishes": ("hisparse_blocks_published", "Blocks published"),
    "duplicates_merged": ("hisparse_blocks_merged", "Blocks whose key was published before"),
    "evictions": ("hisparse_blocks_evicted", "Blocks evicted"),
    "freed": ("hisparse_blocks_freed", "Published blocks given up by their reader"),
    "abandoned": ("hisparse_blocks_abandoned", "Unpublished blocks that returned"),
    "withdrawn": (
        "hisparse_blocks_withdrawn",
        "Published blocks taken away from everybody: damaged, or below such a block",
    ),
    "leases_granted": ("hisparse_leases_granted", "Leases granted"),
    "leases_expired": ("hisparse_leases_expired", "Leases whose deadline passed"),
}


def _pool_metrics(snapshot: dict[str, Any]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    pool = snapshot.get("pool") or {}
    pool_bytes = GaugeMetricFamily("hisparse_pool_bytes", "Bytes of the pool", labels=["use"])
    for use in ("directory", "tables", "payload", "free"):
        if f"{use}_bytes" in pool:
            pool_bytes.add_metric([use], pool[f"{use}_bytes"])
    yield pool_bytes
    yield GaugeMetricFamily(
        "hisparse_population_ratio", "Share of the pool that is populated",
        value=snapshot.get("progress", 0.0),
    )  # fmt: skip


def _namespace_metrics(namespaces: list[dict[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily("hisparse_namespace", "Names of the namespaces", labels=["namespace"])
    blocks = GaugeMetricFamily("hisparse_blocks", "Blocks now", labels=["namespace", "state"])
    block_bytes = GaugeMetricFamily(
        "hisparse_block_bytes", "Bytes of the pool by the state of their block",
        labels=["namespace", "state"],
    )  # fmt: skip
    held = {
        name: GaugeMetricFamily(f"hisparse_{name}", text, labels=["namespace"])
        for name, text in (
            ("leases", "Leases held"), ("pins", "Blocks pinned, each lease's counted"),
            ("writer_leases", "Groups whose writer is known"),
            ("registrations_waiting", "Sessions that register or wait to"),
        )
    }  # fmt: skip
    refusals = CounterMetricFamily(
        "hisparse_refusals", "Requests refused, by reason", labels=["namespace", "code"]
    )
    checks = CounterMetricFamily(
        "hisparse_block_checks", "Blocks that readers reported as damaged, by what was found",
        labels=["namespace", "verdict"],
    )  # fmt: skip
    for namespace in namespaces:
        key = str(namespace["namespace"])
        name, layout = str(namespace.get("name", "")), str(namespace.get("layout", ""))
        info.add_metric([key], {"name": name[:MAX_NAME_CHARACTERS], "layout": layout})
        stride = namespace.get("block_stride_bytes", 0)
        for state, count in namespace["blocks"].items():
            if state != "capacity":
                blocks.add_metric([key, state], count)
                block_bytes.add_metric([key, state], count * stride)
        usage = namespace.get("usage", {})
        held["leases"].add_metric([key], usage.get("leases", 0))
        held["pins"].add_metric([key], usage.get("pins", 0))
        held["writer_leases"].add_metric([key], len(namespace.get("writers", ())))
        held["registrations_waiting"].add_metric([key], namespace.get("registering", 0))
        for code, count in sorted(namespace["statistics"].get("refusals", {}).items()):
            refusals.add_metric([key, code], count)
        for verdict, count in sorted(namespace["statistics"].get("checks", {}).items()):
            checks.add_metric([key, verdict], count)
    yield from (info, blocks, block_bytes, *held.values(), refusals, checks)
    for field_name, (name, text) in _NAMESPACE_COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=["namespace"])
        for namespace in namespaces:
            value = namespace["statistics"].get(field_name)
            if field_name == "tokens_asked":
                asked = namespace["statistics"].get("keys_asked", 0)
                value = asked * namespace.get("block_size", 0)
            if value is not None:
                family.add_metric([str(namespace["namespace"])], value)
        yield family


def _mirror_metrics(backings: list[BackingView]) -> Iterator[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    label = ["namespace"]
    latency = HistogramMetricFamily(
        "hisparse_mirror_latency_seconds", "From a mirror's enqueueing to its completion",
        labels=label,
    )  # fmt: skip
    lag = GaugeMetricFamily(
        "hisparse_publication_lag_seconds",
        "Age of the oldest mirror that is enqueued and not published", labels=label,
    )  # fmt: skip
    counters = {
        (which, unit): CounterMetricFamily(
            f"hisparse_mirrors_{which}_{unit}", f"Mirrors {which}, in {unit}", labels=label
        )
        for which in ("enqueued", "completed")
        for unit in ("blocks", "bytes")
    }
    now_ns = time.monotonic_ns()
    for view in backings:
        key, clock = [str(view.namespace_id)], view.clock
        latency.add_metric(key, clock.latency.cumulative(), clock.latency.sum_ns / 1e9)
        lag.add_metric(key, view.publication_lag_s(now_ns))
        for (which, unit), family in counters.items():
            total = clock.enqueued_total if which == "enqueued" else clock.completed_total
            family.add_metric(key, total * (view.block_stride_bytes if unit == "bytes" else 1))
    yield latency
    yield lag
    yield from counters.values()


def _cuda_metrics(cuda: dict[str, Any]) -> Iterator[Metric]:
    """Of the child that registers the pool; without one, its state is off."""
    from prometheus_client.core import GaugeMetricFamily

    state = GaugeMetricFamily(
        "hisparse_cuda_child_state", "1 for the state of the registering child", labels=["state"]
    )
    for name in ("off", "starting", "registering", "ready", "failed", "closed"):
        state.add_metric([name], cuda.get("state", "off") == name)
    yield state
    total = cuda.get("total_bytes", 0)
    ratio = cuda.get("registered_bytes", 0) / total if total else 0.0
    for name, text, value in (
        ("hisparse_cuda_registered_bytes", "Bytes of the pool that the child registered",
         cuda.get("registered_bytes", 0)),
        ("hisparse_cuda_registration_ratio", "Share of the pool that is registered", ratio),
        ("hisparse_cuda_child_gpu_bytes", "GPU memory of the child's context",
         cuda.get("gpu_bytes", 0)),
        ("hisparse_cuda_error", "Number of the CUDA error that it failed with; 0 without",
         cuda.get("cuda_error", 0)),
    ):  # fmt: skip
        yield GaugeMetricFamily(name, text, value=value)


def _worker_metrics(workers: WorkerTotals) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    for name, total in workers.totals.items():
        yield CounterMetricFamily(
            f"hisparse_worker_{name}", "Of all workers, as they report it", value=total
        )
