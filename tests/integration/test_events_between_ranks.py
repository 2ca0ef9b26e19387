"""A writer's events in the other ranks of its group, over a real daemon and between processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import GEOMETRY, wait_until
from real_daemon import RealDaemon, running_daemon
from shared_event_driver import FileEventDriver

from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    DeviceError,
    LeaseLost,
    ServiceUnavailable,
    UsageError,
)
from worker_client import Client, connect
from worker_client.client import CudaUse, Namespace
from worker_client.events import PeerEvents, WriterEvents, WriterTracker

RING = 8
STEPS = 12_000

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = ["tests"]
from helpers import GEOMETRY
from shared_event_driver import FileEventDriver
from worker_client import connect
from worker_client.client import CudaUse
from worker_client.events import WriterEvents

client = connect(sys.argv[1], group="tp", rank=0, world_size=2)
space = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
space.attach(16, cuda=CudaUse.OFF)
space.take_writer()
driver = FileEventDriver(Path(sys.argv[2]))
events = WriterEvents(space, driver, num_events=int(sys.argv[3]))
events.offer()
print("offered", flush=True)
for line in sys.stdin:
    what, step = line.split()
    if what == "record":
        events.record(int(step))
    else:
        driver.made[int(step) % events.num_events].complete()
    print("done", flush=True)
client.close()
"""


