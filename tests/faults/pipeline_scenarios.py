"""Pipelines to be killed: their documents, and where each kind of order belongs.

With state the results have the ids of the orders that they count, so that the record shows each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from postbus_spark.lake.layout import CatalogTable
from tests.faults.kill_programs import manifests
from tests.faults.pipeline_calls import Call, Moment, Point
from tests.faults.pipeline_record import Order

SOURCE, SECOND, TARGET, GROUP = "orders", "shop", "priced", "kills"
MANIFESTS: Final = manifests([f"{SOURCE}: maxDeliveryCount: 1000", SECOND, TARGET])

WINDOW_S = 100
DELAY_S = 2_000
"""Of watermarks; above the disorder of times that senders make, see `pipeline_kills.AHEAD`."""

KEPT: Final = "message_id, session_id, partition, position, enqueued_time"
PRICED: Final = {
    "priced": f"select {KEPT}, body.amount * 2 as price from orders where body.amount > 0",
    "sent": "select message_id, session_id, to_json(struct(price)) as body from priced",
    "rejected": "select partition, position, 'NoPrice' as reason from orders"
    " where body.amount is null",
}
COUNTED: Final = {
    "sales": " union all ".join(
        f"select message_id, event_time from {each} where body.amount > 0"
        for each in (SOURCE, SECOND)
    ),
    "counts": "select window.start as start, count(*) as orders,"
    " concat_ws(',', collect_list(message_id)) as ids"
    f" from sales group by window(event_time, '{WINDOW_S} seconds')",
    "sent": "select string(start) as message_id, ids as body from counts",
    "rejected": " union all ".join(
        [
            f"select source, partition, position, 'NoPrice' as reason from {each}"
            " where body.amount is null"
            for each in (SOURCE, SECOND)
        ]
        + ["select source, partition, position, reason from malformed"]
    ),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pipeline, where its orders belong, and the points of its batches.

    `ids`: the column of the table with the ids of orders, between commas if a row has several.
    """

    kind: str
    sources: tuple[str, ...]
    transform: dict[str, dict[str, str]] | None
    table_from: str
    ids: str
    sinks: tuple[dict[str, str], ...]
    belongs: dict[str, tuple[Order, ...]]
    points: tuple[Point, ...]
    has_state: bool = False

    def document(self, *, table: dict[str, object], checkpoint: Path) -> str:
        """Return the document of the pipeline."""
        spec: dict[str, object] = {
            "sources": [self._source(each) for each in self.sources],
            "sinks": [{"from": self.table_from, "table": table}, *self.sinks],
            "trigger": {"continuous": "PT0.5S"},
            "limits": {
                # With state a batch takes everything: what it leaves could come too late.
                "maxMessagesPerTrigger": 0 if self.has_state else 1_000,
                "maxAttempts": 1_000,
            },
            "checkpoint": {"path": str(checkpoint)},
        }
        if self.transform is not None:
            spec["transform"] = self.transform
        if self.has_state:
            table["partitionBy"] = []
        return document_of("kills", spec)

    def _source(self, queue: str) -> dict[str, object]:
        source: dict[str, object] = {
            "name": queue, "queue": queue, "mode": self.kind, "readerGroup": GROUP,
        }  # fmt: skip
        if self.transform is not None:
            source["body"] = {"json": "amount double, placed timestamp"}
        if self.has_state:
            source["watermark"] = {"column": "body.placed", "delay": f"PT{DELAY_S}S"}
        return source


def document_of(name: str, spec: dict[str, object]) -> str:
    """Return the text of a document."""
    return yaml.safe_dump(
        {
            "apiVersion": "postbus.dev/v1alpha1",
            "kind": "Pipeline",
            "metadata": {"name": name},
            "spec": spec,
        }
    )


def table_of(format_name: str, folder: Path) -> dict[str, object]:
    """Return the table of a sink in a folder."""
    table: dict[str, object] = {"format": format_name, "path": str(folder / "table")}
    if format_name == "iceberg":
        entry = entry_of(folder)
        table |= {"name": entry.name, "catalog": {"uri": entry.uri}}
    return table


def entry_of(folder: Path) -> CatalogTable:
    """Return the table in its catalog, if it is one of Iceberg."""
    return CatalogTable(f"sqlite:///{folder}/catalog/lake.db", "faults.table", None)


def _points(*calls: Call, more: tuple[Point, ...] = ()) -> tuple[Point, ...]:
    found = [Point(each, moment) for each in calls for moment in (Moment.BEFORE, Moment.AFTER)]
    return (*found, *more)


DRAINED: Final = {
    "table": (Order.GOOD,),
    "target": (Order.GOOD,),
    "dead letters": (Order.FREE, Order.MALFORMED),
}
OF_A_DRAIN: Final = _points(
    Call.PLAN, Call.PUBLISH, Call.REJECT, Call.SETTLE,
    more=(
        Point(Call.READ, Moment.DURING),
        Point(Call.STAGE, Moment.DURING),
        Point(Call.STAGE, Moment.AFTER),
    ),
)  # fmt: skip


SCENARIOS: Final = {
    "drain": Scenario(
        kind="drain",
        sources=(SOURCE,),
        transform={"sql": PRICED},
        table_from="priced",
        ids="message_id",
        sinks=(
            {"from": "sent", "queue": TARGET},
            {"from": "rejected", "deadLetter": SOURCE},
            {"from": "malformed", "deadLetter": SOURCE},
        ),
        belongs=DRAINED,
        points=OF_A_DRAIN,
    ),
    "capture": Scenario(
        kind="tap",
        sources=(SOURCE,),
        transform=None,
        table_from=SOURCE,
        ids="message_id",
        sinks=(),
        belongs={"table": tuple(Order)},
        points=_points(Call.PLAN, Call.SETTLE, more=(Point(Call.READ, Moment.DURING),)),
    ),
    "state": Scenario(
        kind="drain",
        sources=(SOURCE, SECOND),
        transform={"sql": COUNTED},
        table_from="counts",
        ids="ids",
        sinks=(
            {"from": "sent", "queue": TARGET},
            {"from": "rejected", "deadLetter": SOURCE},
            {"from": "rejected", "deadLetter": SECOND},
        ),
        belongs=DRAINED,
        points=OF_A_DRAIN,
        has_state=True,
    ),
}
