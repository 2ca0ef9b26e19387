"""Requests of operators: what is here, and the few things that an operator may do. Control loop."""

# ruff: noqa: ARG001  (all handlers take the same four arguments)

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.limits import MAX_LIST_ROWS
from hisparse_service.contract.segment import BlockState
from hisparse_service.directory.results import Usage
from hisparse_service.server.handlers_backing import entry_of
from hisparse_service.server.state import Client, LongRequest, NamespaceEntry, Phase, ServerState

EVICT_SLICE_BLOCKS = 512


def status_of(state: ServerState, now_s: float) -> dict[str, Any]:
    """Everything an operator sees at a glance; also what metrics are made of."""
    options, metrics = state.options, state.metrics
    workers = state.num_workers
    return {
        "instance": options.instance,
        "epoch": f"{options.epoch:016x}",
        "pid": os.getpid(),
        "runtime_dir": options.runtime_dir,
        "version": options.daemon_version,
        "phase": state.phase.value,
        "progress": round(state.progress, 4),
        "uptime_s": round(now_s - options.started_s, 3),
        "pool_bytes": options.pool_bytes,
        "pool": _pool_status(state),
        "namespaces": [_namespace_status(state, entry) for entry in state.namespaces.values()],
        "sessions": {
            "workers": workers,
            "operators": len(state.clients) - workers,
            "by_state": _sessions_by_state(state),
            "quarantined": len(state.quarantine),
            "opened_total": metrics.sessions_total,
            "ended_total": dict(metrics.deaths),
        },
        "requests": {
            name: {
                "count": histogram.count,
                "p50_s": histogram.quantile_s(0.5),
                "p99_s": histogram.quantile_s(0.99),
            }
            for name, histogram in sorted(metrics.latency.items())
            if histogram.count
        },
        "errors": dict(metrics.errors),
        "replies_dropped": metrics.replies_dropped,
        "malformed": metrics.malformed,
        "unexpected_errors": metrics.unexpected_errors,
        "event_topics": state.events.num_subscriptions,
        "helpers": state.describe_helpers(),
        "longest_turn_s": round(metrics.longest_turn_s, 6),
        "cuda": state.describe_cuda(),
        "device": state.devices.describe(now_s),
        "http": state.describe_http(),
        "workers": {name: total for name, total in metrics.workers.totals.items() if total},
        "limits": dict(state.limits),
    }


def _sessions_by_state(state: ServerState) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {"workers": {}, "operators": {}}
    for client in state.clients.values():
        by_state = counts["operators" if client.is_operator else "workers"]
        name = client.session.state.name.lower()
        by_state[name] = by_state.get(name, 0) + 1
    return counts


def session_rows(state: ServerState, now_s: float) -> list[dict[str, Any]]:
    """All sessions by id, for who watches."""
    clients = sorted(state.clients.values(), key=lambda each: each.session.session_id)
    return [_session_row(state, each, now_s) for each in clients]


def _pool_status(state: ServerState) -> dict[str, Any]:
    pool = state.pool
    if pool is None:
        return {}
    use = pool.bytes_by_use()
    return {
        "segment": pool.segment_name, "device": pool.device, "inode": pool.inode,
        "uuid": pool.uuid.hex(), "adopted": pool.adopted, "bytes": use.segment_bytes,
        "directory_bytes": use.directory_bytes, "tables_bytes": use.tables_bytes,
        "payload_bytes": use.payload_bytes, "free_bytes": use.free_bytes,
    }  # fmt: skip


def _namespace_status(state: ServerState, entry: NamespaceEntry) -> dict[str, Any]:
    namespace_id, backing = entry.namespace_id, entry.backing
    blocks: dict[str, int] = {}
    num_withdrawn = 0
    if backing is not None:
        blocks = dataclasses.asdict(state.directory.counts(namespace_id))
        num_withdrawn = state.directory.num_withdrawn(namespace_id)
    return {
        "namespace": namespace_id,
        "name": entry.name,
        "fingerprint": entry.fingerprint.hex(),
        "layout": entry.geometry.layout.value,
        "block_size": entry.geometry.block_size,
        "block_stride_bytes": entry.geometry.block_stride_bytes,
        "num_blocks": backing.record.num_blocks if backing is not None else 0,
        "adopted": entry.is_adopted,
        "blocks": blocks,
        "withdrawn": num_withdrawn,
        "statistics": dataclasses.asdict(state.directory.statistics(namespace_id)),
        "usage": dataclasses.asdict(state.directory.namespace_usage(namespace_id)),
        "writers": [
            {"group": lease.group, "session": lease.session, "rank": lease.rank}
            for lease in state.directory.writers(namespace_id)
        ],
        "sessions": len(entry.openers),
        "registering": len(entry.turns),
    }


