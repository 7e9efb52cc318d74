"""A bus on two databases, one of which is unavailable: clients read, send, receive and change."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from azure.core.exceptions import HttpResponseError
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import ServiceBusAdministrationClient

from postbus.broker.catalog.directory import home_of
from postbus.broker.placement import partition_of_key
from postbus.process.embedded import EmbeddedPostgres
from tests.cli.command_line import CommandLine
from tests.conftest import dsn_of, make_database
from tests.edge.control.control_bus import Caller, ControlledBus, controlled_bus, path_of
from tests.edge.sdk.sdk_steps import bodies_of, send, take

pytestmark = pytest.mark.slow

PARTITIONS = 16
HERE, THERE = range(0, PARTITIONS, 2), range(1, PARTITIONS, 2)
"""Partitions of the first and of the second database."""

WAIT_S = 30.0
RESEND_S = 15.0
"""The least time limit of a client that survives an outage."""


class Clients(NamedTuple):
    """The bus as its clients see it, and the server of its second database."""

    control: Caller
    messages: ServiceBusClient
    administration: ServiceBusAdministrationClient
    command_line: CommandLine
    server: EmbeddedPostgres

    def counted(self, queue: str) -> tuple[int, str, list[int]]:
        """Return messages, availability and the partitions that are not counted."""
        answer = self.control.get(path_of("queues", queue, "runtime")).body
        return answer["messageCount"], answer["availability"], answer["unavailablePartitions"]

    def troubled(self) -> list[int]:
        """Return the partitions that do not work."""
        answer = self.control.get("/v1/status").body["partitions"]
        return [each["partition"] for each in answer if each["trouble"] is not None]

    def begin_outage(self, queue: str) -> None:
        """Return when the partitions in the second database are known to be away.

        Messages without key go to a queue before that; each is sent within its time limit.
        """
        self.server.stop()
        began = time.monotonic()
        with self.messages.get_queue_sender(queue) as sender:
            for _ in range(PARTITIONS):
                send_or_repeat(sender)
        assert time.monotonic() - began < RESEND_S
        eventually(lambda: self.troubled() == list(THERE))

    def end_outage(self) -> None:
        """Return when all partitions work again."""
        self.server.start()
        eventually(lambda: self.troubled() == [])


def send_or_repeat(sender: ServiceBusSender) -> None:
    """Send a message; clients repeat it when a commit met the outage and its result is unknown."""
    for _ in range(5):
        with contextlib.suppress(ServiceBusError):
            sender.send_messages(ServiceBusMessage("m"))
            return
    raise AssertionError("the message was not sent")


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


@pytest.fixture
def second_server(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(server_folder / "away", major=16)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def running(
    postgres_server: EmbeddedPostgres, second_server: EmbeddedPostgres, tmp_path: Path
) -> Iterator[ControlledBus]:
    servers = (postgres_server, second_server)
    for server in servers:
        make_database(server, "edge_away")
    dsns = " ".join(dsn_of(server, "edge_away") for server in servers)
    with controlled_bus(dsns, tmp_path, None) as bus:
        yield bus


@pytest.fixture
def clients(
    running: ControlledBus, second_server: EmbeddedPostgres, tmp_path: Path
) -> Iterator[Clients]:
    """Clients that repeat nothing."""
    address = running.connection_string
    tls = urlsplit(dict(running.bus.summary())["amqps"])
    with (
        ServiceBusClient.from_connection_string(address, retry_total=0) as messages,
        ServiceBusAdministrationClient.from_connection_string(
            re.sub("sb://[^;]*", f"sb://{tls.netloc}", address),
            connection_verify=str(tmp_path / "tls" / "ca.pem"),
            retry_total=0,
        ) as administration,
    ):
        command_line = CommandLine(tmp_path)
        command_line.ok(
            *("context", "set", "here", "--control", running.caller.address),
            *("--token-file", str(running.token_file)),
        )
        command_line.ok("context", "use", "here")
        yield Clients(running.caller, messages, administration, command_line, second_server)


NAMES = itertools.count(1)


def spread(clients: Clients) -> str:
    """Create a partitioned queue with a message in each partition."""
    queue = f"spread-{next(NAMES)}"
    clients.administration.create_queue(queue, enable_partitioning=True)
    send(clients.messages, queue, *(f"{queue}-{n}" for n in range(PARTITIONS)))
    return queue


def subscribed(clients: Clients) -> str:
    """Create a partitioned topic with a subscription that has a message in each partition."""
    topic = f"topic-{next(NAMES)}"
    clients.administration.create_topic(topic, enable_partitioning=True)
    clients.administration.create_subscription(topic, "all")
    send(clients.messages, topic, *(f"{topic}-{n}" for n in range(PARTITIONS)))
    return topic


def plain(clients: Clients, partitions: range) -> str:
    """Create a queue with a message in one of these partitions."""
    names = (f"plain-{next(NAMES)}" for _ in itertools.count())
    queue = next(name for name in names if home_of(name, PARTITIONS) in partitions)
    clients.administration.create_queue(queue)
    send(clients.messages, queue, "m")
    return queue


def plain_topic(clients: Clients, partitions: range) -> str:
    """Create a topic in one of these partitions, with a subscription."""
    names = (f"plain-topic-{next(NAMES)}" for _ in itertools.count())
    topic = next(name for name in names if home_of(name, PARTITIONS) in partitions)
    clients.administration.create_topic(topic)
    clients.administration.create_subscription(topic, "all")
    return topic


def key_in(partitions: range) -> str:
    """Return a partition key of one of these partitions."""
    keys = (f"key{n}" for n in itertools.count())
    return next(key for key in keys if partition_of_key(key.encode(), PARTITIONS) in partitions)


def refusal_of(work: Callable[[], object]) -> int | None:
    with pytest.raises(HttpResponseError) as caught:
        work()
    return caught.value.status_code


# --- the steps of the outage ----------------------------------------------------------------------


def reads_as_available(clients: Clients, queue: str, count: int) -> None:
    administration = clients.administration
    assert administration.get_queue(queue).availability_status == "Available"
    assert administration.get_queue_runtime_properties(queue).active_message_count == count
    assert clients.counted(queue) == (count, "Available", [])


def reads_as_limited(clients: Clients, queue: str, topic: str) -> None:
    administration = clients.administration
    for _ in range(10):  # no request waits for a database that is known to be away
        assert clients.counted(queue) == (len(HERE), "Limited", list(THERE))
    assert administration.get_queue(queue).availability_status == "Limited"
    counted = administration.get_queue_runtime_properties(queue)
    assert counted.active_message_count == len(HERE)
    assert administration.get_topic(topic).availability_status == "Limited"
    assert administration.get_subscription(topic, "all").availability_status == "Limited"
    below = administration.get_subscription_runtime_properties(topic, "all")
    assert below.active_message_count == len(HERE)


def command_line_shows_availability(clients: Clients, limited: str, near: str) -> None:
    shown = clients.command_line.ok("get", "queue", limited)
    assert re.search(rf"^{limited}\b.*\b{len(HERE)}\b.*\bLimited$", shown, re.MULTILINE)
    assert "availability" not in clients.command_line.ok("get", "queue", near)
    runtime = clients.command_line.json("describe", limited)["runtime"]
    assert runtime["unavailablePartitions"] == list(THERE)


def is_refused_where_nothing_is_known(clients: Clients, near: str, far: str) -> None:
    control = clients.control
    reads_as_available(clients, near, 1)
    assert refusal_of(lambda: clients.administration.get_queue(far)) == 503
    refused = control.get(path_of("queues", far, "runtime"))
    assert (refused.status, refused.kind) == (503, "unavailable")
    assert control.get(path_of("queues", far)).status == 200  # the definition is known
    assert {near, far} <= {each["name"] for each in control.get("/v1/queues").body["items"]}


def lists_contain_what_is_not_counted(clients: Clients, near: str, far: str, topic: str) -> None:
    administration = clients.administration
    listed = {each.name: each.availability_status for each in administration.list_queues()}
    assert (listed[near], listed[far]) == ("Available", "Limited")
    counted = {each.name: each for each in administration.list_queues_runtime_properties()}
    assert counted[near].active_message_count == counted[near].total_message_count == 1
    assert counted[far].active_message_count is None
    assert counted[far].total_message_count is None
    assert counted[far].size_in_bytes is None
    topics = {each.name: each for each in administration.list_topics_runtime_properties()}
    assert topics[topic].subscription_count == 1
    assert topics[topic].size_in_bytes is None
    (below,) = administration.list_subscriptions_runtime_properties(topic)
    assert below.active_message_count is None
    shown = clients.command_line.ok("get", "queues")
    assert re.search(rf"^{near} +Active +1 .*Available$", shown, re.MULTILINE)
    assert re.search(rf"^{far} +Active +- +- +- +- +Limited$", shown, re.MULTILINE)
    assert clients.command_line.ok("get", "queue", far).endswith("Limited\n")
    assert clients.command_line.ok("get", "subscriptions", topic).endswith("Limited\n")
    rows = {each["name"]: each["active"] for each in clients.command_line.json("get", "queues")}
    assert (rows[near], rows[far]) == (1, None)


def messages_without_key_come_and_go(clients: Clients, queue: str) -> list[str]:
    new = [f"new-{n}" for n in range(PARTITIONS)]
    send(clients.messages, queue, *new)
    count = len(HERE) + len(new)
    assert clients.counted(queue) == (count, "Limited", list(THERE))
    taken = bodies_of(take(clients.messages, queue, count))
    assert set(new) < set(taken)
    return taken


def only_keys_of_lost_partitions_are_refused(clients: Clients, queue: str) -> None:
    with clients.messages.get_queue_sender(queue) as sender:
        for key in (key_in(HERE), key_in(HERE)):
            sender.send_messages(ServiceBusMessage("kept", partition_key=key))
            with pytest.raises(ServiceBusError):
                sender.send_messages(ServiceBusMessage("lost", partition_key=key_in(THERE)))
    assert clients.counted(queue) == (len(HERE) + 2, "Limited", list(THERE))


def definitions_change(clients: Clients, queue: str, young: str, gone: str) -> None:
    administration = clients.administration
    administration.update_queue(administration.get_queue(queue), status="SendDisabled")
    administration.create_queue(young, enable_partitioning=True)
    assert clients.counted(young) == (0, "Limited", list(THERE))
    administration.delete_queue(gone)


def changes_hold_everywhere(clients: Clients, queue: str, young: str, gone: str) -> None:
    assert clients.administration.get_queue(queue).status == "SendDisabled"
    with pytest.raises(ServiceBusError):
        send(clients.messages, queue, "m", partition_key=key_in(THERE))
    send(clients.messages, young, "m", partition_key=key_in(THERE))
    reads_as_available(clients, young, 1)
    assert clients.control.get(path_of("queues", gone)).status == 404


@pytest.mark.behaviour("S154", "S181", "S182", "S183", "S184", "S185", "S186", "S187", "S188")
@pytest.mark.behaviour("S147", "S226", "S227", "S228", "S239")
def test_one_of_two_databases_is_away_and_comes_back(clients: Clients) -> None:
    read, keyless, keyed = (spread(clients) for _ in range(3))
    for queue in ("changed", "first", "gone"):
        clients.administration.create_queue(queue, enable_partitioning=True)
    topic, near, far = subscribed(clients), plain(clients, HERE), plain(clients, THERE)
    far_topic = plain_topic(clients, THERE)
    reads_as_available(clients, read, PARTITIONS)
    described = clients.control.get(path_of("queues", read)).body
    assert described["partitions"] == list(range(PARTITIONS))
    clients.begin_outage("first")
    reads_as_limited(clients, read, topic)
    command_line_shows_availability(clients, read, near)
    is_refused_where_nothing_is_known(clients, near, far)
    lists_contain_what_is_not_counted(clients, near, far, far_topic)
    taken = messages_without_key_come_and_go(clients, keyless)
    only_keys_of_lost_partitions_are_refused(clients, keyed)
    definitions_change(clients, "changed", "young", "gone")
    clients.end_outage()
    reads_as_available(clients, read, PARTITIONS)
    reads_as_available(clients, far, 1)
    reads_as_available(clients, keyed, PARTITIONS + 2)
    taken += bodies_of(take(clients.messages, keyless, len(THERE)))
    assert set(taken) > {f"{keyless}-{n}" for n in range(PARTITIONS)}
    assert len(set(taken)) == len(taken) == 2 * PARTITIONS
    changes_hold_everywhere(clients, "changed", "young", "gone")
