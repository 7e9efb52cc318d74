"""Operations on messages over real partitions: every message exists exactly once."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from copy import copy
from datetime import timedelta
from typing import TypeVar

import pytest

from postbus.broker.operate.dead_letter_groups import MAX_GROUPS
from postbus.broker.operate.message_operations import (
    LOOKED_AT,
    MAX_SEQUENCE_NUMBERS,
    MessageEdit,
    MessageOperations,
    OperationRefused,
    PeekPage,
)
from postbus.broker.operate.message_view import moment_of
from postbus.contract.entities import (
    RuleProperties,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.entity.commands import (
    AcceptSession,
    Disposition,
    MessageState,
    ReceiveMode,
    Refusal,
    RemoveConsumer,
    SetDemand,
    Settle,
    Settled,
    SubQueue,
)
from postbus.message.codec import encode_list, encode_value
from postbus.message.envelope import Envelope
from postbus.message.patch import merge_properties
from postbus.store.postgres import Store
from tests.broker.partition.test_host import until
from tests.broker.partition.test_shipping import arrived, bodies_of, named, put
from tests.broker.partition_rig import (
    Bus,
    RecordingSink,
    keys_for,
    message,
    running,
    wait_for_too_many,
)
from tests.broker.putting import put_subscription, put_topic

pytestmark = pytest.mark.slow

DEAD = "/$DeadLetterQueue"

T = TypeVar("T")


def numbered(n: int, *, session: str | None = None, key: str | None = None) -> Envelope:
    """Return a message with properties to filter by and its number in the body."""
    sent = message(f"m{n}", session=session, key=key, message_id=f"id{n}")
    fields = [encode_value(f"id{n}"), b"\x40", b"\x40", encode_value(f"subject {n % 3}")]
    sent.properties = b"\x00\x53\x73" + encode_list(fields)
    sent.application_properties = merge_properties(b"", {"n": n, "parity": n % 2})
    return sent


async def kill(bus: Bus, path: str, *, reason: str = "poison") -> None:
    """Dead-letter all messages of a queue without sessions."""
    address = bus.address(path)
    consumer_id, sink = await bus.consume(address)
    limit = 0
    while limit == 0 or sink.deliveries:
        sink.deliveries.clear()
        limit = await bus.drain(address, consumer_id, limit + 500)
        tokens = [each.lock_token for each in sink.deliveries]
        settle = Settle(
            address.entity_no, SubQueue.ACTIVE, tokens, Disposition.DEAD_LETTER, reason, "no price"
        )
        assert await bus.call(address, settle) == Settled()


def message_operations_of(bus: Bus) -> MessageOperations:
    return MessageOperations(bus.router, bus.hosts)


async def all_of(
    message_operations: MessageOperations, path: str, where: str | None = None
) -> list[PeekPage]:
    """Peek to the end; return the pages."""
    pages: list[PeekPage] = []
    while not pages or not pages[-1].is_end:
        first = pages[-1].next_number if pages else 0
        pages.append(await message_operations.peek(path, from_number=first, where=where))
    return pages


def numbers_of(pages: list[PeekPage]) -> list[int]:
    return [each.sequence_number for page in pages for each in page.messages]


@pytest.mark.parametrize("is_spread", [False, True])
async def test_dead_letters_are_peeked_with_a_filter_deleted_and_sent_again(
    store: Store, is_spread: bool
) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=is_spread)
        address = bus.address("q")
        await bus.sent(address, *(numbered(n) for n in range(300)))
        await kill(bus, "q")
        pages = await all_of(
            message_operations, "q" + DEAD, "parity = 1 AND DeadLetterReason LIKE 'poi%'"
        )
        odd = numbers_of(pages)
        assert len(odd) == 150
        assert sum(page.looked_at for page in pages) == 300
        assert odd == sorted(odd)
        view = pages[0].messages[0]
        assert view.message_id is not None
        assert view.dead_letter_reason == "poison"
        assert view.dead_letter_description == "no price"
        assert (view.delivery_count, view.state) == (0, "active")
        assert view.application_properties["parity"] == 1
        assert view.body_base64 is None
        gone = await message_operations.delete("q" + DEAD, odd[:10])
        assert list(gone.numbers) == odd[:10]
        sent = await message_operations.resend("q" + DEAD, odd)
        assert set(sent.resent) == set(odd[10:])
        assert {each.refusal for each in sent.refused.values()} == {Refusal.MESSAGE_NOT_FOUND}
        assert not sent.forwarded
        found = await bus.peek_all(address)
        assert {each.sequence for each in found} == set(sent.resent.values())
        for host in bus.hosts:
            host.interrupt(0.01)
        await until(lambda: all(host.is_loaded for host in bus.hosts if host.reload_count))
        assert len(await bus.peek_all(address)) == 140
        assert len(numbers_of(await all_of(message_operations, "q" + DEAD))) == 150


@pytest.mark.parametrize("is_spread", [False, True])
async def test_dead_letters_are_summarized_page_by_page(store: Store, is_spread: bool) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=is_spread)
        address = bus.address("q")
        await bus.sent(address, *(numbered(n) for n in range(1_100)))
        await kill(bus, "q", reason="often")
        for number in range(MAX_GROUPS + 5):
            await bus.sent(address, numbered(number))
            await kill(bus, "q", reason=f"reason {number}")
        counts: Counter[str | None] = Counter()
        pages = 0
        first, is_end = 0, False
        while not is_end:
            page = await message_operations.summarize("q" + DEAD, from_number=first)
            assert len(page.groups) <= MAX_GROUPS
            assert page.looked_at <= LOOKED_AT
            assert page.total == 1_100 + MAX_GROUPS + 5
            assert sum(each.count for each in page.groups) == page.looked_at
            counts.update({each.reason: each.count for each in page.groups})
            first, is_end = page.next_number, page.is_end
            pages += 1
        assert pages > 1
        assert counts.pop("often") == 1_100
        assert counts == Counter({f"reason {number}": 1 for number in range(MAX_GROUPS + 5)})
        some = await message_operations.summarize(
            "q" + DEAD, where="DeadLetterReason = 'reason 7' AND x = 1"
        )
        assert (some.groups, some.absent) == ((), ("x",))
        with pytest.raises(OperationRefused, match="only dead letters"):
            await message_operations.summarize("q")


async def test_peeked_messages_are_complete_and_unchanged(store: Store) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", default_message_ttl_ms=3_600_000)
        address = bus.address("q")
        sent = numbered(7, key="k")
        sent.body = b"\x00\x53\x75\xa0\x05hello"
        due_ms = int(time.time() * 1000) + 60_000
        late = message("late", scheduled_ms=due_ms)
        await bus.sent(address, sent, late)
        (view,) = (
            await message_operations.peek("q", body_bytes=3, state=MessageState.ACTIVE)
        ).messages
        assert (view.body_base64, view.body_bytes, view.body_kind) == ("aGVs", 5, "data")
        assert (view.message_id, view.subject, view.partition_key) == ("id7", "subject 1", "k")
        assert view.expires_at == view.enqueued_at + timedelta(hours=1)
        assert view.size_in_bytes >= 100
        (waits,) = (await message_operations.peek("q", state=MessageState.SCHEDULED)).messages
        assert (waits.state, waits.scheduled_at) == ("scheduled", moment_of(due_ms))
        _, sink = await bus.consume(address, 1)
        await until(lambda: len(sink.deliveries) == 1)
        assert sink.deliveries[0].delivery_count == 0
        result = await message_operations.delete(
            "q", [view.sequence_number, waits.sequence_number, 99]
        )
        assert result.numbers == (waits.sequence_number,)
        assert {n: each.refusal for n, each in result.refused.items()} == {
            view.sequence_number: Refusal.MESSAGE_LOCKED,
            99: Refusal.MESSAGE_NOT_FOUND,
        }


@pytest.mark.parametrize("is_spread", [False, True])
async def test_a_purge_counts_first_and_deletes_in_parts(store: Store, is_spread: bool) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=is_spread)
        address = bus.address("q")
        keys = keys_for(4)
        await bus.sent(address, *(numbered(n, key=keys[n % 4]) for n in range(600)))
        matched = deleted = first = 0
        for dry_run in (True, False):
            is_end, first = False, 0
            while not is_end:
                page = await message_operations.purge(
                    "q", where="n % 3 = 0", from_number=first, count=400, dry_run=dry_run
                )
                assert page.looked_at <= 400
                matched += page.matched
                deleted += page.deleted
                first, is_end = page.next_number, page.is_end
            assert deleted == (0 if dry_run else 200)
        assert matched == 400
        rest = [each.envelope.body.decode() for each in await bus.peek_all(address)]
        assert sorted(rest) == sorted(f"m{n}" for n in range(600) if n % 3)


async def test_an_unavailable_partition_is_named(store: Store) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=True)
        keys = keys_for(4)
        numbers = await bus.sent(bus.address("q"), *(numbered(n, key=keys[n]) for n in range(4)))
        bus.hosts[1].interrupt(30)
        await until(lambda: bus.hosts[1].trouble is not None)
        page = await message_operations.peek("q")
        assert page.away == (1,)
        assert len(page.messages) == 3
        result = await message_operations.delete("q", [*numbers, 77 << 48])
        assert len(result.numbers) == 3
        assert {each.refusal for each in result.refused.values()} == {
            Refusal.NOT_APPLIED,
            Refusal.MESSAGE_NOT_FOUND,
        }


async def test_invalid_operations_are_refused_as_a_whole(store: Store) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q")
        await put(bus, "closed", status="Disabled")
        await put(bus, "deaf", status="SendDisabled")
        attempts = [
            (message_operations.peek("none"), Refusal.ENTITY_NOT_FOUND),
            (message_operations.peek("q", where="n ="), Refusal.ARGUMENT_OUT_OF_RANGE),
            (message_operations.purge("q", where="((("), Refusal.ARGUMENT_OUT_OF_RANGE),
            (
                message_operations.purge("q", where="n = 1 OR sys.Colour = 'red'"),
                Refusal.ARGUMENT_OUT_OF_RANGE,
            ),
            (message_operations.peek("closed"), Refusal.ENTITY_DISABLED),
            (
                message_operations.delete("q", range(MAX_SEQUENCE_NUMBERS + 1)),
                Refusal.ARGUMENT_OUT_OF_RANGE,
            ),
            (message_operations.resend("q", [1]), Refusal.NOT_ALLOWED),
            (message_operations.resend("q" + DEAD, [1], to="none"), Refusal.ENTITY_NOT_FOUND),
            (message_operations.resend("q" + DEAD, [1], to="deaf"), Refusal.SEND_DISABLED),
            (message_operations.resend("q" + DEAD, [1], to="deaf" + DEAD), Refusal.NOT_ALLOWED),
            (
                message_operations.resend(
                    "q" + DEAD, [1], edit=MessageEdit(fields={"colour": "red"})
                ),
                Refusal.ARGUMENT_OUT_OF_RANGE,
            ),
        ]
        for attempt, refusal in attempts:
            with pytest.raises(OperationRefused) as caught:
                await attempt
            assert caught.value.refused.refusal is refusal
            assert caught.value.refused.detail


@pytest.mark.parametrize("away", [None, 0, 1])
async def test_messages_resent_to_another_partition_arrive_once(
    store: Store, away: int | None
) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        source, target = named(0), named(1)
        await put(bus, source)
        await put(bus, target, requires_duplicate_detection=True)
        there = bus.address(target)
        await bus.sent(there, *(numbered(n) for n in range(60)))
        await bus.sent(bus.address(source), *(numbered(n) for n in range(120)))
        await kill(bus, source)
        numbers = numbers_of(await all_of(message_operations, source + DEAD))
        if away == 1:
            bus.hosts[1].interrupt(0.5)
        result = await message_operations.resend(source + DEAD, numbers, to=target.upper())
        assert list(result.forwarded) == numbers
        assert not result.resent
        assert not result.refused
        if away == 0:
            bus.hosts[0].interrupt(0.05)
        await until(lambda: bus.hosts[1].is_loaded)
        found = await arrived(bus, target, 180)
        assert Counter(found) == Counter(
            [f"m{n}" for n in range(60)] + [f"m{n}" for n in range(120)]
        )
        assert await bodies_of(bus, source + DEAD) == []


async def test_the_keys_of_an_edit_choose_the_partition(store: Store) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=True, requires_session=True)
        address = bus.address("q")
        first, second = keys_for(2)
        await bus.sent(address, *(message(f"m{n}", session=first) for n in range(4)))
        for n in range(3):
            await bus.sent(address, message(f"none{n}", session=first))
        numbers = numbers_of([await message_operations.peek("q")])
        assert len(numbers) == 7
        consumer = bus.router.new_consumer_id()
        await dead_letter_session(bus, "q", first, consumer)
        dead = numbers_of([await message_operations.peek("q" + DEAD)])
        assert len(dead) == 7
        stays = await message_operations.resend("q" + DEAD, dead[:3])
        assert len(stays.resent) == 3
        moves = await message_operations.resend(
            "q" + DEAD, dead[3:], edit=MessageEdit(fields={"session_id": second})
        )
        assert list(moves.forwarded) == dead[3:]
        await arrived(bus, "q", 7)
        places = Counter(
            (each.envelope.session_id, each.sequence >> 48)
            for each in await bus.peek_all(bus.address("q"))
        )
        assert places == {(first.encode(), 0): 3, (second.encode(), 1): 4}


async def dead_letter_session(bus: Bus, path: str, session: str, consumer_id: int) -> None:
    address, sink = bus.address(path), RecordingSink()
    bus.router.register_sink(address.partition_id, consumer_id, sink)
    await bus.call(
        address,
        AcceptSession(address.entity_no, consumer_id, ReceiveMode.PEEK_LOCK, session.encode()),
    )
    await until(lambda: len(sink.sessions) == 1)
    await bus.call(address, SetDemand(consumer_id, 100, is_drain=True))
    tokens = [each.lock_token for each in sink.deliveries]
    settle = Settle(address.entity_no, SubQueue.ACTIVE, tokens, Disposition.DEAD_LETTER, "poison")
    settle.session_id = session.encode()
    assert await bus.call(address, settle) == Settled()
    await bus.call(address, RemoveConsumer(consumer_id))


@pytest.mark.parametrize("to", [None, 1])
async def test_reloads_at_any_moment_leave_one_of_each(store: Store, to: int | None) -> None:
    """Repeat until nothing is left, despite refusals: an answer may be lost, a message not."""
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        source = named(0)
        target = source if to is None else named(to)
        await put(bus, source)
        if target != source:
            await put(bus, target, requires_duplicate_detection=True)
        await bus.sent(bus.address(source), *(numbered(n) for n in range(300)))
        await kill(bus, source)
        chooser = random.Random(7)
        left = numbers_of(await all_of(message_operations, source + DEAD))
        cuts = 6
        while left:
            part = left[: chooser.randint(1, 30)]
            sending = asyncio.create_task(
                message_operations.resend(source + DEAD, part, to=None if to is None else target)
            )
            victim = bus.hosts[chooser.choice([0, 0, to or 0])]
            if cuts and victim.is_loaded:
                cuts -= 1
                for _ in range(chooser.randint(0, 12)):
                    await asyncio.sleep(0)
                victim.interrupt(0.01)
            result = await sending
            gone = {*result.resent, *result.forwarded}
            for number, refused in result.refused.items():
                if refused.refusal is Refusal.MESSAGE_NOT_FOUND:
                    gone.add(number)  # it was sent, and the answer was lost
            left = [number for number in left if number not in gone]
            if not gone:
                await wait_for_too_many(0.01)
        assert sum(host.reload_count for host in bus.hosts) >= 3
        await until(lambda: all(host.trouble is None for host in bus.hosts))
        found = await wait_until_loaded(lambda: arrived(bus, target, 300))
        assert Counter(found) == Counter(f"m{n}" for n in range(300))
        assert await bodies_of(bus, source + DEAD) == []


async def wait_until_loaded(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request while the partition is loading."""
    while True:
        try:
            return await ask()
        except (OperationRefused, AssertionError):
            await asyncio.sleep(0.02)


