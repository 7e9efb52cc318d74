"""Reads the document of a pipeline; every problem names file, line and field."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from postbus.contract.pipeline import PipelineDocument
from postbus.contract.pipeline_checks import pipeline_problems
from postbus.contract.yaml_documents import (
    Document,
    ManifestError,
    ManifestProblem,
    read_as,
    read_documents,
)
from postbus_spark.jobs.schedules import schedule_problem

KIND: Final = "Pipeline"


def read_pipeline(path: Path) -> PipelineDocument:
    """Return the pipeline of a file. Raises `ManifestError` with all problems."""
    documents = list(read_documents(path, str(path)))
    if len(documents) != 1:
        count = len(documents) or "no"
        message = f"the file has {count} documents: write one of kind {KIND}"
        raise ManifestError([ManifestProblem(str(path), 0, "", message)])
    pipeline, problems = _read(documents[0])
    if pipeline is None or problems:
        raise ManifestError(problems)
    return pipeline


def _read(document: Document) -> tuple[PipelineDocument | None, list[ManifestProblem]]:
    value = document.value
    if not isinstance(value, dict):
        return None, [document.problem((), "a document must be a mapping")]
    if value.get("kind") != KIND:
        shown = value.get("kind") or "missing"
        message = f"kind is {shown}, and a pipeline is of kind {KIND}"
        return None, [document.problem(("kind",), message)]
    pipeline, problems = read_as(document, PipelineDocument)
    if pipeline is None:
        return None, problems
    found = pipeline_problems(pipeline)
    schedule = pipeline.spec.trigger.schedule
    if schedule is not None and (problem := schedule_problem(schedule)) is not None:
        found.append((("spec", "trigger", "schedule"), problem))
    return pipeline, [document.problem(*each) for each in found]
