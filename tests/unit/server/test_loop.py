"""The control loop on real sockets, in this process, with ticks an hour apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from hisparse_service.membership.liveness import PidWatcher
from hisparse_service.server import loop as loop_module
from hisparse_service.server.dispatch import Dispatcher, SendResult
from hisparse_service.server.events import EventPublisher
from hisparse_service.server.loop import STOP_SIGNALS, ControlLoop
from hisparse_service.server.state import ServerState
from hisparse_service.server.transport import Transport
from hisparse_service.telemetry.metrics import ServerMetrics


class Echo:
    """Stands in for the dispatcher: sends each frame back, or does what a test says."""

    def __init__(self) -> None:
        self.waiting = False
        self.slices = 0
        self.wrong: list[int] = []
        self.loop: ControlLoop
        self.last_result: SendResult | None = None

    def on_frame(self, routing_id: bytes, frame: zmq.Frame) -> None:
        if frame.bytes == b"stop":
            self.loop.stop("asked")
        self.last_result = self.loop.send(routing_id, frame.bytes)

    def on_wrong_frames(self, routing_id: bytes, num_frames: int, _peer_address: str) -> None:
        self.wrong.append(num_frames)
        self.loop.send(routing_id, b"wrong")

    def run_slice(self, now_s: float) -> None:  # noqa: ARG002
        self.slices += 1


class World:
    def __init__(self, directory: Path) -> None:
        self.transport = Transport(directory, allowed_uids=[0])
        self.watcher = PidWatcher()
        self.signals: list[int] = []
        self.state = SimpleNamespace(
            events=EventPublisher(self.transport.publisher, epoch=1, instance="t"),
            watcher=self.watcher, metrics=ServerMetrics(), ended_connections=set(),
            by_connection={}, clients={}, quarantine={},
        )  # fmt: skip
        self.loop = ControlLoop(
            cast("ServerState", self.state), self.transport, on_tick=lambda _: None,
            on_signal=self.on_signal,
        )  # fmt: skip
        self.echo = Echo()
        self.echo.loop = self.loop
        self.context = zmq.Context()
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(self.transport.control_endpoint)

    def on_signal(self, number: int) -> None:
        self.signals.append(number)
        self.loop.stop("signal")

    def run(self) -> None:
        self.loop.run(cast("Dispatcher", self.echo))

    def close(self) -> None:
        self.client.close(linger=0)
        self.context.term()
        self.loop.close()
        self.transport.close()
        self.watcher.close()


@pytest.fixture
def world(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    # What is heard only at a tick is heard after this test's time limit.
    monkeypatch.setattr(loop_module, "TICK_S", 3_600.0)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    made = World(runtime_dir)
    made.loop._next_tick_s = 1e18
    yield made
    made.close()
    for number, handler in before.items():
        signal.signal(number, cast("Any", handler))


def test_a_call_made_before_the_loop_first_waits_is_not_left_to_a_tick(world: World) -> None:
    world.loop.call_soon(lambda: world.loop.stop("called"))
    world.run()
    assert world.loop.stop_reason == "called"


def test_a_call_of_another_thread_wakes_a_waiting_loop(world: World) -> None:
    begun = threading.Event()
    world.loop.call_soon(begun.set)

    def call() -> None:
        begun.wait(30)
        world.loop.call_soon(lambda: world.loop.stop("called"))

    thread = threading.Thread(target=call)
    thread.start()
    world.run()
    thread.join()


def test_a_signal_wakes_a_waiting_loop(world: World) -> None:
    world.loop.call_soon(lambda: signal.raise_signal(signal.SIGTERM))
    world.run()
    assert world.signals == [signal.SIGTERM]


def test_messages_are_answered_in_order_and_several_frames_are_told_from_one(
    world: World,
) -> None:
    world.client.send(b"one")
    world.client.send_multipart([b"a", b"b", b"c"])
    world.client.send(b"stop")
    world.run()
    assert [world.client.recv() for _ in range(3)] == [b"one", b"wrong", b"stop"]
    assert world.echo.wrong == [3]


def test_i7_messages_are_answered_between_slices(world: World) -> None:
    world.echo.waiting = True
    world.client.send(b"one")
    world.client.send(b"stop")
    world.run()
    assert world.client.recv() == b"one"
    assert world.echo.slices > 0


def test_i7_a_reply_to_a_peer_that_is_not_there_fails_at_once(
    world: World,
) -> None:
    assert world.loop.send(b"nobody", b"x") is SendResult.GONE
    world.client.send(b"stop")
    world.run()
    assert world.echo.last_result is SendResult.SENT


def test_i8_a_client_cannot_take_the_wakers_name(world: World) -> None:
    thief = world.context.socket(zmq.DEALER)
    thief.setsockopt(zmq.ROUTING_ID, b"loop-waker")
    thief.connect(world.transport.control_endpoint)
    thief.send(b"stop")
    world.client.send(b"one")
    world.client.send(b"stop")
    world.run()
    assert thief.poll(0) == 0
    thief.close(linger=0)
    assert world.client.recv() == b"one"
