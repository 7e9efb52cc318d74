"""The OpenAPI document and the tables behind the control API."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from postbus.edge.control.calls import STATUS_OF
from postbus.edge.control.openapi import REFUSED, openapi_document, openapi_text
from postbus.edge.control.routes import ROUTES
from tests.dev_bus import ROOT, environment


def test_checked_in_document_is_the_served_one() -> None:
    text = (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8")
    assert text == openapi_text(), "run `make openapi`"


@pytest.mark.slow
def test_document_does_not_depend_on_the_process() -> None:
    """Sets have another order in every process."""
    program = "from postbus.edge.control.openapi import openapi_text as t; print(t(), end='')"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env=environment(PYTHONHASHSEED=seed),
        )
        assert done.stdout == openapi_text()


def test_statuses_of_refusals_are_in_the_document() -> None:
    assert {status for status, _ in STATUS_OF.values()} <= set(REFUSED)


def test_operations_have_names_of_their_own() -> None:
    assert len({route.operation for route in ROUTES}) == len(ROUTES)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_document_holds_together() -> None:
    document = openapi_document()
    text = json.dumps(document)
    references = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    for reference in references:
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    assert "_ms" not in text  # names are those of the wire
