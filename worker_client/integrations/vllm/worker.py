"""The worker's half of the connector: vLLM's, with the indexer's keys beside each page.

Order of a step: what the last forward wrote is mirrored first (`_finish_previous_step`), the
forward waits for it, then pages and keys are restored on the compute stream. vLLM reports a page
transfer complete when the copy stream has passed its event; the keys' copies are enqueued before
it, so that a page is durable only with its keys.

Needs vLLM. On the worker's main thread.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker import HiSparseConnectorWorker
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import current_stream

from hisparse_service.contract.errors import ConfigError
from worker_client.host_pool import HostPool
from worker_client.integrations.vllm.connection import check_num_blocks
from worker_client.integrations.vllm.identity import HostPlan, plan_host
from worker_client.integrations.vllm.metrics import make_stats
from worker_client.integrations.vllm.settings import Kernels, Settings
from worker_client.integrations.vllm.swap_figures import SwapSampler
from worker_client.swap_report import SwapReporter

logger = logging.getLogger("vllm.hisparse_service")


class IndexPages:
    """The indexer's keys on both sides, by (index layer, block).

    Args:
        plan: Of the host.
        pool: Mapped.
        caches: Layer to device cache ``[num_blocks, ...]``, a block's bytes contiguous.
        num_device_blocks: Of the device pool.
    """

    def __init__(
        self,
        plan: HostPlan,
        pool: HostPool,
        caches: dict[str, torch.Tensor],
        num_device_blocks: int,
    ) -> None:
        check_num_blocks(pool.num_blocks, plan)
        self.device: list[torch.Tensor] = []
        self.host: list[torch.Tensor] = []
        first = len(plan.source_layers)
        payload = pool.registered.view(torch.uint8)
        for i, (name, page_bytes) in enumerate(
            zip(plan.index_layers, plan.index_page_bytes, strict=True)
        ):
            cache = caches[name]
            block_bytes = cache[0].numel() * cache.element_size()
            if (
                cache.shape[0] != num_device_blocks
                or block_bytes != page_bytes
                or not cache[0].is_contiguous()
            ):
                raise ConfigError(
                    f"the indexer cache of {name} has {cache.shape[0]} blocks of {block_bytes} "
                    f"bytes, expected {num_device_blocks} contiguous ones of {page_bytes}",
                    remedy="Set hisparse_service.index_keys to drop, and report this",
                )
            self.device.append(cache)
            place = plan.geometry.place(first + i, pool.num_blocks)
            self.host.append(
                payload.as_strided(
                    (pool.num_blocks, page_bytes), (place.block_stride_bytes, 1),
                    place.offset_bytes,
                )
            )  # fmt: skip

    def page(self, layer: int, block: int) -> torch.Tensor:
        """uint8 [page_bytes] of a device block."""
        return self.device[layer][block].view(-1).view(torch.uint8)


class ServiceConnectorWorker(HiSparseConnectorWorker):  # type: ignore[misc]
    """See the module's header."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self.settings = settings
        self.index_pages: IndexPages | None = None
        self._mirrors: dict[int, tuple[int, int]] = {}
        self._restores: list[tuple[int, int]] = []
        self.swap_sampler: SwapSampler | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """VLLM's, then the indexer's pages, the kernels and the figures."""
        super().register_kv_caches(kv_caches)
        try:
            self._register_more(kv_caches)
        except BaseException:
            self.shutdown()  # vLLM has released the pool only where its own part failed
            raise

    def _register_more(self, kv_caches: dict[str, torch.Tensor]) -> None:
        plan = plan_host(self.kv_cache_config, self.settings)
        if plan.index_layers:
            self.index_pages = IndexPages(
                plan, self.shared_host_region.pool, kv_caches,
                int(self.kv_cache_config.num_blocks),
            )  # fmt: skip
        counters: list[torch.Tensor] = []
        groups = [runtime.index_group for runtime in self.leader_runtimes]
        if self.settings.kernels is Kernels.SERVICE:
            from worker_client.integrations.vllm.kernels import use_service_kernels

            made = {id(each.group): each for each in use_service_kernels(self.cache_handles)}
            counters = [made[id(group)].state.counters for group in groups]
        self.swap_sampler = SwapSampler(groups, counters=counters, current_stream=current_stream)
        self.swap_reporter = SwapReporter(
            self.shared_host_region.client.counters, self.swap_sampler
        )

    def start_step(self, metadata: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's, with this step's restores; its mirrors come with the next step."""
        self._restores = metadata.index_copies.restores
        super().start_step(metadata, *args, **kwargs)
        self._mirrors.update(metadata.index_copies.mirrors)

    def get_kv_connector_stats(self) -> Any:
        """VLLM's, once a step; what aggregates them knows the service's numbers too."""
        stats = super().get_kv_connector_stats()
        if self.swap_sampler is None:
            return stats
        if stats is not None:
            self.swap_sampler.vllm_took(
                *(
                    sum(stats.data[name])
                    for name in ("cache_hits", "cache_misses", "host_to_device_bytes")
                )
            )
            stats = make_stats(stats.data)
        if not torch.cuda.is_current_stream_capturing():
            self.swap_reporter.tick()
        return stats

    def reset_hot_state(self) -> None:
        """VLLM's: after CUDA graphs were captured."""
        super().reset_hot_state()
        if self.swap_sampler is not None:
            self.swap_sampler.reset()

    def _restore_pages(self, transfers: list[Any]) -> None:
        restores, self._restores = self._restores, []
        pages = self.index_pages
        if pages is not None and restores:
            # The pool is registered with CUDA, which torch's check of pinned memory cannot see.
            with gpu_sync_allowed():
                for layer, host in enumerate(pages.host):
                    for host_block, device_block in restores:
                        pages.page(layer, device_block).copy_(host[host_block], non_blocking=True)
        super()._restore_pages(transfers)

    def _submit_transfers(self, transfers: list[Any]) -> None:
        self._mirror_index_pages(transfers)
        super()._submit_transfers(transfers)

    def _mirror_index_pages(self, transfers: list[Any]) -> None:
        pages = self.index_pages
        copies = [
            copy
            for transfer in transfers
            if (copy := self._mirrors.pop(transfer.transfer_id, None)) is not None
        ]
        if pages is None or not copies or not self.is_host_writer:
            return
        count = len(copies) * len(pages.host)
        descriptors = self._acquire_dma_descriptors(count)
        at = 0
        for layer, host in enumerate(pages.host):
            for host_block, device_block in copies:
                page = pages.page(layer, device_block)
                descriptors.src_np[at] = page.data_ptr()
                descriptors.dst_np[at] = host[host_block].data_ptr()
                descriptors.sizes_np[at] = page.numel()
                at += 1
        self._submit_dma_descriptors(descriptors, count)
