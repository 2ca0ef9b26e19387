"""Segments for tests: names of their own, damage to order, and processes that die while making one.

For tests of the pool, the daemon and recovery. Any thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from hisparse_service.contract.segment import BACKING_DIRECTORY_OFFSET
from hisparse_service.pool import survey
from hisparse_service.pool.segment_file import shm_path
from hisparse_service.testing.faults import CRASH_POINT_VARIABLE

CREATOR = """
from hisparse_service.testing.faults import arm_from_environment
from hisparse_service.pool.pool import Pool
from hisparse_service.pool.settings import PoolSettings
import sys
arm_from_environment()
pool = Pool.create_or_adopt(PoolSettings(instance=sys.argv[1], pool_bytes=int(sys.argv[2])))
backing = pool.make_backing(namespace=1, fingerprint=b"f" * 16, name="model", geometry=b"g",
                            num_blocks=64, payload_bytes=64 * 4096)
pool.drop_backing(backing.slot)
del backing
pool.release()
"""


@contextlib.contextmanager
def own_instance(label: str = "test") -> Iterator[str]:
    """An instance name that no other test uses; whatever it left in shared memory goes at the end.

    Only names of this very instance are removed.
    """
    instance = f"{label}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        yield instance
    finally:
        remove_all(instance)


def remove_all(instance: str) -> tuple[str, ...]:
    """Unlink every segment of a test's instance, alive or not. Never for an instance in use."""
    removed = survey.list_names(instance)
    for name in removed:
        Path(shm_path(name)).unlink(missing_ok=True)
    return removed


def flip_byte(name: str, offset_bytes: int) -> None:
    """Change one byte of a segment in place."""
    with Path(shm_path(name)).open("r+b") as file:
        file.seek(offset_bytes)
        (old,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([old ^ 0xFF]))


def corrupt_backing(name: str, slot_offset_bytes: int = 40) -> None:
    """Change one byte of the first backing record."""
    flip_byte(name, BACKING_DIRECTORY_OFFSET + slot_offset_bytes)


def cut(name: str, size_bytes: int) -> None:
    """Truncate a segment."""
    os.truncate(shm_path(name), size_bytes)


def make_foreign(name: str, content: bytes = b"somebody else's bytes") -> tuple[int, int]:
    """Put an object that is not ours under the name.

    Returns:
        (st_dev, st_ino), by which a test sees that it is still the same object.
    """
    path = Path(shm_path(name))
    with path.open("xb") as file:
        file.write(content)
    status = path.stat()
    return status.st_dev, status.st_ino


def run_creator(
    instance: str, *, pool_bytes: int, crash_point: str | None = None, timeout_s: float = 60.0
) -> int:
    """Run a process that makes a pool and a backing, drops and releases them.

    Args:
        instance: Its instance.
        pool_bytes: Its pool's size.
        crash_point: Where it is to be killed, as in HISPARSE_CRASH_POINT.
        timeout_s: Killed and raised after that.

    Returns:
        Its exit code: 0, or -9 when it died at the crash point.
    """
    environment = dict(os.environ)
    environment.pop(CRASH_POINT_VARIABLE, None)
    if crash_point is not None:
        environment[CRASH_POINT_VARIABLE] = crash_point
    done = subprocess.run(
        [sys.executable, "-c", CREATOR, instance, str(pool_bytes)],
        env=environment,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode
