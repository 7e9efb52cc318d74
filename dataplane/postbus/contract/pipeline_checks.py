"""Checks of the fields of a Pipeline together, which none of them shows alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from postbus.contract.bulk import GROUP_NAME
from postbus.contract.pipeline import (
    MALFORMED,
    S3,
    LakeTable,
    Limits,
    PipelineDocument,
    PipelineSpec,
    Source,
    TablePlace,
)

OWN_FOLDER: Final = "/etc/postbus"
"""Folder of the document and the key in a pod of Kubernetes."""

OWN_FOLDER_TEXT: Final = f"{OWN_FOLDER} has the document and the key: give it another folder"

IN_NO_VOLUME: Final = "lies in none of the volumes: give it a folder below one of their mountPath"
MAX_GROUP_CHARS: Final = 128
QUERY_CHARS: Final = 9
"""Length of the ending of a writer's name, if its numbers are those of one query."""

Problem: TypeAlias = tuple[tuple[str | int, ...], str]
"""The path of a field, and what is wrong with it."""


def pipeline_problems(document: PipelineDocument) -> list[Problem]:
    """Return what is wrong with the fields of a document together."""
    spec = document.spec
    found = [
        *_source_problems(document),
        *_name_problems(spec),
        *_lookup_problems(spec),
        *_sink_problems(spec),
        *_end_problems(spec),
        *_state_problems(spec),
        *_path_problems(spec),
        *_volume_problems(spec),
    ]
    groups = [document.group_of(each) for each in spec.sources]
    writers = [document.writer(sink) for sink in spec.sinks if sink.entity]
    most = MAX_GROUP_CHARS - (QUERY_CHARS if spec.is_stateful else 0)
    if not all(re.fullmatch(GROUP_NAME, name) for name in [*groups, *writers]) or any(
        len(name) > most for name in writers
    ):
        message = "too long for a reader group and its writers: name a shorter one"
        way_out = "" if spec.source.is_bounded else " with readerGroup"
        found.append((("metadata", "name"), f"{message}{way_out}"))
    return found


def _source_problems(document: PipelineDocument) -> Iterator[Problem]:
    """Yield sources that have one name or one reader group."""
    sources = document.spec.sources
    names: set[str] = set()
    groups: set[tuple[str, str, str]] = set()
    for at, source in enumerate(sources):
        where = ("spec", "sources", at)
        if source.name in names:
            yield (*where, "name"), f"another source has the name {source.name}: choose another one"
        names.add(source.name)
        if source.is_bounded:
            if len(sources) > 1:
                yield where, "a source of history or of a table is the only one: remove the others"
            continue
        group = (source.entity.lower(), source.sub_queue, document.group_of(source))
        if group in groups:
            message = f"another source reads {source.entity} with the reader group {group[2]}"
            yield where, f"{message}: name another readerGroup, or read the source twice in SQL"
        groups.add(group)


def _names(spec: PipelineSpec) -> set[str]:
    """Return the views that exist before the transformation."""
    has_bodies = any(source.body for source in spec.sources)
    return {source.name for source in spec.sources} | ({MALFORMED} if has_bodies else set())


def _name_problems(spec: PipelineSpec) -> Iterator[Problem]:
    for at, source in enumerate(spec.sources):
        if source.name == MALFORMED:
            yield ("spec", "sources", at, "name"), f"{MALFORMED} is the output of unreadable bodies"
    for name in (spec.transform and spec.transform.sql) or ():
        if name in {MALFORMED, *(source.name for source in spec.sources)}:
            yield ("spec", "transform", "sql", name), "a source has this name: choose another one"


def _lookup_problems(spec: PipelineSpec) -> Iterator[Problem]:
    transform = spec.transform
    queries = (transform and transform.sql) or {}
    taken = {*(source.name for source in spec.sources), MALFORMED, *queries}
    for at, lookup in enumerate(spec.lookups):
        where = ("spec", "lookups", at, "name")
        if lookup.name in taken:
            yield (
                where,
                f"a source, a lookup or an output has the name {lookup.name}: choose another",
            )
        taken.add(lookup.name)
        is_python = transform is not None and transform.python is not None
        if not is_python and not _is_read(lookup.name, list(queries.values())):
            yield where, f"no query reads {lookup.name}: add one, or remove the lookup"
        if is_python and any(sink.origin == lookup.name for sink in spec.sinks):
            yield where, f"a sink is from {lookup.name}: only rows of the source can be written"


