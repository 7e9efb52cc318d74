"""A call of the control API without HTTP: arguments, answers and refusals of handlers.

The server turns requests into calls by the table of routes; handlers never see a header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from pydantic import BaseModel

from postbus.broker.catalog.preconditions import (
    UNCONDITIONAL,
    DirectoryRefusal,
    Precondition,
    PutMode,
    VersionDiffers,
)
from postbus.contract.control import FieldProblem, ProblemType
from postbus.entity.commands import Refusal, Refused

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Call:
    """A well-formed request. `names`: parameters of the path, decoded."""

    names: Mapping[str, str]
    body: BaseModel | None = None
    queries: Mapping[str, str | int | bool] = field(default_factory=dict)
    condition: Precondition = UNCONDITIONAL

    def read(self, model: type[B]) -> B:
        """Return the body, which the table declares as this model."""
        assert isinstance(self.body, model)
        return self.body

    def number(self, name: str) -> int:
        """Return a query parameter that the table declares as an integer."""
        value = self.queries[name]
        assert isinstance(value, int)
        return value

    def flag(self, name: str) -> bool:
        """Return a query parameter that the table declares as a boolean."""
        return self.queries[name] is True

    def text(self, name: str) -> str:
        """Return a query parameter that the table declares as a string."""
        value = self.queries[name]
        assert isinstance(value, str)
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a query parameter that the table declares as a string without a default."""
        return self.text(name) if name in self.queries else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A handler's answer. `etag`: the version of the entity. `text`: JSON as it is."""

    body: BaseModel | None = None
    status: int = 200
    etag: int | None = None
    text: str = ""


Handler: TypeAlias = Callable[[Call], Awaitable[Answer]]


class ControlRefused(Exception):
    """A call was refused; nothing changed. `detail` says what to do."""

    def __init__(
        self,
        status: int,
        detail: str,
        type: ProblemType = ProblemType.PLAIN,
        problems: Sequence[FieldProblem] = (),
    ) -> None:
        self.status = status
        self.type = type
        self.problems = list(problems)
        super().__init__(detail)


def _status_of(refusal: Refusal) -> tuple[int, ProblemType]:
    match refusal:
        case Refusal.ENTITY_NOT_FOUND | Refusal.MESSAGE_NOT_FOUND | Refusal.GROUP_NOT_FOUND:
            return 404, ProblemType.NOT_FOUND
        case (
            Refusal.ENTITY_DISABLED
            | Refusal.SEND_DISABLED
            | Refusal.RECEIVE_DISABLED
            | Refusal.LOCK_LOST
            | Refusal.MESSAGE_LOCKED
            | Refusal.SESSION_LOCK_LOST
            | Refusal.SESSION_CANNOT_BE_LOCKED
            | Refusal.HOPS_EXCEEDED
            | Refusal.GROUP_FENCED
            | Refusal.STALE_CHECKPOINT
            | Refusal.BUS_RESTORED
        ):
            return 409, ProblemType.PLAIN
        case Refusal.ALREADY_EXISTS:
            return 409, ProblemType.ALREADY_EXISTS
        case Refusal.NOT_ALLOWED:
            return 409, ProblemType.IMMUTABLE
        case Refusal.NOT_EMPTY:
            return 409, ProblemType.NOT_EMPTY
        case Refusal.CONFLICT:
            return 412, ProblemType.VERSION_DIFFERS
        case Refusal.QUOTA_EXCEEDED:
            return 403, ProblemType.QUOTA_EXCEEDED
        case (
            Refusal.MESSAGE_TOO_LARGE
            | Refusal.PROPERTIES_TOO_LARGE
            | Refusal.MESSAGE_MALFORMED
            | Refusal.ARGUMENT_OUT_OF_RANGE
            | Refusal.SESSION_REQUIRED
            | Refusal.SESSION_NOT_SUPPORTED
            | Refusal.PUBLISH_TOO_LARGE
        ):
            return 400, ProblemType.INVALID
        case Refusal.STORE_FULL | Refusal.NOT_APPLIED | Refusal.UNKNOWN | Refusal.BUSY:
            return 503, ProblemType.UNAVAILABLE


STATUS_OF: Final = {each: _status_of(each) for each in Refusal}
"""Refusal of an entity or of the catalog -> status, type of problem."""


def refused(refusal: Refused) -> ControlRefused:
    """Return the control API's error for a refusal of the broker."""
    status, type = STATUS_OF[refusal.refusal]
    return ControlRefused(status, refusal.detail or refusal.refusal.value, type)


@contextmanager
def answering_if_match(
    what: str, mode: PutMode = PutMode.ANY, advice: str = "read it again and repeat"
) -> Iterator[None]:
    """Answer 412 where a header demanded a version, existence or absence."""
    try:
        yield
    except VersionDiffers as error:
        detail = f'{what} has the version "{error.version}", but If-Match names another: {advice}'
        raise ControlRefused(412, detail, ProblemType.VERSION_DIFFERS) from error
    except DirectoryRefusal as error:
        match mode, error.refused.refusal:
            case PutMode.CREATE, Refusal.ALREADY_EXISTS:
                type = ProblemType.ALREADY_EXISTS
            case PutMode.UPDATE, Refusal.ENTITY_NOT_FOUND:
                type = ProblemType.NOT_FOUND
            case _:
                raise
        raise ControlRefused(412, str(error), type) from error
