"""A fixed sequence of requests that uses every one of them, with rows that tell what they are.

`Scenario.run` speaks the protocol by hand, so that nothing is repeated or hidden by the client
library, and remembers what was acknowledged. `verify` asks a (new) daemon for all of it: nothing
acknowledged is lost, and whatever is found has the right bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from helpers import FINGERPRINT, KEY_SPACE, SHM, DaemonProcess, RawClient, keys_of, wait_until

from hisparse_service.contract import messages as m
from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.errors import ConfigError, UsageError
from hisparse_service.contract.geometry import (
    HostGeometry,
    HostLayout,
    LayerGroup,
    encode_geometry,
)
from tests.faults.rows import ROW_BYTES, count_wrong_bytes, fill_block

BLOCK_SIZE, NUM_LAYERS, NUM_BLOCKS = 4, 2, 33
CAPACITY = NUM_BLOCKS - 1
GROUP = "scenario"
DEVICE = "GPU-" + "0" * 32
GEOMETRY = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED,
    block_size=BLOCK_SIZE,
    groups=[LayerGroup(NUM_LAYERS, ROW_BYTES)],
)
SHORT_TIMES = {
    "limits__heartbeat_interval_s": "0.2", "limits__session_timeout_s": "1",
    "limits__lease_ttl_s": "2", "limits__writer_lease_ttl_s": "2",
    "limits__adoption_grace_s": "1",
}  # fmt: skip


class DaemonGone(Exception):
    """No answer: the daemon died at its point."""


class Rows:
    """The payload of the scenario's backing, mapped."""

    def __init__(self, backing: m.BackingReply) -> None:
        path = SHM / backing.segment_name.lstrip("/")
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), backing.segment_bytes)
        stride = GEOMETRY.place(0, backing.num_blocks).block_stride_bytes
        payload = np.frombuffer(
            self._map, np.uint8, backing.num_blocks * stride, backing.payload_offset_bytes
        )
        used = BLOCK_SIZE * NUM_LAYERS * ROW_BYTES
        self.blocks: npt.NDArray[np.uint8] = (
            payload.reshape(backing.num_blocks, stride)[:, :used]
            .reshape(backing.num_blocks, BLOCK_SIZE, NUM_LAYERS, ROW_BYTES)
            .transpose(0, 2, 1, 3)
        )

    def fill(self, blocks: bytes, generations: bytes, keys: bytes) -> None:
        """Write the rows of blocks that hold these keys."""
        for at, (block, generation) in enumerate(zip(u32(blocks), u32(generations), strict=True)):
            fill_block(
                self.blocks[block], keys[at * 16 : at * 16 + 16], namespace=1, block=block,
                version=generation, writer=1,
            )  # fmt: skip

    def wrong_bytes(self, blocks: bytes, generations: bytes, keys: bytes) -> int:
        """Bytes that are not what blocks with these keys hold."""
        return sum(
            count_wrong_bytes(
                self.blocks[block].copy(), keys[at * 16 : at * 16 + 16], namespace=1, block=block,
                version=generation,
            )
            for at, (block, generation) in enumerate(
                zip(u32(blocks), u32(generations), strict=True)
            )
        )  # fmt: skip

    def close(self) -> None:
        """Unmap."""
        del self.blocks
        self._map.close()


def u32(raw: bytes) -> list[int]:
    """Block ids or generations as numbers."""
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


