"""The control API, first piece: entity time and faults of a development bus, JSON over HTTP.

Bound to loopback and served by `postbus dev` only, therefore without TLS and tokens yet. Pages in
a browser of the same machine are kept out: the `Host` header must name loopback (DNS rebinding) and
bodies must be declared as JSON, which another origin may not do without asking (CSRF). Errors are
`Problem`s whose text says what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Annotated, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from postbus.broker.clock import ClockMode
from postbus.broker.controls import Controls
from postbus.contract import DurationMs
from postbus.http_listener import HttpListener

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
MAX_BODY_BYTES: Final = 64 * 1024
LAST_MS: Final = 32_503_680_000_000
"""Entity time ends with the year 2999: SDKs count years to 9999 and add locks and lives to it."""
MAX_OUTAGE_MS: Final = 3_600_000
"""Our choice: longer than any client retries."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound="Body")


def _above_zero(value_ms: int) -> int:
    if value_ms <= 0:
        raise ValueError("must be longer than PT0S")
    return value_ms


def _short(value_ms: int) -> int:
    if value_ms > MAX_OUTAGE_MS:
        raise ValueError("must be at most PT1H")
    return value_ms


SomeTime: TypeAlias = Annotated[DurationMs, AfterValidator(_above_zero)]


class Body(BaseModel):
    """A body of this API: camel case on the wire, nothing unknown accepted."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True
    )


class Advance(Body):
    duration: SomeTime


class LoseLocksOf(Body):
    entity: str = Field(min_length=1)


class StoreOutage(Body):
    """`partition` None: all of them. The duration is real time."""

    duration: Annotated[SomeTime, AfterValidator(_short)]
    partition: int | None = Field(None, ge=0)


class Clock(Body):
    """`now` is entity time, `offset_ms` how far it was moved ahead of the wall."""

    mode: ClockMode
    now: datetime
    offset_ms: int


class LocksLost(Body):
    """`entity` as it was created."""

    entity: str


class StoreInterrupted(Body):
    duration: DurationMs
    partitions: list[int]


class Problem(Body):
    """Why a request was refused, for a human."""

    error: str


class ControlError(Exception):
    """A request is refused; the text says what to do."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class ControlServer:
    """Serves the API; start it once."""

    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._listener = HttpListener()

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self, port: int) -> None:
        """Listen on loopback, 0 takes any free port; raises OSError when the port is taken."""
        app = web.Application(middlewares=[_answer_problems], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/clock", self._clock)
        app.router.add_post("/v1/clock/advance", self._advance)
        app.router.add_post("/v1/faults/lose-locks", self._lose_locks)
        app.router.add_post("/v1/faults/store-outage", self._interrupt_store)
        await self._listener.start(app, LOOPBACK, port)

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        await self._listener.stop()

    # --- clock ----------------------------------------------------------------------------------

    async def _clock(self, _request: web.Request) -> web.Response:
        return _answer(self._shown_clock())

    async def _advance(self, request: web.Request) -> web.Response:
        body = await _read(request, Advance)
        controls = self._controls
        if controls.mode is not ClockMode.MANUAL:
            raise ControlError(
                409, "time follows the wall here; start the bus with `postbus dev --clock manual`"
            )
        if controls.now_ms + body.duration > LAST_MS:
            raise ControlError(400, "duration: time would pass the year 2999; start the bus afresh")
        late = await controls.advance(body.duration)
        if late:
            raise ControlError(
                503,
                f"time was moved, but the store is away from {_named(late)}: what is due there"
                " is done when it is back; /readyz of the metrics port tells when",
            )
        return _answer(self._shown_clock())

    def _shown_clock(self) -> Clock:
        controls = self._controls
        now = datetime.fromtimestamp(controls.now_ms / 1_000, UTC)
        return Clock(mode=controls.mode, now=now, offset_ms=controls.offset_ms)

    # --- faults ---------------------------------------------------------------------------------

    async def _lose_locks(self, request: web.Request) -> web.Response:
        body = await _read(request, LoseLocksOf)
        name = await self._controls.lose_locks(body.entity)
        if name is None:
            raise ControlError(404, f"there is no entity {body.entity!r}; check its name")
        return _answer(LocksLost(entity=name))

    async def _interrupt_store(self, request: web.Request) -> web.Response:
        body = await _read(request, StoreOutage)
        last = self._controls.partition_count - 1
        if body.partition is not None and body.partition > last:
            raise ControlError(400, f"partition: must be between 0 and {last}")
        partitions = self._controls.interrupt_store(body.duration / 1_000, body.partition)
        return _answer(StoreInterrupted(duration=body.duration, partitions=partitions))


# --- requests and answers -----------------------------------------------------------------------


def _answer(body: Body, status: int = 200) -> web.Response:
    return web.Response(
        text=body.model_dump_json(by_alias=True) + "\n",
        status=status,
        content_type="application/json",
    )


async def _read(request: web.Request, model: type[B]) -> B:
    """Return the body of a request; raises `ControlError` naming each mistake."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_input=False):
            name = ".".join(map(str, problem["loc"])) or "body"
            message = str(problem["msg"]).removeprefix("Value error, ")
            lines.append(f"{name}: {message[:1].lower()}{message[1:]}")
        raise ControlError(400, "; ".join(lines)) from None


def _named(partitions: list[int]) -> str:
    return f"partition{'s' * (len(partitions) > 1)} {', '.join(map(str, partitions))}"


@web.middleware
async def _answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what does not come from a program of this machine; tell all errors in one form."""
    try:
        _check_origin(request)
        return await handler(request)
    except ControlError as error:
        return _answer(Problem(error=str(error)), error.status)
    except web.HTTPException as error:  # of the router, or a body that is too long
        answer = _answer(Problem(error=_explain(request, error)), error.status)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except Exception:
        logger.exception("a request broke", extra={"path": request.path})
        return _answer(Problem(error="this is an error of Postbus; please report it"), 500)


def _check_origin(request: web.Request) -> None:
    if not _is_loopback(request.headers.get("Host", "")):
        raise ControlError(403, "the control API is reached as localhost or 127.0.0.1 only")
    if request.method == "POST" and request.content_type != "application/json":
        raise ControlError(415, "send JSON with the header `Content-Type: application/json`")


def _is_loopback(authority: str) -> bool:
    """Say whether a `Host` header names this machine by a name no DNS can give away."""
    try:
        host = urlsplit(f"//{authority}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _explain(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return f"{request.path} is not known; try /v1/clock"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} takes {' or '.join(sorted(error.allowed_methods))} only"
    return error.reason
