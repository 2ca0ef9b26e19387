"""Spans of control messages reach a real OTLP receiver; a receiver that is away costs nothing."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import DaemonProcess, wait_until

from hisparse_service.contract import messages as m

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
MakeDaemon = Callable[..., DaemonProcess]


class Receiver:
    """An OTLP/HTTP collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                request = trace_service.ExportTraceServiceRequest.FromString(body)
                for part in request.resource_spans:
                    receiver.resources.append(part.resource)
                    for scope in part.scope_spans:
                        receiver.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def test_each_message_becomes_a_span_with_its_times_and_its_error(
    make_daemon: MakeDaemon, receiver: Receiver
) -> None:
    daemon = make_daemon(
        tracing__otlp_endpoint=receiver.endpoint, tracing__sample_ratio="1"
    ).wait_ready()
    with daemon.client() as client:
        client.open(16)
        client.send(m.Reserve, 1, 0, 1_000)
        assert client.receive_error().code == "CapacityError"
        session = client.session_id
        names = lambda: {span.name for span in receiver.spans}  # noqa: E731
        wait_until(lambda: {"Hello", "OpenNamespace", "AllocateBacking", "Reserve"} <= names())
    (refused,) = [span for span in receiver.spans if span.name == "Reserve"]
    found = attributes(refused)
    assert found["error.type"] == "CapacityError"
    assert refused.status.code == 2
    assert found["hisparse.session"] == session
    assert 0 < refused.end_time_unix_nano - refused.start_time_unix_nano < 10**10
    instances = {
        each.value.string_value
        for each in receiver.resources[0].attributes
        if each.key == "service.instance.id"
    }
    assert instances == {daemon.instance}


def test_a_sample_of_none_still_has_the_errors(make_daemon: MakeDaemon, receiver: Receiver) -> None:
    daemon = make_daemon(
        tracing__otlp_endpoint=receiver.endpoint, tracing__sample_ratio="0"
    ).wait_ready()
    with daemon.client() as client:
        client.ask(m.Pong, m.Ping)
        client.send(m.Reserve, 60_000, 0, 1)
        assert client.receive_error().code == "UsageError"
        wait_until(lambda: receiver.spans)
    assert {span.name for span in receiver.spans} == {"Reserve"}


def test_a_collector_that_is_away_holds_neither_pings_nor_the_end(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(
        tracing__otlp_endpoint="http://127.0.0.1:1", tracing__sample_ratio="1"
    ).wait_ready()
    with daemon.client() as client:
        for _ in range(200):
            client.ask(m.Pong, m.Ping)
    assert daemon.terminate() == 0
