"""The performatives of AMQP 1.0 and their lists, source and target, delivery states.

Lists are sent with every field (older clients index them) and with smallulong descriptors.
Source: AMQP 1.0 part 2, 2.7; part 3, 3.4 and 3.5; part 5, 5.3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpConnectionError, AmqpError
from postbus.message.codec import (
    Array,
    Described,
    Symbol,
    Uint,
    Ulong,
    decode_value,
    encode_list,
    encode_value,
)

OPEN: Final = 0x10
BEGIN: Final = 0x11
ATTACH: Final = 0x12
FLOW: Final = 0x13
TRANSFER: Final = 0x14
DISPOSITION: Final = 0x15
DETACH: Final = 0x16
END: Final = 0x17
CLOSE: Final = 0x18
ERROR: Final = 0x1D
RECEIVED: Final = 0x23
ACCEPTED_CODE: Final = 0x24
REJECTED_CODE: Final = 0x25
RELEASED_CODE: Final = 0x26
MODIFIED_CODE: Final = 0x27
SOURCE: Final = 0x28
TARGET: Final = 0x29
COORDINATOR: Final = 0x30
DECLARE: Final = 0x31
DISCHARGE: Final = 0x32
DECLARED: Final = 0x33
TRANSACTIONAL: Final = 0x34
SASL_MECHANISMS: Final = 0x40
SASL_INIT: Final = 0x41
SASL_OUTCOME: Final = 0x44

FIELD_COUNTS: Final = {
    OPEN: 10,
    BEGIN: 8,
    ATTACH: 14,
    FLOW: 11,
    TRANSFER: 11,
    DISPOSITION: 6,
    DETACH: 3,
    END: 1,
    CLOSE: 1,
    SASL_INIT: 3,
}
"""Fields of each performative; shorter lists are padded with null, longer ones are refused."""

NULL: Final = b"\x40"

MAX_FILTERS: Final = 8
"""Maximum number of filters kept of a source. Our choice: no broker supports so many together."""

DESCRIPTOR_NAMES: Final = {
    "amqp:open:list": OPEN,
    "amqp:begin:list": BEGIN,
    "amqp:attach:list": ATTACH,
    "amqp:flow:list": FLOW,
    "amqp:transfer:list": TRANSFER,
    "amqp:disposition:list": DISPOSITION,
    "amqp:detach:list": DETACH,
    "amqp:end:list": END,
    "amqp:close:list": CLOSE,
    "amqp:sasl-init:list": SASL_INIT,
    "amqp:source:list": SOURCE,
    "amqp:target:list": TARGET,
    "amqp:coordinator:list": COORDINATOR,
    "amqp:received:list": RECEIVED,
    "amqp:accepted:list": ACCEPTED_CODE,
    "amqp:rejected:list": REJECTED_CODE,
    "amqp:released:list": RELEASED_CODE,
    "amqp:modified:list": MODIFIED_CODE,
    "amqp:declare:list": DECLARE,
    "amqp:discharge:list": DISCHARGE,
    "amqp:declared:list": DECLARED,
    "amqp:transactional-state:list": TRANSACTIONAL,
    "amqp:error:list": ERROR,
}


def described_list(code: int, fields: list[bytes]) -> bytes:
    """Return a described list of encoded fields."""
    return b"\x00\x53" + code.to_bytes(1, "big") + encode_list(fields)


def code_of(value: object) -> int | None:
    """Return the numeric code of a described value, whichever descriptor form it has."""
    if not isinstance(value, Described):
        return None
    descriptor = value.descriptor
    if isinstance(descriptor, str):
        return DESCRIPTOR_NAMES.get(descriptor)
    return int(descriptor) if isinstance(descriptor, int) else None


def fields_of(value: object, count: int) -> list[Any]:
    """Return the fields of a described list, padded to `count`."""
    inner = value.value if isinstance(value, Described) else None
    fields = list(inner[:count]) if isinstance(inner, list) else []
    return fields + [None] * (count - len(fields))


def performative_of(value: object) -> tuple[int, list[Any]]:
    """Return the code and the fields, padded with null. Raises `AmqpConnectionError`."""
    code = code_of(value)
    if code not in FIELD_COUNTS or not isinstance(value, Described):
        raise AmqpConnectionError(conditions.NOT_IMPLEMENTED, "unknown performative")
    if not isinstance(value.value, list) or len(value.value) > FIELD_COUNTS[code]:
        raise AmqpConnectionError(conditions.DECODE_ERROR, "performative has a malformed list")
    return code, fields_of(value, FIELD_COUNTS[code])


# --- errors -------------------------------------------------------------------------------------


def encode_error(error: AmqpError | None) -> bytes:
    """Return an error with all three fields, or null."""
    if error is None:
        return NULL
    return described_list(
        ERROR, [encode_value(Symbol(error.condition)), encode_value(error.description), NULL]
    )


def decode_error(value: object) -> AmqpError | None:
    """Return the error reported by a peer; lenient, since it is for information only."""
    if code_of(value) != ERROR:
        return None
    condition, description, _ = fields_of(value, 3)
    return AmqpError(str(condition or ""), str(description or ""))


# --- delivery states ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    """The delivery was processed."""


@dataclass(frozen=True, slots=True)
class Released:
    """The delivery is returned, its count unchanged."""


@dataclass(frozen=True, slots=True)
class Modified:
    """The delivery is returned changed; Service Bus's abandon, or its defer when undeliverable
    here.
    """

    delivery_failed: bool = False
    undeliverable_here: bool = False
    annotations: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """The delivery is refused; Service Bus's dead-letter. `info` is the error's third field."""

    condition: str | None = None
    description: str | None = None
    info: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """Partial transfer state; the broker does not act on it."""


@dataclass(frozen=True, slots=True)
class TransactionalState:
    """A delivery or an outcome inside a transaction.

    An id that is not a binary becomes b"", which names no transaction: a transactional request must
    not be taken for one without a transaction.
    """

    transaction_id: bytes
    outcome: DeliveryState | None


@dataclass(frozen=True, slots=True)
class Declared:
    """The answer to a declare: the transaction's id, at most 32 bytes."""

    transaction_id: bytes


