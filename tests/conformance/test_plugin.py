"""Activation: what changes in vLLM when the plugin loads, and what does not."""

from __future__ import annotations

import logging

import pytest
from conftest import endpoint_of
from engine import expected_tokens
from test_engine import PROMPT

from hisparse_service.contract.errors import ConfigError


def test_vllm_finds_the_plugin_by_its_entry_point(vllm):
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    plugins = load_plugins_by_group(DEFAULT_PLUGINS_GROUP)
    assert plugins["hisparse_service"].__module__.startswith("worker_client.integrations.vllm")


def test_registering_again_changes_nothing(vllm):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.hisparse import runtime

    from worker_client.integrations.vllm import register

    before = runtime.HiSparseHostPool, KVConnectorFactory._registry["HiSparseConnector"]
    register()
    assert (runtime.HiSparseHostPool, KVConnectorFactory._registry["HiSparseConnector"]) == before


def test_without_an_endpoint_every_object_is_vllms_own(make_engine):
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import connector, worker
    from vllm.v1.core.single_type_kv_cache_manager import HiSparseSourceManager
    from vllm.v1.hisparse import runtime
    from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

    engine = make_engine()
    (pool,) = runtime._host_pools.values()
    assert type(pool).__module__ == "vllm.v1.hisparse.runtime"
    assert type(engine.connector) is connector.HiSparseConnector
    assert type(engine.worker.connector.connector_worker) is worker.HiSparseConnectorWorker
    coordinator = engine.connector.connector_scheduler.coordinator
    assert type(coordinator.host_manager) is HiSparseSourceManager
    assert type(coordinator.host_manager.block_pool) is SharedEventQueueBlockPool
    assert type(engine.connector.get_kv_connector_stats()).__name__ == "HiSparseKVConnectorStats"


def test_the_environment_names_the_endpoint_too(daemon, make_engine, monkeypatch):
    monkeypatch.setenv("HISPARSE_SERVICE_ENDPOINT", str(daemon.directory))
    engine = make_engine()
    assert type(engine.host_pool).__name__ == "ServiceBlockPool"


@pytest.mark.parametrize("service", [False, True])
def test_below_a_multi_connector_an_engine_works_as_alone(daemon, make_engine, service):
    endpoint = endpoint_of(daemon) if service else ""
    engine = make_engine(endpoint, below_multi=True, device_blocks=150)
    assert type(engine.scheduler.connector).__name__ == "MultiConnector"
    assert (type(engine.host_pool).__name__ == "ServiceBlockPool") is service
    assert engine.generate("a", PROMPT, max_tokens=20) == expected_tokens(PROMPT, 20)
    assert all(set(data) == {"HiSparseConnector"} for data in engine.statistics)
    engine.shutdown()
    again = make_engine(endpoint, below_multi=True, device_blocks=150)
    again.generate("b", PROMPT)
    assert again.cached_tokens["b"] == (96 if service else 0)


def test_one_line_says_which_pool_is_used_and_whether_it_was_there(daemon, make_engine, caplog):
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.hisparse_service"):
        make_engine(endpoint_of(daemon)).shutdown()
        make_engine(endpoint_of(daemon))
    lines = [r.getMessage() for r in caplog.records if "host pool of" in r.getMessage()]
    assert len(lines) == 2
    assert "populated" in lines[0]
    assert "adopted" in lines[1]
    assert all(daemon.instance in line and endpoint_of(daemon) in line for line in lines)


def test_an_unknown_version_is_refused_only_where_an_endpoint_is_set(vllm, monkeypatch):
    import vllm as package
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.hisparse import runtime

    from worker_client.integrations.vllm import register

    before = runtime.HiSparseHostPool
    create = KVConnectorFactory.__dict__["create_connector"]
    monkeypatch.setattr(package, "__version__", "0.99.1")
    try:
        register()
        assert runtime.HiSparseHostPool is before
        config = type("Config", (), {})()
        config.kv_transfer_config = type("Transfer", (), {})()
        config.kv_transfer_config.kv_connector = "HiSparseConnector"
        config.kv_transfer_config.kv_connector_extra_config = {"hisparse_service.endpoint": "/x"}
        with pytest.raises(ConfigError, match=r"0\.33\.0, this is 0\.99\.1"):
            KVConnectorFactory.create_connector(config, None, None)
        monkeypatch.setenv("HISPARSE_SERVICE_ENDPOINT", "/x")
        with pytest.raises(ConfigError, match=r"0\.99\.1"):
            register()
    finally:
        KVConnectorFactory.create_connector = create


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("fp8", [True, False])
def test_our_kernels_give_attention_the_same_rows(daemon, make_engine, fp8, group):
    """The harness compares every selected row of both with the tokens'."""
    answers = []
    for kernels in ("vllm", "hisparse_service"):
        engine = make_engine(
            endpoint_of(daemon), fp8=fp8, index_group_size=group,
            device_blocks=60 if group == 4 else 120,
            instance=f"k{kernels}", extra={"hisparse_service.kernels": kernels},
        )  # fmt: skip
        for i in range(4):
            engine.add(f"r{i}", [i, *PROMPT, *range(i * 9)], max_tokens=12)
        engine.run()
        handle = engine.worker.handle("layers.0")
        used = "GroupKernels" in repr(handle.runtime._resolve_residency)
        assert used == (kernels == "hisparse_service")
        assert engine.worker.selected > 300
        group_state = handle.runtime.index_group
        assert int(group_state.swap_stats[1]) > 0
        answers.append(engine.outputs)
        engine.shutdown()
    assert answers[0] == answers[1]


def test_the_doctor_finds_a_healthy_installation(daemon, vllm):
    from worker_client.integrations.vllm import doctor

    findings = doctor.check_vllm(endpoint=str(daemon.directory), environment={})
    assert doctor.is_healthy(findings), findings
    assert {f.verdict for f in findings} == {doctor.Verdict.GOOD}
    sick = doctor.check_vllm(endpoint="/nowhere", environment={"VLLM_PLUGINS": "other"})
    bad = {f.check for f in sick if f.verdict is doctor.Verdict.BAD}
    assert bad == {"VLLM_PLUGINS", "endpoint"}
    assert all(f.remedy for f in sick if f.verdict is doctor.Verdict.BAD)
