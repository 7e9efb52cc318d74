"""Answers about many entities at once: totals and the subscriptions of all topics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import Caller, ControlledBus, controlled_bus, path_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    make_database(postgres_server, "control_bulk", template=TEMPLATE)
    folder = tmp_path_factory.mktemp("control")
    with controlled_bus(dsn_of(postgres_server, "control_bulk"), folder) as bus:
        yield bus


@pytest.fixture
def api(running: ControlledBus) -> Caller:
    return running.caller


def make_topic(api: Caller, topic: str, *subscriptions: str) -> None:
    assert api.put(path_of("topics", topic), {}).status == 201
    for name in subscriptions:
        assert api.put(path_of("topics", topic, "subscriptions", name), {}).status == 201


# --- subscriptions and totals -------------------------------------------------------------------


def test_subscriptions_of_all_topics_are_listed_by_path(api: Caller) -> None:
    make_topic(api, "list-b", "one", "Two")
    make_topic(api, "LIST-a", "three")
    make_topic(api, "list-c")
    found = api.get("/v1/subscriptions").body
    paths = [each["path"] for each in found["items"] if each["topic"].lower().startswith("list-")]
    assert paths == [
        "LIST-a/Subscriptions/three",
        "list-b/Subscriptions/one",
        "list-b/Subscriptions/Two",
    ]
    below = api.get(path_of("topics", "list-b", "subscriptions")).body["items"]
    assert below == [each for each in found["items"] if each["topic"] == "list-b"]
    pages, skip = [], 0
    while skip is not None:
        page = api.get(f"/v1/subscriptions?skip={skip}&top=1").body
        assert len(page["items"]) == 1
        pages += page["items"]
        skip = page["nextSkip"]
    assert pages == found["items"]
    assert api.get("/v1/subscriptions?skip=100000").body == {"items": [], "nextSkip": None}


@pytest.mark.parametrize("query", ["top=0", "top=1001", "top=-1", "top=x", "skip=-1", "topic=a"])
def test_pages_of_all_subscriptions_are_bounded(api: Caller, query: str) -> None:
    refused = api.get(f"/v1/subscriptions?{query}")
    assert (refused.status, refused.kind) == (400, "invalid")


def test_namespace_has_totals_of_its_version(api: Caller) -> None:
    before = api.get("/v1/namespace").body
    make_topic(api, "total", "one", "two")
    mark = "?managed-by=operator"
    assert api.put(path_of("queues", "total-queue") + mark, {}).status == 201
    after = api.get("/v1/namespace").body
    grown = {kind: count - before["entities"][kind] for kind, count in after["entities"].items()}
    assert grown == {"queues": 1, "topics": 1, "subscriptions": 2, "unmanaged": 3}
    assert after["version"] > before["version"]
    assert api.put(path_of("topics", "total") + mark, {}).status == 200
    marked = api.get("/v1/namespace").body["entities"]
    assert marked == after["entities"] | {"unmanaged": after["entities"]["unmanaged"] - 1}
    assert api.delete(path_of("topics", "total")).status == 200
    assert api.delete(path_of("queues", "total-queue") + "?policy=Retain").status == 200
    assert api.get("/v1/namespace").body["entities"] == before["entities"]
