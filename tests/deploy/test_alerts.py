"""Each alert is seen firing: a real Prometheus scrapes a real daemon that is made to misbehave.

The rules are those that ship; only their waiting time (`for`) is taken away. How long they wait is
tested with promtool's clock (test_monitoring.py).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import DEPLOY, find_tool
from helpers import (
    KEY_SPACE,
    SHM,
    DaemonProcess,
    RawClient,
    keys_of,
    short_directory,
    wait_until,
)

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import CapacityError, HiSparseError, QuotaExceeded
from hisparse_service.contract.segment import RECORD_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("alerts"), pytest.mark.timeout(240)]
MONITORING = DEPLOY / "monitoring"
MISBEHAVING = Path(__file__).with_name("misbehaving.py")
FIRES_WITHIN_S = 150.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """A server of its own that scrapes once a second what `scrape` names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._targets: list[str] = []
        rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
        for rule in rules["groups"][0]["rules"]:
            rule.pop("for", None)
        (directory / "alerts.yaml").write_text(yaml.safe_dump(rules))
        shipped = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
        (job,) = shipped["scrape_configs"]
        job |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
        del job["static_configs"]
        job["file_sd_configs"] = [{"files": ["targets.json"], "refresh_interval": "1s"}]
        shipped["global"] = {"evaluation_interval": "1s"}
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(shipped))
        self._write_targets()
        with (directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [find_tool("prometheus"), f"--config.file={directory}/prometheus.yaml",
                 f"--storage.tsdb.path={directory}/data",
                 f"--web.listen-address=127.0.0.1:{self.port}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._is_ready, what="Prometheus")

    def _write_targets(self) -> None:
        new = self.directory / "targets.new"
        new.write_text(json.dumps([{"targets": self._targets}]))
        new.rename(self.directory / "targets.json")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def scrape(self, target: str) -> None:
        self._targets.append(target)
        self._write_targets()

    def query(self, expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])

    def firing(self, target: str) -> set[str]:
        selector = f'ALERTS{{instance="{target}",alertstate="firing"}}'
        return {each["metric"]["alertname"] for each in self.query(selector)}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    with short_directory() as directory:
        server = Prometheus(directory)
        yield server
        server.close()


class Watched:
    """A daemon that Prometheus scrapes."""

    def __init__(self, prometheus: Prometheus, daemon: DaemonProcess, target: str) -> None:
        self.prometheus, self.daemon, self.target = prometheus, daemon, target

    def is_scraped(self, expression: str = "hisparse_uptime_seconds", *, times: int = 2) -> None:
        """Until so many samples of the metric are stored: a rate needs two."""
        counted = f'count_over_time({expression}{{instance="{self.target}"}}[10m])'
        wait_until(
            lambda: any(
                float(each["value"][1]) >= times for each in self.prometheus.query(counted)
            ),
            60.0, what=f"{times} samples of {expression}",
        )  # fmt: skip

    def fires(self, alert: str, *, meanwhile: Callable[[], Any] = lambda: None) -> None:
        """Until the alert fires for this daemon; `meanwhile` is called again and again."""

        def is_firing() -> bool:
            meanwhile()
            return alert in self.prometheus.firing(self.target)

        wait_until(is_firing, FIRES_WITHIN_S, what=f"{alert} firing")

    def quiet(self) -> set[str]:
        return self.prometheus.firing(self.target)


@pytest.fixture
def watch(
    prometheus: Prometheus, make_daemon: Callable[..., DaemonProcess]
) -> Callable[..., Watched]:
    def make(*, fault: str = "", **settings: str) -> Watched:
        target = f"127.0.0.1:{free_port()}"
        daemon = make_daemon(http__listen=target, **settings)
        if fault:
            daemon.close()
            daemon.process = subprocess.Popen(
                [sys.executable, str(MISBEHAVING), fault, "serve"], env=daemon.environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        prometheus.scrape(target)
        watched = Watched(prometheus, daemon, target)
        watched.is_scraped()
        return watched

    return make


Watch = Callable[..., Watched]


def refused(client: RawClient, namespace: int, num_blocks: int, error: type[HiSparseError]) -> None:
    with pytest.raises(error):
        client.ask(m.BlocksReply, m.Reserve, namespace, 0, num_blocks)


def test_a_healthy_daemon_fires_nothing_and_feeds_every_panel(watch: Watch) -> None:
    watched = watch()
    with watched.daemon.client() as client:
        namespace = client.open()
        numbers = itertools.count(1)

        def work() -> None:
            keys = keys_of(next(numbers))
            got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
            enqueued = m.EnqueuedItem(got.lease_id, got.blocks, got.generations)
            client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [enqueued])
            item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys)
            client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
            client.ask(m.BlocksReply, m.Lookup, namespace, got.lease_id, KEY_SPACE, keys)
            client.ask(m.Done, m.ReleaseLeases, [got.lease_id])
            client.ask(m.Pong, m.Ping, [], {"swaps": next(numbers), "swap_seconds": 1.0})

        with pytest.raises(HiSparseError):
            client.ask(m.Done, m.Unpin, namespace, 999, keys_of(1)[:4])
        watched.daemon.client().close()
        missing = list(dashboard_queries(watched.target))

        def all_answer() -> bool:
            work()
            missing[:] = [
                (title, query) for title, query in missing if not watched.prometheus.query(query)
            ]
            return not missing

        wait_until(all_answer, 60.0, what=missing)
        assert watched.quiet() == set()


