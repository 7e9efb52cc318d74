"""`postbus audit`: manual changes with their callers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.command_line import CommandLine, folder_with_bus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def user() -> Iterator[CommandLine]:
    with folder_with_bus() as user:
        yield user


def test_audit_shows_changes_made_by_commands(user: CommandLine) -> None:
    user.ok("send", "queue.1", "hello")
    user.ok("purge", "queue.1", "--yes", "--where", "sys.Label IS NULL")
    user.ok("delete", "queue.1", "--yes", "--policy", "Retain")
    user.ok("restore", "queue.1")
    found = user.json("audit")
    assert [(each["verb"], each["entity"]) for each in found[:3]] == [
        ("restore", ""),
        ("delete", "queue.1"),
        ("purge messages", "queue.1"),
    ]
    assert all(each["caller"].startswith("token ") for each in found[:3])
    output = user.ok("audit", "--count", "3")
    assert "1 deleted, 1 matched; where sys.Label IS NULL" in output
    assert f"3 shown; for more use --before {found[2]['number']}" in output
    rest = user.json("audit", "--before", str(found[2]["number"]))
    assert {each["caller"] for each in rest} == {"manifests"}
    assert len(user.json("audit", "--entity", "queue.1", "--caller", found[0]["caller"])) == 2
    assert user.ok("audit", "--caller", "nobody").strip() == "no manual changes"
