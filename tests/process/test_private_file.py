"""Files for their owner alone."""

from __future__ import annotations

from pathlib import Path

from postbus.process.private_file import write_private


def test_private_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in path.parent.iterdir()] == ["secret"]
