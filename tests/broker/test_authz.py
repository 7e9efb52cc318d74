"""Key rules, tokens, passwords and the paths they cover."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from postbus.broker.authz import (
    Authorizer,
    KeyRule,
    TokenRefused,
    audience_path,
    covers,
    has_right,
    resource_path,
    sign,
)
from postbus.contract import Right

NOW_S = 1_700_000_000.0


@dataclass(frozen=True)
class Keys:
    primary: str
    secondary: str | None = None


ROOT = KeyRule("root", frozenset({Right.MANAGE}), Keys("SAS_KEY_VALUE", "sécond+/="))
READER = KeyRule("reader", frozenset({Right.LISTEN}), Keys("readers key"))
SCOPED = KeyRule("root", frozenset({Right.SEND}), Keys("queue's key"), "Orders")
AUTHORIZER = Authorizer([ROOT, READER, SCOPED])


def token(resource: str, rule: str, key: str, expiry: str = "1700000100", order: str = "") -> str:
    """Return a token; `resource` is URL-encoded already and signed as it stands."""
    signature = sign(resource, expiry, key).replace("+", "%2B").replace("=", "%3d")
    fields = {"sr": resource, "sig": signature, "se": expiry, "skn": rule}
    names = order.split() or list(fields)
    return "SharedAccessSignature " + "&".join(f"{name}={fields[name]}" for name in names)


@pytest.mark.parametrize("order", ["sr sig se skn", "sig se skn sr", "skn sr se sig"])
@pytest.mark.parametrize("key", ["SAS_KEY_VALUE", "sécond+/="])
def test_either_key_grants_whatever_the_order_of_fields(key: str, order: str) -> None:
    text = token("sb%3a%2f%2flocalhost%2forders", "root", key, order=order)
    grant = AUTHORIZER.check_token(text, "sb://localhost/orders", NOW_S)
    assert grant.path == "orders"
    assert grant.rule_name == "root"
    assert grant.expires_s == 1_700_000_100.0
    assert has_right(grant.rights, Right.SEND)


@pytest.mark.parametrize(
    ("resource", "audience", "is_granted"),
    [
        ("sb%3A%2F%2Fhost%2F", "sb://host/orders", True),
        ("http%3A%2F%2Fhost", "amqps://other:5671/orders/$management", True),
        ("sb%3A%2F%2Fhost%2FORDERS", "sb://host/orders/$DeadLetterQueue", True),
        ("sb%3A%2F%2Fhost%2Forders%2F", "sb://host/orders", True),
        ("sb://host/orders", "sb://host/orders", True),
        ("sb%3A%2F%2Fhost%2Forders", "sb://host/orders2", False),
        ("sb%3A%2F%2Fhost%2Forders%2Fsub", "sb://host/orders", False),
        ("sb%3A%2F%2Fhost%2Forders", "sb://host/", False),
    ],
)
def test_token_covers_its_resource_and_what_lies_below(
    resource: str, audience: str, is_granted: bool
) -> None:
    text = token(resource, "root", "SAS_KEY_VALUE")
    if is_granted:
        assert AUTHORIZER.check_token(text, audience, NOW_S)
    else:
        with pytest.raises(TokenRefused):
            AUTHORIZER.check_token(text, audience, NOW_S)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SharedAccessSignature ",
        "SharedAccessSignature sr=a&sig=b",
        "Bearer abc",
        token("sb%3A%2F%2Fhost%2F", "root", "another key"),
        token("sb%3A%2F%2Fhost%2F", "nobody", "SAS_KEY_VALUE"),
        token("sb%3A%2F%2Fhost%2F", "root", "SAS_KEY_VALUE", "1699999999"),
        token("sb%3A%2F%2Fhost%2F", "root", "SAS_KEY_VALUE", "soon"),
        token("sb%3A%2F%2Fhost%2F", "root", "SAS_KEY_VALUE", "9" * 400),
        token("sb%3A%2F%2Fhost%2F", "root", "SAS_KEY_VALUE", "9" * 5_000),
        token("sb%3A%2F%2Fhost%2F", "root", "SAS_KEY_VALUE").replace("sb%3A", "sb%3a"),
        token("sb%3A%2F%2F[%2F", "root", "wrong"),
        token("sb%3A%2F%2Fhost%2F", "root", "SAS_KEY_VALUE") + "%C3%A9\udcff",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(TokenRefused):
        AUTHORIZER.check_token(text, "sb://host/orders", NOW_S)


def test_key_of_an_entity_opens_nothing_else() -> None:
    text = token("sb%3A%2F%2Fhost%2F", "root", "queue's key")
    grant = AUTHORIZER.check_token(text, "sb://host/orders", NOW_S)
    assert not has_right(grant.rights, Right.LISTEN)
    for audience in ("sb://host/other", "sb://host/"):
        with pytest.raises(TokenRefused):
            AUTHORIZER.check_token(text, audience, NOW_S)


def test_password_is_the_key() -> None:
    assert AUTHORIZER.check_password("root", "SAS_KEY_VALUE").path == ""
    assert AUTHORIZER.check_password("root", "queue's key").path == "orders"
    assert AUTHORIZER.check_password("reader", "readers key").rights == {Right.LISTEN}
    for name, key in [("root", ""), ("root", "readers key"), ("", ""), ("reader", "SAS_KEY_VALUE")]:
        with pytest.raises(TokenRefused):
            AUTHORIZER.check_password(name, key)


def test_rights_of_manage_include_the_others() -> None:
    assert all(has_right(frozenset({Right.MANAGE}), right) for right in Right)
    assert not has_right(frozenset({Right.SEND}), Right.LISTEN)


@pytest.mark.parametrize(
    ("audience", "path"),
    [
        ("sb://host:5671/Orders/", "orders"),
        ("amqps://host/a%2Fb?api-version=1", "a/b"),
        ("orders", "orders"),
        ("sb://host", ""),
        ("sb://[::1/x", "x"),
    ],
)
def test_audiences_of_every_form_are_normalised(audience: str, path: str) -> None:
    assert audience_path(audience) == path


def test_management_node_belongs_to_its_entity() -> None:
    assert resource_path("sb://host/orders/$management") == "orders"
    assert resource_path("sb://host/o/$DeadLetterQueue/$management") == "o/$deadletterqueue"


def test_paths_are_compared_by_parts() -> None:
    assert covers("", "anything")
    assert covers("a", "a/b")
    assert not covers("a", "ab")


def test_keys_are_not_shown() -> None:
    assert "SAS_KEY_VALUE" not in repr(ROOT)
