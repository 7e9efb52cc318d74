"""Names of option values in help: TEXT, NUMBER, PATH; none for flags.

Typer shows Python's types, also for flags, which takes space from the help text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import typer

WORDS: Final = {
    "bool": "",
    "str": "TEXT",
    "int": "NUMBER",
    "float": "NUMBER",
    "int range": "NUMBER",
    "float range": "NUMBER",
    "path": "PATH",
    "Path": "PATH",
}
"""Typer's word -> ours. Choices are shown unchanged."""


def name_types(command: Any) -> None:
    """Set our words in a command and its subcommands. Arguments have a name and need none."""
    context = typer.Context(command)
    for option in _options(command, context):
        if option.metavar is None:
            word = option.display_type(context).strip("<>").removeprefix("list[").rstrip("]")
            option.metavar = WORDS.get(word, word)
    for argument in command.params:
        if argument.param_type_name == "argument":
            argument.display_type_rich = lambda ctx: ""  # noqa: ARG005 Typer has no other way
    for inner in getattr(command, "commands", {}).values():
        name_types(inner)


def _options(command: Any, context: typer.Context) -> Iterable[Any]:
    """Return the options of a command with `--help`, which Click creates once and caches."""
    options = [each for each in command.params if each.param_type_name == "option"]
    return [*options, command.get_help_option(context)]
