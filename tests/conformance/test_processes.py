"""Several processes: another reader, two ranks, an engine killed in a step."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine as engine_module
import model
import pytest
from conftest import endpoint_of
from engine import EngineSpec, expected_tokens
from real_daemon import running_daemon, wait_until
from test_engine import PROMPT, counts

HERE = Path(__file__).parent


class Peer:
    """A program of rank.py behind a pipe."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "rank.py"), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump(value, self.process.stdin)
        self.process.stdin.flush()

    def recv(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)  # noqa: S301  our own child

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def as_json(spec: EngineSpec) -> str:
    return json.dumps(dataclasses.asdict(spec))


def test_another_process_reads_every_row_that_vllm_mirrored(daemon, make_engine):
    from vllm.v1.core import kv_cache_utils

    from hisparse_service.contract.geometry import encode_geometry

    engine = make_engine(endpoint_of(daemon), index_group_size=2)
    engine.add("a", PROMPT)
    request = engine.scheduler.requests["a"]
    engine.run()
    service = engine.connector.service
    namespace = engine.worker.handle("layers.0").runtime.shared_host_region.namespace
    from worker_client.integrations.vllm.connector import hash_salt
    from worker_client.integrations.vllm.identity import model_identity, row_format

    assert kv_cache_utils.NONE_HASH
    question = {
        "endpoint": endpoint_of(daemon),
        "geometry": encode_geometry(namespace.geometry).hex(),
        "model": model_identity(engine.config, service.settings),
        "kv_dtype": row_format(engine.worker.cache_config, service.plan),
        "num_blocks": service.plan.num_blocks,
        "salt": hash_salt(engine.config, engine.connector.connector_scheduler.coordinator).decode(),
    }
    hashes = json.dumps([bytes(h).hex() for h in request.block_hashes])
    answer = subprocess.run(
        [sys.executable, str(HERE / "rank.py"), "read", json.dumps(question), hashes],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    blocks = json.loads(answer.stdout)
    assert len(blocks) == 6
    digests = model.prefix_digests(PROMPT)
    size = engine.spec.block_size
    for block, layers in enumerate(blocks):
        for layer, name in enumerate(service.plan.source_layers):
            for offset, found in enumerate(layers[layer]):
                row = model.row_bytes(name, digests[block * size + offset], 656)
                assert bytes.fromhex(found) == row.tobytes(), (block, name, offset)
        first = len(service.plan.source_layers)
        for layer, name in enumerate(service.plan.index_layers):
            page = bytes.fromhex("".join(layers[first + layer]))
            for offset in range(size):
                row = model.row_bytes(name, digests[block * size + offset], 132)
                assert page[offset * 132 : (offset + 1) * 132] == row.tobytes(), (block, name)


@pytest.mark.timeout(300)
def test_two_ranks_map_one_backing_and_serve_one_engine(daemon, tmp_path):
    """In a process of its own: vLLM's groups of ranks are made once a process."""
    port = engine_module.free_port()
    spec = EngineSpec(
        str(tmp_path / "model"), endpoint=endpoint_of(daemon), world_size=2, instance="tp2",
        index_group_size=2,
    )  # fmt: skip
    first = Peer("pair", as_json(spec), str(port), json.dumps(PROMPT))
    try:
        answer = first.recv()
    finally:
        first.close()
    assert answer["tokens"] == expected_tokens(PROMPT, 8)
    assert answer["again"] == expected_tokens([*PROMPT, 1], 4)
    assert answer["cached"] == 96
    assert answer["same_pool"]
    assert answer["sessions"] == 3
    assert answer["ranks"] == [0, 1, 2]


@pytest.mark.timeout(300)
def test_ranks_that_talk_to_two_daemons_are_refused(daemon, tmp_path):
    """Rank 1 would read memory that rank 0 does not write."""
    port = str(engine_module.free_port())
    with running_daemon(pool_bytes="96MiB") as other:
        ranks = []
        for rank, endpoint in enumerate((endpoint_of(daemon), endpoint_of(other))):
            spec = EngineSpec(
                str(tmp_path / f"model{rank}"), endpoint=endpoint, world_size=2, instance="split"
            )
            ranks.append(Peer("pool", str(rank), as_json(spec), port))
        try:
            assert ranks[0].recv() == ""
            assert "attached another pool" in ranks[1].recv()
        finally:
            for rank in ranks:
                rank.close()


@pytest.mark.timeout(300)
def test_i9_an_engine_killed_in_a_step_leaves_its_published_blocks_and_nothing_else(
    daemon, make_engine, tmp_path
):
    """And another engine of the same pool does not notice."""
    other = make_engine(endpoint_of(daemon))
    spec = EngineSpec(str(tmp_path / "model"), endpoint=endpoint_of(daemon), instance="doomed")
    doomed = Peer("doomed", as_json(spec), json.dumps(PROMPT))
    try:
        assert doomed.recv() > 0
        other.add("d", [3, *PROMPT], max_tokens=30)
        for _ in range(5):
            other.step()
        held = other.connector.service.host
        assert counts(daemon)["blocks"]["reserved"] > held.num_reserved > 0
        os.kill(doomed.process.pid, signal.SIGKILL)
        doomed.process.wait()
        other.step()
        wait_until(
            lambda: counts(daemon)["blocks"]["reserved"] == held.num_reserved, "blocks return"
        )
    finally:
        doomed.close()
    other.run()
    assert other.outputs["d"] == expected_tokens([3, *PROMPT], 30)
    assert other.generate("b", PROMPT) == expected_tokens(PROMPT, 4)
    assert other.cached_tokens["b"] == 96
    tokens = [7, *PROMPT]
    assert other.generate("c", tokens) == expected_tokens(tokens, 4)
    other.shutdown()
    wait_until(lambda: counts(daemon)["blocks"]["reserved"] == 0, "all blocks return")
    now = counts(daemon)["blocks"]
    assert now["pinned"] == 0
    assert now["free"] + now["published"] == now["capacity"]
