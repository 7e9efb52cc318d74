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
    SourceTable,
)

OWN_FOLDER: Final = "/etc/postbus"
"""Folder of the document and the key in a pod of Kubernetes."""

OWN_FOLDER_TEXT: Final = f"{OWN_FOLDER} has the document and the key: give it another folder"

IN_NO_VOLUME: Final = "lies in none of the volumes: give it a folder below one of their mountPath"

Problem: TypeAlias = tuple[tuple[str | int, ...], str]
"""The path of a field, and what is wrong with it."""


def pipeline_problems(document: PipelineDocument) -> list[Problem]:
    """Return what is wrong with the fields of a document together."""
    spec = document.spec
    found = [
        *_name_problems(spec),
        *_lookup_problems(spec),
        *_sink_problems(spec),
        *_end_problems(spec),
        *_path_problems(spec),
        *_volume_problems(spec),
    ]
    names = [document.group, *(document.writer(sink) for sink in spec.sinks if sink.entity)]
    if not all(re.fullmatch(GROUP_NAME, name) for name in names):
        message = "too long for a reader group and its writers: name a shorter one"
        way_out = "" if spec.source.is_bounded else " with readerGroup"
        found.append((("metadata", "name"), f"{message}{way_out}"))
    return found


def _names(spec: PipelineSpec) -> set[str]:
    """Return the views that exist before the transformation."""
    return {spec.source.name} | ({MALFORMED} if spec.source.body else set())


def _name_problems(spec: PipelineSpec) -> Iterator[Problem]:
    if spec.source.name == MALFORMED:
        yield ("spec", "sources", 0, "name"), f"{MALFORMED} is the output of unreadable bodies"
    for name in (spec.transform and spec.transform.sql) or ():
        if name in {spec.source.name, MALFORMED}:
            yield ("spec", "transform", "sql", name), "a source has this name: choose another one"


def _lookup_problems(spec: PipelineSpec) -> Iterator[Problem]:
    transform = spec.transform
    queries = (transform and transform.sql) or {}
    taken = {spec.source.name, MALFORMED, *queries}
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
            yield from _dead_letter_problems(spec.source, sink.dead_letter, at)
    for name in queries:
        others = [query for other, query in queries.items() if other != name]
        if name not in used and not _is_read(name, others):
            message = "its rows go nowhere: add a sink that is from it, or remove it"
            yield ("spec", "transform", "sql", name), message
    is_python = transform is not None and transform.python is not None
    is_taken = MALFORMED in used or is_python or _is_read(MALFORMED, list(queries.values()))
    if spec.source.body and not is_taken:
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


def _dead_letter_problems(source: Source, name: str, at: int) -> Iterator[Problem]:
    where = ("spec", "sinks", at, "deadLetter")
    if name != source.name:
        yield where, f"there is no source {name}, only {source.name}"
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
    tables: list[tuple[str, int, SourceTable | LakeTable | None]] = [
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
    claims = [each.claim_name for each in spec.volumes if any(map(each.has, paths))]
    return list(dict.fromkeys(claims))


def _overlaps(
    path: str, taken: list[tuple[str, str]], where: tuple[str | int, ...]
) -> Iterator[Problem]:
    for other, owner in taken:
        if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
            yield where, f"{owner} has {other}: give each a folder of its own"
