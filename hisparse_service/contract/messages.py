"""The control protocol: every request, reply and event, its fields, their units and bounds.

On the wire a message is one frame: a MessagePack array `[tag, field, field, ...]` in the order
below. A newer peer may append fields; an older one skips what it does not know. `decode_request`
reads it straight into one of these types, and each is checked for type, range and length before
anything is built from it, so that no frame can keep the daemon busy (I7, I8; decision 0008). Arrays
of blocks, generations, checksums and keys travel as raw little-endian bytes (u32, u32, u64, 16 B):
`u32_array` and its siblings check and view them.

One request, one reply, matched by `request_id`; every reply carries the daemon's `epoch`. Deadlines
(`*_deadline_ns`) are CLOCK_MONOTONIC nanoseconds, which all processes of a node share.

Pure: any thread of either side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    Detail,
    HiSparseError,
    MalformedMessage,
    MessageTooLarge,
    from_wire,
)

U16 = Annotated[int, Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0)]
"""MessagePack itself ends at 2**64 - 1, and msgspec takes no bound beyond int64."""
Text = Annotated[str, Meta(max_length=limits.MAX_TEXT_BYTES)]
Counted = Annotated[float, Meta(ge=0, le=1e18)]
"""A worker's counter; the bounds refuse NaN and infinities too."""
Fingerprint = Annotated[
    bytes, Meta(min_length=limits.FINGERPRINT_BYTES, max_length=limits.FINGERPRINT_BYTES)
]
KeySpace = Annotated[
    bytes, Meta(min_length=limits.KEY_SPACE_BYTES, max_length=limits.KEY_SPACE_BYTES)
]
Blocks = Annotated[bytes, Meta(max_length=limits.MAX_BLOCKS_PER_MESSAGE * 4)]
"""u32 little endian, one a block."""
ReportedBlocks = Annotated[bytes, Meta(max_length=limits.MAX_REPORTED_BLOCKS * 4)]
"""u32 little endian, one a block."""
Checksums = Annotated[bytes, Meta(max_length=limits.MAX_BLOCKS_PER_MESSAGE * 8)]
"""u64 little endian, one a block, or empty."""
Keys = Annotated[bytes, Meta(max_length=limits.MAX_KEYS * limits.BLOCK_KEY_BYTES)]
"""16 B, one a block."""
NumBlocks = Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_BACKING)]
NumReserve = Annotated[int, Meta(ge=1, le=limits.MAX_RESERVE_BLOCKS)]
LeaseIds = Annotated[list[U64], Meta(max_length=limits.MAX_LIST_ITEMS)]
EventHandles = Annotated[
    bytes, Meta(max_length=limits.MAX_SHARED_EVENTS * limits.EVENT_HANDLE_BYTES)
]
"""64 B, one an event."""


class Request(msgspec.Struct, array_like=True, frozen=True):
    """Base of all requests. The tag, then these fields, then the subclass's."""

    request_id: U64


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """Base of all replies."""

    request_id: int
    epoch: int


# --- session ------------------------------------------------------------------------------------


class Hello(Request, tag=1, frozen=True):
    """The first message of a connection, and the first after `UnknownSession`.

    The peer's uid and pid are the kernel's word (the socket's credentials), not these fields.
    """

    protocol_min: U16
    protocol_max: U16
    client_name: Text
    """For people: the engine and its version, say."""
    group: Text
    """Name of the tensor-parallel group (one engine). Empty: none; such a session writes without a
    writer lease and shares no events, and its device memory is found again by rank and name alone,
    which all without a group have in common."""
    rank: U32
    world_size: Annotated[int, Meta(ge=1, le=limits.MAX_WORLD_SIZE)]
    device_uuid: Text
    """Of the worker's GPU; empty without one."""
    operator: bool = False
    """An operator's command: no heartbeats, no blocks, not counted as a worker."""
    delegates_copies: bool = False
    """Other sessions of the group copy into the blocks that this one reserves: when it dies before
    them, the blocks return with the last of them (I1)."""


class HelloReply(Reply, tag=1, frozen=True):
    """The session is ALIVE. The protocol spoken is the highest version both know."""

    protocol: int
    session_id: int
    heartbeat_interval_s: float
    session_timeout_s: float
    instance: str
    daemon_version: str
    events_endpoint: str


