"""Output of commands: tables for people, JSON and YAML for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from postbus.cli.failures import err, out


class Format(StrEnum):
    """Values of `--output`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_table(self) -> bool:
        """True for a table, limited to the terminal's width or not."""
        return self in {Format.TABLE, Format.WIDE}


OutputFormat = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]

Row = Mapping[str, Any]
MAX_CELL: Final = 80
MAX_VALUE: Final = 1_000
MAX_LINE: Final = 10_000
WHOLE: Final = {"name", "topic", "entityId", "messageId", "sessionId"}
"""Columns that people copy from: never wrapped or cut."""

LEAST_WANTED: Final = (
    "body",
    "deadLetterDescription",
    "subject",
    "sizeInBytes",
    "enqueuedTime",
    "deadLetteredTime",
    "status",
)
"""Columns to leave out on a narrow terminal, in this order."""

MIN_FOLDED: Final = 12
COLUMN_GAP: Final = 3

PART_OF_SECOND: Final = re.compile(r"(?<=^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.\d+Z$")
"""The part of a time that is left out for people, not for programs."""

NEVER: Final = re.compile(
    r"^ *(defaultMessageTimeToLive|autoDeleteOnIdle): P10675199DT2H48M5\.4775807S$", re.MULTILINE
)
"""The longest .NET period, Service Bus's value for "never"; YAML output adds a comment."""


def print_objects(
    found: Sequence[Row] | Row,
    output: Format,
    columns: Mapping[str, str] | None = None,
    empty: str = "none",
) -> None:
    """Print rows, or one object.

    `columns`: key of a row -> heading, for tables of rows; one object is shown as a list of fields.
    """
    if output is Format.JSON:
        write_line(as_json(found, indent=2))
    elif output is Format.YAML:
        write_line(NEVER.sub(r"\g<0>  # never", as_yaml(found).rstrip("\n")))
    elif isinstance(found, Mapping):
        table = Table.grid(padding=(0, 2))
        for key, value in found.items():
            table.add_row(f"[bold]{escape(key)}[/bold]", escape(cell(value, MAX_VALUE)))
        print_table(table)
    elif not found:
        out.print(empty, markup=False)
    else:
        _print_fitting(found, columns or {key: key for key in found[0]}, output)


def _print_fitting(found: Sequence[Row], columns: Mapping[str, str], output: Format) -> None:
    """Print a table, leaving out columns that do not fit, and name those."""
    table, least = _table_of(found, columns)
    left_out = []
    if output is not Format.WIDE and out.is_terminal:
        for key in LEAST_WANTED:
            if least > out.width and key in columns:
                left_out.append(columns[key])
                columns = {each: columns[each] for each in columns if each != key}
                table, least = _table_of(found, columns)
    print_table(table, least)
    if left_out:
        err.print(f"[dim]columns that do not fit: {', '.join(left_out)} (-o wide)[/dim]")


def _table_of(found: Sequence[Row], headings: Mapping[str, str]) -> tuple[Table, int]:
    """Return a table and its minimum width without wrapping the columns to copy from."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown: list[list[str]] = []
    least = 0
    for key, heading in headings.items():
        known = next((each[key] for each in found if each.get(key) is not None), None)
        is_number = isinstance(known, int | float) and heading != ""
        is_short = is_number or PART_OF_SECOND.search(str(known)) is not None
        is_whole = is_short or key in WHOLE
        most = MAX_VALUE if key in WHOLE else MAX_CELL
        cells = [cell(each.get(key), most) for each in found]
        widest = max(cell_len(each) for each in (heading, *cells))
        wanted = widest if is_whole else min(widest, MIN_FOLDED)
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_whole,
            min_width=wanted,
        )
        shown.append(cells)
        least += wanted + COLUMN_GAP
    for row in zip(*shown, strict=True):
        table.add_row(*map(escape, row))
    return table, least


def print_table(table: Table, least: int = 0) -> None:
    """Print a table as wide as the terminal; without a terminal, one line per row.

    `least`: minimum width; on a narrower terminal lines are longer, since wrapped names cannot be
    copied.
    """
    if out.is_terminal:
        out.width = max(out.width, least)
        out.print(table)
        return
    whole = out.measure(table, options=out.options.update(max_width=MAX_LINE))
    out.width = max(out.width, whole.maximum)
    with out.capture() as captured:
        out.print(table)
    write_line("\n".join(line.rstrip() for line in captured.get().splitlines()))


def cell(value: object, most: int = MAX_CELL) -> str:
    """Return a value for people; control characters are escaped."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "*" if value else ""
    if isinstance(value, Mapping | list | tuple):
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = PART_OF_SECOND.sub("Z", printable(str(value)))
    return text if len(text) <= most else text[: most - 1] + "…"


def printable(text: str) -> str:
    """Return text with control characters escaped, including terminal escape sequences."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Return text as `printable` does, but keep line breaks and tabs."""
    return re.sub(r"[^\n\t]+", lambda found: printable(found[0]), text.replace("\r\n", "\n"))


def write_line(text: str) -> None:
    """Write a line for programs in one write: no markup, no wrapping."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def as_json(value: object, indent: int | None = None) -> str:
    """Return JSON without ASCII escapes, except for characters that are not printable.

    Terminals interpret more characters than the control characters that JSON escapes.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return _escaped(text, lambda each: json.dumps(each)[1:-1])


def as_yaml(value: object) -> str:
    """Return YAML of plain values in their order; characters that are not printable are escaped."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper that double-quotes text that is not printable, so that it is escaped."""

        def analyze_scalar(self, scalar: str) -> Any:
            """Return the styles that a scalar may have."""
            found = super().analyze_scalar(scalar)
            if not scalar.replace("\n", "").isprintable():
                found.allow_flow_plain = found.allow_block_plain = False
                found.allow_single_quoted = found.allow_block = False
            return found

    text = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return _escaped(text, lambda each: f"\\U{ord(each):08x}")


def _escaped(text: str, escape_of: Callable[[str], str]) -> str:
    """Return lines with the characters that are not printable escaped."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else escape_of(each) for each in text)


def as_yaml_documents(values: Sequence[object]) -> str:
    """Return several documents as one text."""
    return "---\n".join(as_yaml(each) for each in values)


def asks_yes(question: str, *, is_sure: bool) -> None:
    """Ask for confirmation; raises `typer.Exit` if the answer is no.

    `is_sure`: `--yes` was given, which is required without a terminal.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("cannot ask for confirmation without a terminal: add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
