"""The table of docs/guides/security.md, each cell tried by a client; and secrets are never
disclosed.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast
from urllib.parse import quote, urlsplit

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
from azure.servicebus.exceptions import (
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
)

from postbus.contract.entities import NamespaceProperties, QueueProperties, Right
from postbus.edge.amqp.management_node import OF_SUB_QUEUES, ManagementContext, ManagementNode
from postbus.edge.bulk.requests import Action as BulkAction
from postbus.edge.runtime.requests import Action
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.message.codec import Described, Uint, Ulong, encode_value
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.metrics import BusSample
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.amqp.test_wire import request, response_parts
from tests.edge.bus_thread import sas_token
from tests.edge.control.control_bus import ControlledBus, controlled_bus
from tests.edge.raw_client import (
    ATTACH,
    DETACH,
    DISPOSITION,
    TRANSFER,
    RawClient,
    described,
    frame,
    message,
)

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).resolve().parents[3] / "docs/guides/security.md"
COLUMNS = ("garbage", "wrong key", "expired", "Listen", "Send", "Manage", "other queue")
QUEUE = "orders"
NODE = ManagementNode(cast(ManagementContext, SimpleNamespace(sessions=None)), QUEUE)
DEAD_LETTERS = f"/{QUEUE}/$DeadLetterQueue"
LOCK = "00000000-0000-0000-0000-000000000001"
DEFINITION = BusDefinition(
    "test-bus",
    NamespaceProperties(),
    (
        RuleDefinition("Listen", frozenset({Right.LISTEN}), RuleKeys("listen-secret-key")),
        RuleDefinition("Send", frozenset({Right.SEND}), RuleKeys("send-secret-key")),
        RuleDefinition("Manage", frozenset(Right), RuleKeys("manage-secret-key")),
    ),
    (
        QueueDefinition(QUEUE, QueueProperties(), ()),
        QueueDefinition(
            "other",
            QueueProperties(),
            (RuleDefinition("near", frozenset(Right), RuleKeys("near-secret-key")),),
        ),
        QueueDefinition("team/own", QueueProperties(), ()),
        *(
            QueueDefinition(
                name,
                QueueProperties(),
                (RuleDefinition("app", frozenset(Right), RuleKeys("shared-secret-key")),),
            )
            for name in ("first", "second")
        ),
    ),
)


class Shown(NamedTuple):
    """Credentials of a client: a token for the queue and below, or the password of a rule."""

    token: str
    rule: str
    key: str


class Cell(NamedTuple):
    """One attempt of the table and its result according to the guide."""

    listener: str
    attempt: str
    shown: str
    outcome: str


def table(title: str) -> list[list[str]]:
    """Return the rows of the table below a title of the guide, its head first."""
    section = GUIDE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if "|" in line]
    return [[each.strip() for each in line.strip("|").split("|")] for line in lines]


def cells() -> list[Cell]:
    rows = table("Access by endpoint")
    assert tuple(rows[0][2:]) == COLUMNS
    found = []
    for listener, attempt, *outcomes in rows[2:]:
        found += [
            Cell(listener, attempt, shown, outcome)
            for shown, outcome in zip(COLUMNS, outcomes, strict=True)
            if outcome
        ]
    return found


def shown_as(column: str, resource: str) -> Shown:
    rule, key, life_s = {
        "garbage": ("nobody", "x", 600),
        "wrong key": ("Manage", "wrong-secret-key", 600),
        "expired": ("Manage", "manage-secret-key", -1),
        "Listen": ("Listen", "listen-secret-key", 600),
        "Send": ("Send", "send-secret-key", 600),
        "Manage": ("Manage", "manage-secret-key", 600),
        "other queue": ("near", "near-secret-key", 600),
    }[column]
    token = "" if column == "garbage" else sas_token(resource, rule, key, int(time.time()) + life_s)
    return Shown(token, rule, key)


@pytest.fixture(scope="module")
def bus(postgres_server: EmbeddedPostgres, server_folder: Path) -> Iterator[ControlledBus]:
    with bus_called("access", postgres_server, server_folder) as made:
        yield made


@pytest.fixture
def unbothered_bus(
    postgres_server: EmbeddedPostgres, server_folder: Path
) -> Iterator[ControlledBus]:
    """A bus with a log that does not summarize refusals of other tests."""
    with bus_called("unbothered", postgres_server, server_folder) as made:
        yield made


@contextmanager
def bus_called(name: str, server: EmbeddedPostgres, folder: Path) -> Iterator[ControlledBus]:
    make_database(server, name, template=TEMPLATE)
    with controlled_bus(
        dsn_of(server, name), folder / name, definition=DEFINITION, tls_names="team"
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def unsuspecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer guesses at once: how they are slowed down is shown elsewhere."""
    monkeypatch.setattr("postbus.edge.access.auth_throttle.FIRST_DELAY_S", 0.0)


