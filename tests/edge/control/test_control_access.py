"""Access to the control API: authorization, protection from old callers, and secrets."""

from __future__ import annotations

import http.client
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from postbus.assembly.bus import BusError
from postbus.broker.partition.clock import ClockMode
from postbus.cli.client.contexts import BusAddress, Context
from postbus.contract.control import EPOCH_HEADER
from postbus.edge.access.auth_throttle import AuthThrottle
from postbus.edge.certificates import ensure_certificate
from postbus.edge.control.authorization import ControlAuthorizer, TokenFileError
from postbus.edge.control.callers import Scope
from postbus.edge.control.routes import ROUTES, Route
from postbus.process.embedded import EmbeddedPostgres
from postbus.process.local_bus import bus_at_control_port
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.control.control_bus import (
    KEYS,
    WAIT_S,
    Caller,
    ControlledBus,
    controlled_bus,
    path_of,
)

pytestmark = pytest.mark.slow

WRONG = "wrong-token-of-twenty-and-more"
BODIES: dict[str, Any] = {
    "putQueue": {},
    "putTopic": {},
    "putSubscription": {},
    "putRule": {"name": "rule", "sqlFilter": {"sqlExpression": "1=1"}},
    "advanceClock": {"duration": "PT1S"},
    "loseLocks": {"entity": "declared"},
    "interruptStore": {"duration": "PT0.1S", "partition": 15},
}
NAMES = {
    "queue": "declared",
    "topic": "events",
    "subscription": "some",
    "rule": "rule",
    "authorization_rule": "reader",
    "entity_id": "1",
}


