"""Refusals of the API server have the type that says what to do about them."""

from __future__ import annotations

import json

import pytest

from postbus_operator.kube.api import (
    ApiUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    _error_of,
)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, Invalid), (401, Forbidden), (403, Forbidden), (404, NotFound), (409, Conflict),
        (410, NotFound), (415, Invalid), (422, Invalid), (429, ApiUnavailable),
        (500, ApiUnavailable), (503, ApiUnavailable), (504, ApiUnavailable),
    ],
)  # fmt: skip
def test_each_status_has_a_type(status: int, expected: type) -> None:
    said = {"kind": "Status", "reason": "Because", "message": "of that"}
    found = _error_of(status, json.dumps(said).encode(), None)
    assert type(found) is expected
    assert (found.status, found.reason, found.message) == (status, "Because", "of that")


def test_the_pause_that_the_api_server_asks_for_is_kept() -> None:
    found = _error_of(429, b"{}", "7")
    assert isinstance(found, ApiUnavailable)
    assert found.retry_after_s == 7
    found = _error_of(503, b"{}", None)
    assert isinstance(found, ApiUnavailable)
    assert found.retry_after_s is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"<html>bad gateway</html>", b"[1]", b"null", b'{"details": 7}',
        b'{"details": {"causes": 7}}', b'{"details": {"causes": [7]}}', b'{"details": null}',
    ],
)  # fmt: skip
def test_an_answer_of_something_between_is_shown_as_it_is(data: bytes) -> None:
    """A proxy answers with what it likes."""
    found = _error_of(502, data, None)
    assert isinstance(found, ApiUnavailable)
    assert found.message in (data.decode(), "")