async def test_filters_read_all_fields_of_a_stored_message(store: Store) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q")
        first, second, _ = await bus.sent(bus.address("q"), *(numbered(n) for n in range(3)))
        for where, expected in (
            (f"sys.SequenceNumber <= {second}", 2),
            (f"sys.EnqueuedSequenceNumber = {first}", 1),
            ("sys.DeliveryCount = 0 AND sys.Label = 'subject 1'", 1),
            ("sys.DeadLetterSource IS NULL", 3),
            ("sys.MessageId IN ('id0', 'id2')", 2),
            ("missing = 1", 0),
        ):
            page = await message_operations.peek("q", where=where)
            assert len(page.messages) == expected, where
            assert (page.looked_at, page.failed, page.is_end) == (3, 0, True)
        page = await message_operations.peek("q", where="1 / (sys.DeliveryCount) > 0")
        assert (page.messages, page.failed) == ((), 3)


async def test_a_page_has_a_limit_of_bytes(store: Store) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q")
        large = b"\x00\x53\x75\xb0" + (200_000).to_bytes(4, "big") + b"x" * 200_000
        for _ in range(50):
            sent = message("m")
            sent.body, sent.size_bytes = large, 200_100
            await bus.sent(bus.address("q"), sent)
        page = await message_operations.peek("q")
        assert 8_000_000 < 200_100 * page.looked_at < 9_500_000
        assert not page.is_end
        rest = await message_operations.peek("q", from_number=page.next_number)
        assert len(page.messages) + len(rest.messages) == 50
        assert rest.is_end


