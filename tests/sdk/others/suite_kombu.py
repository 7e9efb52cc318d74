"""kombu's transport for Service Bus, as Celery uses it: tasks, answers, retries."""

from __future__ import annotations

import json
import os
import queue
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from azure.core.exceptions import ResourceNotFoundError
from kombu import Connection, Exchange, Queue
from kombu.message import Message

LONG_S = 20
HOST = "sdk-suite.servicebus.windows.net"
URL = f"azureservicebus://RootManageSharedAccessKey:SAS_KEY_VALUE@{HOST}"


@pytest.fixture
def connection() -> Iterator[Connection]:
    options = {"wait_time_seconds": 1, "peek_lock_seconds": 60, "queue_name_prefix": "celery-"}
    with Connection(URL, transport_options=options) as opened:
        yield opened


def advance(duration: str) -> None:
    """Let time pass for messages, at once."""
    request = urllib.request.Request(
        os.environ["POSTBUS_CONTROL"] + "/v1/clock/advance",
        json.dumps({"duration": duration}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ['POSTBUS_CONTROL_TOKEN']}",
        },
    )
    urllib.request.urlopen(request).close()


def run_tasks(connection: Connection, tasks: Queue, count: int) -> None:
    """Act as a worker of Celery: run received tasks, answer to `reply_to`, acknowledge."""
    done = 0

    def run(body: dict[str, Any], message: Message) -> None:
        nonlocal done
        if body["task"] == "fail once" and body["id"] not in failed:
            failed.add(body["id"])
            message.requeue()
            advance("PT61S")  # the transport gives no lock back: it has to end
            return
        answer = {"id": body["id"], "result": sum(body["args"])}
        with connection.Producer() as producer:
            producer.publish(answer, routing_key=message.properties["reply_to"])
        message.ack()
        done += 1

    failed: set[str] = set()
    with connection.Consumer(tasks, callbacks=[run], accept=["json"]):
        while done < count:
            connection.drain_events(timeout=LONG_S)


def test_tasks_are_run_and_answered(connection: Connection) -> None:
    exchange = Exchange("tasks", type="direct")
    tasks = Queue("tasks", exchange, routing_key="tasks")
    with connection.Producer() as producer:
        for number in range(5):
            kind = "fail once" if number == 2 else "add"
            task = {"id": f"id-{number}", "task": kind, "args": [number, 1]}
            producer.publish(
                task, exchange=exchange, routing_key="tasks", declare=[tasks], reply_to="answers"
            )
    with connection.SimpleQueue("answers") as answers:
        run_tasks(connection, tasks, 5)
        found = []
        for _ in range(5):
            message = answers.get(timeout=LONG_S)
            found.append((message.payload["id"], message.payload["result"]))
            message.ack()
    assert sorted(found) == [(f"id-{number}", number + 1) for number in range(5)]


def test_a_queue_is_counted_purged_and_deleted(connection: Connection) -> None:
    with connection.SimpleQueue("counted") as simple:
        for number in range(3):
            simple.put({"number": number})
        assert simple.qsize() == 3
        first = simple.get(timeout=LONG_S)
        assert first.payload == {"number": 0}
        first.ack()
        assert simple.clear() == 2
        with pytest.raises(queue.Empty):
            simple.get(timeout=1)
    channel = connection.channel()
    channel.queue_delete("counted")
    with pytest.raises(ResourceNotFoundError):
        channel.queue_mgmt_service.get_queue("celery-counted")


def test_every_call_of_a_channel(connection: Connection) -> None:
    channel = connection.channel()
    channel.exchange_declare("exchange", "direct")
    assert "exchange" in channel.get_exchanges()
    assert channel.queue_declare("bound").message_count == 0
    channel.queue_bind("bound", "exchange", "key")
    assert ("bound", "exchange", "key") in set(channel.list_bindings())
    for body in ("one", "two", "three"):
        message = channel.prepare_message(body, content_type="text/plain")
        channel.basic_publish(message, "exchange", "key")
    first = channel.basic_get("bound")
    assert channel.message_to_python(first) is first
    assert first.payload == "one"
    channel.basic_ack(first.delivery_tag)
    assert channel.basic_get("bound").payload == "two"
    assert channel.basic_recover(requeue=True) == []
    advance("PT61S")
    again = channel.basic_get("bound")
    assert again.payload == "two"
    channel.basic_reject(again.delivery_tag, requeue=False)
    assert channel.queue_declare("bound").message_count == 2
    channel.queue_unbind("bound", "exchange", "key")
    assert channel.get_table("exchange") == []
    channel.exchange_delete("exchange")
    assert "exchange" not in channel.get_exchanges()
    for missing in (
        lambda: channel.exchange_bind("exchange"),
        lambda: channel.exchange_unbind("exchange"),
        lambda: channel.flow(),
        lambda: channel.get_bindings(),
    ):
        with pytest.raises(NotImplementedError):
            missing()
    # Without bindings: those of the exchange lead to its deletion.
    channel.queue_mgmt_service.delete_queue("celery-bound")


def test_messages_are_consumed_one_by_one(connection: Connection) -> None:
    channel = connection.channel()
    channel.exchange_declare("answers", "direct")
    channel.queue_declare("one-by-one")
    channel.queue_bind("one-by-one", "answers", "one-by-one")
    producer = channel.Producer(routing_key="one-by-one")
    for body in ("one", "two"):
        producer.publish(body, exchange="answers")
    came: list[Message] = []
    channel.basic_qos(prefetch_count=1)
    consumer = channel.Consumer([Queue("one-by-one")], on_message=came.append)
    consumer.consume()
    channel.drain_events(timeout=LONG_S)
    with pytest.raises(queue.Empty):
        channel.drain_events(timeout=1)
    came[0].ack()
    channel.drain_events(timeout=LONG_S)
    came[1].ack()
    assert [message.payload for message in came] == ["one", "two"]
    consumer.cancel()
    channel.after_reply_message_received("one-by-one")
    with pytest.raises(ResourceNotFoundError):
        channel.queue_mgmt_service.get_queue("celery-one-by-one")
