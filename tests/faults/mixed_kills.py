"""Kill -9 of broker and Postgres while all features are used at once, and the check of the record.

Plain and session queues, duplicate detection, schedules, a topic with filters, forwarding and
transactions, driven by the official SDK (transactions by our own client). Observations of clients
are recorded in a `history`; after the last kill the remaining messages are peeked, and the record
is checked. Some queues keep settled messages (`kept_rows`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusMessage,
    ServiceBusMessageState,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusSubQueue,
)
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusError

from postbus.amqp.events import TransferReceived
from postbus.amqp.link import OutgoingLink
from postbus.message.codec import Described, Ulong, decode_value, encode_value
from postbus.message.sections import slice_message
from postbus.process.embedded import EmbeddedPostgres
from tests.faults.history import (
    Cancelled,
    Delivered,
    Died,
    Event,
    Hold,
    Left,
    Result,
    Sent,
    Settled,
    StateAccess,
    Topology,
    TransactionEnded,
    Violation,
    check,
)
from tests.faults.kept_rows import BRIEF_HISTORY, HISTORY, check_kept
from tests.faults.kill_programs import run_program
from tests.faults.transaction_client import Refused, TransactionClient
from tests.faults.victims import KEY, Broker, Killer, Kills, Kind, wait_for_port

Work: TypeAlias = Callable[[], Coroutine[object, object, None]]

RULE = "RootManageSharedAccessKey"
MAX_DELIVERIES = 50
LOCK_S = 5.0
PAUSE_S = 0.2
PEEK_RETRIES = 30
"""Seconds until the last peek gives up on a partition that loads again."""

BACKLOG = 2_000
"""Senders wait while more messages than this are sent and not completed."""

IDLE_S = 2.0
"""Time without a completion after which the backlog is empty: longer than a reload."""

SESSIONS = 20
QUEUES = ("plain", "later", "once", "fast", "end", "sink", "jobs", "results")
SUBSCRIPTIONS = {"a": None, "b": "n = 1", "c": "n = 2"}

EXAMPLES = """
examples, each begins with `python -m tests.faults.mixed_kills`:
                                  two hundred kills
  --kills 3 --messages 1500       required of a change
  --kills 20 --seed 7
"""


NAMESPACE = [
    f"""apiVersion: v1
kind: Secret
metadata: {{name: root-key}}
stringData: {{primaryKey: {KEY}}}""",
    f"""apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {{name: faults}}
spec:
  sku: {{name: Standard}}
  authorizationRules: [{{name: {RULE}, rights: [Manage], secretName: root-key}}]""",
]
"""The first manifests of a bus."""


def manifests() -> str:
    """Return the manifests of the bus; the name of an entity states its purpose."""
    common = f", lockDuration: PT{LOCK_S:.0f}S, maxDeliveryCount: {MAX_DELIVERIES}"
    extra = {
        "once": ", requiresDuplicateDetection: true",
        "plain": HISTORY,
        "end": BRIEF_HISTORY,
    }
    documents = [
        *NAMESPACE,
        *(entity("Queue", name, "faults", common + extra.get(name, "")) for name in QUEUES),
        entity("Queue", "grouped", "faults", common + ", requiresSession: true" + HISTORY),
        entity("Queue", "hop-two", "faults", common + ", forwardTo: end"),
        entity("Queue", "hop-one", "faults", common + ", forwardTo: hop-two"),
        entity("Topic", "news", "faults"),
    ]
    for name, expression in SUBSCRIPTIONS.items():
        spec = common
        if expression is not None:
            spec += f", rules: [{{name: selected, sqlFilter: {{sqlExpression: '{expression}'}}}}]"
        if name == "c":
            spec += ", forwardTo: sink"
        documents.append(entity("Subscription", name, "news", spec))
    return "\n---\n".join(documents) + "\n"


def entity(kind: str, name: str, owner: str, spec: str = "") -> str:
    """Return a manifest; `spec`: the fields beside the owner, with a leading comma."""
    return f"""apiVersion: postbus.dev/v1alpha1