def status(
    state: ServerState,
    client: Client,
    request: m.Status,
    now_s: float,
) -> m.Reply:
    """The status, and for `handover` what the daemon was started with."""
    options = state.options
    started_with = {"config": options.config_path, "flags": dict(options.flags)}
    return m.StatusReply(
        request.request_id, options.epoch, {**status_of(state, now_s), "started_with": started_with}
    )


def sessions(
    state: ServerState,
    client: Client,
    request: m.Sessions,
    now_s: float,
) -> m.Reply:
    """A page of the sessions, by id."""
    clients = sorted(state.clients.values(), key=lambda each: each.session.session_id)
    page = clients[request.offset : request.offset + MAX_LIST_ROWS]
    return m.ListReply(
        request.request_id, state.options.epoch, len(clients),
        [_session_row(state, each, now_s) for each in page],
    )  # fmt: skip


def _session_row(state: ServerState, client: Client, now_s: float) -> dict[str, Any]:
    session = client.session
    usage = (
        state.directory.session_usage(session.session_id)
        if state.loaded_directory is not None
        else Usage()
    )
    return {
        "session": session.session_id,
        "kind": "operator" if client.is_operator else "worker",
        "state": session.state.name,
        "name": session.identity.name,
        "group": session.identity.group,
        "rank": session.identity.rank,
        "world_size": session.identity.world_size,
        "device_uuid": session.identity.device_uuid,
        "uid": session.credentials.uid,
        "pid": session.credentials.pid,
        "age_s": round(now_s - session.created_s, 3),
        "silent_s": round(now_s - session.last_seen_s, 3),
        "messages": session.statistics.messages,
        "errors": session.statistics.errors,
        "malformed": session.statistics.malformed,
        "dropped_replies": session.statistics.dropped_replies,
        "waiting_requests": len(client.pending),
        "reserved_blocks": usage.reserved_blocks,
        "pins": usage.pins,
        "leases": usage.leases,
        "counters": client.counters,
    }


def list_blocks(
    state: ServerState,
    client: Client,
    request: m.ListBlocks,
    now_s: float,
) -> m.Reply:
    """Blocks from id `offset` on; the next page begins after the last row's block.

    Raises:
        UsageError: No such state, or the namespace has no backing.
    """
    entry = entry_of(state, request.namespace_id)
    wanted = _states(request.state)
    rows = state.directory.list_blocks(
        request.namespace_id, states=wanted, start=max(1, request.offset), max_rows=MAX_LIST_ROWS
    )
    num_blocks = entry.backing.record.num_blocks - 1 if entry.backing is not None else 0
    return m.ListReply(
        request.request_id, state.options.epoch, num_blocks,
        [{**dataclasses.asdict(row), "state": row.state.name} for row in rows],
    )  # fmt: skip


def _states(name: str) -> frozenset[BlockState]:
    if not name:
        return frozenset(BlockState) - {BlockState.FREE}
    try:
        return frozenset({BlockState[name.upper()]})
    except KeyError:
        raise UsageError(
            f"no block state is called {name!r}",
            remedy=f"Known are {', '.join(each.name for each in BlockState)}",
        ) from None


class EvictRequest:
    """An eviction of many blocks, a slice at a time."""

    def __init__(self, state: ServerState, request: m.Evict) -> None:
        self._state = state
        self._request = request
        self._gone = 0

    def step(self) -> bool:
        """Evict one slice."""
        asked = min(EVICT_SLICE_BLOCKS, self._request.num_blocks - self._gone)
        went = len(self._state.directory.evict(self._request.namespace_id, num_blocks=asked))
        self._gone += went
        return went < asked or self._gone >= self._request.num_blocks

    def finish(self, now_s: float) -> m.Reply:  # noqa: ARG002
        """How many went."""
        return m.CountReply(self._request.request_id, self._state.options.epoch, self._gone)

    def cancel(self) -> None:
        """What went stays gone."""


def evict(
    state: ServerState,
    client: Client,
    request: m.Evict,
    now_s: float,
) -> m.Reply | LongRequest:
    """Evict least recently used blocks that nobody reads."""
    entry_of(state, request.namespace_id)
    return EvictRequest(state, request)


def drain(
    state: ServerState,
    client: Client,
    request: m.Drain,
    now_s: float,
) -> m.Reply:
    """Begin to drain; the answer does not wait for the end."""
    if state.phase in (Phase.STARTING, Phase.READY, Phase.DRAINING):
        timeout_s = 0.0 if request.hand_over else request.timeout_s
        if request.hand_over:
            state.keeps_pool = True
            state.successor_pid = request.successor_pid
        state.begin_drain(now_s + timeout_s, request.stop or request.hand_over)
    return m.Done(request.request_id, state.options.epoch)
