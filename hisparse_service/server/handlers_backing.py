"""Requests about namespaces and backings: who shares blocks, and where the bytes lie. Control loop.

Making a backing writes to memory that is populated already: no system call, no wait.
"""

# ruff: noqa: ARG001  (all handlers take the same four arguments)

from __future__ import annotations

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import (
    CapacityError,
    GeometryError,
    GeometryMismatch,
    NotAuthorised,
    UsageError,
)
from hisparse_service.contract.geometry import decode_geometry
from hisparse_service.contract.keys import key_space
from hisparse_service.directory.results import BackingMode
from hisparse_service.pool.pool import Backing, Pool
from hisparse_service.server.state import Client, NamespaceEntry, ServerState
from hisparse_service.telemetry.backings import BackingView, MirrorClock


def entry_of(state: ServerState, namespace_id: int) -> NamespaceEntry:
    """The namespace of an id.

    Raises:
        UsageError: There is none.
    """
    entry = state.namespaces.get(namespace_id)
    if entry is None:
        raise UsageError(
            f"there is no namespace {namespace_id}",
            remedy="Open it: ids are only good for one epoch",
            namespace=namespace_id,
        )
    return entry


def open_namespace(
    state: ServerState,
    client: Client,
    request: m.OpenNamespace,
    now_s: float,
) -> m.Reply:
    """Find or make the namespace of a fingerprint.

    Raises:
        GeometryMismatch: It is open with another geometry.
        GeometryError: The geometry cannot be.
    """
    entry = state.by_fingerprint.get(request.fingerprint)
    if entry is None:
        geometry = decode_geometry(request.geometry)
        namespace_id = state.directory.open_namespace(
            request.fingerprint, name=request.name, block_size=geometry.block_size
        )
        entry = NamespaceEntry(
            namespace_id=namespace_id, fingerprint=request.fingerprint, name=request.name,
            geometry=geometry, geometry_blob=request.geometry,
            key_space=key_space(request.fingerprint),
        )  # fmt: skip
        add_namespace(state, entry)
    elif (
        # Equal geometries may be written differently by another version.
        request.geometry != entry.geometry_blob
        and decode_geometry(request.geometry) != entry.geometry
    ):
        raise GeometryMismatch(
            f"namespace {entry.name!r} ({entry.fingerprint.hex()}) is open with another geometry",
            remedy="Layout, block size, layers and row bytes are part of what is shared: use the "
            "same, or another fingerprint",
            namespace=entry.namespace_id,
        )
    entry.openers.add(client.session.session_id)
    num_blocks = entry.backing.record.num_blocks if entry.backing is not None else 0
    return m.NamespaceReply(request.request_id, state.options.epoch, entry.namespace_id, num_blocks)


def add_namespace(state: ServerState, entry: NamespaceEntry) -> None:
    """Let requests find it."""
    state.namespaces[entry.namespace_id] = entry
    state.by_fingerprint[entry.fingerprint] = entry
    if entry.backing is not None:
        _show_backing(state, entry, entry.backing)


def _show_backing(state: ServerState, entry: NamespaceEntry, backing: Backing) -> None:
    """Let events and telemetry see it."""
    state.events.set_table(entry.namespace_id, backing.table)
    columns = state.directory.columns(entry.namespace_id)
    state.metrics.backings[entry.namespace_id] = BackingView(
        namespace_id=entry.namespace_id, name=entry.name,
        block_stride_bytes=entry.geometry.block_stride_bytes,
        state=columns.state, readers=columns.readers, clock=MirrorClock(len(columns.state)),
    )  # fmt: skip


def allocate_backing(
    state: ServerState,
    client: Client,
    request: m.AllocateBacking,
    now_s: float,
) -> m.Reply:
    """Give the namespace its backing, once.

    Raises:
        GeometryMismatch: It has one with fewer blocks.
        CapacityError: The pool has no extent that large. Nothing changed.
    """
    entry = entry_of(state, request.namespace_id)
    pool = state.pool
    assert pool is not None, "READY without a pool"
    if entry.backing is None:
        _attach_new(state, pool, entry, request.num_blocks)
        entry.made_by = client.session.session_id
    elif request.num_blocks > entry.backing.record.num_blocks:
        has = entry.backing.record.num_blocks
        raise GeometryMismatch(
            f"namespace {entry.name!r} has a backing of {has} blocks, {request.num_blocks} were "
            "asked for",
            remedy=f"Ask for at most {has}; the first to attach decides",
            num_blocks=has, asked_blocks=request.num_blocks,
        )  # fmt: skip
    assert entry.backing is not None
    entry.openers.add(client.session.session_id)
    return _backing_reply(state, pool, entry, entry.backing, client, request.request_id)


