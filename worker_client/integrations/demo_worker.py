"""A process of the demonstration: ``python -m worker_client.integrations.demo_worker``.

Started by `hisparse-service demo`, once for each rank and once for the reference. Commands come as
JSON lines on standard input, each is answered by one JSON line on standard output, in order:

    {"op": "add", "request": name, "hit": tokens or null}   admit a request
    {"op": "step"}                                          one step of all requests
    {"op": "corrupt", "request": name}                      damage its spilled host pages
    {"op": "report", "logits": path}                        counters; logits go to a file
    {"op": "stop"}                                          leave the daemon and end

The answer to a command that failed is {"error": {"code": ..., "message": ...}}. One thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

import worker_client
from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.errors import HiSparseError, UsageError
from worker_client.client import Client, CudaUse
from worker_client.coordinator import Role
from worker_client.damage import report_damage
from worker_client.events import EventDriver, TorchEventDriver
from worker_client.integrations.demo_audit import ChoiceCheck, Choices, RowLedger, Settle
from worker_client.integrations.demo_model import (
    DemoJob,
    build_model,
    load_job,
    num_host_blocks,
    tier_sizes,
    weights_digest,
)
from worker_client.integrations.demo_twin import DeviceTwin
from worker_client.integrations.generation import ContentChecks, Generator, GeneratorOptions
from worker_client.integrations.transformers import DecodeMode, ModelShape, TieredModel

_EQUAL_SCORES = 1e-5
"""Part of the greatest score by which sums in float32 may differ when their order does."""

Answer = dict[str, Any]
Operation = Callable[[Mapping[str, Any]], Answer]


class DemoWorker:
    """One rank.

    Args:
        job: What to run.
        rank: 0 writes, all others only read.
        generation: Which set of workers this is; each is an engine of its own.
    """

    def __init__(self, job: DemoJob, *, rank: int, generation: int) -> None:
        self.job = job
        self.rank = rank
        model = build_model(job)
        self.shape = ModelShape.of(model.config, getattr(torch, job.dtype))
        sizes = tier_sizes(job, self.shape)
        geometry = self.shape.host_geometry(block_size=sizes.block_size, layout=sizes.host_layout)
        blocks = num_host_blocks(job, geometry)
        self.client: Client = worker_client.connect(
            job.endpoint,
            client_name="hisparse-service demo",
            group=f"{job.group}-{generation}",
            rank=rank,
            world_size=job.world_size,
        )
        self.client.wait_ready(timeout_s=30.0)
        self.namespace = self.client.open_namespace(
            model=f"glm-moe-dsa-demo-{weights_digest(model)}",
            kv_dtype=job.dtype,
            geometry=geometry,
            name="demo",
        )
        directory = Path(job.directory)
        self._choices = None
        if rank == 0:
            self._choices = Choices(
                directory,
                [request.name for request in job.requests],
                (len(self.shape.index_groups), job.max_tokens, self.shape.top_k),
            )
        self.audit = RowLedger(directory / "rows.ledger", geometry, blocks, choices=self._choices)
        self.twin: DeviceTwin | None = None
        self.generator = Generator(
            model,
            self.namespace,
            sizes,
            GeneratorOptions(
                role=Role.WRITER if rank == 0 else Role.READER,
                num_host_blocks=blocks,
                cuda=CudaUse.REQUIRED if job.device == "cuda" else CudaUse.OFF,
                decode=DecodeMode(job.decode),
                audit=self.audit,
                witness=self._make_twin,
                event_driver=_event_driver(job),
                content=ContentChecks.ON,
            ),
        )
        self._logits: dict[str, list[np.ndarray[Any, Any]]] = {}

    def _make_twin(self, tiers: TieredModel) -> DeviceTwin:
        self.twin = DeviceTwin(tiers, self.audit)
        self.audit.tokens_of = self.twin.tokens_of
        return self.twin

    # --- commands -----------------------------------------------------------------------------

    def hello(self) -> Answer:
        """What the driver wants to know once."""
        sizes, geometry = self.generator.tiers.sizes, self.generator.host_pool.geometry
        groups = self.generator.tiers.num_resident_groups
        config = self.generator.coordinator.config
        keys = sum(
            config.pages_for(request.length + request.max_new_tokens)
            for request in self.job.requests
        )
        hot = config.hot_blocks * len(self.job.requests)
        return {
            "block_size": sizes.block_size,
            "block_bytes": geometry.block_stride_bytes,
            "num_host_blocks": self.generator.host_pool.num_blocks,
            "resident_tokens": (sizes.num_device_blocks - 1 - keys - hot)
            // groups
            * sizes.block_size,
            "hot_rows": (sizes.hot_rows or 0) * len(self.job.requests),
            "top_k": self.shape.top_k,
        }

    def add(self, command: Mapping[str, Any]) -> Answer:
        """Admit a request of the job."""
        request = self.job.requests[int(command["index"])]
        admission = self.generator.add(
            request.name,
            self.job.prompt(request),
            max_new_tokens=request.max_new_tokens,
            num_hit_tokens=command["hit"],
        )
        self._logits.setdefault(request.name, [])
        return {"hit": admission.num_hit_tokens, "host_blocks": admission.num_host_blocks}

    def step(self, _: Mapping[str, Any]) -> Answer:
        """One step; the generated tokens."""
        tokens = self.generator.step()
        for token in tokens:
            self._logits[token.request_id].append(token.logits.numpy())
        return {
            "tokens": [[token.request_id, token.token, token.is_last] for token in tokens],
            "running": self.generator.num_requests,
            "prefilled": self.generator.statistics.prefilled_tokens,
            "wrong_rows": self.audit.wrong_rows,
        }

    def corrupt(self, command: Mapping[str, Any]) -> Answer:
        """Flip one bit of each row of a request's spilled pages: what the checks must find."""
        pool = self.generator.host_pool
        pages = self.generator.coordinator.pages(str(command["request"]))
        blocks = [page.host_block for page in pages if not page.is_resident]
        for layer in range(self.shape.num_layers):
            pool.layer_view(layer)[blocks, :, 0] ^= 1
        return {"pages": len(blocks)}

    def report(self, command: Mapping[str, Any]) -> Answer:
        """All counters; logits as ``<request>`` arrays [tokens, vocabulary] in an .npz file."""
        self.generator.drain()
        if self._choices is not None:
            self._choices.save(Path(str(command["choices"])))
        logits = {name: np.stack(rows) for name, rows in self._logits.items() if rows}
        np.savez(Path(str(command["logits"])), allow_pickle=False, **logits)
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(logits):
            digest.update(logits[name].tobytes())
        coordinator, tiers = self.generator.coordinator, self.generator.tiers
        swaps = tiers.swap_statistics()
        miss_rows = sum(swap.miss_rows for swap in swaps)
        forgotten = sum(swap.invalidated_rows for swap in swaps) + tiers.dropped_hot_rows
        own = coordinator.statistics
        pool_pages, wrong_pages = self.audit.compare_pool(self.generator.host_pool)
        return {
            **{name: getattr(own, name) for name in own.__slots__},
            "engine_steps": self.generator.statistics.steps,
            "prefilled_tokens": self.generator.statistics.prefilled_tokens,
            "generated_tokens": self.generator.statistics.generated_tokens,
            "waits": self.generator.statistics.waits,
            "recomputed_requests": self.generator.statistics.recomputed_requests,
            "longest_context": self.generator.statistics.longest_context,
            "resident_lanes": sum(swap.resident_lanes for swap in swaps),
            "hot_lanes": sum(swap.hot_lanes for swap in swaps),
            "miss_lanes": sum(swap.miss_lanes for swap in swaps),
            "miss_rows": miss_rows,
            "gathered_bytes": sum(swap.gathered_bytes for swap in swaps),
            # A row that was brought in and is neither there nor forgotten made room for another.
            "evicted_hot_rows": miss_rows - forgotten - tiers.num_hot_rows(),
            "prefill_resident_rows": tiers.prefill_rows.resident,
            "prefill_staged_rows": tiers.prefill_rows.staged,
            "checked_rows": self.audit.checked_rows,
            "wrong_rows": self.audit.wrong_rows,
            "first_wrong": self.audit.first_wrong,
            "pool_pages": pool_pages,
            "wrong_pool_pages": wrong_pages,
            "withdrawn_pages": self._report_wrong(),
            "mirrored_rows": self.generator.statistics.mirrored_rows,
            "graph_replays": tiers.replays,
            "logits_digest": digest.hexdigest(),
            "host_blocks_in_use": self._host_blocks_in_use(),
            **(self.twin.report() if self.twin is not None else {}),
        }

    def _report_wrong(self) -> int:
        """Tell the daemon of host blocks with wrong bytes; how many nobody finds any more."""
        blocks = np.array(sorted(self.audit.wrong_blocks), np.uint32)
        if not len(blocks) or self.rank:  # rank 0 has looked at every page of the pool
            return 0
        generations = self.generator.host_pool.table["generation"][blocks]
        verdicts = report_damage(self.namespace, blocks, generations)
        # Those below a damaged one went with it, and are not checked again.
        return sum(verdict in (Verdict.DAMAGED, Verdict.STALE) for verdict in verdicts)

    def _host_blocks_in_use(self) -> int:
        """Blocks of the namespace that hold published rows, as the daemon counts them."""
        fingerprint = self.namespace.fingerprint.hex()
        for found in self.client.status()["namespaces"]:
            if found["fingerprint"] == fingerprint:
                return int(found["blocks"]["published"] + found["blocks"]["pinned"])
        return 0

    @property
    def operations(self) -> Mapping[str, Operation]:
        """What the driver may ask for."""
        return {
            "add": self.add,
            "step": self.step,
            "corrupt": self.corrupt,
            "report": self.report,
        }

    def stop(self) -> None:
        """Leave the daemon."""
        self.generator.close()
        self.client.close()