kind: {kind}
metadata: {{name: {name}}}
spec: {{owner: {{name: {owner}}}{spec}}}"""


def destinations(path: str, properties: Mapping[str, object]) -> Iterable[str]:
    """Return the destinations of a message sent to an entity."""
    if path == "news":
        selected = {1: ["news/b"], 2: ["sink"]}.get(int(str(properties.get("n", 0))), [])
        return ["news/a", *selected]
    return ["end" if path in ("hop-one", "hop-two") else path]


READ = (*QUEUES, "grouped", "news/a", "news/b")
OWN_RECEIVERS = ("grouped", "jobs")
TOPOLOGY = Topology(
    destinations,
    dict.fromkeys(READ, MAX_DELIVERIES),
    deduplicating=frozenset({"once"}),
    at_most_once=frozenset({"fast"}),
)


# --- the load -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Load:
    """The state that all workers share. Times are seconds since the epoch."""

    port: int
    connection_string: str
    events: list[Event] = field(default_factory=list)
    in_flight: int = 0
    accepted: int = 0
    finished: int = 0
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    may_send: bool = True
    until: asyncio.Event = field(default_factory=asyncio.Event)
    troubles: Counter[str] = field(default_factory=Counter)
    by: str = ""
    """Broker that this client is connected to, of several."""

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self.numbers)}"

    def client(self, retries: int = 0) -> ServiceBusClient:
        """Return a client that raises each failure, or retries each second."""
        return ServiceBusClient.from_connection_string(
            self.connection_string,
            retry_total=retries,
            retry_mode="fixed",
            retry_backoff_factor=1,
        )

    async def repeat(self, work: Work) -> None:
        """Repeat a worker's work until the end, although kills cut its connections."""
        while not self.until.is_set():
            try:
                await work()
            except (ServiceBusError, OSError, ValueError, TimeoutError, Refused) as error:
                self.troubles[type(error).__name__] += 1
                await asyncio.sleep(PAUSE_S)

    async def ready_to_send(self) -> bool:
        """Wait until the backlog allows a send; return False when sending is over.

        The count of finished messages is too low: it lacks copies, duplicates and completions with
        unknown result. When no more messages are finished, none is left.
        """
        seen, since = self.finished, time.time()
        while self.may_send and self.accepted - self.finished > BACKLOG:
            await asyncio.sleep(0.02)
            if self.finished != seen:
                seen, since = self.finished, time.time()
            elif time.time() - since > IDLE_S:
                self.finished = self.accepted
        return self.may_send


async def send(
    load: Load, path: str, sends: list[Sent], call: Callable[[], Coroutine[object, object, None]]
) -> None:
    """Send and record the result; `sends` are the messages, without times and result."""
    started = time.time()
    load.in_flight += len(sends)
    result = Result.UNKNOWN
    try:
        await call()
        result = Result.ACCEPTED
        load.accepted += len(sends)
    finally:
        load.in_flight -= len(sends)
        ended = time.time()
        for each in sends:
            load.events.append(
                Sent(
                    path,
                    each.id,
                    result,
                    started,
                    ended,
                    each.session,
                    each.due,
                    each.ttl_s,
                    None,
                    each.properties,
                )
            )


def send_step(
    name: str,
    path: str,
    session: str | None = None,
    due: float | None = None,
    properties: Mapping[str, object] | None = None,
) -> Sent:
    return Sent(path, name, Result.UNKNOWN, 0.0, 0.0, session, due, None, None, properties or {})


def message_of(sent: Sent) -> ServiceBusMessage:
    message = ServiceBusMessage(
        b"x" * random.randint(1, 2_000),
        message_id=sent.id,
        session_id=sent.session,
        application_properties=dict(sent.properties) or None,
    )
    if sent.due is not None:
        message.scheduled_enqueue_time_utc = datetime.fromtimestamp(sent.due, UTC)
    return message


