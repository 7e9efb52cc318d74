"""A bus is found by its data directory and by its control port while it runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from postbus.process.data_directory import DataDirectory
from postbus.process.local_bus import (
    FILE_NAME,
    Announcement,
    announce_control_port,
    announced_as,
    bus_at_control_port,
    bus_of_data_directory,
    withdraw_control_port,
)

KEY = "a-key-of-the-bus"
BUS = Announcement("bus", os.getpid(), "http://localhost:1", f"SharedAccessKey={KEY}")
URL = "http://localhost:9465"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of notes, which is not there yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"postbus-{os.geteuid()}"


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_bus_is_found_by_its_data_directory_until_it_closes_it(tmp_path: Path) -> None:
    assert KEY not in repr(BUS)
    data = DataDirectory(tmp_path)
    with data:
        data.announce(BUS)
        assert bus_of_data_directory(tmp_path) == BUS
    assert bus_of_data_directory(tmp_path) is None


def test_announcements_of_a_killed_bus_are_withdrawn_by_the_next_bus_of_its_data(
    tmp_path: Path,
) -> None:
    BUS.write(tmp_path / FILE_NAME)
    with DataDirectory(tmp_path):
        assert bus_of_data_directory(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"bus": "b", "pid": "1", "control": null}'])
def test_damaged_announcement_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert bus_of_data_directory(tmp_path) is None


def test_bus_without_a_data_directory_of_its_own_is_found_as_if_it_had_one(
    tmp_path: Path, notes: Path
) -> None:
    with announced_as(tmp_path / "data", BUS):
        assert bus_of_data_directory(tmp_path / "data") == BUS
        assert bus_of_data_directory(tmp_path / "other") is None
        assert notes.stat().st_mode & 0o777 == 0o700
        assert [each.stat().st_mode & 0o777 for each in notes.iterdir()] == [0o600]
    assert bus_of_data_directory(tmp_path / "data") is None
    assert not notes.exists()


def test_bus_is_found_by_its_control_port_until_it_withdraws(tmp_path: Path, notes: Path) -> None:
    for port in (9_465, 9_466):
        announce_control_port(port, URL, tmp_path / f"token-{port}")
    found = bus_at_control_port(9_465)
    assert found == Announcement(None, os.getpid(), URL, token_file=str(tmp_path / "token-9465"))
    withdraw_control_port(9_465)
    assert bus_at_control_port(9_465) is None
    assert bus_at_control_port(9_466) is not None
    withdraw_control_port(9_466)
    assert not notes.exists()


def test_notes_of_killed_buses_are_removed(tmp_path: Path, notes: Path, dead: int) -> None:
    killed = json.dumps({"bus": None, "pid": dead, "control": URL, "token_file": "token"})
    for text in (killed, "", "{}"):
        announce_control_port(9_466, URL, tmp_path / "token")
        note = notes / "bus-9465"
        note.write_text(text)
        assert bus_at_control_port(9_465) is None
        assert not note.exists()
        for name in ("bus-9465", "bus-of-a-folder"):
            (notes / name).write_text(text)
        announce_control_port(9_466, URL, tmp_path / "token")
        assert [each.name for each in notes.iterdir()] == ["bus-9466"]


def test_note_of_another_process_is_not_withdrawn(notes: Path) -> None:
    announce_control_port(9_465, URL, Path("token"))
    other = {"bus": None, "pid": os.getppid(), "control": URL}
    (notes / "bus-9465").write_text(json.dumps(other))
    withdraw_control_port(9_465)
    assert bus_at_control_port(9_465) == Announcement(None, os.getppid(), URL)


def test_folder_that_others_may_enter_holds_no_notes(tmp_path: Path, notes: Path) -> None:
    notes.mkdir()
    notes.chmod(0o755)  # whatever the umask of the run
    announce_control_port(9_465, URL, tmp_path / "token")
    assert list(notes.iterdir()) == []
    assert bus_at_control_port(9_465) is None
    with announced_as(tmp_path, BUS):
        assert bus_of_data_directory(tmp_path) is None