@pytest.mark.parametrize("call", ["peek", "show", "purge"])
async def test_slow_reads_do_not_block_the_event_loop(store: Store, call: str) -> None:
    """Sixty kilobytes of properties or of a list take longer to read than any command."""
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q")
        sent = numbered(1)
        if call == "show":
            sent.body = b"\x00\x53\x77" + encode_list([b"\x40"] * 60_000)
        else:
            many = {f"p{n}": "" for n in range(6_500)}
            sent.application_properties = merge_properties(b"", many)
        sent.size_bytes = 62_000
        await bus.sent(bus.address("q"), *(copy(sent) for _ in range(40)))
        turns_s: list[float] = []

        async def watch() -> None:
            while True:
                turns_s.append(time.process_time())
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        if call == "purge":
            looked_at = (await message_operations.purge("q", where="p1 = 'no'")).looked_at
        else:
            where = None if call == "show" else "p1 = ''"
            looked_at = (await message_operations.peek("q", where=where)).looked_at
        watching.cancel()
        turns_s.append(time.process_time())
        gaps_s = [end - start for start, end in itertools.pairwise(turns_s)]
        assert looked_at == 40
        assert max(gaps_s) < sum(gaps_s) / 8


@pytest.mark.parametrize("is_spread", [False, True])
async def test_a_session_is_peeked_and_purged_alone(store: Store, is_spread: bool) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=is_spread, requires_session=True)
        sessions = keys_for(4)
        sent = [message(f"{session}{n}", session=session) for session in sessions for n in range(3)]
        await bus.sent(bus.address("q"), *sent)
        page = await message_operations.peek("q", session_id=sessions[2])
        assert {each.session_id for each in page.messages} == {sessions[2]}
        assert len(page.messages) == 3
        purged = await message_operations.purge("q", session_id=sessions[2])
        assert (purged.deleted, purged.is_end) == (3, True)
        left = await bus.peek_all(bus.address("q"))
        assert {each.envelope.session_id for each in left} == {
            session.encode() for session in sessions if session != sessions[2]
        }


