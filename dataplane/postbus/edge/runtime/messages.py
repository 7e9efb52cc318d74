"""Messages from HTTP requests: headers, BrokerProperties and bodies to envelopes.

Pure translation for the runtime API. A message is encoded as by an AMQP client and then sliced, so
that all other packages find one kind of message. Mistakes are refused as `BadMessage` with a text
that names the property.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

from postbus.edge.runtime.values import (
    parse_instant,
    parse_property,
    parse_time_span,
    text_or_date,
    whole_number,
)
from postbus.message.codec import DecodeError, Symbol, Timestamp, Value, encode_list, encode_value
from postbus.message.envelope import Envelope
from postbus.message.fields import Field
from postbus.message.patch import MAX_ID_CHARS
from postbus.message.sections import MAX_MEMBERS, MAX_TTL_MS, MAX_UINT, slice_message

BROKER_PROPERTIES: Final = "BrokerProperties"
MORE_PROPERTIES: Final = "Postbus-Properties"
"""A JSON object of the custom properties that no header can name or hold."""

BATCH_TYPE: Final = "application/vnd.microsoft.servicebus.json"
"""Content type of a batch; with a parameter it is the type of a single message, as in Azure."""

TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""A header's name. Source: RFC 9110, 5.1."""

OWN_HEADERS: Final = frozenset({
    "accept", "accept-charset", "accept-encoding", "accept-language", "accept-ranges",
    "access-control-allow-origin", "access-control-request-headers",
    "access-control-request-method", "age", "allow", "authorization", "brokerproperties",
    "cache-control", "connection", "content-disposition", "content-encoding",
    "content-language", "content-length", "content-location", "content-md5", "content-range",
    "content-type", "cookie", "date", "dnt", "etag", "expect", "expires", "forwarded", "from",
    "host", "http2-settings", "if-match", "if-modified-since", "if-none-match", "if-range",
    "if-unmodified-since", "keep-alive", "last-modified", "location", "max-forwards", "origin",
    "postbus-properties", "pragma", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "range", "referer", "retry-after", "save-data", "server",
    "servicebusauthorization", "set-cookie", "strict-transport-security", "te", "trailer",
    "transfer-encoding", "upgrade", "upgrade-insecure-requests", "user-agent", "vary", "via",
    "warning", "www-authenticate", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port",
    "x-forwarded-proto", "x-real-ip", "x-request-id",
})  # fmt: skip
"""Headers about the request, not about the message."""

OWN_PREFIXES: Final = ("sec-", "x-ms-", "x-envoy-")

_DURABLE: Final = b"\x00\x53\x70\xc0\x02\x01\x41"
_SCHEDULED: Final = encode_value(Symbol("x-opt-scheduled-enqueue-time"))
_PARTITION_KEY: Final = encode_value(Symbol("x-opt-partition-key"))
_VIA_PARTITION_KEY: Final = encode_value(Symbol("x-opt-via-partition-key"))
_NULL: Final = b"\x40"

_TEXTS: Final = {
    "MessageId": Field.MESSAGE_ID,
    "To": Field.TO,
    "Label": Field.SUBJECT,
    "ReplyTo": Field.REPLY_TO,
    "CorrelationId": Field.CORRELATION_ID,
    "SessionId": Field.GROUP_ID,
    "ReplyToSessionId": Field.REPLY_TO_GROUP_ID,
}
_IDS: Final = frozenset(
    {"MessageId", "SessionId", "ReplyToSessionId", "PartitionKey", "ViaPartitionKey"}
)
_LAST_FIELD: Final = Field.REPLY_TO_GROUP_ID


class BadMessage(ValueError):
    """A request contains no valid message; the text names the mistake."""


# --- requests -------------------------------------------------------------------------------------


def is_own_header(name: str) -> bool:
    """Return whether a header belongs to HTTP; every other one is a custom property."""
    folded = name.lower()
    return folded in OWN_HEADERS or folded.startswith(OWN_PREFIXES)