async def sender(load: Load, path: str) -> None:
    """Send batches to one entity, in the way that its name implies."""
    async with load.client() as client:
        opened = client.get_topic_sender(path) if path == "news" else client.get_queue_sender(path)
        async with opened as link:
            while await load.ready_to_send():
                count = random.randint(1, 20)
                session = f"s{random.randrange(SESSIONS)}" if path == "grouped" else None
                due = time.time() + random.random() * 3 if path == "later" else None
                sends = [
                    send_step(
                        load.new_id(path),
                        path,
                        session,
                        due,
                        {"n": random.randrange(3)} if path == "news" else None,
                    )
                    for _ in range(count)
                ]
                if path == "once":
                    sends = [each for each in sends for _ in range(random.randint(1, 2))]
                for _ in range(2 if path == "once" and random.random() < 0.3 else 1):
                    messages = [message_of(each) for each in sends]
                    await send(load, path, sends, partial(link.send_messages, messages))
    await load.until.wait()


async def canceller(load: Load) -> None:
    """Schedule messages by number and cancel some of them."""
    async with load.client() as client, client.get_queue_sender("later") as link:
        while await load.ready_to_send():
            sent = send_step(load.new_id("number"), "later", due=time.time() + 5.0)
            numbers: list[int] = []

            async def schedule() -> None:
                due = datetime.fromtimestamp(sent.due or 0.0, UTC)  # noqa: B023
                numbers.extend(await link.schedule_messages(message_of(sent), due))  # noqa: B023

            await send(load, "later", [sent], schedule)
            if random.random() < 0.5:
                result = Result.UNKNOWN
                try:
                    await link.cancel_scheduled_messages(numbers)
                    result = Result.ACCEPTED
                    load.finished += 1
                finally:
                    load.events.append(Cancelled("later", sent.id, result))
            await asyncio.sleep(0.05)
    await load.until.wait()


# --- receiving ------------------------------------------------------------------------------------


def note_delivery(
    load: Load,
    path: str,
    message: ServiceBusReceivedMessage,
    *,
    hold: int | None = None,
    by_number: bool = False,
) -> None:
    token = message.lock_token
    until = message.locked_until_utc
    enqueued = message.enqueued_time_utc
    load.events.append(
        Delivered(
            path,
            str(message.message_id),
            time.time(),
            message.sequence_number or 0,
            message.delivery_count or 0,
            "" if token is None else str(token),
            until.timestamp() if until is not None else 0.0,
            enqueued.timestamp() if enqueued is not None else 0.0,
            hold,
            by_number,
            load.by,
        )
    )


async def settle(
    load: Load,
    path: str,
    receiver: ServiceBusReceiver,
    message: ServiceBusReceivedMessage,
    kind: str,
) -> bool:
    """Settle one delivery and record it; return whether it was confirmed."""
    started, token = time.time(), str(message.lock_token)  # the SDK takes it off when it is done
    load.in_flight += 1
    result = Result.UNKNOWN  # a lost lock may mean that a commit's fate is not known
    try:
        match kind:
            case "complete":
                await receiver.complete_message(message)
                load.finished += 1
            case "abandon":
                await receiver.abandon_message(message)
            case "defer":
                await receiver.defer_message(message)
            case _:
                await receiver.dead_letter_message(message, reason="app")
                load.finished += 1
        result = Result.ACCEPTED
    except ServiceBusError as error:
        load.troubles[type(error).__name__] += 1
    finally:
        load.in_flight -= 1
        load.events.append(
            Settled(
                path,
                str(message.message_id),
                token,
                kind,
                result,
                started,
                time.time(),
            )
        )
    return result is Result.ACCEPTED


async def handle(
    load: Load,
    path: str,
    receiver: ServiceBusReceiver,
    message: ServiceBusReceivedMessage,
    hold: int | None = None,
) -> None:
    """Settle a message at random: mostly complete it."""
    chance = random.random()
    if chance < 0.04:
        await settle(load, path, receiver, message, "abandon")
    elif chance < 0.06:
        if await settle(load, path, receiver, message, "defer"):
            (found,) = await receiver.receive_deferred_messages(message.sequence_number)
            note_delivery(load, path, found, hold=hold, by_number=True)
            await settle(load, path, receiver, found, "complete")
    elif chance < 0.07:
        await settle(load, path, receiver, message, "dead-letter")
    elif chance >= 0.075:  # the rest is left to its lock
        await settle(load, path, receiver, message, "complete")


