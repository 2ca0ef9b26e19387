"""Client and daemon in one process, with faults between any two messages and any two stores."""

from __future__ import annotations

import gc
import itertools
import os

from helpers import short_directory, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hisparse_service.contract.errors import HiSparseError
from hisparse_service.server.state import ServerState
from hisparse_service.testing.faults import all_points
from tests.faults.board import Count
from tests.faults.in_process import Killed, ThreadedDaemon
from tests.faults.scenario import segments_of
from tests.faults.storm_worker import NUM_BLOCKS, StormWorker
from worker_client import connect

POINTS = sorted(
    point for point in all_points() if point.startswith(("reply.", "record.", "mirror."))
)
NUM_CLIENTS = 2
PICK = st.integers(0, 10_000)
_numbers = itertools.count()


class Tally:
    """A board in memory."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(Count, 0)

    def add(self, worker: int, count: Count, amount: int = 1) -> None:  # noqa: ARG002
        self.totals[count] += amount


class Choices:
    """The worker's random choices, drawn by hypothesis."""

    def __init__(self, draws: list[int]) -> None:
        self._draws = itertools.cycle(draws)

    def randrange(self, stop: int) -> int:
        return next(self._draws) % stop

    def randint(self, low: int, high: int) -> int:
        return low + next(self._draws) % (high - low + 1)

    def random(self) -> float:
        return (next(self._draws) % 100) / 100


class ClientDaemonMachine(RuleBasedStateMachine):
    """Workers take turns; the daemon dies at a drawn point, replies get lost, clients vanish."""

    def __init__(self) -> None:
        super().__init__()
        self.directories = short_directory()
        self.instance = f"cdm-{os.getpid()}-{next(_numbers)}"
        self.daemon = ThreadedDaemon(self.directories.__enter__(), self.instance)
        self.tally = Tally()
        self.workers: dict[int, StormWorker] = {}

    # --- what happens -----------------------------------------------------------------------

    @rule(index=st.integers(0, NUM_CLIENTS - 1), draws=st.lists(PICK, min_size=4, max_size=24))
    def turn(self, index: int, draws: list[int]) -> None:
        """A worker looks up, reads, writes, publishes; what fails fails with a typed error."""
        worker = self.workers.get(index)
        if worker is None:
            worker = self.connect(index)
        if worker is not None:
            worker.rng = Choices(draws)
            worker.turn()

    @rule(point=st.sampled_from(POINTS))
    def arm(self, point: str) -> None:
        """The daemon dies when it next passes this point."""
        self.daemon.kill_at(point)

    @rule(count=st.integers(1, 3))
    def lose_replies(self, count: int) -> None:
        """The next replies do not arrive: nobody knows what was done."""
        self.daemon.drop_replies(count)

    @rule()
    def leases_expire(self) -> None:
        """A long time passes for the daemon alone."""
        self.ask(lambda state: state.directory.expire(1e12))

    @precondition(lambda self: self.workers)
    @rule(pick=PICK)
    def vanish(self, pick: int) -> None:
        """A client is gone without a word: its connection just closes."""
        index = sorted(self.workers)[pick % len(self.workers)]
        worker = self.workers.pop(index)
        worker.client.session._say_bye = lambda: 0
        self.leave(worker)

    # --- what holds -------------------------------------------------------------------------

    @invariant()
    def accounts_balance_and_bytes_are_right(self) -> None:
        self.revive()
        self.ask(check_accounts)
        assert self.tally.totals[Count.WRONG_BYTES] == 0

    def teardown(self) -> None:
        try:
            for worker in self.workers.values():
                self.leave(worker)
            self.workers.clear()
            self.revive()
            wait_until(lambda: self.ask(num_held) == 0, what="everything to come back")
        finally:
            self.daemon.close()
            self.directories.__exit__(None, None, None)
        assert segments_of(self.instance) == []

    # --- parts ------------------------------------------------------------------------------

    def connect(self, index: int) -> StormWorker | None:
        client = None
        try:
            client = connect(self.daemon.runtime_dir, client_name="machine", timeout_s=2.0)
            client.session._timeout_s = 0.3
            # Nobody but this thread starts a daemon that died meanwhile.
            self.workers[index] = StormWorker(
                client, self.tally, index, Choices([1]), attach_timeout_s=0.3
            )
        except HiSparseError:
            if client is not None:
                client.close()
            return None
        return self.workers[index]

    def leave(self, worker: StormWorker) -> None:
        del worker.blocks
        worker.client.close()
        worker.held.clear()
        gc.collect()

    def revive(self) -> None:
        if not self.daemon.is_alive:
            self.daemon.start()

    def ask(self, question):
        """The answer of the daemon's own thread; of its successor's if it dies first."""
        while True:
            try:
                return self.daemon.on_loop(question)
            except Killed:
                self.daemon.wait_dead()
                self.daemon.start()


def check_accounts(state: ServerState) -> None:
    state.directory.check_invariants()
    for namespace in state.namespaces.values():
        if namespace.backing is not None:
            counts = state.directory.counts(namespace.namespace_id)
            parts = counts.free + counts.reserved + counts.published + counts.pinned
            assert parts == counts.capacity == NUM_BLOCKS - 1


def num_held(state: ServerState) -> int:
    """Blocks and pins of anybody, once leases of those who are gone have expired."""
    if state.num_workers:
        return -1
    state.directory.expire(1e12)
    held = 0
    for namespace in state.namespaces.values():
        counts = state.directory.counts(namespace.namespace_id)
        held += counts.reserved + counts.pinned
    return held


def test_i6_accounts_balance_whatever_is_lost_between_client_and_daemon() -> None:
    examples = int(os.environ.get("HISPARSE_FAULTS_EXAMPLES", "12"))
    run_state_machine_as_test(
        ClientDaemonMachine,
        settings=settings(max_examples=examples, stateful_step_count=20, deadline=None),
    )
