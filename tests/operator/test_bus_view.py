"""The view of a bus: changes in any order, tombstones, numbers of subscriptions."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.control import Applied, CountDetails, EntityChange
from postbus_operator.bus.count_changes import has_moved, numbers_of
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.bus.view import BusView, view_of


def change(version: int, name: str, entity_id: int, **more: Any) -> EntityChange:
    """Return a put, or with `reason` a deletion."""
    is_put = "reason" not in more
    return EntityChange(
        version=version,
        name=name,
        entity_id=entity_id,
        **{
            "kind": "queue",
            "change": "put" if is_put else "deleted",
            "managed_by": "",
            "applied_hash": f"hash-{version}" if is_put else None,
            **more,
        },
    )


ORDERS = EntityPath("queue", "Orders")


def test_names_compare_without_case() -> None:
    view = view_of([change(1, "Orders", 5)], 1)
    live = view.find("orDERS")
    assert live is not None
    assert (live.name, live.entity_id, live.applied_hash) == ("Orders", 5, "hash-1")


def test_a_late_page_changes_nothing() -> None:
    view = view_of([change(4, "orders", 5)], 4)
    assert not view.take(change(2, "orders", 5))
    assert not view.take(change(4, "orders", 5))
    assert not view.take(change(3, "orders", 5, reason="requested"))
    assert view.find("orders") is not None


def test_a_tombstone_that_ceased_to_be_restorable_is_no_deletion_of_the_next_entity() -> None:
    view = view_of([change(2, "orders", 5, reason="requested")], 2)
    assert view.take(change(3, "orders", 6))
    assert view.take(change(9, "orders", 5, reason="requested"))
    live = view.find("orders")
    assert live is not None
    assert live.entity_id == 6
    assert view.take(change(10, "orders", 6))


def test_a_restored_entity_has_no_tombstone() -> None:
    view = view_of([change(2, "orders", 5, reason="requested")], 2)
    assert [each.entity_id for each in view.tombstones(ORDERS)] == [5]
    answer = Applied(entity_id=5, applied_hash="h", version=3, acknowledged={}, created=False)
    view.note_put(ORDERS, answer, "mark")
    assert view.tombstones(ORDERS) == []
    assert not view.take(change(3, "Orders", 5, applied_hash="h", managed_by="mark"))


def test_tombstones_are_those_of_the_kind() -> None:
    view = view_of([change(2, "orders", 5, reason="idle", kind="topic")], 2)
    assert view.tombstones(ORDERS) == []
    assert [each.reason for each in view.tombstones(EntityPath("topic", "orders"))] == ["idle"]


def test_differences_are_the_paths_that_say_something_else() -> None:
    former = view_of([change(1, "a", 1), change(2, "b", 2), change(3, "c", 3)], 3)
    now = view_of([change(1, "a", 1), change(4, "B", 2), change(5, "d", 4)], 5)
    assert now.differences(former) == {"b", "c", "d"}


ENTITY = st.sampled_from(["t/Subscriptions/a", "t/Subscriptions/b", "T/subscriptions/C"])


@given(st.lists(st.tuples(ENTITY, st.integers(1, 4), st.booleans()), max_size=20), st.randoms())
def test_changes_converge_in_any_order(steps: list[tuple[str, int, bool]], random: Any) -> None:
    """The feed has the last change of an entity; pages may arrive in any order and twice."""
    history: dict[tuple[str, int], EntityChange] = {}
    live: dict[str, int] = {}
    known = 0
    for version, (name, _, is_put) in enumerate(steps, 1):
        if is_put:
            if name not in live:
                known += 1
                live[name] = known
            history[name, live[name]] = change(version, name, live[name], kind="subscription")
        elif name in live:
            number = live.pop(name)
            history[name, number] = change(
                version, name, number, kind="subscription", reason="requested"
            )
    told = [*history.values(), *history.values()]
    random.shuffle(told)
    view = BusView()
    for each in told:
        view.take(each)
    found = {name: view.find(name) for name, _, _ in steps}
    assert {name: each.entity_id for name, each in found.items() if each} == live
    assert view.subscription_count("T") == len(live)


# --- counts -------------------------------------------------------------------------------------


def numbers(active: int) -> tuple[int, ...] | None:
    details = CountDetails(
        active_message_count=active,
        dead_letter_message_count=0,
        scheduled_message_count=0,
        transfer_message_count=0,
        transfer_dead_letter_message_count=0,
    )
    return numbers_of(details, 0)


def test_counts_move_by_more_than_a_tenth_or_across_zero() -> None:
    assert has_moved(None, numbers(0))
    assert not has_moved(numbers(100), numbers(110))
    assert has_moved(numbers(100), numbers(111))
    assert has_moved(numbers(100), numbers(89))
    assert has_moved(numbers(0), numbers(1))
    assert has_moved(numbers(1), numbers(0))
    assert not has_moved(numbers(5), None)


@given(st.integers(0, 10**9))
def test_counts_that_are_shown_do_not_move(active: int) -> None:
    assert not has_moved(numbers(active), numbers(active))
