"""A directory with one small namespace, and keys made from paths of a tree."""

from __future__ import annotations

import hashlib

import numpy as np

from hisparse_service.contract.keys import key_space
from hisparse_service.contract.segment import RECORD_DTYPE
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import (
    BackingMode,
    CompletedItem,
    DirectoryEvent,
    EventKind,
    LookupResult,
    MirrorItem,
    ReserveResult,
)
from hisparse_service.testing.clock import FakeClock

FINGERPRINT = bytes(range(16))
SPACE = key_space(FINGERPRINT)
TTL_S = 30.0
BLOCK_SIZE = 64


def key(path: tuple[int, ...]) -> bytes:
    """The key of the block at the end of a path: chained, as real ones are."""
    return hashlib.blake2b(repr(path).encode(), digest_size=16).digest()


def chain(path: tuple[int, ...]) -> bytes:
    """The keys of all blocks of a path."""
    return b"".join(key(path[:i]) for i in range(1, len(path) + 1))


def path_of(length: int, *, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


class World:
    """One namespace (id 1), sessions 1 and 2, a clock, and the events that were sent."""

    def __init__(self, capacity: int = 32, *, table: np.ndarray | None = None, **options) -> None:
        self.clock = FakeClock()
        self.events: list[DirectoryEvent] = []
        self.options = options
        self.table = np.zeros(capacity + 1, RECORD_DTYPE) if table is None else table
        self.directory = self._new()
        mode = BackingMode.FRESH if table is None else BackingMode.ADOPT
        self.report = self.directory.attach_backing(1, self.table, mode=mode)
        self.open_sessions()

    def _new(self) -> Directory:
        directory = Directory(
            epoch=1, hash_seed=0x1234_5678_9ABC_DEF0_0FED, lease_ttl_s=TTL_S,
            event_sink=self.events.append, **self.options,
        )  # fmt: skip
        directory.open_namespace(FINGERPRINT, name="m", block_size=BLOCK_SIZE, namespace=1)
        return directory

    def open_sessions(self) -> None:
        self.directory.open_session(1)
        self.directory.open_session(2)

    def restart(self) -> None:
        """SIGKILL and successor: only the table is left."""
        self.directory = self._new()
        self.report = self.directory.attach_backing(1, self.table, mode=BackingMode.ADOPT)
        self.open_sessions()

    def reserve(self, num_blocks: int, *, lease: int = 0, session: int = 1) -> ReserveResult:
        return self.directory.reserve(session, 1, num_blocks, lease, now_s=self.clock.now_s)

    def complete(
        self,
        reserved: ReserveResult,
        path: tuple[int, ...],
        *,
        after: tuple[int, int] = (0, 0),
        session: int = 1,
    ) -> CompletedItem:
        """Publish the blocks as the last ones of the path."""
        item = self.item(reserved, path, after=after)
        (answer,) = self.directory.mirror_completed(session, 1, [item])
        return answer

    def item(
        self, reserved: ReserveResult, path: tuple[int, ...], *, after: tuple[int, int] = (0, 0)
    ) -> MirrorItem:
        keys = chain(path)[-16 * len(reserved.blocks) :]
        return MirrorItem(
            reserved.lease_id, reserved.blocks, reserved.generations, keys, after[0], after[1]
        )

    def publish(
        self, path: tuple[int, ...], *, session: int = 1, release: bool = True
    ) -> tuple[ReserveResult, CompletedItem]:
        """Reserve and publish a whole path from its start."""
        reserved = self.reserve(len(path), session=session)
        answer = self.complete(reserved, path, session=session)
        if release:
            self.directory.release_leases(session, [reserved.lease_id])
        return reserved, answer

    def lookup(self, path: tuple[int, ...], *, session: int = 1, lease: int = 0) -> LookupResult:
        return self.directory.lookup(session, 1, SPACE, chain(path), lease, now_s=self.clock.now_s)

    def found(self, path: tuple[int, ...]) -> int:
        """How many blocks of a path are published; leaves no pin."""
        result = self.lookup(path)
        if result.lease_id:
            self.directory.release_leases(1, [result.lease_id])
        return len(result.blocks)

    def evicted(self) -> list[int]:
        """Blocks of all evicted events, in order."""
        return [
            int(block)
            for event in self.events
            if event.kind is EventKind.EVICTED
            for block in event.blocks
        ]

    def check(self) -> None:
        """I6, and everything else that can be recounted."""
        counts = self.directory.counts(1)
        total = counts.free + counts.reserved + counts.published + counts.pinned
        assert total == counts.capacity == len(self.table) - 1
        self.directory.check_invariants()