def single_message(
    headers: Iterable[tuple[str, str]], content_type: str | None, body: bytes
) -> Envelope:
    """Return the message of a request for one. Raises `BadMessage`."""
    broker: Mapping[str, Any] = {}
    custom: dict[str, Value] = {}
    for name, text in headers:
        folded = name.lower()
        if folded == "brokerproperties":
            broker = _object(parse_json(text, BROKER_PROPERTIES), BROKER_PROPERTIES)
        elif folded == "postbus-properties":
            more = _object(parse_json(text, MORE_PROPERTIES), MORE_PROPERTIES)
            custom.update(custom_properties(more))
        elif folded not in OWN_HEADERS and not folded.startswith(OWN_PREFIXES):
            custom[str(name)] = parse_property(text)  # multidict has its own type of names
    return make_message(broker, custom, body, content_type)


def batch_of(data: bytes) -> list[Any]:
    """Return the unparsed members of a batch's JSON. Raises `BadMessage`."""
    members = parse_json(data, "The body of the batch")
    if not isinstance(members, list) or not members:
        raise BadMessage("The body of a batch must be a JSON array of at least one message.")
    if len(members) > MAX_MEMBERS:
        raise BadMessage(
            f"A batch may have at most {MAX_MEMBERS:,} messages: send several batches."
        )
    return members


def batch_message(index: int, member: Any) -> Envelope:
    """Return one message of a batch. Raises `BadMessage`."""
    try:
        entry = _object(member, "The message")
        body = entry.get("Body", "")
        if not isinstance(body, str):
            raise BadMessage("Body must be a text; write other values as JSON within a text.")
        broker = _object(entry.get(BROKER_PROPERTIES) or {}, BROKER_PROPERTIES)
        custom = _object(entry.get("UserProperties") or {}, "UserProperties")
        return make_message(broker, custom_properties(custom), _utf8(body, "Body"))
    except BadMessage as error:
        raise BadMessage(f"Message {index} of the batch: {error}") from None


def custom_properties(entries: Mapping[str, Any]) -> dict[str, Value]:
    """Return JSON values as values of AMQP. Raises `BadMessage`."""
    return {name: _value_of(name, value) for name, value in entries.items()}


