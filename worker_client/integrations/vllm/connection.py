"""One connection of a vLLM process to the service, for its worker or for its scheduler.

A worker and the scheduler of one engine are sessions of one group: the scheduler (rank 0) holds the
group's writer lease, reserves and publishes; the workers (rank 1 on) map the pool and copy. Blocks
that a scheduler reserved outlive it until its workers ended (`delegates_copies`).

Any thread.
"""

from __future__ import annotations

import enum
import time
from typing import Any, Final

from hisparse_service.contract.errors import ConfigError, NotReady
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

_NOT_READY_PAUSE_S: Final = 0.1


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
        NotReady: It was still populating its pool at the end of `attach_timeout_s`.
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
    deadline_s = time.monotonic() + settings.attach_timeout_s
    try:
        while True:
            try:
                return client, client.open_namespace(
                    model=model_identity(vllm_config, settings),
                    kv_dtype=row_format(kv_cache_config, plan),
                    geometry=plan.geometry,
                    tenant=settings.tenant,
                    salt=settings.salt,
                )
            except NotReady:
                # A large pool takes minutes to populate; the engine starts behind it.
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_NOT_READY_PAUSE_S)
    except BaseException:
        client.close()
        raise


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
