"""Checks of reported blocks: one for all who ask, bounded, and never on the control loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import DEADLINE_S, FINGERPRINT, GEOMETRY, unique_instance

from hisparse_service.contract import limits
from hisparse_service.contract.checksum import Verdict, block_extents, content_checksum
from hisparse_service.contract.geometry import encode_geometry
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import BackingMode, MirrorItem
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.settings import PoolSettings
from hisparse_service.server import block_checks
from hisparse_service.server.block_checks import BlockChecks
from hisparse_service.server.state import NamespaceEntry

NUM_BLOCKS = 400


class Loop:
    """Carries out calls of the helper when the test says so."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.calls.get(timeout=DEADLINE_S)()


class World:
    """A pool in real shared memory, its directory, and a helper thread that starts when told."""

    def __init__(self) -> None:
        self.pool = Pool.create_or_adopt(
            PoolSettings(instance=unique_instance(), pool_bytes=8 * limits.MIB)
        )
        self.loop = Loop()
        self.checks = BlockChecks(self.loop.calls.put)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.checks.run, args=(self.stopping,), daemon=True)
        self.directory = Directory(epoch=1)
        namespace = self.directory.open_namespace(FINGERPRINT, name="n", block_size=4)
        blob = encode_geometry(GEOMETRY)
        backing = self.pool.make_backing(
            namespace=namespace, fingerprint=FINGERPRINT, name="n", geometry=blob,
            num_blocks=NUM_BLOCKS, payload_bytes=GEOMETRY.pool_bytes(NUM_BLOCKS),
        )  # fmt: skip
        self.directory.attach_backing(namespace, backing.table, mode=BackingMode.FRESH)
        self.entry = NamespaceEntry(
            namespace_id=namespace, fingerprint=FINGERPRINT, name="n", geometry=GEOMETRY,
            geometry_blob=blob, key_space=b"", backing=backing,
        )  # fmt: skip
        self.directory.open_session(1)
        self.verdicts: list[tuple[int, Verdict]] = []

    def payload(self, block: int) -> memoryview:
        assert self.entry.backing is not None
        ((offset, size),) = block_extents(GEOMETRY, NUM_BLOCKS, block)
        start = self.entry.backing.record.payload_offset_bytes + offset
        return memoryview(self.pool._segment.mapping)[start : start + size]

    def publish(self, num_blocks: int, *, wrong: bool = False) -> list[tuple[int, int]]:
        """Blocks of one prefix, with the checksum of what is there or with others."""
        got = self.directory.reserve(1, 1, num_blocks, 0, now_s=0.0)
        checksums = [content_checksum([self.payload(b)]) ^ int(wrong) for b in got.blocks.tolist()]
        item = MirrorItem(
            got.lease_id, got.blocks, got.generations,
            np.arange(1, 2 * num_blocks + 1, dtype=np.uint64).tobytes(),
            checksums=np.array(checksums, np.uint64),
        )  # fmt: skip
        self.directory.mirror_completed(1, 1, [item])
        self.directory.release_leases(1, [got.lease_id])
        return list(zip(got.blocks.tolist(), got.generations.tolist(), strict=True))

    def report(self, handle: tuple[int, int]) -> None:
        self.checks.report(
            self.pool, self.directory, self.entry, handle,
            lambda verdict: self.verdicts.append((handle[0], verdict)),
        )  # fmt: skip

    def check(self, num_verdicts: int) -> list[Verdict]:
        """Let the helper work until there are so many verdicts."""
        if self.thread.ident is None:
            self.thread.start()
        self.loop.run_until(lambda: len(self.verdicts) >= num_verdicts)
        self.directory.check_invariants()
        return [verdict for _, verdict in self.verdicts]

    def close(self) -> None:
        self.stopping.set()
        self.checks.close()
        if self.thread.ident is not None:
            self.thread.join(DEADLINE_S)
        self.directory.detach()
        self.entry.backing = None
        self.pool.release()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_one_check_serves_all_who_report_the_same_block(world: World) -> None:
    (handle,) = world.publish(1, wrong=True)
    for _ in range(3):
        world.report(handle)
    assert world.verdicts == [], "nothing is read on the loop"
    assert world.check(3) == [Verdict.DAMAGED] * 3
    assert world.directory.statistics(1).checks == {"damaged": 1}
    world.report(handle)
    assert world.verdicts[-1] == (handle[0], Verdict.STALE)


def test_a_check_that_found_damage_in_a_block_that_went_meanwhile_changes_nothing(
    world: World,
) -> None:
    (handle,) = world.publish(1, wrong=True)
    world.report(handle)
    world.directory.evict(1, num_blocks=1)
    assert world.check(1) == [Verdict.STALE]
    assert world.directory.statistics(1).withdrawn == 0


def test_no_more_blocks_wait_than_the_limit(world: World) -> None:
    handles = world.publish(limits.MAX_BLOCKS_IN_CHECK + 2)
    for handle in handles:
        world.report(handle)
    assert [verdict for _, verdict in world.verdicts] == [Verdict.NOT_CHECKED] * 2
    verdicts = world.check(len(handles))
    assert verdicts.count(Verdict.SOUND) == limits.MAX_BLOCKS_IN_CHECK
    world.verdicts.clear()
    world.report(handles[-1])
    assert world.check(1) == [Verdict.SOUND], "there is room again"


def test_pages_that_cannot_be_read_leave_the_block_as_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Pool, buffer: memoryview, *, offset_bytes: int) -> None:
        raise OSError(5, "a page that the hardware lost")

    (handle,) = world.publish(1, wrong=True)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "read_into", fails)
        world.report(handle)
        assert world.check(1) == [Verdict.UNVERIFIABLE]
    assert world.directory.statistics(1).withdrawn == 0
    world.verdicts.clear()
    world.report(handle)
    assert world.check(1) == [Verdict.DAMAGED]


def test_a_long_prefix_goes_in_slices_and_all_of_it_goes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_checks, "WITHDRAW_SLICE_BLOCKS", 16)
    handles = world.publish(200, wrong=True)
    world.report(handles[3])
    world.check(1)
    assert world.directory.statistics(1).withdrawn == 17, "the rest is not waited for"
    world.loop.run_until(lambda: world.directory.statistics(1).withdrawn == 197)
    world.directory.check_invariants()
    assert world.directory.counts(1).free == NUM_BLOCKS - 1 - 3


def test_a_bug_in_the_helper_leaves_nobody_without_an_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (handle,) = world.publish(1, wrong=True)
    world.report(handle)
    with monkeypatch.context() as patch:
        patch.setattr(block_checks, "content_checksum", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.checks.run(world.stopping)
    world.loop.run_until(lambda: bool(world.verdicts))
    assert world.verdicts == [(handle[0], Verdict.UNVERIFIABLE)]


def test_the_buffer_is_filled_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_checks, "_READ_BYTES", 24)  # blocks have 64
    (handle,) = world.publish(1)
    world.report(handle)
    assert world.check(1) == [Verdict.SOUND]
    world.payload(handle[0])[-1] ^= 1
    world.report(handle)
    assert world.check(2)[-1] is Verdict.DAMAGED
