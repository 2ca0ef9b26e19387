"""One worker of the storm: writes, publishes, reads and checks until it is told to stop or killed.

    python -m tests.faults.storm_worker RUNTIME BOARD NUM_WORKERS INDEX SEED

It shares made-up prompts with the other workers. Each turn it looks a prompt up, reads what was
found and checks every row, computes (fills) the rest, and publishes it, or gives up half way.
SIGTERM ends it after the turn. HISPARSE_STORM_PLANT names a bug to plant (planted.py): a storm that
does not see it proves nothing.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    HiSparseError,
    LeaseError,
    PeerError,
    StaleBlock,
    UsageError,
)
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.keys import KeyChain
from tests.faults import planted
from tests.faults.board import Board, Count
from tests.faults.rows import ROW_BYTES, count_wrong_bytes, fill_block
from worker_client import connect
from worker_client.attachment import ATTACH_TIMEOUT_S
from worker_client.blocks import BlockLease, LeaseState
from worker_client.client import Client, Completed, CudaUse, Enqueued, MirrorOutcome, Namespace

BLOCK_SIZE, NUM_LAYERS = 4, 2
NUM_BLOCKS = 112
NUM_PROMPTS, PROMPT_BLOCKS, FAMILY = 240, 6, 8
GEOMETRY = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED,
    block_size=BLOCK_SIZE,
    groups=[LayerGroup(NUM_LAYERS, ROW_BYTES)],
)
REQUEST_TIMEOUT_S = 2.0
SLOW_READS, SLOW_READ_S = 0.1, 0.02
"""Share and length of reads that take long, as a gather of many rows does."""


def open_storm(client: Client, *, attach_timeout_s: float = ATTACH_TIMEOUT_S) -> Namespace:
    """The namespace that all workers of a storm share."""
    namespace = client.open_namespace(model="storm", kv_dtype="rows", geometry=GEOMETRY)
    namespace.attach(NUM_BLOCKS, cuda=CudaUse.OFF, timeout_s=attach_timeout_s)
    return namespace


def prompt_tokens(prompt: int, num_blocks: int) -> list[int]:
    """Token ids; prompts of a family begin alike, so that prefixes are shared."""
    shared = [prompt // FAMILY] * (BLOCK_SIZE * 3)
    own = [1_000 + prompt] * (BLOCK_SIZE * (PROMPT_BLOCKS - 3))
    return (shared + own)[: num_blocks * BLOCK_SIZE]


class StormWorker:
    """The turns of one worker."""

    def __init__(
        self,
        client: Client,
        board: Board,
        index: int,
        rng: random.Random,
        *,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
    ) -> None:
        self.client = client
        self.namespace = open_storm(client, attach_timeout_s=attach_timeout_s)
        pool = self.namespace.pool
        assert pool is not None
        place = GEOMETRY.place(0, pool.num_blocks)
        # [block, row, layer, byte] as the group lies in memory, seen as [block, layer, row, byte].
        self.blocks = (
            pool.payload[: pool.num_blocks * place.block_stride_bytes]
            .reshape(pool.num_blocks, BLOCK_SIZE, NUM_LAYERS, ROW_BYTES)
            .transpose(0, 2, 1, 3)
        )
        self.board, self.index, self.rng = board, index, rng
        self.held: list[tuple[BlockLease, KeyChain]] = []

    def turn(self) -> None:
        """One prompt, start to end, then perhaps a reading of what is held from before."""
        chain = self.namespace.key_chain()
        chain.extend(
            prompt_tokens(self.rng.randrange(NUM_PROMPTS), self.rng.randint(1, PROMPT_BLOCKS))
        )
        was_answered = False
        with self.counted():
            lease = self.namespace.lookup(chain)
            was_answered = True
            try:
                self.read(lease, chain)
                self.write(lease, chain)
            finally:
                self.held.append((lease, chain))
        while len(self.held) > self.rng.randint(0, 4):
            with self.counted():
                self.namespace.release(self.held.pop(self.rng.randrange(len(self.held)))[0])
        for lease, chain in self.held:
            with self.counted():
                self.read(lease, chain)
        for item in self.namespace.handed_in():
            count = Count.HANDED_IN
            if item.canonical_blocks is None:
                # A request that ended before the daemon was back gave its mirrors up itself.
                has_ended = item.completed.lease.state is LeaseState.RELEASED
                count = Count.MIRRORS_GIVEN_UP if has_ended else Count.MIRRORS_LOST
            self.board.add(self.index, count, len(item.completed.blocks))
        if was_answered:
            self.board.add(self.index, Count.OPERATIONS)

    def read(self, lease: BlockLease, chain: KeyChain) -> None:
        """Copy what the lease holds out of the pool under its guard, then check every row."""
        blocks, generations = lease.blocks.copy(), lease.generations.copy()
        if not len(blocks):
            return
        # The first copy is verified inside the guard, so that a stop or an eviction is likely to
        # come between the check before and the second copy; both count only if the guard says so.
        with lease.read_guard():
            wrong = self.count_wrong(chain, blocks, generations)
            if self.rng.random() < SLOW_READS:
                time.sleep(SLOW_READ_S)
            copies = self.blocks[blocks].copy()
        wrong += self.count_wrong(chain, blocks, generations, copies)
        if wrong:
            self.board.add(self.index, Count.WRONG_BYTES, wrong)
        self.board.add(self.index, Count.READS, len(blocks))

    def count_wrong(
        self,
        chain: KeyChain,
        blocks: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
        copies: npt.NDArray[np.uint8] | None = None,
    ) -> int:
        """Wrong bytes in copies of these blocks, made now if not given."""
        copies = self.blocks[blocks].copy() if copies is None else copies
        wrong = 0
        for position, (block, generation) in enumerate(zip(blocks, generations, strict=True)):
            wrong += count_wrong_bytes(
                copies[position],
                chain.keys(position, position + 1),
                namespace=self.namespace_tag,
                block=int(block),
                version=int(generation),
            )
        return wrong

    @property
    def namespace_tag(self) -> int:
        """Stands in each row; the same in every epoch."""
        return int.from_bytes(self.namespace.fingerprint[:4], "little")

    def write(self, lease: BlockLease, chain: KeyChain) -> None:
        """Compute the blocks that were not found; publish them, or give up half way."""
        have = len(lease.blocks)
        missing = chain.num_blocks - have
        if missing <= 0:
            return
        self.namespace.reserve(missing, lease=lease)
        blocks = lease.reserved_blocks[-missing:].copy()
        generations = lease.reserved_generations[-missing:].copy()
        if planted.is_planted("publish_early"):
            self.publish(lease, chain, have, blocks, generations)
        for position, (block, generation) in enumerate(zip(blocks, generations, strict=True)):
            if self.rng.random() < 0.02:
                return  # a request that ends before its last mirror: nothing may be published
            fill_block(
                self.blocks[block],
                chain.keys(have + position, have + position + 1),
                namespace=self.namespace_tag,
                block=int(block),
                version=int(generation),
                writer=self.index,
            )
        if self.rng.random() < 0.5:
            self.namespace.mirror(
                enqueued=[Enqueued(lease=lease, blocks=blocks, generations=generations)]
            )
        if not planted.is_planted("publish_early"):
            self.publish(lease, chain, have, blocks, generations)

    def publish(
        self,
        lease: BlockLease,
        chain: KeyChain,
        have: int,
        blocks: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint32],
    ) -> None:
        """Hand in what was filled, or have the client keep it while the daemon is away."""
        parent = int(lease.blocks[have - 1]) if have else 0
        parent_generation = int(lease.generations[have - 1]) if have else 0
        result = self.namespace.mirror(
            completed=[
                Completed(
                    lease=lease, blocks=blocks, generations=generations,
                    keys=chain.keys(have, chain.num_blocks),
                    parent=parent, parent_generation=parent_generation,
                )
            ]
        )  # fmt: skip
        if result.outcome is MirrorOutcome.ACKNOWLEDGED:
            self.board.add(self.index, Count.PUBLISHED_BLOCKS, len(blocks))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Typed errors are part of a storm; each is counted, and nothing else is let by."""
        try:
            yield
        except (StaleBlock, LeaseError):
            self.board.add(self.index, Count.STALE_RAISED)
        except CapacityError:
            self.drop_all()
        except PeerError:
            self.board.add(self.index, Count.UNAVAILABLE)
        except ClosedError:
            raise
        except UsageError:
            # The daemon restarted between two messages of one turn: what we held is gone.
            self.board.add(self.index, Count.REFUSED)

    def drop_all(self) -> None:
        """Let go of all leases."""
        held, self.held = self.held, []
        for lease, _ in held:
            lease.release()


def main() -> int:
    """Turns until SIGTERM."""
    runtime, board_path, num_workers, index, seed = sys.argv[1:]
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    rng = random.Random(f"{seed}-{index}")
    planted.plant(os.environ.get(planted.VARIABLE, ""))
    with Board(pathlib.Path(board_path), int(num_workers)) as board:
        board.add(int(index), Count.INCARNATIONS)
        client = connect_when_possible(runtime, stop)
        if client is None:
            return 0
        with client:
            worker = StormWorker(client, board, int(index), rng)
            try:
                while not stop:
                    worker.turn()
                worker.drop_all()
            except BaseException:
                board.add(int(index), Count.UNEXPECTED)
                raise
            finally:
                del worker.blocks
    return 0


def connect_when_possible(runtime: str, stop: list[bool]) -> Client | None:
    """Connect and attach, trying again while the daemon is away."""
    while not stop:
        client = None
        try:
            client = connect(runtime, client_name="storm", timeout_s=REQUEST_TIMEOUT_S)
            open_storm(client)
        except (PeerError, CapacityError, LeaseError):
            if client is not None:
                client.close()
            time.sleep(0.02)
        except HiSparseError:
            if client is not None:
                client.close()
            raise
        else:
            return client
    return None


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main())
