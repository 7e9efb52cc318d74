"""Conversion of messages between AMQP and the JSON of `receive`, `peek` and `send --file`.

Fields have the names of Service Bus in camel case. A body is `body` if it is text, `bodyBase64` if
it is bytes that are not UTF-8, and `bodyValue` if it is an AMQP value. Application properties use
JSON types where possible (text, true and false, null; a number with a point is an AMQP double, one
without is a long), else `{"type": "int", "value": 7}`.
"""

from __future__ import annotations

import base64
import binascii
import math
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from postbus.cli.failures import InputError
from postbus.cli.formats.received_sections import REST, ReceivedSections
from postbus.contract.durations import format_duration, parse_duration_ms
from postbus.message import codec
from postbus.message.codec import Described, Symbol, Timestamp, Uint, Ulong, encode_value

HEADER: Final = 0x70
ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION: Final = 0x74
DATA: Final = 0x75
SEQUENCE: Final = 0x76
VALUE: Final = 0x77
MAX_UINT: Final = 0xFFFF_FFFF

PROPERTY_FIELDS: Final = {
    "messageId": 0,
    "to": 2,
    "subject": 3,
    "replyTo": 4,
    "correlationId": 5,
    "contentType": 6,
    "contentEncoding": 7,
    "sessionId": 10,
    "replyToSessionId": 12,
}
"""Name -> position in the properties section. Source: AMQP 1.0 part 3, 3.2.4."""

SYMBOLS: Final = {"contentType", "contentEncoding"}
BODY_SECTIONS: Final = {"amqp:data:binary", "amqp:amqp-sequence:list", "amqp:amqp-value:*", REST}
BODIES: Final = ("body", "bodyBase64", "bodyValue")
SETTABLE: Final = {
    *PROPERTY_FIELDS,
    *BODIES,
    "timeToLive",
    "scheduledEnqueueTime",
    "partitionKey",
    "applicationProperties",
}
SET_BY_BUS: Final = {
    "sequenceNumber",
    "enqueuedSequenceNumber",
    "enqueuedTime",
    "lockedUntil",
    "deliveryCount",
    "state",
    "deadLetterReason",
    "deadLetterDescription",
    "deadLetterSource",
    "deadLetteredTime",
    "deadLetterDeliveries",
    "deadLetterLink",
    "deadLetterClient",
    "resends",
    "expiresAt",
    "sizeBytes",
    "isMalformed",
    "malformedSections",
}
"""Fields that the bus sets; ignored by `send`, so that received messages can be sent."""

STATES: Final = {0: "active", 1: "deferred", 2: "scheduled"}


