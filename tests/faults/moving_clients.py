"""Clients of two brokers on one store: each moves to the other when it is stuck or after a time.

They send, receive, settle and define through the official SDK, and record their observations in a
shared history.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from azure.core.exceptions import (
    AzureError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient
from azure.servicebus.exceptions import ServiceBusError

from tests.faults.history import Cancelled, Defined, Result, Topology
from tests.faults.mixed_kills import (
    LOCK_S,
    MAX_DELIVERIES,
    RULE,
    SESSIONS,
    Load,
    message_of,
    note_delivery,
    receiver,
    send,
    send_step,
    session_receiver,
    settle,
)
from tests.faults.victims import KEY

VISIT_S = (3.0, 8.0)
"""Time that a client stays with one broker."""

STUCK_S = 4.0
"""Time that it stays with a broker that accepts nothing."""

LEAVE_S = 3.0
"""Further time limit, of which the SDK needs a second to close; a client that hangs longer is cut
off, and its answers are unknown."""


CALL_S = 3.0
"""Time limit of a definition."""

PAUSE_S = 0.1
QUEUES = ("plain", "later", "once", "end", "grouped")
SUBSCRIPTIONS = {"a": None, "b": "n = 1"}
READ = ("plain", "later", "once", "end", "news/a", "news/b")
MADE_NAMES = 4


def destinations(path: str, properties: Mapping[str, object]) -> Iterable[str]:
    """Return the destinations of a message sent to an entity."""
    if path == "news":
        return ["news/a", "news/b"] if properties.get("n") == 1 else ["news/a"]
    return ["end" if path == "hop" else path]


TOPOLOGY = Topology(
    destinations,
    dict.fromkeys((*READ, "grouped"), MAX_DELIVERIES),
    deduplicating=frozenset({"once"}),
    lock_s=LOCK_S,
)


@dataclass(slots=True)
class Address:
    """The address of one broker. `name` is its name in the history."""

    name: str
    port: int
    connection_string: str
    tls_port: int
    authority: Path

    def administration(self, retries: int = 0) -> ServiceBusAdministrationClient:
        """Return a client for definitions: the SDK's speaks TLS only."""
        secure = f"Endpoint=sb://localhost:{self.tls_port};SharedAccessKeyName={RULE};"
        return ServiceBusAdministrationClient.from_connection_string(
            f"{secure}SharedAccessKey={KEY}",
            connection_verify=str(self.authority),
            retry_total=retries,
            retry_mode="fixed",
            retry_backoff_factor=1,
        )


@dataclass(slots=True)
class MovingLoad(Load):
    """A client's own load: `visit` does work at one broker after the other."""

    addresses: Sequence[Address] = ()
    end: asyncio.Event = field(default_factory=asyncio.Event)
    address: Address = field(init=False)

    def go_to(self, address: Address) -> None:
        self.address = address
        self.by, self.port = address.name, address.port
        self.connection_string = address.connection_string

    def client(self, retries: int = 0) -> ServiceBusClient:
        return ServiceBusClient.from_connection_string(
            self.connection_string,
            retry_total=retries,
            retry_mode="fixed",
            retry_backoff_factor=1,
            auth_timeout=CALL_S,
        )

    async def visit_all(
        self, work: Callable[[MovingLoad], Coroutine[object, object, None]]
    ) -> None:
        """Work until the end; move if nothing is accepted, and at intervals."""
        number = random.randrange(len(self.addresses))
        while not self.end.is_set():
            self.go_to(self.addresses[number % len(self.addresses)])
            self.until = asyncio.Event()
            before = self.done
            await self._visit(work)
            if self.done == before or random.random() < 0.2:
                number += 1
            await asyncio.sleep(PAUSE_S)

    @property
    def done(self) -> int:
        return self.accepted + self.finished

    async def _visit(self, work: Callable[[MovingLoad], Coroutine[object, object, None]]) -> None:
        visit, before = asyncio.create_task(work(self)), self.done
        await asyncio.wait({visit}, timeout=STUCK_S)
        if self.done > before:
            await asyncio.wait({visit}, timeout=random.uniform(*VISIT_S))
        self.until.set()
        await asyncio.wait({visit}, timeout=LEAVE_S)
        if not visit.done():
            self.troubles["hung"] += 1
            visit.cancel()
            await asyncio.wait({visit}, timeout=LEAVE_S)
        if not visit.done():
            self.troubles["hung for good"] += 1
        elif not visit.cancelled() and (error := visit.exception()) is not None:
            if not isinstance(error, ServiceBusError | AzureError | OSError | ValueError):
                raise error
            self.troubles[type(error).__name__] += 1


async def sender(path: str, load: MovingLoad) -> None:
    """Send batches to one entity, in the way that its name implies."""
    async with load.client() as client:
        opened = client.get_topic_sender(path) if path == "news" else client.get_queue_sender(path)
        async with opened as link:
            while load.may_send and not load.until.is_set():
                session = f"s{random.randrange(SESSIONS)}" if path == "grouped" else None
                due = time.time() + random.random() * 3 if path == "later" else None
                properties = {"n": random.randrange(3)} if path == "news" else None
                sends = [
                    send_step(load.new_id(path), path, session, due, properties)
                    for _ in range(random.randint(1, 8))
                ]
                for _ in range(random.randint(1, 2) if path == "once" else 1):
                    messages = [message_of(each) for each in sends]
                    await send(load, path, sends, partial(link.send_messages, messages))
                await asyncio.sleep(random.random() * 0.3)


