"""SQL actions as functions: statements that change a copy of a message, one after the other.

A statement sees the result of those before it. SET keeps the type of a property if no information
is lost, else the property takes the type of the expression; an unknown value sets null. REMOVE of
an absent property does nothing. System properties in `SETTABLE` can be set: text properties take
the text of any value; sys.TimeToLive takes seconds or a TimeSpan text (`[d.]hh:mm:ss[.f]`, ISO
8601); sys.ScheduledEnqueueTimeUtc a timestamp or an ISO 8601 text; null removes them. Source: "SQL
action syntax" of Azure Service Bus, RuleActionException of its .NET client.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Final, TypeAlias, assert_never

from postbus.message.codec import DecodeError, Timestamp, Value
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageDraft, MessageFields
from postbus.message.sections import MAX_TTL_MS
from postbus.rules.expressions import SYSTEM_FIELDS, SYSTEM_NAMES, compile_read
from postbus.rules.nodes import Assign, Property, Remove, RuleError, Statement
from postbus.rules.steps import (
    COPY_STEPS,
    PROPERTY_STEPS,
    REMOVE_STEPS,
    STATEMENT_STEPS,
    USUAL_PROPERTIES,
    spend,
)
from postbus.rules.values import (
    NUMBERS,
    EvaluationError,
    convert,
    text_of,
    timestamp_of,
)

ACTION_ERROR: Final = "RuleActionException"
RULE_NAME: Final = "RuleName"

SPARE_BYTES: Final = 256
"""Allowance above the limit of all properties for the name of the rule, which the broker adds."""

Act: TypeAlias = Callable[[MessageFields], Envelope]
"""Returns the changed copy of a message. Raises `EvaluationError`."""

_Change: TypeAlias = Callable[[MessageDraft], None]
_Store: TypeAlias = Callable[[MessageDraft, Value], None]


def compile_action(rule_name: str, statements: tuple[Statement, ...], source: random.Random) -> Act:
    """Return an action as a function; `source` supplies randomness for newid().

    The copy carries the name of its rule as `RuleName`, set before the first statement.
    Raises `RuleError`.
    """
    changes = [_statement(statement, source) for statement in statements]
    copy_steps = COPY_STEPS + STATEMENT_STEPS * len(statements)
    removals = sum(isinstance(statement, Remove) for statement in statements)
    each_steps = PROPERTY_STEPS + (REMOVE_STEPS + removals if removals else 0)

    def act(fields: MessageFields) -> Envelope:
        draft = None
        try:
            unusual = max(len(fields.application) - USUAL_PROPERTIES, 0)
            spend(fields, copy_steps + unusual * each_steps)
            draft = MessageDraft(fields)
            draft.set_property(RULE_NAME, rule_name)
            for change in changes:
                change(draft)
            return draft.build(SPARE_BYTES)
        except EvaluationError as error:
            raise EvaluationError(str(error), ACTION_ERROR) from error
        except (DecodeError, ValueError, TypeError) as error:
            raise EvaluationError(str(error), ACTION_ERROR) from error
        finally:
            if draft is not None:
                fields.steps_left = draft.steps_left

    return act


def _statement(statement: Statement, source: random.Random) -> _Change:
    match statement:
        case Remove(named):
            if named.is_system:
                raise RuleError(f"sys.{named.name} cannot be removed; set it to NULL instead")
            return lambda draft: draft.remove_property(named.name)
        case Assign(named, value):
            store = _store(named)
            read = compile_read(value, source)
            return lambda draft: store(draft, read(draft))
        case _:
            assert_never(statement)


def _store(named: Property) -> _Store:
    name = named.name
    folded = name.lower()
    if not named.is_system:
        return lambda draft, value: draft.set_property(
            name, convert(value, draft.folded.get(folded))
        )
    store = SETTABLE.get(folded)
    if store is not None:
        return store
    if folded in SYSTEM_NAMES:
        raise RuleError(f"sys.{name} cannot be set")

    def fail(_draft: MessageDraft, _value: Value) -> None:
        raise EvaluationError(f"There is no system property '{name}'.")

    return fail


# --- system properties ----------------------------------------------------------------------------


def _text(value: Value) -> str | None:
    return None if value is None else text_of(value)


def _set_ttl(draft: MessageDraft, value: Value) -> None:
    draft.set_ttl(None if value is None else _duration_ms(value))


def _set_scheduled(draft: MessageDraft, value: Value) -> None:
    moment = timestamp_of(value) if isinstance(value, str) else value
    if moment is not None and not isinstance(moment, Timestamp):
        raise EvaluationError("sys.ScheduledEnqueueTimeUtc takes a timestamp")
    if moment is None and value is not None:
        raise EvaluationError(f"'{value}' is no timestamp")
    draft.set_scheduled(moment)


def _set_field(name: str) -> _Store:
    field = SYSTEM_FIELDS[name]
    return lambda draft, value: draft.set_field(field, _text(value))


SETTABLE: Final[dict[str, _Store]] = {
    **{name: _set_field(name) for name in SYSTEM_FIELDS},
    "partitionkey": lambda draft, value: draft.set_partition_key(_text(value)),
    "scheduledenqueuetimeutc": _set_scheduled,
    "timetolive": _set_ttl,
}
"""Lower-case name of a system property that an action can set -> its setter.

Source: the publicly settable properties of BrokeredMessage, without ViaPartitionKey and
ForcePersistence, which have no effect on a copy that is already routed.
"""

_TIME_SPAN: Final = re.compile(
    r"(?:(\d{1,8})\.)?(\d{1,2}):(\d{1,2})(?::(\d{1,2}(?:\.\d{1,7})?))?", re.ASCII
)
_ISO_DURATION: Final = re.compile(
    r"P(?:(\d{1,8})D)?(?:T(?:(\d{1,8})H)?(?:(\d{1,8})M)?(?:(\d{1,12}(?:\.\d{1,7})?)S)?)?", re.ASCII
)


def _duration_ms(value: Value) -> int:
    seconds = math.nan
    if value.__class__ in NUMBERS:
        seconds = value
    elif isinstance(value, str):
        found = _TIME_SPAN.fullmatch(value) or _ISO_DURATION.fullmatch(value)
        if found and any(found.groups()):
            days, hours, minutes, rest = (float(part or 0) for part in found.groups())
            seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    if not seconds > 0:
        raise EvaluationError("sys.TimeToLive takes a positive number of seconds or a time span")
    return MAX_TTL_MS if seconds * 1000 >= MAX_TTL_MS else max(1, round(seconds * 1000))
