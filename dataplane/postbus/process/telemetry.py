"""Logging of one process.

The assembly sets it up; other packages only use `logging.getLogger(__name__)` with ids as `extra`
fields. Must never write payloads, tokens or connection strings.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# --- logging ------------------------------------------------------------------------------------


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of a log call."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        instant = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "time": instant.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = "".join(traceback.format_exception(*record.exc_info))
        line = json.dumps(entry, default=str, ensure_ascii=False)
        return line if line.isprintable() else json.dumps(entry, default=str)


class HumanFormatter(logging.Formatter):
    """Time of day, level, message, then `name=value` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end; an exception follows on lines that are indented."""
        instant = datetime.fromtimestamp(record.created).astimezone()
        pairs = "".join(f" {name}={_shown(value)}" for name, value in fields_of(record).items())
        message = _shown(record.getMessage())
        line = f"{instant:%H:%M:%S} {record.levelname.lower():<7} {message}{pairs}"
        if record.exc_info and record.exc_info[0] is not None:
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            line += "".join(f"\n  {_shown(each)}" for each in text.split("\n"))
        return line


def _shown(value: object) -> str:
    """Return a value as text; quoted, with escapes, when it could end the line or move a cursor.

    Many values come from clients, some of them unauthenticated.
    """
    text = str(value)
    return text if text.isprintable() else repr(text)


def configure_logging(
    form: Literal["human", "json"], level: str, stream: TextIO | None = None
) -> None:
    """Send the log of the whole process to one stream, standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for chatty in ("aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(max(root.level, logging.WARNING))
