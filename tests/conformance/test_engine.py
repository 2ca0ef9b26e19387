"""Engines of vLLM's own code over the service, and the same over vLLM's own pool."""

from __future__ import annotations

import random

import engine as engine_module
import pytest
from conftest import endpoint_of
from engine import expected_tokens
from stand_ins import EVENTS

from hisparse_service.contract.errors import ConfigError, HiSparseError
from hisparse_service.contract.segment import BlockState

PROMPT = [(i * 37 + 5) % 1000 for i in range(100)]


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(length)]


@pytest.fixture(params=["stock", "service"])
def endpoint(request) -> str:
    """Without and with the service: both must behave the same."""
    if request.param == "stock":
        return ""
    return endpoint_of(request.getfixturevalue("daemon"))


def status(daemon) -> dict:
    from worker_client import connect

    with connect(endpoint_of(daemon), client_name="status") as client:
        return client.status()


def counts(daemon) -> dict:
    (namespace,) = status(daemon)["namespaces"]
    return namespace


# --- the same with and without the service ----------------------------------------------------


def test_every_row_that_attention_reads_is_its_tokens(endpoint, make_engine):
    engine = make_engine(endpoint, index_group_size=2)
    assert engine.generate("a", PROMPT, max_tokens=20) == expected_tokens(PROMPT, 20)
    assert engine.worker.rows_checked > 100
    assert engine.worker.selected > 500


@pytest.mark.parametrize("fp8", [True, False])
def test_many_requests_of_all_lengths_under_a_small_device_pool(endpoint, make_engine, fp8):
    engine = make_engine(endpoint, fp8=fp8, device_blocks=150, index_group_size=2)
    prompts = {f"r{i}": prompt(i % 5, 20 + 31 * i % 150) for i in range(9)}
    for request_id, tokens in prompts.items():
        engine.add(request_id, tokens, max_tokens=12)
    engine.run()
    for request_id, tokens in prompts.items():
        assert engine.outputs[request_id] == expected_tokens(tokens, 12), request_id
    assert engine.host_pool.get_usage() == 0


@pytest.mark.parametrize("eager", [True, False])
def test_rows_of_a_drafter_and_of_late_mirrors_are_durable_with_their_page(
    endpoint, make_engine, eager
):
    """A drafter writes after the forward; without eager mirrors pages are copied when spilled."""
    engine = make_engine(
        endpoint, num_drafts=2, eager_host_mirror=eager, device_blocks=170, index_group_size=2
    )
    prompts = {f"r{i}": prompt(i % 4, 30 + 29 * i) for i in range(6)}
    for request_id, tokens in prompts.items():
        engine.add(request_id, tokens, max_tokens=25)
    engine.run()
    for request_id, tokens in prompts.items():
        assert engine.outputs[request_id] == expected_tokens(tokens, 25), request_id
    engine.generate("again", prompts["r5"])
    assert engine.cached_tokens["again"] >= 160
    if endpoint:
        engine.shutdown()
        engine = make_engine(
            endpoint, num_drafts=2, eager_host_mirror=eager, device_blocks=170, index_group_size=2
        )
        engine.generate("restarted", prompts["r5"])
        assert engine.cached_tokens["restarted"] >= 160


def test_with_a_step_in_flight_rows_and_blocks_are_right_too(endpoint, make_engine):
    engine = make_engine(
        endpoint, async_scheduling=True, device_blocks=150, index_group_size=2, host_blocks=48
    )
    for round_number in range(2):
        prompts = {f"r{round_number}{i}": prompt(i % 4, 20 + 27 * i) for i in range(7)}
        for request_id, tokens in prompts.items():
            engine.add(request_id, tokens, max_tokens=18)
        engine.run()
        for request_id, tokens in prompts.items():
            assert engine.outputs[request_id][:18] == expected_tokens(tokens, 18), request_id
    assert engine.host_pool.get_usage() == 0


def test_a_prefix_of_the_same_engine_is_a_hit(endpoint, make_engine):
    engine = make_engine(endpoint)
    engine.generate("a", PROMPT)
    assert engine.generate("b", [*PROMPT, 1, 2, 3]) == expected_tokens([*PROMPT, 1, 2, 3], 4)
    assert engine.cached_tokens == {"a": 0, "b": 96}


