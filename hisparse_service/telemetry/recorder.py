"""Records control messages into a file for as long as an operator asked, within bounds.

`start`, `stop` and `look` are called on the control loop and never wait: the file is opened,
written and closed by `run`, on a helper thread.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Final

from hisparse_service.contract.errors import CapacityError
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.taps import MessageTap
from hisparse_service.telemetry.trace_file import Header, TraceWriter

FILE_PREFIX: Final = "trace-"
_DRAIN_INTERVAL_S: Final = 0.05
_IDLE_INTERVAL_S: Final = 1.0

log = get_logger()


@dataclasses.dataclass(slots=True, eq=False)
class Recording:
    """One recording, running or the last one."""

    path: Path
    header: Header
    deadline_s: float
    max_bytes: int
    tap: MessageTap = dataclasses.field(default_factory=MessageTap)
    messages: int = 0
    recorded_bytes: int = 0
    error: str = ""
    is_stopping: bool = False
    """Set by the control loop; the helper writes what is queued and ends."""
    has_ended: bool = False
    """Set by the helper; the tap may go."""


class TraceRecorder:
    """At most one recording at a time.

    Args:
        directory: Where files go; private to the daemon's user.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wake = threading.Event()
        self._count = 0
        self.recording: Recording | None = None

    # --- control loop -----------------------------------------------------------------------

    def start(self, header: Header, *, seconds: float, max_bytes: int) -> Recording:
        """Begin.

        Raises:
            CapacityError: A recording runs.
        """
        if self.recording is not None and not self.recording.has_ended:
            raise CapacityError(
                f"a recording into {self.recording.path} runs already",
                remedy="Stop it, or wait for its end", needed=1, free=0,
            )  # fmt: skip
        self._count += 1
        name = f"{FILE_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{self._count}"
        self.recording = Recording(
            path=self._directory / f"{name}.hstrace", header=header,
            deadline_s=time.monotonic() + seconds, max_bytes=max_bytes,
        )  # fmt: skip
        self._wake.set()
        log.info("trace_started", path=str(self.recording.path), seconds=seconds)
        return self.recording

    def stop(self) -> None:
        """End the recording; what is queued is still written. Without one, nothing happens."""
        if self.recording is not None:
            self.recording.is_stopping = True

    # --- the helper -------------------------------------------------------------------------

    def run(self, stopping: threading.Event) -> None:
        """Write recordings until `stopping` is set."""
        while not stopping.is_set():
            self._wake.wait(_IDLE_INTERVAL_S)
            self._wake.clear()
            recording = self.recording
            if recording is not None and not recording.has_ended:
                try:
                    self._write(recording, stopping)
                except OSError as error:
                    recording.error = f"{recording.path}: {error.strerror}"
                    log.error("trace_failed", path=str(recording.path), error=str(error))
                finally:
                    recording.has_ended = True

    def _write(self, recording: Recording, stopping: threading.Event) -> None:
        writer = TraceWriter(recording.path, recording.header)
        try:
            is_last = False
            while not is_last:
                is_last = (
                    recording.is_stopping or stopping.is_set()
                    or time.monotonic() >= recording.deadline_s
                )  # fmt: skip
                for answered in recording.tap.take():
                    if writer.written_bytes >= recording.max_bytes:
                        is_last = True
                        break
                    writer.add(answered)
                    recording.messages += 1
                    recording.recorded_bytes = writer.written_bytes
                if not is_last:
                    stopping.wait(_DRAIN_INTERVAL_S)
        finally:
            writer.close()
        log.info(
            "trace_ended", path=str(recording.path), messages=recording.messages,
            recorded_bytes=recording.recorded_bytes, dropped=recording.tap.dropped,
        )  # fmt: skip

    def close(self) -> None:
        """Wake the helper, so that it sees that it shall stop. Any thread."""
        self._wake.set()
