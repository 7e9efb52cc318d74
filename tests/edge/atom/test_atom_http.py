"""Administration by plain HTTP: bodies, headers, paths, and refusals."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from xml.etree import ElementTree

import aiohttp
import pytest

from postbus.broker.access.authorization_rules import Keys
from postbus.broker.access.authz import KeyRule
from postbus.contract.entities import Right
from postbus.store.catalog_change import CATALOG_PARTITION
from postbus.store.errors import StoreUnavailable
from tests.edge.atom.atom_documents import ATOM, BUS, request_of
from tests.edge.bus_thread import RULES, BusThread, sas_token
from tests.edge.http_client import Answer, HttpClient, token_of, url_of

LOCK = "<LockDuration>PT{seconds}S</LockDuration>"


@pytest.fixture
async def http(bus: BusThread) -> AsyncIterator[HttpClient]:
    async with aiohttp.ClientSession() as session:
        yield HttpClient(bus, session)


def element_of(answer: Answer, name: str) -> str | None:
    return ElementTree.fromstring(answer.body).findtext(f".//{{{BUS}}}{name}")


async def put(
    http: HttpClient, path: str, inside: str = "", tag: str = "QueueDescription", **headers: str
) -> Answer:
    body = request_of(tag, inside)
    return await http.call("PUT", path, body, {k.replace("_", "-"): v for k, v in headers.items()})


# --- make, change, delete -------------------------------------------------------------------------


async def test_an_entity_is_created_read_and_deleted(http: HttpClient) -> None:
    made = await put(http, "/raw/queue?api-version=2021-05", LOCK.format(seconds=33))
    assert made.status == 201
    assert made.headers["Content-Type"] == "application/atom+xml;type=entry;charset=utf-8"
    assert element_of(made, "LockDuration") == "PT33S"
    again = await put(http, "/raw/queue")
    assert again.status == 409
    assert again.detail.startswith("SubCode=40900. Conflict.")
    for path in ("/raw/queue", "//raw//queue/", "/RAW/Queue?enrich=False", "/raw%2Fqueue"):
        found = await http.call("GET", path)
        assert (found.status, element_of(found, "LockDuration")) == (200, "PT33S")
    changed = await put(http, "/raw/queue", LOCK.format(seconds=34), If_Match="*")
    assert (changed.status, element_of(changed, "LockDuration")) == (200, "PT34S")
    gone = await http.call("DELETE", "/raw/queue")
    assert (gone.status, gone.body) == (200, b"")
    assert (await http.call("DELETE", "/raw/queue")).status == 404
    assert (await put(http, "/raw/queue", If_Match="*")).status == 404


async def test_an_outdated_etag_is_refused(http: HttpClient, bus: BusThread, queue: str) -> None:
    first = (await http.call("GET", f"/{queue}")).headers["ETag"]
    assert re.fullmatch(r'"\d+"', first)
    changed = await put(http, f"/{queue}", LOCK.format(seconds=31), If_Match=first)
    assert changed.status == 200
    second = changed.headers["ETag"]
    assert second != first
    for old in (first, f"W/{first}", '"x"', f"{first}, {second}"):
        late = await put(http, f"/{queue}", LOCK.format(seconds=32), If_Match=old)
        assert (late.status, late.detail[:14]) == (412, "SubCode=41200.")
    assert (await http.call("DELETE", f"/{queue}", headers={"If-Match": first})).status == 412
    assert element_of(await http.call("GET", f"/{queue}"), "LockDuration") == "PT31S"
    topic = bus.topic()
    bus.subscription(topic, "s")
    rule = f"/{topic}/Subscriptions/s/Rules/$Default"
    assert (await put(http, rule, "", "RuleDescription", If_Match='"1"')).status == 412
    assert (await put(http, rule, "", "RuleDescription", If_Match="*")).status == 200
    assert (await http.call("DELETE", f"/{queue}", headers={"If-Match": second})).status == 200


@pytest.mark.behaviour("S217", "S218", "S219")
async def test_the_version_that_brought_partitioning_is_answered(http: HttpClient) -> None:
    elements = "<EnablePartitioning>true</EnablePartitioning>"
    for tag, path in (("QueueDescription", "/p13/queue"), ("TopicDescription", "/p13/topic")):
        made = await put(http, f"{path}?api-version=2013-10", elements, tag)
        assert made.status == 201
        found = await http.call("GET", f"{path}?api-version=2013-10")
        assert element_of(found, "EnablePartitioning") == "true"
        assert b"?api-version=2013-10<" in found.body


async def test_a_subscription_begins_with_the_rule_it_brings(http: HttpClient) -> None:
    await put(http, "/ruled", tag="TopicDescription")
    first = (
        "<DefaultRuleDescription><Filter i:type='CorrelationFilter'><Label>x</Label></Filter>"
        "<Name>mine</Name></DefaultRuleDescription>"
    )
    at = "/ruled/Subscriptions/s"
    assert (await put(http, at, first, "SubscriptionDescription")).status == 201
    rules = await http.call("GET", f"{at}/Rules/")
    assert [each.text for each in titles(rules)] == ["mine"]
    again = first.replace("mine", "other")
    assert (await put(http, at, again, "SubscriptionDescription", If_Match="*")).status == 200
    assert [each.text for each in titles(await http.call("GET", f"{at}/rules"))] == ["mine"]


async def test_a_rule_that_is_too_large_is_refused(http: HttpClient, bus: BusThread) -> None:
    topic = bus.topic()
    bus.subscription(topic)
    at = f"/{topic}/Subscriptions/all/Rules/large"
    rule = f"<Filter i:type='CorrelationFilter'><Label>{'x' * 66_000}</Label></Filter>"
    answer = await put(http, at, f"{rule}<Name>large</Name>", "RuleDescription")
    assert answer.status == 400
    assert "65536 are allowed" in answer.detail


def titles(answer: Answer) -> list[ElementTree.Element]:
    assert answer.headers["Content-Type"] == "application/atom+xml;type=feed;charset=utf-8"
    return ElementTree.fromstring(answer.body).findall(f"{{{ATOM}}}entry/{{{ATOM}}}title")


async def test_a_body_of_another_kind_is_refused(http: HttpClient, bus: BusThread) -> None:
    topic = bus.topic()
    for path, tag in (
        ("/wrong", "SubscriptionDescription"),
        ("/wrong", "RuleDescription"),
        ("/wrong", "Anything"),
        (f"/{topic}/Subscriptions/s", "QueueDescription"),
        (f"/{topic}/Subscriptions/s/Rules/r", "QueueDescription"),
    ):
        answer = await put(http, path, "", tag)
        assert answer.status == 400
        assert "the entry describes something else; send a " in answer.detail
    kind_changed = await put(http, f"/{topic}", If_Match="*")
    assert kind_changed.status == 409
    for path in ("/$Resources/queues", "/", f"/{topic}/Subscriptions", "/a/$DeadLetterQueue"):
        assert (await put(http, path)).status == 400


# --- questions ------------------------------------------------------------------------------------


async def test_missing_entities_are_answered_as_by_service_bus(http: HttpClient) -> None:
    for path in ("/nothing/here", "/"):
        found = await http.call("GET", path)
        assert found.status == 200
        root = ElementTree.fromstring(found.body)
        assert root.tag == f"{{{ATOM}}}feed"
        assert root.findtext(f"{{{ATOM}}}title") == "Publicly Listed Services"
    for path in (
        "/nothing/Subscriptions",
        "/nothing/Subscriptions/s",
        "/nothing/Subscriptions/s/Rules",
        "/nothing/Subscriptions/s/Rules/r",
        "/$Resources/eventhubs",
        "/a/$DeadLetterQueue",
    ):
        found = await http.call("GET", path)
        assert (found.status, found.detail[:14]) == (404, "SubCode=40400.")
    assert (await http.call("POST", "/nothing")).status == 405
    assert (await http.call("POST", "/nothing")).headers["Allow"] == "GET, PUT, DELETE"


@pytest.mark.parametrize(
    "query", ["$skip=-1", "$skip=x", "$top=1.5", "$skip=99999999999", "%24top=%D9%A1"]
)
async def test_an_invalid_page_is_refused(http: HttpClient, query: str) -> None:
    found = await http.call("GET", f"/$Resources/queues?{query}")
    assert found.status == 400
    assert "use a whole number from 0 to" in found.detail


async def test_pages_are_as_large_as_asked_but_no_larger_than_a_hundred(
    http: HttpClient, bus: BusThread
) -> None:
    for number in range(102):
        bus.queue(f"many/{number:03}")
    pages = {"?$top=2": 2, "?%24top=5000": 100, "?$skip=2147483647": 0, "?$top=0": 1, "": 100}
    for query, count in pages.items():
        found = await http.call("GET", f"/$Resources/Queues{query}")
        assert len(titles(found)) == count
        has_next = b'rel="next"' in found.body
        assert has_next is (count > 0)


# --- rights ---------------------------------------------------------------------------------------


async def test_requests_without_a_good_token_are_refused(
    http: HttpClient, bus: BusThread, queue: str
) -> None:
    key = RULES[0].keys.primary
    soon = int(time.time() + 300)
    root = RULES[0].name
    for token, begins in (
        ("", "SubCode=40102. "),
        ("Bearer abc", "SubCode=40103. "),
        ("SharedAccessSignature", "SubCode=40103. "),
        ("SharedAccessSignature sr=&sig=&se=&skn=", "SubCode=40103. "),
        (sas_token(url_of(bus), root, "wrong", soon), "SubCode=40103. "),
        (sas_token(url_of(bus), root, key, int(time.time()) - 1), "ExpiredToken: "),
        (sas_token(f"{url_of(bus)}/another", root, key, soon), "SubCode=40103. "),
        (token_of(bus, "sender"), "SubCode=40100. "),
        (token_of(bus, "listener"), "SubCode=40100. "),
        (token_of(bus, "of-one-queue"), "SubCode=40103. "),
    ):
        headers = {"Authorization": token}
        for method, path in (("GET", f"/{queue}"), ("PUT", "/new"), ("DELETE", f"/{queue}")):
            body = b"<a>" * 1_000 if method == "PUT" else None
            answer = await http.call(method, path, body, headers)
            assert answer.status == 401
            assert answer.detail.startswith(begins)
            assert key not in answer.detail
    for path in ("/", "//"):
        assert (await http.call("GET", path, headers={"Authorization": ""})).status == 200
    assert (await http.call("GET", f"/{queue}")).status == 200


async def test_a_token_for_the_url_of_a_request_is_enough(
    http: HttpClient, bus: BusThread, queue: str
) -> None:
    """JavaScript's client signs each URL whole, in lower case."""
    key = RULES[0].keys.primary
    for path in (f"/{queue}", "/$Resources/Queues", "/$namespaceinfo"):
        signed = f"{url_of(bus)}{path}?api-version=2021-05".lower()
        token = sas_token(signed, RULES[0].name, key, int(time.time() + 300))
        headers = {"Authorization": token}
        answer = await http.call("GET", f"{path}?api-version=2021-05", headers=headers)
        assert answer.status == 200
        assert (await http.call("GET", "/another", headers=headers)).status == 401


