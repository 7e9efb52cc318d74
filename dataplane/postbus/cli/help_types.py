"""What the help of the command line calls the values of options: TEXT, NUMBER, PATH; flags nothing.

Typer names Python's types, and that of flags too, which takes the room of what is to be said.
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
"""Typer's word -> ours. Choices are shown as they are."""


def name_types(command: Any) -> None:
    """Let a command, and those within it, show our words. Arguments have a name and need none."""
    context = typer.Context(command)
    for option in _options(command, context):
        if option.metavar is None:
            word = option.display_type(context).strip("<>").removeprefix("list[").rstrip("]")
            option.metavar = WORDS.get(word, word)
    for argument in command.params:
        if argument.param_type_name == "argument":
            argument.display_type_rich = lambda ctx: ""  # noqa: ARG005 the only way Typer leaves
    for inner in getattr(command, "commands", {}).values():
        name_types(inner)


def _options(command: Any, context: typer.Context) -> Iterable[Any]:
    """Return the options of a command with `--help`, which is made once and kept."""
    options = [each for each in command.params if each.param_type_name == "option"]
    return [*options, command.get_help_option(context)]
