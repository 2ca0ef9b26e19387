"""What the parts of one namespace share: its number with this daemon, its pool, how it asks.

`NamespaceLink` sends the requests of one namespace and notes their answers in its leases. It is the
one place where a namespace that a new daemon does not serve (`broken`) refuses requests, and where
block ids of the daemon are checked before an array is indexed by them (I8).

What stands here changes with `Session.lock` held; whoever builds a request reads `namespace_id` and
`live_id` in the function that builds it, which is called again for a new session.
"""

from __future__ import annotations

import time

import numpy.typing as npt

from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    ForeignSegment,
    HiSparseError,
    InternalError,
    LeaseError,
    ServiceUnavailable,
    UsageError,
)
from hisparse_service.contract.geometry import HostGeometry, encode_geometry
from hisparse_service.contract.keys import key_space
from hisparse_service.contract.messages import (
    Abandon,
    AllocateBacking,
    BlocksReply,
    Done,
    NamespaceReply,
    OpenNamespace,
    Pin,
    Request,
    Unpin,
    u32_array,
)
from worker_client.blocks import BlockLease, U32Array, as_blocks
from worker_client.host_pool import HostPool
from worker_client.late import Late, Part
from worker_client.lease_book import LeaseBook
from worker_client.session import BuildRequest, ReplyT, Session, WhenAway

__all__ = ["NamespaceLink", "count_refused", "keys_refused", "live_id", "other_segment", "raw"]


class NamespaceLink:
    """One namespace's side of the session. Made by `Namespace`.

    Args:
        session: Of the client; borrowed.
        leases: All leases of the client; borrowed.
        name: For people.
        fingerprint: 16 B: what may share blocks.
        geometry: Shape of the blocks.

    Attributes:
        namespace_id: The daemon's number for it in this epoch.
        pool: The mapped backing; None before `Attachment.attach`.
        broken: Why the present daemon does not serve it; None: it does.
    """

    def __init__(
        self,
        session: Session,
        leases: LeaseBook,
        *,
        name: str,
        fingerprint: bytes,
        geometry: HostGeometry,
    ) -> None:
        self.session = session
        self.leases = leases
        self.counters = session.counters
        self.name = name
        self.fingerprint = fingerprint
        self.geometry = geometry
        self.key_space = key_space(fingerprint)
        self.namespace_id = 0
        self.pool: HostPool | None = None
        self.broken: HiSparseError | None = None
        self.given_up: set[tuple[int, int]] = set()
        """(block, generation) that was withdrawn, and whose holder knows."""

    # --- requests -------------------------------------------------------------------------------

    def open(self, *, timeout_s: float | None = None) -> None:
        """Tell the daemon of this namespace; learns its number in this epoch."""
        self.namespace_id = self.session.request(
            lambda request_id: OpenNamespace(
                request_id, self.fingerprint, self.name, encode_geometry(self.geometry)
            ),
            NamespaceReply,
            timeout_s=timeout_s,
        ).namespace_id

    def request(
        self,
        build: BuildRequest,
        reply_type: type[ReplyT],
        *,
        timeout_s: float | None = None,
        when_away: WhenAway = WhenAway.WAIT,
    ) -> ReplyT:
        """`Session.request`, unless the namespace is broken: then that is raised."""
        if self.broken is not None:
            raise self.broken
        return self.session.request(build, reply_type, timeout_s=timeout_s, when_away=when_away)

    def request_blocks(
        self,
        build: BuildRequest,
        part: Part,
        *,
        timeout_s: float | None,
        when_away: WhenAway = WhenAway.WAIT,
    ) -> BlocksReply:
        """A request whose blocks join a part of a lease; they go back if its answer is too late."""
        sent_id = 0

        def noted(request_id: int) -> Request:
            nonlocal sent_id
            request = build(request_id)
            sent_id = request_id
            return request

        try:
            return self.request(noted, BlocksReply, timeout_s=timeout_s, when_away=when_away)
        except BaseException:  # Ctrl-C too
            if sent_id:
                self.leases.late.give_up(sent_id, part)
            raise

    def pin(
        self, lease: BlockLease, blocks: bytes, generations: bytes, *, timeout_s: float | None
    ) -> None:
        """See `Namespace.pin`."""
        reply = self.request_blocks(
            lambda request_id: Pin(
                request_id, self.namespace_id, live_id(lease), blocks, generations
            ),
            "pinned",
            timeout_s=timeout_s,
        )
        self.take_blocks(lease, "pinned", reply)

    def give_back_late(self, late: Late) -> None:
        """Blocks that the daemon counts to a lease and that nobody was told of."""
        blocks = late.blocks.tobytes()

        def build(request_id: int) -> Request:
            lease_id = live_id(late.lease)
            if late.part == "reserved":
                return Abandon(request_id, self.namespace_id, lease_id, blocks)
            return Unpin(request_id, self.namespace_id, lease_id, blocks)

        try:
            self.request(build, Done, when_away=WhenAway.FAIL)
        except ServiceUnavailable:
            self.leases.late.took(late.lease, late.part, late.blocks)
        except (UsageError, LeaseError):
            pass  # they went with something else

    def backing_request(self, num_blocks: int) -> BuildRequest:
        """Builds the request for the backing."""
        return lambda request_id: AllocateBacking(request_id, self.namespace_id, num_blocks)

    # --- answers --------------------------------------------------------------------------------

    def take_blocks(self, lease: BlockLease, part: Part, reply: BlocksReply) -> None:
        """Add what an answer gave to a part of a lease."""
        blocks = self.checked_blocks(reply.blocks)
        lease._add(part, blocks, u32_array(reply.generations, what="generations"))
        self.note_lease(lease, reply)

    def note_lease(self, lease: BlockLease, reply: BlocksReply) -> None:
        """The id and deadline that an answer gave a lease."""
        if reply.lease_id:
            lease.epoch = reply.epoch
            lease.deadline_ns = reply.lease_deadline_ns
            self.note_deadline(reply.lease_deadline_ns)
            self.leases.remember(lease, reply.lease_id)

    def note_deadline(self, deadline_ns: int) -> None:
        """How long leases last, from a deadline that was given just now."""
        self.leases.note_ttl(deadline_ns - time.monotonic_ns())

    def checked_blocks(self, blocks: bytes) -> U32Array:
        """u32 [n]: ids that lie within the pool.

        Raises:
            InternalError: One does not.
        """
        array = u32_array(blocks, what="blocks")
        if self.pool is None or not len(array):
            return array
        highest = array.item() if len(array) == 1 else int(array.max())
        if highest >= self.pool.num_blocks:
            raise InternalError(
                f"the daemon named block {highest} of {self.pool.num_blocks}",
                block=highest, num_blocks=self.pool.num_blocks,
            )  # fmt: skip
        return array


