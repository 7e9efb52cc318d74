"""Parser of requests of the bulk API, and its refusals.

Names of entities may have slashes, so a path is read from `$bulk` to both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Final, TypeVar, get_args
from urllib.parse import parse_qsl, unquote

from aiohttp import web
from pydantic import BaseModel, ValidationError

from postbus.broker.operate.message_view import SUB_QUEUE_NAMES
from postbus.contract.bodies import ResponseBody
from postbus.contract.bulk import (
    GROUP_NAME,
    MAX_POSITION,
    PRESENT_COLUMNS,
    ROW_COLUMNS,
    BrowseMode,
    BulkProblem,
    Selection,
)
from postbus.edge.refusals import REFUSALS
from postbus.edge.web.authorization import RETRY_AFTER
from postbus.entity.commands import Refusal, Refused, SubQueue

B = TypeVar("B", bound=BaseModel)

SUB_QUEUES: Final[dict[str, SubQueue]] = {name: each for each, name in SUB_QUEUE_NAMES.items()}
NUMBER: Final = re.compile(r"[0-9]{1,19}")
MOST_PROBLEMS: Final = 10
MAX_PARAMETERS: Final = 16
BELOW: Final = (
    "below /{entity}/$bulk/ are ranges, rows, groups/{name} and its claim, plan, settle,"
    " reject and reset, and writers/{name} and its stage, publish and abort"
)


class Action(Enum):
    """The operation of a request."""

    RANGES = "ranges"
    ROWS = "rows"
    PUT_GROUP = "put"
    GET_GROUP = "get"
    DROP_GROUP = "drop"
    CLAIM = "claim"
    PLAN = "plan"
    SETTLE = "settle"
    REJECT = "reject"
    RESET = "reset"
    STAGE = "stage"
    PUBLISH = "publish"
    ABORT = "abort"
    GET_WRITER = "get writer"
    FORGET_WRITER = "forget writer"


_OF_GROUP: Final = {
    "claim": Action.CLAIM,
    "plan": Action.PLAN,
    "settle": Action.SETTLE,
    "reject": Action.REJECT,
    "reset": Action.RESET,
}
_METHODS: Final = {
    "PUT": Action.PUT_GROUP,
    "GET": Action.GET_GROUP,
    "DELETE": Action.DROP_GROUP,
}
_OF_WRITER: Final = {
    "stage": Action.STAGE,
    "publish": Action.PUBLISH,
    "abort": Action.ABORT,
}
_WRITER_METHODS: Final = {"GET": Action.GET_WRITER, "DELETE": Action.FORGET_WRITER}
_TIMES: Final = frozenset({"enqueuedFrom", "enqueuedTo"})
_QUERIES: Final = {
    Action.RANGES: {"subQueue", "group", "splits", "mode"},
    Action.ROWS: {
        *("subQueue", "group", "epoch", "partition", "from", "to", "columns", "mode"),
        *_TIMES,
    },
    Action.GET_GROUP: {"subQueue"},
    Action.DROP_GROUP: {"subQueue"},
}


class BulkError(Exception):
    """A request was refused."""

    def __init__(
        self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})
        super().__init__(detail)

    def answer(self) -> web.Response:
        """Return the response."""
        detail = self.detail.encode(errors="replace").decode()  # it may cite what is no text
        problem = BulkProblem.model_validate({"code": self.code, "detail": detail})
        return web.Response(
            status=self.status,
            text=problem.model_dump_json(by_alias=True) + "\n",
            content_type="application/json",
            headers=self.headers,
        )


@dataclass(frozen=True, slots=True)
class BulkPath:
    """A parsed request. `path` is the entity's; `group` and `writer` "" if none is named.

    `below`: the part of the address for which a token may be, such as `$bulk/groups/lake`.
    """

    action: Action
    path: str
    group: str
    queries: Mapping[str, str]
    writer: str = ""

    @property
    def below(self) -> str:
        if self.writer:
            return f"$bulk/writers/{self.writer}"
        return f"$bulk/groups/{self.group}" if self.group else f"$bulk/{self.action.value}"

    @property
    def sub_queue(self) -> SubQueue:
        """Return the sub-queue in the query."""
        name = self.queries.get("subQueue", "main")
        if name not in SUB_QUEUES:
            raise invalid(f"subQueue: must be one of {', '.join(SUB_QUEUES)}")
        return SUB_QUEUES[name]

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number in the query."""
        text = self.queries.get(name)
        if text is None and default is not None:
            return default
        if text is None or not NUMBER.fullmatch(text) or int(text) > MAX_POSITION:
            raise invalid(f"{name}: must be a number")
        return int(text)

    def columns(self) -> list[str]:
        """Return the columns in the query; if none are named, those that never change."""
        wanted = self.queries.get("columns", ",".join(ROW_COLUMNS)).split(",")
        known = ROW_COLUMNS + PRESENT_COLUMNS if "mode" in self.queries else ROW_COLUMNS
        unknown = [name for name in wanted if name not in known]
        if unknown and unknown[0] in PRESENT_COLUMNS:
            raise invalid(
                f"columns: {unknown[0]} changes later, so a group cannot read it: name a mode"
            )
        if unknown:
            raise invalid(f"columns: {unknown[0]!r} is none of {', '.join(known)}")
        return wanted

    def selection(self) -> Selection | None:
        """Return the rows of the mode in the query, None without one."""
        mode, has_times = self.queries.get("mode"), not _TIMES.isdisjoint(self.queries)
        if has_times and mode != "history":
            raise invalid("enqueuedFrom and enqueuedTo belong to mode=history")
        if mode is None:
            return None
        if mode not in get_args(BrowseMode):
            raise invalid(f"mode: must be one of {', '.join(get_args(BrowseMode))}")
        if self.group or "epoch" in self.queries:
            raise invalid("a mode reads without a reader group: name one or the other")
        times = self.number("enqueuedFrom", 0), self.number("enqueuedTo", MAX_POSITION)
        if times[0] > times[1]:
            raise invalid("enqueuedTo: is before enqueuedFrom")
        return Selection(mode == "history", *times)


