"""The texts of `--help`: every example can be parsed, and no text loses a word.

The commands are looked at as the program builds them; nothing is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from rich.text import Text
from typer import BadParameter

from postbus.cli.main import program

REMARK = re.compile(r"\s{2,}\S.*$")
NEXT = re.compile(r"""\s(?:\||&&|>)\s(?=(?:[^"]*"[^"]*")*[^"]*$)""")
VARIABLE_TO_SHELL = re.compile(r"\$(?!\()")


def commands(command: Any, name: str = "postbus") -> Iterator[tuple[str, Any]]:
    """Yield every command with the words that call it."""
    yield name, command
    for word, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {word}")


COMMANDS = list(commands(program()))


def examples_of(command: Any) -> list[str]:
    """Return the examples of its help, without the remarks behind them."""
    shown = Text.from_markup(command.epilog).plain.partition("Exit codes")[0].splitlines()
    return [REMARK.sub("", line.strip()) for line in shown if "postbus " in line]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_examples_can_be_typed(name: str, command: Any) -> None:
    examples = examples_of(command)
    assert examples
    for example in examples:
        assert not VARIABLE_TO_SHELL.search(re.sub(r"'[^']*'", "", example)), example
        inner = re.findall(r"\$\(([^)]*)\)", example)
        outer = re.sub(r"\$\([^)]*\)", "token", example)
        for part in [*inner, *NEXT.split(outer)]:
            words = shlex.split(part)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words and words[0] == "postbus":
                parse(words[1:])


def parse(words: list[str]) -> None:
    """Parse a command line as the program would, without running it."""
    command: Any = COMMANDS[0][1]
    name = "postbus"
    while words and words[0] in (within := getattr(command, "commands", {})):
        name, *words = words
        command = within[name]
    assert name != "postbus", words
    command.make_context(name, list(words))


def test_take_over_and_no_wait_exclude_each_other() -> None:
    with pytest.raises(BadParameter, match="exclude each other"):
        program().main(["serve", "--take-over", "--no-wait"], standalone_mode=False)


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_texts_are_shown_whole(name: str, command: Any) -> None:
    """Text like markup would be removed: `[all]` is, `[9465]` is not."""
    for text in (command.help, *(getattr(each, "help", None) for each in command.params)):
        assert Text.from_markup(text or "").plain == (text or "")


def test_exit_codes_are_in_the_help_of_every_command() -> None:
    assert [name for name, command in COMMANDS if "Exit codes" not in command.epilog] == []


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_examples_stand_line_below_line(name: str, command: Any) -> None:
    examples = command.epilog.strip().partition("\n\n[bold]Exit codes")[0]
    assert "\n\n" not in examples


def shown(command: Any, name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of its help on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command.main(["--help"], prog_name=name)
    printed: str = capsys.readouterr().out
    return [line.rstrip() for line in printed.splitlines()]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_help_fits_80_columns_and_names_no_types_of_python(
    name: str, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(command, name, capsys, monkeypatch)
    assert [line for line in lines if re.search(r"<[a-z|\[ ]+>", line)] == []
    whole = Text.from_markup(command.epilog).plain.partition("Exit codes")[0].splitlines()
    assert [line for line in whole if line.strip() and f" {line}".rstrip() not in lines] == []


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_each_option_has_a_help_text(name: str, command: Any) -> None:
    assert [each.name for each in command.params if not each.help] == []
