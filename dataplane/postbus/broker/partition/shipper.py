"""Delivery of messages that leave a partition: forwards, dead-letter forwards, send-via.

The outbox of the partition emits messages by target (`Ship`) and keeps them until they arrived or
were permanently refused (`Shipped`). The shipper sends them to the partition that stores them and
retries while that is unavailable: the target remembers the last number of each source, so that a
repeated message is stored once. Nothing here is durable; a reload of the partition drops it, and
the outbox starts again.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from postbus.broker.backoff import Backoff
from postbus.broker.placement import key_of, partition_of_key, split
from postbus.entity.commands import (
    Arrive,
    Arrived,
    Refusal,
    Refused,
    Shipped,
    StoredRow,
)
from postbus.entity.expects import Expects, R
from postbus.entity.outcomes import Ship
from postbus.message.envelope import Envelope
from postbus.store.errors import StoreError

logger = logging.getLogger(__name__)

REPEATABLE: Final = frozenset(
    {Refusal.NOT_APPLIED, Refusal.UNKNOWN, Refusal.BUSY, Refusal.STORE_FULL}
)
"""Temporary refusals: the message is retried until it arrives."""

TARGET_NOT_FOUND: Final = Refused(Refusal.ENTITY_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class ForwardDestination:
    """An entity that messages are forwarded to; a partitioned one has no home partition."""

    entity_no: int
    home_partition: int
    is_partitioned: bool
    detects_duplicates: bool

    def partition_of(self, number: int, envelope: Envelope, count: int) -> int:
        """Return where a message arrives, of `count` partitions; a repeat goes there again."""
        if not self.is_partitioned:
            return self.home_partition
        key = key_of(envelope, detects_duplicates=self.detects_duplicates)
        return number % count if key is None else partition_of_key(key, count)


class Source(Protocol):
    """The host that owns the outbox."""

    partition_id: int

    async def call(self, command: Expects[R]) -> R | Refused: ...

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]: ...

    async def read_rows(self, row_keys: list[int]) -> list[StoredRow]: ...


class Destination(Protocol):
    """A host that accepts messages for its partition."""

    async def call(self, command: Expects[R]) -> R | Refused: ...


class Shipper:
    """The shipper of one partition. Targets do not wait for each other."""

    def __init__(
        self,
        source: Source,
        destinations: Sequence[Destination],
        find_target: Callable[[str], ForwardDestination | None],
        find_retained: Callable[[str], Sequence[ForwardDestination]],
    ) -> None:
        """`destinations` are the hosts of all partitions, in order.

        `find_target` and `find_retained` take names in any case; the latter finds deleted entities
        of a name that can be restored.
        """
        self._source = source
        self._destinations = destinations
        self._find_target = find_target
        self._find_retained = find_retained
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[
            int, set[int]
        ] = {}  # retained entity -> partitions that have no more messages of ours

    def ship(self, effect: Ship) -> None:
        """Send messages, retrying without limit, then notify the outbox."""
        task = self._source.start(_Shipment(self, effect).run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop(self) -> None:
        """Drop shipments in progress: the outbox starts again when it is loaded."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._asked.clear()

    # --- for shipments --------------------------------------------------------------------------

    def find_target(self, name: str) -> ForwardDestination | None:
        return self._find_target(name)

    def find_retained(self, name: str) -> Sequence[ForwardDestination]:
        return self._find_retained(name)

    def asked(self, target: ForwardDestination) -> Collection[int]:
        """Return the partitions of a retained entity that need no further query."""
        return self._asked.get(target.entity_no, ())

    def note_asked(self, target: ForwardDestination, partition_id: int) -> None:
        self._asked.setdefault(target.entity_no, set()).add(partition_id)

    def forget_asked(self, target: ForwardDestination) -> None:
        """Reset the queries of an entity that accepts messages again."""
        self._asked.pop(target.entity_no, None)

    def place(self, target: ForwardDestination, number: int, envelope: Envelope) -> int:
        """Return the partition where a message arrives."""
        return target.partition_of(number, envelope, len(self._destinations))

    async def arrive(
        self,
        partition_id: int,
        target: ForwardDestination,
        numbers: list[int],
        messages: list[Envelope],
        resent: frozenset[int],
    ) -> Arrived | Refused:
        source = self._source.partition_id
        command = Arrive(source, target.entity_no, numbers, messages, resent)
        return await self._destinations[partition_id].call(command)

    async def read(self, row_keys: list[int]) -> dict[int, Envelope]:
        """Return row key -> message; retried until the store answers."""
        backoff = Backoff()
        while True:
            try:
                rows = await self._source.read_rows(row_keys)
                return {row.row_key: row.envelope for row in rows}
            except StoreError as error:
                logger.warning(
                    "the outbox could not be read",
                    extra={"partition": self._source.partition_id, "error": str(error)},
                )
            await backoff.pause()

    async def notify(self, shipped: Shipped) -> None:
        """Notify the outbox, which waits for this; retried while it cannot read what it needs."""
        backoff = Backoff()
        while isinstance(await self._source.call(shipped), Refused):
            await backoff.pause()

    def log_trouble(self, ship: Ship) -> None:
        logger.exception(
            "a shipment failed and is restarted",
            extra={"partition": self._source.partition_id, "target": ship.target},
        )


