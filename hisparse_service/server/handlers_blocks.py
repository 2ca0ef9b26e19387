"""Requests about blocks: arrays in, arrays out; all meaning is the directory's. Control loop."""

# ruff: noqa: ARG001  (all handlers take the same four arguments)

from __future__ import annotations

import functools
import struct
from typing import Final

from hisparse_service.contract import messages as m
from hisparse_service.contract.checksum import Verdict
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import ForeignKeys, HiSparseError, UsageError
from hisparse_service.contract.limits import (
    BLOCK_KEY_BYTES,
    LOOKUP_SLICE_KEYS,
    MAX_RESERVE_BLOCKS,
)
from hisparse_service.contract.messages import u32_array, u64_array
from hisparse_service.directory.lookup import Lookup
from hisparse_service.directory.one_block import OneCompleted
from hisparse_service.directory.results import LookupResult, MirrorItem, PinResult, ReserveResult
from hisparse_service.server.handlers_backing import entry_of
from hisparse_service.server.state import AwaitsHelper, Client, LongRequest, Phase, ServerState

_U32: Final = struct.Struct("<I")
_HANDLE: Final = struct.Struct("<II")
_AFTER_ENQUEUED = declare("mirror.after_enqueued")
_AFTER_COMPLETED = declare("mirror.after_completed")
_AFTER_RESERVED = declare("mirror.after_reserved")


def _blocks_reply(
    state: ServerState, request_id: int, result: ReserveResult | LookupResult
) -> m.BlocksReply:
    return m.BlocksReply(
        request_id, state.options.epoch, result.lease_id, int(result.deadline_s * 1e9),
        result.blocks.tobytes(), result.generations.tobytes(),
    )  # fmt: skip


def reserve(state: ServerState, client: Client, request: m.Reserve, now_s: float) -> m.Reply:
    """Blocks to write."""
    if request.num_blocks == 1:
        one = state.directory.reserve_one(
            client.session.session_id, request.namespace_id, request.lease_id, now_s=now_s
        )
        if one is not None:
            return m.BlocksReply(
                request.request_id, state.options.epoch, one.lease_id, int(one.deadline_s * 1e9),
                _U32.pack(one.block), _U32.pack(one.generation),
            )  # fmt: skip
    result = state.directory.reserve(
        client.session.session_id, request.namespace_id, request.num_blocks, request.lease_id,
        now_s=now_s,
    )  # fmt: skip
    return _blocks_reply(state, request.request_id, result)


def reclaim(state: ServerState, client: Client, request: m.Reclaim, now_s: float) -> m.Reply:
    """Blocks that an earlier daemon had reserved for this client."""
    result = state.directory.reclaim(
        client.session.session_id, request.namespace_id, request.lease_id,
        u32_array(request.blocks, what="blocks"),
        u32_array(request.generations, what="generations"), now_s=now_s,
    )  # fmt: skip
    return _blocks_reply(state, request.request_id, result)


class LookupRequest:
    """A Lookup of many keys, a slice at a time."""

    def __init__(self, state: ServerState, request_id: int, lookup: Lookup) -> None:
        self._state = state
        self._request_id = request_id
        self._lookup = lookup

    def step(self) -> bool:
        """Look up one slice."""
        return self._lookup.step(LOOKUP_SLICE_KEYS)

    def finish(self, now_s: float) -> m.Reply:
        """The blocks found."""
        return _blocks_reply(self._state, self._request_id, self._lookup.finish(now_s))

    def cancel(self) -> None:
        """Drop the lease if this lookup made it."""
        self._lookup.cancel()


def lookup(
    state: ServerState, client: Client, request: m.Lookup, now_s: float
) -> m.Reply | LongRequest:
    """The longest published prefix; one slice at once, the rest between other requests."""
    if len(request.keys) % BLOCK_KEY_BYTES:
        m.num_keys(request.keys)  # says so
    running = state.directory.begin_lookup(
        client.session.session_id, request.namespace_id, request.key_space, request.keys,
        request.lease_id, now_s=now_s,
    )  # fmt: skip
    if len(request.keys) > LOOKUP_SLICE_KEYS * 16:
        return LookupRequest(state, request.request_id, running)
    running.step(LOOKUP_SLICE_KEYS)
    return _blocks_reply(state, request.request_id, running.finish(now_s))


def pin(state: ServerState, client: Client, request: m.Pin, now_s: float) -> m.Reply:
    """Pin by handle: the reply repeats the handles."""
    result: PinResult = state.directory.pin(
        client.session.session_id, request.namespace_id, request.lease_id,
        u32_array(request.blocks, what="blocks"),
        u32_array(request.generations, what="generations"), now_s=now_s,
    )  # fmt: skip
    return m.BlocksReply(
        request.request_id, state.options.epoch, result.lease_id, int(result.deadline_s * 1e9),
        request.blocks, request.generations,
    )  # fmt: skip


def unpin(
    state: ServerState,
    client: Client,
    request: m.Unpin,
    now_s: float,
) -> m.Reply:
    """Drop pins."""
    state.directory.unpin(
        client.session.session_id, request.namespace_id, request.lease_id,
        u32_array(request.blocks, what="blocks"),
    )  # fmt: skip
    return m.Done(request.request_id, state.options.epoch)


