"""Names of a bus's objects fit Kubernetes, and no two buses share one."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from postbus_operator.names import (
    MAX_STATEFUL_SET,
    SUFFIXES,
    child_name,
    store_name,
)

SERVICE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
WORDS = ("shop", "a", "store", "broker", "brokers", "tls", "0", "0123456789", "bus", "x" * 30)

resources = st.one_of(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("-".join),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(".".join),
    st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", fullmatch=True),
)
stores = st.one_of(
    st.lists(st.sampled_from(WORDS[:-1]), min_size=1, max_size=4).map("-".join),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?", fullmatch=True),
).filter(lambda name: len(name) <= 30)


def test_an_ordinary_name_is_kept() -> None:
    assert child_name("shop") == "shop"
    assert store_name("shop", "main") == "shop-store-main"


@given(resources, stores)
@example("x" * 253, "y" * 30)
@example("1.2", "1")
def test_names_fit_kubernetes(name: str, store: str) -> None:
    bus = child_name(name)
    assert len(f"{bus}-broker") <= MAX_STATEFUL_SET
    assert len(f"{bus}-brokers") <= 63
    of_store = store_name(bus, store)
    assert len(of_store) <= MAX_STATEFUL_SET
    for each in (bus, f"{bus}-brokers", of_store):
        assert SERVICE.fullmatch(each), each


def objects_of(name: str, store: str) -> set[str]:
    bus = child_name(name)
    of_store = store_name(bus, store)
    return {
        bus,
        *(f"{bus}-{each}" for each in SUFFIXES),
        of_store,
        f"{of_store}-auth",
        f"{of_store}-tls",
    }


@given(st.tuples(resources, stores), st.tuples(resources, stores))
@example(("shop", "a"), ("shop-store-a", "b"))
@example(("shop", "a"), ("shop-broker", "a"))
@example(("shop", "a-0123456789"), ("shop-store-a-0123456789", "b"))
@example(("x" * 252 + "a", "a"), ("x" * 252 + "b", "a"))
@example(("shop.bus", "a"), ("shop-bus", "a"))
def test_two_buses_share_no_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    if one[0] != other[0]:
        assert not objects_of(*one) & objects_of(*other)


@given(resources, stores, stores)
def test_two_stores_of_a_bus_share_no_name(name: str, one: str, other: str) -> None:
    bus = child_name(name)
    assert one == other or store_name(bus, one) != store_name(bus, other)