async def canceller(load: MovingLoad) -> None:
    """Schedule messages by number and cancel some of them."""
    async with load.client() as client, client.get_queue_sender("later") as link:
        while load.may_send and not load.until.is_set():
            sent = send_step(load.new_id("number"), "later", due=time.time() + 4.0)
            due = datetime.fromtimestamp(sent.due or 0.0, UTC)
            numbers: list[int] = []

            async def schedule() -> None:
                numbers.extend(await link.schedule_messages(message_of(sent), due))  # noqa: B023

            await send(load, "later", [sent], schedule)
            if random.random() < 0.5:
                result = Result.UNKNOWN
                try:
                    await link.cancel_scheduled_messages(numbers)
                    result = Result.ACCEPTED
                finally:
                    load.events.append(Cancelled("later", sent.id, result))
            await asyncio.sleep(random.random() * 0.5)


# --- queues that come and go ----------------------------------------------------------------------


@dataclass(slots=True)
class Made:
    """The queues of one definer: the generation of each name, and its unknown results."""

    lives: dict[str, int] = field(default_factory=dict)
    existing: set[str] = field(default_factory=set)
    unknown: dict[str, bool] = field(default_factory=dict)
    """Names with an unanswered last request, and whether it was a deletion."""

    def path(self, name: str) -> str:
        return f"{name}#{self.lives.get(name, 0)}"


async def definer(prefix: str, made: Made, load: MovingLoad) -> None:
    """Create queues, use them, delete most of them; names are reused."""
    async with load.address.administration() as administration:
        while load.may_send and not load.until.is_set():
            name = f"{prefix}-{random.randrange(MADE_NAMES)}"
            if name in made.unknown:
                await define(load, administration, made, name, is_deletion=made.unknown[name])
            elif name not in made.existing:
                made.lives[name] = made.lives.get(name, 0) + 1
                await define(load, administration, made, name, is_deletion=False)
            elif random.random() < 0.2:
                await define(load, administration, made, name, is_deletion=True)
            else:
                await use(load, name, made.path(name))
            await asyncio.sleep(random.random() * 0.2)


async def define(
    load: MovingLoad,
    administration: ServiceBusAdministrationClient,
    made: Made,
    name: str,
    *,
    is_deletion: bool,
) -> None:
    """Create or delete a queue; requests with unknown result are repeated, here or elsewhere.

    Its metadata have the generation of the name.
    """
    path, result = made.path(name), Result.UNKNOWN
    is_again, made.unknown[name] = name in made.unknown, is_deletion
    try:
        async with asyncio.timeout(CALL_S):
            if is_deletion:
                await administration.delete_queue(name)
            else:
                await administration.create_queue(
                    name, lock_duration=timedelta(seconds=LOCK_S), user_metadata=path
                )
        result = Result.ACCEPTED
    except ResourceNotFoundError:  # a request without an answer has deleted it
        if not is_deletion or not is_again:
            raise
        result = Result.ACCEPTED
    except ResourceExistsError:
        async with asyncio.timeout(CALL_S):
            if (await administration.get_queue(name)).user_metadata != path:
                raise
        result = Result.ACCEPTED
    finally:
        load.events.append(Defined(path, is_deletion, result))
        if result is Result.ACCEPTED:
            load.accepted += 1
            del made.unknown[name]
            (made.existing.discard if is_deletion else made.existing.add)(name)


async def use(load: MovingLoad, name: str, path: str) -> None:
    """Send to a created queue and receive some messages."""
    async with load.client() as client:
        async with client.get_queue_sender(name) as link:
            sends = [send_step(load.new_id(name), path) for _ in range(random.randint(1, 3))]
            messages = [message_of(each) for each in sends]
            await send(load, path, sends, partial(link.send_messages, messages))
        async with client.get_queue_receiver(name) as link:
            found = await link.receive_messages(2, max_wait_time=1)
            for message in found:
                note_delivery(load, path, message)
            for message in found:
                await settle(load, path, link, message, "complete")


# --- all of them ----------------------------------------------------------------------------------

Work = Callable[[MovingLoad], Coroutine[object, object, None]]


def works(definers: Mapping[str, Made]) -> list[Work]:
    """Return the concurrent works, each done by its own client."""
    holds = itertools.count(1)

    async def hold_sessions(load: MovingLoad) -> None:
        await session_receiver(load, holds)

    def receive(path: str) -> Work:
        return lambda load: receiver(load, path)

    return [
        *(partial(sender, path) for path in ("plain", "grouped", "once", "later", "news", "hop")),
        *(receive(path) for path in READ),
        hold_sessions,
        hold_sessions,
        canceller,
        *(partial(definer, prefix, made) for prefix, made in definers.items()),
    ]
