"""Speed of the control plane, as ratios to a bare pyzmq echo of the same bytes in the same run.

The echo is what any daemon in Python pays: a ROUTER that answers a frame of the request's length
with a frame of the reply's length over ipc://, and a DEALER that waits for it. Each client process
speaks to both, in turns of TURN_CALLS calls, so that whatever the machine does slows both; new
processes are started ROUNDS times, because where the scheduler places them decides by a factor of
two how long a round trip takes.

Reserving, completing and publishing one block is one message in the product (`step`: the block that
completed and the one that is reserved next travel together, once a decode step) and is measured
against one echo. As two messages (`publish`: reserve, then completed) it needs two round trips by
its nature and is measured against two echoes; its ratio to one is told too.

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
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import zmq

from benchmarks.report import Figure, emit, print_table, save
from hisparse_service.contract import messages as m
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.limits import BLOCK_KEY_BYTES, GIB, MIB
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


Turn = tuple[list[float], list[float]]
"""Seconds of each of the daemon's calls, and of the echo's, one behind the other."""


def paired_client(
    endpoint: str, runtime: str, kind: str, call_count: int, start: Any, out: Any
) -> None:
    """Calls of one kind to the daemon, and as many to the echo server, in turns.

    Puts one (seconds of the daemon's calls, seconds of the echo's) a turn. All clients take the
    same turn.
    """
    spec = CALLS[kind]
    request = os.urandom(spec.request_bytes)
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
        connect(runtime, client_name=f"bench-{kind}") as client,
    ):
        socket.connect(endpoint)

        def echo_call() -> None:
            for _ in range(spec.num_round_trips):
                socket.send(request)
                socket.recv()

        call, after = make_call(client, kind)
        turns: list[Turn] = []
        for _ in range(max(2, call_count // TURN_CALLS)):
            count = min(TURN_CALLS, call_count)
            start.wait(300)
            theirs = time_calls(echo_call, count=count)
            start.wait(300)
            turns.append((time_calls(call, count=count, after=after), theirs))
        out.put(turns)


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


def run_clients(arguments: tuple[Any, ...], num_clients: int) -> list[Turn]:
    """All turns of `num_clients` processes side by side."""
    start, out = SPAWN.Barrier(num_clients), SPAWN.Queue()
    processes = [
        SPAWN.Process(target=paired_client, args=(*arguments, start, out), daemon=True)
        for _ in range(num_clients)
    ]
    for process in processes:
        process.start()
    parts = [out.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return [turn for part in parts for turn in part]


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

ABOUT_PUBLISHING = """\
Reserve, mirror-completed and publish of one block: the product does it in one message (step), which
is measured against one echo. As two messages (publish) it is measured against two echoes."""
TURN_CALLS = 200
ROUNDS = 5
"""Times that new client processes are started; 3 with --quick."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One kind of call, and the echo that it is measured against."""

    request_bytes: int
    reply_bytes: int
    required_ratio: float
    required_ms: float | None = None
    count: int
    """Of all client processes and rounds together."""
    num_round_trips: int = 1
    reference: str = "bare pyzmq echo of the same bytes"


def make_calls() -> dict[str, Call]:
    """Lengths are those of real frames, of a daemon that has run for a while."""
    request, epoch, deadline_ns, lease = 5_000, 2**63, 10**15, 5_000
    handle, key, space = bytes(4), bytes(BLOCK_KEY_BYTES), bytes(8)

    def frames(ask: m.Request, reply: m.Reply) -> dict[str, Any]:
        return {"request_bytes": len(m.encode(ask)), "reply_bytes": len(m.encode(reply))}

    def lookup(keys: int) -> dict[str, Any]:
        return frames(
            m.Lookup(request, 1, 0, space, key * keys),
            m.BlocksReply(request, epoch, lease, deadline_ns, handle * keys, handle * keys),
        )

    def mirror(reserve: list[m.ReserveItem], reserved: list[m.ReservedItem]) -> dict[str, Any]:
        done = m.CompletedItem(lease, 0, 0, handle, handle, key)
        return frames(
            m.MirrorBatch(request, 1, space, [], [done], reserve),
            m.MirrorReply(request, epoch, handle, handle, deadline_ns, reserved, NUM_BLOCKS),
        )

    return {
        "ping": Call(
            **frames(m.Ping(request), m.Pong(request, epoch, deadline_ns, [])),
            required_ratio=1.3, count=8_000,
        ),
        "lookup.16000": Call(**lookup(250), required_ratio=3.0, count=4_000),
        "lookup.1000000": Call(
            **lookup(15_625), required_ratio=6.0, required_ms=12.0, count=500
        ),
        "step": Call(
            **mirror([m.ReserveItem(lease, 1)], [m.ReservedItem(lease, handle, handle)]),
            required_ratio=2.5, count=6_000,
            reference="one bare pyzmq echo of the same bytes",
        ),
        "publish": Call(
            **mirror([], []), required_ratio=2.5, count=4_000, num_round_trips=2,
            reference="two bare pyzmq echoes of the second message's bytes",
        ),
    }  # fmt: skip


