"""Commands that pass several partitions, and merged replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.entity.commands import (
    Enqueued,
    OnReply,
    Peek,
    Peeked,
    Refusal,
    Refused,
    Settled,
    Transacted,
)
from postbus.entity.expects import Expects, R

ELSEWHERE: Final = frozenset({Refusal.NOT_APPLIED, Refusal.STORE_FULL, Refusal.BUSY})
"""Refusals after which a message without key is sent to another partition: it was not stored."""


def away(host: Host) -> Refused | None:
    """Return why a partition is unavailable; None if it is available or just being loaded."""
    if host.status is not HostStatus.LOADING or host.trouble is None:
        return None
    return Refused(Refusal.NOT_APPLIED, f"partition {host.partition_id} {host.trouble}")


def submit_all(
    parts: Sequence[tuple[Host, Expects[R]]], on_all: Callable[[list[R | Refused]], None]
) -> None:
    """Submit to several partitions; `on_all` gets the replies in the order of the parts."""
    replies: list[R | Refused] = [Refused(Refusal.UNKNOWN)] * len(parts)
    left = len(parts)

    def take(index: int, reply: R | Refused) -> None:
        nonlocal left
        replies[index] = reply
        left -= 1
        if not left:
            on_all(replies)

    if not parts:
        on_all(replies)
    for index, (host, command) in enumerate(parts):
        host.submit(command, partial(take, index))


class AnywhereSend:
    """Messages without key on their way to the first partition that accepts them."""

    __slots__ = ("_answer", "_command", "_hosts")

    def __init__(
        self,
        hosts: list[Host],
        command: Expects[Enqueued | Transacted],
        answer: OnReply[Enqueued | Transacted],
    ) -> None:
        self._hosts = iter(hosts)
        self._command = command
        self._answer = answer

    def go_on(self) -> None:
        next(self._hosts).submit(self._command, self._take)

    def _take(self, reply: Enqueued | Transacted | Refused) -> None:
        """Try the next partition; answer with the last refusal if none is left."""
        if type(reply) is Refused and reply.refusal in ELSEWHERE:
            host = next(self._hosts, None)
            if host is not None:
                host.submit(self._command, self._take)
                return
        self._answer(reply)


class MergedSend:
    """Merges the replies of several partitions, in the order of the messages."""

    __slots__ = ("_answer", "_left", "_numbers", "_refusals")

    def __init__(self, message_count: int, part_count: int, answer: OnReply[Enqueued]) -> None:
        self._numbers = [0] * message_count
        self._refusals: dict[int, Refused] = {}
        self._left = part_count
        self._answer = answer

    def taking(self, indexes: list[int]) -> OnReply[Enqueued]:
        """Return what takes the reply of the partition that has these messages."""
        return lambda reply: self.take(indexes, reply)

    def take(self, indexes: list[int], reply: Enqueued | Refused) -> None:
        if isinstance(reply, Refused):
            self._refusals.update(dict.fromkeys(indexes, reply))
        else:
            for index, number in zip(indexes, reply.sequence_numbers, strict=True):
                self._numbers[index] = number
            for position, refused in (reply.refusals or {}).items():
                self._refusals[indexes[position]] = refused
        self._left -= 1
        if not self._left:
            self._answer(Enqueued(self._numbers, self._refusals or None))


class MergedSettlement:
    """Merges the replies of several partitions."""

    __slots__ = ("_answer", "_left", "_lost", "_refused", "_settled_count")

    def __init__(self, part_count: int, answer: OnReply[Settled]) -> None:
        self._left = part_count
        self._answer = answer
        self._lost: list[int] = []
        self._refused: Refused | None = None
        self._settled_count = 0

    def taking(self, indexes: list[int]) -> OnReply[Settled]:
        """Return what takes the reply of the partition that has these tokens."""
        return lambda reply: self._take(indexes, reply)

    def _take(self, indexes: list[int], reply: Settled | Refused) -> None:
        """Collect a reply; if only a part was refused, its tokens count as lost."""
        if isinstance(reply, Settled):
            self._settled_count += 1
            self._lost += [indexes[position] for position in reply.lost or ()]
        else:
            self._refused = reply
            self._lost += indexes
        self._left -= 1
        if self._left:
            return
        if self._refused is not None and not self._settled_count:
            self._answer(self._refused)
        else:
            self._answer(Settled(sorted(self._lost) or None))


class Walk:
    """A peek over partitions in rising order."""

    __slots__ = ("_answer", "_answered_count", "_command", "_hosts", "_refused")

    def __init__(self, hosts: Sequence[Host], command: Peek, answer: OnReply[Peeked]) -> None:
        self._hosts = iter(hosts)
        self._command = command
        self._answer = answer
        self._refused: Refused | None = None
        self._answered_count = 0

    def go_on(self) -> None:
        """Ask the next partition; one that is unavailable is passed over (S161)."""
        for host in self._hosts:
            refused = away(host)
            if refused is not None:
                self._refused = refused
                continue
            host.submit(self._command, self._take)  # its numbers are above earlier ones
            return
        if self._refused is not None and not self._answered_count:
            self._answer(self._refused)
        else:
            self._answer(Peeked([]))

    def _take(self, reply: Peeked | Refused) -> None:
        if isinstance(reply, Peeked):
            self._answered_count += 1
            if reply.messages:
                self._answer(reply)
                return
        else:
            if reply.refusal not in (*ELSEWHERE, Refusal.UNKNOWN):
                self._answer(reply)
                return
            self._refused = reply
        self.go_on()
