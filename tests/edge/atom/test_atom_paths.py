"""Paths of administration and the table of its errors."""

from __future__ import annotations

import pytest

from postbus.contract.entities import EntityKind
from postbus.edge.atom.errors import REFUSALS, explained
from postbus.edge.atom.paths import (
    Entities,
    EntityAt,
    NamespaceInfo,
    ParsedPath,
    Root,
    RuleAt,
    Rules,
    SubscriptionAt,
    Subscriptions,
    Unknown,
    parse_path,
)
from postbus.entity.commands import Refusal, Refused

AT = SubscriptionAt("a/b", "S")


@pytest.mark.parametrize(
    ("path", "parsed"),
    [
        ("", Root()),
        ("/", Root()),
        ("//", Root()),
        ("/$namespaceinfo", NamespaceInfo()),
        ("/$NamespaceInfo/", NamespaceInfo()),
        ("/$Resources/queues", Entities(EntityKind.QUEUE)),
        ("/$resources/Topics/", Entities(EntityKind.TOPIC)),
        ("/$Resources/eventhubs", Unknown()),
        ("/$Resources", Unknown()),
        ("/Orders", EntityAt("Orders")),
        ("/a//b/", EntityAt("a/b")),
        ("/rules", EntityAt("rules")),
        ("/subscriptions", EntityAt("subscriptions")),
        ("/a/rules/b", EntityAt("a/rules/b")),
        ("/a/$DeadLetterQueue", Unknown()),
        ("/a/b/subscriptions", Subscriptions("a/b")),
        ("/a/b/Subscriptions/", Subscriptions("a/b")),
        ("/a/b/SUBSCRIPTIONS/S", AT),
        ("/a//b/Subscriptions//S/", AT),
        ("/a/b/Subscriptions/S/Rules/", Rules(AT)),
        ("/a/b/subscriptions/S/rules", Rules(AT)),
        ("/a/b/Subscriptions/S/Rules/$Default", RuleAt(AT, "$Default")),
        (
            "/x/Subscriptions/y/Subscriptions/z/Rules/r",
            RuleAt(SubscriptionAt("x/Subscriptions/y", "z"), "r"),
        ),
    ],
)
def test_a_path_names_one_resource(path: str, parsed: ParsedPath) -> None:
    assert parse_path(path) == parsed


@pytest.mark.parametrize(
    ("refusal", "status", "sub_code"),
    [
        (Refusal.ALREADY_EXISTS, 409, "SubCode=40900."),
        (Refusal.ENTITY_NOT_FOUND, 404, "SubCode=40400."),
        (Refusal.NOT_ALLOWED, 400, "SubCode=40000."),
        (Refusal.ARGUMENT_OUT_OF_RANGE, 400, "SubCode=40000."),
        (Refusal.QUOTA_EXCEEDED, 403, "SubCode=40300."),
        (Refusal.CONFLICT, 412, "SubCode=41200."),
        (Refusal.NOT_APPLIED, 503, "SubCode=50300."),
        (Refusal.UNKNOWN, 500, "SubCode=50000."),
    ],
)
def test_a_refusal_has_the_status_and_sub_code_clients_know(
    refusal: Refusal, status: int, sub_code: str
) -> None:
    refused = explained(Refused(refusal, "because of this"))
    assert refused.status == status
    assert refused.text.startswith(sub_code)
    assert refused.text.endswith("because of this.")
    assert ("Retry-After" in refused.headers) == (status == 503)


def test_permanent_refusals_have_statuses_that_clients_do_not_repeat() -> None:
    repeated = {
        status for status, _, _ in REFUSALS.values() if status >= 500 or status in (408, 429)
    }
    assert repeated == {500, 503}
    for refusal in (Refusal.NOT_APPLIED, Refusal.BUSY, Refusal.UNKNOWN):
        assert REFUSALS[refusal][0] in repeated
    assert sum(status in repeated for status, _, _ in REFUSALS.values()) == 3
