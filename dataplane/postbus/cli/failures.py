"""Output of commands for people: two consoles, exit codes, and one message for each failure.

Imports almost nothing, since every command needs it, even `--help`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape


class Exit(int, Enum):
    """Exit codes; docs/guides/settings.md lists them."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    SETTINGS = 3
    MANIFESTS = 4
    MACHINE = 5
    STORE = 6
    REFUSED = 7
    REPLACED = 8
    BUG = 70
    INTERRUPTED = 130


class RefusedError(Exception):
    """No bus answers, or it refuses the request; the text says why."""


class ContextError(Exception):
    """A context, or a file that it names, is unusable; the text says why."""


class InputError(Exception):
    """Input to send, import or apply is invalid."""


out: Final = Console(highlight=False, soft_wrap=True, emoji=False)
err: Final = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

EXPECTED: Final = {
    "SettingsError": Exit.SETTINGS,
    "ContextError": Exit.SETTINGS,
    "ManifestError": Exit.MANIFESTS,
    "InputError": Exit.MANIFESTS,
    "DataDirectoryError": Exit.MACHINE,
    "RefusedError": Exit.REFUSED,
}
"""Exit codes by class name: importing the errors of settings and manifests here would add a fifth
of a second to each command."""

EXIT_CODES: Final = """
[bold]Exit codes[/bold]
  0 done, 1 nothing found, or differences found, 2 usage,
  3 settings or contexts, 4 manifests or input,
  7 no bus answers, or it refuses the request, 130 interrupted
"""

EPILOG_WIDTH: Final = 76
"""Columns for an example: 80 minus the margins that Typer and `examples` leave."""


@contextmanager
def expected_failures() -> Iterator[None]:
    """Turn an expected failure into one message and its exit code."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", Exit.INTERRUPTED)
    except Exception as error:
        codes = [
            EXPECTED[each.__name__]
            for each in type(error).__mro__
            if each.__name__ in EXPECTED and each.__module__.startswith("postbus.")
        ]
        if not codes:
            raise
        fail(str(error), codes[0])


def fail(message: str, code: Exit) -> NoReturn:
    """Print a message and exit."""
    for line in message.splitlines():
        err.print(f"[red]postbus:[/red] {escape(line)}")
    raise typer.Exit(code)


def examples(*lines: str, codes: str = EXIT_CODES) -> str:
    """Return the epilog of a command: examples and exit codes.

    A remark follows two or more blanks in its line. Remarks are aligned; a remark that would wrap
    on a terminal of 80 columns gets a line of its own.
    """
    typed = [re.split(r"\s{2,}", line, maxsplit=1) for line in lines]
    width = max((len(each[0]) for each in typed if len(each) > 1), default=0)
    laid_out: list[str] = []
    for command, *remark in typed:
        whole = "  ".join([command.ljust(width) if remark else command, *remark])
        fits = len(whole) <= EPILOG_WIDTH
        laid_out += [whole] if fits else [command, *(f"    {each}" for each in remark)]
    shown = "\n".join(f"  {escape(line)}" for line in laid_out)
    return f"[bold]Examples[/bold]\n{shown}\n{codes}"
