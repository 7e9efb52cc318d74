"""Readers on a real bus, without a JVM: what the SDK sends is read once, whatever happens."""

from __future__ import annotations

import json
import pickle
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage
from pyspark import cloudpickle

from postbus.contract.entities import Right
from postbus_spark import read_batches, reject_messages
from postbus_spark.batches import BATCH_BYTES
from postbus_spark.errors import (
    BusRestored,
    EntityNotFound,
    EntityRecreated,
    Fenced,
    GroupNotFound,
    InvalidOption,
    InvalidRequest,
    NotAllowed,
    PostbusSparkError,
    StaleCheckpoint,
    Unauthorized,
)
from postbus_spark.options import Options, read_options
from postbus_spark.reader import BatchReader
from postbus_spark.stream import StreamReader
from postbus_spark.transport import Bus, call
from tests.edge.bus_thread import RULES, BusThread, Keys
from tests.pipeline.lake import GROUP, KEYS, Lake
from tests.pipeline.stored_rows import spark_schema

NAMES = ["partition", "position", "sequence_number", "body"]
Json = dict[str, Any]


def rows(lake: Lake, *columns: str, **more: str) -> list[Json]:
    options = lake.options(**more)
    batches = read_batches(list(columns) or None, **options)
    return [row for batch in batches for row in batch.to_pylist()]


def bodies(lake: Lake, **more: str) -> list[bytes]:
    return [row["body"] for row in rows(lake, "body", **more)]


def stream(lake: Lake, **more: str) -> StreamReader:
    return StreamReader(lake.checked(**more), spark_schema(NAMES))


def latest(reader: StreamReader, start: Json) -> Json:
    found = reader.latestOffset(json.loads(json.dumps(start)), reader.getDefaultReadLimit())
    return json.loads(json.dumps(found))


def read(reader: StreamReader, start: Json, end: Json) -> list[bytes]:
    """Plan a batch and read it with another reader, as executors do."""
    elsewhere = pickle.loads(cloudpickle.dumps(reader))
    tasks = [pickle.loads(pickle.dumps(task)) for task in reader.partitions(start, end)]
    return [
        row["body"] for task in tasks for batch in elsewhere.read(task) for row in batch.to_pylist()
    ]


def drained(reader: StreamReader, start: Json) -> tuple[list[list[bytes]], Json]:
    """Read as Spark does until nothing is left."""
    found = []
    while (end := latest(reader, start)) != start:
        if found:
            reader.commit(start)
        found.append(read(reader, start, end))
        start = end
    return found, start


# --- batches --------------------------------------------------------------------------------------


def test_messages_are_read_with_their_fields_although_they_are_completed(lake: Lake) -> None:
    number = uuid.uuid4()
    lake.send(
        b"one",
        message_id="m",
        session_id="s",
        subject="subject",
        correlation_id="c",
        time_to_live=timedelta(hours=1),
        application_properties={"sku": "a", "amount": 1.5, "id": number},
    )
    lake.send(b"two")
    lake.complete(1)
    first, second = rows(lake)
    assert first["entity"] == lake.entity
    assert first["body"] == b"one"
    assert (first["message_id"], first["session_id"], first["subject"]) == ("m", "s", "subject")
    assert first["time_to_live_ms"] == 3_600_000
    assert first["expires_at"] - first["enqueued_time"] == timedelta(hours=1)
    assert dict(first["application_properties"]) == {
        "sku": "a", "amount": "1.5", "id": str(number),
    }  # fmt: skip
    assert first["is_malformed"] is second["is_malformed"] is False
    assert (first["sequence_number"], second["sequence_number"]) == (1, 2)
    assert abs((first["enqueued_time"] - lake.bus.now()).total_seconds()) < 60
    assert rows(lake) == [first, second], "reading leaves the group where it is"


