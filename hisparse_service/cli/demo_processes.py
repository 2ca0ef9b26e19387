"""The child processes of the demonstration: a private daemon, ranks, the reference.

Each is started by its own interpreter and talks over pipes, so that this command imports no torch.
`close` ends what was started here and nothing else. Main thread of the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from hisparse_service.contract.errors import ConfigError, ServiceUnavailable, from_wire
from hisparse_service.server.runtime_directory import CONTROL_SOCKET_NAME

_START_TIMEOUT_S: Final = 120.0
"""Importing torch and transformers takes some seconds, on a cold disk many."""
_STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.02
_LOG_TAIL_BYTES: Final = 4_000


class PrivateDaemon:
    """A daemon for one demonstration; it ends with this process, however that ends.

    The supervisor of embedded daemons stands in between and leaves no shared memory.

    Args:
        pool_bytes: Size of its pool.
        log: Where it writes.
    """

    def __init__(self, pool_bytes: int, *, log: Path) -> None:
        # Short, because a socket's path has 107 bytes at most.
        self.directory = Path(tempfile.mkdtemp(prefix="hsp-demo-", dir="/tmp"))
        self._log = log
        instance = f"demo-{os.getpid()}-{secrets.token_hex(3)}"
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", str(_supervisor()), str(os.getpid()),
                    str(self.directory), instance, "--",
                    sys.executable, "-m", "hisparse_service", "serve",
                    "--instance", instance, "--runtime-dir", str(self.directory),
                    "--pool-bytes", str(pool_bytes), "--log-level", "warning",
                ],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=_environment(),
                start_new_session=True,
            )  # fmt: skip
        self._wait_listening()

    @property
    def endpoint(self) -> str:
        """Its runtime directory."""
        return str(self.directory)

    def _wait_listening(self) -> None:
        """Until its socket is there; workers then wait for the pool themselves."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not (self.directory / CONTROL_SOCKET_NAME).exists():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.close()
                raise ServiceUnavailable(
                    f"the demonstration's daemon did not start: {_tail(self._log)}",
                    remedy="Correct what it complains of, or use a running one with --endpoint",
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End it; its pool is released, for no worker is left. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def package_file(*parts: str) -> Path:
    """A file of the package `worker_client`, which this command does not import.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = find_spec("worker_client")
    if spec is None or spec.origin is None:
        raise ConfigError("the package worker_client is not installed")
    return Path(spec.origin).parent.joinpath(*parts)


def _supervisor() -> Path:
    return package_file("embedded_supervisor.py")


class WorkerProcess:
    """One rank, or the reference (rank -1), answering commands one at a time.

    Args:
        job: Path of the job file.
        rank: See `demo_worker`.
        generation: Which set of workers it is of.
    """

    def __init__(self, job: Path, *, rank: int, generation: int = 0) -> None:
        self.name = "reference" if rank < 0 else f"rank {rank}"
        self._has_answered = False
        self._log = job.parent / f"{self.name.replace(' ', '-')}-{generation}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "worker_client.integrations.demo_worker",
                    "--job", str(job), "--rank", str(rank), "--generation", str(generation),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(),
                start_new_session=True,
            )  # fmt: skip

    def ask(self, operation: str, **fields: Any) -> None:
        """Send a command; `answer` takes what it gives."""
        if self._process.stdin is None:
            raise self._ended()
        line = json.dumps({"op": operation, **fields}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest open command; the first one is the worker's hello.

        Raises:
            ServiceUnavailable: The process ended.
            HiSparseError: What the command raised.
        """
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise self._ended()
        self._has_answered = True
        answer: dict[str, Any] = json.loads(line)
        error: Mapping[str, str] | None = answer.get("error")
        if error is not None:
            raise from_wire(error["code"], f"{self.name}: {error['message']}")
        return answer

    def _ended(self) -> ServiceUnavailable:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        return ServiceUnavailable(
            f"{self.name} ended with status {self._process.poll()}: {_tail(self._log)}",
            remedy="Report this as a bug, with the lines above",
        )

    def stop(self) -> None:
        """Let it leave the daemon and end; kill it if it does not. Idempotent."""
        process = self._process
        if not self._has_answered:
            process.kill()  # it is still starting and holds nothing
            process.wait()
        if process.poll() is None:
            with contextlib.suppress(ServiceUnavailable):
                self.ask("stop")
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _environment() -> dict[str, str]:
    """This process's, without settings of another daemon, and one thread a worker."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HISPARSE_")}
    return kept | {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "HISPARSE_HTTP__LISTEN": "",
    }  # fmt: skip


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return "it left no log"
