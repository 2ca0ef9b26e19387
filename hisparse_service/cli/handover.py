"""`hisparse-service handover`: replace the running daemon by a new one, with hardly a gap.

    start a successor -> it imports, reads its settings and waits for the lock -> tell the old one
    to hand over -> it keeps the pool, answers what it has and ends -> the successor adopts the pool
    -> clients say Hello again by themselves

The successor gets the old one's settings file and flags too, which the old one tells in its status:
flags that only its own command line had would otherwise end with it.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, Optional

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

if TYPE_CHECKING:
    from hisparse_service.cli.connection import OperatorConnection

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


class _Inherited(NamedTuple):
    """What the running daemon was started with, as it says."""

    config: str
    """Its settings file; empty without one."""
    flags: dict[str, str]

    def below(self, config: str, flags: Mapping[str, object]) -> _Inherited:
        """What is left of it under what the command itself was given."""
        left = {name: value for name, value in self.flags.items() if name not in flags}
        return _Inherited("" if config else self.config, left)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.flags.items()]
        return ", ".join([f"config {self.config}"] * bool(self.config) + words) or "nothing"


def handover(
    config: ConfigOption = None,
    instance: InstanceOption = None,
    runtime_dir: RuntimeDirOption = None,
    pool_bytes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--pool-bytes", help="As for serve; the pool that is there is kept"),
    ] = None,
    assignments: SetOption = None,
    inherit: Annotated[
        bool,
        typer.Option(
            "--inherit/--no-inherit",
            help="The settings file and the flags of the running daemon, under those given here",
        ),
    ] = True,
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

    named = {"instance": instance, "runtime_dir": runtime_dir, "pool.bytes": pool_bytes}
    flags = flags_of(assignments)
    flags.update({name: value for name, value in named.items() if value is not None})
    # Only where the running daemon is: the others count together with what it was told.
    where = {name: value for name, value in flags.items() if name in ("instance", "runtime_dir")}
    loaded = load_settings(config_path=config, flags=where)
    directory = loaded.settings.resolved_runtime_dir()
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        # Before anything is started: without a daemon there is nothing to hand over.
        old = stack.enter_context(OperatorConnection(directory, timeout_s=timeout_s))
        inherited = _inherited(old) if inherit else None
        if inherited is not None:
            inherited = inherited.below(loaded.path, flags)
        config = loaded.path or (inherited.config if inherited else "")
        # The directory that answered is the successor's, whatever else it is told.
        flags = {**(inherited.flags if inherited else {}), **flags, "runtime_dir": str(directory)}
        _check(config, flags, inherited)
        options = [f"--config={config}"] if config else []
        options += [f"--set={name}={value}" for name, value in flags.items()]
        options += ["--standby", str(timeout_s + _STANDBY_SPARE_S)]
        successor = _Successor(options, log_file)
        stack.callback(successor.close)
        took_s = _replace(old, successor, deadline_s)
        report: dict[str, object] = {
            "pid": successor.process.pid, "old_epoch": f"{old.hello.epoch:016x}",
            "took_s": round(took_s, 3),
            "inherited": None if inherited is None else inherited._asdict(),
        }  # fmt: skip
    # It outlives this command on purpose: Python need not warn of a child that runs on.
    successor.process.returncode = 0
    if as_json:
        print(json.dumps(report))
        return
    if inherited is not None:
        print(f"inherited: {inherited}")
    print(f"pid {report['pid']} took over in {report['took_s']} s")


def _inherited(old: OperatorConnection) -> _Inherited | None:
    """What the running daemon says it was started with; None, and a warning, of an older one."""
    from hisparse_service.contract import messages as m

    status = old.ask(m.StatusReply, m.Status(old.next_id())).status
    told = status.get("started_with")
    if told is None:
        print(
            f"warning: the running daemon (version {status.get('version', 'unknown')}) does not "
            "tell its flags: the successor gets only those of this command and the defaults",
            file=sys.stderr,
        )
        return None
    flags = {str(name): str(value) for name, value in told["flags"].items()}
    flags.pop("runtime_dir", None)  # the one that answered
    return _Inherited(str(told["config"]), flags)


def _check(config: str, flags: dict[str, object], inherited: _Inherited | None) -> None:
    """Refuse what the successor would refuse, before it is started.

    Raises:
        ConfigError: The settings cannot work.
    """
    from hisparse_service.config import load_settings
    from hisparse_service.contract.errors import ConfigError

    try:
        load_settings(config_path=config or None, flags=flags)
    except ConfigError as error:
        if inherited is None:
            raise
        raise ConfigError(
            f"{error.message} (inherited from the running daemon: {inherited})",
            remedy=f"{error.remedy}; `--no-inherit` leaves out what is inherited. The running "
            "daemon goes on",
        ) from error


def _replace(old: OperatorConnection, successor: _Successor, deadline_s: float) -> float:
    """Wait for the successor, tell the old one to go; seconds between both."""
    from hisparse_service.contract import messages as m

    if not successor.wait_for("STANDBY", deadline_s=deadline_s):
        successor.end()
        _fail("the successor did not start: its log says why. The old daemon goes on")
    began_s = time.monotonic()
    drain = m.Drain(
        old.next_id(), stop=True, timeout_s=0.0, hand_over=True,
        successor_pid=successor.process.pid,
    )  # fmt: skip
    old.ask(m.Done, drain)
    if not successor.wait_for("READY", deadline_s=deadline_s):
        _fail("the successor is not ready: its log says why. The pool is kept: start a daemon")
    return time.monotonic() - began_s


def _fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise typer.Exit(FAILED)
