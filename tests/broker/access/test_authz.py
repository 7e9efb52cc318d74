"""SAS tokens and passwords: the rights that they grant, and those that they must not grant."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote_plus

import pytest

from postbus.broker.access.authz import (
    Authorizer,
    KeyRule,
    TokenRefused,
    has_right,
    resource_path,
)
from postbus.broker.access.own_names import OwnNames
from postbus.contract.entities import Right
from postbus.contract.shared_access import sign
from tests.broker.access.fuzz_tokens import fuzz

NOW_S = 1_000_000.0


@dataclass(frozen=True)
class Keys:
    primary: str
    secondary: str | None = None


RULES = Authorizer(
    (
        KeyRule("root", frozenset(Right), Keys("key+/=", "second")),
        KeyRule("local", frozenset({Right.SEND}), Keys("near"), "Orders"),
    )
)


def token(
    resource: str,
    *,
    rule: str = "root",
    key: str = "key+/=",
    expiry: str = "1000100",
    order: str = "sr sig se skn",
) -> str:
    values = {
        "sr": resource,
        "sig": quote_plus(sign(resource, expiry, key)),
        "se": expiry,
        "skn": quote_plus(rule),
    }
    return "SharedAccessSignature " + "&".join(f"{name}={values[name]}" for name in order.split())


@pytest.mark.parametrize("expiry", ["1_000_100", "+1000100", " 1000100", "", "9" * 40])
def test_an_expiry_is_a_number_of_seconds_in_digits(expiry: str) -> None:
    with pytest.raises(TokenRefused, match="malformed"):
        RULES.check_token(token("sb%3A%2F%2Fhost%2Forders", expiry=expiry), "sb://h/orders", NOW_S)


@pytest.mark.parametrize("order", ["sr sig se skn", "sig se skn sr", "skn sr se sig"])
@pytest.mark.parametrize("key", ["key+/=", "second"])
@pytest.mark.parametrize("resource", ["sb%3A%2F%2Fhost%2Forders", "SB%3a%2f%2fHOST%2fOrders%2f"])
def test_either_key_signs_the_resource_as_it_was_written(
    order: str, key: str, resource: str
) -> None:
    grant = RULES.check_token(token(resource, key=key, order=order), "sb://h/orders", NOW_S)
    assert (grant.path, grant.rule_name, grant.expires_s) == ("orders", "root", 1_000_100.0)
    assert grant.covers("orders/$deadletterqueue")
    assert not grant.covers("orders-eu")


@pytest.mark.parametrize(
    "audience",
    [
        "sb://host/Orders",
        "sb://host:5672/orders/",
        "amqps://host/orders/$management",
        "amqps://host/%6Frders",
        "https://host/orders?api-version=2021-05",
    ],
)
def test_audiences_of_all_clients_name_the_same_entity(audience: str) -> None:
    assert resource_path(audience) == "orders"
    assert RULES.check_token(token(quote_plus(audience)), audience, NOW_S).path == "orders"
    assert RULES.check_token(token("sb%3A%2F%2Fhost"), audience, NOW_S).path == "orders"


@pytest.mark.parametrize(
    ("bad", "audience"),
    [
        (token("sb%3A%2F%2Fh%2Forders"), "sb://h/orders-eu"),
        (token("sb%3A%2F%2Fh%2Forders"), "sb://h"),
        (token("sb%3A%2F%2Fh", key="wrong"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh", rule="nobody"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh", expiry="1000000"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh", expiry="soon"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh", order="sr sig skn"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh").replace("sb%3A", "sb%3a"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh", rule="local", key="near"), "sb://h/other"),
        ("Bearer x", "sb://h/orders"),
        # An octet that is no UTF-8, as HTTP brings it.
        (token("sb%3A%2F%2Fh").replace("sig=", "sig=\udcff"), "sb://h/orders"),
        (token("sb%3A%2F%2Fh").replace("sr=", "sr=\udcff"), "sb://h/orders"),
    ],
)
def test_wrong_tokens_grant_no_right(bad: str, audience: str) -> None:
    with pytest.raises(TokenRefused):
        RULES.check_token(bad, audience, NOW_S)


@pytest.mark.parametrize(
    ("resource", "is_good"),
    [
        ("https%3a%2f%2fh%2forders%2fmessages%3ftimeout%3d5", True),
        ("https%3a%2f%2fh%2forders%2fmessages%2fhead", False),
        ("https%3a%2f%2fh%2forders", True),
        ("https%3a%2f%2fh%2fother%2fmessages", False),
    ],
)
def test_token_for_the_place_of_its_use_is_enough(resource: str, is_good: bool) -> None:
    if is_good:
        grant = RULES.check_token(token(resource), "orders", NOW_S, "Messages")
        assert grant.path == "orders"
    else:
        with pytest.raises(TokenRefused):
            RULES.check_token(token(resource), "orders", NOW_S, "Messages")


def test_rule_of_an_entity_cannot_be_used_above_it() -> None:
    near = token("sb%3A%2F%2Fh%2F%24resources%2Fqueues", rule="local", key="near")
    with pytest.raises(TokenRefused):
        RULES.check_token(near, "", NOW_S, "$Resources/queues")


def test_rule_of_an_entity_grants_its_own_rights_there() -> None:
    text = token("sb%3A%2F%2Fh%2Forders", rule="local", key="near")
    grant = RULES.check_token(text, "sb://h/orders", NOW_S)
    assert has_right(grant.rights, Right.SEND)
    assert not has_right(grant.rights, Right.LISTEN)
    assert has_right(frozenset({Right.MANAGE}), Right.LISTEN)


def test_password_is_a_key_of_the_named_rule() -> None:
    assert [each.path for each in RULES.check_password("root", "second")] == [""]
    assert [each.path for each in RULES.check_password("local", "near")] == ["orders"]
    for name, key in (("root", "near"), ("nobody", "second"), ("root", "")):
        with pytest.raises(TokenRefused):
            RULES.check_password(name, key)


def test_password_that_stands_on_several_entities_counts_on_each() -> None:
    rules = [
        KeyRule("app", frozenset({right}), Keys(key), scope)
        for scope, right, key in (
            ("a", Right.SEND, "shared"),
            ("b", Right.LISTEN, "shared"),
            ("c", Right.SEND, "its own"),
        )
    ]
    granted = Authorizer(rules).check_password("app", "shared")
    assert [(each.path, *each.rights) for each in granted] == [
        ("a", Right.SEND),
        ("b", Right.LISTEN),
    ]


NAMED = Authorizer(
    (KeyRule("root", frozenset(Right), Keys("key+/=")),),
    OwnNames("Team", ["bus.example", "10.0.0.7", "team-a"]),
    lambda path: path == "team-a",
)


@pytest.mark.parametrize(
    "resource",
    ["bus.example", "BUS.example:5671", "localhost", "127.0.0.1:5672", "[::1]:5671", "::1", "team",
     "team.servicebus.windows.net", "team.servicebus.windows.net/", "10.0.0.7", "bus.example."],
)  # fmt: skip
def test_token_for_the_bare_name_of_the_bus_counts_for_all_of_it(resource: str) -> None:
    for signed in (resource, quote_plus(resource)):
        assert NAMED.check_token(token(signed), "sb://bus.example/orders", NOW_S).path == "orders"
        assert NAMED.check_token(token(signed), "sb://bus.example", NOW_S).path == ""


@pytest.mark.parametrize(
    "resource",
    ["other.example", "team-b", "bus.example:x", "x@bus.example", "bus.example/a", "[bus.example]",
     "sb://h/bus.example", "h/localhost", "/localhost", "10.0.0.8", "", ":5671"],
)  # fmt: skip
def test_token_for_another_bare_name_is_one_for_that_path(resource: str) -> None:
    if resource:
        with pytest.raises(TokenRefused, match="another resource"):
            NAMED.check_token(token(quote_plus(resource)), "sb://bus.example/orders", NOW_S)
    assert not OwnNames("team", ["bus.example"]).include(resource)


def test_token_for_a_path_that_is_called_like_the_bus_stays_one_for_that_path() -> None:
    assert NAMED.check_token(token("team-a"), "sb://h/team-a/escape", NOW_S)
    with pytest.raises(TokenRefused, match="another resource"):
        NAMED.check_token(token("team-a"), "sb://h/victim", NOW_S)


@pytest.mark.parametrize(
    ("expiry", "shown"), [("999999", "1970-01-12 13:46:39Z"), ("-" + "9" * 17, "long ago")]
)
def test_expired_token_is_refused_in_the_words_of_service_bus(expiry: str, shown: str) -> None:
    with pytest.raises(TokenRefused) as caught:
        RULES.check_token(token("sb%3A%2F%2Fh", expiry=expiry), "sb://h/orders", NOW_S)
    text = f"The token is expired. Expiration time: '{shown}'."
    assert (caught.value.code, str(caught.value)) == ("ExpiredToken", text)


def test_rule_of_an_entity_does_not_reach_an_entity_named_below_it() -> None:
    near = token("sb%3A%2F%2Fh%2Forders", rule="local", key="near")
    grant = RULES.check_token(near, "sb://h/orders", NOW_S)
    assert grant.covers("orders")
    assert grant.covers("orders/$deadletterqueue")
    assert not grant.covers("orders/eu")
    with pytest.raises(TokenRefused):
        RULES.check_token(near, "sb://h/orders/eu", NOW_S)


@pytest.mark.parametrize(
    ("resource", "covered", "refused"),
    [
        ("sb://h/a", "a A a/ %61 a/$management a/b A%2fb a/Subscriptions/s", "ab b a%252fb b/../a"),
        ("sb://h:5671/a", "a", "ab"),
        ("sb://h/a/b", "a/b a/b/$DeadLetterQueue a/B%2fc", "a a/bc a/b%252fc"),
        ("sb://h/a%2fb", "a/b A%2FB", "a b a%252fb"),
        ("sb://h/t/Subscriptions/s", "t/subscriptions/S", "t t/Subscriptions/s2 t/Subscriptions"),
        ("sb://h/a/$DeadLetterQueue", "a/$deadletterqueue", "a a/$management"),
        ("sb://h/a/../b", "a/../b", "a b"),
        ("sb://h/a#b", "a#b", "a b"),
        ("h/a", "h/a", "a"),
    ],
)
def test_spelling_variants_grant_no_unsigned_resource(
    resource: str, covered: str, refused: str
) -> None:
    for signed in (resource, quote_plus(resource)):
        for path in covered.split():
            assert RULES.check_token(token(signed), f"sb://h/{path}", NOW_S)
        for path in refused.split():
            with pytest.raises(TokenRefused, match="another resource"):
                RULES.check_token(token(signed), f"sb://h/{path}", NOW_S)


def test_fuzzed_tokens_grant_only_signed_rights() -> None:
    assert fuzz(5.0, seed=7, max_inputs=3_000) == 3_000
