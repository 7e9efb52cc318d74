"""The key comes from a file or the environment, and no error shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.broker.access.authz import Authorizer, KeyRule
from postbus.broker.access.own_names import OwnNames
from postbus.contract.entities import Right
from postbus_spark.errors import InvalidCredentials
from postbus_spark.tokens import LIFETIME_S, Credentials, load_credentials, read_credentials
from tests.edge.bus_thread import Keys

GOOD = "Endpoint=sb://bus.example;SharedAccessKeyName=lake;SharedAccessKey=s3cret+/="


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (GOOD, "https://bus.example:5671"),
        (GOOD.replace("bus.example", "bus.example:443/"), "https://bus.example:443"),
        (GOOD + ";UseDevelopmentEmulator=true", "http://bus.example:5672"),
        (GOOD.replace("bus.example", "[::1]:7"), "https://[::1]:7"),
        (f" {GOOD};EntityPath=orders;\n", "https://bus.example:5671"),
    ],
)
def test_a_connection_string_names_the_address_and_the_key(text: str, url: str) -> None:
    found = read_credentials(text)
    assert (found.base_url, found.rule, found.key) == (url, "lake", "s3cret+/=")


@pytest.mark.parametrize(
    "text",
    [
        "s3cret+/=",
        "Endpoint=https://bus;SharedAccessKeyName=lake;SharedAccessKey=s3cret+/=",
        "Endpoint=sb://bus:x;SharedAccessKeyName=lake;SharedAccessKey=s3cret+/=",
        "Endpoint=sb://bus;SharedAccessKey=s3cret+/=",
        f"{GOOD};{GOOD}",
        "",
    ],
)
def test_what_is_no_connection_string_is_not_repeated(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "connection"
    file.write_text(text)
    monkeypatch.setenv("POSTBUS_CONNECTION_STRING", text)
    for source in (str(file), None):
        with pytest.raises(InvalidCredentials) as error:
            load_credentials(source)
        assert "s3cret" not in str(error.value)
        assert ("connection" in str(error.value)) or "POSTBUS" in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCredentials, match=r"/missing cannot be read: No such file"):
        load_credentials(str(tmp_path / "missing"))
    with pytest.raises(InvalidCredentials, match="cannot be read: Is a directory"):
        load_credentials(str(tmp_path))
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidCredentials, match="has no text"):
        load_credentials(str(file))


def test_a_file_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "connection"
    file.write_text(GOOD.replace("bus.example", "of-the-file") + "\n")
    monkeypatch.setenv("POSTBUS_CONNECTION_STRING", GOOD)
    assert load_credentials(str(file)).base_url == "https://of-the-file:5671"
    assert load_credentials(None).base_url == "https://bus.example:5671"


def test_a_token_is_accepted_for_its_group_and_nothing_else() -> None:
    rule = KeyRule("läke & more", frozenset({Right.LISTEN}), Keys("s3cret+/="))
    authorizer = Authorizer([rule], OwnNames("bus"))
    token = Credentials("http://bus", rule.name, "s3cret+/=").token("Orders/$bulk/groups/lake", 1e9)
    grant = authorizer.check_token(token, "orders/$bulk/groups/lake", 1e9 + LIFETIME_S - 1)
    assert grant.rule_name == rule.name
    for path in ("orders", "orders/$bulk/groups/lake2", "orders/$bulk", "lake", ""):
        with pytest.raises(Exception, match="another resource"):
            authorizer.check_token(token, path, 1e9)
    with pytest.raises(Exception, match="expired"):
        authorizer.check_token(token, "orders/$bulk/groups/lake", 1e9 + LIFETIME_S)


def test_a_signature_of_the_connection_string_is_used_as_it_is() -> None:
    found = read_credentials("Endpoint=sb://bus;SharedAccessSignature=SharedAccess sr=x")
    assert found.token("orders", 1e9) == "SharedAccess sr=x"
