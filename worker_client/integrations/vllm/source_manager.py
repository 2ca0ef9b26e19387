"""The host cache group's manager over the service: vLLM's, with lookups that ask the directory.

`install` changes one engine's manager object, after vLLM made it; the classes that other engines of
the process would use stay as they are. Needs vLLM. On the scheduler's thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, HiSparseSourceManager

from worker_client.integrations.vllm.block_pool import BlockKeys, ServiceBlockPool
from worker_client.integrations.vllm.host_blocks import HostBlocks


class ServiceSourceManager(HiSparseSourceManager):  # type: ignore[misc]
    """`HiSparseSourceManager` whose `block_pool` is a `ServiceBlockPool`."""

    block_pool: Any

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[Any], ...], int]:
        """vLLM's, after the directory was asked for the whole prefix in one round trip."""
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, block_size)
        block_pool.prefetch(list(itertools.islice(hashes, max_length // block_size)))
        found: tuple[tuple[list[Any], ...], int] = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec,
            *args, **kwargs,
        )  # fmt: skip
        return found

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """0, or vLLM's number for "not now"; reserves from the daemon what is missing."""
        del apply_admission_cap, prefill_end  # as in vLLM's: a host block for every page
        required = FullAttentionManager.get_num_blocks_to_allocate(
            self, request_id, num_tokens, new_computed_blocks, total_computed_tokens,
            num_local_computed_tokens, num_tokens_main_model,
        )  # fmt: skip
        if request_id not in self.num_cached_block:
            # Hits that nobody uses yet are pinned already: they take no free block.
            required -= self._get_num_evictable_blocks(new_computed_blocks)
        if self.block_pool.ensure(required):
            return 0
        return int(self.coordinator.gpu_pool.num_gpu_blocks) + 1


def install(kv_cache_manager: Any, coordinator: Any, *, host: HostBlocks, keys: BlockKeys) -> Any:
    """Put the service's block pool into an engine's host group; returns the pool.

    Before the first request. vLLM's own pool, which it made just before, has handed out nothing.
    """
    manager = coordinator.host_manager
    stock = manager.block_pool
    pool = ServiceBlockPool(
        host=host,
        keys=keys,
        group_id=coordinator.host_group_id,
        next_transfer=lambda: int(coordinator.next_spill_id),
        num_gpu_blocks=stock.num_gpu_blocks,
        enable_caching=stock.enable_caching,
        hash_block_size=stock.hash_block_size,
        enable_kv_cache_events=stock.enable_kv_cache_events,
        metrics_collector=stock.metrics_collector,
        medium=stock.medium,
        event_owner=stock._event_owner,
    )
    manager.block_pool = pool
    manager._null_block = pool.null_block
    manager.__class__ = ServiceSourceManager
    # vLLM looks prefixes up through the classes that it collected when it was built.
    groups: list[Any] = getattr(kv_cache_manager.coordinator, "attention_groups", [])
    for index, group in enumerate(groups):
        if coordinator.host_group_id in group.group_ids:
            groups[index] = group._replace(manager_cls=ServiceSourceManager)
    return pool


def default_spare_blocks(max_model_len: int, block_size: int, num_blocks: int) -> int:
    """One request of full length, but no more than an eighth of the pool."""
    return min(math.ceil(max_model_len / block_size) + 2, max(num_blocks // 8, 1))