@pytest.fixture
def api(running: ControlledBus) -> Caller:
    running.caller.texts.clear()
    return running.caller


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wrong tokens wait no longer than right ones, for tests of other behaviours."""
    monkeypatch.setattr("postbus.edge.access.auth_throttle.MAX_DELAY_S", 0.0)


def authenticated(route: Route) -> tuple[str, str, Any]:
    """Return method, path and body of a request that could work."""
    body = BODIES.get(route.operation)
    if route.body is not None and body is None:
        body = {"rights": ["Listen"]} if "Authorization" in route.operation else {}
    path = re.sub(r"{(\w+)}", lambda found: NAMES[found[1]], route.path)
    return route.method, path, body


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation)
def test_every_operation_asks_for_a_token(api: Caller, route: Route) -> None:
    method, path, body = authenticated(route)
    if route.is_open:
        assert api.call(method, path, body, token="").status == 200
        return
    before = api.get("/v1/status").body["version"]
    for token in ("", WRONG, api.token[:-1], api.token + "x", api.token.swapcase()):
        response = api.call(method, path, body, token=token)
        assert (response.status, response.kind) == (401, "unauthorized")
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
    assert api.get("/v1/status").body["version"] == before
    assert api.call(method, path, body).status not in {401, 403, 500}


@pytest.mark.parametrize(
    "header",
    ["Basic Zm9vOmJhcg==", "Bearer", "Bearer ", "bearer x y", "SharedAccessSignature sr=x"],
)
def test_other_schemes_are_no_tokens(api: Caller, header: str) -> None:
    assert api.get("/v1/status", token="", headers={"Authorization": header}).status == 401


def test_unknown_paths_are_not_disclosed_without_a_token(api: Caller) -> None:
    for path in ("/", "/v1", "/v1/queues/a/b", "/v2/queues", "/metrics"):
        assert api.get(path, token="").status == 401
        assert api.get(path).status == 404
    assert api.call("PATCH", "/v1/queues/declared", {}, token="").status == 401
    response = api.call("PATCH", "/v1/queues/declared", {})
    assert (response.status, "GET" in response.headers["Allow"]) == (405, True)


def test_wrong_tokens_wait_and_right_ones_do_not(
    api: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.edge.access.auth_throttle.MAX_DELAY_S", 0.3)
    for _ in range(4):
        api.get("/v1/status", token=WRONG)
    begun = time.monotonic()
    slow = threading.Thread(target=api.get, args=["/v1/status"], kwargs={"token": WRONG})
    slow.start()
    assert api.get("/v1/status").status == 200
    assert slow.is_alive()
    slow.join()
    assert time.monotonic() - begun >= 0.3


def test_many_wrong_tokens_at_once_are_refused_unchecked(
    api: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postbus.edge.control.authorization.MOST_DELAYED", 0)
    response = api.get("/v1/status", token=WRONG)
    assert (response.status, response.headers["Retry-After"]) == (429, "60")
    assert api.get("/v1/status").status == 200


def test_token_is_for_the_owner_only_and_found_by_the_port(running: ControlledBus) -> None:
    assert running.token_file.stat().st_mode & 0o777 == 0o600
    port = urlsplit(running.caller.address).port
    assert port is not None
    found = bus_at_control_port(port)
    assert found is not None
    assert found.token_file == str(running.token_file)
    assert found.connection_string is None
    assert bus_at_control_port(1) is None


def test_tokens_are_exchanged_without_a_restart(running: ControlledBus, api: Caller) -> None:
    new = "a-new-token-of-enough-characters"
    file = running.token_file
    file.write_text(f"# both for now\n{api.token}\n{new}\n", encoding="ascii")
    assert [api.get("/v1/status", token=each).status for each in (api.token, new)] == [200, 200]
    file.write_text("short\n", encoding="ascii")  # a mistake changes nothing
    assert [api.get("/v1/status", token=each).status for each in (api.token, new)] == [200, 200]
    file.rename(file.with_suffix(".away"))
    assert api.get("/v1/status", token=new).status == 200
    file.write_text(f"{new}\n", encoding="ascii")
    assert [api.get("/v1/status", token=each).status for each in (api.token, new)] == [401, 200]
    file.write_text("", encoding="ascii")
    assert api.get("/v1/status", token=new).status == 401
    file.write_text(f"{api.token}\n", encoding="ascii")
    assert api.get("/v1/status").status == 200


SCOPED = {
    "read": ("auditor", "read"),
    "messages": ("oncall", "messages"),
    "definitions": ("ci", "definitions"),
    "both": ("operator", "messages,definitions"),
    "all": ("root", "all"),
}


@pytest.fixture(scope="module")
def scoped(
    postgres_server: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledBus]:
    """A bus with named tokens that have scopes."""
    make_database(postgres_server, "control_scopes", template=TEMPLATE)
    store, folder = dsn_of(postgres_server, "control_scopes"), tmp_path_factory.mktemp("scoped")
    lines = [f"{name} {scopes} {token_named(name)}\n" for name, scopes in SCOPED.values()]
    (folder / "tokens").write_text("# by name\n" + "".join(lines))
    with controlled_bus(store, folder / "bus", control_token_file=folder / "tokens") as bus:
        yield bus


def token_named(name: str) -> str:
    return f"the-token-of-{name}-is-long-enough"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation)
def test_every_operation_asks_for_its_scope(scoped: ControlledBus, route: Route) -> None:
    method, path, body = authenticated(route)
    for held, (name, scopes) in SCOPED.items():
        response = scoped.caller.call(method, path, body, token=token_named(name))
        may = route.is_open or route.scope.value in {"read", *scopes.split(",")} or held == "all"
        if may:
            assert response.status not in {401, 403, 500}
        else:
            assert (response.status, response.kind) == (403, "unauthorized")
            assert f"scope {route.scope.value}; that of token {name} has" in response.body["detail"]
            assert token_named(name) not in response.body["detail"]


def test_scopes_of_operations_match_the_guide() -> None:
    by_scope = {
        scope: {each.operation for each in ROUTES if each.scope is scope} for scope in Scope
    }
    assert by_scope[Scope.MESSAGES] == {
        "peekMessages", "summarizeMessages", "deleteMessages", "purgeMessages", "resendMessages"
    }  # fmt: skip
    changes = {each.operation for each in ROUTES if each.is_change} - by_scope[Scope.MESSAGES]
    keys = {each for each in changes if "AuthorizationRule" in each}
    assert by_scope[Scope.DEFINITIONS] == changes - keys
    assert by_scope[Scope.ALL] - keys == {
        "forgetCallerEpoch", "advanceClock", "loseLocks", "interruptStore"
    }  # fmt: skip
    assert all(each.method == "GET" for each in ROUTES if each.scope is Scope.READ)


def test_keys_are_given_to_tokens_of_all_scopes_only(scoped: ControlledBus) -> None:
    assert scoped.caller.put("/v1/queues/kept", {}, token=token_named("root")).status == 201
    for path in ("/v1/authorization-rules", "/v1/queues/kept/authorization-rules"):
        for held, (name, _) in SCOPED.items():
            token = token_named(name)
            assert scoped.caller.get(path, token=token).status == 200
            assert scoped.caller.get(f"{path}?keys=false", token=token).status == 200
            status = scoped.caller.get(f"{path}?keys=true", token=token).status
            assert status == (200 if held == "all" else 403)


def test_commands_read_the_token_of_a_line_with_a_name(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    for line in ("abc", "ci definitions abc", "# first\n\n ci\tdefinitions,messages  abc"):
        file.write_text(f"{line}\nother all def\n")
        target = BusAddress(Context("http://localhost:1", str(file)), "here", "here")
        assert target.token() == "abc"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"ci read,write {'x' * 30}", "line 1: scopes are read, messages, definitions, all"),
        (f"\nci {'x' * 30}", "line 2 is neither"),
        (f"a b read {'x' * 30}", "line 1 is neither"),
        (f"na/me read {'x' * 30}", "line 1 is neither"),
        ("ci read short", "at least 20"),
        (None, "no such file"),
        ("", "no token in it"),
        ("# only a remark\n", "no token in it"),
        ("short\n", "at least 20"),
        ("ä" * 30, "ASCII"),
        ("x" * 40 + "\n" + "\n".join(f"{n:030}" for n in range(20)), "at most 16"),
        ("x" * 70_000, "at most 16"),
    ],
)
def test_unusable_token_files_are_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "tokens"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(TokenFileError, match=words) as caught:
        ControlAuthorizer(file, AuthThrottle())
    if content:
        assert content[:20].strip() not in str(caught.value) or content.startswith("#")


# --- certificates and addresses -----------------------------------------------------------------


def test_certificate_of_the_authority_is_as_good_as_a_token(database: str, tmp_path: Path) -> None:
    ours = ensure_certificate(tmp_path / "ours")
    ensure_certificate(tmp_path / "theirs")
    more = {"control_client_ca_file": ours.authority_file}
    with controlled_bus(database, tmp_path / "bus", None, **more) as running:
        assert running.caller.address.startswith("https://")
        trusted = tmp_path / "bus" / "tls" / "ca.pem"
        assert status_over_tls(running, trusted, None, "") == 401
        assert status_over_tls(running, trusted, None, running.caller.token) == 200
        assert status_over_tls(running, trusted, None, WRONG) == 401
        operator = client_certificate(tmp_path / "ours")
        assert status_over_tls(running, trusted, operator, "") == 200
        assert status_over_tls(running, trusted, operator, WRONG) == 200
        for admission in (client_certificate(tmp_path / "theirs"), ours.certificate_file):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                status_over_tls(running, trusted, admission, running.caller.token)
        plain = Caller(running.caller.address, running.caller.token)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.get("/v1/status")


def client_certificate(folder: Path) -> Path:
    """Make a certificate of a client, signed by the authority in a folder; return its file."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    client = ExtendedKeyUsageOID.CLIENT_AUTH
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "operator")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([client]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA256())
    )
    file = folder / "client.pem"
    file.write_bytes(certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.with_suffix(".key").write_bytes(private)
    return file


def status_over_tls(
    running: ControlledBus, trusted: Path, certificate: Path | None, token: str
) -> int:
    context = ssl.create_default_context(cafile=str(trusted))
    if certificate is not None:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    port = urlsplit(running.caller.address).port
    connection = http.client.HTTPSConnection("localhost", port, timeout=WAIT_S, context=context)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", "/v1/status", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_invalid_authority_is_refused(database: str, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content, encoding="ascii")
    with (
        pytest.raises(BusError, match=r"authority of clients .*ca\.pem cannot be used"),
        controlled_bus(database, tmp_path / "bus", control_client_ca_file=file),
    ):
        pass


def test_other_addresses_are_served_with_tls_and_any_host(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus", None, control_host="0.0.0.0") as running:
        context = ssl.create_default_context(cafile=str(tmp_path / "bus" / "tls" / "ca.pem"))
        port = urlsplit(running.caller.address).port
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
        token = {"Authorization": f"Bearer {running.caller.token}"}
        connection.request("GET", "/v1/status", headers={**token, "Host": "bus.example:9465"})
        assert connection.getresponse().status == 200
        connection.close()


def test_api_can_be_switched_off(database: str, tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError, match="token"),
        controlled_bus(database, tmp_path / "bus", is_control_enabled=False),
    ):
        pass


@pytest.mark.parametrize("host", ["attacker.example", "10.0.0.1:9465", "[::", ""])
def test_rebound_names_are_refused(api: Caller, host: str) -> None:
    response = api.get("/v1/status", headers={"Host": host})
    assert (response.status, "localhost" in response.body["detail"]) == (403, True)


# --- epochs -------------------------------------------------------------------------------------


def test_older_callers_are_refused_after_a_restart_too(database: str, tmp_path: Path) -> None:
    def put(api: Caller, epoch: int | str | None) -> int:
        headers = {} if epoch is None else {EPOCH_HEADER: str(epoch)}
        return api.put(path_of("queues", "fenced"), {}, headers=headers).status

    with controlled_bus(database, tmp_path / "bus", ClockMode.WALL) as running:
        api = running.caller
        assert [put(api, epoch) for epoch in (3, 3, 5, 4, 5, 3, None)] == [
            201, 200, 200, 409, 200, 409, 200,
        ]  # fmt: skip
        response = api.delete(path_of("queues", "fenced"), headers={EPOCH_HEADER: "4"})
        assert (response.status, response.kind) == (409, "caller-too-old")
        assert api.get("/v1/status").body["highestCallerEpoch"] == 5
        reading = api.get(path_of("queues", "fenced"), headers={EPOCH_HEADER: "1"})
        assert reading.status == 200
        for wrong in ("", "-1", "1.0", "five", "9" * 19, "9" * 40):
            assert put(api, wrong) == 400
        assert put(api, 2**63 - 1) == 200
    with controlled_bus(database, tmp_path / "bus", ClockMode.WALL) as running:
        api = running.caller
        assert put(api, 2**63 - 2) == 409
        assert api.delete("/v1/caller-epoch").body["highestCallerEpoch"] == 0
        assert put(api, 1) == 200


# --- hostile input ------------------------------------------------------------------------------

HOSTILE_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"lockDuration": NaN}',
    b'{"lockDuration": 60000}',
    b'{"lock_duration_ms": "PT1M"}',
    b'{"maxDeliveryCount": 1e400}',
    b'{"maxDeliveryCount": "5"}' + b" " * 100,
    b'{"unknown": true}',
    b'{"rules": []}',
    b'{"status": "active"}',
    b'{"forwardTo": "\\ud800"}',
    b'{"forwardTo": "' + b"x" * 300 + b'"}',
]


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=range(len(HOSTILE_BODIES)))
def test_hostile_bodies_make_no_change(api: Caller, body: bytes) -> None:
    response = api.call("PUT", "/v1/queues/hostile", data=body)
    assert (response.status, response.kind) == (400, "invalid")
    assert 1 <= len(response.body["problems"]) <= 20
    assert api.get("/v1/queues/hostile").status == 404