class WriterProcess:
    def __init__(self, endpoint: Path, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(endpoint), str(directory), str(RING)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.expect("offered")

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def tell(self, what: str, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {step}\n")
        self.process.stdin.flush()
        self.expect("done")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def daemon() -> Iterator[RealDaemon]:
    with running_daemon() as made:
        yield made


def attached(client: Client) -> Namespace:
    client.wait_ready(timeout_s=30)
    space = client.open_namespace(model="m", kv_dtype="bf16", geometry=GEOMETRY)
    space.attach(16, cuda=CudaUse.OFF)
    return space


@pytest.fixture
def peer(daemon: RealDaemon) -> Iterator[Namespace]:
    with connect(daemon.directory, group="tp", rank=1, world_size=2) as client:
        yield attached(client)


@pytest.fixture
def writer(daemon: RealDaemon) -> Iterator[Namespace]:
    with connect(daemon.directory, group="tp", rank=0, world_size=2) as client:
        space = attached(client)
        space.take_writer()
        yield space


def test_a_peer_follows_a_writer_of_another_process_for_more_than_10_000_steps(
    daemon: RealDaemon, peer: Namespace, tmp_path: Path
) -> None:
    """A ring that is opened once, by step number: neither handles nor messages grow with steps."""
    process = WriterProcess(daemon.directory, tmp_path)
    driver = FileEventDriver(tmp_path)
    events = PeerEvents(peer, driver)
    try:
        assert events.refresh()
        for step in range(1, STEPS + 1):
            process.tell("record", step)
            assert not events.has_reached(step)
            process.tell("complete", step)
            assert events.has_reached(step)
            events.tick()
        assert len(driver.opened) == RING
    finally:
        process.end()


def test_a_wait_for_a_step_in_flight_ends_when_its_copies_do(
    daemon: RealDaemon, peer: Namespace, tmp_path: Path
) -> None:
    import threading

    process = WriterProcess(daemon.directory, tmp_path)
    driver = FileEventDriver(tmp_path)
    events = PeerEvents(peer, driver)
    try:
        assert events.refresh()
        events.wait(3)  # nothing recorded: nothing to wait for
        assert not any(event.waits for event in driver.opened)
        process.tell("record", 3)
        waiting = threading.Thread(target=events.wait, args=(3,))
        waiting.start()
        wait_until(lambda: driver.opened[3].waits, what="the stream to wait")
        assert waiting.is_alive()
        process.tell("complete", 3)
        waiting.join(30)
        assert not waiting.is_alive()
        events.wait(3)
        assert driver.opened[3].waits == 1  # done: asking was enough
    finally:
        process.end()


def test_i9_the_events_of_a_killed_writer_are_closed_and_its_successors_opened(
    daemon: RealDaemon, peer: Namespace, tmp_path: Path
) -> None:
    first = WriterProcess(daemon.directory, tmp_path)
    events = PeerEvents(peer, FileEventDriver(tmp_path))
    assert events.refresh()
    first.kill()
    first.end()
    wait_until(lambda: not events.refresh(), what="the offer to be withdrawn")
    assert not events.has_reached(1)
    events.wait(1)
    second = WriterProcess(daemon.directory, tmp_path)
    try:
        assert events.refresh()
        second.tell("record", 1)
        assert not events.has_reached(1)
    finally:
        second.end()


def test_a_ring_that_was_passed_by_makes_a_peer_wait_longer_never_shorter(
    peer: Namespace, writer: Namespace, tmp_path: Path
) -> None:
    mine = FileEventDriver(tmp_path)
    ring = WriterEvents(writer, mine, num_events=2)
    ring.offer()
    events = PeerEvents(peer, FileEventDriver(tmp_path))
    assert events.refresh()
    for step in (1, 2):
        ring.record(step)
    mine.made[1].complete()
    assert events.has_reached(1)
    assert not events.has_reached(2)
    ring.record(3)  # the event of step 1
    assert not events.has_reached(1)
    assert not ring.is_complete(1)
    mine.made[1].complete()
    assert events.has_reached(1)
    with pytest.raises(UsageError, match="step 2 after step 3"):
        ring.record(2)


def test_the_writers_own_tickets_are_the_events_that_its_peers_see(
    peer: Namespace, writer: Namespace, tmp_path: Path
) -> None:
    mine = FileEventDriver(tmp_path)
    ring = WriterEvents(writer, mine)
    ring.offer()
    step = 5
    tracker = WriterTracker(ring, lambda: step)
    events = PeerEvents(peer, FileEventDriver(tmp_path))
    assert events.refresh()
    ticket = tracker.record()
    assert not tracker.is_complete(ticket)
    assert not events.has_reached(5)
    mine.made[5].complete()
    assert tracker.is_complete(ticket)
    assert events.has_reached(5)
    tracker.release(ticket)


def test_handles_that_cannot_be_opened_are_an_error_once_and_then_left_alone(
    peer: Namespace, writer: Namespace, tmp_path: Path
) -> None:
    """Two containers without a common /dev/shm: everything works, without events."""
    WriterEvents(writer, FileEventDriver(tmp_path)).offer()
    driver = FileEventDriver(tmp_path)
    driver.refuses = True
    events = PeerEvents(peer, driver)
    with pytest.raises(DeviceError):
        events.refresh()
    assert isinstance(events.failure, DeviceError)
    assert events.writer_device_uuid == "no-device"
    driver.refuses = False
    assert not events.refresh()
    assert not driver.opened
    WriterEvents(writer, FileEventDriver(tmp_path, name="others")).offer()
    assert events.refresh()
    assert events.failure is None


def test_ticks_find_a_writer_that_comes_later_and_raise_nothing(
    daemon: RealDaemon, peer: Namespace, writer: Namespace, tmp_path: Path
) -> None:
    events = PeerEvents(peer, FileEventDriver(tmp_path))
    for _ in range(5):
        events.tick()
    assert not events.is_connected
    ring = WriterEvents(writer, FileEventDriver(tmp_path))
    ring.tick()  # offers
    for _ in range(20):
        events.tick()
    assert events.is_connected
    daemon.kill()
    wait_until(lambda: not peer.is_daemon_there, what="the daemon to be missed")
    with pytest.raises(ServiceUnavailable):
        events.refresh()
    events.tick()
    ring.tick()
    assert events.is_connected  # the events are the processes': they need no daemon


def test_another_daemon_is_offered_the_same_events_and_nothing_is_opened_again(
    daemon: RealDaemon, peer: Namespace, writer: Namespace, tmp_path: Path
) -> None:
    ring = WriterEvents(writer, FileEventDriver(tmp_path))
    ring.offer()
    driver = FileEventDriver(tmp_path)
    events = PeerEvents(peer, driver)
    assert events.refresh()
    opened, epoch = len(driver.opened), peer.session_epoch
    daemon.kill()
    daemon.start()
    for space in (writer, peer):
        wait_until(
            lambda space=space: space.is_daemon_there and space.session_epoch != epoch,
            what="the new daemon",
        )
    ring.tick()
    assert events.refresh()
    assert len(driver.opened) == opened
    assert peer.client.session.epoch != epoch


def test_i1_events_are_the_writers_alone(
    daemon: RealDaemon, peer: Namespace, writer: Namespace, tmp_path: Path
) -> None:
    with pytest.raises(LeaseLost):
        WriterEvents(peer, FileEventDriver(tmp_path)).offer()
    ring = WriterEvents(writer, FileEventDriver(tmp_path))
    ring.offer()
    with pytest.raises(UsageError, match="is the writer"):
        PeerEvents(writer, FileEventDriver(tmp_path)).refresh()
    with pytest.raises(UsageError, match="a ring of 65 events"):
        WriterEvents(writer, FileEventDriver(tmp_path), num_events=limits.MAX_SHARED_EVENTS + 1)
    events = PeerEvents(peer, FileEventDriver(tmp_path))
    assert events.refresh()
    ring.close()
    ring.close()
    assert not events.refresh()
