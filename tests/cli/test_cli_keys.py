"""`postbus keys` and `postbus connection-string` on a running bus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.command_line import CommandLine, folder_with_bus, user_folder

MANIFESTS = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: key-bus}
spec:
  sku: {name: Standard}
  authorizationRules:
    - {name: RootManageSharedAccessKey, rights: [Manage]}
    - {name: given, rights: [Listen], secretName: given}
---
apiVersion: v1
kind: Secret
metadata: {name: given}
stringData: {primaryKey: a-key-that-is-long-enough-1}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: orders}
spec:
  owner: {name: key-bus}
  authorizationRules:
    - {name: worker, rights: [Send, Listen]}
"""


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    with user_folder() as folder:
        (folder / "bus.yaml").write_text(MANIFESTS)
        with folder_with_bus(str(folder / "bus.yaml")) as user:
            yield user


def sends(user: CommandLine, connection_string: str) -> bool:
    done = user.run("send", "orders", "x", POSTBUS_CONNECTION_STRING=connection_string)
    assert done.returncode in {0, 7}, done
    return done.returncode == 0


@pytest.mark.slow
def test_connection_string_is_one_line_that_works(here: CommandLine) -> None:
    printed = here.ok("connection-string", COLUMNS="80")
    assert printed.count("\n") == 1
    assert printed.strip() in here.announced
    assert sends(here, printed.strip())
    printed = here.ok("connection-string", "worker", "--entity", "orders").strip()
    assert (printed.count("SharedAccessKeyName=worker;"), printed.count(";EntityPath=orders")) == (
        1,
        1,
    )
    assert sends(here, printed)
    elsewhere = here.ok("connection-string", "--endpoint", "sb://bus.example.org").strip()
    assert elsewhere.startswith("Endpoint=sb://bus.example.org;SharedAccessKeyName=RootManage")
    here.fails("connection-string", "nobody", code=7, says="existing rules: RootManageSharedAcc")


@pytest.mark.slow
def test_keys_are_listed_and_shown_only_when_asked_for(here: CommandLine) -> None:
    found = here.json("keys", "list")
    assert [each["name"] for each in found] == ["RootManageSharedAccessKey", "given"]
    assert "primaryKey" not in found[1]
    shown = here.ok("keys", "list", "--show")
    assert "a-key-that-is-long-enough-1" in shown
    assert here.json("keys", "list", "-e", "orders")[0]["name"] == "worker"


@pytest.mark.slow
@pytest.mark.parametrize("entity", [["--entity", "orders"], []], ids=["queue", "bus"])
def test_old_key_works_until_keys_are_rotated_again(here: CommandLine, entity: list[str]) -> None:
    rule = "worker" if entity else "RootManageSharedAccessKey"
    old = here.ok("connection-string", rule, "--endpoint", endpoint(here), *entity).strip()
    assert "the old one is now the secondary" in here.ok("keys", "rotate", rule, *entity)
    new = here.ok("connection-string", rule, "--endpoint", endpoint(here), *entity).strip()
    assert (new != old, sends(here, old), sends(here, new)) == (True, True, True)
    here.ok("keys", "rotate", rule, *entity)
    assert (sends(here, old), sends(here, new)) == (False, True)


def endpoint(user: CommandLine) -> str:
    (address,) = (line for line in user.announced.splitlines() if line.startswith("Endpoint="))
    return address.removeprefix("Endpoint=").partition(";")[0] + ";UseDevelopmentEmulator=true"


@pytest.mark.slow
def test_key_from_a_secret_cannot_be_rotated_by_command(here: CommandLine) -> None:
    here.fails("keys", "rotate", "given", code=7, says="change it there, and send the bus SIGHUP")


@pytest.mark.slow
def test_ephemeral_bus_is_found_in_its_start_folder() -> None:
    with folder_with_bus("--ephemeral") as user:
        assert user.ok("send", "queue.1", "hello") == "sent 1 message to queue.1\n"
        assert user.lines("receive", "queue.1")[0]["body"] == "hello"
        assert not (user.folder / ".postbus").exists()
        with user_folder() as folder:
            CommandLine(folder).fails("send", "queue.1", "x", code=3, says="no bus of postbus dev")
            assert CommandLine(folder).ok("status", POSTBUS_DATA=str(user.folder / ".postbus"))
    user.folder.mkdir()
    user.fails("send", "queue.1", "hello", code=3, says="no bus of postbus dev runs")
    user.folder.rmdir()