def test_body_that_is_too_long_is_not_read_to_its_end(api: Caller) -> None:
    url = urlsplit(api.address)
    with socket.create_connection((url.hostname or "", url.port or 0), WAIT_S) as peer:
        head = (
            f"PUT /v1/queues/hostile HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {api.token}\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        peer.sendall(head.encode())
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        for _ in range(5):
            peer.sendall(chunk)
        assert peer.recv(100).startswith(b"HTTP/1.1 413 ")  # the body is not at its end
    assert api.get("/v1/queues/hostile").status == 404


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "%00", "%ff", "a%20b", "$management", "a%2F%2Fb", "x" * 261, "%F0%9F%90%87"],
)
def test_hostile_names(api: Caller, name: str) -> None:
    response = api.put(f"/v1/queues/{name}", {})
    assert response.status in {400, 404, 405}
    assert api.get(f"/v1/queues/{name}").status in {200 if name in {"", "."} else 404, 404}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_bodies_are_declared_as_json(api: Caller, kind: str) -> None:
    response = api.call("PUT", "/v1/queues/hostile", data=b"{}", headers={"Content-Type": kind})
    assert response.status == 415
    assert api.get("/v1/queues/hostile").status == 404


def test_callers_that_disconnect_do_not_stop_a_change(api: Caller) -> None:
    url = urlsplit(api.address)
    for number in range(20):
        with socket.create_connection((url.hostname or "", url.port or 0), WAIT_S) as peer:
            peer.sendall(
                f"PUT /v1/queues/hung-up-{number} HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: Bearer {api.token}\r\nContent-Type: application/json\r\n"
                "Content-Length: 2\r\n\r\n{}".encode()
            )
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = api.get("/v1/queues?top=1000").body["items"]
        if len([each for each in found if each["name"].startswith("hung-up")]) == 20:
            return
    pytest.fail("a change was lost")