# --- attempts -----------------------------------------------------------------------------------


def address_of(bus: ControlledBus, title: str) -> tuple[str, int]:
    url = urlsplit(dict(bus.bus.summary())[title])
    return url.hostname or "", url.port or 0


def by_sdk(bus: ControlledBus, shown: Shown, attempt: str, **more: object) -> str:
    before = refused_tokens(bus)
    host, port = address_of(bus, "amqp")
    text = f"Endpoint=sb://{host}:{port};SharedAccessSignature={shown.token or 'none'};"
    client = ServiceBusClient.from_connection_string(
        text + "UseDevelopmentEmulator=true", retry_total=0, **more
    )
    try:
        with client:
            if attempt == "send":
                with client.get_queue_sender(QUEUE) as sender:
                    sender.send_messages(ServiceBusMessage("x", time_to_live=None))
            else:
                with client.get_queue_receiver(QUEUE) as receiver:
                    if attempt == "peek":
                        receiver.peek_messages(1)
    except ServiceBusAuthenticationError:
        return "token refused"
    except ServiceBusAuthorizationError:
        return "link refused"
    except ServiceBusConnectionError:  # so the SDK calls a refused token over WebSocket
        assert refused_tokens(bus) > before
        return "token refused"
    return "ok"


def refused_tokens(bus: ControlledBus) -> int:
    sample: BusSample = bus.run(bus.bus.sample())
    return sample.authentication_failures


def over_websocket(bus: ControlledBus, shown: Shown, attempt: str) -> str:
    host, port = address_of(bus, "http")
    return by_sdk(
        bus,
        shown,
        attempt,
        transport_type=TransportType.AmqpOverWebsocket,
        custom_endpoint_address=f"http://{host}:{port}",
    )


def by_password(bus: ControlledBus, shown: Shown, attempt: str) -> str:
    _, port = address_of(bus, "amqp")
    with RawClient(port, shown.rule, shown.key) as client:
        if client.outcome:
            return "password refused"
        attach = client.attach_sender if attempt == "send" else client.attach_receiver
        attached = attach(QUEUE)
        terminus = attached.fields[6 if attempt == "send" else 5]
        if terminus is not None:
            return "ok"
        error = client.expect(DETACH).fields[2].value
        assert error[0] == "amqp:unauthorized-access"
    return "link refused"


def by_request(bus: ControlledBus, shown: Shown, attempt: str) -> str:
    """Send a management request without its fields: the right is checked before them."""
    _, port = address_of(bus, "amqp")
    with RawClient(port, shown.rule, shown.key) as client:
        if client.outcome:
            return "password refused"
        node = f"{QUEUE}/$management"
        if client.attach_receiver(node).fields[5] is None:
            return "link refused"
        client.write(frame(DETACH, Uint(1), True))
        client.expect(DETACH)
        answer = request(client, node, "id", {"operation": f"com.microsoft:{attempt}"}, {})
    return str(int(response_parts(answer)[1]["statusCode"]))


