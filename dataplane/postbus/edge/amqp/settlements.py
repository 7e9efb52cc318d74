"""Translation of a client's outcomes into settlements, and of results into answers.

Pure translation for `receiver_links.py`; refusals have their table in `refusals.py`.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from postbus.amqp import conditions
from postbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Declared,
    DeliveryState,
    Modified,
    Received,
    Rejected,
    Released,
    TransactionalState,
)
from postbus.entity.commands import Disposition, Refusal, Refused, Settled

DEAD_LETTERED: Final = Rejected()
LOST: Final = Refused(Refusal.LOCK_LOST)
PRE_SETTLED: Final = -1
"""In place of the delivery id of a transfer that gets no answer."""

RELOADING: Final = frozenset({Refusal.UNKNOWN, Refusal.STORE_FULL, Refusal.BUSY})
"""Refusals of a settlement that only a reload of the partition causes: a commit that failed or has
an unknown result, or a partition that is loading. Locks are lost with it (ADR 2). "Not applied" may
also be a failed read; then the lock is valid."""

Fields: TypeAlias = tuple[str | None, str | None, dict[str, object] | None]
"""Dead-letter reason, description and changed application properties."""


def disposition_of(state: DeliveryState | None) -> tuple[Disposition, Fields]:
    """Return the disposition of an outcome; no outcome, or a partial one, abandons the message."""
    match state:
        case Accepted():
            return Disposition.COMPLETE, (None, None, None)
        case Modified(_, is_undeliverable, annotations):
            disposition = Disposition.DEFER if is_undeliverable else Disposition.ABANDON
            return disposition, (None, None, _texts(annotations))
        case Rejected():
            return Disposition.DEAD_LETTER, _dead_letter_fields(state)
        case Released() | Received() | Declared() | TransactionalState() | None:
            return Disposition.RELEASE, (None, None, None)


def answer_of(state: DeliveryState | None) -> DeliveryState:
    """Return the outcome that confirms a settlement to a client: the same type."""
    match state:
        case Accepted():
            return ACCEPTED
        case Released():
            return RELEASED
        case Modified(has_failed, is_undeliverable, _):
            return Modified(has_failed, is_undeliverable)
        case Rejected() | Received() | Declared() | TransactionalState() | None:
            return DEAD_LETTERED


def is_repeatable(reply: Settled | Refused, *, is_reloaded: bool) -> bool:
    """Return whether the broker shall repeat a settlement because its lock is valid.

    "Not applied" without a reload means that a read failed. The client cannot repeat: AMQP has no
    way to withdraw a settlement. The repetition ends, for a lock expires and the heartbeat notices
    a store that is gone. `is_reloaded`: the partition was loaded after the settlement was
    submitted.
    """
    return isinstance(reply, Refused) and reply.refusal is Refusal.NOT_APPLIED and not is_reloaded


def _dead_letter_fields(state: Rejected) -> Fields:
    """Return the dead-letter fields of a rejected outcome.

    SDKs put them into the error's info map; other clients reject with a condition of their own,
    which then is the reason.
    """
    properties = _texts(state.info) or {}
    reason = _pop_text(properties, "DeadLetterReason")
    description = _pop_text(properties, "DeadLetterErrorDescription")
    if reason is None and state.condition not in (None, "", conditions.DEAD_LETTER):
        reason, description = str(state.condition), description or state.description
    return reason, description, properties or None


def _texts(entries: dict[object, object] | None) -> dict[str, object] | None:
    return {str(key): value for key, value in entries.items()} if entries else None


def _pop_text(properties: dict[str, object], name: str) -> str | None:
    value = properties.pop(name, None)
    return str(value) if isinstance(value, str) else None


def ranges_of(ids: list[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive ids without those that get no answer; nearly always one run."""
    first, last = ids[0], ids[-1]
    if last - first + 1 == len(ids) and first != PRE_SETTLED:
        return [(first, last)]
    runs: list[tuple[int, int]] = []
    for each in ids:
        if each == PRE_SETTLED:
            continue
        if runs and each == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], each)
        else:
            runs.append((each, each))
    return runs
