"""A filter over stored messages: a condition in the language of rules, a session, a text.

Made by `message_operations` for each call; also reports the properties that no message had.
"""

from __future__ import annotations

import random

from postbus.entity.commands import PeekedMessage
from postbus.message.body import read_body
from postbus.message.codec import DecodeError
from postbus.message.fields import StoredFields
from postbus.rules.compiled import EvaluationError
from postbus.rules.expressions import (
    Test,
    compile_test,
    refuse_unknown,
    user_properties,
)
from postbus.rules.grammar import parse_filter


class MessageFilter:
    """A condition over stored messages; `failed` counts those for which it could not be evaluated.

    `absent`: properties in the condition that no examined message had. Only the main queue of an
    entity with sessions can be browsed by session.
    """

    def __init__(
        self,
        where: str | None = None,
        session_id: str | None = None,
        body_contains: str | None = None,
    ) -> None:
        """Raises `RuleError` for an invalid condition."""
        self.failed = 0
        self.absent: set[str] = set()
        self.is_narrow = (where, session_id, body_contains) != (None, None, None)
        self._session_id = None if session_id is None else session_id.encode()
        self._text = None if body_contains is None else body_contains.encode()
        self._test: Test | None = None
        if where is not None:
            condition = parse_filter(where)
            refuse_unknown(condition)
            self._test = compile_test(condition, random.Random())
            self.absent = user_properties(condition)

    def selects(self, message: PeekedMessage) -> bool:
        """Return whether the filter selects a message."""
        envelope = message.envelope
        if self._session_id not in (None, envelope.session_id):
            return False
        if self._test is not None and not self._is_true(message):
            return False
        return self._text is None or self._text in read_body(envelope.body)[1]

    def _is_true(self, message: PeekedMessage) -> bool:
        assert self._test is not None
        fields = StoredFields(
            message.envelope, message.enqueued_ms, message.sequence, message.delivery_count
        )
        try:
            if self.absent:
                self.absent = {name for name in self.absent if name.lower() not in fields.folded}
            return self._test(fields) is True
        except (EvaluationError, DecodeError):
            self.failed += 1
            return False
