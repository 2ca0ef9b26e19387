"""Wiring of the daemon: start, run, drain, stop.

    lock the runtime directory -> bind -> answer Hello, Ping and Status while a helper thread
    creates or adopts the pool -> ready -> serve -> drain -> stop (with workers the pool is kept,
    without it is released)

`Daemon.run` is the whole life of the process and belongs to its main thread, which is the control
loop. Only the pool is opened elsewhere: that may take minutes. A command that starts a daemon
begins with that (`start.begin`) before it imports this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

import hisparse_service
from hisparse_service.config import Settings
from hisparse_service.contract.errors import ConfigError, HiSparseError, InternalError, UsageError
from hisparse_service.contract.geometry import decode_geometry
from hisparse_service.contract.keys import key_space
from hisparse_service.contract.limits import GIB
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import BackingMode, Quota
from hisparse_service.membership.credentials import Authoriser
from hisparse_service.membership.liveness import PidWatcher
from hisparse_service.membership.process_lock import ProcessLock, Role
from hisparse_service.membership.sessions import DeathCause, SessionTable
from hisparse_service.pool.opener import PoolOpener
from hisparse_service.pool.pool import Backing, Pool
from hisparse_service.pool.populate import Cancelled, Progress
from hisparse_service.server.block_checks import BlockChecks
from hisparse_service.server.clients import end_session
from hisparse_service.server.device_backings import DeviceBackings, DeviceOptions
from hisparse_service.server.dispatch import BrokenInvariantError, Dispatcher
from hisparse_service.server.events import EventPublisher
from hisparse_service.server.handlers_backing import add_namespace
from hisparse_service.server.handlers_control import LIMIT_NAMES, drop_ended_taps
from hisparse_service.server.handlers_device import tick as tick_devices
from hisparse_service.server.handlers_operations import session_rows, status_of
from hisparse_service.server.helpers import HelperThreads, Restart
from hisparse_service.server.loop import ControlLoop
from hisparse_service.server.observers import Observers
from hisparse_service.server.runtime_directory import LOCK_NAME, prepare_runtime_directory
from hisparse_service.server.state import NamespaceEntry, Phase, ServerOptions, ServerState
from hisparse_service.server.transport import Transport
from hisparse_service.start import Begun, pool_settings
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.metrics import ServerMetrics
from hisparse_service.telemetry.recorder import TraceRecorder
from hisparse_service.telemetry.systemd_notify import ServiceManager

_SNAPSHOT_EVERY_S: Final = 0.9
"""Every other tick, at 0.2 to 0.3 ms; the sampler looks once a second."""
_HELPER_STOP_S: Final = 30.0
"""A helper looks at its stop event at least every 0.2 s; what takes longer is stuck in a call."""

log = get_logger()


class Listener(Protocol):
    """Who wants to know how the start goes: the command line."""

    def on_progress(self, progress: Progress) -> None:
        """Pages are being reserved. Called on a helper thread."""

    def on_ready(self, endpoint: str, pool: Pool) -> None:
        """Workers are accepted. Control loop."""


class Daemon:
    """One daemon, from start to stop. `run` may be called once.

    Args:
        settings: Checked.
        listener: Told of progress and readiness; None: nobody.
        ready_fd: Gets the line "READY <endpoint>" and is closed; -1: none.
        standby_s: How long to wait for a living predecessor to end (it gets the line "STANDBY"
            before); 0: its presence is an error.
        begun: The start so far, which the caller closes; None: begin here.
        config_path: The settings file, for whoever asks; empty without one.
        flags: Settings of the command line by dotted name, for a successor.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        listener: Listener | None = None,
        ready_fd: int = -1,
        standby_s: float = 0.0,
        begun: Begun | None = None,
        config_path: str = "",
        flags: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._config_path, self._flags = config_path, dict(flags or {})
        self._begun = begun
        self._opener = begun.opener if begun is not None else PoolOpener(pool_settings(settings))
        self._listener = listener
        self._ready_fd = ready_fd
        self._standby_s = standby_s
        self._manager = ServiceManager.from_environment(os.environ, predecessor_s=standby_s)
        self._epoch = secrets.randbits(64) or 1
        self._helpers = HelperThreads()
        self._opened: Pool | None = None
        """Of the opener thread; read again only after it ended."""
        self._error: HiSparseError | None = None
        self._drain_deadline_s: float | None = None
        self._registrar: _Registrar | None = None
        self._stop_when_drained = False
        self._next_snapshot_s = 0.0
        self._phase_of_snapshot = Phase.STARTING

    def run(self) -> None:
        """Start, serve, and return after a stop that was asked for.

        Raises:
            ConfigError: The runtime directory, the pool or the settings cannot work.
            InternalError: A broken invariant. The pool is kept for the successor.
            HiSparseError: The pool could not be opened.
        """
        directory = self._settings.resolved_runtime_dir()
        prepare_runtime_directory(directory)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._lock(directory))
            # Where the start fails before there is a loop to hand the pool to.
            stack.callback(self._opener.close)
            self._serve(directory, stack)
        # A successor may be up by now: unmapping takes its time.
        self._close_pool()
        if self._error is not None:
            raise self._error

    def _lock(self, directory: Path) -> ProcessLock:
        if self._begun is not None:
            return self._begun.lock
        path = directory / LOCK_NAME
        if self._standby_s <= 0:
            return ProcessLock.acquire(path, role=Role.TOKEN)
        self._manager.standby()
        self._tell("STANDBY")
        return ProcessLock.acquire(path, role=Role.TOKEN, wait_s=self._standby_s)

    def _serve(self, directory: Path, stack: contextlib.ExitStack) -> None:
        settings = self._settings
        allowed = {os.geteuid(), *settings.server.allowed_uids}
        transport = Transport(directory, allowed_uids=allowed)
        stack.callback(transport.close)
        watcher = stack.enter_context(PidWatcher())
        self._state = state = self._make_state(transport, watcher)
        self._loop = loop = ControlLoop(
            state, transport, on_tick=self._on_tick, on_signal=self._on_signal
        )
        stack.callback(loop.close)
        if self._begun is not None:
            self._begun.deliver_signals()
        else:
            self._opener.start()
        state.checks = BlockChecks(loop.call_soon)
        state.devices = DeviceBackings(_device_options(settings), call_soon=loop.call_soon)
        self._observers = Observers(settings, state, loop)
        dispatcher = Dispatcher(
            state, authoriser=Authoriser(allowed), send=loop.send, read_monitor=loop.read_monitor
        )
        log.info(
            "starting", endpoint=transport.control_endpoint, instance=settings.instance,
            pid=os.getpid(), epoch=f"{self._epoch:016x}", pool_bytes=settings.pool.bytes,
        )  # fmt: skip
        self._helpers.start("pool-opener", self._open_pool, restart=Restart.NEVER)
        self._helpers.start("block-checks", state.checks.run, restart=Restart.ALWAYS)
        self._observers.start(self._helpers)
        is_intact = False
        # What is loaded by now lives as long as the process; looking through it again and again
        # would hold up a request each time.
        gc.freeze()
        gc.enable()
        try:
            loop.run(dispatcher)
            is_intact = True
        except BrokenInvariantError as error:
            log.critical("broken_invariant", error=str(error), exc_info=error)
            self._error = InternalError(
                f"a broken invariant stopped the daemon: {error}",
                remedy="Report it with the log; start again: the published blocks are adopted",
            )
        finally:
            self._stop(is_intact=is_intact)

    def _make_state(self, transport: Transport, watcher: PidWatcher) -> ServerState:
        settings, limits = self._settings, self._settings.limits
        return ServerState(
            options=ServerOptions(
                instance=settings.instance,
                daemon_version=hisparse_service.__version__,
                epoch=self._epoch,
                events_endpoint=transport.events_endpoint,
                heartbeat_interval_s=limits.heartbeat_interval_s,
                session_timeout_s=limits.session_timeout_s,
                lease_ttl_s=limits.lease_ttl_s,
                config_path=self._config_path,
                flags=self._flags,
                started_s=self._begun.started_s if self._begun is not None else time.monotonic(),
                runtime_dir=str(settings.resolved_runtime_dir()),
                pool_bytes=settings.pool.bytes,
            ),
            sessions=SessionTable(
                timeout_s=limits.session_timeout_s, max_sessions=limits.max_sessions
            ),
            watcher=watcher,
            events=EventPublisher(
                transport.publisher, epoch=self._epoch, instance=settings.instance
            ),
            metrics=ServerMetrics(),
            begin_drain=self._begin_drain,
            recorder=TraceRecorder(settings.resolved_runtime_dir()),
            describe_helpers=lambda: {
                **self._helpers.describe(),
                **self._loop.describe_helpers(),
            },
            describe_cuda=self._describe_cuda,
            limits={name: getattr(limits, name) for name in LIMIT_NAMES},
        )

    # --- start ------------------------------------------------------------------------------

    def _open_pool(self, stopping: threading.Event) -> None:
        """On the opener thread: create or adopt, then hand over to the loop."""
        try:
            pool = Pool.take_over(self._opener.take(stopping, progress=self._on_progress))
            self._opened = pool
            for notice in pool.notices:
                log.warning("pool_notice", notice=notice)
            directory, entries = self._load_directory(pool)
            registrar = self._start_registrar(pool)
        except Cancelled:
            return
        except HiSparseError as error:
            self._fail(error)
            return
        except Exception as error:
            log.error("pool_opener_died", error=repr(error), exc_info=error)
            self._fail(InternalError(f"opening the pool met a bug: {error!r}"))
            return
        self._loop.call_soon(lambda: self._on_pool_open(pool, directory, entries, registrar))

    def _fail(self, error: HiSparseError) -> None:
        self._error = error
        self._loop.call_soon(lambda: self._loop.stop(f"the pool cannot be opened: {error.code}"))

    def _on_progress(self, progress: Progress) -> None:
        self._state.progress = progress.fraction
        self._manager.progress(progress.done_bytes, progress.total_bytes)
        if self._listener is not None:
            self._listener.on_progress(progress)

    def _load_directory(self, pool: Pool) -> tuple[Directory, list[NamespaceEntry]]:
        limits = self._settings.limits
        directory = Directory(
            epoch=self._epoch,
            hash_seed=secrets.randbits(128),
            lease_ttl_s=limits.lease_ttl_s,
            writer_ttl_s=limits.writer_lease_ttl_s,
            adoption_grace_s=limits.adoption_grace_s,
            session_quota=Quota(
                max_reserved_blocks=limits.max_reserved_blocks_per_session or None,
                max_pins=limits.max_pins_per_session or None,
                max_leases=limits.max_leases_per_session,
            ),
            namespace_quota=Quota(
                max_reserved_blocks=limits.max_reserved_blocks_per_namespace or None,
                max_pins=limits.max_pins_per_namespace or None,
            ),
            event_sink=self._state.events.on_directory_event,
            audience=self._state.events.audience,
        )
        entries = []
        for backing in pool.backings():
            entry = _adopt_backing(directory, backing, self._state.metrics.adopted_blocks)
            if entry is not None:
                entries.append(entry)
        return directory, entries

    def _start_registrar(self, pool: Pool) -> _Registrar | None:
        if not self._settings.cuda.register:
            return None
        from hisparse_service.pool.cuda import CudaRegistrar

        registrar = CudaRegistrar(pool, gpu=max(0, self._settings.cuda.device))
        registrar.start()
        return _Registrar(registrar)

    def _on_pool_open(
        self,
        pool: Pool,
        directory: Directory,
        entries: list[NamespaceEntry],
        registrar: _Registrar | None,
    ) -> None:
        state = self._state
        state.pool, state.loaded_directory = pool, directory
        for client in state.clients.values():
            directory.open_session(
                client.session.session_id, group=client.hello.group, rank=client.hello.rank,
                delegates_copies=client.hello.delegates_copies,
            )  # fmt: skip
        for entry in entries:
            add_namespace(state, entry)
        state.metrics.adoptions += pool.adopted
        self._registrar = registrar
        state.progress = 1.0
        if state.phase is Phase.STARTING:
            state.phase = Phase.READY
        endpoint = f"ipc://{self._settings.resolved_runtime_dir()}/control.sock"
        log.info(
            "ready", endpoint=endpoint, segment=pool.segment_name, pool_bytes=pool.size_bytes,
            adopted=pool.adopted, namespaces=len(entries),
            start_s=round(time.monotonic() - state.options.started_s, 3),
        )  # fmt: skip
        self._announce(endpoint)
        if self._listener is not None:
            self._listener.on_ready(endpoint, pool)

    def _announce(self, endpoint: str) -> None:
        self._tell(f"READY {endpoint}")
        if self._ready_fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._ready_fd)
            self._ready_fd = -1
        self._manager.ready(_summary(self._state))

    def _tell(self, line: str) -> None:
        if self._ready_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._ready_fd, f"{line}\n".encode())

    # --- while it runs ----------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> None:
        state = self._state
        for client in state.clients.values():
            if client.is_operator:  # no heartbeats: its socket and its pid tell of its end
                state.sessions.touch(client.session, now_s=now_s)
        for session in state.sessions.timed_out(now_s):
            end_session(state, state.by_session[session.session_id], DeathCause.TIMED_OUT)
        if state.loaded_directory is not None:
            result = state.directory.expire(now_s)
            if result.expired:
                log.warning("leases_expired", count=len(result.expired))
        state.events.read_subscriptions()
        state.events.tick(now_s)
        self._helpers.check(now_s)
        state.refusals.tick(now_s)
        if self._registrar is not None:
            self._registrar.poll()
        tick_devices(state, now_s)
        drop_ended_taps(state)
        self._take_snapshot(now_s)
        is_watched = now_s < state.metrics.watched_until_s
        state.metrics.session_rows = session_rows(state, now_s) if is_watched else []
        if self._manager.listens:
            self._manager.tick(_summary(state))
        self._check_drained(now_s)

    def _take_snapshot(self, now_s: float) -> None:
        """The status for whoever asks without the control loop: each second, and at each change."""
        state = self._state
        is_due = now_s >= self._next_snapshot_s or state.phase is not self._phase_of_snapshot
        if is_due or state.phase is Phase.STARTING:
            self._next_snapshot_s = now_s + _SNAPSHOT_EVERY_S
            self._phase_of_snapshot = state.phase
            state.metrics.snapshot = status_of(state, now_s)

    def _on_signal(self, number: int) -> None:
        if self._stop_when_drained:
            log.info("signal_again", signal=number)
            return
        log.info("signal", signal=number)
        self._begin_drain(time.monotonic() + self._settings.server.drain_timeout_s, True)

    def _begin_drain(self, deadline_s: float, stop: bool) -> None:
        state = self._state
        if state.phase is Phase.READY:
            state.phase = Phase.DRAINING
        log.info("draining", workers=state.num_workers, stop=stop)
        if stop:
            before = self._drain_deadline_s if self._stop_when_drained else None
            self._stop_when_drained = True
            self._drain_deadline_s = deadline_s if before is None else min(before, deadline_s)
            left_s = max(0.0, self._drain_deadline_s - time.monotonic())
            if not state.keeps_pool:  # the successor speaks for the service now
                self._manager.draining(left_s, state.num_workers)
            self._check_drained(time.monotonic())

    def _describe_cuda(self) -> dict[str, object]:
        if self._registrar is None:
            return {}
        status = self._registrar.status
        return {
            "state": status.state.value, "registered_bytes": status.registered_bytes,
            "total_bytes": status.total_bytes, "gpu_bytes": status.gpu_bytes,
            "cuda_error": status.cuda_error, "error": str(status.error or ""),
        }  # fmt: skip

    def _check_drained(self, now_s: float) -> None:
        if not self._stop_when_drained:
            return
        assert self._drain_deadline_s is not None
        if self._state.keeps_pool:
            pid = self._state.successor_pid
            self._loop.stop(f"handed over to pid {pid}" if pid else "handed over")
        elif self._state.num_workers == 0:
            self._loop.stop("drained")
        elif self._state.phase is Phase.STARTING:
            self._loop.stop("stopped before it was ready")
        elif now_s >= self._drain_deadline_s:
            self._loop.stop("the drain's deadline passed")

    # --- stop -------------------------------------------------------------------------------

    def _stop(self, *, is_intact: bool) -> None:
        """Give everything back. With workers attached, the pool stays for the successor."""
        state = self._state
        state.phase = Phase.STOPPED
        state.refusals.close()
        if not state.keeps_pool:
            self._manager.stopping()
        has_workers = state.num_workers > 0
        self._helpers.stopping.set()
        state.checks.close()
        self._observers.wake()
        stuck = self._helpers.stop(_HELPER_STOP_S)
        if stuck:
            log.error("helpers_stuck", helpers=stuck)
        if self._registrar is not None:
            self._registrar.close()
        state.devices.close()
        pool = self._opened
        if pool is None:
            log.info("stopped", reason=self._loop.stop_reason, pool="none")
            return
        keeps = (
            not is_intact or has_workers or state.keeps_pool or pool.users_attached()
            or self._error is not None
        )  # fmt: skip
        self._drop_views()
        if keeps:
            pool.disown()
        else:
            pool.unlink()
        log.info(
            "stopped", reason=self._loop.stop_reason, pool="kept" if keeps else "released",
            segment=pool.segment_name, workers=state.num_workers,
        )  # fmt: skip

    def _drop_views(self) -> None:
        """Every view of the mapping goes before the mapping does.

        The tables are left as they are: workers go on copying into blocks that they reserved, and
        reclaim them from the successor.
        """
        state = self._state
        for entry in state.namespaces.values():
            state.events.set_table(entry.namespace_id, None)
            entry.backing = None
        if state.loaded_directory is not None:
            state.directory.detach()
        state.namespaces.clear()
        state.by_fingerprint.clear()
        state.loaded_directory = None
        state.pool = None

    def _close_pool(self) -> None:
        pool, self._opened = self._opened, None
        if pool is None:
            return
        try:
            pool.keep()
        except UsageError as error:
            log.error("pool_views_alive", error=str(error))


