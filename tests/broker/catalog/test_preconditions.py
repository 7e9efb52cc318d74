"""Preconditions of a change of an entity, as in `If-Match`."""

from __future__ import annotations

import pytest

from postbus.broker.catalog.preconditions import (
    UNCONDITIONAL,
    DirectoryRefusal,
    Precondition,
    PutMode,
    VersionDiffers,
)
from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import Refusal
from postbus.store.catalog import CatalogEntry, CatalogPut

QUEUE, TOPIC = EntityKind.QUEUE, EntityKind.TOPIC
NEW, EXISTING = Precondition(PutMode.CREATE), Precondition(PutMode.UPDATE)
KNOWN = CatalogPut(None, "Orders", QUEUE, QueueProperties(), 0).entry(1, 7, 0)


def of(*versions: int, mode: PutMode = PutMode.ANY) -> Precondition:
    return Precondition(mode, frozenset(versions))


@pytest.mark.parametrize(
    ("condition", "known"),
    [
        (UNCONDITIONAL, None),
        (UNCONDITIONAL, KNOWN),
        (NEW, None),
        (EXISTING, KNOWN),
        (of(7), KNOWN),
        (of(3, 7, mode=PutMode.UPDATE), KNOWN),
    ],
)
def test_condition_that_holds_lets_a_change_pass(
    condition: Precondition, known: CatalogEntry | None
) -> None:
    condition.check(QUEUE, "orders", known)


@pytest.mark.parametrize(
    ("condition", "kind", "known", "refusal", "why"),
    [
        (NEW, QUEUE, KNOWN, Refusal.ALREADY_EXISTS, "Orders exists already and is a queue"),
        (of(7), TOPIC, KNOWN, Refusal.ALREADY_EXISTS, "Orders exists already and is a queue"),
        (EXISTING, QUEUE, None, Refusal.ENTITY_NOT_FOUND, "there is no queue orders"),
        (of(7), QUEUE, None, Refusal.ENTITY_NOT_FOUND, "there is no queue orders"),
        (of(6), QUEUE, KNOWN, Refusal.CONFLICT, "Orders has version 7 and not 6"),
        (of(9, 6), QUEUE, KNOWN, Refusal.CONFLICT, "Orders has version 7 and not 6 or 9"),
    ],
)
def test_failed_condition_refuses_with_a_reason(
    condition: Precondition,
    kind: EntityKind,
    known: CatalogEntry | None,
    refusal: Refusal,
    why: str,
) -> None:
    with pytest.raises(DirectoryRefusal) as caught:
        condition.check(kind, "orders", known)
    assert (caught.value.refused.refusal, str(caught.value)) == (refusal, why)


def test_a_version_conflict_names_the_current_version() -> None:
    with pytest.raises(VersionDiffers) as caught:
        of(6).check_version("the catalog", 7)
    assert caught.value.version == 7