def parse(method: str, raw_path: str) -> BulkPath:
    """Parse method and path of a request; raises `BulkError`."""
    raw, _, query = raw_path.partition("?")
    if "://" in raw:  # the absolute form, as sent to proxies
        raw = raw.partition("://")[2].partition("/")[2]
    parts = raw.strip("/").split("/")
    lowered = [part.lower() for part in parts]
    if "$bulk" not in lowered:
        raise BulkError(404, "InvalidRequest", BELOW)
    at = lowered.index("$bulk")
    entity = "/".join(_decoded(part) for part in parts[:at])
    queries = _read_queries(query)
    action, group, writer = _action_of(method, [_decoded(part) for part in parts[at + 1 :]])
    unknown = sorted(queries.keys() - _QUERIES.get(action, set()))
    if unknown:
        raise invalid(f"{unknown[0]}: is not a parameter of this operation")
    group = group or queries.get("group", "")
    if group and not re.fullmatch(GROUP_NAME, group):
        raise invalid("the name of a group has small letters, digits and . _ - only, at most 128")
    if writer and not re.fullmatch(GROUP_NAME, writer):
        raise invalid("the name of a writer has small letters, digits and . _ - only, at most 128")
    if not entity:
        raise invalid("the path does not name an entity")
    return BulkPath(action, entity, group, queries, writer)


def _action_of(method: str, rest: list[str]) -> tuple[Action, str, str]:
    """Return the operation, and the name of a group or of a writer, "" without one."""
    group = writer = ""
    match rest:
        case ["ranges"]:
            actions = {"GET": Action.RANGES}
        case ["rows"]:
            actions = {"GET": Action.ROWS}
        case ["groups", group]:
            actions = _METHODS
        case ["groups", group, verb] if verb in _OF_GROUP:
            actions = {"POST": _OF_GROUP[verb]}
        case ["writers", writer]:
            actions = _WRITER_METHODS
        case ["writers", writer, verb] if verb in _OF_WRITER:
            actions = {"POST": _OF_WRITER[verb]}
        case _:
            raise BulkError(404, "InvalidRequest", BELOW)
    if method not in actions:
        allowed = ", ".join(actions)
        detail = f"{method} is not supported here, only {allowed}"
        raise BulkError(405, "InvalidRequest", detail, {"Allow": allowed})
    return actions[method], group, writer


def _read_queries(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise invalid(f"there are too many parameters, at most {MAX_PARAMETERS} count") from None
    queries = dict(pairs)
    if len(queries) < len(pairs):
        raise invalid("a parameter occurs twice")
    return queries


def _decoded(part: str) -> str:
    try:
        text = unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise invalid("the path is not percent-encoded UTF-8") from None
    if not text.isprintable():
        raise invalid("the path has characters that no name has")
    return text


def read_body(content: bytes, model: type[B]) -> B:
    """Return the body of a request; raises `BulkError` naming each mistake."""
    try:
        return model.model_validate_json(content or b"{}", by_alias=True, by_name=False)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)[:MOST_PROBLEMS]
        ]
        raise invalid("; ".join(problems)) from None


def json_answer(body: ResponseBody, status: int = 200) -> web.Response:
    """Return an answer that nothing keeps."""
    text = body.model_dump_json(by_alias=True) + "\n"
    headers = {"Cache-Control": "no-store"}
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)


def invalid(detail: str) -> BulkError:
    """Return the refusal of a malformed request."""
    return BulkError(400, "InvalidRequest", detail)


def refusal_of(refused: Refused, path: str) -> BulkError:
    """Return the error of a command that was refused."""
    status, code = ANSWERS[refused.refusal]
    detail = refused.detail or REFUSALS[refused.refusal][2].format(path=path)
    return BulkError(status, code, detail, RETRY_AFTER if status == 503 else None)


def _answer_of(refusal: Refusal) -> tuple[int, str]:
    match refusal:
        case Refusal.ENTITY_NOT_FOUND:
            return 404, "EntityNotFound"
        case Refusal.GROUP_NOT_FOUND:
            return 404, "GroupNotFound"
        case Refusal.GROUP_FENCED:
            return 409, "Fenced"
        case Refusal.STALE_CHECKPOINT:
            return 409, "StaleCheckpoint"
        case Refusal.BUS_RESTORED:
            return 409, "BusRestored"
        case Refusal.QUOTA_EXCEEDED | Refusal.STORE_FULL:
            return 403, "QuotaExceeded"
        case Refusal.ARGUMENT_OUT_OF_RANGE | Refusal.MESSAGE_MALFORMED | Refusal.SESSION_REQUIRED:
            return 400, "InvalidRequest"
        case Refusal.MESSAGE_TOO_LARGE | Refusal.PROPERTIES_TOO_LARGE:
            return 413, "MessageTooLarge"
        case Refusal.NOT_APPLIED | Refusal.BUSY | Refusal.UNKNOWN:  # each call may be repeated
            return 503, "Unavailable"
        case _:
            return 409, "NotAllowed"


ANSWERS: Final = {each: _answer_of(each) for each in Refusal}
"""Refusal -> status, code."""
assert all(HTTPStatus(status) for status, _ in ANSWERS.values())
