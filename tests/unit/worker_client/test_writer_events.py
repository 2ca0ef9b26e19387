"""What the events' driver makes of torch's answers; the rest needs two processes: integration."""

from __future__ import annotations

import contextlib

import pytest
import torch
from shared_event_driver import FileEventDriver

from hisparse_service.contract.errors import DeviceError, UsageError
from worker_client.events import PeerEvents, TorchEventDriver

FAILED = "CUDA error: invalid device context\nCUDA kernel errors might be reported later"


class FailingEvent:
    """torch's event where /dev/shm is not shared."""

    def __init__(self, *, interprocess):
        assert interprocess, "events without that flag have no handle"

    def ipc_handle(self):
        raise RuntimeError(FAILED)

    @classmethod
    def from_ipc_handle(cls, *_):
        raise RuntimeError(FAILED)


@pytest.fixture
def driver(monkeypatch) -> TorchEventDriver:
    monkeypatch.setattr(torch.cuda, "Event", FailingEvent)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return TorchEventDriver("cuda:0")


def test_a_driver_that_fails_is_a_device_error_that_says_what_to_do(driver):
    for attempt, call in (
        (driver.create, "cudaIpcGetEventHandle"),
        (lambda: driver.open(bytes(64)), "cudaIpcOpenEventHandle"),
    ):
        with pytest.raises(DeviceError, match=r"invalid device context\. Events need one /dev/shm"):
            attempt()
        with pytest.raises(DeviceError) as caught:
            attempt()
        assert caught.value.details == {"call": call}


def test_devices_that_cannot_share_events_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="got cpu"):
        TorchEventDriver("cpu")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UsageError, match=r"ROCm 7\.0"):
        TorchEventDriver("cuda:0")


def test_a_wait_is_not_captured_into_a_graph(monkeypatch, tmp_path):
    """It would wait for the step of the capture, in every replay."""
    driver = FileEventDriver(tmp_path)
    events = PeerEvents(None, driver)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    events.wait(1)  # nothing is open
    events._events = [driver.create()[0]]
    with pytest.raises(UsageError, match="a wait for a writer's event"):
        events.wait(1)
