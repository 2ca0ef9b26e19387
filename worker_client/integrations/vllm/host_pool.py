"""The worker's host pool in vLLM's shape: `HiSparseHostPool` over the service's memory.

Made by vLLM (`vllm.v1.hisparse.runtime.get_hisparse_host_pool`), once an engine process, first for
the profiling of CUDA graphs; it is kept and asked again for the real cache. vLLM releases it
through `shared_region.cleanup()`, on errors and at shutdown. On the worker's main thread.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from hisparse_service.contract.errors import ConfigError, GeometryMismatch, HiSparseError
from worker_client.client import Client, CudaUse, Namespace
from worker_client.host_pool import HostPool
from worker_client.integrations.vllm.connection import Role, check_num_blocks, open_namespace
from worker_client.integrations.vllm.identity import HostPlan, plan_host
from worker_client.integrations.vllm.settings import Settings

logger = logging.getLogger("vllm.hisparse_service")
"""Below vLLM's own logger, so that its handlers print what is said here."""


class ServiceRegion:
    """What vLLM calls `shared_region`: owner of mapping, registration and connection."""

    def __init__(self, client: Client, namespace: Namespace, pool: HostPool) -> None:
        self.client = client
        self.namespace = namespace
        self.pool = pool

    def cleanup(self) -> None:
        """Unregister, unmap, leave. Idempotent; with the daemon away too. Never raises.

        vLLM calls it on its way out of another error, which it must not replace.
        """
        try:
            self.pool.cleanup()
        except HiSparseError as error:
            logger.warning("hisparse-service: %s", error)
        try:
            self.client.close()
        except HiSparseError as error:
            logger.warning("hisparse-service: %s", error)


class ServiceHostPool:
    """`vllm.v1.hisparse.runtime.HiSparseHostPool`, its memory the service's.

    Attributes:
        backing: int8 [size]: what `allocate` gave; None before.
        registered: int8 [payload bytes]: the whole backing, which the index layers' keys end;
            shares its storage with `backing`. All of it is registered with CUDA.
        shared_region: Owner of both; set, so that rank 0 of a tensor-parallel group is the only
            writer and vLLM orders the others behind it.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.settings = settings
        self.plan: HostPlan = plan_host(kv_cache_config, settings)
        self.backing: torch.Tensor | None = None
        self.registered: torch.Tensor | None = None
        self.shared_region: ServiceRegion | None = None

    def allocate(self, size: int) -> torch.Tensor:
        """int8 [size]: the source layers in vLLM's layout. The same size gives the same tensor.

        Raises:
            GeometryError: Another size than before, or than the configuration's layers have.
            ConfigError: The pool has another number of blocks, or ranks see different pools.
            HiSparseError: The service cannot give it; nothing stays mapped.
        """
        if self.backing is not None and self.shared_region is not None:
            return self.shared_region.pool.allocate(size)
        if size != self.plan.source_bytes:
            raise ConfigError(
                f"vLLM asks for {size} bytes, its host layers take {self.plan.source_bytes}",
                remedy="Report this: the plugin does not know this layout",
            )
        started_s = time.monotonic()
        region = self._attach()
        try:
            _check_one_pool(region.pool)
            backing = region.pool.allocate(size)
        except BaseException:
            region.cleanup()
            raise
        self.shared_region = region
        self.registered = region.pool.registered
        self.backing = backing
        self._log(region, time.monotonic() - started_s)
        return backing

    def _attach(self) -> ServiceRegion:
        client, namespace = open_namespace(
            self.vllm_config, self.kv_cache_config, self.settings, self.plan,
            role=Role.WORKER, tensor_rank=_tensor_rank(),
        )  # fmt: skip
        try:
            pool = namespace.attach(
                self.plan.num_blocks, cuda=_cuda_use(), timeout_s=self.settings.attach_timeout_s
            )
            check_num_blocks(pool.num_blocks, self.plan)
        except GeometryMismatch as error:
            client.close()
            check_num_blocks(int(error.details.get("num_blocks", 0)), self.plan)
            raise
        except BaseException:
            client.close()
            raise
        return ServiceRegion(client, namespace, pool)

    def _log(self, region: ServiceRegion, seconds: float) -> None:
        pool = region.pool
        logger.info(
            "hisparse-service: host pool of %.2f GiB (%d blocks) from %s at %s, %s%s, in %.1f s",
            pool.payload_bytes / 2**30,
            pool.num_blocks,
            region.client.instance,
            region.client.endpoint,
            "adopted" if pool.adopted else "populated",
            ", registered with CUDA" if pool.cuda_registered else "",
            seconds,
        )


def _cuda_use() -> CudaUse:
    return CudaUse.REQUIRED if torch.cuda.is_available() else CudaUse.OFF


def _tensor_rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _check_one_pool(pool: HostPool) -> None:
    """All ranks of the tensor-parallel group must see the memory that rank 0 writes."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return
    mine = pool.identity
    first = group.broadcast_object(mine if group.rank_in_group == 0 else None, src=0)
    if tuple(first) != mine:
        raise ConfigError(
            f"rank {group.rank_in_group} attached another pool ({mine}) than rank 0 ({first})",
            remedy="A tensor-parallel group shares one node and one daemon",
        )
