"""Speed of the control plane, as ratios to a bare pyzmq echo of the same bytes in the same run.

The echo is what any daemon in Python pays: a ROUTER that answers a frame of the request's length
with a frame of the reply's length, and a DEALER that waits for it. Both sides run the same number
of client processes, in turns, so that a busy machine slows both.

    python -m benchmarks.control [--quick] [--save FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import zmq

from benchmarks.report import Figure, emit, print_table, save
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.limits import GIB, MIB
from worker_client import connect
from worker_client.client import Client, Completed, CudaUse, Namespace

SPAWN = multiprocessing.get_context("spawn")
BLOCK_SIZE = 64
# One layer of one 16 B row a token: the control plane does not care how long rows are.
GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=BLOCK_SIZE, groups=[LayerGroup(1, 16)]
)
NUM_BLOCKS = 20_000
SHORT_TOKENS, LONG_TOKENS = 16_000, 1_000_000


# --- the two servers ----------------------------------------------------------------------------


def echo_server(endpoint: str, reply_bytes: int) -> None:
    """Answer every frame with `reply_bytes` bytes."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        reply = os.urandom(reply_bytes)
        while True:
            peer, _ = socket.recv_multipart()
            socket.send_multipart((peer, reply))


@contextmanager
def echo(directory: str, reply_bytes: int) -> Iterator[str]:
    """A running echo server; its endpoint."""
    endpoint = f"ipc://{directory}/echo-{reply_bytes}.sock"
    process = SPAWN.Process(target=echo_server, args=(endpoint, reply_bytes), daemon=True)
    process.start()
    try:
        yield endpoint
    finally:
        process.kill()
        process.join()


@contextmanager
def daemon(directory: str, *, pool_bytes: int, name: str = "bench") -> Iterator[tuple[str, int]]:
    """A running daemon with a pool of its own; its runtime directory and pid."""
    runtime = pathlib.Path(directory, name)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "hisparse_service", "serve", "--instance",
            f"bench-{os.getpid()}-{name}", "--runtime-dir", str(runtime), "--pool-bytes",
            str(pool_bytes),
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_ready(str(runtime))
        yield str(runtime), process.pid
    finally:
        process.terminate()
        process.wait(60)


def wait_ready(runtime: str, *, deadline_s: float = 120.0) -> None:
    """Until the daemon gives out a backing."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            with connect(runtime, client_name="bench-wait") as client:
                # Its own namespace: who attaches first decides how many blocks there are.
                client.open_namespace(
                    model="bench-ready", kv_dtype="uint8", geometry=GEOMETRY
                ).attach(2, cuda=CudaUse.OFF)
                return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def open_bench(client: Client) -> Namespace:
    """The benchmark's namespace, attached lazily."""
    return client.open_namespace(model="bench", kv_dtype="uint8", geometry=GEOMETRY)


# --- what one client process does ----------------------------------------------------------------


def percentiles_us(samples_s: list[float]) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    return (
        statistics.median(samples_s) * 1e6,
        float(np.percentile(samples_s, 99)) * 1e6,
    )


