"""The record of the clients in the pod, read as the history that tests/faults checks.

Lines are those of `client_program.py`. A line may be incomplete while the program writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.history import Delivered, Event, Left, Result, Sent, Settled


@dataclass(frozen=True, slots=True)
class Trouble:
    """An error of a client."""

    at: float
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A place that was peeked at completely at the end."""

    path: str
    place: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line."""


Line = Event | Trouble | Seen | End


def line_of(text: str) -> Line:
    """Return what a line says. Raises ValueError for an unknown one."""
    kind, *values = json.loads(text)
    match kind, values:
        case "sent", [path, name, session, result, started, ended]:
            return Sent(path, name, Result(result), started, ended, session)
        case "delivered", [path, name, at, sequence, count, token, hold]:
            return Delivered(path, name, at, sequence, count, token, hold=hold)
        case "settled", [path, name, token, result, started, ended]:
            return Settled(path, name, token, "complete", Result(result), started, ended)
        case "left", [path, place, name, sequence, count, reason]:
            return Left(path, place, name, sequence, count, reason)
        case "seen", [path, place]:
            return Seen(path, place)
        case "trouble", [at, where, what]:
            return Trouble(at, where, what)
        case "end", []:
            return End()
    raise ValueError(f"unknown line: {text[:200]}")


class RecordFile:
    """The file, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Return the new lines, which `lines` has as well; none if the file is not there yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        new = [line_of(each) for each in complete.decode().splitlines()]
        self.lines += new
        return new


def of_kind(lines: list[Line], kind: Any) -> Any:
    """Return the lines of one kind."""
    return [each for each in lines if isinstance(each, kind)]