def test_requests_are_preempted_and_resumed_when_the_host_pool_is_full(endpoint, make_engine):
    engine = make_engine(endpoint, host_blocks=22, max_model_len=256, device_blocks=300)
    prompts = {f"r{i}": prompt(i, 90) for i in range(4)}
    for request_id, tokens in prompts.items():
        engine.add(request_id, tokens, max_tokens=40)
    engine.run()
    for request_id, tokens in prompts.items():
        assert engine.outputs[request_id] == expected_tokens(tokens, 40)


def test_an_aborted_request_gives_its_blocks_back(endpoint, make_engine):
    from vllm.v1.request import RequestStatus

    engine = make_engine(endpoint)
    engine.add("a", prompt(3, 150), max_tokens=30)
    for _ in range(4):
        engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.host_pool.get_usage() == 0
    assert engine.generate("b", prompt(3, 150)) == expected_tokens(prompt(3, 150), 4)


def test_the_profiling_allocation_is_reused_and_its_size_cannot_change(endpoint, make_engine):
    from vllm.v1.hisparse import runtime
    from vllm.v1.hisparse.binding import init_hisparse_kv_cache, release_hisparse_profiling_cache

    engine = make_engine(endpoint)
    worker = engine.worker
    (pool,) = runtime._host_pools.values()
    address = pool.backing.data_ptr()
    release_hisparse_profiling_cache(worker.context)
    sizes = [group.kv_cache_spec.block_size for group in worker.cache_config.kv_cache_groups]
    caches = init_hisparse_kv_cache(
        worker.cache_config, engine_module.DEVICE, sizes, worker.config, worker.context,
        worker.tables,
    )  # fmt: skip
    (again,) = runtime._host_pools.values()
    assert again is pool
    assert caches["layers.0"].data_ptr() == address
    assert pool.registered.data_ptr() == pool.backing.data_ptr() == address
    with pytest.raises((AssertionError, ConfigError)):
        pool.allocate(pool.backing.numel() + 4096)


def test_a_binding_that_fails_releases_the_pool_and_raises_its_own_error(
    endpoint, make_engine, monkeypatch
):
    from vllm.v1.hisparse import binding, runtime

    def broken(**_):
        raise RuntimeError("injected")

    monkeypatch.setattr(binding, "bind_hisparse_kv_caches", broken)
    with pytest.raises(RuntimeError, match="injected"):
        make_engine(endpoint)
    assert not runtime._host_pools
    monkeypatch.undo()
    assert make_engine(endpoint).generate("a", PROMPT) == expected_tokens(PROMPT, 4)


def test_events_tell_of_the_same_blocks_of_the_host(endpoint, make_engine, monkeypatch):
    engine = make_engine(endpoint, kv_events=True)
    events = []
    monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", events.append)
    engine.add("a", PROMPT)
    hashes = engine.scheduler.requests["a"].block_hashes
    engine.run()
    stored = [
        block_hash
        for batch in events
        for event in batch.events
        if type(event).__name__ == "BlockStored" and event.medium == "CPU"
        for block_hash in event.block_hashes
    ]
    assert len(stored) == len(set(stored)) == len(PROMPT) // 16 == len(hashes)


def test_a_shut_down_engine_leaves_no_pool_behind(endpoint, make_engine):
    from vllm.v1.hisparse import runtime

    engine = make_engine(endpoint)
    engine.generate("a", PROMPT)
    engine.shutdown()
    assert not runtime._host_pools


# --- with the service -------------------------------------------------------------------------


def test_a_prefix_served_before_a_restart_is_a_hit_after_it(daemon, make_engine):
    first = make_engine(endpoint_of(daemon))
    first.generate("a", PROMPT)
    first.shutdown()
    second = make_engine(endpoint_of(daemon))
    assert second.generate("b", [*PROMPT, 9]) == expected_tokens([*PROMPT, 9], 4)
    assert second.cached_tokens["b"] == 96
    assert second.connector.service.restored_pages == 6


def test_stock_vllm_forgets_at_a_restart(make_engine):
    first = make_engine()
    first.generate("a", PROMPT)
    first.shutdown()
    second = make_engine()
    second.generate("b", [*PROMPT, 9])
    assert second.cached_tokens["b"] == 0


def test_without_index_keys_a_restarted_engine_computes_again(daemon, make_engine):
    extra = {"hisparse_service.index_keys": "drop"}
    first = make_engine(endpoint_of(daemon), extra=extra)
    first.generate("a", PROMPT)
    first.shutdown()
    second = make_engine(endpoint_of(daemon), extra=extra)
    assert second.generate("b", PROMPT) == expected_tokens(PROMPT, 4)
    assert second.cached_tokens["b"] == 0