# --- secrets ------------------------------------------------------------------------------------


def test_keys_are_included_only_on_request(api: Caller) -> None:
    rules = "/v1/authorization-rules"
    secret = "my-own-secret-key-that-nobody-sees"
    put = api.put(f"{rules}/reader", {"rights": ["Listen"], "primaryKey": secret})
    assert (put.status, put.body["rights"], put.body["isDeclared"]) == (201, ["Listen"], False)
    assert put.body["primaryKey"] is None
    for path in (rules, f"{rules}/reader", f"{rules}?keys=false"):
        assert secret not in str(api.get(path).body)
    response = api.get(f"{rules}/reader?keys=true").body
    assert response["primaryKey"] == secret
    made = response["secondaryKey"]
    assert len(made) >= 40
    api.put(f"{rules}/reader", {"rights": ["Send", "Listen"]})
    again = api.get(f"{rules}/reader?keys=true").body
    assert (again["primaryKey"], again["secondaryKey"]) == (secret, made)
    assert again["rights"] == ["Listen", "Send"]
    assert [each["name"] for each in api.get(rules).body["items"]] == ["reader", "root"]
    root = api.get(f"{rules}/root?keys=true").body
    assert (root["primaryKey"], root["isDeclared"]) == (KEYS.primary, True)
    refused = api.put(f"{rules}/root", {"rights": ["Listen"]})
    assert (refused.status, "manifest" in refused.body["detail"]) == (409, True)
    gone = api.delete(f"{rules}/reader")
    assert (gone.status, gone.body["primaryKey"]) == (200, None)
    assert api.get(f"{rules}/reader").status == 404
    assert api.delete(f"{rules}/reader").status == 404