def mirror_batch(
    state: ServerState, client: Client, request: m.MirrorBatch, now_s: float
) -> m.Reply:
    """Enqueued, completed and further reservations of one decode step.

    Enqueued goes first: RESERVED to WRITING loses nothing if the rest is then refused.
    """
    entry = state.namespaces.get(request.namespace_id) or entry_of(state, request.namespace_id)
    if request.completed and request.key_space != entry.key_space:
        raise ForeignKeys(
            f"the keys were made for another namespace than {entry.namespace_id} ({entry.name})",
            remedy="Make keys with the fingerprint that this namespace was opened with",
            namespace=entry.namespace_id,
        )
    if len(request.reserve) > 1:
        _check_reserves(request)
    if request.enqueued:
        _enqueue(state, client, request, now_s)
    if len(request.completed) == 1 and len(request.reserve) <= 1:
        reply = _complete_one(state, client, request, now_s)
        if reply is not None:
            return reply
    return _complete_many(state, client, request, now_s)


def _enqueue(state: ServerState, client: Client, request: m.MirrorBatch, now_s: float) -> None:
    directory, session_id = state.directory, client.session.session_id
    namespace_id, items = request.namespace_id, request.enqueued
    view = state.metrics.backings.get(namespace_id)
    handles: list[tuple[int, int, int]] = []
    for item in items:
        if len(item.blocks) != 4 or len(item.generations) != 4:
            break
        handles.append((item.lease_id, *_HANDLE.unpack(item.blocks + item.generations)))
    if len(handles) == len(items) and directory.enqueue_ones(
        session_id, namespace_id, handles, now_s=now_s
    ):
        if view is not None:
            view.clock.enqueued_ones([block for _, block, _ in handles], int(now_s * 1e9))
        crash_point(_AFTER_ENQUEUED)
        return
    enqueued = [
        MirrorItem(
            lease_id=item.lease_id,
            blocks=u32_array(item.blocks, what="blocks"),
            generations=u32_array(item.generations, what="generations"),
        )
        for item in items
    ]
    directory.mirror_enqueued(session_id, namespace_id, enqueued)
    crash_point(_AFTER_ENQUEUED)
    directory.renew(session_id, {item.lease_id for item in items}, now_s=now_s)
    if view is not None:
        for each in enqueued:
            view.clock.enqueued(each.blocks, int(now_s * 1e9))


def _complete_one(
    state: ServerState, client: Client, request: m.MirrorBatch, now_s: float
) -> m.MirrorReply | None:
    """One new block is completed: None where that is not so simple, and nothing was changed."""
    (item,) = request.completed
    reserve = request.reserve
    namespace_id = request.namespace_id
    if (
        len(item.blocks) != 4 or len(item.generations) != 4 or len(item.keys) != BLOCK_KEY_BYTES
        or item.checksums
    ):  # fmt: skip
        return None
    directory, session_id = state.directory, client.session.session_id
    block, generation = _HANDLE.unpack(item.blocks + item.generations)
    if not directory.publish_one(
        session_id, namespace_id,
        OneCompleted(
            item.lease_id, block, generation, item.keys, item.parent, item.parent_generation
        ),
        now_s=now_s,
    ):  # fmt: skip
        return None
    view = state.metrics.backings.get(namespace_id)
    if view is not None:
        view.clock.completed_one(block, int(now_s * 1e9))
    crash_point(_AFTER_COMPLETED)
    return m.MirrorReply(
        request.request_id, state.options.epoch, item.blocks, item.generations,
        int((now_s + state.options.lease_ttl_s) * 1e9),
        [_reserve_item(state, session_id, namespace_id, reserve[0], now_s)] if reserve else [],
        directory.num_free(namespace_id),
    )  # fmt: skip


def _complete_many(
    state: ServerState, client: Client, request: m.MirrorBatch, now_s: float
) -> m.MirrorReply:
    directory, session_id = state.directory, client.session.session_id
    view = state.metrics.backings.get(request.namespace_id)
    canonical_blocks = canonical_generations = b""
    if request.completed:
        items = [_completed_item(item) for item in request.completed]
        completed = directory.mirror_completed(session_id, request.namespace_id, items)
        if view is not None:
            for done in items:
                view.clock.completed(done.blocks, int(now_s * 1e9))
        canonical_blocks = b"".join([item.blocks.tobytes() for item in completed])
        canonical_generations = b"".join([item.generations.tobytes() for item in completed])
        crash_point(_AFTER_COMPLETED)
    directory.renew(session_id, {item.lease_id for item in request.completed}, now_s=now_s)
    return m.MirrorReply(
        request.request_id, state.options.epoch, canonical_blocks, canonical_generations,
        int((now_s + state.options.lease_ttl_s) * 1e9),
        [_reserve_item(state, session_id, request.namespace_id, item, now_s)
         for item in request.reserve],
        directory.num_free(request.namespace_id),
    )  # fmt: skip


