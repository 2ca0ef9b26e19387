"""The states of a session and every legal change between them, as data in one place.

Who may call: `membership/`, on the daemon's control loop. Pure.
"""

from __future__ import annotations

import enum
from typing import Final

from hisparse_service.contract.errors import IllegalTransition


class SessionState(enum.IntEnum):
    """State of a session."""

    STARTING = 0
    """Hello arrived; its pid watch and its rights are being set up."""
    ALIVE = 1
    DRAINING = 2
    """Said Bye, or the daemon drains: nothing new is granted."""
    DEAD = 3
    """What it holds is being given back. Entered once."""
    GONE = 4
    """Forgotten."""


class SessionEvent(enum.IntEnum):
    """What can happen to a session."""

    WELCOME = 0
    """Its Hello is answered."""
    DRAIN = 1
    DIE = 2
    """Its process ended, its connection closed, it went silent, or it said Bye."""
    FORGET = 3
    """All that it held is back."""


SESSION_TRANSITIONS: Final[dict[tuple[SessionState, SessionEvent], SessionState]] = {
    (SessionState.STARTING, SessionEvent.WELCOME): SessionState.ALIVE,
    (SessionState.ALIVE, SessionEvent.DRAIN): SessionState.DRAINING,
    (SessionState.STARTING, SessionEvent.DIE): SessionState.DEAD,
    (SessionState.ALIVE, SessionEvent.DIE): SessionState.DEAD,
    (SessionState.DRAINING, SessionEvent.DIE): SessionState.DEAD,
    (SessionState.DEAD, SessionEvent.FORGET): SessionState.GONE,
}


def next_session_state(state: SessionState, event: SessionEvent, *, session: int) -> SessionState:
    """The state after `event`.

    Raises:
        IllegalTransition: The event is not allowed in this state.
    """
    after = SESSION_TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransition(
            f"session {session} is {state.name}: {event.name} is not allowed",
            session=session,
            state=state.name,
            event=event.name,
        )
    return after
