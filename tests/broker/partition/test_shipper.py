"""Shipments of a partition: destinations, retries, and reports to the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest

from postbus.broker.partition.shipper import ForwardDestination, Shipper
from postbus.broker.placement import partition_of_key
from postbus.entity.commands import (
    Arrive,
    Arrived,
    Command,
    Done,
    Refusal,
    Refused,
    Reply,
    Shipped,
    StoredRow,
)
from postbus.entity.outcomes import Ship
from postbus.message.envelope import Envelope
from postbus.store.errors import StoreUnavailable
from tests.broker.partition.test_host import until
from tests.broker.partition_rig import message

BUSY = Refused(Refusal.BUSY)
AWAY = Refused(Refusal.NOT_APPLIED)
LOST = Refused(Refusal.UNKNOWN)
STORE_FULL = Refused(Refusal.STORE_FULL)
FULL = Refused(Refusal.QUOTA_EXCEEDED)
GONE = Refused(Refusal.ENTITY_NOT_FOUND)


class Source:
    """A partition with an outbox: rows to read, and reported results."""

    partition_id = 5

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.reported: list[Shipped] = []
        self.rows: dict[int, Envelope] = {}
        self.failures: list[Exception] = []
        self.answers: list[Reply] = []
        self._tasks = tasks

    async def call(self, command: Command) -> Reply:
        assert isinstance(command, Shipped)
        self.reported.append(command)
        return self.answers.pop(0) if self.answers else Done()

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    async def read_rows(self, row_keys: list[int]) -> list[StoredRow]:
        if self.failures:
            raise self.failures.pop(0)
        return [
            StoredRow(key, 0, None, 0, False, self.rows[key])
            for key in sorted(row_keys)
            if key in self.rows
        ]


class Destination:
    """A partition that gives the configured answers, then accepts everything."""

    def __init__(self) -> None:
        self.answers: list[Reply] = []
        self.arrived: list[Arrive] = []
        self.opened = asyncio.Event()
        self.opened.set()

    async def call(self, command: Command) -> Reply:
        assert isinstance(command, Arrive)
        self.arrived.append(command)
        await self.opened.wait()
        return self.answers.pop(0) if self.answers else Arrived(len(command.numbers))

    @property
    def numbers(self) -> list[list[int]]:
        return [each.numbers for each in self.arrived]


class Port:
    """A shipper with four partitions around it; the catalog is a dict."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.source = Source(tasks)
        self.destinations = [Destination() for _ in range(4)]
        self.catalog: dict[str, ForwardDestination] = {
            "plain": ForwardDestination(7, 2, is_partitioned=False, detects_duplicates=False),
            "spread": ForwardDestination(8, 0, is_partitioned=True, detects_duplicates=False),
            "detecting": ForwardDestination(9, 0, is_partitioned=True, detects_duplicates=True),
        }
        self.retained: list[ForwardDestination] = []
        self.shipper = Shipper(
            self.source, self.destinations, self.catalog.get, lambda name: self.retained
        )

    async def ship(self, target: str, messages: dict[int, Envelope | None]) -> Shipped:
        """Ship and return the report to the outbox."""
        count = len(self.source.reported)
        self.begin(target, messages)
        await until(lambda: len(self.source.reported) > count)
        return self.source.reported[count]

    def begin(self, target: str, messages: dict[int, Envelope | None]) -> None:
        self.shipper.ship(
            Ship(target, list(messages), list(messages.values()), [None] * len(messages))
        )


@asynccontextmanager
async def port() -> AsyncIterator[Port]:
    async with asyncio.TaskGroup() as tasks:
        made = Port(tasks)
        yield made
        made.shipper.drop()


def several(*numbers: int, make: Callable[[], Envelope] = message) -> dict[int, Envelope | None]:
    return {number: make() for number in numbers}


