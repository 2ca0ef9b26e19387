"""Adoption end to end: a daemon is killed with a full directory, and its successor is timed.

    python -m benchmarks.bench_adoption [--blocks 300000] [--repeats 3]

The pool is real, with one backing of so many blocks, all of them published. Measured are the real
start of a daemon process (from exec to READY on its pipe) beside the start of one that has nothing
to adopt, and what the daemon itself says its start took. One JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from hisparse_service.contract.geometry import HostGeometry, HostLayout, LayerGroup
from hisparse_service.contract.limits import MAX_BLOCKS_PER_MESSAGE
from worker_client import connect
from worker_client.client import Completed, CudaUse

REQUIRED_S = 2.0
GEOMETRY = HostGeometry.make(
    layout=HostLayout.LAYER_MAJOR, block_size=1, groups=[LayerGroup(1, 16)]
)
PREFIX_BLOCKS = 1_000
SHM = pathlib.Path("/dev/shm")


class Service:
    """A daemon process on a directory of its own."""

    def __init__(self, directory: pathlib.Path, *, instance: str, pool_bytes: int) -> None:
        self.runtime = directory / instance
        self.instance = instance
        self.log = directory / f"{instance}.log"
        self._command = [
            sys.executable, "-m", "hisparse_service", "serve", "--instance", instance,
            "--runtime-dir", str(self.runtime), "--pool-bytes", str(pool_bytes),
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes]

    def start(self) -> float:
        """Seconds from exec to READY."""
        read_fd, write_fd = os.pipe()
        began_s = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, "--ready-fd", str(write_fd)], pass_fds=(write_fd,), stderr=log,
                stdout=log,
            )  # fmt: skip
        os.close(write_fd)
        select.select([read_fd], [], [], 300)
        said = os.read(read_fd, 100)
        took_s = time.monotonic() - began_s
        os.close(read_fd)
        assert said.startswith(b"READY"), self.log.read_text()
        return took_s

    def last_start_s(self) -> float:
        """What the daemon itself says: from its first line to ready."""
        return float(re.findall(r"start_s=([0-9.]+)", self.log.read_text())[-1])

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """SIGTERM; nothing is left."""
        self.process.terminate()
        self.process.wait()
        for path in SHM.glob(f"hisparse-{self.instance}-*"):
            path.unlink()


def fill(service: Service, num_blocks: int) -> None:
    """Publish every block, as prefixes of PREFIX_BLOCKS."""
    with connect(service.runtime, client_name="bench", timeout_s=60) as client:
        client.wait_ready(timeout_s=300)
        namespace = client.open_namespace(model="bench", kv_dtype="rows", geometry=GEOMETRY)
        namespace.attach(num_blocks + 1, cuda=CudaUse.OFF)
        done = 0
        while done < num_blocks:
            count = min(PREFIX_BLOCKS, num_blocks - done, MAX_BLOCKS_PER_MESSAGE)
            lease = namespace.reserve(count)
            namespace.mirror(
                completed=[
                    Completed(
                        lease=lease, blocks=lease.reserved_blocks,
                        generations=lease.reserved_generations,
                        keys=secrets.token_bytes(16 * count),
                    )
                ]
            )  # fmt: skip
            lease.release()
            done += count


def published(service: Service) -> int:
    with connect(service.runtime, client_name="bench", timeout_s=60) as client:
        (namespace,) = client.status()["namespaces"]
        return int(namespace["blocks"]["published"]) + int(namespace["blocks"]["pinned"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    # One 16 B row a block, and 64 B of record: the size of the payload does not matter here.
    pool_bytes = (options.blocks + 1) * (GEOMETRY.block_stride_bytes + 64) + (4 << 20)
    with tempfile.TemporaryDirectory(prefix="adopt-", dir="/tmp") as directory:
        place = pathlib.Path(directory)
        name = f"adopt-{os.getpid()}"
        service = Service(place, instance=name, pool_bytes=pool_bytes)
        empty = Service(place, instance=f"{name}-e", pool_bytes=2 << 20)
        starts, own, empties = [], [], []
        try:
            service.start()
            fill(service, options.blocks)
            for _ in range(options.repeats):
                service.kill()
                starts.append(service.start())
                own.append(service.last_start_s())
                assert published(service) == options.blocks
                empties.append(empty.start())
                empty.end()
        finally:
            service.end()
    result = {
        "benchmark": "adoption", "blocks": options.blocks,
        "start_s": round(statistics.median(starts), 3), "fastest_start_s": round(min(starts), 3),
        "adoption_s": round(statistics.median(own), 3),
        "empty_start_s": round(statistics.median(empties), 3), "required_s": REQUIRED_S,
        "cores": os.cpu_count(), "numpy": np.__version__,
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if statistics.median(own) < REQUIRED_S else 1


if __name__ == "__main__":
    sys.exit(main())
