"""What an engine read, by tier: at the daemon, and in vLLM's own statistics beside it."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import endpoint_of
from engine import Engine, expected_tokens
from real_daemon import wait_until
from stand_ins import EVENTS
from test_engine import PROMPT

from hisparse_service.contract.messages import ListReply, Sessions

TIERS = ("rows_read_resident", "rows_read_hot", "rows_missed", "bytes_gathered")


def reported(daemon) -> dict[str, float]:
    """Sums over the workers' heartbeats, as the daemon exports them."""
    from worker_client import connect

    with connect(endpoint_of(daemon), client_name="figures") as client:
        rows = client.session.request(Sessions, ListReply).rows
    return {name: sum(row["counters"].get(name, 0) for row in rows) for name in TIERS}


def worker_of(engine: Engine) -> Any:
    return engine.worker.connector.connector_worker


def serve(engine: Engine, *, max_tokens: int = 20) -> None:
    """More than the device holds, so that rows are read from all tiers."""
    prompts = {f"r{i}": [i, *PROMPT, *range(i * 9)] for i in range(4)}
    for request_id, tokens in prompts.items():
        engine.add(request_id, tokens, max_tokens=max_tokens)
    engine.run()
    for request_id, tokens in prompts.items():
        assert engine.outputs[request_id] == expected_tokens(tokens, max_tokens)


def finish_sampling(engine: Engine) -> None:
    """As if the next second had come."""
    reporter = worker_of(engine).swap_reporter
    assert not reporter.report(), "the first call starts a sample"
    assert reporter.report()


@pytest.mark.parametrize("kernels", ["vllm", "hisparse_service"])
def test_rows_by_tier_reach_the_daemon_with_the_heartbeats(daemon, make_engine, kernels):
    extra = {"hisparse_service.kernels": kernels}
    engine = make_engine(endpoint_of(daemon), index_group_size=2, device_blocks=120, extra=extra)
    serve(engine)
    finish_sampling(engine)
    groups = [runtime.index_group for runtime in worker_of(engine).leader_runtimes]
    hits, misses = (sum(int(group.swap_stats[i]) for group in groups) for i in (0, 1))
    assert misses > 0
    wait_until(lambda: reported(daemon)["rows_missed"] >= misses, "figures")
    found = reported(daemon)
    assert found["rows_read_hot"] == hits
    assert found["bytes_gathered"] == misses * 2 * 656
    if kernels == "vllm":
        assert found["rows_missed"] == misses
    else:
        # Every lane of every selection was read from one tier; followers take their leader's.
        lanes = engine.worker.selected // 2
        assert sum(found[name] for name in TIERS[:3]) == lanes
        assert found["rows_read_resident"] > 0


def test_what_vllm_takes_from_its_counters_stays_counted(daemon, make_engine, monkeypatch):
    """VLLM zeroes the counters when it samples them: no row may be lost, none counted twice."""
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import worker

    monkeypatch.setattr(worker, "_METRICS_INTERVAL", 7)
    engine = make_engine(endpoint_of(daemon), index_group_size=2, device_blocks=120)
    connector = worker_of(engine)
    connector.swap_reporter._clock = iter(range(1, 10_000)).__next__  # each step is a second
    serve(engine, max_tokens=40)
    finish_sampling(engine)
    taken = [data.get("cache_misses", []) for data in engine.statistics]
    assert sum(map(len, taken)) > 4
    left = sum(int(r.index_group.swap_stats[1]) for r in connector.leader_runtimes)
    total = sum(map(sum, taken)) + left
    counters = connector.shared_host_region.client.counters
    assert counters["rows_missed"] == total
    assert counters["bytes_gathered"] == total * 2 * 656


def test_vllms_statistics_of_workers_and_of_the_service_add_up(daemon, make_engine, monkeypatch):
    """VLLM's scheduler adds its own to a worker's, whose keys must be known to both."""
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import worker

    monkeypatch.setattr(worker, "_METRICS_INTERVAL", 5)
    engine = make_engine(endpoint_of(daemon), device_blocks=120)
    serve(engine)
    both = [data for data in engine.statistics if data["cache_hits"]]
    assert both
    assert all(data["service_available"] == [1] for data in both)


def test_a_sample_that_is_under_way_is_not_waited_for(daemon, make_engine):
    engine = make_engine(endpoint_of(daemon), device_blocks=120)
    connector = worker_of(engine)
    connector.swap_reporter._clock = lambda: 0.0  # one sample, before there is anything to count
    serve(engine)
    counters = connector.shared_host_region.client.counters
    before = counters["rows_missed"]
    with EVENTS.hold():
        for _ in range(3):
            assert not connector.swap_reporter.report()
        assert counters["rows_missed"] == before
    assert connector.swap_reporter.report()
    assert counters["rows_missed"] > before
