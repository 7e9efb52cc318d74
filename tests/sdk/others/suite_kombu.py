"""kombu's transport for Service Bus, as Celery uses it: tasks, answers, retries."""

from __future__ import annotations

import queue
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


def run_tasks(connection: Connection, tasks: Queue, count: int) -> None:
    """Do what a worker of Celery does: run what arrives, answer to `reply_to`, acknowledge."""
    done = 0

    def run(body: dict[str, Any], message: Message) -> None:
        nonlocal done
        if body["task"] == "fail once" and body["id"] not in failed:
            failed.add(body["id"])
            message.requeue()
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
            task = {"id": f"id-{number}", "task": "add", "args": [number, 1]}
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