def _sink_problems(spec: PipelineSpec) -> Iterator[Problem]:
    transform = spec.transform
    queries = (transform and transform.sql) or {}
    known = _names(spec) | queries.keys()
    used = {sink.origin for sink in spec.sinks}
    taken: set[tuple[str, str]] = set()
    for at, sink in enumerate(spec.sinks):
        if (transform is None or transform.python is None) and sink.origin not in known:
            there = ", ".join(sorted(known))
            yield ("spec", "sinks", at, "from"), f"there is no {sink.origin}, only {there}"
        if sink.entity is not None and (sink.origin, sink.entity.lower()) in taken:
            yield ("spec", "sinks", at), f"another sink sends {sink.origin} to {sink.entity}"
        taken.add((sink.origin, (sink.entity or "").lower()))
        if sink.dead_letter is not None:
            yield from _dead_letter_problems(spec, sink.dead_letter, at)
    for name in queries:
        others = [query for other, query in queries.items() if other != name]
        if name not in used and not _is_read(name, others):
            message = "its rows go nowhere: add a sink that is from it, or remove it"
            yield ("spec", "transform", "sql", name), message
    is_python = transform is not None and transform.python is not None
    is_taken = MALFORMED in used or is_python or _is_read(MALFORMED, list(queries.values()))
    if MALFORMED in known and not is_taken:
        message = f"rows of {MALFORMED}, whose body has not the schema, go nowhere: add a sink"
        yield ("spec", "sinks"), message


def _end_problems(spec: PipelineSpec) -> Iterator[Problem]:
    """Yield what only a source with a reader group, or one with an end, may have."""
    if not spec.source.is_bounded:
        if spec.checkpoint is None:
            yield ("spec", "checkpoint"), "a source with a reader group needs it: name a folder"
        return
    reads_once = "a source of history or of a table has an end and is read once"
    if spec.trigger.once is None:
        yield ("spec", "trigger"), f"{reads_once}: write once: true"
    if spec.checkpoint is not None:
        yield ("spec", "checkpoint"), f"{reads_once}, without notes of Spark: leave it out"
    if spec.limits != Limits():
        yield ("spec", "limits"), f"{reads_once}, as one batch: leave them out, or set a rate"
    for at, sink in enumerate(spec.sinks):
        if sink.entity is None:
            yield ("spec", "sinks", at), f"{reads_once}, and sent to queues and topics only"


def _state_problems(spec: PipelineSpec) -> Iterator[Problem]:
    """Yield what a pipeline with state between batches cannot have."""
    if not spec.is_stateful:
        return
    if spec.transform is not None and spec.transform.python is not None:
        message = "a function sees one batch at a time: write sql, or remove the watermark"
        yield ("spec", "transform", "python"), message
    path = "" if spec.checkpoint is None else spec.checkpoint.path
    if spec.volumes and not any(volume.has(path) for volume in spec.volumes):
        message = "with a watermark it has state: give it a folder below one of the volumes"
        yield ("spec", "checkpoint", "path"), message


def ordered_queries(queries: Mapping[str, str]) -> list[str]:
    """Return the outputs, each behind those that its query reads.

    API servers do not keep the order of a map. Where names seem to be read in a circle, since one
    is also that of a column, the order of the map counts.
    """
    reads = {
        name: {other for other in queries if other != name and _is_read(other, [query])}
        for name, query in queries.items()
    }
    found: list[str] = []
    while reads:
        free = [name for name, others in reads.items() if not others & reads.keys()]
        found.append((free or list(reads))[0])
        del reads[found[-1]]
    return found


def _is_read(name: str, queries: list[str]) -> bool:
    return any(re.search(rf"\b{name}\b", query, re.IGNORECASE) for query in queries)