async def test_arrivals_are_reported() -> None:
    async with port() as at:
        reported = await at.ship("plain", several(3, 5, 9))
        assert reported == Shipped("plain", [3, 5, 9], {})
        (arrive,) = at.destinations[2].arrived
        assert (arrive.source_partition, arrive.entity_no, arrive.numbers) == (5, 7, [3, 5, 9])


async def test_a_shipped_copy_records_its_hops() -> None:
    async with port() as at:
        first, second = message("a"), message("b")
        second.hop_count = 2
        at.source.rows[2] = second
        sources = [b"orders", None]
        at.shipper.ship(Ship("plain", [1, 2], [first, None], sources))
        await until(lambda: len(at.source.reported) == 1)
        sent = at.destinations[2].arrived[0].messages
        assert [each.hop_count for each in sent] == [1, 3]
        assert [each.dead_letter_source for each in sent] == [b"orders", None]
        assert [each.body for each in sent] == [b"a", b"b"]
        assert (first.hop_count, first.dead_letter_source) == (0, None)


@pytest.mark.parametrize("again", [BUSY, AWAY, LOST, STORE_FULL])
async def test_refusals_unrelated_to_the_message_are_retried(again: Refused) -> None:
    async with port() as at:
        at.destinations[2].answers = [again, Arrived(1, again), again]
        reported = await at.ship("plain", several(1, 2, 3))
        assert reported == Shipped("plain", [1, 2, 3], {})
        assert at.destinations[2].numbers == [[1, 2, 3], [1, 2, 3], [2, 3], [2, 3]]


async def test_no_message_is_shipped_behind_a_refused_one() -> None:
    """If the refusal were forgotten in a crash, the target would skip that number."""
    async with port() as at:
        at.destinations[2].answers = [Arrived(1, FULL)]
        reported = await at.ship("plain", several(1, 2, 3))
        assert reported == Shipped("plain", [1], {2: FULL})
        assert at.destinations[2].numbers == [[1, 2, 3]]
        reported = await at.ship("plain", several(3))
        assert reported == Shipped("plain", [3], {})


async def test_a_disabled_entity_refuses_all_shipped_messages() -> None:
    async with port() as at:
        disabled = Refused(Refusal.ENTITY_DISABLED, "plain")
        at.destinations[2].answers = [disabled]
        reported = await at.ship("plain", several(1, 2))
        assert reported == Shipped("plain", [], {1: disabled, 2: disabled})


@pytest.mark.behaviour("S289")
async def test_an_unknown_name_is_refused() -> None:
    async with port() as at:
        reported = await at.ship("nobody", several(1, 2))
        assert reported.arrived == []
        assert [each.refusal for each in reported.refused.values()] == [
            Refusal.ENTITY_NOT_FOUND
        ] * 2


async def test_a_name_is_looked_up_at_each_attempt() -> None:
    """Deleted and created again: the new entity gets it; deleted for good: refused."""
    async with port() as at:
        at.destinations[2].opened.clear()
        at.begin("plain", several(1))
        await until(lambda: len(at.destinations[2].arrived) == 1)
        at.destinations[2].answers = [GONE, GONE]
        at.catalog["plain"] = ForwardDestination(
            70, 3, is_partitioned=False, detects_duplicates=False
        )
        at.destinations[2].opened.set()
        await until(lambda: len(at.source.reported) == 1)
        assert at.source.reported == [Shipped("plain", [1], {})]
        assert [each.entity_no for each in at.destinations[3].arrived] == [70]
        at.destinations[3].opened.clear()
        at.destinations[3].answers = [GONE]
        at.begin("plain", several(2))
        await until(lambda: len(at.destinations[3].arrived) == 2)
        del at.catalog["plain"]
        at.destinations[3].opened.set()
        await until(lambda: len(at.source.reported) == 2)
        assert at.source.reported[1].refused == {2: GONE}


