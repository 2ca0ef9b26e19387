"""`HiSparseConnector` over the service: what vLLM's own does, and three things more.

Scheduler: the host block pool becomes the service's, and a prefix that the directory has but whose
indexer keys this GPU has not is taken as an external hit, whose keys the workers restore before the
forward. Worker: the indexer's keys of a page are copied to the host with the page, and restored for
such hits. Both in stream order, with vLLM's own copy stream, events and descriptors.

`connector_class` makes the class below vLLM's; for an engine without an endpoint it gives back
vLLM's own object. Needs vLLM. Scheduler thread and worker main thread.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hisparse_service.contract.errors import HiSparseError
from worker_client.client import Client
from worker_client.integrations.vllm.block_pool import BlockKeys
from worker_client.integrations.vllm.connection import Role, open_namespace
from worker_client.integrations.vllm.host_blocks import HostBlocks
from worker_client.integrations.vllm.identity import HostPlan, index_group_id, plan_host
from worker_client.integrations.vllm.metrics import (
    ServicePromMetrics,
    make_stats,
    scheduler_stats,
)
from worker_client.integrations.vllm.settings import CONNECTOR, Settings, find_settings
from worker_client.integrations.vllm.source_manager import default_spare_blocks, install
from worker_client.integrations.vllm.worker import ServiceConnectorWorker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
        HiSparseConnector as _Below,
    )
else:
    _Below = object  # `connector_class` puts vLLM's below

logger = logging.getLogger("vllm.hisparse_service")


class IndexCopies(msgspec.Struct, frozen=True):
    """Copies of indexer keys that a step brings, added to vLLM's connector metadata."""

    mirrors: dict[int, tuple[int, int]]
    """Page transfer to (host block, device block of the indexer group)."""
    restores: list[tuple[int, int]]
    """(host block, device block), before the forward."""