def dashboard_queries(target: str) -> Iterator[tuple[str, str]]:
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for query in panel.get("targets", []):
            yield panel["title"], query["expr"].replace("$instance", target)


def test_down(watch: Watch) -> None:
    watched = watch()
    watched.daemon.kill()
    watched.fires("HisparseDown")


def test_not_ready(watch: Watch) -> None:
    watched = watch()
    with watched.daemon.client(operator=True) as client:
        client.ask(m.Done, m.Drain, False, 60.0)
        watched.fires("HisparseNotReady")


def test_restarting(watch: Watch) -> None:
    watched = watch()
    starts = 0

    def restart() -> None:
        nonlocal starts
        series = f'hisparse_uptime_seconds{{instance="{watched.target}"}}'
        uptime = watched.prometheus.query(series)
        fallen = watched.prometheus.query(f"resets({series}[30m])")
        if not uptime or not fallen or int(fallen[0]["value"][1]) < starts:
            return  # a start is faster than a scrape: the sample may be of the one before
        # Only an uptime that was scraped can be seen to fall.
        if starts < 5 and float(uptime[0]["value"][1]) > 1.5:
            watched.daemon.kill()
            watched.daemon.start().wait_ready()
            starts += 1

    watched.fires("HisparseRestarting", meanwhile=restart)


def ask_for_status(watched: Watched) -> None:
    with watched.daemon.client() as client, pytest.raises(HiSparseError):
        client.ask(m.StatusReply, m.Status)


def test_control_loop_slow(watch: Watch) -> None:
    watched = watch(fault="slow")
    ask_for_status(watched)
    watched.fires("HisparseControlLoopSlow")


def test_bug(watch: Watch) -> None:
    watched = watch(fault="bug")
    ask_for_status(watched)
    watched.is_scraped("hisparse_unexpected_errors_total", times=3)
    ask_for_status(watched)
    watched.fires("HisparseBug")


def test_thread_died(watch: Watch) -> None:
    watch(fault="thread").fires("HisparseThreadDied")


def test_allocations_refused(watch: Watch) -> None:
    watched = watch()
    with watched.daemon.client() as client:
        namespace = client.open(16)
        client.ask(m.BlocksReply, m.Reserve, namespace, 0, 15)
        watched.fires(
            "HisparseAllocationsRefused",
            meanwhile=lambda: refused(client, namespace, 1, CapacityError),
        )


def test_quota_reached(watch: Watch) -> None:
    watched = watch(limits__max_reserved_blocks_per_session="2")
    with watched.daemon.client() as client:
        namespace = client.open(16)
        watched.fires(
            "HisparseQuotaReached",
            meanwhile=lambda: refused(client, namespace, 3, QuotaExceeded),
        )


