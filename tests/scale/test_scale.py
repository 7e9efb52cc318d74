"""The parts of `make e2e-scale` that can be tried without a cluster."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from e2e.scale.audit import OPERATOR, writes
from e2e.scale.figures import Report
from e2e.scale.resources import Plan
from e2e.scale.standin import OPERATIONS, Document, Misfit

from postbus.contract.entities import catalog_key


def entry(second: int, verb: str, resource: str, user: str = OPERATOR, **more: object) -> str:
    return json.dumps(
        {
            "requestReceivedTimestamp": f"2026-01-01T00:00:{second:02}.500000Z",
            "verb": verb,
            "user": {"username": user},
            "objectRef": {"resource": resource},
            "responseStatus": {"code": 200},
        }
        | more
    )


def test_writes_of_a_user_are_counted_in_a_span_of_time(tmp_path: Path) -> None:
    status = {"objectRef": {"resource": "queues", "subresource": "status"}}
    (tmp_path / "audit-2026-01-01.jsonl").write_text(entry(5, "patch", "queues") + "\n")
    lines = [
        entry(1, "patch", "queues"),  # too early
        entry(6, "patch", "", **status),
        entry(6, "patch", "", **status, responseStatus={"code": 409}),
        entry(6, "get", "queues"),
        entry(6, "update", "leases"),
        entry(6, "create", "queues", "somebody"),
        entry(9, "create", "secrets"),  # too late
    ]
    log = tmp_path / "audit.jsonl"
    log.write_text("\n".join(lines))
    found = writes(log, "2026-01-01T00:00:05.000000Z", "2026-01-01T00:00:09.000000Z")
    assert found.counts == {"patch queues": 1, "patch queues/status": 2}
    assert (found.total, found.refused) == (3, 1)
    assert str(found) == "1 patch queues, 2 patch queues/status"


def test_entities_are_spread_and_have_names_of_their_own() -> None:
    made = list(Plan("run", 103, 5).entities())
    assert len(made) == 103
    assert Counter(each["metadata"]["namespace"] for each in made) == {
        **{f"run-{number:03}": 21 for number in range(4)},
        "run-004": 19,
    }
    names = {catalog_key(each["metadata"]["name"]) for each in made}
    assert len(names) == 103
    topics = {each["metadata"]["name"] for each in made if each["kind"] == "Topic"}
    owners = {each["spec"]["owner"]["name"] for each in made if each["kind"] == "Subscription"}
    assert owners <= topics


def test_a_value_above_its_limit_is_bold_and_missed(capsys: object) -> None:
    report = Report()
    report.note("fast", 2.5, "s", 3, 1.5)
    report.note("slow", 12.25, "s", 10, 5, "twice")
    report.note("told", 1_000)
    assert [each.what for each in report.missed] == ["slow"]
    assert report.text().splitlines()[-3:] == [
        "| fast | 2.50 s | 3 | 1.50 |",
        "| slow | **12 s** (twice) | 10 | 5 |",
        "| told | 1,000 s |  |  |",
    ]


def test_the_stand_in_of_brokers_answers_as_the_document_of_the_control_api_says() -> None:
    document = Document()
    assert set(OPERATIONS) <= set(document.operations)
    fits = {"items": [], "cursor": "0", "isEnd": True, "startsOver": False}
    document.check_answer("listCounts", 200, fits)
    with pytest.raises(Misfit, match='answer 200 of listCounts: "yes" is not of type "boolean"'):
        document.check_answer("listCounts", 200, fits | {"isEnd": "yes"})
    with pytest.raises(Misfit, match="answer 200 of getStatus: "):
        document.check_answer("getStatus", 200, {"namespace": "bus"})
    with pytest.raises(Misfit, match="listCounts does not answer 201"):
        document.check_answer("listCounts", 201, fits)
    with pytest.raises(Misfit, match='body of putAuthorizationRule: "Everything" is not one of'):
        document.check_body("putAuthorizationRule", {"rights": ["Everything"]})
