"""The waker: the loop hears of each descriptor, once, and again after it has read it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import zmq
from helpers import wait_until

from hisparse_service.server.waker import Waker


class Loop:
    """A ROUTER that is woken; counts what it read by descriptor."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("inproc://waker-test")
        self.wake = self.context.socket(zmq.DEALER)
        self.wake.connect("inproc://waker-test")
        self.waker = Waker(self.wake)
        self.fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.reads = [0, 0]
        for index, fd in enumerate(self.fds):
            self.waker.watch(fd, lambda index=index: self._read(index))

    def _read(self, index: int) -> None:
        os.eventfd_read(self.fds[index])
        self.reads[index] += 1

    def turn(self) -> None:
        """Wait for a wake message and do what it asks for."""
        assert self.router.poll(10_000)
        self.router.recv_multipart()
        self.waker.run_ready()

    def close(self) -> None:
        self.waker.close()
        self.context.destroy(linger=0)
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_each_descriptor_is_told_and_told_again_after_it_was_read(loop: Loop) -> None:
    loop.waker.ensure_running()
    for expected in (1, 2, 3):
        os.eventfd_write(loop.fds[0], 1)
        wait_until(lambda expected=expected: loop.turn() or loop.reads[0] == expected)
    assert loop.reads == [3, 0]
    os.eventfd_write(loop.fds[1], 1)
    wait_until(lambda: loop.turn() or loop.reads[1] == 1)


def test_a_descriptor_that_stays_readable_sends_one_message_until_it_is_read(loop: Loop) -> None:
    loop.waker.ensure_running()
    os.eventfd_write(loop.fds[0], 1)
    assert loop.router.poll(10_000)
    loop.router.recv_multipart()
    assert loop.router.poll(100) == 0
    loop.waker.run_ready()
    assert loop.reads == [1, 0]


def test_a_waker_that_died_is_started_again_and_what_it_had_heard_is_not_lost(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Waker._run
    monkeypatch.setattr(Waker, "_run", lambda self: self._ready.append(self_fd))
    self_fd = loop.fds[0]
    os.eventfd_write(self_fd, 1)
    loop.waker.ensure_running()
    wait_until(lambda: not loop.waker._thread.is_alive())
    monkeypatch.setattr(Waker, "_run", run)
    loop.waker.ensure_running()
    assert loop.waker.restarts == 1
    assert loop.reads == [1, 0]
    os.eventfd_write(loop.fds[1], 1)
    wait_until(lambda: loop.turn() or loop.reads[1] == 1)


def test_close_ends_the_thread_and_may_be_repeated(loop: Loop) -> None:
    loop.waker.ensure_running()
    loop.waker.close()
    loop.waker.close()
    loop.waker.ensure_running()
    assert not loop.waker._thread.is_alive()