def by_http(
    bus: ControlledBus, title: str, method: str, path: str, token: str, body: bytes = b""
) -> str:
    host, port = address_of(bus, title)
    connection = http.client.HTTPConnection(host, port, timeout=30)
    headers = {"Authorization": token} if token else {}
    if body.startswith(b"<"):
        headers["Content-Type"] = "application/atom+xml"
    connection.request(method, path, body or None, headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return str(answer.status)


ENTRY = (
    b'<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">'
    b'<QueueDescription xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"'
    b"/></content></entry>"
)
HTTP: dict[tuple[str, str], tuple[str, str, str, bytes]] = {
    ("HTTP", "send"): ("http", "POST", f"/{QUEUE}/messages", b"x"),
    ("HTTP", "peek-lock"): ("http", "POST", f"{DEAD_LETTERS}/messages/head?timeout=0", b""),
    ("HTTP", "read and delete"): ("http", "DELETE", f"{DEAD_LETTERS}/messages/head?timeout=0", b""),
    ("HTTP", "complete"): ("http", "DELETE", f"/{QUEUE}/messages/1/{LOCK}", b""),
    ("HTTP", "unlock"): ("http", "PUT", f"/{QUEUE}/messages/1/{LOCK}", b""),
    ("HTTP", "renew"): ("http", "POST", f"/{QUEUE}/messages/1/{LOCK}", b""),
    ("bulk", "ranges"): ("http", "GET", f"/{QUEUE}/$bulk/ranges", b""),
    ("bulk", "rows"): ("http", "GET", f"/{QUEUE}/$bulk/rows", b""),
    ("bulk", "get"): ("http", "GET", f"/{QUEUE}/$bulk/groups/absent", b""),
    ("bulk", "claim"): ("http", "POST", f"/{QUEUE}/$bulk/groups/absent/claim", b""),
    ("bulk", "plan"): ("http", "POST", f"/{QUEUE}/$bulk/groups/absent/plan", b""),
    ("bulk", "settle"): ("http", "POST", f"/{QUEUE}/$bulk/groups/absent/settle", b""),
    ("bulk", "reject"): ("http", "POST", f"/{QUEUE}/$bulk/groups/absent/reject", b""),
    ("bulk", "put"): ("http", "PUT", f"/{QUEUE}/$bulk/groups/put-{{shown}}", b""),
    ("bulk", "reset"): ("http", "POST", f"/{QUEUE}/$bulk/groups/absent/reset", b""),
    ("bulk", "drop"): ("http", "DELETE", f"/{QUEUE}/$bulk/groups/absent", b""),
    ("bulk", "stage"): ("http", "POST", f"/{QUEUE}/$bulk/writers/absent/stage", b""),
    ("bulk", "publish"): ("http", "POST", f"/{QUEUE}/$bulk/writers/absent/publish", b""),
    ("bulk", "abort"): ("http", "POST", f"/{QUEUE}/$bulk/writers/absent/abort", b""),
    ("bulk", "get writer"): ("http", "GET", f"/{QUEUE}/$bulk/writers/absent", b""),
    ("bulk", "forget writer"): ("http", "DELETE", f"/{QUEUE}/$bulk/writers/absent", b""),
    ("administration", "root"): ("http", "GET", "/", b""),
    ("administration", "rules"): ("http", "GET", "/absent/Subscriptions/s/Rules", b""),
    ("administration", "read"): ("http", "GET", f"/{QUEUE}?api-version=2021-05", b""),
    ("administration", "list"): ("http", "GET", "/$Resources/queues", b""),
    ("administration", "create"): ("http", "PUT", "/made-{shown}", ENTRY),
    ("administration", "delete"): ("http", "DELETE", "/absent", b""),
    ("control API", "read"): ("control", "GET", f"/v1/queues/{QUEUE}", b""),
    ("control API", "delete"): ("control", "DELETE", f"/v1/queues/{QUEUE}", b""),
    ("metrics", "read"): ("metrics", "GET", "/metrics", b""),
    ("health", "read"): ("http", "GET", "/health", b""),
}
OVER_AMQP: dict[str, Callable[[ControlledBus, Shown, str], str]] = {
    "AMQP": by_sdk,
    "WebSocket": over_websocket,
    "AMQP PLAIN": by_password,
    "management": by_request,
}


@pytest.mark.parametrize("cell", cells(), ids="-".join)
def test_access_follows_every_cell_of_the_table(bus: ControlledBus, cell: Cell) -> None:
    resource = "sb://localhost/other" if cell.shown == "other queue" else "sb://localhost/"
    shown = shown_as(cell.shown, resource)
    if cell.listener in OVER_AMQP:
        outcome = OVER_AMQP[cell.listener](bus, shown, cell.attempt)
    else:
        title, method, path, body = HTTP[cell.listener, cell.attempt]
        path = path.replace("{shown}", cell.shown.replace(" ", "-").lower())
        token = "" if cell.listener == "health" and not shown.token else shown.token
        if cell.listener == "health":
            token = ""
        outcome = by_http(bus, title, method, path, token, body)
    assert outcome == cell.outcome


def test_requests_are_counted_by_api_and_status(bus: ControlledBus) -> None:
    token = shown_as("Manage", "sb://localhost/").token
    before = dict(bus.run(bus.bus.sample()).http_answers)
    for path, status in ((f"/{QUEUE}", 200), ("/$Resources/queues", 200), ("/health", 200)):
        assert by_http(bus, "http", "GET", path, token * (path != "/health")) == str(status)
    assert by_http(bus, "http", "POST", f"/{QUEUE}/messages", "") == "401"
    for path, status in (("/v1/status", 200), ("/v1/nothing", 404)):
        assert bus.caller.get(path).status == status
    after = bus.run(bus.bus.sample()).http_answers
    grown = {key: count - before.get(key, 0) for key, count in after.items()}
    wanted = {
        ("administration", 200): 2,
        ("health", 200): 1,
        ("runtime", 401): 1,
        ("control", 200): 1,
        ("control", 404): 1,
    }
    assert {key: count for key, count in grown.items() if count} == wanted


def test_table_names_every_attempt() -> None:
    """The operations of requests and of messages over HTTP as the code has them.

    Those of the control API are tried one by one in test_control_access.py.
    """
    named = {(cell.listener, cell.attempt) for cell in cells()}
    assert {listener for listener, _ in named} >= set(OVER_AMQP)
    assert set(HTTP) <= named
    assert {attempt for listener, attempt in named if listener == "management"} == set(
        NODE._operations
    )
    assert {attempt for listener, attempt in named if listener == "HTTP"} == {
        each.value for each in Action
    }
    assert {attempt for listener, attempt in named if listener == "bulk"} == {
        each.value for each in BulkAction
    }


# --- how far a right reaches --------------------------------------------------------------------


def signed(resource: str, rule: str = "Manage", life_s: int = 600) -> str:
    return sas_token(resource, rule, f"{rule.lower()}-secret-key", int(time.time()) + life_s)


def ask(
    bus: ControlledBus, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, str]:
    """Return status and text of a request to the port of HTTP."""
    host, port = address_of(bus, "http")
    connection = http.client.HTTPConnection(host, port, timeout=30)
    try:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body or None, fields)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def forward_out_of_a_folder(bus: ControlledBus) -> str:
    """Try it where the bus is called as the folder is: another `Host` is refused before."""
    forwarding = ENTRY.replace(
        b"/></content>", b"><ForwardTo>orders</ForwardTo></QueueDescription></content>"
    )
    status, _ = ask(
        bus,
        "PUT",
        "/team/escape",
        forwarding,
        Host="team",
        Authorization=signed("sb://localhost/team"),
        ServiceBusSupplementaryAuthorization=signed("team"),
        Content_Type="application/atom+xml",
    )
    assert bus.bus.administration.find("team/escape") is None
    return str(status)


