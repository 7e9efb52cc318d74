from __future__ import annotations

import stat
from pathlib import Path

import pytest

from postbus.broker.access.sealing import KeySeal
from postbus.process.data_directory import DataDirectory, DataDirectoryError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_same_directory_twice_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    with DataDirectory(tmp_path / "bus"), pytest.raises(DataDirectoryError, match=r"process \d+"):
        DataDirectory(tmp_path / "bus").open()


def test_directory_is_free_again_after_closing(tmp_path: Path) -> None:
    for _ in range(2):
        with DataDirectory(tmp_path / "bus") as directory:
            assert mode(directory.path) == 0o700


def test_keys_are_made_once_and_kept_for_the_owner_only(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as directory:
        first = directory.keys_of("shop/root")
        other = directory.keys_of("shop/reader")
    with DataDirectory(tmp_path) as directory:
        assert directory.keys_of("shop/root") == first
    assert len({first.primary, first.secondary, other.primary, other.secondary}) == 4
    assert len(first.primary) == 44
    assert mode(tmp_path / "keys.json") == 0o600


def test_sealing_key_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    with DataDirectory(tmp_path) as directory:
        KeySeal.from_text(directory.sealing_key())
        assert directory.sealing_key() == directory.sealing_key()
    assert mode(tmp_path / "sealing.key") == 0o600


@pytest.mark.parametrize("content", ["{", "[]", '{"shop/root": 1}', '{"shop/root": ["a"]}'])
def test_damaged_keys_are_reported_and_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys.json").write_text(content)
    with DataDirectory(tmp_path) as directory, pytest.raises(DataDirectoryError, match="repair it"):
        directory.keys_of("shop/root")
    assert (tmp_path / "keys.json").read_text() == content


def test_unusable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryError, match="data directory"):
        DataDirectory(tmp_path / "file" / "bus").open()
