"""Device memory that the daemon allocated: opened here by its CUDA IPC handle, closed here.

`Namespace.device_backing` gives a `DeviceBacking`. Its memory outlives this process: the rank's
next process opens it again and finds the rows that were written last. What it means to hold it:

- one process holds it; the daemon gives it to the next one when this one is dead or let go of it;
- when the daemon or its child on that GPU ends, the memory is gone for good. `tensor` and `check`
  then raise `LeaseLost` instead of giving rows that nobody vouches for; the mapping itself stays
  until `close`, so that work under way does not fault. Ask again, or allocate in the worker;
- it is unmapped when the last tensor over it goes, and only then does the daemon hear that it may
  go to another process.

`device_allocator` puts resident and hot rows on it. Opening needs the device's context: the
thread that owns the device. The rest: any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import gc
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from hisparse_service.contract import limits
from hisparse_service.contract.cuda_calls import load_driver
from hisparse_service.contract.device_uuid import normal_device_uuid
from hisparse_service.contract.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DeviceError,
    HiSparseError,
    InternalError,
    LeaseError,
    LeaseLost,
    PeerError,
    ServiceUnavailable,
    UsageError,
)
from hisparse_service.contract.messages import (
    AllocateDeviceBacking,
    CountReply,
    DeviceBackingReply,
    ReleaseDeviceBacking,
)
from worker_client.session import WhenAway

if TYPE_CHECKING:
    import torch

    from worker_client.client import Client, Namespace

__all__ = [
    "CudaMemoryDriver", "DeviceBacking", "DeviceBackingMode", "DeviceBackings",
    "DeviceMemoryDriver", "Mapping",
]  # fmt: skip

_LAZY_PEER_ACCESS: Final = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
_DEINITIALIZED: Final = 4
"""CUDA_ERROR_DEINITIALIZED: the process ends and the driver has let go of everything."""
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1

_Action = Literal["detach", "give_back"]

logger = logging.getLogger(__name__)


class DeviceBackingMode(enum.Enum):
    """What `Namespace.device_backing` does with what is, or is not, there."""

    OPEN_OR_CREATE = "open_or_create"
    OPEN = "open"
    """`LeaseLost` where there is none."""
    CREATE = "create"
    """What is there is given back first: its rows are not wanted."""


class Mapping:
    """Memory of another process, mapped here and wrapped into one tensor.

    Args:
        owner: What the tensor keeps alive; only tensors hold it on.
        wrap: Makes the tensor of it, without a copy.
        unmap: Unmaps it. Nothing uses the memory any more.
    """

    def __init__(
        self,
        owner: object,
        *,
        wrap: Callable[[Any], torch.Tensor],
        unmap: Callable[[], None],
    ) -> None:
        self._owner = weakref.ref(owner)
        self._wrap = wrap
        self._unmap = unmap
        self.tensor: torch.Tensor | None = wrap(owner)
        """int8 [size]."""

    def close(self) -> None:
        """Unmap it.

        Raises:
            UsageError: Tensors over it are alive: unmapping under them would make their next use a
                fault of the whole context. It stays mapped.
        """
        self.tensor = None
        gc.collect()  # what only a cycle holds is not in use
        owner = self._owner()
        if owner is not None:
            self.tensor = self._wrap(owner)
            raise UsageError(
                "tensors over this device backing are alive",
                remedy="Drop the caches and runtimes that are bound on it first",
            )
        self._unmap()


class DeviceMemoryDriver(Protocol):
    """The calls that opening needs; tests put memory without a GPU here."""

    def current_device(self) -> torch.device:
        """Where this process works."""

    def device_uuid(self, device: torch.device) -> str:
        """Of the device, in any spelling."""

    def open(self, handle: bytes, size_bytes: int, device: torch.device) -> Mapping:
        """Map it.

        Raises:
            DeviceError: With the number.
        """


class _IpcMemory:
    """One opened CUDA IPC handle; what torch wraps without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|i1", "data": (address, False), "version": 3,
        }  # fmt: skip