def open_receiver(client: ServiceBusClient, path: str, **options: object) -> ServiceBusReceiver:
    topic, _, subscription = path.partition("/")
    if subscription:
        return client.get_subscription_receiver(topic, subscription, **options)
    return client.get_queue_receiver(path, **options)


async def receiver(load: Load, path: str) -> None:
    """Receive from one entity and settle."""
    mode = ServiceBusReceiveMode.PEEK_LOCK
    if path == "fast":
        mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    async with load.client() as client, open_receiver(client, path, receive_mode=mode) as link:
        while not load.until.is_set():
            messages = await link.receive_messages(50, max_wait_time=1)
            for message in messages:
                note_delivery(load, path, message)
            if path == "fast":
                load.finished += len(messages)
            else:
                await asyncio.gather(*(handle(load, path, link, each) for each in messages))


async def session_receiver(load: Load, holds: itertools.count[int]) -> None:
    """Take the next session, some of its messages, in order, and note them in its state."""
    path = "grouped"
    async with load.client() as client:
        while not load.until.is_set():
            try:
                link = client.get_queue_receiver(
                    path, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=2
                )
                async with link:
                    await hold_session(load, link, next(holds))
            except OperationTimeoutError:
                continue


async def hold_session(load: Load, link: ServiceBusReceiver, number: int) -> None:
    path, started = "grouped", time.time()
    session = str(link.session.session_id)
    try:
        state = await link.session.get_state()
        load.events.append(StateAccess(path, session, time.time(), state or b""))
        messages = await link.receive_messages(20, max_wait_time=1)
        for message in messages:
            note_delivery(load, path, message, hold=number)
        for message in messages:
            await handle(load, path, link, message, number)
        value, result = str(number).encode(), Result.UNKNOWN
        try:
            await link.session.set_state(value)
            result = Result.ACCEPTED
        finally:
            load.events.append(StateAccess(path, session, time.time(), value, result))
    finally:
        until = link.session.locked_until_utc
        ended = time.time() if until is None else min(time.time(), until.timestamp())
        load.events.append(Hold(number, path, session, started, ended))


# --- transactions ---------------------------------------------------------------------------------


def payload_of(name: str) -> bytes:
    return encode_value(Described(Ulong(0x73), [name])) + encode_value(
        Described(Ulong(0x75), b"x" * 100)
    )


async def transactor(load: Load) -> None:
    """Complete jobs and send their results, each in a transaction; some are rolled back."""
    client = await TransactionClient.connect(load.port, RULE, KEY)
    try:
        results = await client.sender("results")
        jobs = await client.sender("jobs")
        link = await client.receiver("jobs", 100)
        while not load.until.is_set():
            try:
                async with asyncio.timeout(1):
                    arrived = await client.arrived.get()
            except TimeoutError:
                continue
            if link.credit < 50:
                client.grant(link, 100)
            await do_job(load, client, results, jobs, arrived)
    finally:
        await client.close()


