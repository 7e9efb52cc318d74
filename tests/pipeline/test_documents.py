"""Documents of kind Pipeline: everything that is wrong is said at once, with file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from postbus.contract.pipeline import DEFAULT_BYTES_PER_TRIGGER
from postbus.contract.pipeline_checks import ordered_queries, shared_claims
from postbus.contract.yaml_documents import ManifestError
from postbus_spark.jobs.batches import writer_options
from postbus_spark.jobs.documents import read_pipeline
from postbus_spark.jobs.explaining import explained
from postbus_spark.jobs.main import main
from postbus_spark.jobs.readers import source_options
from postbus_spark.options import DEFAULT_BYTES_PER_TRIGGER as DEFAULT_OF_SOURCE

GOOD = """\
apiVersion: postbus.dev/v1alpha1
kind: Pipeline
metadata: {name: price-orders}
spec:
  sources:
    - name: orders
      queue: orders
      mode: drain
      body: {json: "sku string, amount double"}
  transform:
    sql:
      priced: select * from orders
  sinks:
    - {from: priced, table: {format: parquet, path: /lake/priced}}
    - {from: malformed, deadLetter: orders}
  trigger: {continuous: PT1S}
  checkpoint: {path: /checkpoints/price-orders}
"""
ENDED = """\
apiVersion: postbus.dev/v1alpha1
kind: Pipeline
metadata: {name: replay-orders}
spec:
  sources:
    - name: orders
      queue: orders
      mode: history
      from: "2026-01-31T08:00:00Z"
      to: "2026-01-31T09:00:00.5Z"
  sinks:
    - {from: orders, queue: orders-again, rate: 500}
  trigger: {once: true}