def time_calls(
    call: Callable[[], Any], *, count: int, after: Callable[[], Any] | None = None
) -> list[float]:
    """Seconds of each of `count` calls; `after` runs untimed behind each."""
    for _ in range(max(count // 10, 3)):
        call()
        if after:
            after()
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
        if after:
            after()
    return samples


def echo_client(endpoint: str, request_bytes: int, count: int, start: Any, out: Any) -> None:
    """Round trips to the echo server."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        request = os.urandom(request_bytes)

        def call() -> None:
            socket.send(request)
            socket.recv()

        call()
        start.wait()
        out.put(time_calls(call, count=count))


def service_client(runtime: str, kind: str, count: int, start: Any, out: Any) -> None:
    """Calls of one kind to the daemon."""
    with connect(runtime, client_name=f"bench-{kind}") as client:
        call, after = make_call(client, kind)
        call()
        if after:
            after()
        start.wait()
        out.put(time_calls(call, count=count, after=after))


def make_call(client: Client, kind: str) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """The timed call and the untimed one that restores the state behind it."""
    if kind == "ping":
        return client.ping, None
    namespace = open_bench(client)
    namespace.attach(NUM_BLOCKS, cuda=CudaUse.OFF)
    if kind.startswith("lookup"):
        chain = namespace.key_chain()
        chain.extend(np.arange(int(kind.split(".")[1])))
        keys = chain.keys()
        held: list[Any] = []
        return (
            lambda: held.append(namespace.lookup(keys)),
            lambda: namespace.release(held.pop()),
        )
    return make_publish_call(namespace, kind)


def make_publish_call(
    namespace: Namespace, kind: str
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """`publish`: reserve, then mirror-completed, each a message; `step`: both in one message."""
    state: dict[str, Any] = {"lease": namespace.reserve(1)}

    def completed() -> Completed:
        lease = state["lease"]
        return Completed(
            lease=lease,
            blocks=lease.reserved_blocks[-1:],
            generations=lease.reserved_generations[-1:],
            keys=os.urandom(16),
        )

    def publish() -> None:
        state["lease"] = namespace.reserve(1)
        namespace.mirror(completed=[completed()])

    def step() -> None:
        namespace.mirror(completed=[completed()], reserve=[(state["lease"], 1)])

    def forget() -> None:
        namespace.release(state["lease"])

    def restart() -> None:
        if len(state["lease"].blocks) >= 64:
            namespace.release(state["lease"])
            state["lease"] = namespace.reserve(1)

    if kind == "publish":
        namespace.release(state["lease"])
        return publish, forget
    return step, restart


def run_clients(
    target: Callable[..., None], arguments: tuple[Any, ...], num_clients: int
) -> list[float]:
    """All samples of `num_clients` processes that start together."""
    start, out = SPAWN.Barrier(num_clients), SPAWN.Queue()
    processes = [
        SPAWN.Process(target=target, args=(*arguments, start, out), daemon=True)
        for _ in range(num_clients)
    ]
    for process in processes:
        process.start()
    samples = [out.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return [sample for part in samples for sample in part]


def fill(runtime: str) -> Client:
    """Publish the blocks of LONG_TOKENS tokens and keep them pinned by the returned client."""
    client = connect(runtime, client_name="bench-fill")
    namespace = open_bench(client)
    namespace.attach(NUM_BLOCKS, cuda=CudaUse.OFF)
    chain = namespace.key_chain()
    chain.extend(np.arange(LONG_TOKENS))
    lease = namespace.reserve(chain.num_blocks)
    namespace.mirror(
        completed=[
            Completed(
                lease=lease,
                blocks=lease.reserved_blocks,
                generations=lease.reserved_generations,
                keys=chain.keys(),
            )
        ]
    )
    return client


# --- the figures --------------------------------------------------------------------------------

# kind, bytes of the request, bytes of the reply, required ratio and milliseconds, calls
CALLS = [
    ("ping", 16, 24, 1.3, None, 4_000),
    ("lookup.16000", 250 * 16 + 30, 250 * 8 + 40, 3.0, None, 2_000),
    ("lookup.1000000", 15_625 * 16 + 30, 15_625 * 8 + 40, 6.0, 12.0, 150),
    ("publish", 80, 60, 2.5, None, 2_000),
    ("step", 90, 80, 2.5, None, 2_000),
]  # fmt: skip


def measure_calls(directory: str, runtime: str, *, scale: float) -> list[Figure]:
    """Each kind of call against the echo of its bytes, with 1 and 8 client processes."""
    figures = []
    for kind, request_bytes, reply_bytes, ratio, limit_ms, count in CALLS:
        count = max(int(count * scale), 20)
        with echo(directory, reply_bytes) as endpoint:
            for num_clients in (1, 8):
                each = max(count // num_clients, 20)
                ours, theirs = [], []
                # In turns, so that a slow minute of the machine slows both sides.
                for _ in range(3):
                    theirs += run_clients(echo_client, (endpoint, request_bytes, each), num_clients)
                    ours += run_clients(service_client, (runtime, kind, each), num_clients)
                p50, p99 = percentiles_us(ours)
                reference, reference_p99 = percentiles_us(theirs)
                figures.append(
                    emit(
                        Figure(
                            name=f"control.{kind}.{num_clients}",
                            value=p50 / 1e3,
                            unit="ms",
                            reference="bare pyzmq echo of the same bytes",
                            reference_value=reference / 1e3,
                            required_ratio=ratio if num_clients == 1 else None,
                            required_value=limit_ms if num_clients == 1 else None,
                            parameters={
                                "clients": num_clients, "calls": len(ours), "p99_ms": p99 / 1e3,
                                "reference_p99_ms": reference_p99 / 1e3,
                                "request_bytes": request_bytes, "reply_bytes": reply_bytes,
                            },
                        )
                    )
                )  # fmt: skip
    return figures


def looping_client(runtime: str, stop: Any, ready: Any, counted: Any) -> None:
    """Look up LONG_TOKENS tokens back to back until told to stop."""
    with connect(runtime, client_name="bench-loop") as client:
        call, after = make_call(client, f"lookup.{LONG_TOKENS}")
        ready.wait()
        count = 0
        while not stop.is_set():
            call()
            assert after is not None
            after()
            count += 1
        counted.put(count)


def measure_ping_beside_lookups(runtime: str, *, scale: float) -> list[Figure]:
    """Ping of one client while others look up a million tokens each, back to back."""
    figures = []
    lookups_per_s = {}
    for num_clients in (1, 4, 8):
        stop, ready, counted = SPAWN.Event(), SPAWN.Barrier(num_clients + 1), SPAWN.Queue()
        processes = [
            SPAWN.Process(target=looping_client, args=(runtime, stop, ready, counted), daemon=True)
            for _ in range(num_clients)
        ]
        for process in processes:
            process.start()
        with connect(runtime, client_name="bench-ping") as client:
            ready.wait(120)
            start = time.perf_counter()
            pings = []
            while time.perf_counter() - start < max(6 * scale, 1.5):
                before = time.perf_counter()
                client.ping()
                pings.append(time.perf_counter() - before)
                time.sleep(0.001)
            stop.set()
            total = sum(counted.get(timeout=60) for _ in processes)
            lookups_per_s[num_clients] = total / (time.perf_counter() - start)
        for process in processes:
            process.join()
        p50, p99 = percentiles_us(pings)
        if num_clients == 4:
            figures.append(
                emit(
                    Figure(
                        name="control.ping_beside_lookups.4", value=p50 / 1e3, unit="ms",
                        required_value=5.0,
                        parameters={"clients": 4, "p99_ms": p99 / 1e3, "pings": len(pings)},
                    )
                )
            )  # fmt: skip
    figures.append(
        emit(
            Figure(
                name="control.lookups_per_second.8",
                value=lookups_per_s[8],
                unit="1/s",
                reference="1 client",
                reference_value=lookups_per_s[1],
                parameters={"tokens": LONG_TOKENS},
            )
        )
    )
    return figures


def measure_idle(directory: str, *, scale: float) -> list[Figure]:
    """Share of a core and memory beyond the pool, with 16 sessions that only heartbeat."""
    with daemon(directory, pool_bytes=64 * MIB, name="idle") as (runtime, pid):
        clients = [connect(runtime, client_name=f"bench-{i}") for i in range(16)]
        process = psutil.Process(pid)
        try:
            time.sleep(1)
            before, start = process.cpu_times(), time.monotonic()
            time.sleep(max(20 * scale, 3))
            after, seconds = process.cpu_times(), time.monotonic() - start
            used = (after.user + after.system) - (before.user + before.system)
            memory = process.memory_info()
            beyond = memory.rss - memory.shared + _file_pages(pid)
        finally:
            for client in clients:
                client.close()
    return [
        emit(
            Figure(
                name="control.idle_share", value=100 * used / seconds, unit="% of a core",
                required_value=0.5, parameters={"sessions": 16, "seconds": seconds},
            )
        ),
        emit(
            Figure(
                name="control.idle_memory", value=beyond / MIB, unit="MiB", required_value=80,
                parameters={"sessions": 16},
            )
        ),
    ]  # fmt: skip


def _file_pages(pid: int) -> int:
    """Bytes of mapped files (code), which `shared` counts together with the pool's."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    return 0


def measure_start(*, pool_bytes: int) -> list[Figure]:
    """Start to ready with a pool that is really reserved, against populating that much alone."""
    from benchmarks.bench_populate import start_to_ready

    ours, theirs = start_to_ready(pool_bytes, repeats=5)
    return [
        emit(
            Figure(
                name="control.start_to_ready", value=statistics.median(ours), unit="s",
                reference="populating as much shared memory with all cores",
                reference_value=statistics.median(theirs),
                # Of a smaller pool the start of a Python process is too large a part.
                required_ratio=1.2 if pool_bytes >= 8 * GIB else None,
                parameters={
                    "pool_bytes": pool_bytes, "seconds_all": [round(each, 3) for each in ours],
                    "reference_seconds_all": [round(each, 3) for each in theirs],
                },
            )
        )
    ]  # fmt: skip


def main() -> int:
    """Measure all, print the table; exit code 1 where a required figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls, 1 GiB pool")
    parser.add_argument("--save", type=pathlib.Path, help="write the figures as a JSON list")
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    with tempfile.TemporaryDirectory(prefix="hisparse-bench-") as directory:
        with daemon(directory, pool_bytes=128 * MIB) as (runtime, _), fill(runtime):
            figures = measure_calls(directory, runtime, scale=scale)
            figures += measure_ping_beside_lookups(runtime, scale=scale)
        figures += measure_idle(directory, scale=scale)
        figures += measure_start(pool_bytes=1 * GIB if options.quick else 8 * GIB)
    print_table(figures, "Control plane")
    if options.save:
        save(figures, options.save)
    return 1 if any(figure.is_met is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