def send_over_http(bus: ControlledBus, token: str) -> str:
    status, text = ask(bus, "POST", f"/{QUEUE}/messages", b"x", Authorization=token)
    code = re.search(r"ExpiredToken: The token is expired\. Expiration time: '[-0-9: ]+Z'", text)
    return f"{status} ExpiredToken" if code else str(status)


def put_token(bus: ControlledBus, token: str) -> str:
    """Return the answer of `$cbs` to a token for the queue."""
    _, port = address_of(bus, "amqp")
    with RawClient(port, "Send", "send-secret-key") as client:
        return put_token_on(client, token)


def put_token_on(client: RawClient, token: str, resource: str = f"sb://localhost/{QUEUE}") -> str:
    """Return the answer of `$cbs` to a token."""
    fields = {"operation": "put-token", "type": "x", "name": resource}
    answered = response_parts(request(client, "$cbs", "id", fields, token))[1]
    return f"{int(answered['status-code'])} {answered['status-description'].partition(':')[0]}"


def requests_of(bus: ControlledBus, names: set[str]) -> str:
    """Send requests without their fields to a dead-letter queue, with a token for it alone."""
    _, port = address_of(bus, "amqp")
    resource = f"sb://localhost{DEAD_LETTERS}"
    answered = set()
    for name in names:
        with RawClient(port, "near", "near-secret-key") as client:
            assert put_token_on(client, signed(resource), resource) == "202 Accepted"
            for handle in (20, 21):
                client.write(frame(DETACH, Uint(handle), True))
                client.expect(DETACH)
            node = f"{DEAD_LETTERS[1:]}/$management"
            answer = request(client, node, "id", {"operation": name}, {})
            answered.add(str(int(response_parts(answer)[1]["statusCode"])))
    return " ".join(sorted(answered))