async def test_forwarding_needs_a_token_for_the_target(http: HttpClient, bus: BusThread) -> None:
    bus.queue("scoped")
    target = bus.queue()
    own = {"Authorization": token_of(bus, "of-one-queue"), "If-Match": "*"}
    body = request_of("QueueDescription", f"<ForwardTo>{target}</ForwardTo>")
    header = "ServiceBusSupplementaryAuthorization"
    for more in ({}, {header: token_of(bus, "listener")}, {header: own["Authorization"]}):
        answer = await http.call("PUT", "/scoped", body, {**own, **more})
        assert answer.status == 401
    assert forward_of(bus, "scoped") is None
    good = {**own, header: token_of(bus, "sender")}
    assert (await http.call("PUT", "/scoped", body, good)).status == 200
    assert (await http.call("PUT", "/scoped", body, own)).status == 200  # nothing new is requested
    assert forward_of(bus, "scoped") == target
    bus.delete("scoped")


async def test_a_token_for_one_queue_is_not_enough_to_forward_from_it(
    http: HttpClient, bus: BusThread, queue: str
) -> None:
    """The rule is that of the namespace, the signed scope is not."""
    target, key, soon = bus.queue(), RULES[0].keys.primary, int(time.time() + 300)
    own = sas_token(f"{url_of(bus)}/{queue}", RULES[0].name, key, soon)
    headers = {"Authorization": own, "If-Match": "*"}
    body = request_of("QueueDescription", f"<ForwardTo>{target}</ForwardTo>")
    answer = await http.call("PUT", f"/{queue}", body, headers)
    assert (answer.status, "ServiceBusSupplementary" in answer.detail) == (401, True)
    assert forward_of(bus, queue) is None
    more = sas_token(f"sb://here/{target}", RULES[0].name, key, soon)
    headers["ServiceBusSupplementaryAuthorization"] = more
    assert (await http.call("PUT", f"/{queue}", body, headers)).status == 200
    assert forward_of(bus, queue) == target


