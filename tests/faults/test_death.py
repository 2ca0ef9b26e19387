"""A dead client is found at once: wherever it lives, and whatever it was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from helpers import KEY_SPACE, DaemonProcess, RawClient, keys_of, wait_until

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import NotHeld, UnknownSession, WriterTaken
from tests.faults.scenario import SHORT_TIMES, segments_of

FOUND_WITHIN_S = 1.0
ATTEMPTS = 3
"""The machine may be busy: the best of these counts."""
AT_ONCE = ("process_ended", "disconnected")
"""Its pidfd or its socket: whichever speaks first."""
MakeDaemon = Callable[..., DaemonProcess]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="unshare needs root")

VICTIM = """
import os, sys, time
from pathlib import Path
from helpers import KEY_SPACE, RawClient, keys_of
from hisparse_service.contract import messages as m
client = RawClient(Path(sys.argv[1]))
stage = sys.argv[2]
if stage == "right_after_hello":
    client.send(m.Hello, 1, 1, "victim", "tp", 0, 2, "")
    while not client.socket.getsockopt(15) & 2:  # the frame is handed to libzmq
        pass
    print("ready", flush=True)
    time.sleep(60)
client.hello(group="tp")
namespace = client.open()
client.ask(m.LeaseReply, m.TakeWriter, namespace)
client.publish(namespace, keys_of(1, 2))
got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 5)
if stage == "in_a_batch":
    client.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE,
               [m.EnqueuedItem(got.lease_id, got.blocks, got.generations)])
if stage == "with_a_child" and os.fork() == 0:
    os.close(1)
    time.sleep(3)
    os._exit(0)
print("ready", flush=True)
time.sleep(60)
"""
IN_NAMESPACES = ("unshare", "--pid", "--net", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def victim(daemon: DaemonProcess, stage: str, *prefix: str) -> Iterator[psutil.Process]:
    """A client that is ready to die; the process itself, also behind `unshare`."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", VICTIM, str(daemon.runtime_dir), stage],
        stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["..", "."])},
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield (
                psutil.Process(process.pid).children()[0] if prefix else psutil.Process(process.pid)
            )
        finally:
            process.kill()


def best_time_to_notice(
    daemon: DaemonProcess, stage: str, *prefix: str, how: tuple[str, ...] = AT_ONCE
) -> tuple[float, int]:
    """The shortest time from a SIGKILL to the end of the session, and the client's namespace."""
    best_s, namespace = float("inf"), 0
    with daemon.client(operator=True) as operator:
        for _ in range(ATTEMPTS):
            before = ended(operator)
            with victim(daemon, stage, *prefix) as process:
                wait_until(lambda: workers(operator) == 1)
                process.kill()
                began_s = time.monotonic()
                wait_until(lambda: workers(operator) == 0)
                best_s = min(best_s, time.monotonic() - began_s)
            after = ended(operator)
            told = [cause for cause, count in after.items() if count != before.get(cause, 0)]
            assert told == [told[0]], (before, after)
            assert told[0] in how
        for entry in operator.ask(m.StatusReply, m.Status).status["namespaces"]:
            namespace = entry["namespace"]
    return best_s, namespace


def workers(operator: RawClient) -> int:
    count: int = operator.ask(m.StatusReply, m.Status).status["sessions"]["workers"]
    return count


def ended(operator: RawClient) -> dict[str, int]:
    counts: dict[str, int] = operator.ask(m.StatusReply, m.Status).status["sessions"]["ended_total"]
    return counts


@pytest.mark.parametrize("stage", ["right_after_hello", "holding_pins", "in_a_batch"])
def test_i9_a_killed_client_is_found_within_a_second(daemon: DaemonProcess, stage: str) -> None:
    took_s, namespace = best_time_to_notice(daemon, stage)
    assert took_s < FOUND_WITHIN_S
    if namespace:
        check_what_is_left(daemon, namespace)


def test_i9_a_killed_client_is_found_though_its_socket_is_still_open(
    daemon: DaemonProcess,
) -> None:
    """A child that it forked holds the connection: only the pidfd tells."""
    took_s, namespace = best_time_to_notice(daemon, "with_a_child", how=("process_ended",))
    assert took_s < FOUND_WITHIN_S
    check_what_is_left(daemon, namespace)


@needs_root
def test_i9_a_client_in_other_pid_and_network_namespaces_works_and_is_found(
    daemon: DaemonProcess,
) -> None:
    took_s, namespace = best_time_to_notice(daemon, "in_a_batch", *IN_NAMESPACES)
    assert took_s < FOUND_WITHIN_S
    check_what_is_left(daemon, namespace)


