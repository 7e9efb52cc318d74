"""The file of addresses: its form, and errors that contain no address."""

from __future__ import annotations

from pathlib import Path

import pytest

from postbus.process.settings import SettingsError, load_settings
from postbus.process.stores_file import read_stores_file

GOOD = "postgresql://bus:secret@db.internal:5432/bus?sslmode=verify-full&sslrootcert=/run/ca.pem"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("POSTBUS_STORES", raising=False)
    return tmp_path / "stores"


def test_each_line_is_an_address_but_comments_and_blank_ones(file: Path) -> None:
    file.write_bytes(f"# of the bus\r\n\r\n  {GOOD}  \n\n# {GOOD}\npostgres://a,b:1/x\n".encode())
    assert read_stores_file(file) == [GOOD, "postgres://a,b:1/x"]
    settings = load_settings(stores_file=file)
    assert settings.store_dsns == [GOOD, "postgres://a,b:1/x"]
    assert settings.has_stores


@pytest.mark.parametrize(
    "address",
    [
        "postgresql:///bus?host=/run/postgresql",
        "postgresql://bus@%2Frun%2Fpostgresql/bus",
        "postgresql://bus:a%40b%2Fc@[fd00::1]:5432/bus",
        "postgresql://bus@db1:5432,db2:5433/bus?target_session_attrs=read-write",
    ],
)
def test_addresses_of_every_form_are_read(file: Path, address: str) -> None:
    file.write_text(address)
    assert read_stores_file(file) == [address]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hidden@db.internal/bus", "line 2 is not one address such as postgresql://"),
        ("mysql://me:hidden@db/bus", "line 2 is not"),
        (f"{GOOD} {GOOD}", "line 2 is not one address"),
        ("postgresql://me:hid@den@db/bus", "write @ / [?] # % and blanks as %40 %2F"),
        ("postgresql://me:hid/den@db/bus", "line 2 is not"),
        ("postgresql://me:12/den@db/bus", "line 2 is not"),
        ("postgresql://me:hid#den@db/bus", "line 2 is not"),
        ("postgresql://me:hid?den@db/bus", "line 2 is not"),
        ("postgresql://me:hidden@db:port/bus", "line 2 is not"),
        ("postgresql://me:hidden@[db/bus", "line 2 is not"),
        ("postgresql://me:hidden@db1:5432,db2:65536/bus", "line 2 is not"),
        ("postgresql://me:hidden@db/bus?sslmode", "line 2 is not"),
        ("postgresql://me:hidden\udcff@db/bus", "line 2 is not"),
        ("# nothing", "there is no address in it; write one a line"),
        ("#" * 70_000, "larger than 64 KiB"),
    ],
)
def test_an_unusable_file_is_refused_without_its_content(file: Path, line: str, words: str) -> None:
    file.write_bytes(b"# first line\n" + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError, match=f"^POSTBUS_STORES_FILE {file}: .*{words}") as caught:
        _ = load_settings(stores_file=file).store_dsns
    for secret in ("hid", "den", "secret"):
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_missing_file_is_refused(file: Path) -> None:
    with pytest.raises(SettingsError, match="no such file"):
        _ = load_settings(stores_file=file).store_dsns


def test_addresses_come_from_one_place(file: Path) -> None:
    file.write_text(GOOD)
    with pytest.raises(SettingsError, match="POSTBUS_STORES and POSTBUS_STORES_FILE exclude") as no:
        load_settings(stores="postgresql://db/bus", stores_file=file)
    assert "unset one of them" in str(no.value)