def commit_after_a_change(bus: ControlledBus) -> str:
    """Send in a transaction, let the rule send no more, and discharge."""
    _, port = address_of(bus, "amqp")
    name, key = "Passing", "passing-secret-key-of-some-length"
    path = f"/v1/authorization-rules/{name}"
    assert bus.caller.put(path, {"rights": ["Send"], "primaryKey": key}).status == 201
    with RawClient(port, name, key) as client:
        client.write(
            frame(
                ATTACH, "c", Uint(9), False, None, None, None, described(0x30), None, None, Uint(0)
            )
        )
        client.expect(ATTACH)
        client.write(
            client.transfer(0, encode_value(Described(Ulong(0x77), described(0x31))), handle=9)
        )
        transaction = client.expect(DISPOSITION).fields[4].value[0]
        client.attach_sender(QUEUE)
        state = described(0x34, transaction, None)
        client.write(
            frame(
                TRANSFER,
                Uint(0),
                Uint(1),
                b"1",
                Uint(0),
                False,
                False,
                None,
                state,
                payload=message(b"x"),
            )
        )
        assert int(client.expect(DISPOSITION).fields[4].descriptor) == 0x34
        assert bus.caller.put(path, {"rights": ["Listen"]}).status == 200
        client.expect(DETACH)
        discharge = encode_value(Described(Ulong(0x77), described(0x32, transaction, False)))
        client.write(client.transfer(2, discharge, handle=9))
        error = client.expect(DISPOSITION).fields[4].value[0].value
    assert error[0] == "amqp:transaction:rollback"
    return "rolled back"


def outlive_a_token(bus: ControlledBus) -> str:
    """Attach with a token that ends soon, and wait for the end of the link."""
    _, port = address_of(bus, "amqp")
    resource, expires_s = f"sb://localhost/{QUEUE}", int(time.time()) + 2
    token = sas_token(resource, "Manage", "manage-secret-key", expires_s)
    with RawClient(port, "near", "near-secret-key") as client:
        assert put_token_on(client, token) == "202 Accepted"
        assert client.attach_sender(QUEUE, 7).fields[6] is not None
        client.expect(DETACH)
        late_s = time.time() - expires_s
    assert late_s >= 0
    return "detached within seconds" if late_s < 5 else f"detached {late_s:.0f} s late"


def send_to_either(bus: ControlledBus) -> str:
    _, port = address_of(bus, "amqp")
    with RawClient(port, "app", "shared-secret-key") as client:
        attached = [client.attach_sender(name, n) for n, name in enumerate(("first", "second"))]
    assert all(each.fields[6] is not None for each in attached)
    return "ok"


def open_websocket(bus: ControlledBus, **headers: str) -> str:
    return str(
        ask(
            bus,
            "GET",
            "/$servicebus/websocket",
            Upgrade="websocket",
            Connection="Upgrade",
            Sec_WebSocket_Version="13",
            Sec_WebSocket_Key="AAAAAAAAAAAAAAAAAAAAAA==",
            Sec_WebSocket_Protocol="AMQPWSB10",
            **headers,
        )[0]
    )


def call_with_scope(bus: ControlledBus, scope: str, method: str, path: str) -> str:
    """Call the control API with a token that is added to the file of the running bus."""
    token = f"a-token-that-may-only-{scope}"
    text = bus.token_file.read_text()
    if token not in text:
        bus.token_file.write_text(f"{text}some {scope} {token}\n")
    return str(bus.caller.call(method, path, token=token).status)


def claim_own_group(bus: ControlledBus) -> str:
    """Make a group, and claim it with a token for nothing else."""
    groups = f"/{QUEUE}/$bulk/groups"
    everything = signed("sb://localhost")
    assert ask(bus, "PUT", f"{groups}/lake", Authorization=everything)[0] in (200, 201)
    return str(ask(bus, "POST", f"{groups}/lake/claim", Authorization=signed(OF_GROUP))[0])


