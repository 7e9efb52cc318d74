"""What a command tells people: two consoles, exit codes, and one message for each failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from postbus.data_directory import DataDirectoryError
from postbus.settings import SettingsError
from postbus.yaml_documents import ManifestError


class Exit(int, Enum):
    """Exit codes; docs/guides/settings.md lists them."""

    OK = 0
    USAGE = 2
    SETTINGS = 3
    MANIFESTS = 4
    MACHINE = 5
    STORE = 6
    REFUSED = 7
    BUG = 70


class RefusedError(Exception):
    """No bus answers, or it refuses; the text says why."""


out: Final = Console(highlight=False, soft_wrap=True)
err: Final = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def expected_failures() -> Iterator[None]:
    """Turn an expected failure into one message and the exit code of its kind."""
    try:
        yield
    except SettingsError as error:
        fail(str(error), Exit.SETTINGS)
    except ManifestError as error:
        fail(str(error), Exit.MANIFESTS)
    except DataDirectoryError as error:
        fail(str(error), Exit.MACHINE)
    except RefusedError as error:
        fail(str(error), Exit.REFUSED)


def fail(message: str, code: Exit) -> NoReturn:
    """End the command."""
    for line in message.splitlines():
        err.print(f"[red]postbus:[/red] {escape(line)}")
    raise typer.Exit(code)