class SchedulerSide:
    """The service in the scheduler of one engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self.settings = settings
        self.plan: HostPlan = plan_host(kv_cache_config, settings)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._index_group = index_group_id(kv_cache_config)
        self._client: Client | None = None
        self._coordinator: Any = None
        self._manager: Any = None
        self._hits: dict[str, int] = {}
        """Request to the tokens of its prefix whose indexer keys the GPU has."""
        self._restores: list[tuple[int, int]] = []
        self._completed_fence = 0
        self.restored_pages = 0
        self.reported: dict[str, int] = {}
        """Counters at the last statistics."""

    # --- life -------------------------------------------------------------------------------

    def bind(self, kv_cache_manager: Any, coordinator: Any) -> None:
        """Replace the host block pool that vLLM made.

        Raises:
            ConfigError, ServiceUnavailable: The engine cannot start with this service.
        """
        client, namespace = open_namespace(
            self._vllm_config, self._kv_cache_config, self.settings, self.plan, role=Role.SCHEDULER
        )
        try:
            namespace.take_writer()
            spare = self.settings.spare_blocks or default_spare_blocks(
                int(self._vllm_config.model_config.max_model_len),
                self.plan.geometry.block_size,
                self.plan.num_blocks,
            )
            host = HostBlocks(
                namespace, spare_blocks=spare, when_away=self.settings.when_away,
                away_limit_s=self.settings.away_limit_s,
            )  # fmt: skip
            self.pool = install(
                kv_cache_manager, coordinator, host=host,
                keys=BlockKeys(namespace, salt=hash_salt(self._vllm_config, coordinator)),
            )  # fmt: skip
        except BaseException:
            client.close()
            raise
        self.host = host
        self._client = client
        self._coordinator = coordinator
        self._manager = kv_cache_manager
        logger.info(
            "hisparse-service: host blocks and prefixes of %s at %s, %d blocks",
            client.instance, client.endpoint, self.plan.num_blocks,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the service: what is published stays. Idempotent."""
        if self._client is None:
            return
        try:
            self.host.flush_publications()
        except HiSparseError as error:
            logger.warning("hisparse-service: %s", error)
        self._client.close()
        self._client = None

    @property
    def is_available(self) -> bool:
        """Whether the daemon answered last time."""
        return self._client is not None and self.host.namespace.is_daemon_there

    # --- prefixes ---------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens beyond `num_computed_tokens` that the host has and whose keys can be restored."""
        self._hits.pop(request.request_id, None)
        if not self.plan.index_layers or not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        source = self._coordinator.host_manager
        _, hit = source.find_longest_cache_hit(
            block_hashes=request.block_hashes,
            max_length=request.num_tokens - 1,
            kv_cache_group_ids=[source.kv_cache_group_id],
            block_pool=source.block_pool,
            kv_cache_spec=source.kv_cache_spec,
            drop_eagle_block=source.use_eagle,
            alignment_tokens=source.cache_hit_alignment_tokens,
        )
        if hit <= num_computed_tokens:
            return 0
        self._hits[request.request_id] = num_computed_tokens
        return int(hit - num_computed_tokens)

    def allocated(self, request: Any, num_external_tokens: int) -> None:
        """The request has its blocks: plan the restores of its external tokens."""
        start = self._hits.pop(request.request_id, None)
        if start is None or not num_external_tokens:
            return
        request_id = request.request_id
        self._coordinator.finish_host_import(request_id, failed=False)
        block_size = self.plan.geometry.block_size
        pages = range(start // block_size, -(-(start + num_external_tokens) // block_size))
        host_blocks = self._coordinator.host_manager.req_to_blocks[request_id]
        index_blocks = self._index_manager().req_to_blocks[request_id]
        self._restores += [
            (host_blocks[page].block_id, index_blocks[page].block_id) for page in pages
        ]
        self.restored_pages += len(pages)

    # --- steps ------------------------------------------------------------------------------

    def index_copies(self, command: Any) -> IndexCopies:
        """What the workers copy in this step, beside vLLM's own transfers."""
        restores, self._restores = self._restores, []
        mirrors: dict[int, tuple[int, int]] = {}
        if command is not None and self.plan.index_layers:
            blocks = self._index_manager().req_to_blocks
            for transfer in command.page_transfers:
                if transfer.restore:
                    continue
                request_id, page = self._coordinator.pending_spills[transfer.transfer_id].page
                mirrors[transfer.transfer_id] = (
                    transfer.host_block_id, blocks[request_id][page].block_id,
                )  # fmt: skip
        return IndexCopies(mirrors, restores)

    def pending_writes(self) -> set[int]:
        """Transfers to the host that have not completed."""
        pending = self._coordinator.pending_spills.items()
        return {number for number, spill in pending if not spill.restore}

    def settle(self, pending_before: set[int] | None = None) -> None:
        """Publish and let go, once a step.

        Args:
            pending_before: `pending_writes` before the workers' reports were taken in.
        """
        if pending_before:
            done = pending_before - self.pending_writes()
            self._completed_fence = max(self._completed_fence, max(done, default=-1) + 1)
        self.pool.settle(completed_fence=self._completed_fence)

    def _index_manager(self) -> Any:
        return self._manager.coordinator.single_type_managers[self._index_group]


def hash_salt(vllm_config: Any, coordinator: Any) -> bytes:
    """What makes two engines' block hashes comparable: function, seed and block size."""
    from vllm.v1.core import kv_cache_utils

    pool = coordinator.host_manager.block_pool
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        logger.warning(
            "hisparse-service: %s has a random seed in each process: prefixes are not shared and "
            "do not outlive this engine. Use sha256_cbor, or set PYTHONHASHSEED",
            algorithm,
        )
    parts = (
        algorithm,
        getattr(kv_cache_utils, "NONE_HASH", b"").hex(),
        str(pool.hash_block_size),
    )
    return "/".join(parts).encode()


class ServiceConnector(_Below):  # type: ignore[misc]
    """`HiSparseConnector` whose host pool and blocks are the service's; see `connector_class`."""

    stock: type[Any]

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> Any:
        """Give vLLM's own object where the engine sets no endpoint."""
        if find_settings(vllm_config) is None:
            return cls.stock(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = find_settings(vllm_config)
        assert settings is not None  # noqa: S101  __new__ looked
        self.service: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.service = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            self.connector_worker = ServiceConnectorWorker(vllm_config, kv_cache_config, settings)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self.service is not None  # noqa: S101
        self.service.bind(kv_cache_manager, self.connector_scheduler.coordinator)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self.service is not None  # noqa: S101
        return self.service.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        assert self.service is not None  # noqa: S101
        self.service.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        assert self.service is not None  # noqa: S101
        metadata = super().build_connector_meta(scheduler_output)
        metadata.index_copies = self.service.index_copies(metadata.command)
        self.service.settle()
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.service is not None  # noqa: S101
        pending = self.service.pending_writes()
        super().update_connector_output(connector_output)
        self.service.settle(pending)

    def shutdown(self) -> None:
        super().shutdown()
        if self.service is not None:
            self.service.close()

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        return stats if self.service is None else scheduler_stats(stats, self.service)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return make_stats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        below = super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
        if find_settings(vllm_config) is None:
            return below
        return ServicePromMetrics(
            below, vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


@functools.cache
def connector_class(stock: type[Any]) -> type[Any]:
    """The connector's class below vLLM's `stock`."""
    # vLLM logs and looks connectors up by this name, MultiConnector's statistics among them.
    return type(CONNECTOR, (ServiceConnector, stock), {"stock": stock, "__module__": __name__})


__all__: Sequence[str] = ("IndexCopies", "SchedulerSide", "connector_class", "hash_salt")
