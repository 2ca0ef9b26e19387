"""docs/vllm.md says what is so: its command, its keys, its metrics, its formula."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import engine as engine_module
import msgspec
import pytest

from worker_client.integrations.vllm import SUPPORTED_VERSIONS
from worker_client.integrations.vllm.settings import PREFIX, Settings, find_settings

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def table(after: str) -> list[list[str]]:
    """Rows below the header of the table whose header begins so."""
    lines = PAGE[PAGE.index(after) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_vllm_takes_the_command_as_it_stands(vllm):
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = re.search(r"vllm serve (.*?\}\}')", PAGE, re.DOTALL)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", " "))
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert arguments.prefix_caching_hash_algo == "sha256_cbor"
    config = msgspec.defstruct("Config", ["kv_transfer_config"])(arguments.kv_transfer_config)
    settings = find_settings(config)
    assert settings is not None
    assert settings.endpoint == "/run/hisparse/default"
    assert config.kv_transfer_config.kv_connector_extra_config["host_pool_gib"] == 48


def test_every_key_is_there_with_its_default():
    rows = {row[0].strip("`"): row[1].strip("`") for row in table(f"| key, after `{PREFIX}.`")}
    fields = {field.name: field for field in msgspec.structs.fields(Settings)}
    assert set(rows) == set(fields)
    for name, default in rows.items():
        value = fields[name].default
        if value is msgspec.NODEFAULT or value == "" or name == "spare_blocks":
            continue
        assert default == f"{value:g}" if isinstance(value, float) else default == value, name


def test_every_metric_is_there(vllm):
    from worker_client.integrations.vllm.metrics import COUNTERS, GAUGES

    rows = "\n".join(row[0] for row in table("| metric | meaning |"))
    named = set(re.findall(r"`(?:vllm:hisparse|\.+)_(\w+)`", rows))
    for name in (*GAUGES, *(f"{counter}_total" for counter in COUNTERS)):
        assert any(name.endswith(short) for short in named), name
    assert len(named) == len(GAUGES) + len(COUNTERS)


def test_the_supported_versions_are_the_plugins():
    assert re.findall(r"\*\*vLLM ([\d.]+)\*\*", PAGE) == list(SUPPORTED_VERSIONS)


@pytest.mark.parametrize(("fp8", "row_bytes"), [(True, 656), (False, 1152)])
@pytest.mark.parametrize("group", [1, 4])
def test_the_bytes_of_a_block_are_as_the_formula_says(vllm, tmp_path, fp8, row_bytes, group):
    from worker_client.integrations.vllm.identity import plan_host

    assert "block_size * (layers * row_bytes + index_layers * 144)`, rounded up to 4 KiB" in PAGE
    spec = engine_module.EngineSpec(
        str(tmp_path), fp8=fp8, num_layers=8, index_group_size=group, block_size=64
    )
    cache_config = engine_module.make_cache_config(spec, engine_module.make_config(spec))
    geometry = plan_host(cache_config, Settings(endpoint="x")).geometry
    bytes_a_block = 64 * (8 * row_bytes + 8 // group * 144)
    assert geometry.block_stride_bytes == -(-bytes_a_block // 4096) * 4096


def test_quoted_log_lines_and_messages_are_in_the_code():
    source = "\n".join(
        path.read_text()
        for folder in ("worker_client", "hisparse_service/contract")
        for path in (Path(__file__).parents[2] / folder).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    quoted = [re.findall(r"`([^`]+)`", row[0]) for row in table("| what is seen |")]
    for text in (one for row in quoted for one in row):
        for part in re.split(r"…|\bN\b|\bM\b", text):
            assert part.strip(" ,") in joined, text
