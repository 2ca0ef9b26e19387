"""OpenTelemetry spans of control messages, made behind the control loop's back.

The loop leaves copies in a tap; this thread turns a sample of them into spans with the times that
they really had and hands them to the OTLP exporter. A collector that is slow or away costs spans,
nothing else. The libraries are an extra, imported only when an endpoint is set.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from typing import Any, Final

from hisparse_service.contract import messages as m
from hisparse_service.contract.errors import ConfigError
from hisparse_service.telemetry.logs import get_logger
from hisparse_service.telemetry.taps import Answered, MessageTap

_INTERVAL_S: Final = 0.5
_TRACES_PATH: Final = "/v1/traces"
_EXPORT_TIMEOUT_S: Final = 5.0

log = get_logger()


class SpanExporter:
    """Exports spans to one collector.

    Args:
        endpoint: Base URL of an OTLP/HTTP collector.
        sample_ratio: Share of the messages, 0 to 1; errors always count.
        instance: Of the daemon.
        version: Of the daemon.

    Raises:
        ConfigError: The libraries are not installed.
    """

    def __init__(self, endpoint: str, *, sample_ratio: float, instance: str, version: str) -> None:
        if importlib.util.find_spec("opentelemetry") is None or (
            importlib.util.find_spec("opentelemetry.exporter") is None
        ):
            raise ConfigError(
                "tracing.otlp_endpoint is set, but OpenTelemetry is not installed",
                remedy="Install hisparse-service[otel], or unset tracing.otlp_endpoint",
            )
        self._endpoint = endpoint.rstrip("/") + _TRACES_PATH
        self._sample_ratio = sample_ratio
        self._resource = {
            "service.name": "hisparse-service", "service.instance.id": instance,
            "service.version": version,
        }  # fmt: skip
        self._random = random.Random()  # noqa: S311 - a sample, no secret
        self.tap = MessageTap()

    def run(self, stopping: threading.Event) -> None:
        """Export until `stopping` is set."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create(self._resource), shutdown_on_exit=False)
        processor = BatchSpanProcessor(
            OTLPSpanExporter(self._endpoint, timeout=_EXPORT_TIMEOUT_S),
            schedule_delay_millis=1_000, export_timeout_millis=int(_EXPORT_TIMEOUT_S * 1000),
        )  # fmt: skip
        provider.add_span_processor(processor)
        tracer = provider.get_tracer("hisparse_service")
        try:
            is_last = False
            while not is_last:
                is_last = stopping.wait(_INTERVAL_S)
                wall_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
                for answered in self.tap.take():
                    if self._is_sampled(answered):
                        _make_span(tracer, answered, wall_minus_monotonic_ns)
        finally:
            # A collector that is away must not hold the daemon's end.
            threading.Thread(target=provider.shutdown, name="spans-end", daemon=True).start()

    def _is_sampled(self, answered: Answered) -> bool:
        return isinstance(answered.reply, m.ErrorReply) or (
            self._random.random() < self._sample_ratio
        )


def _make_span(tracer: Any, answered: Answered, offset_ns: int) -> None:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    name = type(answered.request).__name__
    span = tracer.start_span(
        name, kind=SpanKind.SERVER, start_time=answered.started_ns + offset_ns,
        attributes={
            "rpc.system": "hisparse", "rpc.method": name, "hisparse.session": answered.session_id,
            "hisparse.request_id": answered.request.request_id,
            "hisparse.frame_bytes": answered.frame_bytes,
        },
    )  # fmt: skip
    if isinstance(answered.reply, m.ErrorReply):
        span.set_attribute("error.type", answered.reply.code)
        span.set_status(Status(StatusCode.ERROR, answered.reply.code))
    span.end(end_time=answered.ended_ns + offset_ns)
