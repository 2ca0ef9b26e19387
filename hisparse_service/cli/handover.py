"""`hisparse-service handover`: replace the running daemon by a new one, with hardly a gap.

    start a successor -> it imports, reads its settings and waits for the lock -> tell the old one
    to hand over -> it keeps the pool, answers what it has and ends -> the successor adopts the pool
    -> clients say Hello again by themselves

What takes long (starting a process, imports) is over before the old daemon is told to go. Until
then every failure leaves the old daemon as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Optional

import typer

from hisparse_service.cli.exit_codes import FAILED
from hisparse_service.cli.options import (
    ConfigOption,
    InstanceOption,
    JsonOption,
    RuntimeDirOption,
    SetOption,
    flags_of,
)

_STANDBY_SPARE_S: Final = 5.0
"""The successor waits this much longer than the command: it must not give up first."""


class _Successor:
    """The new daemon, in a session of its own, and what it says on its pipe."""

    def __init__(self, arguments: list[str], log: Path | None) -> None:
        self._read_fd, write_fd = os.pipe()
        self._said = b""
        try:
            with _log_file(log) as output:
                self.process = subprocess.Popen(
                    [
                        sys.executable, "-m", "hisparse_service", "serve", *arguments,
                        "--ready-fd", str(write_fd),
                    ],
                    pass_fds=(write_fd,), start_new_session=True, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output,
                )  # fmt: skip
        except BaseException:
            os.close(self._read_fd)
            raise
        finally:
            os.close(write_fd)

    def wait_for(self, word: str, *, deadline_s: float) -> bool:
        """Until it said `word`; False when it ended or the deadline passed before."""
        while not any(line.startswith(word.encode()) for line in self._said.split(b"\n")):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read_fd], [], [], left_s)[0]:
                return False
            said = os.read(self._read_fd, 4096)
            if not said:
                return False
            self._said += said
        return True

    def end(self) -> None:
        """Stop it, unless it took over."""
        self.process.terminate()
        self.process.wait()

    def close(self) -> None:
        os.close(self._read_fd)


@contextlib.contextmanager
def _log_file(path: Path | None) -> Iterator[int]:
    if path is None:
        yield sys.stderr.fileno()
        return
    with path.open("ab") as file:
        yield file.fileno()


def handover(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    pool_bytes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--pool-bytes", help="As for serve; the pool that is there is kept"),
    ] = None,
    assignments: SetOption = None,
    log_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--log-file", help="The successor's log; standard error when left out"),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--within", help="Seconds for all of it", min=1)
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Start a successor of the running daemon and let it take over; workers stay attached."""
    from hisparse_service.cli.connection import OperatorConnection
    from hisparse_service.config import load_settings
    from hisparse_service.contract import messages as m

    named = {"instance": instance, "runtime_dir": runtime_dir, "pool.bytes": pool_bytes}
    flags = flags_of(assignments)
    flags.update({name: value for name, value in named.items() if value is not None})
    settings = load_settings(config_path=config, flags=flags).settings
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        # Before anything is started: without a daemon there is nothing to hand over.
        old = stack.enter_context(
            OperatorConnection(settings.resolved_runtime_dir(), timeout_s=timeout_s)
        )
        options = [] if config is None else ["--config", config]
        options += [f"--set={name}={value}" for name, value in flags.items()]
        options += ["--standby", str(timeout_s + _STANDBY_SPARE_S)]
        successor = _Successor(options, log_file)
        stack.callback(successor.close)
        if not successor.wait_for("STANDBY", deadline_s=deadline_s):
            successor.end()
            _fail("the successor did not start: its log says why. The old daemon goes on")
        began_s = time.monotonic()
        old.ask(m.Done, m.Drain(old.next_id(), stop=True, timeout_s=0.0, hand_over=True))
        if not successor.wait_for("READY", deadline_s=deadline_s):
            _fail("the successor is not ready: its log says why. The pool is kept: start a daemon")
        took_s = time.monotonic() - began_s
        report = {
            "pid": successor.process.pid, "old_epoch": old.hello.epoch, "took_s": round(took_s, 3),
        }  # fmt: skip
    # It outlives this command on purpose: Python need not warn of a child that runs on.
    successor.process.returncode = 0
    print(
        json.dumps(report) if as_json else f"pid {report['pid']} took over in {report['took_s']} s"
    )


def _fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise typer.Exit(FAILED)
