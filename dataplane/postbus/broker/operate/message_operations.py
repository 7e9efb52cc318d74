"""Message operations for operators: peek, delete, purge, resend.

Called by the control API. Messages are selected by sequence number or by a filter in the language
of rules. A call does a bounded part of the work and returns the number to continue with. It runs
commands like those of clients, so that results are released only when they are durable. A call can
be repeated after an unknown result without doing anything twice, since a handled message no longer
has its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from postbus.broker.address import Address
from postbus.broker.operate.dead_letter_groups import DeadLetterGroup, DeadLetterGroups
from postbus.broker.operate.message_filter import MessageFilter
from postbus.broker.operate.message_view import view_of
from postbus.broker.partition.host import Host
from postbus.broker.placement import SPREAD, partition_of_key, partition_of_number, split
from postbus.broker.router import Router
from postbus.broker.spread.replies import ELSEWHERE, away
from postbus.broker.spread.transactions import detects_duplicates
from postbus.contract.control_messages import ShownMessage
from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import EntityKind, EntityStatus
from postbus.entity.by_sequence import ABSENT
from postbus.entity.commands import (
    DeleteBySequence,
    MessageEdit,
    MessageState,
    Peek,
    PeekedMessage,
    Refusal,
    Refused,
    ResendBySequence,
    SubQueue,
)
from postbus.entity.counts import count_in
from postbus.entity.message_operations import (
    EDITABLE,
    MAX_SEQUENCE_NUMBERS,
    PARTITION_KEY,
    TOO_MANY,
)
from postbus.rules.nodes import RuleError

__all__ = [
    "MAX_SEQUENCE_NUMBERS",
    "MessageEdit",
    "MessageOperations",
    "OperationRefused",
    "OperationResult",
    "PeekPage",
    "PurgePage",
    "ResendResult",
    "SummaryPage",
    "Walked",
]

LOOKED_AT: Final = 1_000
"""Maximum number of messages that a call examines (ADR 20)."""

PAGE_MESSAGES: Final = 250
PAGE_BYTES: Final = 1 << 20
LOOKED_AT_BYTES: Final = 8 << 20
"""Bytes read from a partition at a time, and examined by one call. Our choice: a call holds some
megabytes, regardless of the size of messages."""

MAX_BODY_BYTES: Final = 1 << 20
"""Maximum bytes of a body in a peek. Our choice."""

PAUSE_BYTES: Final = 64 * 1024
"""Bytes of examined messages after which other tasks of the event loop run. Our choice: properties
or lists of that size take a tenth of a second at worst."""

NUMBER_BITS: Final = 48

IN_DOUBT: Final = "the result is unknown; repeat the call: handled messages are not found again"

Numbers: TypeAlias = Sequence[int]


class OperationRefused(Exception):
    """A call was refused as a whole; nothing was done."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(refused.detail)


