"""Addresses that a file replaces: read rarely, kept while the file is unusable, never logged."""

from __future__ import annotations

import logging

import pytest

from postbus.store.addresses import REREAD_S, Address, Addresses, target_of
from postbus.store.outage import SUMMARY_S

FIRST, SECOND, OTHER = (f"postgresql://bus:{word}@db/bus" for word in ("one", "two", "three"))


class File:
    """A file of addresses; an exception as its content is raised. `reads` counts."""

    def __init__(self, *dsns: str) -> None:
        self.content: list[str] | Exception = list(dsns)
        self.reads = 0
        self.now_s = 100.0

    def read(self) -> list[str]:
        self.reads += 1
        if isinstance(self.content, Exception):
            raise self.content
        return self.content

    def clock(self) -> float:
        return self.now_s


def test_all_databases_together_read_the_file_at_most_once_a_second() -> None:
    file = File(FIRST, SECOND)
    addresses = Addresses([FIRST, SECOND], file.read, file.clock)
    both = [Address(addresses, ordinal) for ordinal in range(2)]
    file.content = [FIRST, OTHER]
    both[0].read_again()
    assert [address.dsn for address in both] == [FIRST, OTHER]
    file.content = [OTHER, OTHER]
    for _ in range(3):
        for address in both:
            address.read_again()
    assert file.reads == 1
    file.now_s += REREAD_S
    both[1].read_again()
    assert (file.reads, both[0].dsn) == (2, OTHER)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([OTHER], "number of addresses: 1 instead of 2; list all databases"),
        ([OTHER] * 3, "number of addresses: 3 instead of 2"),
        (ValueError("line 2 is not an address"), "line 2 is not an address"),
        (OSError("gone"), "gone"),
    ],
)
def test_an_unusable_file_changes_nothing_and_is_logged_rarely(
    caplog: pytest.LogCaptureFixture, content: list[str] | Exception, words: str
) -> None:
    caplog.set_level(logging.DEBUG)
    file = File()
    file.content = content
    addresses = Addresses([FIRST, SECOND], file.read, file.clock)
    while file.now_s < 100.0 + SUMMARY_S:
        addresses.read_again()
        file.now_s += REREAD_S
    assert addresses.dsns == [FIRST, SECOND]
    assert addresses.problem is not None
    (record,) = caplog.records
    assert (record.levelno, words in vars(record)["why"]) == (logging.ERROR, True)
    addresses.read_again()
    assert len(caplog.records) == 2
    file.content, file.now_s = [FIRST, OTHER], file.now_s + REREAD_S
    addresses.read_again()
    assert (addresses.dsns, addresses.problem) == ([FIRST, OTHER], None)
    assert vars(caplog.records[-1])["databases"] == [2]
    assert not any(dsn in str(vars(each)) for each in caplog.records for dsn in (FIRST, OTHER))


def test_addresses_of_the_environment_cannot_change() -> None:
    addresses = Addresses([FIRST])
    addresses.read_again()
    assert (addresses.dsns, addresses.may_change) == ([FIRST], False)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("postgresql://bus:two@db/bus", True),
        ("postgresql://other@db/bus?user=x&password=y", True),
        ("postgresql://bus:one@db/bus?sslmode=verify-full&sslrootcert=/ca.pem", True),
        ("postgresql://bus:one@db:5433/bus", False),
        ("postgresql://bus:one@db2/bus", False),
        ("postgresql://bus:one@db/bus2", False),
        ("postgresql://bus:one@db/bus?host=/run", False),
        ("postgresql://bus:one@db/bus?dbname=bus2", False),
    ],
)
def test_the_target_of_an_address_is_its_host_and_database(other: str, is_same: bool) -> None:
    assert (target_of(FIRST) == target_of(other)) is is_same


def test_an_address_without_a_database_has_that_of_its_user() -> None:
    short = target_of("postgresql://bus:one@db")
    assert short == target_of("postgresql://bus:two@db/") == target_of("postgresql://x@db/bus")
    assert short != target_of("postgresql://other:one@db")
    assert target_of("postgresql:///?user=a") != target_of("postgresql:///?user=b")
    named = target_of("postgresql://bus@db?dbname=x")
    assert named == target_of("postgresql://other@db?dbname=x")
