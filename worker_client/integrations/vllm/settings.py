"""What the user set: keys of ``kv_connector_extra_config``, or one environment variable.

Pure: reads vLLM's configuration object by its attributes only. The one place that knows the keys.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hisparse_service.contract.errors import ConfigError

ENDPOINT_VARIABLE: Final = "HISPARSE_SERVICE_ENDPOINT"
PREFIX: Final = "hisparse_service"
CONNECTOR: Final = "HiSparseConnector"


class Kernels(enum.StrEnum):
    """Whose kernels resolve top-k rows and gather the missing ones."""

    VLLM = "vllm"
    SERVICE = "hisparse_service"


class WhenAway(enum.StrEnum):
    """What happens to requests that need new host blocks while the service is away."""

    WAIT = "wait"
    """They stay in vLLM's queue; running requests go on."""
    FAIL = "fail"
    """After `away_limit_s` the engine ends with an error, so that traffic fails over."""


class IndexKeys(enum.StrEnum):
    """Whether the indexer's keys are kept with the blocks."""

    KEEP = "keep"
    """A prefix is found again by an engine whose GPU has no indexer keys for it."""
    DROP = "drop"
    """Less host memory; only prefixes whose keys the GPU still has are hits."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine."""

    endpoint: str
    """Runtime directory, ipc:// or embedded:// (see `worker_client.connect`)."""
    kernels: Kernels = Kernels.VLLM
    when_away: WhenAway = WhenAway.WAIT
    away_limit_s: float = 60.0
    index_keys: IndexKeys = IndexKeys.KEEP
    model_id: str = ""
    """Identity of the weights; empty: made from vLLM's model configuration."""
    tenant: str = ""
    """Separates engines that must not see each other's prefixes."""
    salt: str = ""
    """Change it when something changes the rows that the model's name does not tell."""
    spare_blocks: int = 0
    """Host blocks that the engine keeps reserved in advance; 0: one request's worth."""
    attach_timeout_s: float = 600.0
    """For the daemon to give the pool: it may still be populating it."""


def find_settings(vllm_config: Any) -> Settings | None:
    """The settings of an engine; None where it does not use the service.

    Raises:
        ConfigError: A key or value that cannot be.
    """
    extra = _hisparse_extra_config(getattr(vllm_config, "kv_transfer_config", None))
    if extra is None:
        return None
    values = _own_values(extra)
    endpoint = values.get("endpoint") or os.environ.get(ENDPOINT_VARIABLE, "")
    if not endpoint:
        if values:
            raise ConfigError(
                f"{PREFIX} settings {sorted(values)} without an endpoint",
                remedy=f"Set {PREFIX}.endpoint, or {ENDPOINT_VARIABLE}",
            )
        return None
    try:
        return msgspec.convert({**values, "endpoint": endpoint}, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the {PREFIX} settings of kv_connector_extra_config: {error}",
            remedy="See docs/vllm.md for the keys",
        ) from error


def _hisparse_extra_config(transfer: Any) -> Mapping[str, Any] | None:
    """The extra config of the HiSparseConnector, also below a MultiConnector."""
    if transfer is None:
        return None
    name = getattr(transfer, "kv_connector", None)
    extra: Mapping[str, Any] = getattr(transfer, "kv_connector_extra_config", None) or {}
    if name == CONNECTOR:
        return extra
    if name != "MultiConnector":
        return None
    for child in extra.get("connectors", ()):
        if child.get("kv_connector") == CONNECTOR:
            below: Mapping[str, Any] = child.get("kv_connector_extra_config") or {}
            return below
    return None


def _own_values(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Both ``{"hisparse_service": {"endpoint": …}}`` and ``{"hisparse_service.endpoint": …}``."""
    values: dict[str, Any] = {}
    nested = extra.get(PREFIX)
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise ConfigError(f"{PREFIX} in kv_connector_extra_config is no mapping: {nested!r}")
        values.update(nested)
    for key, value in extra.items():
        if key.startswith(PREFIX + "."):
            values[key[len(PREFIX) + 1 :]] = value
    return values
