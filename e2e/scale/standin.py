"""Buses that have no process: their part of the control API, for hundreds of them at once.

The one stand-in of these measurements. Operations are those of docs/openapi.json; each body and
each answer is checked by the schema of that document, and what does not fit it fails the run. A bus
has a definition and authorization rules, and no entity.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
from aiohttp import web

Json = dict[str, Any]
Reply = tuple[int, Json]

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "openapi.json"
KEY_BYTES: Final = 32
EPOCH: Final = "Postbus-Caller-Epoch"


@dataclass
class Bus:
    """The state of a bus; `version` is that of its catalog."""

    name: str
    version: int = 1
    epoch: int = 0
    definition: Json = field(default_factory=dict)
    rules: dict[str, Json] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    """Operation -> number of requests."""

    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self) -> None:
        """Raise the version, which ends waits for a change."""
        self.version += 1
        self.moved.set()
        self.moved = asyncio.Event()


class Misfit(Exception):
    """A request or an answer that the document does not allow."""


class Document:
    """The schemas of docs/openapi.json."""

    def __init__(self) -> None:
        self._text = json.loads(DOCUMENT.read_text(encoding="utf-8"))
        self._validators: dict[str, Any] = {}
        self.operations: dict[str, tuple[str, str]] = {
            said["operationId"]: (method.upper(), path)
            for path, methods in self._text["paths"].items()
            for method, said in methods.items()
        }

    def check_body(self, operation: str, body: object) -> None:
        """Raise Misfit for the body of a request that does not fit."""
        schema = self._of(operation)["requestBody"]["content"]["application/json"]["schema"]
        self._check(f"body of {operation}", schema, body)

    def check_answer(self, operation: str, status: int, answer: object) -> None:
        """Raise Misfit for an answer that does not fit."""
        response = self._of(operation)["responses"].get(str(status))
        if response is None:
            raise Misfit(f"{operation} does not answer {status}")
        if "$ref" in response:
            response = self._text["components"]["responses"][response["$ref"].split("/")[-1]]
        [content] = response["content"].values()
        self._check(f"answer {status} of {operation}", content["schema"], answer)

    def _of(self, operation: str) -> Json:
        method, path = self.operations[operation]
        found: Json = self._text["paths"][path][method.lower()]
        return found

    def _check(self, what: str, schema: Json, value: object) -> None:
        if what not in self._validators:
            whole = {**schema, "components": self._text["components"]}
            self._validators[what] = jsonschema_rs.validator_for(whole)
        for error in self._validators[what].iter_errors(value):
            raise Misfit(f"{what}: {error.message}")


class StandIn:
    """Serves all buses on one port; the name of the host tells which one is meant."""

    def __init__(self) -> None:
        self.buses: dict[str, Bus] = {}
        self.misfits: list[str] = []
        self._document = Document()
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._runner: web.AppRunner | None = None

    def add(self, host: str, name: str, certificate: bytes, key: bytes) -> None:
        """Serve a bus under a host name with its certificate (PEM)."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
        self._contexts[host] = context
        self.buses.setdefault(host, Bus(name))

    @property
    def calls(self) -> Counter[str]:
        """The requests to all buses, by operation."""
        return sum((each.calls for each in self.buses.values()), Counter())

    async def start(self, port: int) -> None:
        """Listen on loopback."""
        app = web.Application()
        for operation, answer in OPERATIONS.items():
            method, path = self._document.operations[operation]
            app.router.add_route(method, path, self._handler(operation, answer))
        app.router.add_route("*", "/{path:.*}", self._refuse)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=75)
        await self._runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._choose
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=context).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _choose(self, connection: ssl.SSLObject, host: str | None, _: ssl.SSLContext) -> int | None:
        if host not in self._contexts:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = self._contexts[host]
        return None

    def _handler(
        self, operation: str, answer: Callable[[Bus, web.Request, Json], Awaitable[Reply]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            bus = self.buses[request.host.partition(":")[0]]
            bus.calls[operation] += 1
            try:
                body: Json = {}
                if request.method == "PUT":
                    body = await request.json()
                    self._document.check_body(operation, body)
                bus.epoch = max(bus.epoch, int(request.headers.get(EPOCH, 0)))
                status, said = await answer(bus, request, body)
                self._document.check_answer(operation, status, said)
            except Misfit as misfit:
                self.misfits.append(str(misfit))
                return web.Response(status=500, text=str(misfit))
            return web.json_response(said, status=status)

        return handle

    async def _refuse(self, request: web.Request) -> web.Response:
        self.misfits.append(f"{request.method} {request.path} is not here")
        return web.Response(status=501)


# --- operations ---------------------------------------------------------------------------------


async def _status(bus: Bus, _request: web.Request, _body: Json) -> Reply:
    partition = {
        "partition": 0, "status": "active", "version": bus.version, "reloadCount": 0,
        "trouble": None,
    }  # fmt: skip
    return 200, {
        "programVersion": "0", "namespace": bus.name, "broker": "stand-in", "isReady": True,
        "isDevelopment": False, "version": bus.version, "highestCallerEpoch": bus.epoch,
        "partitions": [partition], "troubles": [],
    }  # fmt: skip


async def _namespace(bus: Bus, _request: web.Request, _body: Json) -> Reply:
    return 200, {
        "name": bus.name, "version": bus.version, "partitionCount": 1, "isClosed": False,
        "entities": {"queues": 0, "topics": 0, "subscriptions": 0, "unmanaged": 0},
        "appliedHash": str(bus.version), "properties": bus.definition,
    }  # fmt: skip


async def _put_namespace(bus: Bus, _request: web.Request, body: Json) -> Reply:
    bus.definition = body
    bus.move()
    return 200, {
        "entityId": 0, "appliedHash": str(bus.version), "version": bus.version,
        "acknowledged": {"0": bus.version}, "created": False,
    }  # fmt: skip


async def _changes(bus: Bus, request: web.Request, _body: Json) -> Reply:
    since, wait_s = (int(request.query.get(name, 0)) for name in ("since", "wait"))
    if bus.version <= since:
        with suppress(TimeoutError):
            await asyncio.wait_for(bus.moved.wait(), wait_s)
    cursor = "0" if wait_s and bus.version == since else None
    return 200, {"version": bus.version, "items": [], "countsCursor": cursor}


async def _counts(_bus: Bus, request: web.Request, _body: Json) -> Reply:
    return 200, {
        "items": [], "cursor": request.query.get("since", "0"), "isEnd": True, "startsOver": False,
    }  # fmt: skip


async def _rules(bus: Bus, _request: web.Request, _body: Json) -> Reply:
    return 200, {"items": [bus.rules[name] for name in sorted(bus.rules)]}


async def _put_rule(bus: Bus, request: web.Request, body: Json) -> Reply:
    name = request.match_info["authorization_rule"]
    known = bus.rules.get(name)
    at = "2026-01-01T00:00:00Z"
    made = {
        "name": name, "rights": body["rights"], "isDeclared": False, "createdAt": at,
        "updatedAt": at, "managedBy": request.query.get("managed-by", ""),
    }  # fmt: skip
    for side in ("primaryKey", "secondaryKey"):
        kept = secrets.token_urlsafe(KEY_BYTES) if known is None else known[side]
        made[side] = body.get(side) or kept
    bus.rules[name] = made
    bus.move()
    return 200 if known else 201, made


OPERATIONS: Final = {
    "getStatus": _status,
    "getNamespace": _namespace,
    "putNamespace": _put_namespace,
    "listChanges": _changes,
    "listCounts": _counts,
    "listAuthorizationRules": _rules,
    "putAuthorizationRule": _put_rule,
}
