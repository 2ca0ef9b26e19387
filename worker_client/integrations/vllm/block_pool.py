"""The scheduler's host block pool in vLLM's shape: `BlockPool` over the service's directory.

Block ids are those of the shared backing. Three kinds of blocks are the engine's at any time:

    free      reserved from the daemon, without content: what `get_new_blocks` hands out
    in use    referenced by requests, reserved (being written) or pinned (published)
    idle      published or complete, with a hash, no request uses it: goes with the next `settle`

An idle published block is unpinned and stays in the directory, for this and every other engine; it
comes back by `prefetch`, which one prefix lookup costs one round trip. Which of them are evicted is
the daemon's to say. While the daemon is away idle blocks stay, and are hits.

Needs vLLM. On the scheduler's thread.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

from hisparse_service.contract.errors import LeaseLost
from hisparse_service.contract.limits import MAX_KEYS
from worker_client.client import Namespace
from worker_client.integrations.vllm.host_blocks import HostBlocks, Publication

logger = logging.getLogger("vllm.hisparse_service")

_KEEP_FREE: Final = 2
"""Free blocks go back above this many times the spare ones."""


class BlockKeys:
    """vLLM's block hashes as keys of the namespace.

    Args:
        namespace: Whose keys.
        salt: Says which hash function, seed and block size made the hashes, so that hashes which
            mean different tokens never meet.
    """

    def __init__(self, namespace: Namespace, *, salt: bytes) -> None:
        self._namespace = namespace
        self._salt = salt

    def of(self, hashes: Iterable[bytes]) -> bytes:
        """16 B a hash; each covers its whole prefix, so that any run of them may be asked."""
        chain = self._namespace.key_chain(salt=self._salt)
        chain.extend_hashes(hashes)
        return chain.keys()

    def apart(self) -> BlockKeys:
        """Keys that no other engine has."""
        return BlockKeys(self._namespace, salt=self._salt + os.urandom(16))


class ServiceBlockPool(SharedEventQueueBlockPool):  # type: ignore[misc]
    """See the module's header.

    Args:
        host: The engine's share of the directory.
        keys: Hashes to keys.
        group_id: Of the host cache group.
        next_transfer: Number that vLLM's next page transfer will get.
        **kwargs: `BlockPool`'s.
    """

    def __init__(
        self,
        *,
        host: HostBlocks,
        keys: BlockKeys,
        group_id: int,
        next_transfer: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.host = host
        self._keys = keys
        self._group_id = group_id
        self._next_transfer = next_transfer
        self._free: collections.deque[Any] = collections.deque()
        self._idle: set[int] = set()
        self._num_used = 0
        self._asked: set[bytes] = set()
        """First hashes that a prefetch of this step did not find."""
        self._wrong: set[int] = set()

    # --- vLLM's interface -------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Blocks to write; `ensure` has made room.

        Raises:
            ValueError: Not so many are there.
        """
        if num_blocks > len(self._free) and not self.ensure(num_blocks):
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            block.ref_cnt = 1
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        self._num_used += num_blocks
        return blocks

    def touch(self, blocks: Sequence[Any]) -> None:
        """One more request uses these."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self._idle.discard(block.block_id)
                self._num_used += 1
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One request less uses these; the first ones are reused first."""
        others: dict[Any, list[Any]] = {}
        reusable: list[Any] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.pool is not None and block.pool is not self:
                others.setdefault(block.pool, []).append(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt:
                continue
            self._num_used -= 1
            if block.block_hash is None and not self._is_published(block.block_id):
                reusable.append(block)
            else:
                self._idle.add(block.block_id)
        self._free.extendleft(reversed(reusable))
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Remember hashes, as vLLM does, and publish: vLLM calls this when rows are durable."""
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size,
            kv_cache_group_id, block_mask,
        )  # fmt: skip
        if num_cached_blocks >= num_full_blocks:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        new = blocks[num_cached_blocks:num_full_blocks]
        whole = list(itertools.takewhile(lambda i: not new[i].is_null, range(len(new))))
        if block_mask is not None:
            whole = list(itertools.takewhile(lambda i: block_mask[i], whole))
        parent = blocks[num_cached_blocks - 1] if num_cached_blocks else None
        if not whole or (parent is not None and parent.is_null):
            return
        end = num_cached_blocks + len(whole)
        self.host.publish(
            Publication(
                blocks=[new[i].block_id for i in whole],
                keys=self._keys.of(hashes[i] for i in range(num_cached_blocks, end)),
                parent=0 if parent is None else parent.block_id,
            )
        )

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Rows of these are wrong: they are no hits any more; see `HostBlocks.forget`."""
        super().evict_blocks(block_ids)
        self._wrong |= block_ids
        self.host.distrust(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes; what this engine published can be found by nobody after it.

        The rows of other engines stay; this one no longer shares with them, because whoever
        resets has changed the weights.
        """
        if self._num_used:
            logger.warning(
                "Failed to reset prefix cache because some blocks (%d) are not freed yet",
                self._num_used,
            )
            return False
        self.host.flush_publications()
        self._idle |= self.host.take_loose()
        self._wrong |= {block for block in self._idle if block in self.host.pinned}
        self._keys = self._keys.apart()
        self.settle(completed_fence=0)
        self.host.evict_unused()
        return True

    def get_num_free_blocks(self) -> int:
        """Blocks that no request uses: another engine may still take some of them first."""
        return int(self.num_gpu_blocks) - 1 - self._num_used

    # --- for the manager and the connector --------------------------------------------------

    def ensure(self, num_blocks: int) -> bool:
        """Make at least so many blocks free; False: they cannot be had now."""
        missing = num_blocks - len(self._free)
        if missing > 0:
            self._free.extend(self.blocks[block] for block in self.host.reserve(missing))
        return len(self._free) >= num_blocks

    def prefetch(self, hashes: Sequence[bytes]) -> None:
        """Pin what the directory has of this prefix, so that `get_cached_block` finds it."""
        hashes = hashes[:MAX_KEYS]
        known = 0
        for known, block_hash in enumerate(hashes):  # noqa: B007
            if self._held(block_hash) is None:
                break
        else:
            return
        if hashes[known] in self._asked:
            return
        found = self.host.lookup(self._keys.of(hashes))
        for block_hash, block_id in zip(hashes[known:], found[known:], strict=False):
            block = self.blocks[block_id]
            if block.block_hash is not None:
                continue
            key = make_block_hash_with_group_id(block_hash, self._group_id)
            self._insert_block_hash(key, block, num_tokens=None)
            if block.ref_cnt == 0:
                self._idle.add(block_id)
        if len(found) < len(hashes):
            self._asked.add(hashes[max(known, len(found))])

    def settle(self, *, completed_fence: int) -> None:
        """Once a step: publish, let idle blocks go, give back what is too much.

        Args:
            completed_fence: See `HostBlocks.flush_returns`.

        Raises:
            LeaseLost: The service gave up blocks that requests use.
        """
        self._asked.clear()
        self._drop_lost()
        withdrawn = self.host.take_withdrawn()
        if withdrawn:
            self.evict_blocks(withdrawn)
        self.host.flush_publications()
        self._idle |= self.host.take_loose()
        self._let_idle_go()
        self._idle |= self.host.take_loose()
        excess = len(self._free) - _KEEP_FREE * self.host.spare_blocks
        if excess > 0:
            blocks = [self._free.pop().block_id for _ in range(excess)]
            self.host.give_back(blocks, fence=self._next_transfer())
        self.host.flush_returns(completed_fence=completed_fence)

    # --- small parts ------------------------------------------------------------------------

    def _is_published(self, block_id: int) -> bool:
        return block_id in self.host.pinned or self.host.is_waiting(block_id)

    def _held(self, block_hash: bytes) -> Any:
        return self.cached_block_hash_to_block.get_one_block(
            make_block_hash_with_group_id(block_hash, self._group_id)
        )

    def _let_idle_go(self) -> None:
        going: list[int] = []
        for block_id in list(self._idle):
            block = self.blocks[block_id]
            if block.ref_cnt or self.host.is_waiting(block_id):
                if block.ref_cnt:
                    self._idle.discard(block_id)
                continue
            if block_id in self.host.pinned:
                if self.host.is_needed(block_id):
                    self._idle.discard(block_id)
                else:
                    going.append(block_id)
                continue
            self._idle.discard(block_id)
            self._drop_hash(block)
            self.host.reuse(block_id)
            self._free.append(block)
        wrong = [block_id for block_id in going if block_id in self._wrong]
        for block_id in wrong:
            self._drop_hash(self.blocks[block_id])
        kept = [block_id for block_id in going if block_id not in self._wrong]
        for block_id in (*self.host.unpin(kept), *self.host.forget(wrong)):
            self._idle.discard(block_id)
            self._wrong.discard(block_id)
            self._drop_hash(self.blocks[block_id])

    def _drop_hash(self, block: Any) -> None:
        # The block may still be a hit, in the directory: no BlockRemoved is sent here; what
        # the daemon evicts is told by its own events.
        self._remove_cached_block_hashes(block)

    def _drop_lost(self) -> None:
        lost = self.host.take_lost()
        if not lost:
            return
        self._free = collections.deque(b for b in self._free if b.block_id not in lost)
        used = sorted(block for block in lost if self.blocks[block].ref_cnt)
        if used:
            raise LeaseLost(
                f"the service restarted and gave {len(used)} blocks up that requests of this "
                f"engine are writing, the first is {used[0]}",
                remedy="Restart the engine; it finds its published prefixes again",
                block=used[0],
            )

    def held_hashes(self) -> Iterator[bytes]:
        """Hashes of the blocks that are hits without asking; for tests and metrics."""
        for block in self.blocks:
            if block.block_hash is not None:
                yield get_block_hash(block.block_hash)
