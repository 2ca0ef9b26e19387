"""The writer's CUDA events in another process, through a real daemon, on one GPU (or two).

Both ranks are processes of their own (`event_rank.py`), so that one that hangs fails its test and
nothing else.

    python3 -m pytest -m gpu tests/gpu/test_events_cuda.py
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hisparse_service.contract.errors import UsageError
from worker_client.events import TorchEventDriver

pytestmark = pytest.mark.timeout(300)

STEPS = 10_500
SYNC_EVERY = 32
"""Steps that a peer's device may be behind before its CPU waits: fewer than ring blocks."""
DELAY_CYCLES = 40_000_000
"""About 20 ms: longer than it takes the peer to be told and to read."""
ANSWER_S = 60.0


class RankProcess:
    """One rank; every answer has a deadline."""

    def __init__(self, role: str, runtime: Path, device: str) -> None:
        root = Path(__file__).parents[2]
        self.log = runtime.parent / f"{role}-{id(self)}.log"
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(root / "tests/gpu/event_rank.py"), role, str(runtime), device],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line.strip())
        self._answers.put("(ended)")

    def answer(self, timeout_s: float = ANSWER_S) -> str:
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no answer: {self.log.read_text()[-3000:]}") from None
        assert found != "(ended)", self.log.read_text()[-3000:]
        return found

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(ANSWER_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()
        self._reader.join(ANSWER_S)
        self.process.stdout.close()


@pytest.fixture(params=["cuda:0", "cuda:1"])
def ranks(request, make_daemon) -> Iterator[tuple[RankProcess, RankProcess]]:
    """(writer on cuda:0, peer on the parameter's device)."""
    if int(request.param[-1]) >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    daemon = make_daemon(pool_bytes="32MiB").wait_ready()
    made: list[RankProcess] = []
    try:
        for role, device in (("writer", "cuda:0"), ("peer", request.param)):
            made.append(RankProcess(role, daemon.runtime_dir, device))
            assert made[-1].answer(120.0) == "ready"
        assert made[1].ask("refresh") == "open"
        yield made[0], made[1]
    finally:
        for rank in reversed(made):
            rank.end()


def test_a_peer_reads_behind_the_writers_events_for_more_than_10_000_steps(ranks) -> None:
    """Reads are enqueued while the copies are under way; each finds the rows of its own step."""
    writer, peer = ranks
    for step in range(1, STEPS + 1):
        late = DELAY_CYCLES if step % 150 == 0 else 0
        assert writer.ask(f"record {step} {late}") == "recorded"
        assert peer.ask(f"read {step}") == "enqueued"
        if step % SYNC_EVERY == 0:
            assert peer.ask("count") == "0", step
    assert peer.ask("count") == "0"


def test_without_the_wait_reads_are_too_early(ranks) -> None:
    """What the test above relies on: copies that are delayed are not there yet."""
    writer, peer = ranks
    for step in range(1, 26):
        writer.ask(f"record {step} {DELAY_CYCLES}")
        peer.ask(f"read_at_once {step}")
        writer.ask("wait")
    assert int(peer.ask("count")) > 0


def test_a_peer_sees_when_a_steps_copies_are_done(ranks) -> None:
    writer, peer = ranks
    writer.ask(f"record 1 {50 * DELAY_CYCLES}")
    assert peer.ask("reached 1") == "no"
    writer.ask("wait")
    assert peer.ask("reached 1") == "yes"


def test_i2_published_rows_are_read_behind_the_events_of_their_step(ranks) -> None:
    """Publication waits for the CPU to see the event that the peers have too."""
    writer, peer = ranks
    for step in range(1, 21):
        answer = writer.ask(f"publish {step} {4 * DELAY_CYCLES}")
        assert int(answer.split()[1]) > 0, "complete at once: the copy was not delayed"
        assert peer.ask(f"read_published {step}") == "read"
    assert peer.ask("count") == "0"


def test_i9_a_killed_writer_stops_no_peer(ranks) -> None:
    """Its copies had completed: asking and waiting return, and the offer is gone."""
    writer, peer = ranks
    writer.ask("record 1 0")
    writer.ask("wait")
    assert peer.ask("read 1") == "enqueued"
    writer.kill()
    assert peer.ask("reached 1") == "yes"
    assert peer.ask("read 1") == "enqueued"
    assert peer.ask("work") == "worked"
    assert peer.ask("count") == "0"
    deadline = threading.Event()
    for _ in range(200):
        if peer.ask("refresh") == "none":
            break
        deadline.wait(0.05)
    assert peer.ask("refresh") == "none"
    assert peer.ask("work") == "worked"


def test_a_ring_that_goes_round_and_closes_leaves_the_pool_usable(ranks) -> None:
    """More records than events while one copy is late: peers wait longer, never shorter."""
    writer, peer = ranks
    writer.ask(f"record 1 {DELAY_CYCLES}")
    for step in range(2, 60):
        writer.ask(f"record {step} 0")
    for step in range(1, 60):
        assert peer.ask(f"read {step}") == "enqueued"
    assert peer.ask("count") == "0"


def test_events_are_of_cuda_devices() -> None:
    with pytest.raises(UsageError, match="shared between CUDA processes"):
        TorchEventDriver("cpu")
    event, handle = TorchEventDriver("cuda:0").create()
    assert len(handle) == 64
    event.record()
    torch.cuda.synchronize()
    assert event.query()
