"""Specs of pipelines that an API server accepts, and those that it refuses."""

from __future__ import annotations

from typing import Any, Final

Spec = dict[str, Any]

TABLE: Final = {"from": "orders", "table": {"format": "parquet", "path": "/lake/orders"}}
LAKE: Final = {"claimName": "lake", "mountPath": "/lake"}
MINIMAL_PIPELINE: Final[Spec] = {
    "owner": {"name": "shop-bus"},
    "sources": [{"name": "orders", "queue": "orders"}],
    "sinks": [{"from": "orders", "queue": "copies"}],
    "trigger": {"once": True},
    "checkpoint": {"path": "/lake/checkpoints/orders"},
}


def source(**fields: Any) -> Spec:
    return {"sources": [{"name": "orders", **fields}]}


def sources(*names: str) -> Spec:
    return {"sources": [{"name": name, "queue": name} for name in names]}


def sink(**fields: Any) -> Spec:
    return {"sinks": [{"from": "orders", **fields}]}


def looked_up(*lookups: Spec) -> Spec:
    return {"lookups": list(lookups)}


def table(**fields: Any) -> Spec:
    return {"sinks": [{"from": "orders", "table": TABLE["table"] | fields}], "volumes": [LAKE]}


def replay(**fields: Any) -> Spec:
    return source(**fields) | {"checkpoint": None, "volumes": [LAKE]}


DRAINED: Final = source(queue="orders", mode="drain")
HISTORY: Final = {"queue": "orders", "mode": "history"}
WATERMARK: Final = {"column": "body.placed", "delay": "PT10M"}
CAPTURED: Final = {"format": "parquet", "path": "/lake/orders"}
CATALOG: Final = {"uri": "https://catalog.shop/api"}
ICEBERG: Final = {"format": "iceberg", "name": "shop.orders", "catalog": CATALOG}
NOON: Final = "2026-01-31T12:00:00Z"
NO_FOLDERS: Final = ("lake", "/", "/./", "/a/../b", "s3://lake/orders", "/..", "")

