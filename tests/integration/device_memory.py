"""Device memory without a GPU, for tests: daemon, client driver, and a worker to be killed.

Run as a program it is the worker: `device_memory.py <runtime dir> <group> <rank> <byte>` opens the
backing, writes the byte into every row, says so on its output, and waits for its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import worker_client
from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.testing.device import open_memory
from worker_client.device_backing import Mapping

DEVICE = torch.device("cpu")
UUIDS = ["GPU-00000000-0000-0000-0000-00000000000" + digit for digit in "012"]
LAYOUT = bytes(range(16))
SIZE = 3_000_000
GEOMETRY = HostGeometry.make(
    layout=HostLayout.GROUP_INTERLEAVED, block_size=4, groups=[LayerGroup(1, 32)]
)


class MemoryOpener:
    """`DeviceMemoryDriver` for what `testing.device` allocates."""

    def __init__(self, uuid: str = UUIDS[0]) -> None:
        self.uuid = uuid
        self.mapped = 0

    def current_device(self) -> torch.device:
        return DEVICE

    def device_uuid(self, _device: torch.device) -> str:
        return self.uuid.removeprefix("GPU-").upper()  # another spelling, as torch's is

    def open(self, handle: bytes, size_bytes: int, _device: torch.device) -> Mapping:
        memory = open_memory(handle)
        self.mapped += 1

        def unmap() -> None:
            memory.close()
            self.mapped -= 1

        return Mapping(
            np.frombuffer(memory, np.int8, size_bytes), wrap=torch.from_numpy, unmap=unmap
        )


def connect(runtime_dir: Path | str, *, group: str = "engine", rank: int = 0) -> Any:
    client = worker_client.connect(runtime_dir, group=group, rank=rank, world_size=8, timeout_s=30)
    client.wait_ready(timeout_s=30)
    return client


def open_space(client: Any, *, model: str = "m") -> Any:
    return client.open_namespace(model=model, kv_dtype="bf16", geometry=GEOMETRY)


class WorkerProcess:
    """The worker as a process of its own, which has written its rows."""

    def __init__(
        self, runtime_dir: Path, *, group: str = "engine", rank: int = 0, byte: int = 7
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(runtime_dir), group, str(rank), str(byte)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.said = json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def main(runtime_dir: str, group: str, rank: str, byte: str) -> None:
    client = connect(runtime_dir, group=group, rank=int(rank))
    backing = open_space(client).device_backing(SIZE, layout=LAYOUT, driver=MemoryOpener())
    said = {"adopted": backing.adopted, "first": int(backing.tensor[0]), "pid": os.getpid()}
    backing.tensor.fill_(int(byte))
    print(json.dumps(said), flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
