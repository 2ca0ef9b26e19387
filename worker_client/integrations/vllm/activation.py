"""What `vllm.general_plugins` calls: puts our classes behind two of vLLM's names.

Idempotent, and without effect for engines that set no endpoint. A vLLM version that is not listed
is not touched, except that its connector factory then refuses a configuration with an endpoint:
it would otherwise be ignored in silence. Any process of an engine, on its main thread, before the
profiling of the cache.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Final

from hisparse_service.contract.errors import ConfigError
from worker_client.integrations.vllm.settings import CONNECTOR, ENDPOINT_VARIABLE, find_settings

logger = logging.getLogger("vllm.hisparse_service")

SUPPORTED_VERSIONS: Final = ("0.33.0",)
"""Versions that conformance was run against (`make conformance`)."""

_MARK: Final = "_hisparse_service_seam"


def base_version(version: str) -> str:
    """``0.33.0`` of ``0.33.0+cu129`` and ``0.33.0.post1``: builds of one source."""
    return ".".join(version.split("+")[0].split(".")[:3])


def register() -> None:
    """Entry point of ``vllm.general_plugins``.

    Raises:
        ConfigError: HISPARSE_SERVICE_ENDPOINT is set and this vLLM is not supported.
    """
    import vllm

    version = str(vllm.__version__)
    if base_version(version) not in SUPPORTED_VERSIONS:
        _refuse(version)
        return
    _install_host_pool()
    _install_connector()


def _refuse(version: str) -> None:
    message = (
        f"hisparse-service knows vLLM {', '.join(SUPPORTED_VERSIONS)}, this is {version}: "
        "it changes nothing here"
    )
    remedy = "Install a supported vLLM or a newer hisparse-service, or remove the endpoint"
    if os.environ.get(ENDPOINT_VARIABLE):
        raise ConfigError(message, remedy=remedy)
    logger.info("%s", message)
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        return
    create = KVConnectorFactory.create_connector
    if getattr(create, _MARK, False):
        return

    @functools.wraps(create)
    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        if find_settings(config) is not None:
            raise ConfigError(message, remedy=remedy)
        return create(config, *args, **kwargs)

    setattr(checked, _MARK, True)
    KVConnectorFactory.create_connector = staticmethod(checked)


def _install_host_pool() -> None:
    from vllm.v1.hisparse import runtime

    stock = runtime.HiSparseHostPool
    if getattr(stock, _MARK, False):
        return

    def make_host_pool(vllm_config: Any, kv_cache_config: Any) -> Any:
        settings = find_settings(vllm_config)
        if settings is None:
            return stock(vllm_config, kv_cache_config)
        from worker_client.integrations.vllm.host_pool import ServiceHostPool

        return ServiceHostPool(vllm_config, kv_cache_config, settings)

    setattr(make_host_pool, _MARK, True)
    runtime.HiSparseHostPool = make_host_pool


def _install_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry = KVConnectorFactory._registry
    stock = registry[CONNECTOR]
    if getattr(stock, _MARK, False):
        return

    def load_connector() -> Any:
        from worker_client.integrations.vllm.connector import connector_class

        return connector_class(stock())

    setattr(load_connector, _MARK, True)
    registry[CONNECTOR] = load_connector
