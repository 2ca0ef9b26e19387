"""Numbers: the cheap histogram against its definition, and what a scrape shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from hisparse_service.telemetry.metrics import LatencyHistogram, ServerMetrics, registry


@given(st.lists(st.integers(0, 10**11), max_size=50))
def test_a_bucket_counts_what_is_at_most_its_bound(samples_ns: list[int]) -> None:
    histogram = LatencyHistogram()
    for sample in samples_ns:
        histogram.observe_ns(sample)
    for bound, count in histogram.cumulative():
        # Buckets end just below a power of two nanoseconds; at the power itself is the next one.
        assert count == sum(sample / 1e9 < float(bound) for sample in samples_ns)
    assert (histogram.count, histogram.sum_ns) == (len(samples_ns), sum(samples_ns))


def test_quantiles_are_upper_bounds() -> None:
    histogram = LatencyHistogram()
    assert histogram.quantile_s(0.5) == 0.0
    for _ in range(99):
        histogram.observe_ns(20_000)
    histogram.observe_ns(5_000_000)
    assert histogram.quantile_s(0.5) == pytest.approx(32.768e-6)
    assert histogram.quantile_s(1.0) == pytest.approx(8.388608e-3)


def test_a_scrape_shows_requests_errors_blocks_and_pool_bytes() -> None:
    metrics = ServerMetrics()
    metrics.latency_of("Ping").observe_ns(50_000)
    metrics.count_error("StaleBlock")
    metrics.count_death("bye")
    statistics = dict.fromkeys(
        ("lookups", "keys_asked", "keys_hit", "tokens_hit", "blocks_reserved", "publishes",
         "duplicates_merged", "evictions", "freed", "abandoned", "leases_granted",
         "leases_expired"), 3,
    )  # fmt: skip
    metrics.snapshot = {
        "pool": {"directory_bytes": 1, "tables_bytes": 2, "payload_bytes": 3, "free_bytes": 4},
        "sessions": {"by_state": {"workers": {"alive": 2}}},
        "namespaces": [
            {"namespace": 1, "blocks": {"capacity": 9, "free": 4, "pinned": 5},
             "statistics": statistics}
        ],
        "progress": 1.0,
    }  # fmt: skip
    text = generate_latest(registry(metrics)).decode()
    for line in (
        'hisparse_control_latency_seconds_count{request="Ping"} 1.0',
        'hisparse_control_errors_total{code="StaleBlock"} 1.0',
        'hisparse_session_ends_total{cause="bye"} 1.0',
        'hisparse_pool_bytes{use="free"} 4.0',
        'hisparse_blocks{namespace="1",state="pinned"} 5.0',
        'hisparse_blocks_evicted_total{namespace="1"} 3.0',
        'hisparse_sessions{kind="workers",state="alive"} 2.0',
        "hisparse_population_ratio 1.0",
    ):
        assert line in text.splitlines()
    assert "capacity" not in text


def test_a_scrape_before_the_pool_is_there_works() -> None:
    assert b"hisparse_population_ratio 0.0" in generate_latest(registry(ServerMetrics()))
