"""The log on standard error: an event a line, without secrets."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from postbus_operator.redaction import redacted


def set_up_logging(format: Literal["human", "json"], level: str) -> None:
    """Send the log of all modules to standard error. kopf's and the client's: warnings only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else HumanFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("postbus_operator").setLevel(level.upper())


class HumanFormatter(logging.Formatter):
    """Time, level and text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return a line, more with a traceback."""
        return redacted(super().format(record))


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an object with time, level, logger and text."""
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if record.exc_info:
            shown["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(shown, ensure_ascii=False)