def _truth(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in {"true", "false"}:
        raise ValueError("not a boolean")
    return str(value).lower() == "true"


TYPES: Final[dict[str, Callable[[Any], Any]]] = {
    "string": str,
    "bool": _truth,
    "byte": codec.Byte,
    "ubyte": codec.Ubyte,
    "short": codec.Short,
    "ushort": codec.Ushort,
    "int": codec.Int,
    "uint": codec.Uint,
    "long": int,
    "ulong": codec.Ulong,
    "float": codec.Float,
    "double": float,
    "char": codec.Char,
    "symbol": Symbol,
    "uuid": lambda value: uuid.UUID(str(value)),
    "timestamp": lambda value: Timestamp(read_time(str(value))),
    "binary": lambda value: base64.b64decode(value, validate=True),
}
"""Names of AMQP types -> conversion from text or JSON to a value of that type."""

_NAMES: Final[dict[type, str]] = {
    codec.Byte: "byte",
    codec.Ubyte: "ubyte",
    codec.Short: "short",
    codec.Ushort: "ushort",
    codec.Int: "int",
    codec.Uint: "uint",
    codec.Ulong: "ulong",
    codec.Float: "float",
    codec.Char: "char",
    Symbol: "symbol",
    uuid.UUID: "uuid",
    Timestamp: "timestamp",
    bytes: "binary",
}


# --- writing ------------------------------------------------------------------------------------


def encode_json_message(message: Mapping[str, Any], now_ms: int) -> bytes:
    """Return the AMQP form of a message; raises `InputError` with the field.

    `now_ms`: time of creation, needed if the time to live exceeds the range of the header field.
    """
    unknown = set(message) - SETTABLE - SET_BY_BUS
    if unknown:
        known = ", ".join(sorted(SETTABLE))
        raise InputError(f"unknown field {min(unknown)}; the fields of a message are {known}")
    header, annotations = _header_and_annotations(message)
    fields: list[Any] = [None] * 13
    for name, at in PROPERTY_FIELDS.items():
        if message.get(name) is not None:
            text = _text(message, name)
            fields[at] = Symbol(text) if name in SYMBOLS else text
    ttl_ms = _ttl_ms(message)
    if ttl_ms is not None and ttl_ms > MAX_UINT:
        fields[8], fields[9] = Timestamp(now_ms + ttl_ms), Timestamp(now_ms)
    sections = [header, annotations]
    if any(field is not None for field in fields):
        sections.append((PROPERTIES, fields))
    given = message.get("applicationProperties")
    if given is not None and given != {}:
        sections.append((APPLICATION, _application_properties(given)))
    sections.append(_body(message))
    try:
        return b"".join(
            encode_value(Described(Ulong(code), value)) for code, value in filter(None, sections)
        )
    except (ValueError, OverflowError, TypeError) as error:
        raise InputError(f"the message cannot be encoded: {error}") from None


_Section = tuple[int, Any]


def _header_and_annotations(message: Mapping[str, Any]) -> tuple[_Section | None, _Section | None]:
    ttl_ms = _ttl_ms(message)
    header = None if ttl_ms is None else (HEADER, [True, None, Uint(min(ttl_ms, MAX_UINT))])
    annotations: dict[Symbol, Any] = {}
    if message.get("partitionKey") is not None:
        annotations[Symbol("x-opt-partition-key")] = _text(message, "partitionKey")
    if message.get("scheduledEnqueueTime") is not None:
        when = _text(message, "scheduledEnqueueTime")
        annotations[Symbol("x-opt-scheduled-enqueue-time")] = Timestamp(read_time(when))
    return header, (ANNOTATIONS, annotations) if annotations else None


def _ttl_ms(message: Mapping[str, Any]) -> int | None:
    given = message.get("timeToLive")
    if given is None:
        return None
    try:
        if not isinstance(given, str) or (ttl_ms := parse_duration_ms(given)) <= 0:
            raise ValueError
    except ValueError:
        raise InputError("timeToLive: use an ISO 8601 duration such as PT30S or P14D") from None
    return ttl_ms


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message[name]
    if not isinstance(value, str):
        raise InputError(f"{name}: must be text")
    return value


def _body(message: Mapping[str, Any]) -> _Section:
    given = [name for name in BODIES if name in message]
    if len(given) > 1:
        raise InputError(f"a message has only one body, not {' and '.join(given)}")
    if "bodyBase64" in message:
        try:
            return DATA, base64.b64decode(_text(message, "bodyBase64"), validate=True)
        except binascii.Error:
            raise InputError("bodyBase64: not valid base64") from None
    if "bodyValue" in message:
        return VALUE, read_value("bodyValue", message["bodyValue"])
    return DATA, str(message.get("body", "") or "").encode()


def _application_properties(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError("applicationProperties: must be an object")
    return {str(name): read_value(str(name), value) for name, value in given.items()}


def read_value(name: str, value: object) -> Any:
    """Return the AMQP value for a JSON value; raises `InputError`."""
    if isinstance(value, Mapping):
        if set(value) != {"type", "value"}:
            raise InputError(f'{name}: use plain JSON or {{"type": "int", "value": 7}}')
        return typed(name, str(value["type"]), value["value"])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"{name}: must be text, a number, true, false or null")


def typed(name: str, kind: str, value: object) -> Any:
    """Return a value of the AMQP type called `kind`; raises `InputError`."""
    make = TYPES.get(kind)
    if make is None:
        raise InputError(f"{name}: unknown type {kind}; types are {', '.join(TYPES)}")
    try:
        made = make(value)
        encode_value(made)
    except (ValueError, OverflowError, TypeError, binascii.Error):
        raise InputError(f"{name}: {value!r} is not of type {kind}") from None
    return made


def read_property(text: str) -> tuple[str, Any]:
    """Return the name and value of `name=text` or `name:type=text`; raises `InputError`.

    A name with a colon needs a type: `urn:region:string=eu`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"{text}: use name=text or name:type=value, such as amount:int=7")
    bare, colon, kind = name.rpartition(":")
    if not colon or not bare:
        return name, value
    if kind not in TYPES:
        raise InputError(f"{text}: unknown type {kind}; types are {', '.join(sorted(TYPES))}")
    return bare, typed(bare, kind, value)


def read_time(text: str) -> int:
    """Return milliseconds since the epoch of an ISO 8601 time; raises `InputError`."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{text}: use a time such as 2030-01-31T12:00:00Z") from None
    if when.tzinfo is None:
        raise InputError(f"{text}: add a time zone, such as Z or +01:00")
    return int(when.timestamp() * 1_000)


