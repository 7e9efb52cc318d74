"""Rules of the bus become those of the spec; keys that nobody changes stay."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.entities import AuthorizationRule, Right
from postbus_operator.keys.rules import (
    FoundRule,
    KeyPair,
    Problem,
    RotationStep,
    RulePlan,
    Side,
    SourceKeys,
    former_keys,
    is_own,
    plan_rules,
    read_source,
    rotation_step,
    visible,
    wanted_rules,
)
from postbus_operator.objects import Resource

MARK = "postbus.dev/queues/shop/orders/uid-2"
FORMER_MARK = "postbus.dev/queues/shop/orders/uid-1"
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
PAUSE = timedelta(minutes=5)
KEY = "k" * 44
OTHER = "o" * 44


def resource(kind: str, spec: dict[str, Any]) -> Resource:
    metadata = {
        "namespace": "shop",
        "name": "orders",
        "uid": "uid-2",
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": "2026-11-23T09:00:00Z",
    }
    return Resource.from_object(kind, {"metadata": metadata, "spec": spec})


def rule(name: str, *rights: str, secret: str | None = None) -> AuthorizationRule:
    return AuthorizationRule.model_validate(
        {"name": name, "rights": rights or ("Listen",), "secretName": secret}
    )


def found(name: str, *rights: Right, mark: str = MARK) -> FoundRule:
    return FoundRule(
        name, frozenset(rights or (Right.LISTEN,)), KeyPair(f"{name}-1", f"{name}-2"), mark
    )


def plan(
    wanted: list[AuthorizationRule],
    there: list[FoundRule],
    sources: Mapping[str, SourceKeys | Problem] | None = None,
    renewed: Side | None = None,
) -> RulePlan:
    return plan_rules(wanted, there, sources or {}, MARK, renewed, lambda: "new-key")


# --- wanted -------------------------------------------------------------------------------------


def test_a_namespace_without_rules_has_that_of_azure_and_an_empty_list_means_none() -> None:
    (root,) = wanted_rules(resource("Namespace", {}))
    assert root.name == "RootManageSharedAccessKey"
    assert root.effective_rights == frozenset(Right)
    assert wanted_rules(resource("Namespace", {"authorizationRules": []})) == ()
    assert wanted_rules(resource("Queue", {"owner": {"name": "bus"}})) == ()


def test_a_mark_of_a_former_resource_with_the_same_name_is_own() -> None:
    assert is_own(MARK, MARK)
    assert is_own(FORMER_MARK, MARK)
    assert not is_own("", MARK)
    assert not is_own("", "")
    assert not is_own("postbus.dev/topics/shop/orders/uid-2", MARK)
    assert not is_own(f"{MARK}/more", MARK)


# --- changes ------------------------------------------------------------------------------------


def test_a_new_rule_leaves_its_keys_to_the_bus() -> None:
    (put,) = plan([rule("app", "Send")], []).puts
    assert put.body() == {"rights": ["Send"]}


def test_a_rule_that_left_the_spec_goes_and_foreign_ones_stay() -> None:
    there = [
        found("old"),
        found("former", mark=FORMER_MARK),
        found("by-hand", mark=""),
        found("other", mark="postbus.dev/queues/shop/bills/uid-3"),
    ]
    assert plan([], there) == RulePlan(deletes=("old", "former"))


def test_a_foreign_rule_of_a_wanted_name_is_reported_and_left_alone() -> None:
    made = plan([rule("app"), rule("other")], [found("app", mark="")])
    assert [put.name for put in made.puts] == ["other"]
    assert made.kept == ("other",)
    (problem,) = made.problems
    assert problem.reason == "NameTaken"
    assert "delete it there" in problem.message


def test_a_rule_of_a_former_resource_gets_the_new_mark_and_keeps_its_keys() -> None:
    (put,) = plan([rule("app")], [found("app", mark=FORMER_MARK)]).puts
    assert (put.primary, put.secondary) == ("app-1", "app-2")


def test_changed_rights_keep_the_keys() -> None:
    (put,) = plan([rule("app", "Manage")], [found("app")]).puts
    assert put.body() == {
        "rights": ["Listen", "Manage", "Send"],
        "primaryKey": "app-1",
        "secondaryKey": "app-2",
    }


def test_the_users_secret_decides_the_keys() -> None:
    wanted = [rule("app", secret="mine")]
    (put,) = plan(wanted, [found("app")], {"app": SourceKeys("theirs", None)}).puts
    assert (put.primary, put.secondary) == ("theirs", "app-2")
    assert plan(wanted, [found("app")], {"app": SourceKeys("app-1", "app-2")}).puts == ()


def test_without_its_secret_a_rule_keeps_its_keys_and_a_new_one_waits() -> None:
    missing = Problem("SourceMissing", "create it")
    wanted = [rule("app", secret="mine"), rule("new", secret="mine")]
    made = plan(wanted, [found("app")], {"app": missing, "new": missing})
    assert made == RulePlan(kept=("app",), problems=(missing, missing))


def test_a_rotation_renews_one_key_of_each_rule_whose_keys_the_bus_makes() -> None:
    wanted = [rule("app"), rule("users", secret="mine")]
    there = [found("app"), found("users")]
    source = {"users": SourceKeys("users-1", "users-2")}
    (put,) = plan(wanted, there, source, "primary").puts
    assert (put.name, put.primary, put.secondary) == ("app", "new-key", "app-2")
    (put,) = plan(wanted, there, source, "secondary").puts
    assert (put.name, put.primary, put.secondary) == ("app", "app-1", "new-key")


def test_a_lost_rule_gets_the_keys_of_its_secret_again() -> None:
    (put,) = plan([rule("app")], [], {"app": SourceKeys(KEY, OTHER)}).puts
    assert (put.primary, put.secondary) == (KEY, OTHER)
    (put,) = plan([rule("app")], [], {"app": SourceKeys(None, KEY)}, "primary").puts
    assert (put.primary, put.secondary) == ("new-key", KEY)


@pytest.mark.parametrize(
    ("hidden", "keys"),
    [
        (None, SourceKeys(KEY, OTHER)),
        ("primary", SourceKeys(None, KEY)),
        ("secondary", SourceKeys(KEY, None)),
    ],
)
def test_a_key_that_a_rotation_shows_keeps_its_side(hidden: str | None, keys: SourceKeys) -> None:
    shown = secret(primaryKey=KEY, secondaryKey=KEY if hidden else OTHER)
    assert former_keys(shown, "app", hidden) == keys


def test_what_is_no_key_is_not_taken_from_a_secret() -> None:
    assert former_keys(secret(primaryKey="short"), "app", None) is None


# --- any bus ------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")
RIGHTS = st.frozensets(st.sampled_from(list(Right)), min_size=1)
MARKS = st.sampled_from(("", MARK, FORMER_MARK, "postbus.dev/queues/shop/bills/uid-3"))


def effective(rights: frozenset[Right]) -> frozenset[Right]:
    return frozenset(Right) if Right.MANAGE in rights else rights


def rules_of(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[AuthorizationRule]]:
    one = st.builds(
        AuthorizationRule,
        name=names,
        rights=RIGHTS,
        secret_name=st.sampled_from((None, "mine")),
    )
    return st.lists(one, max_size=4, unique_by=lambda each: each.name)


def bus_of(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[FoundRule]]:
    keys = st.builds(KeyPair, st.sampled_from("xyz"), st.sampled_from("xyz"))
    one = st.builds(FoundRule, names, RIGHTS.map(effective), keys, MARKS)
    return st.lists(one, max_size=4, unique_by=lambda each: each.name)


SOURCES = st.dictionaries(
    st.sampled_from(NAMES),
    st.one_of(
        st.just(Problem("SourceMissing", "create it")),
        st.builds(SourceKeys, st.just("s-1"), st.sampled_from((None, "s-2"))),
    ),
)


def applied(there: list[FoundRule], made: RulePlan) -> list[FoundRule]:
    """Return the rules after the changes, as the bus makes them."""
    new = (f"made-{number}" for number in itertools.count())
    after = {each.name: each for each in there if each.name not in made.deletes}
    for put in made.puts:
        before = after.get(put.name)
        primary = put.primary or (before.keys.primary if before else next(new))
        secondary = put.secondary or (before.keys.secondary if before else next(new))
        after[put.name] = FoundRule(put.name, put.rights, KeyPair(primary, secondary), MARK)
    return list(after.values())


@given(
    rules_of(st.sampled_from(NAMES)),
    bus_of(st.sampled_from(NAMES)),
    SOURCES,
    st.sampled_from((None, "primary", "secondary")),
)
def test_one_pass_makes_any_bus_as_wanted_and_a_second_changes_nothing(
    wanted: list[AuthorizationRule],
    there: list[FoundRule],
    sources: dict[str, SourceKeys | Problem],
    renewed: Side | None,
) -> None:
    sources = {each.name: sources[each.name] for each in wanted if each.name in sources}
    made = plan_rules(wanted, there, sources, MARK, renewed, lambda: "new-key")
    after = {each.name: each for each in applied(there, made)}
    again = plan_rules(wanted, list(after.values()), sources, MARK, None, lambda: "never")
    assert (again.puts, again.deletes) == ((), ())
    assert again.kept == made.kept
    assert {each.name for each in there if not is_own(each.managed_by, MARK)} <= after.keys()
    for before in there:
        if not is_own(before.managed_by, MARK):
            assert after[before.name] == before
    own = {name for name, each in after.items() if each.managed_by == MARK}
    assert own == set(made.kept)
    assert own <= {each.name for each in wanted}


# --- the user's Secret --------------------------------------------------------------------------


def secret(**data: str) -> dict[str, Any]:
    return {"data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}}


def test_keys_of_a_secret_are_read() -> None:
    assert read_source("app", "mine", secret(primaryKey=KEY)) == SourceKeys(KEY, None)
    both = secret(primaryKey=KEY, secondaryKey=KEY[1:])
    assert read_source("app", "mine", both) == SourceKeys(KEY, KEY[1:])


def test_a_missing_secret_or_key_names_the_next_step() -> None:
    missing = read_source("app", "mine", None)
    assert isinstance(missing, Problem)
    assert missing.reason == "SourceMissing"
    assert "create it with the keys primaryKey" in missing.message
    empty = read_source("app", "mine", secret(secondaryKey=KEY))
    assert isinstance(empty, Problem)
    assert empty.reason == "SourceMissing"


@pytest.mark.parametrize("text", ["short", KEY + "\n", "x" * 257, f"{KEY};a", f"{KEY} a", "ü" * 20])
def test_a_text_that_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    problem = read_source("app", "mine", secret(primaryKey=text))
    assert isinstance(problem, Problem)
    assert problem.reason == "SourceInvalid"
    assert text not in problem.message
    assert isinstance(read_source("a", "b", secret(primaryKey=KEY, secondaryKey=text)), Problem)
    assert isinstance(read_source("a", "b", {"data": {"primaryKey": "%"}}), Problem)


# --- rotation -----------------------------------------------------------------------------------


def test_a_rotation_first_hides_the_key_and_renews_it_after_the_pause() -> None:
    assert rotation_step(None, None, NOON, PAUSE) == RotationStep()
    first = rotation_step("primary", None, NOON, PAUSE)
    assert first == RotationStep("primary", None, NOON + PAUSE)
    waiting = rotation_step("primary", NOON, NOON + PAUSE - timedelta(seconds=1), PAUSE)
    assert waiting == first
    last = rotation_step("primary", NOON, NOON + PAUSE, PAUSE)
    assert last == RotationStep("primary", "primary", NOON + PAUSE)


def test_a_rotation_of_something_else_is_reported() -> None:
    problem = rotation_step("both", None, NOON, PAUSE)
    assert isinstance(problem, Problem)
    assert "set one of them, or remove it" in problem.message


def test_a_hidden_key_is_named_nowhere() -> None:
    keys = KeyPair("one", "two")
    assert visible(keys, None) == keys
    assert visible(keys, "primary") == KeyPair("two", "two")
    assert visible(keys, "secondary") == KeyPair("one", "one")


def test_texts_of_objects_contain_no_key() -> None:
    objects = [
        found("app"),
        KeyPair(KEY, KEY),
        SourceKeys(KEY, KEY),
        plan([rule("app")], [FoundRule("app", frozenset(Right), KeyPair(KEY, KEY), MARK)]),
    ]
    for each in objects:
        assert KEY not in repr(each)
        assert "app-1" not in repr(each)
