"""Metrics of the device memory that the daemon keeps for workers, from the status. Any thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_STATES: Final = ("held", "waiting", "changing")


def device_metrics(device: dict[str, Any]) -> Iterator[Metric]:
    """Of `status["device"]`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    label = ["device"]
    gauges = {
        name: GaugeMetricFamily(f"hisparse_device_{name}", text, labels=label)
        for name, text in (
            ("context_bytes", "GPU memory of the context of the child that allocates"),
            ("child_silent", "1 while the child owes an answer for too long"),
        )
    }
    taken = GaugeMetricFamily(
        "hisparse_device_backing_bytes", "GPU memory allocated for workers, by who uses it",
        labels=[*label, "state"],
    )  # fmt: skip
    for each in device.get("devices", ()):
        uuid = each["device_uuid"]
        gauges["context_bytes"].add_metric([uuid], each["context_bytes"])
        gauges["child_silent"].add_metric([uuid], each["child"] == "silent")
        by_state = dict.fromkeys(_STATES, 0)
        for backing in each["backings"]:
            if backing["state"] not in ("lost", "failed"):
                by_state[_use_of(backing)] += backing["bytes"]
        for state, count in by_state.items():
            taken.add_metric([uuid, state], count)
    yield from (*gauges.values(), taken)
    yield GaugeMetricFamily(
        "hisparse_device_limit_bytes", "What may be allocated on each GPU; 0: off",
        value=device.get("limit_bytes", 0),
    )  # fmt: skip
    yield CounterMetricFamily(
        "hisparse_device_backings_lost", "Device backings that went with their child",
        value=device.get("lost_total", 0),
    )  # fmt: skip


def _use_of(backing: dict[str, Any]) -> str:
    if backing["state"] == "ready":
        return "held" if backing["holder_session"] else "waiting"
    return "changing"
