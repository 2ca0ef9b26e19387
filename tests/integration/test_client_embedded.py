"""The embedded daemon: it is private, and it goes with its process, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from real_daemon import SHM, wait_until

import worker_client
from hisparse_service.contract.errors import (
    ConfigError,
    HiSparseError,
    PoolTooLarge,
    ServiceUnavailable,
)
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from worker_client.client import CudaUse

ENDPOINT = "embedded://?pool_bytes=16MiB"
GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=4, groups=[LayerGroup(1, 64)]
)


def connect():
    return worker_client.connect(ENDPOINT, timeout_s=60)


def segments(instance):
    return list(SHM.glob(f"hisparse-{instance}-*"))


def test_an_embedded_daemon_serves_and_leaves_nothing_behind():
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    client = connect()
    daemon = client.embedded
    namespace = client.open_namespace(model="m", kv_dtype="x", geometry=GEOMETRY)
    namespace.attach(8, cuda=CudaUse.OFF)
    namespace.reserve(3).release()
    assert client.instance == daemon.instance
    assert client.session.identity.client_name
    assert len(segments(daemon.instance)) == 1
    client.close()
    client.close()
    assert segments(daemon.instance) == []
    assert not daemon.runtime_dir.exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children


def test_an_embedded_daemon_listens_on_no_port():
    """It is private: another user of the machine could read a port of the loopback address."""
    with connect():
        open_ports = [
            (child.name(), connection.laddr)
            for child in psutil.Process().children(recursive=True)
            for connection in child.net_connections(kind="inet")
        ]
    assert not open_ports


def test_two_embedded_daemons_are_two():
    with connect() as first, connect() as second:
        assert first.epoch != second.epoch
        assert first.embedded.runtime_dir != second.embedded.runtime_dir


def run_parent(how):
    code = f"""
import os, signal, sys, threading, worker_client
clients = []
def make():
    clients.append(worker_client.connect({ENDPOINT!r}, client_name='parent', timeout_s=60))
# In a thread that ends: the kernel's parent-death signal would fire with it.
maker = threading.Thread(target=make)
maker.start()
maker.join()
client = clients[0]
client.ping()
namespace = client.open_namespace(
    model='m', kv_dtype='x', geometry=__import__('test_client_embedded').GEOMETRY)
namespace.attach(8)
print(client.instance, client.embedded.runtime_dir, flush=True)
sys.stdin.readline()
client.ping()
{how}
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        cwd=Path(__file__).parent, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
        ("sys.exit(4)", 4),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
    ids=["SIGKILL", "_exit", "forgotten close", "interrupted"],
)
def test_i6_the_daemon_and_its_memory_go_with_the_process_however_it_ends(how, status):
    with run_parent(how) as parent:
        instance, runtime_dir = parent.stdout.readline().split()
        daemon = daemon_of(parent.pid)
        assert len(segments(instance)) == 1
        parent.stdin.write("end\n")
        parent.stdin.flush()
        assert parent.wait(60) == status
    wait_until(lambda: not segments(instance), "shared memory released")
    wait_until(lambda: not os.path.exists(runtime_dir), "runtime directory removed")
    wait_until(lambda: not daemon.is_running(), "daemon ended")


def daemon_of(pid):
    """The daemon below the supervisor below this process."""
    (supervisor,) = psutil.Process(pid).children()
    (daemon,) = supervisor.children()
    return daemon


def test_i6_a_daemon_that_is_killed_itself_leaves_no_memory():
    client = connect()
    instance = client.embedded.instance
    daemon_of(os.getpid()).kill()
    wait_until(lambda: not segments(instance))
    with pytest.raises(ServiceUnavailable):
        client.ping(timeout_s=0.2)
    client.close()


def test_the_daemon_ends_when_its_supervisor_is_killed():
    client = connect()
    (supervisor,) = psutil.Process().children()
    (daemon,) = supervisor.children()
    supervisor.kill()
    wait_until(lambda: not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE)
    client.close()
    assert segments(client.embedded.instance) == []
    assert not client.embedded.runtime_dir.exists()


def test_a_forked_child_that_ends_does_not_end_the_daemon():
    with connect() as client:
        child = os.fork()
        if child == 0:
            try:
                client.close()
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.ping()


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        ("1KiB", ConfigError, "pool.bytes is 1 KiB, it must lie between"),
        ("1000TiB", ConfigError, "pool.bytes is 1,000 TiB"),
        ("much", ConfigError, "pool.bytes = 'much'"),
        ("60TiB", PoolTooLarge, "the pool needs 60"),
    ],
)
def test_a_pool_that_cannot_be_is_the_daemons_own_error(size, error, words):
    """Before, each was a ServiceUnavailable with the log glued in."""
    before = set(SHM.glob("hisparse-emb-*"))
    with pytest.raises(HiSparseError) as caught:
        worker_client.connect(f"embedded://?pool_bytes={size}", client_name="t", timeout_s=60)
    assert type(caught.value) is error
    assert caught.value.message.startswith(words)
    assert "pool_bytes=" in caught.value.remedy
    assert "[" not in str(caught.value), "no line of a log"
    assert set(SHM.glob("hisparse-emb-*")) <= before
    assert not any(thread.name == "hisparse-heartbeat" for thread in threading.enumerate())


def test_an_unknown_option_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="pool_size"):
        worker_client.connect("embedded://?pool_size=1", client_name="t")
