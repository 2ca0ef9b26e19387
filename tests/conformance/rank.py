"""Programs of conformance's other processes, started by test_processes.py.

rank.py pair SPEC PORT PROMPT   rank 0 and the scheduler of an engine of two ranks
rank.py rank SPEC PORT          rank 1 of it: takes scheduler outputs on stdin, pickled
rank.py pool RANK SPEC PORT     one of two ranks, as far as its host pool
rank.py doomed SPEC PROMPT      an engine that stops in the middle of a step and waits for SIGKILL
rank.py read SPEC KEYS          no vLLM: reads the rows of published blocks through the service
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
from typing import Any


def say(value: object) -> None:
    sys.stdout.buffer.write(pickle.dumps(value))
    sys.stdout.buffer.flush()


def run_rank(spec_json: str, port: str) -> None:
    import engine
    import stand_ins

    from worker_client.integrations.vllm import register

    stand_ins.install()
    register()
    spec = engine.EngineSpec(**json.loads(spec_json))
    engine.init_ranks(1, 2, int(port))
    worker = engine.Worker(spec)
    say("ready")
    while True:
        output = pickle.load(sys.stdin.buffer)  # noqa: S301  the test's own pipe
        if output is None:
            worker.shutdown()
            return
        if output == "identity":
            say(worker.handle("layers.0").runtime.shared_host_region.pool.identity)
            continue
        say(worker.step(output))


def run_pair(spec_json: str, port: str, prompt: str) -> None:
    """Rank 0 with the scheduler; starts rank 1, serves a request, restarts both, serves another."""
    import engine
    import stand_ins
    from test_processes import Peer

    from worker_client import connect
    from worker_client.integrations.vllm import register

    stand_ins.install()
    register()
    spec = engine.EngineSpec(**json.loads(spec_json))
    tokens = json.loads(prompt)
    other = Peer("rank", spec_json, port)
    try:
        engine.init_ranks(0, 2, int(port))
        one = engine.Engine(spec, peers=[other])
        answer = {"tokens": one.generate("a", tokens, max_tokens=8)}
        with connect(spec.endpoint, client_name="status") as client:
            answer["sessions"] = sum("vllm" in s["name"] for s in sessions(client))
            answer["ranks"] = sorted(s["rank"] for s in sessions(client) if "vllm" in s["name"])
        mine = one.worker.handle("layers.0").runtime.shared_host_region.pool.identity
        other.send("identity")
        answer["same_pool"] = other.recv() == mine
        answer["again"] = one.generate("b", [*tokens, 1])
        answer["cached"] = one.cached_tokens["b"]
        one.shutdown()
        other.process.wait(60)
        say(answer)
    finally:
        other.close()


def run_pool(rank: str, spec_json: str, port: str) -> None:
    """Says what `ServiceHostPool.allocate` raised, or an empty string."""
    import engine
    import stand_ins
    from vllm.v1.hisparse import runtime

    from hisparse_service.contract.errors import HiSparseError
    from worker_client.integrations.vllm import register

    stand_ins.install()
    register()
    spec = engine.EngineSpec(**json.loads(spec_json))
    engine.init_ranks(int(rank), 2, int(port))
    config = engine.make_config(spec)
    cache_config = engine.make_cache_config(spec, config)
    pool = runtime.HiSparseHostPool(config, cache_config)
    try:
        pool.allocate(pool.plan.source_bytes)
    except HiSparseError as error:
        say(str(error))
    else:
        say("")
        pool.shared_region.cleanup()


def sessions(client: Any) -> list[dict[str, Any]]:
    from hisparse_service.contract.messages import ListReply, Sessions

    return client.session.request(Sessions, ListReply).rows


def run_doomed(spec_json: str, prompt: str) -> None:
    import engine
    import stand_ins

    from worker_client.integrations.vllm import register

    stand_ins.install()
    register()
    engine.init_ranks(0, 1, engine.free_port())
    one = engine.Engine(engine.EngineSpec(**json.loads(spec_json)))
    one.generate("done", json.loads(prompt))
    one.add("running", [7, *json.loads(prompt)], max_tokens=30)
    one.step()
    one.step()
    output = one.scheduler.schedule()
    real = one.worker._check_context

    def stop_here(layer: str, *arguments: object) -> None:
        if layer == "layers.1":
            say(one.connector.service.host.num_reserved)
            threading.Event().wait()
        real(layer, *arguments)

    one.worker._check_context = stop_here
    one.worker.step(output)


def run_read(spec_json: str, hashes_json: str) -> None:
    """Prints, as JSON: [[row as hex for each row] for each layer] for each block found."""
    from hisparse_service.contract.geometry import decode_geometry
    from worker_client import connect

    assert "vllm" not in sys.modules
    spec = json.loads(spec_json)
    geometry = decode_geometry(bytes.fromhex(spec["geometry"]))
    with connect(spec["endpoint"], client_name="reader") as client:
        namespace = client.open_namespace(
            model=spec["model"], kv_dtype=spec["kv_dtype"], geometry=geometry
        )
        pool = namespace.attach(spec["num_blocks"])
        chain = namespace.key_chain(salt=spec["salt"].encode())
        chain.extend_hashes(bytes.fromhex(h) for h in json.loads(hashes_json))
        lease = namespace.lookup(chain)
        found = []
        with lease.read_guard():
            for block in lease.blocks.tolist():
                layers = []
                for layer in range(geometry.num_layers):
                    view = pool.layer_view(layer)
                    layers.append([bytes(row.tolist()).hex() for row in view[block]])
                found.append(layers)
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    programs = {
        "rank": run_rank, "pair": run_pair, "pool": run_pool, "doomed": run_doomed,
        "read": run_read,
    }  # fmt: skip
    programs[sys.argv[1]](*sys.argv[2:])