@pytest.mark.parametrize("kind", ["queues", "topics"])
def test_entities_have_rules_of_their_own(api: Caller, kind: str) -> None:
    name = f"ruled-{kind}"
    api.put(path_of(kind, name), {})
    path = path_of(kind, name, "authorization-rules", "one")
    assert api.put(path, {"rights": ["Manage"]}).status == 201
    assert api.get(path).body["rights"] == ["Listen", "Manage", "Send"]
    assert api.get("/v1/authorization-rules/one").status == 404
    other = path_of("topics" if kind == "queues" else "queues", name, "authorization-rules", "one")
    assert api.get(other).status == 404
    assert api.put(other, {"rights": ["Send"]}).status == 404
    assert api.delete(path).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rights": []},
        {"rights": ["Own"]},
        {"rights": ["Send"], "primaryKey": ""},
        {"rights": ["Send"], "primaryKey": "hidden-and-too-shor"},
        {"rights": ["Send"], "primaryKey": "hidden-" * 60},
        {"rights": ["Send"], "primaryKey": ["hidden-in-a-list"]},
        {"rights": ["Send"], "key": "hidden-in-a-field"},
        {"rights": "hidden-right"},
    ],
)
def test_wrong_rules_are_refused_without_repeating_keys(api: Caller, body: object) -> None:
    response = api.put("/v1/authorization-rules/wrong", body)
    assert response.status == 400
    assert "hidden" not in str(response.body)


def test_no_secret_is_answered_or_logged(
    running: ControlledBus, caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation, right and wrong: no secret is in an answer or in the log."""
    api = running.caller
    api.texts.clear()
    secret = "key-which-must-not-be-seen-anywhere"
    with caplog.at_level(logging.DEBUG):
        for route in ROUTES:
            method, path, body = authenticated(route)
            if route.operation.startswith("put") and "Authorization" in route.operation:
                body = {"rights": ["Listen"], "primaryKey": secret}
            api.call(method, path, body)
            api.call(method, path, body, token=WRONG)
            if body is not None:
                api.call(method, path, {**body, secret: secret, "rights": secret})
    response = "\n".join(api.texts)
    logged = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    for text in (KEYS.primary, KEYS.secondary, api.token, WRONG):
        assert text not in response
        assert text not in logged
    assert secret not in logged
    assert secret not in response.replace(f'"{secret}","problem"', "").replace(
        f"{secret}: extra", ""
    )


def test_malformed_http_is_not_logged(api: Caller, caplog: pytest.LogCaptureFixture) -> None:
    url = urlsplit(api.address)
    head = (
        f"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {api.token}\0\r\n\r\n"
    )
    with (
        caplog.at_level(logging.DEBUG),
        socket.create_connection((url.hostname or "", url.port or 0), WAIT_S) as peer,
    ):
        peer.sendall(head.encode())
        assert peer.recv(100).startswith(b"HTTP/1.0 400 ")
    logged = [record for record in caplog.records if record.name != "asyncio"]
    assert api.token not in str([(record.getMessage(), record.exc_info) for record in logged])
