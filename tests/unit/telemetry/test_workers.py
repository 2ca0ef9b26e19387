"""Sums of what workers report: they only grow, and count nothing twice, whoever connects again."""

from __future__ import annotations

from hisparse_service.telemetry.workers import MAX_DEPARTED, WorkerTotals

WHO = (100, "engine", "g", 0)
OTHER = (101, "engine", "g", 1)


def missed(totals: WorkerTotals) -> float:
    return totals.totals["rows_missed"]


def test_sessions_are_added_and_their_part_stays_when_they_end() -> None:
    totals = WorkerTotals()
    totals.report(1, WHO, {"rows_missed": 5.0})
    totals.report(2, OTHER, {"rows_missed": 7.0})
    totals.report(1, WHO, {"rows_missed": 6.0})
    totals.ended(1, WHO)
    assert missed(totals) == 13.0


def test_a_client_that_comes_back_goes_on_from_its_last_report() -> None:
    totals = WorkerTotals()
    totals.report(1, WHO, {"rows_missed": 5.0})
    totals.ended(1, WHO)
    totals.report(2, WHO, {"rows_missed": 9.0, "reconnects": 1.0})
    assert missed(totals) == 9.0


def test_a_client_that_an_earlier_daemon_counted_counts_from_its_first_report() -> None:
    totals = WorkerTotals()
    totals.report(1, WHO, {"rows_missed": 1_000.0, "reconnects": 1.0})
    totals.report(1, WHO, {"rows_missed": 1_001.0, "reconnects": 1.0})
    assert missed(totals) == 1.0


def test_a_new_client_with_the_name_of_a_departed_one_counts_from_zero() -> None:
    totals = WorkerTotals()
    totals.report(1, WHO, {"rows_missed": 5.0})
    totals.ended(1, WHO)
    totals.report(2, WHO, {"rows_missed": 3.0})
    assert missed(totals) == 8.0


def test_names_that_are_not_known_are_ignored() -> None:
    totals = WorkerTotals()
    totals.report(1, WHO, {"made_up": 5.0})
    assert "made_up" not in totals.totals


def test_departed_clients_are_forgotten_beyond_a_bound() -> None:
    totals = WorkerTotals()
    for pid in range(MAX_DEPARTED + 50):
        who = (pid, "e", "g", 0)
        totals.report(pid, who, {"rows_missed": 1.0})
        totals.ended(pid, who)
    assert len(totals._departed) == MAX_DEPARTED
    assert not totals._reported
    assert missed(totals) == MAX_DEPARTED + 50
