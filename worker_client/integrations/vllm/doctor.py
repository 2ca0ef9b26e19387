"""Checks of a vLLM installation against this plugin, for `hisparse-service doctor vllm`.

`check_vllm` runs in the Python that vLLM runs in, starts no engine and changes nothing. Each check
says what was found and, where it is not good, what to do.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from hisparse_service.contract.errors import HiSparseError
from worker_client import connect
from worker_client.integrations.vllm.activation import SUPPORTED_VERSIONS, base_version
from worker_client.integrations.vllm.settings import ENDPOINT_VARIABLE

ENTRY_POINT_GROUP: Final = "vllm.general_plugins"
ENTRY_POINT: Final = "hisparse_service"
_TIMEOUT_S: Final = 3.0


class Verdict(enum.StrEnum):
    """How a check ended."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but not as well as it could."""
    BAD = "bad"
    """The engine will not use the service, or will not start."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's result."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def check_vllm(*, endpoint: str = "", environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """All checks, in the order in which an engine needs them.

    Args:
        endpoint: What the engine is given; HISPARSE_SERVICE_ENDPOINT when empty.
        environment: The engine's.
    """
    endpoint = endpoint or environment.get(ENDPOINT_VARIABLE, "")
    checks: list[Callable[[], Finding]] = [
        _check_version,
        _check_entry_point,
        lambda: _check_allowed(environment),
        _check_seams,
        lambda: _check_hash_seed(environment),
        lambda: _check_endpoint(endpoint),
    ]
    return [check() for check in checks]


def is_healthy(findings: list[Finding]) -> bool:
    """Whether an engine would use the service."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def _check_version() -> Finding:
    supported = ", ".join(SUPPORTED_VERSIONS)
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            check="vllm version", verdict=Verdict.BAD, found="vLLM is not installed here",
            remedy="Run this with the Python that runs vLLM",
        )  # fmt: skip
    if base_version(version) in SUPPORTED_VERSIONS:
        return Finding(check="vllm version", verdict=Verdict.GOOD, found=version)
    return Finding(
        check="vllm version", verdict=Verdict.BAD, found=f"{version}, supported: {supported}",
        remedy="Install a supported vLLM, or a newer hisparse-service",
    )  # fmt: skip


def _check_entry_point() -> Finding:
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    if found:
        values = sorted({point.value for point in found})
        return Finding(check="plugin", verdict=Verdict.GOOD, found=", ".join(values))
    return Finding(
        check="plugin", verdict=Verdict.BAD,
        found=f"no entry point {ENTRY_POINT} in {ENTRY_POINT_GROUP}",
        remedy="Install hisparse-service into this environment (pip install)",
    )  # fmt: skip


def _check_allowed(environment: Mapping[str, str]) -> Finding:
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is None:
        return Finding(check="VLLM_PLUGINS", verdict=Verdict.GOOD, found="unset: all plugins load")
    if ENTRY_POINT in allowed.split(","):
        return Finding(check="VLLM_PLUGINS", verdict=Verdict.GOOD, found=allowed)
    return Finding(
        check="VLLM_PLUGINS", verdict=Verdict.BAD, found=f"{allowed!r} leaves this plugin out",
        remedy=f"Add {ENTRY_POINT} to it, or unset it",
    )  # fmt: skip


def _check_seams() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding(
            check="seams", verdict=Verdict.BAD, found="vLLM is not installed here",
            remedy="Run this with the Python that runs vLLM",
        )  # fmt: skip
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.v1.hisparse import runtime

        missing = [
            name
            for name, there in {
                "vllm.v1.hisparse.runtime.HiSparseHostPool": hasattr(runtime, "HiSparseHostPool"),
                "KVConnectorFactory HiSparseConnector": "HiSparseConnector"
                in KVConnectorFactory._registry,
            }.items()
            if not there
        ]
    except Exception as error:  # whatever an import of vLLM raises is the finding
        return Finding(
            check="seams", verdict=Verdict.BAD, found=f"{type(error).__name__}: {error}",
            remedy="This vLLM cannot be imported; repair it first",
        )  # fmt: skip
    if missing:
        return Finding(
            check="seams", verdict=Verdict.BAD, found=f"missing: {', '.join(missing)}",
            remedy="This build of vLLM has no HiSparse",
        )  # fmt: skip
    return Finding(check="seams", verdict=Verdict.GOOD, found="host pool and connector")


def _check_hash_seed(environment: Mapping[str, str]) -> Finding:
    seed = environment.get("PYTHONHASHSEED")
    if seed is not None:
        return Finding(check="block hashes", verdict=Verdict.GOOD, found=f"PYTHONHASHSEED={seed}")
    return Finding(
        check="block hashes", verdict=Verdict.GOOD,
        found="vLLM's fixed seed with sha256 and sha256_cbor",
        remedy="With --prefix-caching-hash-algo xxhash set PYTHONHASHSEED, or no prefix outlives "
        "the engine; sha256_cbor is the same in all Python versions",
    )  # fmt: skip


def _check_endpoint(endpoint: str) -> Finding:
    if not endpoint:
        return Finding(
            check="endpoint", verdict=Verdict.WARNING, found="none given: engines run stock",
            remedy=f"Set hisparse_service.endpoint in kv_connector_extra_config, or "
            f"{ENDPOINT_VARIABLE}, and check again with it",
        )  # fmt: skip
    try:
        with connect(endpoint, client_name="doctor vllm", timeout_s=_TIMEOUT_S) as client:
            status: dict[str, Any] = client.status()
            instance = client.instance
    except HiSparseError as error:
        return Finding(
            check="endpoint", verdict=Verdict.BAD, found=f"{endpoint}: {error.message}",
            remedy=error.remedy or "See whether the daemon runs: hisparse-service status",
        )  # fmt: skip
    phase = status.get("phase", "unknown")
    return Finding(
        check="endpoint", verdict=Verdict.GOOD, found=f"{endpoint}: instance {instance}, {phase}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the findings: ``python -m worker_client.integrations.vllm.doctor [ENDPOINT]``.

    Returns:
        0 when an engine would use the service.
    """
    given = sys.argv[1:] if arguments is None else arguments
    findings = check_vllm(endpoint=given[0] if given else "")
    for finding in findings:
        line = f"{finding.verdict.value:8}{finding.check}: {finding.found}"
        sys.stdout.write(line + (f"\n        {finding.remedy}" if finding.remedy else "") + "\n")
    return 0 if is_healthy(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
