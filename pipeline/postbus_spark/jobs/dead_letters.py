"""Reports of dead letters by cause, for people, browsers and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, Final

from postbus_spark.causes import NEEDED, dead_letter_causes
from postbus_spark.schema import BY_NAME, ddl

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_CAUSES: Final = 1_000
"""Causes of a report, the most frequent ones. Our choice: more of them help nobody."""

SHOWN_CHARS: Final = 100
COLUMNS: Final = {
    "letters": "letters",
    "reason": "reason",
    "source": "source",
    "description": "description",
    "first_enqueued_time": "first sent",
    "last_enqueued_time": "last sent",
    "example_number": "example",
    "example_id": "message id",
    "example_description": "its description",
}
"""Columns of a cause -> their heading."""

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; margin: 2em }} table {{ border-collapse: collapse }}
td, th {{ border-bottom: 1px solid #ccc; padding: .3em .8em }}
td, th {{ text-align: left; vertical-align: top }}
td:first-child {{ text-align: right }}
</style></head><body><h1>{title}</h1><p>{summary}</p><table>
{rows}
</table></body></html>
"""

Cause = dict[str, Any]


def causes_of(spark: SparkSession, options: dict[str, str]) -> list[Cause]:
    """Read the dead letters of an entity and return their causes, the most frequent ones first.

    `options`: those of the source, without a mode and without bodies.
    """
    schema = ddl([BY_NAME[name] for name in NEEDED])
    reader = spark.read.format("postbus").options(**options, mode="peek").schema(schema)
    causes = dead_letter_causes(reader.load()).limit(MAX_CAUSES).collect()
    return [cause.asDict() for cause in causes]


def summary_of(causes: Sequence[Cause]) -> str:
    """Return how many letters there are, and of how many causes."""
    if len(causes) == MAX_CAUSES:
        return f"more than {MAX_CAUSES} causes: the most frequent ones"
    letters = sum(cause["letters"] for cause in causes)
    letter_word = "dead letter" if letters == 1 else "dead letters"
    return f"{letters} {letter_word} of {len(causes)} cause{'' if len(causes) == 1 else 's'}"


def lines_of(causes: Sequence[Cause]) -> Iterator[str]:
    """Yield a line for each cause, and one with their sum."""
    for cause in causes:
        text = _printable(f"{cause['reason'] or '-'}: {cause['description'] or '-'}")
        yield f"{cause['letters']:>9}  {text[:SHOWN_CHARS]}  (such as {cause['example_number']})"
    yield summary_of(causes)


def json_of(entity: str, causes: Sequence[Cause]) -> str:
    """Return a report for programs; times are ISO 8601."""
    report = {"entity": entity, "causes": [_plain(cause) for cause in causes]}
    return json.dumps(report, indent=1) + "\n"


def html_of(entity: str, causes: Sequence[Cause]) -> str:
    """Return a report as a page without scripts. What messages say is shown as text."""
    rows = ["".join(f"<th>{heading}</th>" for heading in COLUMNS.values())]
    for cause in causes:
        plain = _plain(cause)
        cells = ("" if plain[name] is None else escape(str(plain[name])) for name in COLUMNS)
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return PAGE.format(
        title=escape(f"Dead letters of {entity}"),
        summary=summary_of(causes),
        rows="\n".join(f"<tr>{row}</tr>" for row in rows),
    )


def _plain(cause: Cause) -> Cause:
    """Return a cause with texts for times; Spark's rows have them in the zone of the process."""
    return {
        name: f"{value.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        if isinstance(value, datetime)
        else value
        for name, value in cause.items()
    }


def _printable(text: str) -> str:
    """Return a text that cannot control a terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
