"""Kinds and limits of reader groups between the bodies of both APIs and entity commands."""

from __future__ import annotations

from typing import Final

from postbus.contract.bulk import GroupKindName, PinLimited
from postbus.entity.group_commands import NO_LIMITS, GroupKind, Limits

KINDS: Final[dict[GroupKindName, GroupKind]] = {
    "tap": GroupKind.TAP,
    "drain": GroupKind.DRAIN,
}
KIND_NAMES: Final = {kind: name for name, kind in KINDS.items()}


def limits_of(asked: PinLimited) -> Limits | None:
    """Return the limits that a request names; None: those of an existing group stay."""
    if not asked.names_limits:
        return None
    if not asked.has_limit:
        return NO_LIMITS
    return Limits(asked.max_pinned_bytes, asked.max_pinned_age_ms, asked.on_pin_limit == "drop")


def shown_limits(limits: Limits) -> dict[str, object]:
    """Return the fields of `contract.bulk.ShownLimits`."""
    has_limit = limits.max_bytes is not None or limits.max_age_ms is not None
    return {
        "max_pinned_bytes": limits.max_bytes,
        "max_pinned_age_ms": limits.max_age_ms,
        "on_pin_limit": ("drop" if limits.drops else "fail") if has_limit else None,
    }
