"""Batches without a reader group on a real bus, without a JVM."""

from __future__ import annotations

import pickle
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from pyspark import cloudpickle

from postbus_spark import read_batches, reject_messages
from postbus_spark.errors import (
    EntityNotFound,
    EntityRecreated,
    InvalidOption,
    NotAllowed,
    PostbusSparkError,
    Unauthorized,
)
from postbus_spark.options import read_options
from postbus_spark.reader import BatchReader
from postbus_spark.stream import StreamReader
from postbus_spark.transport import Bus, call
from tests.edge.bus_thread import BusThread
from tests.pipeline.lake import KEYS, Lake
from tests.pipeline.stored_rows import spark_schema

Json = dict[str, Any]
STATES = ["delivery_count", "state", "settled_time", "settlement"]


@pytest.fixture
def kept(bus: BusThread, tmp_path: Path) -> Lake:
    """A queue with a history, and no reader group."""
    return Lake(bus, bus.queue(historyRetention="P7D"), tmp_path)


def options(lake: Lake, mode: str, rule: str = "listener", **more: str) -> dict[str, str]:
    file = lake.connection_file(rule)
    return {"entity": lake.entity, "connectionStringFile": file, "mode": mode, **more}


def rows(lake: Lake, mode: str, *columns: str, **more: str) -> list[Json]:
    batches = read_batches(list(columns) or None, **options(lake, mode, **more))
    return [row for batch in batches for row in batch.to_pylist()]


def reader(lake: Lake, mode: str, names: list[str], **more: str) -> BatchReader:
    return BatchReader(read_options(options(lake, mode, **more)), spark_schema(names))


def test_a_peek_has_dead_letters_with_their_reasons(kept: Lake) -> None:
    kept.send(b"one", b"two", b"live")
    kept.dead_letter(2, "NoPrice")
    found = rows(kept, "peek", subQueue="deadLetter")
    assert [row["body"] for row in found] == [b"one", b"two"]
    assert {row["dead_letter_reason"] for row in found} == {"NoPrice"}
    assert {(row["delivery_count"], row["state"]) for row in found} == {(0, "active")}
    assert "settlement" not in found[0], "a peek has no settled messages"
    assert rows(kept, "peek", "body") == [{"body": b"live"}]


def test_a_history_has_the_settled_messages_of_a_time(kept: Lake) -> None:
    for body in (b"first", b"second", b"third"):
        kept.send(body)
        kept.bus.advance(1_000)
    kept.complete(2)
    found = rows(kept, "history")
    assert [row["settlement"] for row in found] == ["completed", "completed", None]
    assert [row["state"] for row in found] == [None, None, "active"]
    for row in found[:2]:
        assert row["settled_time"] > row["enqueued_time"]
    second, third = (_ms(row["enqueued_time"]) for row in found[1:])
    times = {"startingTimestamp": str(second), "endingTimestamp": str(third)}
    assert rows(kept, "history", "body", *STATES[3:], **times) == [
        {"body": b"second", "settlement": "completed"}
    ]


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1_000)


@pytest.mark.slow
def test_each_message_of_a_partitioned_queue_is_in_one_task(bus: BusThread, tmp_path: Path) -> None:
    lake = Lake(bus, bus.queue(enablePartitioning=True), tmp_path)
    sent = [f"m{number}" for number in range(200)]
    with bus.client() as client, client.get_queue_sender(lake.entity) as sender:
        for name in sent:
            sender.send_messages(ServiceBusMessage(b"", message_id=name, partition_key=name))
    for least in (1, 40):
        batch = reader(lake, "peek", ["message_id", "partition"], minPartitions=str(least))
        found: Counter[str] = Counter()
        planned = batch.partitions()
        assert len(planned) >= least
        assert len(planned) < least + 16, "at most one more for each partition"
        for task in planned:
            for each in batch.read(pickle.loads(cloudpickle.dumps(task))):
                found.update(each.column("message_id").to_pylist())
        assert found == Counter(sent)


def test_an_empty_queue_has_no_task(kept: Lake) -> None:
    for mode in ("peek", "history"):
        assert reader(kept, mode, ["body"], minPartitions="4").partitions() == []
        assert rows(kept, mode) == []


@pytest.mark.parametrize(
    ("is_made_again", "error"), [(False, EntityNotFound), (True, EntityRecreated)]
)
def test_a_task_whose_queue_was_deleted_is_refused(
    kept: Lake, is_made_again: bool, error: type[PostbusSparkError]
) -> None:
    kept.send(b"a")
    batch = reader(kept, "peek", ["body"])
    [task] = batch.partitions()
    kept.bus.delete(kept.entity)
    if is_made_again:
        kept.bus.queue(kept.entity)
        kept.send(b"other")
    with pytest.raises(error):
        list(batch.read(task))


def test_what_cannot_be_read_is_named(kept: Lake, bus: BusThread, tmp_path: Path) -> None:
    with pytest.raises(NotAllowed, match="read it through a subscription of your own"):
        rows(Lake(bus, bus.topic(), tmp_path), "peek")
    with pytest.raises(EntityNotFound, match="there is no nowhere"):
        rows(Lake(bus, "nowhere", tmp_path), "history")
    with pytest.raises(Unauthorized, match="needs a key with the right Listen"):
        rows(kept, "peek", rule="sender")


def test_streams_and_rejections_need_a_group(kept: Lake) -> None:
    stream = StreamReader(read_options(options(kept, "peek")), spark_schema(["body"]))
    with pytest.raises(InvalidOption, match=r"peek reads what is there now.*use spark\.read"):
        stream.initialOffset()
    with pytest.raises(InvalidOption, match="streams and rejections need a readerGroup"):
        reject_messages([(0, 1)], reason="NoPrice", **options(kept, "history"))


def test_the_token_of_a_task_reads_rows_only_and_no_key_travels(kept: Lake) -> None:
    kept.send(b"a")
    kept.create("lake")
    batch = reader(kept, "peek", ["body"])
    [task] = batch.partitions()
    for each in (batch, batch.read, task):
        assert not [key for key in KEYS if key.encode() in cloudpickle.dumps(each)]
    assert task.value.token not in repr(task.value)
    token, bus = task.value.token, Bus(f"http://localhost:{kept.bus.port}")
    below = f"/{kept.entity}/$bulk"
    for method, target in (
        ("GET", f"{below}/ranges?mode=peek"),
        ("GET", f"{below}/groups/lake"),
        ("GET", f"{below}/rows?group=lake&epoch=1&partition=0&from=0&to=1"),
        ("POST", f"{below}/groups/lake/claim"),
        ("POST", f"/{kept.entity}/messages"),
        ("POST", f"/{kept.entity}/messages/head"),
    ):
        with pytest.raises(Unauthorized):
            call(bus, method, target, token)