@dataclass(frozen=True, slots=True)
class Walked:
    """Progress of a call. `next_number`: where the next call continues.

    `is_end`: there are no messages from that number on. `looked_at` counts examined messages,
    including those that the filter did not select; `failed` those for which it could not be
    evaluated. `away`: partitions that did not answer; their messages are missing. `absent`:
    properties in the filter that no message had.
    """

    next_number: int
    is_end: bool
    looked_at: int
    failed: int
    away: tuple[int, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeekPage(Walked):
    """Messages by sequence number. `total`: number of messages in any state, None while a
    partition is not loaded.
    """

    messages: tuple[ShownMessage, ...]
    total: int | None


@dataclass(frozen=True, slots=True)
class SummaryPage(Walked):
    """Groups of dead letters, largest first; otherwise like a page of messages."""

    groups: tuple[DeadLetterGroup, ...]
    total: int | None


@dataclass(frozen=True, slots=True)
class OperationResult:
    """`numbers` were handled; `refused`: number -> reason."""

    numbers: tuple[int, ...]
    refused: Mapping[int, Refused]


@dataclass(frozen=True, slots=True)
class PurgePage(Walked):
    """Counts of selected (`matched`) and `deleted` messages (none in a dry run)."""

    matched: int
    deleted: int
    refused: Mapping[int, Refused]


@dataclass(frozen=True, slots=True)
class ResendResult:
    """`resent`: number -> number at the target. `forwarded` are on their way to another partition;
    those that the target permanently refuses go to the transfer dead-letter queue of the source.
    `refused` stay unchanged: number -> reason.
    """

    resent: Mapping[int, int]
    forwarded: tuple[int, ...]
    refused: Mapping[int, Refused]


@dataclass(slots=True)
class _HandledNumbers:
    """Results by number so far."""

    done: dict[int, int] = field(default_factory=dict)
    refused: dict[int, Refused] = field(default_factory=dict)


class MessageOperations:
    """See the module's docstring. A call that is refused as a whole raises `OperationRefused`."""

    def __init__(self, router: Router, hosts: Sequence[Host]) -> None:
        """Take the hosts of all partitions in order."""
        self._router = router
        self._hosts = hosts

    # --- looking --------------------------------------------------------------------------------

    async def peek(
        self,
        path: str,
        *,
        from_number: int = 0,
        count: int = 100,
        where: str | None = None,
        session_id: str | None = None,
        state: MessageState | None = None,
        body_contains: str | None = None,
        body_bytes: int = 0,
    ) -> PeekPage:
        """Return up to `count` messages of a queue or sub-queue from a number on; changes nothing.

        `where` is a filter as in a rule; `body_contains` a text to find in bodies. A page may have
        fewer messages than `count`, even none, before the end is reached.
        """
        address = self._address(path)
        filtered = _filter_of(where, session_id, body_contains)
        walk = self._walk(address, from_number, session_id, state)
        count = min(max(count, 1), PAGE_MESSAGES)
        body_bytes = min(max(body_bytes, 0), MAX_BODY_BYTES)
        found: list[PeekedMessage] = []
        while len(found) < count and walk.goes_on:
            page = await walk.next_page(PAGE_MESSAGES if filtered.is_narrow else count)
            async for message in _unhurried(page):
                walk.looked(message)
                if filtered.selects(message):
                    found.append(message)
                    if len(found) == count:
                        break
        ttl_ms = _default_ttl_ms(address)
        views = [
            view_of(each, address.sub_queue, default_ttl_ms=ttl_ms, body_bytes=body_bytes)
            async for each in _unhurried(found)
        ]
        return PeekPage(*_walked(walk, filtered), tuple(views), self._total(address))

    async def summarize(
        self, path: str, *, from_number: int = 0, where: str | None = None
    ) -> SummaryPage:
        """Group the dead letters of a queue by cause, from a number on; changes nothing.

        A page has at most `MAX_GROUPS` groups of the messages it examined; callers add up pages.
        """
        address = self._address(path)
        if address.sub_queue not in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER):
            raise _refused(Refusal.NOT_ALLOWED, "only dead letters can be summarized")
        filtered = _filter_of(where, None)
        walk = self._walk(address, from_number, None, None)
        groups = DeadLetterGroups()
        is_full = False
        while walk.goes_on and not is_full:
            page = await walk.next_page(PAGE_MESSAGES)
            async for message in _unhurried(page):
                if filtered.selects(message) and not groups.add(message):
                    is_full = True
                    break
                walk.looked(message)
        return SummaryPage(*_walked(walk, filtered), groups.largest_first(), self._total(address))

    # --- deleting -------------------------------------------------------------------------------

    async def delete(self, path: str, numbers: Numbers) -> OperationResult:
        """Delete messages of any state by number, at most `MAX_SEQUENCE_NUMBERS`."""
        address = self._address(path)
        _limit(numbers)
        work = await self._delete(address, numbers)
        return OperationResult(tuple(work.done), work.refused)

    async def purge(
        self,
        path: str,
        *,
        where: str | None = None,
        from_number: int = 0,
        count: int = LOOKED_AT,
        dry_run: bool = False,
        session_id: str | None = None,
        state: MessageState | None = None,
        body_contains: str | None = None,
    ) -> PurgePage:
        """Delete, or only count, messages that a filter selects among up to `count`."""
        address = self._address(path)
        filtered = _filter_of(where, session_id, body_contains)
        walk = self._walk(address, from_number, session_id, state)
        count = min(max(count, 1), LOOKED_AT)
        matched = 0
        work = _HandledNumbers()
        while walk.looked_at < count and walk.goes_on:
            page = await walk.next_page(min(PAGE_MESSAGES, count - walk.looked_at))
            selected: list[int] = []
            async for message in _unhurried(page):
                walk.looked(message)
                if filtered.selects(message):
                    selected.append(message.sequence)
            matched += len(selected)
            if selected and not dry_run:
                part = await self._delete(address, selected)
                work.done.update(part.done)
                work.refused.update(part.refused)
        return PurgePage(*_walked(walk, filtered), matched, len(work.done), work.refused)

    async def _delete(self, address: Address, numbers: Numbers) -> _HandledNumbers:
        work = _HandledNumbers()
        for partition_id, part in _parts(address, numbers).items():
            await self._handle(
                partition_id,
                part,
                work,
                lambda some: DeleteBySequence(address.entity_no, address.sub_queue, some),
            )
        return work

    # --- sending again --------------------------------------------------------------------------

    async def resend(
        self,
        path: str,
        numbers: Numbers,
        *,
        to: str | None = None,
        edit: MessageEdit | None = None,
        max_resends: int | None = None,
    ) -> ResendResult:
        """Resend at most `MAX_SEQUENCE_NUMBERS` dead letters, in the given order.

        They go to their former entity (a subscription itself, not its topic) or to another queue or
        topic. They have no trace of having been dead letters: they are new messages with their
        former ids, keys and body, or those of `edit`. Those that were resent `max_resends` times
        before are refused; None: however often.
        """
        address = self._address(path)
        _limit(numbers)
        if edit is not None:
            _check_edit(edit)
        target = self._target(address, to)
        work, forwarded = _HandledNumbers(), _HandledNumbers()
        for partition_id, part in _parts(address, numbers).items():
            is_here = self._is_here(address, target, partition_id, edit)
            target_no = target.entity_no if is_here else None

            def command(some: list[int], target_no: int | None = target_no) -> ResendBySequence:
                name = None if target_no is not None else target.name
                return ResendBySequence(
                    address.entity_no, address.sub_queue, some, target_no, name, edit, max_resends
                )

            await self._handle(partition_id, part, work if is_here else forwarded, command)
        refused = {**work.refused, **forwarded.refused}
        return ResendResult(work.done, tuple(forwarded.done), refused)

    def _target(self, source: Address, to: str | None) -> Address:
        """Return the target entity; raises for refusals that are already known."""
        if source.sub_queue not in (SubQueue.DEAD_LETTER, SubQueue.TRANSFER_DEAD_LETTER):
            raise _refused(Refusal.NOT_ALLOWED, "only dead letters can be resent")
        target = source if to is None else self._address(to)
        if target.entity_no == source.entity_no:
            return source
        if target.sub_queue is not SubQueue.ACTIVE:
            raise _refused(Refusal.NOT_ALLOWED, "messages cannot be sent to a dead-letter queue")
        if target.kind is EntityKind.SUBSCRIPTION:
            raise _refused(
                Refusal.NOT_ALLOWED, "messages cannot be sent to a subscription: use its topic"
            )
        if target.properties.status is EntityStatus.DISABLED:
            raise _refused(Refusal.ENTITY_DISABLED, target.name)
        if target.properties.status is EntityStatus.SEND_DISABLED:
            raise _refused(Refusal.SEND_DISABLED, target.name)
        return target

    @staticmethod
    def _is_here(
        source: Address, target: Address, partition_id: int, edit: MessageEdit | None
    ) -> bool:
        """Return whether the target stores these messages in their own partition."""
        if target.entity_no != source.entity_no:
            return target.partition_id == partition_id
        if not target.is_partitioned or edit is None:
            return True
        keys = {"session_id", PARTITION_KEY}
        if detects_duplicates(target):
            keys.add("message_id")
        if keys.isdisjoint(edit.fields):
            return True
        if target.kind is EntityKind.SUBSCRIPTION:
            raise _refused(
                Refusal.NOT_ALLOWED,
                "the keys of a partitioned subscription's messages determine their partition"
                " and cannot be changed; send them to the topic instead",
            )
        return False

    # --- partitions -----------------------------------------------------------------------------

    def _address(self, path: str) -> Address:
        found: list[Address | None] = []
        self._router.resolve(path, found.append)
        if not found or found[0] is None:
            raise OperationRefused(Refused(Refusal.ENTITY_NOT_FOUND, path))
        return found[0]

    def _total(self, address: Address) -> int | None:
        """Return the number of messages in a queue or sub-queue, None if unknown."""
        hosts = self._hosts if address.is_partitioned else [self._hosts[address.partition_id]]
        found = [host.counts(address.entity_no) for host in hosts]
        known = [counts for counts in found if counts is not None]
        if len(known) < len(hosts):
            return None
        return sum(count_in(counts, address.sub_queue) for counts in known)

    def _walk(
        self,
        address: Address,
        from_number: int,
        session_id: str | None,
        state: MessageState | None,
    ) -> _Walk:
        key = None if session_id is None else session_id.encode()
        if not address.is_partitioned:
            places: Iterable[int] = (address.partition_id,)
        elif key is None or address.sub_queue is not SubQueue.ACTIVE:
            places = range(max(partition_of_number(from_number), 0), len(self._hosts))
        else:
            home = partition_of_key(key, len(self._hosts))
            places = (home,) if home >= partition_of_number(from_number) else ()
        return _Walk([self._hosts[place] for place in places], address, from_number, key, state)

    async def _handle(
        self,
        partition_id: int,
        numbers: list[int],
        work: _HandledNumbers,
        command: Callable[[list[int]], DeleteBySequence | ResendBySequence],
    ) -> None:
        """Handle numbers in a partition, in as many commits as their size needs."""
        if not 0 <= partition_id < len(self._hosts):
            work.refused.update(dict.fromkeys(numbers, ABSENT))
            return
        host = self._hosts[partition_id]
        while numbers:
            refused = away(host)
            reply = await host.call(command(numbers)) if refused is None else refused
            if isinstance(reply, Refused):
                if reply.refusal is Refusal.UNKNOWN:
                    reply = Refused(Refusal.UNKNOWN, IN_DOUBT)
                work.refused.update(dict.fromkeys(numbers, reply))
                return
            work.done.update(reply.done)
            work.refused.update(reply.refused)
            numbers = reply.left