async def test_a_token_for_the_bare_host_is_enough_to_forward_unless_an_entity_has_that_name(
    http: HttpClient, bus: BusThread
) -> None:
    """@azure/service-bus signs it like this. The names of the bus count, not the dialled name: the
    holder of a token for a path could otherwise present it as the host.
    """
    queue, target, named = bus.queue("team-a/escape"), bus.queue(), bus.queue("localhost/below")
    key, soon = RULES[0].keys.primary, int(time.time() + 300)
    own = sas_token(f"{url_of(bus)}/{queue}", RULES[0].name, key, soon)
    body = request_of("QueueDescription", f"<ForwardTo>{target}</ForwardTo>")
    own_name = "test-bus.servicebus.windows.net"
    for host, status in (("team-a", 401), ("bus.example", 401), ("localhost", 401)):
        assert (await forward(http, queue, body, own, host, key, soon)) == status
        assert forward_of(bus, queue) is None
    bus.delete(named)
    for host in ("localhost", own_name, f"{own_name}:443"):
        assert (await forward(http, queue, body, own, host, key, soon)) == 200
        assert forward_of(bus, queue) == target
        plain = request_of("QueueDescription", "")
        assert (await forward(http, queue, plain, own, host, key, soon)) == 200
    bus.delete(queue)


