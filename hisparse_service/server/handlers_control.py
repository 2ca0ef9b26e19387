"""Requests that change how the daemon works or look at all of it: limits, trace, overview.

Control loop.
"""

# ruff: noqa: ARG001  (all handlers take the same four arguments)

from __future__ import annotations

import datetime
from typing import Any, Final, cast

import msgspec

from hisparse_service.contract import limits
from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import UsageError
from hisparse_service.directory.results import Quota
from hisparse_service.server.state import Client, ServerState
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.recorder import Recording
from hisparse_service.telemetry.trace_file import Header, RecordedNamespace, RecordedSession

WATCH_S: Final = 10.0
"""How long the loop goes on making rows of sessions after somebody looked."""
LIMIT_NAMES: Final = m.SetLimits.__struct_fields__[1:]
_CEILINGS: Final = {
    "max_leases_per_session": limits.MAX_LEASES_PER_SESSION,
    "max_sessions": limits.MAX_SESSIONS,
}

log = get_logger()


def set_limits(state: ServerState, client: Client, request: m.SetLimits, now_s: float) -> m.Reply:
    """Change what is given, and tell the limits in force.

    Raises:
        UsageError: Higher than the protocol allows. Nothing changed.
    """
    asked = {name: getattr(request, name) for name in LIMIT_NAMES if getattr(request, name) >= 0}
    for name, ceiling in _CEILINGS.items():
        if asked.get(name, 0) > ceiling:
            raise UsageError(
                f"{name} is {asked[name]}, the protocol allows {ceiling}",
                remedy="Ask for less", limit=ceiling, value=asked[name],
            )  # fmt: skip
        if asked.get(name) == 0:
            asked[name] = ceiling
    if asked:
        state.limits.update(asked)
        apply_limits(state)
        log.warning("limits_changed", session=client.session.session_id, **asked)
    return m.LimitsReply(request.request_id, state.options.epoch, dict(state.limits))


def apply_limits(state: ServerState) -> None:
    """Have the directory and the session table follow `state.limits`."""
    now = state.limits
    state.directory.set_session_quota(
        Quota(
            max_reserved_blocks=now["max_reserved_blocks_per_session"] or None,
            max_pins=now["max_pins_per_session"] or None,
            max_leases=now["max_leases_per_session"],
        )
    )
    state.directory.set_namespace_quota(
        Quota(
            max_reserved_blocks=now["max_reserved_blocks_per_namespace"] or None,
            max_pins=now["max_pins_per_namespace"] or None,
        )
    )
    state.sessions.max_sessions = now["max_sessions"]


def trace(state: ServerState, client: Client, request: m.Trace, now_s: float) -> m.Reply:
    """Start, stop or look at the recording.

    Raises:
        CapacityError: One runs already.
        UsageError: There is none to stop or look at.
    """
    recorder = state.recorder
    if request.action == "start":
        recording = recorder.start(
            _header(state), seconds=request.seconds, max_bytes=request.max_bytes
        )
        state.taps = (*state.taps, recording.tap)
    else:
        if recorder.recording is None:
            raise UsageError("nothing was recorded since the daemon started")
        if request.action == "stop":
            recorder.stop()
        recording = recorder.recording
    drop_ended_taps(state)
    return _trace_reply(state, request.request_id, recording)


def drop_ended_taps(state: ServerState) -> None:
    """Take the tap of a recording away that has ended. Also called at each tick."""
    recording = state.recorder.recording
    if recording is not None and recording.has_ended and recording.tap in state.taps:
        state.taps = tuple(tap for tap in state.taps if tap is not recording.tap)


def _trace_reply(state: ServerState, request_id: int, recording: Recording) -> m.TraceReply:
    return m.TraceReply(
        request_id, state.options.epoch, str(recording.path), not recording.has_ended,
        recording.messages, recording.recorded_bytes, recording.tap.dropped, recording.error,
    )  # fmt: skip


def _header(state: ServerState) -> Header:
    options = state.options
    return Header(
        instance=options.instance, daemon_version=options.daemon_version,
        protocol=limits.PROTOCOL_MAX,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        namespaces=[
            RecordedNamespace(
                entry.namespace_id, entry.fingerprint, entry.name, entry.geometry_blob,
                entry.backing.record.num_blocks if entry.backing is not None else 0,
            )
            for entry in state.namespaces.values()
        ],
        sessions=[
            RecordedSession(each.session.session_id, m.encode(each.hello))
            for each in state.clients.values()
            if not each.is_operator
        ],
    )  # fmt: skip


def overview(state: ServerState, client: Client, request: m.Overview, now_s: float) -> m.Reply:
    """The last overview, encoded by the thread that made it."""
    state.metrics.watched_until_s = now_s + WATCH_S
    ready_made = cast("dict[str, Any]", msgspec.Raw(state.overview()))
    return m.StatusReply(request.request_id, state.options.epoch, ready_made)