class _Walk:
    """An iteration over messages from a number on, through one partition or several."""

    def __init__(
        self,
        hosts: list[Host],
        address: Address,
        number: int,
        session_id: bytes | None,
        state: MessageState | None,
    ) -> None:
        self._hosts = hosts
        self._address = address
        self._session_id = session_id
        self._state = state
        self._bytes = 0
        self.number = number
        self.looked_at = 0
        self.away: list[int] = []

    @property
    def is_end(self) -> bool:
        return not self._hosts

    @property
    def goes_on(self) -> bool:
        """Return whether there may be more messages and this call may examine more."""
        is_short = self.looked_at < LOOKED_AT and self._bytes < LOOKED_AT_BYTES
        return is_short and bool(self._hosts)

    async def next_page(self, limit: int) -> list[PeekedMessage]:
        """Return the next messages; none at the end. The caller calls `looked` for each."""
        while self._hosts:
            host = self._hosts[0]
            first = self.number
            if self._address.is_partitioned:
                first = max(first, host.partition_id << NUMBER_BITS)
            command = Peek(
                self._address.entity_no,
                self._address.sub_queue,
                first,
                min(limit, LOOKED_AT - self.looked_at),
                PAGE_BYTES,
                self._session_id,
                self._state,
            )
            refused = away(host)
            reply = await host.call(command) if refused is None else refused
            if isinstance(reply, Refused):
                if not self._address.is_partitioned or (
                    reply.refusal not in (*ELSEWHERE, Refusal.UNKNOWN)
                ):
                    raise OperationRefused(reply)
                self.away.append(host.partition_id)
            elif reply.messages:
                return reply.messages
            del self._hosts[0]
        return []

    def looked(self, message: PeekedMessage) -> None:
        """Record that a message was examined."""
        self.number = message.sequence + 1
        self.looked_at += 1
        self._bytes += message.envelope.size_bytes


