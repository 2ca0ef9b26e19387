"""Clients that misbehave hurt nobody else: bounded queues, quotas, bounded logs (I7)."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import posix_ipc
import psutil
import pytest
from helpers import (
    FINGERPRINT,
    KEY_SPACE,
    DaemonProcess,
    RawClient,
    Resources,
    keys_of,
    unique_instance,
    wait_until,
)

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import CapacityError, QuotaExceeded
from tests.faults.fuzz import FRAMES, mutate
from tests.faults.in_process import ThreadedDaemon
from tests.faults.scenario import SHORT_TIMES
from tests.faults.test_death import ended, victim

MakeDaemon = Callable[..., DaemonProcess]
ANSWER_S = 0.1
"""I7."""
FUZZ_FRAMES = int(os.environ.get("HISPARSE_FAULTS_LIVE_FRAMES", "20000"))


class Pinger:
    """A well-behaved client, on a thread of its own, that times its pings."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._stop = threading.Event()
        self.took_s: list[float] = []
        self._thread = threading.Thread(target=self._run, name="pinger")

    def _run(self) -> None:
        with self._daemon.client(operator=True) as client:
            while not self._stop.is_set():
                began_s = time.monotonic()
                client.ask(m.Pong, m.Ping)
                self.took_s.append(time.monotonic() - began_s)
                self._stop.wait(0.001)

    @property
    def p99_s(self) -> float:
        """99 of 100 answers came within this; single ones wait for a busy machine."""
        return sorted(self.took_s)[int(len(self.took_s) * 0.99)]

    @contextmanager
    def running(self) -> Iterator[Pinger]:
        self._thread.start()
        try:
            wait_until(lambda: len(self.took_s) > 10)
            yield self
        finally:
            self._stop.set()
            self._thread.join()


def test_i7_i8_a_live_daemon_answers_others_while_damaged_frames_flood_in(
    daemon: DaemonProcess,
) -> None:
    """Damaged and spliced requests of a client with a session, so that many reach a handler."""
    rng = random.Random(5)
    log_bytes = len(daemon.log)
    with Pinger(daemon).running() as pinger, daemon.client() as good:
        namespace = good.open()
        good.publish(namespace, keys_of(1, 2, 3))
        fuzzer = daemon.client(group="fuzz")
        fuzzer.open()
        for number in range(FUZZ_FRAMES):
            frame = mutate(rng.choice(FRAMES), rng)
            if is_meant_to_hurt(frame):
                continue
            fuzzer.send_frames(frame)
            if number % 32 == 31:
                while fuzzer.socket.poll(0):
                    fuzzer.socket.recv()
        request_id = 2**62  # none that a damaged frame may have
        fuzzer.last_id = request_id - 1
        fuzzer.ask(m.Done, m.Bye)
        fuzzer.close()
        assert daemon.process.poll() is None, daemon.log
        found = good.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2, 3))
        assert len(found.blocks) == 12
        wait_until(lambda: good.counts(namespace)["reserved"] == 0)
        status = good.ask(m.StatusReply, m.Status).status
    assert status["malformed"] > FUZZ_FRAMES // 4
    assert status["unexpected_errors"] == 0, daemon.log
    assert pinger.p99_s < ANSWER_S
    assert len(daemon.log) - log_bytes < 100_000, "the log grows with the flood"


def is_meant_to_hurt(frame: bytes) -> bool:
    """Requests that end or change the service on purpose are no accident to survive."""
    try:
        return isinstance(m.decode_request(frame), m.Drain | m.Bye | m.SetLimits | m.Trace)
    except Exception:
        return False


def test_i7_a_stopped_client_keeps_nobody_waiting_and_its_queue_is_bounded(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon(**SHORT_TIMES).wait_ready()
    process = psutil.Process(daemon.process.pid)
    with Pinger(daemon).running() as pinger, daemon.client() as deaf:
        before = process.memory_info().rss
        for _ in range(3_000):  # never reads an answer
            deaf.send(m.Status)
        with victim(daemon, "in_a_batch") as stopped:
            stopped.suspend()
            with daemon.client(operator=True) as operator:
                wait_until(lambda: ended(operator).get("timed_out", 0) >= 1)
            stopped.resume()
        grown = process.memory_info().rss - before
    assert pinger.p99_s < ANSWER_S
    assert grown < 64 << 20, "replies that nobody reads are kept"


def test_a_lease_held_for_ever_costs_its_holder_only(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        limits__max_reserved_blocks_per_session="20", limits__max_pins_per_session="6",
        limits__max_leases_per_session="4",
    ).wait_ready()  # fmt: skip
    with daemon.client() as greedy, daemon.client() as modest:
        namespace = greedy.open(64)
        modest.open(64)
        greedy.ask(m.BlocksReply, m.Reserve, namespace, 0, 20)
        with pytest.raises(QuotaExceeded, match="20"):
            greedy.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
        modest.publish(namespace, keys_of(1, 2, 3, 4, 5, 6))
        found = greedy.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2, 3, 4))
        assert len(found.blocks) == 16
        with pytest.raises(QuotaExceeded, match="pins"):
            greedy.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2, 3, 4))
        for _ in range(2):
            greedy.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1))
        with pytest.raises(QuotaExceeded, match="leases"):
            greedy.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1))
        got = modest.ask(m.BlocksReply, m.Reserve, namespace, 0, 20 - 0)
        assert len(got.blocks) == 80