class CudaMemoryDriver:
    """`DeviceMemoryDriver` over cuda.bindings, in torch's primary context.

    Raises:
        ConfigError: cuda.bindings or a CUDA build of torch is missing.
    """

    def __init__(self) -> None:
        import torch

        driver = load_driver()
        if not torch.cuda.is_available():
            raise ConfigError("torch sees no CUDA device", remedy="Allocate on another device")
        self._driver: Any = driver

    def current_device(self) -> torch.device:
        """Torch's."""
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def device_uuid(self, device: torch.device) -> str:
        """As torch tells it."""
        import torch

        return str(torch.cuda.get_device_properties(device).uuid)

    def open(self, handle: bytes, size_bytes: int, device: torch.device) -> Mapping:
        """CuIpcOpenMemHandle on the device's primary context."""
        import torch

        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # makes the context, if there is none
            opened = self._driver.CUipcMemHandle()
            # By its address: cuda.bindings 13.5 names no fields of this structure.
            ctypes.memmove(int(opened.getPtr()), handle, limits.MEMORY_HANDLE_BYTES)
            code, address = self._driver.cuIpcOpenMemHandle(opened, _LAZY_PEER_ACCESS)
            if int(code):
                raise _cuda_error(int(code), "cuIpcOpenMemHandle")
            mapping = Mapping(
                _IpcMemory(int(address), size_bytes),
                wrap=lambda owner: torch.as_tensor(owner, device=device),
                unmap=lambda: self._close(address, device),
            )
            if mapping.tensor is None or mapping.tensor.data_ptr() != int(address):
                raise InternalError("torch copied the device backing instead of wrapping it")
            return mapping

    def _close(self, address: Any, device: torch.device) -> None:
        import torch

        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            code = int(self._driver.cuIpcCloseMemHandle(address)[0])
        if code not in (0, _DEINITIALIZED):
            raise _cuda_error(code, "cuIpcCloseMemHandle")


def _cuda_error(code: int, call: str) -> DeviceError:
    return DeviceError(
        f"{call} failed with CUDA error {code}",
        remedy="201 or 400: the daemon's child on this GPU ended, ask again; 1 or 101: see whether "
        "this process and the daemon share their PID namespace; `hisparse-service doctor` tries it",
        cuda_error=code, call=call,
    )  # fmt: skip