def _attach_new(state: ServerState, pool: Pool, entry: NamespaceEntry, num_blocks: int) -> None:
    if num_blocks < 2:
        raise GeometryError(
            f"a backing of {num_blocks} blocks; block 0 is the null block",
            remedy="Ask for at least 2",
            num_blocks=num_blocks,
        )
    stride = entry.geometry.block_stride_bytes
    largest = pool.max_blocks(stride)
    if num_blocks > largest:
        raise CapacityError(
            f"{num_blocks} blocks of {stride} bytes do not fit, the largest free range of the pool "
            f"holds {largest}",
            remedy=f"Ask for at most {largest} blocks, or give the daemon a larger pool.bytes",
            needed=num_blocks, free=largest, block_stride_bytes=stride,
        )  # fmt: skip
    backing = pool.make_backing(
        namespace=entry.namespace_id, fingerprint=entry.fingerprint, name=entry.name,
        geometry=entry.geometry_blob, num_blocks=num_blocks,
        payload_bytes=entry.geometry.pool_bytes(num_blocks),
    )  # fmt: skip
    try:
        state.directory.attach_backing(entry.namespace_id, backing.table, mode=BackingMode.FRESH)
    except BaseException:
        pool.drop_backing(backing.slot)
        raise
    entry.backing = backing
    _show_backing(state, entry, backing)


def _backing_reply(
    state: ServerState,
    pool: Pool,
    entry: NamespaceEntry,
    backing: Backing,
    client: Client,
    request_id: int,
) -> m.BackingReply:
    record = backing.record
    return m.BackingReply(
        request_id=request_id, epoch=state.options.epoch, segment_name=pool.segment_name,
        device=pool.device, inode=pool.inode, segment_bytes=pool.size_bytes,
        pool_uuid=pool.uuid, num_blocks=record.num_blocks,
        table_offset_bytes=record.table_offset_bytes,
        payload_offset_bytes=record.payload_offset_bytes, payload_bytes=record.payload_bytes,
        ranges=list(entry.geometry.registration_ranges(record.num_blocks)),
        generation=record.generation,
        adopted=entry.is_adopted or entry.made_by != client.session.session_id,
    )  # fmt: skip


def take_writer(state: ServerState, client: Client, request: m.TakeWriter, now_s: float) -> m.Reply:
    """Take or renew the group's writer lease. Its id is the session's: it has one a namespace.

    Raises:
        WriterTaken: Another session of the group holds it.
    """
    entry_of(state, request.namespace_id)
    hello = client.hello
    lease = state.directory.take_writer(
        hello.group, request.namespace_id, client.session.session_id, rank=hello.rank, now_s=now_s
    )
    return m.LeaseReply(
        request.request_id, state.options.epoch, client.session.session_id,
        int(lease.deadline_s * 1e9),
    )  # fmt: skip


def yield_writer(
    state: ServerState,
    client: Client,
    request: m.YieldWriter,
    now_s: float,
) -> m.Reply:
    """Give the writer lease back; the events that it offered go with it."""
    session_id = client.session.session_id
    state.directory.yield_writer(client.hello.group, request.namespace_id, session_id)
    entry_of(state, request.namespace_id).withdraw_events(client.hello.group, session_id)
    return m.Done(request.request_id, state.options.epoch)


def registration_turn(
    state: ServerState,
    client: Client,
    request: m.RegistrationTurn,
    now_s: float,
) -> m.Reply:
    """Take turns, first come first served; a session that dies loses its place."""
    entry = entry_of(state, request.namespace_id)
    session_id = client.session.session_id
    if session_id not in state.by_session:
        raise NotAuthorised("the session has ended")
    if request.release:
        if session_id in entry.turns:
            entry.turns.remove(session_id)
        return m.TurnReply(request.request_id, state.options.epoch, False, len(entry.turns))
    if session_id not in entry.turns:
        entry.turns.append(session_id)
    ahead = entry.turns.index(session_id)
    return m.TurnReply(request.request_id, state.options.epoch, ahead == 0, ahead)