async def do_job(
    load: Load,
    client: TransactionClient,
    results: OutgoingLink,
    jobs: OutgoingLink,
    arrived: TransferReceived,
) -> None:
    envelope = slice_message(arrived.payload)
    assert envelope.message_id is not None
    job = str(decode_value(envelope.message_id)[0])
    annotations = decode_value(arrived.payload[_annotations_at(arrived.payload) :])[0].value
    token = arrived.delivery_tag.hex()
    load.events.append(
        Delivered(
            "jobs",
            job,
            time.time(),
            int(annotations["x-opt-sequence-number"]),
            0,
            token,
            int(annotations["x-opt-locked-until"]) / 1_000,
            int(annotations["x-opt-enqueued-time"]) / 1_000,
        )
    )
    name, started = load.new_id("transaction"), time.time()
    sends = [("results", results, load.new_id("result"))]
    if random.random() < 0.3:
        sends.append(("jobs", jobs, load.new_id("jobs")))
    is_rolled_back = random.random() < 0.1
    end = Result.REFUSED if is_rolled_back else Result.UNKNOWN
    done: list[Event] = []
    is_discharged = False
    transaction = await client.declare()
    load.in_flight += 1 + len(sends)
    try:
        done.append(
            Settled("jobs", job, token, "complete", Result.ACCEPTED, started, time.time(), name)
        )
        await client.complete(arrived.delivery_id, transaction)
        for path, link, result in sends:
            done.append(Sent(path, result, Result.ACCEPTED, started, time.time(), transaction=name))
            await client.send(link, payload_of(result), transaction)
        is_discharged = True
        try:
            await client.discharge(transaction, fail=is_rolled_back)
            if not is_rolled_back:
                end = Result.ACCEPTED
                load.accepted += len(sends)
                load.finished += 1
        except Refused as error:
            end = Result.REFUSED if "rollback" in str(error) else Result.UNKNOWN
            raise
    except Refused:
        if not is_discharged:  # left open it would count, and a connection may have a thousand
            end = Result.REFUSED
            await client.discharge(transaction, fail=True)
    finally:
        load.in_flight -= 1 + len(sends)
        load.events += [*done, TransactionEnded(name, end)]


def _annotations_at(payload: bytes) -> int:
    """Return the offset of the message annotations: after the header."""
    return payload.index(b"\x00\x53\x72")


# --- the run --------------------------------------------------------------------------------------


async def run(options: argparse.Namespace, folder: Path) -> tuple[Load, Kills, list[Violation]]:
    """Drive the load, kill the requested number of times, drain, peek and check."""
    random.seed(options.seed)
    program = [options.broker] if options.broker else ["-m", "postbus"]
    settings = {"commit_delay": str(options.commit_delay_ms * 1_000), "commit_siblings": "0"}
    postgres = EmbeddedPostgres(
        folder / "postgres", settings=settings if options.commit_delay_ms else None
    )
    await asyncio.to_thread(postgres.start)
    broker = Broker(folder, postgres.dsn, program, manifests())
    broker.start()
    await wait_for_port(broker.port)
    load, kills = Load(broker.port, broker.connection_string), Kills()
    killer = Killer(broker, postgres, kills)
    holds = itertools.count(1)
    senders = ("plain", "grouped", "once", "later", "news", "hop-one", "jobs", "fast")
    works: list[Work] = [
        *(lambda path=path: sender(load, path) for path in senders),
        *(
            lambda path=path: receiver(load, path)
            for path in READ
            if path not in ("grouped", "jobs")
        ),
        *(lambda: session_receiver(load, holds) for _ in range(3)),
        *(lambda: transactor(load) for _ in range(3)),
        lambda: canceller(load),
    ]
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(load.repeat(work))
        await kill_under_load(options, load, kills, killer)
        load.may_send = False
        await asyncio.sleep(2 * LOCK_S)  # locked messages come again, due ones are delivered
        load.until.set()
    await asyncio.sleep(LOCK_S)
    load.events += [Died(at) for at in (*kills.at, *reload_times(broker))]
    load.events += await peek_all(load)
    violations = check(load.events, TOPOLOGY)
    violations += await check_kept(postgres.dsn, load.events)
    violations += [
        Violation("error", "", "", f"{entry['message']}: {entry.get('error', '')[-2_000:]}")
        for entry in broker.logged()
        if entry.get("level") == "error"
    ]
    await asyncio.to_thread(broker.stop)
    await asyncio.to_thread(postgres.stop)
    return load, kills, violations


def reload_times(broker: Broker) -> list[float]:
    """Return when a partition lost its locks because a commit failed or was not answered."""
    return [
        datetime.fromisoformat(entry["time"]).timestamp()
        for entry in broker.logged()
        if entry.get("message") == "commit failed, reloading"
    ]


