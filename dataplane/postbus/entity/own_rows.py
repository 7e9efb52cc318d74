"""Rows that one outcome inserts and moves: they are inserted at their destination.

A message may leave in the command that stores it, if it has expired or is forwarded. One statement
makes an outcome durable, and no part of it sees a row that another part inserts: the move would
find nothing. A row that stays is inserted as well, so that each of the two has a body of its own.
`partition_state` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from postbus.entity.commands import SubQueue
from postbus.entity.outcomes import InsertMessage, MoveMessage, Mutation, PutKept, ShareBody
from postbus.message.patch import with_properties

if TYPE_CHECKING:
    from postbus.entity.outcomes import Outcome


def settle(outcome: Outcome) -> None:
    """Replace moves of rows that this outcome inserts by inserts under their new keys."""
    moves = {move.row_key: move for move in outcome.mutations if type(move) is MoveMessage}
    own = [insert.row_key for insert in outcome.inserts if insert.row_key in moves] if moves else ()
    if not own:
        return
    moves = {row_key: moves[row_key] for row_key in own}
    inserts: list[InsertMessage] = []
    for insert in outcome.inserts:
        move = moves.get(insert.row_key)
        if move is None or move.keeps_source:
            inserts.append(insert)
        if move is not None:
            inserts.append(_moved(insert, move))
    outcome.inserts[:] = inserts
    mutations: list[Mutation] = []
    for change in outcome.mutations:
        if isinstance(change, MoveMessage) and change.row_key in moves:
            mutations += _kept(change)
        elif isinstance(change, ShareBody):
            keys = [key for key in change.row_keys if key not in moves or moves[key].keeps_source]
            keys += [moves[key].new_row_key for key in change.row_keys if key in moves]
            mutations.append(ShareBody(keys))
        else:
            mutations.append(change)
    outcome.mutations[:] = mutations


def _moved(insert: InsertMessage, move: MoveMessage) -> InsertMessage:
    envelope = insert.envelope
    if move.application_properties is not None:
        envelope = with_properties(envelope, move.application_properties)
    enqueued_ms = insert.enqueued_ms if move.enqueued_ms is None else move.enqueued_ms
    return InsertMessage(move.new_row_key, enqueued_ms, envelope)


def _kept(move: MoveMessage) -> list[PutKept]:
    """Return the number of a row outside ACTIVE; in ACTIVE the key determines it."""
    if move.to_sub_queue is SubQueue.ACTIVE:
        return []
    return [
        PutKept(
            move.new_row_key,
            move.entity_no,
            move.to_sub_queue,
            move.sequence,
            move.delivery_count,
            move.death,
        )
    ]
