"""The daemon and a worker's way to it: directory, sockets, segments, attach, plugin."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hisparse_service.cli.connection import OperatorConnection
from hisparse_service.cli.doctor_findings import (
    Check,
    Finding,
    bad,
    good,
    skipped,
    warning,
)
from hisparse_service.cli.doctor_vllm import check_plugin
from hisparse_service.cli.operations import human_bytes
from hisparse_service.cli.presence import State, look
from hisparse_service.config import Settings
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    HiSparseError,
    NotAuthorised,
    ServiceUnavailable,
)
from hisparse_service.pool import names
from hisparse_service.pool.purge import Finding as SegmentFinding
from hisparse_service.pool.purge import PurgeMode, purge, purge_one
from hisparse_service.pool.purge import Verdict as SegmentVerdict
from hisparse_service.pool.segment_file import open_existing, shm_path
from hisparse_service.server.runtime_directory import (
    CONTROL_SOCKET_NAME,
    check_path_length,
)

_ANSWER_S: Final = 2.0
_SLOW_PING_S: Final = 0.1
_PINGS: Final = 20
_ROUND_TRIP_S: Final = 60.0


def checks(settings: Settings, *, quick: bool = False) -> list[Check]:
    """In the order in which a worker meets them."""
    found = [
        Check("runtime directory", lambda: check_runtime_directory(settings)),
        Check("daemon", lambda: check_daemon(settings)),
        Check("segments", lambda: check_segments(settings)),
        Check("attach", lambda: check_attach(settings)),
        Check("http", lambda: check_http(settings)),
    ]
    if not quick:
        found += [
            Check("round trip", check_round_trip),
            Check("vllm plugin", lambda: check_plugin(settings)),
        ]
    return found


# --- directory and daemon -----------------------------------------------------------------------


def check_runtime_directory(settings: Settings) -> Finding:
    """Path length, owner, mode."""
    directory = settings.resolved_runtime_dir()
    check = "runtime directory"
    check_path_length(directory)
    try:
        found = directory.lstat()
    except FileNotFoundError:
        parent = next(each for each in directory.parents if each.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return bad(
                check, f"{directory} is not there, and {parent} is not writable for uid "
                f"{os.geteuid()}", "Set runtime_dir, or XDG_RUNTIME_DIR, to a writable place",
            )  # fmt: skip
        return good(check, f"{directory} is not there yet; serve makes it")
    except PermissionError:
        return bad(
            check, f"uid {os.geteuid()} may not look into {directory.parent}",
            "Run as the daemon's user: the directory is closed to others",
        )  # fmt: skip
    if not stat.S_ISDIR(found.st_mode):
        return bad(
            check, f"{directory} is no directory (a link is not followed)",
            "Remove it, or set another runtime_dir",
        )  # fmt: skip
    if found.st_uid != os.geteuid():
        return _of_another_user(directory, found.st_uid)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or mode & 0o700 != 0o700:

        def close_it() -> str:
            directory.chmod(0o700)
            return "its mode is 0700 now"

        return bad(
            check, f"{directory} has mode {mode:04o}: it must be 0700", f"chmod 700 {directory}",
            close_it,
        )  # fmt: skip
    return good(check, f"{directory}, mode 0700")


def _of_another_user(directory: Path, owner_uid: int) -> Finding:
    uid, text = os.geteuid(), f"{directory} belongs to uid {owner_uid}, this is {os.geteuid()}"
    with contextlib.suppress(HiSparseError), OperatorConnection(directory, timeout_s=_ANSWER_S):
        return good("runtime directory", f"{text}, whom its daemon lets connect")
    return bad(
        "runtime directory", text,
        f"Run as uid {owner_uid}, name {uid} in its server.allowed_uids (only for root: others "
        "cannot enter), or set another runtime_dir",
    )  # fmt: skip


def running_pool(settings: Settings) -> dict[str, Any] | None:
    """What the daemon that runs says of its pool and its start; None where none answers."""
    with contextlib.suppress(HiSparseError):
        with OperatorConnection(settings.resolved_runtime_dir(), timeout_s=_ANSWER_S) as daemon:
            status = daemon.ask(m.StatusReply, m.Status(daemon.next_id())).status
        return {
            "bytes": status["pool"].get("bytes") or status.get("pool_bytes", 0),
            "progress": status["progress"],
        }
    return None


def check_daemon(settings: Settings) -> Finding:
    """Whether one lives in the directory and answers; whether another holds the pool."""
    directory = settings.resolved_runtime_dir()
    try:
        with OperatorConnection(directory, timeout_s=_ANSWER_S) as daemon:
            status = daemon.ask(m.StatusReply, m.Status(daemon.next_id())).status
    except (ServiceUnavailable, NotAuthorised) as error:
        if look(directory).state is State.NOBODY:
            return _without_daemon(settings, directory / CONTROL_SOCKET_NAME)
        return bad("daemon", error.message, error.remedy)
    # A daemon of an older version does not say its pid.
    text = (
        f"pid {status.get('pid', '?')}, {status['phase']}, {status['sessions']['workers']} workers"
    )
    if status["phase"] == "starting":
        return warning(
            "daemon", f"{text}: {status['progress']:.0%} of the pool is populated",
            "Wait; workers attach when it is ready",
        )  # fmt: skip
    if status["phase"] != "ready":
        return warning("daemon", text, "It drains: start its successor, or wait for it")
    return good("daemon", text)


def _without_daemon(settings: Settings, socket: Path) -> Finding:
    segments = {each.verdict: each for each in purge(settings.instance, mode=PurgeMode.REPORT)}
    owner, unseen = segments.get(SegmentVerdict.OWNED), segments.get(SegmentVerdict.UNSEEN)
    if owner is not None:
        return bad(
            "daemon", f"none in {socket.parent}, but one that lives owns {owner.name}: another "
            "daemon of the same instance runs with another runtime_dir",
            "Use its runtime_dir, or give this one another instance",
        )  # fmt: skip
    if unseen is not None:
        return warning(
            "daemon", f"none in {socket.parent}, but {unseen.name} {_not_seen(unseen)}: its "
            "daemon may run", f"Run doctor as uid {unseen.owner_uid}",
        )  # fmt: skip
    if socket.exists():

        def remove() -> str:
            socket.unlink(missing_ok=True)
            return "it is removed"

        return warning(
            "daemon", f"{socket} is there and no daemon: it was killed",
            "Start the daemon: it replaces the socket and adopts the pool", remove,
        )  # fmt: skip
    return warning("daemon", f"none runs in {socket.parent}", "Start it: hisparse-service serve")


def check_segments(settings: Settings) -> Iterator[Finding]:
    """What stands in shared memory under this instance's names."""
    pool = names.segment_name(settings.instance, settings.pool.name)
    found = purge(settings.instance, mode=PurgeMode.REPORT)
    if not found:
        yield good("segments", f"none of instance {settings.instance}")
    for each in found:
        size = human_bytes(each.size_bytes)
        if each.verdict is SegmentVerdict.UNSEEN:
            # Never how to remove it: it may be a pool with workers on it.
            yield bad(
                "segments", f"{each.name}, {size}, {_not_seen(each)}",
                f"Run doctor as that user (uid {each.owner_uid}), or set another instance",
            )  # fmt: skip
        elif each.verdict is SegmentVerdict.FOREIGN:
            yield bad(
                "segments", f"{each.name}, {size}, is not ours: {each.reason}",
                _remedy_for_foreign(each),
            )  # fmt: skip
        elif each.verdict is not SegmentVerdict.REMOVABLE:
            yield good("segments", f"{each.name}, {size}: {each.reason}")
        elif each.name == pool and not each.is_damaged:
            yield good("segments", f"{each.name}, {size}: kept, the next daemon adopts it")
        else:
            yield _stale(each, size)