async def forward(
    http: HttpClient, queue: str, body: bytes, own: str, host: str, key: str, expiry_s: int
) -> int:
    """Put a queue, with a token for a bare host beside its own, as if that host was dialled."""
    headers = {
        "Authorization": own,
        "If-Match": "*",
        "Host": host.partition(":")[0] + ":5300",
        "ServiceBusSupplementaryAuthorization": sas_token(host, RULES[0].name, key, expiry_s),
    }
    return (await http.call("PUT", f"/{queue}", body, headers)).status


async def test_manage_on_a_topic_allows_to_list_its_subscriptions(
    http: HttpClient, bus: BusThread
) -> None:
    topic, key = bus.topic(), "key-of-the-topic"
    rule = KeyRule("of-topic", frozenset(Right), Keys(key, "another"), scope=topic)
    bus.set_rules(*RULES, rule)
    try:
        for resource in (f"/{topic}", f"/{topic}/subscriptions", ""):
            signed = sas_token(url_of(bus) + resource, "of-topic", key, int(time.time() + 300))
            headers = {"Authorization": signed}
            for name, status in ((topic, 200), (f"{topic}x", 401)):
                answer = await http.call("GET", f"/{name}/Subscriptions", headers=headers)
                assert answer.status == status
    finally:
        bus.set_rules(*RULES)


def forward_of(bus: BusThread, name: str) -> str | None:
    found = bus.administration.find(name)
    assert found is not None
    return found.properties.forward_to


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"<entry",
        b"<a>" * 300_000,
        b"\xff\xfe\x00",
        b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]><a>&x;</a>',
        b'<?xml version="1.0" encoding="idna"?><a/>',
    ],
)
async def test_hostile_bodies_are_refused_without_a_change(
    http: HttpClient, bus: BusThread, body: bytes
) -> None:
    version = bus.administration.version
    for path in ("/hostile", "/hostile/Subscriptions/s", "/hostile/Subscriptions/s/Rules/r"):
        answer = await http.call("PUT", path, body)
        assert (answer.status, answer.detail[:14]) == (400, "SubCode=40000.")
    assert bus.administration.version == version


async def test_a_body_has_a_megabyte_at_most(http: HttpClient) -> None:
    assert (await http.call("PUT", "/large", b"<" + b"a" * (1 << 20))).status == 413


async def test_a_strange_host_is_not_repeated(http: HttpClient, queue: str) -> None:
    answer = await http.call("GET", f"/{queue}", headers={"Host": '"><script>'})
    assert answer.status == 200
    assert b"script>" not in answer.body
    assert b"<id>http://test-bus/" in answer.body


# --- trouble --------------------------------------------------------------------------------------

RULE = (
    "<AuthorizationRules><AuthorizationRule i:type='SharedAccessAuthorizationRule'><Rights>"
    "<AccessRights>Send</AccessRights></Rights><KeyName>k</KeyName></AuthorizationRule>"
    "</AuthorizationRules>"
)