def live_id(lease: BlockLease) -> int:
    """The lease's id. Asked while a request is built: a retry must not use a dead lease.

    Raises:
        LeaseError: It ended.
    """
    lease.require_granted()
    return lease.lease_id


def count_refused(what: str, num_blocks: int, limit: int) -> UsageError:
    """A number of blocks that no daemon is asked for."""
    return UsageError(
        f"{what}: {num_blocks} blocks, one request takes 1 to {limit}",
        remedy="Ask for fewer at once" if num_blocks > limit else "Ask for one block or more",
        limit=limit, value=num_blocks,
    )  # fmt: skip


def keys_refused(size_bytes: int) -> UsageError:
    """Keys that are no keys, or too many for one message."""
    width, limit = limits.BLOCK_KEY_BYTES, limits.MAX_KEYS
    if size_bytes % width:
        return UsageError(
            f"lookup: {size_bytes} bytes are no whole keys, each takes {width}",
            remedy="Give the keys of a KeyChain: `chain.keys(start, stop)`",
            limit=width, value=size_bytes,
        )  # fmt: skip
    return UsageError(
        f"lookup: {size_bytes // width} keys, one request takes {limit}",
        remedy="Look a part of the prefix up, then the rest (`start`, `stop`)",
        limit=limit, value=size_bytes // width,
    )  # fmt: skip


def raw(blocks: npt.ArrayLike) -> bytes:
    """Blocks or generations as they travel."""
    return as_blocks(blocks, "blocks and generations").tobytes()


def other_segment(name: str) -> ForeignSegment:
    """The daemon serves another segment than the one that is mapped."""
    return ForeignSegment(
        f"the daemon now serves another segment ({name}) than the one that is mapped here",
        remedy="The mapping stays as it is, but nothing in it is served: clean the pool up, attach "
        "again and capture CUDA graphs anew",
    )
