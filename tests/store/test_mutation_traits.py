"""The table of mutations is complete, and each statement has the columns of its mutations."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from postbus.contract.entities import EntityKind, QueueProperties
from postbus.entity.commands import SubQueue
from postbus.entity.group_commands import Cursor, GroupKind
from postbus.entity.outcomes import (
    DropCursor,
    DropDefinition,
    ForgetIds,
    MoveMessage,
    Mutation,
    PatchMessage,
    PutCursor,
    PutDefinition,
    PutDue,
    PutInbound,
    PutKept,
    PutOutbound,
    PutSessionState,
    RecordAcquired,
    RecordIds,
    RecordSize,
    RecordUse,
    ReserveBlock,
    SettleRows,
    Settling,
    ShareBody,
)
from postbus.store.batch import Batch, extra_bytes
from postbus.store.changes import BatchChanges
from postbus.store.mutation_traits import TRAITS, Tier
from postbus.store.statements import (
    CHANGES,
    FULL,
    GENERAL,
    KEEP,
    KEEP_PUBLISH,
    PUBLISH,
    RETAIN,
    SEEN,
    Commit,
    Named,
)
from tests.store.driving import outcome

SAMPLES: Final[list[Mutation]] = [
    ReserveBlock(1, 8, 1, SubQueue.ACTIVE, 1),
    RecordAcquired([1], [2]),
    SettleRows(1, [1], Settling.EXPIRED, 1),
    RecordIds(1, 1, bytes(16)),
    ShareBody([1, 2]),
    PutInbound(1, 1, 1),
    MoveMessage(1, 2, 1, SubQueue.DEAD_LETTER, 1, 1, 1, b"p"),
    PatchMessage(1, True, 1, b"p"),
    PutDue(1, 1, 1, 1),
    PutKept(1, 1, SubQueue.DEAD_LETTER, 1, 1),
    PutOutbound(1, 1, "target", 1, False),
    PutDefinition(1, "orders", EntityKind.QUEUE, QueueProperties(), 1, 1),
    DropDefinition(1, 1),
    RecordSize(1, 1, 1),
    RecordUse(1, 1),
    PutSessionState(1, b"s", b"state", 1),
    ForgetIds(1, 1),
    PutCursor(1, SubQueue.ACTIVE, "lake", Cursor(GroupKind.TAP, 1, "driver", 1, None)),
    DropCursor(1, SubQueue.ACTIVE, "lake"),
]
of_each = pytest.mark.parametrize("mutation", SAMPLES, ids=lambda each: type(each).__name__)


def test_every_mutation_has_a_statement() -> None:
    assert set(TRAITS) == set(get_args(Mutation)) == set(map(type, SAMPLES))


def columns_of(*mutations: Mutation) -> dict[str, object]:
    changes = BatchChanges(mutations)
    return {
        **changes.light_columns(),
        **changes.settled_columns(),
        **changes.row_columns(),
        **changes.full_columns(),
    }


def written_columns(mutation: Mutation) -> set[str]:
    """Return the columns that have values of a mutation."""
    if isinstance(mutation, ShareBody):  # of the bodies of a batch, not of its changes
        return {"shared_ids", "shared_keys", "inline_ids", "inline_bodies"}
    empty = columns_of()
    return {name for name, column in columns_of(mutation).items() if column != empty[name]}


def forms_of(statement: Named | Commit) -> tuple[Named, ...]:
    return (statement,) if isinstance(statement, Named) else (statement.whole, statement.beside)


@of_each
def test_the_statement_of_a_mutation_has_its_columns(mutation: Mutation) -> None:
    tier = TRAITS[type(mutation)].tier
    written = written_columns(mutation)
    assert written
    if not isinstance(mutation, SettleRows):
        alone = {
            Tier.LIGHT: CHANGES,
            Tier.IDS: SEEN,
            Tier.PUBLISH: PUBLISH,
            Tier.GENERAL: GENERAL,
            Tier.FULL: FULL,
        }
        mixed = PUBLISH if tier <= Tier.PUBLISH else GENERAL if tier <= Tier.GENERAL else FULL
        for statement in (alone[tier], mixed):
            assert all(written <= set(form.names) for form in forms_of(statement))
    kept = KEEP if tier <= Tier.IDS else KEEP_PUBLISH if tier <= Tier.PUBLISH else RETAIN
    assert all(written <= set(form.names) for form in forms_of(kept))


@pytest.mark.parametrize("commit", [CHANGES, SEEN, PUBLISH, KEEP, KEEP_PUBLISH])
def test_a_copy_beside_a_statement_leaves_out_the_rows_alone(commit: Commit) -> None:
    rows = {"keys", "enqueued", "envelopes", "properties", "bodies", "body_ids"}
    assert set(commit.whole.names) - set(commit.beside.names) <= rows
    assert rows.isdisjoint(commit.beside.names)


@of_each
def test_a_batch_judges_and_counts_every_mutation(mutation: Mutation) -> None:
    """Each chain over mutations knows all of them; a forgotten one raises."""
    batch: Batch[None] = Batch()
    barrier = outcome(mutations=[RecordUse(7, 1)])
    batch.add(barrier, None, 1, 0)
    result = outcome(mutations=[mutation])
    assert batch.admits(result)
    batch.add(result, None, 1, extra_bytes(result))
    assert batch.mutations == [*barrier.mutations, mutation]