class Ping(Request, tag=2, frozen=True):
    """Heartbeat. Renews leases in the same message; carries the worker's own counters."""

    renew_leases: LeaseIds = []
    counters: Annotated[dict[Text, Counted], Meta(max_length=limits.MAX_COUNTERS)] = {}
    """Names of worker_client.telemetry; unknown ones are ignored."""


class Pong(Reply, tag=2, frozen=True):
    """`lost_leases`: those of `renew_leases` that are gone. The others now end at the deadline."""

    lease_deadline_ns: int
    lost_leases: list[int]
    lost_device_backings: list[int] = []
    """Held by this session, and gone with the child that had allocated them."""
    lost_pins: list[tuple[int, int, int]] = []
    """(namespace, block, generation) that this session pins and that were withdrawn because their
    bytes are damaged, or hang below such a block: do not use them, and let them go. Told again
    until they are."""


class Bye(Request, tag=3, frozen=True):
    """Ends the session: its leases end, its unpublished blocks return."""


class Done(Reply, tag=3, frozen=True):
    """The request was carried out and there is nothing to say."""


# --- backing ------------------------------------------------------------------------------------


class OpenNamespace(Request, tag=10, frozen=True):
    """Name what may share blocks. Idempotent; another geometry is `GeometryMismatch`."""

    fingerprint: Fingerprint
    name: Text
    geometry: Annotated[bytes, Meta(max_length=4096)]
    """`geometry.encode_geometry`."""


class NamespaceReply(Reply, tag=10, frozen=True):
    """`num_blocks`: of its backing, 0 while it has none."""

    namespace_id: int
    num_blocks: int


class AllocateBacking(Request, tag=11, frozen=True):
    """Give the namespace its range of the pool, or tell the one it has.

    Asking for more blocks than it has is `GeometryMismatch`; asking for fewer is answered with all.
    """

    namespace_id: U16
    num_blocks: NumBlocks
    """Null block included."""


class BackingReply(Reply, tag=11, frozen=True):
    """Where the backing is. All of it is physically reserved (I5)."""

    segment_name: str
    device: int
    """st_dev of the segment: with `inode` proves that the name still means this segment."""
    inode: int
    segment_bytes: int
    pool_uuid: bytes
    num_blocks: int
    table_offset_bytes: int
    payload_offset_bytes: int
    payload_bytes: int
    ranges: list[tuple[int, int]]
    """[start, end) for CUDA registration, bytes from the payload's start."""
    generation: int
    adopted: bool
    """The backing was there before this session: its pages are populated and may hold prefixes."""


class TakeWriter(Request, tag=12, frozen=True):
    """Take the writer lease of the session's group in this namespace; `WriterTaken` otherwise."""

    namespace_id: U16


class LeaseReply(Reply, tag=12, frozen=True):
    """A lease and when it ends unless renewed."""

    lease_id: int
    lease_deadline_ns: int


class YieldWriter(Request, tag=13, frozen=True):
    """Give the writer lease back."""

    namespace_id: U16


class RegistrationTurn(Request, tag=14, frozen=True):
    """Registering the same pages from many ranks at once fails: one at a time.

    `release` false asks for the turn (ask again until granted), true gives it back.
    """

    namespace_id: U16
    release: bool


class TurnReply(Reply, tag=14, frozen=True):
    """`ahead`: sessions that come first; 0 and granted means register now."""

    granted: bool
    ahead: int


# --- blocks -------------------------------------------------------------------------------------


class Reserve(Request, tag=20, frozen=True):
    """Take free blocks to write (the group's writer only). `CapacityError` changes nothing."""

    namespace_id: U16
    lease_id: U64
    """0: a new lease."""
    num_blocks: NumReserve


class BlocksReply(Reply, tag=20, frozen=True):
    """Blocks of a lease: reserved by Reserve, pinned by Lookup and Pin."""

    lease_id: int
    lease_deadline_ns: int
    blocks: bytes
    generations: bytes


class Lookup(Request, tag=21, frozen=True):
    """The longest published prefix of these keys, pinned. No hit: no blocks, lease_id as given.

    The keys begin with the first block's, or behind a block that the lease pins.
    """

    namespace_id: U16
    lease_id: U64
    key_space: KeySpace
    keys: Keys


class Pin(Request, tag=22, frozen=True):
    """Pin published blocks by id. `StaleBlock` where a generation no longer matches."""

    namespace_id: U16
    lease_id: U64
    blocks: Blocks
    generations: Blocks