async def _unhurried(messages: Iterable[PeekedMessage]) -> AsyncIterator[PeekedMessage]:
    """Yield messages one by one, and let other tasks of the event loop run in between."""
    read_bytes = 0
    for message in messages:
        yield message
        read_bytes += message.envelope.size_bytes
        if read_bytes >= PAUSE_BYTES:
            read_bytes = 0
            await asyncio.sleep(0)


def _filter_of(
    where: str | None, session_id: str | None, body_contains: str | None = None
) -> MessageFilter:
    try:
        return MessageFilter(where, session_id, body_contains)
    except RuleError as error:
        raise _refused(Refusal.ARGUMENT_OUT_OF_RANGE, str(error)) from error


def _walked(
    walk: _Walk, filtered: MessageFilter
) -> tuple[int, bool, int, int, tuple[int, ...], tuple[str, ...]]:
    """Return the fields of `Walked`. If no message was examined, nothing is absent."""
    absent = tuple(sorted(filtered.absent)) if walk.looked_at else ()
    return walk.number, walk.is_end, walk.looked_at, filtered.failed, tuple(walk.away), absent


def _parts(address: Address, numbers: Numbers) -> dict[int, list[int]]:
    """Return partition -> its numbers, in order and each once."""
    wanted = list(dict.fromkeys(numbers))
    if address.partition_id != SPREAD:
        return {address.partition_id: wanted} if wanted else {}
    places = split([partition_of_number(number) for number in wanted])
    return {place: [wanted[n] for n in indexes] for place, indexes in places.items()}


def _limit(numbers: Numbers) -> None:
    if len(numbers) > MAX_SEQUENCE_NUMBERS:
        raise OperationRefused(TOO_MANY)


def _check_edit(edit: MessageEdit) -> None:
    unknown = sorted(edit.fields.keys() - EDITABLE.keys())
    if unknown:
        names = ", ".join(EDITABLE)
        text = f"{unknown[0]!r} cannot be edited; these can: {names}"
        raise _refused(Refusal.ARGUMENT_OUT_OF_RANGE, text)


def _default_ttl_ms(address: Address) -> int | None:
    ttl_ms = address.properties.default_message_ttl_ms
    return None if ttl_ms >= MAX_DURATION_MS else ttl_ms


def _refused(refusal: Refusal, detail: str) -> OperationRefused:
    return OperationRefused(Refused(refusal, detail))
