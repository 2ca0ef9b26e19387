"""What each path answers, called as WSGI: probes, tokens, metrics, and nothing for strangers."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hisparse_service.telemetry.health import Health
from hisparse_service.telemetry.metrics import ServerMetrics
from hisparse_service.telemetry.web import Application, Trust, page

TOKEN = "open-sesame"  # noqa: S105


class World:
    def __init__(self, token: str = "") -> None:
        self.metrics = ServerMetrics()
        self.now_s, self.last_turn_s = 100.0, 99.9
        self.application = Application(
            self.metrics,
            Health(
                last_turn_s=lambda: self.last_turn_s, snapshot=lambda: self.metrics.snapshot,
                clock=lambda: self.now_s,
            ),
            overview=lambda: b'{"at":"now"}', token=lambda: token,
        )  # fmt: skip

    def get(
        self, path: str, *, trust: Trust = Trust.TOKEN, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        answered: list[Any] = []
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, **headers}
        body = self.application.wsgi(trust)(
            environ, lambda status, headers: answered.append((status, headers))
        )
        status, found = answered[0]
        return int(status.split()[0]), dict(found), b"".join(body)


def test_healthz_is_good_while_the_loop_turns_and_503_when_it_does_not() -> None:
    world = World(TOKEN)
    assert world.get("/healthz")[0] == 200
    world.last_turn_s = world.now_s - 1.2
    code, _, body = world.get("/healthz")
    assert code == 503
    assert "did not turn for 1.2 s" in json.loads(body)["reason"]


@pytest.mark.parametrize(
    ("snapshot", "code", "reason"),
    [
        ({}, 503, "populated: 0%"),
        ({"phase": "starting", "progress": 0.42}, 503, "populated: 42%"),
        ({"phase": "ready", "progress": 1.0}, 200, ""),
        ({"phase": "draining", "progress": 1.0}, 503, "draining"),
    ],
)
def test_readyz_says_why_not(snapshot: dict[str, Any], code: int, reason: str) -> None:
    world = World(TOKEN)
    world.metrics.snapshot = snapshot
    found, _, body = world.get("/readyz")
    assert found == code
    assert reason in json.loads(body).get("reason", "")


def test_readyz_is_503_when_the_loop_hangs_although_the_snapshot_says_ready() -> None:
    world = World()
    world.metrics.snapshot = {"phase": "ready", "progress": 1.0}
    world.last_turn_s = 0.0
    assert world.get("/readyz")[0] == 503


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/metrics", "/status", "/overview.json", "/", "/nothing"])
@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", basic("any", "wrong"), "Basic ???",
     "Basic " + base64.b64encode(b"\xff\xfe:x").decode(), f"Token {TOKEN}", "Bearer \xff"],
)  # fmt: skip
def test_everything_but_health_needs_the_token(path: str, header: str) -> None:
    world = World(TOKEN)
    code, headers, body = world.get(path, HTTP_AUTHORIZATION=header)
    assert code == 401
    assert "Basic" in headers["WWW-Authenticate"]
    assert TOKEN.encode() not in body


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer  {TOKEN} ", basic("x", TOKEN)])
def test_the_token_opens(header: str) -> None:
    assert World(TOKEN).get("/status", HTTP_AUTHORIZATION=header)[0] == 200


def test_the_unix_socket_needs_no_token() -> None:
    assert World(TOKEN).get("/status", trust=Trust.SOCKET)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(method: str) -> None:
    assert World().get("/status", method=method)[0] == 405


def test_metrics_are_valid_text_and_rendered_once_a_snapshot() -> None:
    world = World()
    world.metrics.snapshot = {"phase": "ready", "progress": 1.0}
    world.metrics.count_error("StaleBlock")
    _, headers, body = world.get("/metrics")
    assert headers["Content-Type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {"hisparse_control_errors", "hisparse_phase", "hisparse_cuda_child_state"} <= names
    world.metrics.count_error("StaleBlock")
    assert world.get("/metrics")[2] == body
    world.metrics.snapshot = dict(world.metrics.snapshot)
    assert b'hisparse_control_errors_total{code="StaleBlock"} 2.0' in world.get("/metrics")[2]


def test_openmetrics_is_spoken_when_it_is_asked_for() -> None:
    _, headers, body = World().get("/metrics", HTTP_ACCEPT="application/openmetrics-text")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_looking_at_the_page_has_the_loop_make_rows_of_sessions() -> None:
    world = World()
    assert world.metrics.watched_until_s == 0.0
    assert world.get("/overview.json")[2] == b'{"at":"now"}'
    assert world.metrics.watched_until_s > 0.0


def test_the_page_has_no_external_resource_and_a_policy_that_forbids_any() -> None:
    code, headers, body = World().get("/")
    assert code == 200
    text = body.decode()
    outside = [part for part in ("src=", "@import", "url(", '<link rel="style') if part in text]
    assert not outside
    assert text.count("http") == text.count("http-equiv") + text.count("http://www.w3.org/2000/svg")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy == page()[1]


def test_labels_are_bounded_whatever_clients_call_themselves() -> None:
    world = World()
    world.metrics.snapshot = {
        "namespaces": [
            {"namespace": 1, "name": 'x"\n' * 500, "layout": "l", "blocks": {},
             "statistics": {"refusals": {"CapacityError": 2}}}
        ]
    }  # fmt: skip
    body = world.get("/metrics")[2].decode()
    assert max(len(line) for line in body.splitlines()) < 700
    assert 'hisparse_refusals_total{code="CapacityError",namespace="1"} 2.0' in body
