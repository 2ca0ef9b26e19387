"""The vLLM plugin's own checks, in a process of their own: they import vLLM and torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any, Final

from hisparse_service.cli.doctor_findings import Finding, Verdict, bad, skipped
from hisparse_service.config import Settings

ENDPOINT_VARIABLE: Final = "HISPARSE_SERVICE_ENDPOINT"
_TIMEOUT_S: Final = 120.0
"""The first import of vLLM and torch from a cold disk takes most of a minute."""
_CODE: Final = (
    "import json, sys\n"
    "from worker_client.integrations.vllm.doctor import check_vllm\n"
    "rows = [[f.check, f.verdict.value, f.found, f.remedy] for f in "
    "check_vllm(endpoint=sys.argv[1])]\n"
    "print(json.dumps(rows))\n"
)


def check_plugin(settings: Settings) -> list[Finding]:
    """Among doctor's other checks: skipped where vLLM is not; the engine's endpoint, or ours."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [skipped("vllm plugin", "vLLM is not installed in this Python")]
    return check_engine(os.environ.get(ENDPOINT_VARIABLE, str(settings.resolved_runtime_dir())))


def check_engine(endpoint: str) -> list[Finding]:
    """Would an engine of this Python use the service at `endpoint`; empty: as it is set up."""
    if importlib.util.find_spec("torch") is None:
        return [
            bad(
                "vllm plugin", "this Python has no torch, so no vLLM",
                "Run the hisparse-service command of the environment that vLLM runs in",
            )
        ]  # fmt: skip
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _CODE, endpoint], capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        rows: list[list[Any]] = json.loads(ran.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
        return [
            bad(
                "vllm plugin", f"its checks did not end well: {error!r}",
                "Run python -m worker_client.integrations.vllm.doctor and see",
            )
        ]  # fmt: skip
    return [
        Finding(
            check="vllm plugin", verdict=Verdict(verdict), found=f"{check}: {found}",
            remedy=remedy,
        )
        for check, verdict, found, remedy in rows
    ]  # fmt: skip