def _remedy_for_foreign(segment: SegmentFinding) -> str:
    other = "set another instance or pool.name"
    if segment.owner_uid is not None:  # what could not be opened
        return f"See what it is (ls -ld /dev/shm{segment.name}), or {other}"
    return f"See whose it is; remove it by hand (rm /dev/shm{segment.name}) or {other}"


def _not_seen(segment: SegmentFinding) -> str:
    return segment.reason.removeprefix("it ")


def _stale(segment: SegmentFinding, size: str) -> Finding:
    def remove() -> str:
        # Looked at once more, with its lock held, before it goes.
        after = purge_one(segment.name, PurgeMode.REMOVE)
        return f"{after.verdict.value}: {after.reason}"

    return warning(
        "segments", f"{segment.name}, {size}, is stale: {segment.reason}",
        "hisparse-service purge, or doctor --fix", remove,
    )  # fmt: skip


# --- a worker's way -----------------------------------------------------------------------------


def check_attach(settings: Settings) -> Finding:
    """Say Hello, ping, and see that this process sees the segment that the daemon has."""
    directory = settings.resolved_runtime_dir()
    if not os.access(directory / CONTROL_SOCKET_NAME, os.F_OK):
        seen = look(directory)
        if seen.state is State.CLOSED:
            return bad("attach", seen.found, seen.remedy)
        return skipped("attach", "no daemon runs here")
    try:
        with OperatorConnection(directory, timeout_s=_ANSWER_S) as daemon:
            times_s = []
            for _ in range(_PINGS):
                began_s = time.perf_counter()
                daemon.ask(m.Pong, m.Ping(daemon.next_id()))
                times_s.append(time.perf_counter() - began_s)
            pool = daemon.ask(m.StatusReply, m.Status(daemon.next_id())).status["pool"]
    except HiSparseError as error:
        return bad("attach", error.message, error.remedy)
    median_s = sorted(times_s)[_PINGS // 2]
    text = f"Hello and ping in {median_s * 1e6:.0f} us"
    if not pool:
        return warning("attach", f"{text}; the pool is not open yet", "Wait until it is ready")
    try:
        segment = open_existing(pool["segment"])
    except OSError as error:
        return _no_segment(pool["segment"], text, error)
    same = (segment.device, segment.inode) == (pool["device"], pool["inode"])
    segment.close()
    if not same:
        return bad(
            "attach", f"{text}, but {pool['segment']} is another object here than the daemon's",
            "Share /dev/shm with the daemon: the same volume in both containers, or hostIPC",
        )  # fmt: skip
    if median_s > _SLOW_PING_S:
        return warning("attach", text, "The daemon or this machine is overloaded: see top")
    return good("attach", f"{text}, and the segment is the daemon's")


def _no_segment(name: str, text: str, error: OSError) -> Finding:
    """The daemon answers, and its segment cannot be opened by this process."""
    with contextlib.suppress(OSError):
        owner_uid = os.lstat(shm_path(name)).st_uid
        if owner_uid != os.geteuid():
            return warning(
                "attach", f"{text}; its segment belongs to uid {owner_uid}, this is "
                f"{os.geteuid()}", f"Commands work from here; run workers as uid {owner_uid}",
            )  # fmt: skip
    return bad(
        "attach", f"{text}, but {name} cannot be opened here: {error.strerror}",
        "Share /dev/shm with the daemon: the same volume in both containers, or hostIPC",
    )  # fmt: skip


def check_http(settings: Settings) -> Finding:
    """Whether the daemon could take its address, and whether a token file can be read."""
    token_file = settings.http.token_file
    if token_file:
        try:
            if not Path(token_file).read_text().split("\n", 1)[0].strip():
                return bad("http", f"{token_file} has an empty first line", "Write a token into it")
        except OSError as error:
            return bad(
                "http", f"http.token_file {token_file} cannot be read: {error.strerror}",
                "Give its path, and let the daemon's user read it",
            )  # fmt: skip
    with contextlib.suppress(HiSparseError):
        with OperatorConnection(settings.resolved_runtime_dir(), timeout_s=_ANSWER_S) as daemon:
            http = daemon.ask(m.StatusReply, m.Status(daemon.next_id())).status["http"]
        if http.get("error"):
            return warning(
                "http", http["error"],
                "Another process has the address: set http.listen, or end that process",
            )  # fmt: skip
        return good("http", ", ".join(http.get("listening", [])) or "switched off")
    return skipped("http", "no daemon answers here")


def check_round_trip() -> Finding:
    """A daemon of its own, one worker that writes a block, another that finds and reads it."""
    from hisparse_service.cli.doctor_round_trip import round_trip

    with tempfile.TemporaryDirectory(prefix="hisparse-doctor-") as directory:
        try:
            seconds = round_trip(Path(directory), timeout_s=_ROUND_TRIP_S)
        except (HiSparseError, OSError) as error:
            message = error.message if isinstance(error, HiSparseError) else str(error)
            remedy = error.remedy if isinstance(error, HiSparseError) else ""
            return bad("round trip", message, remedy or "See the checks above")
    return good(
        "round trip", f"a daemon was started, a block written, published, found and read in "
        f"{seconds:.1f} s",
    )  # fmt: skip
