"""Traits of mutations: the statement that stores each, and whether commits may overlap.

The batch and the writer read `TRAITS`; `tests/store/test_mutation_traits.py` keeps it complete. The
aliases group mutations by the rows they write.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

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
    ShareBody,
)


class Tier(IntEnum):
    """The smallest statement that stores a mutation; larger ones include the smaller ones.

    A batch with `SettleRows` uses `KEEP`, `KEEP_PUBLISH` and `RETAIN` instead of the others.
    """

    LIGHT = 0
    """`CHANGES` or `KEEP`."""
    IDS = 1
    """`SEEN` if the batch has no other kind, else `PUBLISH`; `KEEP`."""
    PUBLISH = 2
    """`PUBLISH` or `KEEP_PUBLISH`."""
    GENERAL = 3
    """`GENERAL` or `RETAIN`."""
    FULL = 4
    """`FULL` or `RETAIN`."""


class Traits(NamedTuple):
    """`overlaps`: the mutation only adds rows that no other touches, like plain inserts (ADR
    32).
    """

    tier: Tier
    overlaps: bool = False


TRAITS: Final[dict[type[Mutation], Traits]] = {
    ReserveBlock: Traits(Tier.LIGHT),
    RecordAcquired: Traits(Tier.LIGHT),
    SettleRows: Traits(Tier.LIGHT, overlaps=True),
    RecordIds: Traits(Tier.IDS, overlaps=True),
    ShareBody: Traits(Tier.PUBLISH, overlaps=True),
    PutInbound: Traits(Tier.PUBLISH),
    MoveMessage: Traits(Tier.GENERAL),
    PatchMessage: Traits(Tier.GENERAL),
    PutDue: Traits(Tier.GENERAL),
    PutKept: Traits(Tier.GENERAL),
    PutOutbound: Traits(Tier.GENERAL),
    PutDefinition: Traits(Tier.FULL),
    DropDefinition: Traits(Tier.FULL),
    RecordSize: Traits(Tier.FULL),
    RecordUse: Traits(Tier.FULL),
    PutSessionState: Traits(Tier.FULL),
    ForgetIds: Traits(Tier.FULL),
    PutCursor: Traits(Tier.FULL),
    DropCursor: Traits(Tier.FULL),
}
OVERLAPPING: Final = frozenset(kind for kind, traits in TRAITS.items() if traits.overlaps)

EntityChange: TypeAlias = PutDefinition | DropDefinition | RecordSize | RecordUse
"""Mutations of the row of an entity: two of one entity never share a statement."""
EntityRows: TypeAlias = (
    PutSessionState | RecordIds | ForgetIds | PutInbound | PutCursor | DropCursor
)
"""Mutations of rows that are deleted with their entity: none follows a drop in its statement."""
OfEntity: TypeAlias = EntityChange | EntityRows
SideRow: TypeAlias = PatchMessage | PutDue | PutKept | PutOutbound
"""Mutations that write a side row of a message: no delete of it shares their statement."""
OwnRows: TypeAlias = SettleRows | ReserveBlock | RecordAcquired | ShareBody
"""Mutations that may share a statement with any other one."""
FixedSize: TypeAlias = (
    SettleRows
    | ReserveBlock
    | PutDue
    | PutKept
    | PutOutbound
    | PutInbound
    | PutDefinition
    | DropDefinition
    | RecordSize
    | RecordUse
    | ForgetIds
    | PutCursor
    | DropCursor
)
"""Mutations that count as rows only, not as bytes of a batch."""