def _event_driver(job: DemoJob) -> EventDriver | None:
    """Several ranks on GPUs tell each other how far the writer's mirrors are."""
    is_shared = job.device == "cuda" and job.world_size > 1
    return TorchEventDriver("cuda") if is_shared else None


class Reference:
    """The same model with its own cache: what every token and logit is compared with.

    In float32 it generates by itself. In bfloat16 no two orders of a sum agree, and one token that
    is another makes all that follow others too; so it is given the tokens and the choices of rank 0
    and, as a yardstick, computes the same in float32: what the ranks computed must be no further
    from that than what the model computes with its own cache.
    """

    def __init__(self, job: DemoJob) -> None:
        self.job = job
        self.model = build_model(job)
        self.is_exact = job.dtype == "float32"
        settle = Settle.TIES if self.is_exact else Settle.ALWAYS
        self.check = ChoiceCheck(self.model, tolerance=_EQUAL_SCORES, settle=settle)
        self.yardstick: Any = None
        if not self.is_exact:
            self.yardstick = build_model(job).float()
            self.yardstick_check = ChoiceCheck(
                self.yardstick, tolerance=_EQUAL_SCORES, settle=settle
            )

    def hello(self) -> Answer:
        """Nothing to tell."""
        return {}

    def run(self, command: Mapping[str, Any]) -> Answer:
        """Generate one request greedily; its logits go to a file, the yardstick's to another.

        The choices of the ranks lie in another: equal scores are settled as they were there.
        """
        index = int(command["index"])
        request = self.job.requests[index]
        prompt, path = self.job.prompt(request), Path(str(command["logits"]))
        given = None if self.is_exact else [int(token) for token in command["tokens"]]
        with np.load(Path(str(command["choices"])), allow_pickle=False) as choices:
            chosen = choices[f"arr_{index}"]
        self.check.begin(chosen)
        tokens, logits = _generate(self.model, prompt, request.max_new_tokens, given)
        np.save(path, logits, allow_pickle=False)
        if self.yardstick is not None:
            self.yardstick_check.begin(chosen)
            exact = _generate(self.yardstick, prompt, request.max_new_tokens, given)[1]
            np.save(path.with_suffix(".exact.npy"), exact, allow_pickle=False)
        return {"tokens": tokens, **self.check.take()}

    @property
    def operations(self) -> Mapping[str, Operation]:
        """What the driver may ask for."""
        return {"run": self.run}

    def stop(self) -> None:
        """Nothing to give back."""