DeliveryState: TypeAlias = (
    Accepted | Released | Modified | Rejected | Received | TransactionalState | Declared
)

ACCEPTED: Final = Accepted()
RELEASED: Final = Released()


def decode_state(value: object) -> DeliveryState | None:
    """Return a delivery state, or None when it is null or unknown."""
    match code_of(value):
        case 0x24:
            return ACCEPTED
        case 0x26:
            return RELEASED
        case 0x27:
            failed, undeliverable, annotations = fields_of(value, 3)
            return Modified(
                failed is True,
                undeliverable is True,
                annotations if isinstance(annotations, dict) else None,
            )
        case 0x25:
            (error,) = fields_of(value, 1)
            if code_of(error) != ERROR:
                return Rejected()
            condition, description, info = fields_of(error, 3)
            return Rejected(
                condition if isinstance(condition, str) else None,
                description if isinstance(description, str) else None,
                info if isinstance(info, dict) else None,
            )
        case 0x23:
            return Received()
        case 0x33:
            (transaction_id,) = fields_of(value, 1)
            return Declared(transaction_id) if isinstance(transaction_id, bytes) else None
        case 0x34:
            transaction_id, outcome = fields_of(value, 2)
            inner = decode_state(outcome)
            return TransactionalState(
                transaction_id if isinstance(transaction_id, bytes) else b"",
                None if isinstance(inner, TransactionalState) else inner,
            )
        case _:
            return None