class DeviceBacking:
    """One rank's device memory, mapped here. Made by `Namespace.device_backing`.

    Attributes:
        namespace: It belongs to this namespace.
        name: Tells the backings of one rank apart.
        device: Where it is, as torch counts.
        device_uuid: The same, for everybody.
        size_bytes: Of the tensor.
        layout: 16 B: what lies where on it.
        backing_id: The daemon's number, in `epoch`: the generation of this memory.
        adopted: It was there before: its rows are those that the last holder wrote.
    """

    def __init__(
        self,
        namespace: Namespace,
        reply: DeviceBackingReply,
        *,
        name: str,
        layout: bytes,
        device: torch.device,
        driver: DeviceMemoryDriver,
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.layout = layout
        self.device = device
        self.device_uuid = reply.device_uuid
        self.size_bytes = reply.size_bytes
        self.backing_id = reply.backing_id
        self.epoch = reply.epoch
        self.adopted = reply.adopted
        self._lock = threading.Lock()
        self._lost_why = ""
        self._pid = os.getpid()
        self._mapping: Mapping | None = driver.open(reply.handle, reply.size_bytes, device)
        self._owner_pidfd = _owner_pidfd(reply.owner_pid, reply.device_uuid)

    @property
    def is_closed(self) -> bool:
        """After `close` or `release`."""
        return self._mapping is None

    @property
    def is_lost(self) -> bool:
        """Its memory is gone in the daemon: what is still mapped here means nothing any more."""
        self._look_at_owner()
        return bool(self._lost_why)

    @property
    def tensor(self) -> torch.Tensor:
        """int8 [size_bytes] on `device`.

        Raises:
            LeaseLost: The memory is gone.
            ClosedError: Closed before.
        """
        self.check()
        mapping = self._mapping
        tensor = mapping.tensor if mapping is not None else None
        if tensor is None:
            raise _closed()
        return tensor

    def check(self) -> None:
        """For who keeps the tensor: before relying on its rows. Asks nobody.

        Raises:
            LeaseLost: The memory is gone.
            ClosedError: Closed before.
        """
        if self.is_lost:
            raise LeaseLost(
                f"the device backing {self.name!r} on {self.device_uuid} is gone: "
                f"{self._lost_why}",
                remedy="Ask for it again, its rows are gone; or allocate in this process",
                device_uuid=self.device_uuid, backing=self.backing_id,
            )  # fmt: skip
        if self._mapping is None:
            raise _closed()

    def _look_at_owner(self) -> None:
        """It dies with its daemon, long before another daemon could say so.

        One poll: `check` takes 1.2 us (2 cores, 2026-12-01, 77577cd), once a step at most.
        """
        with self._lock:
            if self._owner_pidfd >= 0 and _has_ended(self._owner_pidfd):
                self.lose("the daemon's child on this GPU ended")

    def lose(self, why: str) -> None:
        """The daemon has it no more."""
        self._lost_why = self._lost_why or why

    def close(self) -> None:
        """Unmap it; the daemon keeps it for the next holder, for the lease's time. Idempotent.

        Raises:
            UsageError: Tensors over it are alive; it stays mapped.
            DeviceError: CUDA would not unmap it.
        """
        self._end("detach")

    def release(self) -> None:
        """Unmap it and give the memory back now. Idempotent.

        Raises:
            UsageError: Tensors over it are alive; it stays mapped.
            DeviceError: CUDA would not unmap it.
        """
        self._end("give_back")

    def _end(self, action: _Action) -> None:
        with self._lock:
            mapping = self._mapping
            if mapping is None:
                return
            if os.getpid() != self._pid:  # a forked child has no part in it
                self._mapping = None
                return
            try:
                mapping.close()
            except UsageError:
                raise
            except HiSparseError as error:
                self._forget()
                if not self._lost_why:
                    raise
                # Of a child that died: what CUDA says of its memory then is nobody's business.
                logger.info("unmapping lost device memory: %s", error)
            self._forget()
        if not self._lost_why:
            _tell_released(self.namespace, self.name, self.device_uuid, action)

    def _forget(self) -> None:
        self._mapping = None
        pidfd, self._owner_pidfd = self._owner_pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        self.namespace.client.devices.forget(self)


def _owner_pidfd(pid: int, device_uuid: str) -> int:
    """Of the process that allocated; -1 where it cannot be seen from here: then the daemon tells.

    The pid is the daemon's: in another PID namespace it may mean another process.
    """
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if device_uuid.encode() in command:
            return pidfd
    os.close(pidfd)
    return -1


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _closed() -> ClosedError:
    return ClosedError("the device backing was closed", remedy="Ask the namespace for it again")


def _tell_released(namespace: Namespace, name: str, device_uuid: str, action: _Action) -> None:
    """The daemon learns the rest from the end of this process, where it cannot be told."""
    with contextlib.suppress(PeerError, LeaseError, UsageError, CapacityError):
        namespace.client.session.request(
            lambda request_id: ReleaseDeviceBacking(
                request_id, namespace.namespace_id, name, device_uuid, action
            ),
            CountReply, when_away=WhenAway.FAIL,
        )  # fmt: skip


class DeviceBackings:
    """Those of one client; told when one is gone. Calls come with `Session.lock` held or take it.

    Args:
        client: Whose.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._obtaining = threading.Lock()
        self._open: dict[tuple[bytes, str, str], DeviceBacking] = {}

    def obtain(
        self,
        namespace: Namespace,
        size_bytes: int,
        *,
        layout: bytes,
        name: str,
        device: torch.device,
        mode: DeviceBackingMode,
        timeout_s: float,
        driver: DeviceMemoryDriver,
    ) -> DeviceBacking:
        """See `Namespace.device_backing`."""
        uuid = normal_device_uuid(driver.device_uuid(device))
        with self._obtaining:
            found = self._found(namespace, name, uuid, mode)
            if found is not None and (found.size_bytes, found.layout) == (size_bytes, layout):
                return found
            if mode is DeviceBackingMode.CREATE:
                _tell_released(namespace, name, uuid, "give_back")
            session_id = self._client.session_id
            reply = _wait_ready(namespace, size_bytes, layout, name, uuid, mode, timeout_s)
            try:
                backing = DeviceBacking(
                    namespace, reply, name=name, layout=layout, device=device, driver=driver
                )
            except BaseException:
                _tell_released(namespace, name, uuid, "detach")
                raise
            with self._client.session.lock:
                self._open[namespace.fingerprint, name, uuid] = backing
                if self._client.session_id != session_id:  # a new session did not know of it
                    self._hold_again(backing)
            return backing

    def _found(
        self, namespace: Namespace, name: str, uuid: str, mode: DeviceBackingMode
    ) -> DeviceBacking | None:
        """What is open here already; what is lost or not wanted is closed first."""
        found = self._open.get((namespace.fingerprint, name, uuid))
        if found is None:
            return None
        if found.is_lost:
            found.close()
            return None
        if mode is DeviceBackingMode.CREATE:
            found.release()
            return None
        return found

    def forget(self, backing: DeviceBacking) -> None:
        """It was closed."""
        key = (backing.namespace.fingerprint, backing.name, backing.device_uuid)
        if self._open.get(key) is backing:
            del self._open[key]

    def lost(self, backing_ids: list[int]) -> None:
        """The daemon says that these are gone. `Session.lock` is held."""
        epoch = self._epoch()
        for backing in list(self._open.values()):
            if backing.backing_id in backing_ids and backing.epoch == epoch:
                backing.lose("the daemon's child on this GPU ended")

    def reattach(self) -> None:
        """A new session was made. `Session.lock` is held; PeerErrors go up."""
        for backing in list(self._open.values()):
            if not backing.is_lost:
                self._hold_again(backing)

    def _hold_again(self, backing: DeviceBacking) -> None:
        if backing.epoch != self._epoch():
            backing.lose("the daemon was restarted")
            return
        namespace = backing.namespace

        def build(request_id: int) -> AllocateDeviceBacking:
            return AllocateDeviceBacking(
                request_id, namespace.namespace_id, backing.name, backing.device_uuid,
                backing.size_bytes, backing.layout, "open",
            )  # fmt: skip

        try:
            reply = namespace.client.session.request(build, DeviceBackingReply)
        except PeerError:
            raise
        except HiSparseError as error:
            backing.lose(error.message)
            return
        if reply.backing_id != backing.backing_id:
            backing.lose("it was given back while this client was away")

    def _epoch(self) -> int:
        return self._client.epoch

    def close(self) -> None:
        """Close all. Those that tensors are bound on stay mapped until the process ends.

        Raises:
            DeviceError: CUDA would not unmap one; all were tried.
        """
        with contextlib.ExitStack() as stack:
            for backing in list(self._open.values()):
                stack.callback(_close_unless_used, backing)


def _wait_ready(
    namespace: Namespace,
    size_bytes: int,
    layout: bytes,
    name: str,
    uuid: str,
    mode: DeviceBackingMode,
    timeout_s: float,
) -> DeviceBackingReply:
    deadline_s = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    wire_mode: Any = "open" if mode is DeviceBackingMode.OPEN else "open_or_create"

    def build(request_id: int) -> AllocateDeviceBacking:
        return AllocateDeviceBacking(
            request_id, namespace.namespace_id, name, uuid, size_bytes, layout, wire_mode
        )

    while True:
        reply = namespace.client.session.request(build, DeviceBackingReply)
        if reply.ready:
            break
        if time.monotonic() >= deadline_s:
            _tell_released(namespace, name, uuid, "give_back")
            raise ServiceUnavailable(
                f"no device memory of {size_bytes} bytes on {uuid} within {timeout_s} s",
                remedy="Look for a hung driver, or allocate in this process",
                timeout_s=timeout_s,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if normal_device_uuid(reply.device_uuid) != uuid or reply.size_bytes != size_bytes:
        raise InternalError(
            f"the daemon gave {reply.size_bytes} bytes on {reply.device_uuid} for {size_bytes} "
            f"on {uuid}"
        )
    return reply


def _close_unless_used(backing: DeviceBacking) -> None:
    try:
        backing.close()
    except UsageError as error:
        logger.info("%s; it stays mapped until this process ends", error.message)