def _dead_letter_problems(spec: PipelineSpec, name: str, at: int) -> Iterator[Problem]:
    where = ("spec", "sinks", at, "deadLetter")
    by_name: dict[str, Source] = {source.name: source for source in spec.sources}
    source = by_name.get(name)
    if source is None:
        yield where, f"there is no source {name}, only {', '.join(sorted(by_name))}"
    elif source.is_bounded:
        return
    elif source.mode != "drain":
        yield where, f"only a drained source has one: {name} is a tap, and receivers have its queue"
    elif source.sub_queue != "main":
        yield where, f"messages of {name} are dead letters already"


def _path_problems(spec: PipelineSpec) -> Iterator[Problem]:
    """Yield folders that lie in one another; a lookup of what is written would not repeat."""
    taken: list[tuple[str, str]] = []
    names: set[tuple[str, str | None]] = set()
    if spec.checkpoint is not None:
        taken.append((spec.checkpoint.path, "the checkpoint"))
    for at, sink in enumerate(spec.sinks):
        if sink.table is None:
            continue
        path, catalog = sink.table.path, sink.table.catalog
        where = ("spec", "sinks", at, "table")
        yield from _overlaps(path, taken, (*where, "path"))
        taken.append((path, f"the sink from {sink.origin}"))
        if catalog is not None and (catalog.uri, sink.table.name) in names:
            message = f"another sink writes the table {sink.table.name} of this catalog"
            yield (*where, "name"), message
        if catalog is not None:
            names.add((catalog.uri, sink.table.name))
    for at, lookup in enumerate(spec.lookups):
        yield from _overlaps(lookup.folder, taken, ("spec", "lookups", at))


def _has_own(path: str) -> bool:
    """Return whether a folder is, has or lies in the operator's own one."""
    return f"{path}/".startswith(f"{OWN_FOLDER}/") or f"{OWN_FOLDER}/".startswith(f"{path}/")


def _volume_problems(spec: PipelineSpec) -> Iterator[Problem]:
    """Yield folders that are mounted twice, and tables that would go with their pod."""
    taken: set[str] = set()
    if spec.volumes and spec.checkpoint is not None and _has_own(spec.checkpoint.path):
        yield ("spec", "checkpoint", "path"), OWN_FOLDER_TEXT
    for at, volume in enumerate(spec.volumes):
        if _has_own(volume.mount_path):
            yield ("spec", "volumes", at, "mountPath"), OWN_FOLDER_TEXT
        if volume.mount_path in taken:
            message = f"another volume has {volume.mount_path}: give each a folder of its own"
            yield ("spec", "volumes", at, "mountPath"), message
        taken.add(volume.mount_path)
    tables: list[tuple[str, int, TablePlace | LakeTable | None]] = [
        ("sources", 0, spec.source.table),
        *(("sinks", at, sink.table) for at, sink in enumerate(spec.sinks)),
    ]
    for kind, at, table in tables:
        if table is None or not spec.volumes:
            continue
        where = ("spec", kind, at, "table")
        is_in_bucket = table.path.startswith(S3)
        if not is_in_bucket and not any(volume.has(table.path) for volume in spec.volumes):
            yield (*where, "path"), IN_NO_VOLUME
        folder = None if table.catalog is None else table.catalog.folder
        if folder is not None and not any(volume.has(folder) for volume in spec.volumes):
            yield (*where, "catalog", "uri"), IN_NO_VOLUME


def shared_claims(spec: PipelineSpec) -> list[str]:
    """Return the claims that executors in pods of their own read and write: none without them."""
    if spec.runtime.executors == 0:
        return []
    paths = [each.folder for each in spec.lookups]
    paths += [sink.table.path for sink in spec.sinks if sink.table is not None]
    if spec.source.table is not None:
        paths.append(spec.source.table.path)
    if spec.is_stateful and spec.checkpoint is not None:
        paths.append(spec.checkpoint.path)
    claims = [each.claim_name for each in spec.volumes if any(map(each.has, paths))]
    return list(dict.fromkeys(claims))


def _overlaps(
    path: str, taken: list[tuple[str, str]], where: tuple[str | int, ...]
) -> Iterator[Problem]:
    for other, owner in taken:
        if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
            yield where, f"{owner} has {other}: give each a folder of its own"