@pytest.mark.parametrize("is_spread", [False, True])
async def test_dead_letters_of_a_session_are_purged_alone(store: Store, is_spread: bool) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", is_spread=is_spread)
        sessions = keys_for(4)
        sent = [message(f"{session}{n}", session=session) for session in sessions for n in range(3)]
        await bus.sent(bus.address("q"), *sent)
        for path in ("q", "q" + DEAD):
            pages = [await message_operations.peek(path, session_id=sessions[2], count=2)]
            pages.append(
                await message_operations.peek(
                    path, session_id=sessions[2], from_number=pages[0].next_number
                )
            )
            found = [each.session_id for page in pages for each in page.messages]
            assert found == [sessions[2]] * 3
            if path == "q":
                await kill(bus, "q")
        purged = await message_operations.purge("q" + DEAD, session_id=sessions[2])
        assert (purged.matched, purged.deleted, purged.is_end) == (3, 3, True)
        left = await message_operations.peek("q" + DEAD)
        assert {each.session_id for each in left.messages} == {*sessions} - {sessions[2]}
        assert len(left.messages) == 9


@pytest.mark.parametrize("is_spread", [False, True])
async def test_dead_letters_of_a_subscription_return_to_it_alone(
    store: Store, is_spread: bool
) -> None:
    async with running(store) as bus:
        message_operations = message_operations_of(bus)
        topic = TopicProperties(enable_partitioning=is_spread)
        await put_topic(bus.directory, "t", topic)
        everything = RuleProperties(name="all", sql_filter=SqlFilter(sql_expression="1=1"))
        for name in ("a", "b"):
            await put_subscription(bus.directory, "t", name, SubscriptionProperties(), [everything])
        await bus.sent(bus.address("t"), *(numbered(n) for n in range(8)))
        await kill(bus, "t/Subscriptions/a")
        path = "t/Subscriptions/a"
        numbers = numbers_of(await all_of(message_operations, path + DEAD))
        result = await message_operations.resend(path + DEAD, numbers[:6])
        assert len(result.resent) == 6
        assert len(await bodies_of(bus, path)) == 6
        assert len(await bodies_of(bus, "t/Subscriptions/b")) == 8
        result = await message_operations.resend(path + DEAD, numbers[6:], to="t")
        assert len(result.resent) + len(result.forwarded) == 2
        assert len(await arrived(bus, path, 8)) == 8
        assert len(await bodies_of(bus, "t/Subscriptions/b")) == 10
        with pytest.raises(OperationRefused):
            await message_operations.resend(path + DEAD, numbers, to="t/Subscriptions/b")


