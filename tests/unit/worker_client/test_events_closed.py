"""A ring of events that was closed says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hisparse_service.contract.errors import ClosedError
from tests.shared_event_driver import FileEventDriver
from worker_client.events import WriterEvents, WriterTracker


def test_a_closed_ring_records_and_asks_no_more(tmp_path) -> None:
    away = SimpleNamespace(session_epoch=1)
    events = WriterEvents(away, FileEventDriver(tmp_path), num_events=2)
    tracker = WriterTracker(events, lambda: 1)
    tracker.record()
    events.close()
    events.close()
    with pytest.raises(ClosedError):
        tracker.record()
    with pytest.raises(ClosedError):
        tracker.is_complete(1)
