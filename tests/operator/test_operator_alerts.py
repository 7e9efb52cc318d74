"""Alerts of the operator: metrics and labels that it serves, unit tests, and a runbook for each."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import promql_parser
import pytest
import yaml

from postbus_operator.conditions import ABNORMAL
from postbus_operator.kube.cache import Cache
from postbus_operator.objects import Key
from postbus_operator.running.abnormal import AbnormalCondition, abnormal_conditions
from postbus_operator.running.health import Health, HealthServer
from postbus_operator.running.leading import show_queue
from postbus_operator.running.metrics import MAX_SERIES, RESULTS, Metrics
from postbus_operator.running.work_queue import WorkQueue
from tests.operator.objects import entity

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = (ROOT / "docs/guides/kubernetes-operations.md").read_text(encoding="utf-8")
START_S: Final = datetime(2026, 11, 23, 9, tzinfo=UTC).timestamp()


def rules(name: str = "operator-alerts.yaml") -> list[dict[str, Any]]:
    content = yaml.safe_load((ROOT / "docs" / name).read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def served() -> dict[str, set[str]]:
    """Return the names of the operator's samples and their labels."""
    metrics = Metrics()
    HealthServer(Health(), metrics, 180)
    show_queue(metrics, WorkQueue(None))
    metrics.set_age("queues", "", 1.0)
    metrics.answered("get", 200, 0.1)
    metrics.set_conditions(
        [AbnormalCondition(Key("Queue", "shop", "orders"), "Stalled", "InvalidSpec", START_S)]
    )
    metrics.set_certificates({("shop", "bus-tls"): START_S})
    found: dict[str, set[str]] = {}
    for line in metrics.text().decode().splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:{(.*)})? \S+", line).groups()
            found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels or ""))
    return found


TARGET: Final = {"namespace", "job"}
"""Labels that Prometheus adds to each series."""


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    expression = rule["expr"]
    promql_parser.parse(expression)
    known = served()
    used = re.findall(r"\b(postbus_\w+)(?:{(.*?)})?", expression, re.DOTALL)
    assert used
    for name, matchers in used:
        assert name in known, name
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= known[name]
        grouped = re.search(r"by \((.*?)\)", expression)
        if grouped is not None:
            assert set(grouped[1].split(", ")) <= known[name] | TARGET
    for result in re.findall(r'result=~"(.*?)"', expression):
        assert set(result.split("|")) <= set(RESULTS)
    for condition in re.findall(r'condition="(.*?)"', expression):
        assert condition in ABNORMAL | {"Ready"}


def test_every_alert_is_in_the_table_and_has_a_section_and_unit_tests() -> None:
    names = [rule["alert"] for rule in rules()]
    assert re.findall(r"^\| \[`(Postbus\w+)`\]", GUIDE, re.MULTILINE) == names
    assert re.findall(r"^## (Postbus\w+)$", GUIDE, re.MULTILINE) == names
    for rule in rules():
        annotations = rule["annotations"]
        assert annotations.keys() == {"summary", "description", "runbook_url"}
        page, _, anchor = annotations["runbook_url"].partition("#")
        assert page == "docs/guides/kubernetes-operations.md"
        assert anchor == rule["alert"].lower()
    content = yaml.safe_load((ROOT / "tests/operator_alerts_test.yaml").read_text())
    cases = [case for test in content["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == set(names)
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == set(names)


def test_the_guide_says_for_each_alert_of_brokers_what_is_different_on_kubernetes() -> None:
    names = [rule["alert"] for rule in rules("alerts.yaml")]
    _, _, chapter = GUIDE.partition("\n## Alerts of brokers\n")
    assert re.findall(r"^\| `(Postbus\w+)`", chapter, re.MULTILINE) == names


# --- what the metrics show ----------------------------------------------------------------------


def resource(name: str, *conditions: tuple[str, str, str], minute: int = 0) -> dict[str, Any]:
    found = entity("Queue", name)
    found["status"] = {
        "conditions": [
            {
                "type": type,
                "status": status,
                "reason": reason,
                "message": "",
                "lastTransitionTime": f"2026-11-23T09:{minute:02}:00Z",
            }
            for type, status, reason in conditions
        ]
    }
    return found


def test_only_conditions_out_of_the_ordinary_are_shown_and_the_oldest_first() -> None:
    cache = Cache()
    for each in (
        entity("Queue", "young"),
        resource("fine", ("Ready", "True", "Ready"), ("Valid", "True", "Accepted")),
        resource("wrong", ("Ready", "False", "Invalid"), ("Valid", "False", "BadName"), minute=5),
        resource("warned", ("Ready", "True", "Ready"), ("Valid", "True", "ForwardCycle"), minute=9),
        resource("lost", ("Ready", "Unknown", "BackendUnavailable"), minute=3),
        resource("held", ("Ready", "False", "Deleting"), ("DeletionBlocked", "True", "Protected")),
    ):
        cache.observe(each)
    assert abnormal_conditions(cache.all()) == [
        (Key("Queue", "shop", "held"), "DeletionBlocked", "Protected", START_S),
        (Key("Queue", "shop", "held"), "Ready", "Deleting", START_S),
        (Key("Queue", "shop", "lost"), "Ready", "BackendUnavailable", START_S + 180),
        (Key("Queue", "shop", "wrong"), "Ready", "Invalid", START_S + 300),
        (Key("Queue", "shop", "wrong"), "Valid", "BadName", START_S + 300),
        (Key("Queue", "shop", "warned"), "Valid", "ForwardCycle", START_S + 540),
    ]


def test_series_of_resources_are_bounded_and_go_with_their_condition() -> None:
    metrics = Metrics()
    number = MAX_SERIES + 7
    conditions = [
        AbnormalCondition(Key("Queue", "shop", f"q{at}"), "Stalled", "InvalidSpec", START_S + at)
        for at in range(number)
    ]
    other = AbnormalCondition(Key("Queue", "shop", "q"), "SecretsSynced", "SourceMissing", 0.0)
    metrics.set_conditions([other, *conditions])
    metrics.set_certificates({("shop", f"c{at}"): START_S - at for at in range(number)})
    text = metrics.text().decode()
    total = 'postbus_operator_conditions{condition="Stalled",kind="Queue",reason="InvalidSpec"}'
    assert f"{total} {number}.0" in text
    assert 'condition="SecretsSynced",kind="Queue",reason="SourceMissing"} 1.0' in text
    for name in ("condition_timestamp_seconds", "certificate_expiry_timestamp_seconds"):
        assert text.count(f"postbus_operator_{name}{{") == MAX_SERIES
    assert 'name="q0"' in text
    assert f'name="q{number - 1}"' not in text
    assert f'secret="c{number - 1}"' in text
    assert 'secret="c0"' not in text
    metrics.set_conditions([])
    metrics.set_certificates({})
    assert "shop" not in metrics.text().decode()
