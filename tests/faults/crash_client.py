"""A client that passes every crash point of the client's side; killed at one of them by its test.

    python -m tests.faults.crash_client RUNTIME POINT

It asks its parent, by a line on standard output, to stop, continue or restart the daemon, and waits
for a line on standard input.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from hisparse_service.testing.faults import arm_from_environment
from tests.faults.storm_worker import GEOMETRY, NUM_BLOCKS
from worker_client import connect
from worker_client.client import Completed, Enqueued, Namespace

DEADLINE_S = 20.0


class NoDevice:
    """Stands in for the CUDA driver: everything succeeds."""

    def prepare(self) -> None: ...

    def register(self, address: int, size_bytes: int) -> int:  # noqa: ARG002
        return 0

    def unregister(self, address: int) -> int:  # noqa: ARG002
        return 0

    def clear_error(self) -> None: ...


def ask_parent(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


def write(namespace: Namespace, *tokens: int, timeout_s: float | None = None) -> None:
    """Publish one prefix and keep its lease for ever."""
    chain = namespace.key_chain()
    chain.extend([token for token in tokens for _ in range(4)])
    lease = namespace.reserve(len(tokens))
    finish(namespace, lease, chain, timeout_s)


def finish(namespace: Namespace, lease: object, chain: object, timeout_s: float | None) -> None:
    blocks, generations = lease.reserved_blocks.copy(), lease.reserved_generations.copy()
    KEPT.append(lease)
    namespace.mirror(enqueued=[Enqueued(lease=lease, blocks=blocks, generations=generations)])
    namespace.mirror(
        completed=[
            Completed(lease=lease, blocks=blocks, generations=generations, keys=chain.keys())
        ],
        timeout_s=timeout_s,
    )


KEPT: list[object] = []


def mirror_queue() -> None:
    """The phases before the client's: copies enqueued, sealed, seen to be complete."""
    import torch

    from worker_client.kernels.interface import GroupPages  # noqa: F401  (what submit takes)
    from worker_client.mirror import BlockMirror, ImmediateTracker, MirrorQueue

    class Copies:
        def mirror_blocks(self, **_: object) -> None: ...

    class Pages:
        device = (torch.zeros(1),)

    queue = MirrorQueue(num_units=1, block_size=4, tracker=ImmediateTracker(), backend=Copies())
    queue.open_request("r")
    queue.add_block("r", 0, 3)
    queue.submit_blocks(0, Pages(), [BlockMirror("r", 0, 1)])
    queue.seal()
    queue.accept("r", 4)
    assert len(queue.poll()) == 1


def main() -> None:
    runtime, point = sys.argv[1:]
    arm_from_environment()
    client = connect(runtime, client_name="victim", timeout_s=DEADLINE_S)
    namespace = client.open_namespace(model="crash", kv_dtype="rows", geometry=GEOMETRY)
    namespace.attach(NUM_BLOCKS, driver=NoDevice())
    write(namespace, 1, 2, 3)
    if point.startswith("mirror_queue."):
        mirror_queue()
    # Completed while the daemon stands still: kept, and handed in.
    chain = namespace.key_chain()
    chain.extend([9] * 4)
    lease = namespace.reserve(1)
    ask_parent("stop")
    finish(namespace, lease, chain, 0.2)
    ask_parent("continue")
    wait_for(lambda: bool(namespace.handed_in()))
    # A lease with pins and one with reserved blocks live through a restart.
    KEPT.append(namespace.reserve(2))
    epoch = client.epoch
    ask_parent("restart")
    wait_for(lambda: client.epoch != epoch and client.session.is_alive)
    write(namespace, 5, 6)
    client.ping()
    print("the end was reached", file=sys.stderr)


def wait_for(condition: object) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        threading.Event().wait(0.005)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
