"""A private daemon as a child of this process: ``embedded://``, for notebooks and tests.

It has an instance name and a short runtime directory of its own and ends with this process,
however that ends; embedded_supervisor.py, which stands in between, sees to that and leaves no
shared memory.
`EmbeddedDaemon` owns the child. Any thread; a forked child does not end its parent's daemon.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from hisparse_service.contract.errors import ConfigError, ServiceUnavailable

SCHEME: Final = "embedded://"
DEFAULT_POOL_BYTES: Final = "256MiB"
_OPTIONS: Final = {"pool_bytes": "HISPARSE_POOL__BYTES"}
"""Options of the endpoint, and the daemon's setting that each becomes."""
_STOP_TIMEOUT_S: Final = 15.0
_LOG_TAIL_BYTES: Final = 2_000


class EmbeddedDaemon:
    """The child. Made by `start`; `stop` ends it and removes what it left.

    Attributes:
        instance: Its unique instance name.
        runtime_dir: Its private directory.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, instance: str, runtime_dir: Path
    ) -> None:
        self.instance = instance
        self.runtime_dir = runtime_dir
        self._process = process
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
        supervisor = Path(__file__).with_name("embedded_supervisor.py")
        with (runtime_dir / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable, "-I", "-S", str(supervisor), str(os.getpid()),
                    str(runtime_dir), instance, "--",
                    sys.executable, "-m", "hisparse_service", "serve",
                ],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is for the client, which then closes
            )  # fmt: skip
        return cls(process, instance=instance, runtime_dir=runtime_dir)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"ipc://{self.runtime_dir}/control.sock"

    def check_alive(self) -> None:
        """Raise if the daemon ended.

        Raises:
            ServiceUnavailable: With the end of what it wrote.
        """
        if self._process.poll() is None:
            return
        raise ServiceUnavailable(
            f"the embedded daemon ended with status {self._process.returncode}: {self._log_tail()}",
            remedy="Correct what it complains of; pool_bytes=… in the endpoint sets its size",
        )

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            data = (self.runtime_dir / "daemon.log").read_bytes()[-_LOG_TAIL_BYTES:]
            return data.decode(errors="replace").strip()
        return "it left no log"

    def stop(self) -> None:
        """End the daemon and wait until its memory is released. Idempotent."""
        with self._lock:
            if os.getpid() != self._pid or self._process.returncode is not None:
                return
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


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
