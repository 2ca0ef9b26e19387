"""Requests about device memory that the daemon keeps for workers. Control loop.

What is asked of a driver is answered later: the client asks again until its backing is ready.
"""

from __future__ import annotations

from hisparse_service.contract import messages as m
from hisparse_service.contract.device_uuid import normal_device_uuid
from hisparse_service.server.clients import drop_namespace
from hisparse_service.server.device_records import BackingKey, BackingState
from hisparse_service.server.handlers_backing import entry_of
from hisparse_service.server.state import Client, Phase, ServerState


def allocate_device_backing(
    state: ServerState, client: Client, request: m.AllocateDeviceBacking, now_s: float
) -> m.Reply:
    """Find or make the rank's backing; see `DeviceBackings.allocate` for what may be raised."""
    entry = entry_of(state, request.namespace_id)
    session = client.session
    backing = state.devices.allocate(
        _key(client, request), size_bytes=request.size_bytes, layout=request.layout,
        may_create=request.mode == "open_or_create", session_id=session.session_id,
        pid=session.credentials.pid, now_s=now_s,
    )  # fmt: skip
    entry.openers.add(session.session_id)
    return m.DeviceBackingReply(
        request_id=request.request_id, epoch=state.options.epoch,
        ready=backing.state is BackingState.READY, backing_id=backing.backing_id,
        device_uuid=backing.key.device_uuid, size_bytes=backing.size_bytes,
        handle=backing.handle, owner_pid=backing.process.pid, adopted=backing.is_adopted,
    )  # fmt: skip


def release_device_backing(
    state: ServerState, client: Client, request: m.ReleaseDeviceBacking, now_s: float
) -> m.Reply:
    """Take note that it is unmapped, and keep or free it.

    Raises:
        DeviceBackingTaken: Another process holds it.
        UsageError: No such namespace, or no UUID.
    """
    entry_of(state, request.namespace_id)
    if client.is_operator:
        count = state.devices.release_idle(
            request.namespace_id, device_uuid=request.device_uuid, now_s=now_s
        )
    else:
        count = state.devices.release(
            _key(client, request), session_id=client.session.session_id,
            pid=client.session.credentials.pid, gives_back=request.action == "give_back",
            now_s=now_s,
        )  # fmt: skip
    return m.CountReply(request.request_id, state.options.epoch, count)


def tick(state: ServerState, now_s: float) -> None:
    """Twice a second: leases of device memory, and namespaces that only it had kept."""
    devices = state.devices
    devices.tick(now_s, is_draining=state.phase is Phase.DRAINING)
    for namespace_id, entry in list(state.namespaces.items()):
        if entry.backing is None and not entry.openers and not devices.keeps(namespace_id):
            drop_namespace(state, namespace_id)


def _key(client: Client, request: m.AllocateDeviceBacking | m.ReleaseDeviceBacking) -> BackingKey:
    return BackingKey(
        request.namespace_id, client.hello.group, client.hello.rank, request.name,
        normal_device_uuid(request.device_uuid),
    )  # fmt: skip