class Unpin(Request, tag=23, frozen=True):
    """End the lease's pins on these blocks."""

    namespace_id: U16
    lease_id: U64
    blocks: Blocks


class EnqueuedItem(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of one lease whose copies are in stream order: RESERVED becomes WRITING."""

    lease_id: U64
    blocks: Blocks
    generations: Blocks


class CompletedItem(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of one lease whose every layer the writer's CPU saw complete, in prefix order.

    The first one's parent is `parent` (0: it begins the prefix), each next one's the one before it.
    """

    lease_id: U64
    parent: U32
    parent_generation: U32
    blocks: Blocks
    generations: Blocks
    keys: Keys
    checksums: Checksums = b""
    """`checksum.content_checksum` of each block, or none: what readers, and the daemon when one of
    them reports damage, compare its bytes with."""
    keep_duplicates: bool = False
    """Of a block whose key is published already, keep the own one reserved: for engines whose block
    tables cannot change any more. The published one is answered and pinned all the same."""


class ReserveItem(msgspec.Struct, array_like=True, frozen=True):
    """Reserve this many more blocks into that lease, in the same message."""

    lease_id: U64
    num_blocks: NumReserve


class MirrorBatch(Request, tag=24, frozen=True):
    """All that happened to mirrors since the last one. At most one a decode step.

    Enqueued and completed items are checked as a whole before anything changes. A reservation that
    cannot be met is answered by empty blocks and does not undo the rest.
    """

    namespace_id: U16
    key_space: KeySpace
    enqueued: Annotated[list[EnqueuedItem], Meta(max_length=limits.MAX_BATCH_ITEMS)] = []
    completed: Annotated[list[CompletedItem], Meta(max_length=limits.MAX_BATCH_ITEMS)] = []
    reserve: Annotated[list[ReserveItem], Meta(max_length=limits.MAX_BATCH_ITEMS)] = []


class ReservedItem(msgspec.Struct, array_like=True, frozen=True):
    """What one `ReserveItem` got."""

    lease_id: int
    blocks: bytes
    generations: bytes


class MirrorReply(Reply, tag=24, frozen=True):
    """For each completed block, in order, the block that now holds its key.

    Another id than the writer's means that the same prefix was published before: that block is
    pinned into the lease and the writer's own went back.
    """

    canonical_blocks: bytes
    canonical_generations: bytes
    lease_deadline_ns: int
    reserved: list[ReservedItem]
    num_free: int


class Abandon(Request, tag=25, frozen=True):
    """Give reserved blocks back unpublished. Empty `blocks`: all of the lease."""

    namespace_id: U16
    lease_id: U64
    blocks: Blocks


class Free(Request, tag=26, frozen=True):
    """Give back blocks that the lease holds.

    Reserved ones return; pinned ones are forgotten by the index once no other reader holds them.
    `NotHeld` for any other, and nothing changes.
    """

    namespace_id: U16
    lease_id: U64
    blocks: Blocks


class Reclaim(Request, tag=28, frozen=True):
    """Take blocks back that an earlier daemon had reserved for this client.

    A daemon that adopts a pool keeps such blocks for a lease's time. Answer: those that this lease
    holds now, with the generations that they had; the others are lost.
    """

    namespace_id: U16
    lease_id: U64
    blocks: Blocks
    generations: Blocks


class ReportDamage(Request, tag=29, frozen=True):
    """A reader found that the bytes of published blocks do not fit their checksums.

    The daemon believes nobody: it reads the blocks itself, and answers when it has. Only a block
    whose bytes (or record) disagree is withdrawn: with all that was published below it, it is found
    by nobody any more, its record says so to those that read it, an `evicted` event tells of it,
    and it is free once its last reader lets it go. A daemon that does not know this message answers
    `MalformedMessage`.
    """

    namespace_id: U16
    blocks: ReportedBlocks
    generations: ReportedBlocks


class DamageReply(Reply, tag=29, frozen=True):
    """One `checksum.Verdict` a block, u8, in order."""

    verdicts: bytes


class ReleaseLeases(Request, tag=27, frozen=True):
    """A request ended: its pins end, its reserved blocks return, what it published stays."""

    lease_ids: LeaseIds


# --- device -------------------------------------------------------------------------------------


class OfferEvents(Request, tag=32, frozen=True):
    """CUDA IPC handles of the writer's events, for the other ranks of its group.

    The group's writer only; replaces its earlier offer, and no handles withdraw it. The offer ends
    with the session and with the writer lease. The daemon hands the bytes on and never opens them.
    """

    namespace_id: U16
    device_uuid: Text
    """Of the GPU whose streams record the events."""
    handles: EventHandles
    """In the order of the ring: step s is recorded in event s modulo their number."""


class FetchEvents(Request, tag=33, frozen=True):
    """The offer of the group's writer. No handles: there is none now."""

    namespace_id: U16


class EventsReply(Reply, tag=33, frozen=True):
    """What to open. Waiting for these events is for speed: what may be read, the records say."""

    writer_session: int
    """0 without an offer."""
    device_uuid: str
    handles: bytes
    number: int
    """Of the offer, in this epoch: another number means other events."""


class AllocateDeviceBacking(Request, tag=35, frozen=True):
    """Device memory that the daemon allocates for one rank and keeps beyond the rank's process.

    Its identity is (namespace, the session's group and rank, `name`, device). Ask again until the
    answer is `ready`: a child of the daemon allocates, and the daemon waits for no driver. Who asks
    holds it until `ReleaseDeviceBacking` or the end of its process. Other bytes or another layout
    than it has: `GeometryMismatch`; held by another process: `DeviceBackingTaken`.
    """

    namespace_id: U16
    name: Text
    """Tells the backings of one rank apart."""
    device_uuid: Text
    size_bytes: Annotated[int, Meta(ge=1, le=limits.MAX_DEVICE_BACKING_BYTES)]
    layout: Fingerprint
    """What lies where on it; whoever finds it must say the same."""
    mode: Literal["open_or_create", "open"] = "open_or_create"
    """open: `LeaseLost` where there is none."""


class DeviceBackingReply(Reply, tag=35, frozen=True):
    """The memory, once it is `ready`."""

    ready: bool
    backing_id: int
    """Never used again in this epoch: with it, the generation of what the handle means."""
    device_uuid: str
    size_bytes: int
    handle: bytes
    """CUDA IPC memory handle, 64 B."""
    owner_pid: int
    """Process that allocated it, as the daemon sees it: the memory ends with it."""
    adopted: bool
    """It was there before this session: its rows are those that the last holder wrote."""


class ReleaseDeviceBacking(Request, tag=36, frozen=True):
    """A worker no longer has its device backing mapped. Answer: how many backings this concerned.

    From an operator: give back all of the namespace that nobody holds (of that device, if named).
    """

    namespace_id: U16
    name: Text
    device_uuid: Text
    action: Literal["detach", "give_back"]
    """detach: keep it for the lease's time; give_back: free it now."""


# --- operations ---------------------------------------------------------------------------------


class Status(Request, tag=40, frozen=True):
    """Everything an operator sees at a glance."""


class StatusReply(Reply, tag=40, frozen=True):
    """A plain mapping, the same that `hisparse-service status --json` prints."""

    status: dict[str, Any]


class Sessions(Request, tag=41, frozen=True):
    """A page of the sessions."""

    offset: U32 = 0


class ListReply(Reply, tag=41, frozen=True):
    """Rows of a listing; `total` tells how many there are."""

    total: int
    rows: list[dict[str, Any]]


class ListBlocks(Request, tag=42, frozen=True):
    """A page of a namespace's blocks, filtered by state (empty: all but FREE)."""

    namespace_id: U16
    state: Text = ""
    offset: U32 = 0


class Evict(Request, tag=43, frozen=True):
    """Evict up to this many unpinned blocks, least recently used first. Answer: how many went."""

    namespace_id: U16
    num_blocks: NumReserve


class CountReply(Reply, tag=43, frozen=True):
    """How many."""

    count: int


class Drain(Request, tag=44, frozen=True):
    """Take no new session and reserve nothing from now on.

    With `stop`, end when the workers are gone or the deadline passes. With `hand_over` too, end at
    once and keep the pool, with or without workers: a successor waits for it.
    """

    stop: bool
    timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    hand_over: bool = False
    successor_pid: U32 = 0
    """Who waits, for the log; 0: not told."""


Limit = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""-1: stays as it is; 0: no limit."""


class SetLimits(Request, tag=45, frozen=True):
    """Change limits until the daemon ends; what is held already stays. Answer: those in force."""

    max_reserved_blocks_per_session: Limit = -1
    max_pins_per_session: Limit = -1
    max_leases_per_session: Limit = -1
    """0: as many as the protocol allows."""
    max_reserved_blocks_per_namespace: Limit = -1
    max_pins_per_namespace: Limit = -1
    max_sessions: Limit = -1
    """0: as many as the protocol allows. Who is connected stays."""


class LimitsReply(Reply, tag=45, frozen=True):
    """The limits in force, by the names of `SetLimits`; 0 is none."""

    limits: dict[str, int]


class Trace(Request, tag=46, frozen=True):
    """Record control messages, requests and replies, into a file of the runtime directory.

    It ends by itself after `seconds` or `max_bytes`. One recording at a time.
    """

    action: Literal["start", "stop", "look"]
    seconds: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    max_bytes: Annotated[int, Meta(ge=1, le=limits.MAX_TRACE_BYTES)] = 64 * limits.MIB


class TraceReply(Reply, tag=46, frozen=True):
    """How the recording stands; of the last one when none runs."""

    path: str
    is_recording: bool
    messages: int
    recorded_bytes: int
    dropped: int
    """Messages that came faster than they could be written."""
    error: str
    """Why it ended early; empty otherwise."""


class Overview(Request, tag=47, frozen=True):
    """What `hisparse-service top` and the page show: occupancy, rates, sessions, events.

    Made by another thread about once a second; answered by a `StatusReply`, empty before the first.
    """


# --- errors and events --------------------------------------------------------------------------


class ErrorReply(Reply, tag=99, frozen=True):
    """A typed error: `errors.from_wire` makes it again on the other side."""

    code: str
    message: str
    remedy: str
    details: dict[str, Detail]


class EpochEvent(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Topic `epoch`: the daemon started; sent now and then, so that a late subscriber learns it."""

    epoch: int
    instance: str


class PublishedEvent(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Topic `published`: blocks became readable."""

    epoch: int
    namespace_id: int
    blocks: bytes
    generations: bytes
    keys: bytes


class EvictedEvent(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Topic `evicted`: blocks are no longer readable."""

    epoch: int
    namespace_id: int
    blocks: bytes
    keys: bytes


Event = EpochEvent | PublishedEvent | EvictedEvent
TOPIC_EPOCH: Final = b"epoch"
TOPIC_PUBLISHED: Final = b"published"
TOPIC_EVICTED: Final = b"evicted"

REQUEST_TYPES: Final[Mapping[int, type[Request]]] = {
    cast("int", request_type.__struct_config__.tag): request_type
    for request_type in (
        Hello, Ping, Bye, OpenNamespace, AllocateBacking, TakeWriter, YieldWriter,
        RegistrationTurn, Reserve, Lookup, Pin, Unpin, MirrorBatch, Abandon, Free, ReleaseLeases,
        Reclaim, ReportDamage, OfferEvents, FetchEvents, AllocateDeviceBacking,
        ReleaseDeviceBacking, Status, Sessions, ListBlocks, Evict, Drain, SetLimits, Trace,
        Overview,
    )
}  # fmt: skip
AnyReply = (
    HelloReply | Pong | Done | NamespaceReply | BackingReply | LeaseReply | TurnReply | BlocksReply
    | MirrorReply | DamageReply | EventsReply | DeviceBackingReply | StatusReply | ListReply
    | CountReply | LimitsReply | TraceReply | ErrorReply
)  # fmt: skip


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """What is read of a request that cannot be read, so that its answer names it."""

    tag: int
    request_id: U64


_REQUEST_DECODER: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(
    cast("type[Request]", Union[tuple(REQUEST_TYPES.values())])  # noqa: UP007  made at run time
)
_HEAD_DECODER: Final = msgspec.msgpack.Decoder(_Head)
_REPLY_DECODER = msgspec.msgpack.Decoder(AnyReply)
_EVENT_DECODER = msgspec.msgpack.Decoder(Event)
_ENCODER = msgspec.msgpack.Encoder()
_U32_VALUES: Final = np.dtype("<u4")
_U64_VALUES: Final = np.dtype("<u8")


def encode(message: Request | Reply | Event) -> bytes:
    """The frame of a message."""
    return _ENCODER.encode(message)


def decode_request(frame: bytes) -> Request:
    """Read a request that came over the socket.

    Raises:
        MessageTooLarge: The frame is longer than MAX_MESSAGE_BYTES.
        MalformedMessage: Not MessagePack, no known tag, a field of the wrong type or range. Its
            details carry ``request_id`` where that much could be read, for the answer.
    """
    if len(frame) > limits.MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"the message has {len(frame)} bytes, at most {limits.MAX_MESSAGE_BYTES} are read",
            remedy="Split it: fewer keys or blocks a message",
            limit_bytes=limits.MAX_MESSAGE_BYTES, message_bytes=len(frame),
        )  # fmt: skip
    try:
        return _REQUEST_DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(frame, error) from error


def _refused(frame: bytes, error: Exception) -> MalformedMessage:
    try:
        head = _HEAD_DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _malformed(f"not a request of the protocol ({error})")
    request_type = REQUEST_TYPES.get(head.tag)
    if request_type is None:
        return _malformed(f"no request has the tag {head.tag}", request_id=head.request_id)
    return MalformedMessage(
        f"{request_type.__name__}: {_by_name(request_type, str(error))}",
        remedy="Correct this field; a daemon of another version may have other bounds",
        request_id=head.request_id,
    )


def _by_name(request_type: type[Request], complaint: str) -> str:
    """A complaint of msgspec's with the field's name, where it counts places in the array."""

    def name(found: re.Match[str]) -> str:
        fields = request_type.__struct_fields__
        place = int(found[1]) - 1  # the tag comes first
        return f"`{fields[place]}{found[2]}`" if 0 <= place < len(fields) else found[0]

    return re.sub(r"`\$\[(\d+)\](.*?)`", name, complaint)


def _malformed(what: str, **details: Detail) -> MalformedMessage:
    return MalformedMessage(
        what, remedy="The two sides speak different protocols, or the frame is damaged", **details
    )


ReplyT = TypeVar("ReplyT", bound=Reply)


def decode_reply(frame: bytes) -> Reply:
    """Read a reply. An `ErrorReply` is returned, not raised: see `raise_for_error`.

    Raises:
        MalformedMessage: The daemon sent something that is not a reply.
    """
    try:
        return _REPLY_DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _malformed(f"not a reply of the protocol ({error})") from error


def decode_event(frame: bytes) -> Event:
    """Read an event of the PUB socket.

    Raises:
        MalformedMessage: It is none.
    """
    try:
        return _EVENT_DECODER.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _malformed(f"not an event of the protocol ({error})") from error


def error_reply(request_id: int, epoch: int, error: HiSparseError) -> ErrorReply:
    """The reply that carries an error to the other side."""
    return ErrorReply(
        request_id=request_id, epoch=epoch, code=error.code, message=error.message,
        remedy=error.remedy, details=error.details,
    )  # fmt: skip


def raise_for_error(reply: Reply) -> None:
    """Raise the error an `ErrorReply` carries; do nothing for other replies."""
    if isinstance(reply, ErrorReply):
        raise from_wire(reply.code, reply.message, reply.remedy, reply.details)


def u32_array(data: bytes, *, what: str) -> npt.NDArray[np.uint32]:
    """View raw little-endian u32 (blocks, generations).

    Raises:
        MalformedMessage: The length is not a multiple of 4.
    """
    if len(data) & 3:
        raise _no_whole_number(data, 4, what)
    return np.frombuffer(data, _U32_VALUES)


def u64_array(data: bytes, *, what: str) -> npt.NDArray[np.uint64]:
    """View raw little-endian u64 (checksums).

    Raises:
        MalformedMessage: The length is not a multiple of 8.
    """
    if len(data) & 7:
        raise _no_whole_number(data, 8, what)
    return np.frombuffer(data, _U64_VALUES)


def num_keys(keys: bytes) -> int:
    """How many keys these bytes are.

    Raises:
        MalformedMessage: The length is not a multiple of 16.
    """
    if len(keys) % limits.BLOCK_KEY_BYTES:
        raise _malformed(
            f"keys take {limits.BLOCK_KEY_BYTES} bytes each, got {len(keys)} bytes in all"
        )
    return len(keys) // limits.BLOCK_KEY_BYTES


def event_handles(data: bytes) -> list[bytes]:
    """Split the handles of events.

    Raises:
        MalformedMessage: The length is not a multiple of 64.
    """
    width = limits.EVENT_HANDLE_BYTES
    if len(data) % width:
        raise _malformed(f"event handles take {width} bytes each, got {len(data)} bytes in all")
    return [data[start : start + width] for start in range(0, len(data), width)]


def _no_whole_number(data: bytes, width: int, what: str) -> MalformedMessage:
    return _malformed(f"{what}: {len(data)} bytes are no whole number of {width} B values")
