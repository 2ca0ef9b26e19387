"""Checks of blocks that readers reported as damaged: the daemon believes what it reads itself.

A helper thread reads a block through the segment's descriptor and compares it with the checksum
that its writer gave. Reading may wait (for a page in swap, for memory that an error took: the
system call fails where a mapped access would end the daemon), which the control loop never does.
What came of it is applied on the loop, where the block must still be published in the generation
that was read: nobody writes into such a block, so its bytes were the same all the time.

One check serves all who report the same block meanwhile, and goes on when they are gone. A daemon
that dies forgets its reports: the block is found again, and so is its damage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from hisparse_service.contract.checksum import Verdict, block_extents, content_checksum
from hisparse_service.contract.errors import HiSparseError
from hisparse_service.contract.limits import MAX_BLOCKS_IN_CHECK, MIB, WITHDRAW_SLICE_BLOCKS
from hisparse_service.contract.segment import BackingRecord
from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.directory import Directory
from hisparse_service.directory.results import Suspect, U32Array
from hisparse_service.directory.subtree import find_below
from hisparse_service.pool.pool import Pool
from hisparse_service.telemetry.logs import get_logger

if TYPE_CHECKING:
    from hisparse_service.server.state import NamespaceEntry

_READ_BYTES: Final = MIB
_IDLE_INTERVAL_S: Final = 1.0
_LOOP_ANSWER_S: Final = 0.2
"""How often a helper that waits for the loop looks whether it shall stop."""

OnVerdict = Callable[[Verdict], None]
"""Called on the control loop."""

log = get_logger()


@dataclass(slots=True, eq=False)
class _Check:
    """One block, from its first report to the end of its withdrawal."""

    entry: NamespaceEntry
    record: BackingRecord
    """Of the backing, and not the backing: a view of the pool would keep it open at the end."""
    pool: Pool
    directory: Directory
    columns: BlockColumns
    suspect: Suspect
    on_verdict: list[OnVerdict] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        """What the same report of another reader has too."""
        return self.entry.namespace_id, self.suspect.block, self.suspect.generation


class BlockChecks:
    """Waiting and running checks. Control loop only, but for `run`.

    Args:
        call_soon: Has the loop call something; from any thread.
    """

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], None] = lambda callback: callback()
    ) -> None:
        self._call_soon = call_soon
        self._queue: SimpleQueue[_Check | None] = SimpleQueue()
        self._checks: dict[tuple[int, int, int], _Check] = {}

    # --- control loop -----------------------------------------------------------------------

    def report(
        self,
        pool: Pool,
        directory: Directory,
        entry: NamespaceEntry,
        handle: tuple[int, int],
        on_verdict: OnVerdict,
    ) -> None:
        """Have a (block, generation) checked; `on_verdict` is called once, maybe at once."""
        namespace_id = entry.namespace_id
        found = directory.suspect(namespace_id, *handle)
        known = self._checks.get((namespace_id, *handle))
        if isinstance(found, Suspect) and known is not None:
            known.on_verdict.append(on_verdict)
            return
        if isinstance(found, Suspect) and len(self._checks) >= MAX_BLOCKS_IN_CHECK:
            found = Verdict.NOT_CHECKED
        if isinstance(found, Verdict):
            directory.count_check(namespace_id, found)
            on_verdict(found)
            return
        assert entry.backing is not None
        check = _Check(
            entry, entry.backing.record, pool, directory, directory.columns(namespace_id), found,
            [on_verdict],
        )  # fmt: skip
        self._checks[check.key] = check
        self._queue.put(check)

    def close(self) -> None:
        """Wake the helper, so that it sees that it shall stop. Any thread."""
        self._queue.put(None)

    def _is_current(self, check: _Check) -> bool:
        """Whether the namespace still has the backing that was read."""
        backing = check.entry.backing
        return backing is not None and backing.record is check.record

    def _withdraw(self, check: _Check, below: tuple[U32Array, U32Array]) -> bool:
        suspect, namespace_id = check.suspect, check.entry.namespace_id
        if not self._is_current(check):
            return False
        before = check.directory.statistics(namespace_id).withdrawn
        if not check.directory.withdraw(
            namespace_id, suspect.block, suspect.generation, below=below
        ):
            return False
        log.error(
            "block_damaged", namespace=namespace_id, name=check.entry.name, block=suspect.block,
            generation=suspect.generation, record_damaged=suspect.is_record_damaged,
            withdrawn=check.directory.statistics(namespace_id).withdrawn - before,
        )  # fmt: skip
        return True

    def _settle(self, check: _Check, verdict: Verdict) -> None:
        if self._checks.pop(check.key, None) is None:
            return  # settled with its withdrawal
        if self._is_current(check):
            check.directory.count_check(check.entry.namespace_id, verdict)
        for on_verdict in check.on_verdict:
            on_verdict(verdict)

    # --- helper thread ----------------------------------------------------------------------

    def run(self, stopping: threading.Event) -> None:
        """Check what is reported until `stopping` is set."""
        while not stopping.is_set():
            try:
                check = self._queue.get(timeout=_IDLE_INTERVAL_S)
            except Empty:
                continue
            if check is not None:
                self._run_one(check, stopping)

    def _run_one(self, check: _Check, stopping: threading.Event) -> None:
        verdict = Verdict.UNVERIFIABLE
        try:
            verdict = _compare(check)
            if verdict is Verdict.DAMAGED:
                self._take_away(check, stopping)
        finally:
            # Also where this thread dies of a bug: somebody waits for an answer.
            self._call_soon(lambda: self._settle(check, verdict))

    def _take_away(self, check: _Check, stopping: threading.Event) -> None:
        """Withdraw the block with a first slice of those below it, then the others in slices.

        Once the block is gone nobody new comes below it but from engines that read there already;
        those come to an end too, because what they hang their blocks to goes.
        """
        namespace_id, suspect, size = check.entry.namespace_id, check.suspect, WITHDRAW_SLICE_BLOCKS
        blocks, generations = find_below(check.columns, suspect.block)

        def begin() -> None:
            is_gone = self._withdraw(check, (blocks[:size], generations[:size]))
            self._settle(check, Verdict.DAMAGED if is_gone else Verdict.STALE)

        self._on_loop(begin, stopping)
        at = size
        while not stopping.is_set():
            if at >= len(blocks):
                if check.columns.generation_view[suspect.block] != suspect.generation:
                    return
                blocks, generations = find_below(check.columns, suspect.block)
                at = 0
                if not len(blocks):
                    return
            part = blocks[at : at + size], generations[at : at + size]
            at += size

            def go_on(part: tuple[U32Array, U32Array] = part) -> None:
                if self._is_current(check):
                    check.directory.withdraw_below(namespace_id, part)

            self._on_loop(go_on, stopping)

    def _on_loop(self, callback: Callable[[], None], stopping: threading.Event) -> None:
        """Have the loop call this, and wait until it has: slices come one by one."""
        done = threading.Event()

        def call() -> None:
            callback()
            done.set()

        self._call_soon(call)
        while not done.wait(_LOOP_ANSWER_S) and not stopping.is_set():
            pass


def _compare(check: _Check) -> Verdict:
    if check.suspect.is_record_damaged:
        return Verdict.DAMAGED
    record = check.record
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        found = content_checksum(
            part
            for offset, length in block_extents(
                check.entry.geometry, record.num_blocks, check.suspect.block
            )
            for part in _parts(check.pool, record.payload_offset_bytes + offset, length, buffer)
        )
    except (OSError, HiSparseError) as error:
        log.warning(
            "block_unreadable", namespace=check.entry.namespace_id, block=check.suspect.block,
            error=str(error),
        )  # fmt: skip
        return Verdict.UNVERIFIABLE
    return Verdict.SOUND if found == check.suspect.checksum else Verdict.DAMAGED


def _parts(pool: Pool, start: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
    """The segment's bytes, a buffer at a time."""
    while length > 0:
        part = buffer[: min(length, len(buffer))]
        pool.read_into(part, offset_bytes=start)
        yield part
        start += len(part)
        length -= len(part)