def test_a_namespaces_quota_bounds_all_its_sessions_together(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(limits__max_reserved_blocks_per_namespace="30").wait_ready()
    with daemon.client() as first, daemon.client() as second:
        namespace = first.open(64)
        second.open(64)
        other = second.open(16, fingerprint=bytes(reversed(FINGERPRINT)))
        first.ask(m.BlocksReply, m.Reserve, namespace, 0, 25)
        with pytest.raises(QuotaExceeded, match="namespace"):
            second.ask(m.BlocksReply, m.Reserve, namespace, 0, 6)
        second.ask(m.BlocksReply, m.Reserve, namespace, 0, 5)
        second.ask(m.BlocksReply, m.Reserve, other, 0, 15)


def test_a_full_pool_is_a_typed_refusal_for_one_and_reads_go_on_for_all(
    daemon: DaemonProcess,
) -> None:
    with daemon.client() as greedy, daemon.client() as reader:
        namespace = greedy.open(16)
        reader.open(16)
        greedy.publish(namespace, keys_of(1, 2))
        greedy.ask(m.BlocksReply, m.Reserve, namespace, 0, 13)
        with pytest.raises(CapacityError):
            reader.ask(m.BlocksReply, m.Reserve, namespace, 0, 1)
        found = reader.ask(m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys_of(1, 2))
        assert len(found.blocks) == 8


def test_i7_log_lines_are_bounded_whatever_clients_do(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(log__events_per_second="5").wait_ready()
    lines = daemon.log.count("\n")
    began_s = time.monotonic()
    for _ in range(200):  # each opens and ends a session: two log lines
        client = RawClient(daemon.runtime_dir)
        client.hello()
        client.close()
    took_s = time.monotonic() - began_s
    new = daemon.log.count("\n") - lines
    assert new <= 2 * 5 * (took_s + 2), f"{new} lines in {took_s} s"


def test_a_helper_thread_that_dies_is_started_again_counted_and_visible(
    daemon: DaemonProcess,
) -> None:
    """Through the class that runs all of them but the loop's waker, which has a test below."""
    from hisparse_service.server.helpers import RESTART_DELAY_S, HelperThreads, Restart

    helpers = HelperThreads()
    lives: list[int] = []

    def dies_once(stopping: threading.Event) -> None:
        lives.append(1)
        if len(lives) == 1:
            raise RuntimeError("on purpose")
        stopping.wait()

    helpers.start("mortal", dies_once, restart=Restart.ALWAYS)
    wait_until(lambda: not helpers.describe()["mortal"]["alive"])
    helpers.check(100.0)
    assert helpers.describe()["mortal"]["restarts"] == 0
    assert helpers.describe()["mortal"]["last_error"] == "RuntimeError('on purpose')"
    helpers.check(100.0 + RESTART_DELAY_S)
    wait_until(lambda: len(lives) == 2)
    assert helpers.describe()["mortal"]["alive"]
    assert helpers.describe()["mortal"]["restarts"] == 1
    assert helpers.stop(30.0) == []
    with daemon.client() as client:
        assert "helpers" in client.ask(m.StatusReply, m.Status).status


def test_i9_the_thread_that_tells_of_deaths_is_restarted_and_tells_of_the_one_it_missed(
    runtime_dir: Path,
) -> None:
    daemon = ThreadedDaemon(runtime_dir, unique_instance())
    try:
        with RawClient(daemon.runtime_dir) as operator:
            operator.hello(operator=True)
            client = RawClient(daemon.runtime_dir)
            client.hello()
            with mock.patch.object(daemon.waker, "_ready", FailsOnce()):
                client.close()
                found = wait_until(lambda: helper_of(operator, restarts=1))
                wait_until(lambda: operator.ask(m.ListReply, m.Sessions).total == 1)
            assert found["alive"]
            assert found["permanent"]
            assert "on purpose" in found["last_error"]
    finally:
        daemon.close()


class FailsOnce(deque):
    has_failed = False

    def append(self, fd: int) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("on purpose")
        super().append(fd)


def helper_of(operator: RawClient, *, restarts: int) -> dict[str, Any] | None:
    status = operator.ask(m.StatusReply, m.Status).status
    found: dict[str, Any] = status["helpers"]["loop-waker"]
    return found if found["restarts"] == restarts else None


def test_the_resource_check_sees_a_semaphore_that_is_left() -> None:
    before = Resources()
    name = f"/hisparse-test-{os.getpid()}"
    semaphore = posix_ipc.Semaphore(name, posix_ipc.O_CREX)
    try:
        leaks = Resources().leaked_since(before)
    finally:
        semaphore.close()
        posix_ipc.unlink_semaphore(name)
    assert any(leak.startswith("semaphore ") for leak in leaks)
    assert Resources().leaked_since(before) == []
