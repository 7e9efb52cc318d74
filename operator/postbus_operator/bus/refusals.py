"""Refusals of a bus in the words of conditions. Pure."""

from __future__ import annotations

import re
from typing import Final

from postbus.client.control import RequestRefused
from postbus.contract.control import ProblemType
from postbus_operator.outcome import SpecInvalid

_SKU: Final = re.compile(r"this tier|in Basic|in Premium|must be at least 1024$")
_FILTER: Final = re.compile(r"^rule ")

NEXT_STEPS: Final = {
    "ImmutableFieldChanged": "set the field as it was, or create another resource",
    "QuotaExceeded": "delete what is not needed, or use another Namespace",
    "InvalidFilter": "correct the rule",
    "SkuUnsupported": "leave the field out, or give the Namespace a higher tier",
    "InvalidSpec": "correct the spec",
}
"""What to do about each reason."""


def spec_invalid(error: RequestRefused) -> SpecInvalid:
    """Return the reason why the bus accepts a spec under no circumstances."""
    match error.type:
        case ProblemType.IMMUTABLE:
            reason = "ImmutableFieldChanged"
        case ProblemType.QUOTA_EXCEEDED:
            reason = "QuotaExceeded"
        case _ if _FILTER.search(error.detail):
            reason = "InvalidFilter"
        case _ if _SKU.search(error.detail):
            reason = "SkuUnsupported"
        case _:
            reason = "InvalidSpec"
    return SpecInvalid(reason, f"the bus refuses: {error.detail}: {NEXT_STEPS[reason]}")


def has_moved_on(error: RequestRefused) -> bool:
    """Return whether the request was made on old knowledge: what is there must be read again."""
    return error.status == 412 or (
        error.status in (404, 409)
        and error.type in (ProblemType.ALREADY_EXISTS, ProblemType.NOT_FOUND)
    )
