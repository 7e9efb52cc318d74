"""Exposed settings of a process are reported at its start, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from postbus.process.exposure import KEY_FILES, exposures
from postbus.process.settings import Settings, SettingsError, load_settings

ELSEWHERE = "postgresql://bus:secret@db.internal/bus"


@pytest.mark.parametrize("name", KEY_FILES)
@pytest.mark.parametrize(
    ("mode", "is_logged"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)]
)
def test_file_of_keys_that_others_may_read_is_remarked(
    tmp_path: Path, name: str, mode: int, is_logged: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("postgresql://localhost/bus")  # not to be read unless it is the stores_file
    file.chmod(mode)
    remarks = exposures(Settings.model_validate({name: file}))
    assert [remark.startswith(f"{name}: others may read {file}") for remark in remarks] == (
        [True] if is_logged else []
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of root")
@pytest.mark.parametrize(("mode", "is_logged"), [(0o440, False), (0o640, False), (0o644, True)])
def test_a_file_of_root_that_a_group_may_read_is_in_order_for_a_process_that_is_not_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_logged: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("secret")
    file.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 10_001)
    assert bool(exposures(Settings(sealing_key_file=file))) == is_logged


@pytest.mark.parametrize("name", KEY_FILES)
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_of_keys_that_others_may_change_is_refused(
    tmp_path: Path, name: str, mode: int
) -> None:
    file = tmp_path / "keys"
    file.write_text("secret")
    file.chmod(mode)
    with pytest.raises(SettingsError, match=f"others may change {file}: chmod 600"):
        exposures(Settings.model_validate({name: file}))


def test_missing_file_of_keys_gives_no_warning(tmp_path: Path) -> None:
    assert exposures(Settings(sealing_key_file=tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("stores", "remarked"),
    [
        (ELSEWHERE, "database on db.internal is"),
        (f"{ELSEWHERE}?sslmode=require", "database on db.internal is"),
        (f"{ELSEWHERE}?sslmode=verify-full&sslrootcert=ca.pem", ""),
        (f"{ELSEWHERE}?sslmode=verify-ca", ""),
        ("postgresql://bus:s@localhost:5433/bus", ""),
        ("postgresql://bus:s@127.0.0.1/bus", ""),
        ("postgresql://bus:s@[::1]:5432/bus", ""),
        ("postgresql://bus:s@[fd00::2]:5432/bus", "database on fd00::2 is"),
        ("postgresql://bus:s@a:1,localhost:2,b/bus", "database on a, b is"),
        ("postgresql:///bus?host=/run/postgresql", ""),
        ("postgresql:///bus?host=db.internal", "database on db.internal is"),
        ("postgresql://%2Frun%2Fpostgresql/bus", ""),
        (f"{ELSEWHERE} postgresql://localhost/bus", "database 1 on db.internal is"),
    ],
)
def test_postgres_elsewhere_without_verified_tls_is_remarked(stores: str, remarked: str) -> None:
    settings = Settings.model_validate({"stores": stores})
    remarks = exposures(settings)
    assert [remark.partition(" reached")[0] for remark in remarks] == (
        [remarked] if remarked else []
    )
    assert not any("secret" in remark for remark in remarks)
    assert not exposures(settings, default_ssl_mode="verify-full") or "sslmode" in stores


@pytest.mark.parametrize("password", ["me:hidden@db/bus", "db/bus?user=me&password=hidden"])
def test_password_on_the_command_line_is_refused(
    monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    address = f"postgresql://{password}"
    with pytest.raises(SettingsError, match=r"--stores: .* POSTBUS_STORES") as caught:
        load_settings(stores=f"postgresql://db/other {address}")
    assert "hidden" not in str(caught.value)
    monkeypatch.setenv("POSTBUS_STORES", address)
    assert load_settings().store_dsns == [address]
    assert load_settings(stores="postgresql://me@db/bus").store_dsns == ["postgresql://me@db/bus"]
