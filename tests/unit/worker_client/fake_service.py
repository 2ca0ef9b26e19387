"""A model of the daemon's rules in one process: what the coordinator's tests run against.

It keeps exact books and refuses what the daemon refuses, so that a test fails where a coordinator
would corrupt a pool. The real daemon is tested with the coordinator in tests/integration.
"""

from __future__ import annotations

import numpy as np

from hisparse_service.contract.errors import (
    CapacityError,
    IllegalTransition,
    LeaseLost,
    NotHeld,
    PublishOutOfOrder,
    ServiceUnavailable,
    StaleBlock,
)
from hisparse_service.contract.keys import KeyChain
from worker_client.blocks import LeaseState
from worker_client.client import Completed, HandedIn, MirrorOutcome, MirrorResult

FINGERPRINT = bytes(range(16))


class FakeLease:
    def __init__(self, service):
        self.service = service
        self.pinned = []  # (block, generation)
        self.reserved = []
        self.enqueued = set()
        self.released = False
        self.lost_blocks = np.empty(0, np.uint32)
        self.state = LeaseState.GRANTED

    blocks = property(lambda self: _u32(b for b, _ in self.pinned))
    generations = property(lambda self: _u32(g for _, g in self.pinned))
    reserved_blocks = property(lambda self: _u32(b for b, _ in self.reserved))
    reserved_generations = property(lambda self: _u32(g for _, g in self.reserved))

    def check(self):
        if self.released:
            raise LeaseLost("released")
        for block, generation in self.pinned:
            if self.service.generation[block] != generation or block not in self.service.key_of:
                raise StaleBlock(f"block {block}")

    def release(self):
        self.service.release(self)