# spec, part of the error
REFUSED_PIPELINES: Final = [
    ({"owner": None}, "name the Namespace of the bus in owner"),
    ({"sources": []}, "should have at least 1 items"),
    (sources("orders", "orders"), "two sources have one name: choose another one"),
    (sources(*(f"s{number}" for number in range(11))), "must have at most 10 items"),
    (
        {"sources": [HISTORY | {"name": "orders"}, {"name": "a", "queue": "a"}]},
        "a source of history or of a table is the only one",
    ),
    (source(queue="orders", deduplicate=["message_id"]), "deduplicate needs a watermark"),
    (replay(**HISTORY, watermark=WATERMARK), "history and tables are one batch"),
    (source(queue="orders", watermark=WATERMARK | {"delay": "P91D"}), "between PT0S and P90D"),
    (source(queue="orders", watermark=WATERMARK | {"column": "a b"}), "should match"),
    (
        source(queue="orders", watermark=WATERMARK)
        | {"transform": {"python": {"module": "a", "function": "b"}}},
        "a function sees one batch at a time",
    ),
    (source(), "name a queue, or a topic and its subscription, or a table"),
    (source(queue="orders", table=CAPTURED), "or a table"),
    (replay(table={**CAPTURED, "format": "csv"}), "supported values"),
    (replay(table={**CAPTURED, "path": "/a/../b"}), "an absolute path of a folder"),
    (replay(table={**CAPTURED, "path": "/other"}), "a table without a volume would go"),
    (replay(table=CAPTURED, mode="drain"), "a table has neither mode nor subQueue"),
    (replay(table=CAPTURED, subQueue="deadLetter"), "a table has neither mode nor subQueue"),
    (replay(**HISTORY, readerGroup="lake"), "history and tables have no reader group"),
    (replay(**HISTORY, **{"from": "yesterday"}), "should match"),
    (replay(**HISTORY, **{"from": NOON, "to": NOON}), "to must be later than from"),
    (source(queue="orders", to=NOON), "from and to are for mode: history"),
    (replay(**HISTORY) | {"checkpoint": {"path": "/a"}}, "history and tables have none"),
    ({"checkpoint": None}, "a source with a reader group needs a checkpoint"),
    (replay(**HISTORY) | {"trigger": {"continuous": "PT1S"}}, "is read once: write once: true"),
    (replay(**HISTORY) | {"trigger": {"schedule": "* * * * *"}}, "is read once"),
    (replay(**HISTORY) | {"limits": {"maxAttempts": 2}}, "leave out limits, or set a rate"),
    (replay(**HISTORY) | {"sinks": [TABLE]}, "can be sent to queues and topics only"),
    (table(path="/lake/orders") | {"sinks": [TABLE | {"rate": 5}]}, "only a queue or topic has"),
    (sink(queue="copies", rate=0), "greater than or equal to 1"),
    (source(queue="orders", topic="events", subscription="all"), "name a queue, or a topic"),
    (source(topic="events"), "name a queue, or a topic and its subscription"),
    (source(queue="orders", mode="peek"), "supported values"),
    (source(queue="orders", readerGroup="Lake"), "should match"),
    (looked_up({"name": "prices"}), "name one table: parquet or delta"),
    (looked_up({"name": "prices", "parquet": "/a", "delta": "/b"}), "name one table"),
    (looked_up({"name": "Prices", "parquet": "/a"}), "should match"),
    (looked_up({"name": "prices", "parquet": "s3://a"}), "an absolute path of a folder"),
    (looked_up({"name": "prices", "delta": "/a/../b"}), "an absolute path of a folder"),
    (looked_up(*({"name": f"p{number}", "delta": "/a"} for number in range(21))), "at most 20"),
    ({"transform": {}}, "write either sql or python"),
    (
        {"transform": {"sql": {"a": "b"}, "python": {"module": "a", "function": "b"}}},
        "write either sql or python",
    ),
    ({"transform": {"sql": {"Priced": "select 1"}}}, "names of outputs have small letters"),
    ({"sinks": []}, "should have at least 1 items"),
    (sink(), "name one target"),
    (sink(queue="a", topic="b"), "name one target"),
    (DRAINED | sink(deadLetter="other"), "deadLetter names the source"),
    (sink(deadLetter="orders"), "only a drained source has deadLetter"),
    (
        source(queue="orders", mode="drain", subQueue="deadLetter") | sink(deadLetter="orders"),
        "messages of this source are dead letters already",
    ),
    (table(partitionBy=["hour"]), "partitionBy is [date, hour], [date] or []"),
    (table(format="avro"), "supported values"),
    ({"trigger": {}}, "write one of continuous: PT1S, schedule: '*/5 * * * *', once: true"),
    ({"trigger": {"continuous": "PT1S", "once": True}}, "write one of continuous"),
    ({"trigger": {"schedule": "* * * * *", "once": True}}, "write one of continuous"),
    ({"trigger": {"once": False}}, "supported values"),
    ({"trigger": {"continuous": "PT0.05S"}}, "must be between PT0.1S and P1D"),
    ({"trigger": {"schedule": "@daily"}}, "five fields"),
    ({"trigger": {"schedule": "* * * * * *"}}, "five fields"),
    *(({"checkpoint": {"path": path}}, "path") for path in NO_FOLDERS),
    ({"checkpoint": {"path": "lake"}}, "an absolute path of a folder, such as /lake/orders"),
    (table(path="/a/../b"), "an absolute path of a folder, such as /lake/orders"),
    (table(path="s3://lake"), "or a bucket and a prefix, such as s3://lake/orders"),
    (table(path="s3://lake/a/../b"), "or a bucket and a prefix, such as s3://lake/orders"),
    (table(path="s3://lake/a b"), "or a bucket and a prefix, such as s3://lake/orders"),
    (table(format="iceberg"), "a table of iceberg has a name, such as shop.orders"),
    (table(name="shop.orders"), "a table of iceberg has a name, such as shop.orders"),
    (table(catalog=CATALOG), "a table of iceberg has a name, such as shop.orders"),
    (table(**(ICEBERG | {"name": "orders"})), "should match"),
    (
        {"volumes": [{"claimName": "lake", "mountPath": "/"}]},
        "an absolute path of a folder, such as /lake/orders",
    ),
    ({"sinks": [TABLE]}, "a table without a volume would go with its pod"),
    (table(path="/lakes/orders"), "a table without a volume would go with its pod"),
    ({"runtime": {"memory": "1023Mi"}}, "memory must be at least 1Gi"),
    ({"runtime": {"memory": "2G"}}, "should match"),
    ({"runtime": {"cores": 0}}, "greater than or equal to 1"),
    ({"runtime": {"executors": 101}}, "less than or equal to 100"),
    ({"runtime": {"executor": {"memory": "512Mi"}}}, "memory must be at least 1Gi"),
    ({"runtime": {"executor": {"cores": 0}}}, "greater than or equal to 1"),
    ({"runtime": {"executor": {"coreRequest": "0.5"}}}, "should match"),
    ({"runtime": {"envFrom": [{}]}}, "Required value"),
    ({"runtime": {"envFrom": [{"secretRef": {"name": "Lake"}}]}}, "should match"),
    ({"operatorSpec": {"deletionPolicy": "DeleteIfEmpty"}}, "supported values"),
    ({"operatorSpec": {"maxLag": "PT59S"}}, "must be between PT1M and P90D"),
]