"""
Change = Callable[[Any], object]
NOON = "2026-01-31T12:00:00Z"
TABLE = {"format": "parquet", "path": "/lake/orders"}
WATERMARK = {"column": "enqueued_time", "delay": "PT10M"}
PRICES = {"name": "prices", "parquet": "/lake/prices"}


def problems(folder: Path, text: str) -> list[str]:
    file = folder / "pipeline.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError) as error:
        read_pipeline(file)
    return [str(each).replace(f"{file}:", "") for each in error.value.problems]


def changed(folder: Path, change: Change, good: str = GOOD) -> list[str]:
    document = yaml.safe_load(good)
    change(document["spec"])
    found = problems(folder, yaml.safe_dump(document))
    return [each.partition(": ")[2] for each in found]


def looked_up(spec: Any, *lookups: object) -> None:
    spec.update(lookups=list(lookups))


def test_a_document_has_defaults(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(GOOD)
    document = read_pipeline(file)
    assert document.group == "price-orders"
    table = document.spec.sinks[0].table
    assert table is not None
    assert table.partition_by == ("date", "hour")
    assert source_options(document, document.spec.source, "key") == {
        "entity": "orders",
        "readerGroup": "price-orders",
        "subQueue": "main",
        "mode": "drain",
        "maxMessagesPerTrigger": "0",
        "maxBytesPerTrigger": str(DEFAULT_OF_SOURCE),
        "connectionStringFile": str(Path("key").absolute()),
    }
    assert DEFAULT_BYTES_PER_TRIGGER == DEFAULT_OF_SOURCE


def test_a_subscription_is_a_source(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(GOOD.replace("queue: orders", "topic: news\n      subscription: lake"))
    document = read_pipeline(file)
    assert (
        source_options(document, document.spec.source, None)["entity"] == "news/Subscriptions/lake"
    )


def test_everything_that_is_wrong_is_said_with_its_line(tmp_path: Path) -> None:
    text = (
        GOOD.replace("mode: drain", "mod: drain")
        .replace("PT1S", "1s")
        .replace("format: parquet", "format: orc")
        .replace("kind: Pipeline", "kind: Pipeline\nshade: red")
    )
    assert problems(tmp_path, text) == [
        "3: shade: unknown field",
        "9: spec.sources[0].mod: unknown field; did you mean mode?",
        "15: spec.sinks[0].table.format: input should be 'parquet', 'delta' or 'iceberg'",
        "17: spec.trigger.continuous: use an ISO 8601 duration such as PT30S, PT5M or P14D",
    ]


def test_fields_are_checked_together(tmp_path: Path) -> None:
    text = (
        GOOD.replace("mode: drain", "mode: tap")
        .replace("from: priced,", "from: prised,")
        .replace("path: /checkpoints/price-orders", "path: /lake")
    )
    nowhere = "its rows go nowhere: add a sink that is from it, or remove it"
    is_tap = "only a drained source has one: orders is a tap, and receivers have its queue"
    assert problems(tmp_path, text) == [
        f"12: spec.transform.sql.priced: {nowhere}",
        "14: spec.sinks[0].from: there is no prised, only malformed, orders, priced",
        "14: spec.sinks[0].table.path: the checkpoint has /lake: give each a folder of its own",
        f"15: spec.sinks[1].deadLetter: {is_tap}",
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda spec: spec["sinks"].pop(), "spec.sinks: rows of malformed, whose body has not"),
        (lambda spec: spec.update(sinks=[]), "spec.sinks: name 1 to 100 sinks"),
        (lambda spec: spec["sinks"][1].update(deadLetter="news"), "there is no source news"),
        (lambda spec: spec["sources"][0].update(subQueue="deadLetter"), "dead letters already"),
        (lambda spec: spec["sources"][0].update(topic="news"), "name a queue, or a topic and its"),
        (lambda spec: spec["sources"][0].update(name="malformed"), "malformed is the output of"),
        (lambda spec: spec["sources"][0].update(name="a-b"), "spec.sources[0].name: string should"),
        (lambda spec: spec["sources"].append(spec["sources"][0]), "has the name orders: choose"),
        (
            lambda spec: spec["sources"].append({**spec["sources"][0], "name": "again"}),
            "spec.sources[1]: another source reads orders with the reader group price-orders",
        ),
        (
            lambda spec: spec["sources"].append({"name": "old", "table": TABLE}),
            "spec.sources[1]: a source of history or of a table is the only one",
        ),
        (
            lambda spec: spec["sources"].extend({"name": f"s{n}", "queue": "q"} for n in range(10)),
            "name 1 to 10 sources",
        ),
        (lambda spec: spec["sources"][0].update(deduplicate=["x"]), "deduplicate needs a waterma"),
        (
            lambda spec: spec["sources"][0].update(watermark=WATERMARK, mode="history"),
            "history and tables are one batch: leave out watermark",
        ),
        (
            lambda spec: (
                spec["sources"][0].update(watermark=WATERMARK),
                spec.update(transform={"python": {"module": "m", "function": "f"}}),
            ),
            "spec.transform.python: a function sees one batch at a time",
        ),
        (
            lambda spec: (
                spec["sources"][0].update(watermark=WATERMARK),
                spec.update(volumes=[{"claimName": "lake", "mountPath": "/lake"}]),
            ),
            "spec.checkpoint.path: with a watermark it has state: give it a folder below",
        ),
        (lambda spec: spec["transform"]["sql"].update(orders="x"), "choose another one"),
        (lambda spec: spec["transform"].update(python={"module": "a", "function": "b"}), "either"),
        (lambda spec: spec["transform"].update(sql={}), "spec.transform.sql: "),
        (lambda spec: spec["sinks"][0].update(queue="q"), "name one target"),
        (
            lambda spec: spec["sinks"].extend([{"from": "priced", "queue": "Q"}] * 2),
            "spec.sinks[3]: another sink sends priced to Q",
        ),
        (lambda spec: spec["sinks"][0].pop("table"), "name one target"),
        (lambda spec: spec["sinks"][0]["table"].update(path="lake"), "an absolute path"),
        (lambda spec: spec["sinks"][0]["table"].update(path="/a/../b"), "an absolute path"),
        (lambda spec: spec["sinks"][0]["table"].update(path="gs://b/a"), "path: a folder, such as"),
        (lambda spec: spec["sinks"][0]["table"].update(path="s3://lake"), "a bucket and a prefix"),
        (lambda spec: spec["sinks"][0]["table"].update(path="s3://lake/a b"), "of letters, digits"),
        (lambda spec: spec["sinks"][0]["table"].update(path="s3://Lake/a"), "s3://lake/orders"),
        (lambda spec: spec["sinks"][0]["table"].update(path="s3://lake/../a"), "and a prefix"),
        (lambda spec: spec.update(checkpoint={"path": "s3://lake/a"}), "path: only a folder of a"),
        (lambda spec: spec["sinks"][0]["table"].update(path="//"), "below the root"),
        (lambda spec: spec["sinks"][0]["table"].update(partitionBy=["hour"]), "[date, hour]"),
        (lambda spec: spec["sinks"][0]["table"].update(name="a.b"), "of parquet has neither name"),
        (lambda spec: of_iceberg(spec, name=None), "sinks[0].table: a table of iceberg needs a"),
        (lambda spec: of_iceberg(spec, catalog=None), "needs a name, such as shop.orders, and a"),
        (lambda spec: of_iceberg(spec, name="orders"), "spec.sinks[0].table.name: string should"),
        (
            lambda spec: of_iceberg(spec, uri="postgresql://a/b"),
            "catalog.uri: a REST catalog, such",
        ),
        (lambda spec: of_iceberg(spec, uri="sqlite:///lake.db"), "uri: an absolute path"),
        (lambda spec: of_iceberg(spec, uri="https://me:key@lake/"), "uri: no user and password"),
        (lambda spec: of_iceberg(spec, uri="https://lake/?token=a"), "uri: a REST catalog"),
        (
            lambda spec: spec["sinks"].append(
                {"from": "priced", "table": {**of_iceberg(spec), "path": "/lake/b"}}
            ),
            "spec.sinks[2].table.name: another sink writes the table shop.priced of this catalog",
        ),
        (
            lambda spec: (
                of_iceberg(spec),
                spec.update(volumes=[{"claimName": "a", "mountPath": "/lake"}]),
            ),
            "spec.sinks[0].table.catalog.uri: lies in none of the volumes",
        ),
        (lambda spec: looked_up(spec, {"name": "prices"}), "spec.lookups[0]: name one table"),
        (lambda spec: looked_up(spec, {**PRICES, "delta": "/a"}), "spec.lookups[0]: name one"),
        (lambda spec: looked_up(spec, {**PRICES, "parquet": "s3://a"}), "lookups[0].parquet: only"),
        (lambda spec: looked_up(spec, PRICES), "spec.lookups[0].name: no query reads prices"),
        (lambda spec: looked_up(spec, PRICES, PRICES), "spec.lookups[1].name: a source, a lookup"),
        (lambda spec: looked_up(spec, {**PRICES, "name": "orders"}), "has the name orders"),
        (lambda spec: looked_up(spec, {**PRICES, "name": "priced"}), "has the name priced"),
        (lambda spec: looked_up(spec, {**PRICES, "name": "malformed"}), "has the name malformed"),
        (
            lambda spec: looked_up(spec, *21 * [PRICES]),
            "spec.lookups: tuple should have at most 20",
        ),
        (
            lambda spec: looked_up(spec, {**PRICES, "parquet": "/lake/priced/date=2026-01-31"}),
            "spec.lookups[0]: the sink from priced has /lake/priced",
        ),
        (
            lambda spec: (
                looked_up(spec, {**PRICES, "name": "priced"}),
                spec.update(transform={"python": {"module": "a", "function": "b"}}),
            ),
            "spec.lookups[0].name: a sink is from priced",
        ),
        (lambda spec: spec["trigger"].update(once=True), "write one of continuous"),
        (lambda spec: spec["trigger"].update(schedule="* * * * *"), "write one of continuous"),
        *(
            (lambda spec, text=text: spec.update(trigger={"schedule": text}), problem)
            for text, problem in {
                "* * * *": "spec.trigger.schedule: five fields",
                "* * * * * *": "five fields",
                "@daily": "five fields",
                "0 0 L * *": "five fields",
                "60 * * * *": "spec.trigger.schedule: Bad minute in 60 * * * *: write minute",
            }.items()
        ),
        (lambda spec: spec["trigger"].update(continuous="PT0.01S"), "between PT0.1S and P1D"),
        (lambda spec: spec.update(limits={"maxAttempts": 0}), "spec.limits.maxAttempts"),
        (lambda spec: spec.pop("checkpoint"), "spec.checkpoint: a source with a reader group"),
        (lambda spec: spec["sinks"][0].update(rate=5), "spec.sinks[0]: only a queue or topic has"),
        (lambda spec: spec["sources"][0].update({"to": NOON}), "from and to are for mode: history"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, change: Change, text: str) -> None:
    found = changed(tmp_path, change)
    assert any(text in each for each in found), found


def of_iceberg(spec: Any, uri: str = "sqlite:////catalogs/lake.db", **changes: Any) -> Any:
    """Make the sink's table one of Iceberg; return it."""
    table = spec["sinks"][0]["table"]
    table |= {"format": "iceberg", "name": "shop.priced", "catalog": {"uri": uri}, **changes}
    return table