async def kill_under_load(
    options: argparse.Namespace, load: Load, kills: Kills, killer: Killer
) -> None:
    """Kill in equal steps of accepted messages, each with enough operations in flight."""
    kinds = itertools.cycle((Kind.BROKER, Kind.POSTGRES, Kind.LOAD))
    for number, kind in zip(range(options.kills), kinds, strict=False):
        target = options.messages * (number + 1) // (options.kills + 1)
        async with asyncio.timeout(600):
            while load.accepted < target or load.in_flight < options.in_flight:
                await asyncio.sleep(0.002)
        in_flight = load.in_flight
        await asyncio.to_thread(killer.kill, kind)
        await wait_for_port(load.port)
        print(
            f"kill {number + 1}/{options.kills} ({kind.value}), {in_flight} in flight,"
            f" {load.accepted} accepted, {load.finished} finished",
            flush=True,
        )
    while load.accepted < options.messages:
        await asyncio.sleep(0.05)


PLACES: dict[ServiceBusSubQueue | None, str] = {
    None: "active",
    ServiceBusSubQueue.DEAD_LETTER: "dead-letter",
    ServiceBusSubQueue.TRANSFER_DEAD_LETTER: "transfer",
}
STATES = {
    ServiceBusMessageState.DEFERRED: "deferred",
    ServiceBusMessageState.SCHEDULED: "scheduled",
}
FORWARDING = ("news/c", "hop-one", "hop-two")


async def peek_all(load: Load) -> list[Event]:
    """Peek all remaining messages, in every place."""
    left: list[Event] = []
    async with load.client(PEEK_RETRIES) as client:
        for path in (*READ, *FORWARDING):
            for sub_queue, place in PLACES.items():
                if sub_queue is not None:
                    left += await peek(client, path, place, sub_queue=sub_queue)
                elif path == "grouped":
                    for number in range(SESSIONS):
                        left += await peek(client, path, place, session_id=f"s{number}")
                elif path not in FORWARDING:
                    left += await peek(client, path, place)
    return left


async def peek(client: ServiceBusClient, path: str, place: str, **options: object) -> list[Event]:
    """Peek one place from its first number to its last."""
    left: list[Event] = []
    number = 1
    async with open_receiver(client, path, **options) as link:
        while page := await link.peek_messages(250, sequence_number=number):
            left += [
                Left(
                    path,
                    STATES.get(each.state, place),
                    str(each.message_id),
                    each.sequence_number or 0,
                    each.delivery_count or 0,
                    each.dead_letter_reason,
                )
                for each in page
            ]
            number = (page[-1].sequence_number or 0) + 1
    return left


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default: 200)")
    parser.add_argument(
        "--messages", type=int, default=100_000, help="accepted messages (default: 100000)"
    )
    parser.add_argument(
        "--in-flight", type=int, default=100, help="operations in flight at a kill (default: 100)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of choices (default: 1)")
    parser.add_argument(
        "--commit-delay-ms",
        type=int,
        choices=range(101),
        default=0,
        metavar="0..100",
        help="delay commits, so that more are in flight at a kill (default: 0)",
    )
    parser.add_argument("--broker", help="program to run as the broker (default: `-m postbus`)")
    parser.add_argument("--record", type=Path, help="file for the record, as lines of JSON")
    options = parser.parse_args()
    began = time.time()
    load, kills, violations = run_program(run, options)
    if options.record is not None:
        with options.record.open("w") as lines:
            for event in load.events:
                entry = {"event": type(event).__name__, **asdict(event)}
                lines.write(json.dumps(entry, default=str) + "\n")
    kinds = Counter(type(event).__name__ for event in load.events)
    print(f"kills {kills.count}, {timedelta(seconds=round(time.time() - began))}")
    print("recorded " + ", ".join(f"{count} {name}" for name, count in sorted(kinds.items())))
    print(f"accepted {load.accepted}, finished {load.finished}, violations {len(violations)}")
    for violation in violations[:30]:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
