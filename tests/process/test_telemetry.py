from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest

from postbus.process.telemetry import configure_logging


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    root.handlers = handlers
    root.setLevel(level)


def test_json_lines_carry_ids_as_fields(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("postbus.test").info("link attached", extra={"link": "a/b", "conn": 7})
    logging.getLogger("postbus.test").debug("not written")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "link attached"
    assert (entry["link"], entry["conn"], entry["level"]) == ("a/b", 7, "info")
    assert entry["time"].endswith("+00:00")


def test_json_lines_hold_an_exception_on_one_line(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("postbus.test").exception("host failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["error"]


def test_human_lines_show_fields_after_the_message(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("human", "warning", stream)
    logging.getLogger("postbus.test").warning("commit failed", extra={"partition": 3})
    assert stream.getvalue().rstrip().endswith("warning commit failed partition=3")


FORGED = "/x\n23:59:59 warning all is well\x1b[31m\x9b2J\u2028\ud800"


@pytest.mark.parametrize("form", ["human", "json"])
def test_values_of_clients_cannot_add_lines_or_move_the_cursor(
    root_logger: logging.Logger, form: Literal["human", "json"]
) -> None:
    stream = io.StringIO()
    configure_logging(form, "info", stream)
    log = logging.getLogger("postbus.test")
    log.info("refused", extra={"path": FORGED, "entity": "größe"})
    log.info("odd %s", FORGED)
    first, second = stream.getvalue().removesuffix("\n").split("\n")
    assert first.isprintable()
    assert second.isprintable()
    if form == "json":
        assert json.loads(first)["path"] == FORGED
    else:
        assert "refused path='/x\\n23:59:59" in first
        assert first.endswith("entity=größe")


def test_lines_of_an_exception_are_indented(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("human", "info", stream)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("postbus.test").exception("host failed")
    first, *others = stream.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("host failed")
    assert all(each.startswith("  ") and each.isprintable() for each in others)
    assert any("ValueError" in each for each in others)
