"""Conformance runs in an environment of its own (`make conformance`); elsewhere it is left out."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
sys.path.insert(0, str(HERE.parent / "integration"))


def pytest_configure() -> None:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.pop("HISPARSE_SERVICE_ENDPOINT", None)


@pytest.fixture(scope="session")
def vllm() -> None:
    """VLLM with the stand-ins and the plugin in this process, and a group of one rank."""
    import engine
    import stand_ins

    from worker_client.integrations.vllm import register

    stand_ins.install()
    register()
    engine.init_ranks(0, 1, engine.free_port())


@pytest.fixture(autouse=True)
def patient_scheduler(monkeypatch) -> None:
    """A lookup that a busy machine answers after a second finds nothing: not what is tested."""
    from worker_client.integrations.vllm import host_blocks

    monkeypatch.setattr(host_blocks, "_ANSWER_TIMEOUT_S", 30.0)


@pytest.fixture
def daemon() -> Iterator[object]:
    from real_daemon import running_daemon

    with running_daemon(pool_bytes="96MiB") as running:
        yield running


@pytest.fixture
def make_engine(vllm, tmp_path) -> Iterator[object]:
    """Makes engines; those that a test did not shut down are."""
    import engine

    made: list[engine.Engine] = []

    def make(endpoint: str = "", **values) -> engine.Engine:
        values.setdefault("instance", f"conf{len(made)}")
        # One directory: the weights' identity is part of what engines share.
        spec = engine.EngineSpec(str(tmp_path / "model"), endpoint=endpoint, **values)
        made.append(engine.Engine(spec))
        return made[-1]

    yield make
    for one in made:
        if not one.is_shut_down:
            one.shutdown()


def endpoint_of(daemon) -> str:
    return f"ipc://{daemon.directory}/control.sock"
