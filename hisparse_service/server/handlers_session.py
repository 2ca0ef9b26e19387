"""Requests about the session itself: Ping and Bye. Hello is the dispatcher's. Control loop."""

# ruff: noqa: ARG001  (all handlers take the same four arguments)

from __future__ import annotations

from hisparse_service.contract import messages as m
from hisparse_service.membership.sessions import DeathCause
from hisparse_service.server.clients import end_session, keep_counters
from hisparse_service.server.state import Client, ServerState


def ping(state: ServerState, client: Client, request: m.Ping, now_s: float) -> m.Reply:
    """Heartbeat: renews the leases named, and the session's writer leases."""
    if request.counters:
        keep_counters(state, client, request.counters)
    lost: list[int] = []
    lost_pins: list[tuple[int, int, int]] = []
    if state.loaded_directory is None or client.is_operator:
        lost = list(request.renew_leases)
    else:
        if request.renew_leases or client.hello.group:
            lost = state.directory.renew(
                client.session.session_id, request.renew_leases, now_s=now_s
            )
        lost_pins = state.directory.lost_pins(client.session.session_id)
    return m.Pong(
        request.request_id,
        state.options.epoch,
        int((now_s + state.options.lease_ttl_s) * 1e9),
        lost,
        state.devices.lost_of(client.session.session_id),
        lost_pins,
    )


def bye(state: ServerState, client: Client, request: m.Bye, now_s: float) -> m.Reply:
    """The session ends; the reply is the last thing it hears."""
    end_session(state, client, DeathCause.BYE)
    return m.Done(request.request_id, state.options.epoch)