def test_bodies_of_every_kind(lake: Lake) -> None:
    with lake.bus.client() as client, client.get_queue_sender(lake.entity) as sender:
        sender.send_messages(AmqpAnnotatedMessage(data_body=[b"a", b"b"]))
        sender.send_messages(AmqpAnnotatedMessage(value_body={"k": [1, True]}))
        sender.send_messages(AmqpAnnotatedMessage(sequence_body=[["x", 2]]))
        sender.send_messages(ServiceBusMessage(None))
    found = rows(lake, "body", "body_type", "is_malformed")
    assert [(each["body_type"], each["body"]) for each in found][:3] == [
        ("data", b"ab"),
        ("value", b'{"k":[1,true]}'),
        ("sequence", b'["x",2]'),
    ]
    assert not any(each["is_malformed"] for each in found)


def test_a_raw_message_is_what_was_sent(lake: Lake) -> None:
    lake.send(b"one", subject="s", application_properties={"a": 1})
    [row] = rows(lake, "amqp", "body")
    again = Lake(lake.bus, lake.bus.queue(), lake.folder)
    again.create()
    again.send(row["body"], subject="s", application_properties={"a": 1})
    raw = rows(again, "amqp")[0]["amqp"]
    assert len(raw) == len(row["amqp"])


def test_dead_letters_and_their_reasons(lake: Lake) -> None:
    dead = replace_sub_queue(lake)
    lake.send(b"one", b"two")
    with lake.bus.client() as client, client.get_queue_receiver(lake.entity) as receiver:
        for message in receiver.receive_messages(2, max_wait_time=5):
            receiver.dead_letter_message(message, reason="NoPrice", error_description="sku 7")
    found = [row for batch in read_batches(**dead) for row in batch.to_pylist()]
    assert [row["body"] for row in found] == [b"one", b"two"]
    assert {row["dead_letter_reason"] for row in found} == {"NoPrice"}
    assert {row["dead_letter_error_description"] for row in found} == {"sku 7"}
    assert {row["sub_queue"] for row in found} == {"deadLetter"}
    assert bodies(lake) == [b"one", b"two"]


def replace_sub_queue(lake: Lake) -> dict[str, str]:
    lake.create("dead", subQueue="deadLetter")
    return lake.options(subQueue="deadLetter", readerGroup="dead")


def test_a_subscription_of_a_topic(bus: BusThread, tmp_path: Path) -> None:
    topic = bus.topic()
    bus.subscription(topic, "lake")
    lake = Lake(bus, f"{topic}/Subscriptions/lake", tmp_path)
    lake.create()
    with bus.client() as client, client.get_topic_sender(topic) as sender:
        sender.send_messages(ServiceBusMessage(b"news"))
    assert bodies(lake) == [b"news"]
    reader = stream(lake)
    assert drained(reader, reader.initialOffset())[0] == [[b"news"]]


@pytest.mark.slow
def test_many_messages_and_large_ones(lake: Lake) -> None:
    sent = [b"%d " % number * 500 for number in range(2_000)]
    lake.send(*sent)
    lake.send(b"x" * 200_000)
    assert bodies(lake, minPartitions="3") == [*sent, b"x" * 200_000]
    sizes = [batch.nbytes for batch in read_batches(["body"], **lake.options())]
    assert sum(sizes) > BATCH_BYTES
    assert len(sizes) == 2
    assert max(sizes) <= BATCH_BYTES


def test_tls_with_the_authority_of_the_bus(lake: Lake) -> None:
    lake.send(b"one")
    more = {"endpoint": f"https://localhost:{lake.bus.port}"}
    ca_file = str(lake.bus.authority_file)
    assert bodies(lake, **more, tlsCaFile=ca_file) == [b"one"]
    with pytest.raises(PostbusSparkError, match="the option tlsCaFile"):
        bodies(lake, **more)


