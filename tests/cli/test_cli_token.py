"""`postbus token`: its resource, its lifetime and its inputs."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from postbus.broker.access.authz import Authorizer, KeyRule, TokenRefused
from postbus.cli import app
from postbus.contract.entities import Right
from tests.edge.bus_thread import Keys

KEY = "a+/key=="
WORDS = f"Endpoint=sb://localhost:5672;SharedAccessKeyName=a rule;SharedAccessKey={KEY}"
RULE = KeyRule("a rule", frozenset({Right.SEND}), Keys(KEY))


def token(*arguments: str, words: str = WORDS) -> str:
    variables = {"POSTBUS_CONNECTION_STRING": words}
    done = CliRunner().invoke(app, ["token", *arguments], env=variables)
    assert done.exit_code == 0, done.output
    return done.stdout.rstrip("\n")


def grants(made: str, path: str, in_s: float = 0) -> bool:
    try:
        Authorizer([RULE]).check_token(made, path, time.time() + in_s)
    except TokenRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("arguments", "words", "granted", "refused"),
    [
        ((), WORDS, ("orders", "news/subscriptions/all"), ()),
        (("orders",), WORDS, ("orders", "orders/$deadletterqueue"), ("other", "orders2")),
        (("News/Subscriptions/all",), WORDS, ("news/subscriptions/all",), ("news",)),
        ((), WORDS + ";EntityPath=orders", ("orders",), ("other",)),
    ],
)
def test_token_grants_the_requested_scope_only(
    arguments: tuple[str, ...], words: str, granted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    made = token(*arguments, words=words)
    assert [grants(made, path) for path in granted] == [True] * len(granted)
    assert [grants(made, path) for path in refused] == [False] * len(refused)
    assert KEY not in made


def test_token_expires() -> None:
    assert grants(token(), "orders", 3_500)
    assert not grants(token(), "orders", 3_700)
    assert grants(token("--expires", "5m"), "orders", 200)
    assert not grants(token("--expires", "5m"), "orders", 400)


def test_a_signature_cannot_sign() -> None:
    words = "Endpoint=sb://localhost;SharedAccessSignature=SharedAccessSignature sr=x"
    done = CliRunner().invoke(app, ["token"], env={"POSTBUS_CONNECTION_STRING": words})
    assert done.exit_code == 3
    assert "has no key" in done.output
