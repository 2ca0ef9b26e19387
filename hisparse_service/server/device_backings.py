"""Device memory that the daemon keeps for workers: who holds which, how much, until when.

A backing belongs to one rank of one engine in a namespace, on one GPU. It outlives the process that
filled it, so that the rank's next process finds its rows; it is given back when nobody held it for
a lease's time, when the daemon drains, when an operator or its holder says so, or when its
namespace goes. A child process a GPU owns the memory (`pool/device_child.py`); what is asked of it
is answered later, and nothing here waits.

    ALLOCATING --allocated--> READY --free--> FREEING --freed--> GONE
        |  |                    +--child died--> LOST --told--> GONE
        |  +--refused, child died--> FAILED --told--> GONE
        +--free--> ABANDONED --allocated--> FREEING

Memory is never freed or given to another while a process that may have it mapped lives: CUDA
calls that undefined. That process is known by its pidfd, or, where its pid cannot be seen, by what
ended its session. Control loop only; no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hisparse_service.contract import limits
from hisparse_service.contract.device_uuid import normal_device_uuid
from hisparse_service.contract.errors import (
    ConfigError,
    DeviceBackingTaken,
    DeviceError,
    GeometryMismatch,
    HiSparseError,
    LeaseLost,
    QuotaExceeded,
    from_wire,
)
from hisparse_service.pool.device_protocol import Answer, Order
from hisparse_service.server.device_records import (
    ON_DEVICE,
    BackingEvent,
    BackingKey,
    BackingState,
    DeviceBacking,
    Holder,
)
from hisparse_service.telemetry.logs import get_logger

if TYPE_CHECKING:
    from hisparse_service.pool.device_process import CallSoon, DeviceProcess

_FAILED_KEPT_S: Final = 60.0
"""How long a failure waits for who asked; a client asks again every 0.2 s."""
_REFUSED_KEPT_S: Final = 1.0
"""A device that could not be opened is not tried again at once: each try starts a process."""

_S, _E = BackingState, BackingEvent

log = get_logger()


@dataclass(slots=True, eq=False)
class _Device:
    """A GPU with a child."""

    process: DeviceProcess
    idle_since_s: float
    is_open: bool = False
    context_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """What the settings say."""

    limit_bytes: int = 0
    """A device; 0: off."""
    lease_s: float = limits.DEVICE_BACKING_LEASE_S
    timeout_s: float = limits.DEVICE_ANSWER_S


class DeviceBackings:
    """All device backings of one daemon.

    Args:
        options: Limits and times.
        call_soon: Has the control loop call something; any thread.
    """

    def __init__(
        self,
        options: DeviceOptions | None = None,
        *,
        call_soon: CallSoon = lambda callback: callback(),
    ) -> None:
        self.options = options or DeviceOptions()
        self._call_soon = call_soon
        self._by_id: dict[int, DeviceBacking] = {}
        self._by_key: dict[BackingKey, DeviceBacking] = {}
        self._devices: dict[str, _Device] = {}
        self._refused: dict[str, tuple[HiSparseError, float]] = {}
        self._lost_of: dict[int, list[int]] = {}
        """Session to its backings that are LOST: looked at by each heartbeat."""
        self._next_id = 1
        self._lost_total = 0
        self._now_s = 0.0
        """Of the last call that brought the time: answers come between two."""

    # --- requests -------------------------------------------------------------------------------

    def allocate(
        self,
        key: BackingKey,
        *,
        size_bytes: int,
        layout: bytes,
        may_create: bool,
        session_id: int,
        pid: int,
        now_s: float,
    ) -> DeviceBacking:
        """Find or make a backing, for a session that holds it from now on.

        Returns:
            ALLOCATING (ask again) or READY.

        Raises:
            ConfigError: Switched off, or the device cannot be opened.
            DeviceBackingTaken: Another process holds it.
            GeometryMismatch: It has another size or layout.
            LeaseLost: There is none, and none may be made.
            QuotaExceeded: It would go beyond a limit. Nothing changed.
            CapacityError: The device has not that much memory.
            DeviceError: The driver failed, or does not answer.
        """
        self._now_s = now_s
        self._require_on()
        found = self._by_key.get(key)
        if found is not None and found.state is _S.FAILED:
            error = found.error
            asked_by = found.holder.session_id
            self._forget(found, _E.TOLD)
            if error is not None and asked_by == session_id:
                raise error
            found = None
        if found is not None and found.state is _S.LOST:
            if found.holder.session_id == session_id:
                self._forget(found, _E.TOLD)
            else:
                self._unfind(found)  # its holder is still to be told, by heartbeats
            found = None
        if found is None:
            if not may_create:
                raise LeaseLost(
                    f"there is no device backing {key.name!r} of rank {key.rank} of group "
                    f"{key.group!r} on {key.device_uuid}",
                    remedy="Allocate one; what lay on an earlier one is gone",
                    device_uuid=key.device_uuid,
                )
            return self._make(key, size_bytes, layout, session_id, pid)
        self._take(found, session_id, pid, size_bytes, layout)
        self._check_answers(found)
        return found

    def release(
        self, key: BackingKey, *, session_id: int, pid: int, gives_back: bool, now_s: float
    ) -> int:
        """The session has it mapped no more; keep it for the lease's time, or free it.

        Returns:
            How many backings that was: 0 or 1.

        Raises:
            DeviceBackingTaken: Another process holds it.
        """
        self._now_s = now_s
        found = self._by_key.get(key)
        if found is None:
            return 0
        if not self._is_of(found.holder, session_id, pid) and found.holder.may_use(now_s):
            raise _taken(found)
        self._detach(found)
        if found.state in (_S.LOST, _S.FAILED):
            self._forget(found, _E.TOLD)
        elif gives_back or found.state is _S.ALLOCATING:
            self._free(found, "given_back")
        return 1

    def release_idle(self, namespace_id: int, *, device_uuid: str, now_s: float) -> int:
        """An operator gives back what nobody of the namespace holds.

        Args:
            namespace_id: Of the backings.
            device_uuid: Only of this device; empty: of all.
            now_s: Monotonic.

        Returns:
            How many.
        """
        self._now_s = now_s
        wanted = normal_device_uuid(device_uuid) if device_uuid else ""
        idle = [
            each
            for each in self._of_namespace(namespace_id)
            if each.state is _S.READY
            and wanted in ("", each.key.device_uuid)
            and not each.holder.session_id
            and not each.holder.may_use(now_s)
        ]
        for each in idle:
            self._free(each, "operator")
        return len(idle)

    # --- what happens elsewhere -----------------------------------------------------------------

    def lost_of(self, session_id: int) -> list[int]:
        """Backings that this session held when their child died."""
        return self._lost_of.get(session_id, [])

    def keeps(self, namespace_id: int) -> bool:
        """Whether the namespace has device memory, here or under way."""
        return any(each.state in ON_DEVICE for each in self._of_namespace(namespace_id))

    def session_ended(self, session_id: int, *, may_live: bool, now_s: float) -> None:
        """Its backings wait for their next holder.

        Args:
            session_id: Of the session that ended.
            may_live: Whether its process may go on, where no pidfd tells.
            now_s: Monotonic.
        """
        self._now_s = now_s
        self._lost_of.pop(session_id, None)
        for each in list(self._by_id.values()):
            if each.holder.session_id != session_id:
                continue
            each.holder.session_ended(may_live=may_live, now_s=now_s)
            self._wait_for_next(each)
            if each.state in (_S.LOST, _S.FAILED):
                self._forget(each, _E.TOLD)

    def namespace_gone(self, namespace_id: int) -> None:
        """Free what it has; its number may mean another one from now on."""
        for each in list(self._of_namespace(namespace_id)):
            if each.state in (_S.LOST, _S.FAILED):
                self._forget(each, _E.TOLD)
            elif each.holder.may_use(self._now_s):
                self._unfind(each)
                each.idle_since_s = -math.inf  # freed as soon as that process is dead
            elif each.state in (_S.ALLOCATING, _S.READY):
                self._free(each, "namespace_gone")

    def tick(self, now_s: float, *, is_draining: bool) -> None:
        """Free what waited long enough, forget failures, end children that nobody needs."""
        self._now_s = now_s
        for each in list(self._by_id.values()):
            if each.state is _S.FAILED and now_s - each.failed_s > _FAILED_KEPT_S:
                self._forget(each, _E.TOLD)
            elif each.state in (_S.READY, _S.ALLOCATING) and each.idle_since_s is not None:
                waited_s = now_s - each.idle_since_s
                is_over = is_draining or waited_s >= self.options.lease_s
                if is_over and not each.holder.may_use(now_s):
                    self._free(each, "drain" if is_draining else "lease")
        for uuid, (_, until_s) in list(self._refused.items()):
            if now_s >= until_s:
                del self._refused[uuid]
        for device in list(self._devices.values()):
            self._tick_device(device, is_draining=is_draining)

    def close(self) -> None:
        """End all children; what is left on them is gone. Idempotent."""
        for device in list(self._devices.values()):
            self._lose(device, LeaseLost("the daemon stopped"))
        for each in self._by_id.values():
            each.holder.close()

    # --- figures --------------------------------------------------------------------------------

    def describe(self, now_s: float) -> dict[str, Any]:
        """For the status: device memory by device, and who holds it."""
        uuids = {*self._devices, *(each.key.device_uuid for each in self._by_id.values())}
        return {
            "limit_bytes": self.options.limit_bytes,
            "lease_s": self.options.lease_s,
            "lost_total": self._lost_total,
            "devices": [self._describe_device(uuid, now_s) for uuid in sorted(uuids)],
        }

    def _describe_device(self, uuid: str, now_s: float) -> dict[str, Any]:
        device = self._devices.get(uuid)
        overdue = device is not None and self._is_overdue(device.process)
        state = "off" if device is None else "starting"
        if device is not None and device.is_open:
            state = "open"
        return {
            "device_uuid": uuid,
            "child": "silent" if overdue else state,
            "child_pid": device.process.pid if device is not None else 0,
            "context_bytes": device.context_bytes if device is not None else 0,
            "total_bytes": device.total_bytes if device is not None else 0,
            "used_bytes": self._used_bytes(uuid),
            "backings": [
                _describe_backing(each, now_s)
                for each in self._by_id.values()
                if each.key.device_uuid == uuid
            ],
        }

    # --- holding --------------------------------------------------------------------------------

    @staticmethod
    def _is_of(holder: Holder, session_id: int, pid: int) -> bool:
        # One process is one mapping, whichever of its connections asks.
        return holder.session_id == session_id or (pid > 0 and holder.pid == pid)

    def _take(
        self, found: DeviceBacking, session_id: int, pid: int, size_bytes: int, layout: bytes
    ) -> None:
        is_own = self._is_of(found.holder, session_id, pid)
        if not is_own and (found.holder.session_id or found.holder.may_use(self._now_s)):
            raise _taken(found)
        if (found.size_bytes, found.layout) != (size_bytes, layout):
            raise GeometryMismatch(
                f"the device backing {found.key.name!r} has {found.size_bytes} bytes in layout "
                f"{found.layout.hex()}, asked for were {size_bytes} in {layout.hex()}",
                remedy="Its rows mean nothing to this configuration: give it back and allocate "
                "anew, or use another name",
                has_bytes=found.size_bytes, asked_bytes=size_bytes,
            )  # fmt: skip
        found.idle_since_s = None
        if found.holder.session_id != session_id:
            found.holder.close()
            found.holder = Holder(session_id, pid)

    def _detach(self, backing: DeviceBacking) -> None:
        self._untell(backing)
        backing.holder.close()
        self._wait_for_next(backing)

    def _wait_for_next(self, backing: DeviceBacking) -> None:
        backing.idle_since_s = self._now_s
        backing.is_adopted = backing.is_adopted or backing.state is _S.READY

    # --- making ---------------------------------------------------------------------------------

    def _require_on(self) -> None:
        if not self.options.limit_bytes:
            raise ConfigError(
                "this daemon allocates no device memory",
                remedy="Set cuda.device_backing_bytes, or allocate in the worker",
            )

    def _make(
        self, key: BackingKey, size_bytes: int, layout: bytes, session_id: int, pid: int
    ) -> DeviceBacking:
        taken_bytes = -(-size_bytes // limits.DEVICE_BACKING_ALIGNMENT_BYTES)
        taken_bytes *= limits.DEVICE_BACKING_ALIGNMENT_BYTES
        self._check_quota(key.device_uuid, taken_bytes)
        device = self._device(key.device_uuid)
        self._require_answering(device.process)
        backing = DeviceBacking(
            backing_id=self._next_id, key=key, size_bytes=size_bytes, taken_bytes=taken_bytes,
            layout=layout, process=device.process, holder=Holder(session_id, pid),
            made_s=self._now_s,
        )  # fmt: skip
        self._next_id += 1
        self._by_id[backing.backing_id] = self._by_key[key] = backing
        self._order(backing, Order(do="allocate", backing_id=backing.backing_id,
                                   size_bytes=taken_bytes))  # fmt: skip
        return backing

    def _check_quota(self, uuid: str, taken_bytes: int) -> None:
        limit, used = self.options.limit_bytes, self._used_bytes(uuid)
        if used + taken_bytes > limit:
            raise QuotaExceeded(
                f"{taken_bytes} bytes on {uuid}: {used} are taken, the limit is {limit} "
                "(cuda.device_backing_bytes)",
                remedy="Raise it, ask for less, or give back what nobody holds: `hisparse-service "
                "status` lists it, `hisparse-service release-device` frees it",
                limit=limit, value=used + taken_bytes, needed=taken_bytes,
                free=max(0, limit - used),
            )  # fmt: skip
        if len(self._by_id) >= limits.MAX_DEVICE_BACKINGS:
            raise QuotaExceeded(
                f"there are {len(self._by_id)} device backings, the limit is "
                f"{limits.MAX_DEVICE_BACKINGS}",
                remedy="Use fewer names: one backing holds all layers of a rank",
                limit=limits.MAX_DEVICE_BACKINGS, value=len(self._by_id) + 1,
            )  # fmt: skip
        if uuid not in self._devices and len(self._devices) >= limits.MAX_DEVICES:
            raise QuotaExceeded(
                f"there are {len(self._devices)} devices, the limit is {limits.MAX_DEVICES}",
                remedy="Name the device's own UUID",
                limit=limits.MAX_DEVICES, value=len(self._devices) + 1,
            )  # fmt: skip

    def _device(self, uuid: str) -> _Device:
        refused = self._refused.get(uuid)
        if refused is not None and self._now_s < refused[1]:
            raise refused[0]
        device = self._devices.get(uuid)
        if device is None:
            # Here, so that a daemon without device memory does not load it.
            from hisparse_service.pool.device_process import DeviceProcess

            process = DeviceProcess(
                uuid, call_soon=self._call_soon, on_answer=self._on_answer, on_end=self._on_end
            )
            device = self._devices[uuid] = _Device(process, self._now_s)
            log.info("device_child_started", device_uuid=uuid)
            process.start()
        return device

    def _order(self, backing: DeviceBacking, order: Order) -> None:
        backing.asked_s = self._now_s
        backing.process.send(order)

    def _check_answers(self, backing: DeviceBacking) -> None:
        """Give an allocation up that takes too long.

        Raises:
            DeviceError: This one does.
        """
        if backing.state is not _S.ALLOCATING or not self._is_overdue(backing.process):
            return
        self._free(backing, "no_answer")
        self._require_answering(backing.process)

    def _is_overdue(self, process: DeviceProcess) -> bool:
        oldest_s = min(
            (
                each.asked_s
                for each in self._by_id.values()
                if each.process is process and each.asked_s is not None
            ),
            default=self._now_s,
        )
        return self._now_s - oldest_s > self.options.timeout_s

    def _require_answering(self, process: DeviceProcess) -> None:
        if self._is_overdue(process):
            raise DeviceError(
                f"the driver has not answered for {process.device_uuid} within "
                f"{self.options.timeout_s:g} s (cuda.device_backing_timeout_s)",
                remedy="Look for a hung driver (`dmesg`, `nvidia-smi`); allocate in the worker "
                "meanwhile",
                device_uuid=process.device_uuid, timeout_s=self.options.timeout_s,
            )  # fmt: skip

    # --- freeing --------------------------------------------------------------------------------

    def _free(self, backing: DeviceBacking, reason: str) -> None:
        log.info(
            "device_backing_freed", backing=backing.backing_id, reason=reason,
            namespace=backing.key.namespace_id, group=backing.key.group, rank=backing.key.rank,
            device_uuid=backing.key.device_uuid, size_bytes=backing.size_bytes,
        )  # fmt: skip
        backing.move(_E.FREE)
        self._unfind(backing)
        backing.holder.close()
        if backing.state is _S.FREEING:
            self._order(backing, Order(do="free", backing_id=backing.backing_id))

    def _unfind(self, backing: DeviceBacking) -> None:
        if self._by_key.get(backing.key) is backing:
            del self._by_key[backing.key]

    def _untell(self, backing: DeviceBacking) -> None:
        told = self._lost_of.get(backing.holder.session_id)
        if told is not None and backing.backing_id in told:
            told.remove(backing.backing_id)

    def _forget(self, backing: DeviceBacking, event: BackingEvent) -> None:
        backing.move(event)
        assert backing.state is _S.GONE
        self._untell(backing)
        self._unfind(backing)
        del self._by_id[backing.backing_id]
        backing.holder.close()

    # --- what the children say ------------------------------------------------------------------

    def _on_answer(self, process: DeviceProcess, answer: Answer) -> None:
        device = self._devices.get(process.device_uuid)
        if device is None or device.process is not process:
            return  # of a child that was given up
        try:
            self._take_answer(device, answer)
        except HiSparseError as error:
            process.end(DeviceError(f"the device child broke the rules: {error}"))

    def _take_answer(self, device: _Device, answer: Answer) -> None:
        if answer.event == "opened":
            if normal_device_uuid(answer.device_uuid) != device.process.device_uuid:
                raise DeviceError(f"it opened {answer.device_uuid}")
            device.is_open = True
            device.context_bytes, device.total_bytes = answer.context_bytes, answer.total_bytes
            log.info(
                "device_child_open", device_uuid=device.process.device_uuid,
                pid=device.process.pid, context_bytes=answer.context_bytes,
            )  # fmt: skip
        if answer.event in ("started", "opened"):
            return
        backing = self._by_id.get(answer.backing_id)
        if backing is None:
            raise DeviceError(f"it answered for backing {answer.backing_id}, which is not there")
        backing.asked_s = None
        if answer.event == "allocated":
            self._on_allocated(backing, answer)
        elif answer.event == "refused":
            backing.error = from_wire(answer.code, answer.message, answer.remedy, answer.details)
            backing.failed_s = self._now_s
            backing.move(_E.REFUSED)
        else:
            self._forget(backing, _E.FREED)
        if backing.state is _S.GONE and backing.backing_id in self._by_id:
            del self._by_id[backing.backing_id]

    def _on_allocated(self, backing: DeviceBacking, answer: Answer) -> None:
        if len(answer.handle) != limits.MEMORY_HANDLE_BYTES:
            raise DeviceError(f"a handle of {len(answer.handle)} bytes")
        backing.move(_E.ALLOCATED)
        if backing.state is _S.FREEING:
            self._order(backing, Order(do="free", backing_id=backing.backing_id))
            return
        backing.handle = answer.handle
        log.info(
            "device_backing_allocated", backing=backing.backing_id,
            namespace=backing.key.namespace_id, group=backing.key.group, rank=backing.key.rank,
            device_uuid=backing.key.device_uuid, size_bytes=backing.size_bytes,
        )  # fmt: skip

    def _on_end(self, process: DeviceProcess, error: HiSparseError) -> None:
        device = self._devices.get(process.device_uuid)
        if device is not None and device.process is process:
            self._lose(device, error)

    def _lose(self, device: _Device, error: HiSparseError) -> None:
        """The child is gone, or as good as: so is its memory, and whoever held it is told."""
        process = device.process
        del self._devices[process.device_uuid]
        process.abandon(error)
        if not device.is_open and not isinstance(error, LeaseLost):
            self._refused[process.device_uuid] = (error, self._now_s + _REFUSED_KEPT_S)
        lost = [
            each
            for each in self._by_id.values()
            if each.process is process and each.state in ON_DEVICE
        ]
        tell = log.info if isinstance(error, LeaseLost) and not lost else log.warning
        tell(
            "device_child_ended", device_uuid=process.device_uuid, error=str(error),
            backings=len(lost),
        )  # fmt: skip
        for each in lost:
            each.asked_s = None
            each.error, each.failed_s = error, self._now_s
            self._lost_total += each.state is _S.READY
            each.move(_E.CHILD_DIED)
            session_id = each.holder.session_id
            if each.state is _S.GONE:
                del self._by_id[each.backing_id]
            elif not session_id:
                self._forget(each, _E.TOLD)
            elif each.state is _S.LOST:
                self._lost_of.setdefault(session_id, []).append(each.backing_id)

    def _tick_device(self, device: _Device, *, is_draining: bool) -> None:
        own = [each for each in self._by_id.values() if each.process is device.process]
        own = [each for each in own if each.state in ON_DEVICE]
        if own:
            device.idle_since_s = self._now_s
            # While somebody's rows are on it, a hung child is left alone: its memory is good.
            if self._is_overdue(device.process) and not any(e.state is _S.READY for e in own):
                self._lose(device, DeviceError(
                    f"the driver did not answer for {device.process.device_uuid} within "
                    f"{self.options.timeout_s:g} s; the child was killed",
                    remedy="Look for a hung driver (`dmesg`, `nvidia-smi`)",
                    device_uuid=device.process.device_uuid,
                ))  # fmt: skip
        elif is_draining or self._now_s - device.idle_since_s >= limits.DEVICE_CHILD_LINGER_S:
            self._lose(device, LeaseLost("nothing lies on this device any more"))

    # --- small parts ----------------------------------------------------------------------------

    def _of_namespace(self, namespace_id: int) -> Iterable[DeviceBacking]:
        return [each for each in self._by_id.values() if each.key.namespace_id == namespace_id]

    def _used_bytes(self, uuid: str) -> int:
        return sum(
            each.taken_bytes
            for each in self._by_id.values()
            if each.key.device_uuid == uuid and each.state in ON_DEVICE
        )


def _taken(backing: DeviceBacking) -> DeviceBackingTaken:
    holder, key = backing.holder, backing.key
    who = f"session {holder.session_id}" if holder.session_id else "a session that ended"
    return DeviceBackingTaken(
        f"the device backing {key.name!r} of rank {key.rank} of group {key.group!r} on "
        f"{key.device_uuid} is held by {who} of process {holder.pid}, which lives",
        remedy="End that process first, or give each engine a group of its own",
        holder_session=holder.session_id, holder_pid=holder.pid,
    )  # fmt: skip


def _describe_backing(backing: DeviceBacking, now_s: float) -> dict[str, Any]:
    key, idle_since_s = backing.key, backing.idle_since_s
    return {
        "backing": backing.backing_id, "namespace": key.namespace_id, "group": key.group,
        "rank": key.rank, "name": key.name, "bytes": backing.taken_bytes,
        "state": backing.state.value, "layout": backing.layout.hex(),
        "holder_session": backing.holder.session_id, "holder_pid": backing.holder.pid,
        "age_s": round(now_s - backing.made_s, 3),
        "idle_s": round(min(now_s - idle_since_s, 1e9), 3) if idle_since_s is not None else 0.0,
        "error": str(backing.error or ""),
    }  # fmt: skip
