"""Reader groups over the control API: list, create, reset, delete."""

from __future__ import annotations

from typing import Any

import pytest

from tests.edge.control.control_bus import Caller, path_of

pytestmark = pytest.mark.slow

GROUPS = "/v1/reader-groups"


def listed(api: Caller, queue: str) -> list[dict[str, Any]]:
    answer = api.get(GROUPS)
    assert answer.status == 200
    assert answer.body["unavailablePartitions"] == []
    return [each for each in answer.body["items"] if each["entity"] == queue]


def test_a_group_is_created_once_listed_and_deleted(api: Caller, queue: str) -> None:
    body = {"entity": queue, "name": "lake"}
    created = api.post(f"{GROUPS}/create", body)
    assert (created.status, created.body["planNumber"], created.body["unreadMessages"]) == (
        201, 0, 0,
    )  # fmt: skip
    assert api.post(f"{GROUPS}/create", body).status == 200
    assert api.post(f"{GROUPS}/create", {**body, "subQueue": "deadLetter"}).status == 201
    assert [(each["subQueue"], each["name"], each["kind"]) for each in listed(api, queue)] == [
        ("main", "lake", "tap"),
        ("deadLetter", "lake", "tap"),
    ]
    assert api.post(f"{GROUPS}/delete", body).status == 200
    again = api.post(f"{GROUPS}/delete", body)
    assert (again.status, again.kind) == (404, "not-found")
    assert [each["subQueue"] for each in listed(api, queue)] == ["deadLetter"]


def test_limits_are_those_of_the_last_request_that_names_some(api: Caller, queue: str) -> None:
    body = {"entity": queue, "name": "lake"}
    limits = {"maxPinnedBytes": 2_000_000, "maxPinnedAge": "P7D", "onPinLimit": "drop"}
    created = api.post(f"{GROUPS}/create", {**body, **limits})
    assert created.status == 201
    for found in (created.body, api.post(f"{GROUPS}/create", body).body, *listed(api, queue)):
        assert {name: found[name] for name in limits} == limits
    changed = api.post(f"{GROUPS}/create", {**body, "maxPinnedAge": "PT1H"})
    assert changed.status == 200
    [found] = listed(api, queue)
    assert (found["maxPinnedBytes"], found["maxPinnedAge"], found["onPinLimit"]) == (
        None, "PT1H", "fail",
    )  # fmt: skip
    assert {"lagSeconds", "keptBytes", "isOverLimit", "hasLostMessages"} <= found.keys()
    entries = api.get(f"/v1/audit?entity={queue}").body["items"]
    detail = {"group": "lake", "maxPinnedAge": "PT1H"}
    assert entries[0]["detail"] == {**entries[0]["detail"], **detail}
    assert "maxPinnedBytes" not in entries[0]["detail"]


def test_a_partitioned_queue_has_one_group_over_all_partitions(api: Caller, name: str) -> None:
    assert api.put(path_of("queues", name), {"enablePartitioning": True}).status == 201
    assert api.post(f"{GROUPS}/create", {"entity": name, "name": "lake"}).status == 201
    assert [each["name"] for each in listed(api, name)] == ["lake"]
    assert api.post(f"{GROUPS}/delete", {"entity": name, "name": "lake"}).status == 200
    assert listed(api, name) == []


@pytest.mark.parametrize("start", ["0001-01-01T00:00:00", "2026-01-31T08:00:00", "yesterday"])
def test_a_start_without_a_zone_is_refused(api: Caller, queue: str, start: str) -> None:
    body = {"entity": queue, "name": "lake", "start": start}
    answer = api.post(f"{GROUPS}/create", body)
    assert (answer.status, answer.kind) == (400, "invalid")
    assert listed(api, queue) == []


def test_a_reset_group_refuses_its_reader(api: Caller, queue: str) -> None:
    body = {"entity": queue, "name": "lake", "start": "earliest"}
    assert api.post(f"{GROUPS}/create", body).status == 201
    [before] = listed(api, queue)
    for start in ("latest", "earliest", "2020-01-01T00:00:00Z"):
        moved = api.post(f"{GROUPS}/reset", {**body, "start": start})
        assert moved.status == 200
        assert moved.body["epoch"] == before["epoch"] + 1
        [before] = listed(api, queue)
    missing = api.post(f"{GROUPS}/reset", {**body, "name": "none"})
    assert (missing.status, missing.kind) == (404, "not-found")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"name": "Lake"}, 400),
        ({"name": ""}, 400),
        ({"name": "l" * 129}, 400),
        ({"start": "yesterday"}, 400),
        ({"start": 7}, 400),
        ({"subQueue": "scheduled"}, 400),
        ({"entity": "absent"}, 404),
        ({"maxPinnedBytes": -1}, 400),
        ({"maxPinnedBytes": 2**70}, 400),
        ({"maxPinnedAge": "a day"}, 400),
        ({"onPinLimit": "drop"}, 400),
        ({"maxPinnedAge": "P1D", "onPinLimit": "delete"}, 400),
        ({"other": 1}, 400),
    ],
    ids=str,
)
def test_a_wrong_group_is_refused(
    api: Caller, queue: str, change: dict[str, Any], status: int
) -> None:
    body = {"entity": queue, "name": "lake", **change}
    assert api.post(f"{GROUPS}/create", body).status == status
    assert listed(api, queue) == []


def test_a_topic_and_a_forwarding_queue_have_no_groups(api: Caller, queue: str) -> None:
    topic, forwarding = f"{queue}-topic", f"{queue}-forwarding"
    assert api.put(path_of("topics", topic), {}).status == 201
    assert api.put(path_of("queues", forwarding), {"forwardTo": queue}).status == 201
    for name in (topic, forwarding):
        assert api.post(f"{GROUPS}/create", {"entity": name, "name": "lake"}).status == 409
        assert listed(api, name) == []


def test_groups_are_in_the_audit(api: Caller, queue: str) -> None:
    body = {"entity": queue, "name": "lake"}
    api.post(f"{GROUPS}/create", body)
    api.post(f"{GROUPS}/delete", body)
    entries = api.get(f"/v1/audit?entity={queue}").body["items"]
    assert [(each["verb"], each["detail"]["group"]) for each in entries[:2]] == [
        ("delete reader group", "lake"),
        ("create reader group", "lake"),
    ]
