"""Readers of a pipeline: each of its sources with the group that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from postbus_spark.client import GroupClient
from postbus_spark.options import read_options

if TYPE_CHECKING:
    from postbus.contract.pipeline import PipelineDocument, Source


class Reader(NamedTuple):
    """A source with a reader group. `options`: those of `spark.readStream`."""

    source: Source
    options: dict[str, str]
    client: GroupClient

    @property
    def entity(self) -> str:
        """The entity as offsets name it."""
        return read_options(self.options).offset_entity


def readers_of(document: PipelineDocument, connection_file: str | None) -> tuple[Reader, ...]:
    """Return the readers in the order of sources. Raises `InvalidOption`, `InvalidCredentials`."""
    found = []
    for source in document.spec.sources:
        options = source_options(document, source, connection_file)
        found.append(Reader(source, options, GroupClient(read_options(options))))
    return tuple(found)


def source_options(
    document: PipelineDocument, source: Source, connection_file: str | None
) -> dict[str, str]:
    """Return the options of a source that a pipeline reads."""
    limits = document.spec.limits
    options = {
        "entity": source.entity,
        "readerGroup": document.group_of(source),
        "subQueue": source.sub_queue,
        "mode": source.mode,
        "maxMessagesPerTrigger": str(limits.max_messages_per_trigger),
        "maxBytesPerTrigger": str(limits.max_bytes_per_trigger),
    }
    if connection_file is not None:
        options["connectionStringFile"] = str(Path(connection_file).absolute())
    return options