class NamespacedDaemon(DaemonProcess):
    """A daemon in PID and network namespaces of its own: it sees no client's pid."""

    prefix = IN_NAMESPACES


@needs_root
def test_i9_a_client_whose_pid_is_not_visible_is_found_by_its_socket(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = NamespacedDaemon(runtime_dir)
    real = subprocess.Popen

    def behind_unshare(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return real([*IN_NAMESPACES, *command], **options)

    with monkeypatch.context() as patch:
        patch.setattr("helpers.subprocess.Popen", behind_unshare)
        daemon.start()
    daemon.wait_ready()
    try:
        took_s, namespace = best_time_to_notice(daemon, "in_a_batch", how=("disconnected",))
        assert took_s < FOUND_WITHIN_S
        assert "pid_watched=False" in daemon.log
        check_what_is_left(daemon, namespace)
    finally:
        (child,) = psutil.Process(daemon.process.pid).children()
        child.send_signal(signal.SIGTERM)
        daemon.process.wait(30)
        daemon.close()
    assert segments_of(daemon.instance) == []


def check_what_is_left(daemon: DaemonProcess, namespace: int) -> None:
    """Unpublished blocks are back, published ones stay, the next rank may write."""
    with daemon.client(group="tp", rank=1) as heir:
        heir.open()
        counts = heir.counts(namespace)
        assert counts["reserved"] == counts["pinned"] == 0
        assert counts["published"] == 2
        heir.ask(m.LeaseReply, m.TakeWriter, namespace)
        heir.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
        heir.ask(m.Done, m.Bye)


# --- alive, but silent ------------------------------------------------------------------------


def test_i1_blocks_of_a_process_that_stands_still_are_nobodys_until_it_continues_or_dies(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon(**SHORT_TIMES).wait_ready()
    with daemon.client(operator=True) as operator, victim(daemon, "in_a_batch") as process:
        process.suspend()
        wait_until(lambda: ended(operator).get("timed_out", 0) == 1)
        with daemon.client(group="tp", rank=1) as other:
            namespace = other.open()
            # Its writer lease ran out: the next rank takes over at once.
            wait_until(lambda: took_writer(other, namespace))
            other.ask(m.Pong, m.Ping)
            assert other.counts(namespace)["reserved"] == 5
            process.kill()
            wait_until(lambda: other.counts(namespace)["reserved"] == 0)


def took_writer(client: RawClient, namespace: int) -> bool:
    try:
        client.ask(m.LeaseReply, m.TakeWriter, namespace)
    except WriterTaken:
        return False
    return True


def test_a_process_that_stood_still_reclaims_its_blocks(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SHORT_TIMES).wait_ready()
    with daemon.client() as slow, daemon.client(operator=True) as operator:
        namespace = slow.open()
        got = slow.ask(m.BlocksReply, m.Reserve, namespace, 0, 3)
        wait_until(lambda: ended(operator).get("timed_out", 0) == 1)
        with pytest.raises(UnknownSession):
            slow.ask(m.Pong, m.Ping)
        slow.hello()
        slow.open()
        back = slow.ask(m.BlocksReply, m.Reclaim, namespace, 0, got.blocks, got.generations)
        assert (back.blocks, back.generations) == (got.blocks, got.generations)
        item = m.CompletedItem(back.lease_id, 0, 0, back.blocks, back.generations, keys_of(1, 2, 3))
        slow.ask(m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, [], [item])


def test_i9_a_repeated_hello_does_not_hold_anything_twice(daemon: DaemonProcess) -> None:
    """A client that lost track says Hello again on the same connection, and reclaims."""
    with daemon.client() as client:
        namespace = client.open()
        got = client.ask(m.BlocksReply, m.Reserve, namespace, 0, 3)
        first = client.session_id
        client.hello()
        assert client.session_id != first
        client.open()
        with pytest.raises(NotHeld):
            client.ask(m.Done, m.Free, namespace, reserve_one(client, namespace), got.blocks)
        back = client.ask(m.BlocksReply, m.Reclaim, namespace, 0, got.blocks, got.generations)
        assert back.blocks == got.blocks
        assert client.counts(namespace)["reserved"] == 4
        client.ask(m.Done, m.Bye)
    with daemon.client() as other:
        assert other.counts(namespace)["reserved"] == 0


def reserve_one(client: RawClient, namespace: int) -> int:
    return client.ask(m.BlocksReply, m.Reserve, namespace, 0, 1).lease_id