def test_pool_thrashing(watch: Watch) -> None:
    watched = watch()
    numbers = iter(range(1, 100_000))
    with watched.daemon.client() as client:
        namespace = client.open(16)

        def publish() -> None:
            for _ in range(30):
                got = client.publish(namespace, keys_of(next(numbers)))
                client.ask(m.Done, m.ReleaseLeases, [got.lease_id])

        publish()
        watched.is_scraped("hisparse_blocks_evicted_total", times=3)
        watched.fires("HisparsePoolThrashing", meanwhile=publish)


def test_publication_stuck(watch: Watch) -> None:
    watched = watch()
    with watched.daemon.client() as client:
        namespace = client.open(16)
        got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
        item = m.EnqueuedItem(got.lease_id, got.blocks, got.generations)
        client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [item])
        watched.fires(
            "HisparsePublicationStuck",
            meanwhile=lambda: client.ask(m.Pong, m.Ping, [got.lease_id]),
        )


def test_workers_dying(watch: Watch) -> None:
    watched = watch()
    watched.daemon.client().close()  # the cause's series begins with the first
    watched.is_scraped("hisparse_session_ends_total", times=2)
    for _ in range(5):
        watched.daemon.client().close()
    watched.fires("HisparseWorkersDying")


def test_sessions_quarantined(watch: Watch) -> None:
    watched = watch(limits__heartbeat_interval_s="0.2", limits__session_timeout_s="1")
    with watched.daemon.client() as client:
        client.ask(m.BlocksReply, m.Reserve, client.open(16), 0, 1)
        watched.fires("HisparseSessionsQuarantined")


def test_leases_expire(watch: Watch) -> None:
    watched = watch(
        limits__heartbeat_interval_s="0.2", limits__session_timeout_s="1",
        limits__lease_ttl_s="1.5",
    )  # fmt: skip
    with watched.daemon.client() as client:
        namespace = client.open(64)
        got = client.publish(namespace, keys_of(1))

        def forget() -> None:
            client.ask(m.Pong, m.Ping, [got.lease_id])
            for _ in range(4):
                client.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1))

        watched.fires("HisparseLeasesExpire", meanwhile=forget)


def test_mirrors_lost(watch: Watch) -> None:
    watched = watch()
    lost = iter(range(10_000))
    with watched.daemon.client() as client:
        watched.fires(
            "HisparseMirrorsLost",
            meanwhile=lambda: client.ask(m.Pong, m.Ping, [], {"mirrors_lost": float(next(lost))}),
        )


def test_malformed_messages(watch: Watch) -> None:
    watched = watch()

    def babble() -> None:
        with watched.daemon.client() as client:
            client.send_frames(b"\xc1 no message")
            client.receive_error()

    watched.fires("HisparseMalformedMessages", meanwhile=babble)


def test_blocks_corrupt(watch: Watch) -> None:
    watched = watch()
    daemon = watched.daemon
    with daemon.client() as client:
        namespace = client.open(16)
        (block,) = client.publish(namespace, keys_of(7)).blocks[:1]
        reply = client.ask(m.BackingReply, m.AllocateBacking, namespace, 16)
        daemon.kill()
        with (SHM / daemon.segments[0]).open("r+b") as segment:
            segment.seek(reply.table_offset_bytes + block * RECORD_BYTES)
            segment.write(b"\xff" * 8)
    daemon.start().wait_ready()
    watched.fires("HisparseBlocksCorrupt")


def test_blocks_damaged(watch: Watch) -> None:
    watched = watch()
    with watched.daemon.client() as client:
        namespace = client.open(16)

        def read_damage() -> None:
            got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
            item = m.CompletedItem(
                got.lease_id, 0, 0, got.blocks, got.generations, keys_of(next(numbers)),
                (1).to_bytes(8, "little"),
            )  # fmt: skip
            client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])
            client.ask(m.DamageReply, m.ReportDamage, namespace, got.blocks, got.generations)
            client.ask(m.Done, m.ReleaseLeases, [got.lease_id])

        numbers = itertools.count(100)
        read_damage()
        watched.fires("HisparseBlocksDamaged", meanwhile=read_damage)


def test_cuda_registration_failed(watch: Watch) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a GPU: registration works")
    watch(cuda__register="true").fires("HisparseCudaRegistrationFailed")


def test_every_alert_has_its_test() -> None:
    source = Path(__file__).read_text()
    for rule in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]:
        assert f'"{rule["alert"]}"' in source, rule["alert"]
