"""Requests about CUDA events that a group's writer shares with its peers. Control loop.

The handles are bytes here: no driver is called and nothing of a worker is opened, so an offer costs
its length in memory and goes with its session. What may be read is told by the block table alone.
"""

# ruff: noqa: ARG001  (all handlers take the same four arguments)

from __future__ import annotations

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import LeaseLost, UsageError
from hisparse_service.server.handlers_backing import entry_of
from hisparse_service.server.state import Client, EventOffer, NamespaceEntry, ServerState


def offer_events(
    state: ServerState, client: Client, request: m.OfferEvents, now_s: float
) -> m.Reply:
    """Keep the writer's handles for the other ranks of its group.

    Raises:
        LeaseLost: The session is not the writer of its group.
        UsageError: It has no group.
        MalformedMessage: Not a whole number of handles.
    """
    entry = entry_of(state, request.namespace_id)
    group, session_id = _group_of(client), client.session.session_id
    holder = _writer_of(state, entry, group)
    if holder != session_id:
        raise LeaseLost(
            f"session {session_id} does not hold the writer lease of group {group!r}",
            remedy="Take it with TakeWriter; the events are those of the rank that mirrors",
            session=session_id, holder_session=holder,
        )  # fmt: skip
    if not m.event_handles(request.handles):
        entry.event_offers.pop(group, None)
        return m.Done(request.request_id, state.options.epoch)
    entry.num_event_offers += 1
    entry.event_offers[group] = EventOffer(
        session_id, request.device_uuid, request.handles, entry.num_event_offers
    )
    return m.Done(request.request_id, state.options.epoch)


def fetch_events(
    state: ServerState, client: Client, request: m.FetchEvents, now_s: float
) -> m.Reply:
    """Hand out what the group's writer offered, while it is the writer.

    Raises:
        UsageError: The session has no group.
    """
    entry = entry_of(state, request.namespace_id)
    group = _group_of(client)
    offer = entry.event_offers.get(group)
    if offer is not None and offer.session_id != _writer_of(state, entry, group):
        del entry.event_offers[group]  # its lease passed to another rank, or ran out
        offer = None
    if offer is None:
        return m.EventsReply(request.request_id, state.options.epoch, 0, "", b"", 0)
    return m.EventsReply(
        request.request_id, state.options.epoch, offer.session_id, offer.device_uuid,
        offer.handles, offer.number,
    )  # fmt: skip


def _group_of(client: Client) -> str:
    group = client.hello.group
    if not group:
        raise UsageError(
            "a session without a group has no peers to share events with",
            remedy="Name the tensor-parallel group in Hello",
        )
    return group


def _writer_of(state: ServerState, entry: NamespaceEntry, group: str) -> int:
    """Session that holds the group's writer lease; 0: none does."""
    for lease in state.directory.writers(entry.namespace_id):
        if lease.group == group:
            return int(lease.session)
    return 0