def parse_json(text: str | bytes, name: str) -> Any:
    """Return a JSON value. Raises `BadMessage`, also for NaN and infinite numbers."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise BadMessage(f"{name} is not valid JSON: it is nested too deeply.") from None
    except ValueError as error:
        raise BadMessage(f"{name} is not valid JSON: {error}.") from None


# --- messages -------------------------------------------------------------------------------------


def make_message(
    broker: Mapping[str, Any],
    custom: Mapping[str, Value],
    body: bytes,
    content_type: str | None = None,
) -> Envelope:
    """Return a message with properties given by their names in BrokerProperties.

    Read-only properties are ignored, as in Azure. A message without an id gets one. Raises
    `BadMessage`.
    """
    texts = {name: _text(broker, name) for name in _TEXTS}
    if texts["MessageId"] is None:
        texts["MessageId"] = uuid.uuid4().hex
    kind = _text(broker, "ContentType") or content_type
    fields = [_NULL] * (_LAST_FIELD + 1)
    for name, text in texts.items():
        if text is not None:
            fields[_TEXTS[name]] = _encoded(name, text)
    if kind is not None:
        fields[Field.CONTENT_TYPE] = _encoded("Content-Type", Symbol(kind))
    while fields[-1] == _NULL:
        fields.pop()
    ttl_ms = _ttl_ms(broker)
    parts = [_DURABLE if ttl_ms is None else _header(ttl_ms)]
    parts += _annotations(broker, texts["SessionId"])
    parts += (b"\x00\x53\x73", encode_list(fields))
    if custom:
        parts.append(_application_properties(custom))
    if len(body) < 256:
        parts += (b"\x00\x53\x75\xa0", len(body).to_bytes(1, "big"), body)
    else:
        parts += (b"\x00\x53\x75\xb0", len(body).to_bytes(4, "big"), body)
    try:
        envelope = slice_message(b"".join(parts))
    except DecodeError as error:
        raise BadMessage(f"The message cannot be stored: {error}.") from None
    if ttl_ms is not None:
        envelope.ttl_ms = ttl_ms  # the header ends at 49 days
    return envelope


def _header(ttl_ms: int) -> bytes:
    return b"\x00\x53\x70\xc0\x08\x03\x41\x40\x70" + min(ttl_ms, MAX_UINT).to_bytes(4, "big")


def _annotations(broker: Mapping[str, Any], session_id: str | None) -> list[bytes]:
    """Return the section of message annotations, empty when there are none."""
    entries: list[bytes] = []
    scheduled = _text(broker, "ScheduledEnqueueTimeUtc")
    if scheduled is not None:
        at_ms = parse_instant(scheduled)
        if at_ms is None:
            raise BadMessage(
                "ScheduledEnqueueTimeUtc must be a date such as 'Sun, 06 Nov 2044 08:49:37 GMT'."
            )
        entries.append(_SCHEDULED + encode_value(Timestamp(at_ms)))
    key = _text(broker, "PartitionKey")
    if key is not None:
        if session_id is not None and key != session_id:
            raise BadMessage("SessionId and PartitionKey must be the same when both are given.")
        entries.append(_PARTITION_KEY + _encoded("PartitionKey", key))
    via = _text(broker, "ViaPartitionKey")
    if via is not None:
        entries.append(_VIA_PARTITION_KEY + _encoded("ViaPartitionKey", via))
    return [b"\x00\x53\x72", _map(b"".join(entries), len(entries))] if entries else []


def _application_properties(custom: Mapping[str, Value]) -> bytes:
    entries = b"".join(
        _encoded("The name of a property", name) + _encoded(name, value)
        for name, value in custom.items()
    )
    return b"\x00\x53\x74" + _map(entries, len(custom))


def _map(entries: bytes, count: int) -> bytes:
    size = len(entries) + 4
    return b"\xd1" + size.to_bytes(4, "big") + (count * 2).to_bytes(4, "big") + entries


def _ttl_ms(broker: Mapping[str, Any]) -> int | None:
    """Return the time to live, rounded up to a millisecond."""
    value = broker.get("TimeToLiveTimeSpan")
    name = "TimeToLiveTimeSpan"
    if value is None:
        value, name = broker.get("TimeToLive"), "TimeToLive"
    if value is None:
        return None
    seconds = parse_time_span(value) if isinstance(value, str) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise BadMessage(f"{name} must be a number of seconds or a text such as '00:01:30'.")
    if not seconds > 0:
        raise BadMessage(f"{name} must be greater than zero.")
    if seconds >= MAX_TTL_MS / 1_000:
        return MAX_TTL_MS
    return math.ceil(seconds * 1_000)


# --- values ---------------------------------------------------------------------------------------


def _value_of(name: str, value: Any) -> Value:
    match value:
        case None | bool() | float():
            return value
        case str():
            return text_or_date(value)
        case int():
            try:
                return whole_number(value)
            except OverflowError:
                raise BadMessage(f"The number of the property '{name}' is too large.") from None
        case _:
            raise BadMessage(
                f"The property '{name}' must be a text, a number, a boolean or null,"
                " not an object or an array."
            )


def _text(broker: Mapping[str, Any], name: str) -> str | None:
    value = broker.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadMessage(f"{name} must be a text in double quotes.")
    if len(value) > MAX_ID_CHARS and name in _IDS:
        raise BadMessage(f"{name} is longer than {MAX_ID_CHARS} characters.")
    return value


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise BadMessage(f"{name} must be a JSON object.")


def _encoded(name: str, value: Value) -> bytes:
    try:
        return encode_value(value)
    except TypeError:
        raise BadMessage(f"{name} contains characters that are not allowed.") from None


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadMessage(f"{name} contains half a surrogate pair.") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
