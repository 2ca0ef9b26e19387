"""A daemon with a fault built in: `python misbehaving.py FAULT serve ...`, for the alerts' tests.

slow: a Status request holds the control loop for 1.5 s. bug: a Status request meets a TypeError.
thread: the trace recorder's thread dies when it starts.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from hisparse_service.cli import main
from hisparse_service.contract import messages
from hisparse_service.server import dispatch
from hisparse_service.telemetry.recorder import TraceRecorder


def _slow(*_arguments: Any) -> messages.Reply:
    time.sleep(1.5)
    raise TypeError("and then it fails")


def _bug(*_arguments: Any) -> messages.Reply:
    raise TypeError("a bug that the test built in")


def _die(_recorder: TraceRecorder, _stopping: threading.Event) -> None:
    raise OSError("the thread's end, built in by the test")


def build_in(fault: str) -> None:
    """Change this process before the daemon starts."""
    if fault == "thread":
        TraceRecorder.run = _die  # type: ignore[method-assign]
        return
    handler = {"slow": _slow, "bug": _bug}[fault]
    route = dispatch.ROUTES[messages.Status]
    dispatch.ROUTES[messages.Status] = route._replace(handler=handler)  # type: ignore[index]


if __name__ == "__main__":
    build_in(sys.argv.pop(1))
    main.main()
