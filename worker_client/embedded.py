"""A private daemon as a child of this process: ``embedded://``, for notebooks and tests.

It has an instance name and a short runtime directory of its own and ends with this process,
however that ends; embedded_supervisor.py, which stands in between, sees to that and leaves no
shared memory.
`EmbeddedDaemon` owns the child. Any thread; a forked child does not end its parent's daemon.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Final
from urllib.parse import parse_qsl, urlsplit

from hisparse_service.contract.errors import (
    ConfigError,
    HiSparseError,
    ServiceUnavailable,
    from_wire,
)

SCHEME: Final = "embedded://"
DEFAULT_POOL_BYTES: Final = "256MiB"
_OPTIONS: Final = {"pool_bytes": "HISPARSE_POOL__BYTES"}
"""Options of the endpoint, and the daemon's setting that each becomes."""
_STOP_TIMEOUT_S: Final = 15.0
_LOG_TAIL_BYTES: Final = 2_000
_SHM: Final = Path("/dev/shm")  # noqa: S108 - where posix_ipc's segments are


class EmbeddedDaemon:
    """The child. Made by `start`; `stop` ends it and removes what it left.

    Attributes:
        instance: Its unique instance name.
        runtime_dir: Its private directory.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        instance: str,
        runtime_dir: Path,
        log: IO[bytes],
    ) -> None:
        self.instance = instance
        self.runtime_dir = runtime_dir
        self._process = process
        self._log = log
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def start(cls, endpoint: str) -> EmbeddedDaemon:
        """Start a daemon for an ``embedded://`` endpoint; it may not be ready yet.

        Raises:
            ConfigError: Unknown options.
        """
        environment = _environment(endpoint)
        instance = f"emb-{os.getpid()}-{secrets.token_hex(4)}"
        # Short, because a socket's path has 107 bytes at most; not TMPDIR, which may be long.
        runtime_dir = Path(tempfile.mkdtemp(prefix="hsp-", dir="/tmp"))
        environment["HISPARSE_INSTANCE"] = instance
        environment["HISPARSE_RUNTIME_DIR"] = str(runtime_dir)
        environment["HISPARSE_HTTP__LISTEN"] = ""  # private: no port for others on this machine
        supervisor = Path(__file__).with_name("embedded_supervisor.py")
        # Without a name: the directory goes with the daemon, what it said of its end stays.
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        try:
            process = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", str(supervisor), str(os.getpid()),
                    str(runtime_dir), instance, "--",
                    sys.executable, "-m", "hisparse_service", "serve",
                ],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is for the client, which then closes
            )  # fmt: skip
        except BaseException:
            log.close()
            shutil.rmtree(runtime_dir, ignore_errors=True)
            raise
        return cls(process, instance=instance, runtime_dir=runtime_dir, log=log)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"ipc://{self.runtime_dir}/control.sock"

    def check_alive(self) -> None:
        """Raise if the daemon ended.

        Raises:
            ServiceUnavailable: It gave no error of its own; with the end of what it wrote.
            HiSparseError: The daemon's own error, such as PoolTooLarge.
        """
        if self._process.poll() is None:
            return
        said = self._log_tail()
        error = _error_in(said)
        if error is not None:
            raise error
        raise ServiceUnavailable(
            f"the embedded daemon ended with status {self._process.returncode}: {said}",
            remedy="Correct what it complains of; pool_bytes=… in the endpoint sets its size",
        )

    def _log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
        return tail.decode(errors="replace").strip() or "it said nothing"

    def stop(self) -> None:
        """End the daemon and wait until its memory is released. Idempotent."""
        with self._lock:
            if os.getpid() != self._pid or self._log.closed:
                return
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            # The supervisor did this, unless it was killed itself.
            for segment in _SHM.glob(f"hisparse-{self.instance}-*"):
                segment.unlink(missing_ok=True)
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            self._log.close()


def _error_in(said: str) -> HiSparseError | None:
    """The error that `serve` ends with, as its last line has it: `Code: what. remedy`."""
    code, colon, text = said.rpartition("\n")[2].partition(": ")
    if not colon or code not in HiSparseError.registry:
        return None
    names_size = "pool.bytes" in text
    return from_wire(code, text, "The endpoint has it as pool_bytes=…" if names_size else "")


def _environment(endpoint: str) -> dict[str, str]:
    """The child's settings: this process's environment without a daemon's own settings."""
    query = urlsplit(endpoint).query
    options = {"pool_bytes": DEFAULT_POOL_BYTES, **dict(parse_qsl(query, keep_blank_values=True))}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown or urlsplit(endpoint).netloc:
        raise ConfigError(
            f"{endpoint!r}: unknown {', '.join(unknown) or 'address'}",
            remedy=f"Write {SCHEME}?pool_bytes=256MiB; options are {', '.join(_OPTIONS)}",
        )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HISPARSE_")}
    return kept | {_OPTIONS[name]: value for name, value in options.items()}