class Scenario:
    """One run against a daemon."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.acknowledged: list[bytes] = []
        """Prefixes (keys) whose publication was answered and that were not given up since."""

    def run(self) -> None:
        """All requests, then SIGTERM. Returns early when the daemon dies."""
        client = RawClient(self.daemon.runtime_dir)
        rows: Rows | None = None
        try:
            namespace, rows = self.open(client)
            self.write(client, namespace, rows)
            self.crowd_out(client, namespace)
            self.operate(client, namespace)
            client.ask(m.Done, m.Bye)
        except (AssertionError, DaemonGone):
            if self.daemon.process.poll() is None:
                raise
            return
        finally:
            client.close()
            if rows is not None:
                rows.close()
        self.daemon.process.send_signal(signal.SIGTERM)
        self.daemon.process.wait(30)

    def open(self, client: RawClient) -> tuple[int, Rows]:
        """Session, namespace, backing, turn, writer."""
        self.send_hello(client)
        namespace = self.ask(
            client, m.NamespaceReply, m.OpenNamespace, FINGERPRINT, "scenario",
            encode_geometry(GEOMETRY),
        ).namespace_id  # fmt: skip
        backing = self.ask(client, m.BackingReply, m.AllocateBacking, namespace, NUM_BLOCKS)
        self.ask(client, m.TurnReply, m.RegistrationTurn, namespace, False)
        self.ask(client, m.TurnReply, m.RegistrationTurn, namespace, True)
        self.ask(client, m.LeaseReply, m.TakeWriter, namespace)
        self.ask(client, m.Done, m.OfferEvents, namespace, "", bytes(64))
        self.ask(client, m.EventsReply, m.FetchEvents, namespace)
        with contextlib.suppress(ConfigError):  # this daemon allocates no device memory
            self.ask(
                client, m.DeviceBackingReply, m.AllocateDeviceBacking, namespace, "", DEVICE, 1,
                bytes(16),
            )  # fmt: skip
        self.ask(client, m.CountReply, m.ReleaseDeviceBacking, namespace, "", DEVICE, "detach")
        return namespace, Rows(backing)

    def send_hello(self, client: RawClient) -> None:
        """Hello, and wait until the pool is there."""
        self.ask(client, m.HelloReply, m.Hello, 1, 1, "scenario", GROUP, 0, 1, "")
        while self.ask(client, m.StatusReply, m.Status).status["phase"] == "starting":
            pass

    def write(self, client: RawClient, namespace: int, rows: Rows) -> None:
        """Reserve, write, publish (many, one, a duplicate), give back, read."""
        got = self.ask(client, m.BlocksReply, m.Reserve, namespace, 0, 8)
        lease = got.lease_id
        blocks, generations = u32(got.blocks), u32(got.generations)

        def part(start: int, stop: int) -> tuple[bytes, bytes]:
            return got.blocks[start * 4 : stop * 4], got.generations[start * 4 : stop * 4]

        first, one = keys_of(1, 2, 3), keys_of(4)
        rows.fill(*part(0, 3), first)
        enqueued = m.EnqueuedItem(lease, *part(0, 3))
        self.mirror(client, namespace, enqueued=[enqueued], reserve=[m.ReserveItem(lease, 1)])
        self.mirror(client, namespace, completed=[m.CompletedItem(lease, 0, 0, *part(0, 3), first)])
        self.acknowledged.append(first)
        rows.fill(*part(3, 4), one)
        item = m.CompletedItem(lease, blocks[2], generations[2], *part(3, 4), one)
        self.mirror(client, namespace, completed=[item])
        self.acknowledged = [first + one]
        # The same prefix again: merged, and the own blocks go back.
        item = m.CompletedItem(lease, 0, 0, *part(4, 7), first)
        self.mirror(client, namespace, completed=[item])
        self.ask(client, m.Done, m.Abandon, namespace, lease, part(7, 8)[0])
        self.ask(client, m.BlocksReply, m.Reclaim, namespace, lease, *part(7, 8))
        found = self.ask(client, m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, first)
        assert rows.wrong_bytes(found.blocks, found.generations, first) == 0
        self.ask(client, m.BlocksReply, m.Pin, namespace, found.lease_id, *part(3, 4))
        self.ask(client, m.Done, m.Unpin, namespace, found.lease_id, part(3, 4)[0])
        self.ask(client, m.Pong, m.Ping, [lease])
        self.ask(client, m.Done, m.ReleaseLeases, [lease, found.lease_id])

    def crowd_out(self, client: RawClient, namespace: int) -> None:
        """Other prefixes, one damaged, one freed, one evicted by need."""
        bad = self.ask(client, m.BlocksReply, m.Reserve, namespace, 0, 1)
        item = m.CompletedItem(
            bad.lease_id, 0, 0, bad.blocks, bad.generations, keys_of(40), bytes(range(8))
        )  # with a checksum that cannot be right
        self.mirror(client, namespace, completed=[item])
        found = self.ask(
            client, m.DamageReply, m.ReportDamage, namespace, bad.blocks, bad.generations
        )
        assert found.verdicts == bytes([Verdict.DAMAGED])
        self.ask(client, m.Done, m.ReleaseLeases, [bad.lease_id])
        keys = keys_of(50, 51)
        got = self.ask(client, m.BlocksReply, m.Reserve, namespace, 0, 2)
        item = m.CompletedItem(got.lease_id, 0, 0, got.blocks, got.generations, keys)
        self.mirror(client, namespace, completed=[item])
        self.ask(client, m.Done, m.Free, namespace, got.lease_id, got.blocks)
        # Use of the first prefix: what is evicted for the next reservation is not it.
        first = self.acknowledged[0]
        held = self.ask(client, m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, first)
        old = self.ask(client, m.BlocksReply, m.Reserve, namespace, 0, 3)
        item = m.CompletedItem(old.lease_id, 0, 0, old.blocks, old.generations, keys_of(60, 61, 62))
        self.mirror(client, namespace, completed=[item])
        self.ask(client, m.Done, m.ReleaseLeases, [old.lease_id])
        many = self.ask(client, m.BlocksReply, m.Reserve, namespace, 0, CAPACITY - 4)
        self.ask(client, m.Done, m.ReleaseLeases, [many.lease_id, held.lease_id])

    def operate(self, client: RawClient, namespace: int) -> None:
        """What an operator asks."""
        self.ask(client, m.ListReply, m.Sessions)
        self.ask(client, m.ListReply, m.ListBlocks, namespace)
        self.ask(client, m.Done, m.YieldWriter, namespace)
        self.acknowledged = [self.acknowledged[0][:48]]
        self.ask(client, m.CountReply, m.Evict, namespace, 1)
        self.ask(client, m.LimitsReply, m.SetLimits)
        with contextlib.suppress(UsageError):  # nothing was recorded
            self.ask(client, m.TraceReply, m.Trace, "look")
        self.ask(client, m.StatusReply, m.Overview)
        self.ask(client, m.Done, m.Drain, False)

    def mirror(
        self,
        client: RawClient,
        namespace: int,
        *,
        enqueued: list[m.EnqueuedItem] | None = None,
        completed: list[m.CompletedItem] | None = None,
        reserve: list[m.ReserveItem] | None = None,
    ) -> None:
        """One batch."""
        self.ask(
            client, m.MirrorReply, m.MirrorBatch, namespace, KEY_SPACE, enqueued or [],
            completed or [], reserve or [],
        )  # fmt: skip

    def ask(self, client: RawClient, reply_type: type, request_type: type, *fields: object) -> Any:
        """Ask, and notice the daemon's death at once."""
        request_id = client.send(request_type, *fields)
        while not client.socket.poll(20):
            if self.daemon.process.poll() is not None:
                raise DaemonGone
        reply = client.receive()
        m.raise_for_error(reply)
        assert reply.request_id == request_id
        assert isinstance(reply, reply_type), reply
        return reply