def _completed_item(item: m.CompletedItem) -> MirrorItem:
    m.num_keys(item.keys)
    return MirrorItem(
        lease_id=item.lease_id,
        blocks=u32_array(item.blocks, what="blocks"),
        generations=u32_array(item.generations, what="generations"),
        keys=item.keys,
        parent=item.parent,
        parent_generation=item.parent_generation,
        checksums=u64_array(item.checksums, what="checksums") if item.checksums else None,
        keep_duplicates=item.keep_duplicates,
    )


def _reserve_item(
    state: ServerState, session_id: int, namespace_id: int, item: m.ReserveItem, now_s: float
) -> m.ReservedItem:
    if state.phase is not Phase.READY:
        return m.ReservedItem(item.lease_id, b"", b"")
    if item.num_blocks == 1 and item.lease_id:
        one = state.directory.reserve_one(session_id, namespace_id, item.lease_id, now_s=now_s)
        if one is not None:
            crash_point(_AFTER_RESERVED)
            return m.ReservedItem(
                item.lease_id, _U32.pack(one.block), _U32.pack(one.generation)
            )  # fmt: skip
    try:
        got = state.directory.reserve(
            session_id, namespace_id, item.num_blocks, item.lease_id, now_s=now_s
        )
    except HiSparseError:
        # What was published above stays published: an error here would hide that.
        return m.ReservedItem(item.lease_id, b"", b"")
    crash_point(_AFTER_RESERVED)
    return m.ReservedItem(got.lease_id, got.blocks.tobytes(), got.generations.tobytes())


def _check_reserves(request: m.MirrorBatch) -> None:
    wanted = sum(item.num_blocks for item in request.reserve)
    if wanted > MAX_RESERVE_BLOCKS:
        raise UsageError(
            f"the batch reserves {wanted} blocks in all, one message may take {MAX_RESERVE_BLOCKS}",
            remedy="Reserve in several messages",
            limit=MAX_RESERVE_BLOCKS,
            value=wanted,
        )


def abandon(
    state: ServerState,
    client: Client,
    request: m.Abandon,
    now_s: float,
) -> m.Reply:
    """Reserved blocks go back unpublished."""
    blocks = u32_array(request.blocks, what="blocks") if request.blocks else None
    state.directory.abandon(
        client.session.session_id, request.namespace_id, request.lease_id, blocks
    )
    return m.Done(request.request_id, state.options.epoch)


def free(
    state: ServerState,
    client: Client,
    request: m.Free,
    now_s: float,
) -> m.Reply:
    """Blocks of a lease are no longer wanted."""
    state.directory.free(
        client.session.session_id, request.namespace_id, request.lease_id,
        u32_array(request.blocks, what="blocks"),
    )  # fmt: skip
    return m.Done(request.request_id, state.options.epoch)


class DamageReport(AwaitsHelper):
    """A ReportDamage whose blocks are being read."""

    def __init__(self, state: ServerState, request: m.ReportDamage, num_blocks: int) -> None:
        super().__init__()
        self._state = state
        self._request_id = request.request_id
        self._verdicts: list[Verdict | None] = [None] * num_blocks
        self._num_left = num_blocks

    def put(self, at: int, verdict: Verdict) -> None:
        """What was found about one block."""
        self._verdicts[at] = verdict
        self._num_left -= 1
        if not self._num_left:
            self.is_ready = True
            self.resume()

    def finish(self, now_s: float) -> m.Reply:  # noqa: ARG002
        """What was found."""
        return m.DamageReply(
            self._request_id, self._state.options.epoch, bytes(v or 0 for v in self._verdicts)
        )

    def cancel(self) -> None:
        """The checks go on: what the reader saw, others will."""


def report_damage(
    state: ServerState, client: Client, request: m.ReportDamage, now_s: float
) -> m.Reply | LongRequest:
    """Blocks whose bytes a reader found damaged are checked, beside the loop.

    Raises:
        UsageError: No such namespace, or not a generation for each block.
    """
    entry = entry_of(state, request.namespace_id)
    blocks = u32_array(request.blocks, what="blocks").tolist()
    generations = u32_array(request.generations, what="generations").tolist()
    if len(blocks) != len(generations):
        raise UsageError(f"{len(blocks)} blocks with {len(generations)} generations")
    pool = state.pool
    if pool is None or entry.backing is None:
        nothing = bytes([Verdict.STALE] * len(blocks))
        return m.DamageReply(request.request_id, state.options.epoch, nothing)
    report = DamageReport(state, request, len(blocks))
    for at, handle in enumerate(zip(blocks, generations, strict=True)):
        state.checks.report(pool, state.directory, entry, handle, functools.partial(report.put, at))
    return report if not report.is_ready and blocks else report.finish(now_s)


def release_leases(
    state: ServerState,
    client: Client,
    request: m.ReleaseLeases,
    now_s: float,
) -> m.Reply:
    """Requests ended. Leases that are lost already are released already."""
    state.directory.release_leases(client.session.session_id, request.lease_ids)
    return m.Done(request.request_id, state.options.epoch)
