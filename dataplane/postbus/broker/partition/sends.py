"""Commands that store messages: refusal when the store is behind, and order of application.

Pure bookkeeping of one host. A command that has to read something first, such as whether an id was
seen before, is applied after the read. Sends to its entity wait behind it meanwhile, to keep the
order of messages in a session.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeAlias

from postbus.entity.commands import (
    Command,
    Enqueue,
    MessageCommand,
    OnReply,
    Refusal,
    Refused,
    Transact,
)
from postbus.entity.expects import Expects

Waiting: TypeAlias = tuple[Expects[Any], OnReply[Any] | None]

BEHIND: Final = Refused(Refusal.BUSY, "the store is too slow for the load; send again later")
CLOSED: Final = Refused(Refusal.BUSY, "the namespace is closed or is being closed")


def brings_messages(command: Command) -> bool:
    """Return whether a command stores messages that the client can send again later."""
    if isinstance(command, Transact):
        return any(type(each) is Enqueue for each in command.operations)
    return isinstance(command, MessageCommand)


class SendOrder:
    """Sends that wait for an earlier one to the same entity."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Waiting]] = {}  # by entity with a read in progress
        self._reads: dict[int, int] = {}

    def must_wait(self, command: Command, on_reply: OnReply[Any] | None) -> bool:
        """Return whether a command waits; if so, `end` returns it later."""
        if self._waiting and isinstance(command, Enqueue):
            waiting = self._waiting.get(command.entity_no)
            if waiting is not None:
                waiting.append((command, on_reply))
                return True
        return False

    def begin(self, command: Command) -> None:
        """Record the start of a read for a command."""
        if isinstance(command, Enqueue):
            self._waiting.setdefault(command.entity_no, deque())
            self._reads[command.entity_no] = self._reads.get(command.entity_no, 0) + 1

    def end(self, command: Command) -> deque[Waiting]:
        """Record that a command is done; return the commands that can be applied now, in order."""
        entity_no = command.entity_no if isinstance(command, Enqueue) else 0
        if entity_no not in self._reads:
            return deque()
        self._reads[entity_no] -= 1
        if self._reads[entity_no]:  # it needs a further read
            return deque()
        del self._reads[entity_no]
        return self._waiting.pop(entity_no)

    def drop(self) -> list[Waiting]:
        """Drop everything, including reads in progress; return the waiting commands."""
        waiting = [each for queue in self._waiting.values() for each in queue]
        self._waiting.clear()
        self._reads.clear()
        return waiting