def use_a_group_token(bus: ControlledBus) -> str:
    requests = (
        ("POST", f"/{QUEUE}/$bulk/groups/pond/claim"),
        ("GET", f"/{QUEUE}/$bulk/ranges?group=pond"),
        ("GET", f"/{QUEUE}/$bulk/ranges"),
        ("POST", f"/{QUEUE}/messages"),
        ("POST", f"/{QUEUE}/messages/head?timeout=0"),
        ("GET", f"/{QUEUE}"),
    )
    return " ".join({str(ask(bus, *each, Authorization=signed(OF_GROUP))[0]) for each in requests})


def publish_as_the_writer(bus: ControlledBus) -> str:
    path, body = f"/{QUEUE}/$bulk/writers/loader/publish", b'{"batch": 1, "stages": []}'
    return str(ask(bus, "POST", path, body, Authorization=signed(OF_WRITER))[0])


def use_a_writer_token(bus: ControlledBus) -> str:
    requests = (
        ("POST", f"/{QUEUE}/$bulk/writers/other/publish"),
        ("POST", f"/{QUEUE}/$bulk/writers/loader2/stage"),
        ("GET", f"/{QUEUE}/$bulk/ranges"),
        ("POST", f"/{QUEUE}/messages"),
        ("POST", f"/{QUEUE}/messages/head?timeout=0"),
        ("GET", f"/{QUEUE}"),
    )
    return " ".join({str(ask(bus, *each, Authorization=signed(OF_WRITER))[0]) for each in requests})


def peek_rows(bus: ControlledBus) -> str:
    ranges = f"/{QUEUE}/$bulk/ranges?mode=peek"
    found = json.loads(ask(bus, "GET", ranges, Authorization=signed("sb://localhost"))[1])
    [partition] = {each["partition"] for each in found["partitions"]}
    path = f"/{QUEUE}/$bulk/rows?mode=peek&partition={partition}&from=0&to=0"
    return str(ask(bus, "GET", path, Authorization=signed(OF_ROWS))[0])


def use_a_rows_token(bus: ControlledBus) -> str:
    requests = (
        ("GET", f"/{QUEUE}/$bulk/rows?group=lake&epoch=1&partition=0&from=0&to=0"),
        ("GET", f"/{QUEUE}/$bulk/ranges?mode=peek"),
        ("POST", f"/{QUEUE}/$bulk/groups/lake/claim"),
        ("POST", f"/{QUEUE}/messages"),
        ("POST", f"/{QUEUE}/messages/head?timeout=0"),
        ("GET", f"/{QUEUE}"),
    )
    return " ".join({str(ask(bus, *each, Authorization=signed(OF_ROWS))[0]) for each in requests})


