"""The program `postbus-operator`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from postbus_operator.__main__ import UNUSABLE, main
from postbus_operator.kube.cache import Cache
from postbus_operator.settings import PREFIX
from tests.operator.objects import entity

DEEPEST = 9_900


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program has begun, and ended, as a setting is wrong."""
    before = sys.getrecursionlimit()
    monkeypatch.setattr(sys, "argv", ["postbus-operator"])
    monkeypatch.setenv(f"{PREFIX}LOG_FORMAT", "none")
    assert main() == UNUSABLE
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("started")
def test_no_value_is_nested_too_deep_to_be_read() -> None:
    """Whoever may write a Subscription somewhere must not stop the operator of the cluster."""
    value = json.loads('{"a":' * DEEPEST + "1" + "}" * DEEPEST)
    rule = {"name": "a", "sqlFilter": {"sqlExpression": "a = @p", "parameters": {"@p": value}}}
    cache = Cache()
    assert cache.observe(entity("Subscription", "large", owner="events", rules=[rule])) is not None
    assert [each.name for each in cache.all_keys()] == ["large"]