@pytest.mark.behaviour("S205", "S238")
async def test_messages_refused_by_a_deleted_entity_go_to_its_namesake() -> None:
    async with port() as at:
        at.destinations[2].opened.clear()
        at.destinations[2].answers = [Arrived(0, Refused(Refusal.ENTITY_DISABLED))]
        at.begin("plain", several(1, 2))
        await until(lambda: len(at.destinations[2].arrived) == 1)
        at.catalog["plain"] = ForwardDestination(
            12, 3, is_partitioned=False, detects_duplicates=False
        )
        at.destinations[2].opened.set()
        await until(lambda: len(at.source.reported) == 1)
        assert at.source.reported == [Shipped("plain", [1, 2], {})]
        assert [(each.entity_no, each.numbers) for each in at.destinations[3].arrived] == [
            (12, [1, 2])
        ]


@pytest.mark.behaviour("S205")
@pytest.mark.parametrize("has_namesake", [True, False])
async def test_a_retained_entity_is_asked_for_its_last_number(has_namesake: bool) -> None:
    async with port() as at:
        at.retained = [ForwardDestination(70, 3, is_partitioned=False, detects_duplicates=False)]
        if not has_namesake:
            del at.catalog["plain"]
        at.destinations[3].answers = [AWAY, LOST, Arrived(1, Refused(Refusal.ENTITY_DISABLED))]
        reported = await at.ship("plain", several(1, 2, 3))
        assert at.destinations[3].numbers == [[1, 2, 3]] * 3
        assert {each.entity_no for each in at.destinations[3].arrived} == {70}
        if has_namesake:
            assert reported == Shipped("plain", [1, 2, 3], {})
            assert at.destinations[2].numbers == [[2, 3]]
        else:
            assert reported.arrived == [1]
            assert {n: each.refusal for n, each in reported.refused.items()} == {
                2: Refusal.ENTITY_NOT_FOUND,
                3: Refusal.ENTITY_NOT_FOUND,
            }


async def test_a_retained_entity_is_not_asked_about_later_messages() -> None:
    """A name that is reused leaves many entities; each gets one request in each partition."""
    async with port() as at:
        no_more = Arrived(0, Refused(Refusal.ENTITY_DISABLED))
        at.retained = [
            ForwardDestination(70, 3, is_partitioned=False, detects_duplicates=False),
            ForwardDestination(71, 0, is_partitioned=True, detects_duplicates=False),
        ]
        at.destinations[3].answers = [no_more]
        at.destinations[1].answers = [no_more, no_more]
        assert await at.ship("plain", several(1)) == Shipped("plain", [1], {})
        assert [(each.entity_no, each.numbers) for each in at.destinations[1].arrived] == [
            (71, [1])
        ]
        assert await at.ship("plain", several(5)) == Shipped("plain", [5], {})
        assert len(at.destinations[1].arrived) == 1
        at.destinations[0].answers = [Arrived(1)]  # the answer to 8 was lost
        assert await at.ship("plain", several(8)) == Shipped("plain", [8], {})
        assert [(each.entity_no, each.numbers) for each in at.destinations[0].arrived] == [
            (71, [8])
        ]
        assert at.destinations[2].numbers == [[1], [5]]
        assert at.destinations[3].numbers == [[1]]


async def test_an_entity_that_comes_back_and_goes_again_is_asked_again() -> None:
    async with port() as at:
        back = ForwardDestination(70, 3, is_partitioned=False, detects_duplicates=False)
        at.retained = [back]
        del at.catalog["plain"]
        at.destinations[3].opened.clear()
        at.destinations[3].answers = [
            Arrived(0, Refused(Refusal.ENTITY_DISABLED)),  # retained
            LOST,  # restored: it stored it, and the answer was lost
            Arrived(1),  # retained again
        ]
        at.begin("plain", several(1))
        await until(lambda: len(at.destinations[3].arrived) == 1)
        at.retained, at.catalog["plain"] = [], back
        at.destinations[3].opened.set()
        await until(lambda: len(at.destinations[3].arrived) == 2)
        at.retained = [back]
        del at.catalog["plain"]
        await until(lambda: len(at.source.reported) == 1)
        assert at.source.reported == [Shipped("plain", [1], {})]


