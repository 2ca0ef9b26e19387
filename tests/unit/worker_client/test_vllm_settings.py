"""What a user may set for vLLM, and what is said of what he may not. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hisparse_service.contract.errors import ConfigError
from worker_client.integrations.vllm.settings import (
    ENDPOINT_VARIABLE,
    IndexKeys,
    Kernels,
    WhenAway,
    find_settings,
)


def config(extra: dict | None, *, connector: str = "HiSparseConnector"):
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch):
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)


def test_without_an_endpoint_there_are_no_settings():
    assert find_settings(SimpleNamespace(kv_transfer_config=None)) is None
    assert find_settings(config({"host_pool_gib": 1})) is None
    assert find_settings(config(None)) is None


def test_another_connector_is_not_asked(monkeypatch):
    monkeypatch.setenv(ENDPOINT_VARIABLE, "/run")
    assert find_settings(config({"hisparse_service.endpoint": "/x"}, connector="Nixl")) is None


@pytest.mark.parametrize(
    "extra",
    [
        {"hisparse_service.endpoint": "/x", "hisparse_service.kernels": "hisparse_service"},
        {"hisparse_service": {"endpoint": "/x", "kernels": "hisparse_service"}},
    ],
)
def test_keys_may_be_dotted_or_nested(extra):
    found = find_settings(config({"host_pool_gib": 1, **extra}))
    assert (found.endpoint, found.kernels) == ("/x", Kernels.SERVICE)
    assert (found.when_away, found.index_keys) == (WhenAway.WAIT, IndexKeys.KEEP)


def test_the_environment_gives_the_endpoint_and_the_configuration_wins(monkeypatch):
    monkeypatch.setenv(ENDPOINT_VARIABLE, "/from-environment")
    assert find_settings(config({})).endpoint == "/from-environment"
    assert find_settings(config({"hisparse_service.endpoint": "/x"})).endpoint == "/x"


def test_children_of_a_multi_connector_are_looked_through():
    child = {
        "kv_connector": "HiSparseConnector",
        "kv_connector_extra_config": {"hisparse_service.endpoint": "/x"},
    }
    extra = {"connectors": [{"kv_connector": "NixlConnector"}, child]}
    assert find_settings(config(extra, connector="MultiConnector")).endpoint == "/x"
    extra = {"connectors": [{"kv_connector": "NixlConnector"}]}
    assert find_settings(config(extra, connector="MultiConnector")) is None


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"hisparse_service.endpoint": "/x", "hisparse_service.kernel": "vllm"}, "kernel"),
        ({"hisparse_service.endpoint": "/x", "hisparse_service.when_away": "panic"}, "panic"),
        ({"hisparse_service.kernels": "vllm"}, "without an endpoint"),
        ({"hisparse_service": "/x"}, "no mapping"),
    ],
)
def test_what_cannot_be_is_refused_by_name(extra, said):
    with pytest.raises(ConfigError, match=said):
        find_settings(config(extra))


def test_numbers_may_be_text_as_command_lines_write_them():
    extra = {"hisparse_service.endpoint": "/x", "hisparse_service.away_limit_s": "2.5"}
    assert find_settings(config(extra)).away_limit_s == 2.5