async def test_a_queue_is_not_created_when_its_rules_cannot_be_stored(
    http: HttpClient, bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_arguments: object) -> None:
        raise StoreUnavailable("says the test")

    monkeypatch.setattr(bus.authorization_rules._store, "replace", fail)
    busy = await put(http, "/half", RULE)
    assert (busy.status, busy.detail[:14]) == (503, "SubCode=50300.")
    assert bus.administration.find("half") is None
    half = await put(http, f"/{queue}", RULE, If_Match="*")
    assert (half.status, "may have had an effect" in half.detail) == (500, True)
    assert bus.administration.find(queue) is not None
    monkeypatch.undo()
    assert (await put(http, "/half", RULE)).status == 201  # as clients repeat it
    bus.delete("half")


async def test_a_disconnect_leaves_no_entity_without_its_rules(
    http: HttpClient, bus: BusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = bus.authorization_rules
    replace = rules._store.replace
    others = bus.http.connection_count
    begun, goes_on = threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> Any:
        begun.set()
        assert await asyncio.to_thread(goes_on.wait, 10)
        return await replace(*arguments)

    monkeypatch.setattr(rules._store, "replace", slow)
    asking = asyncio.create_task(put(http, "/whole", RULE))
    assert await asyncio.to_thread(begun.wait, 10)
    asking.cancel()
    await asyncio.wait([asking])
    await wait_until(lambda: bus.http.connection_count <= others)
    goes_on.set()
    await wait_until(lambda: [rule.name for rule in rules.listed("whole")] == ["k"])
    bus.delete("whole")


async def wait_until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.02)


async def test_unavailable_counts_are_reported_as_unavailable(
    http: HttpClient, bus: BusThread, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus.administration, "_loading_s", 0.2)
    entry = bus.administration.find(queue)
    assert entry is not None
    host = bus._hosts[entry.partitions[0]]
    bus.reload(queue)
    bus._loop.call_soon_threadsafe(host.interrupt, 3_600)
    try:
        busy = await http.call("GET", f"/{queue}")
        assert (busy.status, busy.headers["Retry-After"]) == (503, "1")
        assert busy.detail.startswith("SubCode=50300. Server Busy.")
        listed = await http.call("GET", "/$Resources/queues")
        assert listed.status == 200
        assert b"<EntityAvailabilityStatus>Limited<" in listed.body
        changed = await put(http, f"/{queue}", LOCK.format(seconds=35), If_Match="*")
        if host.partition_id == CATALOG_PARTITION:  # definitions cannot be changed then
            assert changed.status == 503
        else:
            assert changed.status == 200  # the catalog has it; the partition catches up
            assert element_of(changed, "EntityAvailabilityStatus") == "Limited"
    finally:
        host._recovery._interrupted_until = 0.0
    monkeypatch.undo()
    await wait_until(lambda: host.is_loaded)
    if changed.status == 503:
        changed = await put(http, f"/{queue}", LOCK.format(seconds=35), If_Match="*")
        assert changed.status == 200
    found = await http.call("GET", f"/{queue}")
    assert element_of(found, "LockDuration") == "PT35S"
    assert element_of(found, "EntityAvailabilityStatus") == "Available"


@pytest.mark.parametrize(
    ("path", "tag"),
    [
        ("/too-late", "QueueDescription"),
        ("/late-topic/subscriptions/all/rules/mine", "RuleDescription"),
    ],
)
async def test_a_description_completed_after_its_rule_was_deleted_creates_no_entity(
    bus: BusThread, http: HttpClient, path: str, tag: str
) -> None:
    if tag == "RuleDescription":
        await put(http, "/late-topic", tag="TopicDescription")
        await put(http, "/late-topic/subscriptions/all", tag="SubscriptionDescription")
    inside = TRUE_RULE if tag == "RuleDescription" else ""
    document = request_of(tag, inside)
    reader, writer = await asyncio.open_connection("127.0.0.1", bus.port)
    head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    fields = f"Authorization: {http.token}\r\nContent-Length: {len(document)}\r\n"
    writer.write(f"{head}{fields}Expect: 100-continue\r\n\r\n".encode())
    assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    bus.set_rules(*RULES[1:])
    try:
        writer.write(document)
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    finally:
        bus.set_rules(*RULES)
        writer.close()
    made = await put(http, path, inside, tag)
    assert made.status == 201, "it was not there"


TRUE_RULE = '<Filter i:type="TrueFilter"><SqlExpression>1=1</SqlExpression></Filter>'