async def test_ten_thousand_dead_letters(store: Store) -> None:
    """Filter them and resend nine of ten while a sender and a receiver continue."""
    async with running(store, partition_count=1) as bus:
        message_operations = message_operations_of(bus)
        await put(bus, "q", max_delivery_count=1000)
        await put(bus, "busy")
        address = bus.address("q")
        for start in range(0, 10_000, 500):
            await bus.sent(address, *(numbered(n) for n in range(start, start + 500)))
        await kill(bus, "q")
        began = time.monotonic()
        numbers: list[int] = []
        first, is_end = 0, False
        while not is_end:
            page = await message_operations.peek(
                "q" + DEAD, from_number=first, count=250, where="n % 10 <> 0"
            )
            numbers += numbers_of([page])
            first, is_end = page.next_number, page.is_end
        peeked_s = time.monotonic() - began
        assert len(numbers) == 9_000
        began = time.monotonic()
        slowest_s = 0.0
        for start in range(0, 9_000, MAX_SEQUENCE_NUMBERS):
            part = asyncio.create_task(
                message_operations.resend("q" + DEAD, numbers[start : start + MAX_SEQUENCE_NUMBERS])
            )
            sent_at = time.monotonic()
            await bus.sent(bus.address("busy"), message("m"))
            slowest_s = max(slowest_s, time.monotonic() - sent_at)
            assert len((await part).resent) == len(numbers[start : start + MAX_SEQUENCE_NUMBERS])
        resent_s = time.monotonic() - began
        counts = bus.hosts[0].counts(address.entity_no)
        assert counts is not None
        assert (counts.active, counts.dead_letter) == (9_000, 1_000)
        assert peeked_s < 15
        assert resent_s < 15