async def test_the_key_selects_the_partition_of_a_partitioned_entity() -> None:
    async with port() as at:
        messages: dict[int, Envelope | None] = {
            10: message(session="s"),
            11: message(key="k"),
            12: message(message_id="m"),
            13: message(),
            14: message(key="k"),
        }
        reported = await at.ship("spread", messages)
        assert reported == Shipped("spread", [10, 11, 12, 13, 14], {})
        places = {n: p for p in range(4) for part in at.destinations[p].numbers for n in part}
        by_key = {10: b"s", 11: b"k", 14: b"k"}
        assert places == {
            **{number: partition_of_key(key, 4) for number, key in by_key.items()},
            12: 12 % 4,
            13: 13 % 4,
        }
        await at.ship("detecting", {20: message(message_id="m"), 21: message()})
        there = partition_of_key(b"m", 4)
        assert any(
            each.entity_no == 9 and 20 in each.numbers for each in at.destinations[there].arrived
        )


async def test_an_unavailable_partition_gets_its_messages_later_and_delays_no_other_target() -> (
    None
):
    async with port() as at:
        at.destinations[1].answers = [AWAY, LOST, AWAY]
        at.begin("spread", several(*range(8)))
        reported = await at.ship("plain", several(100))
        assert reported == Shipped("plain", [100], {})
        await until(lambda: len(at.source.reported) == 2)
        assert at.source.reported[1] == Shipped("spread", list(range(8)), {})
        assert at.destinations[0].numbers == [[0, 4]]  # once
        assert at.destinations[1].numbers == [[1, 5]] * 4


async def test_rows_are_read_until_the_store_answers() -> None:
    async with port() as at:
        at.source.rows = {1: message("a"), 2: message("b")}
        at.source.failures = [StoreUnavailable("away"), StoreUnavailable("away")]
        reported = await at.ship("plain", {1: None, 2: None, 3: None})
        assert reported == Shipped("plain", [1, 2, 3], {})  # number 3 has no row: it is gone
        assert at.destinations[2].numbers == [[1, 2]]


async def test_a_shipment_that_breaks_begins_again() -> None:
    async with port() as at:
        at.source.rows = {1: message("a")}
        at.source.failures = [RuntimeError("a bug")]
        assert await at.ship("plain", {1: None}) == Shipped("plain", [1], {})


async def test_a_reload_drops_shipments_in_flight() -> None:
    async with port() as at:
        at.destinations[2].opened.clear()
        at.begin("plain", several(1, 2))
        await until(lambda: len(at.destinations[2].arrived) == 1)
        at.shipper.drop()
        at.destinations[2].opened.set()
        assert await at.ship("plain", several(1, 2)) == Shipped("plain", [1, 2], {})
        assert len(at.source.reported) == 1


async def test_an_outbox_that_could_not_read_gets_the_result_again() -> None:
    """Refused messages are dead-lettered with a reason, for which the outbox reads them."""
    async with port() as at:
        at.destinations[2].answers = [Arrived(0, FULL)]
        at.source.answers = [AWAY, AWAY]
        at.begin("plain", several(1))
        await until(lambda: len(at.source.reported) == 3)
        assert at.source.reported == [Shipped("plain", [], {1: FULL})] * 3
        await asyncio.sleep(0)
        assert not at.shipper._tasks


async def test_numbers_written_by_a_failed_target_are_not_sent_again() -> None:
    """A topic numbers each message; a reload of the partition takes the number back."""
    async with port() as at:
        at.destinations[2].answers = [AWAY]
        at.destinations[2].opened.clear()
        at.begin("plain", several(1))
        await until(lambda: len(at.destinations[2].arrived) == 1)
        at.destinations[2].arrived[0].messages[0].origin_sequence = 77
        at.destinations[2].opened.set()
        await until(lambda: len(at.source.reported) == 1)
        assert [each.messages[0].origin_sequence for each in at.destinations[2].arrived] == [
            77,
            None,
        ]
