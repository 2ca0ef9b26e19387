"""The HTTP service of a real daemon: what it answers, who may ask, that nothing waits for it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import KEY_SPACE, DaemonProcess, RawClient, keys_of, wait_until
from prometheus_client.parser import text_string_to_metric_families

from hisparse_service.contract import messages as m
from hisparse_service.contract.counters import WORKER_COUNTERS
from hisparse_service.telemetry.http import MAX_CONNECTIONS

MakeDaemon = Callable[..., DaemonProcess]
HELD = str(Path(__file__).parent.parent / "held_daemon.py")
TIMEOUT_S = 20.0


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self.path))


def ask(connection: http.client.HTTPConnection, path: str, **headers: str) -> tuple[int, bytes]:
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    return ask(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S), path, **headers)


def listening(daemon: DaemonProcess) -> list[str]:
    with RawClient(daemon.runtime_dir) as client:
        client.hello(operator=True)
        http_status: dict[str, Any] = client.ask(m.StatusReply, m.Status).status["http"]
    return list(http_status["listening"])


def port_of(daemon: DaemonProcess) -> int:
    (address, *_) = wait_until(lambda: listening(daemon))
    return int(address.rpartition(":")[2])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    return make_daemon(http__listen="127.0.0.1:0").wait_ready()


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """(name, label values in order of their names) to value."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_scrape_shows_the_node(daemon: DaemonProcess, connect: Callable[..., RawClient]) -> None:
    port, client = port_of(daemon), connect()
    namespace = client.open(32)
    client.publish(namespace, keys_of(1, 2))
    client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2, 3))
    got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 2)
    client.ask(
        m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE,
        [m.EnqueuedItem(got.lease_id, got.blocks, got.generations)],
    )  # fmt: skip
    item = m.CompletedItem(got.lease_id, 0, 0, got.blocks[:4], got.generations[:4], keys_of(9))
    client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
    client.send(m.Reserve, namespace, 0, 1_000)
    assert client.receive_error().code == "CapacityError"
    client.ask(m.Pong, m.Ping, [], {"swaps": 0.0})
    client.ask(m.Pong, m.Ping, [], dict.fromkeys(WORKER_COUNTERS, 3.0))
    n = str(namespace)

    def scrape() -> dict[tuple[str, ...], float]:
        return samples(get(port, "/metrics")[1])

    wait_until(lambda: scrape().get(("hisparse_worker_rows_missed_total",)) == 3.0)
    found = wait_until(lambda: (s := scrape()).get(("hisparse_blocks", n, "pinned")) == 3.0 and s)
    stride = 4096.0
    expected = {
        ("hisparse_blocks", n, "reserved"): 1.0,
        ("hisparse_block_bytes", n, "pinned"): 3 * stride,
        ("hisparse_lookup_keys_total", n): 3.0,
        ("hisparse_lookup_hit_blocks_total", n): 2.0,
        ("hisparse_lookup_tokens_total", n): 12.0,
        ("hisparse_lookup_hit_tokens_total", n): 8.0,
        ("hisparse_allocations_total", n): 2.0,
        ("hisparse_blocks_reserved_total", n): 4.0,
        ("hisparse_refusals_total", "CapacityError", n): 1.0,
        ("hisparse_blocks_evicted_total", n): 0.0,
        ("hisparse_mirrors_enqueued_blocks_total", n): 2.0,
        ("hisparse_mirrors_enqueued_bytes_total", n): 2 * stride,
        ("hisparse_mirrors_completed_bytes_total", n): 3 * stride,
        ("hisparse_mirror_latency_seconds_count", n): 1.0,
        ("hisparse_leases", n): 3.0,
        ("hisparse_sessions", "workers", "alive"): 1.0,
        ("hisparse_population_ratio",): 1.0,
        ("hisparse_cuda_child_state", "off"): 1.0,
        ("hisparse_cuda_child_gpu_bytes",): 0.0,
        ("hisparse_phase", "ready"): 1.0,
        ("hisparse_helper_alive", "http"): 1.0,
        ("hisparse_helper_restarts_total", "sampler"): 0.0,
        ("hisparse_adoptions_total",): 0.0,
        **{(f"hisparse_worker_{name}_total",): 3.0 for name in WORKER_COUNTERS},
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found[("hisparse_publication_lag_seconds", n)] > 0  # one block is still being written
    assert found[("hisparse_control_latency_seconds_count", "Lookup")] == 1.0
    uses = ("directory", "tables", "payload", "free")
    assert sum(found[("hisparse_pool_bytes", use)] for use in uses) == 8 * 2**20
    wait_until(lambda: scrape()[("hisparse_loop_lag_seconds_count",)] > 0)
    client.close()
    wait_until(
        lambda: any(key[0] == "hisparse_session_ends_total" for key in scrape()), what="a death"
    )


def test_an_adopted_pool_and_its_blocks_are_counted(make_daemon: MakeDaemon) -> None:
    first = make_daemon().wait_ready()
    with first.client() as client:
        client.publish(client.open(16), keys_of(1, 2, 3))
        first.kill()
    second = make_daemon(
        first.directory, instance=first.instance, http__listen="127.0.0.1:0"
    ).wait_ready()
    found = samples(get(port_of(second), "/metrics")[1])
    assert found[("hisparse_adoptions_total",)] == 1.0
    assert found[("hisparse_adopted_blocks", "kept")] == 3.0


def test_readyz_tells_the_progress_and_then_200(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    hold, port = tmp_path / "hold", free_port()
    hold.touch()
    daemon = make_daemon(
        program=(HELD, "segment.after_truncate", str(hold)), http__listen=f"127.0.0.1:{port}"
    )
    wait_until(lambda: not is_refused(port))
    wait_until(lambda: hold.with_suffix(".reached").exists())
    code, body = get(port, "/readyz")
    assert code == 503
    assert json.loads(body)["phase"] == "starting"
    assert "populated: 0%" in json.loads(body)["reason"]
    assert get(port, "/healthz")[0] == 200
    hold.unlink()
    daemon.wait_ready()
    wait_until(lambda: get(port, "/readyz")[0] == 200)
    with daemon.client(operator=True) as operator, daemon.client():
        operator.ask(m.Done, m.Drain, False)
        wait_until(lambda: get(port, "/readyz")[0] == 503)
        assert "draining" in json.loads(get(port, "/readyz")[1])["reason"]
        assert get(port, "/healthz")[0] == 200


def test_healthz_is_503_while_the_control_loop_hangs(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    hold = tmp_path / "hold"
    daemon = make_daemon(
        program=(HELD, "reply.before_Lookup", str(hold)), http__listen="127.0.0.1:0"
    ).wait_ready()
    port = port_of(daemon)
    with daemon.client() as client:
        namespace = client.open(16)
        assert get(port, "/healthz")[0] == 200
        hold.touch()
        client.send(m.Lookup, namespace, 0, KEY_SPACE, keys_of(1))
        wait_until(lambda: get(port, "/healthz")[0] == 503)
        assert get(port, "/readyz")[0] == 503
        assert get(port, "/metrics")[0] == 200  # the last snapshot is still told
        hold.unlink()
        client.receive()
        wait_until(lambda: get(port, "/healthz")[0] == 200)


@pytest.fixture
def hanging(daemon: DaemonProcess) -> Iterator[Callable[[bytes], socket.socket]]:
    """Makes connections that send something and then neither send nor read."""
    port, made = port_of(daemon), []

    def hang(first: bytes) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(TIMEOUT_S)
        client.connect(("127.0.0.1", port))
        client.sendall(first)
        made.append(client)
        return client

    yield hang
    for client in made:
        client.close()


REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "first",
    [b"", b"GET /metr", b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n", REQUEST * 40],
    ids=["silent", "half a request line", "no body", "asks and never reads"],
)
def test_i7_http_clients_that_hang_stop_neither_pings_nor_probes(
    daemon: DaemonProcess,
    connect: Callable[..., RawClient],
    hanging: Callable[[bytes], socket.socket],
    first: bytes,
) -> None:
    port, client = port_of(daemon), connect()
    for _ in range(3 * MAX_CONNECTIONS):
        hanging(first)
        client.ask(m.Pong, m.Ping)
    # Every place is taken by one that hangs, and the newest still gets in.
    for _ in range(10):
        assert get(port, "/healthz")[0] == 200
        client.ask(m.Pong, m.Ping)
    descriptors = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    assert descriptors < 2 * MAX_CONNECTIONS + 60


def test_too_long_heads_and_bodies_are_refused(
    daemon: DaemonProcess, hanging: Callable[[bytes], socket.socket]
) -> None:
    for first, code in (
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" + b"a" * 9_000, b"413"),
    ):
        assert code in hanging(first).recv(100).split(b"\r\n")[0]
    assert get(port_of(daemon), "/healthz")[0] == 200


def test_a_taken_address_is_no_reason_not_to_serve_workers(make_daemon: MakeDaemon) -> None:
    port = free_port()
    first = make_daemon(http__listen=f"127.0.0.1:{port}").wait_ready()
    wait_until(lambda: listening(first))
    second = make_daemon(http__listen=f"127.0.0.1:{port}").wait_ready()
    with second.client(operator=True) as client:

        def error() -> str:
            return str(client.ask(m.StatusReply, m.Status).status["http"]["error"])

        assert "Address already in use" in wait_until(error)
        assert second.log.count("http_address_unavailable") == 1
        first.terminate()
        wait_until(lambda: not error())
    assert json.loads(get(port, "/status")[1])["instance"] == second.instance


def test_a_unix_socket_serves_the_same_and_is_private(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(http__socket="http.sock").wait_ready()
    path = daemon.runtime_dir / "http.sock"
    wait_until(lambda: listening(daemon))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(UnixConnection(path), "/readyz")[0] == 200
    assert ask(UnixConnection(path), "/metrics")[0] == 200
    daemon.kill()
    assert path.exists()
    again = make_daemon(
        daemon.directory, instance=daemon.instance, http__socket="http.sock"
    ).wait_ready()
    wait_until(lambda: listening(again))
    assert ask(UnixConnection(path), "/healthz")[0] == 200
    again.terminate()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_not_removed(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    daemon = make_daemon(http__socket=str(path)).wait_ready()
    with daemon.client(operator=True) as client:
        wait_until(lambda: client.ask(m.StatusReply, m.Status).status["http"]["error"])
    assert path.read_text() == "data"


def test_beyond_loopback_a_token_is_required_and_may_be_changed(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    refused = make_daemon(http__listen="0.0.0.0:0")
    assert refused.process.wait(TIMEOUT_S) == 3
    assert "http.token_file is not set" in refused.log
    token = tmp_path / "token"
    missing = make_daemon(http__token_file=str(token))
    assert missing.process.wait(TIMEOUT_S) == 3
    token.write_text("first\n")
    daemon = make_daemon(
        http__listen="0.0.0.0:0", http__token_file=str(token), http__socket="http.sock"
    ).wait_ready()  # fmt: skip
    wait_until(lambda: len(listening(daemon)) == 2)
    port = port_of(daemon)
    assert [get(port, path)[0] for path in ("/healthz", "/readyz")] == [200, 200]
    for path in ("/metrics", "/status", "/overview.json", "/", "/x"):
        assert get(port, path)[0] == 401
    assert get(port, "/metrics", Authorization="Bearer first")[0] == 200
    token.write_text("second\n")
    os.utime(token, ns=(1, 1))
    assert get(port, "/metrics", Authorization="Bearer first")[0] == 401
    assert get(port, "/metrics", Authorization="Bearer second")[0] == 200
    assert ask(UnixConnection(daemon.runtime_dir / "http.sock"), "/metrics")[0] == 200
    assert "first" not in daemon.log
    assert "second" not in daemon.log


def test_status_json_is_what_the_command_prints(
    daemon: DaemonProcess, connect: Callable[..., RawClient]
) -> None:
    client, port = connect(operator=True), port_of(daemon)
    printed = client.ask(m.StatusReply, m.Status).status
    served = json.loads(get(port, "/status")[1])
    # Command lines are for operators of this machine, not for who may scrape.
    assert set(printed) - set(served) == {"started_with"}
    assert set(served) <= set(printed)
    assert served["pool"] == printed["pool"]


def test_the_overview_has_cells_sessions_and_events(
    daemon: DaemonProcess, connect: Callable[..., RawClient]
) -> None:
    client, port = connect(), port_of(daemon)
    namespace = client.open(64)
    client.publish(namespace, keys_of(1, 2, 3))

    def overview() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get(port, "/overview.json")[1])
        return found if found.get("session_rows") and sum(found["occupancy"][0]["shares"]) else {}

    found = wait_until(overview)
    assert found["occupancy"][0]["shares"].count(100) == 3
    assert {row["session"] for row in found["session_rows"]} >= {client.session_id}
    assert "session_opened" in {event["event"] for event in found["events"]}
    series = wait_until(lambda: overview().get("history", {}).get("series"))
    assert len({len(values) for values in series.values()}) == 1