# --- reading ------------------------------------------------------------------------------------


def decode_json_message(payload: bytes) -> dict[str, Any]:
    """Return a delivered message as JSON.

    A message with malformed sections has `isMalformed`, its readable parts, with replacement
    characters for invalid text, and the malformed sections as received (`malformedSections`, AMQP
    name -> base64).
    """
    sections = ReceivedSections(payload)
    decoded: dict[str, Any] = {}
    header = sections.first(HEADER)
    annotations = {str(key): value for key, value in sections.first(ANNOTATIONS).items()}
    fields = sections.first(PROPERTIES)
    number = annotations.get("x-opt-sequence-number")
    if isinstance(number, int):
        decoded["sequenceNumber"] = int(number)
    for name, place in PROPERTY_FIELDS.items():
        if place < len(fields) and fields[place] is not None:
            decoded[name] = str(fields[place])
    if len(header) > 2 and isinstance(header[2], int):
        decoded["timeToLive"] = format_duration(int(header[2]))
    _put_annotations(decoded, annotations)
    if number is not None:
        failed = header[4] if len(header) > 4 else 0
        decoded["deliveryCount"] = (int(failed) if isinstance(failed, int) else 0) + 1
    application = sections.first(APPLICATION)
    if application:
        decoded["applicationProperties"] = {str(k): shown_value(v) for k, v in application.items()}
    decoded |= _shown_body(sections)
    if sections.malformed:
        decoded["isMalformed"] = True
        decoded["malformedSections"] = {
            name: base64.b64encode(data).decode("ascii")
            for name, data in sections.malformed.items()
        }
    return decoded


def _put_annotations(decoded: dict[str, Any], annotations: Mapping[str, Any]) -> None:
    for key, name in (
        ("x-opt-partition-key", "partitionKey"),
        ("x-opt-deadletter-source", "deadLetterSource"),
    ):
        if annotations.get(key) is not None:
            decoded[name] = str(annotations[key])
    for key, name in (
        ("x-opt-enqueued-time", "enqueuedTime"),
        ("x-opt-locked-until", "lockedUntil"),
        ("x-opt-scheduled-enqueue-time", "scheduledEnqueueTime"),
    ):
        if isinstance(value := annotations.get(key), int):
            decoded[name] = shown_time(int(value))
    if isinstance(value := annotations.get("x-opt-enqueue-sequence-number"), int):
        decoded["enqueuedSequenceNumber"] = int(value)
    if isinstance(state := annotations.get("x-opt-message-state"), int):
        decoded["state"] = STATES.get(int(state), str(state))


def _shown_body(sections: ReceivedSections) -> dict[str, Any]:
    """Return the fields of the body, empty if it is malformed."""
    bodies = sections.values
    if DATA in bodies:
        content = b"".join(bodies[DATA])
        try:
            return {"body": content.decode()}
        except UnicodeDecodeError:
            return {"bodyBase64": base64.b64encode(content).decode("ascii")}
    if VALUE in bodies:
        return {"bodyValue": shown_value(bodies[VALUE][0])}
    if SEQUENCE in bodies:
        return {"bodyValue": [shown_value(each) for part in bodies[SEQUENCE] for each in part]}
    return {} if sections.malformed.keys() & BODY_SECTIONS else {"body": ""}


def shown_value(value: object) -> Any:
    """Return an AMQP value as JSON; `read_value` reads plain values back."""
    kind = _NAMES.get(type(value))
    if kind == "timestamp":
        return {"type": kind, "value": shown_time(int(value))}  # type: ignore[call-overload]
    if isinstance(value, bytes):
        return {"type": "binary", "value": base64.b64encode(value).decode("ascii")}
    if kind == "uuid":
        return {"type": kind, "value": str(value)}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
        return {"type": kind or "double", "value": str(float(value))}
    if kind is not None:
        plain = float(value) if kind == "float" else value  # type: ignore[arg-type]
        return {"type": kind, "value": plain}
    if isinstance(value, Mapping):
        return {str(key): shown_value(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shown_value(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)


def shown_time(value_ms: int) -> str:
    """Return ISO 8601 with milliseconds, in UTC."""
    try:
        when = datetime.fromtimestamp(value_ms / 1_000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{value_ms} ms"
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
