"""Rules and dashboard: what they ask for exists, each alert fires in time, each has its runbook."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_tools import DEPLOY, ROOT, find_tool, run

MONITORING = DEPLOY / "monitoring"
RULES = MONITORING / "alerts.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
JOB = 'instance="n",job="hisparse-service"'


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    found = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """(what asks, PromQL) of all rules and panels."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$instance", ".*")


def exported() -> dict[str, set[str]]:
    """Name of each series that a scrape shows, and its labels."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    names: dict[str, set[str]] = {"up": set()}
    for family in generate.metric_families():
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def test_promtool_takes_the_rules_and_the_scrape_configuration() -> None:
    promtool = find_tool("promtool")
    for kind, name in (("rules", "alerts.yaml"), ("config", "prometheus.yaml")):
        done = run([promtool, "check", kind, MONITORING / name])
        assert done.returncode == 0, done.stdout


def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    recorded = [{"record": "q", "expr": expression} for _, expression in queries()]
    path = tmp_path / "queries.yaml"
    path.write_text(
        yaml.safe_dump(
            {"groups": [{"name": f"g{i}", "rules": [r]} for i, r in enumerate(recorded)]}
        )
    )
    done = run([find_tool("promtool"), "check", "rules", path])
    assert done.returncode == 0, done.stdout


def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    names = exported()
    for who, expression in queries():
        for name, labels in re.findall(r"\b(hisparse_\w+|up)\b(?:\{([^}]*)\})?", expression):
            assert name in names, f"{who} asks for {name}"
            known = names[name] | {"instance", "job"}
            for label in re.findall(r"(\w+)\s*=", labels):
                assert label in known, f"{who} asks for {label} of {name}"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    alerts = {rule["alert"] for rule in rules()}
    assert alerts == {path.stem for path in RUNBOOKS.glob("*.md")} - {"index"}
    for rule in rules():
        url = rule["annotations"]["runbook_url"]
        assert url.endswith(f"/runbooks/{rule['alert']}/")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} <= set(rule["annotations"])


def test_every_panel_says_what_it_shows() -> None:
    for panel in panels():
        assert panel["description"], panel["title"]
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


# Series (promtool's notation, one sample a minute) under which each alert fires, and after how many
# minutes; a minute before its time it must not.
FIRING: dict[str, tuple[list[tuple[str, str]], int]] = {
    "HisparseDown": ([(f"up{{{JOB}}}", "0x60")], 1),
    "HisparseNotReady": ([(f'hisparse_phase{{phase="starting",{JOB}}}', "1x60")], 15),
    "HisparseRestarting": ([(f"hisparse_uptime_seconds{{{JOB}}}", "9 1 9 1 9 1x60")], 5),
    "HisparseControlLoopSlow": ([(f"hisparse_loop_longest_turn_seconds{{{JOB}}}", "2x60")], 2),
    "HisparseAllocationsRefused": (
        [(f'hisparse_refusals_total{{code="CapacityError",namespace="1",{JOB}}}', "0+5x60")], 6,
    ),
    "HisparseQuotaReached": (
        [(f'hisparse_refusals_total{{code="QuotaExceeded",namespace="1",{JOB}}}', "0+5x60")], 6,
    ),
    "HisparsePoolThrashing": (
        [(f'hisparse_blocks_{what}_total{{namespace="1",{JOB}}}', "0+100x60")
         for what in ("evicted", "published")], 31,
    ),
    "HisparsePublicationStuck": (
        [(f'hisparse_publication_lag_seconds{{namespace="1",{JOB}}}', "61+60x60")], 2,
    ),
    "HisparseWorkersDying": (
        [(f'hisparse_session_ends_total{{cause="process_ended",{JOB}}}', "0 0 0 3x60")], 3,
    ),
    "HisparseSessionsQuarantined": ([(f"hisparse_sessions_quarantined{{{JOB}}}", "1x60")], 5),
    "HisparseLeasesExpire": (
        [(f'hisparse_leases_expired_total{{namespace="1",{JOB}}}', "0+20x60")], 6,
    ),
    "HisparseMirrorsLost": ([(f"hisparse_worker_mirrors_lost_total{{{JOB}}}", "0 0 0 5x60")], 3),
    "HisparseThreadDied": (
        [(f'hisparse_helper_restarts_total{{helper="http",{JOB}}}', "0 0 0 1x60")], 3,
    ),
    "HisparseBug": ([(f"hisparse_unexpected_errors_total{{{JOB}}}", "0 0 0 1x60")], 3),
    "HisparseMalformedMessages": (
        [(f"hisparse_malformed_messages_total{{{JOB}}}", "0 0 0 1x60")], 3,
    ),
    "HisparseBlocksCorrupt": (
        [(f'hisparse_adopted_blocks{{outcome="corrupt",{JOB}}}', "_ _ _ 1x60")], 3,
    ),
    "HisparseBlocksDamaged": (
        [(f'hisparse_block_checks_total{{verdict="damaged",namespace="1",{JOB}}}', "0 0 0 1x60")],
        3,
    ),
    "HisparseCudaRegistrationFailed": (
        [(f'hisparse_cuda_child_state{{state="failed",{JOB}}}', "1x60")], 1,
    ),
}  # fmt: skip


def alert_test(alert: str) -> dict[str, Any]:
    series, minutes = FIRING[alert]
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    return {
        "name": alert,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{minutes - 1}m", "exp_samples": []},
            {
                "expr": firing, "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            },
        ],
    }  # fmt: skip


def test_each_alert_fires_in_its_time_and_not_before(tmp_path: Path) -> None:
    assert set(FIRING) == {rule["alert"] for rule in rules()}
    path = tmp_path / "alerts_test.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(RULES)], "evaluation_interval": "1m",
                "tests": [alert_test(alert) for alert in FIRING],
            }
        )
    )  # fmt: skip
    done = run([find_tool("promtool"), "test", "rules", path])
    assert done.returncode == 0, done.stdout


def test_a_healthy_daemon_fires_nothing(tmp_path: Path) -> None:
    quiet = [
        (f"up{{{JOB}}}", "1x60"),
        (f'hisparse_phase{{phase="starting",{JOB}}}', "0x60"),
        (f"hisparse_uptime_seconds{{{JOB}}}", "0+60x60"),
        (f"hisparse_loop_longest_turn_seconds{{{JOB}}}", "0.01x60"),
        (f'hisparse_refusals_total{{code="CapacityError",namespace="1",{JOB}}}', "3x60"),
        (f'hisparse_blocks_evicted_total{{namespace="1",{JOB}}}', "0+10x60"),
        (f'hisparse_blocks_published_total{{namespace="1",{JOB}}}', "0+100x60"),
        (f'hisparse_session_ends_total{{cause="bye",{JOB}}}', "0+1x60"),
        (f'hisparse_helper_alive{{helper="http",{JOB}}}', "1x60"),
        (f'hisparse_cuda_child_state{{state="failed",{JOB}}}', "0x60"),
    ]
    path = tmp_path / "quiet_test.yaml"
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in quiet],
        "promql_expr_test": [{"expr": "ALERTS", "eval_time": "60m", "exp_samples": []}],
    }
    path.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    done = run([find_tool("promtool"), "test", "rules", path])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_runbook_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    text = (RUNBOOKS / f"{rule['alert']}.md").read_text()
    for heading in ("## What it means", "## Look", "## Do"):
        assert heading in text, heading
    assert "hisparse-service " in text, "it names a command"
