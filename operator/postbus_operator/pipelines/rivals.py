"""Pipelines that would read with one reader group, or note in one folder. Pure.

The earlier one has it. The bus would end one of two drivers only while both run, and in the folder
of another checkpoint Spark finds a foreign query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from pydantic import ValidationError

from postbus.contract.pipeline import PipelineDocument, Source, Volume
from postbus.contract.pipeline_checks import pipeline_problems
from postbus.contract.resources import API_VERSION
from postbus_operator.objects import Key, Resource
from postbus_operator.outcome import SpecInvalid

GroupKey: TypeAlias = tuple[Key | None, str, str, str]
NEXT_STEP: Final = "or delete one of them"


def document_of(resource: Resource) -> PipelineDocument:
    """Return a resource as the document that it is. Raises ValidationError."""
    found: Mapping[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": resource.key.kind,
        "metadata": {"name": resource.key.name, "namespace": resource.key.namespace},
        "spec": resource.spec,
    }
    return PipelineDocument.model_validate(found)


def check_rivals(
    resource: Resource, document: PipelineDocument, others: Iterable[Resource]
) -> None:
    """Raise SpecInvalid if an earlier pipeline has the reader group or the folder."""
    checkpoint = document.spec.checkpoint
    for other in sorted(others, key=_age):
        if other.is_deleting or not is_of_bus(other) or _age(other) >= _age(resource):
            continue
        known = _readable(other)
        if known is None:
            continue
        taken = {group_of(other, source) for source in known.spec.sources}
        for source in document.spec.sources:
            if group_of(resource, source) in taken:
                raise SpecInvalid(
                    "GroupTaken",
                    f"{other.key} reads {source.entity} with the reader group"
                    f" {document.group_of(source)}: set another readerGroup, {NEXT_STEP}",
                )
        is_shared = _is_shared(_folder_of(other, known), _folder_of(resource, document))
        if checkpoint is not None and is_shared:
            raise SpecInvalid(
                "CheckpointTaken",
                f"{other.key} has its checkpoint in {checkpoint.path} of the same"
                f" volume: set another checkpoint.path, {NEXT_STEP}",
            )


def is_group_shared(resource: Resource, source: Source, others: Iterable[Resource]) -> bool:
    """Return whether another pipeline can go on with the reader group, and stands for it."""
    return (group_of(resource, source), source.mode) in (
        (group_of(other, each), each.mode)
        for other in others
        if other.key != resource.key and is_of_bus(other)
        if not other.is_deleting and not other.is_paused
        if (known := _readable(other)) is not None and not pipeline_problems(known)
        for each in known.spec.sources
    )


def is_of_bus(resource: Resource) -> bool:
    """Return whether a pipeline is in the cluster namespace of its bus, as it must be.

    Its key is for all entities: whoever may make entities elsewhere gets none of these, and has no
    claim that others must heed.
    """
    return resource.owner is not None and resource.owner.namespace == resource.key.namespace


def group_of(resource: Resource, source: Source) -> GroupKey:
    """Return what identifies the reader group of a source: bus, entity, sub-queue, name.

    A source without one is itself what nobody shares.
    """
    if source.is_bounded:
        return resource.key, "", "", ""
    name = source.reader_group or resource.key.name
    return resource.owner, source.entity.lower(), source.sub_queue, name


def _age(resource: Resource) -> tuple[datetime, bool, str]:
    """Return what is less for the one that stays. Of two of one second, it is the accepted one."""
    return resource.created_at, not resource.meets("Valid"), resource.uid


def _readable(resource: Resource) -> PipelineDocument | None:
    try:
        return document_of(resource)
    except ValidationError:  # it has a condition of its own
        return None


def _folder_of(resource: Resource, document: PipelineDocument) -> tuple[str, str, str] | None:
    """Return cluster namespace, claim, and folder in it of the checkpoint; None: in no claim."""
    if document.spec.checkpoint is None:
        return None
    path = document.spec.checkpoint.path
    volume: Volume | None = max(
        (each for each in document.spec.volumes if each.has(path)),
        key=lambda each: len(each.mount_path),
        default=None,
    )
    if volume is None:
        return None
    return resource.key.namespace, volume.claim_name, f"{path[len(volume.mount_path) :]}/"


def _is_shared(one: tuple[str, str, str] | None, other: tuple[str, str, str] | None) -> bool:
    """Return whether two folders are the same, or one lies in the other."""
    if one is None or other is None or one[:2] != other[:2]:
        return False
    return one[2].startswith(other[2]) or other[2].startswith(one[2])