CALLS = make_calls()


def measure_calls(directory: str, runtime: str, *, is_quick: bool) -> list[Figure]:
    """Each kind of call against the echo of its bytes, with 1 and 8 client processes."""
    figures = []
    rounds = 3 if is_quick else ROUNDS
    for kind, spec in CALLS.items():
        with echo(directory, spec.reply_bytes) as endpoint:
            for num_clients in (1, 8):
                count = spec.count // (5 if is_quick else 1) // rounds // num_clients
                arguments = (endpoint, runtime, kind, max(count, 20))
                turns = [
                    turn for _ in range(rounds) for turn in run_clients(arguments, num_clients)
                ]
                figures.append(emit(call_figure(kind, spec, num_clients, turns)))
    return figures


def call_figure(kind: str, spec: Call, num_clients: int, turns: list[Turn]) -> Figure:
    """p50 of one kind of call, beside its echo's.

    Where round trips take one of two times, as the processes lie, the two medians may fall on
    different ones: `median_ratio_of_turns` compares within each turn alone.
    """
    ours = [sample for turn, _ in turns for sample in turn]
    theirs = [sample for _, turn in turns for sample in turn]
    of_turns = [statistics.median(turn) / statistics.median(echoes) for turn, echoes in turns]
    p50, p99 = percentiles_us(ours)
    reference, reference_p99 = percentiles_us(theirs)
    is_required = num_clients == 1
    return Figure(
        name=f"control.{kind}.{num_clients}",
        value=p50 / 1e3,
        unit="ms",
        reference=spec.reference,
        reference_value=reference / 1e3,
        required_ratio=spec.required_ratio if is_required else None,
        required_value=spec.required_ms if is_required else None,
        parameters={
            "clients": num_clients, "calls": len(ours), "p99_ms": p99 / 1e3,
            "reference_p99_ms": reference_p99 / 1e3, "request_bytes": spec.request_bytes,
            "reply_bytes": spec.reply_bytes, "round_trips": spec.num_round_trips,
            "ratio_to_one_echo": p50 / reference * spec.num_round_trips,
            "median_ratio_of_turns": statistics.median(of_turns),
        },
    )  # fmt: skip


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
            time.sleep(2)  # the first heartbeats come sooner
            before_s, start = cpu_s(pid), time.monotonic()
            time.sleep(max(30 * scale, 6))
            used, seconds = cpu_s(pid) - before_s, time.monotonic() - start
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


def cpu_s(pid: int) -> float:
    """Processor seconds that a process used, to the nanosecond; /proc counts in 10 ms."""
    return time.clock_gettime(((~pid) << 3) | 2)  # CPUCLOCK_SCHED of all its threads


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
            figures = measure_calls(directory, runtime, is_quick=options.quick)
            figures += measure_ping_beside_lookups(runtime, scale=scale)
        figures += measure_idle(directory, scale=scale)
        figures += measure_start(pool_bytes=1 * GIB if options.quick else 8 * GIB)
    print_table(figures, "Control plane")
    print(ABOUT_PUBLISHING)
    if options.save:
        save(figures, options.save)
    return 1 if any(figure.is_met is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
