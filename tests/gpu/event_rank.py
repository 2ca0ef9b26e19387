"""One rank of tests/gpu/test_events_cuda.py: a process with a CUDA context and a daemon's pool.

    python3 tests/gpu/event_rank.py writer|peer RUNTIME_DIRECTORY DEVICE

Commands come by lines on standard input, answers go by lines to standard output. Row n holds n in
every 32-bit word, so that a row that is read too early tells by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

import torch

from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from worker_client import connect
from worker_client.client import Completed, CudaUse, Enqueued
from worker_client.events import PeerEvents, TorchEventDriver, WriterEvents, WriterTracker
from worker_client.kernels.cuda import CudaBackend
from worker_client.kernels.interface import GroupPages
from worker_client.mirror import BlockMirror, MirrorQueue

SIZE = 16
ROW_BYTES = 656
BLOCKS = 160
RING_BLOCKS = 128
"""Host blocks 1 to RING_BLOCKS are written by step number; the ones behind are reserved for that
purpose, so nothing else lives there."""
RING = 16
GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=SIZE, groups=[LayerGroup(1, ROW_BYTES)]
)


class Rank:
    """What both sides have."""

    def __init__(self, role: str, runtime: str, device: str) -> None:
        self.device = torch.device(device)
        torch.cuda.set_device(self.device)
        self.client = connect(
            runtime, client_name=role, group="tp", rank=int(role == "peer"), world_size=2
        )
        self.client.wait_ready(timeout_s=30)
        self.space = self.client.open_namespace(model="events", kv_dtype="fp8", geometry=GEOMETRY)
        pool = self.space.attach(BLOCKS, cuda=CudaUse.REQUIRED)
        self.host = pool.layer_view(0)
        self.cache = torch.zeros((3, SIZE, ROW_BYTES), dtype=torch.uint8, device=self.device)
        self.pages = GroupPages(host=(self.host,), device=(self.cache,), block_stride_rows=SIZE)
        self.backend = CudaBackend(self.device)
        self.backend.prepare()

    def close(self) -> None:
        del self.host, self.pages
        self.client.close()


class Writer(Rank):
    """Mirrors a block a step and records the step's event behind it."""

    def __init__(self, runtime: str, device: str) -> None:
        super().__init__("writer", runtime, device)
        self.space.take_writer()
        # The ring's blocks are the writer's: nobody is given them while this lease lives.
        self.lease = self.space.reserve(BLOCKS - 1)
        self.events = WriterEvents(self.space, TorchEventDriver(self.device), num_events=RING)
        self.events.offer()
        self.step_number = 0
        self.queue = MirrorQueue(
            num_units=1, block_size=SIZE, backend=self.backend,
            tracker=WriterTracker(self.events, lambda: self.step_number),
        )  # fmt: skip
        self.device_block = torch.ones(1, dtype=torch.int32, device=self.device)
        self.host_blocks = torch.arange(BLOCKS, dtype=torch.int32, device=self.device)
        self.spare = list(range(RING_BLOCKS + 1, BLOCKS))

    def record(self, step: int, cycles: int) -> str:
        """Rows of this step, copied after so many cycles of delay; enqueued, not waited for."""
        self.step_number = step
        self.cache[1].view(torch.int32).fill_(step)
        if cycles:
            torch.cuda._sleep(cycles)
        block = 1 + step % RING_BLOCKS
        self.backend.mirror_blocks(
            pages=self.pages, device_blocks=self.device_block,
            host_blocks=self.host_blocks[block : block + 1],
        )  # fmt: skip
        self.events.record(step)
        return "recorded"

    def publish(self, step: int, cycles: int) -> str:
        """The whole way: reserved, mirrored, seen complete by the CPU, published."""
        self.step_number = step
        name, block = f"r{step}", self.spare.pop()
        at = self.lease.reserved_blocks.tolist().index(block)
        blocks = self.lease.reserved_blocks[at : at + 1].copy()
        generations = self.lease.reserved_generations[at : at + 1].copy()
        self.cache[1].view(torch.int32).fill_(step)
        if cycles:
            torch.cuda._sleep(cycles)
        self.queue.open_request(name)
        self.queue.add_block(name, 0, block)
        self.queue.submit_blocks(0, self.pages, [BlockMirror(name, 0, 1)])
        self.queue.accept(name, SIZE)
        self.queue.seal()
        item = Enqueued(lease=self.lease, blocks=blocks, generations=generations)
        self.space.mirror(enqueued=[item])
        polls = 0
        while not self.queue.poll():
            polls += 1
        chain = self.space.key_chain()
        chain.extend([step] * SIZE)
        self.space.mirror(
            completed=[
                Completed(
                    lease=self.lease, blocks=blocks, generations=generations, keys=chain.keys()
                )
            ]
        )
        self.queue.drop_request(name)
        return f"published {polls}"

    def wait(self) -> str:
        """Until the device is idle."""
        torch.cuda.synchronize()
        return "idle"


class Peer(Rank):
    """Reads what the writer copied, on its own stream and without the CPU's waiting for it."""

    def __init__(self, runtime: str, device: str) -> None:
        super().__init__("peer", runtime, device)
        self.events = PeerEvents(self.space, TorchEventDriver(self.device))
        self.rows = torch.arange(SIZE, device=self.device)
        self.out = torch.zeros((1, SIZE, ROW_BYTES), dtype=torch.uint8, device=self.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)

    def _read(self, block: int, step: int) -> None:
        self.backend.stage(pages=self.pages, host_slots=self.rows + block * SIZE, out=self.out)
        self.wrong += (self.out.view(torch.int32) != step).any()

    def refresh(self) -> str:
        """Ask for the writer's events."""
        return "open" if self.events.refresh() else "none"

    def read(self, step: int) -> str:
        """Read the step's rows behind its event."""
        self.events.wait(step)
        return self.read_at_once(step)

    def read_at_once(self, step: int) -> str:
        """Read them as soon as the device gets to it."""
        self._read(1 + step % RING_BLOCKS, step)
        self.events.tick()
        return "enqueued"

    def read_published(self, step: int) -> str:
        """Find the block by its key, as an engine does."""
        chain = self.space.key_chain()
        chain.extend([step] * SIZE)
        lease = self.space.lookup(chain)
        (block,) = lease.blocks.tolist()
        self.events.wait(step)
        self._read(block, step)
        torch.cuda.synchronize()
        lease.check()
        lease.release()
        return "read"

    def reached(self, step: int) -> str:
        """Whether the step's copies look done."""
        return "yes" if self.events.has_reached(step) else "no"

    def work(self) -> str:
        """Something on the stream, waited for."""
        self.out.fill_(1)
        torch.cuda.synchronize()
        return "worked"

    def count(self) -> str:
        """Wait for the device; reads that found another step's rows, and begin to count anew."""
        wrong = int(self.wrong)
        self.wrong.zero_()
        return str(wrong)


def answer(text: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    role, runtime, device = sys.argv[1:]
    rank: Writer | Peer = (Writer if role == "writer" else Peer)(runtime, device)
    answer("ready")
    try:
        for line in sys.stdin:
            name, *numbers = line.split()
            command: Callable[..., str] = getattr(rank, name)
            answer(command(*map(int, numbers)))
    finally:
        with contextlib.suppress(BrokenPipeError):
            rank.close()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    sys.exit(main())