def test_two_engines_share_one_pool_and_each_others_prefixes(daemon, make_engine):
    first = make_engine(endpoint_of(daemon))
    second = make_engine(endpoint_of(daemon))
    first.generate("a", PROMPT)
    assert second.generate("b", PROMPT) == expected_tokens(PROMPT, 4)
    assert second.cached_tokens["b"] == 96
    other = prompt(7, 90)
    second.generate("c", other)
    assert first.generate("d", other) == expected_tokens(other, 4)
    assert first.cached_tokens["d"] == 80
    pools = [
        one.worker.handle("layers.0").runtime.shared_host_region.pool for one in (first, second)
    ]
    assert pools[0].identity == pools[1].identity
    assert len(status(daemon)["namespaces"]) == 1


def test_i1_two_engines_that_compute_one_prefix_at_once_end_with_one_copy(daemon, make_engine):
    engines = [make_engine(endpoint_of(daemon)) for _ in range(2)]
    for one in engines:
        one.add("a", PROMPT, max_tokens=30)
    for _ in range(12):
        for one in engines:
            one.step()
    table = engines[0].worker.handle("layers.0").runtime.shared_host_region.pool.table
    for one in engines:
        # Requests still read their own copies: nobody else may be given these blocks.
        own = [block.block_id for block in one.host_pool.blocks if block.ref_cnt]
        assert own
        assert (table["state"][own] != BlockState.FREE).all()
    for one in engines:
        one.run()
        assert one.outputs["a"] == expected_tokens(PROMPT, 30)
    published = [one.connector.service.host.totals for one in engines]
    assert sum(t.blocks_published for t in published) == 8
    assert sum(t.blocks_duplicate for t in published) == 8
    now = counts(daemon)
    assert now["blocks"]["published"] + now["blocks"]["pinned"] == 8


def test_two_engines_under_pressure_evict_and_stay_right(daemon, make_engine):
    engines = [
        make_engine(endpoint_of(daemon), host_blocks=40, device_blocks=300) for _ in range(2)
    ]
    expected = []
    for round_number in range(6):
        for index, one in enumerate(engines):
            request_id = f"{round_number}.{index}"
            tokens = prompt((round_number * 2 + index) % 7, 100)
            one.add(request_id, tokens, max_tokens=10)
            expected.append((one, request_id, tokens))
        for _ in range(60):
            for one in engines:
                if one.scheduler.has_requests():
                    one.step()
        for one in engines:
            one.run()
    for one, request_id, tokens in expected:
        assert one.outputs[request_id] == expected_tokens(tokens, 10), request_id


def test_i2_a_page_whose_copy_is_under_way_is_not_published(daemon, make_engine):
    engine = make_engine(endpoint_of(daemon))
    engine.add("a", PROMPT, max_tokens=30)
    with EVENTS.hold():
        for _ in range(8):
            engine.step()
        assert engine.connector.service.host.totals.blocks_published == 0
        assert counts(daemon)["blocks"]["published"] + counts(daemon)["blocks"]["pinned"] == 0
    engine.run()
    assert engine.connector.service.host.totals.blocks_published > 0


