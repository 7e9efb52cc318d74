"""`postbus context`, the search of commands for their bus, and shell completion."""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from postbus.cli.client.contexts import ContextFile, config_folder
from postbus.cli.failures import ContextError
from postbus.process.local_bus import FILE_NAME, bus_of_data_directory
from tests.cli.command_line import CommandLine, folder_with_bus
from tests.dev_bus import LIMIT_S

KEY = "c2VjcmV0LXNlY3JldA=="
SECRET_STRING = f"Endpoint=sb://bus.example.org;SharedAccessKeyName=app;SharedAccessKey={KEY}"


@pytest.fixture
def user(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


# --- the stored contexts ------------------------------------------------------------------------


@pytest.mark.slow
def test_contexts_are_stored_privately_selected_and_deleted(user: CommandLine) -> None:
    string_file = user.folder / "prod.txt"
    string_file.write_text(SECRET_STRING)
    token_file = user.folder / "token"
    token_file.write_text("t" * 30)
    user.ok(
        "context", "set", "prod", "--control", "https://bus.example.org:9465/",
        "--token-file", "token", "--connection-string-file", "prod.txt",
    )  # fmt: skip
    user.ok("context", "use", "prod")
    shown = user.json("context", "show")
    assert shown == {
        "name": "prod",
        "origin": "context prod",
        "control": "https://bus.example.org:9465",
        "tokenFile": str(token_file),
        "caFile": None,
        "amqp": str(string_file),
    }
    user.ok("context", "set", "prod", "--token-file", "")
    listed = {each["name"]: each for each in user.json("context", "list")}
    assert [name for name, each in listed.items() if each["current"]] == ["prod"]
    assert listed["prod"]["tokenFile"] is None
    assert listed["prod"]["amqp"] == str(string_file)
    path = user.folder / "config" / "postbus" / "contexts.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    user.ok("context", "delete", "prod")
    assert [each["name"] for each in user.json("context", "list")] == ["default"]
    assert string_file.exists()


@pytest.mark.slow
def test_key_from_standard_input_is_stored_and_never_shown(user: CommandLine) -> None:
    printed = user.ok(
        "context", "set", "prod", "--connection-string-file", "-", stdin=SECRET_STRING + "\n"
    )
    for output in ("table", "json", "yaml"):
        printed += user.ok("context", "show", "prod", "-o", output)
        printed += user.ok("context", "list", "-o", output)
    assert KEY not in printed
    assert "SharedAccessKey=***" in printed
    path = user.folder / "config" / "postbus" / "contexts.json"
    assert json.loads(path.read_text())["contexts"]["prod"]["connection_string"] == SECRET_STRING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("use", "nobody"), 3, "no context nobody; existing contexts: default"),
        (("show", "nobody"), 3, "no context nobody"),
        (("delete", "default"), 3, "no context default"),
        (("set", "default"), 2, "default is reserved"),
        (("set", "a b"), 2, "letters, digits"),
        (("set", "x", "--control", "bus:9465"), 2, "use http://host:port or https://host:port"),
        (("set", "x", "--control", "https://a:b@bus"), 2, "use http://host:port"),
        (("set", "x", "--token-file", "absent"), 4, "absent: no such file"),
    ],
)
def test_bad_input_is_refused(
    user: CommandLine, arguments: tuple[str, ...], code: int, says: str
) -> None:
    user.fails("context", *arguments, code=code, says=says)


@pytest.mark.slow
def test_invalid_connection_string_is_neither_stored_nor_repeated(user: CommandLine) -> None:
    error = user.fails(
        "context", "set", "x", "--connection-string-file", "-",
        code=3, says="no connection string, which has the form Endpoint=", stdin="geheim",
    )  # fmt: skip
    assert "geheim" not in error
    assert not (user.folder / "config").exists()


