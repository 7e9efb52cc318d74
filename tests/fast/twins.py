"""Both builds of the functions for bursts in one process, and what they leave behind, compared."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar

from postbus.amqp import runs as frame_runs
from postbus.entity.queues import runs as queue_runs
from postbus.fast import IS_ACCELERATED
from postbus.message import runs as message_runs

REASON = "the functions in C are not in use: make accelerate, and POSTBUS_ACCELERATE not off"

OURS = ("postbus.", "tests.")
EMPTY = "an empty slot"

T = TypeVar("T")


@contextmanager
def pure_python() -> Iterator[None]:
    """Let the modules `runs` use Python alone."""
    in_c = message_runs.in_c, queue_runs.in_c
    choose(None, None, is_accelerated=False)
    try:
        yield
    finally:
        choose(*in_c, is_accelerated=IS_ACCELERATED)


def choose(of_messages: object, of_queues: object, *, is_accelerated: bool) -> None:
    """Set what the modules `runs` have chosen when they were loaded."""
    vars(message_runs)["in_c"] = of_messages
    vars(queue_runs)["in_c"] = of_queues
    vars(frame_runs)["IS_ACCELERATED"] = is_accelerated


def agree(call: Callable[[T], Any], given: T) -> Any:
    """Call with two copies of a value, first in C; assert that all is the same afterwards.

    Return what both returned, or the exception that both raised.
    """
    ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
    accelerated = result_of(call, ours)
    with pure_python():
        pure = result_of(call, theirs)
    assert shown((accelerated, ours)) == shown((pure, theirs))
    return accelerated


def result_of(call: Callable[[T], Any], given: T) -> Any:
    """Return the result of a call, or its exception."""
    try:
        return call(given)
    except Exception as error:  # noqa: BLE001 - compared with that of the twin
        return error


def shown(value: object, seen: dict[int, int] | None = None) -> Any:
    """Return types, contents and order of a value; an object that was shown before by its number.

    So two values are equal only if the same places in them hold the same object.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Exception):
        return type(value).__name__, re.sub(r"(?<=sequence item )\d+", "n", str(value))
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, bytearray | str | bytes | int | float | None):
        return type(value).__name__, value
    if id(value) in seen and not isinstance(value, tuple):
        return "shown as", seen[id(value)]
    seen[id(value)] = len(seen)
    name = type(value).__name__
    if isinstance(value, dict):
        return name, [(shown(key, seen), shown(each, seen)) for key, each in value.items()]
    if isinstance(value, list | tuple | deque):
        return name, [shown(each, seen) for each in value]
    if isinstance(value, SimpleNamespace):
        return name, [(key, shown(each, seen)) for key, each in vars(value).items()]
    if type(value).__module__.startswith(OURS):
        names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())]
        return name, [(each, shown(getattr(value, each, EMPTY), seen)) for each in names]
    return name
