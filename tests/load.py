"""A made-up load for the page, `top` and traces: workers that look up, publish and report.

python tests/load.py <runtime directory> <seconds>
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from helpers import RawClient, keys_of

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import HiSparseError
from hisparse_service.contract.geometry import (
    HostGeometry,
    HostLayout,
    LayerGroup,
    encode_geometry,
)
from hisparse_service.contract.keys import key_space

GEOMETRY = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED, block_size=64, groups=[LayerGroup(1, 656)] * 4
)
NAMES = {b"glm-5-fp8-layout": "glm-5.2-fp8 tp4", b"deepseek-v32-bf1": "deepseek-v3.2-bf16 tp2"}


class Engine:
    """One engine's writer: prompts of a few families, so that some prefixes are found again."""

    def __init__(
        self, runtime_dir: Path, fingerprint: bytes, *, group: str, rank: int, num_blocks: int
    ) -> None:
        self.client = RawClient(runtime_dir)
        self.client.hello(group=group, rank=rank)
        self.fingerprint, self.num_blocks = fingerprint, num_blocks
        reply = self.client.ask(
            m.NamespaceReply, m.OpenNamespace, fingerprint, NAMES[fingerprint],
            encode_geometry(GEOMETRY),
        )  # fmt: skip
        self.namespace = reply.namespace_id
        self.client.ask(m.BackingReply, m.AllocateBacking, self.namespace, num_blocks)
        if rank == 0:
            self.client.ask(m.LeaseReply, m.TakeWriter, self.namespace)
        self.random = random.Random(group)
        self.counters = dict.fromkeys(
            ("rows_read_resident", "rows_read_hot", "rows_missed", "bytes_gathered"), 0.0
        )
        self.leases: list[int] = []

    def request(self) -> None:
        """Look a prompt up, publish what is missing of it, keep its lease for a while."""
        family, length = self.random.randrange(12), self.random.randrange(8, 40)
        tail = self.random.randrange(1 << 40)
        numbers = [family << 20 | i for i in range(length)] + [tail << 8 | i for i in range(6)]
        keys, ask = keys_of(*numbers), self.client.ask
        found = ask(m.BlocksReply, m.Lookup, self.namespace, 0, key_space(self.fingerprint), keys)
        hits = len(found.blocks) // 4
        got = ask(m.BlocksReply, m.Reserve, self.namespace, found.lease_id, len(numbers) - hits + 2)
        self.leases.append(got.lease_id)
        count = 4 * (len(numbers) - hits)
        blocks, generations = got.blocks[:count], got.generations[:count]
        space = key_space(self.fingerprint)
        enqueued = m.EnqueuedItem(got.lease_id, blocks, generations)
        ask(m.MirrorReply, m.MirrorBatch, self.namespace, space, [enqueued])
        parent = int.from_bytes(found.blocks[-4:], "little") if hits else 0
        parent_generation = int.from_bytes(found.generations[-4:], "little") if hits else 0
        item = m.CompletedItem(
            got.lease_id, parent, parent_generation, blocks, generations, keys[16 * hits :]
        )
        ask(m.MirrorReply, m.MirrorBatch, self.namespace, space, [], [item])
        if len(self.leases) > 6:
            ask(m.Done, m.ReleaseLeases, [self.leases.pop(0)])

    def report(self) -> None:
        """A heartbeat with counters."""
        rows = self.random.randrange(40_000, 60_000)
        for name, share in (
            ("rows_read_resident", 0.5), ("rows_read_hot", 0.38), ("rows_missed", 0.12),
        ):  # fmt: skip
            self.counters[name] += int(rows * share)
        self.counters["bytes_gathered"] += int(rows * 0.12) * 656
        self.client.ask(m.Pong, m.Ping, self.leases, self.counters)


def main(runtime_dir: Path, seconds: float) -> None:
    """Run two engines of two ranks each."""
    glm, deepseek = NAMES
    engines = [
        Engine(runtime_dir, glm, group="glm-a", rank=0, num_blocks=900),
        Engine(runtime_dir, glm, group="glm-b", rank=0, num_blocks=900),
        Engine(runtime_dir, deepseek, group="deepseek", rank=0, num_blocks=400),
    ]
    readers = [Engine(runtime_dir, glm, group="glm-a", rank=1, num_blocks=900)]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for engine in engines:
            try:
                engine.request()
            except HiSparseError as error:
                sys.stderr.write(f"{error.code}: {error}\n")
                engine.client.ask(m.Done, m.ReleaseLeases, engine.leases)
                engine.leases.clear()
        for engine in (*engines, *readers):
            engine.report()
        time.sleep(0.05)
    for engine in (*engines, *readers):
        engine.client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