def test_damaged_file_is_named(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert ContextFile.load(environ).contexts == {}
    path = config_folder(environ) / "contexts.json"
    path.parent.mkdir()
    for text in ("{", "[]", '{"contexts": {"a": 1}}', '{"contexts": {"a": {"control": 1}}}'):
        path.write_text(text)
        with pytest.raises(ContextError, match=r"contexts\.json: damaged: fix or remove it"):
            ContextFile.load(environ)


def test_relative_configuration_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: XDG Base Directory Specification, "all paths must be absolute"."""
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = Path("/home/somebody/.config/postbus")
    assert config_folder({"XDG_CONFIG_HOME": "here"}) == config_folder({}) == expected


# --- the bus of a folder ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    """Run a bus in a folder until the module's tests are done."""
    with folder_with_bus("--clock", "manual") as user:
        yield user


@pytest.mark.slow
def test_bus_of_this_folder_is_found_by_itself(here: CommandLine) -> None:
    path = here.folder / ".postbus" / FILE_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    announced = bus_of_data_directory(path.parent)
    assert announced is not None
    assert announced.bus == "local-bus"
    assert here.json("context", "show")["control"] == announced.control
    assert here.ok("clock", "advance", "1s").split()[-1] == "PT1S"
    assert here.ok("send", "queue.1", "found") == "sent 1 message to queue.1\n"
    assert here.lines("receive", "queue.1")[0]["body"] == "found"
    elsewhere = CommandLine(here.folder / "config")
    elsewhere.folder.mkdir(exist_ok=True)
    data = str(here.folder / ".postbus")
    assert elsewhere.json("context", "show")["origin"] == "the bus at http://127.0.0.1:9465"
    elsewhere.fails(
        "send", "queue.1", "x", code=3, says="no bus of postbus dev runs in this folder"
    )
    assert "manual" in elsewhere.ok("clock", POSTBUS_DATA=data)
    assert elsewhere.ok("send", "queue.1", "x", POSTBUS_DATA=data)
    assert here.lines("receive", "queue.1")[0]["body"] == "x"


@pytest.mark.slow
def test_named_context_precedes_the_bus_of_this_folder(here: CommandLine) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{bound.getsockname()[1]}"
        here.ok("context", "set", "away", "--control", where)
        says = f"no bus answers at {where}: start one with postbus dev, or select another"
        here.fails("clock", "--context", "away", code=7, says=says)
        here.fails("clock", code=7, says=says, POSTBUS_CONTEXT="away")
        here.fails("send", "queue.1", "x", "-C", "away", code=3, says="no connection string for")
        here.ok("context", "use", "away")
        here.fails("clock", code=7, says=says)
        here.ok("clock", "-C", "default")
        here.ok("context", "use", "default")
        here.ok("context", "delete", "away")


# --- help and completion ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list", "show", "use", "set", "delete"])
def test_help_shows_examples_and_exit_codes(user: CommandLine, command: str) -> None:
    shown = user.ok("context", command, "--help")
    assert f"postbus context {command}" in shown
    assert "Exit codes" in shown


def complete(user: CommandLine, line: str) -> list[str]:
    """Return the completions that bash gets for a line."""
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-m", "postbus"],
        env={
            **user.environment(),
            "_POSTBUS_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        cwd=user.folder,
    )
    return done.stdout.split()


@pytest.mark.slow
def test_shell_completes_commands_options_and_contexts(user: CommandLine) -> None:
    assert {"send", "receive", "context", "dev"} <= set(complete(user, "postbus "))
    assert complete(user, "postbus con") == ["connections", "connection-string", "context"]
    assert "--schedule" in complete(user, "postbus send --sch")
    user.ok("context", "set", "prod")
    assert complete(user, "postbus context use pr") == ["prod"]
    assert complete(user, "postbus clock --context ") == ["default", "prod"]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_each_shell(user: CommandLine, shell: str) -> None:
    done = user.run(_POSTBUS_COMPLETE=f"source_{shell}")
    assert re.search(r"complete|compdef", done.stdout), done
    assert "postbus" in done.stdout


@pytest.mark.slow
def test_help_imports_no_slow_module() -> None:
    """Each of these takes from a tenth of a second to most of one."""
    heavy = {"aiohttp", "asyncpg", "lark", "pydantic", "uvloop", "yaml", "postbus.assembly.bus"}
    program = "import sys, postbus.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env=CommandLine(Path("/")).environment(),
    )
    loaded = set(done.stdout.split())
    assert "postbus.cli.main" in loaded
    assert loaded & heavy == set()
