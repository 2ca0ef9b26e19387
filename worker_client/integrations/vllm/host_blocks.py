"""The scheduler's share of the service's directory: what it reserved, pinned and published.

One lease holds everything. Changes are collected and sent once a scheduler step: at most one
MirrorBatch, one Unpin and one Abandon. Only `reserve` and `lookup`, which a new request needs, are
answered at once; neither waits for a daemon that is away.

Publication keeps duplicates: vLLM's block tables only grow, so that a block whose key another
engine published first stays this engine's own (reserved) and is given back when its last request
ends; the published one is pinned meanwhile, as the parent of what follows.

Reserved blocks that are given back may still be written by a copy that is under way in the worker:
they go to the daemon only when a transfer that was planned after they became free has completed
(the worker's copy stream runs in order).

Integers and bytes only; imports neither vLLM nor torch. On the scheduler's thread.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from hisparse_service.contract import limits
from hisparse_service.contract.errors import (
    CapacityError,
    HiSparseError,
    LeaseError,
    LeaseLost,
    ServiceUnavailable,
    UsageError,
)
from worker_client.blocks import BlockLease, LeaseState, U32Array, empty_blocks
from worker_client.client import Completed, HandedIn, MirrorOutcome, Namespace
from worker_client.integrations.vllm.settings import WhenAway

logger = logging.getLogger("vllm.hisparse_service")

_MAX_PER_MESSAGE: Final = 65_536
_ANSWER_TIMEOUT_S: Final = 1.0
"""How long the scheduler stands still when the daemon hangs without being known to be away."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one request whose host copies are complete."""

    blocks: list[int]
    keys: bytes
    """16 B a block."""
    parent: int
    """The request's block before the first one; 0 at the start of a prefix."""


class Totals(msgspec.Struct):
    """Counts since the start; only grow."""

    lookups: int = 0
    blocks_found: int = 0
    blocks_published: int = 0
    blocks_duplicate: int = 0
    blocks_unpublished: int = 0
    """Complete blocks that could not be published."""
    refused_reservations: int = 0


