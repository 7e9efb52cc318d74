"""Which output of a pipeline with state is the query, and what is made of its rows in each batch.

A query of Spark has one result, and reads each stream once: a second use would be a second reader
of the group, which ends the first. So one output keeps state. Outputs that read it are queries of
its rows in a batch, and outputs without state those of the messages of a batch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.errors import AnalysisException

from postbus.contract.pipeline import MALFORMED
from postbus.contract.pipeline_checks import ordered_queries
from postbus_spark.jobs.frames import InvalidPipeline, first_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pyspark.sql import DataFrame

    from postbus.contract.pipeline import PipelineSpec

KEEPING: Final = {
    "Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "GlobalLimit", "Join",
}  # fmt: skip
"""Nodes of a plan that keep state between the batches of streams."""

OWN_PIPELINE: Final = (
    "write a Pipeline for each, with a readerGroup of its own, or let one query read the other"
)


class Arrangement(NamedTuple):
    """`kept`: the output of the streaming query. `derived`: queries of its rows, in their order.

    `stateless`: outputs of the messages of a batch.
    """

    kept: str
    derived: tuple[str, ...]
    stateless: frozenset[str]


class Kept(NamedTuple):
    """What the plan of a stream has, from the top: `views` that it reads down to the first ones,
    and `states`, the names of nodes that keep state.
    """

    views: tuple[str, ...]
    states: tuple[str, ...]


def arranged(spec: PipelineSpec, streams: Mapping[str, DataFrame]) -> Arrangement:
    """Return the arrangement of outputs. Raises `InvalidPipeline` if there is none."""
    plans = {name: kept_by(frame) for name, frame in streams.items() if frame.isStreaming}
    origins = dict.fromkeys(sink.origin for sink in spec.sinks)
    wanted = [name for name in origins if plans[name].states]
    if not wanted:
        raise InvalidPipeline(
            "spec.sources",
            "a source has a watermark, and no output of a sink groups, joins or deduplicates:"
            " remove the watermark",
        )
    order = ordered_queries((spec.transform and spec.transform.sql) or {})
    for kept in [*(source.name for source in spec.sources), *order]:
        has_state = all(plans[kept].states == plans[name].states for name in wanted)
        if has_state and all(_is_of(plans, name, kept) for name in wanted):
            where = f"spec.transform.sql.{kept}" if kept in order else "spec.sources"
            _check_reads(spec, plans, kept, where)
            _check_append(streams[kept], where)
            _check_dead_letters(spec, wanted)
            derived = (name for name in order if name != kept and _is_of(plans, name, kept))
            return Arrangement(kept, tuple(derived), frozenset(origins.keys() - set(wanted)))
    raise InvalidPipeline(
        "spec.sinks",
        f"{' and '.join(wanted)} keep state apart from one another, and a query of Spark has one"
        f" result: {OWN_PIPELINE}",
    )


def kept_by(frame: DataFrame) -> Kept:
    """Return what the plan of a stream has."""
    views: list[str] = []
    states: list[str] = []

    def walk(node: Any, *, is_own: bool) -> None:
        children = node.children()
        parts = [children.apply(at) for at in range(children.size())]
        name = node.nodeName()
        if not node.isStreaming():
            return
        if name in KEEPING and all(part.isStreaming() for part in parts):
            states.append(name)
        if name == "View" and is_own:
            views.append(node.desc().identifier().table())
        for part in parts:
            walk(part, is_own=is_own and name != "View")

    walk(frame._jdf.queryExecution().analyzed(), is_own=True)
    return Kept(tuple(views), tuple(states))


def _is_of(plans: Mapping[str, Kept], name: str, kept: str) -> bool:
    """Return whether all messages of an output come from another one, or it is that one."""
    views = plans[name].views
    return name == kept or (bool(views) and all(_is_of(plans, each, kept) for each in views))


def _reads(plans: Mapping[str, Kept], name: str) -> Iterator[str]:
    """Yield the source that an output reads, each time it does."""
    if not plans[name].views:
        yield name
    for each in plans[name].views:
        yield from _reads(plans, each)


def _check_reads(spec: PipelineSpec, plans: Mapping[str, Kept], kept: str, where: str) -> None:
    """Raise `InvalidPipeline` unless a query reads each source once."""
    times = Counter(_reads(plans, kept))
    for name, count in times.items():
        if name == MALFORMED or count > 1:
            raise InvalidPipeline(
                where, f"it reads {name} beside what it has of that already: a stream is read once"
            )
    unread = [source.name for source in spec.sources if source.name not in times]
    if unread:
        raise InvalidPipeline(
            where, f"it keeps state, and does not read {' and '.join(unread)}: {OWN_PIPELINE}"
        )


def _check_append(frame: DataFrame, where: str) -> None:
    """Raise `InvalidPipeline` if a query cannot add rows batch by batch."""
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    mode = jvm.org.apache.spark.sql.streaming.OutputMode.Append()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), mode)
    except AnalysisException as error:
        raise InvalidPipeline(
            where,
            f"{first_line(error)} Group by window(…) of a column with a watermark, or by this"
            " column, and give all sources of a join a watermark",
        ) from None


def _check_dead_letters(spec: PipelineSpec, kept: Collection[str]) -> None:
    """Raise `InvalidPipeline` if rows of settled messages would be dead-lettered."""
    for at, sink in enumerate(spec.sinks):
        if sink.dead_letter is not None and sink.origin in kept:
            raise InvalidPipeline(
                f"spec.sinks[{at}].deadLetter",
                f"{sink.origin} has rows of earlier batches, whose messages are settled: send them"
                " to a queue, or write a query that keeps no state",
            )
