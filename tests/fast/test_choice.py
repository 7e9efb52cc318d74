"""The build in use is the one that POSTBUS_ACCELERATE names."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

from postbus import fast
from postbus.amqp import runs as frame_runs
from postbus.entity.queues import runs as queue_runs
from postbus.message import runs as message_runs


def test_required_functions_in_c_are_in_use() -> None:
    """`make test-accelerated` sets `require`: without this its tests would pass in Python alone."""
    if os.environ.get("POSTBUS_ACCELERATE") == "require":
        assert fast.IS_ACCELERATED
        from postbus.fast import _runs

        assert Path(_runs.__file__).parent == Path(fast.__file__).parent
    users = (
        vars(frame_runs)["IS_ACCELERATED"],
        message_runs.in_c is not None,
        queue_runs.in_c is not None,
    )
    assert users == (fast.IS_ACCELERATED,) * 3


def test_each_function_in_c_names_its_twin() -> None:
    source = (Path(fast.__file__).parent / "_runs.pyx").read_text()
    begin = r"^ *def ([a-z]\w+)\("  # not the constructors
    called = rf'{begin}[^"]*"""Do [a-z ]*`([\w.]+)`'
    functions = re.findall(called, source, re.MULTILINE)
    names = re.findall(begin, source, re.MULTILINE)
    assert [name for name, _ in functions] == names
    assert [twin for _, twin in functions if not is_there(f"postbus.{twin}")] == []


def is_there(name: str) -> bool:
    """Return whether a module, or a class in it, has this name."""
    owner, _, last = name.rpartition(".")
    try:
        found = importlib.import_module(owner)
    except ModuleNotFoundError:
        above, _, kind = owner.rpartition(".")
        found = getattr(importlib.import_module(above), kind)
    return hasattr(found, last)
