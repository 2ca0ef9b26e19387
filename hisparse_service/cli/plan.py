"""`hisparse-service plan`: what a model and a load need of host memory and of the GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from hisparse_service.cli.operations import human_bytes
from hisparse_service.cli.options import JsonOption

if TYPE_CHECKING:
    from hisparse_service.cli.capacity import Load, ModelShape, Plan


def plan(
    context_tokens: Annotated[
        int, typer.Option("--context", help="Tokens of the longest request, answer included")
    ],
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="Requests that decode at once, on all engines")
    ],
    model: Annotated[
        str, typer.Option("--model", help="deepseek-v3.2, glm-5 or glm-5-shared")
    ] = "deepseek-v3.2",
    model_config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--model-config", help="A model's config.json, instead of --model"),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="fp8_ds_mla (656 B a row) or bfloat16 (1,152 B)")
    ] = "fp8_ds_mla",
    hot_rows: Annotated[
        int, typer.Option("--hot-rows", help="Hot rows a request; 0: (1 + query rows) * top-k")
    ] = 0,
    shared_prefix: Annotated[
        int, typer.Option("--shared-prefix", help="Tokens of the context that all requests share")
    ] = 0,
    kept_tokens: Annotated[
        int, typer.Option("--keep", help="Tokens of ended requests that shall be found again")
    ] = 0,
    prefill_tokens: Annotated[
        int, typer.Option("--prefill-tokens", help="Tokens that one step prefills at most")
    ] = 8192,
    speculative_tokens: Annotated[
        int, typer.Option("--speculative-tokens", help="Draft tokens a step")
    ] = 0,
    block_size: Annotated[int, typer.Option("--block-size", help="Tokens a block")] = 64,
    drop_index_keys: Annotated[
        bool,
        typer.Option("--drop-index-keys", help="Host blocks without the indexer's keys"),
    ] = False,
    pool_bytes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--pool-bytes", help='Also tell what a pool of this size ("256GiB") holds'),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count the host and GPU bytes of a model, a context and a concurrency."""
    from hisparse_service.cli import capacity
    from hisparse_service.config import parse_bytes
    from hisparse_service.contract.errors import ConfigError

    if model_config is not None:
        shape = capacity.read_model(model_config)
    elif model in capacity.PRESETS:
        shape = capacity.PRESETS[model]
    else:
        raise ConfigError(
            f"no model is called {model!r}",
            remedy=f"Known are {', '.join(capacity.PRESETS)}; or give --model-config",
        )
    load = capacity.Load(
        context_tokens=context_tokens, concurrency=concurrency, hot_rows=hot_rows,
        shared_prefix_tokens=shared_prefix, kept_tokens=kept_tokens, kv_dtype=kv_dtype,
        prefill_tokens=prefill_tokens, speculative_tokens=speculative_tokens,
        block_size=block_size, keeps_index_keys=not drop_index_keys,
    )  # fmt: skip
    found = capacity.plan(shape, load)
    tokens = None
    if pool_bytes is not None:
        tokens = capacity.tokens_in(shape, load, parse_bytes(pool_bytes))
    if as_json:
        print(json.dumps(_as_json(shape, load, found, tokens), indent=2))
        return
    _print(shape, load, found)
    if tokens is not None:
        full = tokens // max(1, context_tokens)
        print(f"a pool of {pool_bytes} holds {tokens:,} tokens: {full:,} such contexts")


def _as_json(shape: ModelShape, load: Load, found: Plan, tokens: int | None) -> dict[str, Any]:
    import msgspec

    result: dict[str, Any] = {
        "model": msgspec.to_builtins(shape), "load": msgspec.to_builtins(load),
        "plan": msgspec.to_builtins(found),
    }  # fmt: skip
    if tokens is not None:
        result["tokens_in_pool"] = tokens
    return result


def _print(shape: ModelShape, load: Load, found: Plan) -> None:
    groups = len(shape.group_sizes)
    print(
        f"{shape.name}: {shape.num_layers} layers, {groups} indexers, {load.kv_dtype}, "
        f"{load.concurrency} requests of {load.context_tokens:,} tokens"
    )
    saved = 1 - found.gpu_bytes / found.gpu_bytes_without
    rows = (
        ("host", "pool.bytes", found.pool_bytes,
         f"{found.host_blocks:,} blocks of {human_bytes(found.host_block_bytes)}"),
        ("", "daemon beside it", found.daemon_bytes, "private memory and page tables"),
        ("", "each worker", found.worker_page_table_bytes, "page tables of the mapping"),
        ("GPU", "indexer keys", found.index_blocks * found.device_block_bytes,
         f"{found.index_blocks:,} blocks of {human_bytes(found.device_block_bytes)}"),
        ("", "hot rows", found.hot_blocks * found.device_block_bytes,
         f"{found.hot_rows:,} rows a request, {found.device_groups} groups"),
        ("", "resident pages", found.resident_blocks * found.device_block_bytes,
         f"{found.resident_blocks:,} blocks"),
        ("", "hot maps and plans", found.state_bytes, f"{groups} index groups"),
        ("", "in all", found.gpu_bytes,
         f"{human_bytes(found.gpu_bytes_without)} with the whole cache on the GPU: {-saved:+.0%}"),
    )  # fmt: skip
    for where, what, size, remark in rows:
        print(f"{where:<5} {what:<19} {human_bytes(size):>11}  {remark}")
    print(f'set pool.bytes = "{-(-found.pool_bytes // 2**20)}MiB" or more')
