"""Conditions of a Namespace follow from one look, and mean the same to kstatus."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.contract.control import EntityTotals, NamespaceDescription, PartitionStatus, Status
from postbus.contract.namespace import NamespaceDefinition
from postbus_operator.namespaces.status import (
    Look,
    Trouble,
    Verdict,
    conditions_of,
    namespace_status,
)
from postbus_operator.namespaces.workloads import PodTrouble, Workload
from postbus_operator.objects import Key, Resource
from postbus_operator.running.status_patch import is_same, status_json
from tests.operator.buses import bus_of
from tests.operator.health import check_health

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def resource(status: dict[str, Any] | None = None, **annotations: str) -> Resource:
    return Resource(
        key=Key("Namespace", "apps", "shop-bus"),
        uid="1",
        generation=3,
        resource_version="1",
        created_at=NOON,
        deleted_at=None,
        finalizers=(),
        labels={},
        annotations=annotations,
        spec={},
        status=status or {},
    )


def workload(name: str, *, ready: bool = True, current: bool = True) -> Workload:
    return Workload(name, 1, 1, int(ready), current)


def answered(*troubles: str | None, ready: bool = True) -> Status:
    partitions = [
        PartitionStatus(
            partition=at,
            status="active",
            version=4,
            epoch=7,
            schema_version=25,
            reload_count=0,
            trouble=each,
        )
        for at, each in enumerate(troubles)
    ]
    return Status(
        program_version="1.2.3",
        namespace="shop-bus",
        broker="shop-bus-broker-0",
        is_ready=ready,
        is_development=False,
        version=4,
        highest_caller_epoch=0,
        partitions=partitions,
        troubles=[each for each in troubles if each],
    )


DESCRIBED = NamespaceDescription(
    name="shop-bus",
    version=4,
    partition_count=2,
    is_closed=False,
    entities=EntityTotals(queues=1, topics=2, subscriptions=3, unmanaged=1),
    applied_hash="",
    properties=NamespaceDefinition(),
)


def whole(status: dict[str, Any] | None = None) -> Look:
    return Look(
        resource(status),
        NOON,
        bus=bus_of({}),
        stores=[workload("shop-bus-store-main")],
        broker=workload("shop-bus-broker"),
        bus_status=answered(None, None),
        description=DESCRIBED,
    )


def said(look: Look) -> dict[str, tuple[str, str, str]]:
    found = conditions_of(look).all()
    return {each.type: (each.status, each.reason, each.message) for each in found}


def test_a_whole_bus_is_ready_and_nothing_else() -> None:
    found = said(whole())
    assert {name: each[0] for name, each in found.items()} == {
        "Ready": "True",
        "Valid": "True",
        "StorageReady": "True",
        "PartitionsReady": "True",
    }
    status = namespace_status(whole())
    assert status.version == "1.2.3"
    assert [each.ready for each in status.partitions] == [True, True]
    assert [(each.epoch, each.schema_version) for each in status.partitions] == [(7, 25)] * 2
    assert status.entity_counts is not None
    assert status.entity_counts.subscriptions == 3


def test_a_look_that_finds_the_same_means_the_same() -> None:
    first = status_json(namespace_status(whole()))
    later = whole(first)
    later.now = NOON + timedelta(hours=1)
    assert is_same(first, status_json(namespace_status(later)))


def test_one_partition_that_is_away_degrades_the_bus() -> None:
    look = whole()
    look.bus_status = answered(None, "its database does not answer")
    found = said(look)
    assert found["Ready"][:2] == ("True", "Degraded")
    assert found["PartitionsReady"][:2] == ("False", "SomeNotReady")
    assert found["StorageReady"] == ("False", "Unreachable", "its database does not answer")
    assert "Reconciling" in found


def test_a_full_store_is_named_with_what_to_do() -> None:
    """The words are those of `Host.trouble`."""
    look = whole()
    look.bus_status = answered(None, "the store is full, sends are refused")
    status, reason, text = said(look)["StorageReady"]
    assert (status, reason) == ("False", "StoreFull")
    assert "managed.size" in text


def test_a_bus_without_a_partition_is_not_ready() -> None:
    look = whole({"version": "1.2.3"})
    look.bus_status = answered("away", "away", ready=False)
    found = said(look)
    assert found["Ready"][:2] == ("False", "BackendUnavailable")
    assert found["PartitionsReady"][:2] == ("False", "NoneReady")


def test_a_bus_that_never_answered_is_being_made() -> None:
    look = whole()
    look.stores = [workload("shop-bus-store-main", ready=False)]
    look.store_trouble = "PersistentVolumeClaim data is Pending: set storageClassName"
    look.broker = workload("shop-bus-broker", ready=False)
    look.bus_status = look.description = None
    found = said(look)
    text = f"waits for shop-bus-store-main: {look.store_trouble}"
    assert found["Ready"] == ("False", "Provisioning", text)
    assert found["StorageReady"] == ("False", "Unreachable", text)
    assert found["Reconciling"] == ("True", "Creating", text)


def test_a_roll_is_shown_while_the_bus_works() -> None:
    look = whole({"version": "1.2.3"})
    look.broker = workload("shop-bus-broker", current=False)
    found = said(look)
    assert found["Ready"][:2] == ("True", "Updating")
    assert found["Reconciling"][1] == "RollingOut"


def test_a_database_that_refuses_the_bus_is_named() -> None:
    for text, reason in (
        ('role "bus" was refused: wrong password', "AuthFailed"),
        ("fsync is off", "Misconfigured"),
    ):
        look = whole()
        look.broker = workload("shop-bus-broker", ready=False)
        look.broker_trouble = PodTrouble(text, 6)
        look.bus_status = look.description = None
        assert said(look)["StorageReady"] == ("False", reason, text)


NEWER = "tables have version 9, this Postbus knows 8; run the newer version"


def refused_start(look: Look) -> None:
    look.broker = workload("shop-bus-broker", ready=False)
    look.broker_trouble = PodTrouble(f"the store {NEWER}", 6)
    look.bus_status = look.description = None


def refused_partition(look: Look) -> None:
    look.broker = workload("shop-bus-broker", ready=False)
    look.readiness_trouble = f"partition 0: the partition {NEWER}"
    look.bus_status = look.description = None


@pytest.mark.parametrize("refuse", [refused_start, refused_partition])
def test_tables_of_a_newer_version_stall_and_say_how_to_go_on(
    refuse: Callable[[Look], None],
) -> None:
    look = whole({"version": "1.2.3"})
    refuse(look)
    found = said(look)
    text = found["Stalled"][2]
    assert NEWER in text
    assert "install the newer chart again, or set operatorSpec.image" in text
    assert found["Stalled"] == ("True", "SchemaTooNew", text)
    assert found["StorageReady"] == found["Ready"] == ("False", "SchemaTooNew", text)
    assert "Reconciling" not in found


def test_a_bus_works_on_with_partitions_that_no_newer_version_had() -> None:
    look = whole()
    look.bus_status = answered(None, f"the partition {NEWER}")
    found = said(look)
    assert found["Ready"][:2] == ("True", "Degraded")
    assert found["Stalled"][:2] == ("True", "SchemaTooNew")


def test_a_mistake_in_the_spec_stalls_and_waits_for_nothing() -> None:
    look = whole()
    look.verdict = Verdict("InvalidSpec", "mend it")
    found = said(look)
    assert found["Valid"] == ("False", "InvalidSpec", "mend it")
    assert found["Stalled"] == ("True", "InvalidSpec", "mend it")
    assert found["Ready"] == ("False", "Invalid", "mend it")
    assert "Reconciling" not in found
    assert namespace_status(look).provisioning_state == "Failed"


def test_a_secret_that_may_come_does_not_stall() -> None:
    look = whole()
    look.troubles = [Trouble("secrets", "SecretMissing", "create it", is_stalled=False)]
    found = said(look)
    assert found["SecretsSynced"] == ("False", "SourceMissing", "create it")
    assert "Stalled" not in found
    assert found["Reconciling"] == ("True", "Retrying", "create it")
    assert found["Ready"] == ("True", "Degraded", "create it")


def test_partitions_stay_listed_while_the_bus_does_not_answer() -> None:
    look = whole(status_json(namespace_status(whole())))
    look.bus_status = look.description = None
    status = namespace_status(look)
    assert [each.ready for each in status.partitions] == [False, False]
    assert status.ready_partitions == 0
    assert status.desired_partitions == 2
    assert status.entity_counts is not None


def test_a_paused_bus_keeps_what_was_said_of_it() -> None:
    look = whole()
    look.resource = resource(
        {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "x"}]},
        **{"postbus.dev/paused": "true"},
    )
    look.bus_status = None
    found = said(look)
    assert found["Ready"][:2] == ("False", "Paused")
    assert "Reconciling" not in found


looks = st.builds(
    lambda broker, store, status, verdict, trouble: Look(
        resource(),
        NOON,
        bus=bus_of({}),
        stores=[store],
        broker=broker,
        bus_status=status,
        description=None if status is None else DESCRIBED,
        verdict=verdict,
        troubles=trouble,
    ),
    st.one_of(
        st.none(),
        st.builds(
            lambda ready, current: workload("b", ready=ready, current=current),
            st.booleans(),
            st.booleans(),
        ),
    ),
    st.builds(lambda ready: workload("s", ready=ready), st.booleans()),
    st.sampled_from(
        [
            None,
            *(answered(*each) for each in ((None, None), (None, "x"), ("x", "x"), (None, NEWER))),
        ]
    ),
    st.sampled_from([None, None, Verdict("InvalidSpec", "x")]),
    st.sampled_from(
        [
            [],
            [],
            [Trouble("secrets", "SecretMissing", "x", is_stalled=False)],
            [Trouble("objects", "NameTaken", "x", is_stalled=True)],
        ]
    ),
)


@given(looks)
def test_every_look_has_one_clear_state(look: Look) -> None:
    """kstatus: Failed by Stalled, InProgress by Reconciling, else Current by Ready."""
    found = said(look)
    assert {"Ready", "Valid", "StorageReady", "PartitionsReady"} <= found.keys()
    assert not {"Stalled", "Reconciling"} <= found.keys()
    is_whole = look.is_whole
    assert is_whole == (found["Ready"][:2] == ("True", "Ready"))
    assert is_whole == (not {"Stalled", "Reconciling"} & found.keys())
    assert all(text for _, _, text in found.values())
    status = status_json(namespace_status(look))
    metadata = {"generation": look.resource.generation}
    check_health({"kind": "Namespace", "metadata": metadata, "status": status})
