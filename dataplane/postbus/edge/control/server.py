"""Server of the control API: listens, authorizes, reads requests by the routes, writes answers.

JSON over HTTP for the operator, for CI and for the command line. Callers present a token or a
certificate. Requests of web pages are refused, too: on loopback the `Host` header must name
loopback (DNS rebinding), and bodies must be declared as JSON, which a page of another origin may
not do without a preflight request (CSRF). Errors are problems (RFC 9457) whose text says what
to do.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import BaseModel, ValidationError

from postbus.broker.access.caller_fence import CallerFence, CallerTooOld, StoreAway
from postbus.broker.catalog.preconditions import (
    UNCONDITIONAL,
    DirectoryRefusal,
    Precondition,
    PutMode,
)
from postbus.broker.operate.message_operations import OperationRefused
from postbus.contract.control import (
    EPOCH_HEADER,
    MAX_EPOCH,
    FieldProblem,
    Problem,
    ProblemType,
)
from postbus.edge.control.audit import ControlAudit
from postbus.edge.control.authorization import ControlAuthorizer, NotAuthorized
from postbus.edge.control.callers import ANONYMOUS, ControlCaller, Scope
from postbus.edge.control.calls import (
    Answer,
    Call,
    ControlRefused,
    Handler,
    refused,
)
from postbus.edge.control.routes import KEYS, ROUTES, Query, Route
from postbus.edge.web.http_listener import HttpListener

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""Our choice: sufficient for two thousand rules of the longest SQL text."""

MOST_PROBLEMS: Final = 20
RETRY_S: Final = 1
NUMBER: Final = re.compile(r"[0-9]{1,19}")
ETAG: Final = re.compile(r'"([0-9]{1,19})"')

HttpHandler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ControlServer:
    """Serves the API; start it once. `operations`: a handler for every route of the table."""

    def __init__(
        self,
        operations: Mapping[str, Handler],
        authorizer: ControlAuthorizer,
        fence: CallerFence,
        audit: ControlAudit,
    ) -> None:
        self._operations = operations
        self._authorizer = authorizer
        self._fence = fence
        self._audit = audit
        self._listener = HttpListener()
        self._is_loopback = True
        self.answers: Counter[int] = Counter()
        """Responses sent: status -> count."""

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        """Listen, on any free port for 0; raises OSError when the port is taken."""
        middlewares = [self._count_answers, self._answer_problems]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._handler_of(route))
        self._is_loopback = _is_loopback(f"[{host}]" if ":" in host else host)
        await self._listener.start(app, host, port, context)

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        await self._listener.stop()

    def _handler_of(self, route: Route) -> HttpHandler:
        operation = self._operations[route.operation]

        async def handle(request: web.Request) -> web.StreamResponse:
            caller = ANONYMOUS
            if not route.is_open:
                caller = await self._authorizer.authorize(request)
                _check_scope(caller, route.scope)
            call = await _read_call(request, route)
            if call.queries.get(KEYS.name):
                _check_scope(caller, Scope.ALL)
            if not route.is_change:
                return _answer(await operation(call))
            async with self._fence.admitted(_epoch(request)):
                address = request.remote or ""
                return _answer(await self._audit.run(operation, route, call, caller, address))

        return handle

    @web.middleware
    async def _count_answers(
        self, request: web.Request, handler: HttpHandler
    ) -> web.StreamResponse:
        answer = await handler(request)
        self.answers[answer.status] += 1
        return answer

    @web.middleware
    async def _answer_problems(
        self, request: web.Request, handler: HttpHandler
    ) -> web.StreamResponse:
        """Refuse requests that browsers send for other pages; give all errors one form."""
        try:
            if self._is_loopback and not _is_loopback(request.headers.get("Host", "")):
                raise ControlRefused(
                    403,
                    "call the control API as localhost or 127.0.0.1: it listens on loopback only",
                    ProblemType.UNAUTHORIZED,
                )
            if request.match_info.http_exception is not None:
                # existing resources are not disclosed to unauthenticated callers
                await self._authorizer.authorize(request)
            return await handler(request)
        except ControlRefused as error:
            return _problem(error.status, str(error), error.type, error.problems)
        except (DirectoryRefusal, OperationRefused) as error:
            known = refused(error.refused)
            return _problem(known.status, str(known), known.type)
        except NotAuthorized as error:
            return _unauthorized(error)
        except CallerTooOld as error:
            detail = f"{error}: another caller leads now; changes require a higher epoch"
            return _problem(409, detail, ProblemType.CALLER_TOO_OLD)
        except StoreAway:
            detail = "the store is unavailable, nothing was changed: repeat the request"
            return _problem(503, detail, ProblemType.UNAVAILABLE)
        except web.HTTPException as error:  # raised by the router, or for a body that is too long
            answer = _problem(error.status, _explain(request, error))
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except Exception:
            logger.exception("handling a request failed", extra={"path": request.path})
            return _problem(500, "this is a bug in Postbus; please report it")


