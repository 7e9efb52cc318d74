"""What a pipeline does and where it is, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from postbus.contract.pipeline_checks import ordered_queries, shared_claims
from postbus_spark.jobs.batches import tables_of
from postbus_spark.jobs.settling import last_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from postbus.contract.bulk import PublishedBatch, ReadableRanges
    from postbus.contract.pipeline import PipelineDocument, Sink, Source


def explained(document: PipelineDocument, frames: Mapping[str, DataFrame]) -> Iterator[str]:
    """Yield the steps of a batch, and the columns of each output."""
    spec = document.spec
    steps = [f"read {each.folder} as {each.name}" for each in spec.lookups]
    if spec.transform is not None and spec.transform.python is not None:
        steps.append(f"call {spec.transform.python.module}.{spec.transform.python.function}")
    elif spec.transform is not None:
        steps.append(f"query {', '.join(ordered_queries(spec.transform.sql or {}))}")
    steps += [_shown_sink(sink) for sink in spec.sinks if sink.table is not None]
    steps += [_shown_sink(sink) for sink in spec.sinks if sink.entity is not None]
    steps += [_shown_sink(sink) for sink in spec.sinks if sink.dead_letter is not None]
    if spec.checkpoint is not None:
        steps += [f"commit in {spec.checkpoint.path}", "settle what is planned"]
    first, *reading = _reading(document)
    if spec.is_stateful:
        yield "State of queries lies in the checkpoint alone: without it, a run stops."
    yield first
    for number, step in enumerate([*reading, *steps], 1):
        yield f"{number}. {step}"
    if spec.runtime.executors:
        yield ""
        yield f"On Kubernetes {spec.runtime.executors} executors do the work."
    if claims := shared_claims(spec):
        yield f"They and the driver must be able to mount {', '.join(claims)} on each node."
    for name, frame in frames.items():
        yield ""
        yield f"{name}:"
        for field in frame.schema.fields:
            yield f"  {field.name} {field.dataType.simpleString()}"


def _reading(document: PipelineDocument) -> Iterator[str]:
    """Yield when a batch begins, and the steps until its rows are there."""
    spec = document.spec
    source, limits = spec.source, spec.limits
    if source.is_bounded:
        yield "Once:"
        yield f"read {_shown_source(source)} as {source.name}"
        return
    if spec.trigger.continuous_ms is not None:
        yield f"Every {spec.trigger.continuous_ms / 1000:g} s:"
    elif spec.trigger.schedule is not None:
        yield f"At the times of {spec.trigger.schedule} (UTC), for what is there:"
    else:
        yield "Once, for what is there:"
    bounds = [
        f"{most} {unit}"
        for most, unit in (
            (limits.max_messages_per_trigger, "messages"),
            (limits.max_bytes_per_trigger, "bytes"),
        )
        if most
    ]
    for source in spec.sources:
        yield (
            f"plan up to {' or '.join(bounds) or 'all messages'} of {source.entity}"
            f" ({source.sub_queue}) for the reader group {document.group_of(source)},"
            f" a {source.mode}"
        )
        yield f"read them as {source.name}"
        yield from _remembering(source)


def _remembering(source: Source) -> Iterator[str]:
    """Yield what a source keeps in mind between batches."""
    watermark = source.watermark
    if watermark is None:
        return
    late = f"{watermark.delay_ms / 1_000:g} s"
    yield f"watch {watermark.column} of {source.name}: rows may be {late} late"
    if source.deduplicate:
        yield f"leave out rows with the same {', '.join(source.deduplicate)} within {late}"


def _shown_source(source: Source) -> str:
    """Return what a source with an end has."""
    shown = f"the history of {source.entity} ({source.sub_queue})"
    if source.table is not None:
        shown = f"the {source.table.format} table {source.table.path}"
    times = (("from", source.from_time), ("to", source.to_time))
    return " ".join([shown, *(f"{word} {time}" for word, time in times if time is not None)])


def _shown_sink(sink: Sink) -> str:
    if sink.table is not None:
        table = sink.table
        folders = "/".join(table.partition_by) or "no folders"
        return f"add {sink.origin} to the {table.format} table {table.path} ({folders})"
    if sink.entity is not None:
        rate = f", {sink.rate} a second at most" if sink.rate else ""
        return f"send {sink.origin} to {sink.entity}{rate}"
    return f"dead-letter {sink.origin} in {sink.dead_letter}"


def replay_status(
    document: PipelineDocument, batches: Mapping[int, PublishedBatch | None]
) -> Iterator[str]:
    """Yield the source, and where the writer of each sink is."""
    yield f"{_shown_source(document.spec.source)} has no reader group"
    for at, sink in enumerate(document.spec.sinks):
        batch = batches[at]
        shown = "nothing is published"
        if batch is not None:
            sent = batch.messages - batch.left
            shown = f"{sent} of {batch.messages} published messages have arrived"
            shown += f", it waits: {batch.waits_for}" if batch.waits_for else ""
        yield f"writer {document.writer(sink)} to {sink.entity}: {shown}"


def status(document: PipelineDocument, ranges: Sequence[ReadableRanges]) -> Iterator[str]:
    """Yield where reader groups, the checkpoint and the tables are. `ranges`: of each source."""
    for source, found in zip(document.spec.sources, ranges, strict=True):
        yield from _group_status(document.group_of(source), found)
    checkpoint = document.spec.checkpoint
    committed = last_batch(Path(checkpoint.path)) if checkpoint is not None else None
    yield f"checkpoint: {'empty' if committed is None else f'batch {committed} is committed'}"
    for table in tables_of(document).values():
        table.load()
        mark = table.mark
        if mark is None:
            yield f"table {table.folder}: takes what comes next"
            continue
        at = f"table {table.folder}: commit {table.version}"
        if not document.spec.has_places:
            yield f"{at}, batch {mark.number}"
            continue
        ends = ", ".join(f"{number}: {end}" for number, end in sorted(mark.ends.items()))
        yield f"{at}, plan {mark.number}, ends {ends}"


def _group_status(name: str, found: ReadableRanges) -> Iterator[str]:
    group = found.group
    if group is None:
        yield f"{found.entity} has no reader group {name}"
        return
    plan = group.plan
    state = "settled" if plan.is_settled else f"not settled, attempt {plan.attempts}"
    yield f"reader group {group.name}, a {group.kind}: plan {plan.number}, {state}"
    nexts = {each.partition: each.next_position for each in found.partitions}
    for number, (first, end) in sorted(plan.ranges.items()):
        yield f"  partition {number}: [{first}, {end}), the bus has up to {nexts.get(number)}"
