"""What the coordinator needs of others: a namespace, its blocks' bytes, the writer's progress.

Protocols alone, so that policy can be run and tested without a daemon, a pool or a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hisparse_service.contract.keys import KeyChain
from worker_client.blocks import BlockLease
from worker_client.publication import Completed, Enqueued, HandedIn, MirrorResult

__all__ = ["BlockContent", "BlockService", "MirrorProgress"]


class BlockService(Protocol):
    """What the coordinator needs of the service: `worker_client.client.Namespace` has it."""

    @property
    def is_daemon_there(self) -> bool:
        """Whether the daemon answered last time."""
        ...

    def key_chain(self, *, salt: bytes = b"") -> KeyChain:
        """An empty chain for one request."""
        ...

    def reserve(
        self, num_blocks: int, *, lease: BlockLease | None = None, timeout_s: float | None = None
    ) -> BlockLease:
        """Take free blocks to write."""
        ...

    def lookup(
        self,
        keys: KeyChain | bytes,
        *,
        lease: BlockLease | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> BlockLease:
        """Pin the longest published prefix of these keys."""
        ...

    def mirror(
        self,
        *,
        enqueued: Sequence[Enqueued] = (),
        completed: Sequence[Completed] = (),
        reserve: Sequence[tuple[BlockLease, int]] = (),
    ) -> MirrorResult:
        """Report mirrors, publish, reserve more."""
        ...

    def handed_in(self) -> list[HandedIn]:
        """What became of queued mirrors."""
        ...

    def release(self, *leases: BlockLease) -> None:
        """End leases."""
        ...


class BlockContent(Protocol):
    """The bytes of host blocks: `worker_client.host_pool.HostPool` has them."""

    def checksum(self, blocks: Any) -> Any:
        """u64 [len(blocks)]: of each block's bytes."""
        ...


class MirrorProgress(Protocol):
    """How far the writer's copies look to be: `worker_client.events.PeerEvents` has it."""

    @property
    def is_connected(self) -> bool:
        """Whether `has_reached` can tell anything."""
        ...

    def has_reached(self, step: int) -> bool:
        """Whether the copies of a step look done: a reason to look them up, never a proof."""
        ...