def test_a_reset_prefix_cache_is_found_by_nobody(daemon, make_engine):
    engine = make_engine(endpoint_of(daemon))
    engine.generate("a", PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.generate("b", PROMPT)
    assert engine.cached_tokens["b"] == 0
    other = make_engine(endpoint_of(daemon))
    other.generate("c", PROMPT)
    assert other.cached_tokens["c"] == 0


def test_blocks_whose_rows_are_wrong_are_found_by_nobody_and_not_written_while_published(
    daemon, make_engine
):
    """As after a load error: vLLM evicts blocks from the cache that a request still uses."""
    engine = make_engine(endpoint_of(daemon))
    engine.add("a", PROMPT, max_tokens=30)
    for _ in range(12):
        engine.step()
    used = {block.block_id for block in engine.host_pool.blocks if block.ref_cnt}
    assert used & engine.connector.service.host.pinned
    engine.host_pool.evict_blocks(used)
    engine.run()
    table = engine.worker.handle("layers.0").runtime.shared_host_region.pool.table
    free = [block.block_id for block in engine.host_pool._free]
    assert (table["state"][free] != BlockState.PUBLISHED).all()
    other = make_engine(endpoint_of(daemon))
    assert other.generate("b", PROMPT) == expected_tokens(PROMPT, 4)
    assert other.cached_tokens["b"] == 0


def test_blocks_that_became_wrong_while_the_service_was_away_are_found_by_nobody(
    daemon, make_engine
):
    from real_daemon import wait_until

    engine = make_engine(endpoint_of(daemon))
    engine.add("a", PROMPT, max_tokens=30)
    for _ in range(12):
        engine.step()
    daemon.kill()
    wait_until(lambda: not engine.connector.service.is_available, "away")
    engine.host_pool.evict_blocks({b.block_id for b in engine.host_pool.blocks if b.ref_cnt})
    engine.run()
    daemon.start()
    wait_until(lambda: engine.connector.service.is_available, "back")
    wait_until(lambda: (engine.step(), not engine.connector.service.host.pinned)[1], "forgotten")
    other = make_engine(endpoint_of(daemon))
    assert other.generate("b", PROMPT) == expected_tokens(PROMPT, 4)
    assert other.cached_tokens["b"] == 0


def test_another_hash_function_or_model_shares_nothing(daemon, make_engine, tmp_path):
    make_engine(endpoint_of(daemon)).generate("a", PROMPT)
    other = make_engine(endpoint_of(daemon), hash_algorithm="sha256")
    other.generate("b", PROMPT)
    assert other.cached_tokens["b"] == 0
    tenant = make_engine(endpoint_of(daemon), extra={"hisparse_service.tenant": "other"})
    tenant.generate("c", PROMPT)
    assert tenant.cached_tokens["c"] == 0


def test_another_size_of_the_same_pool_is_refused_with_the_size_that_fits(daemon, make_engine):
    from vllm.v1.hisparse import runtime

    first = make_engine(endpoint_of(daemon), host_blocks=64)
    first.generate("a", PROMPT)
    for blocks in (40, 80):
        with pytest.raises(ConfigError, match="host_pool_gib") as caught:
            make_engine(endpoint_of(daemon), host_blocks=blocks)
        assert (
            caught.value.details["num_blocks"] == first.worker.cache_config.hisparse_host_num_blocks
        )
    assert len(runtime._host_pools) == 1


def test_prefix_caching_switched_off_publishes_nothing(daemon, make_engine):
    engine = make_engine(endpoint_of(daemon), enable_caching=False)
    assert engine.generate("a", PROMPT) == expected_tokens(PROMPT, 4)
    assert engine.generate("b", PROMPT) == expected_tokens(PROMPT, 4)
    assert engine.connector.service.host.totals.blocks_published == 0


def test_what_an_engine_does_not_need_goes_back_for_others(daemon, make_engine):
    extra = {"hisparse_service.spare_blocks": 2}
    engine = make_engine(endpoint_of(daemon), extra=extra, enable_caching=False)
    for i in range(4):
        engine.add(f"a{i}", prompt(i, 180))
    engine.run()
    held = engine.connector.service.host.num_reserved
    for i in range(3):
        engine.generate(f"b{i}", prompt(20 + i, 40))
    assert engine.connector.service.host.num_reserved < held
    assert engine.connector.service.host.num_reserved <= 8


def test_a_failure_in_the_plugins_part_of_the_binding_releases_the_pool(
    daemon, make_engine, monkeypatch
):
    """VLLM cleans up behind its own part only."""
    from vllm.v1.hisparse import runtime

    from worker_client.integrations.vllm import worker

    def broken(*_):
        raise ConfigError("injected")

    monkeypatch.setattr(worker, "IndexPages", broken)
    with pytest.raises(ConfigError, match="injected"):
        make_engine(endpoint_of(daemon))
    assert not runtime._host_pools
    assert status(daemon)["sessions"]["workers"] == 1  # who asks
    monkeypatch.undo()
    assert make_engine(endpoint_of(daemon)).generate("a", PROMPT) == expected_tokens(PROMPT, 4)


# --- without the daemon for a while -----------------------------------------------------------


def test_a_daemon_restarted_between_two_steps_disturbs_nothing(daemon, make_engine):
    engine = make_engine(endpoint_of(daemon))
    engine.add("a", PROMPT, max_tokens=30)
    for _ in range(6):
        engine.step()
    daemon.kill()
    for _ in range(3):
        engine.step()
    daemon.start()
    from real_daemon import wait_until

    wait_until(lambda: engine.connector.service.is_available, "attached again")
    host = engine.connector.service.host
    wait_until(
        lambda: counts(daemon)["blocks"]["reserved"] == host.num_reserved > 0, "blocks are back"
    )
    engine.run()
    assert host.totals.blocks_unpublished == 0
    assert engine.outputs["a"] == expected_tokens(PROMPT, 30)
    engine.shutdown()
    again = make_engine(endpoint_of(daemon))
    again.generate("b", PROMPT)
    assert again.cached_tokens["b"] == 96


def test_another_pool_in_the_place_of_the_old_one_ends_the_engine_and_the_next_one_works(
    daemon, make_engine
):
    """As after `purge`: the engine's mapping is nobody's any more."""
    from real_daemon import SHM, wait_until

    engine = make_engine(endpoint_of(daemon))
    engine.add("a", PROMPT, max_tokens=100)
    for _ in range(6):
        engine.step()
    daemon.kill()
    for name in daemon.segments():
        (SHM / name).unlink()
    daemon.start()
    errors = []

    def step_until_it_ends() -> bool:
        try:
            engine.step()
        except HiSparseError as error:
            errors.append(str(error))
        return bool(errors)

    wait_until(step_until_it_ends, "the engine ends")
    assert "the engine's lease was revoked" in errors[0]
    assert "Restart the engine" in errors[0]
    engine.shutdown()
    again = make_engine(endpoint_of(daemon))
    assert again.generate("b", PROMPT) == expected_tokens(PROMPT, 4)


def test_while_the_service_is_away_running_requests_go_on_and_new_ones_wait(daemon, make_engine):
    from real_daemon import wait_until

    extra = {"hisparse_service.spare_blocks": 8}
    engine = make_engine(endpoint_of(daemon), extra=extra)
    engine.add("a", PROMPT, max_tokens=8)
    engine.step()
    daemon.kill()
    wait_until(lambda: not engine.connector.service.is_available, "away")
    engine.add("b", prompt(5, 220))
    for _ in range(30):
        engine.step()
    assert engine.outputs["a"] == expected_tokens(PROMPT, 8)
    assert engine.outputs["b"] == []
    daemon.start()
    wait_until(lambda: engine.connector.service.is_available, "back")
    engine.run()
    assert engine.outputs["b"] == expected_tokens(prompt(5, 220), 4)


def test_with_when_away_fail_the_engine_ends_for_failover(daemon, make_engine):
    from real_daemon import wait_until

    from hisparse_service.contract.errors import ServiceUnavailable

    extra = {
        "hisparse_service.spare_blocks": 1, "hisparse_service.when_away": "fail",
        "hisparse_service.away_limit_s": 0.2,
    }  # fmt: skip
    engine = make_engine(endpoint_of(daemon), extra=extra)
    daemon.kill()
    wait_until(lambda: not engine.connector.service.is_available, "away")
    engine.add("a", PROMPT)

    def step_until_it_gives_up() -> bool:
        try:
            engine.step()
        except ServiceUnavailable:
            return True
        return False

    wait_until(step_until_it_gives_up, "failed over")
    daemon.start()


def test_an_engine_without_a_daemon_does_not_start_and_says_why(make_engine, tmp_path):
    from vllm.v1.hisparse import runtime

    with pytest.raises(HiSparseError, match=r"daemon|socket|answer"):
        make_engine(str(tmp_path))
    assert not runtime._host_pools


# --- metrics ----------------------------------------------------------------------------------


def test_the_pools_numbers_are_in_vllms_registry_under_its_naming(daemon, make_engine):
    from prometheus_client import REGISTRY
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    engine = make_engine(endpoint_of(daemon))
    metrics = KVConnectorProm(engine.config, ["engine"], {0: ["0"]})
    engine.generate("a", PROMPT)
    for data in engine.statistics:
        metrics.observe(data)
    engine.statistics.clear()
    engine.generate("b", [*PROMPT, 4])
    connector = KVConnectorFactory.get_connector_class_by_name("HiSparseConnector")
    total = connector.build_kv_connector_stats()
    for data in engine.statistics:
        total = total.aggregate(connector.build_kv_connector_stats(data))
    metrics.observe(total.data)

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:hisparse_{name}", {"engine": "0"})

    assert value("service_available") == 1
    assert value("service_published_blocks_total") == 6
    assert value("service_prefix_blocks_found_total") == 6
    assert value("host_cache_usage_perc") == 0
