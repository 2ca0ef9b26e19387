"""Sessions against a model, with a clock that moves when told; each rule by name below."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from hisparse_service.contract.errors import (
    IllegalTransition,
    QuotaExceeded,
    UnknownSession,
    UsageError,
)
from hisparse_service.membership.credentials import Credentials
from hisparse_service.membership.sessions import DeathCause, Identity, SessionTable
from hisparse_service.membership.states import (
    SESSION_TRANSITIONS,
    SessionEvent,
    SessionState,
    next_session_state,
)
from hisparse_service.testing.clock import FakeClock

CREDENTIALS = Credentials(uid=1, gid=1, pid=1)
TIMEOUT_S = 15.0
LIMIT = 4


def test_every_session_event_that_the_table_lacks_raises_with_state_event_and_id():
    for state in SessionState:
        for event in SessionEvent:
            if (state, event) in SESSION_TRANSITIONS:
                assert (
                    next_session_state(state, event, session=4) is SESSION_TRANSITIONS[state, event]
                )
                continue
            with pytest.raises(IllegalTransition) as error:
                next_session_state(state, event, session=4)
            assert error.value.details == {
                "session": 4, "state": state.name, "event": event.name,
            }  # fmt: skip


class SessionMachine(RuleBasedStateMachine):
    """Connections come, speak, fall silent and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.table = SessionTable(timeout_s=TIMEOUT_S, max_sessions=LIMIT)
        self.heard: dict[bytes, float] = {}
        """Live connections -> when they were last heard."""
        self.dead: list = []
        self.ids: set[int] = set()

    @rule(connection=st.integers(0, 5))
    def hello(self, connection: int) -> None:
        routing_id = bytes([connection])
        if routing_id in self.heard:
            with pytest.raises(UsageError):
                self.table.create(routing_id, CREDENTIALS, Identity(), now_s=self.clock.now_s)
        elif len(self.heard) + len(self.dead) >= LIMIT:
            with pytest.raises(QuotaExceeded):
                self.table.create(routing_id, CREDENTIALS, Identity(), now_s=self.clock.now_s)
        else:
            session = self.table.create(routing_id, CREDENTIALS, Identity(), now_s=self.clock.now_s)
            assert session.session_id not in self.ids
            self.ids.add(session.session_id)
            self.heard[routing_id] = self.clock.now_s

    @rule(connection=st.integers(0, 5))
    def speak(self, connection: int) -> None:
        routing_id = bytes([connection])
        if routing_id not in self.heard:
            with pytest.raises(UnknownSession):
                self.table.find(routing_id)
            return
        session = self.table.find(routing_id)
        if session.state is SessionState.STARTING:
            self.table.welcome(session)
        self.table.touch(session, now_s=self.clock.now_s)
        self.heard[routing_id] = self.clock.now_s

    @rule(connection=st.integers(0, 5), cause=st.sampled_from(DeathCause), times=st.integers(1, 3))
    def die(self, connection: int, cause: DeathCause, times: int) -> None:
        routing_id = bytes([connection])
        if routing_id in self.heard:
            session = self.table.find(routing_id)
            results = [self.table.mark_dead(session, cause) for _ in range(times)]
            assert results == [True] + [False] * (times - 1)
            heard_s = session.last_seen_s
            self.table.touch(session, now_s=self.clock.now_s + 99.0)
            assert session.last_seen_s == heard_s
            del self.heard[routing_id]
            self.dead.append(session)

    @rule()
    def forget(self) -> None:
        for session in self.dead:
            assert self.table.get(session.session_id) is session
            self.table.forget(session)
            assert session.state is SessionState.GONE
            with pytest.raises(UnknownSession):
                self.table.get(session.session_id)
        self.dead.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.5, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        late = {s.routing_id for s in self.table.timed_out(self.clock.now_s)}
        assert late == {
            routing_id
            for routing_id, heard_s in self.heard.items()
            if self.clock.now_s - heard_s >= TIMEOUT_S
        }

    @invariant()
    def the_table_agrees_with_the_model(self) -> None:
        self.table.check_invariants()
        assert {s.routing_id for s in self.table if s.is_live} == set(self.heard)
        assert len(self.table) == len(self.heard) + len(self.dead)
        deadline_s = self.table.next_deadline_s()
        assert deadline_s == min((t + TIMEOUT_S for t in self.heard.values()), default=None)


def test_i9_sessions_end_once_and_silent_ones_are_found_in_any_order_of_events():
    run_state_machine_as_test(
        SessionMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def test_a_dead_session_keeps_the_first_cause_and_frees_its_connection():
    table = SessionTable()
    first = table.create(b"a", CREDENTIALS, Identity(group="tp", rank=1), now_s=0.0)
    table.mark_dead(first, DeathCause.PROCESS_ENDED)
    table.mark_dead(first, DeathCause.DISCONNECTED)
    assert first.death_cause is DeathCause.PROCESS_ENDED
    second = table.create(b"a", CREDENTIALS, Identity(), now_s=0.0)
    assert table.find(b"a") is second
    table.forget(first)
    assert table.find(b"a") is second


def test_only_a_live_session_drains_and_only_a_dead_one_is_forgotten():
    table = SessionTable()
    session = table.create(b"a", CREDENTIALS, Identity(), now_s=0.0)
    with pytest.raises(IllegalTransition):
        table.drain(session)
    table.welcome(session)
    table.drain(session)
    assert session.is_live
    with pytest.raises(IllegalTransition):
        table.forget(session)


def test_the_clock_goes_forward_only():
    clock = FakeClock(5.0)
    assert clock.advance(2.5) == clock() == clock.now_s == 7.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1.0)