class FakeService:
    """Capacity, reservations, prefix index, pins and least-recently-used eviction."""

    def __init__(self, num_blocks, *, block_size=4):
        self.block_size = block_size
        self.capacity = num_blocks - 1
        self.free = list(range(1, num_blocks))
        self.generation = [0] * num_blocks
        self.key_of = {}
        self.block_of = {}
        self.parent_of = {}
        self.pins = {}
        self.reserved = {}
        self.leases = []
        self.is_away = False
        self.messages = 0
        self.queue = []  # (client, enqueued, completed)
        self.answers = []  # (client, what became of it)
        self.published_log = []

    def client(self):
        """What another process sees of the service: only its own queued mirrors."""
        return FakeClient(self)

    @property
    def is_daemon_there(self):
        return not self.is_away

    def key_chain(self, *, salt=b""):
        return KeyChain(FINGERPRINT, self.block_size, salt=salt)

    def _hear(self):
        self.messages += 1
        if self.is_away:
            raise ServiceUnavailable("away")

    def num_available(self):
        return len(self.free) + sum(1 for b in self.key_of if not self.pins.get(b))

    def reserve(self, num_blocks, *, lease=None):
        self._hear()
        if num_blocks > self.num_available():
            raise CapacityError("full", needed=num_blocks, free=self.num_available())
        lease = lease or self._new_lease()
        lease.reserved += self._take(num_blocks, lease)
        return lease

    def _new_lease(self):
        lease = FakeLease(self)
        self.leases.append(lease)
        return lease

    def _take(self, num_blocks, lease):
        taken = []
        while len(self.free) < num_blocks:
            self.evict_one()
        for _ in range(num_blocks):
            block = self.free.pop(0)
            self.generation[block] += 1
            self.reserved[block] = lease
            taken.append((block, self.generation[block]))
        return taken

    def evict_one(self):
        """The oldest unpinned block that no published block continues."""
        parents = {self.parent_of[b] for b in self.key_of}
        for block in list(self.key_of):
            if not self.pins.get(block) and block not in parents:
                del self.block_of[self.key_of.pop(block)]
                self.free.append(block)
                return
        # What is left is held by pinned children; parents of pinned blocks may go first here.
        for block in list(self.key_of):
            if not self.pins.get(block):
                del self.block_of[self.key_of.pop(block)]
                self.free.append(block)
                return
        raise AssertionError("nothing to evict")

    def lookup(self, keys, *, lease=None, start=0, stop=None):
        self._hear()
        if isinstance(keys, KeyChain):
            keys = keys.keys(start, stop)
        lease = lease or self._new_lease()
        for at in range(0, len(keys), 16):
            block = self.block_of.get(keys[at : at + 16])
            if block is None:
                break
            self.pins[block] = self.pins.get(block, 0) + 1
            lease.pinned.append((block, self.generation[block]))
        return lease

    def mirror(self, *, enqueued=(), completed=(), reserve=(), client=None):
        self.messages += 1
        if self.is_away:
            self.queue.append((client, list(enqueued), list(completed)))
            return MirrorResult(
                outcome=MirrorOutcome.QUEUED, canonical_blocks=_u32(()),
                canonical_generations=_u32(()), reserved=[_arrays([])] * len(reserve), num_free=0,
            )  # fmt: skip
        self._note_enqueued(enqueued)
        canonical = [pair for item in completed for pair in self._publish(item)]
        granted = [
            _arrays(self._take(n, lease) if n <= self.num_available() else [])
            for lease, n in reserve
        ]
        for (lease, _), (blocks, generations) in zip(reserve, granted, strict=True):
            lease.reserved += list(zip(blocks.tolist(), generations.tolist(), strict=True))
        blocks, generations = _arrays(canonical)
        return MirrorResult(
            outcome=MirrorOutcome.ACKNOWLEDGED, canonical_blocks=blocks,
            canonical_generations=generations, reserved=granted, num_free=len(self.free),
        )  # fmt: skip

    def _note_enqueued(self, enqueued):
        for item in enqueued:
            for block in item.blocks.tolist():
                if self.reserved.get(block) is not item.lease:
                    raise NotHeld(f"block {block}")
                item.lease.enqueued.add(block)

    def _publish(self, item: Completed):
        parent = item.parent
        if parent and parent not in self.key_of:
            raise PublishOutOfOrder(f"parent {parent}")
        result = []
        for index, block in enumerate(item.blocks.tolist()):
            if self.reserved.get(block) is not item.lease:
                raise NotHeld(f"block {block}")
            if block not in item.lease.enqueued:
                raise IllegalTransition(f"block {block} was never enqueued", state="reserved")
            key = item.keys[index * 16 : index * 16 + 16]
            del self.reserved[block]
            item.lease.reserved.remove((block, self.generation[block]))
            known = self.block_of.get(key)
            if known is None:
                self.key_of[block] = key
                self.block_of[key] = block
                self.parent_of[block] = parent
                self.published_log.append((block, self.generation[block], key))
                known = block
            else:
                self.free.append(block)
            self.pins[known] = self.pins.get(known, 0) + 1
            item.lease.pinned.append((known, self.generation[known]))
            result.append((known, self.generation[known]))
            parent = known
        return result

    def come_back(self):
        """The same daemon answers again and takes what was queued."""
        self.is_away = False
        for client, enqueued, completed in self.queue:
            self._note_enqueued([item for item in enqueued if not item.lease.released])
            # A batch that names a lease which is gone is refused as a whole; the client gives up
            # all that it would have published.
            is_refused = any(item.lease.released for item in (*enqueued, *completed))
            for item in completed:
                blocks, generations = (None, None) if is_refused else _arrays(self._publish(item))
                self._answer(client, item, blocks, generations)
        self.queue = []

    def restart(self):
        """Another daemon adopts the pool: what is published stays, what is reserved is lost."""
        self.is_away = False
        for lease in self.leases:
            lost = [block for block, _ in lease.reserved]
            lease.lost_blocks = np.concatenate((lease.lost_blocks, _u32(lost)))
            for block in lost:
                del self.reserved[block]
                self.free.append(block)
            lease.reserved, lease.enqueued = [], set()
        for client, _, completed in self.queue:
            for item in completed:
                self._answer(client, item, None, None)
        self.queue = []

    def _answer(self, client, item, blocks, generations):
        answer = HandedIn(
            completed=item, canonical_blocks=blocks, canonical_generations=generations
        )
        self.answers.append((client, answer))

    def handed_in(self, client=None):
        own = [answer for owner, answer in self.answers if owner is client]
        self.answers = [pair for pair in self.answers if pair[0] is not client]
        return own

    def release(self, *leases):
        self.messages += 1
        for lease in leases:
            if lease.released:
                continue
            lease.released = True
            for block, _ in lease.pinned:
                self.pins[block] -= 1
            for block, _ in lease.reserved:
                del self.reserved[block]
                self.free.append(block)
            lease.pinned, lease.reserved = [], []
            self.leases.remove(lease)

    def check(self):
        assert len(self.free) + len(self.reserved) + len(self.key_of) == self.capacity
        assert len(set(self.free)) == len(self.free)
        held = {}
        for lease in self.leases:
            for block, _ in lease.pinned:
                held[block] = held.get(block, 0) + 1
        assert held == {b: n for b, n in self.pins.items() if n}


class FakeClient:
    """One process's connection to a `FakeService`."""

    def __init__(self, service):
        self._service = service

    def __getattr__(self, name):
        return getattr(self._service, name)

    def mirror(self, **batch):
        return self._service.mirror(**batch, client=self)

    def handed_in(self):
        return self._service.handed_in(self)


def _u32(values):
    return np.fromiter(values, dtype=np.uint32)


def _arrays(pairs):
    return _u32(b for b, _ in pairs), _u32(g for _, g in pairs)
