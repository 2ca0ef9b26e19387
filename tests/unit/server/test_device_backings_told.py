"""Whoever asked for device memory, or held it, hears that it failed or was lost."""

from __future__ import annotations

import pytest
from test_device_backings import (
    SIZE,
    RecordedProcess,
    ask,
    devices,
    make_ready,
    recorded,
    states,
)

from hisparse_service.contract.errors import CapacityError
from hisparse_service.pool.device_protocol import Answer
from hisparse_service.server.device_backings import DeviceBackings, DeviceOptions

__all__ = ["devices", "recorded"]


def test_a_refusal_that_took_long_still_reaches_who_asked(
    recorded: list[RecordedProcess],
) -> None:
    """Forgotten at once, it would be asked for again, and again in vain."""
    devices = DeviceBackings(DeviceOptions(limit_bytes=SIZE, lease_s=100, timeout_s=600))
    ask(devices)
    devices.tick(90.0, is_draining=False)
    recorded[0].answer(Answer(event="refused", backing_id=1, code="CapacityError", message="full"))
    devices.tick(90.5, is_draining=False)
    assert states(devices) == ["failed"]
    with pytest.raises(CapacityError, match="full"):
        ask(devices, now_s=90.6)
    assert states(devices) == []


def test_a_holder_is_told_of_its_loss_though_another_session_asks_first(
    devices: DeviceBackings,
    recorded: list[RecordedProcess],
) -> None:
    """Otherwise it would go on reading memory that its owner's death freed."""
    lost = make_ready(devices, recorded)
    recorded[0].die()
    assert ask(devices, session=2).backing_id != lost
    assert devices.lost_of(1) == [lost]
    devices.session_ended(1, may_live=False, now_s=1.0)
    assert devices.lost_of(1) == []
    assert states(devices) == ["allocating"]
