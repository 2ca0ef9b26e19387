"""Coordinators of two engines against a model of memory: what each block really holds.

The machine keeps the contents of every device and host block as the copies would leave them, and
after each step looks at what each request would read. So a page handed back too early, a host block
read before it is written, a stale hot row or a wrong table shows as wrong content, whatever the
coordinator's own books say.
"""

from __future__ import annotations

import collections
import contextlib

from fake_service import FakeService
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hisparse_service.contract.errors import CapacityError, ServiceUnavailable
from worker_client.coordinator import CoordinatorConfig, HiSparseCoordinator, Role
from worker_client.requests import EndMode, StepWork

BLOCK = 2
GROUPS = 2
CONFIG = CoordinatorConfig(
    block_size=BLOCK, num_device_blocks=32, num_resident_groups=GROUPS, num_hot_groups=1,
    hot_blocks_per_request=2, max_num_requests=3, max_model_tokens=20, max_step_tokens=4,
    max_restores_per_step=2,
)  # fmt: skip
NOTHING = None
TEXT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]
"""Prompts begin with it, so that prefixes are found and computed twice."""


class Engine:
    """One rank: its coordinator, its device memory, its tables, its copies in flight."""

    def __init__(self, service, host, role):
        self.service = service
        self.host = host
        self.role = role
        self.coordinator = HiSparseCoordinator(service.client(), CONFIG, role=role)
        self.device = collections.defaultdict(lambda: NOTHING)
        self.tables = {}
        self.hot = {}  # slot -> {host block: content when it was read}
        self.running = {}  # name -> (slot, prompt and generated tokens, number left)
        self.in_flight = collections.deque()
        self.dropped = set()

    # --- what a worker does -----------------------------------------------------------------

    def admit(self, name, prompt, left, hit=None):
        admission = self.coordinator.admit(
            name, prompt, max_tokens=len(prompt) + left, num_hit_tokens=hit
        )
        self.running[name] = [admission.request_slot, list(prompt), left]
        return admission

    def step(self, names):
        work = []
        for name in names:
            _, tokens, _ = self.running[name]
            start = self.coordinator.num_computed_tokens(name)
            work.append((name, tokens[start : start + CONFIG.max_step_tokens]))
        plan = self.coordinator.prepare([StepWork(name, len(new)) for name, new in work])
        self.apply(plan)
        for name, _ in work:
            self.read_context(name)
        for name, new in work:
            self.run(name, new)

    def apply(self, plan):
        for rows in self.hot.values():
            for block in plan.invalidate:
                rows.pop(block, None)
        for slot in plan.reset_slots:
            self.hot[slot] = {}
            self.tables = {key: row for key, row in self.tables.items() if key[0] != slot}
        for restore in plan.restores:
            assert restore.host_block in self.service.key_of, "restored what is not published"
            content = self.host[restore.host_block]
            for block in (*restore.resident_blocks, restore.indexer_block):
                if block:
                    self.device[block] = content
        for update in plan.updates:
            self.tables[update.request_slot, update.page] = update
            if not update.resident_blocks:
                assert update.host_block in self.service.key_of, "spilled what is not published"

    def run(self, name, new):
        slot, tokens, left = self.running[name]
        end = self.coordinator.num_computed_tokens(name) + len(new)
        for page in range((end - len(new)) // BLOCK, -(-end // BLOCK)):
            row = self.tables[slot, page]
            content = tuple(tokens[: min(end, (page + 1) * BLOCK)])
            for block in (*row.resident_blocks, row.indexer_block):
                self.device[block] = content
        self.mirror(self.coordinator.commit(name, new))
        if end == len(tokens):
            tokens.append(sum(tokens) % 2)
            self.running[name][2] -= 1
            if left == 1:
                self.end(name, EndMode.PUBLISH)

    def mirror(self, mirrors):
        self.coordinator.enqueued(mirrors)
        for mirror in mirrors:
            self.in_flight.append((mirror, self.device[mirror.indexer_block]))

    def complete(self):
        """The oldest copy ends: the source blocks must still hold what it was told to copy."""
        mirror, content = self.in_flight.popleft()
        for block in (*mirror.resident_blocks, mirror.indexer_block):
            assert self.device[block] == content, "a device block was reused under a copy"
        if (mirror.request_id, mirror.host_block) in self.dropped:
            self.dropped.discard((mirror.request_id, mirror.host_block))
            self.coordinator.dropped([mirror.host_block])
            return
        assert mirror.host_block not in self.service.key_of, "wrote into a published block"
        self.host[mirror.host_block] = content
        self.coordinator.completed(mirror.request_id, mirror.page)

    def end(self, name, mode):
        del self.running[name]
        if mode is EndMode.DISCARD:
            self.dropped |= {
                (mirror.request_id, mirror.host_block)
                for mirror, _ in self.in_flight
                if mirror.request_id == name
            }
        self.coordinator.finish(name, mode=mode)

    def publish(self):
        report = self.coordinator.publish()
        assert report.messages <= 1 or self.role is Role.READER
        names = {recalled.request_id for recalled in report.recalled}
        self.in_flight = collections.deque(
            item for item in self.in_flight if item[0].request_id not in names
        )
        self.mirror(report.mirrors)
        return report

    # --- what must hold ---------------------------------------------------------------------

    def check(self):
        self.coordinator.check_accounting()
        owners = collections.defaultdict(set)
        for name, (slot, tokens, _) in self.running.items():
            computed = self.coordinator.num_computed_tokens(name)
            for page in self.coordinator.pages(name):
                for block in page.device_blocks:
                    owners[block].add(name)
                if len(owners) and page.owners != {name}:
                    assert page.is_published, "requests share a page that is not published"
                row = self.tables.get((slot, page.index))
                if row is None or page.index * BLOCK >= computed:
                    continue
                content = tuple(tokens[: min(computed, (page.index + 1) * BLOCK)])
                for block in page.device_blocks:
                    assert self.device[block] == content, "a device page holds something else"
        for block, names in owners.items():
            for name in names:
                page = next(p for p in self.coordinator.pages(name) if block in p.device_blocks)
                assert names <= page.owners, "two requests own one device block"

        handed_out = self.coordinator._device._used
        for mirror, _ in self.in_flight:
            assert handed_out.issuperset(mirror.resident_blocks), "free under a copy in flight"
            assert mirror.indexer_block in handed_out, "free under a copy in flight"

    def read_context(self, name):
        """Read what the tables say, as attention does in the step that was just prepared."""
        slot, tokens, _ = self.running[name]
        start = self.coordinator.num_computed_tokens(name)
        for index in range(-(-start // BLOCK)):
            row = self.tables[slot, index]
            content = tuple(tokens[: min(start, (index + 1) * BLOCK)])
            assert self.device[row.indexer_block] == content, "keys of something else"
            for block in row.resident_blocks:
                assert self.device[block] == content, "a resident page holds something else"
            if not row.resident_blocks:
                # What a hot row holds is read before what the host holds by now.
                read = self.hot[slot].setdefault(row.host_block, self.host[row.host_block])
                assert read == content, "a host page or a hot row holds something else"


class Residency(RuleBasedStateMachine):
    """Two engines on one pool; the first has a reader, which steps after its writer."""

    def __init__(self):
        super().__init__()
        self.service = FakeService(60, block_size=BLOCK)
        self.host = collections.defaultdict(lambda: NOTHING)
        self.engines = [Engine(self.service, self.host, Role.WRITER) for _ in range(2)]
        self.reader = Engine(self.service, self.host, Role.READER)
        self.names = 0

    @property
    def all(self):
        return [*self.engines, self.reader]

    @rule(
        engine=st.sampled_from([0, 0, 1]),
        prompt=st.integers(1, 12).flatmap(
            lambda n: st.sampled_from([TEXT[:n], [*TEXT[: n - 1], 1 - TEXT[n - 1]]])
        ),
        left=st.integers(1, 8),
        rounds=st.integers(0, 5),
    )
    def admit_and_work(self, engine, prompt, left, rounds):
        self.admit(engine, prompt, left)
        self.work(engine, rounds)
        if engine == 0:
            self.work(2, rounds)

    def admit(self, engine, prompt, left):
        self.names += 1
        name = f"r{self.names}"
        try:
            admission = self.engines[engine].admit(name, prompt, left)
        except (CapacityError, ServiceUnavailable):
            return
        if engine == 0:
            try:
                self.reader.admit(name, prompt, left, hit=admission.num_hit_tokens)
            except (CapacityError, ServiceUnavailable):
                self.engines[0].end(name, EndMode.DISCARD)

    @rule(engine=st.integers(0, 2), data=st.data())
    def step(self, engine, data):
        rank = self.all[engine]
        names = sorted(rank.running)
        if not names:
            return
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        try:
            rank.step(chosen)
        except CapacityError:
            rank.publish()

    @rule(engine=st.integers(0, 2), rounds=st.integers(1, 8))
    def steps(self, engine, rounds):
        self.work(engine, rounds)

    def work(self, engine, rounds):
        """Steps as an engine makes them: all requests, copies that complete, publication."""
        rank = self.all[engine]
        for _ in range(rounds):
            if not rank.running:
                return
            with contextlib.suppress(CapacityError):
                rank.step(sorted(rank.running))
            while rank.in_flight:
                rank.complete()
            rank.publish()

    @rule(engine=st.integers(0, 1), count=st.integers(1, 4))
    def complete(self, engine, count):
        rank = self.engines[engine]
        for _ in range(min(count, len(rank.in_flight))):
            rank.complete()

    @rule(engine=st.integers(0, 2))
    def publish(self, engine):
        self.all[engine].publish()

    @rule(engine=st.integers(0, 2), data=st.data(), mode=st.sampled_from(EndMode))
    def end(self, engine, data, mode):
        rank = self.all[engine]
        if rank.running:
            rank.end(data.draw(st.sampled_from(sorted(rank.running))), mode)

    @rule()
    def daemon_goes_or_comes(self):
        if self.service.is_away:
            self.service.come_back()
        else:
            self.service.is_away = True

    @rule()
    def another_daemon_takes_over(self):
        for rank in self.engines:
            while rank.in_flight:  # the copies of a moment ago have long ended
                rank.complete()
        self.service.restart()

    @invariant()
    def every_request_reads_its_own_rows(self):
        for rank in self.all:
            rank.check()

    @invariant()
    def the_services_books_add_up(self):
        self.service.check()

    def teardown(self):
        """Whatever happened: all admitted requests come to their end, and nothing is left."""
        if self.service.is_away:
            self.service.come_back()
        for _ in range(400):
            if not any(
                rank.running or rank.in_flight or rank.coordinator.num_finishing
                for rank in self.all
            ):
                break
            for rank in self.all:
                for name in sorted(rank.running):
                    with contextlib.suppress(CapacityError):
                        rank.step([name])
                while rank.in_flight:
                    rank.complete()
                rank.publish()
                rank.check()
            # A reader whose writer ended early waits for pages that nobody publishes any more;
            # an engine ends a request on all ranks at once.
            for name in [n for n in self.reader.running if n not in self.engines[0].running]:
                self.reader.end(name, EndMode.DISCARD)
        for rank in self.all:
            rank.publish()
            assert not rank.running, "admitted requests wait for each other"
            assert rank.coordinator.num_finishing == 0
            assert rank.coordinator.num_free_device_blocks == CONFIG.num_device_blocks - 1
        assert not self.service.leases
        assert not self.service.reserved
        self.service.check()


Residency.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestResidency = Residency.TestCase