def encode_state(state: DeliveryState | None) -> bytes:
    """Return the encoded state.

    A rejected state without a condition is an empty list (wire form of "dead-lettered as asked");
    with one it has all three error fields.
    """
    match state:
        case None:
            return NULL
        case Accepted():
            return b"\x00\x53\x24\x45"
        case Released():
            return b"\x00\x53\x26\x45"
        case Modified(failed, undeliverable, annotations):
            fields = [
                encode_value(failed),
                encode_value(undeliverable),
                encode_value(annotations),
            ]
            return described_list(MODIFIED_CODE, fields)
        case Rejected(None, _, _):
            return b"\x00\x53\x25\x45"
        case Rejected(condition, description, info):
            error = [
                encode_value(Symbol(condition)),
                encode_value(description or ""),
                encode_value(info),
            ]
            return described_list(REJECTED_CODE, [described_list(ERROR, error)])
        case Received():
            return described_list(RECEIVED, [b"\x43", b"\x44"])
        case Declared(transaction_id):
            return described_list(DECLARED, [encode_value(transaction_id)])
        case TransactionalState(transaction_id, outcome):
            fields = [encode_value(transaction_id), encode_state(outcome)]
            return described_list(TRANSACTIONAL, fields)


# --- termini ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Terminus:
    """A source or target. `raw` is the peer's encoded value, for the echo."""

    address: str | None
    raw: bytes
    filters: dict[Any, Any] | None = None
    is_coordinator: bool = False
    is_dynamic: bool = False
    is_copying: bool = False  # a source that keeps its messages: a browser of JMS


def decode_terminus(value: object, raw: bytes) -> Terminus | None:
    """Return a source or target, None for null."""
    code = code_of(value)
    if code is None:
        return None
    if code == COORDINATOR:
        return Terminus(None, raw, is_coordinator=True)
    fields = fields_of(value, 8)
    address = fields[0] if isinstance(fields[0], str) else None
    filters = None
    if code == SOURCE and isinstance(fields[7], dict):
        some = islice(fields[7].items(), MAX_FILTERS)
        filters = {key: _without_items(value) for key, value in some}
    is_copying = code == SOURCE and fields[6] == "copy"
    return Terminus(address, raw, filters, is_dynamic=fields[4] is True, is_copying=is_copying)


def _without_items(value: object) -> object:
    """Return a filter as kept with its link: an empty list replaces a compound value."""
    if isinstance(value, Described):
        return Described(_without_items(value.descriptor), _without_items(value.value))
    return [] if isinstance(value, list | dict | Array) else value


def with_filters(source: Terminus, filters: dict[Any, Any]) -> Terminus:
    """Return the peer's source with other filters."""
    described, _ = decode_value(source.raw)
    fields = fields_of(described, 11)
    fields[7] = filters
    raw = encode_value(Described(described.descriptor, fields))
    return Terminus(source.address, raw, filters, is_dynamic=source.is_dynamic)


# --- transactions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declare:
    """Request to a coordinator for a transaction."""


@dataclass(frozen=True, slots=True)
class Discharge:
    """Request to end a transaction: commit, or roll back when `has_failed`."""

    transaction_id: bytes
    has_failed: bool


def decode_transaction_request(value: object) -> Declare | Discharge | None:
    """Return the request in the value of a message to a coordinator, None for any other value.

    Source: AMQP 1.0 part 4, 4.5.2 and 4.5.3.
    """
    match code_of(value):
        case 0x31:
            return Declare()
        case 0x32:
            transaction_id, has_failed = fields_of(value, 2)
            if isinstance(transaction_id, bytes):
                return Discharge(transaction_id, has_failed is True)
            return None
        case _:
            return None


# --- checks of decoded fields -------------------------------------------------------------------


def require_uint(value: object, name: str, maximum: int = 0xFFFF_FFFF) -> int:
    """Return a mandatory number. Raises `AmqpConnectionError`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise AmqpConnectionError(conditions.DECODE_ERROR, f"{name} is missing or not a number")
    return int(value)


def optional_uint(value: object, name: str, default: int, maximum: int = 0xFFFF_FFFF) -> int:
    """Return a number or the default for null. Raises `AmqpConnectionError`."""
    return default if value is None else require_uint(value, name, maximum)


def uint(value: int) -> bytes:
    """Encode a uint."""
    return encode_value(Uint(value))


def ulong(value: int) -> bytes:
    """Encode a ulong."""
    return encode_value(Ulong(value))
