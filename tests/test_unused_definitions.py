"""The check of unused definitions finds uses by types and not by bare names."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

from tests.unused_definitions import Program, complaints

pytestmark = pytest.mark.slow

DEFINITIONS = """
from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import Final, Protocol, TypeAlias

LIMIT: Final = 3
SPARE: Final = 4
handlers: Final[list[Callable[[], int]]] = []

def register(handler: Callable[[], int]) -> Callable[[], int]:
    handlers.append(handler)
    return handler

@register
def handle() -> int:
    return LIMIT

def called() -> int:
    return 1

def repeated(count: int) -> int:
    return repeated(count - 1) if count else only_from_unused()

def only_from_unused() -> int:
    return 1

class Annotated:
    pass

Alias: TypeAlias = "Annotated | None"

class Sink(Protocol):
    def take(self) -> int: ...

class Shelf:
    def count(self) -> int:
        return 1

    def put(self) -> None:
        pass

    @property
    def size(self) -> int:
        return 2

    @cached_property
    def spare(self) -> int:
        return 3

    def by_name(self) -> int:
        return 4

class Crate(Shelf):
    def count(self) -> int:
        return 5

class Box:
    def count(self) -> int:
        return 6

    def take(self) -> int:
        return 7

class Stream(asyncio.Protocol):
    def data_received(self, data: bytes) -> None:
        pass

    def data_forgotten(self, data: bytes) -> None:
        pass
"""
USES = """
from __future__ import annotations

from typing import Any

from sample import definitions
from sample.definitions import Alias, Box, Crate, Shelf, Sink, Stream
from sample.definitions import called as renamed

def main(shelf: Shelf, sink: Sink, given: Alias, something: Any) -> object:
    something.put()
    made = [Crate(), Box(), Stream(), definitions.handlers]
    return shelf.count(), shelf.size, sink.take(), renamed(), made, getattr(shelf, "by_name")
"""
ENTRY = "sample.uses.main"
UNUSED = [
    "sample.definitions.SPARE",
    "sample.definitions.repeated",
    "sample.definitions.only_from_unused",
    "sample.definitions.Shelf.spare",
    "sample.definitions.Box.count",  # that of Shelf is called
    "sample.definitions.Stream.data_forgotten",  # asyncio calls the other one
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small package and one that uses it, checked as `make check` does."""
    folder = tmp_path_factory.mktemp("unused")
    sources = {
        "sample": {"__init__": "", "definitions": DEFINITIONS, "uses": USES},
        "another": {"__init__": "from sample.definitions import SPARE\n\nprint(SPARE)\n"},
    }
    for package, modules in sources.items():
        (folder / package).mkdir()
        for name, text in modules.items():
            (folder / package / f"{name}.py").write_text(text)
    flags = ["--strict", "--export-ref-info", "--no-sqlite-cache", "--python-version", "3.11"]
    flags += ["--cache-dir", str(folder / "cache")]
    out, _, code = api.run([*flags, *(str(folder / package) for package in sources)])
    assert code == 0, out
    return folder


@pytest.fixture(scope="module")
def program(checked: Path) -> Program:
    return Program(checked / "sample", checked / "cache" / "3.11")


def test_definitions_are_used_from_used_definitions(program: Program) -> None:
    assert [each.name for each in program.unused({ENTRY})] == UNUSED
    assert ENTRY in [each.name for each in program.unused(set())]


def test_what_another_package_uses_is_used(checked: Path) -> None:
    users = [checked / "another"]
    found = Program(checked / "sample", checked / "cache" / "3.11", users)
    assert [each.name for each in found.unused({ENTRY})] == UNUSED[1:]


def test_an_exception_keeps_its_own_dependencies(program: Program) -> None:
    kept = program.unused({ENTRY, "sample.definitions.repeated"})
    assert "sample.definitions.only_from_unused" not in [each.name for each in kept]


def test_an_exception_for_a_used_or_missing_definition_is_reported(program: Program) -> None:
    exceptions = dict.fromkeys([ENTRY, *UNUSED], "why")
    assert complaints(program, exceptions) == []
    assert complaints(program, exceptions | {"sample.gone": "why"}) == [
        "sample.gone is used or gone: remove it from EXCEPTIONS"
    ]
    del exceptions["sample.definitions.SPARE"]
    (line,) = complaints(program, exceptions)
    assert line.endswith(": sample.definitions.SPARE is not used by the product")
