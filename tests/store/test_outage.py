"""An outage is one event: logged at once, then once a minute, and at its end."""

from __future__ import annotations

import logging
import ssl

import asyncpg
import pytest

from postbus.store.errors import (
    StoreError,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
    as_store_error,
)
from postbus.store.outage import SUMMARY_S, Outage


def test_an_outage_is_logged_at_once_then_summed_up_until_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 1_000.0
    outage = Outage("db.example.org:5432", lambda: now, lambda: 1_700_000_000.0)

    def logged() -> list[logging.LogRecord]:
        found = list(caplog.records)
        caplog.clear()
        return found

    def fail() -> None:
        outage.failed(StoreUnavailable("refused\nDETAIL: more"))

    assert (outage.is_on, outage.text) == (False, None)
    fail()
    text = "the store at db.example.org:5432 is unavailable (since 2023-11-14T22:13:20Z): refused"
    assert (outage.is_on, outage.text) == (True, text)
    (first,) = logged()
    assert first.levelno == logging.WARNING
    assert vars(first)["why"] == "the store at db.example.org:5432 is unavailable: refused"
    for _ in range(59):
        now += 1
        fail()
    assert not logged()
    now += 1
    fail()
    (summary,) = logged()
    assert (vars(summary)["failures"], vars(summary)["since_s"]) == (60, SUMMARY_S)
    outage.ended()
    outage.ended()
    (end,) = logged()
    assert (end.levelno, vars(end)["away_s"], outage.text) == (logging.INFO, 60, None)
    fail()
    (again,) = logged()
    assert "failures" not in vars(again)


def test_one_error_counts_once_and_a_misconfiguration_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage("")
    error = StoreMisconfigured("no such")
    outage.failed(error)
    outage.failed(error)
    (record,) = caplog.records
    assert (record.levelno, vars(record)["why"]) == (
        logging.ERROR,
        "the store cannot be used: no such",
    )


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("08006", StoreUnavailable),
        ("25006", StoreUnavailable),
        ("40001", StoreUnavailable),
        ("53300", StoreUnavailable),
        ("55P03", StoreUnavailable),
        ("57014", StoreUnavailable),
        ("57P01", StoreUnavailable),
        ("57P03", StoreUnavailable),
        ("58030", StoreUnavailable),
        ("53100", StoreFull),
        ("53200", StoreFull),
        ("28000", StoreMisconfigured),
        ("28P01", StoreMisconfigured),
        ("3D000", StoreMisconfigured),
        ("42501", StoreMisconfigured),
    ],
)
def test_server_errors_are_transient_or_need_a_human(sqlstate: str, kind: type[StoreError]) -> None:
    error = asyncpg.PostgresError.new({"C": sqlstate, "M": "words", "S": "ERROR"})
    assert type(as_store_error(error)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError(), StoreUnavailable),
        (TimeoutError(), StoreUnavailable),
        (asyncpg.InterfaceError("connection is closed"), StoreUnavailable),
        (ssl.SSLCertVerificationError("self-signed"), StoreMisconfigured),
        (ConnectionError('PostgreSQL server at "a:1" rejected SSL upgrade'), StoreMisconfigured),
        (asyncpg.exceptions.ClientConfigurationError("no file"), StoreMisconfigured),
    ],
)
def test_driver_errors_are_transient_or_need_a_human(
    error: Exception, kind: type[StoreError]
) -> None:
    assert type(as_store_error(error)) is kind


def test_a_catalog_cache_that_cannot_be_written_is_a_full_disk() -> None:
    texts = {"could not write init file": StoreFull, "unexpected data": type(None)}
    for text, kind in texts.items():
        error = asyncpg.PostgresError.new({"C": "XX000", "M": text, "S": "FATAL"})
        assert type(as_store_error(error)) is kind


def test_a_timeout_of_the_store_is_named() -> None:
    assert str(as_store_error(TimeoutError())) == "TimeoutError: no answer in time"
    assert (
        str(as_store_error(OSError(111, "refused")))
        == "ConnectionRefusedError: [Errno 111] refused"
    )
