r"""Values of messages in HTTP: headers of custom properties, dates, durations.

Pure translation for the runtime API. Texts are in double quotes, with quotes in them written `\"`;
numbers and booleans are bare; a time is a quoted date of HTTP. Source: Service Bus REST, "Message
headers and properties"; the quoting of azure-servicebus for Python below 1.0.
"""

from __future__ import annotations

import base64
import math
import re
import uuid
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from postbus.message.codec import Array, Described, Int, Timestamp, Ulong, Value

MAX_HTTP_DATE_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, the last that a date of HTTP can express."""

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = (
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
)  # fmt: skip
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_HTTP_DATE: Final = re.compile(
    rf"(?:{'|'.join(_DAYS)}), ([0-9]{{1,2}}) ({'|'.join(_MONTHS)}) ([0-9]{{4}})"
    r" ([0-9]{2}):([0-9]{2}):([0-9]{2}) GMT"
)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER: Final = re.compile(
    r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?"
)
_TIME_SPAN: Final = re.compile(
    r"(?:([0-9]{1,8})\.)?([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,7}))?"
)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\x80-\x9f\ud800-\udfff]")


# --- dates and durations --------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _http_date(second: int) -> str:
    at = _EPOCH + timedelta(seconds=second)
    return (
        f"{_DAYS[at.weekday()]}, {at.day:02} {_MONTHS[at.month - 1]} {at.year:04}"
        f" {at.hour:02}:{at.minute:02}:{at.second:02} GMT"
    )


def http_date(at_ms: int) -> str:
    """Return a time in milliseconds since the epoch in the form of RFC 1123, cut to its second."""
    return _http_date(min(max(at_ms, 0), MAX_HTTP_DATE_MS) // 1_000)


def parse_http_date(text: str) -> int | None:
    """Return a date of RFC 1123 in milliseconds since the epoch, None for any other text."""
    found = _HTTP_DATE.fullmatch(text)
    if found is None:
        return None
    day, month, year, hour, minute, second = found.groups()
    try:
        at = datetime(
            int(year), _MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second),
            tzinfo=UTC,
        )  # fmt: skip
    except ValueError:
        return None
    return (at - _EPOCH) // timedelta(milliseconds=1)


def parse_instant(text: str) -> int | None:
    """Return a date of RFC 1123 or ISO 8601 in milliseconds; without a zone it is UTC."""
    at_ms = parse_http_date(text)
    if at_ms is not None:
        return at_ms
    try:
        at = datetime.fromisoformat(text)
        return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        return None


def parse_time_span(text: str) -> float | None:
    """Return the seconds of `[d.]hh:mm:ss[.fffffff]`, None for any other text."""
    found = _TIME_SPAN.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds, fraction = found.groups()
    if int(hours) > 23 or int(minutes) > 59 or int(seconds) > 59:
        return None
    whole = ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    return whole + (float(f"0.{fraction}") if fraction else 0.0)


# --- custom properties ----------------------------------------------------------------------------


def parse_property(text: str) -> Value:
    """Return the value of a header; text that is not a number, a boolean or quoted is taken as it
    is.

    A whole number is an int if it fits, else a long, else an ulong.
    """
    if len(text) >= 2 and text[0] == text[-1] == '"':
        return text_or_date(text[1:-1].replace('\\"', '"'))
    if _INTEGER.fullmatch(text):
        return whole_number(int(text))
    if _NUMBER.fullmatch(text):
        return float(text)
    folded = text.lower()
    if folded in ("true", "false"):
        return folded == "true"
    return text


def text_or_date(text: str) -> Value:
    """Return a timestamp for a date of HTTP, the text itself for every other."""
    at_ms = parse_http_date(text) if text.endswith("GMT") else None
    return text if at_ms is None else Timestamp(at_ms)


def whole_number(number: int) -> Value:
    """Return the smallest of int, long, ulong, double that holds a number."""
    if -(2**31) <= number < 2**31:
        return Int(number)
    if -(2**63) <= number < 2**63:
        return number
    if 0 <= number < 2**64:
        return Ulong(number)
    return float(number)


def format_property(value: Value) -> str | None:
    """Return a header's text, None for a value that headers cannot hold."""
    if isinstance(value, str):  # symbols and characters too
        if isinstance(text_or_date(value), Timestamp):
            return str(value)  # quotes would make it a timestamp
        return None if _CONTROL.search(value) else '"' + value.replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Timestamp):
        return f'"{http_date(value)}"' if 0 <= value <= MAX_HTTP_DATE_MS else None
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else None
    if isinstance(value, uuid.UUID):
        return f'"{value}"'
    return None


def is_plain(text: str) -> bool:
    """Return whether a text can be a header's value unchanged."""
    return text.isascii() and text.isprintable() and text == text.strip() and bool(text)


def json_form(value: Value) -> Any:
    """Return a value in JSON: bytes in base64, a described value without its descriptor."""
    match value:
        case None | bool():
            return value
        case float():
            return float(value) if math.isfinite(value) else repr(float(value))
        case Timestamp() if 0 <= value <= MAX_HTTP_DATE_MS:
            return http_date(value)
        case int():
            return int(value)
        case str():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
        case uuid.UUID():
            return str(value)
        case dict():
            return {_json_key(key): json_form(item) for key, item in value.items()}
        case list() | tuple():
            return [json_form(item) for item in value]
        case Array():
            return [json_form(item) for item in value.items]
        case Described():
            return json_form(value.value)
        case _:
            return str(value)


def _json_key(key: Value) -> str:
    plain = json_form(key)
    return plain if isinstance(plain, str) else str(plain)