FOREIGN = "evil.example"
OF_ROWS = f"sb://localhost/{QUEUE}/$bulk/rows"
ROWS_TOKEN = f"token for `{QUEUE}/$bulk/rows`"
OF_WRITER = f"sb://localhost/{QUEUE}/$bulk/writers/loader"
WRITER_TOKEN = f"token for `{QUEUE}/$bulk/writers/loader`"
OF_GROUP = f"sb://localhost/{QUEUE}/$bulk/groups/lake"
GROUP_TOKEN = f"token for `{QUEUE}/$bulk/groups/lake`"
BARE = "token for the bare host of the bus"
EXPIRED = "token that has expired"
OPERATIONS = {f"com.microsoft:{name}" for name in NODE._operations}
OUT_OF_A_FOLDER = (
    "create a queue in it that forwards to one outside, with `Host: team` and a supplementary token"
    " for that host"
)
REACH: dict[tuple[str, str], Callable[[ControlledBus], str]] = {
    ("token of a namespace rule for the folder `team`", OUT_OF_A_FOLDER): forward_out_of_a_folder,
    (BARE, "send over HTTP"): lambda bus: send_over_http(bus, signed("localhost")),
    (f"{BARE}, with a port", "send over AMQP"): lambda bus: by_sdk(
        bus, Shown(signed("localhost:5672"), "", ""), "send"
    ),
    ("token for the bare host of another bus", "send over HTTP"): lambda bus: send_over_http(
        bus, signed("other.example")
    ),
    (EXPIRED, "send over HTTP"): lambda bus: send_over_http(
        bus, signed("sb://localhost", life_s=-1)
    ),
    (EXPIRED, "`put-token` to `$cbs`"): lambda bus: put_token(
        bus, signed("sb://localhost", life_s=-1)
    ),
    (
        "password of a rule that is defined on two queues with one key",
        "send to either",
    ): send_to_either,
    (
        "valid token, `Host` with a foreign name that resolves to loopback",
        "read a definition",
    ): lambda bus: str(
        ask(bus, "GET", f"/{QUEUE}", Host=FOREIGN, Authorization=signed("sb://localhost"))[0]
    ),
    (GROUP_TOKEN, "claim that group"): claim_own_group,
    (GROUP_TOKEN, "claim another group, send or receive, over HTTP"): use_a_group_token,
    (GROUP_TOKEN, "send over AMQP"): lambda bus: by_sdk(
        bus, Shown(signed(OF_GROUP), "", ""), "send"
    ),
    (ROWS_TOKEN, "read rows in a mode"): peek_rows,
    (
        ROWS_TOKEN,
        "read rows by a group, ranges, claim, send or receive, over HTTP",
    ): use_a_rows_token,
    (WRITER_TOKEN, "publish as that writer"): publish_as_the_writer,
    (
        WRITER_TOKEN,
        "publish as another writer, read, send or receive, over HTTP",
    ): use_a_writer_token,
    ("token for a dead-letter queue", "requests about its messages"): lambda bus: requests_of(
        bus, OPERATIONS & OF_SUB_QUEUES
    ),
    (
        "token for a dead-letter queue",
        "requests about rules, sessions, schedules of the entity",
    ): lambda bus: requests_of(bus, OPERATIONS - OF_SUB_QUEUES),
    (
        "password whose rule is changed",
        "commit an open transaction",
    ): commit_after_a_change,
    ("token that expires", "keep a link that it authorized"): outlive_a_token,
    ("control token of the scope `read`", "delete a queue"): lambda bus: call_with_scope(
        bus, "read", "DELETE", f"/v1/queues/{QUEUE}"
    ),
    (
        "control token of the scope `definitions`",
        "read the keys of authorization rules",
    ): lambda bus: call_with_scope(bus, "definitions", "GET", "/v1/authorization-rules?keys=true"),
    (
        "web page of another host (`Origin`)",
        "open a WebSocket to loopback",
    ): lambda bus: open_websocket(bus, Origin=f"https://{FOREIGN}"),
}


@pytest.mark.parametrize(("shown", "attempt", "outcome"), table("Scope of rights")[2:])
def test_a_right_reaches_the_entities_of_the_table(
    bus: ControlledBus, shown: str, attempt: str, outcome: str
) -> None:
    assert REACH[shown, attempt](bus) == outcome


def test_table_of_reach_has_every_attempt() -> None:
    rows = table("Scope of rights")[2:]
    assert {(shown, attempt) for shown, attempt, _ in rows} == set(REACH)


# --- secrets ------------------------------------------------------------------------------------


def test_no_secret_is_logged(
    unbothered_bus: ControlledBus, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys, tokens and bodies are searched in the whole log, metrics and refusals."""
    bus = unbothered_bus
    caplog.set_level("DEBUG", logger="postbus")
    shown = shown_as("Manage", "sb://localhost/")
    wrong = shown_as("wrong key", "sb://localhost/")
    answered = [by_sdk(bus, each, "send") for each in (shown, wrong)]
    answered += [by_password(bus, each, "send") for each in (shown, wrong)]
    for title, path, token in (
        ("http", f"/{QUEUE}", wrong.token),
        ("http", f"/{QUEUE}?token={quote(shown.token)}", ""),
        ("http", "/$Resources/queues", shown.token),
        ("control", "/v1/authorization-rules", f"Bearer {bus.caller.token}"),
        ("control", "/v1/authorization-rules", f"Bearer {wrong.token}"),
        ("metrics", "/metrics", ""),
    ):
        answered.append(text_of(bus, title, path, token))
    answered.append("\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records))
    assert len(caplog.records) > 3
    for secret in (
        *(rule.keys.primary for rule in DEFINITION.rules if rule.keys is not None),
        "wrong-secret-key",
        bus.caller.token,
        re.findall(r"sig=([^&]+)", shown.token)[0],
        re.findall(r"sig=([^&]+)", wrong.token)[0],
    ):
        for text in answered:
            assert secret not in text


def text_of(bus: ControlledBus, title: str, path: str, token: str) -> str:
    """Return head and body of an answer."""
    host, port = address_of(bus, title)
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("GET", path, headers={"Authorization": token} if token else {})
    answer = connection.getresponse()
    text = f"{answer.headers}\n{answer.read().decode()}"
    connection.close()
    return text