class HostBlocks:
    """See the module's header.

    Args:
        namespace: Attached by the workers; this process maps nothing.
        spare_blocks: How many reserved blocks to keep beyond what requests use.
        when_away: What `reserve` does while the daemon is away.
        away_limit_s: For `WhenAway.FAIL`.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        spare_blocks: int,
        when_away: WhenAway = WhenAway.WAIT,
        away_limit_s: float = 60.0,
    ) -> None:
        self.namespace = namespace
        self.totals = Totals()
        self.spare_blocks = spare_blocks
        self._when_away = when_away
        self._away_limit_s = away_limit_s
        self._away_since_s: float | None = None
        self._forget_from_s: float | None = 0.0
        self._lease: BlockLease = BlockLease(namespace, epoch=namespace.session_epoch)
        self._generations: dict[int, int] = {}
        """Of every block that is held, reserved or pinned."""
        self.pinned: set[int] = set()
        self._canonical: dict[int, int] = {}
        """Own duplicate to the published block of its key."""
        self._uses_of_canonical: collections.Counter[int] = collections.Counter()
        self._publications: list[Publication] = []
        self._waiting: set[int] = set()
        """Blocks of publications whose answer is outstanding."""
        self._unpublished: set[int] = set()
        """Held blocks whose children cannot be published either."""
        self._withdrawn: set[int] = set()
        """Pinned blocks that the daemon took away from everybody."""
        self._loose: set[int] = set()
        """Pinned blocks that maybe nobody needs."""
        self._returns: collections.deque[tuple[int, int]] = collections.deque()
        """(transfer that must complete first, block), in order."""

    @property
    def num_reserved(self) -> int:
        """Blocks that the engine may write."""
        return len(self._lease.reserved_blocks)

    # --- at once --------------------------------------------------------------------------------

    def reserve(self, needed: int) -> list[int]:
        """`needed` new blocks, and the spare ones with them where there are enough.

        Fewer, or none: they cannot be had now.

        Raises:
            ServiceUnavailable: Away for longer than the limit, with `WhenAway.FAIL`.
        """
        taken: list[int] = []
        extra = self.spare_blocks
        while len(taken) < needed:
            wanted = min(needed - len(taken) + extra, limits.MAX_RESERVE_BLOCKS)
            try:
                blocks = self._reserve(wanted)
            except CapacityError:
                if extra:
                    extra = 0
                    continue
                break
            except ServiceUnavailable as error:
                self._note_away(error)
                break
            self._away_since_s = None
            taken += blocks
        if len(taken) < needed:
            self.totals.refused_reservations += 1
        return taken

    def _reserve(self, wanted: int) -> list[int]:
        # The last ones of the lease are the new ones. While the request waited, blocks that were
        # published in the background left the lease before them.
        with self.namespace.session_lock:
            self.namespace.reserve(wanted, lease=self._lease, timeout_s=self._timeout_s())
            blocks = self._lease.reserved_blocks[-wanted:]
            self._remember(blocks, self._lease.reserved_generations[-wanted:])
        return [int(block) for block in blocks]

    def lookup(self, keys: bytes) -> list[int]:
        """Blocks of the longest published prefix of `keys`, pinned. Empty while it is away."""
        if not keys or not self.namespace.is_daemon_there:
            return []
        self.totals.lookups += 1
        try:
            blocks, generations = self.namespace.lookup_into(
                self._lease, keys, timeout_s=_ANSWER_TIMEOUT_S
            )
        except (ServiceUnavailable, CapacityError):
            return []
        self._remember(blocks, generations)
        found = [int(block) for block in blocks]
        self.pinned.update(found)
        self._loose.update(found)
        self.totals.blocks_found += len(found)
        return found

    def take_lost(self) -> set[int]:
        """Reserved blocks that a new daemon did not give back: nobody may write them any more.

        Raises:
            LeaseLost: The whole lease is lost, pins included; the engine cannot go on.
        """
        lease = self._lease
        if lease.state is not LeaseState.GRANTED:
            raise LeaseLost(
                f"the engine's lease was {lease.state.value}: the service gave its blocks up",
                remedy="Restart the engine; it finds what is still published",
            )
        if not len(lease.lost_blocks):
            return set()
        lost = set(lease.lost_blocks.tolist())
        lease.lost_blocks = empty_blocks()
        self._returns = collections.deque(item for item in self._returns if item[1] not in lost)
        self._forget(list(lost))
        return lost

    # --- collected, and sent once a step --------------------------------------------------------

    def publish(self, publication: Publication) -> None:
        """Publish with the next `flush_publications`."""
        self._publications.append(publication)
        self._waiting.update(publication.blocks)

    def is_waiting(self, block: int) -> bool:
        """Whether a publication of this block was not answered yet."""
        return block in self._waiting

    def is_needed(self, block: int) -> bool:
        """Whether a pinned block stands in for an own duplicate that is in use."""
        return self._uses_of_canonical[block] > 0

    def take_loose(self) -> set[int]:
        """Pinned blocks that maybe nobody needs, since the last call."""
        loose, self._loose = self._loose, set()
        return loose

    def flush_publications(self) -> None:
        """Publish what was collected, in order; kept by the client while the daemon is away."""
        for handed_in in self.namespace.handed_in():
            self._note_handed_in(handed_in)
        pending, self._publications = self._publications, []
        for start in range(0, len(pending), limits.MAX_BATCH_ITEMS):
            self._publish_part(pending[start : start + limits.MAX_BATCH_ITEMS])

    def reuse(self, block: int) -> None:
        """An own block with a key, which no request uses, will be written again."""
        canonical = self._canonical.pop(block, None)
        if canonical is not None:
            self._uses_of_canonical[canonical] -= 1
            self._loose.add(canonical)
        self._unpublished.discard(block)

    def unpin(self, blocks: Sequence[int]) -> Sequence[int]:
        """Let published blocks go; returns those that went. None while the daemon is away."""
        if not blocks or not self.namespace.is_daemon_there:
            return ()
        part = blocks[:_MAX_PER_MESSAGE]
        # Without an answer they are gone too: a daemon that hangs may let them go when it is back,
        # and evict them, and a request that took them for a hit would read another prefix's rows.
        with contextlib.suppress(ServiceUnavailable):
            self.namespace.unpin(self._lease, part, timeout_s=_ANSWER_TIMEOUT_S)
        self._forget(part)
        return part

    def distrust(self, blocks: Iterable[int]) -> None:
        """Rows of these held blocks are wrong: nothing is published below them any more."""
        self._unpublished.update(block for block in blocks if block in self._generations)

    def forget(self, blocks: Sequence[int]) -> Sequence[int]:
        """Let published blocks go whose rows are wrong: nobody shall find them again.

        Returns those that went; none while the daemon is away: they are to be asked for again.
        The daemon is told first, and takes away from everybody what it finds damaged itself. A
        block that has no checksum, which is what this engine publishes, stays published as long as
        another engine reads it.
        """
        pinned = [block for block in blocks if block in self.pinned]
        if pinned:
            if not self.namespace.is_daemon_there:
                self._forget_from_s = None
                return ()
            if self._forget_from_s is None:
                # A daemon that adopted the pool holds what was read, and would forget nothing;
                # twice, because it sweeps only now and then.
                self._forget_from_s = time.monotonic() + 2 * limits.ADOPTION_GRACE_S
            if time.monotonic() < self._forget_from_s:
                return ()
            try:
                self._report(pinned)
                self.namespace.free(self._lease, pinned)
            except ServiceUnavailable:
                return ()
            except (UsageError, LeaseError) as error:  # carried out before, without an answer
                logger.warning("hisparse-service: %s", error)
            self._forget(pinned)
        return blocks

    def _report(self, blocks: Sequence[int]) -> None:
        with contextlib.suppress(UsageError):  # what it is said of is let go in any case
            self.namespace.report_damage(
                blocks, [self._generations[block] for block in blocks],
                timeout_s=_ANSWER_TIMEOUT_S,
            )  # fmt: skip

    def take_withdrawn(self) -> set[int]:
        """Pinned blocks that the daemon found damaged since the last call: no hits any more.

        Requests that read them already go on: they stay pinned, so that they are nobody else's,
        until `forget` lets them go.
        """
        lost = self.namespace.take_lost_pins()
        if not lost:
            return set()
        held = {block for block, of in lost.items() if self._generations.get(block) == of}
        for block in lost.keys() - held:  # of a lookup that they were cut from
            with contextlib.suppress(ServiceUnavailable, UsageError, LeaseError):
                self.namespace.unpin(self._lease, [block], timeout_s=_ANSWER_TIMEOUT_S)
        new = held - self._withdrawn
        if new:
            logger.error(
                "hisparse-service: %d published blocks were found damaged (the first is %d); "
                "requests that read them may have wrong results",
                len(new), min(new),
            )  # fmt: skip
        self._withdrawn |= new
        self.distrust(new)
        return new

    def evict_unused(self) -> None:
        """Every published block of the namespace that nobody reads goes, other engines' too."""
        try:
            self.namespace.evict()
        except HiSparseError as error:
            logger.warning("hisparse-service: published blocks stay: %s", error)

    def give_back(self, blocks: Iterable[int], *, fence: int) -> None:
        """Reserved blocks that the engine does not want any more.

        Args:
            blocks: Theirs.
            fence: Number of a transfer that was not planned yet: when it, or a later one, has
                completed, so have all copies into these blocks.
        """
        self._returns.extend((fence, block) for block in blocks)

    def flush_returns(self, *, completed_fence: int) -> None:
        """Send the blocks that may go: those whose fence is below this."""
        if not self.namespace.is_daemon_there:
            return
        part: list[int] = []
        while self._returns and self._returns[0][0] < completed_fence:
            part.append(self._returns.popleft()[1])
            if len(part) == _MAX_PER_MESSAGE:
                break
        if not part:
            return
        try:
            self.namespace.abandon(self._lease, part, timeout_s=_ANSWER_TIMEOUT_S)
        except ServiceUnavailable:
            pass  # the client asks again, unless they were reserved anew meanwhile
        except (UsageError, LeaseError) as error:
            logger.warning("hisparse-service: %s", error)
        self._forget(part)

    # --- small parts ----------------------------------------------------------------------------

    def _publish_part(self, part: list[Publication]) -> None:
        completed = [item for item in map(self._completed, part) if item is not None]
        if not completed:
            return
        try:
            result = self.namespace.mirror(completed=completed, timeout_s=_ANSWER_TIMEOUT_S)
        except (UsageError, CapacityError) as error:
            if len(completed) > 1:
                # One refused item refuses the message: the others are not to blame.
                for publication in part:
                    self._publish_part([publication])
                return
            logger.warning("hisparse-service: blocks stay unpublished: %s", error)
            self._give_up(completed[0].blocks.tolist())
            return
        if result.outcome is MirrorOutcome.QUEUED:
            return
        at = 0
        for item in completed:
            end = at + len(item.blocks)
            self._note_published(
                item, result.canonical_blocks[at:end], result.canonical_generations[at:end]
            )
            at = end

    def _completed(self, publication: Publication) -> Completed | None:
        parent = self._canonical.get(publication.parent, publication.parent)
        needed = [*publication.blocks, parent] if parent else publication.blocks
        held = all(block in self._generations for block in needed)
        if not held or parent in self._unpublished:
            self._give_up(publication.blocks)
            return None
        blocks = np.array(publication.blocks, np.uint32)
        return Completed(
            lease=self._lease, blocks=blocks, generations=self._generations_of(blocks),
            keys=publication.keys, parent=parent,
            parent_generation=self._generations[parent] if parent else 0, keep_duplicates=True,
        )  # fmt: skip

    def _note_published(self, item: Completed, canonical: U32Array, generations: U32Array) -> None:
        self._remember(canonical, generations)
        for own, published in zip(item.blocks.tolist(), canonical.tolist(), strict=True):
            self.pinned.add(published)
            self._waiting.discard(own)
            if own == published:
                self.totals.blocks_published += 1
                continue
            self.totals.blocks_duplicate += 1
            self._canonical[own] = published
            self._uses_of_canonical[published] += 1

    def _note_handed_in(self, handed_in: HandedIn) -> None:
        item = handed_in.completed
        if handed_in.canonical_blocks is None or handed_in.canonical_generations is None:
            self._give_up(item.blocks.tolist())
        else:
            self._note_published(item, handed_in.canonical_blocks, handed_in.canonical_generations)

    def _give_up(self, blocks: Sequence[int]) -> None:
        self._waiting.difference_update(blocks)
        self._unpublished.update(blocks)
        self.totals.blocks_unpublished += len(blocks)

    def _remember(self, blocks: U32Array, generations: U32Array) -> None:
        self._generations.update(zip(blocks.tolist(), generations.tolist(), strict=True))

    def _forget(self, blocks: Sequence[int]) -> None:
        self.pinned.difference_update(blocks)
        self._withdrawn.difference_update(blocks)
        self._unpublished.difference_update(blocks)  # the ids come back with other content
        for block in blocks:
            self._generations.pop(block, None)

    def _generations_of(self, blocks: U32Array) -> U32Array:
        return np.array([self._generations[block] for block in blocks.tolist()], np.uint32)

    def _timeout_s(self) -> float:
        # A daemon that is known to be away is not waited for on the scheduler's thread.
        return _ANSWER_TIMEOUT_S if self.namespace.is_daemon_there else 0.0

    def _note_away(self, error: HiSparseError) -> None:
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._away_since_s = now_s
            logger.warning("hisparse-service: no new host blocks: %s", error)
        elif self._when_away is WhenAway.FAIL and now_s - self._away_since_s > self._away_limit_s:
            raise ServiceUnavailable(
                f"the service is away for {now_s - self._away_since_s:.0f} s and requests wait "
                "for host blocks",
                remedy="Start hisparse-service again; this engine ends so that traffic moves on",
                away_s=now_s - self._away_since_s,
            ) from error
