"""Text and JSON of AMQP values.

Binary is Base64, as Spark's own `to_json` writes it; times are ISO 8601 in UTC. What has no text
raises `DecodeError`.
"""

from __future__ import annotations

import json
import math
import uuid
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from postbus.message.codec import Array, DecodeError, Described, Timestamp, Value
from postbus.message.described_times import offset_ms, span_ticks

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MAX_DEPTH: Final = 40
"""More than the depth of values that the codec decodes."""


def text_of(plain: object) -> str | None:
    """Return the text of what `plain_of` returns, None for null."""
    if plain is None or isinstance(plain, str):
        return plain
    return str(plain) if type(plain) is int else json_of(plain)


def json_of(plain: object) -> str:
    """Return the JSON of what `plain_of` returns."""
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def plain_of(value: Value, depth: int = MAX_DEPTH) -> Any:
    """Return a value as JSON has it. Raises `DecodeError`."""
    if isinstance(value, str):
        return checked_text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Timestamp):
        return time_text(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, bytes):  # decimals, too: their octets
        return b64encode(value).decode()
    if isinstance(value, uuid.UUID):
        return str(value)
    return _compound(value, depth - 1)


def _compound(value: Value, depth: int) -> Any:
    if depth < 0:
        raise DecodeError("nested too deeply")
    match value:
        case Described():
            return _described(value, depth)
        case Array():
            return [plain_of(item, depth) for item in value.items]
        case list():
            return [plain_of(item, depth) for item in value]
        case dict():
            return {
                text_of(plain_of(name, depth)) or "": plain_of(item, depth)
                for name, item in value.items()
            }
        case _:
            raise DecodeError(f"no text for {type(value).__name__}")


def _described(value: Described, depth: int) -> Any:
    """Return durations and times of .NET as text, of other described values what they describe."""
    ticks = span_ticks(value)
    if ticks is not None:
        seconds, rest = divmod(abs(ticks), 10_000_000)
        part = f".{rest:07}".rstrip("0") if rest else ""
        return f"PT{'-' if ticks < 0 else ''}{seconds}{part}S"
    time_ms = offset_ms(value)
    if time_ms is not None:
        return time_text(time_ms)
    return plain_of(value.value, depth)


def time_text(time_ms: int) -> str:
    """Return a time as ISO 8601, or its milliseconds since the epoch if there is no such date."""
    try:
        time = EPOCH + timedelta(milliseconds=int(time_ms))
    except OverflowError:
        return str(int(time_ms))
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def checked_text(text: str) -> str:
    """Return text that UTF-8 can hold: a char of AMQP may be half of a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DecodeError("text is not Unicode") from None
    return str(text)
