"""Options are checked when a query is made; a mistake is named with what to write instead."""

from __future__ import annotations

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from postbus_spark.errors import InvalidOption
from postbus_spark.offsets import Offset
from postbus_spark.options import DEFAULT_BYTES_PER_TRIGGER, Options, read_options
from postbus_spark.source import PostbusSource

LEAST = {"entity": "orders", "readerGroup": "lake"}


def test_defaults() -> None:
    assert read_options(LEAST) == Options("orders", "lake")
    assert read_options(LEAST).max_bytes == DEFAULT_BYTES_PER_TRIGGER == 256 << 20


def test_all_options() -> None:
    offset = '{"v":1,"entity":"orders","generation":"g","p":{"0":5}}'
    assert read_options({
        "endpoint": "https://bus.example:5671/",
        "entity": "news/Subscriptions/all",
        "subQueue": "deadletter",
        "mode": "TAP",
        "readerGroup": "lake",
        "startingOffsets": offset,
        "maxMessagesPerTrigger": "10",
        "maxBytesPerTrigger": "0",
        "minPartitions": "4",
        "failOnDataLoss": "false",
        "connectionStringFile": "/run/secrets/bus",
        "tlsCaFile": "/etc/ca.pem",
        "includeRaw": "true",
        "propertiesFormat": "json",
    }) == Options(
        entity="news/Subscriptions/all",
        reader_group="lake",
        endpoint="https://bus.example:5671",
        sub_queue="deadLetter",
        mode="tap",
        starting=Offset("orders", "g", {0: 5}),
        max_messages=10,
        max_bytes=0,
        min_partitions=4,
        is_data_loss_fatal=False,
        connection_string_file="/run/secrets/bus",
        tls_ca_file="/etc/ca.pem",
        is_raw_included=True,
        properties_format="json",
    )  # fmt: skip


def test_spark_hands_options_over_in_lower_case() -> None:
    source = PostbusSource(CaseInsensitiveDict({**LEAST, "maxMessagesPerTrigger": "7"}))
    assert list(source.options) == ["entity", "readergroup", "maxmessagespertrigger"]
    assert "amqp" not in source.schema()
    assert source._options().max_messages == 7


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("maxMessagePerTrigger", "1", "did you mean maxMessagesPerTrigger?"),
        ("reader_group", "x", "did you mean readerGroup?"),
        ("qqq", "x", "there are connectionStringFile, endingOffsets, endingTimes"),
        ("connectionString", "Endpoint=sb://x", "would show a key in query plans"),
        ("sharedAccessKey", "x", "POSTBUS_CONNECTION_STRING"),
        ("mode", "peek", "option readerGroup: the mode peek reads what is there without a group"),
        ("mode", "history", "leave out readerGroup"),
        ("mode", "tip", "there is no mode tip"),
        ("startingTimestamp", "1", "belong to the mode history"),
        ("endingTimestamp", "2026-01-01", "a whole number from 0"),
        ("endpoint", "bus:5671", "an address such as https://"),
        ("endpoint", "https://user:secret@bus", "without user and password"),
        ("endpoint", "https://bus/path", "without a path"),
        ("endpoint", "https://bus:99999", "an address such as"),
        ("entity", "orders/$deadletterqueue", "the option subQueue selects dead letters"),
        ("entity", "", "the name of a queue"),
        ("entity", "a//b", "the name of a queue"),
        ("readerGroup", "", "the name of a reader group"),
        ("subQueue", "dead", "one of main, deadLetter, transferDeadLetter"),
        ("startingOffsets", "latest", "decided when the group is created"),
        ("startingOffsets", "{", "group, or an offset as JSON"),
        ("startingOffsets", '{"v":2}', "group, or an offset as JSON"),
        ("maxMessagesPerTrigger", "-1", "a whole number from 0"),
        ("maxBytesPerTrigger", "1g", "a whole number from 0"),
        ("maxBytesPerTrigger", "9" * 30, "a whole number from 0"),
        ("minPartitions", "0", "a whole number from 1 to 10000"),
        ("failOnDataLoss", "no", "true or false"),
        ("includeRaw", "1", "true or false"),
        ("propertiesFormat", "xml", "one of map, json"),
        ("connectionStringFile", "secret.txt", "an absolute path"),
        ("tlsCaFile", "/a\x00b", "an absolute path"),
    ],
)
def test_mistakes_are_named(name: str, value: str, text: str) -> None:
    with pytest.raises(InvalidOption) as error:
        read_options({**LEAST, name: value})
    assert text in str(error.value)
    assert "secret@" not in str(error.value)
    assert "sb://x" not in str(error.value)


@pytest.mark.parametrize("name", ["entity", "readerGroup"])
def test_missing_options_are_named(name: str) -> None:
    with pytest.raises(InvalidOption, match=f"the option {name} is missing"):
        read_options({key: value for key, value in LEAST.items() if key != name})


def test_modes_without_a_group() -> None:
    entity = {"entity": "orders"}
    assert read_options({**entity, "mode": "PEEK"}) == Options("orders", mode="peek")
    times = {"startingTimestamp": "5", "endingTimestamp": "5"}
    assert read_options({**entity, "mode": "history", **times}) == Options(
        "orders", mode="history", from_ms=5, to_ms=5
    )


OFFSET = '{"v":1,"entity":"orders","generation":"g","p":{"0":5}}'


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "peek", "startingTimestamp": "1"}, "belong to the mode history"),
        ({"mode": "peek", "startingOffsets": OFFSET}, "the mode peek has no offsets"),
        ({"mode": "history", "startingTimestamp": "-1"}, "a whole number from 0"),
        ({"mode": "history", "endingTimestamp": "9" * 17}, "a whole number from 0"),
        (
            {"mode": "history", "startingTimestamp": "6", "endingTimestamp": "5"},
            "endingTimestamp: 5 is before startingTimestamp",
        ),
        ({"mode": "tap"}, "the option readerGroup is missing"),
    ],
)
def test_options_of_another_mode_are_named(options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOption) as error:
        read_options({"entity": "orders", **options})
    assert text in str(error.value)


def test_offsets_name_the_sub_queue() -> None:
    assert Options("a", "g").offset_entity == "a"
    assert Options("a", "g", sub_queue="deadLetter").offset_entity == "a/$deadletterqueue"
