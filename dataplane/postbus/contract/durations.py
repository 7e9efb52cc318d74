"""Durations in ISO 8601, in milliseconds, and their limits in models and schemas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import (
    BeforeValidator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import core_schema

MAX_DURATION_MS: Final = 922_337_203_685_477  # .NET TimeSpan.MaxValue: "never"
DURATION: Final = re.compile(
    r"P(?:([0-9]{1,8})D)?"
    r"(?:T(?:([0-9]{1,4})H)?(?:([0-9]{1,5})M)?(?:([0-9]{1,7}(?:\.[0-9]{1,7})?)S)?)?"
)


def parse_duration_ms(value: object) -> int:
    """Return the milliseconds of an ISO 8601 duration such as `PT1M`; integers pass unchanged.

    Fractions of a millisecond are dropped, so that rounding passes no limit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or not any(match.groups()) or str(value).endswith("T"):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    days, hours, minutes, seconds = match.groups(default="0")
    whole, _, fraction = seconds.partition(".")
    whole_s = int(days) * 86_400 + int(hours) * 3_600 + int(minutes) * 60 + int(whole)
    return min(whole_s * 1_000 + int(fraction[:3].ljust(3, "0")), MAX_DURATION_MS)


def format_duration(value_ms: int) -> str:
    """Return the ISO 8601 form of a duration; the inverse of `parse_duration_ms`."""
    if value_ms >= MAX_DURATION_MS:
        return "P10675199DT2H48M5.4775807S"
    days, rest = divmod(value_ms, 86_400_000)
    hours, rest = divmod(rest, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    time = f"{hours}H" * bool(hours) + f"{minutes}M" * bool(minutes)
    if rest or not (days or time):
        time += f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "S"
    return f"P{days}D" * bool(days) + ("" if days else "P") + (f"T{time}" if time else "")


def _read_duration(value: object, info: ValidationInfo) -> int:
    """Read a field; in JSON, thus in manifests, a bare number has no unit and is rejected."""
    if info.mode == "json" and not isinstance(value, str):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    return parse_duration_ms(value)


DurationMs = Annotated[
    int,
    BeforeValidator(_read_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{DURATION.pattern}$",
            "maxLength": 40,
            "description": "ISO 8601, such as PT1M",
        }
    ),
]


@dataclass(frozen=True, slots=True)
class DurationRange:
    """Limits of a duration, checked by models and named in their JSON schema.

    Keywords of the schema are `x-minimum` and, unless every longer one is allowed, `x-maximum`.
    """

    least_ms: int
    most_ms: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Add the check to a field; its error uses the notation of the field."""
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Name the limits."""
        described = {**handler(schema), "x-minimum": format_duration(self.least_ms)}
        if self.most_ms < MAX_DURATION_MS:
            described["x-maximum"] = format_duration(self.most_ms)
        return described

    def check(self, value_ms: int) -> int:
        """Return a duration within the limits, or raise ValueError."""
        if not self.least_ms <= value_ms <= self.most_ms:
            least, most = format_duration(self.least_ms), format_duration(self.most_ms)
            if self.most_ms == MAX_DURATION_MS:
                raise ValueError(f"must be at least {least}")
            raise ValueError(f"must be between {least} and {most}")
        return value_ms
