"""The fault plans themselves: armed they strike at the right time, unarmed they do nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from hisparse_service.contract import crashpoints
from hisparse_service.contract.crashpoints import PointKind, call_point, crash_point, declare
from hisparse_service.testing.faults import (
    CRASH_POINT_VARIABLE,
    FaultPlan,
    all_points,
    arm_from_environment,
)

STEP = declare("tests.step")
CALL = declare("tests.call", PointKind.CALL)


def test_an_unarmed_point_does_nothing() -> None:
    crash_point(STEP)
    call_point(CALL)


def test_a_call_fails_the_nth_time_only_and_with_its_errno() -> None:
    with FaultPlan().fail_nth(CALL, error=errno.ENOSPC, nth=2) as plan:
        call_point(CALL)
        with pytest.raises(OSError, match=r"made to fail at tests\.call") as error:
            call_point(CALL)
        call_point(CALL)
    assert error.value.errno == errno.ENOSPC
    assert plan.reached == {CALL: 3}
    call_point(CALL)


def test_nth_zero_fails_every_time() -> None:
    with FaultPlan().fail_nth(CALL, error=errno.EIO, nth=0):
        for _attempt in range(3):
            with pytest.raises(OSError, match="made to fail"):
                call_point(CALL)


def test_plans_nest_and_are_undone_in_order() -> None:
    with FaultPlan() as outer:
        with FaultPlan() as inner:
            crash_point(STEP)
        crash_point(STEP)
    assert (inner.reached, outer.reached) == ({STEP: 1}, {STEP: 2})
    assert crashpoints.install(None) is None


def test_a_point_that_nobody_declares_cannot_be_armed() -> None:
    with pytest.raises(ValueError, match="no crash point is called"):
        FaultPlan().kill_at("no.such.point").arm()
    with pytest.raises(ValueError, match="no call point is called"):
        FaultPlan().fail_nth(STEP, error=1).arm()
    with pytest.raises(ValueError, match="nth"):
        FaultPlan().kill_at(STEP, nth=-1)


def test_a_name_cannot_be_declared_as_two_kinds() -> None:
    assert declare("tests.step") == STEP
    with pytest.raises(ValueError, match=r"tests\.step"):
        declare("tests.step", PointKind.CALL)


def test_an_action_can_stand_in_for_the_kill() -> None:
    seen: list[str] = []
    with FaultPlan().call_at(STEP, lambda: seen.append("here"), nth=2):
        crash_point(STEP)
        assert seen == []
        crash_point(STEP)
    assert seen == ["here"]


PROGRAM = """
from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.testing.faults import arm_from_environment
arm_from_environment()
step = declare("tests.step")
for count in range(1, 4):
    crash_point(step)
    print(count, flush=True)
"""


@pytest.mark.parametrize(
    ("armed", "code", "printed"),
    [("tests.step", -9, []), ("tests.step:3", -9, ["1", "2"]), ("", 0, ["1", "2", "3"])],
)
def test_the_environment_kills_a_process_at_the_nth_pass(
    armed: str, code: int, printed: list[str]
) -> None:
    environment = {**os.environ, CRASH_POINT_VARIABLE: armed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (code, printed)


def test_a_count_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("tests.step:0", "tests.step:x"):
        monkeypatch.setenv(CRASH_POINT_VARIABLE, text)
        with pytest.raises(ValueError, match=r"count|int"):
            arm_from_environment()


def test_all_points_lists_the_pools_steps_without_arming_any() -> None:
    points = all_points(packages=("hisparse_service.pool",))
    assert {"segment.after_create", "segment.after_link", "backing.after_body"} <= set(points)
    assert "os.madvise" in all_points(PointKind.CALL, packages=("hisparse_service.pool",))
    assert crashpoints.install(None) is None
