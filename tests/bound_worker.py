"""A worker whose resident and hot rows lie on the daemon's device memory, to be killed.

Run as `bound_worker.py <runtime dir> <cpu or cuda>`: allocates and binds by the binding functions,
says what it found as one JSON line, and obeys lines on its input: `write <number>` fills every
resident row with bytes that follow from the number, `digest` tells what the rows hold. The caches
are read and written through the bound views.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

import worker_client
from hisparse_service.contract.geometry import HostLayout
from worker_client import binding, layout
from worker_client.client import CudaUse
from worker_client.device_allocator import DeviceAllocator, DeviceFallback
from worker_client.layout import build_kv_cache_config, make_layer_specs, required_host_blocks
from worker_client.runtime import ResolvedHiSparseConfig, create_index_group_handles
from worker_client.specs import HISPARSE_RESIDENT_SUFFIX, BlockTables, HiSparseConfig, KVCacheLayout

NAMES = [f"layers.{index}.attn" for index in range(4)]
BLOCK_SIZE, ROW_BYTES, NUM_DEVICE_BLOCKS, MAX_MODEL_LEN = 16, 656, 64, 40
TIMEOUT_S = 120


class BoundWorker:
    """Binds in this process; see the module's header."""

    def __init__(self, runtime_dir: str, device: torch.device) -> None:
        self.client = worker_client.connect(
            runtime_dir, group="bound", rank=0, world_size=1, timeout_s=30
        )
        self.client.wait_ready(timeout_s=60)
        specs = make_layer_specs(
            [NAMES], row_width=ROW_BYTES, dtype=torch.uint8, block_size=BLOCK_SIZE,
            indexer_width=132, indexer_dtype=torch.uint8,
        )  # fmt: skip
        config = HiSparseConfig(
            top_k=24, max_num_requests=2, max_num_batched_tokens=8, max_model_len=MAX_MODEL_LEN
        )
        num_host_blocks = required_host_blocks(MAX_MODEL_LEN, BLOCK_SIZE)
        kv_cache_config = build_kv_cache_config(
            config, specs, num_device_blocks=NUM_DEVICE_BLOCKS, num_host_blocks=num_host_blocks,
            host_layout=HostLayout.GROUP_INTERLEAVED,
        )  # fmt: skip
        space = self.client.open_namespace(
            model="bound", kv_dtype="fp8",
            geometry=layout.host_geometry(
                {name: specs[name] for name in NAMES}, HostLayout.GROUP_INTERLEAVED
            ),
        )  # fmt: skip
        pool = space.attach(
            num_host_blocks, cuda=CudaUse.OFF if device.type == "cpu" else CudaUse.REQUIRED
        )
        allocator = DeviceAllocator(space, fallback=DeviceFallback.RAISE, driver=_driver(device))
        pool.allocate_device = allocator
        self.caches, self.handles = _bind(config, kv_cache_config, device, pool)
        assert allocator.backing is not None
        self.backing = allocator.backing
        self.resident = [self.caches[name + HISPARSE_RESIDENT_SUFFIX] for name in NAMES]

    def found(self) -> dict[str, Any]:
        """What lies there, and that views and runtimes use this very memory."""
        start = self.backing.tensor.data_ptr()
        end = start + self.backing.size_bytes
        hot = [handle.runtime.hot.cache for handle in self.handles]
        return {
            "adopted": self.backing.adopted, "bytes": self.backing.size_bytes,
            "uuid": self.backing.device_uuid, "digest": self.digest(),
            "bound": all(start <= view.data_ptr() < end for view in [*self.resident, *hot]),
        }  # fmt: skip

    def write(self, seed: int) -> None:
        """Fill all resident rows."""
        made = torch.Generator().manual_seed(seed)
        for view in self.resident:
            rows = torch.randint(0, 256, tuple(view.shape), dtype=torch.uint8, generator=made)
            view.copy_(rows.to(view.device))
        if self.backing.device.type == "cuda":
            torch.cuda.synchronize()

    def digest(self) -> str:
        """Of all resident rows."""
        digest = hashlib.blake2b(digest_size=16)
        for view in self.resident:
            digest.update(view.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def _driver(device: torch.device) -> Any:
    if device.type == "cuda":
        return None
    sys.path.insert(0, str(Path(__file__).parent / "integration"))
    from device_memory import MemoryOpener

    return MemoryOpener()


def _bind(config: Any, kv_cache_config: Any, device: torch.device, pool: Any) -> Any:
    handles = create_index_group_handles(
        ResolvedHiSparseConfig.resolve(top_k=config.top_k), num_layers=len(NAMES),
        row_width=ROW_BYTES, kv_dtype=torch.uint8, device=device,
    )  # fmt: skip
    block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    caches = binding.allocate_hisparse_kv_caches(
        kv_cache_config, device, KVCacheLayout.BLNHC, block_sizes, pool
    )
    tables = BlockTables.allocate(
        kv_cache_config, max_num_requests=config.max_num_requests,
        max_num_batched_tokens=config.max_num_batched_tokens, max_model_len_tokens=MAX_MODEL_LEN,
        device=device,
    )  # fmt: skip
    context = {
        name: types.SimpleNamespace(hisparse_cache=handle, is_draft_layer=False)
        for name, handle in zip(NAMES, handles, strict=True)
    }
    bound = binding.bind_hisparse_kv_caches(
        forward_context=context, kv_cache_config=kv_cache_config, kv_caches=caches,
        block_tables=tables, host_pool=pool,
    )  # fmt: skip
    return caches, bound


class WorkerProcess:
    """The program as a process of its own."""

    def __init__(self, runtime_dir: Path, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(runtime_dir), device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        self.found = self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended; its error stands in standard error"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def tell(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        """SIGKILL: nothing is unmapped, unregistered or said."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(runtime_dir: str, device: str) -> None:
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", 0)
    worker = BoundWorker(runtime_dir, where)
    print(json.dumps(worker.found()), flush=True)  # noqa: T201
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "write":
            worker.write(int(numbers[0]))
        print(json.dumps({"digest": worker.digest()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
