"""Greedy generation for several requests at once over a `TieredModel`: a small engine.

Each `step` computes one chunk of the first request that still has prompt to compute, then one token
of every request that has none, and ends with one message to the service at most. The order depends
on nothing but the calls, so the ranks of a tensor-parallel group that are called alike step alike.

A `Generator` owns the tiered model, the coordinator and the mirror queue; it borrows model and
namespace. Used on the worker's compute thread only.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hisparse_service.contract.errors import CapacityError, DeviceError, UsageError
from worker_client.client import CudaUse, Namespace
from worker_client.coordinator import (
    CoordinatorConfig,
    HiSparseCoordinator,
    PublishReport,
    Role,
)
from worker_client.events import EventDriver, PeerEvents, WriterEvents, WriterTracker
from worker_client.host_pool import HostPool
from worker_client.integrations.transformers import (
    Batch,
    DecodeMode,
    RowAudit,
    StepMode,
    TieredModel,
    TierSizes,
)
from worker_client.mirror import CompletionTracker, EventTracker, ImmediateTracker, MirrorQueue
from worker_client.requests import Admission, EndMode, PageMirror, StepPlan, StepWork
from worker_client.swap_report import SwapReporter

_POLL_S = 0.002
"""How often a step that waits for a publication asks again: a round trip takes 0.1 ms."""


class MirrorAudit(RowAudit, Protocol):
    """A `RowAudit` that is also told where pages go."""

    def mirrored(self, request_id: str, page: int, host_block: int) -> None:
        """This page is about to be copied to that host block."""
        ...

    def ended(self, request_id: str) -> None:
        """The request computes nothing more."""
        ...


class ContentChecks(enum.Enum):
    """Whether the bytes of host blocks are compared with checksums: 1 ms a MB, each time."""

    OFF = "off"
    ON = "on"
    """A writer gives what it publishes a checksum, and verifies a found prefix before it uses it.
    What is damaged later is found by whoever looks for it the next time."""


class StepWitness(Protocol):
    """Sees every step that counts, from outside the tiers. For checks; slow."""

    def admitted(self, request_id: str, request_slot: int, tokens: Sequence[int]) -> None:
        """A request has this slot now."""
        ...

    def applied(self, plan: StepPlan) -> None:
        """The next step's plan was carried out."""
        ...

    def stepped(self, batch: Batch, logits: torch.Tensor) -> None:
        """The batch was computed and its results are used.

        Args:
            batch: What was computed.
            logits: ``[B, vocab]``, as the model gave them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        request_id: Whose.
        token: Its id.
        logits: ``[vocab]``, on the CPU: what it was the greatest of.
        is_last: The request has ended.
    """

    request_id: str
    token: int
    logits: torch.Tensor
    is_last: bool


@dataclass(slots=True)
class _Sequence:
    slot: int
    tokens: list[int]
    """Prompt and generated ones."""
    left: int
    """Tokens still to generate."""


@dataclass(slots=True)
class _RowsMirrored:
    """Rows of a page that decode steps copied to its host block: ``first`` to before ``end``."""

    host_block: int
    first: int
    end: int


@dataclass(slots=True)
class GenerationStatistics:
    """Counts since the generator was made."""

    steps: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    recomputed_requests: int = 0
    """Requests that began anew because the service lost their blocks."""
    waits: int = 0
    """Times that a step had to wait for a publication."""
    longest_context: int = 0
    mirrored_rows: int = 0
    """Rows that decode steps copied to the host themselves."""


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions:
    """What a generator does beyond its sizes.

    Attributes:
        role: WRITER for the group's rank 0.
        num_host_blocks: Blocks of the namespace's backing, the null block included.
        cuda: Whether the host pool is registered with CUDA.
        wait_timeout_s: How long a step waits for a publication.
        decode: How decode steps are run. A writer's static steps mirror their rows themselves, so
            that a captured step does all its copies.
        audit: Sees all rows.
        witness: Makes what sees all steps.
        tracker: Tells when mirrors are complete; None for the device's own.
        content: Whether found prefixes are verified.
        event_driver: Shares the writer's events with the other ranks (see `events.py`), which then
            ask for its blocks when they are there. None: no sharing, everything else the same.
    """

    role: Role
    num_host_blocks: int
    cuda: CudaUse = CudaUse.AUTO
    wait_timeout_s: float = 30.0
    decode: DecodeMode = DecodeMode.DYNAMIC
    audit: MirrorAudit | None = None
    witness: Callable[[TieredModel], StepWitness] | None = None
    tracker: CompletionTracker | None = field(default=None)
    event_driver: EventDriver | None = None
    content: ContentChecks = ContentChecks.OFF