ONCE = "a source of history or of a table has an end and is read once"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda spec: spec.update(trigger={"continuous": "PT1S"}), f"spec.trigger: {ONCE}: write"),
        (lambda spec: spec.update(trigger={"schedule": "* * * * *"}), f"spec.trigger: {ONCE}"),
        (lambda spec: spec.update(checkpoint={"path": "/a"}), f"spec.checkpoint: {ONCE}"),
        (
            lambda spec: spec.update(limits={"maxMessagesPerTrigger": 5}),
            f"spec.limits: {ONCE}, as one batch: leave them out, or set a rate",
        ),
        (
            lambda spec: spec.update(sinks=[{"from": "orders", "table": TABLE}]),
            f"spec.sinks[0]: {ONCE}, and sent to queues and topics only",
        ),
        (
            lambda spec: spec.update(sinks=[{"from": "orders", "deadLetter": "orders"}]),
            f"spec.sinks[0]: {ONCE}, and sent",
        ),
        (lambda spec: spec["sources"][0].update(readerGroup="a"), "leave out readerGroup"),
        (lambda spec: spec["sources"][0].update(table=TABLE), "and its subscription, or a table"),
        (lambda spec: of_table(spec, subQueue="deadLetter"), "neither mode nor subQueue"),
        (lambda spec: of_table(spec, mode="history"), "neither mode nor subQueue"),
        (lambda spec: of_table(spec, table={**TABLE, "format": "csv"}), "'delta' or 'iceberg'"),
        (lambda spec: of_table(spec, table={**TABLE, "path": "lake"}), "an absolute path"),
        (
            lambda spec: (
                of_table(spec),
                spec.update(volumes=[{"claimName": "a", "mountPath": "/lakes"}]),
            ),
            "spec.sources[0].table.path: lies in none of the volumes",
        ),
        (lambda spec: spec["sources"][0].update({"from": NOON}), "to must be later than from"),
        (lambda spec: spec["sources"][0].update({"from": "2026-02-30T00:00:00Z"}), "day is out"),
        (lambda spec: spec["sources"][0].update({"from": "2026-01-31T08:00:00"}), "a time in UTC"),
        (lambda spec: spec["sources"][0].update({"from": "2026-01-31T08:00:00+01:00"}), "in UTC"),
        (lambda spec: spec["sinks"][0].update(rate=0), "spec.sinks[0].rate"),
        (lambda spec: spec["sinks"][0].update(rate=1_000_001), "spec.sinks[0].rate"),
    ],
)
def test_a_mistake_of_a_replay_is_named(tmp_path: Path, change: Change, text: str) -> None:
    found = changed(tmp_path, change, ENDED)
    assert any(text in each for each in found), found


