"""What a starting daemon does with what it finds: a decision table, as data.

The policy behind it: never delete on doubt. A segment that cannot be trusted is left alone and
reported, and the daemon starts beside it. What another program, user or instance put under our
name is refused, because a second name would hide the mistake. What a live daemon owns is refused,
because there must be one owner.

`survey.py` finds out, `pool.py` acts. Pure.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final


class Name(enum.Enum):
    """Whether something stands under the name."""

    ABSENT = "absent"
    PRESENT = "present"


class HeaderFound(enum.Enum):
    """What the first page says."""

    GOOD = "good"
    FOREIGN = "foreign"
    """Not our magic, another user's, not a regular object, or ours under another one's name."""
    WRONG_VERSION = "wrong_version"
    """Our magic, a format that this code does not know."""
    CORRUPT = "corrupt"
    """Our magic, but a wrong checksum, size or field, or pages that are missing."""
    UNFINISHED = "unfinished"
    """No magic yet: its creator died before it wrote the header. Only under a temporary name."""


class Owner(enum.Enum):
    """The owner lock."""

    FREE = "free"
    HELD = "held"


class Size(enum.Enum):
    """Its size against the settings."""

    SAME = "same"
    DIFFERENT = "different"


class Contents(enum.Enum):
    """The backing directory."""

    EMPTY = "empty"
    BACKINGS = "backings"
    CORRUPT = "corrupt"


class Users(enum.Enum):
    """Whether workers hold the user lock."""

    NONE = "none"
    ATTACHED = "attached"


class Action(enum.Enum):
    """What to do with a public name."""

    CREATE = "create"
    ADOPT = "adopt"
    ADOPT_OTHER_SIZE = "adopt_other_size"
    """Adopt and warn: what it holds is worth more than the configured size."""
    REPLACE = "replace"
    """Remove it and create: ours, sound, empty, unused, of a size that is no longer wanted."""
    START_BESIDE = "start_beside"
    """Leave it, report it, and use the next numbered name."""
    REFUSE_FOREIGN = "refuse_foreign"
    REFUSE_LIVE = "refuse_live"
    """A live daemon owns it."""


class LeftoverAction(enum.Enum):
    """What to do with a temporary name."""

    REMOVE_LEFTOVER = "remove_leftover"
    LEAVE = "leave"
    """Its creator lives."""
    LEAVE_AND_REPORT = "leave_and_report"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What was found under a public name. All but `name` are meaningless when it is absent."""

    name: Name
    header: HeaderFound = HeaderFound.GOOD
    owner: Owner = Owner.FREE
    size: Size = Size.SAME
    contents: Contents = Contents.EMPTY
    users: Users = Users.NONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row: an empty set stands for "any"."""

    action: Action
    name: frozenset[Name] = frozenset()
    header: frozenset[HeaderFound] = frozenset()
    owner: frozenset[Owner] = frozenset()
    size: frozenset[Size] = frozenset()
    contents: frozenset[Contents] = frozenset()
    users: frozenset[Users] = frozenset()

    def matches(self, found: Found) -> bool:
        """Whether every column allows what was found."""
        return all(
            not allowed or value in allowed
            for allowed, value in (
                (self.name, found.name), (self.header, found.header), (self.owner, found.owner),
                (self.size, found.size), (self.contents, found.contents),
                (self.users, found.users),
            )
        )  # fmt: skip


_HERE: Final = frozenset({Name.PRESENT})
_FREE: Final = frozenset({Owner.FREE})
_GOOD: Final = frozenset({HeaderFound.GOOD})
# A public name never stands for an unfinished segment of ours: it is given last.
_NOT_OURS: Final = frozenset({HeaderFound.FOREIGN, HeaderFound.UNFINISHED})
_UNUSABLE: Final = frozenset({HeaderFound.CORRUPT, HeaderFound.WRONG_VERSION})
_OURS: Final = _GOOD | _UNUSABLE
_SAME: Final = frozenset({Size.SAME})
_OTHER: Final = frozenset({Size.DIFFERENT})
_EMPTY: Final = frozenset({Contents.EMPTY})
_HOLDS: Final = frozenset({Contents.BACKINGS})
_SOUND: Final = _EMPTY | _HOLDS
_BROKEN: Final = frozenset({Contents.CORRUPT})
_USED: Final = frozenset({Users.ATTACHED})
_UNUSED: Final = frozenset({Users.NONE})

_HELD: Final = frozenset({Owner.HELD})

# fmt: off
TABLE: Final = (
    Row(action=Action.CREATE, name=frozenset({Name.ABSENT})),
    Row(action=Action.REFUSE_FOREIGN, name=_HERE, header=_NOT_OURS),
    Row(action=Action.REFUSE_LIVE, name=_HERE, header=_OURS, owner=_HELD),
    Row(action=Action.START_BESIDE, name=_HERE, header=_UNUSABLE, owner=_FREE),
    Row(action=Action.START_BESIDE, name=_HERE, header=_GOOD, owner=_FREE, contents=_BROKEN),
    Row(action=Action.ADOPT, name=_HERE, header=_GOOD, owner=_FREE, contents=_SOUND, size=_SAME),
    Row(action=Action.ADOPT_OTHER_SIZE,
        name=_HERE, header=_GOOD, owner=_FREE, contents=_HOLDS, size=_OTHER),
    Row(action=Action.ADOPT_OTHER_SIZE,
        name=_HERE, header=_GOOD, owner=_FREE, contents=_EMPTY, size=_OTHER, users=_USED),
    Row(action=Action.REPLACE,
        name=_HERE, header=_GOOD, owner=_FREE, contents=_EMPTY, size=_OTHER, users=_UNUSED),
)
"""Exactly one row matches whatever is found; a test enumerates every input."""

LEFTOVERS: Final = {
    (header, owner): (
        LeftoverAction.LEAVE if owner is Owner.HELD
        else LeftoverAction.LEAVE_AND_REPORT if header is HeaderFound.FOREIGN
        else LeftoverAction.REMOVE_LEFTOVER
    )
    for header in HeaderFound for owner in Owner
}
"""For temporary names: what the first page says and the owner lock. Nobody was ever told of such a
segment, so one whose creator is dead holds nothing, however much of its header was written."""
# fmt: on


def decide(found: Found) -> Action:
    """The action of the one row that matches."""
    (row,) = (row for row in TABLE if row.matches(found))
    return row.action


def decide_leftover(header: HeaderFound, owner: Owner) -> LeftoverAction:
    """What to do with a segment under a temporary name."""
    return LEFTOVERS[header, owner]
