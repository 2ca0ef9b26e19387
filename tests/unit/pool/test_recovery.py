"""The decision table: every input has exactly one row, and the rows say what the policy says."""

from __future__ import annotations

import itertools

import pytest

from hisparse_service.pool.recovery import (
    TABLE,
    Action,
    Contents,
    Found,
    HeaderFound,
    LeftoverAction,
    Name,
    Owner,
    Size,
    Users,
    decide,
    decide_leftover,
)

EVERYTHING = [
    Found(name=name, header=header, owner=owner, size=size, contents=contents, users=users)
    for name, header, owner, size, contents, users in itertools.product(
        Name, HeaderFound, Owner, Size, Contents, Users
    )
]


def policy(found: Found) -> Action:
    """The policy in prose order, written apart from the table."""
    if found.name is Name.ABSENT:
        return Action.CREATE
    if found.header in (HeaderFound.FOREIGN, HeaderFound.UNFINISHED):
        return Action.REFUSE_FOREIGN
    if found.owner is Owner.HELD:
        return Action.REFUSE_LIVE
    if found.header is not HeaderFound.GOOD or found.contents is Contents.CORRUPT:
        return Action.START_BESIDE
    if found.size is Size.SAME:
        return Action.ADOPT
    worth_keeping = found.contents is Contents.BACKINGS or found.users is Users.ATTACHED
    return Action.ADOPT_OTHER_SIZE if worth_keeping else Action.REPLACE


def test_every_finding_matches_exactly_one_row() -> None:
    assert len(EVERYTHING) == 2 * 5 * 2 * 2 * 3 * 2
    for found in EVERYTHING:
        assert [row.action for row in TABLE if row.matches(found)] == [policy(found)], found
        assert decide(found) is policy(found)


def test_every_row_and_every_action_is_reached() -> None:
    for row in TABLE:
        assert any(row.matches(found) for found in EVERYTHING), row
    assert {row.action for row in TABLE} == set(Action)


def test_nothing_that_holds_blocks_or_is_doubtful_is_ever_removed() -> None:
    for found in EVERYTHING:
        if decide(found) is Action.REPLACE:
            assert found.header is HeaderFound.GOOD
            assert found.contents is Contents.EMPTY
            assert found.owner is Owner.FREE
            assert found.users is Users.NONE


@pytest.mark.parametrize("header", HeaderFound)
def test_a_leftover_goes_only_when_its_creator_is_dead_and_it_is_ours(header: HeaderFound) -> None:
    assert decide_leftover(header, Owner.HELD) is LeftoverAction.LEAVE
    expected = (
        LeftoverAction.LEAVE_AND_REPORT
        if header is HeaderFound.FOREIGN
        else LeftoverAction.REMOVE_LEFTOVER
    )
    assert decide_leftover(header, Owner.FREE) is expected