@torch.no_grad()
def _generate(
    model: Any, prompt: list[int], num_tokens: int, given: list[int] | None
) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Greedy tokens and their logits [tokens, vocabulary]; goes on with the given tokens."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.tensor([prompt], device=model.device)
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    for index in range(num_tokens):
        output = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        rows.append(output.logits[0, -1].float().cpu())
        tokens.append(int(rows[-1].argmax()))
        ids = ids.new_tensor([[tokens[-1] if given is None else given[index]]])
    return tokens, torch.stack(rows).numpy()


def _serve(process: DemoWorker | Reference, commands: TextIO, answers: TextIO) -> None:
    def answer(value: Answer) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(process.hello())
    for line in commands:
        command = json.loads(line)
        operation = str(command["op"])
        if operation == "stop":
            break
        handler = process.operations.get(operation)
        try:
            if handler is None:
                raise UsageError(f"unknown operation {operation!r}")
            answer(handler(command))
        except HiSparseError as error:
            answer(_error(error))


def _error(error: HiSparseError) -> Answer:
    return {"error": {"code": error.code, "message": str(error)}}


def main() -> int:
    """Run one process of the demonstration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=-1, help="-1: the reference")
    parser.add_argument("--generation", type=int, default=0)
    options = parser.parse_args()
    # Standard output carries answers alone, whatever a library prints.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    process: DemoWorker | Reference | None = None
    try:
        job = load_job(options.job)
        process = (
            Reference(job)
            if options.rank < 0
            else DemoWorker(job, rank=options.rank, generation=options.generation)
        )
        _serve(process, sys.stdin, answers)
    except HiSparseError as error:
        answers.write(json.dumps(_error(error)) + "\n")
        return 1
    finally:
        if process is not None:
            process.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
