"""Limits of one publish or batch, which is one commit (ADR 20)."""

from __future__ import annotations

from dataclasses import dataclass

from postbus.entity.commands import Refusal, Refused


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """Over all messages and subscriptions."""

    max_copies: int = 50_000

    max_row_bytes: int = 64 * 1024 * 1024
    """Bytes of the copies; a body that they share counts once."""

    @property
    def too_large(self) -> Refused:
        """The refusal of a publish that exceeds a limit."""
        return Refused(
            Refusal.PUBLISH_TOO_LARGE,
            f"a publish makes at most {self.max_copies} copies and {self.max_row_bytes} bytes of"
            " them: split it",
        )