CHANGED_SOURCE: Final = "entity, table, mode, reader group and times of a source cannot be changed"

# spec before, spec after, part of the error
REFUSED_PIPELINE_CHANGES: Final = [
    ({}, {"owner": {"name": "other-bus"}}, "owner cannot be changed: create another Pipeline"),
    ({}, source(queue="others"), CHANGED_SOURCE),
    ({}, source(queue="orders", readerGroup="lake"), CHANGED_SOURCE),
    ({}, DRAINED, CHANGED_SOURCE),
    ({}, sources("orders", "returns"), CHANGED_SOURCE),
    (replay(**HISTORY), replay(**HISTORY, **{"from": NOON}), CHANGED_SOURCE),
    (replay(table=CAPTURED), replay(table={**CAPTURED, "path": "/lake/b"}), CHANGED_SOURCE),
]

ACCEPTED_PIPELINES: Final[list[Spec]] = [
    {},
    sources("orders", *(f"s{number}" for number in range(9))),
    source(queue="orders", watermark=WATERMARK, deduplicate=["message_id", "body.sku"]),
    table(path="/lake/..."),
    table(path="s3://lake/shop/date=1") | {"volumes": None},
    table(**ICEBERG),
    replay(table={**CAPTURED, **ICEBERG, "path": "s3://lake/orders"}),
    replay(table={**CAPTURED, "path": "s3://lake/orders"}),
    {"sinks": [TABLE], "volumes": [{"claimName": "lake", "mountPath": "/lake/orders"}]},
    source(topic="events", subscription="lake", subQueue="deadLetter"),
    DRAINED | sink(deadLetter="orders"),
    replay(**HISTORY, subQueue="deadLetter", **{"from": "2026-01-31T08:00:00.125Z", "to": NOON}),
    replay(table=CAPTURED, to=NOON) | sink(topic="copies", rate=1_000_000),
    {"transform": {"python": {"module": "shop.pricing", "function": "price"}}},
    {"transform": {"sql": {f"output_{number}": "select 1" for number in range(100)}}},
    {"sinks": [{"from": f"o{number}", "queue": "copies"} for number in range(100)]},
    looked_up(*({"name": f"p{number}", "parquet": "/a"} for number in range(20))),
    looked_up({"name": "prices", "delta": "/lake/prices"}),
    {"trigger": {"continuous": "PT0.1S"}, "suspend": True},
    {"trigger": {"schedule": "*/5 6-18 * * MON-FRI"}},
    {"runtime": {"cores": 8, "memory": "1536Mi", "image": "shop/pricing:7"}},
    {"runtime": {"executors": 2, "executor": {"cores": 4, "coreRequest": "3500m"}}},
    {"runtime": {"executors": 100, "executor": {"coreRequest": "1", "memory": "64Gi"}}},
    {"runtime": {"envFrom": [{"secretRef": {"name": "lake-access"}}]}},
    {"operatorSpec": {"deletionPolicy": "Retain", "maxLag": "PT1M"}},
]

ACCEPTED_PIPELINE_CHANGES: Final = [
    ({}, {"suspend": True, "trigger": {"continuous": "PT1S"}}),
    ({}, source(queue="orders", watermark=WATERMARK)),
    ({}, source(queue="orders") | {"sources": [{"name": "incoming", "queue": "orders"}]}),
]
