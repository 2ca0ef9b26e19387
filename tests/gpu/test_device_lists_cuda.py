"""Lists of numbers go to the device without a wait: torch raises where a copy would wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from worker_client.device_lists import to_device

DEVICE = torch.device("cuda:0")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_lists_are_enqueued_behind_work_and_arrive_whole(no_waiting) -> None:
    torch.cuda._sleep(200_000_000)
    behind = torch.cuda.current_stream().record_event()
    made = [to_device(list(range(i, i + 100)), torch.int64, DEVICE) for i in range(200)]
    assert not behind.query(), "the host waited for the device"
    assert not to_device([], torch.int32, DEVICE).numel()
    torch.cuda.set_sync_debug_mode("default")
    for index, tensor in enumerate(made):
        assert tensor.tolist() == list(range(index, index + 100))
