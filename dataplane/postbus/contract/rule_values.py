"""Values that rules of subscriptions compare with: JSON values, times, durations, ids and octets.

JSON has no notation for the last four, and a string stays a string: in definitions they are
`{"dateTime": "2026-01-01T00:00:00Z"}`, `{"duration": "PT5M"}`, `{"uuid": "..."}` and `{"binary":
"base64"}`. A time without a zone counts as UTC and is written back without one.
"""

from __future__ import annotations

import base64
import re
import uuid
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Annotated, Final, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

TICKS_A_SECOND: Final = 10_000_000
"""Durations are counted in .NET's ticks, since .NET clients send them."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_MS: Final = -62_135_596_800_000
_LAST_MS: Final = 253_402_300_799_999
"""The first and last millisecond of the years 1 to 9999, which every client can represent."""

_MAX_TICKS: Final = 2**63 - 1
_MOMENT: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_SPAN: Final = re.compile(
    r"(-)?P(?:(\d{1,8})D)?(?:T(?:(\d{1,9})H)?(?:(\d{1,11})M)?(?:(\d{1,12})(?:\.(\d{1,9}))?S)?)?",
    re.ASCII,
)


_ID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Zoneless(int):
    """Milliseconds of a time that was given without a zone."""

    __slots__ = ()


def parse_moment_ms(text: str) -> int:
    """Return milliseconds since the epoch of an ISO 8601 time; a time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(text) if _MOMENT.fullmatch(text) else None
    except ValueError:
        moment = None
    if moment is None:
        raise ValueError("use an ISO 8601 time such as 2026-01-01T00:00:00Z")
    if moment.tzinfo is None:
        return Zoneless((moment.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1))
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def format_moment(at_ms: int) -> str:
    """Return the ISO 8601 form of a time; the inverse of `parse_moment_ms`."""
    moment = _EPOCH + timedelta(milliseconds=at_ms)
    precision = "milliseconds" if at_ms % 1_000 else "seconds"
    zone = "" if isinstance(at_ms, Zoneless) else "Z"
    return moment.isoformat(timespec=precision).replace("+00:00", zone)


def parse_span_ticks(text: str) -> int:
    """Return the ticks of 100 ns of an ISO 8601 duration in days or less; may be negative."""
    match = _SPAN.fullmatch(text)
    if match is None or not any(match.groups()[1:]) or text.endswith("T"):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    sign, days, hours, minutes, seconds, fraction = match.groups(default="")
    whole = ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes or 0)) * 60
    ticks = (whole + int(seconds or 0)) * TICKS_A_SECOND + int(fraction[:7].ljust(7, "0"))
    return -ticks if sign else ticks


def format_span(ticks: int) -> str:
    """Return the ISO 8601 form of a duration; the inverse of `parse_span_ticks`."""
    seconds, fraction = divmod(abs(ticks), TICKS_A_SECOND)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    time = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes)
    if seconds or fraction or not (days or time):
        time += f"{seconds}" + f".{fraction:07}".rstrip("0") * bool(fraction) + "S"
    return "-" * (ticks < 0) + "P" + f"{days}D" * bool(days) + f"T{time}" * bool(time)


def _read_moment(value: object, info: ValidationInfo) -> int:
    if isinstance(value, str):
        value = parse_moment_ms(value)
    elif info.mode == "json" or not isinstance(value, int):
        raise ValueError("use an ISO 8601 time such as 2026-01-01T00:00:00Z")
    if not _FIRST_MS <= value <= _LAST_MS:
        raise ValueError("a time must be in the years 1 to 9999")
    return value if isinstance(value, Zoneless) else int(value)


def _read_span(value: object, info: ValidationInfo) -> int:
    if isinstance(value, str):
        value = parse_span_ticks(value)
    elif info.mode == "json" or not isinstance(value, int):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    if not -_MAX_TICKS - 1 <= value <= _MAX_TICKS:
        raise ValueError("a duration has at most 10,675,199 days")
    return int(value)


class Moment(BaseModel):
    """A time, an AMQP timestamp."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    at_ms: Annotated[
        int,
        PlainValidator(_read_moment),
        PlainSerializer(format_moment, return_type=str),
        WithJsonSchema({"type": "string", "format": "date-time"}),
    ] = Field(alias="dateTime")


class Span(BaseModel):
    """A duration: ISO 8601 in JSON, a .NET TimeSpan over AMQP and ATOM."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    ticks: Annotated[
        int,
        BeforeValidator(_read_span),
        PlainSerializer(format_span, return_type=str),
        WithJsonSchema({"type": "string", "description": "ISO 8601, such as PT1M"}),
    ] = Field(alias="duration")


def _read_id(value: object) -> uuid.UUID:
    if isinstance(value, uuid.UUID):
        return value
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise ValueError("use a uuid such as 12345678-1234-5678-1234-567812345678")
    return uuid.UUID(value)


def _read_octets(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        if isinstance(value, str):
            return base64.b64decode("".join(value.split()), validate=True)
    except ValueError:
        pass
    raise ValueError("use base64 for a binary")


def format_octets(octets: bytes) -> str:
    return base64.b64encode(octets).decode("ascii")


class Identifier(BaseModel):
    """A uuid; equal to its text form."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    id: Annotated[
        uuid.UUID,
        PlainValidator(_read_id),
        PlainSerializer(str, return_type=str),
        WithJsonSchema({"type": "string", "format": "uuid"}),
    ] = Field(alias="uuid")


class Octets(BaseModel):
    """Bytes, an AMQP binary; base64 in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    octets: Annotated[
        bytes,
        PlainValidator(_read_octets),
        PlainSerializer(format_octets, return_type=str),
        WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
    ] = Field(alias="binary")


def _check_value(value: object, info: ValidationInfo) -> object:
    """Validate a value by its shape, so that a mistake causes one error only."""
    match value:
        case {"dateTime": at, **rest} if not rest:
            return Moment(at_ms=_read_moment(at, info))
        case {"duration": span, **rest} if not rest:
            return Span(ticks=_read_span(span, info))
        case {"uuid": text, **rest} if not rest:
            return Identifier(id=_read_id(text))
        case {"binary": text, **rest} if not rest:
            return Octets(octets=_read_octets(text))
        case bool() | int() | str() | Moment() | Span() | Identifier() | Octets():
            return value
        case float() if isfinite(value):
            return value
        case float():
            raise ValueError("a rule cannot compare with this number")
        case _:
            raise ValueError(
                "a rule compares with text, a number, true and false,"
                ' {"dateTime": "2026-01-01T00:00:00Z"}, {"duration": "PT5M"}, {"uuid": "..."} or'
                ' {"binary": "base64"}'
            )


RuleValue: TypeAlias = bool | int | float | str | Moment | Span | Identifier | Octets

PropertyValue = Annotated[RuleValue, BeforeValidator(_check_value)]
"""A value that a rule can compare with. Numbers are equal by value, regardless of AMQP width."""
