"""Makes a namespace, its writer and its leases known to a new session.

A new session comes with a new daemon, or with one that forgot this client. The mapping stays where
it is and nothing is registered again (I4); what cannot be had again is marked: the namespace
(`NamespaceLink.broken`) or single leases (REVOKED). An answer that does not come ends it half way;
the session then does all of it again.

With `Session.lock` held throughout: nobody sees a namespace that is half attached.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from hisparse_service.contract import limits
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import (
    CapacityError,
    ConfigError,
    ForeignSegment,
    LeaseError,
    MalformedMessage,
    NotReady,
    ServiceUnavailable,
    StaleBlock,
    UsageError,
)
from hisparse_service.contract.messages import BackingReply, BlocksReply, Pin, Reclaim, u32_array
from worker_client.blocks import BlockLease, LeaseState
from worker_client.host_pool import HostPool
from worker_client.link import NamespaceLink, other_segment, raw
from worker_client.writer import WriterSeat

__all__ = ["reattach"]

_AFTER_OPEN: Final = declare("client.reattach_after_open")
_AFTER_PIN: Final = declare("client.reattach_after_pin")
_AFTER_RECLAIM: Final = declare("client.reattach_after_reclaim")


def reattach(link: NamespaceLink, writer: WriterSeat, leases: list[BlockLease]) -> None:
    """Attach one namespace again.

    Args:
        link: The namespace's.
        writer: Its writer lease, if it holds one.
        leases: All of its leases that hold something.

    Raises:
        ServiceUnavailable: The daemon went away, or has no pool yet.
    """
    try:
        link.open()
        if link.pool is not None and not link.pool.is_closed:
            _check_same_segment(link, link.pool)
    except NotReady as error:
        raise ServiceUnavailable(error.message, remedy=error.remedy) from error
    except (ConfigError, CapacityError, ForeignSegment, UsageError) as error:
        link.broken = error
        for lease in leases:
            lease._lose_reserved()
            lease._revoke()
            lease.lease_id = 0
        return
    link.broken = None
    crash_point(_AFTER_OPEN)
    writer.retake()
    for lease in leases:
        _repin(link, lease)


def _check_same_segment(link: NamespaceLink, pool: HostPool) -> None:
    backing = link.session.request(link.backing_request(pool.num_blocks), BackingReply)
    if not pool.is_backed_by(backing):
        raise other_segment(backing.segment_name)


def _repin(link: NamespaceLink, lease: BlockLease) -> None:
    lease.lease_id = 0
    if lease.state is not LeaseState.GRANTED:
        lease._lose_reserved()
        return
    try:
        _pin_again(link, lease)
    except (StaleBlock, UsageError, LeaseError, CapacityError):
        if lease.lease_id:  # what was pinned before the refusal
            link.leases.release_later(lease.lease_id)
        lease._lose_reserved()
        lease._revoke()
        return
    if len(lease.reserved_blocks):
        _reclaim(link, lease)
        crash_point(_AFTER_RECLAIM)
    lease.epoch = link.session.epoch


def _pin_again(link: NamespaceLink, lease: BlockLease) -> None:
    """All that the lease pinned, each block once, in as many messages as it takes."""
    _, first = np.unique(lease.blocks, return_index=True)
    order = np.sort(first)
    if link.given_up:  # the next daemon has freed them
        handles = zip(lease.blocks[order].tolist(), lease.generations[order].tolist(), strict=True)
        order = order[[handle not in link.given_up for handle in handles]]
    for part in _slices(len(order)):
        blocks = lease.blocks[order[part]].tobytes()
        generations = lease.generations[order[part]].tobytes()

        def build(request_id: int, blocks: bytes = blocks, gens: bytes = generations) -> Pin:
            return Pin(request_id, link.namespace_id, lease.lease_id, blocks, gens)

        reply = link.session.request(build, BlocksReply)
        lease.deadline_ns = reply.lease_deadline_ns
        link.leases.remember(lease, reply.lease_id)
        crash_point(_AFTER_PIN)


def _reclaim(link: NamespaceLink, lease: BlockLease) -> None:
    """Get reserved blocks back from a daemon that adopted the pool; copies go on into them.

    Nothing changes where the daemon goes away again meanwhile: the next one is asked for them.
    """
    blocks, generations = lease.reserved_blocks, lease.reserved_generations
    kept: list[BlocksReply] = []
    for part in _slices(len(blocks)):
        asked = raw(blocks[part]), raw(generations[part])

        def build(request_id: int, asked: tuple[bytes, bytes] = asked) -> Reclaim:
            return Reclaim(request_id, link.namespace_id, lease.lease_id, *asked)

        try:
            kept.append(link.session.request(build, BlocksReply))
        except (UsageError, LeaseError, CapacityError, MalformedMessage):
            break
        link.leases.remember(lease, kept[-1].lease_id)
    lease._lose_reserved()
    for reply in kept:
        lease._regain_reserved(
            link.checked_blocks(reply.blocks), u32_array(reply.generations, what="generations")
        )
        lease.deadline_ns = reply.lease_deadline_ns


def _slices(count: int) -> Iterator[slice]:
    """Parts of `count` blocks that a message may carry."""
    step = limits.MAX_BLOCKS_PER_MESSAGE
    return (slice(start, start + step) for start in range(0, count, step))
