"""One connection of a vLLM process to the service, for its worker or for its scheduler.

A worker and the scheduler of one engine are sessions of one group: the scheduler (rank 0) holds the
group's writer lease, reserves and publishes; the workers (rank 1 on) map the pool and copy. Blocks
that a scheduler reserved outlive it until its workers ended (`delegates_copies`).

Any thread.
"""

from __future__ import annotations

import enum
from typing import Any

from hisparse_service.contract.errors import ConfigError
from worker_client import connect
from worker_client.client import Client, Namespace
from worker_client.integrations.vllm.identity import (
    HostPlan,
    check_topology,
    group_name,
    model_identity,
    row_format,
)
from worker_client.integrations.vllm.settings import Settings


class Role(enum.Enum):
    """What this process does for its engine."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


def open_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    settings: Settings,
    plan: HostPlan,
    *,
    role: Role,
    tensor_rank: int = 0,
) -> tuple[Client, Namespace]:
    """Connect and name what this engine may share. The caller closes the client.

    Raises:
        ConfigError: The topology or the endpoint cannot work.
        ServiceUnavailable: No daemon answers.
    """
    check_topology(vllm_config)
    if settings.endpoint.startswith("embedded://"):
        raise ConfigError(
            "an embedded daemon belongs to one process; an engine has several",
            remedy="Start hisparse-service and give its runtime directory",
        )
    world_size = int(getattr(vllm_config.parallel_config, "tensor_parallel_size", 1))
    client = connect(
        settings.endpoint,
        client_name=f"vllm {role.value}",
        group=group_name(vllm_config),
        rank=0 if role is Role.SCHEDULER else 1 + tensor_rank,
        world_size=1 + world_size,
        delegates_copies=role is Role.SCHEDULER,
    )
    try:
        namespace = client.open_namespace(
            model=model_identity(vllm_config, settings),
            kv_dtype=row_format(kv_cache_config, plan),
            geometry=plan.geometry,
            tenant=settings.tenant,
            salt=settings.salt,
        )
    except BaseException:
        client.close()
        raise
    return client, namespace


def check_num_blocks(found: int, plan: HostPlan) -> None:
    """The layout of vLLM moves with the number of blocks, so that both must have the same.

    Raises:
        ConfigError: With the `host_pool_gib` that fits.
    """
    if found == plan.num_blocks:
        return
    page = plan.source_bytes // plan.num_blocks
    # vLLM rounds a shared block up to the OS page; the larger number serves both of its ways.
    gib = found * -(-page // 4096) * 4096 / 2**30
    raise ConfigError(
        f"the pool of this model has {found} blocks, this engine asks for {plan.num_blocks}",
        remedy=f"Engines that share a pool set the same host_pool_gib; {gib:.6f} gives {found} "
        "blocks. Or release the pool with `hisparse-service purge` while no engine runs",
        num_blocks=found, asked_blocks=plan.num_blocks,
    )  # fmt: skip


__all__ = ["Role", "check_num_blocks", "open_namespace"]