class Generator:
    """Requests of one rank, from prompt to last token.

    Args:
        model: `GlmMoeDsaForCausalLM` on its device, in evaluation mode.
        namespace: Opened with the model's geometry; attached here.
        sizes: Sizes of the tiers.
        options: See `GeneratorOptions`.
    """

    def __init__(
        self, model: Any, namespace: Namespace, sizes: TierSizes, options: GeneratorOptions
    ) -> None:
        self.statistics = GenerationStatistics()
        self.options = options
        self.host_pool: HostPool = namespace.attach(options.num_host_blocks, cuda=options.cuda)
        if options.role is Role.WRITER:
            namespace.take_writer()
        self._events = _share_events(namespace, options)
        self._mirrors_rows = (
            options.role is Role.WRITER and options.decode is not DecodeMode.DYNAMIC
        )
        self.tiers = TieredModel(
            model,
            self.host_pool,
            sizes,
            decode=options.decode,
            mirrors_rows=self._mirrors_rows,
            audit=options.audit,
        )
        self._witness = options.witness(self.tiers) if options.witness else None
        self.coordinator = HiSparseCoordinator(
            namespace,
            CoordinatorConfig(
                block_size=sizes.block_size,
                num_device_blocks=sizes.num_device_blocks,
                num_resident_groups=self.tiers.num_resident_groups,
                num_hot_groups=self.tiers.num_resident_groups,
                hot_blocks_per_request=self.tiers.hot_blocks_per_request,
                max_num_requests=sizes.max_num_requests,
                max_model_tokens=sizes.max_model_tokens,
                max_step_tokens=sizes.max_step_tokens,
            ),
            role=options.role,
            progress=self._events if isinstance(self._events, PeerEvents) else None,
            content=self.host_pool if options.content is ContentChecks.ON else None,
        )
        self._queue = MirrorQueue(
            num_units=self.tiers.num_mirror_units,
            block_size=sizes.block_size,
            tracker=options.tracker or self._make_tracker(),
            backend=self.tiers.backend,
        )
        self._reporter = SwapReporter(namespace.counters, self.tiers.swap_statistics)
        self.tiers.timed_swap = lambda: self._reporter.timed(self.tiers.device)
        self._sequences: dict[str, _Sequence] = {}
        self._mirrored: set[str] = set()
        """Requests that the mirror queue knows."""
        self._rows_mirrored: dict[tuple[str, int], _RowsMirrored] = {}
        """By request and page: pages that decode steps are filling."""

    def _make_tracker(self) -> CompletionTracker:
        if isinstance(self._events, WriterEvents):
            return WriterTracker(self._events, lambda: self.coordinator.statistics.steps)
        return EventTracker() if self.tiers.device.type == "cuda" else ImmediateTracker()

    # --- requests ---------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        num_hit_tokens: int | None = None,
    ) -> Admission:
        """Let a request in; see `HiSparseCoordinator.admit`.

        A name that was used before is free again when the last pages of its request are.
        """
        _check_prompt(prompt, self.tiers.model.config.vocab_size)
        if self.coordinator.knows(request_id) and request_id not in self._sequences:
            self._wait(
                lambda: not self.coordinator.knows(request_id),
                f"the last pages of {request_id!r} to be published",
            )
        admission = self.coordinator.admit(
            request_id,
            prompt,
            max_tokens=len(prompt) + max_new_tokens,
            num_hit_tokens=num_hit_tokens,
        )
        if self.options.role is Role.WRITER:
            first_block = admission.num_hit_tokens // self.tiers.sizes.block_size
            self._queue.open_request(request_id, first_block=first_block)
            self._mirrored.add(request_id)
        self._sequences[request_id] = _Sequence(
            admission.request_slot, list(prompt), max_new_tokens
        )
        if self._witness is not None:
            self._witness.admitted(request_id, admission.request_slot, prompt)
        return admission

    def preempt(self, request_id: str) -> list[int]:
        """Take a request off the device; returns its tokens so far, to be added again."""
        sequence = self._sequences.pop(request_id)
        self._end(request_id, EndMode.DISCARD)
        return sequence.tokens

    @property
    def num_requests(self) -> int:
        """Requests that still generate."""
        return len(self._sequences)

    # --- steps ------------------------------------------------------------------------------------

    def step(self) -> list[Token]:
        """Compute one prefill chunk and one token of each request past its prompt.

        Raises:
            CapacityError: No device room for the step, and no publication made some in time.

        A request whose blocks are gone from the pool begins anew; the step's results are not used.
        """
        tokens: list[Token] = []
        chunk = self._next_chunk()
        if chunk is not None:
            tokens += self._run(chunk)
        decode = self._next_decode(skip={token.request_id for token in tokens})
        if decode is not None:
            tokens += self._run(decode)
        self.settle()
        self._reporter.tick()
        if self._events is not None:
            self._events.tick()
        self.statistics.steps += 1
        return tokens

    def settle(self) -> PublishReport:
        """Pass on what completed: from the mirror queue to the coordinator, and to the service."""
        for block in self._queue.poll():
            self.coordinator.completed(str(block.request), block.block_index)
        self.coordinator.dropped(self._queue.poll_dropped())
        report = self.coordinator.publish()
        for recalled in report.recalled:
            # A new daemon lost what was on its way: the queue begins anew behind what is published.
            self._queue.drop_request(recalled.request_id)
            self._queue.open_request(recalled.request_id, first_block=recalled.first_page)
            self._queue.accept(recalled.request_id, recalled.num_tokens)
        self._mirror(report.mirrors)
        for request_id in [name for name in self._mirrored if name not in self._sequences]:
            if not self.coordinator.knows(request_id):
                self._queue.drop_request(request_id)
                self._mirrored.discard(request_id)
        return report

    def drain(self) -> None:
        """Wait until the last pages of ended requests are published.

        Raises:
            CapacityError: They are not, in time.
        """
        self._wait(lambda: self.coordinator.num_finishing == 0, "the last pages to be published")

    def close(self) -> None:
        """Give everything back, in the order of use. Idempotent."""
        try:
            self._reporter.report()
        finally:
            if self._events is not None:
                self._events.close()
            self.coordinator.close()
            self.tiers.close()

    def _next_chunk(self) -> Batch | None:
        for request_id, sequence in self._sequences.items():
            start = self.coordinator.num_computed_tokens(request_id)
            if len(sequence.tokens) - start > 1 or start == 0:
                end = start + self.tiers.sizes.max_step_tokens
                return self._batch(
                    StepMode.PREFILL, {request_id: tuple(sequence.tokens[start:end])}
                )
        return None

    def _next_decode(self, *, skip: set[str]) -> Batch | None:
        last: dict[str, tuple[int, ...]] = {
            request_id: (sequence.tokens[-1],)
            for request_id, sequence in self._sequences.items()
            if request_id not in skip
            and self.coordinator.num_computed_tokens(request_id) == len(sequence.tokens) - 1 > 0
        }
        return self._batch(StepMode.DECODE, last) if last else None

    def _batch(self, mode: StepMode, tokens: dict[str, tuple[int, ...]]) -> Batch:
        return Batch(
            mode=mode,
            request_ids=tuple(tokens),
            request_slots=tuple(self._sequences[name].slot for name in tokens),
            starts=tuple(self.coordinator.num_computed_tokens(name) for name in tokens),
            tokens=tuple(tokens.values()),
        )

    def _with_host_slots(self, batch: Batch) -> Batch:
        """Say where a decode step mirrors its rows, once the step's pages are prepared."""
        if not self._mirrors_rows or batch.mode is not StepMode.DECODE:
            return batch
        size = self.tiers.sizes.block_size
        host_slots: list[int] = []
        for request_id, start in zip(batch.request_ids, batch.starts, strict=True):
            page = self.coordinator.pages(request_id)[start // size]
            is_ours = page.host_block and request_id in self._mirrored and not page.is_published
            host_slots.append(page.host_block * size + start % size if is_ours else -1)
        return replace(batch, host_slots=tuple(host_slots))

    def _run(self, batch: Batch) -> list[Token]:
        self._prepare(batch)
        batch = self._with_host_slots(batch)
        # What the step copied to the host is complete with its logits: no block that it wrote to
        # can be given away while a copy is under way.
        on_device = self.tiers.forward(batch)
        logits = on_device.float().cpu()
        # Before the results are used: whatever was read from the host was still what it was (I3).
        lost = self.coordinator.lost_requests()
        if lost:
            # Those requests begin anew; the others of the batch compute the same rows again.
            for request_id in lost:
                self._recompute(request_id)
            return []
        if self._witness is not None:
            self._witness.stepped(batch, on_device)
        self._note_rows(batch)
        self._commit(batch)
        return self._sample(batch, logits)

    def _note_rows(self, batch: Batch) -> None:
        """Remember which rows the step mirrored, until their page is whole."""
        size = self.tiers.sizes.block_size
        for request_id, start, slot in zip(
            batch.request_ids, batch.starts, batch.host_slots, strict=False
        ):
            if slot < 0:
                continue
            (host_block, row), key = divmod(slot, size), (request_id, start // size)
            known = self._rows_mirrored.get(key)
            if known is None or (known.host_block, known.end) != (host_block, row):
                known = self._rows_mirrored[key] = _RowsMirrored(host_block, row, row)
            known.end = row + 1
            self.statistics.mirrored_rows += 1

    def _first_mirrored(self, mirror: PageMirror) -> int:
        """From which row on decode steps mirrored a page to its end; the block size for none."""
        size = self.tiers.sizes.block_size
        known = self._rows_mirrored.pop((mirror.request_id, mirror.page), None)
        is_whole = known is not None and (known.host_block, known.end) == (mirror.host_block, size)
        return known.first if known is not None and is_whole else size

    def _prepare(self, batch: Batch) -> None:
        work = [
            StepWork(name, len(tokens))
            for name, tokens in zip(batch.request_ids, batch.tokens, strict=True)
        ]
        deadline_s = time.monotonic() + self.options.wait_timeout_s
        while True:
            try:
                plan = self.coordinator.prepare(work)
            except CapacityError:
                self.statistics.waits += 1
                if time.monotonic() > deadline_s:
                    raise
                if not self.settle().published:
                    time.sleep(_POLL_S)
                continue
            if plan.mirror_step and isinstance(self._events, PeerEvents):
                self._events.wait(plan.mirror_step)
            self.tiers.apply(plan)
            if self._witness is not None:
                self._witness.applied(plan)
            return

    def _commit(self, batch: Batch) -> None:
        mirrors: list[PageMirror] = []
        for request_id, tokens in zip(batch.request_ids, batch.tokens, strict=True):
            mirrors += self.coordinator.commit(request_id, tokens)
            computed = self.coordinator.num_computed_tokens(request_id)
            if request_id in self._mirrored:
                self._queue.accept(request_id, computed)
            self.statistics.longest_context = max(self.statistics.longest_context, computed)
            if batch.mode is StepMode.PREFILL:
                self.statistics.prefilled_tokens += len(tokens)
        self._mirror(mirrors)

    def _mirror(self, mirrors: Sequence[PageMirror]) -> None:
        if not mirrors:
            return
        if self.options.audit is not None:
            for mirror in mirrors:
                self.options.audit.mirrored(mirror.request_id, mirror.page, mirror.host_block)
        spans = [self._first_mirrored(mirror) for mirror in mirrors]
        self.tiers.submit_mirrors(self._queue, mirrors, spans)
        self._queue.seal()
        self.coordinator.enqueued(mirrors)

    def _sample(self, batch: Batch, logits: torch.Tensor) -> list[Token]:
        tokens: list[Token] = []
        for request_id, row in zip(batch.request_ids, logits, strict=True):
            sequence = self._sequences[request_id]
            if self.coordinator.num_computed_tokens(request_id) < len(sequence.tokens):
                continue  # a chunk in the middle of a prompt
            token = int(row.argmax())
            sequence.tokens.append(token)
            sequence.left -= 1
            self.statistics.generated_tokens += 1
            tokens.append(Token(request_id, token, row, sequence.left == 0))
            if sequence.left == 0:
                del self._sequences[request_id]
                self._end(request_id, EndMode.PUBLISH)
        return tokens

    def _recompute(self, request_id: str) -> None:
        sequence = self._sequences[request_id]
        tokens = self.preempt(request_id)
        self.statistics.recomputed_requests += 1
        self.add(request_id, tokens, max_new_tokens=sequence.left)

    def _end(self, request_id: str, mode: EndMode) -> None:
        if mode is EndMode.DISCARD and request_id in self._mirrored:
            self._queue.drop_request(request_id)
            self._mirrored.discard(request_id)
        for key in [key for key in self._rows_mirrored if key[0] == request_id]:
            del self._rows_mirrored[key]
        self.coordinator.finish(request_id, mode=mode)
        if self.options.audit is not None:
            self.options.audit.ended(request_id)

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self.options.wait_timeout_s
        while True:
            self.settle()
            if is_done():
                return
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"{what}: not within {self.options.wait_timeout_s:g} s",
                    remedy="See whether the daemon runs (`hisparse-service status`)",
                )
            time.sleep(_POLL_S)


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model has no embedding for.

    Raises:
        UsageError: With the id.
    """
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise UsageError(f"token {token} is not one of {vocab_size}")


def _share_events(
    namespace: Namespace, options: GeneratorOptions
) -> WriterEvents | PeerEvents | None:
    """The ring of a writer, or a reader's view of it; None where events cannot be made."""
    driver = options.event_driver
    if driver is None or not namespace.client.session.identity.group:
        return None
    if options.role is Role.READER:
        return PeerEvents(namespace, driver)
    try:
        return WriterEvents(namespace, driver)
    except DeviceError:
        return None  # they are for speed alone