class _Shipment:
    """The messages of one `Ship` in transit.

    In each partition numbers are stored in rising order. After a refused number nothing more is
    sent there: if the source lost the refusal in a crash, the target would skip that number. Later
    messages stay undecided and are offered again once the refusal is durable.

    A deleted entity that can be restored is queried first: it may have stored a message whose
    answer was lost, perhaps with a former process. It accepts nothing any more, but it knows.
    Numbers rise, so the first one that it has not stored ends the queries, in each partition.
    """

    def __init__(self, shipper: Shipper, ship: Ship) -> None:
        self._shipper = shipper
        self._ship = ship
        self._arrived: set[int] = set()
        self._refused: dict[int, Refused] = {}
        self._held_back: set[int] = set()

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._send_all(await self._load())
                break
            except Exception:  # noqa: BLE001 - logged; a supervised boundary, the outbox waits
                self._shipper.log_trouble(self._ship)
            await backoff.pause()
        arrived = [number for number in self._ship.numbers if number in self._arrived]
        await self._shipper.notify(Shipped(self._ship.target, arrived, self._refused))

    async def _load(self) -> dict[int, Envelope]:
        """Return number -> copy to send, for all undecided messages."""
        ship = self._ship
        found = dict(zip(ship.numbers, ship.envelopes, strict=True))
        absent = [number for number, envelope in found.items() if envelope is None]
        rows = await self._shipper.read(absent) if absent else {}
        messages: dict[int, Envelope] = {}
        for number, source in zip(ship.numbers, ship.sources, strict=True):
            envelope = found[number] or rows.get(number)
            if number in self._arrived or number in self._refused or number in self._held_back:
                continue
            if envelope is None:
                logger.error("a row of the outbox is missing", extra={"row_key": number})
                self._arrived.add(number)
                continue
            message = copy.copy(envelope)  # the outbox may have to emit it again
            if number not in ship.resent:  # a resend counts no hop
                message.hop_count += 1
            if source is not None:
                message.dead_letter_source = source
            messages[number] = message
        return messages

    async def _send_all(self, messages: dict[int, Envelope]) -> None:
        """Send until every message has arrived or is permanently refused."""
        backoff = Backoff()
        while messages:
            target, places = self._to_ask(messages)
            send = self._ask_part
            if target is None:
                target, send = self._shipper.find_target(self._ship.target), self._send_part
                if target is None:
                    self._refused.update(dict.fromkeys(messages, TARGET_NOT_FOUND))
                    return
                places = self._places(target, messages)
                self._shipper.forget_asked(target)
            moved = await asyncio.gather(
                *(send(place, target, numbers, messages) for place, numbers in places.items())
            )
            if not any(moved):
                await backoff.pause()
            else:
                backoff.reset()

    def _to_ask(
        self, messages: dict[int, Envelope]
    ) -> tuple[ForwardDestination | None, dict[int, list[int]]]:
        """Return a retained entity that has unanswered queries, and the numbers by partition."""
        for target in self._shipper.find_retained(self._ship.target):
            places = self._places(target, messages)
            for partition_id in self._shipper.asked(target):
                places.pop(partition_id, None)
            if places:
                return target, places
        return None, {}

    def _places(
        self, target: ForwardDestination, messages: dict[int, Envelope]
    ) -> dict[int, list[int]]:
        """Return partition -> its numbers, in order."""
        numbers = list(messages)
        places = split([self._shipper.place(target, n, messages[n]) for n in numbers])
        return {place: [numbers[index] for index in part] for place, part in places.items()}

    async def _send_part(
        self,
        partition_id: int,
        target: ForwardDestination,
        numbers: list[int],
        messages: dict[int, Envelope],
    ) -> bool:
        """Send to one partition and remove decided messages. False: none was decided."""
        count, refused, concerned = await self._deliver(partition_id, target, numbers, messages)
        if refused is None:
            return count > 0
        if refused.refusal in REPEATABLE:
            return count > 0
        known = self._shipper.find_target(self._ship.target)
        is_gone = known is None or known.entity_no != target.entity_no  # deleted, perhaps retained
        if is_gone or refused.refusal is Refusal.ENTITY_NOT_FOUND:
            return count > 0  # the catalog has changed: look it up again
        for number in numbers[count : count + concerned]:
            del messages[number]
            self._refused[number] = refused
        for number in numbers[count + concerned :]:
            del messages[number]
            self._held_back.add(number)
        return True

    async def _ask_part(
        self,
        partition_id: int,
        target: ForwardDestination,
        numbers: list[int],
        messages: dict[int, Envelope],
    ) -> bool:
        """Ask one partition of a retained entity what it stored; remove that from `messages`.

        False: there was no answer.
        """
        _, refused, _ = await self._deliver(partition_id, target, numbers, messages)
        if refused is not None and refused.refusal in REPEATABLE:
            return False
        if refused is not None:
            self._shipper.note_asked(target, partition_id)
        return True

    async def _deliver(
        self,
        partition_id: int,
        target: ForwardDestination,
        numbers: list[int],
        messages: dict[int, Envelope],
    ) -> tuple[int, Refused | None, int]:
        """Send, and remove arrived messages from `messages`; return their number, and the refusal.

        The last value is the number of messages after the arrived ones that the refusal concerns.
        """
        # A copy each time: a target may modify a message before it fails.
        copies = [copy.copy(messages[number]) for number in numbers]
        resent = self._ship.resent.intersection(numbers)
        reply = await self._shipper.arrive(partition_id, target, numbers, copies, resent)
        if isinstance(reply, Arrived):
            count, refused, concerned = reply.count, reply.refused, 1  # stopped before this one
        else:
            count, refused, concerned = 0, reply, len(numbers)  # nothing is stored
        for number in numbers[:count]:
            del messages[number]
            self._arrived.add(number)
        return count, refused, concerned