def _device_options(settings: Settings) -> DeviceOptions:
    cuda = settings.cuda
    return DeviceOptions(
        limit_bytes=cuda.device_backing_bytes, lease_s=cuda.device_backing_lease_s,
        timeout_s=cuda.device_backing_timeout_s,
    )  # fmt: skip


class _Registrar:
    """Polls the CUDA child and logs what changes."""

    def __init__(self, registrar: object) -> None:
        from hisparse_service.pool.cuda import CudaRegistrar

        assert isinstance(registrar, CudaRegistrar)
        self._registrar = registrar
        self._last = ""
        self.status = registrar.poll()

    def poll(self) -> None:
        """Log a new state."""
        self.status = status = self._registrar.poll()
        if status.state.value != self._last:
            self._last = status.state.value
            log.info(
                "cuda_registration", state=self._last, registered_bytes=status.registered_bytes,
                cuda_error=status.cuda_error, error=str(status.error or ""),
            )  # fmt: skip

    def close(self) -> None:
        """End the child."""
        self._registrar.close()


def _adopt_backing(
    directory: Directory, backing: Backing, found_blocks: dict[str, int]
) -> NamespaceEntry | None:
    """Take a backing of an earlier daemon over; None where it cannot be understood."""
    record = backing.record
    try:
        geometry = decode_geometry(record.geometry)
        if geometry.pool_bytes(record.num_blocks) != record.payload_bytes:
            raise ConfigError(
                f"its payload has {record.payload_bytes} bytes, its geometry asks for "
                f"{geometry.pool_bytes(record.num_blocks)}"
            )
        directory.open_namespace(
            record.fingerprint, name=record.name, block_size=geometry.block_size,
            namespace=record.namespace,
        )  # fmt: skip
    except HiSparseError as error:
        log.error("backing_left_alone", backing=record.name, slot=backing.slot, error=str(error))
        return None
    report = directory.attach_backing(
        record.namespace, backing.table, mode=BackingMode.ADOPT, now_s=time.monotonic()
    )
    outcomes = dataclasses.asdict(report)
    for outcome, count in outcomes.items():
        found_blocks[outcome] = found_blocks.get(outcome, 0) + count
    log.info("backing_adopted", namespace=record.namespace, name=record.name, **outcomes)
    return NamespaceEntry(
        namespace_id=record.namespace, fingerprint=record.fingerprint, name=record.name,
        geometry=geometry, geometry_blob=record.geometry,
        key_space=key_space(record.fingerprint), backing=backing, is_adopted=True,
    )  # fmt: skip


def _summary(state: ServerState) -> str:
    """One line for `systemctl status`."""
    workers = f"{state.num_workers} worker{'' if state.num_workers == 1 else 's'}"
    if state.pool is None:
        return f"Opening the pool: {state.progress:.0%}"
    size = f"{state.pool.size_bytes / GIB:.1f} GiB"
    return f"{state.phase.value.capitalize()}: {workers}, pool of {size}"
