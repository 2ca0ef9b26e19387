"""Every error that either side raises, in one tree split by what the caller does next.

    HiSparseError
    ├── ConfigError              fix the configuration and start again
    │   ├── GeometryError            sizes that do not fit each other
    │   ├── GeometryMismatch         another geometry than the namespace has
    │   ├── PoolTooLarge             one of the four memory limits is too small
    │   └── RuntimeDirectoryError    the runtime directory cannot be used
    ├── CapacityError            retry later (carries needed and free)
    │   ├── QuotaExceeded            a limit of this session or namespace
    │   └── NotReady                 the pool is still being populated, or draining
    ├── LeaseError               take the lease again
    │   ├── LeaseLost                unknown, revoked, or of another session
    │   ├── LeaseExpired             its deadline passed
    │   ├── WriterTaken              another rank holds the group's writer lease
    │   └── DeviceBackingTaken       another process holds this device memory
    ├── StaleBlock               look the block up again; its bytes must not be used
    │   └── DamagedBlock             its bytes are not those that were published
    ├── PeerError                reconnect or upgrade
    │   ├── ServiceUnavailable       no answer before the deadline
    │   ├── UnknownSession           say Hello again
    │   ├── ProtocolMismatch         version ranges do not meet
    │   ├── MalformedMessage         bytes that are not a message of the protocol
    │   ├── MessageTooLarge          longer than limits.MAX_MESSAGE_BYTES
    │   └── NotAuthorised            this uid may not do that
    ├── CorruptSegmentError      stop using the segment
    │   └── ForeignSegment           the name is taken by something that is not ours
    ├── UsageError               the caller's bug: fix the call
    │   ├── NotHeld                  a block or lease that this session does not hold
    │   ├── ForeignKeys              keys made for another namespace
    │   ├── IllegalTransition        event not allowed in this state (double publish, …)
    │   ├── PublishOutOfOrder        the parent block is not published
    │   └── ClosedError              used after close
    ├── DeviceError              a CUDA call failed; carries the numeric code
    └── InternalError            report a bug

Each error says what was wrong, the limit and the value, and what to do. On the wire it is its
``code`` (the class name), the message and its numbers (``details``); `from_wire` makes it again.
Pure: usable on any thread of either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

Detail = int | float | str
"""What an error's details may hold: numbers with a unit in their name, and short words."""


class HiSparseError(Exception):
    """Root of the tree.

    Args:
        message: What was wrong, with the value and the limit.
        remedy: What the caller or operator should do.
        **details: Numbers and short words for programs (units in the names).
    """

    registry: ClassVar[dict[str, type[HiSparseError]]] = {}

    def __init__(self, message: str, *, remedy: str = "", **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details: dict[str, Detail] = details

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        HiSparseError.registry[cls.__name__] = cls

    @property
    def code(self) -> str:
        """The name that stands for this class on the wire and in the troubleshooting page."""
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross processes in tests and worker pools; keyword-only arguments
        # are lost by the default protocol.
        return (from_wire, (self.code, self.message, self.remedy, self.details))


class ConfigError(HiSparseError):
    """Settings that cannot work. Fix them and start again."""


class GeometryError(ConfigError):
    """Row, block, layer or pool sizes that do not fit each other."""


class GeometryMismatch(ConfigError):
    """Attach with a geometry other than the one the namespace was opened with."""


class PoolTooLarge(ConfigError):
    """The pool cannot be held. Details: ``limit`` (its name), limit_bytes, needed_bytes."""


class RuntimeDirectoryError(ConfigError):
    """The runtime directory is not ours, too long for a socket path, or held by a live daemon."""


class CapacityError(HiSparseError):
    """Not enough free blocks or bytes now. Details: needed, free. Retry later."""


class QuotaExceeded(CapacityError):
    """A limit of this session or namespace is reached. Details: limit, value."""


class NotReady(CapacityError):
    """The pool is being populated or the daemon is draining. Details: progress, 0 to 1."""


class LeaseError(HiSparseError):
    """The right is gone. Take the lease again."""


class LeaseLost(LeaseError):
    """The lease is unknown to the daemon, was revoked, or belongs to another session."""


class LeaseExpired(LeaseError):
    """The lease's deadline passed before the read ended. The bytes must not be used."""


class WriterTaken(LeaseError):
    """Another rank of the tensor-parallel group holds the writer lease."""


class DeviceBackingTaken(LeaseError):
    """Another session holds the device backing, or a process that may still use it lives."""


class StaleBlock(HiSparseError):
    """The block was evicted, rewritten or belongs to another epoch. Its bytes must not be used."""


class DamagedBlock(StaleBlock):
    """A published block's bytes do not fit its checksum. Details: block, generation, verdict."""


class PeerError(HiSparseError):
    """The other side cannot be talked to as things are. Reconnect or upgrade."""


class ServiceUnavailable(PeerError):
    """No answer from the daemon before the deadline."""


class UnknownSession(PeerError):
    """The daemon does not know this connection (it restarted, or reaped it). Say Hello again."""


class ProtocolMismatch(PeerError):
    """The version ranges do not meet. Details: the four ends of both ranges."""


class MalformedMessage(PeerError):
    """Bytes that are not a message of the protocol, or fields out of range."""


class MessageTooLarge(PeerError):
    """A message longer than the limit. Details: limit_bytes, message_bytes."""


class NotAuthorised(PeerError):
    """The peer's uid may not connect, or may not do this."""


class CorruptSegmentError(HiSparseError):
    """A segment whose header or records fail their checks. Stop using it; nothing was deleted."""


class ForeignSegment(CorruptSegmentError):
    """The pool's name is taken by a segment of another program, instance or version."""


class UsageError(HiSparseError):
    """A bug in the calling code. Nothing was changed."""


class NotHeld(UsageError):
    """The block or lease is not held by this session."""


class ForeignKeys(UsageError):
    """Block keys that were made for another namespace."""


class IllegalTransition(UsageError):
    """The event is not allowed in this state. Details: state, event, and the id."""


class PublishOutOfOrder(UsageError):
    """A block cannot be published before its parent is."""


class ClosedError(UsageError):
    """Used after close."""


class DeviceError(HiSparseError):
    """A CUDA call failed. Details: cuda_error (its number), call."""


class InternalError(HiSparseError):
    """Broken invariant. Report a bug."""


def from_wire(
    code: str, message: str, remedy: str = "", details: Mapping[str, Detail] | None = None
) -> HiSparseError:
    """Make the error that a peer sent.

    An unknown code (a newer peer) becomes a plain `HiSparseError` that keeps the code in its text.
    """
    error_type = HiSparseError.registry.get(code)
    if error_type is None:
        return HiSparseError(f"{code}: {message}", remedy=remedy, **dict(details or {}))
    return error_type(message, remedy=remedy, **dict(details or {}))