def verify(daemon: DaemonProcess, acknowledged: list[bytes]) -> None:
    """Nothing acknowledged is lost, all that is found verifies, the accounts balance (I2, I6)."""
    scenario = Scenario(daemon)
    client = RawClient(daemon.runtime_dir)
    try:
        namespace, rows = scenario.open(client)
        for keys in [*acknowledged, keys_of(1, 2, 3, 4)]:
            found = scenario.ask(client, m.BlocksReply, m.Lookup, namespace, 0, KEY_SPACE, keys)
            hits = len(found.blocks) // 4
            if keys in acknowledged:
                assert hits == len(keys) // 16, f"{hits} of {len(keys) // 16} blocks are left"
            assert rows.wrong_bytes(found.blocks, found.generations, keys[: hits * 16]) == 0
            if found.lease_id:
                scenario.ask(client, m.Done, m.ReleaseLeases, [found.lease_id])
        rows.close()
        client.counts(namespace)
        wait_for_all_blocks(client, namespace)
        scenario.ask(client, m.Done, m.Bye)
    finally:
        client.close()


def wait_for_all_blocks(client: RawClient, namespace: int) -> None:
    """Until nothing is reserved or pinned for somebody who is gone."""

    def is_all_back() -> bool:
        client.ask(m.Pong, m.Ping)
        counts = client.counts(namespace)
        return counts["reserved"] == counts["pinned"] == 0

    wait_until(is_all_back, what="all blocks to come back")


def segments_of(instance: str) -> list[Path]:
    """What is left in shared memory, unfinished segments included."""
    return [path for path in SHM.iterdir() if instance in path.name]