def test_the_authority_of_the_bus_is_named_by_the_environment(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the bus alone: with SSL_CERT_FILE other libraries would trust nobody else."""
    lake.send(b"one")
    monkeypatch.setenv("POSTBUS_CA_FILE", str(lake.bus.authority_file))
    assert bodies(lake, endpoint=f"https://localhost:{lake.bus.port}") == [b"one"]


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_a_stream_reads_each_message_once_in_batches(
    bus: BusThread, tmp_path: Path, is_partitioned: bool
) -> None:
    lake = Lake(bus, bus.queue(enable_partitioning=is_partitioned), tmp_path)
    lake.create()
    sent = [b"%d" % number for number in range(700)]
    lake.send(*sent)
    reader = stream(lake, maxMessagesPerTrigger="100", minPartitions="3")
    batches, end = drained(reader, reader.initialOffset())
    assert all(0 < len(batch) <= 100 for batch in batches)
    assert len(batches) in range(7, 14)
    assert sorted(body for batch in batches for body in batch) == sorted(sent)
    assert is_partitioned or [body for batch in batches for body in batch] == sent
    group = lake.group()
    assert (group.plan.number, group.plan.is_settled) == (len(batches), False)

    lake.send(b"later")
    again = stream(lake)
    assert again.partitions(end, end) == []
    after = latest(again, end)
    again.commit(end)
    assert lake.group().plan.is_settled
    assert read(again, end, after) == [b"later"]


def test_gaps_between_blocks_cost_no_empty_batches(bus: BusThread, tmp_path: Path) -> None:
    """Positions of two queues alternate in blocks."""
    lake, other = (Lake(bus, bus.queue(), tmp_path) for _ in range(2))
    lake.create()
    for _ in range(4):
        lake.send(*[b"x"] * 200)
        other.send(*[b"y"] * 200)
    reader = stream(lake, maxMessagesPerTrigger="150")
    batches, _ = drained(reader, reader.initialOffset())
    assert sum(map(len, batches)) == 800
    assert all(batches)


def test_a_drain_takes_messages_out_of_the_queue(bus: BusThread, tmp_path: Path) -> None:
    lake = Lake(bus, bus.queue(), tmp_path)
    sent = [b"%d" % number for number in range(250)]
    lake.send(*sent)
    lake.create(kind="drain")
    reader = stream(lake, mode="drain", maxMessagesPerTrigger="100")
    start = reader.initialOffset()
    batches, end = drained(reader, start)
    assert [body for batch in batches for body in batch] == sent
    assert bus.counts(lake.entity).active == 50, "a batch is settled when the next is planned"
    again = stream(lake)
    assert again.partitions(end, end) == []
    assert latest(again, end) == end
    again.commit(end)
    assert bus.counts(lake.entity).active == 0
    for more in ({}, {"mode": "drain"}):
        with pytest.raises(InvalidOption, match="read it as a stream"):
            rows(lake, **more)
    with pytest.raises(InvalidOption, match="is a drain, not a tap"):
        stream(lake, mode="tap").initialOffset()


def test_rejected_messages_of_a_drain_are_dead_letters(lake: Lake) -> None:
    lake.send(b"x")
    reader = stream(lake)
    start = reader.initialOffset()
    [place] = places(reader, start, latest(reader, start))
    with pytest.raises(NotAllowed, match="tap"):
        reject_messages([place], reason="x", **lake.options())
    other = Lake(lake.bus, lake.bus.queue(), lake.folder)
    other.send(b"a", b"b", b"c")
    other.create(kind="drain")
    reader = stream(other)
    start = reader.initialOffset()
    end = latest(reader, start)
    assert read(reader, start, end) == [b"a", b"b", b"c"]
    _, place, _ = places(reader, start, end)
    options = other.options()
    assert reject_messages([place], reason="NoPrice", description="why", **options) == 1
    assert reject_messages([place], reason="NoPrice", **options) == 0
    assert read(reader, start, end) == [b"a", b"b", b"c"]
    reader.commit(end)
    counts = lake.bus.counts(other.entity)
    assert (counts.active, counts.dead_letter) == (0, 1)
    with pytest.raises(InvalidRequest, match="planned range"):
        reject_messages([place], reason="NoPrice", **options)


def places(reader: StreamReader, start: Json, end: Json) -> list[tuple[int, int]]:
    """Return partition and position of the messages of a batch."""
    return [
        (row["partition"], row["position"])
        for task in reader.partitions(start, end)
        for batch in reader.read(task)
        for row in batch.to_pylist()
    ]


def test_a_lost_checkpoint_repeats_the_last_range_under_its_number(lake: Lake) -> None:
    lake.send(b"a", b"b", b"c")
    first = stream(lake, maxMessagesPerTrigger="2")
    start = first.initialOffset()
    end = latest(first, start)
    assert read(first, start, end) == [b"a", b"b"]
    lake.send(b"d")
    lake.complete(3)
    second = stream(lake, maxMessagesPerTrigger="1")
    second.prepareForTriggerAvailableNow()
    assert second.initialOffset() == start
    assert latest(second, start) == end
    assert read(second, start, end) == [b"a", b"b"]
    plan = lake.group().plan
    assert (plan.number, plan.attempts) == (1, 2)
    assert drained(second, end)[0] == [[b"c"], [b"d"]]


def test_the_older_of_two_readers_is_refused_with_the_name_of_the_newer(lake: Lake) -> None:
    lake.send(b"a")
    older, newer = stream(lake), stream(lake)
    start = older.initialOffset()
    end = latest(older, start)
    tasks = older.partitions(start, end)
    assert latest(newer, start) == end
    for step in (
        lambda: list(older.read(tasks[0])),
        lambda: older.partitions(start, end),
        lambda: older.commit(end),
        lambda: latest(older, end),
    ):
        with pytest.raises(Fenced, match=r"process \d+.*Only one query at a time"):
            step()
    assert read(newer, start, end) == [b"a"]


def test_an_older_checkpoint_and_one_ahead_of_the_bus_are_refused(lake: Lake) -> None:
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    _, end = drained(reader, start)
    reader.commit(end)
    with pytest.raises(StaleCheckpoint, match="Restore the newest checkpoint"):
        latest(stream(lake), start)
    ahead = {**end, "p": {name: position + 5 for name, position in end["p"].items()}}
    with pytest.raises(BusRestored, match="Start with an empty checkpoint"):
        latest(stream(lake), ahead)
    with pytest.raises(BusRestored):
        stream(lake).partitions(end, ahead)
    lake.reset("earliest")
    assert drained(stream(lake), start)[0] == [[b"a"]]


def test_a_reset_ends_the_reader(lake: Lake) -> None:
    lake.send(b"a")
    reader = stream(lake)
    _, end = drained(reader, reader.initialOffset())
    lake.reset("earliest")
    with pytest.raises(Fenced):
        reader.commit(end)


def test_an_entity_that_was_made_again_is_noticed(lake: Lake) -> None:
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    _, end = drained(reader, start)
    tasks = BatchReader(lake.checked(), spark_schema(NAMES)).partitions()
    lake.bus.delete(lake.entity)
    with pytest.raises(EntityNotFound):
        stream(lake).initialOffset()
    lake.bus.queue(lake.entity)
    with pytest.raises(GroupNotFound, match="postbus groups create"):
        stream(lake).initialOffset()
    lake.create()
    with pytest.raises(EntityRecreated, match="start with an empty checkpoint"):
        latest(stream(lake), end)
    lake.send(b"b")
    assert tasks
    for task in tasks:
        with pytest.raises((EntityRecreated, Fenced, BusRestored)):
            list(reader.read(task))


def test_a_topic_itself_cannot_be_read(bus: BusThread, tmp_path: Path) -> None:
    lake = Lake(bus, bus.topic(), tmp_path)
    with pytest.raises(NotAllowed, match="subscription"):
        lake.group()


def test_a_batch_read_disturbs_no_stream(lake: Lake) -> None:
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    end = latest(reader, start)
    assert bodies(lake) == [b"a"]
    assert read(reader, start, end) == [b"a"]
    assert bodies(lake) == [b"a"]
    reader.commit(end)
    assert bodies(lake) == []


# --- rights ---------------------------------------------------------------------------------------


def test_a_right_that_is_missing_is_named(lake: Lake) -> None:
    options = lake.options()
    options["connectionStringFile"] = lake.connection_file("sender")
    with pytest.raises(Unauthorized, match=r"'Listen' claim\(s\) are required.*Reading needs"):
        StreamReader(read_options(options), spark_schema(NAMES)).initialOffset()


def test_a_wrong_key_is_told_without_it(lake: Lake) -> None:
    options = lake.options()
    options["connectionStringFile"] = lake.connection_file("listener", "wr0ng-key")
    with pytest.raises(Unauthorized, match="does not match") as error:
        StreamReader(read_options(options), spark_schema(NAMES)).initialOffset()
    assert "wr0ng" not in str(error.value)


def test_a_task_with_a_token_that_ended_says_so(lake: Lake) -> None:
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    tasks = reader.partitions(start, latest(reader, start))
    lake.bus.real_shift_s = 3_700
    with pytest.raises(Unauthorized, match=r"ExpiredToken.*ends an hour after its batch"):
        list(reader.read(tasks[0]))


def test_a_key_may_be_rotated_while_a_query_runs(lake: Lake) -> None:
    """The driver reads its file once; a rule has two keys, so that the old one lasts a while."""
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    end = latest(reader, start)
    others = [rule for rule in RULES if rule.name != "listener"]
    listener = next(rule for rule in RULES if rule.name == "listener")
    try:
        lake.bus.set_rules(*others, replace(listener, keys=Keys("new", listener.keys.primary)))
        assert read(reader, start, end) == [b"a"]
        lake.bus.set_rules(*others, replace(listener, keys=Keys("new", "newer")))
        with pytest.raises(Unauthorized, match="does not match a key"):
            latest(reader, end)
    finally:
        lake.bus.set_rules(*RULES)


def test_the_token_of_a_task_works_for_its_group_only(lake: Lake) -> None:
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    [task] = reader.partitions(start, latest(reader, start))
    lake.create("other")
    token, bus = task.value.token, Bus(f"http://localhost:{lake.bus.port}")
    below = f"/{lake.entity}/$bulk"
    call(bus, "GET", f"{below}/groups/{GROUP}", token)
    for method, target, body in (
        ("GET", f"{below}/groups/other", None),
        ("POST", f"{below}/groups/other/claim", {}),
        ("GET", f"{below}/ranges", None),
        ("POST", f"{below}/groups/{GROUP}/reset", {"start": "latest"}),
        ("DELETE", f"{below}/groups/{GROUP}", None),
        ("POST", f"/{lake.entity}/messages/head", None),
        ("POST", f"/{lake.entity}/messages", {}),
        ("GET", f"/{lake.entity}", None),
    ):
        with pytest.raises(Unauthorized):
            call(bus, method, target, token, body)


def test_no_key_travels(lake: Lake) -> None:
    assert Right.LISTEN in next(rule for rule in RULES if rule.name == "listener").rights
    lake.send(b"a")
    reader = stream(lake)
    start = reader.initialOffset()
    end = latest(reader, start)
    batch = BatchReader(lake.checked(), spark_schema(NAMES))
    for each in (
        reader, reader.partitions(start, end), batch, batch.partitions(), batch.read, start,
        Options(lake.entity, GROUP),
    ):  # fmt: skip
        pickled = cloudpickle.dumps(each)
        assert not [key for key in KEYS if key.encode() in pickled]