def of_table(spec: Any, **more: object) -> None:
    spec["sources"] = [{"name": "orders", "table": TABLE, **more}]


def test_a_replay_has_one_batch_of_each_sink(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(ENDED)
    document = read_pipeline(file)
    assert document.spec.source.is_bounded
    [sink] = document.spec.sinks
    assert writer_options(document, sink, None) == {
        "entity": "orders-again",
        "writer": "replay-orders.orders",
        "rate": "500",
    }


@pytest.mark.parametrize("command", ["settle", "reset", "verify"])
def test_a_replay_leaves_nothing_to_look_after(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(ENDED)
    assert main([command, str(file)]) == 0
    said = f"nothing to {command}: replay-orders has neither a reader group nor a table"
    assert capsys.readouterr().out.startswith(said)


def test_explain_names_the_table_of_a_replay(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        ENDED.replace("queue: orders\n", "table: {format: delta, path: /lake/orders}\n").replace(
            "      mode: history\n", ""
        )
    )
    times = "from 2026-01-31T08:00:00Z to 2026-01-31T09:00:00.5Z"
    assert list(explained(read_pipeline(file), {})) == [
        "Once:",
        f"1. read the delta table /lake/orders {times} as orders",
        "2. send orders to orders-again, 500 a second at most",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file has no documents"),
        (f"{GOOD}---\n{GOOD}", "the file has 2 documents"),
        (GOOD.replace("kind: Pipeline", "kind: Queue"), "kind is Queue"),
        ("- 1", "a document must be a mapping"),
        ("a: {", "no valid YAML"),
        (GOOD.replace("price-orders}", "a" * 200 + "}"), "name a shorter one with readerGroup"),
        (ENDED.replace("replay-orders}", "a" * 200 + "}"), "its writers: name a shorter one"),
    ],
)
def test_a_file_that_is_no_pipeline_is_named(tmp_path: Path, text: str, problem: str) -> None:
    assert problem in "\n".join(problems(tmp_path, text))


def test_a_query_may_be_read_by_another_one(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    priced = "priced: select * from orders"
    file.write_text(
        GOOD.replace(priced, "checked: select * from orders\n      priced: select * from CHECKED")
    )
    assert list(read_pipeline(file).spec.transform.sql) == ["checked", "priced"]


@pytest.mark.parametrize(
    ("trigger", "line"),
    [
        ("{continuous: PT2S}", "Every 2 s:"),
        ("{schedule: '0  6 * * MON'}", "At the times of 0 6 * * MON (UTC), for what is there:"),
        ("{once: true}", "Once, for what is there:"),
    ],
)
def test_explain_begins_with_the_trigger(tmp_path: Path, trigger: str, line: str) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(GOOD.replace("{continuous: PT1S}", trigger))
    assert next(explained(read_pipeline(file), {})) == line


def test_explain_names_the_claims_that_executors_share(tmp_path: Path) -> None:
    """The claim of the checkpoint alone is the driver's."""
    file = tmp_path / "pipeline.yaml"
    claims = {"lake": "/lake", "notes": "/checkpoints"}
    volumes = [{"claimName": name, "mountPath": path} for name, path in claims.items()]
    text = f"{GOOD}  volumes: {volumes}\n"
    file.write_text(f"{text}  runtime: {{executors: 3}}\n")
    assert list(explained(read_pipeline(file), {}))[-2:] == [
        "On Kubernetes 3 executors do the work.",
        "They and the driver must be able to mount lake on each node.",
    ]
    file.write_text(text)
    assert "Kubernetes" not in "\n".join(explained(read_pipeline(file), {}))


def test_executors_share_the_folder_of_state(tmp_path: Path) -> None:
    """It is in the checkpoint, which is the driver's alone otherwise."""
    example = Path(__file__).parents[2] / "examples" / "pipeline" / "count-orders.yaml"
    file = tmp_path / "pipeline.yaml"
    text = example.read_text(encoding="utf-8").replace("/tmp/lake/checkpoints", "/state")
    text += "    - {claimName: state, mountPath: /state}\n  runtime: {executors: 3}\n"
    file.write_text(text)
    assert shared_claims(read_pipeline(file).spec) == ["lake", "state"]
    file.write_text(text.replace("executors: 3", "executors: 0"))
    assert shared_claims(read_pipeline(file).spec) == []


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "check", "explain", "status", "settle", "reset"])
def test_a_wrong_document_ends_with_the_code_of_configuration(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(GOOD.replace("sinks:", "sink:"))
    assert main([command, str(file)]) == 10
    assert f"{file}:13: spec.sink: unknown field; did you mean sinks?" in capsys.readouterr().err
    assert main([command, str(tmp_path / "none.yaml")]) == 10
    assert "no such file or directory" in capsys.readouterr().err


def test_the_error_of_a_run_is_written_to_a_file_as_far_as_kubernetes_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, error = tmp_path / "pipeline.yaml", tmp_path / "error"
    file.write_text(GOOD.replace("sinks:", "sink:"))
    assert main(["run", str(file), "--error-file", str(error)]) == 10
    assert error.read_text() == capsys.readouterr().err.removesuffix("\n")
    file.write_text(GOOD + "".join(f"ü{number}: 1\n" for number in range(200)))
    assert main(["run", str(file), "--error-file", str(error)]) == 10
    assert len(error.read_bytes()) == 4_096
    assert error.read_bytes() in capsys.readouterr().err.encode()


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run"], ["run", "a", "--agan"]])
def test_wrong_arguments_end_with_the_code_of_configuration(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 10


def test_a_run_without_a_key_ends_with_the_code_of_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTBUS_CONNECTION_STRING", raising=False)
    file = tmp_path / "pipeline.yaml"
    file.write_text(GOOD)
    assert main(["run", str(file)]) == 10
    assert "InvalidCredentials: no connection string" in capsys.readouterr().err


def test_queries_run_after_those_that_they_read_in_whatever_order_they_come() -> None:
    """An API server returns the names of a map sorted."""
    queries = {
        "counts": "select count(*) from Priced",
        "late": "select * from counts join priced",
        "priced": "select * from orders",
        "rejected": "select * from orders",
    }
    assert ordered_queries(queries) == ["priced", "counts", "late", "rejected"]


def test_queries_in_a_circle_run_in_their_order() -> None:
    queries = {"price": "select 1 as late from orders", "late": "select price from price"}
    assert ordered_queries(queries) == ["price", "late"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"volumes": [{"claimName": "a", "mountPath": "/lakes"}]}, "lies in none of the volumes"),
        ({"volumes": [{"claimName": "a", "mountPath": "/lake"}] * 2}, "another volume has /lake"),
        ({"runtime": {"memory": "512Mi"}}, "must be at least 1Gi"),
        ({"runtime": {"memory": "2 GB"}}, "pattern"),
        ({"operatorSpec": {"deletionPolicy": "DeleteIfEmpty"}}, "'Delete' or 'Retain'"),
    ],
)
def test_fields_for_kubernetes_are_checked_on_a_laptop(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    [problem] = changed(tmp_path, lambda spec: spec.update(change))
    assert said in problem


def test_sources_have_groups_and_names_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    document = yaml.safe_load(GOOD)
    spec = document["spec"]
    spec["sources"] += [
        {"name": "returns", "queue": "returns"},
        {"name": "again", "queue": "Orders", "readerGroup": "again"},
    ]
    spec["sinks"].append({"from": "orders", "queue": "all"})
    file.write_text(yaml.safe_dump(document))
    found = read_pipeline(file)
    groups = [found.group_of(source) for source in found.spec.sources]
    assert groups == ["price-orders", "price-orders", "again"]
    assert writer_options(found, found.spec.sinks[-1], None)["writer"] == "price-orders.orders"
    numbered = writer_options(found, found.spec.sinks[-1], None, "0f3c9b7a-4c1f")["writer"]
    assert numbered == "price-orders.orders.0f3c9b7a"
