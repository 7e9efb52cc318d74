"""Exit codes of the runner, and the error behind what Spark says.

A supervisor starts a pipeline again after 1, and must not after 10 and 20: nothing would change.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final

from pyspark.errors import PySparkException

from postbus.contract.yaml_documents import ManifestError
from postbus_spark import errors
from postbus_spark.jobs.frames import InvalidPipeline
from postbus_spark.jobs.state import StateLost
from postbus_spark.lake.layout import TableAhead
from postbus_spark.lake.places import InvalidTable, TableUnavailable


class ExitCode(IntEnum):
    """What the process that runs a pipeline ends with."""

    OK = 0
    RETRY = 1
    CONFIGURATION = 10
    STOPPED = 20


class JavaMissing(Exception):
    """There is no Java for Spark."""


class NoExecutor(Exception):
    """A process was not started by Spark as an executor."""


class Poison(Exception):
    """A batch has failed as often as its pipeline allows."""


CONFIGURATION: Final = (
    ManifestError,
    InvalidPipeline,
    InvalidTable,
    JavaMissing,
    NoExecutor,
    errors.EntityNotFound,
    errors.GroupNotFound,
    errors.InvalidCredentials,
    errors.InvalidOption,
    errors.InvalidRequest,
    errors.InvalidRows,
    errors.InvalidSchema,
    errors.MessageTooLarge,
    errors.NotAllowed,
    errors.Unauthorized,
    errors.UnknownRows,
    errors.UnsupportedSpark,
)
"""Somebody must change the document, the group, the key or the installation."""

STOPPED: Final = (
    Poison,
    StateLost,
    TableAhead,
    errors.BusRestored,
    errors.DataLoss,
    errors.EntityRecreated,
    errors.InvalidOffset,
    errors.StaleCheckpoint,
    errors.StaleWriter,
)
"""Somebody must decide what shall become of messages."""

MOST_LINES: Final = 40

_BY_NAME: Final = {
    each.__name__: each
    for each in (*vars(errors).values(), InvalidTable, TableUnavailable)
    if isinstance(each, type) and issubclass(each, errors.PostbusSparkError)
}
_IN_TEXT: Final = re.compile(
    r"\bpostbus_spark\.(?:errors|lake\.places)\.(\w+): (.+)$", re.MULTILINE
)
"""The last line of a traceback."""


def cause_of(error: BaseException) -> BaseException:
    """Return the connector's error that Spark has put into text, or the error itself."""
    if not isinstance(error, PySparkException):
        return error
    for name, text in _IN_TEXT.findall(str(error)):
        if name in _BY_NAME:
            return _Named(_BY_NAME[name], text)
    return error


class _Named(Exception):
    """An error whose class Spark knows by name only."""

    def __init__(self, kind: type[errors.PostbusSparkError], text: str) -> None:
        self.kind = kind
        super().__init__(text)


def exit_code(error: BaseException) -> ExitCode:
    """Return what the process ends with after an error."""
    kind = _kind(error)
    if issubclass(kind, errors.QuotaExceeded):
        return ExitCode.RETRY
    if issubclass(kind, STOPPED):
        return ExitCode.STOPPED
    if issubclass(kind, CONFIGURATION):
        return ExitCode.CONFIGURATION
    return ExitCode.RETRY


def is_passing(error: BaseException) -> bool:
    """Return whether the bus, a disk or an S3 has failed, so that a repetition may succeed."""
    is_known = issubclass(_kind(error), errors.PostbusSparkError | OSError)
    return exit_code(error) is ExitCode.RETRY and is_known


def is_of_batch(error: BaseException) -> bool:
    """Return whether an error may come of the rows of a batch."""
    return exit_code(error) is ExitCode.RETRY and not is_passing(error)


def shown(error: BaseException) -> str:
    """Return one message for people, without the stacks of Java."""
    if isinstance(error, ManifestError):
        return str(error)
    lines = str(error).splitlines()
    kept = [line for line in lines if not line.startswith(("\tat ", "Caused by: "))]
    return f"{_kind(error).__name__}: " + "\n".join(kept[:MOST_LINES])


def _kind(error: BaseException) -> type[BaseException]:
    return error.kind if isinstance(error, _Named) else type(error)