def _check_scope(caller: ControlCaller, needed: Scope) -> None:
    if not caller.may(needed):
        has = ", ".join(sorted(scope.value for scope in caller.scopes))
        detail = (
            f"this requires a token of the scope {needed.value}; that of {caller.name} has {has}"
        )
        raise ControlRefused(403, detail, ProblemType.UNAUTHORIZED)


# --- requests -----------------------------------------------------------------------------------


async def _read_call(request: web.Request, route: Route) -> Call:
    """Return the call of a request; raises `ControlRefused` naming each mistake."""
    names = dict(request.match_info)
    queries = _read_queries(request, route)
    condition = _read_condition(request) if route.is_versioned else UNCONDITIONAL
    body = None
    if route.body is not None:
        if request.content_type != "application/json":
            raise ControlRefused(415, "send JSON with the header `Content-Type: application/json`")
        body = _parse(await request.read(), route.body)
    return Call(names, body, queries, condition)


def _parse(content: bytes, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate_json(content, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        problems = []
        for each in error.errors(include_url=False, include_input=False)[:MOST_PROBLEMS]:
            message = str(each["msg"]).removeprefix("Value error, ")
            where = ".".join(map(str, each["loc"])) or "body"
            problems.append(FieldProblem(field=where, problem=message[:1].lower() + message[1:]))
        raise _invalid(problems) from None


def _invalid(problems: list[FieldProblem]) -> ControlRefused:
    detail = "; ".join(f"{each.field}: {each.problem}" for each in problems)
    return ControlRefused(400, detail, ProblemType.INVALID, problems)


def _read_queries(request: web.Request, route: Route) -> dict[str, str | int | bool]:
    known = {query.name: query for query in route.queries}
    values: dict[str, str | int | bool] = {
        name: query.schema["default"] for name, query in known.items() if "default" in query.schema
    }
    problems = []
    for name, text in request.query.items():
        query = known.get(name)
        value = None if query is None else _read_query(query, text)
        if query is None:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            problems.append(
                FieldProblem(
                    field=name, problem=f"is not a parameter of this operation, which {takes}"
                )
            )
        elif value is None or len(request.query.getall(name)) > 1:
            problems.append(FieldProblem(field=name, problem=_expected(query)))
        else:
            values[name] = value
    if problems:
        raise _invalid(problems)
    return values


def _read_query(query: Query, text: str) -> str | int | bool | None:
    """Return the value of a parameter, None when it is not one of the allowed values."""
    schema = query.schema
    match schema["type"]:
        case "integer":
            value = int(text) if NUMBER.fullmatch(text) else -1
            return value if schema["minimum"] <= value <= schema["maximum"] else None
        case "boolean":
            return {"true": True, "false": False}.get(text)
        case _ if "enum" in schema:
            return text if text in schema["enum"] else None
        case _:
            is_short = len(text) <= schema.get("maxLength", len(text))
            pattern = schema.get("pattern")
            is_valid = is_short and (pattern is None or re.fullmatch(pattern, text))
            return text if is_valid else None


def _expected(query: Query) -> str:
    schema = query.schema
    match schema["type"]:
        case "integer":
            return f"must be a number between {schema['minimum']} and {schema['maximum']}, once"
        case "boolean":
            return "must be true or false, once"
        case _ if "enum" in schema:
            return f"must be one of {', '.join(schema['enum'])}, once"
        case _ if query.form:
            return f"must {query.form}, once"
        case _:
            return "must occur once"


def _read_condition(request: web.Request) -> Precondition:
    must_be_new = False
    if (absent := request.headers.get("If-None-Match")) is not None:
        if absent.strip() != "*" or request.method != "PUT":
            raise ControlRefused(
                400, "If-None-Match: only `*` is supported, with PUT", ProblemType.INVALID
            )
        must_be_new = True
    if "If-Match" not in request.headers:
        return Precondition(PutMode.CREATE) if must_be_new else UNCONDITIONAL
    present = ", ".join(request.headers.getall("If-Match")).strip()
    if must_be_new:
        raise ControlRefused(
            400, "If-Match and If-None-Match exclude each other", ProblemType.INVALID
        )
    if present == "*":
        return Precondition(PutMode.UPDATE)
    tags = [ETAG.fullmatch(tag.strip()) for tag in present.split(",")]
    if None in tags:
        raise ControlRefused(
            400,
            'If-Match: use the ETag of an answer, such as "12", or `*`',
            ProblemType.INVALID,
        )
    versions = frozenset(int(tag[1]) for tag in tags if tag is not None)
    return Precondition(PutMode.UPDATE, versions)


def _epoch(request: web.Request) -> int | None:
    """Return the epoch of a caller, None without one."""
    values = request.headers.getall(EPOCH_HEADER, [])
    if not values:
        return None
    epoch = int(values[0]) if len(values) == 1 and NUMBER.fullmatch(values[0]) else -1
    if not 0 <= epoch <= MAX_EPOCH:
        raise ControlRefused(
            400, f"{EPOCH_HEADER}: must be a number between 0 and {MAX_EPOCH}", ProblemType.INVALID
        )
    return epoch


def _is_loopback(authority: str) -> bool:
    """Return whether a `Host` header is `localhost` or a loopback address: no name in DNS."""
    try:
        host = urlsplit(f"//{authority}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


# --- answers ------------------------------------------------------------------------------------


def _answer(answer: Answer) -> web.Response:
    text = answer.text if answer.body is None else f"{answer.body.model_dump_json(by_alias=True)}\n"
    response = web.Response(text=text, status=answer.status, content_type="application/json")
    if answer.etag is not None:
        response.headers["ETag"] = f'"{answer.etag}"'
    response.headers["Cache-Control"] = "no-store"
    return response


def _problem(
    status: int,
    detail: str,
    type: ProblemType = ProblemType.PLAIN,
    problems: list[FieldProblem] | None = None,
) -> web.Response:
    body = Problem(
        type=type,
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        problems=problems or [],
    )
    response = web.Response(
        text=f"{body.model_dump_json(by_alias=True)}\n",
        status=status,
        content_type="application/problem+json",
    )
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_S)
    return response


def _unauthorized(error: NotAuthorized) -> web.Response:
    if error.is_too_often:
        answer = _problem(429, str(error), ProblemType.UNAUTHORIZED)
        answer.headers["Retry-After"] = "60"
        return answer
    answer = _problem(401, str(error), ProblemType.UNAUTHORIZED)
    answer.headers["WWW-Authenticate"] = 'Bearer realm="postbus"'
    return answer


def _explain(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return "unknown path; /openapi.json lists all paths"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return f"{request.method} is not supported here, only {allowed}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"a body may have at most {MAX_BODY_BYTES} bytes"
    return error.reason
